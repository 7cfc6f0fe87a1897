"""One chunk of videos by one reward, with the policy for failures: called again, then one by one; never a number made
up."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from sage_fast.errors import RewardError
from sage_fast.rewards.failure import RewardFailure, failure, first_line

TIMEOUTS = 2
"""Times `reward.timeout_seconds` after which no other call is made for a batch: a reward that hangs is called once
more, but not for each of B videos while the other ranks wait."""

Call = Callable[[Tensor, list[str]], dict[str, Tensor]]
"""Scores videos or raises; what it returns has been through `checked`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one reward gave for B videos.

    Attributes:
        parts: name -> float32 `[B]`, NaN for a video that failed.
        errors: why each of them failed at last; None for one that has its scores.
        retried: videos that the first call gave no scores.
        note: why the reward was called again; None if it was not.
    """

    parts: dict[str, Tensor]
    errors: list[str | None]
    retried: int
    note: str | None


def checked(returned: object, count: int) -> dict[str, Tensor]:
    """What a reward returned, each part float32 `[count]` on the CPU, in the order of their names.

    Raises:
        RewardFailure: it is something else than a mapping of names to `count` numbers each.
    """
    if not isinstance(returned, Mapping):
        raise RewardFailure(
            f"returned {type(returned).__name__}; expected a mapping of parts to [B], such as {{'sharpness': scores}}"
        )
    parts = {}
    for part, value in returned.items():
        if not isinstance(part, str) or not part:
            raise RewardFailure(f"returned a part named {part!r}; expected text")
        try:
            values = torch.as_tensor(value).detach()
        except (TypeError, ValueError, RuntimeError) as error:
            raise RewardFailure(f"part {part!r}: expected numbers [{count}], got {type(value).__name__}") from error
        if values.shape != (count,):
            raise RewardFailure(f"part {part!r}: expected shape [{count}], got {list(values.shape)}")
        if values.is_complex():
            raise RewardFailure(f"part {part!r}: expected real numbers, got {values.dtype}")
        parts[part] = values.float().cpu()
    return dict(sorted(parts.items()))


def score(
    call: Call,
    videos: Tensor,
    prompts: Sequence[str],
    needed: Collection[str] | None,
    retries: int,
    timeout: float = 0.0,
) -> Outcome:
    """Call for all videos, `retries` times more for those without scores, and at last one by one for those whose call
    raised, so that only what fails alone is without scores.

    Args:
        needed: parts that have to be finite; None: all.
        timeout: seconds of a call; after `TIMEOUTS` times as many no other one is begun. 0: no limit.

    Raises:
        RewardError: the reward hangs where nothing can end the call.
    """
    count = len(prompts)
    rows: dict[str, Tensor] = {}
    errors: list[str | None] = [None] * count
    raised = False
    deadline = time.monotonic() + TIMEOUTS * timeout if timeout else math.inf

    def attempt(chosen: list[int]) -> None:
        nonlocal raised
        if time.monotonic() >= deadline:
            return
        raised = False
        try:
            parts = call(videos if len(chosen) == count else videos[chosen], [prompts[i] for i in chosen])
            if missing := set(needed or ()) - parts.keys():
                raise RewardFailure(f"returned {sorted(parts)}, without {sorted(missing)}")
        except RewardError:
            raise
        except Exception as error:
            raised = True
            errors[:] = [failure(error) if i in chosen else why for i, why in enumerate(errors)]
            return
        for part, values in parts.items():
            rows.setdefault(part, torch.full((count,), torch.nan))[chosen] = values
        for place, i in enumerate(chosen):
            wrong = [part for part in parts if (needed is None or part in needed) and not parts[part][place].isfinite()]
            errors[i] = f"{wrong[0]!r} is {float(parts[wrong[0]][place])}, not finite" if wrong else None

    def failed() -> list[int]:
        return [i for i, why in enumerate(errors) if why is not None]

    attempt(list(range(count)))
    again = failed()
    note = f"{first_line(str(errors[again[0]]))}; called again for {len(again)} of {count} videos" if again else None
    for _ in range(retries):
        if failed():
            attempt(failed())
    if raised and len(failed()) > 1:
        for i in failed():
            attempt([i])
    for values in rows.values():
        values[failed()] = torch.nan
    return Outcome(parts=dict(sorted(rows.items())), errors=errors, retried=len(again), note=note)
