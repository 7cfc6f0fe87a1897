"""A reward by its name: shipped, offered by an installed package, a module of the user's, or behind HTTP."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import operator
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from sage_fast.config.schema import RewardEntry
from sage_fast.errors import UserError, nearest
from sage_fast.rewards.failure import failure

SHIPPED = {
    "testbed": "sage_fast.rewards.testbed:TestbedReward",
    "testbed-judge": "sage_fast.rewards.judge:TestbedJudge",
    "videoalign": "sage_fast.rewards.videoalign:VideoAlignReward",
    "clipscore": "sage_fast.rewards.clip:CLIPScoreReward",
    "pickscore": "sage_fast.rewards.clip:PickScoreReward",
}
"""Short names of the rewards that come with the package."""

GROUP = "sage_fast.rewards"
"""The entry points of other packages: name = "package.module:Class"."""

Score = Callable[[Tensor, list[str]], object]


class Reward(Protocol):
    def __call__(self, videos: Tensor, prompts: Sequence[str]) -> Mapping[str, Tensor]:
        """Score `videos [B, F, 3, H, W]` in [0, 1] against their prompts; each part is `[B]`."""
        ...


def load_reward(entry: RewardEntry, key: str = "reward.name", device: str = "cpu", timeout: float = 0.0) -> Any:
    """The reward named by `entry.name`; a class is made with `entry.args`, and with `device` if it takes that keyword.

    Modules in the current folder are found, after those that are installed.

    Args:
        key: of the setting that holds the name, for messages.
        timeout: seconds of a request, if the name is an address.

    Raises:
        UserError: there is no such reward, or its module or class fails; with its traceback.
    """
    setting = f"{key} = {entry.name!r}"
    if entry.is_address:
        from sage_fast.rewards.http import HttpReward

        return _made(HttpReward, {"url": entry.name, "timeout_seconds": timeout} | entry.args, device, setting)
    reward = _found(entry.name, setting)
    if isinstance(reward, type):
        reward = _made(reward, entry.args, device, setting)
    elif entry.args:
        raise UserError(f"{setting}: is no class, so that it takes no args; got {sorted(entry.args)}")
    if not callable(score_of(reward)):
        raise UserError(f"{setting}: expected a class with score(self, videos, prompts), or a function")
    return reward


def score_of(reward: Any) -> Score:
    """What is called: its method `score`, or the reward itself; a layer that is called so is no method."""
    method = getattr(reward, "score", None)
    return method if inspect.isroutine(method) else reward


def device_of(entry: RewardEntry, default: str, place: int = 0) -> str:
    """Where the reward runs: `entry.device`, or that of its own `devices` whose turn it is.

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


def _found(name: str, setting: str) -> Any:
    if ":" not in name:
        offered = {point.name: point.value for point in importlib.metadata.entry_points(group=GROUP)} | SHIPPED
        if name not in offered:
            raise UserError(
                f"{setting}: {nearest(name, sorted(offered))}; or 'package.module:name', such as "
                "my_rewards:MyReward, or http://host:port"
            )
        name = offered[name]
    if not re.fullmatch(r"[\w.]+:[\w.]+", name):
        raise UserError(f"{setting}: expected 'package.module:name', such as my_rewards:MyReward")
    module_name, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # that of a console script begins with the folder of the script
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise UserError(f"{setting}: {failure(error)}") from error
        raise UserError(
            f"{setting}: expected 'package.module:name' of something importable; no module {error.name!r} is installed "
            f"or in {os.getcwd()}"
        ) from error
    except (Exception, SystemExit) as error:
        raise UserError(f"{setting}: {failure(error)}") from error
    try:
        reward = operator.attrgetter(attribute)(module)
    except AttributeError:
        reward = None
    if not callable(score_of(reward)):
        raise UserError(f"{setting}: module {module_name} has no {attribute!r} that can be called")
    return reward


def _made(of: type, args: Mapping[str, Any], device: str, setting: str) -> Any:
    """An instance.

    Raises:
        UserError: it takes other arguments, or fails.
    """
    parameters = inspect.signature(of).parameters
    given = ({"device": device} if "device" in parameters else {}) | dict(args)
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    taken = [name for name, parameter in parameters.items() if parameter.kind in by_keyword]
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    for name in given:
        if name not in taken and not takes_any:
            raise UserError(f"{setting}: args: {of.__name__} takes no {name!r}; {nearest(name, taken)}")
    try:
        return of(**given)
    except (Exception, SystemExit) as error:
        raise UserError(f"{setting}: {of.__name__}() failed: {failure(error)}") from error
