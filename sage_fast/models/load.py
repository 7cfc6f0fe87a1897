"""From `model.path` to a policy, its video autoencoder and its text encoders."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLHunyuanVideo15,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideo15Transformer3DModel,
)
from diffusers.guiders import ClassifierFreeGuidance
from safetensors import SafetensorError

from sage_fast.config import ModelConfig, SamplingConfig
from sage_fast.distributed import all_gather_object, sequence_group, sequence_size
from sage_fast.errors import UserError
from sage_fast.models.attention import ATTENTION, Trial, check_attention, fastest, measure_attention, try_attention
from sage_fast.models.checkpointing import set_checkpointing
from sage_fast.models.hub import progress_bars_of, reachable
from sage_fast.models.hunyuan15.decode import VideoDecoder
from sage_fast.models.hunyuan15.encoder import load_encoder
from sage_fast.models.hunyuan15.policy import HunyuanVideo15Policy, add_lora, freeze_dead_ends, load_lora
from sage_fast.models.hunyuan15.random_weights import check_random, is_random, random_layout, random_module
from sage_fast.models.hunyuan15.text import Encoder
from sage_fast.models.sequence import SequenceParallel, check_heads
from sage_fast.models.testbed.model import BASE, TestbedTransformer

TRANSFORMERS = {cls.__name__: cls for cls in (HunyuanVideo15Transformer3DModel, TestbedTransformer)}
TEXT_TOKENS = 200
"""Length assumed of a prompt whenever a size is wanted before one is known; the published encoder pads to 1000."""
PUBLISHED = "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v"
VIDEO_FPS = {"HunyuanVideo15Transformer3DModel": 24, "TestbedTransformer": 8}


@dataclasses.dataclass(kw_only=True)
class Model:
    """A policy with what stands before and after it.

    Attributes:
        path: where it came from.
        policy: the trained part.
        vae: the frozen autoencoder.
        fps: frames per second of its videos.
        attention: the backend that serves it.
        attention_milliseconds: what the choice was made by; empty without a choice.
        notes: what a user should know of this checkpoint and machine, one sentence each.
        checkpointing: what the backward computes again, one of `models.checkpointing.MODES`.
        decoder: `vae`'s, for latents of any batch.
    """

    path: str
    policy: HunyuanVideo15Policy
    vae: AutoencoderKLHunyuanVideo15
    fps: int
    attention: str = "sdpa"
    attention_milliseconds: dict[str, float] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)
    checkpointing: str = "none"

    def choose_attention(self, asked: str, sampling: SamplingConfig) -> None:
        """Serve attention by the backend `asked`, or by the fastest that is right, at the size of this run.

        Raises:
            UserError: what was asked for is not there, does not run or computes something else, on any rank.
        """
        config, device = self.policy.transformer.config, self.policy.device
        tokens = self.joint_tokens(sampling)
        heads = config.num_attention_heads // sequence_size()
        shape = (sampling.batch_size, tokens, heads, config.attention_head_dim)
        check_attention(asked, device, self.policy.dtype)
        dtype = self.policy.dtype
        if asked == "auto":
            trials: list[dict[str, Trial]] = all_gather_object(measure_attention(shape, device, dtype))
            problems = {name: trial.problem for of in trials for name, trial in of.items() if trial.problem}
            self.notes += [f"attention {name!r} is skipped: {problem}" for name, problem in problems.items()]
            right = {name: trial for name, trial in trials[0].items() if name not in problems}
            if problems and not right:
                raise UserError("model.attention = 'auto': no backend is right here; " + "; ".join(self.notes))
            self.attention_milliseconds = {name: trial.milliseconds for name, trial in right.items()}
            asked = fastest(right)
        elif asked != "sdpa":
            found = [
                trial.problem for trial in all_gather_object(try_attention(ATTENTION[asked], shape, device, dtype))
            ]
            if problem := next(filter(None, found), None):
                raise UserError(f"model.attention = {asked!r}: {problem}; the nearest choice is 'auto'")
        self.attention = asked
        self.policy.forward.attention = ATTENTION[asked]

    def set_checkpointing(self, mode: str, *, gathered: bool = False) -> None:
        """Train with one of `models.checkpointing.MODES`; `gathered`, as there."""
        self.checkpointing = mode
        set_checkpointing(self.policy.transformer, mode, gathered=gathered)

    def joint_tokens(self, sampling: SamplingConfig, text_tokens: int = TEXT_TOKENS) -> int:
        """Tokens of a video and of a prompt of `text_tokens`."""
        config = self.policy.transformer.config
        return math.prod(self.latent_shape(sampling)[1:]) // (config.patch_size_t * config.patch_size**2) + text_tokens

    def __post_init__(self) -> None:
        self.decoder = VideoDecoder(self.vae)

    def latent_shape(self, sampling: SamplingConfig) -> tuple[int, int, int, int]:
        """(C, T, H, W) of one video's latents."""
        return (
            self.policy.latent_channels,
            (sampling.num_frames - 1) // self.vae.temporal_compression_ratio + 1,
            sampling.height // self.vae.spatial_compression_ratio,
            sampling.width // self.vae.spatial_compression_ratio,
        )

    def load_encoder(self) -> Encoder:
        """Load the text encoders; they are released with the function that is returned.

        Raises:
            UserError: they are missing or incomplete, or the tokenizer is not the one that the pipeline crops for.
        """
        transformer = self.policy.transformer
        layout = {**transformer.config, "_class_name": type(transformer).__name__}
        return load_encoder(self.path, layout, self.policy.dtype, self.policy.device)


