"""The commands that judge what was trained: `eval`, `compare` and `votes`. Nothing heavy is imported before its use."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from sage_fast.errors import UserError
from sage_fast.files import make_folder_of


def add_parsers(add: Callable[[str, str], argparse.ArgumentParser]) -> None:
    """
    Args:
        add: makes the parser of a command from its name and its help.
    """
    evaluate = add("eval", "score runs, checkpoints or videos on the held-out prompts, with intervals")
    evaluate.usage = "sage-fast eval SOURCE [SOURCE ...] [OPTION ...] [--SETTING VALUE ...]"
    evaluate.add_argument(
        "source", metavar="SOURCE", nargs="+",
        help="YAML file, run folder, checkpoint, folder with videos.csv, or base; LABEL=SOURCE names it",
    )  # fmt: skip
    evaluate.add_argument(
        "--scorer", action="append", default=[], metavar="NAME", help="a further reward (several times for several)"
    )
    evaluate.add_argument("--folder", help="new or empty: takes the videos, the table, and a page with both")
    evaluate.add_argument("--json", metavar="FILE", help="write every score there")
    evaluate.add_argument("--quiet", action="store_true", help="no progress bar")

    compare = add("compare", "lay runs over each other on one page, or make a blind study of their videos")
    compare.add_argument(
        "run", metavar="RUN", nargs="+", help="run folder, or folder with videos.csv; LABEL=RUN names it"
    )
    compare.add_argument("--folder", default="comparison", help="where the pages go (default: comparison)")
    compare.add_argument("--videos", type=int, metavar="N", default=6, help="rows of videos on the page (default: 6)")
    compare.add_argument(
        "--blind", type=int, metavar="N",
        help="in place of that page, one that asks which is better in N pairs of videos of the first and each other",
    )  # fmt: skip
    compare.add_argument("--seed", type=int, default=0, help="with --blind: of the pairs, their order and their sides")

    votes = add("votes", "win rates with intervals, from the votes that a blind page saved")
    votes.add_argument("key", metavar="KEY", help="blind-key.json, from beside the page")
    votes.add_argument("votes", metavar="VOTES", nargs="+", help="a file of each voter")


Tell = Callable[..., None]
"""Told the options of the command, then lines to print."""


def _eval(tell: Tell, options: argparse.Namespace, overrides: dict[str, str]) -> int:
    from sage_fast.run.sources import read_sources, settings_for, told

    make_folder_of(options.json)
    sources = read_sources(options.source, overrides, lambda line: tell(options, line))
    config = settings_for(sources, overrides)
    tell(options, *told(sources, config), "sage-fast eval: loading PyTorch and diffusers")
    from sage_fast.run.eval_command import run_eval

    run_eval(
        sources,
        config,
        scorers=options.scorer,
        folder=None if options.folder is None else Path(options.folder),
        json=None if options.json is None else Path(options.json),
        quiet=options.quiet,
        tell=lambda *lines: tell(options, *lines),
    )
    return 0


def _compare(tell: Tell, options: argparse.Namespace, overrides: dict[str, str]) -> int:
    from sage_fast.run.sources import labelled

    if options.videos < 1:
        raise UserError(f"--videos {options.videos}: expected at least 1")
    sources = {label: Path(source) for label, source in labelled(options.run).items()}
    tell(options, f"sage-fast compare: reading {', '.join(sources)}")
    from sage_fast.report.blind import blind_study
    from sage_fast.report.compare import write_compare

    folder = Path(options.folder)
    if options.blind is None:
        print(write_compare(sources, folder, options.videos))
    else:
        print(*blind_study(sources, options.blind, options.seed, folder), sep="\n")
    return 0


def _votes(tell: Tell, options: argparse.Namespace, overrides: dict[str, str]) -> int:
    from sage_fast.report.blind import count_votes, format_win_rates

    print(format_win_rates(*count_votes(Path(options.key), [Path(file) for file in options.votes])))
    return 0


COMMANDS = {"eval": _eval, "compare": _compare, "votes": _votes}
