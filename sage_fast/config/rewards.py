"""The names of rewards, and their check before PyTorch is imported, as `sage_fast.rewards` needs it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import sys

from sage_fast.util.errors import UserError, nearest

SHIPPED = {
    "testbed": "sage_fast.rewards.testbed:TestbedReward",
    "testbed-judge": "sage_fast.rewards.judge:TestbedJudge",
    "videoalign": "sage_fast.rewards.videoalign:VideoAlignReward",
    "clipscore": "sage_fast.rewards.clip:CLIPScoreReward",
    "pickscore": "sage_fast.rewards.clip:PickScoreReward",
}
"""Short names of the rewards that come with the package."""

GROUP = "sage_fast.rewards"
"""Entry-point group for other packages: name = "package.module:Class"."""


def place_of_reward(name: str, setting: str) -> tuple[str, str]:
    """Return the module of a reward and its name there; the current folder is searched too, after the others.

    Args:
        setting: setting that holds the name, for messages.

    Raises:
        UserError: there is no such name, or no such package.
    """
    if ":" not in name:
        offered = {point.name: point.value for point in importlib.metadata.entry_points(group=GROUP)} | SHIPPED
        if name not in offered:
            raise UserError(
                f"{setting}: {nearest(name, sorted(offered))}; or 'package.module:name', such as "
                "my_rewards:MyReward, or http://host:port"
            )
        name = offered[name]
    if not re.fullmatch(r"\w[\w.]*:[\w.]+", name):
        raise UserError(f"{setting}: expected 'package.module:name', such as my_rewards:MyReward")
    module, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # a console script's path begins with the script's own folder instead
    package = module.partition(".")[0]
    if package not in sys.modules and importlib.util.find_spec(package) is None:
        raise no_module(package, setting)
    return module, attribute


def no_module(name: str | None, setting: str) -> UserError:
    """Return the error for a module that is not there."""
    return UserError(
        f"{setting}: expected 'package.module:name' of something importable; no module {name!r} is installed or in "
        f"{os.getcwd()}"
    )
