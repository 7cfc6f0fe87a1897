"""The engine `zero3`: PyTorch's FSDP2 (`fully_shard`) gathers the weights of a block for its
forward and backward.

The units are the modules of `policy.sharded_units`: one all-gather each, with the next one's under
way. A trained weight of a unit is a float32 shard on each rank, which the optimizers update in
place. It is gathered in the activations' dtype, and its gradient is reduced in float32 after every
micro-batch. All other weights stay whole on each rank, as in the plain engine: ranks may use them a
different number of times.

With `train.offload_shards` the shards are in host memory, with their gradients, moments, anchor and
average. FSDP2 copies a unit's shard to the GPU before it is gathered, and its reduced gradient
back.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Iterable, Mapping
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from sage_fast.models.policy import Policy, UnshardedStates
from sage_fast.parallel import ranks_that_shard
from sage_fast.parallel.gradients import average_gradients
from sage_fast.parallel.muon import Partition
from sage_fast.parallel.optimizers import make_optimizers
from sage_fast.parallel.plain import PlainEngine
from sage_fast.util.console import wrapped
from sage_fast.util.environment import synchronize
from sage_fast.util.ranks import all_reduce, start_alone, world_size

log = logging.getLogger(__name__)


class FsdpEngine(PlainEngine):
    """FSDP2 over all ranks, or over those of a node (`train.hybrid_shard`); one rank works too."""

    def _prepare(self) -> None:
        policy = self.policy
        start_alone(policy.device)
        shards = torch.tensor(ranks_that_shard(self.config, world_size()), device=policy.device)
        # nodes may differ in size
        mesh, self.replicate_group = _meshes(policy.device, int(all_reduce(shards, "max")))
        offload = self.config.offload_shards
        matrices = {name for name, p in policy.parameters().items() if policy.is_muon(name, p)}
        self.parameters.clear()  # so that each whole weight is freed once it is sharded
        policy.states = ShardedStates(policy.device, in_host_memory=offload)
        _shard(policy, mesh, offload=offload)
        named = policy.parameters()
        self.parameters = list(named.values())
        self.optimized = {name: nn.Parameter(policy.states.part(p)) for name, p in named.items()}
        partitions = {
            name: Partition(shape=p.shape, sizes=sizes(p), group=mesh.get_group())
            for name, p in named.items()
            if isinstance(p, DTensor)
        }
        self.optimizers = make_optimizers(
            self.optimized, self.config, matrices, partitions, self.policy.trains_adapter
        )
        policy.uses_all_weights = True
        if policy.trains_adapter:
            log.info(
                wrapped(
                    "note: with train.engine = zero3 a LoRA is added to the rounded output of its "
                    "layer, as peft does, not within one float32 sum: in bfloat16, small changes "
                    "of a young adapter are lost. If the frozen weights fit on each GPU, "
                    "train.engine = plain keeps them"
                )
            )

    def _reduce_gradients(self) -> None:
        """Average gradients: of whole weights over all ranks, of shards over the nodes; FSDP2 did
        so within them."""
        whole: list[Tensor] = []
        shards: list[Tensor] = []
        for p, part in zip(self.parameters, self.optimized.values()):
            part.grad = None if p.grad is None else self.policy.states.part(p.grad)
            p.grad = None
            (shards if isinstance(p, DTensor) else whole).append(part)
        average_gradients(whole, self.policy.device)
        if self.replicate_group is not None:
            average_gradients(shards, self.policy.device, self.replicate_group)

    def _gradient_norm(self) -> Tensor:
        sharded: list[Tensor] = []
        whole: list[Tensor] = []
        for p, part in zip(self.parameters, self.optimized.values()):
            if part.grad is not None:
                (sharded if isinstance(p, DTensor) else whole).append(part.grad)
        # NCCL reduces nothing on the CPU, where the norm of no gradients is, and that of shards in
        # host memory.
        of_shards = get_total_norm(sharded).to(self.policy.device)
        of_whole = get_total_norm(whole).to(self.policy.device)
        copies = 1 if self.replicate_group is None else dist.get_world_size(self.replicate_group)
        return (all_reduce(of_shards.square()) / copies + of_whole.square()).sqrt()


class ShardedStates(UnshardedStates):
    """Snapshots of this rank's shards: copying, averaging and writing them needs no communication.

    A part is a contiguous slice of the flattened weight.
    """

    gathers = True
    device: torch.device

    def __init__(self, device: torch.device, *, in_host_memory: bool = False) -> None:
        self.device = device
        self.in_host_memory = in_host_memory

    def padding(self, count: int, backward: bool = False) -> int:
        return int(all_reduce(torch.tensor(count, device=self.device), "max")) - count

    def part(self, p: Tensor) -> Tensor:
        detached = p.detach()
        return (detached.to_local() if isinstance(detached, DTensor) else detached).view(-1)

    def start(self, p: Tensor) -> int:
        """Return the index in the flattened weight at which this rank's part begins."""
        return sum(sizes(p)[: p.device_mesh.get_local_rank()]) if isinstance(p, DTensor) else 0

    def whole(self, p: Tensor) -> Tensor:
        if not isinstance(p, DTensor):
            return p.detach()
        # from the GPU for NCCL, if shards are in host memory
        on_device = cast(DTensor, p.detach().to(self.device))
        return on_device.full_tensor()

    def write(self, parameters: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
        if self.in_host_memory:
            # The host runs ahead: copies of the present shards to the GPU may be under way.
            synchronize(self.device)
        for name, p in parameters.items():
            self.part(p).copy_(state[name])


def _meshes(device: torch.device, shards: int) -> tuple[DeviceMesh, dist.ProcessGroup | None]:
    """Return the mesh of ranks that share a copy of the weights, and the group of those with the
    same shards."""
    copies = world_size() // shards
    if copies == 1:
        return init_device_mesh(device.type, (shards,), mesh_dim_names=("shard",)), None
    mesh = init_device_mesh(device.type, (copies, shards), mesh_dim_names=("copy", "shard"))
    return mesh["shard"], mesh.get_group("copy")


def _shard(policy: Policy, mesh: DeviceMesh, *, offload: bool = False) -> None:
    """Shard the policy's units; a module runs its forward with its weights, and after it holds the
    shards.

    `offload` keeps the shards in host memory.
    """
    # Pinned host memory lets copies run beside the forward; only CUDA has it.
    in_host_memory = CPUOffloadPolicy(pin_memory=policy.device.type == "cuda")
    shard = functools.partial(
        fully_shard,
        mesh=mesh,
        reshard_after_forward=True,
        offload_policy=in_host_memory if offload else OffloadPolicy(),
        mp_policy=MixedPrecisionPolicy(
            param_dtype=policy.dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        ),
    )
    chains = policy.sharded_units()
    for p in nn.ModuleList(itertools.chain(*chains)).parameters():
        p.data = p.data.contiguous()  # a forward may have laid the weight beside its adapter
    for chain in chains:
        sharded = [shard(unit) for unit in chain]
        for unit, following in itertools.pairwise(sharded):
            unit.set_modules_to_forward_prefetch([following])
    # The first forward tells FSDP2 the root, whose units share streams and the end of a backward.
    root = _Root(itertools.chain(*chains))
    fully_shard(root, mesh=mesh)
    root(None)


class _Root(nn.Module):
    def __init__(self, units: Iterable[nn.Module]) -> None:
        super().__init__()
        self.units = nn.ModuleList(units)

    def forward(self, _: None) -> None:
        """Do nothing.

        FSDP2 of PyTorch 2.11 takes the first argument to move it to the GPU, and fails without one.
        """


def sizes(p: DTensor) -> tuple[int, ...]:
    """Return the elements of a weight on each rank of its mesh: FSDP2 shards rows as `torch.chunk`
    does."""
    rows = -(-p.shape[0] // p.device_mesh.size())
    ends = [min(end * rows, p.shape[0]) for end in range(p.device_mesh.size() + 1)]
    return tuple(
        (end - start) * (p.numel() // p.shape[0]) for start, end in itertools.pairwise(ends)
    )
