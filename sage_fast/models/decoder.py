"""Decoder interface: latents to videos."""

from __future__ import annotations

import abc
from typing import Any

import torch
from torch import Tensor

from sage_fast.util.parking import Parked


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


class ParkedDecoder(Decoder):
    """A decoder whose autoencoder is on the device only while it decodes.

    Args:
        decoder: the decoder.
        device: where it decodes; its autoencoder leaves it.
    """

    def __init__(self, decoder: Decoder, device: torch.device) -> None:
        super().__init__(decoder.vae)
        self.decoder = decoder
        self._parked = Parked([self.vae], device)

    def plan(self, latents: tuple[int, int, int, int]) -> object:
        with self._parked.on_device():
            return self.decoder.plan(latents)

    def __call__(self, latents: Tensor) -> Tensor:
        with self._parked.on_device():
            return self.decoder(latents)
