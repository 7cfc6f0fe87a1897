"""Score candidates on the same prompts and seeds: models, sampled with the ODE, and folders of
videos."""

from __future__ import annotations

import dataclasses
import gc
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from sage_fast.config.schema import AttentionBackend, Config, ModelConfig
from sage_fast.data.prompt_checks import check_task
from sage_fast.data.prompts import configured_prompts, metadata_of
from sage_fast.eval.candidate import Candidate
from sage_fast.eval.evaluation import Chunk, Chunks, evaluate, rewards_of, score_videos
from sage_fast.eval.playback import Clip, read_clip
from sage_fast.eval.video_folder import read_folder, write_folder
from sage_fast.eval.videoset import VideoSet, from_evaluation
from sage_fast.loading import Setup, load_setup, resolve
from sage_fast.models.find import find_spec
from sage_fast.rewards import Judge, load_rewards
from sage_fast.rewards.comparing import check_comparing
from sage_fast.rewards.interface import Scorer
from sage_fast.util.captions import PromptKey
from sage_fast.util.errors import UserError
from sage_fast.util.files import VIDEOS, check_new_folder, writing
from sage_fast.util.process_group import initialize
from sage_fast.util.ranks import local_device, rank
from sage_fast.util.text import counted
from sage_fast.util.videos import check_encoder, numbered, save_video

log = logging.getLogger(__name__)


def evaluate_candidates(
    candidates: Sequence[Candidate], config: Config, scorers: Mapping[str, str], folder: Path | None
) -> tuple[list[VideoSet], tuple[str, ...]]:
    """Evaluate the candidates. Collective.

    Args:
        config: samples and scores all candidates; only the `model` section of each candidate's own
            settings is used.
        scorers: label -> an additional reward, named as in `reward.name`; its parts, which do not
            count in the composite, are called `<label>/<part>`.
        folder: where to write `videos/<label>/`; new or empty.

    Returns:
        The videos of each with their scores, and the prefixes of the scores that nothing trains on.

    Raises:
        UserError: a scorer, the folder or a video is wrong, or a folder of videos has none of the
            prompts.
    """
    if folder is not None:
        check_new_folder(folder)
        check_encoder()
    initialize(config.timeout_minutes)
    evaluator = _Evaluator(candidates, config, scorers)
    sets = []
    for candidate, home in zip(candidates, _folders(candidates, folder)):
        if home is not None:
            home.mkdir(parents=True, exist_ok=True)
        with writing(home or "."):
            sets.append(evaluator(candidate, home))
            if home is not None and rank() == 0:
                write_folder(sets[-1], home)
    return sets, tuple(prefix for prefix in evaluator.rewards if prefix)


def _folders(candidates: Sequence[Candidate], folder: Path | None) -> list[Path | None]:
    """Return a video folder for each candidate, named after it."""
    names: list[str] = []
    for candidate in candidates:
        plain = re.sub(r"[^\w.-]+", "-", candidate.label).strip(".-")
        # file systems limit bytes, not letters
        name = plain.encode()[:80].decode(errors="ignore") or "source"
        if name in names:
            name = f"{name}-{len(names)}"
        names.append(name)
    if folder is None:
        return [None for _ in names]
    return [folder / "videos" / name for name in names]


