"""Decoder interface: latents to videos."""

from __future__ import annotations

import abc
from typing import Any

from torch import Tensor


class Decoder(abc.ABC):
    """Decoder over a frozen autoencoder.

    Args:
        vae: the autoencoder, on its device.
    """

    def __init__(self, vae: Any) -> None:
        self.vae = vae

    def plan(self, latents: tuple[int, int, int, int]) -> object:
        """Return how latents (C, T, H, W) are decoded; its `str` is printed at the start of a run.

        Raises:
            UserError: no way of decoding fits in memory.
        """
        return "all videos of a batch at a time"

    @abc.abstractmethod
    def __call__(self, latents: Tensor) -> Tensor:
        """Decode latents `[B, C, T, H, W]`, in the policy's scale, to videos `[B, F, 3, H', W']`,
        float32 in [0, 1].

        Raises:
            UserError: no way of decoding fits in memory.
        """
