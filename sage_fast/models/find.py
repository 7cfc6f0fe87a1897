"""Find the specification of the model that `model.path` names, from its configuration files."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from diffusers import ConfigMixin

from sage_fast.config.fields import is_hub_id
from sage_fast.models.hub import reachable
from sage_fast.models.random_weights import is_random
from sage_fast.models.registry import (
    CHECKPOINTS,
    SHIPPED,
    default_family,
    family,
    family_of_hub_id,
    split_path,
)
from sage_fast.models.spec import Spec
from sage_fast.util.errors import UserError, first_line, nearest

JSON_TYPES: dict[type, Any] = {
    int: (int, float),
    float: (int, float),
    str: str,
    tuple: (list, tuple),
}
"""Type of a field's default -> what config.json may hold."""
FILE_SUFFIXES = (".safetensors", ".gguf", ".ckpt", ".pt", ".bin")
"""Ends of the names of checkpoints in a single file, which are refused."""


class _ConfigReader(ConfigMixin):
    """Reader for the config.json of any part."""

    config_name = "config.json"


def read_config(setting: str, source: str, part: str) -> dict[str, Any]:
    """Read the config.json of a part, from a folder or the hub.

    Raises:
        UserError: it is missing or cannot be read.
    """
    if Path(source).is_dir() and not (Path(source) / part / "config.json").is_file():
        raise UserError(
            f"{setting} = {source!r}: no checkpoint in diffusers format; {part}/config.json is "
            "missing"
        )
    try:
        config = _ConfigReader.load_config(source, subfolder=part)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"{setting} = {source!r}: cannot read the {part}'s config.json: {first_line(error)}"
        ) from error
    if not isinstance(config, dict):
        raise UserError(f"{setting} = {source!r}: the {part}'s config.json holds no mapping")
    if config.get("quantization_config"):
        raise UserError(
            f"{setting} = {source!r}: its {part} is quantized; expected weights in float32 or "
            "bfloat16"
        )
    return config


def find_spec(path: str, *, fetch: bool = False) -> Spec:
    """Return the spec of the model that `model.path` names, from its configuration files alone.

    Args:
        path: one of `CHECKPOINTS`, a folder, a hub id, `random:NAME`, or any of these prefixed with
            `package.module:Name:`.
        fetch: download missing configuration files from the hub. Otherwise a hub id gets the
            published sizes of the family in its prefix, of the shipped family of such a name, or
            else of the default family (`family_note`).

    Raises:
        UserError: `path` is neither a checkpoint folder nor shaped like a hub id, names an unknown
            random model, has no matching family, or is a checkpoint for another task.
    """
    setting = f"model.path = {path!r}"
    named, path = split_path(path)
    if is_random(path):
        return _find_random(named, path)
    # settings name a folder of theirs by its whole path
    if is_hub_id(path) and Path(path).is_dir():
        raise UserError(
            f"{setting}: a hub id, and a folder of that name is in the current folder but not "
            f"beside the settings; --model.path ./{path} is the folder"
        )

    path = str(CHECKPOINTS.get(path, path))
    if Path(path).is_file() or Path(path).suffix in FILE_SUFFIXES:
        raise UserError(f"{setting}: a single file; expected a folder in diffusers format")
    if not Path(path).is_dir():
        if not is_hub_id(path):
            raise UserError(
                f"{setting}: no such folder; {nearest(Path(path).name, CHECKPOINTS)}; or a local "
                "folder in diffusers format, or a hub id such as "
                f"{(named or default_family()).published}"
            )
        if not fetch:
            known = named or family_of_hub_id(path)
            spec = (known or default_family())(path)
            spec.family_is_assumed = known is None
            return spec

    source = reachable(path)
    cls = named or _family_in(setting, source)
    spec = cls(path, _read_configs(setting, cls, source))
    _check_fields(setting, spec)
    spec.check()
    return spec


def _read_configs(setting: str, cls: type[Spec], source: str) -> dict[str, dict[str, Any]]:
    """Read the config.json of each network and of the autoencoder, whose class is checked."""
    configs = {}
    for part in (*cls.networks, "vae"):
        configs[part] = read_config("model.path", cls.source(part, source), part)

    kind = configs["vae"].get("_class_name")
    known = cls.autoencoder.__name__
    if kind not in (None, known):
        raise UserError(f"{setting}: its vae is a {kind}; expected {known}")
    return configs


def _check_fields(setting: str, spec: Spec) -> None:
    """Check that the known fields of each config.json have the types of their defaults."""
    for part in (*spec.networks, "vae"):
        defaults = inspect.signature(spec.part_class(part)).parameters
        for key, value in spec.known_fields(part).items():
            usual = defaults[key].default
            if not isinstance(value, JSON_TYPES.get(type(usual), object)):
                raise UserError(
                    f"{setting}: {part}/config.json describes no model: {key} is {value!r}; "
                    f"expected a value like {usual!r}"
                )


def _family_in(setting: str, source: str) -> type[Spec]:
    """Return the family whose first network is in a checkpoint."""
    found: dict[str, str | None] = {}  # part -> class of the network in it
    problems: dict[str, UserError] = {}
    for class_name, name in SHIPPED.items():
        cls = family(name)
        part = cls.main_network()
        if part not in found and part not in problems:
            try:
                found[part] = read_config("model.path", source, part).get("_class_name")
            except UserError as error:
                problems[part] = error
        if found.get(part) == class_name:
            return cls
    if not found:
        raise next(iter(problems.values()))
    first = next(iter(found.values()))
    raise UserError(f"{setting} holds a {first}; expected one of {list(SHIPPED)}")


def family_note(spec: Spec) -> str:
    """Return a note that the family of a hub id is assumed, and how to name it, or that its sizes
    are; empty if both are known."""
    if not spec.family_is_assumed:
        if spec.configs or spec.sizes_are_known:
            return ""
        return (
            f"model.path = {spec.path!r}: its files are not read here; its sizes are assumed to be "
            f"those of {spec.published}"
        )
    choices = [f"{name}:{spec.path}" for name in SHIPPED.values() if family(name).hub_names]
    return (
        f"model.path = {spec.path!r}: assumed to be {spec.title}, since its files are not read "
        f"here and its name tells no family; to name one: {' or '.join(choices)}"
    )


def _find_random(named: type[Spec] | None, path: str) -> Spec:
    """Return the spec of a random model of the family in the path's prefix, or of a shipped one."""
    families = [family(name) for name in SHIPPED.values()] if named is None else [named]
    randoms: dict[str, type[Spec]] = {}
    for cls in families:
        randoms |= dict.fromkeys(cls.randoms, cls)
    if not randoms:
        raise UserError(
            f"model.path = {path!r}: {families[0].title} has no models with random weights; its "
            "`randoms` would name them"
        )
    if path not in randoms:
        raise UserError(f"model.path = {path!r}: {nearest(path, randoms)}")
    return randoms[path](path)
