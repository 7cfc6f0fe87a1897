"""Rewards: one small interface, and the composite that training maximises.

A reward is a callable `(videos, prompts) -> {part: Tensor [B]}` with videos float32 `[B, F, 3, H, W]` in [0, 1].
"""

from __future__ import annotations

import importlib
import os
import re
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from sage_fast.config import RewardConfig
from sage_fast.errors import RewardError, UserError
from sage_fast.rewards.timeout import OverdueError, call_within

SHIPPED = {
    "testbed": "sage_fast.rewards.testbed:TestbedReward",
    "testbed-judge": "sage_fast.rewards.judge:TestbedJudge",
    "videoalign": "sage_fast.rewards.videoalign:VideoAlignReward",
    "clipscore": "sage_fast.rewards.clip:CLIPScoreReward",
    "pickscore": "sage_fast.rewards.clip:PickScoreReward",
}
"""Short names of the rewards that come with the package."""


class Reward(Protocol):
    def __call__(self, videos: Tensor, prompts: Sequence[str]) -> Mapping[str, Tensor]:
        """Score `videos [B, F, 3, H, W]` in [0, 1] against their prompts; each part is `[B]`."""
        ...


def load_reward(config: RewardConfig, key: str = "reward.name") -> Reward:
    """The reward named by `config.name`; a class is instantiated without arguments.

    Modules in the current folder are found, after those that are installed.

    Args:
        key: of the setting that holds the name, for messages.

    Raises:
        UserError: the name is not of that form, there is no such module or name in it, or the module or class fails.
    """
    name = SHIPPED.get(config.name, config.name)
    module_name, _, attribute = name.partition(":")
    setting = f"{key} = {config.name!r}"
    expected = f"expected '{'testbed-judge' if key == 'eval.judge' else 'testbed'}' or 'package.module:name'"
    if not re.fullmatch(r"[\w.]+:\w+", name):
        raise UserError(f"{setting}: {expected}, such as my_rewards:MyReward")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # that of a console script begins with the folder of the script
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise UserError(f"{setting}: {_failure(error)}") from error
        raise UserError(
            f"{setting}: {expected} of something importable; no module {error.name!r} is installed or in {os.getcwd()}"
        ) from error
    except Exception as error:
        raise UserError(f"{setting}: {_failure(error)}") from error
    reward = getattr(module, attribute, None)
    if not callable(reward):
        raise UserError(f"{setting}: module {module_name} has no {attribute!r} that can be called")
    try:
        reward = reward() if isinstance(reward, type) else reward
    except Exception as error:
        raise UserError(f"{setting}: {attribute}() failed: {_failure(error)}") from error
    if not callable(reward):
        raise UserError(f"{setting}: expected a class with __call__(self, videos, prompts), or a function")
    return reward


def _parts(reward: Reward, name: str, videos: Tensor, prompts: Sequence[str], timeout: float) -> dict[str, Tensor]:
    """What the reward returns within `timeout` seconds (0: whenever), each part float32 `[B]` on the CPU.

    Raises:
        RewardError: it returns nothing in time.
        UserError: it returns something else.
    """
    try:
        returned: object = call_within(timeout, reward, videos, prompts)
    except OverdueError as error:
        raise RewardError(
            f"reward {name!r} gave no answer within reward.timeout_seconds = {timeout:g} for {len(prompts)} prompts "
            f"that begin with {prompts[0]!r}; a larger value, or 0, waits longer"
        ) from error
    if not isinstance(returned, Mapping):
        raise UserError(
            f"reward {name!r} returned {type(returned).__name__}; expected a mapping of parts to [B], "
            "such as {'sharpness': scores}"
        )
    parts = {part: torch.as_tensor(value).detach().float().cpu() for part, value in returned.items()}
    for part, value in parts.items():
        if value.shape != (len(prompts),):
            raise UserError(f"reward part {part!r}: expected shape [{len(prompts)}], got {list(value.shape)}")
    return parts


