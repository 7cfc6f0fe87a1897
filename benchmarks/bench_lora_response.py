"""`python -m benchmarks.bench_lora_response [FILE]`: how much of a small adapter a bfloat16 model answers to.

Eight layers, width 128, rank 16. The up-projections of all adapters are drawn with standard deviation `size`; the
change of the velocity is compared with that of a float32 model of the same weights: the share is <d, d32> / |d32|^2.
1 is faithful, 0 deaf. `ours` is one accumulation, `peft` the adapters' own forward.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import torch
from torch import Tensor

from sage_fast.config import ModelConfig
from sage_fast.environment import environment
from sage_fast.files import write_json
from sage_fast.policy.hunyuan import HunyuanVideo15Policy, add_lora
from sage_fast.policy.text import TextEmbedding, collate
from sage_fast.testbed.model import TestbedTransformer
from sage_fast.testbed.text import TEXT_EMBED_DIM

SIZES = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 1e-2)


@functools.cache
def instances() -> tuple[HunyuanVideo15Policy, HunyuanVideo15Policy]:
    """The same weights in bfloat16 and in float32."""
    policies = []
    for dtype in (torch.bfloat16, torch.float32):
        torch.manual_seed(0)
        transformer = TestbedTransformer(in_channels=33, out_channels=16, num_layers=8, num_attention_heads=8)
        for p in transformer.parameters():
            p.data = p.data.to(torch.bfloat16).to(dtype)
        add_lora(transformer.eval(), rank=16, alpha=16, targets=ModelConfig().lora_targets, seed=0)
        policies.append(HunyuanVideo15Policy(transformer, dtype=dtype))
    return policies[0], policies[1]


@torch.no_grad()
def velocity(policy: HunyuanVideo15Policy, size: float, seed: int, own_forward: bool) -> Tensor:
    """With up-projections of this size; float64."""
    generator = torch.Generator().manual_seed(seed)
    for name, p in policy.parameters().items():
        if "lora_B" in name:
            p.copy_(size * torch.randn(p.shape, generator=generator))
    x = torch.randn(16, 16, 5, 8, 8, generator=generator)
    words = TextEmbedding(text=torch.randn(7, TEXT_EMBED_DIM, generator=generator), glyphs=torch.zeros(0, 8))
    text = collate([words] * len(x), x.device, policy.dtype)
    conditioning = policy.condition(torch.full((len(x),), 0.6), text)
    if not own_forward:
        return policy.velocity(x, conditioning).double()
    for projection in policy.forward.projections:
        projection.room, projection._adapters = 0, []
    return policy.forward(x.to(policy.dtype), conditioning).double()


def responses(size: float, path: str, seeds: int) -> tuple[float, float]:
    """Mean share over the seeds and its standard error."""
    low, high = instances()
    shares = []
    for seed in range(seeds):
        change, exact = (
            velocity(policy, size, seed, path == "peft") - velocity(policy, 0, seed, path == "peft")
            for policy in (low, high)
        )
        shares.append(float((change * exact).sum() / exact.square().sum()))
    values = torch.tensor(shares)
    return float(values.mean()), float(values.std()) / seeds**0.5


def main() -> None:
    rows = []
    for size in SIZES:
        for path in ("ours", "peft"):
            share, error = responses(size, path, seeds=24)
            rows.append({"size": size, "path": path, "share": share, "standard_error": error})
            print(f"size {size:.0e}  {path:5s} {share:6.3f} +- {error:.3f}", flush=True)
    file = Path(sys.argv[1] if len(sys.argv) > 1 else "benchmarks/results/lora_response.json")
    write_json({"environment": environment(torch.device("cpu")), "rows": rows}, file)


if __name__ == "__main__":
    main()
