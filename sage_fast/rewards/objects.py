"""Rewards that a program hands over as objects: functions, classes and instances.

One that Python can import becomes `package.module:name` in the settings, as in a file, and works
everywhere as such. Any other, of a script, a notebook or a closure, is `object:NAME` there: it is
called in this process alone, and known by its source text.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import operator
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sage_fast.config.schema import OBJECT, Config, RewardConfig, RewardEntry
from sage_fast.rewards.composite import dummy_batch
from sage_fast.rewards.failure_policy import RewardFailure
from sage_fast.rewards.in_process import InProcess, own_name
from sage_fast.rewards.interface import USUAL_FPS, Metadata, Request
from sage_fast.rewards.load import device_of, load_reward
from sage_fast.util.captions import PromptKey
from sage_fast.util.errors import UserError, nearest
from sage_fast.util.files import fingerprint
from sage_fast.util.plugins import find_module


def name_rewards(
    config: Config,
    reward_funcs: object,
    prompts: Sequence[PromptKey],
    metadata: Mapping[PromptKey, Metadata],
    device: str = "cpu",
) -> tuple[Config, dict[str, Any]]:
    """Put rewards that are objects into the settings; they replace `reward.name` and
    `reward.several`.

    Each is called once, on made-up videos, to learn its parts. `reward.weights` weighs them if it
    was set; otherwise each part counts 1.

    Args:
        config: the settings.
        reward_funcs: a function (videos, prompts) -> `[B]` or part -> `[B]`, an instance with such
            a method `score`, a class of such instances, which is created with `reward.args`; or a
            list of them.
        prompts: keys of the training prompts.
        metadata: key of a prompt -> its metadata.
        device: device of this rank.

    Returns:
        The settings, and setting that holds the name of a reward -> what to call.

    Raises:
        UserError: one is no reward or fails, two return a part of the same name, a weight is of no
            part, or workers are asked for and cannot import one.
    """
    given = _as_list(reward_funcs)
    _check_importable(given, config.reward.workers)
    takes_args = len(given) == 1 and isinstance(given[0], type)
    if config.reward.args and not takes_args:
        raise UserError(
            f"reward.args = {config.reward.args!r}: only a class takes arguments, and only if it "
            "is the one reward; an instance and a function have theirs"
        )

    entries = [_entry(each, config.reward) for each in given]
    keys = ["reward.name"]
    if len(given) > 1:
        keys = [f"reward.several[{i}].name" for i in range(len(given))]

    objects: dict[str, Any] = {}
    parts: dict[str, list[str]] = {}
    for key, entry, each in zip(keys, entries, given):
        own_device = device_of(entry, device)
        objects[key] = load_reward(entry, key, own_device, given=each)
        parts[key] = _parts_of(entry, objects[key], config, prompts, metadata, device)

    weights = _weights(config.reward, parts)
    weighted = [
        dataclasses.replace(entry, weights=weights[key]) for key, entry in zip(keys, entries)
    ]
    reward = _section(config.reward, weighted)
    return dataclasses.replace(config, reward=reward), objects


def digest(reward: object) -> str:
    """Return what `run.json` holds of a reward that no name can import: a digest of its source
    text, or that there is none."""
    code = reward.func if isinstance(reward, functools.partial) else reward
    if not isinstance(code, type) and not inspect.isroutine(code):
        code = type(code)
    try:
        source = inspect.getsource(code)
    except (OSError, TypeError):  # a builtin, or a class typed in a notebook
        return f"{own_name(reward)}, without source text"
    return f"code ({fingerprint(source.encode())})"


def import_name(reward: object) -> str | None:
    """Return the `package.module:name` by which another process can import an object, with the
    folder of its module; None if it cannot."""
    if not isinstance(reward, type) and not inspect.isroutine(reward):
        return None  # an instance: its class could be imported, its state could not
    module = getattr(reward, "__module__", None) or ""
    name = getattr(reward, "__qualname__", "")
    file = getattr(sys.modules.get(module), "__file__", None)
    if module == "__main__" or file is None:
        return None
    try:
        found = operator.attrgetter(name)(sys.modules[module])
    except AttributeError:  # of a closure
        return None
    if found is not reward:
        return None

    installed = [sysconfig.get_path("purelib"), sysconfig.get_path("stdlib")]
    if any(Path(file).is_relative_to(folder) for folder in installed):
        return f"{module}:{name}"
    depth = module.count(".") + 1
    if Path(file).name == "__init__.py":
        depth += 1
    folder = Path(file).absolute().parents[depth - 1]
    return f"{folder}/{module}:{name}" if find_module(module, folder) is not None else None


def _as_list(reward_funcs: object) -> list[Any]:
    """Return the objects, each of which can be called or has a method `score`.

    Raises:
        UserError: one cannot, or there is none.
    """
    given = list(reward_funcs) if isinstance(reward_funcs, list | tuple) else [reward_funcs]
    expected = "expected a function of (videos, prompts), or an object with such a method score"
    for each in given:
        if isinstance(each, str):
            raise UserError(
                f"reward_funcs = {each!r}: {expected}; a name is a setting: reward.name = "
                f"{each!r}, or reward.several for more than one, without reward_funcs"
            )
        if not callable(each) and not callable(getattr(each, "score", None)):
            raise UserError(f"reward_funcs = {each!r:.80}: {expected}; or a list of them")
    if not given:
        raise UserError(f"reward_funcs = []: {expected}; or a list of them")
    return given


def _check_importable(given: Sequence[Any], workers: int) -> None:
    """Check that worker processes, if there are any, can import the rewards.

    Raises:
        UserError: one they cannot.
    """
    for each in given:
        if workers > 0 and import_name(each) is None:
            name = own_name(each)
            raise UserError(
                f"reward.workers = {workers}: worker processes cannot import the reward {name!r}, "
                "which is an object of this program; put it into a module and name it, such as "
                f"reward.name = my_rewards:{name}, or set reward.workers = 0"
            )


def _entry(each: Any, config: RewardConfig) -> RewardEntry:
    """Return the settings of a reward, without its weights."""
    return RewardEntry(
        name=import_name(each) or f"{OBJECT}{own_name(each)}",
        args=config.args,
        prefix=config.prefix,
        device=config.device,
        workers=config.workers,
    )


def _parts_of(
    entry: RewardEntry,
    reward: Any,
    config: Config,
    prompts: Sequence[PromptKey],
    metadata: Mapping[PromptKey, Metadata],
    device: str,
) -> list[str]:
    """Return the names of the parts that a reward returns for made-up videos.

    Raises:
        UserError: it fails on them.
    """
    backend = InProcess(entry.name, reward, entry.device)
    videos, keys = dummy_batch(
        config.sampling, prompts, device, compares_group=backend.compares_group
    )
    request = Request(
        videos=videos,
        prompts=[key.text for key in keys],
        metadata=[metadata.get(key, {}) for key in keys],
        fps=USUAL_FPS,
    )
    try:
        return list(backend.score(request))
    except RewardFailure as error:
        raise UserError(
            f"reward_funcs: {own_name(reward)!r} failed on made-up videos {list(videos.shape)} of "
            f"{str(keys[0])!r}: {error}"
        ) from error


def _weights(
    config: RewardConfig, parts: Mapping[str, Sequence[str]]
) -> dict[str, dict[str, float]]:
    """Return, for each reward, the weights of its parts: those of `reward.weights` if it was set,
    else 1 each.

    Args:
        parts: setting of a reward -> names of the parts that it returns.

    Raises:
        UserError: two rewards return a part of the same name, or a weight is of no part.
    """
    returned = [part for names in parts.values() for part in names]
    for part in returned:
        if returned.count(part) > 1:
            raise UserError(
                f"reward_funcs: two of them return a part {part!r}; rename one of the functions, "
                "or return a mapping with other names"
            )
    is_default = config.weights == RewardEntry().weights
    if is_default:
        return {key: dict.fromkeys(names, 1.0) for key, names in parts.items()}
    for part in config.weights:
        if part not in returned:
            raise UserError(f"reward.weights names {part!r}: {nearest(part, returned)}")
    found = {}
    for key, names in parts.items():
        found[key] = {part: config.weights[part] for part in names if part in config.weights}
    return found


def _section(config: RewardConfig, entries: Sequence[RewardEntry]) -> RewardConfig:
    """Return the section `reward` with other rewards: one in its own fields, several in a list."""
    fields = [field.name for field in dataclasses.fields(RewardEntry)]
    if len(entries) == 1:
        own = {name: getattr(entries[0], name) for name in fields}
        return dataclasses.replace(config, several=[], **own)
    unset = {name: getattr(RewardEntry(), name) for name in fields}
    several = [dataclasses.asdict(entry) for entry in entries]
    return dataclasses.replace(config, several=several, **unset)
