"""Settings from YAML files and overrides to a checked `Config`, and back.

`load` reads a file, applies overrides such as `{"sampling.eta": "0.7"}` and builds the tree, which checks itself before
any model is made. `dump` writes the resolved tree into the run folder.
"""

from __future__ import annotations

import dataclasses
import re
import reprlib
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_origin

import yaml

from sage_fast.config.fields import own_settings, sections, settings_of
from sage_fast.config.schema import Config, RewardEntry
from sage_fast.util.errors import UserError, first_line

LARGEST = 1_000_000
"""Most characters of a YAML text."""

ALIASES = {"lr": "train.learning_rate", "epochs": "train.iterations", "fsdp": "train.engine", "beta": "kl.lambda_max"}
ALIASES |= {"kl_coef": "kl.lambda_max", "num_epochs": "train.iterations", "num_generations": "train.group_size"}
"""Last part of a name in other trainers -> the setting meant."""
_SINGLE_REWARD = {f"reward.{field.name}" for field in dataclasses.fields(RewardEntry)}


def load(
    path: str | Path | None, overrides: Mapping[str, str] | None = None, overlays: Sequence[Mapping[str, Any]] = ()
) -> Config:
    """Read a YAML file, apply `overrides` (dotted key -> YAML value, as typed) and check the result.

    The file may begin with `base: FILE`, relative to it, and then changes the settings of FILE. A mapping such as
    `reward.weights`, or one of its entries, replaces the whole mapping of the layer below: a file's replaces the
    base's, an override's replaces the file's. An entry of `reward.args` replaces only that argument.

    Args:
        path: None for the defaults.
        overlays: settings as in a file. They win over the file, and the overrides win over them.

    Raises:
        UserError: file missing or not YAML, unknown key (names the nearest one), wrong type, invalid value.
    """
    own, typed = _read(Path(path)) if path else {}, {key: _typed(key, text) for key, text in (overrides or {}).items()}
    return build(_merged(own, *map(leaves, overlays), typed))


def keys_of(path: Path) -> list[str]:
    """Return the names of the settings that a file and its base set."""
    return list(_entries_joined(_read(path)))


def _read(path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Return dotted key -> value of a YAML file on top of its base; `above` are the files that led to this one."""
    tree = read_yaml(path)
    base, own = tree.pop("base", None), leaves(tree)
    for name in own.keys() & {"data.prompts", "data.eval_prompts", "model.weights"}:
        if not Path(str(own[name])).exists() and (path.parent / str(own[name])).exists():
            own[name] = str(path.parent / own[name])
    if unknown := [key for key in _entries_joined(own) if key not in settings_of(Config)]:
        raise UserError(f"config {path}: {'; '.join(map(_unknown, unknown))}")
    if base is None:
        return own
    if not isinstance(base, str) or not base or path.resolve() in above:
        expected = "it leads back to this file" if isinstance(base, str) and base else "expected another YAML file"
        raise UserError(f"config {path}: base = {base!r}: {expected}")
    return _merged(_read(path.parent / base, (*above, path.resolve())), own)


def _merged(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Merge layers: the last value of a setting wins. `reward.several` and a single reward replace each other."""
    joined: dict[str, Any] = {}
    for layer in layers:
        own = _entries_joined(layer)
        if not {"reward.args", "reward.name"} & layer.keys() and "reward.args" in own:  # single arguments
            below = settings_of(Config)["reward.args"].checked(joined.get("reward.args", {}))
            own["reward.args"] = below | own["reward.args"]
        if own.get("reward.several"):
            joined = {key: value for key, value in joined.items() if key not in _SINGLE_REWARD}
        elif "reward.name" in own:
            joined.pop("reward.several", None)
        joined |= own
    return joined


def read_yaml(path: Path) -> dict[Any, Any]:
    """Read a YAML file that holds a mapping.

    Raises:
        UserError: file missing, not YAML, no mapping, or an empty one.
    """
    if path.is_dir():
        again = "; --resume continues the run in it" if (path / "run.json").is_file() else ""
        raise UserError(f"config {path}: a folder; expected a YAML file, such as {path / 'config.yaml'}{again}")
    if not path.exists():
        raise UserError(f"config {path}: no such file")
    try:
        loaded = parse_yaml(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"config {path}: not valid YAML: {error}") from error
    if not loaded or not isinstance(loaded, dict):
        raise UserError(f"config {path}: {'expected a mapping of' if loaded else 'holds no'} settings")
    return loaded


class _Loader(yaml.SafeLoader):
    """YAML 1.1, but 1e-4 is a number, a date is text, and a mapping must not repeat a key."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [str(key.value) for key, _ in node.value]
        if repeated := [name for name in names if names.count(name) > 1]:
            raise yaml.MarkedYAMLError(problem=f"found duplicate key {repeated[0]}", problem_mark=node.start_mark)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes text that `_Loader` would read as a number."""


for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d[\d_]*\.?|\.\d)[\d_]*[eE][-+]?\d+$"), list("-+.0123456789")
    )
