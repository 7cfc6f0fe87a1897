"""The DeepSpeed engine: ZeRO-1, 2 and 3 (arXiv 1910.02054), with optional offload of optimizer and weights to the host.

DeepSpeed does not run our forward. It gets the modules, hooks their weights and receives every loss; it shards and
updates weights, gradients and AdamW's moments. All else is as in the plain engine: learning rate, averages, files, and
weights without a gradient, which stay unchanged.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_optimizer_state
from torch import Tensor, nn

from sage_fast.models.policy import Item, Policy, State, WholeStates, check_names
from sage_fast.parallel.optimizers import BETAS
from sage_fast.parallel.plain import Engine
from sage_fast.parallel.settings import deepspeed_settings, stage_of
from sage_fast.util.errors import UserError
from sage_fast.util.ranks import all_reduce, data_size, join_deepspeed, rank, world_size

MOMENTS = ("exp_avg", "exp_avg_sq")


class ZeroEngine(Engine):
    """ZeRO over all ranks; one rank works too.

    Each rank keeps its share of anchor and averaged weights. With ZeRO-3 this is its shard of the weights (in host
    memory with `train.offload = all`), otherwise an equal part of each weight.
    """

    def _prepare(self) -> None:
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        if not dist.is_initialized():
            backend = "nccl" if self.policy.device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
            os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed requires it
        join_deepspeed()
        self.stage = stage_of(self.config)
        trained = sum(p.numel() for p in self.parameters)
        self._moves = torch.zeros(len(self.parameters), dtype=torch.bool, device=self.policy.device)
        self._moved: set[int] = set()  # weights that have moments
        for number, p in enumerate(self.parameters):
            p.register_hook(functools.partial(self._note, number))
        # We apply weight decay ourselves (`_decay`): DeepSpeed's optimizer only sees one flat buffer.
        fused = True if self.config.offload != "none" else None
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=self.config.learning_rate,
            betas=BETAS,
            eps=self.config.eps,
            weight_decay=0.0,
            fused=fused,
        )
        self.optimizer.register_step_pre_hook(self._decay)
        modules = _Modules(self.policy)
        self.deepspeed, *_ = deepspeed.initialize(
            model=modules, optimizer=self.optimizer, config=deepspeed_settings(self.config, trained)
        )
        self.policy.use_all_weights()
        self.policy.states = _Parts() if self.stage < 3 else _Shards(self.deepspeed.optimizer, modules)

    def _note(self, number: int, grad: Tensor) -> None:
        self._moves[number].logical_or_(grad.any())

    def backward(self, loss: Tensor, total: int) -> None:
        """Accumulate the gradients of one micro-batch. Every rank must call equally often: `policy.states.lockstep`."""
        self.deepspeed.backward(self.deepspeed(data_size() / total * loss))

    def _update(self, rate: float) -> float:
        all_reduce(moves := self._moves.int(), "max")
        self._moving = moves.bool().tolist()
        self._moves.zero_()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if self.stage == 3:  # DeepSpeed would reuse the gradient of the previous update
            for p, moves in zip(self.parameters, self._moving):
                if not moves and (part := self._local(p)) is not None:
                    deepspeed.utils.safe_set_local_grad(p, torch.zeros_like(part))
        self._rate, self._decayed = rate, False
        with self._resting(self._moved - {i for i, moves in enumerate(self._moving) if moves}):
            self.deepspeed.step()
        if self.deepspeed.optimizer.overflow:  # nothing was updated
            return float("nan")
        self._moved |= {i for i, moves in enumerate(self._moving) if moves}
        return float(self.deepspeed.get_global_grad_norm())

    @torch.no_grad()
    def _decay(self, *_: Any) -> None:
        """Decay the weights about to be updated. Runs once per update, even if DeepSpeed steps in several parts."""
        if not self._decayed:
            self._decayed = True
            for p, moves in zip(self.parameters, self._moving):
                if moves and (part := self._local(p)) is not None:
                    part.mul_(1 - self._rate * self.config.weight_decay)

    @contextlib.contextmanager
    def _resting(self, numbers: set[int]) -> Iterator[None]:
        """Freeze weights that have moments but no gradient: zero their moments for the block, then restore them."""
        kept = []
        for p in (self.parameters[number] for number in sorted(numbers)):
            moments = [part for key in MOMENTS if (part := self._local(p, key)) is not None]
            kept += [(part, part.clone()) for part in moments]
            for part in moments:
                part.zero_()
        yield
        for part, values in kept:
            part.copy_(values)

    def _local(self, p: Any, key: str | None = None) -> Tensor | None:
        """Return this rank's float32 shard of a weight, or of its moment `key`; None if it holds none."""
        if self.stage == 3:
            return self.deepspeed.optimizer._get_fp32_opt_state_partition(p, False, key)[0]
        return None if p._hp_mapping is None else p._hp_mapping.get_hp_fragment(key)

    # -- files --------------------------------------------------------------------------------------------------------

    @property
    def _state_device(self) -> torch.device:
        return torch.device("cpu")

    def _optimizer_states(self) -> list[Mapping[int, Any]]:
        """Optimizer state as torch's AdamW has it for unsharded weights; none for weights that never had a gradient."""
        states = {}
        for number in sorted(self._moved):
            moments = {key: safe_get_full_optimizer_state(self.parameters[number], key) for key in MOMENTS}
            if rank() == 0:
                states[number] = {"step": torch.tensor(float(self.steps))}
                states[number] |= {key: moment.cpu() for key, moment in moments.items()}
        return [states]

    def _load_optimizer_states(self, states: list[Mapping[int, Any]]) -> None:
        optimizer = self.deepspeed.optimizer
        optimizer.refresh_fp32_params()
        steps = max((float(state["step"]) for state in states[0].values()), default=0.0)
        ours = "fp32_partitioned_groups_flat" if self.stage == 3 else "single_partition_of_fp32_groups"
        for flat in getattr(optimizer, ours):
            state = self.optimizer.state[flat]
            state["step"] = torch.tensor(steps)
            state |= {key: torch.zeros_like(flat, requires_grad=False) for key in MOMENTS}
        if self.stage < 3:
            optimizer._lazy_init_hp_params_optimizer_state()
        for number, state in states[0].items():
            for key in MOMENTS:
                deepspeed.utils.safe_set_full_optimizer_state(
                    self.parameters[number], state[key].to(self.policy.device), key
                )
        self._moved = set(states[0])

    def remember(self) -> bool:
        """Return False: host memory may hold DeepSpeed's shards, or be needed for them."""
        return False

    def save_weights(self, folder: Any) -> None:
        with self._whole_on_host():
            super().save_weights(folder)

    @contextlib.contextmanager
    def _whole_on_host(self) -> Iterator[None]:
        """With ZeRO-3, give rank 0 the weights to be saved, whole and in host memory, within the block."""
        present = []
        if self.stage == 3:
            adapter = self.policy.has_adapter
            for name, p in self.policy.named_parameters():
                if not adapter or ".lora_" in name:
                    whole = self.policy.whole(p)
                    if rank() == 0:
                        present.append((p, p.data))
                        p.data = whole.cpu()
        try:
            yield
        finally:
            for p, data in present:
                p.data = data


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


