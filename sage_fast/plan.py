"""What an iteration will cost, before it is run: `sage-fast train CONFIG --dry-run`.

The real architecture is built on the meta device (no memory, no weights); the rest are formulas, each checked by
tests/test_plan.py against a count made by PyTorch. FLOPs are two per multiply-add.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
from diffusers import HunyuanVideo15Transformer3DModel

from sage_fast.config import Config
from sage_fast.objective import uses_anchor, uses_velocity
from sage_fast.policy.hunyuan import add_lora, freeze_dead_ends
from sage_fast.testbed.model import TestbedTransformer
from sage_fast.trainer import configured_table, iteration_table, trained_steps

TEXT_TOKENS = 200
"""Assumed length of a prompt; the published encoder pads to 1000."""
H200_BF16_FLOPS = 790e12
"""Measured ceiling of a bf16 matrix product on one H200, the unit of the lower bounds."""

Architecture = Mapping[str, Any]


def forward_flops(architecture: Architecture, tokens: int, text_tokens: int) -> float:
    """FLOPs of one forward of one sample, d = heads x head_dim:

        layers (8 d^2 + 4 r d^2) (N + L + 1) + layers 4 (N + L)^2 d  +  2 N d (in + out)  +  refiner

    with mlp ratio r = 4 (so 24 d^2), N video and L text tokens, one more token's worth for the modulation of both
    streams, and the same two terms over the L text tokens alone for the refiner. Left out: time and text embedders,
    normalisation, elementwise work.
    """
    d = architecture["num_attention_heads"] * architecture["attention_head_dim"]
    linear = (8 + 4 * architecture["mlp_ratio"]) * d**2
    joint = tokens + text_tokens
    blocks = architecture["num_layers"] * (linear * (joint + 1) + 4 * joint**2 * d)
    refiner = architecture["num_refiner_layers"] * (linear * text_tokens + 4 * text_tokens**2 * d)
    patch = architecture["patch_size_t"] * architecture["patch_size"] ** 2
    embed = 2 * tokens * d * patch * (architecture["in_channels"] + architecture["out_channels"])
    project = 2 * text_tokens * d * architecture["text_embed_dim"]
    return float(blocks + refiner + embed + project)


def training_flops(forward: float, *, checkpointing: bool, frozen_base: bool) -> float:
    """Forward, its recomputation with checkpointing, and a backward.

    A backward costs two forwards: gradients in the inputs and in the weights. With a frozen base (LoRA) the second
    half is left out of the linear layers; attention still pays both, so 2 is an upper bound and 1 a lower one there.
    """
    return forward * (1 + checkpointing + (1 if frozen_base else 2))


def checkpointed_activation_bytes(architecture: Architecture, joint_tokens: int, bytes_per_value: int) -> int:
    """Saved by block-wise checkpointing: the inputs of every block."""
    d = architecture["num_attention_heads"] * architecture["attention_head_dim"]
    return architecture["num_layers"] * joint_tokens * d * bytes_per_value


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Sections of (label, value) lines, and the numbers behind them."""

    parameters: int
    trainable: int
    latent_shape: tuple[int, int, int, int]
    tokens: int
    samples: int
    forwards: dict[str, int]
    flops: dict[str, float]
    memory: dict[str, float]


def build_meta(config: Config, architecture: Architecture | None) -> HunyuanVideo15Transformer3DModel:
    """The configured transformer on the meta device, with its adapter; by default the published 8.3 B architecture."""
    settings = {k: v for k, v in (architecture or {}).items() if not k.startswith("_")}
    cls = TestbedTransformer if "text_embed_2_hidden_dim" in settings else HunyuanVideo15Transformer3DModel
    with torch.device("meta"):
        transformer = cls(**settings)
        model = config.model
        if model.tuning == "lora":
            add_lora(transformer, rank=model.lora_rank, alpha=model.lora_alpha, targets=model.lora_targets, seed=0)
        else:
            freeze_dead_ends(transformer)
    return transformer


