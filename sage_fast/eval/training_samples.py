"""Samples of training iterations that are shown: which ones, and where their videos are.

    <run>/videos/training-000010/videos.csv 00-a-small-red-ball.mp4 01-a-small-red-ball.mp4 ...

The folder is one of scored videos, so `sage-fast eval` scores it with other rewards. `videos.csv`
has the reward, its parts and the advantage of each video.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from pathlib import Path

from sage_fast.eval.videoset import VideoSet
from sage_fast.util.presence import entries

ADVANTAGE = "advantage"
"""Column of `videos.csv` beside the reward and its parts."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """A sample of an iteration, without its video.

    Attributes:
        rank: rank that holds the video.
        index: index among the samples of that rank.
        group: index of its group in the iteration.
        seed: seed of its noise, which tells it from the others of its group.
        prompt: its prompt.
        reward: composite reward; NaN if a reward failed.
        advantage: its advantage.
        parts: part of the reward -> value.
    """

    rank: int
    index: int
    group: int
    seed: int
    prompt: str
    reward: float
    advantage: float
    parts: dict[str, float]


def groups_shown(count: int) -> int:
    """Return from how many groups `count` samples are chosen: two of each."""
    return (count + 1) // 2


def choose(samples: Sequence[Sample], count: int) -> list[Sample]:
    """Choose the samples to show: of the first groups, the highest and the lowest advantage.

    What the policy is pushed towards and away from is what shows whether a reward is hacked.

    Args:
        samples: of any ranks; a sample that several ranks hold counts once, samples whose reward
            failed do not count.
        count: largest number of samples to return.

    Returns:
        Group by group, the highest advantage first. A group in which only one reward was computed
        has one sample.
    """
    groups: dict[int, dict[int, Sample]] = {}
    for sample in samples:
        if math.isfinite(sample.reward):
            groups.setdefault(sample.group, {}).setdefault(sample.seed, sample)

    chosen: list[Sample] = []
    for group in sorted(groups)[: groups_shown(count)]:
        by_advantage = sorted(groups[group].values(), key=lambda sample: -sample.advantage)
        chosen.append(by_advantage[0])
        if len(by_advantage) > 1:
            chosen.append(by_advantage[-1])
    return chosen[:count]


def video_set(samples: Sequence[Sample], files: Sequence[Path | None]) -> VideoSet:
    """Return shown samples as a set of scored videos, in their order."""
    parts = list(dict.fromkeys(part for sample in samples for part in sample.parts))
    scores = {
        "reward": [sample.reward for sample in samples],
        ADVANTAGE: [sample.advantage for sample in samples],
    }
    for part in parts:
        scores[part] = [sample.parts.get(part, math.nan) for sample in samples]
    return VideoSet(
        label="training",
        prompts=[sample.prompt for sample in samples],
        seeds=[sample.seed for sample in samples],
        scores=scores,
        files=list(files),
    )


def folder_name(iteration: int) -> str:
    """Return the name of an iteration's folder in `videos/`; iterations count from 1."""
    return f"training-{iteration:06d}"


def shown_iterations(videos: Path) -> dict[int, Path]:
    """Return iteration -> its folder in `videos/`, from the first to the last; empty without any.

    Raises:
        UserError: `videos/` cannot be read.
    """
    found = {}
    for folder in entries(videos):
        name = re.fullmatch(r"training-(\d{6,9})", folder.name)
        if name is not None:
            found[int(name[1])] = folder
    return dict(sorted(found.items()))