class _Parts(WholeStates):
    """Snapshots as equal parts of whole weights (ZeRO-1 and 2)."""

    def part(self, p: Tensor) -> Tensor:
        size = -(-p.numel() // world_size())
        return p.detach().view(-1)[rank() * size : (rank() + 1) * size]

    def join(self, part: Tensor, p: Tensor) -> Tensor:
        """Gather the parts of all ranks into a whole weight on the device."""
        shape = getattr(p, "ds_shape", p.shape)
        padded = part.new_zeros(-(-shape.numel() // world_size()), device=p.device)
        padded[: part.numel()] = part[: padded.numel()]
        parts = [torch.empty_like(padded) for _ in range(world_size())]
        dist.all_gather(parts, padded)
        return torch.cat(parts)[: shape.numel()].view(shape)

    def write(self, parameters: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
        for name, p in parameters.items():
            p.copy_(self.join(state[name], p))

    def gather(self, state: State, parameters: Mapping[str, Tensor]) -> State:
        whole = {}
        for name, p in parameters.items():
            tensor = self.join(state[name], p)
            if rank() == 0:
                whole[name] = tensor.cpu()
        return whole

    def split(self, whole: State, parameters: Mapping[str, Tensor]) -> State:
        check_names(parameters, whole)
        for name, p in parameters.items():
            shape = getattr(p, "ds_shape", p.shape)
            if whole[name].shape != shape:
                raise UserError(f"{name}: expected shape {list(shape)}, got {list(whole[name].shape)}")
        return {name: self._of(whole[name], p) for name, p in parameters.items()}

    def _of(self, whole: Tensor, p: Tensor) -> Tensor:
        return _Parts.part(self, whole).to(p.device, copy=True)

    def lockstep(self, items: Sequence[Item], stand_in: Item) -> Iterator[tuple[Item, bool]]:
        most = int(all_reduce(torch.tensor(len(items)).to(_device()), "max"))
        yield from super().lockstep(items, stand_in)
        yield from [(stand_in, False)] * (most - len(items))


class _Shards(_Parts):
    """Snapshots of this rank's ZeRO-3 shards; averaging them needs no communication."""

    gathers = True

    def __init__(self, optimizer: Any, modules: _Modules) -> None:
        self.optimizer = optimizer
        offload = optimizer.parameter_offload
        # The hook would record the order of the layers for prefetching, and require the same order on all ranks.
        offload.fwd_pre_hook.remove()
        gathered = {p for module in modules.gathered for p in module.parameters()}
        self.kept: list[Any] = [p for p in modules.parameters() if p not in gathered]
        offload.persistent_parameters += self.kept  # gathered after every update
        self._gather_kept()

    def _gather_kept(self) -> None:
        self.kept[0].all_gather(self.kept)

    def part(self, p: Any) -> Tensor:
        return p.ds_tensor.detach()

    def whole(self, p: Tensor) -> Tensor:
        return self.join(self.part(p), p)

    def write(self, parameters: Mapping[str, Any], state: Mapping[str, Tensor]) -> None:
        self.optimizer.empty_partition_cache()
        for name, p in parameters.items():
            p.ds_tensor.data.copy_(state[name])
        self._gather_kept()

    def _of(self, whole: Tensor, p: Any) -> Tensor:
        part, shard = super()._of(whole, p), torch.zeros_like(p.ds_tensor)
        shard[: part.numel()] = part
        return shard


def _device() -> torch.device:
    """Return the device on which collectives run."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
