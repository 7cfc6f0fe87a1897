"""Score the sources of `sage-fast eval` on the same prompts and seeds, sampled with the ODE."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import json
import logging
import math
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from sage_fast.commands.sources import Source
from sage_fast.config.schema import AttentionBackend, Config, DataConfig, RewardConfig, SamplingConfig
from sage_fast.data.prompts import Prompt, metadata_of
from sage_fast.eval.evaluation import Chunks, evaluate, prompts_and_seeds, score_videos
from sage_fast.eval.tables import format_table
from sage_fast.eval.videoset import (
    VideoSet,
    check_prompts,
    hacked,
    of_scores,
    read_folder,
    scorers_of,
    table,
    write_folder,
)
from sage_fast.loading import Scoring, Setup, check_task, configured_prompts, load_rewards, load_setup
from sage_fast.models.load import find_spec, load_model
from sage_fast.report.gallery import write_gallery
from sage_fast.report.playback import read_video
from sage_fast.rewards import Judge, join_scores
from sage_fast.rewards.interface import Metadata, Scores
from sage_fast.rollout.recorder import step_graphs
from sage_fast.rollout.scoring import log_failures
from sage_fast.run.folder import save_video
from sage_fast.util.errors import UserError, printable
from sage_fast.util.files import VIDEOS, json_value, write_atomic, write_json, writing
from sage_fast.util.metrics import JUDGE_PART
from sage_fast.util.ranks import initialize, local_device, rank
from sage_fast.util.videos import numbered

log = logging.getLogger(__name__)


def run_eval(
    sources: Sequence[Source],
    config: Config,
    *,
    scorers: Sequence[str] = (),
    folder: Path | None = None,
    json: Path | None = None,
) -> None:
    """Evaluate the sources, print their table and write the requested files.

    Args:
        sources: gains are relative to the first.
        config: samples and scores all sources; only the `model` section of each source's own settings is used.
        scorers: additional rewards, named as in `reward.name`; their parts do not count in the composite.
        folder: where to write the videos, `evaluation.md` and `evaluation.html`; new or empty.
        json: file for all scores.

    Raises:
        UserError: a scorer, the folder or a video is wrong, or the sources have no prompt in common.
    """
    if folder is not None and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"--folder {str(folder)!r}: expected a new or an empty folder; nothing was changed")
    initialize(config.timeout_minutes)
    videos = {s.label: read_folder(s.label, Path(s.path)) for s in sources if s.config is None}
    known = [prompt for found in videos.values() for prompt in found.prompts]
    files = configured_prompts(config.data)
    if len(videos) < len(sources):
        known = [prompt.key for prompt in files[1]]
    for path in dict.fromkeys(source.config.model.path for source in sources if source.config is not None):
        check_task(files[1], find_spec(path, fetch=True))
    metadata = _metadata([*files[0], *files[1]], videos.values())
    further = _scorers(scorers, config.reward, config.sampling, known, metadata)
    evaluator = _Evaluator(sources, config, further, videos, metadata)
    watching = {JUDGE_PART: config.eval.judge} | {f"{short}/": name for short, name in zip(further, scorers)}
    evaluations: dict[str, dict[str, Any]] = {}
    sets: list[VideoSet] = []
    for source, home in zip(sources, _folders(sources, folder)):
        if home is not None:
            home.mkdir(parents=True, exist_ok=True)
        with writing(home or "."):
            evaluations[source.label], found = evaluator(source, home)
            by = scorers_of(dataclasses.asdict(config.reward), watching, evaluations[source.label])
            found = dataclasses.replace(found, scorers=by)
            sets.append(found)
            if home is not None and rank() == 0:
                write_folder(found, home)
    if rank() == 0:
        notes = [note for other in sets[1:] for note in check_prompts(sets[0], other)]
        judges = [name for name in dict.fromkeys(n for s in sets for n in s.scores) if _watches(name, further)]
        _finish(sets, evaluations, notes, judges, config.eval.num_videos, folder, json)


def _metadata(prompts: Iterable[Prompt], sets: Iterable[VideoSet]) -> dict[str, Metadata]:
    """Return the metadata of all prompts; of those in no file, the image alone."""
    known = {key: {"image": path} for videos in sets for key, path in videos.images.items()}
    return known | metadata_of(prompts)


def _scorers(
    names: Sequence[str],
    settings: RewardConfig,
    sampling: SamplingConfig,
    prompts: Sequence[str],
    metadata: Mapping[str, Metadata],
) -> dict[str, Judge]:
    """Load and check the additional rewards, keyed by `short_names`."""
    scorers: dict[str, Judge] = {}
    device = str(local_device())
    for name, short in zip(names, short_names(names)):
        scorers[short] = Judge(name, settings, device, "--scorer", metadata)
        scorers[short].check(sampling, prompts, device)
    return scorers


def short_names(names: Sequence[str]) -> list[str]:
    """Return the prefix of each scorer's parts in tables: `clipscore`, or `Class` for `module:Class`.

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