class _Evaluator:
    """Loads the rewards once and the models one at a time."""

    def __init__(
        self, candidates: Sequence[Candidate], config: Config, scorers: Mapping[str, str]
    ) -> None:
        self.config = config
        self.setup: Setup | None = None
        self.folders = {
            c.label: read_folder(c.label, Path(c.path)) for c in candidates if c.config is None
        }
        train, heldout = configured_prompts(config.data)
        paths = dict.fromkeys(c.config.model.path for c in candidates if c.config is not None)
        for path in paths:
            check_task(heldout, find_spec(path, fetch=True))
        in_folders = [prompt for found in self.folders.values() for prompt in found.prompts]
        if paths:
            self.prompts = {str(prompt.key) for prompt in heldout[: config.eval.num_prompts]}
        else:
            self.prompts = set(in_folders)
        if paths and self.folders:
            log.info(
                "note: videos in folders are compressed, those of other sources are not, which "
                "changes scores"
            )
        for found in self.folders.values():
            self._check_prompts(found)
        metadata: dict[PromptKey, Mapping[str, object]] = {}
        for found in self.folders.values():
            for prompt, path in found.images.items():
                metadata[PromptKey.parse(prompt)] = {"image": path}
        metadata |= metadata_of([*train, *heldout])
        device = str(local_device())
        if paths:
            known = [prompt.key for prompt in heldout]
        else:
            known = [PromptKey.parse(prompt) for prompt in in_folders]
        further: dict[str, Scorer] = {}
        for label, name in scorers.items():
            scorer = Judge(name, config.reward, device, "--scorer", metadata)
            scorer.check(config.sampling, known, device)
            further[f"{label}/"] = scorer
        reward, judge = load_rewards(config, known, known, metadata)
        if paths:
            check_comparing(config, reward.comparing)
        self.rewards = rewards_of(reward, judge) | further

    def _check_prompts(self, found: VideoSet) -> None:
        missing = sorted(self.prompts - {*found.prompts})
        if len(missing) == len(self.prompts):
            raise UserError(
                f"{found.label}: none of its prompts, such as {found.prompts[0]!r}, is evaluated; "
                f"data.eval_prompts = FILE with the prompts of {VIDEOS} makes them pairs"
            )
        if missing:
            log.info(
                f"note: {found.label} has no video of {len(missing)} of the prompts, such as "
                f"{missing[0]!r}"
            )

    def __call__(self, candidate: Candidate, home: Path | None) -> VideoSet:
        """Evaluate one candidate; return its videos with their scores."""
        if candidate.config is None:
            return self._score_folder(self.folders[candidate.label])
        setup = self._load(candidate.config.model)
        self.setup = setup
        log.info(f"evaluate {candidate.label}")

        def save(number: int, prompt: str, video: Tensor) -> None:
            if home is not None:
                save_video(video, prompt, home, number, setup.model.spec.fps)

        result, _ = evaluate(setup, iteration=candidate.iteration, save=save, rewards=self.rewards)
        files = {} if home is None else numbered(home)
        return from_evaluation(candidate.label, result, files)

    def _load(self, model: ModelConfig) -> Setup:
        """Load a model, after the current one has been freed, and embed the prompts, unless they
        are known."""
        attention, embeddings = None, None
        if self.setup is not None:
            attention = cast(AttentionBackend, self.setup.model.attention)  # measured once
            last = self.setup.config.model
            if (last.path, last.dtype) == (model.path, model.dtype):
                embeddings = self.setup.embeddings
            self.setup = None
            gc.collect()
            torch.cuda.empty_cache()
        model = dataclasses.replace(model, sequence_parallel=self.config.model.sequence_parallel)
        setup = load_setup(
            resolve(dataclasses.replace(self.config, model=model)),
            attention=attention,
            rewards=False,
        )
        for note in setup.model.notes:
            log.info(f"note: {note}")
        if embeddings is None:
            setup.encode()
        else:
            setup.embeddings = embeddings
        return setup

    def _score_folder(self, found: VideoSet) -> VideoSet:
        """Score a folder's videos of the evaluated prompts."""
        chosen = [i for i, prompt in enumerate(found.prompts) if prompt in self.prompts]
        if len(chosen) < len(found.prompts):
            others = counted(len(found.prompts) - len(chosen), "video")
            log.info(f"note: {found.label}: without {others} of other prompts")
        found = found.only(chosen)
        log.info(f"score {found.label}")
        seeds = found.seeds or [index for _, index in found.keys]

        files = list(found.shown.values())

        def read(share: range) -> Chunks:
            return _batches(files[share.start : share.stop], self.config.sampling.batch_size)

        keys = [PromptKey.parse(prompt) for prompt in found.prompts]
        result, _ = score_videos(self.rewards, keys, seeds, read)
        scores = from_evaluation("", result, {}).scores
        return dataclasses.replace(found, scores=scores, evaluation=result)


def _batches(files: Sequence[Path], size: int) -> Chunks:
    """Yield videos of one shape and rate, at most `size` at a time, with their indices in
    `files`."""
    indices: list[int] = []
    batch: list[Clip] = []

    def chunk() -> Chunk:
        videos = torch.stack([clip.frames for clip in batch])
        return Chunk(list(indices), videos.to(local_device()), batch[0].fps)

    for index, file in enumerate(files):
        clip = read_clip(file)
        fits = not batch or (clip.frames.shape, clip.fps) == (batch[0].frames.shape, batch[0].fps)
        if not fits:
            yield chunk()
            indices, batch = [], []
        indices.append(index)
        batch.append(clip)
        if len(batch) == size:
            yield chunk()
            indices, batch = [], []
    if batch:
        yield chunk()
