"""The model card of a run: what was trained on what, what it gained on held-out prompts, and how to use it."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData

from sage_fast import __version__
from sage_fast.config.schema import Config, SamplingConfig
from sage_fast.eval.scores import paired_table, read_evaluations
from sage_fast.eval.tables import format_paired_table
from sage_fast.models.lora.adapter import LORA_FILE
from sage_fast.models.registry import split_path
from sage_fast.models.spec import Spec
from sage_fast.util.console import wrapped

log = logging.getLogger(__name__)

PICTURE = "comparison.png"
"""File of a run that the card shows beside it."""


def model_card(run: Path, config: Config, spec: Spec, *, iteration: int, base: str | None, files: Iterable[str]) -> str:
    """Return the README.md of a run's weights on the hub.

    Args:
        run: the run folder, whose evaluations are shown.
        base: hub id of the base model.
        files: names of the files beside the card.
    """
    lora, task = config.model.trains_adapter, "image-to-video" if spec.takes_images else "text-to-video"
    data = ModelCardData(
        base_model=base,
        base_model_relation=("adapter" if lora else "finetune") if base else None,
        library_name="diffusers",
        license="other" if spec.license else None,
        license_name=spec.license[0] if spec.license else None,
        license_link=spec.license[1] if spec.license else None,
        pipeline_tag=task,
        tags=[task, "sage-fast", *(["lora"] if lora else [])],
    )
    rewards = ", ".join(entry.name for entry in config.reward.entries)
    sampling = config.sampling
    sections = {
        "": f"{'A LoRA for' if lora else 'All weights of'} {base or spec.title}, aligned with a reward ({rewards}) in "
        f"{iteration} iterations of sage-fast {__version__} (objective.surrogate {config.objective.surrogate}, "
        f"sampling.sampler {sampling.sampler}). Trained at guidance scale "
        f"{sampling.guidance_scale:g}, shift {sampling.shift:g}, {sampling.num_frames} frames of {sampling.width} x "
        f"{sampling.height}; evaluated at guidance scale {config.eval_guidance_scale:g} with "
        f"{config.eval.steps} steps of the ODE.",
        "Use": _use(base, files, spec, sampling, config.eval.steps, lora=lora),
        "Held-out prompts": _evaluation(run, iteration),
        "Settings": f"```yaml\n{_settings(config, base)}```",
    }
    text = "\n\n".join(
        f"{f'## {title}' if title else f'# {run.resolve().name}'}\n\n{body}" for title, body in sections.items()
    )
    return str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}\n"))


def _use(
    base: str | None, files: Iterable[str], spec: Spec, sampling: SamplingConfig, steps: int, *, lora: bool
) -> str:
    """Return what each file is for, and code that samples a video at the guidance scale of the training."""
    listed = [f"- `{name}`: {text}" for name in sorted(files) if (text := _purpose(name))]
    part, scale = spec.main_network(), sampling.guidance_scale
    if lora:
        load = f'pipe.{part}.load_lora_adapter(weights, weight_name="{LORA_FILE}", prefix=None)'
    else:
        load = f'pipe.{part} = type(pipe.{part}).from_pretrained(weights, subfolder="{part}", dtype=torch.bfloat16)'
    helpers, given = ("export_to_video, load_image", "image, ") if spec.takes_images else ("export_to_video", "")
    further = f"num_inference_steps={steps}" + ("" if spec.set_guidance else f", guidance_scale={scale:g}")
    code = [
        "import torch",
        "from diffusers import DiffusionPipeline",
        f"from diffusers.utils import {helpers}",
        "",
        'weights = "."  # the folder of this file, or the name of this repository on the hub',
        f'base = "{base or "BASE"}"' + ("" if base else "  # the folder or the hub id of the base model"),
        "pipe = DiffusionPipeline.from_pretrained(base, dtype=torch.bfloat16)",
        load,
        'pipe.to("cuda")',
        *([spec.set_guidance.format(scale)] if spec.set_guidance else []),
        *(['image = load_image("image.png")'] if spec.takes_images else []),
        f'video = pipe({given}"a prompt", {spec.size_arguments(sampling)}, {further}).frames[0]',
        f'export_to_video(video, "video.mp4", fps={spec.fps})',
    ]
    return "\n".join([*listed, "", "```python", *code, "```"]).strip()


def _purpose(file: str) -> str | None:
    if file == LORA_FILE:
        return "for diffusers"
    if file == "adapter_model.safetensors":
        return "for peft, with `adapter_config.json`"
    found = re.fullmatch(r".+-(\w+)\.safetensors", file)
    return f"with the layer names of {found[1]}, its scale in `lora_B`" if found and "/" not in file else None


def _evaluation(run: Path, iteration: int) -> str:
    """Return the table of scores before and after training, and the run's picture of both.

    Args:
        iteration: iterations the weights were trained for; may exceed that of the last evaluation.
    """
    found, left_out = read_evaluations(run)
    for note in left_out:
        log.warning(wrapped(f"note: {note}"))
    if not found.keys() >= {"before", "after"}:
        return "There are no evaluations from before and after training."
    scores = found["after"]
    if scores["iteration"] != iteration:
        return (
            f"The weights of iteration {iteration} were not evaluated: eval/after.json is of iteration "
            f"{scores['iteration']}."
        )
    table = format_paired_table(paired_table(found["before"], scores))
    if not (run / PICTURE).is_file():
        return table
    return f"{table}\n\n![The base model, during and after training, on the same prompts and seeds]({PICTURE})"


def _settings(config: Config, base: str | None) -> str:
    """Return the settings as YAML, without folders of this machine."""
    settings = _without_folders(dataclasses.asdict(config))
    settings["model"]["path"] = base or _name(split_path(config.model.path)[1])
    return yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)


def _without_folders(value: Any) -> Any:
    """Return settings with the name alone of each absolute path."""
    if isinstance(value, dict):
        return {key: _without_folders(kept) for key, kept in value.items()}
    if isinstance(value, list):
        return [_without_folders(kept) for kept in value]
    return _name(value) if isinstance(value, str) and value.startswith(("/", "~")) else value


def _name(path: str) -> str:
    return Path(path).name or path
