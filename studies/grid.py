"""`python -m studies.grid`: one run per cell of a grid of settings, in sequence here or as a Slurm
array job.

    base: paper-480p.yaml # relative to this file
    output: runs/paper # parent folder of the runs
    seeds: [0]
    axes:
      method:
        flow: {sampling: {sampler: flow}}
        sage: {sampling: {sampler: sage}}
      kl:
        none: {kl: {strategy: none}}
        dual: {kl: {strategy: dual}}

Each cell runs in its own process, so that one failure does not stop the others.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sage_fast.cli import guarded
from sage_fast.config.command_line import split_settings
from sage_fast.config.loader import leaves, load, read_yaml
from sage_fast.config.places import placed
from sage_fast.config.schema import Config
from sage_fast.util.console import log_to_screen
from sage_fast.util.errors import RunError, UserError, nearest
from sage_fast.util.files import read_json, write_atomic
from sage_fast.util.paths import TypedPath, expand_options, expanded, located
from studies.processes import run_many

log = logging.getLogger("sage_fast.studies")

KEYS = ("base", "output", "seeds", "axes")


def grid(options: argparse.Namespace, overrides: Mapping[str, str]) -> int:
    """Run the command; return the exit status.

    Raises:
        UserError: the file, an option or a setting of any cell is wrong.
        RunError: some cells failed; the others are finished.
        Stopped: after a signal; the interrupted run has left a checkpoint.
    """
    expand_options(options)
    cells = read_grid(Path(options.grid), overrides)
    if options.gpus < 1:
        raise UserError(f"--gpus {options.gpus}: expected at least 1")
    if options.cell is not None:
        if options.cell not in cells:
            raise UserError(f"--cell {options.cell!r}: {nearest(options.cell, cells)}")
        _run_cell(cells[options.cell])
    elif options.slurm is not None:
        write_atomic(Path(options.slurm), _array_job(options, overrides, cells))
        submit = shlex.join(["sbatch", options.slurm])
        print(
            f"{options.slurm}: {len(cells)} runs; submit it here, with what your site asks for: "
            f"{submit}"
        )
    else:
        _run_all(options, overrides, cells)
    return 0


# -- the grid file ---------------------------------------------------------------------------------


def read_grid(file: Path, overrides: Mapping[str, str]) -> dict[str, Config]:
    """Return the settings of each cell by its name, which joins the names on the axes and the seed.

    Args:
        overrides: settings for all cells, as typed; `output` is the parent folder of the runs.

    Raises:
        UserError: something is wrong; names the file and the key, or the cell.
    """
    tree = read_yaml(file)
    for key in tree:
        if key not in KEYS:
            raise UserError(f"grid {file}: unknown key {key!r}; {nearest(str(key), KEYS)}")
    base, output = tree.get("base"), overrides.get("output", tree.get("output"))
    for key, value in (("base", base), ("output", output)):
        if not isinstance(value, str) or not value:
            raise UserError(
                f"grid {file}: {key} = {value!r}: expected "
                f"{'a YAML file' if key == 'base' else 'a folder'}"
            )
    axes = _axes(file, tree.get("axes"))
    if (seeds := tree.get("seeds")) is not None:
        if not isinstance(seeds, list) or not seeds or len(set(map(str, seeds))) < len(seeds):
            raise UserError(
                f"grid {file}: seeds = {seeds!r}: expected a list of different whole numbers, as "
                "in [0, 1]"
            )
        axes["seeds"] = {f"seed{seed}": {"seed": seed} for seed in seeds}
    common = {key: text for key, text in overrides.items() if key != "output"}
    _check_disjoint(file, axes, common)
    cells = {}
    for names in itertools.product(*axes.values()):
        name = "-".join(names)
        try:
            overlays = [
                placed(leaves(axis[own]), file.parent)
                for axis, own in zip(axes.values(), names, strict=True)
            ]
            overlays.append({"output": str(Path(expanded(str(output))) / name)})
            cells[name] = load(located(str(base), file.parent), common, overlays)
        except UserError as error:
            raise UserError(f"grid {file}, {name}: {error}") from error
    return cells


def _axes(file: Path, axes: Any) -> dict[str, dict[str, Any]]:
    """Return axis -> name -> overlay."""
    if (
        not isinstance(axes, dict)
        or not axes
        or not all(isinstance(axis, dict) and axis for axis in axes.values())
    ):
        raise UserError(
            f"grid {file}: axes: expected axes of named settings, such as kl: {{none: {{kl: "
            f"{{strategy: none}}}}, dual: ...}}"
        )
    for axis, overlays in axes.items():
        for name, overlay in overlays.items():
            if not isinstance(name, str) or not re.fullmatch(r"[\w.]+", name, re.ASCII):
                raise UserError(
                    f"grid {file}: axes.{axis}: {name!r}: expected a name of letters, digits, _ "
                    "and ., in quotes if YAML reads it as something else"
                )
            if not isinstance(overlay, dict | None):
                raise UserError(
                    f"grid {file}: axes.{axis}.{name} = {overlay!r}: expected settings, as in a "
                    "config"
                )
    return {
        str(axis): {name: overlay or {} for name, overlay in named.items()}
        for axis, named in axes.items()
    }


def _check_disjoint(
    file: Path, axes: Mapping[str, Mapping[str, Any]], overrides: Mapping[str, str]
) -> None:
    """Check that no setting is set twice: differently named cells would be the same run.

    Raises:
        UserError: two axes, or an axis and an option, set the same key.
    """
    owner = {"output": "the grid"}
    for axis, overlays in axes.items():
        for key in {key for overlay in overlays.values() for key in leaves(overlay)}:
            if key in owner:
                raise UserError(
                    f"grid {file}: {key} is set by {owner[key]} and by axis {axis}; expected one "
                    "of them"
                )
            owner[key] = f"axis {axis}"
    for key in overrides:
        if key in owner:
            raise UserError(
                f"--{key}: {owner[key]} of {file} sets it; expected a setting that all runs share"
            )


# -- runs ------------------------------------------------------------------------------------------


def is_finished(config: Config) -> bool:
    """Whether the run has completed `train.iterations`; it ends with its evaluation after
    training."""
    try:
        after = read_json(Path(config.output) / "eval" / "after.json")
    except (FileNotFoundError, UserError):  # or damaged
        return False
    return after.get("iteration") == config.train.iterations


def _run_cell(config: Config) -> None:
    """Start or resume the run of a cell in this process (maybe one of several ranks); skip it if
    finished."""
    if is_finished(config):
        return
    from sage_fast.run.train import train

    train(config, resume=(Path(config.output) / "config.yaml").is_file())


def _run_all(
    options: argparse.Namespace, overrides: Mapping[str, str], cells: Mapping[str, Config]
) -> None:
    """Run the cells that are not finished, in sequence, each in a process of its own."""
    command = [sys.executable]
    if options.gpus > 1:
        command += [
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(options.gpus),
        ]
    command += ["-m", "studies.grid", *_words(options, overrides), "--cell"]

    def jobs() -> Iterator[tuple[str, list[str]]]:
        for number, (name, config) in enumerate(cells.items(), start=1):
            if not is_finished(config):
                log.info(f"run {number} of {len(cells)}: {name}")
                yield name, [*command, name]

    statuses: dict[str, int] = {}
    run_many(jobs(), statuses.__setitem__)
    finished = [config.output for config in cells.values() if is_finished(config)]
    compare = (
        f"; to compare them: {shlex.join(['sage-fast', 'compare', *finished])}" if finished else ""
    )
    log.info(f"{len(finished)} of {len(cells)} runs are finished{compare}")
    failed = [f"{name} (status {status})" for name, status in statuses.items() if status]
    if failed:
        raise RunError(
            f"{len(failed)} of {len(cells)} runs failed: {', '.join(failed)}; the same command "
            "tries them again"
        )


def _words(options: argparse.Namespace, overrides: Mapping[str, str]) -> list[str]:
    """Return the command line as given, without the options that only this process uses."""
    words = [options.grid]
    if options.quiet:
        words.append("--quiet")
    for key, text in overrides.items():
        words += [f"--{key}", text]
    return words


def _array_job(
    options: argparse.Namespace, overrides: Mapping[str, str], cells: Mapping[str, Config]
) -> str:
    """Return an sbatch script: `grid.sbatch` filled in, then `configs/slurm.sbatch` from where it
    knows the run."""
    values = {
        "LAST": str(len(cells) - 1),
        "GPUS": str(options.gpus),
        "CELLS": " ".join(cells),
        "OUTPUT": shlex.quote(str(Path(next(iter(cells.values())).output).parent)),
        # of the 1800 of --signal
        "COMMAND": shlex.join(_words(options, {"train.grace_seconds": "1700", **overrides})),
    }
    here = Path(__file__).parent
    head = re.sub(
        r"@([A-Z]+)@",
        lambda found: values[found[1]],
        (here / "grid.sbatch").read_text(encoding="utf-8"),
    )
    slurm = (here.parent / "configs" / "slurm.sbatch").read_text(encoding="utf-8")
    _, start, rest = slurm.replace("-m sage_fast train", "-m studies.grid").partition(
        "MASTER_ADDR="
    )
    return head + start + rest


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the grid, or write its array job; return the exit status as `sage-fast` does."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.grid",
        description=(
            "Train a grid of settings, here or as a Slurm array job; started again, it resumes."
        ),
        epilog="Settings, such as --train.iterations 50, are listed by `sage-fast train --help`.",
        allow_abbrev=False,
    )
    grid_help = "YAML file with base, output, seeds, axes (docs/how-to/grid.md)"
    parser.add_argument("grid", type=TypedPath, metavar="GRID", help=grid_help)
    parser.add_argument(
        "--gpus", type=int, default=1, metavar="N", help="GPUs of each run (default: 1)"
    )
    parser.add_argument(
        "--slurm",
        type=TypedPath,
        metavar="FILE",
        help="write an array job with one element per run",
    )
    parser.add_argument(
        "--cell",
        metavar="NAME",
        help="run only this cell, in this process, as an array element does",
    )
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")
    words, settings = split_settings(sys.argv[1:] if arguments is None else arguments)
    options = parser.parse_args(words)
    log_to_screen(quiet=options.quiet)
    return guarded("studies.grid", lambda: grid(options, settings))


if __name__ == "__main__":
    sys.exit(main())
