"""`sage-fast reproduce`: decide claims and write what was found."""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path

from sage_fast.errors import UserError, nearest


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those of the command."""
    parser.add_argument("claims", nargs="+", metavar="CLAIM", help="all, or names of claims; `list` tells them")
    parser.add_argument("--quick", action="store_true", help="two seeds and three iterations: shows that it works")
    parser.add_argument("--output", metavar="FOLDER", help="default: runs/reproduce, or runs/reproduce-quick")
    parser.add_argument("--workers", type=int, metavar="N", help="runs at once (default: the number of cores)")
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")


def reproduce(options: argparse.Namespace) -> int:
    """The command.

    Raises:
        UserError: an unknown claim, or an option out of range.
        RunError: a training run failed; the others are kept.
    """
    from sage_fast.console import speaker
    from sage_fast.reproduce import page, training
    from sage_fast.reproduce.claims import CLAIMS
    from sage_fast.reproduce.finding import Material

    known = {claim.name: claim for claim in CLAIMS}
    if options.claims == ["list"]:
        print("\n".join(f"{name:<18} {claim.says} ({claim.source})" for name, claim in known.items()))
        return 0
    for name in options.claims:
        if name != "all" and name not in known:
            raise UserError(f"claim {name!r}: {nearest(name, ['all', 'list', *known])}")
    workers = (os.cpu_count() or 1) if options.workers is None else options.workers
    if workers < 1:
        raise UserError(f"--workers {workers}: expected at least 1")
    tell = speaker(options.quiet)
    chosen = [claim for name, claim in known.items() if name in options.claims or "all" in options.claims]
    folder = Path(options.output or ("runs/reproduce-quick" if options.quick else "runs/reproduce"))
    variants = dict.fromkeys(variant for claim in chosen for variant in claim.variants)
    runs = training.train_runs(variants, folder / "runs", quick=options.quick, workers=workers, tell=tell)
    material = Material(quick=options.quick, runs=runs)
    findings = {}
    for claim in chosen:
        findings[claim] = finding = claim.find(material)
        page.write_finding(claim, finding, folder / "results")
        tell(f"{claim.name}: {finding.verdict}. {finding.text}")
    words = ["sage-fast", "reproduce", *options.claims, *(["--quick"] if options.quick else [])]
    print(page.write_pages(findings, folder, training.facts(runs, shlex.join(words)), training.protocol_text()))
    return 0
