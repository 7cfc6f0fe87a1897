"""Text files and pipes have an encoding of their own: the default is that of the locale, which may
lack letters."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
FOLDERS = ("sage_fast", "benchmarks", "studies", "scripts", "examples")
METHODS = {"read_text", "write_text"}
"""Methods of a path that always do so; `util.files.read_text` is a function, and knows its
encoding."""
TEXT = {"FileHandler", "TextIOWrapper", "getoutput", "getstatusoutput", "savetxt", "loadtxt"}
"""Calls that always read or write text."""
OPENS = {
    "open": 1,
    "fdopen": 1,
    "NamedTemporaryFile": 0,
    "TemporaryFile": 0,
    "SpooledTemporaryFile": 1,
}
"""Calls that do so by their mode -> the position of the mode; a method has no file argument before
it."""
BINARY_BY_DEFAULT = {"NamedTemporaryFile", "TemporaryFile", "SpooledTemporaryFile"}
NOT_FILES = {"os", "Image", "tarfile", "zipfile"}
"""Modules whose `open` knows no encoding."""


def text_calls(source: str) -> Iterator[tuple[int, str]]:
    """Line and source of every call that reads or writes text by the encoding of the locale."""
    for call in ast.walk(ast.parse(source)):
        if not isinstance(call, ast.Call) or any(word.arg == "encoding" for word in call.keywords):
            continue
        is_method = isinstance(call.func, ast.Attribute)
        name = (
            call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        )
        owner = getattr(call.func.value, "id", "") if isinstance(call.func, ast.Attribute) else ""
        given = {word.arg: ast.unparse(word.value) for word in call.keywords}
        pipes = {key for key in ("text", "universal_newlines") if given.get(key) == "True"}
        if name in OPENS and not (name == "open" and owner in NOT_FILES):
            place = OPENS[name] - (
                is_method and name == "open" and owner not in ("io", "codecs", "gzip")
            )
            default = "'w+b'" if name in BINARY_BY_DEFAULT else "'r'"
            mode = given.get("mode") or (
                ast.unparse(call.args[place]) if len(call.args) > place else default
            )
            is_text = "b" not in mode and not (owner == "gzip" and "t" not in mode)
        else:
            is_text = name in TEXT or (is_method and name in METHODS) or bool(pipes)
        if is_text:
            yield call.lineno, ast.unparse(call)


@pytest.mark.parametrize("folder", FOLDERS)
def test_text_is_never_read_or_written_by_the_encoding_of_the_locale(folder: str) -> None:
    found = [
        f"{file.relative_to(REPOSITORY)}:{line}: {call}"
        for file in sorted((REPOSITORY / folder).rglob("*.py"))
        for line, call in text_calls(file.read_text(encoding="utf-8"))
    ]
    assert found == [], 'give encoding="utf-8"'
