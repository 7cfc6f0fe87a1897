"""Run a rollout step and a trained step of hunyuanvideo15-24gb.yaml with the memory of such a card,
streamed as its plan says; then with resident blocks and all memory, and compare the bits:
`python -m scripts.gpu.streamed --json FILE [--tiny]`.

Times are by the fastest attention. Bits are compared with kernels that give the same ones each
time, since FlashAttention 4 adds gradients of queries by atomics.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sage_fast.algorithm.transitions import sigma_schedule, transition_table
from sage_fast.config.loader import load
from sage_fast.config.schema import Config
from sage_fast.models.attention.backends import ATTENTION, REFERENCE
from sage_fast.models.checkpointing import CheckpointPlan
from sage_fast.models.find import find_spec
from sage_fast.models.hunyuan15.conditioning import TextEmbedding
from sage_fast.models.load import load_model
from sage_fast.models.model import Model
from sage_fast.ops import implementation
from sage_fast.rollout.loop import initial_latents
from sage_fast.rollout.step import denoise
from sage_fast.tools.harness import host_timer
from sage_fast.tools.plan import plan_of_run
from sage_fast.util.captions import PromptKey
from sage_fast.util.environment import environment
from sage_fast.util.files import write_json
from sage_fast.util.ranks import local_device

GIB = 2**30
CARD_BYTES = 22.3 * GIB
"""What CUDA leaves of 24 GB."""
CALLS = 3
SEED = 0


def settings(tiny: bool) -> Config:
    if tiny:
        return load("configs/recipes/paper.yaml", {"model.gradient_checkpointing": "full"})
    random_weights = {"model.path": "random:hunyuanvideo15-480p"}
    return load("configs/hunyuanvideo15-24gb.yaml", random_weights)


def loaded(config: Config, streamed: int, chosen: CheckpointPlan, device: torch.device) -> Model:
    """Return the model with an adapter of which nothing is 0."""
    torch.manual_seed(SEED)
    model = load_model(config.model, config.sampling, device, SEED, streamed=streamed)
    model.set_checkpointing(chosen)
    generator = torch.Generator(device=device).manual_seed(SEED)
    with torch.no_grad():
        for name, p in model.policy.parameters().items():
            if ".lora_B." in name:
                p.normal_(std=0.02, generator=generator)
    return model


class Steps:
    """A rollout step and a trained step of a model.

    Args:
        config: the settings.
        model: of them.
        device: where it runs.
    """

    def __init__(self, config: Config, model: Model, device: torch.device) -> None:
        sampling = config.sampling
        self.policy = model.policy
        table = transition_table(
            sigma_schedule(sampling.steps, sampling.shift), sampling.sampler, sampling.eta
        )
        transformer = self.policy.networks["transformer"].config
        generator = torch.Generator().manual_seed(SEED)
        text = torch.randn(model.spec.text_tokens, transformer.text_embed_dim, generator=generator)
        glyphs = torch.zeros(0, transformer.text_embed_2_dim)
        key = PromptKey("prompt")
        known = {key: TextEmbedding(text=text, glyphs=glyphs)}
        schedule = self.policy.conditioning_table(table.sigmas[:-1], known).of([key])
        self.step = torch.full((1,), sampling.steps // 2, device=device)
        self.inputs = lambda: schedule.at(self.step)
        self.coefs = table.coefficients().to(device)
        self.seeds = torch.arange(1, device=device)
        self.x = initial_latents(self.seeds, model.spec.latent_shape(sampling), device)

    @torch.no_grad()
    def rollout(self) -> dict[str, Tensor]:
        next_latents, log_prob, velocity = denoise(
            self.policy, self.coefs, self.inputs(), self.seeds, self.x, self.step
        )
        return {"latents": next_latents, "log-prob": log_prob, "velocity": velocity}

    def train(self) -> dict[str, Tensor]:
        parameters = self.policy.parameters()
        velocity = self.policy.guided_velocity(self.x, self.inputs())
        loss = velocity.float().square().mean()
        gradients = torch.autograd.grad(loss, list(parameters.values()))
        return {f"gradient of {name}": found for name, found in zip(parameters, gradients)}


@contextlib.contextmanager
def deterministic(steps: Steps) -> Iterator[None]:
    """Have kernels of PyTorch that give the same bits each time within the block."""
    fastest = steps.policy.attention
    steps.policy.attention = ATTENTION[REFERENCE]
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
    steps.policy.attention = fastest


def measured(
    config: Config, streamed: int, chosen: CheckpointPlan, device: torch.device
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return times and peaks of both steps, and their results in host memory."""
    model = loaded(config, streamed, chosen, device)
    steps = Steps(config, model, device)
    works: dict[str, Callable[[], dict[str, Tensor]]] = {
        "rollout": steps.rollout,
        "train": steps.train,
    }
    results: dict[str, Tensor] = {}
    seconds: dict[str, float] = {}
    peaks: dict[str, int] = {}
    with deterministic(steps):
        for work in works.values():
            results |= {key: tensor.cpu() for key, tensor in work().items()}
    for name, work in works.items():
        timer = host_timer(work, device)
        timer()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds[name] = statistics.median(timer() for _ in range(CALLS))
        if device.type == "cuda":
            peaks[name] = torch.cuda.max_memory_allocated()
    facts: dict[str, Any] = {"blocks": streamed, "seconds": seconds, "peak_bytes": peaks}
    if model.policy.stream is not None:
        facts["copied_bytes"] = model.policy.stream.copied_bytes
        facts["host_bytes"] = model.policy.stream.host_bytes
    facts["attention"] = model.attention
    return facts, results


def cap(device: torch.device, count: float | None) -> None:
    """Limit what PyTorch may allocate on a GPU to `count` bytes; None: no limit."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(device).total_memory
        share = 1.0 if count is None else min(1.0, count / total)
        torch.cuda.set_per_process_memory_fraction(share, device)


def compare(tiny: bool) -> dict[str, Any]:
    """Return what is written as JSON."""
    device = local_device()
    config = settings(tiny)
    spec = find_spec(config.model.path)
    planned = plan_of_run(config, spec, ranks=1, gpu_memory=CARD_BYTES)
    count = 2 if tiny else planned.streamed
    chosen = planned.checkpointing

    cap(device, CARD_BYTES)
    streamed, found = measured(config, count, chosen, device)
    cap(device, None)
    # the same kernel, whose time is part of both
    same = config.replace({"model.attention": streamed["attention"]})
    resident, expected = measured(same, 0, chosen, device)
    different = [name for name in expected if not torch.equal(found[name], expected[name])]
    return {
        "environment": environment(device, implementation(device)) | {"dtype": config.model.dtype},
        "streamed": {
            "card_bytes": CARD_BYTES,
            "planned_bytes": planned.together,
            "checkpointing": str(chosen),
            "streamed": streamed,
            "resident": resident,
            "compared": len(expected),
            "different": different,
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    # what cuBLAS needs to give the same bits on every stream; read at its first call
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    result = compare(options.tiny)
    write_json(result, options.json)
    found = result["streamed"]
    for work in ("rollout", "train"):
        times = []
        for kind in ("streamed", "resident"):
            times.append(f"{kind} {found[kind]['seconds'][work]:.3f} s")
        print(f"{work}: {', '.join(times)}")
    print(f"{len(found['different'])} of {found['compared']} results differ")
    return int(bool(found["different"]))


if __name__ == "__main__":
    sys.exit(main())
