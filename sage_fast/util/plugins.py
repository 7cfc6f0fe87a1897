"""Plug-ins, which are rewards and model families: shipped, of an installed package, or in a file of
the user's.

Imports nothing heavy.
"""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.metadata
import importlib.util
import operator
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sage_fast.util.errors import UserError


def registered(group: str, shipped: Mapping[str, str]) -> dict[str, str]:
    """Return name -> `package.module:name` of what is shipped, then of the entry points of a
    group."""
    points = {point.name: point.value for point in importlib.metadata.entry_points(group=group)}
    return {**shipped, **points, **shipped}


def split_place(place: str, setting: str = "") -> tuple[str, str, str]:
    """Split the place of a plug-in into the folder that its module is in, the module, and the name
    in it.

    The folder is "" for `package.module:name`, which is imported by Python's own rules, and FOLDER
    for `FOLDER/package.module:name`.

    Args:
        setting: setting that holds the place, for messages.

    Raises:
        UserError: it has another form.
    """
    found = re.fullmatch(r"(?:(.*)/)?(\w[\w.]*):(\w[\w.]*)", place)
    if found is None:
        where = f"{setting}: " if setting else f"{place!r}: "
        raise UserError(f"{where}expected 'package.module:name', such as my_rewards:MyReward")
    folder = found[1]
    if folder == "":  # in the root of the file system
        folder = "/"
    return folder or "", found[2], found[3]


def find_module(module: str, folder: Path) -> Path | None:
    """Return the file of a module, or of a package, in a folder; None if it is not there."""
    path = folder.joinpath(*module.split("."))
    files = path.with_name(f"{path.name}.py"), path / "__init__.py"
    return next((file for file in files if file.is_file()), None)


def is_importable(module: str) -> bool:
    """Whether Python finds the package of a module without looking into the current folder."""
    package = module.partition(".")[0]
    if package in sys.modules:
        return True
    here, path = os.getcwd(), list(sys.path)
    sys.path[:] = [entry for entry in path if entry not in ("", here)]
    try:
        return importlib.util.find_spec(package) is not None
    finally:
        sys.path[:] = path


def file_of(place: str, setting: str) -> Path | None:
    """Return the file of a plug-in's module without importing it; None if it is not known.

    Raises:
        UserError: as `check_place`.
    """
    folder, module, _ = check_place(place, setting)
    if folder:
        return find_module(module, Path(folder))
    spec = importlib.util.find_spec(module)
    return Path(spec.origin) if spec is not None and spec.origin is not None else None


def check_place(place: str, setting: str) -> tuple[str, str, str]:
    """Return `split_place`. Without a folder, the current one is searched too, after the installed
    packages.

    Raises:
        UserError: the place has another form, there is no such package, or Python would import
            another one.
    """
    folder, module, name = split_place(place, setting)
    package = module.partition(".")[0]
    if folder:
        if find_module(module, Path(folder)) is None:
            raise _no_module(module, setting, folder)
        _search(folder)
        _check_own(module, Path(folder), setting)
        return folder, module, name
    if os.getcwd() not in sys.path:
        # a console script's path begins with the script's own folder instead
        sys.path.append(os.getcwd())
    if package not in sys.modules and importlib.util.find_spec(package) is None:
        raise _no_module(package, setting, os.getcwd())
    return folder, module, name


def _check_own(module: str, folder: Path, setting: str) -> None:
    """Check that a module of `folder`, and those beside it that it imports, are not imported from
    elsewhere already.

    Python has one module of a name. Another one would be used without a word.

    Raises:
        UserError: one is.
    """
    package = module.partition(".")[0]
    packages = {name.partition(".")[0] for name in _imports_beside(module, folder)}
    checked = sorted(packages - {package})
    if package in sys.modules:  # imported already, perhaps from elsewhere
        checked.insert(0, package)
    for name in checked:
        files = _files_of(name)
        expected = [folder / f"{name}.py", folder / name / "__init__.py", folder / name]
        if not _share_a_file(files, expected):
            elsewhere = files[0] if files else "another place"
            raise UserError(
                f"{setting}: Python imports {name!r} from {elsewhere}, not from {folder}; rename "
                "one of them"
            )


def _share_a_file(first: Sequence[Path], second: Sequence[Path]) -> bool:
    """Whether a file or folder is in both lists, perhaps by another path."""
    for one in first:
        for other in second:
            if one.exists() and other.exists() and one.samefile(other):
                return True
    return False


def _files_of(package: str) -> list[Path]:
    """Return the file of a package or its folders, as it is imported or would be."""
    loaded = sys.modules.get(package)
    if loaded is not None:
        origins = [getattr(loaded, "__file__", None), *getattr(loaded, "__path__", ())]
    else:
        spec = importlib.util.find_spec(package)
        origins = (
            [spec.origin, *(spec.submodule_search_locations or ())] if spec is not None else []
        )
    return [Path(origin) for origin in origins if origin is not None]


def _imports_beside(module: str, folder: Path) -> list[str]:
    """Return the modules of `folder` that a module imports by their names, directly or through one
    of them."""
    found: dict[str, None] = {}
    waiting = [module]
    while waiting:
        file = find_module(waiting.pop(), folder)
        try:
            tree = ast.parse(file.read_bytes()) if file is not None else None
        except (SyntaxError, ValueError, OSError):  # told when it is imported
            tree = None
        for node in ast.walk(tree) if tree is not None else ():
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            else:
                continue
            for name in names:
                package = name.partition(".")[0]
                is_new = (
                    name not in found and name != module and package not in sys.stdlib_module_names
                )
                if is_new and find_module(package, folder) is not None:
                    found[name] = None
                    waiting.append(name)
    return list(found)


def import_plugin(place: str, setting: str) -> Any:
    """Import what a plug-in's place names; None if the module has no such name.

    Raises:
        UserError: as `check_place`. Whatever the module raises passes through.
    """
    folder, name, attribute = check_place(place, setting)
    if folder:
        _load_package(name.partition(".")[0], folder)
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise _no_module(error.name, setting, folder or os.getcwd()) from error
    try:
        return operator.attrgetter(attribute)(module)
    except AttributeError:
        return None


def _search(folder: str) -> None:
    """Let modules of `folder` import each other: it comes before the current folder, and else
    last."""
    if folder in sys.path:
        return
    places = [i for i, entry in enumerate(sys.path) if entry in ("", os.getcwd())]
    sys.path.insert(min(places, default=len(sys.path)), folder)


def _load_package(package: str, folder: str) -> None:
    """Import a top-level module or package of `folder`, whatever of its name stands before it on
    Python's path."""
    if package in sys.modules:  # that of this folder: `check_place`
        return
    spec = importlib.machinery.PathFinder.find_spec(package, [folder])
    if spec is None or spec.loader is None:  # a folder without __init__.py
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules[package] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[package]
        raise


def _no_module(name: str, setting: str, folder: str) -> UserError:
    return UserError(
        f"{setting}: expected 'package.module:name' of something importable; no module {name!r} is "
        f"installed or in {folder}"
    )
