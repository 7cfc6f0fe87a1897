"""Tables of docs/explanation/scaling.md: the plan's formulas, a communication model, CPU seconds at small sizes.

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
from typing import cast

import torch

from sage_fast.algorithm.flops import training_flops
from sage_fast.config.loader import load
from sage_fast.config.schema import Config, ModelConfig
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
from sage_fast.models.load import find_spec, meta_policy
from sage_fast.ops import implementation
from sage_fast.parallel import NODE
from sage_fast.tools.harness import H200_BF16_FLOPS
from sage_fast.tools.links import IN_NODE, Ring
from sage_fast.tools.plan import plan
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

ALL_TO_ALL = 20e-6
"""Seconds of an empty all-to-all within a node: an assumption, as the links of sage_fast/tools/links.py are."""


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
    def of_a_sample(self) -> float:
        """FLOPs of rollout, anchor and training for one sample."""
        return (self.steps + self.trained) * self.forward + self.trained * self.training


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
        x = torch.zeros(1, policy.latent_channels, 1, 1, 1, dtype=policy.dtype)
        policy.forward(x, Inputs(modulation=modulation, final=final, context=context, mask=None))
    for hook in hooks:
        hook.remove()
    parts = {"rollout": calls[of_adaln:], "anchor": calls, "training": 2 * calls}
    return {part: (len(units), sum(units)) for part, units in parts.items()}


@functools.cache
def published_gathers() -> dict[str, tuple[int, int]]:
    policy = meta_policy(HunyuanVideo15(), ModelConfig(tuning="full", dtype="float32"))
    return count_gathers(cast(HunyuanVideo15Policy, policy))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """Seconds of an iteration on `gpus`: kernels run at the ceiling, and the only waits are those modelled here.

    Attributes:
        work: the iteration.
        gpus: number of GPUs.
        sharing: `model.sequence_parallel`.
        sharded: ranks over which ZeRO-3 shards a copy of weights, gradients and optimizer; 1: not sharded.
        trained_bytes: size of the LoRA's gradients, in float32.
    """

    work: Work
    gpus: int
    sharing: int = 1
    sharded: int = 1
    trained_bytes: float = 4 * 184e6

    @property
    def groups(self) -> int:
        return self.gpus // self.sharing

    @property
    def mine(self) -> int:
        """Samples of the largest group."""
        return -(-self.work.samples // self.groups)

    @property
    def ideal(self) -> float:
        """Seconds if all GPUs shared all FLOPs evenly and sent nothing."""
        return self.work.samples * (self.work.of_a_sample + self.work.decode) / H200_BF16_FLOPS / self.gpus

    @property
    def compute(self) -> float:
        padded = math.ceil(self.work.joint / self.sharing) * self.sharing / self.work.joint
        transformer = self.mine * self.work.of_a_sample * padded / self.sharing
        decodes = -(-self.mine // self.sharing) * self.work.decode  # in full: a concurrent decode slows the rollout
        return (transformer + decodes) / H200_BF16_FLOPS

    @property
    def passes(self) -> int:
        """Passes of a sample that exchange data; a recomputation and a backward count as one each."""
        return self.work.steps + self.work.trained + 3 * self.work.trained

    @property
    def exchanges(self) -> float:
        """Seconds of the sequence group's all-to-alls."""
        if self.sharing == 1:
            return 0.0
        each = exchange_bytes(self.work.joint, self.sharing) / IN_NODE + 4 * ALL_TO_ALL
        return self.mine * self.passes * ARCHITECTURE["num_layers"] * each

    @property
    def gradients(self) -> float:
        """Seconds of one optimizer step's all-reduce: of the LoRA over all GPUs, or of shards over their copies."""
        if self.sharded > 1:
            return 2 * self.copies.seconds(self.shard_gradients)
        return 2 * Ring(ranks=self.gpus).seconds(self.trained_bytes)

    @property
    def copies(self) -> Ring:
        """The ranks with the same shards, one in each node."""
        return Ring(ranks=self.gpus // self.sharded, per_node=1)

    @property
    def shard_gradients(self) -> float:
        """Bytes of the gradients of a rank's shards, in float32."""
        return 4 * published_gathers()["anchor"][1] / self.sharded

    def sharded_part(self, part: str) -> tuple[int, int, float]:
        """ZeRO-3's all-gathers and reduce-scatters in a part of `count_gathers`, and the bytes of all of them.

        Weights are gathered in bf16. Training reduces the gradients of what the anchor gathers, in float32.
        """
        count, elements = published_gathers()[part]
        reductions, gradients = published_gathers()["anchor"] if part == "training" else (0, 0)
        return count, reductions, float(BF16 * elements + 4 * gradients)

    def seconds_of(self, part: str) -> float:
        """Seconds of `sharded_part`."""
        gathers, reductions, size = self.sharded_part(part)
        return Ring(ranks=self.sharded).seconds(size, gathers + reductions)

    def exposed(self, part: str) -> float:
        """Seconds of `sharded_part` that no computation can hide: the first collective, and what takes longer."""
        flops = self.work.training if part == "training" else self.work.forward
        seconds, (count, reductions, _) = self.seconds_of(part), self.sharded_part(part)
        return max(seconds - flops / H200_BF16_FLOPS, seconds / (count + reductions))

    def gathers(self, seconds: Callable[[str], float]) -> float:
        """Seconds of ZeRO-3's collectives, given those of a part. Not counted: those of AdaLN in a rollout."""
        if self.sharded == 1:
            return 0.0
        times = {"rollout": self.work.steps, "anchor": self.work.trained, "training": self.work.trained}
        return self.mine * sum(count * seconds(part) for part, count in times.items())

    def efficiency(self, *, prefetch: bool = False) -> float:
        """Ideal over expected seconds, with no communication hidden, or ZeRO-3's where its prefetch can."""
        gathers = self.gathers(self.exposed if prefetch else self.seconds_of)
        return self.ideal / (self.compute + self.exchanges + self.gradients + gathers)


# -- the tables --------------------------------------------------------------------------------------------------------


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    lines.insert(1, "|---" * len(head) + "|")
    return "\n".join(lines)


def _seconds(value: float) -> str:
    return f"{value / 3600:.1f} h" if value >= 7200 else f"{value / 60:.1f} min" if value >= 120 else f"{value:.2g} s"


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
             _seconds(work.of_a_sample / H200_BF16_FLOPS), _seconds(work.decode / H200_BF16_FLOPS),
             *(f"{size / 2**30:.1f} GiB" for size in kept)]
        )  # fmt: skip
    head = ["frames x height x width", "tokens", "FLOPs per forward", "attention share", "time per sample",
            "time per decode", "activations", "activations, 8 GPUs a sample"]  # fmt: skip
    return _table(head, rows)


