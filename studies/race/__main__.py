"""`python -m studies.race`: race recipes at equal compute in two small worlds, and write what
each gained."""

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

PROGRAM = "python -m studies.race"
ABOUT = """\
What a recipe gains on held-out prompts for its compute, with a tiny HunyuanVideo 1.5 of moving \
shapes
(`studies/shapes`), and in a second small world; not on the 8.3 B model. A recipe that wins \
here may lose there. Each
recipe is a file of `configs/recipes`. `make race` writes this page, verdicts included. It \
takes hours, can be stopped,
and goes on. `make race RECIPES="paper precise --quick"` shows in minutes that everything \
works, and decides nothing."""


def _study(options: argparse.Namespace) -> int:
    log_to_screen(quiet=options.quiet)
    log.info("loading PyTorch and diffusers")
    from studies import page
    from studies.finding import Material
    from studies.race import findings, runs
    from studies.runs import TrainedRun, facts

    for name in options.recipes:
        if name not in runs.recipes():
            raise UserError(f"recipe {name!r}: {nearest(name, runs.recipes())}")
    recipes = [
        name
        for name in runs.recipes()
        if name in {*options.recipes, runs.reference()} or not options.recipes
    ]
    if recipes == [runs.reference()]:
        raise UserError(
            f"recipe {runs.reference()!r} is what the others are compared with; name one more"
        )
    workers, quick = workers_of(options), options.quick
    folder, archive = folders_of(options, "race")
    raced = runs.race(recipes, archive, quick=quick, workers=workers)
    again = runs.race_again(raced, archive, quick=quick, workers=workers)
    made: dict[str, list[TrainedRun]] = {}
    for found in (*raced.values(), *again.values()):
        made |= {str(cell): list(trained) for cell, trained in found.search.items()}
        made[str(found.best)] += [*found.final, *found.confirmation]
    words = [*options.recipes, "--quick"] if quick else options.recipes
    provenance = facts(made, f"{PROGRAM} {shlex.join(words)}".rstrip())
    if others := [name for name in runs.recipes() if name not in recipes]:
        provenance["Not raced here"] = ", ".join(others)
    material = Material(quick=quick, runs=made)
    claims, text = findings.claims(raced, again), runs.protocol_text()
    print(
        page.write_study(
            claims, material, folder, ABOUT, provenance, text, title="Reward for compute"
        )
    )
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the race; return the exit status as `sage-fast` does."""
    parser = study_parser(PROGRAM, (__doc__ or "").partition(": ")[2])
    parser.add_argument(
        "recipes", nargs="*", metavar="RECIPE", help="names of configs/recipes (default: all)"
    )
    options = parser.parse_args(arguments)
    return guarded("studies.race", lambda: _study(options))


if __name__ == "__main__":
    sys.exit(main())
