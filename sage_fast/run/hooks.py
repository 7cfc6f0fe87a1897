"""What a trainer calls in a run: signals, and the user's callbacks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from sage_fast.algorithm.iteration_plan import Sample
from sage_fast.callbacks.interface import Rollouts
from sage_fast.rewards.interface import Scores
from sage_fast.rollout.batch import Batch
from sage_fast.trainer import TrainerHooks

if TYPE_CHECKING:
    from sage_fast.run.train import Run


class RunHooks(TrainerHooks):
    """Connects a trainer with the signals and the callbacks of its run."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def pause(self) -> None:
        run = self._run
        # other ranks wait for this rank's next forward
        if not run.setup.model.policy.collective_forwards:
            run.signals.pause()

    def videos_wanted(self, samples: Sequence[Sample]) -> Collection[int]:
        run = self._run
        rollouts = [(sample.group, sample.index) for sample in samples]
        return run.callbacks.videos_wanted(run, rollouts)

    def after_rollout(self, iteration: int, batch: Batch, scores: Scores) -> None:
        run = self._run
        local = list(batch.numbers)  # `scores` are of all ranks
        rollouts = Rollouts(
            iteration=iteration,
            prompts=[sample.prompt.text for sample in batch.samples],
            seeds=[sample.seed for sample in batch.samples],
            groups=[sample.group for sample in batch.samples],
            rewards=scores.rewards[local].cpu(),
            parts={name: values[local].cpu() for name, values in scores.parts.items()},
            # a copy also on the CPU: a callback that works in place changes no update
            advantages=batch.advantages.detach().to("cpu", copy=True),
            videos=batch.videos,
            fps=run.setup.model.spec.fps,
        )
        run.callbacks.call("on_rollout_end", run, rollouts)
        batch.videos = {}  # they are large, and nothing else needs them

    def before_update(self, number: int) -> None:
        run = self._run
        run.signals.before_update(run.trainer.device)
        run.callbacks.call("on_update_start", run, number)

    def after_update(self, number: int) -> None:
        self._run.callbacks.call("on_update_end", self._run, number)