def collectives() -> str:
    """Table of the bytes that one GPU sends at 480p."""
    work, rows = Work(), []
    forward, sample = (flops / H200_BF16_FLOPS for flops in (work.forward, work.of_a_sample))
    layers = ARCHITECTURE["num_layers"]

    def row(what: str, when: str, size: float, seconds: float, baseline: float, label: str) -> None:
        times = f"{1e3 * seconds:.0f} ms", f"{seconds / baseline:.2g} of {label}"
        rows.append([what, when, f"{size / 1e9:.2f} GB", *times])

    every = "each forward, recomputation and backward"
    for size in (2, 4, 8):
        sent = layers * exchange_bytes(work.joint, size)
        seconds = sent / IN_NODE + layers * 4 * ALL_TO_ALL
        label = f"a forward's {1e3 * forward / size:.0f} ms"
        row(f"4 all-to-alls a block, {size} GPUs a sample", every, sent, seconds, forward / size, label)
    for gpus in (8, 64, 512):
        layout = Layout(work=work, gpus=gpus)
        sent = 2 * Ring(ranks=gpus).sent(layout.trained_bytes)
        what = f"all-reduce of the LoRA's gradients, {gpus} GPUs"
        row(what, "each optimizer step", sent, layout.gradients, sample, f"a sample's {_seconds(sample)}")
    full = Work(frozen_base=False)
    for gpus in (8, 64):
        layout = Layout(work=full, gpus=gpus, sharded=gpus)
        where = "within 8 GPUs" if gpus == NODE else "over 64 GPUs, without `hybrid_shard`"
        for part, when, flops in (
            ("rollout", "each step of a rollout", full.forward),
            ("anchor", "each forward of the anchor", full.forward),
            ("training", "each trained transition", full.training),
        ):
            gathered, reduced, together = layout.sharded_part(part)
            what = f"{gathered:,} all-gathers{f' and {reduced} reduce-scatters' if reduced else ''} of ZeRO-3"
            baseline = flops / H200_BF16_FLOPS
            label = f"its {1e3 * baseline:.0f} ms"
            row(f"{what}, {where}", when, Ring(ranks=gpus).sent(together), layout.seconds_of(part), baseline, label)
    for gpus in (64, 256):
        layout = Layout(work=full, gpus=gpus, sharded=NODE)
        what, label = f"all-reduce of the shards' gradients over {gpus // NODE} nodes", f"a sample's {_seconds(sample)}"
        across = 2 * layout.copies.sent(layout.shard_gradients)
        row(what, "each optimizer step", across, layout.gradients, sample, label)
    return _table(["collective", "when", "sent per GPU", "time", "share"], rows)


