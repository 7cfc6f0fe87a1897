"""Memory that an engine holds per rank: weights, gradients, optimizer state and snapshots, but no activations.

In bytes, with n trained and f frozen elements, a bytes per element of the activations, b per frozen element, and N
ranks that share a copy:

              weights            gradients       master    moments   anchor, EMA (each)
    plain     4 n + b f          4 n             -         8 n       4 n
    zero1     a n + b f          4 n             4 n / N   8 n / N   4 n / N
    zero2     a n + b f          4 n / N         4 n / N   8 n / N   4 n / N
    zero3     (4 n + b f) / N    4 n / N         -         8 n / N   4 n / N

Muon keeps one moment of the matrices of the blocks: 4 n or 4 n / N. zero1 and zero2 keep a float32 copy of the weights
(DeepSpeed's master), which is updated and copied back, and a bucket of gradients in flight, with copies of it while it
is reduced. In bfloat16, zero1 also keeps the gradients of one backward, 2 n, until they are added in float32. With
zero3 what is outside the sharded units stays whole, its state too (2 % of HunyuanVideo 1.5), and a block is in flight.
tests/test_engine_deepspeed.py and tests/test_engine_fsdp.py compare the sums with the live tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from sage_fast.algorithm.objective import KLStrategy
from sage_fast.config.engines import ENGINES, OFFLOADS, OPTIMIZERS
from sage_fast.config.schema import ModelConfig, TrainConfig
from sage_fast.models.policy import Policy
from sage_fast.parallel import engine_settings, ranks_that_shard


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
        ranks: of the run.
    """
    row = ENGINES[train.engine]
    stored = row.stored_bytes(model.element_bytes)
    width = model.element_bytes if model.trains_adapter else stored
    weights = dict(policy.named_parameters())
    whole = {}
    if row.gathers:
        in_units = {id(p) for run in policy.sharded_units() for unit in run for p in unit.parameters()}
        whole = {name: p for name, p in weights.items() if id(p) not in in_units}
    trained = {name: p for name, p in policy.parameters().items() if name not in whole}
    n = sum(p.numel() for p in trained.values())
    f = sum(p.numel() for name, p in weights.items() if name not in whole) - n
    snapshots = int(strategy.anchor is not None) + int(train.ema_decay > 0)
    share = 1 / ranks_that_shard(train, ranks) if row.shards else 1.0

    def state(parameters: Mapping[str, Tensor]) -> float:
        state_bytes = OPTIMIZERS[train.optimizer].state_bytes
        return float(sum(state_bytes(policy.is_muon(name, p)) * p.numel() for name, p in parameters.items()))

    of_weights = {"frozen weights": float(width * f), "trained weights": float(stored * n)}
    training = {
        "gradients": 4.0 * n * (share if "gradients" in row.shards else 1),
        f"state of the optimizer ({train.optimizer})": state(trained) * share,
        "anchor and EMA": 4.0 * n * snapshots * share,
    }
    if row.settings is not None:
        training["float32 master of the weights"] = 4.0 * n * share
        zero = engine_settings(train, n)["zero_optimization"]
        buckets = 2 if zero["overlap_comm"] else 1
        training |= _gradients_in_flight(
            list(trained.values()), zero["reduce_bucket_size"], buckets, stored, "gradients" in row.shards
        )
    if row.gathers:
        of_weights = {part: size * share for part, size in of_weights.items()}
        of_weights["whole on each rank: outside the blocks"] = float(
            sum((4 if p.requires_grad else width) * p.numel() for p in whole.values())
        )
        outside = {name: p for name, p in whole.items() if p.requires_grad}
        training["gradients and state of these"] = state(outside) + 4.0 * (1 + snapshots) * sum(
            p.numel() for p in outside.values()
        )
        training["block in flight"] = _block_in_flight(policy.sharded_units()[-1][0], model.element_bytes)
    if model.element_bytes < width:
        copied = sum(p.numel() for p in (whole or weights).values())
        training["bf16 copies of the weights (autocast)"] = 2.0 * copied
    moved = []
    if "state" in OFFLOADS[train.offload]:
        moved = [f"state of the optimizer ({train.optimizer})", "float32 master of the weights"]
        moved += ["anchor and EMA"] if row.keeps_master else []
        moved += ["gradients"] if "gradients" in row.shards and stored == 4 else []
    host = {part: training.pop(part) for part in moved if part in training}
    if moved and stored < 4:  # summed on the device
        host["gradients"] = 4.0 * n * share
    if "weights" in OFFLOADS[train.offload]:
        host |= {part: of_weights.pop(part) for part in ("frozen weights", "trained weights")}
        host["anchor and EMA"] = training.pop("anchor and EMA")
    return Held(weights=of_weights, training=training, host=host)


def _gradients_in_flight(
    trained: Sequence[Tensor], bucket: int, buckets: int, width: int, sharded: bool
) -> dict[str, float]:
    """Return the bytes of gradients in flight in DeepSpeed, of `width` bytes an element, beside their float32 sums."""
    if width < 4 and not sharded:  # the sums are reduced, in place
        return {"gradients of a backward": float(width * sum(p.numel() for p in trained))}
    # `allreduce_bucket` copies the bucket, or a larger gradient, and converts the copy to float32.
    largest = max(bucket, *(p.numel() for p in trained))
    copies = largest * (4.0 if width == 4 else 6.0)
    return {
        "buckets of gradients": float(width * bucket * buckets),
        "copies of the bucket, while it is reduced": copies,
    }


def _block_in_flight(block: nn.Module, width: int) -> float:
    """Return the bytes of a block at the peak of its backward, with `width` bytes a gathered value.

    They are its weights and their gradients, the gathered weights of the block before it, and the gradients of the
    block after it in float32, while they are reduced. AdaLN's larger units are in flight when no activations are kept.
    """
    gathered = sum(p.numel() for p in block.parameters())
    reduced = sum(p.numel() for p in block.parameters() if p.requires_grad)
    return float(2 * width * gathered + (width + 4) * reduced)