def transformer_config(path: str) -> dict[str, object] | None:
    """The transformer's config.json of a local checkpoint or of the testbed; None for a model on the hub."""
    return _config_of(path, "transformer")


def vae_config(path: str) -> dict[str, object] | None:
    """The autoencoder's, likewise."""
    return _config_of(path, "vae")


def _config_of(path: str, part: str) -> dict[str, object] | None:
    if is_random(path):
        return random_layout(path, part)
    folder = BASE if path == "testbed" else Path(path)
    file = folder / part / "config.json"
    return json.loads(file.read_text()) if file.is_file() else None


def check_path(path: str) -> str:
    """The folder or hub id that `from_pretrained` is given, or `random:NAME` as it is.

    Raises:
        UserError: neither a checkpoint folder nor the form of a hub id, no such random model, or a folder with a
            model of another task.
    """
    if path == "testbed":
        return str(BASE)
    if is_random(path):
        return check_random(path)
    folder = Path(path)
    if folder.is_dir():
        missing = [part for part in ("transformer", "vae") if not (folder / part / "config.json").is_file()]
        if missing:
            raise UserError(
                f"model.path = {path!r}: not a HunyuanVideo 1.5 checkpoint in diffusers format; "
                f"{missing[0]}/config.json is missing"
            )
        _check_task(path, transformer_config(path) or {})
    elif not re.fullmatch(r"[\w.-]+/[\w.-]+", path) or path.startswith("."):
        raise UserError(
            f"model.path = {path!r}: no such folder; expected 'testbed', a local folder in diffusers format, or a hub "
            f"id such as {PUBLISHED}"
        )
    return path


def _check_task(path: str, layout: Mapping[str, Any]) -> None:
    """Refuse what would load and then be sampled wrongly: image conditions and a second time are never passed."""
    task = layout.get("task_type", "t2v")
    if task != "t2v":
        raise UserError(
            f"model.path = {path!r}: its transformer has task_type = {task!r}; expected a text-to-video checkpoint, "
            f"'t2v', such as {PUBLISHED}"
        )
    if layout.get("use_meanflow", False):
        raise UserError(
            f"model.path = {path!r}: its transformer has use_meanflow = true, a step-distilled model that is told the "
            f"end of each step too; expected one without, such as {PUBLISHED}"
        )


def _unlike_published(loaded: str, sampling: SamplingConfig) -> list[str]:
    """Where the settings sample otherwise than the checkpoint's own pipeline, one sentence each.

    Notes and not errors, since both may be wanted: a run without guidance takes half the forwards.
    """
    notes = []
    try:
        scheduler = FlowMatchEulerDiscreteScheduler.load_config(loaded, subfolder="scheduler")
        guider = ClassifierFreeGuidance.load_config(loaded, subfolder="guider")
    except OSError:
        return [
            "the checkpoint lacks scheduler/ or guider/: sampling.shift and sampling.guidance_scale are not compared"
        ]
    if scheduler.get("use_dynamic_shifting") or scheduler.get("shift", 1.0) != sampling.shift:
        dynamic = scheduler.get("use_dynamic_shifting")
        published = "a shift that depends on the size" if dynamic else f"shift {scheduler.get('shift', 1.0):g}"
        notes.append(f"sampling.shift = {sampling.shift:g}, and the checkpoint's scheduler has {published}")
    scale = guider.get("guidance_scale", 1.0) if guider.get("enabled", True) else 1.0
    if scale != sampling.guidance_scale:
        notes.append(
            f"sampling.guidance_scale = {sampling.guidance_scale:g}, and the checkpoint's guider has "
            f"{scale:g}{' (off: a model distilled from guidance)' if scale == 1 else ''}"
        )
    return notes


