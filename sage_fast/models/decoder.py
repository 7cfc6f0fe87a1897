"""Latents to videos, beside the rollout on a GPU."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class PendingVideos:
    """Videos that may still be in the making on another stream."""

    videos: Tensor
    event: torch.cuda.Event | None

    def result(self) -> Tensor:
        """The videos, float32 `[B, F, 3, H', W']` in [0, 1]; the current stream waits for them, the CPU does not."""
        if self.event is not None:
            stream = torch.cuda.current_stream(self.videos.device)
            stream.wait_event(self.event)
            self.videos.record_stream(stream)  # its memory belongs to the other stream's pool
        return self.videos


class Decoder(abc.ABC):
    """The decode of a frozen autoencoder.

    Args:
        vae: the autoencoder, on its device.
    """

    def __init__(self, vae: Any) -> None:
        self.vae = vae
        self._stream: torch.cuda.Stream | None = None

    def plan(self, latents: tuple[int, int, int, int]) -> object:
        """How latents (C, T, H, W) are decoded; its text is a line at the start of a run.

        Raises:
            UserError: too little memory for any way.
        """
        return "all videos of a batch at a time"

    @abc.abstractmethod
    def __call__(self, latents: Tensor) -> Tensor:
        """Latents `[B, C, T, H, W]`, scaled as the policy makes them, to videos `[B, F, 3, H', W']`, float32 in [0, 1].

        Raises:
            UserError: too little memory for any way.
        """

    def submit(self, latents: Tensor) -> PendingVideos:
        """Decode on a stream of its own, after what the current stream has been given; on the CPU, at once.

        The current stream may go on with the next rollout meanwhile. At most one submission should be pending while
        another's videos are scored: each holds its videos.
        """
        if latents.device.type != "cuda":
            return PendingVideos(videos=self(latents), event=None)
        if self._stream is None:
            self._stream = torch.cuda.Stream(latents.device)
        self._stream.wait_stream(torch.cuda.current_stream(latents.device))
        with torch.cuda.stream(self._stream):
            videos = self(latents)
        latents.record_stream(self._stream)  # freed by its owner, its memory waits for this decode
        return PendingVideos(videos=videos, event=self._stream.record_event())
