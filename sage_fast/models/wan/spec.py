"""Wan described by its configuration alone: sizes, tasks, and what differs among checkpoints."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from diffusers import (
    AutoencoderKLWan,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
)

from sage_fast.config.schema import SamplingConfig
from sage_fast.models.hub import reachable, stated_config
from sage_fast.models.interface import Encoder
from sage_fast.models.random_weights import is_random
from sage_fast.models.spec import Spec
from sage_fast.models.wan import encoder
from sage_fast.models.wan.conditioning import TEXT_TOKENS, TextEmbedding
from sage_fast.models.wan.decode import WanDecoder
from sage_fast.models.wan.lora_names import comfyui, original
from sage_fast.models.wan.policy import WanPolicy
from sage_fast.util.errors import UserError

OF_5B: dict[str, dict[str, Any]] = {
    "transformer": {
        "num_attention_heads": 24,
        "in_channels": 48,
        "out_channels": 48,
        "ffn_dim": 14336,
        "num_layers": 30,
    },
    "vae": {
        "base_dim": 160,
        "decoder_base_dim": 256,
        "z_dim": 48,
        "is_residual": True,
        "in_channels": 12,
        "out_channels": 12,
        "patch_size": 2,
        "scale_factor_spatial": 16,
        "latents_mean": [0.0] * 48,
        "latents_std": [1.0] * 48,
    },
}
PUBLISHED: dict[str, dict[str, dict[str, Any]]] = {
    "wan2.2-ti2v-5b": OF_5B,
    "wan2.1-t2v-1.3b": {
        "transformer": {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30}
    },
    "wan2.1-t2v-14b": {},
}
"""Part of a hub id, in small letters -> part -> the arguments that are not its class's defaults.

