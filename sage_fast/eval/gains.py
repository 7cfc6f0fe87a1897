"""Scores of sets of videos: means, paired differences to the first set, and the sign of reward
hacking."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence

from sage_fast.eval.scores import mean_and_margin
from sage_fast.eval.videoset import VideoKey, VideoSet
from sage_fast.util.meters import JUDGE_PART


@dataclasses.dataclass(frozen=True, kw_only=True)
class GainRow:
    """One score of one set.

    Attributes:
        score: name of the score; `reward` for the composite.
        label: label of the set.
        mean, margin: mean over the videos and the half-width of its 95 % interval over prompts
            (None with fewer than `MIN_PROMPTS`).
        videos, prompts: numbers of videos and prompts with this score.
        gain, gain_margin: mean paired difference to the first set and its margin; None for the
            first set, and where that has no such score.
        pairs: number of pairs with this score in both sets.
    """

    score: str
    label: str
    mean: float
    margin: float | None
    videos: int
    prompts: int
    gain: float | None = None
    gain_margin: float | None = None
    pairs: int = 0

    @property
    def direction(self) -> str:
        """`up` or `down` if the interval of the gain excludes 0, else an empty string."""
        if self.gain is None or self.gain_margin is None or not abs(self.gain) > self.gain_margin:
            return ""
        return "up" if self.gain > 0 else "down"


def table(sets: Sequence[VideoSet]) -> list[GainRow]:
    """Return all scores of all sets with their paired differences to the first set, grouped by
    score."""
    names = list(dict.fromkeys(name for videos in sets for name in videos.scores))
    names.sort(key=lambda name: name != "reward")  # the composite first, the others in their order
    return [
        _row(name, videos, sets[0]) for name in names for videos in sets if name in videos.scores
    ]


def _row(name: str, videos: VideoSet, first: VideoSet) -> GainRow:
    values = videos.by_key(name)
    mean, margin, prompts = _mean(values)
    row = GainRow(
        score=name,
        label=videos.label,
        mean=mean,
        margin=margin,
        videos=len(values),
        prompts=prompts,
    )
    if videos is first or name not in first.scores:
        return row
    gains = gains_of(name, first, videos)
    gain, gain_margin, _ = _mean(gains)
    return dataclasses.replace(row, gain=gain, gain_margin=gain_margin, pairs=len(gains))


def _mean(values: Mapping[VideoKey, float]) -> tuple[float, float | None, int]:
    """Return the mean, its margin, and the number of prompts."""
    prompts = [prompt for prompt, _ in values]
    mean, margin = mean_and_margin(prompts, list(values.values()))
    return mean, margin, len(set(prompts))


def gains_of(name: str, first: VideoSet, videos: VideoSet) -> dict[VideoKey, float]:
    """Return each video's score minus that of its pair in the first set."""
    base, values = first.by_key(name), videos.by_key(name)
    return {key: value - base[key] for key, value in values.items() if key in base}


# -- reward hacking --------------------------------------------------------------------------------


def hacking(
    first: VideoSet, last: VideoSet, watched: tuple[str, ...] = (JUDGE_PART,), pairs: int = 1
) -> str | None:
    """Return a warning if the composite rose and a score that nothing trains on fell, both beyond
    their intervals.

    Each score is another chance of a fall by luck, and so is each pair of sets that is looked at.
    The intervals of the falls are corrected for the number of both by Bonferroni's method: all hold
    together in 95 % of cases.

    Args:
        watched: prefixes of the scores that nothing trains on.
        pairs: pairs of sets that are looked at, this one included.
    """
    names = [name for name in last.scores if name.startswith(watched) and name in first.scores]
    fallen = [name for name in names if _falls(name, first, last, comparisons=pairs * len(names))]
    if not fallen or _row("reward", last, first).direction != "up":
        return None
    return f"reward rose while {', '.join(fallen)} fell: look at the videos (reward hacking)"


def _falls(name: str, first: VideoSet, last: VideoSet, comparisons: int) -> bool:
    """Whether the interval of a score's mean gain, corrected for `comparisons`, lies below 0."""
    gains = gains_of(name, first, last)
    gain, margin = mean_and_margin(
        [prompt for prompt, _ in gains], list(gains.values()), comparisons
    )
    return margin is not None and gain + margin < 0


def hacking_in_run(evaluations: Sequence[VideoSet]) -> str | None:
    """Return a warning if a run hacks its reward: since its first evaluation, or since a part of
    the judge was best.

    A judge that rises first and falls later is also over-optimisation. Which evaluation was best is
    chosen by the scores, so that each earlier one counts as a pair that is looked at.

    Args:
        evaluations: of one run, in the order of iterations.
    """
    if len(evaluations) < 2:
        return None
    first, *_, last = evaluations
    pairs = len(evaluations) - 1
    since_first = hacking(first, last, pairs=pairs)
    if since_first:
        return since_first
    for part in sorted(name for name in last.scores if name.startswith(JUDGE_PART)):
        best = max(
            evaluations[:-1],
            key=lambda videos: statistics.fmean(videos.by_key(part).values() or [-math.inf]),
        )
        since_best = hacking(best, last, pairs=pairs)
        if since_best:
            return f"since iteration {best.iteration}: {since_best}"
    return None
