"""Decoder interface: latents to videos, overlapped with the rollout on a GPU."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class PendingVideos:
    """Videos that another stream may still be decoding."""

    videos: Tensor
    event: torch.cuda.Event | None

    def result(self) -> Tensor:
        """Return the videos, float32 `[B, F, 3, H', W']` in [0, 1]; the current stream waits for them, not the CPU."""
        if self.event is not None:
            stream = torch.cuda.current_stream(self.videos.device)
            stream.wait_event(self.event)
            self.videos.record_stream(stream)  # its memory belongs to the other stream's pool
        return self.videos


class Decoder(abc.ABC):
    """Decoder over a frozen autoencoder.

    Args:
        vae: the autoencoder, on its device.
    """

    def __init__(self, vae: Any) -> None:
        self.vae = vae
        self._stream: torch.cuda.Stream | None = None

    def plan(self, latents: tuple[int, int, int, int]) -> object:
        """Return how latents (C, T, H, W) are decoded; its `str` is printed at the start of a run.

        Raises:
            UserError: no way of decoding fits in memory.
        """
        return "all videos of a batch at a time"

    @abc.abstractmethod
    def __call__(self, latents: Tensor) -> Tensor:
        """Decode latents `[B, C, T, H, W]`, in the policy's scale, to videos `[B, F, 3, H', W']`, float32 in [0, 1].

        Raises:
            UserError: no way of decoding fits in memory.
        """

    def submit(self, latents: Tensor) -> PendingVideos:
        """Decode on a separate stream, after the work queued on the current one; on the CPU, decode right away.

        The current stream is free for the next rollout meanwhile. Keep at most one submission pending while the videos
        of another are scored: each holds its videos in memory.
        """
        if latents.device.type != "cuda":
            return PendingVideos(videos=self(latents), event=None)
        if self._stream is None:
            self._stream = torch.cuda.Stream(latents.device)
        self._stream.wait_stream(torch.cuda.current_stream(latents.device))
        with torch.cuda.stream(self._stream):
            videos = self(latents)
        latents.record_stream(self._stream)  # if the caller frees them, the memory stays until this decode is done
        return PendingVideos(videos=videos, event=self._stream.record_event())
