"""A model family: `Spec` reads a checkpoint's configuration, and makes the `Policy` and the
`Decoder`.

models/registry.py finds it; models/interface.py has what a policy takes besides the latents.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from sage_fast.config.schema import Config, SamplingConfig
from sage_fast.models.cost import Cost, counted_cost
from sage_fast.models.decoder import Decoder
from sage_fast.models.interface import Condition, Encoder
from sage_fast.models.lora.export_target import ExportTarget
from sage_fast.models.policy import Policy
from sage_fast.util.errors import UserError, first_line

MAX_GRAPHS = 64
"""Most CUDA graphs of a run. It bounds the memory to plan with, and what PyTorch does not count:
the driver's thousands of launches of each graph."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Distillation:
    """A checkpoint that is distilled from guidance, and perhaps to few steps.

    Attributes:
        steps: the numbers of steps that it is made for.
        mean_velocity: whether it predicts the mean velocity of a step, and so needs the step's end
            (MeanFlow).
    """

    steps: tuple[int, ...]
    mean_velocity: bool = False


class Spec:
    """A checkpoint described by its configuration alone, and the loaders of its parts.

    Args:
        path: folder, hub id, or one of `randoms`.
        configs: part -> its config.json; missing parts have `published_sizes`.

    Attributes:
        title: name of the family, for messages.
        published: hub id of a published checkpoint, used as an example.
        networks: part of a checkpoint -> diffusers class of a trained network. The first one is the
            main network.
        autoencoder: diffusers class of the part `vae`.
        condition: class of the encoder's results.
        hub_names: regular expression, searched without case, that the hub ids of the family's
            checkpoints match; empty: none does.
        randoms: paths `random:NAME` of models with random weights.
        family_is_assumed: the spec is of a hub id whose files are not read and whose name tells no
            family.
        text_tokens: assumed prompt length while none is known.
        text_keys: keys of an attention from the video to its text alone, which the chosen kernel
            has to serve too; None: there is none.
        lora_targets: layers that get an adapter if `model.lora_targets` names none, as a regular
            expression.
        encoder_bytes: what the encoders take on a device: where less is free, the model leaves the
            device while prompts are encoded.
        prompt_sets: shipped sets of prompts (`sage_fast.data.prompts.SETS`) that suit the model;
            files always do.
        lora_layouts: other layouts of the checkpoint that a LoRA is exported to: name -> where a
            layer is in it.
        set_guidance: the line that sets the guidance scale `{:g}` of a diffusers pipeline `pipe`,
            for the cards; empty: its call takes `guidance_scale`.
        license: name and address of the checkpoint's licence, for the cards of models trained from
            it; no address where the hub knows the name.
    """

    title: ClassVar[str]
    published: ClassVar[str]
    networks: ClassVar[Mapping[str, Any]]
    autoencoder: ClassVar[Any]
    condition: ClassVar[type[Condition]]
    lora_targets: ClassVar[str]
    hub_names: ClassVar[str] = ""
    randoms: ClassVar[tuple[str, ...]] = ()
    text_tokens: ClassVar[int] = 200
    text_keys: ClassVar[int | None] = None
    encoder_bytes: ClassVar[float] = 0.0
    prompt_sets: ClassVar[tuple[str, ...]] = ()
    lora_layouts: ClassVar[Mapping[str, Callable[[str], ExportTarget]]] = {}
    set_guidance: ClassVar[str] = ""
    license: ClassVar[tuple[str, str] | None] = None

    def __init__(
        self, path: str = "", configs: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        self.path = path
        self.configs = configs or {}
        self.family_is_assumed = False

    @classmethod
    def main_network(cls) -> str:
        """Return the network whose class tells the family, and whose adapter has the name that
        diffusers looks for."""
        return next(iter(cls.networks))

    @classmethod
    def source(cls, part: str, checkpoint: str) -> str:
        """Return the checkpoint that a part is read from: another one if they share it."""
        return checkpoint

    @classmethod
    def part_class(cls, part: str) -> Any:
        """Return the diffusers class of a part: one of the networks, or `vae`."""
        return {**cls.networks, "vae": cls.autoencoder}[part]

    def known_fields(self, part: str) -> dict[str, Any]:
        """Return the fields of a part's config.json that its class knows."""
        known = inspect.signature(self.part_class(part)).parameters
        return {key: value for key, value in self.configs.get(part, {}).items() if key in known}

    def published_sizes(self, part: str) -> Mapping[str, Any]:
        """Return the arguments of a part's class where no config.json is known: those of a random
        model, or of a hub id whose files are not here. By default none, so that the class's own
        defaults hold."""
        return {}

    @property
    def sizes_are_known(self) -> bool:
        """Whether `published_sizes` are those of the checkpoint that `path` names."""
        return True

    def build(self, part: str) -> Any:
        """Construct a part on PyTorch's default device, with the weights that its class draws."""
        has_config = bool(self.configs.get(part))
        arguments = self.known_fields(part) if has_config else self.published_sizes(part)
        return self.part_class(part)(**arguments)

    def meta(self, part: str) -> Any:
        """Return a part on the meta device: no memory, no weights.

        Raises:
            UserError: its class refuses the values in config.json.
        """
        try:
            with torch.device("meta"):
                return self.build(part)
        except Exception as error:  # whatever odd values make a class raise
            raise UserError(
                f"model.path = {self.path!r}: {part}/config.json describes no model: "
                f"{first_line(error)}"
            ) from error

    @functools.cached_property
    def transformer_config(self) -> Any:
        """The main network's config, including the defaults that config.json leaves out."""
        return self.meta(self.main_network()).config

    @functools.cached_property
    def vae(self) -> Any:
        """The autoencoder on the meta device."""
        return self.meta("vae")

    @property
    def fps(self) -> int:
        """Frames per second of the videos; checkpoints of a family may differ."""
        return 24

    @property
    def heads(self) -> int:
        """Number of attention heads, which ranks sharing a sample divide among them; 1 if a sample
        cannot be shared."""
        return 1

    @property
    def distillation(self) -> Distillation | None:
        """What the checkpoint is distilled to; None if it is not, or if nothing on this machine
        says so."""
        return None

    @property
    def patch(self) -> int:
        """Latent positions per token."""
        return 1

    def check(self) -> None:
        """Refuse a checkpoint that would load but be sampled wrongly, such as one for another task.

        Raises:
            UserError: this is such a checkpoint.
        """

    @property
    def takes_images(self) -> bool:
        """Whether every prompt has an image; otherwise none has one."""
        return False

    @property
    def prompt_tokens(self) -> int:
        """Assumed tokens of a prompt in a forward, while none is known: those of its text and of
        its image."""
        return self.text_tokens

    def check_prompts(self, prompts: Iterable[str]) -> None:
        """Check that the text encoder knows every word.

        Raises:
            UserError: it does not.
        """

    def notes(self, sampling: SamplingConfig) -> list[str]:
        """Return what the user should know about this checkpoint with these settings, one sentence
        each."""
        return []

    def latent_shape(self, sampling: SamplingConfig) -> tuple[int, int, int, int]:
        """Return (C, T, H, W) of one video's latents."""
        raise NotImplementedError

    def tokens(self, latents: Sequence[int]) -> int:
        """Return the tokens of a video with latents (C, T, H, W)."""
        return math.prod(latents[1:]) // self.patch

    def size_arguments(self, sampling: SamplingConfig) -> str:
        """Return the arguments that give a diffusers pipeline the size of a video, for the
        cards."""
        return f"height={sampling.height}, width={sampling.width}, num_frames={sampling.num_frames}"

    def attention_shape(self, sampling: SamplingConfig) -> tuple[int, int, int] | None:
        """Return (tokens, heads, head width) at which to measure attention kernels; None if the
        model calls its own."""
        return None

    def cost(self, config: Config) -> Cost:
        """Return the cost of one sample with these settings, counted on the meta device.

        A family may say more than what is counted, or find some of it faster.
        """
        return counted_cost(self, config)

    def assumed_condition(self) -> Condition:
        """Return a condition of `prompt_tokens` tokens, on the default device. Only its shapes
        count, and all prompts are taken to have them."""
        raise NotImplementedError

    def freeze_idle(self, network: nn.Module) -> None:
        """Freeze weights that no forward reads, so that no optimizer or reducer waits for their
        gradients."""

    def is_gate(self, name: str) -> bool:
        """Whether a weight makes the gates of a block, which random weights keep small."""
        return False

    def policy(
        self, networks: Mapping[str, Any], *, dtype: torch.dtype, guidance_scale: float
    ) -> Policy:
        """Return the policy over loaded networks."""
        raise NotImplementedError

    def decoder(self, vae: Any) -> Decoder:
        """Return the decoder over a loaded autoencoder."""
        raise NotImplementedError

    def load_encoder(
        self, dtype: torch.dtype, device: torch.device, sampling: SamplingConfig
    ) -> Encoder:
        """Load the encoders; dropping the returned function releases them.

        Args:
            sampling: its height and width are those that images are resized to.

        Raises:
            UserError: they are missing or incomplete.
        """
        raise NotImplementedError

    def encoder_version(self) -> str | None:
        """Return a fingerprint of the encoders' files; empty if they are code, None if there are
        none."""
        return ""
