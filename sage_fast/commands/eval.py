"""`sage-fast eval`: score one or more sources on the same prompts and seeds, sampled with the
ODE."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sage_fast.commands.sources import Source, labelled, labelled_sources, load_run, split_output
from sage_fast.config.loader import leaves, load
from sage_fast.config.places import placed_plugin
from sage_fast.config.schema import Config
from sage_fast.eval.candidate import Candidate, notes_on
from sage_fast.run_folder import RunFolder
from sage_fast.util.console import heavy_imports, leave_logs
from sage_fast.util.errors import UserError, printable
from sage_fast.util.files import VIDEOS, check_new_folder, make_folder_of
from sage_fast.util.launchers import speaks
from sage_fast.util.paths import TypedFile, as_path

if TYPE_CHECKING:
    from sage_fast.eval.comparison import Comparison

log = logging.getLogger(__name__)

BASE = "base"
"""The source that stands for the model of the other sources, without trained weights."""
RESERVED_LABELS = ("", "judge")
"""Labels that no further reward can have: prefixes of the scores of a run's own rewards."""


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
        help="new or empty folder for videos, table and page (default: evaluation, or "
        "evaluation-2 and so on if that exists)",
    )
    add(
        "--json",
        type=TypedFile,
        metavar="FILE",
        help="write every score to FILE, and nothing else without --folder",
    )
    add("--quiet", action="store_true", help="no progress bar")


def run(options: argparse.Namespace, overrides: Mapping[str, str]) -> None:
    """Evaluate the sources; print the table, and the page's file if there is one."""
    folder, settings = split_output(options, overrides)
    if folder is None and options.json is None:
        # alike on all ranks, which have yet to join
        names = (Path(f"evaluation-{i}" if i > 1 else "evaluation") for i in itertools.count(1))
        folder = next(name for name in names if not name.exists())

    found = evaluate(
        labelled(options.source),
        settings,
        scorer=options.scorer,
        folder=folder,
        json=options.json,
    )
    if speaks():
        print(printable(found.text))
        if folder is not None:
            print(printable(str(folder / "evaluation.html")))


def evaluate(
    sources: Source | Iterable[Source] | Mapping[str, Source],
    overrides: Mapping[str, Any] | None = None,
    *,
    scorer: str | Sequence[str] = (),
    folder: str | os.PathLike[str] | None = None,
    json: str | os.PathLike[str] | None = None,
) -> Comparison:
    """Score one or more sources on the same prompts and seeds, as `sage-fast eval` does.

    Collective, if ranks have been launched together. Files are only written where `folder` and
    `json` say.

    Args:
        sources: runs, their folders, checkpoints, YAML files, settings, folders with `videos.csv`,
            or `base`, the model of the others without trained weights; as label -> source, or as
            one or a list of them, where a text may be `LABEL=SOURCE`. The first is the one that the
            others are compared with.
        overrides: settings to change, as for `load`.
        scorer: further rewards, each named as in `reward.name`, or `LABEL=NAME`.
        folder: new or empty folder for the videos, `evaluation.md` and `evaluation.html`.
        json: file for every score.

    Returns:
        The comparison: `rows` are its table, `sets` the videos of each source with their scores,
        and `print` shows it.

    Raises:
        UserError: a source, a reward, a setting or a folder is wrong, or two sources have no prompt
            in common.
    """
    leave_logs()  # that of a run which this process has trained
    folder = as_path(folder)
    json = as_path(json)
    make_folder_of(json)
    if folder is not None:
        check_new_folder(folder)

    named = leaves(dict(overrides or {}))
    candidates, config = read_candidates(labelled_sources(sources), named)
    further: Any = scorer  # a call from Python may hold anything
    scorers = _read_scorers(further if isinstance(further, list | tuple) else [further])
    for note in notes_on(candidates, config.sampling, config.eval_guidance_scale):
        log.info(note)

    with heavy_imports("eval"):
        from sage_fast.eval.candidates import evaluate_candidates
        from sage_fast.eval.comparison import compare
        from sage_fast.report.comparison_page import write_evaluation
        from sage_fast.run.fail_fast import fail_fast
        from sage_fast.util.process_group import joined
        from sage_fast.util.ranks import barrier, rank

    beside = folder or (json.parent if json else None)  # for the dumps of a failure
    with joined(config.timeout_minutes), fail_fast(config.timeout_minutes, beside):
        sets, watched = evaluate_candidates(candidates, config, scorers, folder)
        found = compare(sets, watched)
        if rank() == 0:
            try:
                write_evaluation(found, config.eval.num_videos, folder=folder, json=json)
            except OSError:
                log.error(found.text)  # it took long, and no file holds it
                raise
        barrier()  # whoever returns finds the files
    return found


