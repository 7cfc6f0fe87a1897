"""Score candidates on the same prompts and seeds: models, sampled with the ODE, and folders of videos."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from sage_fast.algorithm.resolved import Resolved
from sage_fast.config.schema import AttentionBackend, Config
from sage_fast.data.prompt_checks import check_task
from sage_fast.data.prompts import configured_prompts, metadata_of
from sage_fast.eval.candidate import Candidate
from sage_fast.eval.evaluation import Chunks, evaluate, prompts_and_seeds, rewards_of, score_videos
from sage_fast.eval.playback import read_video
from sage_fast.eval.video_folder import read_folder, scorers_of, write_folder
from sage_fast.eval.videoset import VideoSet, from_evaluation
from sage_fast.loading import load_setup, resolve
from sage_fast.models.load import find_spec, load_model
from sage_fast.rewards import Judge, load_rewards
from sage_fast.rewards.interface import Scorer
from sage_fast.rollout.recorder import step_graphs
from sage_fast.util.errors import UserError
from sage_fast.util.files import VIDEOS, writing
from sage_fast.util.metrics import JUDGE_PART
from sage_fast.util.ranks import initialize, local_device, rank
from sage_fast.util.videos import numbered, save_video

log = logging.getLogger(__name__)


def evaluate_candidates(
    candidates: Sequence[Candidate], config: Config, scorers: Sequence[str], folder: Path | None
) -> tuple[list[VideoSet], list[dict[str, Any]], tuple[str, ...]]:
    """Evaluate the candidates. Collective.

    Args:
        config: samples and scores all candidates; only the `model` section of each candidate's own settings is used.
        scorers: additional rewards, named as in `reward.name`; their parts do not count in the composite.
        folder: where to write `videos/<label>/`; new or empty.

    Returns:
        The videos of each, their scores as in `eval/*.json`, and the prefixes of the scores that nothing trains on.

    Raises:
        UserError: a scorer, the folder or a video is wrong, or a folder of videos has none of the prompts.
    """
    if folder is not None and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"--folder {str(folder)!r}: expected a new or an empty folder; nothing was changed")
    initialize(config.timeout_minutes)
    evaluator = _Evaluator(candidates, config, scorers)
    watching = dict(zip((JUDGE_PART, *evaluator.scorers), (config.eval.judge, *scorers)))
    sets: list[VideoSet] = []
    evaluations = []
    for candidate, home in zip(candidates, _folders(candidates, folder)):
        if home is not None:
            home.mkdir(parents=True, exist_ok=True)
        with writing(home or "."):
            scores, videos = evaluator(candidate, home)
            evaluations.append(scores)
            by = scorers_of(dataclasses.asdict(config.reward), watching, scores)
            sets.append(dataclasses.replace(videos, scorers=by))
            if home is not None and rank() == 0:
                write_folder(sets[-1], home)
    return sets, evaluations, tuple(watching)


def short_names(names: Sequence[str]) -> list[str]:
    """Return what each scorer is called in tables: `clipscore`, or `Class` for `module:Class`.

    A name whose short form is ambiguous is kept in full.

    Raises:
        UserError: a name is empty, or given twice.
    """
    ends = [name.rstrip("/").rpartition("//" if "//" in name else ":")[2] for name in names]
    taken = [JUDGE_PART.rstrip("/"), *ends]
    for name in names:
        if not name.strip():
            raise UserError(f"--scorer {name!r}: expected the name of a reward, such as testbed-judge")
        if names.count(name) > 1:
            raise UserError(f"--scorer = {name!r}: given more than once")
    return [name if taken.count(end) > 1 else end for name, end in zip(names, ends)]


def _folders(candidates: Sequence[Candidate], folder: Path | None) -> list[Path | None]:
    """Return a video folder for each candidate, named after it."""
    names: list[str] = []
    for candidate in candidates:
        name = re.sub(r"[^\w.-]+", "-", candidate.label).strip(".-")[:80] or "source"
        names.append(name if name not in names else f"{name}-{len(names)}")
    return [None if folder is None else folder / "videos" / name for name in names]


class _Evaluator:
    """Loads the rewards once and the models one at a time."""

    def __init__(self, candidates: Sequence[Candidate], config: Config, scorers: Sequence[str]) -> None:
        self.config, self.models = config, [c for c in candidates if c.config is not None]
        self.videos = {c.label: read_folder(c.label, Path(c.path)) for c in candidates if c.config is None}
        train, heldout = configured_prompts(config.data)
        for path in dict.fromkeys(c.config.model.path for c in self.models if c.config is not None):
            check_task(heldout, find_spec(path, fetch=True))
        known = [prompt for found in self.videos.values() for prompt in found.prompts]
        known = [prompt.key for prompt in heldout] if self.models else known
        images = {key: {"image": path} for found in self.videos.values() for key, path in found.images.items()}
        metadata = images | metadata_of([*train, *heldout])
        self.scorers: dict[str, Scorer] = {}
        device = str(local_device())
        for name, short in zip(scorers, short_names(scorers)):
            self.scorers[f"{short}/"] = scorer = Judge(name, config.reward, device, "--scorer", metadata)
            scorer.check(config.sampling, known, device)
        if not self.models:
            reward, judge = load_rewards(config.reward, config.eval.judge, config.sampling, known, known, metadata)
            self.rewards = rewards_of(reward, judge, self.scorers)
            return
        self.loaded = first = self.models[0]
        assert first.config is not None
        self.setup = load_setup(resolve(dataclasses.replace(config, model=first.config.model)))
        self.rewards = rewards_of(self.setup.reward, self.setup.judge, self.scorers)
        self._log_notes()
        self.prompts = set(prompts_and_seeds(self.setup)[0])
        for label, found in self.videos.items():
            missing = sorted(self.prompts - {*found.prompts})
            if len(missing) == len(self.prompts):
                raise UserError(
                    f"{label}: none of its prompts, such as {found.prompts[0]!r}, is among those evaluated, such as "
                    f"{missing[0]!r}; data.eval_prompts = FILE with the prompts of {VIDEOS} makes them pairs"
                )
            if missing:
                log.info(f"note: {label} has no video of {len(missing)} of the prompts, such as {missing[0]!r}")
        self.setup.encode()

    def __call__(self, candidate: Candidate, home: Path | None) -> tuple[dict[str, Any], VideoSet]:
        """Evaluate one candidate; return its scores as in `eval/*.json`, and its videos."""
        if candidate.config is None:
            return self._score_folder(candidate)
        if self.loaded is not candidate:
            self._load(candidate)
        log.info(f"evaluate {candidate.label}")

        def save(number: int, prompt: str, video: Tensor) -> None:
            if home is not None:
                save_video(video, prompt, home, number, self.setup.model.spec.fps)

        result, _ = evaluate(self.setup, iteration=candidate.iteration, save=save, rewards=self.rewards)
        return result, from_evaluation(candidate.label, result, numbered(home) if home is not None else {})

    def _load(self, candidate: Candidate) -> None:
        """Free the current model, then load that of `candidate`."""
        assert candidate.config is not None
        setup, config = self.setup, self.setup.config
        settings = dataclasses.replace(
            candidate.config.model,
            attention=cast(AttentionBackend, setup.model.attention),  # measured once
            sequence_parallel=self.config.model.sequence_parallel,
        )
        before = setup.model.spec.path, setup.model.policy.dtype
        room = 0.0 if setup.graphs is None else setup.graphs.max_memory
        del setup.model, setup.graphs
        gc.collect()
        torch.cuda.empty_cache()
        setup.model = load_model(settings, config.sampling, local_device(), config.seed, needs_agreement=False)
        setup.resolved = Resolved(dataclasses.replace(config, model=settings))
        setup.graphs = step_graphs(setup.model.policy, setup.model.spec.cost(setup.config), room)
        if (setup.model.spec.path, setup.model.policy.dtype) != before:
            setup.encode()
        self._log_notes()
        self.loaded = candidate

    def _log_notes(self) -> None:
        for note in self.setup.model.notes:
            log.info(f"note: {note}")

    def _score_folder(self, candidate: Candidate) -> tuple[dict[str, Any], VideoSet]:
        """Score a folder's videos: those of the evaluated prompts, or all of them if no candidate has a model."""
        found = self.videos[candidate.label]
        chosen = [i for i, prompt in enumerate(found.prompts) if not self.models or prompt in self.prompts]
        if len(chosen) < len(found.prompts):
            log.info(f"note: {found.label}: {len(found.prompts) - len(chosen)} videos of other prompts do not count")
        found = found.only(chosen)
        log.info(f"score {found.label}")
        seeds = found.seeds or [index for _, index in found.keys]

        def read(share: range) -> Chunks:
            return _batches([*found.shown.values()][share.start : share.stop], self.config.sampling.batch_size)

        result, _ = score_videos(self.rewards, found.prompts, seeds, read)
        return result, dataclasses.replace(found, scores=from_evaluation("", result, {}).scores)


def _batches(files: Sequence[Path], size: int) -> Chunks:
    """Yield videos of one shape, at most `size` at a time, with their indices in `files`."""
    videos = ((i, read_video(file)) for i, file in enumerate(files))
    for _, alike in itertools.groupby(videos, key=lambda video: video[1].shape):
        while batch := dict(itertools.islice(alike, size)):
            yield [*batch], torch.stack([*batch.values()]).to(local_device())
