"""Plug-ins, which are rewards and model families: shipped, of an installed package, or in a file of the user's.

Imports nothing heavy.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import operator
import os
import re
import sys
from collections.abc import Mapping
from typing import Any

from sage_fast.util.errors import UserError


def registered(group: str, shipped: Mapping[str, str]) -> dict[str, str]:
    """Return name -> `package.module:name` of what is shipped, then of the entry points of a group."""
    points = {point.name: point.value for point in importlib.metadata.entry_points(group=group)}
    return {**shipped, **points, **shipped}


def module_of(place: str, setting: str) -> str:
    """Return the module of `package.module:name`. The current folder is searched too, after the installed packages.

    Args:
        setting: setting that holds the name, for messages.

    Raises:
        UserError: it has another form, or there is no such package.
    """
    if not re.fullmatch(r"\w[\w.]*:\w[\w.]*", place):
        raise UserError(f"{setting}: expected 'package.module:name', such as my_rewards:MyReward")
    module = place.partition(":")[0]
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # a console script's path begins with the script's own folder instead
    package = module.partition(".")[0]
    if package not in sys.modules and importlib.util.find_spec(package) is None:
        raise _no_module(package, setting)
    return module


def import_plugin(place: str, setting: str) -> Any:
    """Import what `package.module:name` names; None if the module has no such name.

    Raises:
        UserError: as `module_of`. Whatever the module raises passes through.
    """
    name = module_of(place, setting)
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise _no_module(error.name, setting) from error
    try:
        return operator.attrgetter(place.partition(":")[2])(module)
    except AttributeError:
        return None


def _no_module(name: str, setting: str) -> UserError:
    return UserError(
        f"{setting}: expected 'package.module:name' of something importable; no module {name!r} is installed or in "
        f"{os.getcwd()}"
    )
