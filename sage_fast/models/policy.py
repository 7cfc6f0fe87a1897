"""A policy: networks that predict a velocity, their trainable weights, and snapshots of those.

The anchor, base, rollout and averaged policies are not separate models. Each is a snapshot of the
trainable weights (the adapter under LoRA), and `using` swaps it in place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from sage_fast.models.interface import ConditionTable, Inputs
from sage_fast.ops.guidance import guided
from sage_fast.util.errors import UserError
from sage_fast.util.ranks import fails_alone, sequence_size, world_size

if TYPE_CHECKING:
    from sage_fast.models.streaming import BlockStream

Item = TypeVar("Item")
State = dict[str, Tensor]
"""Trainable weights by name."""


class UnshardedStates:
    """Storage of weight snapshots: here whole on every rank. A sharding engine has its own."""

    gathers = False
    """Whether a forward gathers sharded weights, so that all ranks must run the same number of
    forwards."""
    device: torch.device | None = None
    """Where forwards run, if shards may be elsewhere; by default where the weights are."""

    def part(self, p: Tensor) -> Tensor:
        """Return this rank's shard of a weight; it shares the weight's memory."""
        return p.detach()

    def start(self, p: Tensor) -> int:
        """Return the index in the flattened weight at which this rank's shard begins."""
        return 0

    def whole(self, p: Tensor) -> Tensor:
        """Return the whole weight, gathered from all ranks."""
        return p.detach()

    def shape(self, p: Tensor) -> torch.Size:
        """Return the shape of a whole weight, even if this rank holds only a shard."""
        return p.shape

    def write(self, parameters: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
        for name, p in parameters.items():
            p.copy_(state[name])

    def padding(self, count: int, backward: bool = False) -> int:
        """Return max(count over ranks) - count if all ranks must run the same number of forwards,
        else 0.

        Collective before the first forward. `backward` says that each forward has a backward, which
        reduces gradients.
        """
        return 0

    def pad_to_largest(
        self,
        items: Sequence[Item],
        idle: Callable[[], object],
        *,
        forwards: int | None = None,
        backward: bool = False,
    ) -> Iterator[Item]:
        """Yield the items, then run `idle` until every rank has made as many forwards as it must.

        Every loop over forwards goes through here: the number of a rank's items may be any, also 0.

        Args:
            items: the work of this rank.
            idle: runs a forward without effect, which must not need this rank's work
                (`rollout.idle`).
            forwards: forwards that the items take together; by default each takes one.
            backward: whether each forward has a backward, which reduces gradients.
        """
        missing = self.padding(len(items) if forwards is None else forwards, backward)
        yield from items
        for _ in range(missing):
            idle()


def check_names(parameters: Mapping[str, Tensor], state: Mapping[str, object]) -> None:
    """Check that a state has the names of the trainable weights.

    Raises:
        UserError: it does not.
    """
    if parameters.keys() != state.keys():
        odd = sorted(parameters.keys() ^ state.keys())[0]
        raise UserError(
            f"state does not fit the policy's trainable weights: {odd} is on one side only"
        )


class _Weight(NamedTuple):
    """A weight by the module that holds it, where an engine may put another tensor."""

    module: nn.Module
    name: str

    @property
    def tensor(self) -> Tensor:
        tensor = self.module._parameters[self.name]
        assert tensor is not None
        return tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype


class _StoredDtype(NamedTuple):
    """The dtype of the weights.

    Attributes:
        weight: one that has it.
        dtype: its dtype when all weights were read.
        activations: the policy's dtype then.
    """

    weight: _Weight
    dtype: torch.dtype
    activations: torch.dtype

    def holds(self, activations: torch.dtype) -> bool:
        """Whether neither dtype has changed since."""
        return self.weight.dtype == self.dtype and self.activations == activations


class Policy:
    """A velocity field with trainable weights. Each model's subclass implements `velocity` and
    `conditioning_table`.

    Args:
        networks: part of a checkpoint -> network, on its device.
        dtype: dtype of activations. If no weight is stored in it, forwards run under autocast.
        guidance_scale: classifier-free guidance; 1 runs only the conditional pass.

    Attributes:
        states: storage of snapshots; a sharding engine sets its own.
        attention: the attention kernel in use; None for a model that calls its own. Set only if
            `Spec.attention_shape` returns a shape.
        sequence: a `SequenceParallel` if ranks share a sample, each with a part of its tokens. Set
            only if `Spec.heads` allows it.
        uses_all_weights: forwards with gradients give one to every trained weight, so that all
            ranks reduce the same set.
        stream: brings the frozen weights of streamed blocks to the device; None if none is
            streamed.
        blocks: attribute name of the list of blocks in each network.
    """

    blocks = "transformer_blocks"

    def __init__(
        self, networks: Mapping[str, Any], *, dtype: torch.dtype, guidance_scale: float = 1.0
    ) -> None:
        self.networks = dict(networks)
        self.dtype = dtype
        self.guidance_scale = guidance_scale
        self.states = UnshardedStates()
        self.attention: Callable[..., Tensor] | None = None
        self.sequence: Any = None
        self.uses_all_weights = False
        self.stream: BlockStream | None = None
        self._stored: _StoredDtype | None = None

    @property
    def device(self) -> torch.device:
        if self.states.device is not None:
            return self.states.device
        if self.stream is not None:
            return self.stream.device  # the first weight may be in host memory
        # diffusers' own walks through every module
        _, first = next(self.named_parameters())
        return first.device

    @property
    def uses_guidance(self) -> bool:
        return self.guidance_scale != 1

    @property
    def guidance(self) -> float | None:
        """The guidance scale as the operators take it, beside an unconditional velocity; None
        without guidance."""
        return self.guidance_scale if self.uses_guidance else None

    @property
    def collective_forwards(self) -> bool:
        """Whether forwards are collective (ZeRO-3, sequence parallelism): no rank may leave a
        rollout alone."""
        return sequence_size() > 1 or (world_size() > 1 and self.states.gathers)

    # -- forward -----------------------------------------------------------------------------------

    def velocity(self, x: Tensor, inputs: Any) -> Tensor:
        """Velocity dx/dsigma at latents `x`, without guidance.

        Args:
            x: `[B, C, T, H, W]` latents, float32.
            inputs: inputs of B samples, from `conditioning_table`.

        Returns:
            `[B, C, T, H, W]` in the activation dtype.
        """
        raise NotImplementedError

    def conditioning_table(self, sigmas: Tensor, embeddings: Mapping[Any, Any]) -> ConditionTable:
        """Compute the conditions at every noise level with the present weights.

        Args:
            sigmas: `[T]` in [0, 1], where each step begins; the last step ends at 0.
            embeddings: key -> condition; with guidance, including the negative ones.
        """
        raise NotImplementedError

    def refresh(self) -> None:
        """Pick up changed weights.

        Call before replaying a recorded forward; a normal forward does it itself.
        """

    def velocities(self, x: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
        """Return the conditional and, with guidance, the unconditional velocity."""
        conditional = self.velocity(x, inputs)
        if inputs.negative is None:
            return conditional, None
        return conditional, self.velocity(x, inputs.negative)

    def guided(self, v: Tensor, v_uncond: Tensor | None = None) -> Tensor:
        """Return the velocity that moves the latents: v in its own dtype, or with guidance both
        combined in float32."""
        return v if v_uncond is None else guided(v, v_uncond, self.guidance_scale, torch.float32)

    def guided_velocity(self, x: Tensor, inputs: Inputs) -> Tensor:
        """Return `guided` of the velocities at latents `x`."""
        return self.guided(*self.velocities(x, inputs))

    @contextlib.contextmanager
    def at_guidance(self, scale: float) -> Iterator[None]:
        """Sample at another guidance scale within the block."""
        before, self.guidance_scale = self.guidance_scale, scale
        try:
            yield
        finally:
            self.guidance_scale = before

    def _autocast(self) -> torch.autocast:
        """Return an autocast context, enabled if no weight is stored in the activations' dtype.

        A network may keep some of its weights in float32 beside those (diffusers'
        `_keep_in_fp32_modules`), and then computes with them in float32.
        """
        # Every forward asks. Engines round all matrices or none, so that one weight tells whether
        # all have to be read again.
        known = self._stored
        if known is None or not known.holds(self.dtype):
            self._stored = known = self._read_stored_dtype()
        enabled = known.dtype != self.dtype
        return torch.autocast(self._autocast_device, dtype=self.dtype, enabled=enabled)

    @property
    def _autocast_device(self) -> str:
        """The kind of device whose autocast acts; the meta device has none, and that of the CPU
        leaves its tensors as they are."""
        return "cpu" if self.device.type == "meta" else self.device.type

    def _read_stored_dtype(self) -> _StoredDtype:
        """Return the largest weight in the activations' dtype, or of all weights where none has
        it."""
        weights = []
        for network in self.networks.values():
            for module in network.modules():
                for name, p in module._parameters.items():
                    if p is not None:
                        weights.append(_Weight(module, name))
        fitting = [weight for weight in weights if weight.dtype == self.dtype]
        largest = max(fitting or weights, key=lambda weight: weight.tensor.numel())
        return _StoredDtype(largest, largest.dtype, self.dtype)

    # -- weights -----------------------------------------------------------------------------------

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield all weights by name; with several networks, the names are `<network>.<name>`."""
        for network, module in self.networks.items():
            prefix = f"{network}." if len(self.networks) > 1 else ""
            yield from ((prefix + name, p) for name, p in module.named_parameters())

    def block_list(self) -> list[nn.Module]:
        """Return the blocks of all networks."""
        return [
            block for network in self.networks.values() for block in getattr(network, self.blocks)
        ]

    def sharded_units(self) -> list[Sequence[nn.Module]]:
        """Return the modules whose weights ZeRO-3 shards, in chains of modules that a forward calls
        one after the other.

        A module's weights are gathered for its forward and its backward. All other weights stay
        whole.
        """
        return [list(getattr(network, self.blocks)) for network in self.networks.values()]

    def streamed_units(self, chosen: Sequence[int]) -> list[Sequence[nn.Module]]:
        """Return the modules whose frozen weights are streamed (`models.streaming`), in chains of
        modules that a forward calls one after the other; the last chain is the blocks.

        Args:
            chosen: indices of blocks in `block_list`.
        """
        blocks = self.block_list()
        return [[blocks[index] for index in chosen]]

    def is_muon(self, name: str, p: Tensor) -> bool:
        """Whether the optimizer `muon` updates this weight by Muon: true for the matrices of the
        blocks."""
        return p.ndim == 2 and f".{self.blocks}." in f".{name}"

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the trainable parameters by name."""
        return {name: p for name, p in self.named_parameters() if p.requires_grad}

    def parts(self) -> State:
        """Return the trainable weights, or this rank's shards of them, without a copy."""
        return {name: self.states.part(p) for name, p in self.parameters().items()}

    def snapshot(self) -> State:
        """Return a copy of the trainable weights, or of this rank's shards of them."""
        return {name: part.clone() for name, part in self.parts().items()}

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Copy `state`, a `snapshot`, into the trainable weights in place.

        Raises:
            UserError: names or shapes differ; nothing is changed then.
        """
        check_names(self.parameters(), state)
        for name, part in self.parts().items():
            if part.shape != state[name].shape:
                raise UserError(
                    f"{name}: expected shape {list(part.shape)}, got {list(state[name].shape)}"
                )
        self.states.write(self.parameters(), state)

    @contextlib.contextmanager
    def using(self, state: State) -> Iterator[None]:
        """Run with another state of the trainable weights, then restore the present one.

        After an error of this rank alone they are not restored: a sharding engine would need a
        collective.
        """
        present = self.snapshot()
        try:
            self.load(state)
            yield
        finally:
            if not fails_alone():
                self.load(present)

    @property
    def trains_adapter(self) -> bool:
        return any(hasattr(network, "peft_config") for network in self.networks.values())
