"""`sage-fast eval`: score one or more sources on the same prompts and seeds, sampled with the
ODE."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from sage_fast.config.loader import load
from sage_fast.config.places import placed_plugin
from sage_fast.config.schema import Config
from sage_fast.eval.candidate import Candidate, notes_on
from sage_fast.run.sources import labelled, load_run
from sage_fast.run_folder import RunFolder
from sage_fast.util.console import heavy_imports
from sage_fast.util.errors import UserError
from sage_fast.util.files import VIDEOS, check_new_folder, make_folder_of
from sage_fast.util.paths import TypedFile

log = logging.getLogger(__name__)

BASE = "base"
"""The source that stands for the model of the other sources, without trained weights."""


def add_arguments(add: Callable[..., object]) -> None:
    sources = (
        "YAML file, run folder, checkpoint, folder with videos.csv, or base; LABEL=SOURCE names it"
    )
    add("source", metavar="SOURCE", nargs="+", help=sources)
    add(
        "--scorer",
        action="append",
        default=[],
        metavar="NAME",
        help="an extra reward, or LABEL=NAME; may be repeated",
    )
    add(
        "--folder",
        type=TypedFile,
        help="new or empty folder for videos, table and page (default: evaluation, a new one)",
    )
    add(
        "--json",
        type=TypedFile,
        metavar="FILE",
        help="write every score to FILE, and nothing else without --folder",
    )
    add("--quiet", action="store_true", help="no progress bar")


def run(options: argparse.Namespace, overrides: Mapping[str, str]) -> None:
    make_folder_of(options.json)
    if options.folder is not None:
        check_new_folder(options.folder)
    candidates, config = read_candidates(options.source, overrides)
    scorers = {label: placed_plugin(name) for label, name in labelled(options.scorer).items()}
    if wrong := {"", "judge"} & scorers.keys():
        raise UserError(
            f"--scorer {scorers[wrong.pop()]!r}: expected LABEL=NAME, and a label other than judge"
        )
    if (
        folder := options.folder
    ) is None and options.json is None:  # alike on all ranks, which have yet to join
        names = (Path(f"evaluation-{i}" if i > 1 else "evaluation") for i in itertools.count(1))
        folder = next(name for name in names if not name.exists())
    for note in notes_on(candidates, config.sampling, config.eval_guidance_scale):
        log.info(note)
    with heavy_imports("eval"):
        from sage_fast.eval.candidates import evaluate_candidates
        from sage_fast.report.comparison_page import write_evaluation
        from sage_fast.run.fail_fast import fail_fast
        from sage_fast.util.ranks import rank

    with fail_fast(config.timeout_minutes):
        found = evaluate_candidates(candidates, config, scorers, folder)
        if rank() == 0:
            write_evaluation(*found, config.eval.num_videos, folder=folder, json=options.json)


def read_candidates(
    arguments: Sequence[str], overrides: Mapping[str, str]
) -> tuple[list[Candidate], Config]:
    """Read all sources, in the order given, and the settings that sample and score them.

    These are the settings of the first source that has settings. Of the others, only the `model`
    section is used.

    Raises:
        UserError: a source is wrong; or there are only videos, and no reward is given.
    """
    if len(arguments) > 1 and "model.weights" in overrides:
        raise UserError(
            "--model.weights goes with one source; give the runs or checkpoints of the weights as "
            "sources"
        )
    found = [_read(label, source, overrides) for label, source in labelled(arguments).items()]
    config = next((candidate.config for candidate in found if candidate.config is not None), None)
    if config is None:
        if not all(Path(candidate.path).exists() for candidate in found):
            raise UserError(
                f"{BASE!r} is the model of a run or of settings without trained weights: name "
                "those too"
            )
        if "reward.name" not in overrides and not any(
            key.startswith("reward.several") for key in overrides
        ):
            raise UserError(
                "only videos are given: --reward.name NAME, and --reward.weights, say what scores "
                "them"
            )
        return found, load(None, overrides)
    base = dataclasses.replace(config, model=dataclasses.replace(config.model, weights=None))
    return [
        c if Path(c.path).exists() else dataclasses.replace(c, config=base) for c in found
    ], config


def _read(label: str, source: str, overrides: Mapping[str, str]) -> Candidate:
    """Read one source; `base` gets its settings later."""
    path = Path(source)
    if (path / VIDEOS).is_file() or (source == BASE and not path.exists()):
        return Candidate(label=label, path=source)
    if path.is_dir() and RunFolder.of_checkpoint(path) is None:
        RunFolder(path).check(
            f"; nor a folder of videos: {VIDEOS}, with the columns file and prompt, is missing"
        )
    config, iteration = load_run(source, overrides)
    return Candidate(label=label, path=source, config=config, iteration=iteration or 0)
