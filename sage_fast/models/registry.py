"""Find a model's family: shipped with sage-fast, or in a module of the user's."""

from __future__ import annotations

import re
from pathlib import Path

from sage_fast.config.places import split_family
from sage_fast.models.spec import Spec
from sage_fast.util.errors import UserError
from sage_fast.util.plugins import import_plugin

SHIPPED = {
    "HunyuanVideo15Transformer3DModel": "sage_fast.models.hunyuan15.spec:HunyuanVideo15",
    "TestbedTransformer": "sage_fast.testbed.tiny_model:Testbed",
    "WanTransformer3DModel": "sage_fast.models.wan.spec:Wan",
}
"""Transformer class, as in config.json -> family.

The first one is the default for a hub id whose name tells no family, until config.json is read.
"""

_TESTBED = Path(__file__).parents[1] / "testbed"
CHECKPOINTS = {"testbed": _TESTBED / "base", "testbed-i2v": _TESTBED / "base_i2v"}
"""Name in `model.path` -> folder of a checkpoint that comes with the package."""


def family(name: str) -> type[Spec]:
    """Import the family `package.module:Name`.

    Raises:
        UserError: there is no such family.
    """
    # imports PyTorch, which a path without a family does not need
    from sage_fast.util.guard import (
        guarded,
    )

    setting = f"model.path = {name!r}"
    with guarded(setting):
        found = import_plugin(name, setting)
    if not (isinstance(found, type) and issubclass(found, Spec)):
        raise UserError(
            f"{setting}: expected a subclass of sage_fast.models.spec.Spec, found {found!r}"
        )
    return found


def default_family() -> type[Spec]:
    return family(next(iter(SHIPPED.values())))


def family_of_hub_id(hub_id: str) -> type[Spec] | None:
    """Return the shipped family whose `hub_names` a hub id matches; None if it tells no family."""
    for name in SHIPPED.values():
        cls = family(name)
        if cls.hub_names and re.search(cls.hub_names, hub_id, re.IGNORECASE):
            return cls
    return None


def split_path(path: str) -> tuple[type[Spec] | None, str]:
    """Split `package.module:Name:PATH` into the family and PATH; the family is None without the
    prefix."""
    place, path = split_family(path)
    return (None if place is None else family(place)), path
