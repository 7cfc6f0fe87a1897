"""`python -m studies.search`: search the settings of the demo, and confirm them on prompts and
seeds that chose nothing."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from sage_fast.cli import guarded
from sage_fast.util.console import log_to_screen
from studies.command import folders_of, study_parser, workers_of

log = logging.getLogger("sage_fast.studies")

PROGRAM = "python -m studies.search"
ABOUT = """\
How the settings of the [demo](demo.md) were chosen, and what SAGE-GRPO and its challenger \
DiffusionNFT gain by them
over 175 iterations: in the world of shapes, with a tiny HunyuanVideo 1.5; not on the 8.3 B \
model. The
[race](race.md#sage-grpo-at-its-best) has more seeds. `python -m studies.search` writes this \
page."""


def _study(options: argparse.Namespace) -> int:
    log_to_screen(quiet=options.quiet)
    log.info("loading PyTorch and diffusers")
    from studies import page
    from studies.finding import Material
    from studies.runs import facts
    from studies.search import findings, runs

    folder, archive = folders_of(options, "search")
    made = runs.make(archive, quick=options.quick, workers=workers_of(options))
    provenance = facts(made.all, f"{PROGRAM} --quick" if options.quick else PROGRAM)
    material = Material(quick=options.quick, runs=made.all)
    text = runs.protocol_text()
    print(
        page.write_study(
            findings.claims(made), material, folder, ABOUT, provenance, text, title="The search"
        )
    )
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the study; return the exit status as `sage-fast` does."""
    options = study_parser(PROGRAM, (__doc__ or "").partition(": ")[2]).parse_args(arguments)
    return guarded("studies.search", lambda: _study(options))


if __name__ == "__main__":
    sys.exit(main())
