"""Show a few samples of some training iterations, with prompt, rewards and advantage.

Rewards are hacked in the training samples first, and before any number says so. So the run folder,
its page and the trackers show what the policy is pushed towards and what away from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image
from torch import Tensor

from sage_fast.callbacks.interface import Callback, Rollouts
from sage_fast.callbacks.once import NotesOnce
from sage_fast.eval.sheets import frame_strip, sheet_of
from sage_fast.eval.training_samples import (
    Sample,
    choose,
    folder_name,
    groups_shown,
    shown_iterations,
    video_set,
)
from sage_fast.eval.video_folder import write_folder
from sage_fast.run_folder import RunFolder
from sage_fast.util.errors import UserError, reason
from sage_fast.util.files import take_away
from sage_fast.util.ranks import all_gather_object, rank
from sage_fast.util.videos import numbered, save_video

if TYPE_CHECKING:
    from sage_fast.run.train import Run

MOST_KEPT = 20
"""Iterations whose videos stay in the run folder: the latest."""


class TrainingVideos(Callback):
    """Writes videos of some iterations' samples, and shows them on the page and in the trackers.

    Of each of the first groups, the samples with the highest and the lowest advantage are shown.
    Each rank writes the videos it has. A video that cannot be written is a note, said once.

    Args:
        count: samples to show; 0 shows none.
        interval: iterations from one that is shown to the next.
    """

    def __init__(self, *, count: int, interval: int) -> None:
        self.count = count
        self.interval = interval
        self._notes = NotesOnce()

    def _shows(self, iteration: int) -> bool:
        """Whether an iteration, counted from 1, is shown."""
        return self.count > 0 and iteration % self.interval == 0

    def on_run_start(self, run: Run) -> None:
        """Remove what was shown beyond the iteration that is resumed from: it is made again."""
        if not run.is_main:
            return
        for iteration, folder in shown_iterations(RunFolder(run.folder).videos_folder).items():
            if iteration > run.iteration:
                take_away(folder)

    def videos_wanted(self, run: Run, rollouts: Sequence[tuple[int, int]]) -> Sequence[int]:
        if not self._shows(run.iteration + 1):
            return ()
        groups = groups_shown(self.count)
        return [index for index, (group, _) in enumerate(rollouts) if group < groups]

    def on_rollout_end(self, run: Run, rollouts: Rollouts) -> None:
        iteration = rollouts.iteration + 1
        if not self._shows(iteration):
            return

        ranks = all_gather_object(samples_of(rollouts))
        samples = [sample for of_rank in ranks for sample in of_rank]
        chosen = choose(samples, self.count)

        folder = RunFolder(run.folder).videos(folder_name(iteration))
        strips: dict[int, np.ndarray] = {}
        for number, sample in enumerate(chosen):
            if sample.rank == rank():
                video = rollouts.videos[sample.index]
                self._save(video, sample.prompt, folder, number, rollouts.fps)
                strips[number] = np.asarray(frame_strip(video))

        # The first rank goes on when all ranks have written their files.
        gathered = all_gather_object(strips)
        if run.is_main and chosen:
            every_strip = {number: strip for part in gathered for number, strip in part.items()}
            self._show(run, iteration, chosen, folder, every_strip)

    def _save(self, video: Tensor, prompt: str, folder: Path, number: int, fps: float) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            save_video(video, prompt, folder, number, fps)
        except OSError as error:  # a video is only shown
            self._notes.say("no training video", reason(error))

    def _show(
        self,
        run: Run,
        iteration: int,
        chosen: Sequence[Sample],
        folder: Path,
        strips: Mapping[int, np.ndarray],
    ) -> None:
        """Write the table of an iteration's videos, remove the oldest ones, and tell the trackers.

        Args:
            strips: number of a chosen sample -> frames of its video side by side.
        """
        try:
            files = numbered(folder)
            written = sorted(number for number in files if number < len(chosen))
            videos = video_set(
                [chosen[number] for number in written], [files[number] for number in written]
            )
            if written:
                write_folder(videos, folder)
            kept = shown_iterations(folder.parent)
            for old in list(kept.values())[:-MOST_KEPT]:
                take_away(old)
        except (OSError, UserError) as error:
            self._notes.say("no training video", reason(error))
            return

        if run.writer is not None:
            run.writer.show_sheet(
                "training",
                [files[number] for number in written],
                lambda: sheet_of_samples(chosen, strips),
                [caption(chosen[number]) for number in written],
                iteration,
            )


def samples_of(rollouts: Rollouts) -> list[Sample]:
    """Return those of this rank's samples whose videos it has."""
    return [
        Sample(
            rank=rank(),
            index=index,
            group=rollouts.groups[index],
            seed=rollouts.seeds[index],
            prompt=rollouts.prompts[index],
            reward=float(rollouts.rewards[index]),
            advantage=float(rollouts.advantages[index]),
            parts={part: float(values[index]) for part, values in rollouts.parts.items()},
        )
        for index in sorted(rollouts.videos)
    ]


def caption(sample: Sample) -> str:
    """Return a line for a contact sheet."""
    return f"advantage {sample.advantage:+.2f}, reward {sample.reward:.3g}: {sample.prompt}"


def sheet_of_samples(chosen: Sequence[Sample], strips: Mapping[int, np.ndarray]) -> Image.Image:
    """Lay out the frames of the chosen samples, one row each."""
    pictures = [Image.fromarray(strips[number]) for number in range(len(chosen))]
    return sheet_of(pictures, [caption(sample) for sample in chosen])
