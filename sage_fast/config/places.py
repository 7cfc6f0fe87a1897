"""What settings name on this machine: files, folders, checkpoints and code. One rule for all of
them.

A relative path, or a module, means the folder of the settings file that names it; on the command
line, the current folder. A field of the schema says what it names (`names("file")`); nothing here
knows a setting by its name. Imports nothing heavy.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sage_fast.config.fields import PLACE_FORM, is_hub_id, own_settings, settings_of
from sage_fast.config.schema import MODEL_NAMES, OBJECT, PROMPT_SETS, RANDOM, Config, RewardEntry
from sage_fast.util.errors import UserError
from sage_fast.util.paths import expanded, located, without_dots
from sage_fast.util.plugins import find_module, is_importable, split_place

_FAMILY = re.compile(r"((?:[^:]*/)?[A-Za-z_][\w.]*:[A-Za-z_]\w*):(.+)")
"""A model family, `package.module:Name` with or without its folder, before a path."""


def placed(settings: Mapping[str, Any], folder: Path, *, is_file: bool = True) -> dict[str, Any]:
    """Return settings, dotted key -> value, with whatever they name made absolute.

    Args:
        folder: what is relative is relative to it.
        is_file: whether a file in `folder` holds the settings. If not, they are typed in `folder`.

    Raises:
        UserError: names the setting; a path cannot be expanded, or a module is only in the current
            folder.
    """
    whole = Path(without_dots(folder))
    return {key: _placed(key, value, whole, is_file) for key, value in settings.items()}


def placed_plugin(name: str) -> str:
    """Return the name of a reward that an option holds, as `placed` returns that of a setting."""
    return str(_reward_name(name, Path.cwd(), is_file=False))


def is_moved(old: Any, new: Any) -> bool:
    """Whether a setting names the same thing at another place: it has kept its name, and the old
    place is empty."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        return old.keys() == new.keys() and all(
            old[key] == new[key] or is_moved(old[key], new[key]) for key in old
        )
    if isinstance(old, list) and isinstance(new, list):
        if len(old) != len(new):
            return False
        return all(a == b or is_moved(a, b) for a, b in zip(old, new))
    if not _is_absolute(old) or not _is_absolute(new):
        return False
    return Path(old).name == Path(new).name and not _is_there(old) and _is_there(new)


def _is_absolute(value: Any) -> bool:
    return isinstance(value, str) and os.path.isabs(value)


def _is_there(place: str) -> bool:
    """Whether there is a file, a folder or the module of a plug-in at an absolute place."""
    if os.path.exists(place):
        return True
    try:
        folder, module, _ = split_place(place)
    except UserError:  # no place of a plug-in
        return False
    return find_module(module, Path(folder)) is not None


def split_family(path: str) -> tuple[str | None, str]:
    """Split `package.module:Name:PATH` into the place of the model family and PATH; the first is
    None without it."""
    found = _FAMILY.fullmatch(path)
    return (None, path) if found is None else (found[1], found[2])


def _placed(key: str, value: Any, folder: Path, is_file: bool) -> Any:
    known = settings_of(Config)
    setting = next((known[name] for name in known if f"{key}.".startswith(f"{name}.")), None)
    if setting is None or setting.names is None:
        return value
    is_place = isinstance(value, str) and PLACE_FORM.fullmatch(value)
    if setting.takes_plugin and not is_place:
        return value  # a shipped choice, or nothing valid: its check says what is expected
    try:
        return PLACES[setting.names](value, folder, is_file)
    except UserError as error:
        raise UserError(f"{key} = {error}") from error


# -- one function for each kind of name. A value of another type stays as it is, and is refused by
# its check.


def _output(value: Any, folder: Path, is_file: bool) -> Any:
    """A folder that a command writes, wherever the settings are: relative to the current folder,
    and left so."""
    return expanded(value) if isinstance(value, str) else value


def _file(value: Any, folder: Path, is_file: bool) -> Any:
    return located(value, folder) if isinstance(value, str) and value else value


def _prompts(value: Any, folder: Path, is_file: bool) -> Any:
    """A prompt file, or a shipped set."""
    prefixes = tuple({name.partition(":")[0] + ":" for name in PROMPT_SETS})
    if isinstance(value, str) and value.startswith(prefixes):
        return value
    return _file(value, folder, is_file)


