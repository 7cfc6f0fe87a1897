"""`python -m studies.demo`: what the demo and DiffusionNFT gain on ten seeds, and on the way."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from sage_fast.cli import guarded
from sage_fast.util.console import log_to_screen
from studies.command import folders_of, study_parser, workers_of

log = logging.getLogger("sage_fast.studies")

PROGRAM = "python -m studies.demo"
ABOUT = """\
What SAGE-GRPO gains in the demo, word by word, how DiffusionNFT compares, and what was tried to
gain more in the first forty iterations. The model is a tiny HunyuanVideo 1.5 that draws balls, not
the 8.3 B one. The settings were found by a [search](search.md). `python -m studies.demo` writes
this page from its runs, and makes those that are missing.

The first two claims are about seeds 10 to 19 and 100 iterations, the others about seeds 20 to 29
and at most 40. *Held*: the 95 % interval lies on the side of the claim. *Not held*: it lies on the
other side. *Not decidable*: it reaches both. How often runs were looked at, a *look*, is counted,
and intervals are wider for it. The [protocol](#protocol) has the rules."""


def _study(options: argparse.Namespace) -> int:
    log_to_screen(quiet=options.quiet)
    log.info("loading PyTorch and diffusers")
    from studies import page
    from studies.demo import early, early_findings, findings, runs, signal
    from studies.finding import Material
    from studies.runs import facts, shipped
    from studies.testbed.look import rewards_of_correct_clips

    folder, archive = folders_of(options, "demo-study")
    workers = workers_of(options)
    made = runs.make(archive, quick=options.quick, workers=workers)
    on_the_way = early.make(archive, quick=options.quick, workers=workers)
    correct = rewards_of_correct_clips(shipped(runs.SAGE), "testbed")
    every = made | early.by_label(on_the_way)
    provenance = facts(every, f"{PROGRAM} --quick" if options.quick else PROGRAM)
    material = Material(quick=options.quick, runs=every)
    claims = findings.claims(made, correct) + early_findings.claims(
        on_the_way, signal.table(), signal.about()
    )
    text = runs.protocol_text()
    print(page.write_study(claims, material, folder, ABOUT, provenance, text, title="The demo"))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the study; return the exit status as `sage-fast` does."""
    options = study_parser(PROGRAM, (__doc__ or "").partition(": ")[2]).parse_args(arguments)
    return guarded("studies.demo", lambda: _study(options))


if __name__ == "__main__":
    sys.exit(main())
