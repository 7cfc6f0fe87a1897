"""What an iteration will cost, before it is run: `sage-fast train CONFIG --dry-run`.

The real architecture is built on the meta device (no memory, no weights); the rest are formulas, each checked by
tests/test_plan.py against a count made by PyTorch. FLOPs are two per multiply-add.
"""

from __future__ import annotations

import dataclasses
import math
import textwrap
from collections.abc import Mapping
from typing import Any

import torch
from diffusers import AutoencoderKLHunyuanVideo15, HunyuanVideo15Transformer3DModel

from sage_fast.config import Config
from sage_fast.engine.memory import held_bytes
from sage_fast.environment import format_bytes
from sage_fast.measure.harness import H200_BF16_FLOPS
from sage_fast.models.checkpointing import MODES, activation_bytes
from sage_fast.models.hunyuan15.policy import add_lora, freeze_dead_ends
from sage_fast.models.load import TEXT_TOKENS, check_path, transformer_config, vae_config
from sage_fast.models.sequence import check_heads
from sage_fast.models.testbed.model import TestbedTransformer, tiny_vae
from sage_fast.objective import stores_rollout_velocities, strategy_of, surrogate_of
from sage_fast.rollout.schedule import (
    check_trainable,
    configured_table,
    iteration_table,
    position_steps,
    share_of,
    trained_steps,
)
from sage_fast.rollout.trajectories import trajectory_bytes

TESTBED_TEXT_TOKENS = 7
"""Length of every prompt of the testbed."""

Architecture = Mapping[str, Any]


def forward_flops(architecture: Architecture, tokens: int, text_tokens: int) -> float:
    """FLOPs of one forward of one sample, d = heads x head_dim:

        layers (8 d^2 + 4 r d^2) (N + L + 1) + layers 4 (N + L)^2 d  +  2 N d (in + out)  +  refiner

    with mlp ratio r = 4 (so 24 d^2), N video and L text tokens, one more token's worth for the modulation of both
    streams, and the same two terms over the L text tokens for the refiner. Not counted: time and text embedders,
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


def attention_flops(architecture: Architecture, tokens: int, text_tokens: int) -> float:
    """The part of `forward_flops` that is attention: the products Q K^T and P V, 4 S^2 d a layer."""
    d = architecture["num_attention_heads"] * architecture["attention_head_dim"]
    blocks = architecture["num_layers"] * (tokens + text_tokens) ** 2
    return float(4 * d * (blocks + architecture["num_refiner_layers"] * text_tokens**2))


def training_flops(forward: float, attention: float, *, checkpointing: str, frozen_base: bool) -> float:
    """Forward, its recomputation with checkpointing, and a backward.

        linear x (1 + [recomputed] + (1 if frozen_base else 2))  +  attention x (1 + [recomputed] + 2.5)

    Checkpointing `full` recomputes both, `attention` the linear layers, `none` neither.

    A linear layer's backward is one product for the gradient in its input and, unless the base is frozen (LoRA), one
    for that in its weight. Attention's is five products against two, since fused kernels recompute the scores. The
    adapter's own products are not counted: about r / d of the linear part.
    """
    linear = forward - attention
    again = checkpointing != "none", checkpointing == "full"
    return linear * (1 + again[0] + (1 if frozen_base else 2)) + attention * (1 + again[1] + 2.5)


def decode_flops(decoder: Any, latents: tuple[int, ...]) -> float:
    """FLOPs of decoding one video: two per weight of a convolution and place where it is applied, and attention of each
    frame to itself and all earlier ones, 2 T (T + 1) (H W)^2 C.

    Args:
        decoder: a `HunyuanVideo15Decoder3D`, on the meta device too.
        latents: (C, T, H, W).
    """
    _, t, h, w = latents

    def conv(module: Any) -> float:
        return 2.0 * getattr(module, "conv", module).weight.numel() * t * h * w

    def residual(block: Any) -> float:
        shortcut = conv(block.conv_shortcut) if block.conv_shortcut is not None else 0.0
        return conv(block.conv1) + conv(block.conv2) + shortcut

    middle = decoder.mid_block
    flops = conv(decoder.conv_in) + sum(residual(block) for block in middle.resnets)
    for attention in middle.attentions:
        flops += sum(conv(getattr(attention, name)) for name in ("to_q", "to_k", "to_v", "proj_out"))
        flops += 2.0 * t * (t + 1) * (h * w) ** 2 * attention.to_q.out_channels
    for block in decoder.up_blocks:
        flops += sum(residual(resnet) for resnet in block.resnets)
        for upsampler in block.upsamplers or ():
            flops += conv(upsampler.conv)
            t, h, w = 2 * t - 1 if upsampler.add_temporal_upsample else t, 2 * h, 2 * w
    return flops + conv(decoder.conv_out)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The numbers that `format_plan` prints.

    Attributes:
        parameters: of the model without its adapter.
        trainable: of them, or of the adapter.
        latent_shape: (C, T, H, W).
        tokens: of one video.
        text_tokens: assumed of a prompt.
        ranks: GPUs the iteration is spread over.
        samples: of an iteration, all ranks together.
        trained_steps: transitions trained of each sample.
        forwards: part -> forwards of one sample in an iteration, all ranks together; guidance counts twice. None of the
            decode.
        flops: part -> FLOPs in an iteration, all ranks together; `forward` is one forward of one sample.
        memory: part -> bytes on each GPU while it trains.
        other_memory: what is not held at that time, or in host memory, or would be with another setting of
            checkpointing.
        engine: `train.engine`.
    """

    parameters: int
    trainable: int
    latent_shape: tuple[int, int, int, int]
    tokens: int
    text_tokens: int
    ranks: int
    samples: int
    trained_steps: int
    forwards: dict[str, int]
    flops: dict[str, float]
    memory: dict[str, float]
    other_memory: dict[str, float]
    engine: str


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


