"""Measure the rollout engine: forwards, steps, rollouts and training against the stock diffusers forward.

`sage-fast bench rollout`. Random weights (nothing is downloaded), one model whose stock and own forwards are timed
interleaved in one process; medians. A correctness gate runs first: no time is reported for a velocity that is wrong.
On a GPU the ladder is the published 8.3 B architecture from 5 x 16 x 16 latents to 480p, 81 frames; on the CPU it is
the testbed.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from diffusers import HunyuanVideo15Transformer3DModel

from sage_fast.config import ModelConfig
from sage_fast.console import progress
from sage_fast.environment import environment
from sage_fast.measure.harness import head_line, host_timer, interleaved, matmul_ceiling
from sage_fast.measure.plan import attention_flops, forward_flops, training_flops
from sage_fast.measure.stock import StockPolicy
from sage_fast.policy.checkpointing import set_checkpointing
from sage_fast.policy.hunyuan import HunyuanVideo15Policy, add_lora
from sage_fast.policy.load import TEXT_TOKENS
from sage_fast.policy.text import TextEmbedding
from sage_fast.rollout.graphs import CudaRecorder, StepGraphs, denoise
from sage_fast.rollout.loop import initial_latents, rollout
from sage_fast.testbed.model import LATENT_SHAPE, TestbedTransformer
from sage_fast.transitions import sigma_schedule, transition_table

STEPS = 10
PARTS = ("forward", "step", "rollout", "train")


@dataclasses.dataclass(frozen=True)
class Size:
    """One rung: latents `[batch, C, *space]` and the tokens of a prompt."""

    batch: int
    space: tuple[int, int, int]
    text_tokens: int = TEXT_TOKENS
    testbed: bool = False


SIZES = {
    "tiny": Size(2, (2, 2, 3), 3, testbed=True),
    "testbed batch 1": Size(1, LATENT_SHAPE[1:], 7, testbed=True),
    "testbed batch 32": Size(32, LATENT_SHAPE[1:], 7, testbed=True),
    "5x16x16": Size(1, (5, 16, 16)),
    "9x30x52": Size(1, (9, 30, 52)),
    "480p 81 frames": Size(1, (21, 30, 52)),
}
GPU_SIZES = ("5x16x16", "9x30x52", "480p 81 frames")
CPU_SIZES = ("testbed batch 1", "testbed batch 32")


# -- one rung ---------------------------------------------------------------------------------------------------------


def random_transformer(testbed: bool, device: torch.device, dtype: torch.dtype) -> HunyuanVideo15Transformer3DModel:
    """The architecture with random weights, made on the device."""
    with torch.device("meta"):
        transformer = TestbedTransformer() if testbed else HunyuanVideo15Transformer3DModel()  # the published 8.3 B
    return randomize(torch.nn.Module.to(transformer, dtype).to_empty(device=device).eval(), rank=16 if testbed else 64)


def randomize(transformer: HunyuanVideo15Transformer3DModel, rank: int) -> HunyuanVideo15Transformer3DModel:
    """Random weights and a LoRA adapter that is not zero; gates are small, as in a trained model, so that rounding does
    not grow from block to block.
    """
    device = transformer.device
    generator = torch.Generator(device=device).manual_seed(0)
    with torch.no_grad():
        for p in transformer.parameters():
            p.normal_(std=p.shape[-1] ** -0.5, generator=generator) if p.ndim > 1 else p.fill_(0.1)
        for name, p in transformer.named_parameters():
            if "norm" in name and p.ndim == 1 and name.endswith("weight"):
                p.fill_(1)
            if ".linear." in name and "norm1" in name:
                p.mul_(0.1)
    add_lora(transformer, rank=rank, alpha=16, targets=ModelConfig().lora_targets, seed=0)
    with torch.no_grad():
        for name, p in transformer.named_parameters():
            if ".lora_B." in name:
                p.normal_(std=0.02, generator=generator)
    return transformer


class Rung:
    """A size, its inputs, and the contenders as functions of nothing.

    Args:
        transformer: shared by all contenders.
        size: of the inputs.
        compiled: whether regional torch.compile takes part.
    """

    def __init__(self, transformer: HunyuanVideo15Transformer3DModel, size: Size, compiled: bool) -> None:
        device, dtype = next(transformer.parameters()).device, next(transformer.parameters()).dtype
        config = transformer.config
        self.ours = HunyuanVideo15Policy(transformer, dtype=dtype)
        self.stock, self.stock_padded = (StockPolicy(transformer, dtype=dtype) for _ in range(2))
        self.stock_padded.padded = True
        self.policies: dict[str, HunyuanVideo15Policy] = {"stock": self.stock, "eager": self.ours}
        if not size.testbed:
            self.policies["stock padded"] = self.stock_padded
        if compiled:
            self.policies["compiled"] = HunyuanVideo15Policy(transformer, dtype=dtype)
            self.policies["compiled"].forward.compile_blocks()
        self.size = size
        self.device = device
        generator = torch.Generator().manual_seed(0)
        text = torch.randn(size.text_tokens, config.text_embed_dim, generator=generator)
        self.embeddings = {"prompt": TextEmbedding(text=text, glyphs=torch.zeros(0, config.text_embed_2_dim))}
        self.prompts = ["prompt"] * size.batch
        self.shape = (config.out_channels, *size.space)
        self.table = transition_table(sigma_schedule(STEPS, 5.0), "sage", 0.5)
        self.coefs = self.table.coefficients(math.prod(self.shape)).to(device)
        self.seeds = torch.arange(size.batch, device=device)
        self.x = initial_latents(self.seeds, self.shape, device)
        self.step = torch.full((1,), STEPS // 2, device=device)
        self.graphs = StepGraphs(self.ours, CudaRecorder(), 2**40) if device.type == "cuda" else None

    def schedule(self, policy: HunyuanVideo15Policy) -> Any:
        return policy.conditioning_table(self.table.sigmas[:-1], self.embeddings).of(self.prompts)

    @torch.no_grad()
    def check(self) -> None:
        """The gate: every contender's velocity against the stock one.

        Raises:
            AssertionError: they differ by more than rounding.
        """
        expected = self.stock.velocity(self.x, self.schedule(self.stock).at(self.step)).float()
        limit = 1e-4 if self.x.dtype == self.ours.dtype else 0.05
        for name, policy in self.policies.items():
            error = (policy.velocity(self.x, self.schedule(policy).at(self.step)).float() - expected).norm()
            assert error <= limit * expected.norm(), f"{name} is off by {error / expected.norm():.1e}"

    def contenders(self, part: str) -> dict[str, Callable[[], Any]]:
        """name -> a function that runs `forward`, `step`, `rollout` or `train` (forward and backward) once."""
        made = {name: self._function(part, policy) for name, policy in self.policies.items()}
        if part in ("step", "rollout") and self.graphs is not None:
            made |= self._graphed(part, self.graphs)
        return made

    def _function(self, part: str, policy: HunyuanVideo15Policy) -> Callable[[], Any]:
        schedule = self.schedule(policy)

        @torch.no_grad()
        def forward() -> Any:
            return policy.velocity(self.x, schedule.at(self.step))

        @torch.no_grad()
        def step() -> Any:
            return denoise(policy, self.coefs, schedule, self.seeds, self.x, self.step)

        def whole() -> Any:
            conditioning = policy.conditioning_table(self.table.sigmas[:-1], self.embeddings)
            return rollout(policy, self.table, self.coefs, conditioning, self.prompts, self.seeds, self.x)

        def train() -> Any:
            v = policy.velocity(self.x, schedule.at(self.step))
            return torch.autograd.grad(v.float().square().mean(), list(policy.parameters().values()))

        return {"forward": forward, "step": step, "rollout": whole, "train": train}[part]

    def _graphed(self, part: str, graphs: StepGraphs) -> dict[str, Callable[[], Any]]:
        schedule = self.schedule(self.ours)
        with torch.no_grad():
            for _ in range(2):  # a shape is recorded when it comes for the second time
                graph = graphs.prepare(self.coefs, schedule, self.seeds, self.x)
        if graph is None:
            return {}
        if part == "step":
            return {"graphed": graph.step}

        def whole() -> Any:
            conditioning = self.ours.conditioning_table(self.table.sigmas[:-1], self.embeddings)
            return rollout(
                self.ours, self.table, self.coefs, conditioning, self.prompts, self.seeds, self.x, graphs=graphs
            )

        return {"graphed": whole}


# -- timing -----------------------------------------------------------------------------------------------------------


def measure(contenders: Mapping[str, Callable[[], Any]], device: torch.device, rounds: int) -> dict[str, Any]:
    """name -> median seconds over interleaved rounds, and on a GPU the peak of allocated bytes."""
    peak: dict[str, int] = {}
    for name, function in contenders.items():  # compiles and allocates; the second call is in steady state
        function()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            function()
            peak[name] = torch.cuda.max_memory_allocated()
    seconds = interleaved({name: host_timer(function, device) for name, function in contenders.items()}, rounds)
    return {"seconds": {name: statistics.median(times) for name, times in seconds.items()}, "peak_bytes": peak}


def run(names: Sequence[str] | None = None, rounds: int = 7) -> dict[str, Any]:
    """Measure every part at every size; the result is what `sage-fast bench rollout` writes as JSON."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rows, transformer, built = [], None, None
    for name in names or (GPU_SIZES if device.type == "cuda" else CPU_SIZES):
        size = SIZES[name]
        if built != size.testbed:
            transformer, built = random_transformer(size.testbed, device, dtype), size.testbed
        assert transformer is not None
        rung = Rung(transformer, size, compiled=True)
        rung.check()
        for part in progress(PARTS, name, len(PARTS), "part"):
            set_checkpointing(transformer, _checkpointing(size, part))
            flops = _flops(transformer, size, part)
            measured = measure(rung.contenders(part), device, rounds)
            rows.append({"size": name, "part": part, "batch": size.batch, "flops": flops} | measured)
    return {
        "environment": environment(device) | {"dtype": str(dtype).removeprefix("torch.")},
        "ceiling_flops_per_second": matmul_ceiling(device, dtype),
        "rows": rows,
    }


