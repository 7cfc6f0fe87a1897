"""The weights of a run in the formats of other programs, with a model card."""

from __future__ import annotations

import logging
from pathlib import Path

from sage_fast.commands.card import model_card
from sage_fast.commands.sources import run_and_weights
from sage_fast.config.fields import is_hub_id
from sage_fast.models.find import family_note, find_spec
from sage_fast.models.lora.adapter import LORA_FILE, lora_files, write_adapter
from sage_fast.models.lora.convert import converted, read_lora
from sage_fast.models.registry import split_path
from sage_fast.models.spec import Spec
from sage_fast.util.console import wrapped
from sage_fast.util.errors import UserError
from sage_fast.util.files import atomic_path, check_new_folder, copy_folder, save_tensors

log = logging.getLogger(__name__)


def export(source: Path, folder: Path, base: str | None = None) -> list[Path]:
    """Write the newest weights of a run, or those of a checkpoint in it, and a model card into
    `folder`.

    A LoRA is written in diffusers format, in peft's (adapter_model.safetensors,
    adapter_config.json) and in each of `Spec.lora_layouts` (<run>-<layout>.safetensors). All
    weights stay in diffusers format.

    Args:
        source: the run folder, or a checkpoint in one.
        folder: new or empty, and not the current one: a new one takes its place.
        base: hub id of the base model; by default `model.path`, if that is one.

    Returns:
        The files.

    Raises:
        UserError: `source` has no weights or damaged ones, `folder` holds files, or `base` is no
            hub id.
    """
    check_new_folder(folder, "folder")
    target = folder.resolve()
    if target == Path.cwd():
        raise UserError(f"{str(folder)!r}: the current folder; expected another one")
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(target) as partial:
        _write(source.resolve(), partial, base)
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _write(source: Path, folder: Path, base: str | None) -> None:
    run, weights, iteration = run_and_weights(source)
    config = run.settings()
    path = split_path(config.model.path)[1]
    if is_hub_id(path) and not Path(path).is_dir() and run.facts.get("model_is_local"):
        raise UserError(
            f"model.path = {path!r}: a folder where the run began, and none here; export from there"
        )
    spec = find_spec(config.model.path)
    assumption = family_note(spec)
    if assumption:
        log.info(wrapped(f"note: {assumption}"))
    base = _base(path, base, spec)
    folder.mkdir()
    for part in spec.networks:
        if not config.model.trains_adapter:
            copy_folder((weights / part).resolve(), folder / part)
        else:
            _write_lora(spec, part, weights, folder, run.path.name, base)
    names = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    card = model_card(run, config, spec, iteration=iteration, base=base, files=names)
    (folder / "README.md").write_text(card, encoding="utf-8")


def _base(path: str, base: str | None, spec: Spec) -> str | None:
    """Return the hub id of the base model; None without one, as for a local folder."""
    if base is None and is_hub_id(path) and not Path(path).is_dir():
        return path
    if base is None:
        log.info(
            f"note: model.path = {path!r} is no hub id: --base HUB_ID names the base in files and "
            "card"
        )
    elif not is_hub_id(base):
        raise UserError(f"--base {base!r}: expected a hub id such as {spec.published}")
    return base


def _write_lora(
    spec: Spec, part: str, weights: Path, folder: Path, name: str, base: str | None
) -> None:
    """Write the adapter of one part in all formats."""
    file = lora_files(spec.networks)[part]
    tensors, adapter = read_lora(weights / file)
    adapter.base_model_name_or_path = base
    write_adapter(folder / file, tensors, adapter)
    own = folder if file == LORA_FILE else folder / part
    adapter.save_pretrained(own)
    named = {f"base_model.model.{key}": tensor for key, tensor in tensors.items()}
    save_tensors(own / "adapter_model.safetensors", named, {"format": "pt"})
    metadata = {"format": "pt"}
    if base:
        metadata["base_model"] = base
    for layout, target_of in spec.lora_layouts.items():
        tensors_of_layout = converted(tensors, adapter, target_of)
        save_tensors(own / f"{name}-{layout}.safetensors", tensors_of_layout, metadata)