def build_meta_vae(autoencoder: Architecture | None, testbed: bool) -> AutoencoderKLHunyuanVideo15:
    """The autoencoder on the meta device; by default the published one, or the testbed's."""
    settings = {k: v for k, v in (autoencoder or {}).items() if not k.startswith("_")}
    with torch.device("meta"):
        return tiny_vae() if testbed and not settings else AutoencoderKLHunyuanVideo15(**settings)


def plan(
    config: Config,
    architecture: Architecture | None = None,
    autoencoder: Architecture | None = None,
    *,
    ranks: int = 1,
) -> Plan:
    """Sizes, FLOPs and memory of one iteration.

    Args:
        config: validated settings.
        architecture: the transformer's config.json; None for the published architecture.
        autoencoder: the autoencoder's config.json, likewise.
        ranks: GPUs; samples are spread over them (`model.sequence_parallel` of them share theirs), and of weights and
            optimizer what `train.engine` shares out.
    """
    transformer = build_meta(config, architecture)
    built = transformer.config
    trainable = sum(p.numel() for p in transformer.parameters() if p.requires_grad)
    base = sum(p.numel() for name, p in transformer.named_parameters() if ".lora_" not in name)

    s, train = config.sampling, config.train
    testbed = isinstance(transformer, TestbedTransformer)
    vae = build_meta_vae(autoencoder, testbed)
    text_tokens = TESTBED_TEXT_TOKENS if testbed else TEXT_TOKENS
    spatial, temporal = vae.spatial_compression_ratio, vae.temporal_compression_ratio
    latent = (built.out_channels, (s.num_frames - 1) // temporal + 1, s.height // spatial, s.width // spatial)
    tokens = math.prod(latent[1:]) // (built.patch_size_t * built.patch_size**2)
    joint = tokens + text_tokens
    samples = train.prompts_per_iteration * train.group_size
    steps = trained_steps(iteration_table(configured_table(config), config, 0), config, 0)
    trained, anchored = len(steps), len(position_steps(config, steps, 0))
    passes = 2 if s.guidance_scale != 1 else 1
    process = surrogate_of(config.objective).process
    scored = trained * (not process.scores_rollout and stores_rollout_velocities(config))

    forwards = {
        "rollout": samples * s.steps * passes,
        "training": samples * trained * passes,
        "anchor": samples * (anchored * (strategy_of(config.kl).anchor is not None) + scored) * passes,
    }
    forward = forward_flops(built, tokens, text_tokens)
    asked = config.model.gradient_checkpointing
    mode = "full" if asked == "auto" else asked  # what is free is known where it is run
    per_training = training_flops(
        forward,
        attention_flops(built, tokens, text_tokens),
        checkpointing=mode,
        frozen_base=config.model.tuning == "lora",
    )
    flops = {
        "forward": forward,
        "rollout": forwards["rollout"] * forward,
        "training": forwards["training"] * per_training,
        "anchor": forwards["anchor"] * forward,
        "decode": samples * decode_flops(vae.decoder, latent),
    }

    width = 2 if config.model.dtype == "bfloat16" else 4
    sharing = config.model.sequence_parallel
    check_heads(sharing, built.num_attention_heads)
    mine = len(share_of(samples, ranks // sharing, 0))
    states, velocities = trajectory_bytes(config, math.prod(latent), mine)
    held = held_bytes(config, transformer, ranks, mode)
    memory = {
        **held.weights,
        **held.training,
        "autoencoder": float(width * sum(p.numel() for p in vae.parameters())),
    }
    trajectories = {"trajectories (fp32 latents)": float(states), "stored velocities": float(velocities)}
    if s.offload_trajectories:
        host = {f"{part}, pinned host memory": size for part, size in trajectories.items()}
    else:
        memory, host = memory | trajectories, {}
    host |= {f"{part}, host memory": size for part, size in held.host.items()}
    rank = config.model.lora_rank if config.model.tuning == "lora" else 0
    activations = {
        name: activation_bytes(
            name, built, -(-joint // sharing), width, rank=rank, batch_size=train.batch_size, passes=passes
        )
        for name in MODES
    }
    memory[f"activations, checkpointing {asked}{', as full' if asked == 'auto' else ''}"] = activations.pop(mode)
    chunk = min(s.batch_size, mine)  # scored before the next one is decoded
    videos = {"decoded videos (during decode and reward)": 12.0 * chunk * s.num_frames * s.height * s.width}
    other = {f"activations, checkpointing {name}": size for name, size in activations.items()} | videos | host
    return Plan(
        parameters=base,
        trainable=trainable,
        latent_shape=latent,
        tokens=tokens,
        text_tokens=text_tokens,
        ranks=ranks,
        samples=samples,
        trained_steps=trained,
        forwards=forwards,
        flops=flops,
        memory=memory,
        other_memory=other,
        engine=config.train.engine,
    )


def format_plan(plan: Plan) -> str:
    """The plan for a terminal."""

    def line(label: str, *cells: str) -> str:
        return f"  {label:<41}{''.join(f'{cell:>12}' for cell in cells)}"

    def work(label: str, count: int, flops: float) -> str:
        # Of the GPU that has the most samples.
        share = 1 if label == "one forward of one sample" else len(share_of(plan.samples, plan.ranks, 0)) / plan.samples
        return line(label, f"{count:,}" if count else "", f"{flops:.3g}", _duration(flops * share))

    parts = {part: flops for part, flops in plan.flops.items() if part != "forward"}
    gpus = f"{plan.ranks} GPU{'s' * (plan.ranks > 1)}"
    lines = [
        "model",
        line("parameters", _count(plan.parameters)),
        line("trained parameters", _count(plan.trainable)),
        line("latents C x T x H x W", " x ".join(map(str, plan.latent_shape))),
        line("tokens of a video", f"{plan.tokens:,}"),
        "",
        f"one iteration on {gpus}: {plan.samples:,} samples, {plan.trained_steps} trained steps of each",
        line("", "forwards", "FLOPs", "at least"),
        work("one forward of one sample", 0, plan.flops["forward"]),
        *(work(part, plan.forwards.get(part, 0), flops) for part, flops in parts.items()),
        work("together", sum(plan.forwards.values()), sum(parts.values())),
        textwrap.fill(
            f"The time is a lower bound: every FLOP at {H200_BF16_FLOPS / 1e12:.0f} TFLOP/s (bf16, measured on an "
            f"H200), with {plan.text_tokens} text tokens a prompt. Training holds the backward, and the recomputation "
            "with checkpointing. The anchor is free in the iteration after its refresh. Not counted: rewards.",
            80,
            initial_indent="  ",
            subsequent_indent="  ",
        ),
        "",
        f"memory on each of {gpus} while it trains, engine {plan.engine}",
        *(line(part, format_bytes(count)) for part, count in plan.memory.items()),
        line("together", format_bytes(sum(plan.memory.values()))),
        "  Not counted: text encoders, rewards, fragmentation.",
        "",
        "for comparison",
        *(line(part, format_bytes(count)) for part, count in plan.other_memory.items()),
    ]
    return "\n".join(text.rstrip() for text in lines)


def _count(count: int) -> str:
    """A count with its short form, such as `8.33 B = 8,326,608,160`."""
    unit, scale = ("B", 1e9) if count >= 1e9 else ("M", 1e6) if count >= 1e6 else ("k", 1e3)
    return f"{count / scale:.3g} {unit} = {count:,}"


def _duration(flops: float) -> str:
    """Time of `flops` at the measured ceiling."""
    seconds = flops / H200_BF16_FLOPS
    for unit, scale in (("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= 2 * scale or unit == "us":
            return f"{seconds / scale:.3g} {unit}"
    raise AssertionError


def dry_run(config: Config, ranks: int) -> str:
    """The plan of a run on so many ranks, in words.

    Raises:
        UserError: the settings make it impossible, or `model.path` is no checkpoint.
    """
    path = config.model.path
    check_path(path)
    check_trainable(config, ranks)
    return format_plan(plan(config, transformer_config(path), vae_config(path), ranks=ranks))