The scale of the latents is not among them: without a checkpoint nothing is decoded but noise.
"""
OTHER_TASKS = r"a14b|(?<!t)i2v|flf2v|vace|animate|s2v|fun"
"""In the names of published checkpoints of Wan that do not make a video of a text by one
transformer."""
RATES = {16: 16, 48: 24}
"""Channels of the latents -> frames per second of the videos, as published."""


class Wan(Spec):
    """Wan 2.1 (1.3B, 14B) and Wan 2.2 TI2V (5B), text-to-video.

    Wan 2.2 TI2V can also begin from an image, and Wan 2.2 A14B has two transformers: neither is
    supported.
    """

    title = "Wan"
    published = "Wan-AI/Wan2.2-TI2V-5B-Diffusers"
    hub_names = r"\bwan[-_]?2"
    networks: ClassVar = {"transformer": WanTransformer3DModel}
    autoencoder = AutoencoderKLWan
    condition = TextEmbedding
    randoms: ClassVar[tuple[str, ...]] = tuple(f"random:{name}" for name in PUBLISHED)
    text_tokens = TEXT_TOKENS
    text_keys = TEXT_TOKENS
    encoder_bytes = 11.4e9  # UMT5-XXL in 16 bits
    lora_targets = r"blocks\.\d+\.(attn[12]\.(to_[qkv]|to_out\.0)|ffn\.net\.(0\.proj|2))"
    lora_layouts: ClassVar = {"original": original, "comfyui": comfyui}
    license: ClassVar[tuple[str, str] | None] = ("apache-2.0", "")

    def __init__(
        self, path: str = "", configs: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        super().__init__(path, configs)
        if not self.configs and re.search(OTHER_TASKS, path.lower()):
            raise UserError(
                f"model.path = {path!r}: by its name a checkpoint for another task, or of two "
                f"transformers; expected one for text-to-video, such as {self.published}"
            )

    @property
    def sizes_are_known(self) -> bool:
        return self._published_name is not None

    @property
    def _published_name(self) -> str | None:
        return next((name for name in PUBLISHED if name in self.path.lower()), None)

    def published_sizes(self, part: str) -> Mapping[str, Any]:
        return PUBLISHED[self._published_name or next(iter(PUBLISHED))].get(part, {})

    @property
    def fps(self) -> int:
        return RATES.get(self.vae.config.z_dim, super().fps)

    @property
    def heads(self) -> int:
        return self.transformer_config.num_attention_heads

    @property
    def patch(self) -> int:
        return math.prod(self.transformer_config.patch_size)

    def check(self) -> None:
        """Refuse checkpoints for another task, and parts that do not fit each other.

        Raises:
            UserError: the checkpoint would load but be sampled wrongly.
        """
        config = self.transformer_config
        start = f"model.path = {self.path!r}: its transformer"
        if config.image_dim is not None or config.in_channels != config.out_channels:
            raise UserError(
                f"{start} reads an image (in_channels {config.in_channels}, image_dim "
                f"{config.image_dim}); expected one for text-to-video, as in {self.published}"
            )
        if not config.cross_attn_norm:
            raise UserError(f"{start} has cross_attn_norm = False; expected True, as published")
        if self.vae.config.z_dim != config.in_channels:
            raise UserError(
                f"{start} has {config.in_channels} channels, and its vae {self.vae.config.z_dim}"
            )
        self._check_autoencoder()
        pipeline = self._stated("_class_name")
        if pipeline not in (None, WanPipeline.__name__):
            raise UserError(
                f"model.path = {self.path!r}: a {pipeline}; expected a {WanPipeline.__name__}, as "
                f"{self.published}"
            )
        if self._stated("boundary_ratio") is not None or any(self._stated("transformer_2") or ()):
            raise UserError(
                f"model.path = {self.path!r}: two transformers share its steps (A14B); expected a "
                f"checkpoint with one, as {self.published}"
            )

    def _check_autoencoder(self) -> None:
        """Check what the autoencoder's class takes without a question.

        Raises:
            UserError: a scale is not positive, or is missing for some channels of the latents.
        """
        config = self.vae.config
        start = f"model.path = {self.path!r}: its vae has"
        for name in ("scale_factor_temporal", "scale_factor_spatial"):
            if not isinstance(config[name], int) or config[name] < 1:
                raise UserError(f"{start} {name} = {config[name]!r}; expected at least 1")
        for name in ("latents_mean", "latents_std"):
            values = config[name]
            if not isinstance(values, list | tuple) or len(values) != config.z_dim:
                raise UserError(f"{start} {name} = {values!r}; expected {config.z_dim} numbers")

    def _stated(self, key: str) -> Any:
        """Return what model_index.json states; None if it states nothing, or is not there."""
        try:
            return stated_config(WanPipeline, reachable(self.path)).get(key)
        except (OSError, ValueError, RecursionError, AttributeError):
            return None

    def notes(self, sampling: SamplingConfig) -> list[str]:
        """Return where the settings sample differently from the checkpoint's own pipeline.

        Its guidance scale is no part of a checkpoint.
        """
        try:
            stated = stated_config(UniPCMultistepScheduler, reachable(self.path), "scheduler")
            name = stated["_class_name"]
        except (OSError, ValueError, RecursionError, LookupError, TypeError):
            return ["the checkpoint lacks scheduler/: sampling.shift is not compared"]
        shift = stated.get("flow_shift", stated.get("shift", 1.0))
        found = []
        if shift != sampling.shift:
            found.append(
                f"sampling.shift = {sampling.shift:g}, and the checkpoint's scheduler has {shift}"
            )
        if name != "FlowMatchEulerDiscreteScheduler":
            found.append(
                f"the checkpoint's scheduler is {name}, and a run samples as by "
                "FlowMatchEulerDiscreteScheduler"
            )
        return found

    def latent_shape(self, sampling: SamplingConfig) -> tuple[int, int, int, int]:
        config = self.vae.config
        space = config.scale_factor_spatial
        patches = self.transformer_config.patch_size
        _, rows, columns = patches
        for name, step in (("height", space * rows), ("width", space * columns)):
            size = getattr(sampling, name)
            nearest = max(step, round(size / step) * step)
            expected = f"expected a multiple of {step} for {self.title}, such as {nearest}"
            sampling.require(size % step == 0, name, expected)
        frames = (sampling.num_frames - 1) // config.scale_factor_temporal + 1
        shape = config.z_dim, frames, sampling.height // space, sampling.width // space
        most = self.transformer_config.rope_max_seq_len
        for name, size, patch in zip(("num_frames", "height", "width"), shape[1:], patches):
            expected = f"expected at most {most} positions of {self.title}'s rotary table"
            sampling.require(size // patch <= most, name, expected)
        return shape

    def attention_shape(self, sampling: SamplingConfig) -> tuple[int, int, int]:
        tokens = self.tokens(self.latent_shape(sampling))
        return tokens, self.heads, self.transformer_config.attention_head_dim

    def assumed_condition(self) -> TextEmbedding:
        return TextEmbedding(text=torch.empty(TEXT_TOKENS, self.transformer_config.text_dim))

    def is_gate(self, name: str) -> bool:
        return name.endswith("scale_shift_table")

    def policy(
        self, networks: Mapping[str, Any], *, dtype: torch.dtype, guidance_scale: float
    ) -> WanPolicy:
        return WanPolicy(networks["transformer"], dtype=dtype, guidance_scale=guidance_scale)

    def decoder(self, vae: Any) -> WanDecoder:
        return WanDecoder(vae)

    def load_encoder(
        self, dtype: torch.dtype, device: torch.device, sampling: SamplingConfig
    ) -> Encoder:
        width = self.transformer_config.text_dim
        if is_random(self.path):
            return encoder.random_encoder(width)
        return encoder.load_encoder(self.path, dtype, device, width)

    def encoder_version(self) -> str | None:
        return "" if is_random(self.path) else encoder.encoder_version(self.path)
