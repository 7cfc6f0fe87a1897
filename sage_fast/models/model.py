"""A loaded model: its spec, the trained policy, the decoder, and access to the text encoders."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

from sage_fast.config.schema import SamplingConfig
from sage_fast.models.attention.backends import REFERENCE
from sage_fast.models.checkpointing import NO_RECOMPUTE, CheckpointPlan, set_checkpointing
from sage_fast.models.decoder import Decoder
from sage_fast.models.interface import Encoder
from sage_fast.models.policy import Policy
from sage_fast.models.spec import Spec
from sage_fast.models.streaming import fused_linears
from sage_fast.util.environment import free_bytes
from sage_fast.util.parking import off_device


@dataclasses.dataclass(kw_only=True)
class Model:
    """A policy with its decoder and encoder.

    Attributes:
        spec: facts known from the configuration alone.
        policy: the trained part.
        decoder: decoder over the frozen autoencoder, for latents of any batch size.
        attention: name of the attention backend.
        attention_milliseconds: measured time per backend; empty if there was no choice.
        notes: what the user should know about this checkpoint and machine, one sentence each.
        checkpointing: what the backward recomputes.
        parked: what is on the device only while it is used, such as the autoencoder.
    """

    spec: Spec
    policy: Policy
    decoder: Decoder
    attention: str = REFERENCE
    attention_milliseconds: dict[str, float] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)
    checkpointing: CheckpointPlan = NO_RECOMPUTE
    parked: list[str] = dataclasses.field(default_factory=list)

    def set_checkpointing(self, chosen: CheckpointPlan) -> None:
        """Set what the backward recomputes."""
        self.checkpointing = chosen
        others = chosen.faster if chosen.count < chosen.blocks else None
        # a forward may run one of them alone: each takes its share
        for network in self.policy.networks.values():
            blocks = getattr(network, self.policy.blocks)
            first = blocks[: -(-chosen.count * len(blocks) // chosen.blocks)]
            set_checkpointing(network, chosen.mode, others=others, first=first)

    @contextlib.contextmanager
    def off_device(self) -> Iterator[None]:
        """Have the weights in host memory within the block, for encoders that need the device."""
        policy, device = self.policy, self.policy.device
        for linear in fused_linears(policy):
            linear.release(device)
        with off_device([*policy.networks.values(), self.decoder.vae], device):
            yield

    def load_encoder(
        self, sampling: SamplingConfig, away: contextlib.ExitStack | None = None
    ) -> Encoder:
        """Load the encoders; dropping the returned function releases them.

        Args:
            away: until it closes, the weights may leave the device for encoders that lack room;
                None: they stay.

        Raises:
            UserError: they are missing or incomplete, or do not match the checkpoint.
        """
        device = self.policy.device
        is_short = device.type != "cpu" and free_bytes(device) < self.spec.encoder_bytes
        if away is not None and is_short:
            away.enter_context(self.off_device())
        return self.spec.load_encoder(self.policy.dtype, device, sampling)
