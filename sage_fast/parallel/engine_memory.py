"""Memory that an engine holds per rank: weights, gradients, optimizer state and snapshots, but no
activations.

In bytes, with n trained and f frozen elements, a bytes per element of the activations, b per frozen
element, and N ranks that share a copy:

              weights            gradients       master    moments   anchor, EMA (each)
    plain     4 n + b f          4 n             -         8 n       4 n
    zero1     a n + b f          4 n             4 n / N   8 n / N   4 n / N
    zero2     a n + b f          4 n / N         4 n / N   8 n / N   4 n / N
    zero3     (4 n + b f) / N    4 n / N         -         8 n / N   4 n / N

With `train.offload_shards`, the row of zero3 is in host memory, and only the block in flight and
what is outside the sharded units are on the GPU.

Muon keeps one moment of the matrices of the blocks: 4 n or 4 n / N. zero1 and zero2 keep a float32
copy of the weights (DeepSpeed's master), which is updated and copied back, and a bucket of
gradients in flight, with copies of it while it is reduced. In bfloat16, zero1 also keeps the
gradients of one backward, 2 n, until they are added in float32. With zero3 what is outside the
sharded units stays whole, its state too (2 % of HunyuanVideo 1.5), and a block is in flight.
tests/test_engine_deepspeed.py and tests/test_engine_fsdp.py compare the sums with the live tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from sage_fast.algorithm.objective import KLStrategy
from sage_fast.config.engines import ENGINES, OPTIMIZERS
from sage_fast.config.schema import ModelConfig, TrainConfig
from sage_fast.models.policy import Policy
from sage_fast.models.streaming import StreamSizes
from sage_fast.parallel import ranks_that_shard
from sage_fast.parallel.deepspeed_config import deepspeed_settings


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineMemory:
    """Bytes that an engine holds on a rank.

    Attributes:
        frozen_weights, trained_weights: as forwards read them; they are there before training.
        gradients: float32 sums over the micro-batches.
        optimizer_state: moments.
        anchor_and_averages: snapshots of the trained weights.
        master_weights: DeepSpeed's float32 copy, which is updated.
        gradients_in_flight: those of one backward, or buckets of them and copies while they are
            reduced.
        block_in_flight: gathered weights of a block and their gradients.
        autocast_copies: 16-bit copies of float32 weights.
        adapter_copies: copies of adapters in the dtype of the activations, in the buffers of the
            fused linears.
        slots_of_streamed_blocks: through which they pass.
        in_host_memory: shards with `train.offload_shards`, and all that belongs to them, or frozen
            weights of streamed blocks; not in `total`.
    """

    frozen_weights: float = 0.0
    trained_weights: float = 0.0
    gradients: float = 0.0
    optimizer_state: float = 0.0
    anchor_and_averages: float = 0.0
    master_weights: float = 0.0
    gradients_in_flight: float = 0.0
    block_in_flight: float = 0.0
    autocast_copies: float = 0.0
    adapter_copies: float = 0.0
    slots_of_streamed_blocks: float = 0.0
    in_host_memory: float = 0.0

    @property
    def weights(self) -> float:
        return self.frozen_weights + self.trained_weights

    @property
    def total(self) -> float:
        return sum(vars(self).values()) - self.in_host_memory

    def by_label(self) -> dict[str, float]:
        """Return label -> bytes on the GPU, without parts of 0 bytes."""
        sizes = {name: size for name, size in vars(self).items() if name != "in_host_memory"}
        return {name.replace("_", " "): size for name, size in sizes.items() if size}

    def with_streaming(self, sizes: StreamSizes) -> EngineMemory:
        """Return the memory with streamed blocks, and with the fused linears of the others."""
        return dataclasses.replace(
            self,
            frozen_weights=self.frozen_weights - sizes.leaving,
            adapter_copies=float(sizes.copies),
            slots_of_streamed_blocks=float(sizes.slots),
            in_host_memory=self.in_host_memory + sizes.host,
        )

    def __add__(self, other: EngineMemory) -> EngineMemory:
        return EngineMemory(
            **{name: size + getattr(other, name) for name, size in vars(self).items()}
        )


def engine_memory(
    model: ModelConfig,
    train: TrainConfig,
    strategy: KLStrategy,
    policy: Policy,
    ranks: int = 1,
) -> EngineMemory:
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
    snapshots = int(strategy.anchor is not None) + int(train.ema_decay > 0)

    def held(parameters: Mapping[str, Tensor], share: float) -> EngineMemory:
        """Return the memory for these parameters; each rank holds a `share` of what the engine
        shards."""
        trained = {name: p for name, p in parameters.items() if p.requires_grad}
        n = sum(p.numel() for p in trained.values())
        frozen = sum(p.numel() for p in parameters.values()) - n
        moments = 0
        for name, p in trained.items():
            by_muon = OPTIMIZERS[train.optimizer] and policy.is_muon(name, p)
            moments += p.numel() if by_muon else 2 * p.numel()

        weights_share = share if "weights" in row.shards else 1.0
        gradients_share = share if "gradients" in row.shards else 1.0
        return EngineMemory(
            frozen_weights=weights_share * width * frozen,
            trained_weights=weights_share * stored * n,
            gradients=gradients_share * 4 * n,
            optimizer_state=share * 4 * moments,
            anchor_and_averages=share * 4 * n * snapshots,
            master_weights=share * 4 * n if row.keeps_master else 0.0,
        )

    weights = dict(policy.named_parameters())
    in_units = {
        id(p) for units in policy.sharded_units() for unit in units for p in unit.parameters()
    }
    whole = {name: p for name, p in weights.items() if row.gathers and id(p) not in in_units}
    share = 1 / ranks_that_shard(train, ranks) if row.shards else 1.0
    sharded = held({name: p for name, p in weights.items() if name not in whole}, share)
    if train.offload_shards:
        sharded = EngineMemory(in_host_memory=sharded.total)
    memory = held(whole, 1.0) + sharded
    if row.keeps_master:
        trained = [p for name, p in policy.parameters().items() if name not in whole]
        memory = dataclasses.replace(
            memory, gradients_in_flight=_gradients_in_flight(trained, train, stored)
        )
    if row.gathers:
        block = _block_in_flight(policy.sharded_units()[-1][0], model.element_bytes)
        memory = dataclasses.replace(memory, block_in_flight=block)
    if model.element_bytes < width:
        copied = sum(p.numel() for p in (whole or weights).values())
        memory = dataclasses.replace(memory, autocast_copies=2.0 * copied)
    return memory


def _gradients_in_flight(trained: Sequence[Tensor], train: TrainConfig, width: int) -> float:
    """Return the bytes of gradients in flight in DeepSpeed, of `width` bytes an element, beside
    their float32 sums."""
    n = sum(p.numel() for p in trained)
    # the sums are reduced, in place
    if width < 4 and "gradients" not in ENGINES[train.engine].shards:
        return float(width * n)
    zero = deepspeed_settings(train, n)["zero_optimization"]
    bucket, buckets = zero["reduce_bucket_size"], 1 + zero["overlap_comm"]
    # `allreduce_bucket` copies the bucket, or a larger gradient, and converts the copy to float32.
    largest = max(bucket, *(p.numel() for p in trained))
    return float(width * bucket * buckets) + largest * (4 if width == 4 else 6)


def _block_in_flight(block: nn.Module, width: int) -> float:
    """Return the bytes of a block at the peak of its backward, with `width` bytes a gathered value.

    They are its weights and their gradients, the gathered weights of the block before it, and the
    gradients of the block after it in float32, while they are reduced. AdaLN's larger units are in
    flight when no activations are kept.
    """
    gathered = sum(p.numel() for p in block.parameters())
    reduced = sum(p.numel() for p in block.parameters() if p.requires_grad)
    return float(2 * width * gathered + (width + 4) * reduced)