def _checkpointing(size: Size, part: str) -> str:
    return "full" if part == "train" and not size.testbed else "none"


def _flops(transformer: HunyuanVideo15Transformer3DModel, size: Size, part: str) -> float:
    """Model FLOPs of a part at the unpadded prompt, by the formulas of measure/plan.py."""
    tokens = math.prod(size.space)
    forward = size.batch * forward_flops(transformer.config, tokens, size.text_tokens)
    attention = size.batch * attention_flops(transformer.config, tokens, size.text_tokens)
    if part == "train":
        return training_flops(forward, attention, checkpointing=_checkpointing(size, part), frozen_base=True)
    return forward * (STEPS if part == "rollout" else 1)


# -- tables -----------------------------------------------------------------------------------------------------------


def format_rollout(result: Mapping[str, Any]) -> str:
    """The table for a terminal."""
    env, ceiling = result["environment"], result["ceiling_flops_per_second"]
    lines = [
        head_line(env),
        f"ceiling of a {env['dtype']} matrix product, measured here and now: {ceiling / 1e12:.3g} TFLOP/s",
        "",
        f"{'size':<18}{'part':<9}{'path':<14}{'time':>12}{'to stock':>10}{'of ceiling':>12}{'peak memory':>13}",
    ]
    for row in result["rows"]:
        for name, seconds in row["seconds"].items():
            peak = f"{row['peak_bytes'][name] / 2**30:.2f} GiB" if row["peak_bytes"] else ""
            share = row["flops"] / seconds / ceiling
            lines.append(
                f"{row['size']:<18}{row['part']:<9}{name:<14}{1e3 * seconds:>9.2f} ms"
                f"{row['seconds']['stock'] / seconds:>9.2f}x{share:>12.1%}{peak:>13}".rstrip()
            )
    lines += ["", "medians of one interleaved run; FLOPs are the model's at the unpadded prompt, for every path"]
    if not any(row["peak_bytes"] for row in result["rows"]):
        lines.append("There is no GPU row yet.")
    return "\n".join(lines)