def _read_scorers(arguments: Sequence[str]) -> dict[str, str]:
    """Return label -> name of the further rewards.

    Raises:
        UserError: as `labelled`, or a label is taken.
    """
    for each in arguments:
        if not isinstance(each, str):
            raise UserError(
                f"scorer = {each!r:.80}: expected a name, as in reward.name, such as "
                "my_rewards:my_reward"
            )
    scorers = {label: placed_plugin(name) for label, name in labelled(arguments).items()}
    for label in RESERVED_LABELS:
        if label in scorers:
            raise UserError(
                f"--scorer {scorers[label]!r}: expected LABEL=NAME, and a label other than judge"
            )
    return scorers


def read_candidates(
    sources: Mapping[str, str | Config], overrides: Mapping[str, Any]
) -> tuple[list[Candidate], Config]:
    """Read all sources, in the order given, and the settings that sample and score them.

    These are the settings of the first source that has settings. Of the others, only the `model`
    section is used.

    Args:
        sources: label -> path or settings.
        overrides: settings to change, by their dotted names.

    Raises:
        UserError: a source is wrong; or there are only videos, and no reward is given.
    """
    if len(sources) > 1 and "model.weights" in overrides:
        raise UserError(
            "--model.weights goes with one source; give the runs or checkpoints of the weights as "
            "sources"
        )
    found = [_read(label, source, overrides) for label, source in sources.items()]
    config = next((candidate.config for candidate in found if candidate.config is not None), None)
    if config is None:
        _check_only_videos(found, overrides)
        return found, load(None, overrides)

    untrained = dataclasses.replace(config, model=dataclasses.replace(config.model, weights=None))
    candidates = [
        dataclasses.replace(candidate, config=untrained) if _is_base(candidate) else candidate
        for candidate in found
    ]
    return candidates, config


def _read(label: str, source: str | Config, overrides: Mapping[str, Any]) -> Candidate:
    """Read one source; `base` gets its settings later."""
    if isinstance(source, Config):
        config, _ = load_run(source, overrides)
        return Candidate(label=label, path=label, config=config)

    path = Path(source)
    if (path / VIDEOS).is_file() or (source == BASE and not path.exists()):
        return Candidate(label=label, path=source)
    if path.is_dir() and RunFolder.of_checkpoint(path) is None:
        RunFolder(path).check(
            f"; nor a folder of videos: {VIDEOS}, with the columns file and prompt, is missing"
        )
    config, iteration = load_run(source, overrides)
    return Candidate(label=label, path=source, config=config, iteration=iteration or 0)


def _is_base(candidate: Candidate) -> bool:
    """Whether a candidate, as `_read` returns it, is `base` rather than a folder of videos."""
    return candidate.config is None and not Path(candidate.path).exists()


def _check_only_videos(candidates: Sequence[Candidate], overrides: Mapping[str, Any]) -> None:
    """Check that candidates without any settings are folders of videos, and that something scores
    them.

    Raises:
        UserError: they are not, or nothing does.
    """
    if any(_is_base(candidate) for candidate in candidates):
        raise UserError(
            f"{BASE!r} is the model of a run or of settings without trained weights: name those too"
        )
    names_reward = any(key.startswith(("reward.name", "reward.several")) for key in overrides)
    if not names_reward:
        raise UserError(
            "only videos are given: --reward.name NAME, and --reward.weights, say what scores them"
        )
