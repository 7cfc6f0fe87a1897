"""Passes of a Wan block over its tokens besides matmuls and attention, ours and diffusers': counted
by dispatch, without a GPU.

python -m sage_fast.benchmarks.wan_passes            # print the table
python -m sage_fast.benchmarks.wan_passes PAGE.md    # write it between the marks of a page, as in
                                                     # docs/how-to/wan.md

A block of Wan 2.2 TI2V's published size runs on meta tensors of 704 x 1280 and 121 frames, with a
LoRA of rank 64. The unit is one read or write of its video tokens. These are counts of bytes, not
times.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from diffusers.models.transformers import transformer_wan
from sage_fast.benchmarks.passes import Traffic, attend, show
from torch import Tensor

from sage_fast.config.schema import ModelConfig, SamplingConfig
from sage_fast.models.trainable import make_trainable
from sage_fast.models.wan.conditioning import TEXT_TOKENS
from sage_fast.models.wan.policy import WanPolicy
from sage_fast.models.wan.spec import Wan

SIZE = SamplingConfig(height=704, width=1280, num_frames=121)
BF16 = torch.bfloat16
MARKS = ("<!-- wan passes -->", "<!-- end of wan passes -->")
COLUMNS = {
    "ours": "ours",
    "stock": "diffusers, one timestep a sample",
    "pipeline": "diffusers, one a token, as its pipeline of Wan 2.2 TI2V",
}


def count(path: str) -> tuple[Traffic, Traffic]:
    """Count the forward and the backward of a block that is neither first nor last.

    Args:
        path: one of `COLUMNS`.
    """
    spec = Wan(Wan.published)
    tokens = spec.tokens(spec.latent_shape(SIZE))
    with torch.device("meta"):
        network = spec.meta("transformer")
        del network.blocks[2:]
        for name, p in network.blocks.named_parameters():
            if not set(name.split(".")) & {*network._keep_in_fp32_modules}:
                p.data = p.data.to(BF16)
        make_trainable(spec, network, ModelConfig())
        config = network.config
        width = config.num_attention_heads * config.attention_head_dim
        video = torch.empty(1, tokens, width, dtype=BF16, requires_grad=True)
        text = torch.empty(1, TEXT_TOKENS, width, dtype=BF16)
        if path == "ours":
            block, arguments = _ours(network, video, text)
        else:
            block, arguments = _diffusers(network, video, text, per_token=path == "pipeline")
        with (
            mock.patch.object(transformer_wan, "dispatch_attention_fn", _dispatched),
            mock.patch.object(torch.nn.functional, "rms_norm", _rms_norm),
        ):
            with Traffic() as there:
                out = block(*arguments)
            trained = [p for p in network.blocks[1].parameters() if p.requires_grad]
            with Traffic() as back:
                torch.autograd.grad(out, [video, *trained], torch.empty_like(out))
    return there, back


def _ours(
    network: Any, video: Tensor, text: Tensor
) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
    """Return our block and its arguments."""
    policy = WanPolicy(network, dtype=BF16)
    policy.refresh()
    head = network.config.attention_head_dim
    modulation = torch.empty(1, 6, video.shape[2])
    rotary = torch.empty(video.shape[1], head // 2, 2)
    return policy.forward.blocks[1], (video, text, modulation, rotary, attend)


def _diffusers(
    network: Any, video: Tensor, text: Tensor, *, per_token: bool
) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
    """Return diffusers' block and its arguments."""
    tokens, width = video.shape[1:]
    rows = (1, tokens, 6, width) if per_token else (1, 6, width)
    table = torch.empty(1, tokens, 1, network.config.attention_head_dim)
    return network.blocks[1], (video, text, torch.empty(rows, dtype=BF16), (table, table))


def _dispatched(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
    return attend(query, key, value)


def _rms_norm(x: Tensor, shape: Any, weight: Tensor, eps: float) -> Tensor:
    normed: Tensor = _RmsNorm.apply(x)
    return normed


class _RmsNorm(torch.autograd.Function):
    """What PyTorch's fused RMSNorm of a GPU reads and writes, which the meta device does not
    have."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.neg()  # reads one tensor and writes one

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad + x  # reads two tensors and writes one


def table() -> str:
    """Count all three; return Markdown."""
    unit = count_unit()
    lines = [
        "| a block, 704 x 1280, 121 frames, LoRA | forward | backward | launches |",
        "|---|---|---|---|",
    ]
    for path, title in COLUMNS.items():
        there, back = count(path)
        passes = [f"{sum(traffic.bytes.values()) / unit:.1f}" for traffic in (there, back)]
        lines.append(f"| {title} | {' | '.join(passes)} | {there.launches + back.launches} |")
    return "\n".join(lines)


def count_unit() -> int:
    """Return the bytes of one read or write of the video tokens in bfloat16."""
    spec = Wan(Wan.published)
    config = spec.transformer_config
    width = config.num_attention_heads * config.attention_head_dim
    return spec.tokens(spec.latent_shape(SIZE)) * width * BF16.itemsize


if __name__ == "__main__":
    show(table, MARKS, (__doc__ or "").split("\n")[0])
