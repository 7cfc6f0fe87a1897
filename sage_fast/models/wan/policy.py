"""Wan as a policy, over diffusers' `WanTransformer3DModel`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from torch import Tensor, nn

from sage_fast.models.attention.backends import ATTENTION, REFERENCE, Attention
from sage_fast.models.interface import ConditionKey
from sage_fast.models.policy import Policy
from sage_fast.models.wan.conditioning import BatchConditions, Inputs, TextEmbedding, inputs_of
from sage_fast.models.wan.forward import WanForward


class WanPolicy(Policy):
    """The policy over a Wan transformer.

    Args:
        transformer: any instance of the diffusers class, on its device.
        dtype: dtype of activations. Weights stored in another dtype run under autocast.
        guidance_scale: classifier-free guidance; 1 runs only the conditional pass.
    """

    blocks = "blocks"

    def __init__(
        self,
        transformer: WanTransformer3DModel,
        *,
        dtype: torch.dtype,
        guidance_scale: float = 1.0,
    ) -> None:
        super().__init__({"transformer": transformer}, dtype=dtype, guidance_scale=guidance_scale)
        self.transformer = transformer
        self.forward = WanForward(transformer, dtype)
        self.attention: Attention = ATTENTION[REFERENCE]

    def sharded_units(self) -> list[Sequence[nn.Module]]:
        return [list(self.forward.blocks)]

    def streamed_units(self, chosen: Sequence[int]) -> list[Sequence[nn.Module]]:
        return [[self.forward.blocks[index] for index in chosen]]

    def refresh(self) -> None:
        self.forward.refresh()

    def velocity(self, x: Tensor, inputs: Inputs) -> Tensor:
        self.forward.refresh()
        with self._autocast():
            return self.forward(x.to(self.dtype), inputs, self.attention, self.sequence)

    def modulation(self, sigmas: Tensor) -> tuple[Tensor, Tensor]:
        """Compute AdaLN at noise levels `[R]` in [0, 1]; see `WanForward.modulation`."""
        with torch.autocast(self._autocast_device, enabled=False):
            return self.forward.modulation(1000 * sigmas)

    def text(self, texts: Sequence[TextEmbedding]) -> Tensor:
        """Compute what cross-attention reads of R prompts, `[R, TEXT_TOKENS, d]`."""
        with self._autocast():
            return self.forward.text(texts)

    def conditioning_table(
        self, sigmas: Tensor, embeddings: Mapping[Any, TextEmbedding]
    ) -> ConditionTable:
        return ConditionTable(self, sigmas, embeddings)


class ConditionTable:
    """Conditions at every step of a rollout; a prompt's tokens are computed on first use.

    If the weights behind it are frozen, as under LoRA on the blocks, training reads the same table.

    Args:
        policy: its weights make the conditions.
        sigmas: `[T]` in [0, 1], where each step begins.
        embeddings: key -> embedding; with guidance, including the negative prompts.

    Attributes:
        modulation: float32 `[T, layers, 6, d]`.
        final: float32 `[T, 2, d]`.
    """

    @torch.no_grad()
    def __init__(
        self, policy: WanPolicy, sigmas: Tensor, embeddings: Mapping[Any, TextEmbedding]
    ) -> None:
        self.policy = policy
        self.embeddings = embeddings
        self.sigmas = sigmas.to(policy.device, torch.float32)
        self.modulation, self.final = policy.modulation(self.sigmas)
        self._texts: dict[ConditionKey, Tensor] = {}  # `[1, TEXT_TOKENS, d]`

    def of(self, keys: Sequence[ConditionKey]) -> BatchConditions:
        """Return the conditions of a batch."""
        negative = self._text(self._negatives(keys)) if self.policy.uses_guidance else None
        return BatchConditions(self.modulation, self.final, self._text(keys), negative)

    def at(self, keys: Sequence[ConditionKey], steps: Tensor) -> Inputs:
        """Return rows of the table; if the weights behind it are trained, recompute them with
        gradients."""
        if self.policy.forward.conditioning_is_frozen:
            return self.of(keys).at(steps)
        modulation, final = self.policy.modulation(self.sigmas[steps])
        texts = self.policy.text([self.embeddings[key] for key in keys])
        negative = None
        if self.policy.uses_guidance:
            negative = self.policy.text([self.embeddings[key] for key in self._negatives(keys)])
        return inputs_of(modulation, final, texts, negative)

    def _negatives(self, keys: Sequence[ConditionKey]) -> list[ConditionKey]:
        return [self.embeddings[key].negative for key in keys]

    @torch.no_grad()
    def _text(self, keys: Sequence[ConditionKey]) -> Tensor:
        """Return the tokens of prompts; a single row where all are the same."""
        for key in dict.fromkeys(keys):
            if key not in self._texts:
                self._texts[key] = self.policy.text([self.embeddings[key]])
        keys = keys[:1] if len(set(keys)) == 1 else keys
        return torch.cat([self._texts[key] for key in keys])
