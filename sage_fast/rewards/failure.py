"""What a reward that fails looks like: its own traceback, in words."""

from __future__ import annotations

import traceback
from pathlib import Path

FRAMES = 8
"""Of a traceback, the last so many are shown."""

_OURS = {
    str(Path(__file__).with_name(f"{name}.py"))
    for name in ("caller", "composite", "load", "score", "timeout", "worker")
}
_PYTHONS = ("<frozen ", "importlib/__init__.py", "concurrent/futures/_base.py")


class RewardFailure(Exception):
    """A call of a reward that gave no scores, told in words.

    Args:
        text: as of `failure`: one line that says what happened, then the frames if there are any.
    """


class NoAnswer(RewardFailure):
    """A failure that is no word of the reward itself: it crashed, hung, could not start or was not reached."""


def failure(error: BaseException) -> str:
    """File, line, type and message on the first line; then the reward's own frames, as a traceback shows them."""
    if isinstance(error, RewardFailure):
        return str(error)
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}: SyntaxError: {error.msg}"
    frames = list(traceback.extract_tb(error.__traceback__))
    own = frames[next((i for i, frame in enumerate(frames) if not _is_ours(frame.filename)), len(frames)) :]
    what = f"{type(error).__name__}: {error}".strip().splitlines()
    if not own:  # raised by our call itself, such as one with too few arguments
        return what[0]
    first = f"{own[-1].filename}:{own[-1].lineno}: {what[0]}"
    return "\n".join([first, *"".join(traceback.format_list(own[-FRAMES:])).splitlines(), *what[1:]])


def first_line(text: str) -> str:
    return text.partition("\n")[0]


def _is_ours(file: str) -> bool:
    return file in _OURS or file.startswith(_PYTHONS[0]) or file.endswith(_PYTHONS[1:])
