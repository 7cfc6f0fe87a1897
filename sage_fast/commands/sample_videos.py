"""Sample videos of given prompts with the ODE, and write them with a contact sheet."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from sage_fast.eval.evaluation import video_chunks
from sage_fast.eval.sheets import contact_sheet
from sage_fast.loading import Setup
from sage_fast.util.captions import PromptKey
from sage_fast.util.files import atomic_path
from sage_fast.util.videos import numbered, save_video


def generate(setup: Setup, prompts: Sequence[PromptKey], seeds: Tensor) -> list[Tensor]:
    """Collect the videos of `video_chunks` in prompt order, each `[F, 3, H, W]` on the CPU."""
    videos: dict[int, Tensor] = {}
    with setup.model.policy.at_guidance(setup.config.eval_guidance_scale):
        for chosen, chunk, _ in video_chunks(setup, prompts, seeds):
            videos.update(zip(chosen, chunk.cpu()))
    return [videos[i] for i in range(len(prompts))]


def save_videos(
    videos: Sequence[Tensor], prompts: Sequence[str], folder: Path, fps: float
) -> list[Path]:
    """Write one file per video, and a contact sheet named after the number of the first video.

    Nothing is overwritten: numbering continues from the highest number in `folder`.

    Args:
        videos: float `[F, 3, H, W]` in [0, 1] each.
        prompts: one per video; surplus prompts are ignored.
        folder: created if missing.
        fps: frames per second.

    Returns:
        The video files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    first = max(numbered(folder), default=-1) + 1
    paths = [
        save_video(v, prompt, folder, i, fps)
        for i, (v, prompt) in enumerate(zip(videos, prompts), first)
    ]
    if videos:
        with atomic_path(folder / f"contact-sheet-{first:02d}.png") as file:
            contact_sheet(videos, prompts[: len(videos)]).save(file, "PNG")
    return paths
