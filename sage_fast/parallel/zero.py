"""The DeepSpeed engine: ZeRO-1, 2 and 3 (arXiv 1910.02054), with optional offload of optimizer and weights to the host.

DeepSpeed does not run our forward. It gets the modules, hooks their weights and receives every loss; it shards weights
and gradients, reduces, clips and gathers. DeepSpeed flattens each rank's weights into 1-D
buffers, and the optimizers of the plain engine update slices of them. All else is as in the plain engine: learning
rate, averages, files, and weights without a gradient, which stay unchanged.
"""

from __future__ import annotations

import functools
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_set_local_grad
from torch import Tensor, nn

from sage_fast.config.engines import ENGINES, OFFLOADS
from sage_fast.models.policy import Policy, State, UnshardedStates
from sage_fast.parallel import engine_settings
from sage_fast.parallel.engine import OptimizerState
from sage_fast.parallel.muon import Partition
from sage_fast.parallel.optimizers import make_optimizers
from sage_fast.parallel.plain import PlainEngine
from sage_fast.util.deepspeed_private import (
    check_version,
    forget_order,
    gather,
    join_deepspeed,
    keep_whole,
    part_of_master,
    refresh_master,
    release_gathered,
    shard,
    whole_shape,
)
from sage_fast.util.ranks import (
    all_gather_object,
    all_reduce,
    collective_device,
    data_size,
    rank,
    world_size,
)

# DeepSpeed calls these by their old names, thousands of times an iteration.
_OLD_NAMES = "all_gather_into_tensor|reduce_scatter_tensor|_all_gather_base|_reduce_scatter_base"
warnings.filterwarnings("ignore", rf"`torch\.distributed\.({_OLD_NAMES})` is ", FutureWarning)


class ZeroEngine(PlainEngine):
    """ZeRO over all ranks; one rank works too.

    Each rank keeps its share of anchor and averaged weights. With ZeRO-3 this is its shard of the weights (in host
    memory with `train.offload = all`), otherwise an equal part of each weight.
    """

    def _prepare(self) -> None:
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        logging.getLogger("DeepSpeed").addFilter(_is_news)
        if not dist.is_initialized():
            backend = "nccl" if self.policy.device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
            os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed requires it
        check_version()
        join_deepspeed()
        self.sharded = ENGINES[self.config.engine].shards
        self._moves = torch.zeros(len(self.parameters), dtype=torch.bool, device=self.policy.device)
        for number, p in enumerate(self.parameters):
            p.register_hook(functools.partial(self._note, number))
        named = self.policy.parameters()
        matrices = {name for name, p in named.items() if self.policy.is_muon(name, p)}
        modules, trained = _Modules(self.policy), sum(p.numel() for p in self.parameters)
        self.deepspeed, *_ = deepspeed.initialize(
            model=modules,
            optimizer=_Rows(self.parameters, self._update_row),
            config=engine_settings(self.config, trained),
        )
        optimizer = self.deepspeed.optimizer
        none = torch.empty(0, device="cpu" if OFFLOADS[self.config.offload] else self.policy.device)
        parts = [part_of_master(optimizer, p) for p in self.parameters]
        on_ranks = zip(*all_gather_object([0 if part is None else part.numel() for part in parts]))
        states = _PartitionedStates(dict(zip(self.parameters, on_ranks)))
        self.policy.states = states = _ShardedStates(optimizer, modules) if "weights" in self.sharded else states
        partitions = {name: Partition(shape=states.shape(p), sizes=tuple(states.sizes(p))) for name, p in named.items()}
        own = [
            none if part is None else part.detach()[: states.sizes(p)[rank()]]
            for p, part in zip(self.parameters, parts)
        ]
        self.parts = [nn.Parameter(part) for part in own]
        self.optimized = dict(zip(named, self.parts))
        self.optimizers = make_optimizers(self.optimized, self.config, lambda name, _: name in matrices, partitions)
        self.policy.use_all_weights()

    def _note(self, number: int, grad: Tensor) -> None:
        self._moves[number].logical_or_(grad.any())

    def backward(self, loss: Tensor, total: int) -> None:
        """Accumulate the gradients of one micro-batch.

        Every rank must call equally often: `policy.states.pad_to_largest`.
        """
        self.deepspeed.backward(self.deepspeed(data_size() / total * loss))

    def _update(self, rate: float) -> float:
        moving = all_reduce(self._moves.int(), "max").tolist()
        self._moves.zero_()
        self._waiting = [part for part, moves in zip(self.parts, moving) if moves]
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
        if "weights" in self.sharded:  # DeepSpeed would count the gradient of the previous update in the norm
            for p, moves in zip(self.parameters, moving):
                if not moves:
                    safe_set_local_grad(p, torch.zeros_like(shard(p)))
        self.deepspeed.step()
        if not self.deepspeed.was_step_applied():
            return float("nan")
        assert not self._waiting, "every part lies in one of DeepSpeed's rows"
        return float(self.deepspeed.get_global_grad_norm())

    def _update_row(self, row: Tensor) -> None:
        """Update the parts of weights in a row, by the row's gradient. Weights without a gradient stay unchanged."""
        assert row.grad is not None
        for part in self._waiting:
            start = (part.data_ptr() - row.data_ptr()) // row.element_size() if part.numel() else 0
            if 0 <= start < row.numel():
                part.grad = row.grad.narrow(0, start, part.numel())
        self._waiting = [part for part in self._waiting if part.grad is None]
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def remember(self) -> bool:
        """Return False: host memory may hold DeepSpeed's shards, or be needed for them."""
        return False

    def restore(self, weights: State, optimizer_state: OptimizerState, steps: int) -> None:
        super().restore(weights, optimizer_state, steps)
        refresh_master(self.deepspeed.optimizer)


