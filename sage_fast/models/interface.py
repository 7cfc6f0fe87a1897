"""The inputs of a video model besides the latents, in the four forms that they take.

    prompt -> Condition -> ConditionTable -> BatchConditions -> Inputs

An encoder makes a `Condition` of a prompt; it belongs to one sample and is cached on disk.
`conditioning_table` makes a `ConditionTable`, which covers an iteration at all of its noise levels.
Its `of` gives the `BatchConditions` of a batch, in tensors that a CUDA graph can hold, and their
`at` the `Inputs` of one forward. Each model packs conditions of different lengths in its own way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor

from sage_fast.util.captions import Caption, PromptKey
from sage_fast.util.encoders import check_finite

ConditionKey = Hashable
"""Opaque key of a sample's condition: a `PromptKey`, where the condition is that of a prompt."""
EMPTY_PROMPT = PromptKey("")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Condition:
    """A model's conditioning inputs for one sample, without padding. Subclasses add a field per
    tensor.

    Attributes:
        encoders: field -> part of the checkpoint that makes it, for messages; a field without an
            entry names itself.
        negative: key of the condition that guidance steers away from.
        notes: lines of text about its encoding, for the user; not cached.
    """

    encoders: ClassVar[Mapping[str, str]] = {}
    negative: ConditionKey = EMPTY_PROMPT
    notes: Any = ()

    @property
    def tokens(self) -> int:
        """Length in a forward; conditions of the same length share a batch."""
        raise NotImplementedError

    def tensors(self) -> dict[str, Tensor]:
        """Return field -> tensor, as cached on disk."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def check_finite(self, key: ConditionKey) -> None:
        """Check what the encoders give for the prompt of this key.

        Raises:
            UserError: a tensor has values that are not finite.
        """
        for name, tensor in self.tensors().items():
            check_finite(tensor, self.encoders.get(name, name), f"prompt {str(key)!r}")

    def to(self, device: torch.device, dtype: torch.dtype) -> Self:
        return dataclasses.replace(
            self, **{name: t.to(device, dtype) for name, t in self.tensors().items()}
        )


Encoder = Callable[[Caption], Condition]
"""Caption -> its `Condition`."""


def pass_lengths(
    conditions: Mapping[Any, Condition], *, guided: bool
) -> dict[ConditionKey, tuple[int, ...]]:
    """Return key -> condition length in each pass of a forward; with guidance, the negative one is
    a second pass."""
    return {
        key: (condition.tokens, conditions[condition.negative].tokens)
        if guided
        else (condition.tokens,)
        for key, condition in conditions.items()
    }


class Inputs(Protocol):
    """Inputs of one forward of B samples, besides the latents."""

    @property
    def negative(self) -> Self | None:
        """Inputs of the unconditional pass; None without guidance."""


class BatchConditions(Protocol):
    """Conditions of B samples at every noise level of a rollout: a named tuple of tensors, of None,
    or of such tuples.

    A CUDA graph reads copies of the tensors.
    """

    def at(self, steps: Tensor) -> Inputs:
        """Return the inputs at `steps`, int64 `[1]` (one step for all samples) or `[B]`.

        Must not synchronise.
        """


class ConditionTable(Protocol):
    """Conditions of all samples at every noise level of a rollout."""

    def of(self, keys: Sequence[ConditionKey]) -> BatchConditions:
        """Return the conditions of a batch."""

    def at(self, keys: Sequence[ConditionKey], steps: Tensor) -> Inputs:
        """Return the inputs of one training forward, differentiable if the weights behind them are
        trained."""
