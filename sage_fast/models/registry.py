"""From `model.path` to the family of its model: shipped, offered by an installed package, or a module of the user's."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import operator
import os
import re
import sys

from sage_fast.models.protocol import Spec
from sage_fast.util.errors import UserError

SHIPPED = {
    "HunyuanVideo15Transformer3DModel": "sage_fast.models.hunyuan15.spec:HunyuanVideo15",
    "TestbedTransformer": "sage_fast.models.testbed.model:Testbed",
}
"""Class of the transformer, as its config.json names it -> the family; the first one is assumed before that is read."""

GROUP = "sage_fast.models"
"""The entry points of other packages: class of the transformer = "package.module:Name"."""


@functools.cache
def families() -> dict[str, str]:
    """Class of the transformer -> the family, of all that are registered."""
    return SHIPPED | {point.name: point.value for point in importlib.metadata.entry_points(group=GROUP)}


def family(name: str) -> type[Spec]:
    """The family `package.module:Name`, found in the current folder too.

    Raises:
        UserError: there is none.
    """
    module, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        found = operator.attrgetter(attribute)(importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        raise UserError(f"model.path = {name!r}: expected 'package.module:Name' of a Spec: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Spec)):
        raise UserError(f"model.path = {name!r}: {attribute} is no subclass of sage_fast.models.protocol.Spec")
    return found


def default_family() -> type[Spec]:
    return family(next(iter(SHIPPED.values())))


def split_path(path: str) -> tuple[type[Spec] | None, str]:
    """The family that a path begins with, as `package.module:Name:PATH`, and the rest of it."""
    found = re.fullmatch(r"([A-Za-z_][\w.]*:[A-Za-z_]\w*):(.+)", path)
    return (None, path) if found is None else (family(found[1]), found[2])
