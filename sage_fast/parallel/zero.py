"""The DeepSpeed engine: ZeRO-1 and 2 (arXiv 1910.02054).

DeepSpeed does not run our forward. It hooks the weights and receives every loss; it shards
gradients, reduces, clips and gathers. DeepSpeed flattens each rank's weights into 1-D buffers, and
the optimizers of the plain engine update slices of them. All else is as in the plain engine:
learning rate, averages, files, and weights without a gradient, which stay unchanged.

Every rank updates its part of the float32 master. Forwards read the working weights, whole on every
rank and in the dtype of the activations: the rounded master, gathered once an update.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import groups
from torch import Tensor, nn

from sage_fast.models.policy import Policy, UnshardedStates
from sage_fast.parallel.deepspeed_config import deepspeed_settings
from sage_fast.parallel.muon import Partition
from sage_fast.parallel.optimizers import make_optimizers
from sage_fast.parallel.plain import PlainEngine
from sage_fast.util.console import wrapped
from sage_fast.util.ranks import (
    all_reduce,
    collective_device,
    data_size,
    rank,
    start_alone,
    world_size,
)

# DeepSpeed calls these by their old names, thousands of times an iteration.
_OLD_NAMES = "all_gather_into_tensor|reduce_scatter_tensor|_all_gather_base|_reduce_scatter_base"
warnings.filterwarnings("ignore", rf"`torch\.distributed\.({_OLD_NAMES})` is ", FutureWarning)


log = logging.getLogger(__name__)

TESTED = "0.19"
"""Minor version whose insides this file was written for.