def _watches(score: str, scorers: Mapping[str, Judge]) -> bool:
    """Whether a score is only watched: it comes from the judge or a scorer, and nothing trains on it."""
    return score.startswith((JUDGE_PART, *(f"{name}/" for name in scorers)))


def _folders(sources: Sequence[Source], folder: Path | None) -> list[Path | None]:
    """Return a video folder for each source, named after it."""
    if folder is None:
        return [None] * len(sources)
    names: list[str] = []
    for source in sources:
        name = re.sub(r"[^\w.-]+", "-", source.label).strip(".-")[:80] or "source"
        names.append(name if name not in names else f"{name}-{len(names)}")
    return [folder / "videos" / name for name in names]


def _log_notes(setup: Setup) -> None:
    for note in setup.model.notes:
        log.info(f"note: {note}")


class _Evaluator:
    """Loads the rewards once and the models one at a time."""

    def __init__(
        self,
        sources: Sequence[Source],
        config: Config,
        scorers: Mapping[str, Judge],
        videos: Mapping[str, VideoSet],
        metadata: Mapping[str, Metadata],
    ) -> None:
        self.config, self.scorers, self.videos = config, scorers, videos
        self.several = len(sources) > 1
        self.prompts: list[str] | None = None
        first = next((source for source in sources if source.config is not None), None)
        self.loaded: Source | None = first
        if first is None:
            known = [prompt for found in videos.values() for prompt in found.prompts]
            reward, judge = load_rewards(config.reward, config.eval.judge, config.sampling, known, known, metadata)
            self.scoring = Scoring(config=config, reward=reward, judge=judge)
            return
        assert first.config is not None
        self.scoring = self.setup = load_setup(dataclasses.replace(config, model=first.config.model))
        _log_notes(self.setup)
        self.prompts = prompts_and_seeds(self.setup)[0]
        for label, found in videos.items():
            missing = [prompt for prompt in dict.fromkeys(self.prompts) if prompt not in found.prompts]
            if len(missing) == len(set(self.prompts)):
                raise UserError(
                    f"{label}: none of its prompts, such as {found.prompts[0]!r}, is among those evaluated, such as "
                    f"{missing[0]!r}; data.eval_prompts = FILE with the prompts of {VIDEOS} makes them pairs"
                )
            if missing:
                log.info(f"note: {label} has no video of {len(missing)} of the prompts, such as {missing[0]!r}")
        self.setup.encode()

    def __call__(self, source: Source, home: Path | None) -> tuple[dict[str, Any], VideoSet]:
        """Evaluate one source; return its scores as in `eval/*.json`, and its videos."""
        if source.config is None:
            return self._of_videos(source)
        if self.loaded is not source:
            self._load(source)
        if self.several:
            log.info(f"evaluate {source.label}")

        def save(number: int, prompt: str, video: Tensor) -> None:
            if home is not None:
                save_video(video, prompt, home, number, self.setup.model.spec.fps)

        result = evaluate(self.setup, iteration=source.iteration, save=save, scorers=self.scorers).to_json()
        return result, of_scores(source.label, result, numbered(home) if home is not None else {})

    def _load(self, source: Source) -> None:
        """Free the current model, then load that of `source`."""
        assert source.config is not None
        setup, config = self.setup, self.setup.config
        settings = dataclasses.replace(
            source.config.model,
            attention=cast(AttentionBackend, setup.model.attention),  # measured once
            sequence_parallel=self.config.model.sequence_parallel,
        )
        before = setup.model.spec.path, setup.model.policy.dtype
        room = 0.0 if setup.graphs is None else setup.graphs.max_memory
        del setup.model, setup.graphs
        gc.collect()
        torch.cuda.empty_cache()
        setup.model = load_model(settings, config.sampling, local_device(), config.seed, needs_agreement=False)
        setup.config = dataclasses.replace(config, model=settings)
        setup.graphs = step_graphs(setup.model.policy, setup.model.spec.cost(setup.config), room)
        if (setup.model.spec.path, setup.model.policy.dtype) != before:
            setup.encode()
        _log_notes(self.setup)
        self.loaded = source

    def _of_videos(self, source: Source) -> tuple[dict[str, Any], VideoSet]:
        """Score a folder's videos: those of the evaluated prompts, or all of them if no source has a model."""
        found = self.videos[source.label]
        wanted = None if self.prompts is None else set(self.prompts)
        chosen = [i for i, prompt in enumerate(found.prompts) if wanted is None or prompt in wanted]
        if len(chosen) < len(found.prompts):
            log.info(f"note: {source.label}: {len(found.prompts) - len(chosen)} videos of other prompts do not count")
        files = [found.files[i] for i in chosen]
        size = self.config.sampling.batch_size
        log.info(f"score {source.label}")
        seeds = [found.seeds[i] if found.seeds else found.keys[i][1] for i in chosen]
        prompts = [found.prompts[i] for i in chosen]
        result = score_videos(
            self.scoring, prompts, seeds, lambda own: _batches(files[own.start : own.stop], size), scorers=self.scorers
        ).to_json()
        scored = of_scores(source.label, result, {})
        return result, dataclasses.replace(
            scored, files=files, seeds=seeds if found.seeds else None, images=found.images
        )


