"""Time a forward and a trained step of Wan 2.2 TI2V-5B with random weights, ours and compiled
diffusers' with the same attention kernel: `python -m scripts.gpu.wan --json FILE [--tiny]`.

A video of 704 x 1280 and 121 frames, without guidance. diffusers gets one timestep a sample, where
its pipeline of this model has one a token: that is its best case. Both have the same frozen
weights, and each an adapter of its own. Checkpointing is `full`, which both can.

No time is given if the two velocities differ. The file is written again after every row.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diffusers.models.attention_dispatch import AttentionBackendName
from sage_fast.benchmarks.rollout import failures, measure
from sage_fast.benchmarks.rung import random_network, with_own_adapter
from sage_fast.benchmarks.stock import LOCAL_FLASH4, register_attention
from sage_fast.benchmarks.timing import fresh_compilation
from torch import Tensor

from sage_fast.algorithm.flops import training_flops
from sage_fast.config.loader import load
from sage_fast.config.schema import Config
from sage_fast.models.attention.backends import ATTENTION
from sage_fast.models.attention.choose import uses_of
from sage_fast.models.attention.trial import fastest, measure_attention
from sage_fast.models.checkpointing import set_checkpointing
from sage_fast.models.cost import Cost
from sage_fast.models.wan.conditioning import TEXT_TOKENS, TextEmbedding
from sage_fast.models.wan.spec import Wan
from sage_fast.ops import implementation
from sage_fast.rollout.loop import initial_latents
from sage_fast.tools.harness import usual_dtype
from sage_fast.util.captions import PromptKey
from sage_fast.util.environment import environment
from sage_fast.util.files import write_json
from sage_fast.util.ranks import local_device

MODEL = "random:wan2.2-ti2v-5b"
SETTINGS = {
    "model.path": MODEL,
    "model.lora_rank": 64,
    "model.lora_alpha": 128,
    "sampling.num_frames": 121,
    "sampling.guidance_scale": 1,
}
"""What is not as configs/wan22-ti2v-5b.yaml has it."""
TINY = {"sampling.height": 64, "sampling.width": 96, "sampling.num_frames": 9}
TINY_NETWORK = {
    "num_attention_heads": 2,
    "attention_head_dim": 24,
    "in_channels": 48,
    "out_channels": 48,
    "text_dim": 32,
    "freq_dim": 32,
    "ffn_dim": 96,
    "num_layers": 2,
}
PATHS = ("ours", "diffusers")
ROUNDS = 3
SECONDS = 80
"""Seconds from the start in which the rounds should end; each row has at least one."""
CHECKPOINTING = "full"
SIGMA = 0.5
LARGEST_DIFFERENCE = {torch.float32: 1e-4, torch.bfloat16: 0.05}
"""Dtype -> largest relative difference of the two velocities, as in `bench rollout`."""

Velocity = Callable[[], Tensor]


def subject(tiny: bool) -> tuple[Wan, Config]:
    """Return the model and its settings."""
    settings = SETTINGS | (TINY if tiny else {})
    config = load("configs/wan22-ti2v-5b.yaml", settings)
    return Wan(MODEL, {"transformer": TINY_NETWORK} if tiny else None), config


def counted_flops(cost: Cost) -> dict[str, float]:
    """Return the FLOPs of a forward and of a trained step, by the plan."""
    trained = training_flops(
        cost.forward,
        cost.attention,
        cost.block_ends,
        checkpointing=CHECKPOINTING,
        trains_adapter=True,
    )
    return {"forward": cost.forward, "train": trained}


def right_attention(spec: Wan, config: Config, device: torch.device, dtype: torch.dtype) -> str:
    """Return the fastest kernel that is right for the video's tokens and for those of a text."""
    trials = measure_attention(uses_of(spec, config.sampling), device, dtype)
    for name, trial in trials.items():
        if trial.problem:
            print(f"attention {name!r} is skipped: {trial.problem}", flush=True)
    return fastest(trials)


