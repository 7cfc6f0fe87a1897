"""The model card of a run: what was trained on what, what it gained on held-out prompts, and how to
use it."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData

from sage_fast import __version__
from sage_fast.config.schema import Config
from sage_fast.eval.comparison import compare
from sage_fast.models.lora.adapter import LORA_FILE
from sage_fast.models.registry import split_path
from sage_fast.models.spec import Spec
from sage_fast.run_folder import RunFolder
from sage_fast.util.console import wrapped
from sage_fast.util.text import counted

log = logging.getLogger(__name__)


def model_card(
    run: RunFolder,
    config: Config,
    spec: Spec,
    *,
    iteration: int,
    base: str | None,
    files: Iterable[str],
) -> str:
    """Return the README.md of a run's weights on the hub.

    Args:
        run: its evaluations are shown.
        iteration: iterations the weights were trained for; may exceed that of the last evaluation.
        base: hub id of the base model.
        files: names of the files beside the card.
    """
    is_lora = config.model.trains_adapter
    relation = None
    if base:
        relation = "adapter" if is_lora else "finetune"
    task = "image-to-video" if spec.takes_images else "text-to-video"
    tags = [task, "sage-fast"]
    if is_lora:
        tags.append("lora")
    data = ModelCardData(
        base_model=base,
        base_model_relation=relation,
        library_name="diffusers",
        **_license(spec),
        pipeline_tag=task,
        tags=tags,
    )

    rewards = []
    for entry in config.reward.entries:
        is_address = "://" in entry.name
        # without folders of this machine
        rewards.append(entry.name if is_address else Path(entry.name).name)
    negative = None
    if config.sampling.guidance_scale != 1 and config.data.negative_prompt:
        # a string of Python too
        negative = json.dumps(config.data.negative_prompt.strip(), ensure_ascii=False)
    weights = [file for file in files if file.endswith(".safetensors") and "/" not in file]
    card = ModelCard.from_template(
        data,
        str(Path(__file__).parent / "card.md.j2"),
        run=run.path.resolve().name,
        version=__version__,
        spec=spec,
        base=base,
        config=config,
        iterations=counted(iteration, "iteration"),
        evaluation=_evaluation(run, iteration),
        settings=_settings(dataclasses.asdict(config), base),
        lora_file=LORA_FILE,
        negative=negative,
        rewards=rewards,
        files=sorted(weights),
    )
    return str(card)


def _license(spec: Spec) -> dict[str, Any]:
    """Return the licence of a family's checkpoints as the hub's cards have it: by its name if the
    hub knows it, else as `other`, by name and address."""
    if spec.license is None:
        return {"license": None}
    name, address = spec.license
    if not address:
        return {"license": name}
    return {"license": "other", "license_name": name, "license_link": address}


def _evaluation(run: RunFolder, iteration: int) -> str:
    """Return the table of scores before and after training, or why there is none."""
    for note in run.evaluations[1]:
        log.warning(wrapped(f"note: {note}"))
    sets = run.video_sets()
    if not sets.keys() >= {"before", "after"}:
        return "There are no evaluations from before and after training."
    last = sets["after"].iteration
    if last != iteration:
        return (
            f"The weights of iteration {iteration} were not evaluated: eval/after.json is of "
            f"iteration {last}."
        )
    return compare([sets["before"], sets["after"]]).text


def _settings(settings: dict[str, Any], base: str | None) -> str:
    """Return the settings as YAML, with the name alone of each absolute path: folders of this
    machine stay private."""

    def shown(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: shown(kept) for key, kept in value.items()}
        if isinstance(value, list):
            return [shown(kept) for kept in value]
        if isinstance(value, str) and value.startswith(("/", "~")):
            return Path(value).name or value
        return value

    path = split_path(settings["model"]["path"])[1]
    settings["model"] |= {"path": base or Path(path).name or path}
    return yaml.safe_dump(shown(settings), sort_keys=False, allow_unicode=True)
