"""A loaded model: what its configuration says, the trained part, and what stands before and after it."""

from __future__ import annotations

import dataclasses

from sage_fast.config.schema import SamplingConfig
from sage_fast.models.checkpointing import set_checkpointing
from sage_fast.models.decoder import Decoder
from sage_fast.models.policy import Policy
from sage_fast.models.protocol import Encoder, Spec


@dataclasses.dataclass(kw_only=True)
class Model:
    """A policy with what stands before and after it.

    Attributes:
        spec: what its configuration alone says.
        policy: the trained part.
        decoder: of the frozen autoencoder, for latents of any batch.
        attention: the backend that serves it.
        attention_milliseconds: what the choice was made by; empty without a choice.
        notes: what a user should know of this checkpoint and machine, one sentence each.
        checkpointing: what the backward computes again, one of `models.checkpointing.MODES`.
    """

    spec: Spec
    policy: Policy
    decoder: Decoder
    attention: str = "sdpa"
    attention_milliseconds: dict[str, float] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)
    checkpointing: str = "none"

    @property
    def path(self) -> str:
        """Where it came from."""
        return self.spec.path

    @property
    def fps(self) -> int:
        """Frames per second of its videos."""
        return self.spec.fps

    def set_checkpointing(self, mode: str, *, gathered: bool = False) -> None:
        """Train with one of `models.checkpointing.MODES`; `gathered`, as there."""
        self.checkpointing = mode
        for network in self.policy.networks.values():
            set_checkpointing(network, mode, gathered=gathered)

    def joint_tokens(self, sampling: SamplingConfig, text_tokens: int | None = None) -> int:
        """Tokens of a video and of a prompt of `text_tokens`, by default as many as the spec assumes."""
        text_tokens = self.spec.text_tokens if text_tokens is None else text_tokens
        return self.spec.tokens(self.latent_shape(sampling)) + text_tokens

    def latent_shape(self, sampling: SamplingConfig) -> tuple[int, int, int, int]:
        """(C, T, H, W) of one video's latents."""
        return self.spec.latent_shape(sampling)

    def load_encoder(self) -> Encoder:
        """Load the text encoders; they are released with the function that is returned.

        Raises:
            UserError: they are missing or incomplete, or the tokenizer is not the one that the pipeline crops for.
        """
        return self.spec.load_encoder(self.policy.dtype, self.policy.device)
