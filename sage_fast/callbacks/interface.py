"""The interface of callbacks: what a run calls beside the algorithm, and what it hands over.

Imports nothing heavy, so that `import sage_fast` stays light.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from sage_fast.run.train import Run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rollouts:
    """This rank's N samples of an iteration, scored, before the first update.

    Attributes:
        iteration: index of the iteration, from 0.
        prompts: prompt of each sample.
        seeds: seed of each sample's noise.
        groups: index of each sample's group in the iteration; a group has one prompt.
        rewards: composite reward, `[N]` on the CPU; NaN where a reward failed.
        parts: part of the reward -> its values, `[N]` on the CPU.
        advantages: float32 `[N]` on the CPU.
        videos: index of a sample -> its video, uint8 `[F, 3, H, W]` on the CPU, for the samples
            that a callback has asked for with `videos_wanted`.
        fps: frames per second of the videos.
    """

    iteration: int
    prompts: Sequence[str]
    seeds: Sequence[int]
    groups: Sequence[int]
    rewards: Tensor
    parts: Mapping[str, Tensor]
    advantages: Tensor
    videos: Mapping[int, Tensor]
    fps: float


class Callback:
    """Hooks of a run. Each does nothing; override those you need.

    Every hook is called on every rank, at the same point, in the order of the callbacks: first
    those of the setting `callbacks`, then those given to `train`, then the run's own, which write
    metrics, evaluations and checkpoints. A hook may therefore make collective calls, except
    `on_exception`. Files are written by rank 0: ask `run.is_main`.

    An error in a hook ends the run, names the callback, and leaves a checkpoint.
    """

    @property
    def name(self) -> str:
        """Name of its state in a checkpoint, and in messages: by default that of the class."""
        return vars(self).get("name", type(self).__name__)

    @name.setter
    def name(self, value: str) -> None:
        vars(self)["name"] = value

    # -- a run -------------------------------------------------------------------------------------

    def on_run_start(self, run: Run) -> None:
        """Called once the model is loaded and a resumed run's state restored."""

    def on_run_end(self, run: Run) -> None:
        """Called after the last iteration, its checkpoint, the final weights and evaluation."""

    def on_exception(self, run: Run, error: BaseException) -> None:
        """Called when an error or a signal ends the run, after its checkpoint, on each rank alone.

        Other ranks may have ended already: make no collective call.
        """

    # -- an iteration ------------------------------------------------------------------------------

    def on_iteration_start(self, run: Run, iteration: int) -> None:
        """Called before the rollouts of the iteration with this index, from 0."""

    def videos_wanted(self, run: Run, rollouts: Sequence[tuple[int, int]]) -> Sequence[int]:
        """Return the indices of this rank's samples whose videos `on_rollout_end` needs.

        They are kept on the host as uint8 until then: F x 3 x H x W bytes each.

        Args:
            rollouts: (group, number within the group) of each of this rank's samples.
        """
        return ()

    def on_rollout_end(self, run: Run, rollouts: Rollouts) -> None:
        """Called after the rollouts and their rewards, before the first update."""

    def on_update_start(self, run: Run, update: int) -> None:
        """Called before the optimizer step with this index in the iteration, from 0."""

    def on_update_end(self, run: Run, update: int) -> None:
        """Called after an optimizer step."""

    def on_iteration_end(self, run: Run, row: dict[str, Any]) -> None:
        """Called after an iteration; `run.iteration` counts it already.

        Args:
            row: its metrics by name, equal on all ranks. Columns that a callback adds reach
                `metrics.jsonl` and the trackers: numbers, lists of numbers or a `Histogram`.
        """

    # -- evaluations and checkpoints ---------------------------------------------------------------

    def on_evaluation_start(self, run: Run, name: str) -> None:
        """Called before an evaluation: `before`, `iteration-000010` or `after`."""

    def on_evaluation_end(self, run: Run, name: str, scores: Mapping[str, Any]) -> None:
        """Called after an evaluation, whose scores are in the run folder.

        Args:
            scores: as in `eval/<name>.json`, equal on all ranks.
        """

    def on_checkpoint(self, run: Run, folder: Path) -> None:
        """Called after a checkpoint, which `folder` holds whole."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a resume needs, as plain JSON. Rank 0's is saved, in every checkpoint."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned. Called on all ranks, before `on_run_start`."""


@dataclasses.dataclass(frozen=True)
class Histogram:
    """A column of a row that trackers draw as a histogram.

    Attributes:
        values: the numbers, of any shape.
    """

    values: Any
