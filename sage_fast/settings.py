"""Settings from YAML files and the command line into a validated `Config`, and back.

`load` reads a file, applies overrides such as `{"sampling.eta": "0.7"}` and validates the result once, before any model
is built. The resolved tree is written into the run folder with `dump`. The command's help and its completion are made
from the tree and the docstrings of its fields.
"""

from __future__ import annotations

import argparse
import dataclasses
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_origin

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException, ValidationError

from sage_fast.config import Config
from sage_fast.errors import UserError
from sage_fast.reward_config import RewardEntry
from sage_fast.section import is_unicode, kind, meanings, own_settings, sections, settings_of

_OF_ONE_REWARD = {f"reward.{field.name}" for field in dataclasses.fields(RewardEntry)}


def load(
    path: str | Path, overrides: Mapping[str, str] | None = None, overlays: Sequence[Mapping[str, Any]] = ()
) -> Config:
    """Read a YAML file, apply `overrides` (dotted key -> YAML value, as typed) and validate.

    The file may begin with `base: FILE`, another one whose settings it changes; FILE is relative to it. A mapping such
    as `reward.weights`, or one of its entries, replaces that of the base, and in the overrides that of the file; an
    entry of `reward.args` replaces that argument alone.

    Args:
        overlays: settings as a file has them, between those of the file and the overrides.

    Raises:
        UserError: file missing or not YAML, unknown key (names the nearest one), wrong type, invalid value.
    """
    path = Path(path)
    if overrides and not path.exists():
        raise UserError(f"config {path}: no such file; it comes first, before settings such as --sampling.eta 0.7")
    return build(_laid_over(_read(path), *map(leaves, overlays), _given(overrides or {})))


def from_overrides(overrides: Mapping[str, str]) -> Config:
    """The defaults under `overrides`, as for `load`.

    Raises:
        UserError: unknown key, wrong type, invalid value.
    """
    return build(_given(overrides))


def _given(overrides: Mapping[str, str]) -> dict[str, Any]:
    return {key: _typed(key, text) for key, text in overrides.items()}


def keys_of(path: Path) -> list[str]:
    """Names of the settings that a file holds, which `load` has read."""
    return list(_entries_joined(_read(path)))


