"""What a run says on the screen: its iterations, and warnings that they give rise to."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from sage_fast.callbacks.interface import Callback
from sage_fast.config.schema import TrainConfig
from sage_fast.eval.gains import hacking_in_run
from sage_fast.eval.scores import format_number
from sage_fast.run_folder import RunFolder
from sage_fast.util.console import wrapped
from sage_fast.util.meters import REWARD_PART
from sage_fast.util.text import counted

if TYPE_CHECKING:
    from sage_fast.run.train import Run

log = logging.getLogger(__name__)


class Notes(Callback):
    """Says how each iteration went and how long the rest takes; warns of what a signal would lose,
    once, and of reward hacking, after each evaluation."""

    def __init__(self) -> None:
        self._began: float | None = None  # time of the first iteration of this process
        self._first = 0  # its index

    def on_iteration_start(self, run: Run, iteration: int) -> None:
        if self._began is None:
            self._began = time.monotonic()
            self._first = iteration

    def on_iteration_end(self, run: Run, row: dict[str, Any]) -> None:
        assert self._began is not None
        planned = run.config.train.iterations
        done_here = run.iteration - self._first
        seconds_each = (time.monotonic() - self._began) / done_here
        seconds_left = seconds_each * (planned - run.iteration)
        log.info(format_row(row, planned, seconds_left))
        if done_here == 1:
            collective = run.trainer.policy.collective_forwards
            warning = grace_warning(row, run.config.train, collective=collective)
            if warning is not None:
                log.warning(wrapped(f"warning: {warning}"))

    def on_evaluation_end(self, run: Run, name: str, scores: Mapping[str, Any]) -> None:
        if not run.is_main:
            return
        evaluations = RunFolder(run.folder).video_sets().values()
        until_now = [videos for videos in evaluations if videos.iteration <= scores["iteration"]]
        hacking = hacking_in_run(until_now)
        if hacking is not None:
            log.warning(wrapped(f"warning: {hacking}"))


def format_row(row: dict[str, Any], iterations: int, seconds_left: float) -> str:
    """Format an iteration's metrics and the time left as three lines of 80 columns, for up to four
    reward parts."""
    parts = []
    for key, value in row.items():
        if key.startswith(REWARD_PART):
            parts.append(f"{key.removeprefix(REWARD_PART)} {value:.3f}")

    label = f"{row['iteration'] + 1:>5}/{iterations}"
    first = f"{label}  reward {row['reward/mean']:.4f}  std {format_number(row['reward/std'], 3)}  "
    first += " ".join(parts)
    if "ratio/mean" in row:
        off = max(1 - row["ratio/min"], row["ratio/max"] - 1)
        second = f"loss {row['loss']:.1e}  kl {row['kl/anchor']:.1e}  ratio within {off:.1e} of 1, "
        second += f"{100 * row['ratio/clip_fraction']:.0f} % clipped"
        third = f"gradient norm {row['grad_norm']:.1e}  learning rate {row['learning_rate']:.1e}  "
    else:
        second = "no update: the rewards of every group are equal"
        third = ""
    third += f"{row['time/total']:.1f} s, {tqdm.format_interval(seconds_left)} left"
    return f"\n{'':>{len(label)}}  ".join((first, second, third))


def grace_warning(row: dict[str, Any], train: TrainConfig, *, collective: bool) -> str | None:
    """Return what a signal loses, and the settings that save it; None if `train.grace_seconds`
    saves every iteration.

    Args:
        row: metrics of an iteration, with its times.
        collective: forwards are collective, so that a rollout cannot pause; an update never can.
    """
    update = row["time/train"] / train.optimizer_steps
    before = row["time/total"] - row["time/train"]
    seconds = max(update, before) if collective else update
    if seconds <= train.grace_seconds / 2:
        return None
    enough = 10 * math.ceil(seconds / 4)  # a quarter more than twice as long
    return (
        f"a signal can lose up to {counted(train.checkpoint_interval, 'iteration')}: "
        f"{seconds:.0f} s of one "
        f"cannot be interrupted and half of train.grace_seconds = {train.grace_seconds:g} is for "
        f"that. {enough} is enough, if the scheduler waits longer: Slurm's "
        f"--signal=B:USR1@{enough + 100} (slurm.sbatch, which `init` writes), or torchrun's "
        "--shutdown-timeout"
    )
