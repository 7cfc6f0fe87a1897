"""The errors that are raised on purpose: the command shows them in one line, and everything else with its traceback.

Imports nothing heavy.
"""

from __future__ import annotations

import difflib
import signal
from collections.abc import Iterable


class UserError(ValueError):
    """Something that a user gave is wrong: a setting, a file, an option. Exit status 2."""


class RunError(RuntimeError):
    """A run cannot go on although its settings are valid. Exit status 1.

    Attributes:
        on_all_ranks: it was raised on every rank, so that they can still save a checkpoint together.
    """

    on_all_ranks = False


class NonFiniteError(RunError):
    """A loss or gradient that is not finite; nothing was updated with it. What is tested is a sum over the ranks."""

    on_all_ranks = True


class ParityError(RunError):
    """Training does not reproduce the log-probs of the rollout; measured over all ranks."""

    on_all_ranks = True


class RankError(RunError):
    """Another rank failed; raised on all the others (`sage_fast.distributed.together`)."""

    on_all_ranks = True


class RewardError(RunError):
    """A reward that failed, or that is not finite."""


class Stopped(KeyboardInterrupt):
    """SIGINT or SIGTERM asked a run to end; raised where its state is whole, on every rank.

    Args:
        number: of the signal.

    Attributes:
        status: exit status: 130 after SIGINT, as of any program, and 0 after SIGTERM, which a scheduler sends.
    """

    on_all_ranks = True

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number
        self.status = 0 if number == signal.SIGTERM else 128 + number


def nearest(value: str, choices: Iterable[str]) -> str:
    """`expected one of a, b, c; did you mean 'b'?`, the question only if something is close."""
    choices = list(choices)
    close = difflib.get_close_matches(str(value), choices, n=1)
    question = f"; did you mean {close[0]!r}?" if close else ""
    return f"expected one of {', '.join(choices)}{question}"


def reason(error: OSError) -> str:
    """`'path': No space left on device`, as far as the error knows them."""
    if error.strerror is None:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return error.strerror if error.filename is None else f"{str(error.filename)!r}: {error.strerror}"
