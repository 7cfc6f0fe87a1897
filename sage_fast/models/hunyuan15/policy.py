"""HunyuanVideo 1.5 as a policy: velocity(x, sigma, text), LoRA, and the states of its trainable weights.

The transformer is diffusers' `HunyuanVideo15Transformer3DModel`. Anchor, base, rollout and averaged policies are not
further models: each is a snapshot of the trainable weights (the adapter under LoRA) that `using` swaps in place.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from diffusers import HunyuanVideo15Transformer3DModel
from diffusers.utils import logging
from peft import LoraConfig, set_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from sage_fast.distributed import sequence_size, world_size
from sage_fast.errors import UserError
from sage_fast.models.hunyuan15.conditioning import Conditioning, ConditioningTable
from sage_fast.models.hunyuan15.forward import TextToVideoForward
from sage_fast.models.hunyuan15.text import TextBatch, TextEmbedding, collate
from sage_fast.ops.transition_step import guided

Item = TypeVar("Item")
State = dict[str, Tensor]
"""Trainable weights by name."""

ADAPTER = "default"
LORA_FILE = "pytorch_lora_weights.safetensors"


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


class HunyuanVideo15Policy:
    """A text-to-video velocity network with trainable weights.

    Args:
        transformer: any instance of the diffusers class, on its device.
        dtype: type of activations. Weights stored in another type are used under autocast.
        guidance_scale: classifier-free guidance; 1 runs only the conditional pass.
    """

    def __init__(
        self, transformer: HunyuanVideo15Transformer3DModel, *, dtype: torch.dtype, guidance_scale: float = 1.0
    ) -> None:
        self.transformer = transformer
        self.dtype = dtype
        self.guidance_scale = guidance_scale
        self.forward = TextToVideoForward(transformer, dtype)
        self.states = WholeStates()
        self.latent_channels: int = transformer.config.out_channels

    @property
    def device(self) -> torch.device:
        return self.transformer.device

    @property
    def uses_guidance(self) -> bool:
        return self.guidance_scale != 1

    @property
    def in_step(self) -> bool:
        """Whether other ranks' forwards wait for this one's, so that none leaves a rollout on its own."""
        return sequence_size() > 1 or (world_size() > 1 and self.states.gathers)

    @property
    def conditioning_is_frozen(self) -> bool:
        """Whether training leaves AdaLN and the text embedders as they are."""
        return self.forward.conditioning_is_frozen

    # -- forward ------------------------------------------------------------------------------------------------------

    def velocity(self, x: Tensor, conditioning: Conditioning) -> Tensor:
        """Velocity dx/dsigma at latents `x`, without guidance.

        Args:
            x: `[B, C, T, H, W]` latents, float32.
            conditioning: prompts and noise levels of B samples, from `condition` or a `ConditioningTable`.

        Returns:
            `[B, C, T, H, W]` in the activation type.
        """
        self.forward.refresh()
        with self._autocast():
            return self.forward(x.to(self.dtype), conditioning)

    def velocities(self, x: Tensor, conditioning: Conditioning) -> tuple[Tensor, Tensor | None]:
        """Conditional and, with guidance, unconditional velocity."""
        conditional = self.velocity(x, conditioning)
        if conditioning.negative is None:
            return conditional, None
        return conditional, self.velocity(x, conditioning.negative)

    def guided_velocity(self, x: Tensor, conditioning: Conditioning) -> Tensor:
        """The velocity that moves the latents, guidance included, float32; what `transition_score` differentiates."""
        v, v_uncond = self.velocities(x, conditioning)
        return guided(v, v_uncond, self.guidance_scale, x.dtype) if v_uncond is not None else v

    def condition(self, sigma: Tensor, text: TextBatch, negative: TextBatch | None = None) -> Conditioning:
        """Conditioning of B samples, differentiable.

        Args:
            sigma: float32 `[B]` in [0, 1]; the network is given timestep = 1000 sigma.
            text: B prompts.
            negative: B negative prompts, for guidance.
        """
        with self._autocast():
            modulation, final = self.forward.modulation(1000 * sigma, self.dtype)

            def of(batch: TextBatch) -> Conditioning:
                context, mask = self.forward.context(1000 * sigma, batch)
                return Conditioning(modulation=modulation, final=final, context=context.to(self.dtype), mask=mask)

            return dataclasses.replace(of(text), negative=of(negative) if negative is not None else None)

    @torch.no_grad()
    def conditioning_table(self, sigmas: Tensor, embeddings: Mapping[str, TextEmbedding]) -> ConditioningTable:
        """Conditioning of every prompt at every noise level, by the present weights.

        Args:
            sigmas: `[T]` in [0, 1].
            embeddings: prompt -> embedding; with guidance, of the negative prompts too.
        """
        timesteps = 1000 * sigmas.to(self.device, torch.float32)

        def contextualize(embeddings: Sequence[TextEmbedding]) -> Tensor:
            once, times = collate(embeddings, self.device, self.dtype), (len(timesteps), 1, 1)  # of one length: no mask
            text = dataclasses.replace(once, text=once.text.repeat(times), glyphs=once.glyphs.repeat(times))
            with self._autocast():
                context, _ = self.forward.context(timesteps.repeat_interleave(len(embeddings)), text)
            return context.to(self.dtype).unflatten(0, (len(timesteps), len(embeddings)))

        with self._autocast():
            modulation, final = self.forward.modulation(timesteps, self.dtype)
        return ConditioningTable(modulation, final, embeddings, contextualize, self.uses_guidance)

    def _autocast(self) -> torch.autocast:
        """For weights that are stored in another type than that of the activations."""
        weights = next(self.transformer.parameters()).dtype
        # A cache of the casts would hold every gathered weight to the end of the forward.
        return torch.autocast(
            self.device.type, dtype=self.dtype, enabled=weights != self.dtype, cache_enabled=not self.states.gathers
        )

    # -- trainable weights --------------------------------------------------------------------------------------------

    def parameters(self) -> dict[str, nn.Parameter]:
        """Trainable parameters by name."""
        return {name: p for name, p in self.transformer.named_parameters() if p.requires_grad}

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
        """Weights in diffusers format: the LoRA file, or the whole transformer after full fine-tuning."""
        if self.has_adapter:
            verbosity = logging.get_verbosity()
            logging.set_verbosity_error()  # `save_lora_adapter` warns of a cast that it does not make
            try:
                self.transformer.save_lora_adapter(folder, adapter_name=ADAPTER, weight_name=LORA_FILE)
            finally:
                logging.set_verbosity(verbosity)
        else:
            self.transformer.save_pretrained(folder / "transformer")

    @property
    def has_adapter(self) -> bool:
        return hasattr(self.transformer, "peft_config")


def add_lora(transformer: HunyuanVideo15Transformer3DModel, *, rank: int, alpha: int, targets: str, seed: int) -> None:
    """Freeze the transformer and add a LoRA adapter in float32; its up-projections start at zero.

    Raises:
        UserError: `targets` (a regular expression over whole module names) matches no layer, or not only layers.
    """
    transformer.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):  # peft draws on the CPU
        torch.default_generator.manual_seed(seed)
        try:
            transformer.add_adapter(LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets), adapter_name=ADAPTER)
        except (ValueError, re.error) as error:
            raise UserError(f"model.lora_targets = {targets!r}: {error}") from error
    _train_adapter(transformer)


def load_lora(transformer: HunyuanVideo15Transformer3DModel, path: Path) -> None:
    """Freeze the transformer and add the LoRA adapter at `path`, a file or folder in diffusers format, trainable.

    Raises:
        UserError: no such file, or an adapter made for another model.
    """
    file = path / LORA_FILE if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"model.weights = {str(path)!r}: no such file; expected {LORA_FILE} or a folder that holds it")
    try:
        tensors = load_file(file)
    except SafetensorError as error:
        raise UserError(f"model.weights = {str(path)!r}: not a safetensors file: {error}") from error
    layers = {n: m.weight.shape for n, m in transformer.named_modules() if isinstance(m, nn.Linear | nn.Conv3d)}
    # A transformer writes bare layer names; a pipeline puts "transformer." before each.
    prefix = "transformer" if any(key.startswith("transformer.") for key in tensors) else None
    problem = _problem_of_factors({key.removeprefix("transformer."): t for key, t in tensors.items()}, layers)
    if problem is not None:
        raise UserError(f"model.weights = {str(path)!r}{problem}")
    transformer.requires_grad_(False)
    try:
        transformer.load_lora_adapter(str(file), prefix=prefix, adapter_name=ADAPTER, use_safetensors=True)
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:  # metadata that does not fit
        why = str(error).strip().splitlines()[0]
        raise UserError(f"model.weights = {str(path)!r}: diffusers cannot load it as a LoRA: {why}") from error
    _train_adapter(transformer)
    # The line above the last has rounded the adapter to the type of the base: once more, now in float32.
    set_peft_model_state_dict(transformer, {k.removeprefix("transformer."): t for k, t in tensors.items()}, ADAPTER)


def _problem_of_factors(tensors: Mapping[str, Tensor], layers: Mapping[str, torch.Size]) -> str | None:
    """Why tensors `<layer>.lora_A.weight` and `.lora_B.weight` are no adapter for layers with weights of these shapes;
    None if they are one: two factors for each layer, all of one rank, finite."""
    named = re.compile(r"(.+)\.lora_([AB])\.weight")
    if not any(map(named.fullmatch, tensors)):
        return ": holds no LoRA in diffusers format (`<layer>.lora_A.weight`)"
    ranks = set()
    for key, tensor in tensors.items():
        if (match := named.fullmatch(key)) is None:
            return f": holds {key!r}; expected nothing but `<layer>.lora_A.weight` and `<layer>.lora_B.weight`"
        layer, factor = match.groups()
        other = f"{layer}.lora_{'B' if factor == 'A' else 'A'}.weight"
        weight, axis = layers.get(layer), 1 if factor == "A" else 0
        if weight is None or tensor.ndim != len(weight) or tensor.shape[axis] != weight[axis]:
            expected = "no such layer here" if weight is None else f"expected width {weight[axis]}"
            return f" was made for another model: {key} has shape {list(tensor.shape)}, {expected}"
        if other not in tensors:
            return f": {key} is there and {other} is missing"
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            return f": {key} is {tensor.dtype}; expected float32, bfloat16 or float16"
        if not tensor.isfinite().all():
            return f": {key} is not finite"
        ranks.add(tensor.shape[1 - axis])
    if len(ranks) > 1 or 0 in ranks:
        return f": its factors have the ranks {sorted(ranks)}; expected one above 0 for all layers"
    return None


def _train_adapter(transformer: HunyuanVideo15Transformer3DModel) -> None:
    for name, p in transformer.named_parameters():
        if ".lora_" in name:
            p.data = p.data.float()
            p.requires_grad_(True)
    freeze_dead_ends(transformer)


def freeze_dead_ends(transformer: Any) -> None:
    """Freeze what text-to-video never reads, so that no optimizer or reducer waits for its gradient.

    The last block's text stream feeds nothing, so its queries and all that follows them are idle; its keys and values
    are not. Without image tokens the image projection is idle too.
    """
    last = transformer.transformer_blocks[-1]
    for module in (
        last.attn.add_q_proj,
        last.attn.norm_added_q,
        last.attn.to_add_out,
        last.ff_context,
        transformer.image_embedder,
    ):
        module.requires_grad_(False)
