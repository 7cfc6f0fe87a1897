"""Wording shared by error messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(value: str, choices: Iterable[str]) -> str:
    """`expected one of a, b, c; did you mean 'b'?`, the question only where something is close."""
    choices = list(choices)
    close = difflib.get_close_matches(str(value), choices, n=1)
    question = f"; did you mean {close[0]!r}?" if close else ""
    return f"expected one of {', '.join(choices)}{question}"
