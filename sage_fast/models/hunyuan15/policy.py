"""HunyuanVideo 1.5 as a policy, over diffusers' `HunyuanVideo15Transformer3DModel`."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from diffusers import HunyuanVideo15Transformer3DModel
from torch import Tensor, nn

from sage_fast.models.attention.backends import ATTENTION, REFERENCE, Attention
from sage_fast.models.hunyuan15.conditioning import BatchConditions, Images, Inputs, TextEmbedding
from sage_fast.models.hunyuan15.forward import TextToVideoForward
from sage_fast.models.interface import ConditionKey
from sage_fast.models.policy import Policy


class HunyuanVideo15Policy(Policy):
    """The policy over a HunyuanVideo 1.5 transformer.

    Args:
        transformer: any instance of the diffusers class, on its device.
        dtype: dtype of activations. If no weight is stored in it, forwards run under autocast.
        guidance_scale: classifier-free guidance; 1 runs only the conditional pass.
    """

    def __init__(
        self,
        transformer: HunyuanVideo15Transformer3DModel,
        *,
        dtype: torch.dtype,
        guidance_scale: float = 1.0,
    ) -> None:
        super().__init__({"transformer": transformer}, dtype=dtype, guidance_scale=guidance_scale)
        self.transformer = transformer
        self.forward = TextToVideoForward(transformer, dtype)
        self.attention: Attention = ATTENTION[REFERENCE]

    def sharded_units(self) -> list[Sequence[nn.Module]]:
        return [list(self.forward.adaln), list(self.forward.blocks)]

    def streamed_units(self, chosen: Sequence[int]) -> list[Sequence[nn.Module]]:
        adaln = []  # a third of a block's weights, read once a schedule
        for index in chosen:
            block: Any = self.transformer.transformer_blocks[index]
            adaln += [block.norm1.linear, block.norm1_context.linear]
        return [adaln, [self.forward.blocks[index] for index in chosen]]

    def refresh(self) -> None:
        self.forward.refresh()

    def velocity(self, x: Tensor, inputs: Inputs) -> Tensor:
        self.forward.refresh()
        with self._autocast():
            return self.forward(x.to(self.dtype), inputs, self.attention, self.sequence)

    def condition(
        self,
        sigma: Tensor,
        texts: Sequence[TextEmbedding],
        negatives: Sequence[TextEmbedding] | None = None,
        end: Tensor | None = None,
    ) -> Inputs:
        """Compute the conditioning of B samples, differentiably.

        Args:
            sigma: float32 `[B]` in [0, 1]; the network's timestep is 1000 sigma.
            texts: B prompts with one number of tokens.
            negatives: B negative prompts, for guidance.
            end: sigma at the end of the step, float32 `[B]`, for a network with a mean velocity.
        """
        with self._autocast():
            ends = None if end is None else 1000 * end
            modulation, final = self.forward.modulation(1000 * sigma, self.dtype, ends)

            def conditioning(texts: Sequence[TextEmbedding]) -> Inputs:
                every = self.uses_all_weights and torch.is_grad_enabled()
                context, images = (
                    self.forward.context(1000 * sigma, texts, every),
                    self.forward.images(texts),
                )
                frame = None if images is None else images.frame
                context = (context if images is None else images.beside(context)).to(self.dtype)
                return Inputs(modulation=modulation, final=final, context=context, frame=frame)

            return dataclasses.replace(
                conditioning(texts), negative=None if negatives is None else conditioning(negatives)
            )

    def conditioning_table(
        self, sigmas: Tensor, embeddings: Mapping[Any, TextEmbedding]
    ) -> ConditionTable:
        return ConditionTable(self, sigmas, embeddings)

    def step_ends(self, starts: Tensor) -> Tensor | None:
        """Return where each step of a schedule ends, if the network takes it: where the next one
        begins, at last 0."""
        return (
            torch.cat([starts[1:], starts.new_zeros(1)]) if self.forward.has_mean_velocity else None
        )


class ConditionTable:
    """Conditions at every step of a rollout; each prompt's part is computed on first use.

    If the weights behind it are frozen, as under LoRA on the blocks, training reads the same table.

    Args:
        policy: its weights make the conditions.
        sigmas: `[T]` in [0, 1], where each step begins; the last step ends at 0.
        embeddings: key -> embedding; with guidance, including the negative prompts.

    Attributes:
        modulation: `[T, layers, 2, 6, d]`.
        final: `[T, 2, d]`.
    """

    @torch.no_grad()
    def __init__(
        self, policy: HunyuanVideo15Policy, sigmas: Tensor, embeddings: Mapping[Any, TextEmbedding]
    ) -> None:
        self.policy = policy
        self.embeddings = embeddings
        self.sigmas = sigmas.to(policy.device, torch.float32)
        times = 1000 * self.sigmas
        with policy._autocast():
            self.modulation, self.final = policy.forward.modulation(
                times, policy.dtype, policy.step_ends(times)
            )
        self._contexts: dict[ConditionKey, Tensor] = {}  # glyph and text tokens `[T, L, d]`
        self._images: dict[ConditionKey, Images] = {}

    def of(self, keys: Sequence[ConditionKey]) -> BatchConditions:
        """Return the conditions of a batch, whose prompts have one number of tokens."""
        negatives = [self.embeddings[key].negative for key in keys]
        return self._batch(keys)._replace(
            negative=self._batch(negatives) if self.policy.uses_guidance else None
        )

    def at(self, keys: Sequence[ConditionKey], steps: Tensor) -> Inputs:
        """Return rows of the table; if the weights behind it are trained, recompute them with
        gradients."""
        return (
            self.of(keys).at(steps)
            if self.policy.forward.conditioning_is_frozen
            else self.trained(keys, steps)
        )

    def trained(self, keys: Sequence[ConditionKey], steps: Tensor) -> Inputs:
        """Compute the conditions at `steps` with gradients."""
        texts = [self.embeddings[key] for key in keys]
        negatives = (
            [self.embeddings[text.negative] for text in texts]
            if self.policy.uses_guidance
            else None
        )
        sigma, ends = self.sigmas[steps].expand(len(keys)), self.policy.step_ends(self.sigmas)
        return self.policy.condition(
            sigma, texts, negatives, None if ends is None else ends[steps].expand(len(keys))
        )

    def _batch(self, keys: Sequence[ConditionKey]) -> BatchConditions:
        self._fill(keys)
        keys = keys[:1] if len(set(keys)) == 1 else keys
        context = torch.stack([self._contexts[key] for key in keys], dim=1)
        own = [self._images[key] for key in keys if key in self._images]
        images = Images(*map(torch.cat, zip(*own))) if own else None
        return BatchConditions(self.modulation, self.final, context, images)

    @torch.no_grad()
    def _fill(self, keys: Sequence[ConditionKey]) -> None:
        """Compute missing contexts, prompts of equal length together."""
        policy, times = self.policy, 1000 * self.sigmas
        missing: dict[tuple[int, int], list[ConditionKey]] = defaultdict(list)
        for key in dict.fromkeys(keys):
            if key not in self._contexts:
                embedding = self.embeddings[key]
                missing[len(embedding.text), len(embedding.glyphs)].append(key)
        for group in missing.values():
            texts = [self.embeddings[key].to(policy.device, policy.dtype) for key in group]
            with policy._autocast():
                contexts = policy.forward.context(
                    times.repeat_interleave(len(texts)), texts * len(times)
                )
                images = policy.forward.images(texts)
            self._contexts |= zip(
                group, contexts.to(policy.dtype).unflatten(0, (len(times), -1)).unbind(1)
            )
            if images is not None:
                self._images |= zip(
                    group, map(Images, images.tokens.split(1), images.frame.split(1))
                )


def freeze_dead_ends(transformer: Any, *, takes_images: bool = False) -> None:
    """Freeze layers that the task never reads, so that no optimizer or reducer waits for their
    gradients.

    Nothing reads the last block's text stream, so its queries and all that follows are idle; its
    keys and values are not. In text-to-video, without image tokens, the image projection is idle
    too.
    """
    last = transformer.transformer_blocks[-1]
    idle = [last.attn.add_q_proj, last.attn.norm_added_q, last.attn.to_add_out, last.ff_context]
    for module in [*idle, *([] if takes_images else [transformer.image_embedder])]:
        module.requires_grad_(False)
