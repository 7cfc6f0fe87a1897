"""Memory that an engine holds per rank: weights, gradients, optimizer state and snapshots, but no activations.

In bytes, with n trained and f frozen elements, b bytes per frozen element, N ranks, and k elements outside the blocks'
linear layers:

              weights            gradients       master    moments   anchor, EMA (each)
    plain     4 n + b f          4 n             -         8 n       4 n
    zero1     4 n + b f          4 n             4 n / N   8 n / N   4 n / N
    zero2     4 n + b f          4 n / N         4 n / N   8 n / N   4 n / N
    zero3     (4 n + b f) / N    4 n / N         4 n / N   8 n / N   4 n / N
              + k of either

Muon keeps one moment of the matrices of the blocks: 4 n or 4 n / N. ZeRO adds a bucket of gradients in flight, ZeRO-3
a second one while the first is reduced.
DeepSpeed keeps a float32 copy of the weights (the master), which is updated and copied back.
tests/test_engine_deepspeed.py compares the sum with the live tensors.
"""

from __future__ import annotations

import dataclasses

from sage_fast.algorithm.objective import KLStrategy
from sage_fast.config.engines import ENGINES, OFFLOADS, OPTIMIZERS
from sage_fast.config.schema import ModelConfig, TrainConfig
from sage_fast.models.policy import Policy
from sage_fast.parallel import engine_settings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Held:
    """Bytes per rank, keyed by part.

    Attributes:
        weights: on the device before training.
        training: added on the device by training.
        host: in host memory, due to `train.offload`.
    """

    weights: dict[str, float]
    training: dict[str, float]
    host: dict[str, float]


def held_bytes(model: ModelConfig, train: TrainConfig, strategy: KLStrategy, policy: Policy, ranks: int = 1) -> Held:
    """Compute the memory an engine will hold on each rank.

    Args:
        model, train: sections of the settings.
        strategy: the KL strategy, which may have an anchor.
        policy: with whole weights, on any device (including meta).
        ranks: N.
    """
    width = model.element_bytes if model.trains_adapter else 4
    every, trained = [p for _, p in policy.named_parameters()], policy.parameters()
    n = sum(p.numel() for p in trained.values())
    f = sum(p.numel() for p in every) - n
    shards = ENGINES[train.engine].shards
    snapshots = int(strategy.anchor is not None) + int(train.ema_decay > 0)
    share = 1 / ranks if shards else 1.0
    state_bytes = OPTIMIZERS[train.optimizer].state_bytes
    moments = sum(state_bytes(policy.is_muon(name, p)) * p.numel() for name, p in trained.items()) * share
    weights = {"frozen weights": float(width * f), "trained weights": 4.0 * n}
    training = {
        "gradients": 4.0 * n * (share if "gradients" in shards else 1),
        f"state of the optimizer ({train.optimizer})": float(moments),
        "anchor and EMA": 4.0 * n * snapshots * share,
    }
    copied = n + f
    if shards:
        training["float32 master of the weights"] = 4.0 * n * share
        settings = engine_settings(train, n)["zero_optimization"]
        training["bucket of gradients"] = 4.0 * settings["reduce_bucket_size"]
    if "weights" in shards:
        inner = {p for unit in policy.sharded_units() for p in unit.parameters()}
        outer = [p for p in every if p not in inner]
        weights = {part: size * share for part, size in weights.items()}
        weights["whole on each rank: outside the blocks"] = float(
            sum((4 if p.requires_grad else width) * p.numel() for p in outer)
        )
        # DeepSpeed's own linear function saves the weight for the backward, not autocast's copy. So the copies of one
        # block at most are alive.
        copied = sum(p.numel() for p in policy.block_list()[0].parameters())
        training["gathered weights of a block"] = float(width * copied)
        # DeepSpeed's `reduce_scatter_coalesced` lays the bucket's gradients out by rank in a copy.
        training["second bucket, while it is reduced"] = training["bucket of gradients"]
    if model.element_bytes < width:
        training["bf16 copies of the weights (autocast)"] = 2.0 * copied
    moved = []
    if "state" in OFFLOADS[train.offload]:
        moved = [f"state of the optimizer ({train.optimizer})", "float32 master of the weights"]
        moved += ["gradients"] if "gradients" in shards else []
    host = {part: training.pop(part) for part in moved}
    if "weights" in OFFLOADS[train.offload]:
        host |= {part: weights.pop(part) for part in ("frozen weights", "trained weights")}
        host["anchor and EMA"] = training.pop("anchor and EMA")
    return Held(weights=weights, training=training, host=host)
