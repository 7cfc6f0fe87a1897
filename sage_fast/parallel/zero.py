"""The DeepSpeed engine: ZeRO-1 and 2 (arXiv 1910.02054), with optional offload of the optimizer to the host.

DeepSpeed does not run our forward. It hooks the weights and receives every loss; it shards gradients, reduces, clips
and gathers. DeepSpeed flattens each rank's weights into 1-D buffers, and the optimizers of the plain engine update
slices of them. All else is as in the plain engine: learning rate, averages, files, and weights without a gradient,
which stay unchanged.
"""

from __future__ import annotations

import functools
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn

from sage_fast.config.engines import OFFLOADS
from sage_fast.models.policy import Policy, State, UnshardedStates
from sage_fast.parallel import engine_settings
from sage_fast.parallel.engine import OptimizerState
from sage_fast.parallel.muon import Partition
from sage_fast.parallel.optimizers import make_optimizers
from sage_fast.parallel.plain import PlainEngine
from sage_fast.util.deepspeed_private import (
    check_version,
    join_deepspeed,
    part_of_master,
    refresh_master,
)
from sage_fast.util.ranks import (
    all_gather_object,
    all_reduce,
    collective_device,
    data_size,
    rank,
    start_alone,
)

# DeepSpeed calls these by their old names, thousands of times an iteration.
_OLD_NAMES = "all_gather_into_tensor|reduce_scatter_tensor|_all_gather_base|_reduce_scatter_base"
warnings.filterwarnings("ignore", rf"`torch\.distributed\.({_OLD_NAMES})` is ", FutureWarning)


class ZeroEngine(PlainEngine):
    """ZeRO over all ranks; one rank works too.

    Each rank keeps its part of anchor and averaged weights.
    """

    def _prepare(self) -> None:
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        logging.getLogger("DeepSpeed").addFilter(_is_news)
        start_alone(self.policy.device)
        os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed requires it
        check_version()
        join_deepspeed()
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
        none = torch.empty(0, device="cpu" if OFFLOADS[self.config.offload] else self.policy.device)
        parts = [part_of_master(p) for p in self.parameters]
        on_ranks = zip(*all_gather_object([0 if part is None else part.numel() for part in parts]))
        self.policy.states = states = _PartitionedStates(dict(zip(self.parameters, on_ranks)))
        partitions = {name: Partition(shape=p.shape, sizes=tuple(states.sizes(p))) for name, p in named.items()}
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
    """The module handed to DeepSpeed: it has all weights, and no children that it could hook."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.networks = nn.ModuleDict(policy.networks)

    def children(self) -> Iterator[nn.Module]:
        return iter(())

    def forward(self, loss: Tensor) -> Tensor:
        """Return the loss: DeepSpeed counts micro-batches by forwards."""
        return loss


class _PartitionedStates(UnshardedStates):
    """Snapshots as parts of whole weights, those that DeepSpeed updates on each rank.

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

    def join(self, part: Tensor, p: Tensor) -> Tensor:
        """Gather the parts of all ranks into a whole weight on the device."""
        whole = torch.empty(p.numel(), dtype=part.dtype, device=p.device)
        for owner, piece in enumerate(whole.split(list(self.sizes(p)))):
            if piece.numel():
                dist.broadcast(piece.copy_(part) if owner == rank() else piece, owner)
        return whole.view(p.shape)

    def write(self, parameters: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
        for name, p in parameters.items():
            p.copy_(self.join(state[name], p))

    def padding(self, count: int) -> int:
        return int(all_reduce(torch.tensor(count).to(collective_device()), "max")) - count
