"""Tables of docs/explanation/scaling.md: the plan's formulas, and CPU seconds at small sizes.

python -m benchmarks.scaling                  write the tables into docs/explanation/scaling.md
python -m benchmarks.scaling --measure FILE   first measure the small sizes on one thread and write them to FILE
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from sage_fast.algorithm.flops import training_flops
from sage_fast.config.loader import load
from sage_fast.config.schema import Config
from sage_fast.models.hunyuan15.conditioning import Inputs
from sage_fast.models.hunyuan15.cost import activation_bytes
from sage_fast.models.hunyuan15.policy import HunyuanVideo15Policy
from sage_fast.models.hunyuan15.spec import (
    HunyuanVideo15,
    attention_flops,
    block_end_flops,
    decode_flops,
    forward_flops,
)
from sage_fast.models.load import find_spec
from sage_fast.ops import implementation
from sage_fast.tools.harness import BURST_FLOPS
from sage_fast.tools.plan import plan, seconds_on_a_gpu
from sage_fast.util.environment import environment

REPOSITORY = Path(__file__).parent.parent
PAGE = REPOSITORY / "docs" / "explanation" / "scaling.md"
MEASURED = REPOSITORY / "benchmarks" / "results" / "2026-11-22-cpu-1-thread-scaling.json"
TEXT_TOKENS = HunyuanVideo15.text_tokens
ARCHITECTURE = {
    "num_attention_heads": 16, "attention_head_dim": 128, "num_layers": 54, "num_refiner_layers": 2, "mlp_ratio": 4.0,
    "patch_size": 1, "patch_size_t": 1, "in_channels": 65, "out_channels": 32, "text_embed_dim": 3584,
}  # fmt: skip
"""The published transformer; tests/test_scaling.py compares it with diffusers' own defaults."""
WIDTH, BF16 = 16 * 128, 2


# -- the cost of an iteration ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """Work of one iteration at a video size."""

    frames: int = 81
    height: int = 480
    width: int = 832
    samples: int = 32
    steps: int = 20
    trained: int = 20
    frozen_base: bool = True

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
            frozen_base=self.frozen_base,
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
    """Bytes a rank sends in one block's forward: queries, keys, values and outputs of its tokens, to the others."""
    return 4 * math.ceil(joint / size) * width * bytes_per_value * (size - 1) / size


def count_gathers(policy: HunyuanVideo15Policy) -> dict[str, tuple[int, int]]:
    """Count what ZeRO-3 gathers for one sample, by running the model: part -> all-gathers, elements.

    A unit is gathered for its forward, and again for its backward, with its recomputation. A rollout computes AdaLN
    once for all its steps; the anchor and training compute it for each transition.

    Args:
        policy: with unsharded weights of the activations' dtype, on any device (including meta).
    """
    calls: list[int] = []
    hooks = [
        unit.register_forward_hook(lambda unit, *_: calls.append(sum(p.numel() for p in unit.parameters())))
        for run in policy.sharded_units()
        for unit in run
    ]
    with policy.device, torch.no_grad():
        modulation, final = policy.forward.modulation(torch.zeros(1), policy.dtype)
        of_adaln = len(calls)
        context = torch.zeros(1, 1, modulation.shape[-1], dtype=policy.dtype)
        x = torch.zeros(1, policy.transformer.config.out_channels, 1, 1, 1, dtype=policy.dtype)
        policy.forward(x, Inputs(modulation=modulation, final=final, context=context), policy.attention)
    for hook in hooks:
        hook.remove()
    parts = {"rollout": calls[of_adaln:], "anchor": calls, "training": 2 * calls}
    return {part: (len(units), sum(units)) for part, units in parts.items()}


# -- the tables --------------------------------------------------------------------------------------------------------


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    lines.insert(1, "|---" * len(head) + "|")
    return "\n".join(lines)


def _seconds(value: float) -> str:
    return f"{value / 3600:.1f} h" if value >= 7200 else f"{value / 60:.1f} min" if value >= 100 else f"{value:.2g} s"


def sizes() -> str:
    """Table of the cost and memory of one sample, by frames and resolution."""
    rows = []
    for work in (
        Work(frames=17), Work(frames=49), Work(), Work(frames=121), Work(frames=241),
        Work(height=352, width=624), Work(height=720, width=1280), Work(frames=121, height=720, width=1280),
    ):  # fmt: skip
        kept = [
            activation_bytes("attention", ARCHITECTURE, math.ceil(work.joint / size), BF16, rank=64) for size in (1, 8)
        ]
        share = attention_flops(ARCHITECTURE, work.tokens, TEXT_TOKENS) / work.forward
        rows.append(
            [f"{work.frames} x {work.height} x {work.width}", f"{work.tokens:,}", f"{work.forward:.2e}", f"{share:.0%}",
             *map(_seconds, seconds_on_a_gpu(work.parts)),
             _seconds(work.decode / BURST_FLOPS),
             *(f"{size / 2**30:.1f} GiB" for size in kept)]
        )  # fmt: skip
    head = ["frames x height x width", "tokens", "FLOPs per forward", "attention share", "time per sample",
            "at the H200's rates", "time per decode", "activations", "activations, 8 GPUs a sample"]  # fmt: skip
    return _table(head, rows)