Another fails only where something is missing.
"""


@functools.cache
def check_version() -> None:
    """Warn, once in a process, if the installed minor version of DeepSpeed is not the tested
    one."""
    if deepspeed.__version__.split(".")[:2] != TESTED.split("."):
        warning = (
            f"warning: DeepSpeed {deepspeed.__version__} is not tested with sage-fast, which uses "
            f"some of its insides; tested is {TESTED}: pip install 'deepspeed=={TESTED}.*'"
        )
        log.warning(wrapped(warning))


def join_deepspeed() -> None:
    """Make DeepSpeed use the existing process group and its timeout.

    It would create a group of its own, whose timeout no argument sets.
    """
    # An inference operator that is never called here. On a CPU, DeepSpeed would compile it at start
    # and print so.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if not deepspeed.comm.is_initialized():
        deepspeed.comm.init_distributed(verbose=False)
    groups._WORLD_GROUP = dist.group.WORLD


class ZeroEngine(PlainEngine):
    """ZeRO over all ranks; one rank works too.

    Each rank keeps its part of anchor and averaged weights.
    """

    def _prepare(self) -> None:
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        logging.getLogger("DeepSpeed").addFilter(_keep_record)
        start_alone(self.policy.device)
        os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed requires it
        check_version()
        join_deepspeed()
        self._has_grad = torch.zeros(
            len(self.parameters), dtype=torch.bool, device=self.policy.device
        )
        for number, p in enumerate(self.parameters):
            p.register_hook(functools.partial(self._record_grad, number))
        named = self.policy.parameters()
        matrices = {name for name, p in named.items() if self.policy.is_muon(name, p)}
        modules = _Modules(self.policy)
        trained = sum(p.numel() for p in self.parameters)
        rows = _Rows(self.parameters, self._update_row)
        self.policy.states = states = _MasterStates(self.parameters)
        settings = deepspeed_settings(
            self.config, trained, bf16=self.policy.dtype == torch.bfloat16
        )
        with contextlib.redirect_stdout(io.StringIO()):  # ZeRO-1 in bfloat16 prints memory
            self.deepspeed, *_ = deepspeed.initialize(
                model=modules, optimizer=rows, config=settings
            )
        states.attach(*rows.param_groups[0]["params"])
        self.parts = [nn.Parameter(states.part(p)) for p in self.parameters]
        partitions = {
            name: Partition(shape=p.shape, sizes=tuple(states.sizes(p)))
            for name, p in named.items()
        }
        self.optimized = dict(zip(named, self.parts))
        self.optimizers = make_optimizers(
            self.optimized, self.config, matrices, partitions, self.policy.trains_adapter
        )
        self.policy.uses_all_weights = True

    def _record_grad(self, number: int, grad: Tensor) -> None:
        self._has_grad[number].logical_or_(grad.any())

    def backward(self, loss: Tensor, total: int) -> None:
        """Accumulate the gradients of one micro-batch.

        Every rank must call equally often: `policy.states.pad_to_largest`.
        """
        self.deepspeed.backward(self.deepspeed(data_size() / total * loss))

    def _update(self, rate: float) -> float:
        moving = all_reduce(self._has_grad.int(), "max").tolist()
        self._has_grad.zero_()
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
        """Update the parts of weights in a row, by the row's gradient.

        Weights without a gradient stay unchanged.
        """
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


def _keep_record(record: logging.LogRecord) -> bool:
    """Drop two of DeepSpeed's warnings: `_Rows` is an optimizer of ours, and our engine reports an
    overflow itself."""
    return not any(
        known in record.getMessage() for known in ("untested optimizer", "OVERFLOW! Skipping step")
    )


class _Rows(torch.optim.Optimizer):
    """The optimizer handed to DeepSpeed, which lays the weights in rows and steps each of them: by
    `update`."""

    def __init__(self, parameters: Sequence[Tensor], update: Callable[[Tensor], None]) -> None:
        super().__init__(parameters, {"lr": 0.0})
        self._update = update

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for row in group["params"]:
                self._update(row)


class _Modules(nn.Module):
    """The module handed to DeepSpeed: it has all weights of the device, and no children that it
    could hook.

    Weights of streamed blocks are in host memory, which NCCL cannot broadcast.
    """

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.networks = nn.ModuleDict(policy.networks)
        self.device = policy.device

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        for name, p in super().named_parameters(*args, **kwargs):
            if p.device.type == self.device.type:
                yield name, p

    def children(self) -> Iterator[nn.Module]:
        return iter(())

    def forward(self, loss: Tensor) -> Tensor:
        """Return the loss: DeepSpeed counts micro-batches by forwards."""
        return loss


class _MasterStates(UnshardedStates):
    """Snapshots of each rank's part of the float32 master.

    DeepSpeed lays the working weights one after another into a buffer, padded to whole pairs of
    elements a rank, and gives each rank the master of an equal row of it. It makes the master from
    the working weights, so `attach` writes the weights into it as they were before they were
    rounded.

    Args:
        parameters: the trained weights, before DeepSpeed rounds them.

    Attributes:
        parts: this rank's part of each weight.
        row: this rank's master.
        working: the working weights.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        ends = list(itertools.accumulate(p.numel() for p in parameters))
        row = -(-ends[-1] // (2 * world_size())) * 2
        self._sizes = {}
        for p, end in zip(parameters, ends):
            cuts = [
                min(max(row * number, end - p.numel()), end) for number in range(world_size() + 1)
            ]
            self._sizes[p] = [high - low for low, high in itertools.pairwise(cuts)]
        self.parts = {}
        for p in parameters:
            local = p.detach().flatten().narrow(0, self.start(p), self.sizes(p)[rank()])
            self.parts[p] = local.to(torch.float32, copy=True)

    def attach(self, row: Tensor) -> None:
        """Write the parts into `row`, this rank's master, and keep them there."""
        self.row = row.detach()
        first = next(iter(self.parts))
        self.working = first.new_empty(0).set_(first.untyped_storage())
        assert len(self.working) == len(row) * world_size()
        sizes = [part.numel() for part in self.parts.values()]
        padding = len(row) - sum(sizes)
        begin = 0
        for p, slot in zip(self.parts, self.row.split([*sizes, padding])):
            assert p.storage_offset() == begin
            begin += p.numel()
            self.parts[p] = slot.copy_(self.parts[p])

    def sizes(self, p: Tensor) -> list[int]:
        """Return the elements of each rank's part."""
        return self._sizes[p]

    def start(self, p: Tensor) -> int:
        return sum(self.sizes(p)[: rank()])

    def part(self, p: Tensor) -> Tensor:
        return self.parts[p]

    def whole(self, p: Tensor) -> Tensor:
        return self.join(self.part(p), p) if p.requires_grad else p.detach()

    def join(self, part: Tensor, p: Tensor) -> Tensor:
        """Gather the parts of all ranks into a whole weight on the device."""
        whole = torch.empty(p.numel(), dtype=part.dtype, device=p.device)
        for owner, piece in enumerate(whole.split(self.sizes(p))):
            if piece.numel():
                dist.broadcast(piece.copy_(part) if owner == rank() else piece, owner)
        return whole.view(p.shape)

    def write(self, parameters: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
        for name, p in parameters.items():
            self.parts[p].copy_(state[name])
        mine = self.working.chunk(world_size())[rank()]
        mine.copy_(self.row)
        dist.all_gather_into_tensor(self.working, mine)
        torch.autograd.graph.increment_version(parameters.values())

    def padding(self, count: int, backward: bool = False) -> int:
        if not backward:
            return 0
        largest = all_reduce(torch.tensor(count).to(collective_device()), "max")
        return int(largest) - count
