"""Decode Wan's latents to videos."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sage_fast.models.decoder import Decoder


class WanDecoder(Decoder):
    """Decoder over Wan's autoencoder, which decodes one latent frame after the other and keeps what
    its convolutions in time need of those before.

    Args:
        vae: the autoencoder, on its device.
    """

    def plan(self, latents: tuple[int, int, int, int]) -> object:
        return "1 video and 1 latent frame at a time"

    @torch.no_grad()
    def __call__(self, latents: Tensor) -> Tensor:
        """Decode latents `[B, C, T, H, W]`, in the policy's scale, to videos `[B, F, 3, H', W']`,
        float32 in [0, 1]."""
        mean, std = (self._by_channel(name, latents) for name in ("latents_mean", "latents_std"))
        scaled = (latents * std + mean).to(self.vae.dtype)
        # one at a time: the kept frames of a video take most of the memory
        videos = [self.vae.decode(video, return_dict=False)[0] for video in scaled.split(1)]
        return torch.cat(videos).float().mul_(0.5).add_(0.5).clamp_(0, 1).transpose(1, 2)

    def _by_channel(self, name: str, latents: Tensor) -> Any:
        """Return a list of the autoencoder's config as `[C, 1, 1, 1]`."""
        return latents.new_tensor(self.vae.config[name])[:, None, None, None]
