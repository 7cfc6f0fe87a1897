"""A reward to start from: it measures two things in the pixels. `sage-fast init` copies this file;
make it yours.

Training maximises the sum of these parts, weighted by reward.weights in config.yaml. Only the
differences between the videos of one prompt count: adding a constant to a part changes nothing, and
a part that is equal for all of them teaches nothing.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

COLORS = {"red": (2, -1, -1), "green": (-1, 2, -1), "blue": (-1, -1, 2), "yellow": (1, 1, -2)}


class MyReward:
    """Created once per run, with reward.args: load a scoring model in `__init__` if you have
    one."""

    def score(self, videos: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
        """Score a batch.

        Args:
            videos: float32 `[B, F, 3, H, W]` in [0, 1], on the device that trains.
            prompts: B strings.

        Returns:
            Part -> `[B]`, any names. A sample with a weighted part that is not finite is scored
            again, then dropped.
        """
        return {"color": named_color(videos, prompts), "steady": steady(videos)}


def named_color(videos: Tensor, prompts: Sequence[str]) -> Tensor:
    """Return `[B]` in [0, 1]: how much of the video's colour is the one its prompt names; 0 if it
    names none."""
    chroma = videos - videos.mean(dim=2, keepdim=True)
    scores = []
    for video, prompt in zip(chroma, prompts, strict=True):
        wanted = [color for word, color in COLORS.items() if word in prompt.lower().split()]
        if not wanted:
            scores.append(video.new_zeros(()))
            continue
        direction = torch.nn.functional.normalize(video.new_tensor(wanted[0]), dim=0)
        along = (video * direction[:, None, None]).sum(dim=1).clamp(min=0)
        scores.append(along.mean() / (video.norm(dim=1).mean() + 1e-3))
    return torch.stack(scores)


def steady(videos: Tensor) -> Tensor:
    """Return `[B]` in (0, 1], 1 without flicker: the mean second difference over time, small for
    steady motion."""
    flicker = (videos[:, 2:] - 2 * videos[:, 1:-1] + videos[:, :-2]).abs().mean(dim=(1, 2, 3, 4))
    return torch.exp(-20 * flicker)
