"""A set of scored videos of one source, such as an evaluation of a run."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sage_fast.eval.scores import as_float, columns_of, composite

VideoKey = tuple[str, int]
"""(prompt, index among the prompt's videos); videos of two sets with the same key are a pair."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class VideoSet:
    """N videos of one source.

    Attributes:
        label: label of the source in tables and pages.
        prompts: one per video.
        seeds: one per video; None if unknown.
        scores: name -> N numbers, NaN if missing; `reward`, the composite, comes first.
        files: one per video; None where the file was not kept.
        images: prompt -> path of its image, where it has one that is known.
        evaluation: the evaluation that gave the scores, as in `eval/*.json`; empty if a file did.
    """

    label: str
    prompts: list[str]
    files: list[Path | None]
    seeds: list[int] | None = None
    scores: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    images: dict[str, str] = dataclasses.field(default_factory=dict)
    evaluation: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def iteration(self) -> int:
        """Iterations the policy was trained for, where that is known."""
        return self.evaluation.get("iteration", 0)

    @functools.cached_property
    def keys(self) -> list[VideoKey]:
        seen: dict[str, int] = {}
        keys = []
        for prompt in self.prompts:
            keys.append((prompt, seen.setdefault(prompt, 0)))
            seen[prompt] += 1
        return keys

    @functools.cached_property
    def shown(self) -> dict[VideoKey, Path]:
        """The videos whose files exist."""
        return {key: file for key, file in zip(self.keys, self.files) if file is not None}

    def by_key(self, name: str) -> dict[VideoKey, float]:
        """Return the finite values of a score by key."""
        return {
            k: value
            for k, value in zip(self.keys, self.scores.get(name, ()))
            if math.isfinite(value)
        }

    def only(self, indices: Sequence[int]) -> VideoSet:
        """Return some of the videos."""
        return dataclasses.replace(
            self,
            prompts=[self.prompts[i] for i in indices],
            files=[self.files[i] for i in indices],
            seeds=self.seeds and [self.seeds[i] for i in indices],
            scores={name: [values[i] for i in indices] for name, values in self.scores.items()},
        )


def from_evaluation(
    label: str,
    scores: Mapping[str, Any],
    files: Mapping[int, Path],
    weights: Mapping[str, float] | None = None,
) -> VideoSet:
    """Build a set from an evaluation (`eval/*.json`) and its files by number.

    Args:
        weights: of the composite; None takes the composite as it was logged.
    """
    columns = {**columns_of(scores), "reward": composite(scores, weights or {})}
    return VideoSet(
        label=label,
        prompts=list(scores["prompts"]),
        seeds=list(scores["seeds"]),
        scores={name: [as_float(value) for value in values] for name, values in columns.items()},
        files=[files.get(number) for number in range(len(scores["prompts"]))],
        images=dict(scores.get("images", {})),
        evaluation=scores,
    )
