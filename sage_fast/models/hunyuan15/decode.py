"""Decode latents to videos, in portions that fit the free memory."""

from __future__ import annotations

import dataclasses

import torch
from diffusers import AutoencoderKLHunyuanVideo15
from torch import Tensor

from sage_fast.models.decoder import Decoder
from sage_fast.models.hunyuan15.vae import decode_frames, peak_bytes, video_shape
from sage_fast.util.environment import free_bytes
from sage_fast.util.errors import UserError

MEMORY_FRACTION = 0.5
"""Share of the memory free at the first decode; the rest is for the concurrent rollout and for
training."""
TARGET_CHUNK_BYTES = {"cpu": 16 * 2**20, "cuda": 8 * 2**30}
"""Bytes beyond which larger portions should not be faster. CPU: what its caches hold. CUDA: not
measured; an activation of the last stage then exceeds a gigabyte, which fills any GPU."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodePlan:
    """How latents are decoded.

    Attributes:
        samples: videos per call.
        frames: latent frames at a time after the decoder's attention; does not change values.
        bytes: peak memory while decoding, by formula.
    """

    samples: int
    frames: int
    bytes: int

    def __str__(self) -> str:
        """Return one line for the start of a run."""
        videos = "video" if self.samples == 1 else "videos"
        frames = "latent frame" if self.frames == 1 else "latent frames"
        size = f"{self.bytes / 2**20:,.0f} MiB"
        return f"{self.samples} {videos} and {self.frames} {frames} at a time, {size}"


def choose(
    vae: AutoencoderKLHunyuanVideo15,
    latents: tuple[int, int, int, int],
    itemsize: int,
    free: int,
    enough: int,
) -> DecodePlan:
    """Choose the first plan that fits: several whole videos, one, or a few latent frames of one at
    a time.

    Args:
        vae: the autoencoder.
        latents: (C, T, H, W) of one video.
        itemsize: bytes per value.
        free: bytes of free memory, of which MEMORY_FRACTION may be used.
        enough: bytes beyond which portions do not grow for speed alone.

    Raises:
        UserError: not even one latent frame at a time fits.
    """
    _, total, height, width = latents
    limit = int(MEMORY_FRACTION * free)
    target = min(limit, enough)
    for pieces in range(1, total + 1):
        frames = -(-total // pieces)
        needed = peak_bytes(vae.decoder, (1, *latents), frames, itemsize)
        # One frame at a time is the minimum, so it may exceed `enough`.
        if needed <= (target if frames > 1 else limit):
            samples = max(1, target // needed) if frames == total else 1
            return DecodePlan(samples=samples, frames=frames, bytes=samples * needed)
    raise UserError(
        f"decoding latents of {total} x {height} x {width} frame by frame needs "
        f"{needed / 2**20:,.0f} MiB, and {MEMORY_FRACTION:.0%} of the free memory is "
        f"{limit / 2**20:,.0f} MiB; choose smaller sampling.height, sampling.width or "
        "sampling.num_frames"
    )


class VideoDecoder(Decoder):
    """Decoder over HunyuanVideo 1.5's autoencoder.

    Args:
        vae: the autoencoder, on its device; its weights are rearranged in memory.
        channels_last: use the channels-last layout for weights and activations.
            `2026-11-25-h100-decode-480p.json` in benchmarks/results has both, of one call each.
    """

    def __init__(self, vae: AutoencoderKLHunyuanVideo15, channels_last: bool = True) -> None:
        super().__init__(vae)
        self.layout = torch.channels_last_3d if channels_last else torch.contiguous_format
        self.plans: dict[tuple[int, ...], DecodePlan] = {}
        for weight in vae.decoder.parameters():
            if weight.ndim == 5:
                weight.data = weight.data.contiguous(memory_format=self.layout)

    def plan(self, latents: tuple[int, int, int, int]) -> DecodePlan:
        """Return how latents (C, T, H, W) are decoded. Chosen once, so rounding stays the same
        throughout a run.

        Raises:
            UserError: no way of decoding fits in memory.
        """
        if latents not in self.plans:
            device = self.vae.device
            enough = TARGET_CHUNK_BYTES.get(device.type, TARGET_CHUNK_BYTES["cuda"])
            self.plans[latents] = choose(
                self.vae, latents, self.vae.dtype.itemsize, free_bytes(device), enough
            )
        return self.plans[latents]

    @torch.no_grad()
    def __call__(self, latents: Tensor) -> Tensor:
        """Decode latents `[B, C, T, H, W]`, in the policy's scale, to videos `[B, F, 3, H', W']`,
        float32 in [0, 1].

        Raises:
            UserError: no way of decoding fits in memory.
        """
        _, channels, frames, height, width = latents.shape
        plan = self.plan((channels, frames, height, width))
        latents = latents.to(self.vae.dtype) / self.vae.config.scaling_factor
        latents = latents.contiguous(memory_format=self.layout)
        shape = video_shape(self.vae.decoder, latents.shape)
        videos = torch.empty(shape, dtype=torch.float32, device=latents.device)
        # Parts of nearly equal size, without a small one at the end.
        parts = -(-len(latents) // plan.samples)
        for part, out in zip(latents.tensor_split(parts), videos.tensor_split(parts)):
            done = 0
            for piece in decode_frames(self.vae.decoder, part, plan.frames):
                out[:, done : done + piece.shape[2]] = piece.transpose(1, 2)
                done += piece.shape[2]
        return videos.mul_(0.5).add_(0.5).clamp_(0, 1)
