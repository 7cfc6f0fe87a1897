"""Settings from YAML files and overrides to a checked `Config`, and back.

`load` reads a file, applies overrides such as `{"sampling.eta": "0.7"}` and builds the tree, which
checks itself before any model is made. `dump` writes the resolved tree into the run folder.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import os
import re
import reprlib
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_origin

import yaml

from sage_fast.config.fields import own_settings, sections, settings_of
from sage_fast.config.other_trainers import INSTEAD, MEANINGS
from sage_fast.config.places import placed
from sage_fast.config.schema import Config, RewardEntry
from sage_fast.config.shipped import shipped_hint
from sage_fast.util.errors import UserError, first_line
from sage_fast.util.files import read_text
from sage_fast.util.paths import located

MAX_YAML_CHARS = 1_000_000
"""Most characters of a YAML text, also with every alias written out."""
MAX_NUMBER_CHARS = 100
"""Most characters of a whole number; messages show it."""
MIN_SIMILARITY = 0.8
"""Similarity of difflib from which a word counts as misspelt: a wrong hint is worse than none."""
BASES = {"0x": 16, "0o": 8, "0b": 2}
"""How a whole number begins -> its base."""

_SINGLE_REWARD = {f"reward.{field.name}" for field in dataclasses.fields(RewardEntry)}


def load(
    path: str | Path | None,
    overrides: Mapping[str, Any] | None = None,
    overlays: Sequence[Mapping[str, Any]] = (),
) -> Config:
    """Read a YAML file, apply `overrides` and check the result.

    What a file names is relative to that file, and what an override names to the current folder:
    sage_fast/config/places.py. `overlays` are taken as they are.

    The file may begin with `base: FILE`, relative to it, and then changes the settings of FILE. A
    mapping such as `reward.weights`, or one of its entries, replaces the whole mapping of the layer
    below: a file's replaces the base's, an override's replaces the file's. An entry of
    `reward.args` replaces only that argument.

    Args:
        path: None for the defaults.
        overrides: dotted keys or nested mappings, such as `{"train.iterations": 50}`. A text is
            read as on the command line, where `"50"` is a number too.
        overlays: settings as in a file. They win over the file, and the overrides win over them.

    Raises:
        UserError: file missing or not YAML, unknown key (names the nearest one), wrong type,
            invalid value.
    """
    of_file = _read(Path(path)) if path else {}
    of_overlays = [leaves(overlay) for overlay in overlays]
    typed = {key: _typed(key, value) for key, value in leaves(dict(overrides or {})).items()}
    of_command_line = placed(typed, Path.cwd(), is_file=False)
    return _checked(_merged(of_file, *of_overlays, of_command_line))


def build(settings: Mapping[str, Any]) -> Config:
    """Return a checked `Config` from dotted keys or nested mappings, over the defaults.

    What they name is relative to the current folder, as on the command line.

    Raises:
        UserError: unknown key (names the nearest one), wrong type, invalid value.
    """
    plain = {key: _plain(value) for key, value in leaves(dict(settings)).items()}
    return _checked(placed(_entries_joined(plain), Path.cwd(), is_file=False))


def keys_of(path: Path) -> list[str]:
    """Return the names of the settings that a file and its base set."""
    return list(_entries_joined(_read(path)))


def _read(path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Return dotted key -> value of a YAML file on top of its base; `above` are the files that led
    to this one."""
    tree = read_yaml(path)
    base = tree.pop("base", None)
    settings = leaves(tree)
    unknown = [key for key in _entries_joined(settings) if key not in settings_of(Config)]
    if unknown:
        raise UserError(f"config {path}: {'; '.join(map(_unknown, unknown))}")
    try:
        settings = placed(settings, path.parent)
    except UserError as error:
        raise UserError(f"config {path}: {error}") from error
    if base is None:
        return settings

    if not isinstance(base, str) or not base:
        raise UserError(f"config {path}: base = {base!r}: expected another YAML file")
    if path.resolve() in above:
        raise UserError(f"config {path}: base = {base!r}: it leads back to this file")
    base_file = Path(located(base, path.parent))
    return _merged(_read(base_file, (*above, path.resolve())), settings)


