"""Rows of `sage-fast doctor`, and how errors become one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Literal, NamedTuple, get_args

from sage_fast.util.errors import in_one_line

Verdict = Literal["ok", "wrong", "missing", "slow"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)


class Check(NamedTuple):
    """A row of the table: what was looked at, the verdict, what was found, and what to do."""

    name: str
    verdict: Verdict
    found: str
    advice: str = ""


def tried(name: str, checks: Callable[[], Iterable[Check]]) -> Iterator[Check]:
    """Yield the rows of `checks`.

    If it raises, yield the error as a row: broken machines are what doctor is for.
    """
    try:
        yield from checks()
    except Exception as error:  # from a compiler, a driver or a package
        yield Check(name, "wrong", f"ended in {in_one_line(error)}")