def plan(config: Config, architecture: Architecture | None = None) -> Plan:
    """Sizes, FLOPs and memory of one iteration.

    Args:
        config: validated settings.
        architecture: the transformer's config.json; None for the published architecture.
    """
    transformer = build_meta(config, architecture)
    built = transformer.config
    parameters = [(p.numel(), p.requires_grad) for p in transformer.parameters()]
    trainable = sum(count for count, trained in parameters if trained)
    lora = sum(p.numel() for name, p in transformer.named_parameters() if ".lora_" in name)
    base = sum(count for count, _ in parameters) - lora

    s, train = config.sampling, config.train
    spatial = 8 if isinstance(transformer, TestbedTransformer) else 16
    latent = (built.out_channels, (s.num_frames - 1) // 4 + 1, s.height // spatial, s.width // spatial)
    tokens = math.prod(latent[1:]) // (built.patch_size_t * built.patch_size**2)
    joint = tokens + TEXT_TOKENS
    samples = train.prompts_per_iteration * train.group_size
    trained = len(trained_steps(iteration_table(configured_table(config), config, 0), config, 0))
    passes = 2 if s.guidance_scale != 1 else 1

    forwards = {
        "rollout": samples * s.steps * passes,
        "training": samples * trained * passes,
        "anchor": samples * trained * passes if uses_anchor(config.kl) else 0,
    }
    forward = forward_flops(built, tokens, TEXT_TOKENS)
    per_training = training_flops(
        forward, checkpointing=config.model.gradient_checkpointing, frozen_base=config.model.tuning == "lora"
    )
    flops = {
        "forward": forward,
        "rollout": forwards["rollout"] * forward,
        "training": forwards["training"] * per_training,
        "anchor": forwards["anchor"] * forward,
    }

    width = 2 if config.model.dtype == "bfloat16" else 4
    frozen_width = 4 if config.model.tuning == "full" else width
    numel = math.prod(latent)
    snapshots = int(uses_anchor(config.kl)) + int(train.ema_decay > 0)
    closed_form = uses_velocity(config.kl) and config.kl.velocity_term == "closed_form"
    velocities = int(uses_anchor(config.kl)) + int(closed_form)
    memory = {
        "frozen weights": float((base - (trainable if config.model.tuning == "full" else 0)) * frozen_width),
        "trained weights, gradients, AdamW": 16.0 * trainable,
        "anchor and EMA": 4.0 * trainable * snapshots,
        "trajectories (fp32 latents)": 4.0 * numel * samples * min(trained + 1, s.steps + 1),
        "stored velocities": float(width * numel * samples * trained * velocities),
    }
    if config.model.gradient_checkpointing:
        memory["checkpointed activations"] = float(
            train.batch_size * passes * checkpointed_activation_bytes(built, joint, width)
        )
    return Plan(
        parameters=base,
        trainable=trainable,
        latent_shape=latent,
        tokens=tokens,
        samples=samples,
        forwards=forwards,
        flops=flops,
        memory=memory,
    )


def format_plan(plan: Plan) -> str:
    """The plan for a terminal."""

    def seconds(flops: float) -> str:
        return (
            f"{flops / H200_BF16_FLOPS:,.1f} s" if flops >= H200_BF16_FLOPS / 10 else f"{flops / H200_BF16_FLOPS:.1e} s"
        )

    def size(count: float) -> str:
        for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
            if count >= scale:
                return f"{count / scale:,.2f} {unit}"
        return f"{count:.0f} B"

    total = sum(value for key, value in plan.flops.items() if key != "forward")
    lines = [
        "model",
        f"  {'parameters':<36}{plan.parameters / 1e9:.3f} B ({plan.parameters:,})",
        f"  {'trained parameters':<36}{plan.trainable / 1e6:,.2f} M ({plan.trainable:,})",
        f"  {'latents [C, T, H, W]':<36}{list(plan.latent_shape)}",
        f"  {'video tokens':<36}{plan.tokens:,} (+ {TEXT_TOKENS} text tokens assumed)",
        "",
        "one iteration, all ranks together",
        f"  {'samples':<36}{plan.samples:,}",
        *(f"  {'forwards: ' + part:<36}{count:,}" for part, count in plan.forwards.items()),
        "",
        f"FLOPs, and a lower bound of the time on one H200 ({H200_BF16_FLOPS / 1e12:.0f} TFLOP/s, a measured ceiling)",
        *(
            f"  {'one forward' if part == 'forward' else part:<36}{flops:<12.3g}{seconds(flops)}"
            for part, flops in plan.flops.items()
        ),
        f"  {'iteration':<36}{total:<12.3g}{seconds(total)}",
        "",
        "memory, samples of all ranks (weights and optimizer on each)",
        *(f"  {part:<36}{size(count)}" for part, count in plan.memory.items()),
        "  not counted: the activations of one block, the autoencoder, the text encoders, the rewards",
    ]
    return "\n".join(lines)
