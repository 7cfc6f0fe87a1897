"""Dry run of a reward: check its name, its arguments and the files that they name, without loading anything."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import try_to_load_from_cache

from sage_fast.config.fields import is_hub_id
from sage_fast.config.reward_names import CLIENTS
from sage_fast.config.schema import RewardEntry
from sage_fast.rewards.backends import find_reward, load_reward
from sage_fast.util.errors import UserError


def dry_run_reward(entry: RewardEntry, key: str = "reward.name") -> list[str]:
    """Check a reward's name, arguments and files without creating it, unless it only calls a server.

    A class says in `files` which arguments name a folder or a hub id, and which files that holds.

    Args:
        key: setting that holds the name, for messages.

    Returns:
        A line for each hub id that is not in the cache.

    Raises:
        UserError: there is no such reward, an argument is unknown or missing, or a folder or file is missing.
    """
    notes, (reward, args) = [], find_reward(entry, key)
    if entry.is_address or entry.name in CLIENTS:  # it loads nothing and opens no connection
        load_reward(entry, key)
    for name, patterns in getattr(reward, "files", {}).items() if isinstance(reward, type) else ():
        source = args.get(name, inspect.signature(reward).parameters[name].default)
        setting = f"{key.removesuffix('name')}args.{name}" if key.endswith("name") else name
        given = str(entry.args.get(name, source))  # with ${NAME}, not its value
        if source is not None and (note := _check_files(str(source), given, patterns, setting)):
            notes.append(note)
    return notes


def reward_bytes(entry: RewardEntry, key: str = "reward.name") -> float | None:
    """Return the bytes that a reward takes on each rank's GPU, by the `gpu_bytes` of its class; None if unknown."""
    if entry.is_address or entry.name in CLIENTS or entry.devices:  # its GPU, if any, is not the rank's own
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
        raise UserError(f"{setting} = {given!r}: no such folder; expected one with {patterns[0]}, or a hub id")
    if isinstance(try_to_load_from_cache(source, patterns[0]), str):
        return None
    return f"{setting} = {given!r}: no folder and not in the hub's cache; a run fetches it, or: hf download {given}"
