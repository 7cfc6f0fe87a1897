"""The check of the output folder, before PyTorch is imported, which takes seconds. Imports nothing heavy."""

from __future__ import annotations

from pathlib import Path

from sage_fast.config.schema import Config
from sage_fast.run.folder import RunFolder
from sage_fast.run.manifest import iteration_of
from sage_fast.run.resume import check_kept, check_run
from sage_fast.util.errors import UserError
from sage_fast.util.files import PARTIAL


def check_output(config: Config, *, resume: bool) -> None:
    """Check the output folder without touching it.

    Raises:
        UserError: without `resume`, the folder holds a run or other files. With `resume`, it holds no run, a run that
            began with other values of settings it must keep, a run past `train.iterations`, or one without its metrics.
    """
    run, path = RunFolder(config.output), Path(config.output)
    if resume:
        check_run(run)
        check_kept(config)
        saved = [*map(iteration_of, run.checkpoints())] or [0]
        done = saved[-1]
        if done > config.train.iterations:
            raise UserError(
                f"train.iterations = {config.train.iterations}: the run in {config.output!r} has done {done} already; "
                "nothing was changed"
            )
        check_metrics(run, saved[0])  # later checkpoints may be damaged, and skipped
    elif (path.is_symlink() or path.exists()) and not path.is_dir():  # in this order: another rank may just make it
        found = "a file" if path.exists() else "a link to nothing"
        raise UserError(f"output = {config.output!r}: {found}; expected a new or empty folder")
    elif path.is_dir() and any(file.name != run.lock_file.name and file.suffix != PARTIAL for file in path.iterdir()):
        found = "a run: continue it with --resume" if run.exists else "other files: it must be new or empty"
        raise UserError(
            f"output = {config.output!r} already holds {found}, or choose another folder with --output; "
            "nothing was changed"
        )


def check_metrics(run: RunFolder, done: int) -> None:
    """Check that `metrics.jsonl` begins with the lines of iterations 0 to `done` - 1.

    Raises:
        UserError: one is missing, or not in its place.
    """
    found = [row["iteration"] for row in run.rows]
    if missing := [i for i in range(done) if found[i : i + 1] != [i]]:
        raise UserError(
            f"{str(run.metrics_file)!r}: the line of iteration {missing[0]} is missing; put a copy of the file "
            "there, or start another run with --output and no --resume; nothing was changed"
        )
