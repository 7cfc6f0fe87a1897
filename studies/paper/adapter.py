"""How strongly a bfloat16 model responds to a small adapter: one accumulation against peft's own
forward.

The model has eight layers of width 128; the rank is 16. The up-projections of all adapters are
drawn with standard deviation `size`. The change of the velocity, d, is compared with that of a
float32 model with the same weights, d32: the share is <d, d32> / |d32|^2. A share of 1 is faithful,
0 is no response. `ours` is one accumulation, `peft` is the adapters' own forward.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from sage_fast.eval.scores import t_quantile
from sage_fast.report.charts import COLORS, GREY
from studies.finding import Claim, Finding, Material, Verdict

if TYPE_CHECKING:
    from sage_fast.models.hunyuan15.policy import HunyuanVideo15Policy

SIZES, QUICK_SIZES = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 1e-2), (1e-4, 1e-3)
JUDGED = 1e-4
"""Size that the verdict uses: that of B's elements after the first updates at a learning rate of
1e-4."""

Shares = Mapping[tuple[float, str], tuple[float, float]]
"""(size, path) -> mean share and its standard error."""


@functools.cache
def instances() -> tuple[HunyuanVideo15Policy, HunyuanVideo15Policy]:
    """Return policies with the same weights in bfloat16 and in float32."""
    from sage_fast.config.schema import ModelConfig
    from sage_fast.models.hunyuan15.policy import HunyuanVideo15Policy
    from sage_fast.models.trainable import make_trainable
    from sage_fast.testbed.tiny_model import Testbed, TestbedTransformer

    policies = []
    for dtype in (torch.bfloat16, torch.float32):
        torch.manual_seed(0)
        transformer = TestbedTransformer(
            in_channels=33, out_channels=16, num_layers=8, num_attention_heads=8
        )
        for p in transformer.parameters():
            p.data = p.data.to(torch.bfloat16).to(dtype)
        make_trainable(Testbed(), transformer.eval(), ModelConfig(lora_rank=16, lora_alpha=16))
        policies.append(HunyuanVideo15Policy(transformer, dtype=dtype))
    return policies[0], policies[1]


@torch.no_grad()
def velocity(policy: HunyuanVideo15Policy, size: float, seed: int, own_forward: bool) -> Tensor:
    """Return the velocity, float64, with up-projections of this size."""
    from sage_fast.models.hunyuan15.conditioning import TextEmbedding
    from sage_fast.testbed.text_encoder import TEXT_EMBED_DIM

    generator = torch.Generator().manual_seed(seed)
    for name, p in policy.parameters().items():
        if "lora_B" in name:
            p.copy_(size * torch.randn(p.shape, generator=generator))
    x = torch.randn(4, 16, 5, 8, 8, generator=generator)
    words = TextEmbedding(
        text=torch.randn(7, TEXT_EMBED_DIM, generator=generator), glyphs=torch.zeros(0, 8)
    )
    conditioning = policy.condition(torch.full((len(x),), 0.6), [words] * len(x))
    if not own_forward:
        return policy.velocity(x, conditioning).double()
    for projection in policy.forward.fused_linears:
        projection.pad = 0
        projection._adapters = []
    return policy.forward(x.to(policy.dtype), conditioning, policy.attention).double()


def responses(sizes: Sequence[float], path: str, seeds: int) -> dict[float, tuple[float, float]]:
    """Return size -> mean share over the seeds and its standard error."""
    shares: dict[float, list[float]] = {size: [] for size in sizes}
    for seed in range(seeds):
        without = [velocity(policy, 0, seed, path == "peft") for policy in instances()]
        for size in sizes:
            change, exact = (
                velocity(policy, size, seed, path == "peft") - base
                for policy, base in zip(instances(), without)
            )
            shares[size].append(float((change * exact).sum() / exact.square().sum()))
    values = {size: torch.tensor(drawn) for size, drawn in shares.items()}
    return {
        size: (float(drawn.mean()), float(drawn.std()) / seeds**0.5)
        for size, drawn in values.items()
    }


def judge_responses(shares: Shares) -> Verdict:
    """Decide whether, at size JUDGED, one accumulation responds more than peft by three standard
    errors."""
    (ours, ours_error), (peft, peft_error) = shares[JUDGED, "ours"], shares[JUDGED, "peft"]
    sure = 3 * (ours_error**2 + peft_error**2) ** 0.5
    if ours - peft > sure:
        return "held"
    return "not held" if ours - peft < -sure else "not decidable"


def find_lora_response(material: Material) -> Finding:
    """Measure the responses of random weights, without training."""
    sizes, seeds = (QUICK_SIZES, 6) if material.quick else (SIZES, 24)
    paths = {path: responses(sizes, path, seeds) for path in ("ours", "peft")}
    shares = {(size, path): paths[path][size] for size in sizes for path in paths}

    text = (
        "Share of an adapter's float32 effect on the velocity that is left in bfloat16, by the "
        f"size of B's elements: mean and 95 % interval of {seeds} draws. Stock peft adds the "
        "adapter's output to a rounded one."
    )
    table = [["size", "one accumulation", "stock peft"]]
    for size in sizes:
        means = [
            (mean, t_quantile(seeds) * error)
            for mean, error in (shares[size, path] for path in paths)
        ]
        table.append([f"{size:g}", *(f"{mean:.2f} ± {half:.2f}" for mean, half in means)])
    rows = [
        {"size": size, "path": path, "share": share, "standard_error": error, "draws": seeds}
        for (size, path), (share, error) in shares.items()
    ]

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for color, path in zip(COLORS, ("ours", "peft")):
            mean, error = np.array([shares[size, path] for size in sizes]).T
            label = {"ours": "one accumulation", "peft": "stock peft"}[path]
            axes.errorbar(
                sizes,
                mean,
                t_quantile(seeds) * error,
                color=color,
                label=label,
                marker="o",
                markersize=4,
            )
        axes.axhline(1, color=GREY, linestyle="--", linewidth=1)
        axes.set_xscale("log")
        axes.set_xlabel("size of the elements of B")
        axes.set_ylabel("share of the float32 response")
        axes.legend(loc="lower right")

    return Finding(verdict=judge_responses(shares), text=text, draw=draw, rows=rows, table=table)


CLAIMS: tuple[Claim, ...] = (
    Claim(
        name="lora-response",
        title="What bfloat16 lets through of a young adapter",
        kind="beyond",
        source="",
        says=(
            "In bfloat16, LoRA with one float32 accumulation lets more of a young adapter through "
            "than stock peft."
        ),
        find=find_lora_response,
        size=(6.4, 3.4),
    ),
)
