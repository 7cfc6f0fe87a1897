"""What the rest of the package may ask of a video model.

A family of models is a subclass of `Spec`: it knows a checkpoint from its configuration alone, and makes the `Policy`
(models/policy.py) and the `Decoder` (models/decoder.py). models/registry.py finds it. What a model is told beside the
latents goes through four steps:

    prompt - encoder -> Condition - conditioning_table -> Conditions - of(keys) -> Schedule - at(steps) -> Inputs

A `Condition` is one sample's, cached on disk. `Conditions` are those of an iteration, at all of its noise levels. A
`Schedule` is a batch's, in tensors that a CUDA graph can hold. `Inputs` are those of one forward. How a model packs
conditions of different lengths is up to it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

import torch
from torch import Tensor, nn

from sage_fast.config.schema import Config, SamplingConfig

if TYPE_CHECKING:
    from sage_fast.models.decoder import Decoder
    from sage_fast.models.policy import Policy

Key = Hashable
"""Names the condition of a sample; nobody looks into it. A text prompt is its own key."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Condition:
    """What a model is told of one sample, without padding. A subclass has a field for each of its tensors.

    Attributes:
        negative: key of the condition that guidance leads away from.
    """

    negative: Key = ""

    @property
    def tokens(self) -> int:
        """Length in a forward: conditions of one length share a batch."""
        raise NotImplementedError

    def tensors(self) -> dict[str, Tensor]:
        """Field -> tensor; what is cached on disk."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def to(self, device: torch.device, dtype: torch.dtype) -> Self:
        return dataclasses.replace(self, **{name: t.to(device, dtype) for name, t in self.tensors().items()})


Encoder = Callable[[str], Condition]
"""Prompt -> its `Condition`."""


def pass_lengths(conditions: Mapping[Any, Condition], *, guided: bool) -> dict[Key, tuple[int, ...]]:
    """Key -> length of its condition in each pass of a forward; with guidance the negative one has a pass too."""
    return {
        key: (condition.tokens, conditions[condition.negative].tokens) if guided else (condition.tokens,)
        for key, condition in conditions.items()
    }


class Inputs(Protocol):
    """What one forward of B samples reads beside the latents."""

    @property
    def negative(self) -> Self | None:
        """The same for the unconditional pass; None without guidance."""


class Schedule(Protocol):
    """Inputs of B samples at every noise level of a rollout."""

    @property
    def tokens(self) -> int:
        """Length of the conditions, padding included."""

    def tensors(self) -> list[Tensor]:
        """Everything it holds, in a fixed order: what a CUDA graph keeps a copy of."""

    def clone(self) -> Self: ...

    def at(self, steps: Tensor) -> Inputs:
        """Inputs at `steps`, int64 `[1]` (one step for all samples) or `[B]`. Must not wait for the device."""


class Conditions(Protocol):
    """Conditions of all samples at every noise level of a rollout."""

    def of(self, keys: Sequence[Key]) -> Schedule:
        """The schedule of a batch."""

    def at(self, keys: Sequence[Key], steps: Tensor) -> Inputs:
        """Inputs of one forward in training, differentiable where the weights behind them are trained."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """What one sample takes.

    Attributes:
        forward: FLOPs of one forward of the network, at `Spec.text_tokens`.
        attention: the part of `forward` that is attention.
        decode: FLOPs of decoding the video.
        decoder_weights: elements of the autoencoder.
        activations: checkpointing mode -> bytes on each rank of a micro-batch's activations and their gradients.
    """

    forward: float
    attention: float
    decode: float
    decoder_weights: int
    activations: Mapping[str, float]


class Spec:
    """A checkpoint known from its configuration alone, and how its parts are loaded.

    Args:
        path: folder, hub id, or a name of `randoms`.
        layouts: part -> its config.json; a part that is missing has the published sizes.

    Attributes:
        title: of the family, for messages.
        published: hub id of a checkpoint, as an example.
        networks: part of a checkpoint -> diffusers class of a network that is trained.
        autoencoder: diffusers class of the part `vae`.
        condition: what the encoder gives.
        randoms: `random:NAME` for models with random weights.
        fps: frames per second of its videos.
        text_tokens: length that is assumed of a prompt before one is known.
        lora_targets: layers that get an adapter by default; None takes the default of `model.lora_targets`.
    """

    title: ClassVar[str]
    published: ClassVar[str]
    networks: ClassVar[Mapping[str, Any]]
    autoencoder: ClassVar[Any]
    condition: ClassVar[type[Condition]]
    randoms: ClassVar[tuple[str, ...]] = ()
    fps: ClassVar[int] = 24
    text_tokens: ClassVar[int] = 200
    lora_targets: ClassVar[str | None] = None

    def __init__(self, path: str = "", layouts: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        self.path = path
        self.layouts = layouts or {}

    def meta(self, part: str) -> Any:
        """A part on the meta device: no memory, no weights."""
        settings = {key: value for key, value in self.layouts.get(part, {}).items() if not key.startswith("_")}
        with torch.device("meta"):
            return {**self.networks, "vae": self.autoencoder}[part](**settings)

    @property
    def heads(self) -> int:
        """Attention heads, which ranks that share a sample divide; 1 if they cannot share one."""
        return 1

    @property
    def patch(self) -> int:
        """Places of the latents that make one token."""
        return 1

    def check(self) -> None:
        """
        Raises:
            UserError: a checkpoint that would load and then be sampled wrongly, such as one of another task.
        """

    def check_prompt(self, prompt: str) -> None:
        """
        Raises:
            UserError: the text encoder does not know a word.
        """

    def notes(self, sampling: SamplingConfig) -> list[str]:
        """What a user should know of this checkpoint with these settings, one sentence each."""
        return []

    def latent_shape(self, sampling: SamplingConfig) -> tuple[int, int, int, int]:
        """(C, T, H, W) of one video's latents."""
        raise NotImplementedError

    def tokens(self, latents: Sequence[int]) -> int:
        """Tokens of a video with latents (C, T, H, W)."""
        return math.prod(latents[1:]) // self.patch

    def attention_shape(self, sampling: SamplingConfig) -> tuple[int, int, int] | None:
        """(tokens, heads, values of a head) of the attention whose kernel is chosen by measurement; None if the model
        calls a kernel of its own."""
        return None

    def cost(self, config: Config) -> Cost:
        """What one sample takes with these settings."""
        raise NotImplementedError

    def freeze_idle(self, network: nn.Module) -> None:
        """Freeze what no forward reads, so that no optimizer or reducer waits for its gradient."""

    def policy(self, networks: Mapping[str, Any], *, dtype: torch.dtype, guidance_scale: float) -> Policy:
        """The policy over loaded networks."""
        raise NotImplementedError

    def decoder(self, vae: Any) -> Decoder:
        """The decoder over a loaded autoencoder."""
        raise NotImplementedError

    def load_encoder(self, dtype: torch.dtype, device: torch.device) -> Encoder:
        """Load the text encoders; they are released with the function that is returned.

        Raises:
            UserError: they are missing or incomplete.
        """
        raise NotImplementedError

    def encoder_version(self) -> str | None:
        """Changes when a file of the text encoders does; empty if they are code, None if the checkpoint lacks them."""
        return ""
