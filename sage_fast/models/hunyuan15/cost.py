"""Memory of HunyuanVideo 1.5's activations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sage_fast.models.lora.linear import padding_for

# Activations that autograd keeps per token, in units of d plus the adapters' pad, for mlp ratio 4
# and the default LoRA targets; the same in float32 and bfloat16. tests/test_plan.py counts each:
# change them together with the block.
KEPT_BY_BLOCK, KEPT_BY_TRAINED_BLOCK = 10, 16
"""Kept per video token from a block's forward to its backward, in addition to the block's input and
attention's output: the normed rows of both matmuls and the video stream after attention (3), q, k
and v (3), the feed-forward before GELU (4). In addition the products with the adapters of four
matmuls are kept: one of three adapters, three of one. If all weights are trained, the feed-forward
after GELU and the operands of both gates are kept as well (4 + 2). Text tokens keep less, and are
few.
"""
ROTATED = 2
"""Queries and keys after rotation. A block that a checkpoint recomputes keeps them as well, for its
backward. Any other recomputes them alone, in attention's backward."""
GRADIENTS = 5
"""Gradients alive per token at the peak of one block's backward: that of the stream (1), and that
of the feed-forward's inner rows (4, plus padding for one adapter).

Attention's backward, with recomputed queries and keys, comes when the feed-forward's tensors are
gone, and takes less. Not counted is what an operator allocates within itself: PyTorch's kernels, on
the CPU and for ranks above 256, hold GELU of the inner rows again (4)."""

KEPT_BY_STEP = 14
"""Alive per token at the peak of a step without gradients, in a block's feed-forward: the block's
input and its normed rows, attention's output and its projection, the video stream after it and the
normed rows of that (6), the feed-forward before and after GELU (8)."""


def activation_bytes(
    mode: str,
    config: Mapping[str, Any],
    tokens: int,
    value_bytes: int,
    rank: int,
    batch_size: int = 1,
    passes: int = 1,
) -> float:
    """Return the peak bytes of a micro-batch's activations and their gradients, reached at the
    start of the backward.

    Args:
        mode: one of `MODES`.
        config: the transformer's config.
        tokens: tokens of the video and of its prompt.
        value_bytes: bytes of an activation value.
        rank: rank of the adapter; 0 if all weights are trained.
        batch_size: transitions per micro-batch.
        passes: 2 with guidance; the activations of both passes are kept, and their backwards run
            one after the other.
    """
    d = config["num_attention_heads"] * config["attention_head_dim"]
    stream = value_bytes * d  # a block's input, or its output, which is recomputed too
    attention = attention_output_bytes(config, value_bytes)
    pad, padding_of_three = (padding_for(adapters * rank, value_bytes) for adapters in (1, 3))
    inner = value_bytes * (
        (KEPT_BY_BLOCK if rank else KEPT_BY_TRAINED_BLOCK) * d + padding_of_three + 3 * pad
    )
    again = inner + value_bytes * ROTATED * d + stream
    kept, recomputed = {
        "none": (stream + attention + inner, 0),
        "attention": (stream + attention, again),
        "full": (stream, attention + again),
    }[mode]
    gradients = value_bytes * (GRADIENTS * d + pad)
    return float(
        batch_size * tokens * (passes * config["num_layers"] * kept + recomputed + gradients)
    )


def step_bytes(
    config: Mapping[str, Any],
    tokens: int,
    value_bytes: int,
    *,
    rank: int,
    batch_size: int,
    casts: bool,
) -> float:
    """Return the peak bytes of a denoising step; arguments as in `activation_bytes`.

    If it `casts` float32 weights, autocast keeps copies of the blocks' matrices in 16 bits, but for
    those of queries, keys and values, which are joined for each use.
    """
    d = config["num_attention_heads"] * config["attention_head_dim"]
    padding = sum(padding_for(adapters * rank, value_bytes) for adapters in (1, 1, 3))
    copies = 2 * config["num_layers"] * 18 * d**2 * casts
    return float(batch_size * tokens * value_bytes * (KEPT_BY_STEP * d + padding) + copies)


def condition_bytes(
    config: Mapping[str, Any],
    text_tokens: int,
    image_tokens: int,
    value_bytes: int,
    *,
    steps: int,
    passes: int,
    frame: tuple[int, ...] = (),
) -> tuple[float, float]:
    """Return the bytes of a rollout's conditions, without the prompt's text tokens, and of these.

    The text tokens of the second pass, with guidance, count as the same for all prompts. Images all
    have one size, and are the same at every step.

    Args:
        frame: (H, W) of the latents of an image.
    """
    d = config["num_attention_heads"] * config["attention_head_dim"]
    text = float(value_bytes * steps * text_tokens * d)
    modulation = value_bytes * steps * (12 * config["num_layers"] + 2) * d
    latents = config["out_channels"] * math.prod(frame) if image_tokens else 0
    image = value_bytes * (image_tokens * d + latents)
    return passes * (modulation + image) + (passes - 1) * text, text


def attention_output_bytes(config: Mapping[str, Any], value_bytes: int) -> int:
    """Return the bytes of attention's output per token and block: the values, and a float32
    log-sum-exp per head."""
    heads = config["num_attention_heads"]
    return heads * (config["attention_head_dim"] * value_bytes + 4)
