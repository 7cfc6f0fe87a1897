"""Errors raised on purpose. The command line shows them in one line and any other exception with
its traceback.

This module imports nothing heavy.
"""

from __future__ import annotations

import difflib
import os
import signal
import sys
import unicodedata
from collections.abc import Iterable

HUNG_THREAD = "hanging"
"""Name of a thread whose call did not return in time.

A command does not wait for it when the process ends.
"""


class UserError(ValueError):
    """A wrong setting, file or option. Exit status 2."""


class RunError(RuntimeError):
    """A run that cannot continue although its settings are valid. Exit status 1.

    Attributes:
        on_all_ranks: whether every rank raises it; if so, the ranks can still save a checkpoint
            together.
    """

    on_all_ranks = False


class NonFiniteError(RunError):
    """A loss or gradient that is not finite.

    No weight was updated; the tested value is a sum over the ranks.
    """

    on_all_ranks = True


class ParityError(RunError):
    """Training does not reproduce the rollout's log-probs (max over ranks)."""

    on_all_ranks = True


class RankError(RunError):
    """A failure of another rank, raised on all the others by
    `sage_fast.util.ranks.fail_together`."""

    on_all_ranks = True


class RewardError(RunError):
    """A reward that failed or is not finite."""


SIGNALS = {
    signal.SIGINT: 130,  # Ctrl-C; LSF's bkill, whose SIGTERM and SIGKILL follow
    signal.SIGQUIT: 131,  # Ctrl-\
    signal.SIGTERM: 0,  # Slurm, PBS, LSF, Kubernetes, systemd, torchrun, deepspeed
    signal.SIGHUP: 0,  # a terminal that closes
    # a warning: Slurm's --signal=USR1, SGE's -notify and s_rt, submitit before 1.4
    signal.SIGUSR1: 0,
    signal.SIGUSR2: 0,  # a warning: SGE's -notify, LSF's run limit, submitit, OAR
    signal.SIGXCPU: 0,  # a warning: the CPU limit of LSF, SGE (s_cpu), PBS and `ulimit -St`
}
"""Signals that stop a run -> exit status: 128 + number after those that a person types, 0 after a
scheduler's.

Others need no handler. SIGKILL and SIGSTOP cannot be handled. SIGTSTP and SIGCONT suspend and
continue a run. Python ignores SIGPIPE and SIGXFSZ, so a closed pipe and a file beyond the size
limit are errors of the write.
"""


class Stopped(KeyboardInterrupt):
    """Stop requested by one of `SIGNALS`. Raised on every rank at a point where the run's state is
    consistent.

    Args:
        number: signal number.

    Attributes:
        status: exit status, from `SIGNALS`.
    """

    on_all_ranks = True

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number
        self.status = SIGNALS.get(signal.Signals(number), 0)


OWN_PLACE = ", or package.module:name"
"""What a choice may be beside those of its list, where users bring their own."""


def nearest(value: str, choices: Iterable[str], also: str = "") -> str:
    """Return `expected one of a, b, c; did you mean 'b'?`.

    The question is left out if nothing is close.

    Args:
        also: what else is valid, after the choices, such as `OWN_PLACE`.
    """
    choices = list(choices)
    if not choices:
        return "there is nothing to choose from"
    alike = [choice for choice in choices if choice.casefold() == str(value).casefold()]
    close = alike or difflib.get_close_matches(str(value), choices, n=1)
    question = f"; did you mean {close[0]!r}?" if close else ""
    return f"expected one of {', '.join(choices)}{also}{question}"


def first_line(text: object) -> str:
    """Return the first line of a text, or of an error's message; empty if there is none."""
    return next(iter(str(text).strip().splitlines()), "")


def in_one_line(error: BaseException) -> str:
    """Return an error's type and the first line of its message."""
    return f"{type(error).__name__}: {first_line(error)}"


def printable(text: str) -> str:
    """Escape what a terminal would obey, in text of a file, of the network or of a plug-in.

    Spaces of any width and the joiners of emoji stay: prompts are written in many scripts.
    """
    harmless = "\n\u200c\u200d"
    return "".join(
        c
        if c.isprintable() or c in harmless or unicodedata.category(c) == "Zs"
        else c.encode("unicode_escape").decode()
        for c in text
    )


def print_error(line: str) -> None:
    """Print a line on stderr.

    Where that is closed, on a full disk or read by nobody, the command ends as it would.
    """
    try:
        print(printable(line), file=sys.stderr, flush=True)
    except ValueError:  # closed
        return
    except OSError:
        drop_output(2)


def drop_output(descriptor: int) -> None:
    """Point stdout (1) or stderr (2) to /dev/null, with what Python still holds for it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


def reason(error: OSError | UserError) -> str:
    """Return `'path': No space left on device`, or as much of it as the error knows."""
    if isinstance(error, UserError) or error.strerror is None:
        return in_one_line(error)
    return (
        error.strerror if error.filename is None else f"{str(error.filename)!r}: {error.strerror}"
    )
