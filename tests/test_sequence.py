"""Samples that ranks share (`model.sequence_parallel`), on gloo: the values and gradients of one process, the same
iterations, and what does not fit is said before a model is loaded."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sage_fast import policy
from sage_fast.cli import main
from sage_fast.distributed import sequence_group
from sage_fast.errors import UserError
from sage_fast.policy.load import load_model
from sage_fast.policy.sequence import check_sequence_parallel
from sage_fast.run.setup import load_setup
from tests.test_distributed import start_two_ranks
from tests.tiny import demo_trainer, perturb, settings, tiny_model

FORWARD = """
import json, sys
from pathlib import Path
import torch
from sage_fast.distributed import all_reduce, initialize, join_sequence_group, rank, sequence_group, shutdown
from sage_fast.policy.checkpointing import set_checkpointing
from sage_fast.policy.sequence import SequenceParallel
from sage_fast.policy.text import collate
from tests.tiny import embeddings, settings, tiny_model

PROMPTS = {
    "one length": ["a red circle moves left quickly"] * 2,
    "mixed lengths": ["a red circle moves left quickly", ""],
    "one token": ["", ""],
}
rows = {}

def relative(a, b):
    return float((a - b).norm() / b.norm().clamp(min=1e-30))

def run(model, x, upstream, conditions):
    policy = model.policy
    parameters = policy.parameters()
    sigma, text, negative = conditions
    v = policy.guided_velocity(x, policy.condition(sigma, text, negative))
    gradients = torch.autograd.grad(v, list(parameters.values()), upstream, allow_unused=True)
    return v.detach(), dict(zip(parameters, gradients))

initialize()
for size in (2, 4):
    join_sequence_group(size)
    sequence = SequenceParallel(sequence_group(), torch.device("cpu"))
    for tuning, guidance, prompts, latents in (
        ("lora", 1.0, "one length", (5, 4, 4)),
        ("lora", 3.0, "mixed lengths", (5, 3, 3)),
        ("full", 1.0, "one token", (5, 3, 3)),
        ("full", 3.0, "mixed lengths", (5, 4, 4)),
    ):
        torch.manual_seed(5)
        model = tiny_model(settings(model__tuning=tuning, sampling__guidance_scale=guidance))
        for p in model.policy.parameters().values():
            p.data.add_(0.05 * torch.randn(p.shape))
        chosen = embeddings(PROMPTS[prompts])
        of = lambda texts: collate([chosen[text] for text in texts], torch.device("cpu"), torch.float32)
        x = torch.randn(2, 32, *latents)
        upstream = torch.randn_like(x)
        conditions = (torch.rand(2), of(PROMPTS[prompts]), of(["", ""]) if guidance != 1 else None)
        expected, exact = run(model, x, upstream, conditions)
        model.policy.forward.sequence = sequence
        results = {}
        for mode in ("none", "attention", "full"):
            set_checkpointing(model.policy.transformer, mode)
            results[mode] = run(model, x, upstream, conditions)
        v, local = results["none"]
        worst = {}
        for name, gradient in local.items():
            if exact[name] is None:
                assert gradient is None or not gradient.any(), name
                continue
            total = all_reduce(torch.zeros_like(exact[name]) if gradient is None else gradient.clone()) / 4
            worst[name] = (relative(total, exact[name]), float(exact[name].norm()))
        same = all(
            torch.equal(v, other) and all(a is b or torch.equal(a, b) for a, b in zip(local.values(), gradients.values()))
            for other, gradients in results.values()
        )
        rows[f"{size} {tuning} {guidance:g} {prompts} {latents}"] = {
            "value": relative(v, expected),
            "gradients": {name: error for name, (error, norm) in worst.items() if norm > 1e-4},
            "count": len(worst),
            "checkpointing": same,
        }
(Path(sys.argv[1]) / f"rank{rank()}.json").write_text(json.dumps(rows))
shutdown()
"""


def test_values_and_gradients_are_those_of_one_process(tmp_path: Path) -> None:
    """Four ranks, two and four to a sample: LoRA and full tuning, with and without guidance, prompts of one length and
    of several, tokens that the ranks divide and that they do not, fewer text tokens than ranks, each with every mode of
    checkpointing, whose gradients are the same to the bit."""
    done = start_two_ranks(FORWARD, tmp_path, ranks=4)
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in range(4):
        rows = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert len(rows) == 8
        for case, row in rows.items():
            assert row["value"] < 2e-6, case
            assert row["count"] > 20
            assert len(row["gradients"]) > row["count"] // 2
            worst = max(row["gradients"], key=row["gradients"].__getitem__)
            assert row["gradients"][worst] < 2e-5, f"{case}: {worst}"
            assert row["checkpointing"], case
