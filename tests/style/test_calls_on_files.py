"""Calls that not every file system has, and what a host tells about memory and CPUs, stand in one
module each."""

import ast

from tests.style.test_rooms import code

FILES = {
    "fsync", "fdatasync", "chmod", "fchmod", "lchmod", "chown", "utime", "flock", "lockf",
    "FileLock", "rename",
    "renames", "link", "symlink", "symlink_to", "hardlink_to", "truncate", "ftruncate", "rmtree",
    "unlink",
    "copytree", "copy2", "copymode", "disk_usage", "statvfs", "move", "copystat", "posix_fallocate",
}  # fmt: skip
HOST = {"cpu_count", "virtual_memory", "sched_getaffinity", "sysconf"}


def called(node: ast.AST) -> str:
    """Name of what a node calls; `Path.replace` is told from that of texts and dataclasses by its
    one argument."""
    if not isinstance(node, ast.Call):
        return ""
    function = node.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    alone = len(node.args) == 1 and not node.keywords
    return "rename" if name == "replace" and alone else name


def elsewhere(names: set[str], module: str) -> list[str]:
    """Calls of these names in every other module than this one."""
    return [
        f"{file}:{getattr(node, 'lineno', 0)}: {called(node)}"
        for other, file in code().items()
        if other != module
        for node in ast.walk(ast.parse(file.read_text()))
        if called(node) in names
    ]


def test_calls_on_files_stand_in_one_module() -> None:
    """Which says of each error whether a run needs the call."""
    assert not elsewhere(FILES, "sage_fast.util.files")


def test_what_a_container_has_is_asked_in_one_module() -> None:
    assert not elsewhere(HOST, "sage_fast.util.container")