def _is_news(record: logging.LogRecord) -> bool:
    """Drop DeepSpeed's warning that it does not know `_Rows`."""
    return "untested optimizer" not in record.getMessage()


class _Rows(torch.optim.Optimizer):
    """The optimizer handed to DeepSpeed, which lays the weights in rows and steps each of them: by `update`."""

    def __init__(self, parameters: Sequence[Tensor], update: Callable[[Tensor], None]) -> None:
        super().__init__(parameters, {"lr": 0.0})
        self._update = update

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for row in group["params"]:
                self._update(row)


class _Modules(nn.Module):
    """The module handed to DeepSpeed: it has all weights, but only the blocks' linear layers as children.

    DeepSpeed hooks the children, and ZeRO-3 gathers each for its own forward and backward. All other weights stay
    whole: our forward reads some without calling their module, and ranks may call others at different counts.
    """

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.networks = nn.ModuleDict(policy.networks)
        self.gathered = tuple(policy.sharded_units())

    def children(self) -> Iterator[nn.Module]:
        return iter(self.gathered)

    def forward(self, loss: Tensor) -> Tensor:
        """Return the loss: DeepSpeed counts micro-batches by forwards."""
        return loss


class _PartitionedStates(UnshardedStates):
    """Snapshots as parts of whole weights, those that DeepSpeed updates on each rank (ZeRO-1 and 2).

    Args:
        sizes: trained weight -> elements of its part on each rank.
    """

    def __init__(self, sizes: Mapping[Tensor, Sequence[int]]) -> None:
        self._sizes = sizes

    def sizes(self, p: Tensor) -> Sequence[int]:
        return self._sizes[p]

    def start(self, p: Tensor) -> int:
        return sum(self.sizes(p)[: rank()])

    def part(self, p: Tensor) -> Tensor:
        return p.detach().view(-1).narrow(0, self.start(p), self.sizes(p)[rank()])

    def shape(self, p: Tensor) -> torch.Size:
        return whole_shape(p)

    def join(self, part: Tensor, p: Tensor) -> Tensor:
        """Gather the parts of all ranks into a whole weight on the device."""
        shape = self.shape(p)
        whole = torch.empty(shape.numel(), dtype=part.dtype, device=p.device)
        for owner, piece in enumerate(whole.split(list(self.sizes(p)))):
            if piece.numel():
                dist.broadcast(piece.copy_(part) if owner == rank() else piece, owner)
        return whole.view(shape)

    def write(self, parameters: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
        for name, p in parameters.items():
            p.copy_(self.join(state[name], p))

    def padding(self, count: int) -> int:
        return int(all_reduce(torch.tensor(count).to(collective_device()), "max")) - count


class _ShardedStates(_PartitionedStates):
    """Snapshots of this rank's ZeRO-3 shards; averaging them needs no communication."""

    gathers = True

    def __init__(self, optimizer: Any, modules: _Modules) -> None:
        self.optimizer = optimizer
        forget_order(optimizer)
        gathered = {p for module in modules.gathered for p in module.parameters()}
        self.kept = [p for p in modules.parameters() if p not in gathered]
        keep_whole(optimizer, self.kept)

    def sizes(self, p: Tensor) -> list[int]:
        """Return the elements of each rank's shard. The last ones are padded in memory."""
        count, size = whole_shape(p).numel(), shard(p).numel()
        return [min(max(count - size * holder, 0), size) for holder in range(world_size())]

    def part(self, p: Tensor) -> Tensor:
        return shard(p).detach()[: self.sizes(p)[rank()]]

    def whole(self, p: Tensor) -> Tensor:
        return self.join(self.part(p), p)

    def write(self, parameters: Mapping[str, Any], state: Mapping[str, Tensor]) -> None:
        release_gathered(self.optimizer)
        for name, p in parameters.items():
            self.part(p).copy_(state[name])
        gather(self.kept)