class Judge:
    """A reward that only looks on: its parts have no weights, and training never sees them.

    Args:
        name: as in `reward.name`, given as `eval.judge`.
        timeout: seconds of a call; 0: no limit.

    Raises:
        UserError: as `load_reward`.
    """

    def __init__(self, name: str, timeout: float = 0.0) -> None:
        self.name = name
        self.timeout = timeout
        self.reward = load_reward(RewardConfig(name=name), "eval.judge")

    def __call__(self, videos: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
        """Its parts, each float32 `[B]` on the CPU.

        Raises:
            RewardError: it failed, hangs, or returned a value that is not finite; an evaluation needs every score.
            UserError: it returned something else than parts of shape `[B]`.
        """
        where = f"eval.judge = {self.name!r}: on {len(prompts)} prompts that begin with {prompts[0]!r}"
        try:
            parts = _parts(self.reward, self.name, videos, prompts, self.timeout)
        except (UserError, RewardError):
            raise
        except Exception as error:
            raise RewardError(f"{where}: {_failure(error)}") from error
        for part, value in parts.items():
            if not value.isfinite().all():
                raise RewardError(f"{where}: {part!r} is not finite: {value.tolist()}")
        return parts


def _failure(error: Exception) -> str:
    """What went wrong in a module of the user, and on which line."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}: SyntaxError: {error.msg}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<frozen")]
    what = f"{type(error).__name__}: {error}".splitlines()[0]
    return f"{frames[-1].filename}:{frames[-1].lineno}: {what}"


class CompositeReward:
    """R = sum of weight x part (Eq. 33), with failures never turned into a number.

    Args:
        reward: scores the parts.
        config: weights and what to do with a failure.
        way_out: of a failure that stops the run, in words.
    """

    def __init__(
        self,
        reward: Reward,
        config: RewardConfig,
        way_out: str = "reward.on_failure = 'drop' would skip such samples and count them",
    ) -> None:
        self.reward = reward
        self.config = config
        self.way_out = way_out

    def __call__(self, videos: Tensor, prompts: Sequence[str]) -> tuple[Tensor, dict[str, Tensor]]:
        """Composite float32 `[B]` and its parts, on the CPU; NaN marks a failed sample if `on_failure = drop`.

        Raises:
            RewardError: the reward raised or returned a non-finite value, and `on_failure = stop`; or it hangs, after
                which it cannot be called again.
            UserError: a weighted part is missing, or has another shape than `[B]`.
        """
        try:
            parts = self._parts(videos, prompts)
        except (UserError, RewardError):
            raise
        except Exception as error:
            if self.config.on_failure == "stop":
                raise RewardError(
                    f"reward {self.config.name!r} failed on {len(prompts)} prompts that begin with {prompts[0]!r}: "
                    f"{_failure(error)}; {self.way_out}"
                ) from error
            parts = self._one_by_one(videos, prompts)
        composite = torch.zeros(len(prompts))
        for part, weight in self.config.weights.items():
            if weight != 0:
                composite = composite + weight * parts[part]
        if self.config.on_failure == "stop" and not composite.isfinite().all():
            i = int((~composite.isfinite()).nonzero()[0])
            values = {part: float(value[i]) for part, value in parts.items()}
            raise RewardError(
                f"reward {self.config.name!r} is not finite for prompt {prompts[i]!r}: {values}; {self.way_out}"
            )
        return torch.where(composite.isfinite(), composite, torch.nan), parts

    def _parts(self, videos: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
        parts = _parts(self.reward, self.config.name, videos, prompts, self.config.timeout_seconds)
        for part, weight in self.config.weights.items():
            if weight != 0 and part not in parts:
                raise UserError(f"reward.weights names {part!r}; reward {self.config.name!r} returns {sorted(parts)}")
        return parts

    def _one_by_one(self, videos: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
        rows = []
        for i, prompt in enumerate(prompts):
            try:
                rows.append(self._parts(videos[i : i + 1], [prompt]))
            except (UserError, RewardError):
                raise
            except Exception:  # this sample is dropped and counted by the caller as NaN
                rows.append({part: torch.full((1,), torch.nan) for part in self.config.weights})
        names = set.intersection(*(set(row) for row in rows))
        return {part: torch.cat([row[part] for row in rows]) for part in sorted(names)}
