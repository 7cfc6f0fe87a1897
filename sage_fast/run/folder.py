"""The files of a run folder that are not metrics or checkpoints.

<run>/config.yaml run.json metrics.jsonl tensorboard/ wandb/ embeddings/ checkpoints/ weights/ eval/ videos/
<run>/comparison.png report.html
"""

from __future__ import annotations

import re
import secrets
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from sage_fast.config import Config
from sage_fast.console import Say
from sage_fast.distributed import all_gather_object, barrier, initialize, rank
from sage_fast.errors import UserError
from sage_fast.files import read_json, read_metrics
from sage_fast.report.videos import contact_sheet, numbered, video_suffix, write_video
from sage_fast.run.checkpoint import checkpoints
from sage_fast.run.resume import LAUNCHERS, began_here, check_kept, check_run, differences, launcher
from sage_fast.settings import dump, load


def check_output(config: Config, *, resume: bool) -> None:
    """Look at the output folder without touching it.

    Raises:
        UserError: it holds another run or other files (without `resume`); or no run, one begun with settings that it
            has to keep, or one that has done more iterations already (with it).
    """
    run = Path(config.output)
    if resume:
        check_run(run)
        check_kept(config)
        done = max((int(folder.name.removeprefix("iteration-")) for folder in checkpoints(run)), default=0)
        if done > config.train.iterations:
            raise UserError(
                f"train.iterations = {config.train.iterations}: the run in {config.output!r} has done {done} already; "
                "nothing was changed"
            )
    elif run.exists() and (not run.is_dir() or any(run.iterdir())):
        holds_run = (run / "config.yaml").exists()
        found = "a run: continue it with --resume" if holds_run else "other files: it must be new or empty"
        raise UserError(
            f"output = {config.output!r} already holds {found}, or choose another folder with --output; "
            "nothing was changed"
        )


def claim_output(config: Config) -> None:
    """Make the folder of a new run and write its settings.

    Raises:
        UserError: another run has claimed it since `check_output`.
    """
    run = Path(config.output)
    launchers = all_gather_object(launcher())  # all ranks have looked before the first one writes
    if rank() == 0:
        run.mkdir(parents=True, exist_ok=True)
        try:
            with (run / "config.yaml").open("x", encoding="utf-8") as file:
                file.write(dump(config))
        except FileExistsError as error:
            raise UserError(
                f"output = {config.output!r}: another run began there while this one was loading"
            ) from error
        if named := sorted({name for name in launchers if name is not None}):
            (run / LAUNCHERS).write_text("".join(f"{name}\n" for name in named), encoding="utf-8")
    barrier()


def is_restart(config: Config) -> bool:
    """Whether torchrun has started these ranks before, and they began the run in `config.output`; all ranks call."""
    if launcher() is None:
        return False
    initialize(config.timeout_minutes)
    return any(all_gather_object(began_here(Path(config.output))))


def replace_settings(config: Config, tell: Say) -> None:
    """Write the settings of a run that is resumed, and tell what is new; those before are kept under another name."""
    run = Path(config.output)
    settings = run / "config.yaml"
    changed = differences(load(settings), config)
    barrier()  # all ranks have read them
    for line in changed:
        tell(line)
    if rank() == 0 and changed:
        shutil.copyfile(settings, run / f"config.until-{len(read_metrics(run / 'metrics.jsonl')):06d}.yaml")
        partial = run / "config.yaml.partial"
        partial.write_text(dump(config), encoding="utf-8")
        partial.replace(settings)  # a run without its settings could not be resumed
    barrier()


def save_videos(videos: Sequence[torch.Tensor], prompts: Sequence[str], folder: Path, fps: float) -> list[Path]:
    """One file a video, and a contact sheet of all of them, named by the number of its first video.

    Nothing is overwritten: the numbers go on from the highest one in `folder`.

    Args:
        videos: float `[F, 3, H, W]` in [0, 1] each.
        prompts: one for each video; further ones are ignored.
        folder: made if it does not exist.
        fps: frames per second.

    Returns:
        The files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    first = max(numbered(folder), default=-1) + 1
    paths = []
    for number, (video, prompt) in enumerate(zip(videos, prompts), start=first):
        paths.append(save_video(video, prompt, folder, number, fps))
    if videos:
        contact_sheet(videos, prompts[: len(videos)]).save(folder / f"contact-sheet-{first:02d}.png")
    return paths


def save_video(video: torch.Tensor, prompt: str, folder: Path, number: int, fps: float) -> Path:
    """An MP4 (see `video_suffix`) of float `[F, 3, H, W]` in [0, 1], named by number and prompt."""
    slug = re.sub(r"[\W_]+", "-", prompt.lower()).strip("-")[:60]
    path = folder / f"{number:02d}-{slug}{video_suffix()}"
    write_video(path, video, fps)
    return path


def run_facts(run: Path, facts: Mapping[str, Any], iteration: int) -> dict[str, Any]:
    """What `run.json` says of a run that starts, or goes on, at `iteration`.

    The id of the run, and date, commit and command of its first start stay; those of every later start are listed
    under `resumed`. All other facts are those of the newest start.
    """
    start = {key: facts[key] for key in ("date", "commit", "command")}
    file = run / "run.json"
    if not file.is_file():
        return {"run_id": secrets.token_hex(4), **facts}
    first = read_json(file)
    kept = {"run_id": secrets.token_hex(4)} | {key: first[key] for key in ("run_id", *start) if key in first}
    return {**facts, **kept, "resumed": [*first.get("resumed", []), {"iteration": iteration, **start}]}