class Comparison:
    """A network by both forwards, at one noise level of one sample.

    Args:
        spec: the model.
        config: its settings.
        device: where it runs.
    """

    def __init__(self, spec: Wan, config: Config, device: torch.device) -> None:
        self.device = device
        self.dtype = usual_dtype(device)
        network = random_network(spec, config.model, device, self.dtype)
        self.stock = with_own_adapter(network, self.dtype)
        self.policy = spec.policy({"transformer": network}, dtype=self.dtype, guidance_scale=1.0)
        # changes the strides of the weights, for which code is compiled later
        self.policy.refresh()
        for module in (network, self.stock):
            set_checkpointing(module, CHECKPOINTING)
        self.attention = right_attention(spec, config, device, self.dtype)
        self.policy.attention = ATTENTION[self.attention]
        self._compile_stock()

        generator = torch.Generator().manual_seed(0)
        text_dim = spec.transformer_config.text_dim
        text = torch.randn(TEXT_TOKENS, text_dim, generator=generator)
        self.text = text[None].to(device, self.dtype)
        key = PromptKey("prompt")
        sigmas = torch.tensor([SIGMA])
        table = self.policy.conditioning_table(sigmas, {key: TextEmbedding(text=text)})
        self.conditions = table.of([key])
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        self.timestep = 1000 * sigmas.to(device)
        seeds = torch.arange(1, device=device)
        self.x = initial_latents(seeds, spec.latent_shape(config.sampling), device)
        self.velocities: dict[str, Velocity] = {"ours": self._ours, "diffusers": self._diffusers}

    def _compile_stock(self) -> None:
        """Compile diffusers' blocks as it does itself, with our kernel in its registry."""
        backend = AttentionBackendName(LOCAL_FLASH4)
        register_attention(backend, ATTENTION[self.attention])
        for block in self.stock.blocks:
            for attention in (block.attn1, block.attn2):
                attention.processor._attention_backend = backend
        # on a CPU the blocks are traced, and no code is generated, which would take a minute
        backend_of_compiler = "inductor" if self.device.type == "cuda" else "aot_eager"
        self.stock.compile_repeated_blocks(dynamic=False, backend=backend_of_compiler)

    def _ours(self) -> Tensor:
        return self.policy.velocity(self.x, self.conditions.at(self.step))

    def _diffusers(self) -> Tensor:
        x = self.x.to(self.dtype)
        velocity: Tensor = self.stock(x, self.timestep, self.text, return_dict=False)[0]
        return velocity

    def parameters(self, path: str) -> list[Tensor]:
        """Return the weights that a path trains."""
        network = self.stock if path == "diffusers" else self.policy.networks["transformer"]
        return [p for p in network.parameters() if p.requires_grad]

    @torch.no_grad()
    def difference(self) -> float:
        """Return the norm of the velocities' difference over that of diffusers' velocity."""
        found, expected = (self.velocities[path]().float() for path in PATHS)
        return float((found - expected).norm() / expected.norm())

    def forward(self, path: str) -> Callable[[], Any]:
        """Return a function that runs a forward without gradients."""
        return torch.no_grad()(self.velocities[path])

    def train(self, path: str) -> Callable[[], Any]:
        """Return a function that runs a forward and a backward."""
        velocity = self.velocities[path]
        parameters = self.parameters(path)

        def run() -> Any:
            loss = velocity().float().square().mean()
            return torch.autograd.grad(loss, parameters)

        return run


def compare(tiny: bool, file: Path) -> dict[str, Any]:
    """Return what is written to `file`."""
    stop = time.monotonic() + SECONDS
    device = local_device()
    spec, config = subject(tiny)
    cost = spec.cost(config)
    flops = counted_flops(cost)

    with fresh_compilation():
        comparison = Comparison(spec, config, device)
        difference = comparison.difference()
        rows: list[dict[str, Any]] = []
        facts = {
            "size": f"{config.sampling.height} x {config.sampling.width}",
            "frames": config.sampling.num_frames,
            "lora_rank": config.model.lora_rank,
            "checkpointing": CHECKPOINTING,
            "attention": comparison.attention,
            "difference": difference,
            "rows": rows,
        }
        if device.type == "cuda":
            # beside the peaks: the weights, and what a trained step should add to them
            trained = sum(p.numel() for p in comparison.parameters("ours"))
            facts["resting_bytes"] = torch.cuda.memory_allocated()
            facts["planned_bytes"] = cost.activations[CHECKPOINTING] + 4 * trained
        dtype = str(comparison.dtype).removeprefix("torch.")
        described = environment(device, implementation(device)) | {"dtype": dtype}
        result = {"environment": described, "wan": facts}
        if not difference <= LARGEST_DIFFERENCE[comparison.dtype]:
            write_json(result, file)
            return result

        for part, work in (("forward", comparison.forward), ("train", comparison.train)):
            contenders = {path: work(path) for path in PATHS}
            left = stop - time.monotonic()
            rows.append(
                {"part": part, "flops": flops[part]} | measure(contenders, device, ROUNDS, left)
            )
            write_json(result, file)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    found = compare(options.tiny, options.json)["wan"]
    for row in found["rows"]:
        times = [f"{path} {took:.3f} s" for path, took in row["seconds"].items()]
        problems = [f"{path}: {why}" for path, why in row["failed"].items()]
        print(f"{row['part']}: {', '.join([*times, *problems])}")
    print(f"attention {found['attention']}, velocities differ by {found['difference']:.1e}")
    # no row: the difference is too large
    return int(not found["rows"] or failures(found) > 0)


if __name__ == "__main__":
    sys.exit(main())