def _model(value: Any, folder: Path, is_file: bool) -> Any:
    """A checkpoint: a shipped one, one with random weights, a folder or a hub id, each perhaps
    after a family."""
    if not isinstance(value, str) or not value:
        return value
    family, path = split_family(value)
    if family is not None:
        return f"{_plugin(family, folder, is_file)}:{_model(path, folder, is_file)}"
    if path in MODEL_NAMES or path.startswith(RANDOM):
        return path
    whole = located(path, folder)
    # `owner/name` is a folder if it is there. Otherwise it is a hub id.
    return path if is_hub_id(path) and not os.path.isdir(whole) else whole


def _reward_name(value: Any, folder: Path, is_file: bool) -> Any:
    """A reward: a plug-in, or an object of a program, which is at no place."""
    if isinstance(value, str) and value.startswith(OBJECT):
        return value
    return _plugin(value, folder, is_file)


def _plugin(value: Any, folder: Path, is_file: bool) -> Any:
    """A reward or another plug-in: `package.module:name`, a short name or an address; or a list of
    them."""
    if isinstance(value, list):
        return [_plugin(item, folder, is_file) for item in value]
    if not isinstance(value, str) or ":" not in value or "://" in value:
        return value
    inside, module, name = split_place(value)
    if inside or value.startswith("~"):
        return f"{located(inside, folder)}/{module}:{name}"
    if find_module(module, folder) is not None:
        return f"{folder}/{module}:{name}"
    here = Path.cwd()
    is_here_alone = here != folder and find_module(module, here) is not None
    if is_file and is_here_alone and not is_importable(module):
        raise UserError(
            f"{value!r}: no module {module!r} is installed or in {folder}, the folder of the "
            "settings; the current folder has one: give the name as an option to take that"
        )
    return value


def _callbacks(value: Any, folder: Path, is_file: bool) -> Any:
    """A list of callbacks: `package.module:name`, or a mapping with a name and arguments."""
    if not isinstance(value, list):
        return value
    placed = []
    for entry in value:
        if isinstance(entry, Mapping):
            entry = dict(entry)
            if "name" in entry:
                entry["name"] = _plugin(entry["name"], folder, is_file)
            if "args" in entry:
                entry["args"] = _arguments(entry["args"], folder, is_file)
            placed.append(entry)
        else:
            placed.append(_plugin(entry, folder, is_file))
    return placed


def _arguments(value: Any, folder: Path, is_file: bool) -> Any:
    """Arguments of a reward.

    A text that names a file or folder beside the settings, or begins with `~/`, is a path.
    """
    if isinstance(value, Mapping):
        return {key: _arguments(item, folder, is_file) for key, item in value.items()}
    if isinstance(value, list):
        return [_arguments(item, folder, is_file) for item in value]
    # ${NAME} is a secret: config/secrets.py
    if not isinstance(value, str) or not value or "$" in value:
        return value
    if value.startswith("~/"):
        return expanded(value)
    if is_file and (folder / "run.json").exists():
        return value  # in a run's folder paths are whole, and a word such as `eval` is no path
    whole = without_dots(folder / value)
    if os.path.exists(whole):
        return whole
    looks_like_path = "/" in value or Path(value).suffix
    if is_file and looks_like_path and os.path.exists(value):
        raise UserError(
            f"{value!r}: is in the current folder and not in {folder}, the folder of the settings; "
            "write the whole path, or give the argument as an option"
        )
    return value


def _rewards(value: Any, folder: Path, is_file: bool) -> Any:
    """A list of rewards, each as the section `reward`."""
    if not isinstance(value, list):
        return value
    return [
        _reward(entry, folder, is_file) if isinstance(entry, Mapping) else entry for entry in value
    ]


def _reward(entry: Mapping[str, Any], folder: Path, is_file: bool) -> dict[str, Any]:
    kinds = {setting.field: setting.names for setting in own_settings(RewardEntry) if setting.names}
    found = {}
    for key, value in entry.items():
        found[key] = PLACES[kinds[key]](value, folder, is_file) if key in kinds else value
    return found


PLACES: dict[str, Callable[[Any, Path, bool], Any]] = {
    "output": _output,
    "file": _file,
    "prompts": _prompts,
    "model": _model,
    "plugin": _plugin,
    "reward": _reward_name,
    "arguments": _arguments,
    "rewards": _rewards,
    "callbacks": _callbacks,
}
"""What a setting says that it names -> how that is placed."""
