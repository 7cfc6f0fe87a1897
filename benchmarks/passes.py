"""Passes of a transformer block over its tokens besides matmuls and attention: counted by dispatch,
without a GPU.

python -m sage_fast.benchmarks.passes            # print the table
python -m sage_fast.benchmarks.passes PAGE.md    # write it between the marks of a page, as in
                                                 # rollout-engine.md

A block of the published size runs on fake tensors of 480p and 81 frames. The unit is one read or
write of its video tokens. These are counts of bytes, not times.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import HunyuanVideo15Transformer3DModel
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sage_fast.algorithm.rates import MATMULS as OF_A_PROFILE
from sage_fast.config.schema import ModelConfig
from sage_fast.models.hunyuan15.forward import TextToVideoForward
from sage_fast.models.hunyuan15.spec import HunyuanVideo15
from sage_fast.models.lora.linear import padding_for
from sage_fast.models.trainable import make_trainable
from sage_fast.ops._calls import bytes_of_call
from sage_fast.ops._common import LIBRARY
from sage_fast.tools.harness import BURST_FLOPS

TOKENS, TEXT, WIDTH = 21 * 30 * 52, 200, 2048
"""Video and text tokens of a 480p video of 81 frames, and the width of the published transformer.
"""
UNIT = TOKENS * WIDTH * torch.bfloat16.itemsize
"""Bytes of one read or write of the video tokens in bfloat16: 134 MB."""
NARROW = padding_for(3 * ModelConfig().lora_rank, torch.bfloat16.itemsize)
"""Width of the widest factor of an adapter, that of queries, keys and values together."""
BANDWIDTH = 4.07e12
"""B/s of a copy on one H200: `2026-11-27-h200-adapter-rows.json` in benchmarks/results."""
ATTENTION = ((558e12, 538e12), (654e12, 609e12))
"""FLOP/s of attention forward and backward on one H200, cuDNN's and FlashAttention 4's:
`2026-11-27-h200-attention.json`."""
MARKS = (
    "<!-- passes: python -m sage_fast.benchmarks.passes docs/explanation/rollout-engine.md -->",
    "<!-- end of passes -->",
)

MOVE_NOTHING = {
    "view", "_unsafe_view", "transpose", "t", "slice", "split_with_sizes", "split", "unsqueeze",
    "squeeze", "expand",
    "unbind", "detach", "alias", "select", "permute", "as_strided", "new_empty", "empty",
    "empty_like", "new_zeros",
    "new_ones",
}  # fmt: skip
MATMULS = OF_A_PROFILE | {"linear": (0, 1)}


class Traffic(TorchDispatchMode):
    """Bytes that operators read and write, by operator.

    Attention and matmuls are not counted, except a matmul with a factor as narrow as an adapter,
    which does no more work than a pass over its rows. An operator of ours reads its arguments and
    writes its results, once each.

    Attributes:
        bytes: name of an operator -> bytes.
        strided: those of PyTorch's element-wise operators whose operands differ in shape or
            strides. A GPU runs them in a kernel that moves one element a thread.
        launches: calls that are counted in `bytes`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()
        self.strided: Counter[str] = Counter()
        self.launches = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if func.namespace == "prim" or name in MOVE_NOTHING or "scaled_dot_product" in name:
            return out
        if name in MATMULS:
            left, right = (args[position] for position in MATMULS[name])
            if min(*left.shape[-2:], *right.shape[-2:]) > NARROW:
                return out
            name = f"narrow {name}"
        # `out=` comes back as the result. An in-place operator reads and writes its tensor unless
        # it replaces it.
        read = (args, {key: value for key, value in (kwargs or {}).items() if key != "out"})
        if name in ("copy_", "fill_", "zero_"):
            read = (args[1:], kwargs)
        tensors = [t for t in tree_leaves((read, out)) if isinstance(t, Tensor)]
        if func.namespace == LIBRARY.ns:
            count = bytes_of_call(name, args, out)
        else:
            count = sum(t.nbytes for t in tensors)
        self.bytes[name] += count
        self.launches += 1
        aten = torch.ops.aten
        other = "narrow" in name or func.overloadpacket in (aten.sum, aten.cat, aten.stack)
        elementwise = func.namespace == "aten" and not other
        if elementwise and len({(t.shape, t.stride()) for t in tensors}) > 1:
            self.strided[name] += count
        return out

    @property
    def passes(self) -> dict[str, float]:
        """Traffic by operator, largest first; the unit is one read or write of the video tokens."""
        return {name: round(count / UNIT, 2) for name, count in self.bytes.most_common()}


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention as cuDNN lays out its result and gradients."""
    query, key, value = (t.transpose(1, 2) for t in (query, key, value))
    return torch.ops.aten._scaled_dot_product_cudnn_attention(query, key, value, None, True)[
        0
    ].transpose(1, 2)


def count_block(model: ModelConfig) -> tuple[Traffic, Traffic]:
    """Count the forward and the backward of a block that is neither first nor last, in bfloat16.

    Args:
        model: settings; all weights are trained in float32, under autocast.
    """
    adapter = model.trains_adapter
    # Neither computes anything. Autocast ignores meta tensors, and fake ones do not let peft
    # replace a layer.
    with torch.device("meta") if adapter else FakeTensorMode():
        transformer = HunyuanVideo15Transformer3DModel(task_type="t2v", num_layers=2)
        head = transformer.config.attention_head_dim
        if adapter:
            transformer.transformer_blocks.to(torch.bfloat16)
        make_trainable(HunyuanVideo15(), transformer, model)
        forward = TextToVideoForward(transformer, torch.bfloat16)
        forward.refresh()
        block = forward.blocks[0]
        trained = [p for p in block.parameters() if p.requires_grad]
        video, text = (torch.randn(1, n, WIDTH).bfloat16().requires_grad_() for n in (TOKENS, TEXT))
        modulation = torch.randn(1, 2, 6, WIDTH).bfloat16().requires_grad_(not adapter)
        rotary = torch.randn(TOKENS, head // 2, 2)
        # Gradients are returned, as inside a model, rather than accumulated in leaves.
        with torch.autocast("cpu", torch.bfloat16, enabled=not adapter), Traffic() as there:
            outs = block(video, text, modulation, rotary, attend, False)
        upstream = [torch.randn_like(out) for out in outs]
        wanted = [video, text, *trained]
        if modulation.requires_grad:
            wanted.append(modulation)
        with Traffic() as back:
            torch.autograd.grad(outs, wanted, upstream)
    return there, back


def share_of_limit(
    there: Traffic, back: Traffic, attention: Sequence[float], frozen: bool
) -> tuple[float, float]:
    """Return the time of a forward, and of a trained step, by arithmetic, in units of that at the
    ceiling.

    A trained step is a forward, its recomputation and the backward, which then finds the queries
    and keys that a backward alone computes again. Its matmuls run at `BURST_FLOPS`, its passes at
    `BANDWIDTH`, and attention at `attention` FLOP/s forward and backward.
    """
    tokens = TOKENS + TEXT
    linear, attended = 24.0 * WIDTH**2 * tokens, 4.0 * tokens**2 * WIDTH
    passes_ahead = sum(there.bytes.values()) / BANDWIDTH
    passes_behind = (sum(back.bytes.values()) - back.bytes["norm_rotate"]) / BANDWIDTH
    ahead = linear / BURST_FLOPS + attended / attention[0] + passes_ahead
    behind = linear * (1 if frozen else 2) / BURST_FLOPS + 2.5 * attended / attention[1]
    behind += passes_behind
    limit = (
        (linear + attended) / BURST_FLOPS,
        (linear * (3 if frozen else 4) + 4.5 * attended) / BURST_FLOPS,
    )
    return ahead / limit[0], (2 * ahead + behind) / limit[1]


def table() -> str:
    """Count both tunings; return Markdown."""
    lines = [
        "| a block, 480p, 81 frames | LoRA forward | LoRA backward | all weights forward | all "
        "weights backward |"
    ]
    lines.append("|---" * 5 + "|")
    models = ModelConfig(tuning="lora"), ModelConfig(tuning="full")
    counts = [count_block(model) for model in models]
    every = [traffic for pair in counts for traffic in pair]

    def row(name: str, values: Sequence[Any]) -> None:
        lines.append(f"| {name} | " + " | ".join(map(str, values)) + " |")

    names = sorted({n for traffic in every for n in traffic.bytes})
    names.sort(key=lambda n: -sum(traffic.bytes[n] for traffic in every))
    largest = [n for n in names if any(t.bytes[n] >= 0.5 * UNIT for t in every)]
    for name in largest:
        title = f"`{name.replace('narrow ', '')}`"
        if "narrow" in name:
            title += " with an adapter's factor"
        row(title, [f"{t.bytes[name] / UNIT:.1f}" if t.bytes[name] else "" for t in every])
    row(
        "all others",
        [f"{sum(b for n, b in t.bytes.items() if n not in largest) / UNIT:.1f}" for t in every],
    )
    row("**passes**", [f"**{sum(t.bytes.values()) / UNIT:.1f}**" for t in every])
    row("of these with strided operands, one element a thread",
        [f"{sum(t.strided.values()) / UNIT:.1f}" for t in every])  # fmt: skip
    row("launches", [t.launches for t in every])
    for attention in ATTENTION:
        shares = [
            share_of_limit(*pair, attention, model.trains_adapter)
            for model, pair in zip(models, counts)
        ]
        rates = "/".join(f"{rate / 1e12:.0f}" for rate in attention)
        row(f"of the limit, attention at {rates} TFLOP/s: forward, then trained step",
            [f"{share:.2f}" for pair in shares for share in pair])  # fmt: skip
    return "\n".join(lines)


def show(table: Callable[[], str], marks: tuple[str, str], description: str) -> None:
    """Print a table, or write it between the marks of the page that the command names."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("page", nargs="?", type=Path, help="Markdown file with the marks")
    page = parser.parse_args().page
    if page is None:
        print(table())
        return
    begin, end = marks
    before, rest = page.read_text(encoding="utf-8").split(begin)
    _, after = rest.split(end)
    page.write_text(f"{before}{begin}\n{table()}\n{end}{after}", encoding="utf-8")


if __name__ == "__main__":
    show(table, MARKS, (__doc__ or "").split("\n")[0])