def transformer_layout(setting: str, source: str) -> dict[str, Any]:
    if is_random(source):
        return random_layout(source, "transformer")
    try:
        return HunyuanVideo15Transformer3DModel.load_config(source, subfolder="transformer")
    except OSError as error:
        raise UserError(f"{setting} = {source!r}: cannot read the transformer's config.json: {error}") from error


def _load(cls: Any, setting: str, source: str, part: str, dtype: torch.dtype, device: torch.device) -> Any:
    """`from_pretrained` that never fills a gap with random weights, which only `random:NAME` asks for."""
    if is_random(source):
        return random_module(source, part, dtype, device)
    try:
        with progress_bars_of(source):
            module, found = cls.from_pretrained(source, subfolder=part, dtype=dtype, output_loading_info=True)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{setting} = {source!r}: cannot read the weights in {part}/: {error}") from error
    odd = [f"{key} is {kind}" for kind in ("missing", "unexpected") for key in found[f"{kind}_keys"]]
    if odd:
        raise UserError(f"{setting} = {source!r}: {len(odd)} weights in {part}/ do not fit its config.json: {odd[0]}")
    return module


def load_model(config: ModelConfig, sampling: SamplingConfig, device: torch.device, seed: int) -> Model:
    """Load a checkpoint and make it trainable.

    Raises:
        UserError: checkpoint missing, incomplete or of another task, LoRA weights of another model, or attention that
            is not there or not right.
    """
    check_attention(config.attention, device, getattr(torch, config.dtype))
    path = check_path(config.path)
    loaded = reachable(path)
    dtype = getattr(torch, config.dtype)
    layout = transformer_layout("model.path", loaded)
    class_name = str(layout.get("_class_name"))
    if class_name not in TRANSFORMERS:
        raise UserError(f"model.path = {config.path!r} holds a {class_name}; expected one of {list(TRANSFORMERS)}")
    _check_task(config.path, layout)
    check_heads(config.sequence_parallel, layout.get("num_attention_heads", 16))
    # Full fine-tuning keeps float32 weights: updates of size lr would vanish in bf16 rounding.
    weights = torch.float32 if config.tuning == "full" else dtype
    setting, source = "model.path", loaded
    if config.tuning == "full" and config.weights is not None:
        setting, source = "model.weights", config.weights
        if not (Path(source) / "transformer" / "config.json").is_file():
            raise UserError(f"model.weights = {source!r}: expected a folder that holds transformer/config.json")
        for key, value in transformer_layout(setting, source).items():
            # A key that only one of the files spells out has its default in the other.
            if key not in ("_diffusers_version", "_name_or_path") and layout.get(key, value) != value:
                raise UserError(
                    f"model.weights = {source!r} was made for another model: "
                    f"{key} is {value!r}, model.path has {layout[key]!r}"
                )
    transformer = _load(TRANSFORMERS[class_name], setting, source, "transformer", weights, device)
    vae = _load(AutoencoderKLHunyuanVideo15, "model.path", loaded, "vae", dtype, device)
    transformer.to(device).eval()
    vae.to(device).eval().requires_grad_(False)
    if config.tuning == "lora" and config.weights is not None:
        load_lora(transformer, Path(config.weights))
    elif config.tuning == "lora":
        add_lora(transformer, rank=config.lora_rank, alpha=config.lora_alpha, targets=config.lora_targets, seed=seed)
    else:
        transformer.requires_grad_(True)
        freeze_dead_ends(transformer)
    policy = HunyuanVideo15Policy(transformer, dtype=dtype, guidance_scale=sampling.guidance_scale)
    if is_random(path):
        notes = [f"model.path = {path}: the weights are random; times and memory count, videos and rewards do not"]
    else:
        notes = [] if class_name == TestbedTransformer.__name__ else _unlike_published(loaded, sampling)
    if (group := sequence_group()) is not None:
        policy.forward.sequence = SequenceParallel(group, device)
    model = Model(path=path, policy=policy, vae=vae, fps=VIDEO_FPS[class_name], notes=notes)
    model.choose_attention(config.attention, sampling)
    return model