def _batches(files: Sequence[Path | None], size: int) -> Chunks:
    """Yield videos of one shape, at most `size` at a time, with their indices in `files`."""
    device, indices, batch = local_device(), list[int](), list[Tensor]()
    for i, file in enumerate(files):
        assert file is not None
        video = read_video(file)
        if batch and (len(batch) == size or video.shape != batch[0].shape):
            yield indices, torch.stack(batch).to(device)
            indices, batch = [], []
        indices.append(i)
        batch.append(video)
    if batch:
        yield indices, torch.stack(batch).to(device)


def add_scores(
    sets: Sequence[VideoSet], names: Sequence[str], settings: RewardConfig, sampling: SamplingConfig, data: DataConfig
) -> list[VideoSet]:
    """Score the video files that `sage-fast compare` found; a video without a file gets NaN.

    Args:
        names: scorers, named as in `reward.name`; their parts become scores.
        settings: what to do about failures.
        sampling: size of the made-up videos that check a scorer, and of a batch.
        data: prompts with their metadata.

    Raises:
        UserError: a scorer or a video is wrong, or two sources have no files of the same prompt.
    """
    for videos in sets[1:] or sets:
        if not sets[0].shown.keys() & videos.shown.keys():
            raise UserError(
                f"--scorer {names[0]}: {sets[0].label} and {videos.label} kept no videos of the same prompt; sage-fast "
                "eval has --scorer too, and samples them"
            )
    known = [prompt for videos in sets for prompt, _ in videos.shown]
    metadata = _metadata(itertools.chain(*configured_prompts(data)), sets)
    scorers = _scorers(names, settings, sampling, known, metadata)
    scored = []
    for videos in sets:
        log.info(f"score {videos.label}")
        kept = [i for i, file in enumerate(videos.files) if file is not None]
        found: dict[str, list[Scores]] = {short: [] for short in scorers}
        for indices, chunk in _batches([videos.files[i] for i in kept], sampling.batch_size):
            for short, scorer in scorers.items():
                found[short].append(scorer(chunk, [videos.prompts[kept[i]] for i in indices]))
        scores, by = dict(videos.scores), dict(videos.scorers)
        for name, (short, scorer) in zip(names, scorers.items()):
            log_failures(joined := join_scores(found[short]))
            scorer.check_share(joined)
            for part, values in joined.parts.items():
                of_file = dict(zip(kept, values.tolist()))
                scores[f"{short}/{part}"] = [of_file.get(i, math.nan) for i in range(len(videos.files))]
                by[f"{short}/{part}"] = json.dumps(name)
        scored.append(dataclasses.replace(videos, scores=scores, scorers=by))
    return scored


def _finish(
    sets: Sequence[VideoSet],
    evaluations: Mapping[str, Mapping[str, Any]],
    notes: Sequence[str],
    judges: Sequence[str],
    count: int,
    folder: Path | None,
    json: Path | None,
) -> None:
    rows = table(sets)
    warnings = hacked(rows, judges)
    text = format_table(rows)
    filled = [textwrap.fill(line, 80, break_on_hyphens=False) for line in (*notes, *warnings)]
    print(printable("\n".join([text, *filled])))
    if json is not None:
        one = next(iter(evaluations.values()))
        lines = [{name: json_value(value) for name, value in dataclasses.asdict(row).items()} for row in rows]
        write_json(one if len(sets) == 1 else {"sources": evaluations, "table": lines}, json)
    if folder is None:
        return
    write_atomic(folder / "evaluation.md", f"{text}\n")
    page = folder / "evaluation.html"
    title = " · ".join(videos.label for videos in sets)
    write_gallery(page, title=title, sets=sets, rows=rows, count=count, notes=notes, warnings=warnings)
    print(page)