_Loader.add_constructor("tag:yaml.org,2002:timestamp", _Loader.construct_yaml_str)


def parse_yaml(text: str) -> Any:
    """Return the value of a YAML text, the only way in which YAML is read.

    Raises:
        ValueError: says what is wrong and where, in one line.
    """
    if len(text) > LARGEST:
        raise ValueError(f"longer than {LARGEST:,} characters")
    try:
        return yaml.load(text, _Loader)
    except RecursionError as error:
        raise ValueError("nested too deeply for settings") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        raise ValueError(f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}") from error
    except (yaml.YAMLError, ValueError, LookupError, OverflowError) as error:  # the last three: of a number
        raise ValueError(f"cannot read a value: {first_line(error)}") from error


def build(settings: Mapping[str, Any]) -> Config:
    """Return a checked `Config` from dotted keys or nested mappings."""
    given: dict[str, dict[str, Any]] = {name: {} for name in sections(Config)}
    for key, value in leaves(_entries_joined(settings)).items():
        if key not in settings_of(Config):
            raise UserError(_unknown(key))
        section, _, field = key.rpartition(".")
        given[section][field] = value
    inside = {name: section(**given[name]) for name, section in sections(Config).items() if name}
    return Config(**given[""], **inside)


def dump(config: Config) -> str:
    """Return the resolved tree as YAML."""
    return yaml.dump(dataclasses.asdict(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def leaves(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings to dotted key -> value, down to the settings.

    A section without settings, as when all its lines are commented out, keeps the defaults.
    """
    name = prefix.removesuffix(".")
    if name in sections(Config) and not tree and isinstance(tree, dict | None):
        return {}
    if isinstance(tree, dict) and tree and name not in settings_of(Config):
        return {name: leaf for key, value in tree.items() for name, leaf in leaves(value, f"{prefix}{key}.").items()}
    return {name: tree}


def _entries_joined(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Collect dotted entries such as `reward.weights.red` into their mapping."""
    joined = dict(settings)
    for name, setting in settings_of(Config).items():
        entries = {key.removeprefix(f"{name}."): joined.pop(key) for key in settings if key.startswith(f"{name}.")}
        if entries and get_origin(setting.type) is dict:
            joined[name] = setting.checked(joined.get(name, {})) | entries
    return joined


def _typed(key: str, text: str) -> Any:
    """Parse the value of an override as YAML; the value of a text setting stays as typed, with its line breaks."""
    if not text.strip(" "):
        raise UserError(f"--{key}: the value is empty")
    try:
        value = parse_yaml(text)
    except ValueError as error:
        quote = f"quote special characters twice: --{key} \"'...'\""
        raise UserError(f"--{key} {reprlib.repr(text)}: not a YAML value: {error}; {quote}") from error
    setting = settings_of(Config).get(key)
    as_typed = not isinstance(value, str | None) or len(text.splitlines()) > 1
    return text if setting is not None and setting.is_text and as_typed else value


def _unknown(key: str) -> str:
    """Say what is wrong with an unknown key."""
    if key in sections(Config):
        return f"{key!r} is a section of settings: {', '.join(s.name for s in own_settings(sections(Config)[key]))}"
    question = f"did you mean {' or '.join(map(repr, close))}?" if (close := similar(key)) else "--help lists them"
    return f"unknown setting {textwrap.shorten(key, 60)!r}; {question}"


def similar(key: str) -> list[str]:
    """Return the settings that an unknown key may mean: by its last name (`--eta`, `--lr`), else by a similar path."""
    import difflib

    last, known = key.rsplit(".", 1)[-1].replace("-", "_"), list(settings_of(Config))
    named = [ALIASES.get(last, ""), *(name for name in known if f".{name}".endswith(f".{last}"))]
    return list(dict.fromkeys(filter(None, named))) or difflib.get_close_matches(key, known, n=1, cutoff=0.75)
