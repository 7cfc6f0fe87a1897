"""Find a reward by name, create it, and call it: in this process, in another one, or behind HTTP.

A name is that of a shipped reward, one of an installed package, `module:name` of the user's, or an address.
"""

from __future__ import annotations

import inspect
import pkgutil
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from sage_fast.config.fields import require
from sage_fast.config.reward_names import CLIENTS, SHIPPED, place_of_reward
from sage_fast.config.schema import RewardEntry
from sage_fast.config.secrets import from_environment, names_for_values
from sage_fast.rewards.failure_policy import Backend
from sage_fast.rewards.failures import failure
from sage_fast.rewards.interface import Metadata
from sage_fast.util.captions import split_key
from sage_fast.util.errors import UserError, nearest
from sage_fast.util.launchers import launched
from sage_fast.util.plugins import import_plugin, running, split_place

BACKENDS = {
    "inline": "sage_fast.rewards.inline:InProcess",
    "process": "sage_fast.rewards.process:ChildProcess",
    "http": "sage_fast.rewards.http:HttpReward",
}
"""Backend classes by kind; strings, so that importing a reward's interface imports none of them."""


def backend_class(kind: str) -> Any:
    """Import the class of a backend."""
    return pkgutil.resolve_name(BACKENDS[kind])


def connect(entry: RewardEntry, key: str, device: str) -> list[Backend]:
    """Create a reward's backends: in this process, in separate processes, or as clients of its server.

    Args:
        device: device of this rank.

    Raises:
        UserError: as `load_reward`; in a separate process, its first call fails instead.
    """
    if entry.is_address or entry.name in CLIENTS:
        return [load_reward(entry, key, device) for _ in range(max(1, entry.workers))]
    rank = launched("LOCAL_RANK", 0)
    if entry.workers:
        places = range(rank * entry.workers, (rank + 1) * entry.workers)
        return [backend_class("process")(entry, key, device_of(entry, device, place)) for place in places]
    own = device_of(entry, device, rank)
    return [backend_class("inline")(entry.name, load_reward(entry, key, own), own if entry.devices else None)]


def load_reward(entry: RewardEntry, key: str = "reward.name", device: str = "cpu") -> Any:
    """Return the reward named `entry.name`; a class is created with `entry.args`, and `device` if it takes that.

    Args:
        key: setting that holds the name, for messages.

    Raises:
        UserError: as `find_reward`; or the class fails, with its traceback.
    """
    reward, args = find_reward(entry, key, device)
    if not isinstance(reward, type):
        return reward
    setting = f"{key} = {entry.name!r}"
    try:
        with running(f"reward {entry.name!r}"):
            made = reward(**args)
    except UserError as error:
        raise UserError(f"{setting}: {names_for_values(str(error))}") from error
    except (Exception, SystemExit) as error:
        raise UserError(f"{setting}: {reward.__name__}() failed: {failure(error)}") from error
    if not callable(score_of(made)):
        raise UserError(f"{setting}: expected a class with score(self, videos, prompts), or a function")
    return made


def find_reward(entry: RewardEntry, key: str, device: str = "cpu") -> tuple[Any, dict[str, Any]]:
    """Return a reward, where a class is not created yet, and its arguments with the values of the environment.

    Raises:
        UserError: there is no such reward, its module fails, or an argument is unknown or missing.
    """
    setting = f"{key} = {entry.name!r}"
    args = from_environment(entry.args, f"{setting}: args")
    if entry.is_address:
        require(not args, f"{setting}: args", entry.args, "the address of a server takes no arguments")
        return backend_class("http"), {"url": entry.name}
    place = place_of_reward(entry.name, setting)
    try:
        with running(f"reward {entry.name!r}"):
            reward = import_plugin(place, setting)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"{setting}: {failure(error)}") from error
    if not callable(score_of(reward)):
        _, module, named = split_place(place)
        own = [k for k, value in vars(sys.modules[module]).items() if getattr(value, "__module__", "") == module]
        hint = nearest(named, own) if own else "it defines nothing"
        raise UserError(f"{setting}: module {module} has no {named!r} that can be called; {hint}")
    if isinstance(reward, type):
        return reward, _checked_args(reward, args, device, setting)
    if args:
        raise UserError(f"{setting}: is not a class, so it takes no args; got {sorted(args)}")
    return reward, {}


def check_prompts(entry: RewardEntry, key: str, prompts: Mapping[str, Metadata]) -> None:
    """Check that a shipped reward can score every prompt, if its class says which: `check_prompt(text, metadata)`.

    Args:
        key: setting that holds the name, for messages.
        prompts: key -> metadata.

    Raises:
        UserError: it cannot; names the prompt.
    """
    shipped: Any = find_reward(entry, key)[0] if entry.name in SHIPPED else None  # a user's own may not run here
    for prompt, metadata in prompts.items() if hasattr(shipped, "check_prompt") else ():
        try:
            shipped.check_prompt(split_key(prompt)[0], metadata)
        except ValueError as error:
            raise UserError(f"{key} = {entry.name!r}: prompt {prompt!r}: {error}") from error


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
                hint = f"{kind.__name__} takes no arguments; --reward.args {{}} leaves out those of the settings file"
            else:
                hint = nearest(unknown[0], taken)
            raise UserError(f"{setting}: args: no {unknown[0]!r}; {hint}") from error
        raise UserError(f"{setting}: args: {error}; {kind.__name__} takes {', '.join(taken)}") from error
    return given


def score_of(reward: Any) -> Callable[[Tensor, list[str]], object]:
    """Return the function to call: its method `score`, else the reward itself. A layer named `score` is no method."""
    method = getattr(reward, "score", None)
    return method if inspect.isroutine(method) else reward


def device_of(entry: RewardEntry, default: str, place: int = 0) -> str:
    """Return the device of instance `place`: `entry.devices` in turn, or `default` if there are none.

    Raises:
        UserError: there is no such device.
    """
    if not entry.devices:
        return default
    device = entry.devices[place % len(entry.devices)]
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device != "cpu" and (torch.device(device).index or 0) >= count:
        raise UserError(f"reward.device = {entry.device!r}: there is no {device}, of {count} GPUs; the nearest is cpu")
    return device
