"""The commands of what is found: `reproduce` and `sde`. Nothing heavy is imported before its use."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Callable
from pathlib import Path

from sage_fast.errors import UserError, nearest


def add_parsers(add: Callable[[str, str], argparse.ArgumentParser]) -> None:
    """
    Args:
        add: makes the parser of a command from its name and its help.
    """
    reproduce = add("reproduce", "decide claims of the paper on the testbed, and write what was found")
    reproduce.add_argument("claims", nargs="+", metavar="CLAIM", help="names of claims, `all`, or `list` to print them")
    reproduce.add_argument("--quick", action="store_true", help="two seeds and three iterations: shows that it works")
    reproduce.add_argument("--output", metavar="FOLDER", help="default: runs/reproduce, or runs/reproduce-quick")
    reproduce.add_argument("--workers", type=int, metavar="N", help="runs at once (default: the number of cores)")
    reproduce.add_argument("--quiet", action="store_true", help="print nothing but errors")

    sde = add("sde", "print and draw the transitions of the samplers: noise, excess noise, equalizer weights, warnings")
    for option, kind, default in (("--steps", int, 20), ("--shift", float, 5.0), ("--eta", float, 1.0)):
        sde.add_argument(option, type=kind, default=default, help=f"default: {default:g}")
    sde.add_argument("--sampler", action="append", default=[], metavar="NAME", help="may be given several times")
    sde.add_argument("--figure", metavar="FILE", help="draw them there, as .svg or .png")


Tell = Callable[..., None]
"""Told the options of the command, then lines to print."""


def _reproduce(tell: Tell, options: argparse.Namespace, overrides: dict[str, str]) -> int:
    tell(options, "sage-fast reproduce: loading PyTorch and diffusers")
    from sage_fast.console import speaker
    from sage_fast.reproduce import page, training
    from sage_fast.reproduce.claims import CLAIMS
    from sage_fast.reproduce.finding import Material

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
    say = speaker(options.quiet)
    chosen = [claim for name, claim in known.items() if name in options.claims or "all" in options.claims]
    folder = Path(options.output or ("runs/reproduce-quick" if options.quick else "runs/reproduce"))
    (folder / "results").mkdir(parents=True, exist_ok=True)  # before hours of work
    variants = dict.fromkeys(variant for claim in chosen for variant in claim.variants)
    runs_of = folder / ("runs-quick" if options.quick else "runs")  # neither replaces the other's
    runs = training.train_runs(variants, runs_of, quick=options.quick, workers=workers, tell=say)
    material = Material(quick=options.quick, runs=runs)
    findings = {}
    for claim in chosen:
        findings[claim] = finding = claim.find(material)
        page.write_finding(claim, finding, folder / "results")
        say(f"{claim.name}: {finding.verdict}. {finding.text}")
    words = ["sage-fast", "reproduce", *options.claims, *(["--quick"] if options.quick else [])]
    facts = training.facts(runs, shlex.join(words))
    if others := [name for name, claim in known.items() if claim not in findings]:
        facts["Not decided here"] = ", ".join(others)
    print(page.write_pages(findings, folder, facts, training.protocol_text(), quick=options.quick))
    return 0


def _sde(tell: Tell, options: argparse.Namespace, overrides: dict[str, str]) -> int:
    from sage_fast.reproduce.sde import sde

    return sde(options)


COMMANDS = {"reproduce": _reproduce, "sde": _sde}