def _read(path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Dotted key -> value of a YAML file over its base; `above` are the files that led to this one."""
    tree = read_yaml(path)
    base = tree.pop("base", None)
    if base is None:
        return leaves(tree)
    if not isinstance(base, str) or not base or path.resolve() in above:
        expected = "it leads back to this file" if isinstance(base, str) and base else "expected another YAML file"
        raise UserError(f"config {path}: base = {base!r}: {expected}")
    return _laid_over(_read(path.parent / base, (*above, path.resolve())), leaves(tree))


def _laid_over(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """The last layer that has a setting counts. Several rewards stand in the place of one, and one in theirs."""
    joined: dict[str, Any] = {}
    for layer in layers:
        own = _entries_joined(layer)
        if not {"reward.args", "reward.name"} & layer.keys() and "reward.args" in own:  # an argument leaves the others
            below = joined.get("reward.args", {})
            settings_of(Config)["reward.args"].check(below)
            own["reward.args"] = below | own["reward.args"]
        if own.get("reward.several"):
            joined = {key: value for key, value in joined.items() if key not in _OF_ONE_REWARD}
        elif "reward.name" in own:
            joined.pop("reward.several", None)
        joined |= own
    return joined


def read_yaml(path: Path) -> dict[Any, Any]:
    """
    Raises:
        UserError: file missing, not YAML, no mapping, or an empty one.
    """
    if path.is_dir():
        raise UserError(f"config {path}: a folder; expected a YAML file, such as {path / 'config.yaml'}")
    if not path.exists():
        raise UserError(f"config {path}: no such file")
    try:
        loaded = OmegaConf.load(path)
    except RecursionError as error:
        raise UserError(f"config {path}: nested too deeply; expected sections of settings") from error
    except (UnicodeDecodeError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise UserError(f"config {path}: not valid YAML: {_where(error)}") from error
    except OSError as error:
        if error.errno is not None:
            raise
        raise UserError(f"config {path}: expected a mapping of settings") from error  # a number or a word
    if not isinstance(loaded, DictConfig):
        raise UserError(f"config {path}: expected a mapping of settings")
    if not loaded:
        raise UserError(f"config {path}: holds no settings")
    container = OmegaConf.to_container(loaded)
    assert isinstance(container, dict)
    return container


def build(settings: Mapping[str, Any]) -> Config:
    """A validated `Config` from dotted keys."""
    tree, known = OmegaConf.structured(Config), settings_of(Config)
    for key, value in _entries_joined(settings).items():
        if key not in known:
            raise UserError(_unknown(key))
        try:
            OmegaConf.update(tree, key, value, merge=False)
        except (ValidationError, OverflowError) as error:
            known[key].check(value)
            raise UserError(f"{key} = {value!r}: expected {kind(known[key].type)}") from error
        except OmegaConfBaseException as error:
            raise UserError(f"{key} = {value!r}: {str(error).splitlines()[0]}") from error
    try:
        config = OmegaConf.to_object(tree)
    except OmegaConfBaseException as error:  # ${...} that leads nowhere
        raise UserError(f"{error.full_key}: {str(error).splitlines()[0]}") from error
    assert isinstance(config, Config)
    return config


def dump(config: Config) -> str:
    """The resolved tree as YAML."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def _where(error: Exception) -> str:
    """What is wrong with a YAML file, and on which line, in one line."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}: {error.problem}"
    return str(error).splitlines()[0]


def leaves(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value of nested mappings, each taken apart until it is a setting.

    A section without settings, as when all its lines are commented out, leaves the defaults.
    """
    name = prefix.removesuffix(".")
    if name in sections(Config) and not tree and isinstance(tree, dict | None):
        return {}
    if isinstance(tree, dict) and tree and name not in settings_of(Config):
        return {name: leaf for key, value in tree.items() for name, leaf in leaves(value, f"{prefix}{key}.").items()}
    return {name: tree}


def _entries_joined(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Entries of a mapping that are given one by one (`reward.weights.red`) joined to that mapping."""
    joined = dict(settings)
    for name, setting in settings_of(Config).items():
        entries = {key.removeprefix(f"{name}."): joined.pop(key) for key in settings if key.startswith(f"{name}.")}
        if setting.is_mapping and entries:
            setting.check(joined.get(name, {}))
            joined[name] = joined.get(name, {}) | entries
    return joined


def _typed(key: str, text: str) -> Any:
    """The value that an override gives, as YAML; text stays as typed where text is expected."""
    if not text.strip(" "):
        raise UserError(f"--{key}: the value is empty")
    if not is_unicode(text):
        raise UserError(f"--{key} {text!r}: expected text in UTF-8")
    try:
        value = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))["value"]  # type: ignore[index, call-overload]
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        why = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise UserError(f"--{key} {text!r}: not a YAML value: {why}; text with special characters needs quotes of its "
                        f"own inside those of the shell: --{key} \"'...'\"") from error  # fmt: skip
    setting = settings_of(Config).get(key)
    return text if setting is not None and setting.is_text and not isinstance(value, str | None) else value


def _unknown(key: str) -> str:
    """Nearest by the whole path, else by the last name (so that `--eta` finds `sampling.eta`)."""
    import difflib

    known = list(settings_of(Config))
    if key in sections(Config):
        inside = [name for name in known if name.startswith(f"{key}.")]
        return f"{key!r} is a section of settings: {', '.join(inside)}"
    same_name = [k for k in known if k.rsplit(".", 1)[-1] == key.rsplit(".", 1)[-1]]
    close = same_name or difflib.get_close_matches(key, known, n=1, cutoff=0.0)
    return f"unknown setting {textwrap.shorten(key, 60)!r}; did you mean {close[0]!r}?"


# -- the command line -------------------------------------------------------------------------------------------------


def overrides_of(arguments: Sequence[str]) -> dict[str, str]:
    """Dotted key -> value as typed, of `--key.path value` or `--key.path=value`; the last one counts.

    Raises:
        UserError: an argument of another form, or an option without its value.
    """
    settings: dict[str, str] = {}
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("--"):
            raise UserError(f"unexpected argument {argument!r}; settings are given as --key.path value")
        key, separator, value = argument[2:].partition("=")
        if not separator:
            if not rest or rest[0].startswith("--"):
                known = key in settings_of(Config) or key.startswith(("reward.weights.", "reward.args."))
                raise UserError(f"{argument} needs a value" if known else f"unknown option {argument}; see --help")
            value = rest.pop(0)
        settings[key] = value
    return settings


METAVARS = {int: "INTEGER", float: "NUMBER", dict: "{NAME: NUMBER, ...}", list: "[...]"}


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add every setting as an option, for the help and for completion; `overrides_of` parses what is given."""
    for name, section in sections(Config).items():
        meaning = meanings(section)
        group = parser.add_argument_group(f"settings, {name}" if name else "settings", meaning[""])
        for setting in own_settings(section):
            bounds = f"{setting.range}; " if setting.range else ""
            text = f"{meaning[setting.field]} ({bounds}default: {_yaml(setting.default)})"
            group.add_argument(
                f"--{setting.name}",
                choices=setting.choices or (("true", "false") if setting.type is bool else None),
                metavar="TEXT" if setting.is_text else METAVARS.get(get_origin(setting.type) or setting.type),
                help=text.replace("%", "%%"),
            )


def _yaml(value: object) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=1000, sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...")
