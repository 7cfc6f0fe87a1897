"""HunyuanVideo 1.5 as a policy, over diffusers' `HunyuanVideo15Transformer3DModel`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from diffusers import HunyuanVideo15Transformer3DModel
from torch import Tensor, nn

from sage_fast.models.attention.backends import Attention
from sage_fast.models.attention.sequence import SequenceParallel
from sage_fast.models.hunyuan15.conditioning import ConditionTable, Images, Inputs
from sage_fast.models.hunyuan15.forward import TextToVideoForward
from sage_fast.models.hunyuan15.text import TextEmbedding
from sage_fast.models.interface import Key
from sage_fast.models.policy import Policy


class HunyuanVideo15Policy(Policy):
    """The policy over a HunyuanVideo 1.5 transformer.

    Args:
        transformer: any instance of the diffusers class, on its device.
        dtype: dtype of activations. Weights stored in another dtype run under autocast.
        guidance_scale: classifier-free guidance; 1 runs only the conditional pass.
    """

    def __init__(
        self, transformer: HunyuanVideo15Transformer3DModel, *, dtype: torch.dtype, guidance_scale: float = 1.0
    ) -> None:
        super().__init__({"transformer": transformer}, dtype=dtype, guidance_scale=guidance_scale)
        self.transformer = transformer
        self.forward = TextToVideoForward(transformer, dtype)

    @property
    def attention(self) -> Attention:
        return self.forward.attention

    def set_attention(self, attention: Attention) -> None:
        self.forward.attention = attention

    def enable_sequence_parallel(self, sequence: SequenceParallel) -> None:
        self.forward.sequence = sequence

    def use_all_weights(self) -> None:
        self.forward.uses_all_embedders = True

    def sharded_units(self) -> list[Sequence[nn.Module]]:
        return [list(self.forward.adaln), list(self.forward.blocks)]

    def refresh(self) -> None:
        self.forward.refresh()

    def velocity(self, x: Tensor, inputs: Inputs) -> Tensor:
        self.forward.refresh()
        with self._autocast():
            return self.forward(x.to(self.dtype), inputs)

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
                context, images = self.forward.context(1000 * sigma, texts), self.forward.images(texts)
                frame = None if images is None else images.frame
                context = (context if images is None else images.beside(context)).to(self.dtype)
                return Inputs(modulation=modulation, final=final, context=context, frame=frame)

            return dataclasses.replace(
                conditioning(texts), negative=None if negatives is None else conditioning(negatives)
            )

    @torch.no_grad()
    def conditioning_table(self, sigmas: Tensor, embeddings: Mapping[Any, TextEmbedding]) -> ConditionTable:
        """Compute the conditioning of every prompt at every noise level with the present weights.

        Args:
            sigmas: `[T]` in [0, 1], where each step begins; the last step ends at 0.
            embeddings: key -> embedding; with guidance, including the negative prompts.
        """
        sigmas = sigmas.to(self.device, torch.float32)
        timesteps = 1000 * sigmas

        def contextualize(embeddings: Sequence[TextEmbedding]) -> tuple[Tensor, Images | None]:
            texts = [embedding.to(self.device, self.dtype) for embedding in embeddings]
            with self._autocast():
                context = self.forward.context(timesteps.repeat_interleave(len(texts)), texts * len(timesteps))
                images = self.forward.images(texts)
            return context.to(self.dtype).unflatten(0, (len(timesteps), len(embeddings))), images

        with self._autocast():
            modulation, final = self.forward.modulation(timesteps, self.dtype, self._ends(timesteps))
        trained = None if self.forward.conditioning_is_frozen else functools.partial(self._trained, sigmas, embeddings)
        return ConditionTable(modulation, final, embeddings, contextualize, self.uses_guidance, trained)

    def _trained(
        self, sigmas: Tensor, embeddings: Mapping[Any, TextEmbedding], keys: Sequence[Key], steps: Tensor
    ) -> Inputs:
        """Compute the conditioning at `steps` with gradients."""
        sigma, ends = sigmas[steps].expand(len(keys)), self._ends(sigmas)
        end = None if ends is None else ends[steps].expand(len(keys))
        texts = [embeddings[key] for key in keys]
        negatives = [embeddings[text.negative] for text in texts] if self.uses_guidance else None
        return self.condition(sigma, texts, negatives, end)

    def _ends(self, starts: Tensor) -> Tensor | None:
        """Return where each step of a schedule ends, if the network takes it: where the next one begins, at last 0."""
        return torch.cat([starts[1:], starts.new_zeros(1)]) if self.forward.has_mean_velocity else None


def freeze_dead_ends(transformer: Any, *, takes_images: bool = False) -> None:
    """Freeze layers that the task never reads, so that no optimizer or reducer waits for their gradients.

    Nothing reads the last block's text stream, so its queries and all that follows are idle; its keys and values are
    not. In text-to-video, without image tokens, the image projection is idle too.
    """
    last = transformer.transformer_blocks[-1]
    idle = [last.attn.add_q_proj, last.attn.norm_added_q, last.attn.to_add_out, last.ff_context]
    for module in [*idle, *([] if takes_images else [transformer.image_embedder])]:
        module.requires_grad_(False)
