"""`python -m studies.paper`: decide claims of the paper in a small world and write the results."""

from __future__ import annotations

import argparse
import logging
import shlex
import sys
from collections.abc import Sequence

from sage_fast.cli import guarded
from sage_fast.util.console import log_to_screen
from sage_fast.util.errors import UserError, nearest
from studies.command import folders_of, study_parser, workers_of

log = logging.getLogger("sage_fast.studies")

PROGRAM = "python -m studies.paper"
ABOUT = """\
Which claims of the SAGE-GRPO paper (arXiv 2603.21872), and which answers to our own questions, \
hold for a tiny
HunyuanVideo 1.5 of moving shapes (`studies/shapes`). One that fails here may hold at 8.3 B. \
`make reproduce` writes this
page; it takes hours, can be stopped, and goes on."""


def _study(options: argparse.Namespace) -> int:
    log_to_screen(quiet=options.quiet)
    log.info("loading PyTorch and diffusers")
    from studies import page
    from studies.finding import Material
    from studies.paper import training
    from studies.paper.claims import CLAIMS
    from studies.paper.comparisons import base_score
    from studies.runs import facts

    known = {claim.name: claim for claim in CLAIMS}
    if "list" in options.claims:
        print(
            "\n".join(f"{name:<18} {claim.says} ({claim.source})" for name, claim in known.items())
        )
        return 0
    for name in options.claims:
        if name != "all" and name not in known:
            raise UserError(f"claim {name!r}: {nearest(name, ['all', 'list', *known])}")
    workers = workers_of(options)
    chosen = [
        claim for name, claim in known.items() if name in options.claims or "all" in options.claims
    ]
    folder, archive = folders_of(options, "reproduce")
    variants = dict.fromkeys(variant for claim in chosen for variant in claim.variants)
    runs = training.train_variants(variants, archive, quick=options.quick, workers=workers)
    material = Material(quick=options.quick, runs=runs)
    quick = ["--quick"] if options.quick else []
    provenance = facts(runs, f"{PROGRAM} {shlex.join([*options.claims, *quick])}")
    if runs:
        provenance["Base model"] = f"held-out composite {base_score(runs):.3f}"
    if others := [name for name, claim in known.items() if claim not in chosen]:
        provenance["Not decided here"] = ", ".join(others)
    text = training.protocol_text()
    print(
        page.write_study(
            chosen, material, folder, ABOUT, provenance, text, title="The paper's claims"
        )
    )
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the study; return the exit status as `sage-fast` does."""
    parser = study_parser(PROGRAM, (__doc__ or "").partition(": ")[2])
    parser.add_argument(
        "claims", nargs="+", metavar="CLAIM", help="names of claims, `all`, or `list` to print them"
    )
    options = parser.parse_args(arguments)
    return guarded("studies.paper", lambda: _study(options))


if __name__ == "__main__":
    sys.exit(main())
