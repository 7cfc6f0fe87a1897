"""HunyuanVideo 1.5 described by its configuration alone: sizes, and the FLOPs of a sample.

tests/test_plan.py checks the formulas against PyTorch's own counts. A multiply-add is two FLOPs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from diffusers import (
    AutoencoderKLHunyuanVideo15,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideo15Pipeline,
    HunyuanVideo15Transformer3DModel,
)
from diffusers.guiders import ClassifierFreeGuidance
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from sage_fast.config.schema import Config, SamplingConfig
from sage_fast.models.cost import Cost, counted_memory
from sage_fast.models.encoders import fingerprint
from sage_fast.models.hub import reachable, stated_config
from sage_fast.models.hunyuan15 import encoder
from sage_fast.models.hunyuan15.conditioning import TextEmbedding
from sage_fast.models.hunyuan15.decode import VideoDecoder
from sage_fast.models.hunyuan15.lora_names import comfyui, original
from sage_fast.models.hunyuan15.policy import HunyuanVideo15Policy, freeze_dead_ends
from sage_fast.models.hunyuan15.vae import decode_frames
from sage_fast.models.interface import Encoder
from sage_fast.models.random_weights import is_random
from sage_fast.models.spec import Distillation, Spec
from sage_fast.util.errors import UserError

TransformerConfig = Mapping[str, Any]
"""The transformer's config."""

FEW_BLOCKS = {"random:hunyuanvideo15-480p-4-blocks": 4}
"""Random model -> number of its blocks, which have the published width: all weights of these train
on one GPU."""
PIPELINES = {"HunyuanVideo15Pipeline": "t2v", "HunyuanVideo15ImageToVideoPipeline": "i2v"}
"""Class in a checkpoint's model_index.json -> its task."""
SAMPLED_AS: dict[str, tuple[Any, str]] = {
    "scheduler": (FlowMatchEulerDiscreteScheduler, "shift"),
    "guider": (ClassifierFreeGuidance, "guidance_scale"),
}
"""Part of a checkpoint -> the class that a run samples as, at its default settings, and the field
that is a setting."""
DYNAMIC = ("base_shift", "max_shift", "base_image_seq_len", "max_image_seq_len", "time_shift_type")
"""Fields of the scheduler that act with `use_dynamic_shifting` alone."""
DISTILLED, STEP_DISTILLED = "_distilled", "_step_distilled"
"""Ends of the names of published checkpoints: distilled from guidance, and also to few steps by
MeanFlow."""


