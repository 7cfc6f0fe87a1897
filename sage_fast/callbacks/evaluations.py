"""The evaluations of a run: before, during and after training."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sage_fast.callbacks.interface import Callback
from sage_fast.callbacks.once import NotesOnce
from sage_fast.eval.evaluation import evaluate, negatives_for, prompts_and_seeds
from sage_fast.loading import Setup
from sage_fast.models.policy import State
from sage_fast.run_folder import RunFolder
from sage_fast.util.errors import UserError, reason
from sage_fast.util.files import discard
from sage_fast.util.ranks import barrier, broadcast_object, rank
from sage_fast.util.videos import numbered, save_video

if TYPE_CHECKING:
    from sage_fast.run.train import Run

log = logging.getLogger(__name__)


class Evaluations(Callback):
    """Evaluates the policy before training and every `eval.interval` iterations; an evaluation that
    was interrupted is repeated first. The run itself evaluates its final weights."""

    def __init__(self) -> None:
        self._notes = NotesOnce()

    def on_run_start(self, run: Run) -> None:
        if read_evaluation(run.folder, "before") is None:
            self.evaluate(run, "before", run.start_weights)
        name = f"iteration-{run.iteration:06d}"
        if _is_due(run) and read_evaluation(run.folder, name) is None:
            self.evaluate(run, name)

    def on_iteration_end(self, run: Run, row: dict[str, Any]) -> None:
        if _is_due(run):
            self.evaluate(run, f"iteration-{run.iteration:06d}")

    def evaluate(self, run: Run, name: str, weights: State | None = None) -> None:
        """Evaluate `weights`, by default the averaged ones if any, else the trained ones.

        Scores and videos go into the run folder and the trackers. Collective.
        """
        log.info(f"evaluate ({name})")
        run.callbacks.call("on_evaluation_start", run, name)
        run.claim.check()
        folder = RunFolder(run.folder).videos(name)
        if run.is_main:
            discard(folder)  # left by an interrupted evaluation
        barrier()

        shown = run.config.eval.num_videos
        keep_all = name in ("before", "after")  # the report chooses its videos by the final scores

        def save(number: int, prompt: str, video: torch.Tensor) -> None:
            if not keep_all and number >= shown:
                return
            try:
                folder.mkdir(parents=True, exist_ok=True)
                save_video(video, prompt, folder, number, run.setup.model.spec.fps)
            except OSError as error:  # a video is only shown
                self._notes.say("no video", reason(error))

        trainer = run.trainer
        iteration = 0 if name == "before" else run.iteration
        evaluated = (
            trainer.engine.averaged_weights() if weights is None else trainer.policy.using(weights)
        )
        with evaluated:
            scores, videos = evaluate(
                run.setup, iteration=iteration, save=save, pause=trainer.hooks.pause
            )

        run.claim.check()
        if run.writer is not None:
            RunFolder(run.folder).write_evaluation(name, scores)
            files = [path for number, path in numbered(folder).items() if number < shown]
            run.writer.write_evaluation(scores, files, videos)
        run.callbacks.call("on_evaluation_end", run, name, scores)


def _is_due(run: Run) -> bool:
    """Whether the policy is evaluated at the present iteration; the last one has `after`."""
    interval = run.config.eval.interval
    if interval == 0 or not 0 < run.iteration < run.config.train.iterations:
        return False
    return run.iteration % interval == 0


def read_evaluation(run: Path, name: str) -> dict[str, Any] | None:
    """Read an evaluation on rank 0 and broadcast it; None if it is missing or damaged."""
    scores = None
    if rank() == 0:
        with contextlib.suppress(UserError):
            scores = RunFolder(run).evaluation(name)
    return broadcast_object(scores, 0)


def check_pairs(setup: Setup, run: Path) -> bool:
    """Return whether `run` was evaluated before training.

    Raises:
        UserError: it was, on other prompts, negative prompts or seeds than the current ones.
    """
    before = read_evaluation(run, "before")
    if before is None:
        return False
    keys, seeds = prompts_and_seeds(setup)
    evaluated = (before["prompts"], before.get("negatives", {}), before["seeds"])
    prompts = [str(key) for key in keys]
    if evaluated != (prompts, negatives_for(setup, keys), seeds.tolist()):
        raise UserError(
            f"data.eval_prompts = {setup.config.data.eval_prompts!r} holds other prompts than "
            f"those that the run in {str(run)!r} was evaluated on before training; restore the "
            "file, or begin another run; nothing was changed"
        )
    return True
