"""`python -m studies.paper`: decide claims of the paper on the testbed and write the results."""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from sage_fast.cli import guarded
from sage_fast.util.console import hush, show
from sage_fast.util.errors import UserError, nearest

log = logging.getLogger("sage_fast.studies")

PROGRAM = "python -m studies.paper"
ABOUT = """\
Claims of the SAGE-GRPO paper (arXiv 2603.21872), our questions about it and questions beyond it, decided on the
testbed: a tiny HunyuanVideo 1.5 of moving shapes, not the 8.3 B model. A claim that does not hold here may hold there.
`make reproduce` writes this page, verdicts included. It takes hours, can be stopped, and goes on.
`make reproduce CLAIMS="all --quick"` shows in a quarter of an hour on two cores that everything works, and decides
nothing; `make reproduce CLAIMS=list` names the claims."""


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=PROGRAM, description=(__doc__ or "").partition(": ")[2], allow_abbrev=False)
    parser.add_argument("claims", nargs="+", metavar="CLAIM", help="names of claims, `all`, or `list` to print them")
    parser.add_argument("--quick", action="store_true", help="two seeds and three iterations, to check that it works")
    parser.add_argument("--output", metavar="FOLDER", help="default: runs/reproduce, or runs/reproduce-quick")
    parser.add_argument("--workers", type=int, metavar="N", help="parallel runs (default: number of cores)")
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")
    return parser.parse_args(arguments)


def _study(options: argparse.Namespace) -> int:
    show(quiet=options.quiet)
    log.info("loading PyTorch and diffusers")
    from studies import page
    from studies.finding import Material
    from studies.paper import training
    from studies.paper.claims import CLAIMS
    from studies.runs import facts

    known = {claim.name: claim for claim in CLAIMS}
    if "list" in options.claims:
        print("\n".join(f"{name:<18} {claim.says} ({claim.source})" for name, claim in known.items()))
        return 0
    for name in options.claims:
        if name != "all" and name not in known:
            raise UserError(f"claim {name!r}: {nearest(name, ['all', 'list', *known])}")
    workers = (os.cpu_count() or 1) if options.workers is None else options.workers
    if workers < 1:
        raise UserError(f"--workers {workers}: expected at least 1")
    chosen = [claim for name, claim in known.items() if name in options.claims or "all" in options.claims]
    folder = Path(options.output or ("runs/reproduce-quick" if options.quick else "runs/reproduce"))
    (folder / "results").mkdir(parents=True, exist_ok=True)  # fail now rather than after hours of work
    variants = dict.fromkeys(variant for claim in chosen for variant in claim.variants)
    archive = folder / ("runs-quick" if options.quick else "runs")  # quick runs are kept apart
    runs = training.train_variants(variants, archive, quick=options.quick, workers=workers)
    material = Material(quick=options.quick, runs=runs)
    findings = {}
    for claim in chosen:
        with hush():
            findings[claim] = finding = claim.find(material)
        page.write_finding(claim, finding, folder / "results")
        log.info(f"{claim.name}: {finding.verdict}. {finding.text}")
    provenance = facts(runs, f"{PROGRAM} {shlex.join(options.claims)}{' --quick' * options.quick}")
    if others := [name for name, claim in known.items() if claim not in findings]:
        provenance["Not decided here"] = ", ".join(others)
    print(page.write_pages(findings, folder, ABOUT, provenance, training.protocol_text(), quick=options.quick))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the study; return the exit status as `sage-fast` does."""
    options = _options(arguments)
    return guarded("studies.paper", lambda: _study(options))


if __name__ == "__main__":
    sys.exit(main())
