"""Sample videos of given prompts with the ODE, and write them with a contact sheet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from sage_fast.config.schema import Config
from sage_fast.eval.evaluation import video_chunks
from sage_fast.eval.sheets import contact_sheet
from sage_fast.models.interface import Condition
from sage_fast.models.model import Model
from sage_fast.rollout.graphs import StepGraphs
from sage_fast.util.files import atomic_path
from sage_fast.util.videos import numbered, save_video


def generate(
    config: Config,
    model: Model,
    prompts: Sequence[str],
    embeddings: Mapping[Any, Condition],
    seeds: Tensor,
    graphs: StepGraphs | None = None,
) -> list[Tensor]:
    """Collect the videos of `video_chunks` in prompt order, each `[F, 3, H, W]` on the CPU."""
    videos: dict[int, Tensor] = {}
    with model.policy.at_guidance(config.eval_guidance_scale):
        sampled = video_chunks(config.sampling, config.eval, model, prompts, embeddings, seeds, graphs=graphs)
        for chosen, chunk in sampled:
            videos.update(zip(chosen, chunk.cpu()))
    return [videos[i] for i in range(len(prompts))]


def save_videos(videos: Sequence[Tensor], prompts: Sequence[str], folder: Path, fps: float) -> list[Path]:
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
    paths = []
    for place, (video, prompt) in enumerate(zip(videos, prompts), start=first):
        paths.append(save_video(video, prompt, folder, place, fps))
    if videos:
        with atomic_path(folder / f"contact-sheet-{first:02d}.png") as file:
            contact_sheet(videos, prompts[: len(videos)]).save(file, "PNG")
    return paths
