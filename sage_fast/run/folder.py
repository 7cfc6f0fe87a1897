"""The files of a run folder that are not metrics or checkpoints.

<run>/config.yaml run.json metrics.jsonl tensorboard/ checkpoints/ weights/ eval/ videos/ comparison.png report.html
"""

from __future__ import annotations

import re
from pathlib import Path

import torch

from sage_fast.config import Config
from sage_fast.distributed import barrier, rank
from sage_fast.errors import UserError
from sage_fast.report.videos import contact_sheet, save_mp4
from sage_fast.run.trackers import read_lines
from sage_fast.settings import dump


def check_output(config: Config, *, resume: bool) -> None:
    """Look at the output folder without touching it.

    Raises:
        UserError: it holds another run or other files (without `resume`), or no run (with it).
    """
    run = Path(config.output)
    holds_run = (run / "config.yaml").exists()
    if resume and not holds_run:
        raise UserError(f"output = {config.output!r}: no run to resume there; leave --resume out to start one")
    if not resume and run.exists() and (not run.is_dir() or any(run.iterdir())):
        found = "a run: continue it with --resume" if holds_run else "other files: it must be new or empty"
        raise UserError(
            f"output = {config.output!r} already holds {found}, or choose another folder with --output; "
            "nothing was changed"
        )


def claim_output(config: Config, *, resume: bool) -> Path:
    """Make the run folder and write the settings; those of a run that is resumed are kept under another name."""
    run = Path(config.output)
    settings = run / "config.yaml"
    barrier()  # all ranks have looked before the first one writes
    if rank() == 0:
        run.mkdir(parents=True, exist_ok=True)
        if resume and settings.read_text(encoding="utf-8") != dump(config):
            settings.rename(run / f"config.until-{len(read_lines(run / 'metrics.jsonl')):06d}.yaml")
        settings.write_text(dump(config), encoding="utf-8")
    barrier()
    return run


def save_videos(videos: list[torch.Tensor], prompts: list[str], folder: Path, fps: int) -> list[Path]:
    """One MP4 a video, named by number and prompt, and a contact sheet beside the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for i, (video, prompt) in enumerate(zip(videos, prompts)):
        slug = re.sub(r"[^a-z0-9]+", "-", prompt.lower()).strip("-")[:60]
        paths.append(folder / f"{i:02d}-{slug}.mp4")
        save_mp4(paths[-1], video, fps)
    if videos:
        contact_sheet(videos, prompts[: len(videos)]).save(folder.with_suffix(".png"))
    return paths
