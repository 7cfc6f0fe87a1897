"""Find a reward by name and create it, or only check it for a dry run.

A name is that of a shipped reward, one of an installed package, `module:name` of the user's, or an
address.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache

from sage_fast.config.fields import is_hub_id, require
from sage_fast.config.reward_names import CLIENTS, SHIPPED, reward_import_path
from sage_fast.config.schema import RewardEntry
from sage_fast.config.secrets import from_environment, names_for_values
from sage_fast.rewards.failure_policy import failure
from sage_fast.rewards.interface import Metadata
from sage_fast.util.captions import PromptKey
from sage_fast.util.errors import UserError, nearest
from sage_fast.util.guard import guarded, seed_random_numbers
from sage_fast.util.plugins import import_plugin, split_place

CREATION_SEED = 0
"""Seed while a reward is imported and created: the same in each process of a run, after a restart
and on a resume."""
EXPECTED = "expected a class with score(self, videos, prompts), or a function"


def load_reward(
    entry: RewardEntry, key: str = "reward.name", device: str = "cpu", given: Any = None
) -> Any:
    """Return the reward named `entry.name`; a class is created with `entry.args`, and `device` if
    it takes that.

    Args:
        key: setting that holds the name, for messages.
        given: as for `find_reward`.

    Raises:
        UserError: as `find_reward`; or the class fails, with its traceback.
    """
    reward, args = find_reward(entry, key, device, given)
    if not isinstance(reward, type):
        return reward
    setting = f"{key} = {entry.name!r}"
    try:
        with guarded(f"reward {entry.name!r}"):
            seed_random_numbers(CREATION_SEED)
            made = reward(**args)
    except UserError as error:
        raise UserError(f"{setting}: {names_for_values(str(error))}") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # as in a call
        raise UserError(f"{setting}: {reward.__name__}() failed: {failure(error)}") from error
    if not callable(score_of(made)):
        raise UserError(f"{setting}: {EXPECTED}")
    return made


def find_reward(
    entry: RewardEntry, key: str, device: str = "cpu", given: Any = None
) -> tuple[Any, dict[str, Any]]:
    """Return a reward, where a class is not created yet, and its arguments with the values of the
    environment.

    Args:
        given: the reward itself, where the program has it: then nothing is imported. An instance
            has its arguments already.

    Raises:
        UserError: there is no such reward, its module fails, it is neither a function nor a class
            that scores, or an argument is unknown or missing.
    """
    setting = f"{key} = {entry.name!r}"
    args = from_environment(entry.args, f"{setting}: args")
    if entry.is_address:
        require(
            not args, f"{setting}: args", entry.args, "the address of a server takes no arguments"
        )
        from sage_fast.rewards.http import HttpReward  # imports an HTTP client, which few runs need

        return HttpReward, {"url": entry.name}

    reward = _imported(entry, setting) if given is None else given
    if isinstance(reward, type):
        # found before it is created: any class of a library could be named
        if not _instances_score(reward):
            raise UserError(f"{setting}: {EXPECTED}")
        return reward, _checked_args(reward, args, device, setting)
    is_made = given is not None and not inspect.isroutine(given)
    if args and not is_made:
        raise UserError(f"{setting}: is not a class, so it takes no args; got {sorted(args)}")
    _check_takes_videos(reward, setting)
    return reward, {}


def _imported(entry: RewardEntry, setting: str) -> Any:
    """Import what the name of a reward says.

    Raises:
        UserError: there is no such reward, its module fails, or it cannot be called.
    """
    place = reward_import_path(entry.name, setting)
    try:
        with guarded(f"reward {entry.name!r}"):
            seed_random_numbers(CREATION_SEED)
            reward = import_plugin(place, setting)
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:  # as in a call
        raise UserError(f"{setting}: {failure(error)}") from error
    if callable(score_of(reward)):
        return reward

    _, module, named = split_place(place)
    own = []
    for name, value in vars(sys.modules[module]).items():
        is_defined_here = getattr(value, "__module__", "") == module
        if is_defined_here and not name.startswith("_"):
            own.append(name)
    hint = nearest(named, own) if own else "it defines nothing"
    raise UserError(f"{setting}: module {module} has no {named!r} that can be called; {hint}")


def _instances_score(kind: type) -> bool:
    """Whether instances of a class have a method `score`, or can be called."""
    return callable(getattr(kind, "score", None)) or any(
        "__call__" in vars(base) for base in kind.__mro__
    )


def _check_takes_videos(reward: Any, setting: str) -> None:
    """Check that a function can be called with videos and prompts.

    Raises:
        UserError: by its signature it cannot.
    """
    try:
        signature = inspect.signature(score_of(reward))
    except (TypeError, ValueError):  # of a function in C, which tells none
        return
    known: dict[str, Any] = {
        name: None for name in ("metadata", "fps") if name in signature.parameters
    }
    try:
        signature.bind(None, None, **known)
    except TypeError as error:
        raise UserError(f"{setting}: expected a function of (videos, prompts): {error}") from error


def _checked_args(kind: type, args: Mapping[str, Any], device: str, setting: str) -> dict[str, Any]:
    """Check the arguments of a class by its signature; return them with `device`, if it takes that.

    Raises:
        UserError: the class takes other arguments.
    """
    signature = inspect.signature(kind)
    given = ({"device": device} if "device" in signature.parameters else {}) | dict(args)
    try:
        signature.bind(**given)
    except TypeError as error:
        taken = signature.parameters
        if unknown := sorted(args.keys() - taken.keys()):
            if not taken:
                hint = (
                    f"{kind.__name__} takes no arguments; --reward.args {{}} leaves out those of "
                    "the settings file"
                )
            else:
                hint = nearest(unknown[0], taken)
            raise UserError(f"{setting}: args: no {unknown[0]!r}; {hint}") from error
        raise UserError(
            f"{setting}: args: {error}; {kind.__name__} takes {', '.join(taken)}"
        ) from error
    return given


def score_of(reward: Any) -> Callable[..., object]:
    """Return the function to call: its method `score`, else the reward itself.

    A layer named `score` is no method.
    """
    method = getattr(reward, "score", None)
    return method if inspect.isroutine(method) else reward


def device_of(entry: RewardEntry, default: str, place: int = 0) -> str:
    """Return the device of instance `place`: `entry.devices` in turn, or `default` if there are
    none.

    Raises:
        UserError: there is no such device.
    """
    if not entry.devices:
        return default
    device = entry.devices[place % len(entry.devices)]
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device != "cpu" and (torch.device(device).index or 0) >= count:
        raise UserError(
            f"reward.device = {entry.device!r}: there is no {device}, of {count} GPUs; the nearest "
            "is cpu"
        )
    return device


def check_prompts(entry: RewardEntry, key: str, prompts: Mapping[PromptKey, Metadata]) -> None:
    """Check that a shipped reward can score every prompt, if its class says which:
    `check_prompt(text, metadata)`.

    Args:
        key: setting that holds the name, for messages.
        prompts: key -> metadata.

    Raises:
        UserError: it cannot; names the prompt.
    """
    if entry.name not in SHIPPED:
        return  # a user's own may not run here
    shipped: Any = find_reward(entry, key)[0]
    if not hasattr(shipped, "check_prompt"):
        return
    for prompt, metadata in prompts.items():
        try:
            shipped.check_prompt(prompt.text, metadata)
        except ValueError as error:
            raise UserError(f"{key} = {entry.name!r}: prompt {str(prompt)!r}: {error}") from error


# -- dry run ---------------------------------------------------------------------------------------


def dry_run_reward(entry: RewardEntry, key: str = "reward.name") -> list[str]:
    """Check a reward's name, arguments and files without creating it, unless it only calls a
    server.

    A class says in `files` which arguments name a folder or a hub id, and which files that holds.

    Args:
        key: setting that holds the name, for messages.

    Returns:
        A line for each hub id that is not in the cache.

    Raises:
        UserError: there is no such reward, an argument is unknown or missing, or a folder or file
            is missing.
    """
    sources = reward_sources(entry, key)
    if entry.is_address or entry.name in CLIENTS:  # it loads nothing and opens no connection
        load_reward(entry, key)
    notes = []
    for name, (source, patterns) in sources.items():
        setting = f"{key.removesuffix('name')}args.{name}" if key.endswith("name") else name
        as_written = str(entry.args.get(name, source))  # with ${NAME}, not its value
        note = _check_files(source, as_written, patterns, setting)
        if note is not None:
            notes.append(note)
    return notes


def reward_sources(
    entry: RewardEntry, key: str = "reward.name"
) -> dict[str, tuple[str, Sequence[str]]]:
    """Return argument -> the folder or hub id that it names, and patterns of files in it, by the
    `files` of the reward's class.

    Raises:
        UserError: as `find_reward`.
    """
    reward, args = find_reward(entry, key)
    files = getattr(reward, "files", {}) if isinstance(reward, type) else {}
    found = {}
    for name, patterns in files.items():
        source = args.get(name, inspect.signature(reward).parameters[name].default)
        if source is not None:
            found[name] = (str(source), patterns)
    return found


def reward_bytes(entry: RewardEntry, key: str = "reward.name") -> float | None:
    """Return the bytes that a reward takes on each rank's GPU, by the `gpu_bytes` of its class;
    None if unknown."""
    # its GPU, if any, is not the rank's own
    if entry.is_address or entry.name in CLIENTS or entry.devices:
        return 0.0
    each = getattr(find_reward(entry, key)[0], "gpu_bytes", None)
    return None if each is None else float(each) * max(1, entry.workers)


def _check_files(source: str, given: str, patterns: Sequence[str], setting: str) -> str | None:
    """Return a note if `source` is a hub id that is not in the cache.

    Raises:
        UserError: it is no folder with files like `patterns`, nor a hub id.
    """
    folder = Path(source)
    if folder.is_dir():
        if missing := [pattern for pattern in patterns if not any(folder.glob(pattern))]:
            raise UserError(f"{setting} = {given!r}: expected a folder that holds {missing[0]}")
        return None
    if not is_hub_id(source):
        raise UserError(
            f"{setting} = {given!r}: no such folder; expected one with {patterns[0]}, or a hub id"
        )
    if isinstance(try_to_load_from_cache(source, patterns[0]), str):
        return None
    return (
        f"{setting} = {given!r}: no folder and not in the hub's cache; a run fetches it, or: hf "
        f"download {given}"
    )