def layouts() -> str:
    """Table of the expected efficiency on 8 to 512 GPUs."""
    long = Work(frames=121, height=720, width=1280)
    rows = []
    for name, layout in (
        ("LoRA, 480p, 32 samples", Layout(work=Work(), gpus=8)),
        ("LoRA, 480p, 32 samples", Layout(work=Work(), gpus=8, sharing=8)),
        ("LoRA, 720p, 121 frames, 32 samples", Layout(work=long, gpus=8, sharing=8)),
        ("full, ZeRO-3 over 8, 480p, 32 samples", Layout(work=Work(frozen_base=False), gpus=8, sharded=8)),
        ("LoRA, 480p, 128 samples", Layout(work=Work(samples=128), gpus=64)),
        ("LoRA, 480p, 96 samples", Layout(work=Work(samples=96), gpus=64)),
        ("LoRA, 480p, 32 samples", Layout(work=Work(), gpus=64, sharing=2)),
        ("full, ZeRO-3 over 8, 480p, 128 samples",
         Layout(work=Work(samples=128, frozen_base=False), gpus=64, sharded=8)),
        ("full, ZeRO-3 over 64, 480p, 128 samples",
         Layout(work=Work(samples=128, frozen_base=False), gpus=64, sharded=64)),
        ("full, ZeRO-3 over 8, 480p, 256 samples",
         Layout(work=Work(samples=256, frozen_base=False), gpus=256, sharded=8)),
        ("LoRA, 480p, 512 samples", Layout(work=Work(samples=512), gpus=512)),
        ("LoRA, 480p, 128 samples", Layout(work=Work(samples=128), gpus=512, sharing=4)),
        ("LoRA, 720p, 121 frames, 128 samples",
         Layout(work=dataclasses.replace(long, samples=128), gpus=512, sharing=8)),
    ):  # fmt: skip
        rows.append(
            [str(layout.gpus), name, str(layout.sharing), str(layout.mine),
             _seconds(layout.compute), _seconds(layout.exchanges) if layout.sharing > 1 else "",
             _seconds(layout.gradients + layout.gathers(layout.seconds_of)),
             f"{layout.efficiency():.0%}", f"{layout.efficiency(prefetch=True):.0%}" if layout.sharded > 1 else ""]
        )  # fmt: skip
    head = ["GPUs", "run", "GPUs per sample", "samples per GPU or group", "compute", "all-to-alls",
            "gradients, ZeRO-3", "efficiency", "with prefetch"]  # fmt: skip
    return _table(head, rows)


def overlap() -> str:
    """Table of what can be overlapped in a 480p iteration with four samples per GPU."""
    work = Work()
    iteration = 4 * work.of_a_sample / H200_BF16_FLOPS
    decode = work.decode / H200_BF16_FLOPS
    rows = [
        ["decode of all but the last chunk, during the rollout", "done", f"{3 * decode / iteration:.1%}"],
        ["decode of the last chunk, during the anchor's forwards", "not done", f"{decode / iteration:.1%}"],
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
    from sage_fast.loading import load_setup
    from sage_fast.trainer import Trainer

    torch.set_num_threads(1)
    rows = {}
    for name, given in SMALL.items():
        config = small_config(given)
        setup = load_setup(config)
        setup.encode()
        trainer = Trainer(config, setup.model, setup.reward, setup.prompts, setup.embeddings, graphs=setup.graphs)
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


TABLES: dict[str, Callable[[], str]] = {
    function.__name__: function for function in (sizes, collectives, layouts, overlap, small)
}


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