class HunyuanVideo15(Spec):
    """HunyuanVideo 1.5, text-to-video and image-to-video.

    Attributes:
        image_tokens: tokens of an image in a forward; assumed while none is known.
    """

    title = "HunyuanVideo 1.5"
    published = "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v"
    networks: ClassVar = {"transformer": HunyuanVideo15Transformer3DModel}
    autoencoder = AutoencoderKLHunyuanVideo15
    condition = TextEmbedding
    hub_names = r"hunyuan[-_]?video[-_]?1[._]?5"
    image_tokens: ClassVar[int] = encoder.IMAGE_TOKENS
    randoms: ClassVar[tuple[str, ...]] = (
        "random:hunyuanvideo15-480p",
        *FEW_BLOCKS,
        "random:hunyuanvideo15-480p-i2v",
    )
    encoder_bytes = 17e9  # Qwen2.5-VL and ByT5 in 16 bits
    lora_targets = (
        r"transformer_blocks\.\d+\."
        r"(attn\.(to_[qkv]|to_out\.0|add_[qkv]_proj|to_add_out)|ff\.net\.(0\.proj|2))"
    )
    lora_layouts: ClassVar = {"original": original, "comfyui": comfyui}
    set_guidance = "pipe.guider.guidance_scale = {:g}"
    license: ClassVar[tuple[str, str] | None] = (
        "tencent-hunyuan-community",
        "https://github.com/Tencent-Hunyuan/HunyuanVideo-1.5/blob/main/LICENSE",
    )

    @functools.cached_property
    def takes_images(self) -> bool:
        """Whether its pipeline is the one for images.

        Without one of `PIPELINES`, its `task_type` is. diffusers' converter gives "i2v" to 480p
        text-to-video too.
        """
        pipeline = None
        if self.configs:
            # the last: no mapping
            with contextlib.suppress(OSError, ValueError, RecursionError, AttributeError):
                pipeline = stated_config(HunyuanVideo15Pipeline, reachable(self.path)).get(
                    "_class_name"
                )
        return PIPELINES.get(str(pipeline), self.transformer_config.task_type) == "i2v"

    @property
    def prompt_tokens(self) -> int:
        return self.text_tokens + self.image_tokens * self.takes_images

    @property
    def heads(self) -> int:
        return self.transformer_config.num_attention_heads

    @functools.cached_property
    def distillation(self) -> Distillation | None:
        if self.transformer_config.use_meanflow:
            return Distillation(steps=(8, 12), mean_velocity=True)  # README: recommended
        distilled = self.path.endswith(DISTILLED)
        if not distilled and self.configs:
            with contextlib.suppress(OSError, ValueError, RecursionError):
                distilled = self._stated("guider")[1].get("guidance_scale") == 1
        return Distillation(steps=(50,)) if distilled else None  # README: "must use 50 steps"

    @property
    def patch(self) -> int:
        return self.transformer_config.patch_size_t * self.transformer_config.patch_size**2

    def published_sizes(self, part: str) -> Mapping[str, Any]:
        if part == "vae":
            return {}
        # published checkpoints are named by their task
        sizes: dict[str, Any] = {"task_type": "i2v" if "i2v" in self.path else "t2v"}
        if self.path in FEW_BLOCKS:
            sizes["num_layers"] = FEW_BLOCKS[self.path]
        if self.path.endswith(STEP_DISTILLED):
            sizes["use_meanflow"] = True
        return sizes

    def check(self) -> None:
        """Refuse checkpoints for another task.

        Raises:
            UserError: the checkpoint would load but be sampled wrongly.
        """
        has, task = (
            f"model.path = {self.path!r}: its transformer has",
            self.transformer_config.task_type,
        )
        if task not in ("t2v", "i2v"):
            raise UserError(
                f"{has} task_type = {task!r}; expected 't2v' or 'i2v', as in {self.published}"
            )
        axes, width = (
            self.transformer_config.rope_axes_dim,
            self.transformer_config.attention_head_dim,
        )
        if (
            len(axes) != 3
            or not all(isinstance(n, int) and n % 2 == 0 for n in axes)
            or sum(axes) != width
        ):
            raise UserError(
                f"{has} rope_axes_dim = {axes}; expected 3 even numbers with the sum {width}"
            )

    def notes(self, sampling: SamplingConfig) -> list[str]:
        """Return where the settings sample differently from the checkpoint's own pipeline.

        These are notes, not errors: the difference may be intended. A run without guidance takes
        half the forwards.
        """
        notes: list[str] = []
        for part, (cls, setting) in SAMPLED_AS.items():
            try:
                name, stated = self._stated(part)
            except (OSError, ValueError, RecursionError):
                lacks = "the checkpoint lacks scheduler/ or guider/"
                return [f"{lacks}: sampling.shift and sampling.guidance_scale are not compared"]
            if name != cls.__name__:
                own = ", ".join(f"{key} {value}" for key, value in stated.items() if setting in key)
                notes.append(
                    f"the checkpoint's {part} is {name} ({own}), and a run samples as by "
                    f"{cls.__name__}"
                )
                continue
            usual = {
                key: parameter.default
                for key, parameter in inspect.signature(cls).parameters.items()
            }
            value = getattr(sampling, setting)
            published = stated.pop(setting, usual[setting])
            if published != value:
                has = _number(published)
                if part == "scheduler":
                    has = f"shift {has}"
                elif published == 1:
                    has = f"{has} (off: a model distilled from guidance)"
                notes.append(
                    f"sampling.{setting} = {value:g}, and the checkpoint's {part} has {has}"
                )
            idle = () if stated.get("use_dynamic_shifting") else DYNAMIC
            odd = [
                key
                for key, value in usual.items()
                if key not in idle and stated.get(key, value) != value
            ]
            notes += [
                f"the checkpoint's {part} has {key} {_number(stated[key])}, and a run does not"
                for key in odd
            ]
        return notes

    def _stated(self, part: str) -> tuple[str, dict[str, Any]]:
        """Return the class of the scheduler or the guider, and its configuration; a guider that is
        off has scale 1.

        Raises:
            OSError: the checkpoint has none, or it states nothing.
        """
        cls, _ = SAMPLED_AS[part]
        found = stated_config(cls, reachable(self.path), part)
        if not found or not isinstance(found, dict):
            raise OSError(f"{part} states nothing")
        if not found.pop("enabled", True):
            found |= {"guidance_scale": 1.0}
        return str(found.pop("_class_name", cls.__name__)), found

    def latent_shape(self, sampling: SamplingConfig) -> tuple[int, int, int, int]:
        return (
            self.transformer_config.out_channels,
            (sampling.num_frames - 1) // self.vae.temporal_compression_ratio + 1,
            sampling.height // self.vae.spatial_compression_ratio,
            sampling.width // self.vae.spatial_compression_ratio,
        )

    def size_arguments(self, sampling: SamplingConfig) -> str:
        arguments = super().size_arguments(sampling)
        # the image has the shape
        return f"num_frames={sampling.num_frames}" if self.takes_images else arguments

    def attention_shape(self, sampling: SamplingConfig) -> tuple[int, int, int]:
        joint = self.tokens(self.latent_shape(sampling)) + self.prompt_tokens
        return joint, self.heads, self.transformer_config.attention_head_dim

    def cost(self, config: Config) -> Cost:
        transformer = self.transformer_config
        latents = self.latent_shape(config.sampling)
        tokens = self.tokens(latents)
        lengths = tokens, self.text_tokens, self.prompt_tokens - self.text_tokens
        return Cost(
            forward=forward_flops(transformer, *lengths),
            attention=attention_flops(transformer, *lengths),
            block_ends=block_end_flops(transformer, tokens),
            decode=decode_flops(self.vae.decoder, latents),
            decoder_weights=sum(p.numel() for p in self.vae.parameters()),
            **counted_memory(self, config),
        )

    def assumed_condition(self) -> TextEmbedding:
        config = self.transformer_config
        condition = TextEmbedding(
            text=torch.zeros(self.text_tokens, config.text_embed_dim),
            glyphs=torch.zeros(0, config.text_embed_2_dim),
        )
        if not self.takes_images:
            return condition
        return dataclasses.replace(
            condition,
            image=torch.zeros(self.image_tokens, config.image_embed_dim),
            frame=torch.zeros(config.out_channels, 1, 1, 1),  # of any size: it is small
        )

    def freeze_idle(self, network: nn.Module) -> None:
        freeze_dead_ends(network, takes_images=self.takes_images)

    def is_gate(self, name: str) -> bool:
        return ".linear." in name and "norm1" in name

    def policy(
        self, networks: Mapping[str, Any], *, dtype: torch.dtype, guidance_scale: float
    ) -> HunyuanVideo15Policy:
        return HunyuanVideo15Policy(
            networks["transformer"], dtype=dtype, guidance_scale=guidance_scale
        )

    def decoder(self, vae: Any) -> VideoDecoder:
        return VideoDecoder(vae)

    def load_encoder(
        self, dtype: torch.dtype, device: torch.device, sampling: SamplingConfig
    ) -> Encoder:
        if is_random(self.path):
            channels, _, *space = self.latent_shape(sampling)
            return encoder.random_encoder(
                self.transformer_config, (channels, 1, *space) if self.takes_images else None
            )
        size = (sampling.height, sampling.width) if self.takes_images else None
        return encoder.load_encoder(self.path, dtype, device, size)

    def encoder_version(self) -> str | None:
        parts = (*encoder.PARTS, *encoder.IMAGE_PARTS) if self.takes_images else encoder.PARTS
        if is_random(self.path):
            return ""
        return fingerprint(self.path, parts, encoder.ENCODING)


