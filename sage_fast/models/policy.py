"""A policy: networks that give a velocity, their trained weights, and snapshots of these.

Anchor, base, rollout and averaged policies are not further models: each is a snapshot of the trainable weights (the
adapter under LoRA) that `using` swaps in place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from diffusers.utils import logging
from torch import Tensor, nn

from sage_fast.models.protocol import Conditions, Inputs
from sage_fast.ops.transition_step import guided
from sage_fast.util.errors import UserError
from sage_fast.util.ranks import sequence_size, world_size

Item = TypeVar("Item")
State = dict[str, Tensor]
"""Trainable weights by name."""

ADAPTER = "default"
LORA_FILE = "pytorch_lora_weights.safetensors"


def lora_file(part: str) -> str:
    """File of the adapter of one part of a checkpoint."""
    return LORA_FILE if part == "transformer" else f"{part}_{LORA_FILE}"


class WholeStates:
    """How snapshots of weights are kept: here whole on every rank. An engine that shards has its own."""

    gathers = False
    """Whether a forward gathers weights that are spread over the ranks, so that all ranks make as many forwards."""

    def part(self, p: Tensor) -> Tensor:
        """This rank's share of a weight, sharing its memory."""
        return p.detach()

    def whole(self, p: Tensor) -> Tensor:
        """The weight from the shares of all ranks."""
        return p.detach()

    def write(self, parameters: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
        for name, p in parameters.items():
            p.copy_(state[name])

    def gather(self, state: State, parameters: Mapping[str, Tensor]) -> State:
        """Whole tensors of a snapshot; only the first rank needs them."""
        return state

    def split(self, whole: State, parameters: Mapping[str, Tensor]) -> State:
        """This rank's share of whole tensors; the inverse of `gather`."""
        return whole

    def lockstep(self, items: Sequence[Item], stand_in: Item) -> Iterator[tuple[Item, bool]]:
        """(item, True) for each forward or backward that this rank makes, then (stand_in, False) until it has made as
        many as any other, where ranks have to be in step. A collective before the first."""
        yield from ((item, True) for item in items)


def numel(p: Tensor) -> int:
    """Elements of a whole weight, of which a rank may hold a share."""
    return getattr(p, "ds_numel", p.numel())


def check_names(parameters: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """
    Raises:
        UserError: the names are not the same.
    """
    if parameters.keys() != state.keys():
        odd = sorted(parameters.keys() ^ state.keys())[0]
        raise UserError(f"state does not fit the policy's trainable weights: {odd} is on one side only")


class Policy:
    """A velocity field with trainable weights. A model's own subclass has `velocity` and `conditioning_table`.

    Args:
        networks: part of a checkpoint -> network, on its device.
        dtype: type of activations. Weights stored in another type are used under autocast.
        guidance_scale: classifier-free guidance; 1 runs only the conditional pass.

    Attributes:
        states: how snapshots are kept; an engine that shards sets its own.
        blocks: name of the list of blocks in each network.
        patch: places of the latents that make one token.
    """

    blocks = "transformer_blocks"
    patch = 1

    def __init__(self, networks: Mapping[str, Any], *, dtype: torch.dtype, guidance_scale: float = 1.0) -> None:
        self.networks = dict(networks)
        self.dtype = dtype
        self.guidance_scale = guidance_scale
        self.states = WholeStates()

    @property
    def device(self) -> torch.device:
        return next(iter(self.networks.values())).device

    @property
    def uses_guidance(self) -> bool:
        return self.guidance_scale != 1

    @property
    def in_step(self) -> bool:
        """Whether other ranks' forwards wait for this one's, so that none leaves a rollout on its own."""
        return sequence_size() > 1 or (world_size() > 1 and self.states.gathers)

    # -- forward ------------------------------------------------------------------------------------------------------

    def velocity(self, x: Tensor, inputs: Any) -> Tensor:
        """Velocity dx/dsigma at latents `x`, without guidance.

        Args:
            x: `[B, C, T, H, W]` latents, float32.
            inputs: of B samples, from `conditioning_table`.

        Returns:
            `[B, C, T, H, W]` in the activation type.
        """
        raise NotImplementedError

    def conditioning_table(self, sigmas: Tensor, embeddings: Mapping[Any, Any]) -> Conditions:
        """Conditions at every noise level, by the present weights.

        Args:
            sigmas: `[T]` in [0, 1].
            embeddings: key -> condition; with guidance, the negative ones too.
        """
        raise NotImplementedError

    @property
    def attention(self) -> Callable[..., Tensor] | None:
        """The kernel that serves it; None for a model that calls its own."""
        return None

    def serve(self, attention: Callable[..., Tensor]) -> None:
        """Serve attention by a kernel; called if `Spec.attention_shape` gives a shape."""
        raise NotImplementedError

    def share_samples(self, sequence: Any) -> None:
        """Run on a part of the tokens, by a `SequenceParallel`; called if `Spec.heads` allows it."""
        raise NotImplementedError

    def refresh(self) -> None:
        """Follow the trained weights before a recorded forward is replayed; a forward does so itself."""

    def use_all_weights(self) -> None:
        """From now on give every trained weight a gradient in every forward, so that all ranks have the same ones."""

    def velocities(self, x: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
        """Conditional and, with guidance, unconditional velocity."""
        conditional = self.velocity(x, inputs)
        if inputs.negative is None:
            return conditional, None
        return conditional, self.velocity(x, inputs.negative)

    def guided_velocity(self, x: Tensor, inputs: Inputs) -> Tensor:
        """The velocity that moves the latents, guidance included, float32; what `transition_score` differentiates."""
        v, v_uncond = self.velocities(x, inputs)
        return guided(v, v_uncond, self.guidance_scale, x.dtype) if v_uncond is not None else v

    def _autocast(self) -> torch.autocast:
        """For weights that are stored in another type than that of the activations."""
        weights = next(p for _, p in self.named_parameters()).dtype
        # A cache of the casts would hold every gathered weight to the end of the forward.
        return torch.autocast(
            self.device.type, dtype=self.dtype, enabled=weights != self.dtype, cache_enabled=not self.states.gathers
        )

    # -- weights ------------------------------------------------------------------------------------------------------

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """All weights; those of several networks are named `<network>.<name>`."""
        for network, module in self.networks.items():
            prefix = f"{network}." if len(self.networks) > 1 else ""
            yield from ((prefix + name, p) for name, p in module.named_parameters())

    def block_list(self) -> list[nn.Module]:
        """The blocks of all networks."""
        return [block for network in self.networks.values() for block in getattr(network, self.blocks)]

    def sharded_units(self) -> Iterable[nn.Module]:
        """The modules whose weights ZeRO-3 gathers for one forward or backward; all other weights stay whole."""
        return [module for block in self.block_list() for module in block.modules() if isinstance(module, nn.Linear)]

    def is_muon(self, name: str, p: Tensor) -> bool:
        """Whether the optimizer `muon` updates a weight by Muon: the matrices of the blocks."""
        return p.ndim == 2 and f".{self.blocks}." in f".{name}"

    def parameters(self) -> dict[str, nn.Parameter]:
        """Trainable parameters by name."""
        return {name: p for name, p in self.named_parameters() if p.requires_grad}

    def whole(self, p: Tensor) -> Tensor:
        """The values of a parameter; a collective where it is spread over ranks."""
        return self.states.whole(p)

    def parts(self) -> State:
        """The trainable weights as a snapshot holds them, without a copy."""
        return {name: self.states.part(p) for name, p in self.parameters().items()}

    def snapshot(self) -> State:
        """A copy of the trainable weights, or of this rank's share of them: as `states` keeps them."""
        return {name: part.clone() for name, part in self.parts().items()}

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Copy `state`, as `snapshot` gives it, into the trainable weights, in place.

        Raises:
            UserError: names or shapes differ; then nothing was changed.
        """
        check_names(self.parameters(), state)
        for name, part in self.parts().items():
            if part.shape != state[name].shape:
                raise UserError(f"{name}: expected shape {list(part.shape)}, got {list(state[name].shape)}")
        self.states.write(self.parameters(), state)

    @contextlib.contextmanager
    def using(self, state: State) -> Iterator[None]:
        """Run with another state of the trainable weights, then put the present ones back."""
        present = self.snapshot()
        try:
            self.load(state)
            yield
        finally:
            self.load(present)

    # -- files --------------------------------------------------------------------------------------------------------

    def save_weights(self, folder: Path) -> None:
        """Weights in diffusers format: the LoRA files, or the whole networks after full fine-tuning."""
        for part, network in self.networks.items():
            if not self.has_adapter:
                network.save_pretrained(folder / part)
                continue
            verbosity = logging.get_verbosity()
            logging.set_verbosity_error()  # `save_lora_adapter` warns of a cast that it does not make
            try:
                network.save_lora_adapter(folder, adapter_name=ADAPTER, weight_name=lora_file(part))
            finally:
                logging.set_verbosity(verbosity)

    @property
    def has_adapter(self) -> bool:
        return any(hasattr(network, "peft_config") for network in self.networks.values())
