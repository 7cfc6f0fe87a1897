"""Failing rewards: how a failure reads, and the policy, the same for every backend: score again,
then drop.

A batch is scored in one call. Videos without scores are scored again one by one, `reward.retries`
times; where a reward compares the videos of a group, the whole group is scored again. A video that
still has no score is dropped; no number is made up.
"""

from __future__ import annotations

import dataclasses
import math
import time
import traceback
from pathlib import Path

import torch
from torch import Tensor

from sage_fast.config.schema import RewardConfig
from sage_fast.config.secrets import names_for_values
from sage_fast.rewards.interface import Backend, Request
from sage_fast.util import plugins
from sage_fast.util.errors import first_line

BATCH_DEADLINE_FACTOR = 2
"""Deadline of a batch in units of `reward.timeout_seconds`.

No call begins after it: other ranks wait.
"""
MAX_TEXT = 4000
"""Longest text of a failure in characters, so that an exception that quotes its data stays
readable."""
MAX_FRAMES = 8
"""Largest number of traceback frames shown, innermost last."""

_OWN_FOLDER = str(Path(__file__).parent)
_PYTHONS = ("<frozen ", "importlib/__init__.py", "concurrent/futures/_base.py")


class RewardFailure(Exception):
    """A call without scores: the reward failed, or crashed, hung, could not start or was not
    reached.

    Args:
        text: as formatted by `failure`: one line that says what happened, then frames if there are
            any. It is cut at `MAX_TEXT`, and shows no value of a secret.
    """

    def __init__(self, text: str) -> None:
        super().__init__(names_for_values(text[:MAX_TEXT]))


class SomeFailed(RewardFailure):
    """The reward failed on some videos of a call.

    Args:
        errors: video -> why it has no scores.
        parts: scores of all videos, NaN for those.
    """

    def __init__(self, errors: dict[int, str], parts: dict[str, Tensor]) -> None:
        super().__init__(next(iter(errors.values())))
        self.errors = {i: names_for_values(text[:MAX_TEXT]) for i, text in errors.items()}
        self.parts = parts


def failure(error: BaseException) -> str:
    """Format an error: file, line, type and message first; then the reward's own frames, as in a
    traceback."""
    if isinstance(error, RewardFailure):
        return str(error)
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if not _is_ours(frame.filename)
    ]
    shown = frames[-MAX_FRAMES:]
    # none: a wrong number of arguments
    where = f"{shown[-1].filename}:{shown[-1].lineno}: " if shown else ""
    message = names_for_values(f"{where}{type(error).__name__}: {_text_of(error)}"[:MAX_TEXT])
    first, *rest = message.strip().splitlines()
    stack = "".join(traceback.format_list(shown)).splitlines()
    return "\n".join([first, *stack, *rest])[:MAX_TEXT]


def _text_of(error: BaseException) -> str:
    """Return the text of an error, whose class is a reward's own and may fail to say it."""
    try:
        return str(error)
    except Exception as second:
        return f"its text cannot be told: {type(second).__name__}"


def _is_ours(file: str) -> bool:
    """Whether a frame is of the code that calls rewards; the shipped rewards are in a folder
    below."""
    own = str(Path(file).parent) == _OWN_FOLDER or file == plugins.__file__
    return own or file.startswith(_PYTHONS[0]) or file.endswith(_PYTHONS[1:])


@dataclasses.dataclass(kw_only=True)
class Outcome:
    """What one reward gave for B videos.

    Attributes:
        parts: name -> `[B]`, NaN for a video that failed.
        errors: video -> why it has no scores.
        retried: number of videos without scores after the first call.
        note: why videos had no scores after the first call; None if all had.
    """

    parts: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    errors: dict[int, str] = dataclasses.field(default_factory=dict)
    retried: int = 0
    note: str | None = None


def score_or_drop(
    backend: Backend,
    request: Request,
    needed: set[str] | None,
    config: RewardConfig,
    *,
    as_a_whole: bool = False,
) -> Outcome:
    """Score a batch, in several calls if need be.

    Args:
        needed: parts that must be finite; None: all.
        config: retries and time limit.
        as_a_whole: the batch is a group whose videos are compared, so that each call has all of
            them. A further call that is answered replaces the answer before.
    """
    outcome = Outcome()
    count = len(request)
    limited = backend.in_background and config.timeout_seconds > 0
    deadline = (
        time.monotonic() + BATCH_DEADLINE_FACTOR * config.timeout_seconds if limited else math.inf
    )

    every = list(range(count))
    _attempt(outcome, backend, request, every, needed, config.timeout_seconds)
    if outcome.errors:
        outcome.retried = len(outcome.errors)
        first = first_line(next(iter(outcome.errors.values())))
        outcome.note = f"{first}; {outcome.retried} of {count} videos had no scores"

    for _ in range(config.retries):
        batches = [[i] for i in outcome.errors]
        if as_a_whole and batches:
            batches = [every]
        for batch in batches:
            if time.monotonic() >= deadline:
                continue
            # The scores of a group are those of one call.
            target = Outcome() if as_a_whole else outcome
            _attempt(target, backend, request, batch, needed, config.timeout_seconds)
            if as_a_whole and len(target.errors) <= len(outcome.errors):
                outcome.parts, outcome.errors = target.parts, target.errors

    for values in outcome.parts.values():
        values[list(outcome.errors)] = torch.nan
    return outcome


def _attempt(
    outcome: Outcome,
    backend: Backend,
    request: Request,
    chosen: list[int],
    needed: set[str] | None,
    seconds: float,
) -> None:
    """Score some videos of a request; put their scores, or why they have none, into `outcome`."""
    failed: dict[int, str] = {}
    try:
        try:
            parts = backend.score(request.only(chosen), seconds)
        except SomeFailed as some:
            parts = some.parts
            failed = some.errors
        if missing := (needed or set()) - parts.keys():
            raise RewardFailure(f"returned {sorted(parts)}, without {sorted(missing)}")
    except RewardFailure as error:
        # What an earlier call has scored stays so.
        unscored = [i for i in chosen if i in outcome.errors or not outcome.parts]
        outcome.errors.update(dict.fromkeys(unscored, str(error)))
        return

    for i in chosen:
        outcome.errors.pop(i, None)
    outcome.errors.update({chosen[row]: why for row, why in failed.items()})
    for part, values in parts.items():
        whole = outcome.parts.get(part)
        if whole is None:
            whole = torch.full((len(request),), torch.nan)
        whole = whole.to(torch.promote_types(whole.dtype, values.dtype))
        whole[chosen] = values
        outcome.parts[part] = whole
        if needed is not None and part not in needed:
            continue
        for i, value in zip(chosen, values.tolist()):
            if not math.isfinite(value):
                outcome.errors.setdefault(i, f"{part!r} is {value}, not finite")
