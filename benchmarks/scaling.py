"""Tables of docs/explanation/scaling.md, by the plan's formulas; `python -m benchmarks.scaling`
writes them there."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Sequence
from pathlib import Path

import torch

from sage_fast.algorithm.flops import training_flops
from sage_fast.config.schema import ModelConfig
from sage_fast.models.cost import Activations
from sage_fast.models.hunyuan15.conditioning import Inputs
from sage_fast.models.hunyuan15.policy import HunyuanVideo15Policy
from sage_fast.models.hunyuan15.spec import (
    HunyuanVideo15,
    attention_flops,
    block_end_flops,
    decode_flops,
    forward_flops,
)
from sage_fast.tools.harness import BURST_FLOPS
from sage_fast.tools.plan import seconds_on_a_gpu

REPOSITORY = Path(__file__).parent.parent
PAGE = REPOSITORY / "docs" / "explanation" / "scaling.md"
TEXT_TOKENS = HunyuanVideo15.text_tokens
ARCHITECTURE = {
    "num_attention_heads": 16, "attention_head_dim": 128, "num_layers": 54, "num_refiner_layers": 2,
    "mlp_ratio": 4.0,
    "patch_size": 1, "patch_size_t": 1, "in_channels": 65, "out_channels": 32,
    "text_embed_dim": 3584,
}  # fmt: skip
"""The published transformer; tests/test_scaling.py compares it with diffusers' own defaults."""
WIDTH, BF16 = 16 * 128, 2


# -- the cost of an iteration ----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """Work of one iteration at a video size."""

    frames: int = 81
    height: int = 480
    width: int = 832
    samples: int = 32
    steps: int = 20
    trained: int = 20
    trains_adapter: bool = True

    @property
    def latents(self) -> tuple[int, int, int, int]:
        return 32, (self.frames - 1) // 4 + 1, self.height // 16, self.width // 16

    @property
    def tokens(self) -> int:
        return math.prod(self.latents[1:])

    @property
    def joint(self) -> int:
        return self.tokens + TEXT_TOKENS

    @property
    def forward(self) -> float:
        """FLOPs of one forward."""
        return forward_flops(ARCHITECTURE, self.tokens, TEXT_TOKENS)

    @property
    def training(self) -> float:
        """FLOPs of training on one transition, with checkpointing `attention`."""
        attention = attention_flops(ARCHITECTURE, self.tokens, TEXT_TOKENS)
        return training_flops(
            self.forward,
            attention,
            checkpointing="attention",
            trains_adapter=self.trains_adapter,
            block_ends=block_end_flops(ARCHITECTURE, self.tokens),
        )

    @property
    def decode(self) -> float:
        return _decode_flops(self.latents)

    @property
    def parts(self) -> dict[str, float]:
        """Part -> FLOPs for one sample."""
        return {
            "rollout": self.steps * self.forward,
            "anchor": self.trained * self.forward,
            "training": self.trained * self.training,
        }

    @property
    def of_a_sample(self) -> float:
        """FLOPs of rollout, anchor and training for one sample."""
        return sum(self.parts.values())


@functools.cache
def _decode_flops(latents: tuple[int, int, int, int]) -> float:
    return decode_flops(_autoencoder().decoder, latents)


@functools.cache
def _autoencoder() -> torch.nn.Module:
    return HunyuanVideo15().vae


def exchange_bytes(joint: int, size: int, width: int = WIDTH, bytes_per_value: int = BF16) -> float:
    """Bytes a rank sends in one block's forward: queries, keys, values and outputs of its tokens,
    to the others."""
    return 4 * math.ceil(joint / size) * width * bytes_per_value * (size - 1) / size


def count_gathers(policy: HunyuanVideo15Policy) -> dict[str, tuple[int, int]]:
    """Count what ZeRO-3 gathers for one sample, by running the model: part -> all-gathers,
    elements.

    A unit is gathered for its forward, and again for its backward, with its recomputation. A
    rollout computes AdaLN once for all its steps; the anchor and training compute it for each
    transition.

    Args:
        policy: with unsharded weights of the activations' dtype, on any device (including meta).
    """
    calls: list[int] = []
    hooks = [
        unit.register_forward_hook(
            lambda unit, *_: calls.append(sum(p.numel() for p in unit.parameters()))
        )
        for run in policy.sharded_units()
        for unit in run
    ]
    with policy.device, torch.no_grad():
        modulation, final = policy.forward.modulation(torch.zeros(1), policy.dtype)
        of_adaln = len(calls)
        context = torch.zeros(1, 1, modulation.shape[-1], dtype=policy.dtype)
        x = torch.zeros(1, policy.transformer.config.out_channels, 1, 1, 1, dtype=policy.dtype)
        policy.forward(
            x, Inputs(modulation=modulation, final=final, context=context), policy.attention
        )
    for hook in hooks:
        hook.remove()
    parts = {"rollout": calls[of_adaln:], "anchor": calls, "training": 2 * calls}
    return {part: (len(units), sum(units)) for part, units in parts.items()}


# -- the tables ------------------------------------------------------------------------------------


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    lines.insert(1, "|---" * len(head) + "|")
    return "\n".join(lines)


def _seconds(value: float) -> str:
    return (
        f"{value / 3600:.1f} h"
        if value >= 7200
        else f"{value / 60:.1f} min"
        if value >= 100
        else f"{value:.2g} s"
    )


def sizes() -> str:
    """Table of the cost and memory of one sample, by frames and resolution."""
    rows = []
    for work in (
        Work(frames=17), Work(frames=49), Work(), Work(frames=121), Work(frames=241),
        Work(height=352, width=624), Work(height=720, width=1280), Work(frames=121, height=720,
            width=1280),
    ):  # fmt: skip
        kept = []
        for size in (1, 8):
            model = ModelConfig(lora_rank=64, sequence_parallel=size)
            kept.append(Activations(HunyuanVideo15(), model, work.latents)["attention"])
        share = attention_flops(ARCHITECTURE, work.tokens, TEXT_TOKENS) / work.forward
        rows.append(
            [f"{work.frames} x {work.height} x {work.width}", f"{work.tokens:,}",
             f"{work.forward:.2e}", f"{share:.0%}",
             *map(_seconds, seconds_on_a_gpu(work.parts)),
             _seconds(work.decode / BURST_FLOPS),
             *(f"{size / 2**30:.1f} GiB" for size in kept)]
        )  # fmt: skip
    head = ["frames x height x width", "tokens", "FLOPs per forward", "attention share",
        "time per sample",
            "at the H200's rates", "time per decode", "activations",
            "activations, 8 GPUs a sample"]  # fmt: skip
    return _table(head, rows)


TABLES = {"sizes": sizes}


def written(page: str) -> str:
    """Return the page with every table, between `<!-- table: NAME -->` and `<!-- end -->`,
    regenerated."""
    pattern = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.S)
    return pattern.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}\n{found[3]}", page)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
