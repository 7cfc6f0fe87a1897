"""Base class of frame-based rewards, which scores chosen frames of a video; resizing of frames."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from sage_fast.util.console import wrapped
from sage_fast.util.encoders import check_finite, reading
from sage_fast.util.errors import UserError
from sage_fast.util.text import counted
from sage_fast.util.videos import evenly_spaced

log = logging.getLogger(__name__)

SCORED_AT_ONCE = 8
"""Maximum number of videos per batch."""
TRIAL_PROMPT = 'a "word"'
TRIAL_SHAPE = (1, 4, 3, 64, 64)
"""Video of a trial, all grey: [B, F, 3, H, W]."""


def levels(frames: Tensor) -> Tensor:
    """Quantise floats in [0, 1] to 8 bits as image and video files do; return float32 0 to 255."""
    return (frames.float().clamp(0, 1) * 255).round()


def resize(frames: Tensor, height: int, width: int) -> Tensor:
    """Resize with antialiased bicubic interpolation, as PIL and torchvision do for 8-bit frames.

    Args:
        frames: `levels`, `[N, 3, H, W]`.

    Returns:
        `levels`, `[N, 3, height, width]`.
    """
    if frames.shape[-2:] == (height, width):
        return frames
    resized = F.interpolate(
        frames, (height, width), mode="bicubic", antialias=True, align_corners=False
    )
    return resized.clamp(0, 255).round()


class FrameReward:
    """A frozen network that scores selected frames of each video.

    A subclass loads `network` and scores frames (`of_frames`); it may also select them (`choose`).

    Args:
        device: device of the network, such as "cuda:1".
        num_frames: number of evenly spaced frames, including first and last; shorter videos use
            all.

    Attributes:
        files: argument that names a folder or a hub id -> patterns of files in it, for `--dry-run`.
        gpu_bytes: bytes of the default network on a GPU, for `--dry-run`; None if unknown.
    """

    files: ClassVar[Mapping[str, Sequence[str]]] = {}
    gpu_bytes: ClassVar[float | None] = None
    network: Any

    def __init__(self, device: str, num_frames: int) -> None:
        if num_frames < 1:
            raise UserError(f"num_frames = {num_frames}: expected at least 1")
        self.device, self.num_frames = torch.device(device), num_frames

    def choose(self, total: int, fps: float | None = None) -> list[int]:
        """Return the sorted indices of the frames to score, out of `total` at `fps` frames per
        second, if known."""
        return evenly_spaced(total, self.num_frames)

    def of_frames(self, videos: Sequence[Tensor], prompts: Sequence[str]) -> dict[str, Tensor]:
        """Score B videos, given as their chosen frames, float `[n, 3, H, W]` in [0, 1] on `device`.

        Returns:
            Each part, `[B]`.
        """
        raise NotImplementedError

    def try_once(self, start: str) -> None:
        """Score one grey video on `device`, as a subclass does once it has loaded everything.

        Args:
            start: beginning of the message of an error.

        Raises:
            UserError: it fails, or a part is not finite.
        """
        with reading(start, "a trial with a grey video"):
            for part, values in self.score(torch.full(TRIAL_SHAPE, 0.5), [TRIAL_PROMPT]).items():
                check_finite(values, f"the network of {part}", "a grey video")

    @torch.no_grad()
    def score(
        self, videos: Tensor, prompts: Sequence[str], fps: float | None = None
    ) -> dict[str, Tensor]:
        """Score videos; return each part, float32 `[B]`.

        Args:
            videos: float `[B, F, 3, H, W]` in [0, 1]; NaN gives NaN. So does a network that fails
                on a finite video, with a warning that names it and the prompt.
            prompts: B prompts.
            fps: frames per second; None: not known.

        Raises:
            ValueError: the shape is wrong, there are too few frames, or a prompt cannot be scored.
        """
        if (
            videos.ndim != 5
            or videos.shape[2] != 3
            or not videos.is_floating_point()
            or len(videos) != len(prompts)
        ):
            found = f"{videos.dtype} {list(videos.shape)} and {counted(len(prompts), 'prompt')}"
            raise ValueError(f"expected float videos [B, F, 3, H, W] and B prompts, got {found}")
        chosen = videos[:, self.choose(videos.shape[1], fps)]
        self.network.to(self.device)
        batches = []
        for i in range(0, len(prompts), SCORED_AT_ONCE):
            batch = chosen[i : i + SCORED_AT_ONCE].to(self.device)
            batches.append(self.of_frames(list(batch), prompts[i : i + SCORED_AT_ONCE]))
        parts = {
            part: torch.cat([scores[part] for scores in batches]).float() for part in batches[0]
        }
        broken = ~chosen.flatten(1).isfinite().all(1)
        parts = {
            part: values.masked_fill(broken.to(values.device), torch.nan)
            for part, values in parts.items()
        }
        for part, values in parts.items():
            for i in (~values.isfinite().cpu() & ~broken.cpu()).nonzero()[:, 0].tolist():
                where = f"{type(self).__name__}: its network gives {values[i].item()} as {part}"
                log.warning(wrapped(f"note: {where} for prompt {prompts[i]!r}"))
        return parts
