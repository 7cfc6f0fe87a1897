"""Base class of frame-based rewards; choosing, reading and resizing frames of videos in memory and in files."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from sage_fast.util.errors import UserError, first_line

SCORED_AT_ONCE = 8
"""Maximum number of videos per batch."""


def levels(frames: Tensor) -> Tensor:
    """Quantise floats in [0, 1] to 8 bits as image and video files do; return float32 0 to 255. NaN stays NaN."""
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
    resized = F.interpolate(frames, (height, width), mode="bicubic", antialias=True, align_corners=False)
    return resized.clamp(0, 255).round()


def read_frames(path: str | Path, choose: Callable[[int, float], list[int]]) -> Tensor:
    """Read the chosen frames of any file that ffmpeg reads, as float32 `[n, 3, H, W]` in [0, 1].

    Args:
        choose: maps the file's number of frames and frames per second to sorted frame indices.

    Raises:
        ValueError: the file is missing or is no video.
    """
    import imageio_ffmpeg

    if not Path(path).is_file():
        raise ValueError(f"{str(path)!r}: no such video")
    try:
        reader = imageio_ffmpeg.read_frames(str(path))
        header = next(reader)
        total, (width, height) = sum(1 for _ in reader), header["size"]
        if not (total and header["fps"] > 0):
            raise ValueError(f"{str(path)!r}: {total} frames at {header['fps']} frames per second cannot be scored")
        wanted = choose(total, header["fps"])
        kept = {}
        reader = imageio_ffmpeg.read_frames(str(path))  # a second pass: a long video would not fit into memory
        next(reader)
        for i, frame in enumerate(reader):
            if i in wanted:
                kept[i] = np.frombuffer(frame, dtype=np.uint8).reshape(height, width, 3)
    except (OSError, RuntimeError) as error:
        raise ValueError(f"{str(path)!r}: not read: {first_line(error)}") from error
    return torch.from_numpy(np.stack([kept[i] for i in wanted])).permute(0, 3, 1, 2) / 255


class FrameReward:
    """A frozen network that scores selected frames of each video.

    A subclass loads `network`, selects frames (`choose`) and scores them (`of_frames`).

    Args:
        device: device of the network, such as "cuda:1"; None for the device of the first videos it scores.
        video_fps: frames per second of the videos passed to `score`.

    Attributes:
        definitions: part -> description, with its pooling over frames and its scale.
        files: argument that names a folder or a hub id -> patterns of files in it, for `--dry-run`.
    """

    files: ClassVar[Mapping[str, Sequence[str]]] = {}
    network: Any
    definitions: dict[str, str]

    def __init__(self, device: str | None, video_fps: float) -> None:
        if not (math.isfinite(video_fps) and video_fps > 0):
            raise UserError(f"video_fps = {video_fps}: expected frames per second above 0, such as 24")
        try:
            self.device = None if device is None else torch.device(device)
        except RuntimeError as error:
            raise UserError(f"device = {device!r}: expected a device of torch, such as 'cuda:1' or 'cpu'") from error
        self.video_fps = video_fps

    def choose(self, total: int, fps: float) -> list[int]:
        """Return the sorted indices of the frames to score, out of `total` at `fps` frames per second."""
        raise NotImplementedError

    def of_frames(self, videos: Sequence[Tensor], prompts: Sequence[str]) -> dict[str, Tensor]:
        """Score B videos, given as their chosen frames, float `[n, 3, H, W]` in [0, 1] on `device`.

        Returns:
            Each part, `[B]`.
        """
        raise NotImplementedError

    def score(self, videos: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
        """Score videos; return each part, float32 `[B]`.

        Args:
            videos: float `[B, F, 3, H, W]` in [0, 1] at `video_fps` frames per second; NaN gives NaN.
            prompts: B prompts.

        Raises:
            ValueError: the shape is wrong, there are too few frames, or a prompt cannot be scored.
        """
        if videos.ndim != 5 or videos.shape[2] != 3 or not videos.is_floating_point():
            raise ValueError(f"expected float videos [B, F, 3, H, W], got {videos.dtype} {list(videos.shape)}")
        chosen = videos[:, self.choose(videos.shape[1], self.video_fps)]
        return self._in_batches(list(chosen), prompts, lambda video: video, videos.device)

    def score_files(self, paths: Sequence[str | Path], prompts: Sequence[str]) -> dict[str, Tensor]:
        """Score B video files of any size, length and frame rate; return each part, float32 `[B]`.

        Raises:
            ValueError: as `score`, or a file is missing or is no video.
        """
        home = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return self._in_batches(paths, prompts, lambda path: read_frames(path, self.choose), home)

    @torch.no_grad()
    def _in_batches(
        self, videos: Sequence[Any], prompts: Sequence[str], frames: Callable[[Any], Tensor], home: torch.device
    ) -> dict[str, Tensor]:
        if len(videos) != len(prompts) or not prompts:
            raise ValueError(f"expected a prompt for each video, got {len(videos)} videos and {len(prompts)} prompts")
        if self.device is None:
            self.device = home
        self.network.to(self.device)
        batches = []
        for i in range(0, len(prompts), SCORED_AT_ONCE):
            batch = [frames(video).to(self.device) for video in videos[i : i + SCORED_AT_ONCE]]
            batches.append(self.of_frames(batch, prompts[i : i + SCORED_AT_ONCE]))
        return {part: torch.cat([scores[part] for scores in batches]).float() for part in batches[0]}