def _merged(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Merge layers: the last value of a setting wins.

    `reward.several` and a single reward replace each other.
    """
    joined: dict[str, Any] = {}
    for layer in layers:
        settings = _entries_joined(layer)

        # Single arguments (`reward.args.fps`) add to those of the layers below, unless this layer
        # names another reward.
        has_single_args = "reward.args" in settings and "reward.args" not in layer
        if has_single_args and "reward.name" not in layer:
            below = settings_of(Config)["reward.args"].checked(joined.get("reward.args", {}))
            settings["reward.args"] = below | settings["reward.args"]

        if settings.get("reward.several"):
            joined = {key: value for key, value in joined.items() if key not in _SINGLE_REWARD}
        elif "reward.name" in settings:
            joined.pop("reward.several", None)
        joined |= settings
    return joined


def read_yaml(path: Path) -> dict[Any, Any]:
    """Read a YAML file that holds a mapping.

    Raises:
        UserError: file missing, not YAML, no mapping, or an empty one.
    """
    if path.is_dir():
        again = "; --resume continues the run in it" if (path / "run.json").is_file() else ""
        files = [path / "config.yaml", *sorted(path.glob("*.yaml"))]
        example = next((f", such as {file}" for file in files if file.is_file()), "")
        raise UserError(f"config {path}: a folder; expected a YAML file{example}{again}")
    if not path.exists():
        is_name = not path.suffix and len(path.parts) == 1
        hint = shipped_hint(path)
        if is_name and not hint:
            hint = "; expected a YAML file; sage-fast init --list shows those that are shipped"
        raise UserError(f"config {path}: no such file{hint}")
    try:
        loaded = parse_yaml(read_text(path))
    except ValueError as error:
        raise UserError(f"config {path}: not valid YAML: {error}") from error
    if not loaded:
        raise UserError(f"config {path}: holds no settings")
    if not isinstance(loaded, dict):
        raise UserError(f"config {path}: expected a mapping of settings")
    return loaded


class NumberError(ValueError):
    """A number of a YAML text that cannot be read, or that YAML's versions read as different
    ones."""


class _Loader(yaml.SafeLoader):
    """YAML 1.1 with numbers as people write them, dates as text, and no key twice in a mapping.

    `010` is 10 and `1e-4` is a number. `1:30`, a number in base 60 to YAML 1.1 and text to YAML
    1.2, is refused.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [str(key.value) for key, _ in node.value]
        if repeated := [name for name in names if names.count(name) > 1]:
            raise yaml.MarkedYAMLError(
                problem=f"found duplicate key {repeated[0]}", problem_mark=node.start_mark
            )
        return super().construct_mapping(node, deep)

    def whole_number(self, node: yaml.ScalarNode) -> int:
        """Read an integer.

        Leading zeros mean nothing; `0x`, `0o` and `0b` say which base it is in.
        """
        digits = node.value.replace("_", "")
        if len(digits) > MAX_NUMBER_CHARS:
            raise _number_error(
                node, f"a number of {len(digits):,} characters; expected at most {MAX_NUMBER_CHARS}"
            )
        base = BASES.get(digits.lstrip("-+")[:2].lower(), 10)
        return int(digits, base)

    def decimal_number(self, node: yaml.ScalarNode) -> float:
        """Read a float; `.inf` and `.nan` are YAML's names for what Python calls inf and nan."""
        text = node.value.replace("_", "").lower()
        return float(text.replace(".inf", "inf").replace(".nan", "nan"))

    def base_60(self, node: yaml.ScalarNode) -> float:
        """Refuse a number in base 60."""
        text = reprlib.repr(node.value)
        expected = "expected a plain number, or quotes around it for text"
        raise _number_error(
            node,
            f"{text} is a number in base 60 to some readers of YAML and text to others; {expected}",
        )


class _Dumper(yaml.SafeDumper):
    """Quotes text that `_Loader` would read as a number."""


def _number_error(node: yaml.Node, problem: str) -> NumberError:
    mark = node.start_mark
    return NumberError(f"line {mark.line + 1}, column {mark.column + 1}: {problem}")


_INTEGER = "tag:yaml.org,2002:int"
_FLOAT = "tag:yaml.org,2002:float"
_BASE_60 = "!base-60"
_DIGITS = "[0-9]+(_[0-9]+)*"
_NUMBERS = {
    _INTEGER: rf"[-+]?({_DIGITS}|0[xX][0-9a-fA-F]+|0[oO][0-7]+|0[bB][01]+)",
    _FLOAT: rf"[-+]?({_DIGITS}(\.({_DIGITS})?)?|\.{_DIGITS})([eE][-+]?[0-9]+)?"
    r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
    _BASE_60: r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?",
}
"""Tag -> the plain text that has it, instead of YAML 1.1's numbers.

An integer is no float: the first one counts.
"""


def _set_numbers(kind: type[_Loader] | type[_Dumper]) -> None:
    """Replace the rules by which a reader or a writer of YAML knows numbers."""
    others = {
        first: [(tag, pattern) for tag, pattern in rules if tag not in _NUMBERS]
        for first, rules in kind.yaml_implicit_resolvers.items()
    }
    kind.yaml_implicit_resolvers = others
    for tag, pattern in _NUMBERS.items():
        kind.add_implicit_resolver(tag, re.compile(f"({pattern})$"), list("-+.0123456789"))


_set_numbers(_Loader)
_set_numbers(_Dumper)
_Loader.add_constructor(_INTEGER, _Loader.whole_number)
_Loader.add_constructor(_FLOAT, _Loader.decimal_number)
_Loader.add_constructor(_BASE_60, _Loader.base_60)
_Loader.add_constructor("tag:yaml.org,2002:timestamp", _Loader.construct_yaml_str)


def parse_yaml(text: str) -> Any:
    """Return the value of a YAML text, the only way in which YAML is read.

    Raises:
        NumberError: a number is too long or in base 60; says where, in one line.
        ValueError: says what is wrong and where, in one line.
    """
    if len(text) > MAX_YAML_CHARS:
        raise ValueError(f"longer than {MAX_YAML_CHARS:,} characters")
    try:
        return _value_of(text)
    except NumberError:
        raise
    except RecursionError as error:
        raise ValueError("nested too deeply for settings") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        raise ValueError(
            f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
        ) from error
    except (
        yaml.YAMLError,
        ValueError,
        LookupError,
        OverflowError,
    ) as error:  # the last three: of a number
        raise ValueError(f"cannot read a value: {first_line(error)}") from error


def _value_of(text: str) -> Any:
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        if _expanded_chars(node, {}) > MAX_YAML_CHARS:
            raise yaml.MarkedYAMLError(
                problem=f"longer than {MAX_YAML_CHARS:,} characters with every alias written out",
                problem_mark=node.start_mark,
            )
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _expanded_chars(node: yaml.Node, known: dict[int, int | None]) -> int:
    """Return the characters of a node with every alias in it written out.

    Args:
        known: number of a node -> its characters; None while they are counted, and so within
            itself.

    Raises:
        yaml.MarkedYAMLError: a node contains itself.
    """
    key = id(node)
    if key in known:
        chars = known[key]
        if chars is None:
            raise yaml.MarkedYAMLError(
                problem="an alias of what it is in", problem_mark=node.start_mark
            )
        return chars
    if isinstance(node, yaml.ScalarNode):
        return len(node.value) + 1
    known[key] = None
    parts = itertools.chain(*node.value) if isinstance(node, yaml.MappingNode) else node.value
    chars = 1 + sum(_expanded_chars(part, known) for part in parts)
    known[key] = chars
    return chars


def _checked(settings: Mapping[str, Any]) -> Config:
    """Return a `Config` from settings whose names are placed already."""
    by_section: dict[str, dict[str, Any]] = {name: {} for name in sections(Config)}
    for key, value in leaves(_entries_joined(settings)).items():
        if key not in settings_of(Config):
            raise UserError(_unknown(key))
        section_of_key, _, field = key.rpartition(".")
        by_section[section_of_key][field] = value

    of_tree = by_section.pop("")
    made = {name: sections(Config)[name](**fields) for name, fields in by_section.items()}
    return Config(**of_tree, **made)


def replaced(config: Config, settings: Mapping[str, Any]) -> Config:
    """Return a copy of `config` with some settings changed, as `Config.replace` does."""
    present = leaves(dataclasses.asdict(config))
    changed = {key: _plain(value) for key, value in leaves(dict(settings)).items()}
    return _checked(_merged(present, placed(changed, Path.cwd(), is_file=False)))


def dump(config: Config) -> str:
    """Return the resolved tree as YAML."""
    return yaml.dump(
        dataclasses.asdict(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True
    )


def leaves(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings to dotted key -> value, down to the settings.

    A section without settings, as when all its lines are commented out, keeps the defaults.
    """
    name = prefix.removesuffix(".")
    if name in sections(Config) and not tree and isinstance(tree, dict | None):
        return {}
    if isinstance(tree, dict) and tree and not _is_in_setting(name):
        return {
            name: leaf
            for key, value in tree.items()
            for name, leaf in leaves(value, f"{prefix}{key}.").items()
        }
    return {name: tree}


def _is_in_setting(name: str) -> bool:
    """Whether a dotted name is a setting, or an entry of one, such as `reward.args.path`."""
    parts = name.split(".")
    outer = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
    return any(each in settings_of(Config) for each in outer)


def _entries_joined(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Collect dotted entries such as `reward.weights.red` into their mapping."""
    joined = dict(settings)
    for name, setting in settings_of(Config).items():
        entries = {
            key.removeprefix(f"{name}."): joined.pop(key)
            for key in settings
            if key.startswith(f"{name}.")
        }
        if entries and get_origin(setting.type) is dict:
            joined[name] = setting.checked(joined.get(name, {})) | entries
    return joined


def _plain(value: Any) -> Any:
    """Return a value of Python as YAML would hold it: a path as text, a tuple as a list."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _typed(key: str, text: Any) -> Any:
    """Parse the value of an override as YAML; the value of a text setting stays as typed, with its
    line breaks. What is no text is a value already."""
    if not isinstance(text, str):
        return _plain(text)
    if not text.strip(" "):
        raise UserError(f"--{key}: the value is empty")
    setting = settings_of(Config).get(key)
    takes_text = setting is not None and setting.is_text
    try:
        value = parse_yaml(text)
    except NumberError as error:
        if takes_text:
            return text
        raise UserError(f"--{key} {reprlib.repr(text)}: {error}") from error
    except ValueError as error:
        quote = f"quote special characters twice: --{key} \"'...'\""
        raise UserError(
            f"--{key} {reprlib.repr(text)}: not a YAML value: {error}; {quote}"
        ) from error
    if isinstance(value, dict) and setting is not None and setting.takes_mapping:
        return value
    as_typed = not isinstance(value, str | None) or len(text.splitlines()) > 1
    return text if takes_text and as_typed else value


def _unknown(key: str) -> str:
    """Say what is wrong with an unknown key."""
    if key in sections(Config):
        return (
            f"{key!r} is a section of settings: "
            f"{', '.join(s.name for s in own_settings(sections(Config)[key]))}"
        )
    close = similar(key)
    question = instead_of(key) or "--help lists them"
    if close:
        question = f"did you mean {' or '.join(map(repr, close))}?"
    return f"unknown setting {textwrap.shorten(key, 60)!r}; {question}"


def similar(key: str) -> list[str]:
    """Return the settings that an unknown key may mean, by its last part: `--eta`, `--lr`,
    `sampling.stesp`.

    The list is empty rather than a guess. Of several settings, those of the key's own section are
    meant.
    """
    section, _, last = key.rpartition(".")
    last = last.replace("-", "_")
    by_field: dict[str, list[str]] = {}
    for name, setting in settings_of(Config).items():
        by_field.setdefault(setting.field, []).append(name)

    own_name = by_field.get(last)
    meant = MEANINGS.get(last)
    if meant is not None and own_name is None:
        named: list[str] = []
        for role in meant:
            field = settings_of(Config)[role].field
            in_section = f"{section}.{field}"  # eval.cfg is eval.guidance_scale
            named.append(in_section if in_section in settings_of(Config) else role)
        return named
    named = own_name or by_field.get(_misspelt(last, by_field), [])
    return [name for name in named if name.startswith(f"{section}.")] or named


def instead_of(key: str) -> str:
    """Return what there is here for a name of other trainers that is no setting, such as
    `resume_from_checkpoint`; "" if the name is not known."""
    last = key.rpartition(".")[2].replace("-", "_")
    return INSTEAD.get(last, "")


def _misspelt(word: str, known: Iterable[str]) -> str:
    """Return the known word that a word is but for a letter or two; "" if there is none."""
    swapped = [other for other in known if sorted(other) == sorted(word)]
    close = difflib.get_close_matches(word, known, n=1, cutoff=MIN_SIMILARITY)
    return next(iter([*swapped, *close]), "")