def overlap() -> str:
    """Table of what can be overlapped in a 480p iteration with four samples per GPU."""
    work = Work()
    iteration = 4 * work.of_a_sample / BURST_FLOPS
    decode = work.decode / BURST_FLOPS
    rows = [
        ["decode, during the next rollout or the anchor's forwards", "not done", f"{4 * decode / iteration:.1%}"],
        ["scoring of the last chunk, during the first updates", "not done", "at most the time to score one chunk"],
        ["rollout of the next iteration, during this one's updates", "not done: off-policy",
         f"at most {work.steps * work.forward / work.of_a_sample:.0%}"],
    ]  # fmt: skip
    return _table(["what overlaps with what", "status", "share of the iteration"], rows)


# -- measured at small size --------------------------------------------------------------------------------------------

SMALL = {
    "unchanged": {},
    "33 frames": {"sampling.num_frames": 33},
    "65 frames": {"sampling.num_frames": 65},
    "64 x 64 pixels": {"sampling.height": 64, "sampling.width": 64},
    "groups of 8": {"train.group_size": 8},
    "10 steps": {"sampling.steps": 10},
}


def small_config(given: dict[str, int]) -> Config:
    base = {"train.prompts_per_iteration": 2, "train.group_size": 4, "train.optimizer_steps": 1}
    settings = {key: str(value) for key, value in (base | given).items()}
    return load(REPOSITORY / "configs" / "recipes" / "paper.yaml", settings)


def measure(file: Path) -> None:
    """Write the CPU seconds of one thread for rollout, anchor and training on the testbed, at each size, to `file`.

    The minimum over iterations 1 to 3, after a warm-up. CPU seconds, since other processes do not add to them.
    """
    from sage_fast.loading import load_setup, resolve
    from sage_fast.trainer import Trainer

    torch.set_num_threads(1)
    rows = {}
    for name, given in SMALL.items():
        config = small_config(given)
        setup = load_setup(resolve(config))
        setup.encode()
        trainer = Trainer(
            setup.resolved, setup.model, setup.reward, setup.prompts, setup.embeddings, graphs=setup.graphs
        )
        trainer.iteration(0)
        seconds = []
        for index in range(1, 4):
            start = time.process_time()
            row = trainer.iteration(index)
            spent = time.process_time() - start
            scored = float(str(row["time/decode"])) + float(str(row["time/reward"]))
            seconds.append(spent * (1 - scored / float(str(row["time/total"]))))
        rows[name] = {"settings": given, "cpu_seconds": min(seconds)}
        print(name, rows[name])
    facts = environment(torch.device("cpu"), implementation(torch.device("cpu"))) | {"threads": 1}
    file.write_text(json.dumps({"environment": facts, "rows": rows}, indent=1) + "\n", encoding="utf-8")


@functools.cache
def small_flops(name: str) -> float:
    """FLOPs of rollout, anchor and training, from the plan."""
    config = small_config(SMALL[name])
    planned = plan(config, find_spec("testbed"))
    return sum(planned.flops[part] for part in ("rollout", "training", "anchor"))


def small() -> str:
    rows = json.loads(MEASURED.read_text(encoding="utf-8"))["rows"]
    base = "unchanged"
    return _table(
        ["testbed", "FLOPs of rollout, anchor and training", "by the formulas", "CPU seconds", "measured"],
        [
            [name, f"{small_flops(name):.2e}", f"{small_flops(name) / small_flops(base):.2f}x",
             f"{row['cpu_seconds']:.2f}", f"{row['cpu_seconds'] / rows[base]['cpu_seconds']:.2f}x"]
            for name, row in rows.items()
        ],
    )  # fmt: skip


TABLES: dict[str, Callable[[], str]] = {function.__name__: function for function in (sizes, overlap, small)}


def written(page: str) -> str:
    """Return the page with every table, between `<!-- table: NAME -->` and `<!-- end -->`, regenerated."""
    pattern = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.S)
    return pattern.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}\n{found[3]}", page)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", type=Path, metavar="FILE")
    options = parser.parse_args()
    if options.measure is not None:
        measure(options.measure)
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