def _number(value: object) -> str:
    return (
        f"{value:g}"
        if isinstance(value, int | float) and not isinstance(value, bool)
        else repr(value)
    )


def forward_flops(
    config: TransformerConfig, tokens: int, text_tokens: int, image_tokens: int = 0
) -> float:
    """Return the FLOPs of one forward of one sample, with d = heads x head_dim:

        layers (8 d^2 + 4 r d^2) (N + L + 1) + layers 4 (N + L)^2 d  +  2 N d (in + out)  +  refiner
        +  image

    with mlp ratio r = 4 (so 24 d^2), N video and L text and image tokens, and one more token's
    worth for the modulation of both streams. The refiner has the same two terms over the text
    tokens; image tokens go through two layers. Not counted: time and text embedders, normalisation,
    element-wise work.
    """
    d = config["num_attention_heads"] * config["attention_head_dim"]
    linear = (8 + 4 * config["mlp_ratio"]) * d**2
    joint = tokens + text_tokens + image_tokens
    blocks = config["num_layers"] * (linear * (joint + 1) + 4 * joint**2 * d)
    refiner = config["num_refiner_layers"] * (linear * text_tokens + 4 * text_tokens**2 * d)
    patch = config["patch_size_t"] * config["patch_size"] ** 2
    embed = 2 * tokens * d * patch * (config["in_channels"] + config["out_channels"])
    project = 2 * text_tokens * d * config["text_embed_dim"]
    image = 0
    if image_tokens:
        width = config["image_embed_dim"]
        image = 2 * image_tokens * width * (width + d)
    return float(blocks + refiner + embed + project + image)


def attention_flops(
    config: TransformerConfig, tokens: int, text_tokens: int, image_tokens: int = 0
) -> float:
    """Return the part of `forward_flops` that is attention: the products Q K^T and P V, 4 S^2 d per
    layer."""
    d = config["num_attention_heads"] * config["attention_head_dim"]
    blocks = config["num_layers"] * (tokens + text_tokens + image_tokens) ** 2
    return float(4 * d * (blocks + config["num_refiner_layers"] * text_tokens**2))


def block_end_flops(config: TransformerConfig, tokens: int) -> float:
    """Return the part of `forward_flops` that is the second layer of the video tokens'
    feed-forwards: 2 r d^2 a token.

    The text's has no adapter by default, so that its recomputation is not skipped.
    """
    d = config["num_attention_heads"] * config["attention_head_dim"]
    return float(config["num_layers"] * 2 * config["mlp_ratio"] * d**2 * tokens)


@functools.lru_cache(maxsize=16)
@torch.no_grad()
def decode_flops(decoder: Any, latents: tuple[int, ...]) -> float:
    """Count the FLOPs of decoding one video, of latents (C, T, H, W), by a decoder on the meta
    device."""
    with FlopCounterMode(display=False) as counter:
        for _ in decode_frames(decoder, torch.empty(1, *latents, device="meta"), latents[1]):
            pass
    return float(counter.get_total_flops())
