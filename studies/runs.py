"""The training runs of a study: a file each, made in parallel processes; what is missing is made,
the rest is kept."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sage_fast.cli import guarded
from sage_fast.config.loader import build, dump, leaves, load, parse_yaml
from sage_fast.config.schema import Config
from sage_fast.models.spec import Spec
from sage_fast.ops import implementation
from sage_fast.util.console import log_to_screen, quiet, shows
from sage_fast.util.container import available_cpus
from sage_fast.util.errors import RunError, UserError
from sage_fast.util.files import read_json, write_json
from sage_fast.util.meters import JUDGE_PART
from studies.differences import Difference, difference_of_runs, mean_and_half, means_by_prompt
from studies.processes import run_many

if TYPE_CHECKING:
    from sage_fast.trainer import Trainer

log = logging.getLogger("sage_fast.studies")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainedRun:
    """The result of a run.

    Attributes:
        seed: seed of the run.
        evaluations: evaluations on held-out prompts by iteration; the first is of the base model.
        rows: metrics of the iterations.
        environment: commit, date, device and versions of the run.
    """

    seed: int
    evaluations: Sequence[Mapping[str, Any]]
    rows: Sequence[Mapping[str, Any]]
    environment: Mapping[str, Any]

    def score(self, part: str = "reward") -> dict[str, float]:
        """Return prompt -> mean score over its videos and the evaluations of the last third of the
        run.

        While the policy still moves, a single evaluation is largely luck.

        Args:
            part: `reward` (all parts with weight 1, whatever the run was trained on), `vq`,
                `judge/naturalness`, ...
        """
        last = self.evaluations[-1]["iteration"]
        late = [
            evaluation for evaluation in self.evaluations if evaluation["iteration"] > 2 * last / 3
        ]
        prompts = [prompt for evaluation in late for prompt in evaluation["prompts"]]
        return means_by_prompt(
            prompts, [value for evaluation in late for value in scores_of(evaluation, part)]
        )

    def before(self, part: str = "reward") -> dict[str, float]:
        """Return prompt -> mean score over its videos before training."""
        return means_by_prompt(self.evaluations[0]["prompts"], scores_of(self.evaluations[0], part))

    def mean(self, part: str = "reward") -> float:
        """Return the mean of `score` over the prompts."""
        return statistics.fmean(self.score(part).values())

    def course(self, part: str = "reward") -> dict[int, float]:
        """Return iteration -> mean held-out score."""
        return {e["iteration"]: statistics.fmean(scores_of(e, part)) for e in self.evaluations}


def difference(
    first: Sequence[TrainedRun], second: Sequence[TrainedRun], part: str = "reward"
) -> Difference:
    """Return the difference paired over seeds and held-out prompts, which both must share."""
    return difference_of_runs(
        [run.score(part) for run in first], [run.score(part) for run in second]
    )


def seeds_behind(runs: Sequence[TrainedRun], others: Sequence[TrainedRun]) -> int:
    """Return on how many seeds the others end higher."""
    theirs = {run.seed: run.mean() for run in others}
    return sum(run.mean() < theirs[run.seed] for run in runs)


def mean_interval(runs: Sequence[TrainedRun], part: str = "reward") -> tuple[float, float]:
    """Return the mean held-out score over the seeds, and the half-width of its 95 % interval over
    the seeds."""
    return mean_and_half([run.mean(part) for run in runs])


def scores_of(evaluation: Mapping[str, Any], part: str) -> list[float]:
    """Return the score of each video. In the composite each part has weight 1: runs with other
    weights are comparable.

    Raises:
        RunError: a video has no score because its reward failed.
    """
    names = (
        [part]
        if part != "reward"
        else [name for name in evaluation["parts"] if not name.startswith(JUDGE_PART)]
    )
    columns = [evaluation["parts"][name] for name in names]
    if any(None in column for column in columns):
        raise RunError(
            f"a held-out video of iteration {evaluation['iteration']} has no {part} that is a "
            "number"
        )
    return [sum(values) for values in zip(*columns)]


def shipped(name: str, *overlays: Mapping[str, Any]) -> Config:
    """Load a shipped configuration with overlays."""
    return load(str(files("sage_fast.configs") / f"{name}.yaml"), overlays=overlays)


LARGE = {"lora": "hunyuanvideo15-480p", "full": "hunyuanvideo15-480p-full"}
"""`model.tuning` -> shipped configuration of the 8.3 B model."""
RANKS = 8
"""GPUs of 80 GB that the shipped configurations are for."""


def full_size(config: Config) -> Config:
    """Return the same algorithm on the 8.3 B model, for videos of 480 x 832 and 81 frames.

    Model and engine are those of the shipped configuration for a LoRA or all weights.
    """
    large = shipped(LARGE[config.model.tuning])
    size = {
        name: getattr(large.sampling, name)
        for name in ("num_frames", "height", "width", "shift", "batch_size")
    }
    return dataclasses.replace(
        config,
        model=large.model,
        sampling=dataclasses.replace(config.sampling, **size),
        train=dataclasses.replace(
            config.train, batch_size=large.train.batch_size, engine=large.train.engine
        ),
    )


def planned_flops(config: Config, spec: Spec | None = None, ranks: int = 1) -> dict[str, float]:
    """Return part -> FLOPs of an iteration on `ranks` GPUs together, for the published sizes or
    those of `spec`."""
    from sage_fast.tools.plan import plan

    return {
        part: count
        for part, count in plan(config, spec, ranks=ranks).flops.items()
        if part != "forward"
    }


def teraflops(config: Config) -> float:
    """Return the planned TFLOPs (1e12) of a run at its own size, without its evaluations."""
    return config.train.iterations * sum(_own_flops(config).values()) / 1e12


def decoder_share(config: Config) -> float:
    """Return the decoder's share of the FLOPs of a run at its own size, in [0, 1]."""
    of_iteration = _own_flops(config)
    return of_iteration["decode"] / sum(of_iteration.values())


def _own_flops(config: Config) -> dict[str, float]:
    from sage_fast.models.find import find_spec

    return planned_flops(config, find_spec(config.model.path))


def exaflops(config: Config) -> dict[str, float]:
    """Return part -> exaFLOPs (1e18) of an iteration of `full_size` on `RANKS` GPUs together."""
    return {
        part: count / 1e18 for part, count in planned_flops(full_size(config), ranks=RANKS).items()
    }


def facts(runs: Mapping[str, Sequence[TrainedRun]], command: str) -> dict[str, str]:
    """Return the provenance of the findings: this process and the runs."""
    import torch

    from sage_fast.util.environment import PACKAGES, environment

    here = environment(torch.device("cpu"), implementation(torch.device("cpu")))
    every = [run for seeds in runs.values() for run in seeds]
    environments = [run.environment for run in every] or [here]
    found = {"Command": command, "Findings": f"by commit {here['commit']}, {here['date']}"}
    if every:
        lengths = sorted({run.evaluations[-1]["iteration"] for run in every})
        iterations = " to ".join(map(str, dict.fromkeys((lengths[0], lengths[-1]))))
        seeds = ", ".join(map(str, sorted({run.seed for run in every})))
        commits = ", ".join(sorted({str(e["commit"]) for e in environments}))
        dates = sorted(e["date"] for e in environments)
        found["Runs"] = f"{len(runs)} variants, seeds {seeds}, {iterations} iterations each"
        found["Runs made"] = f"by commit {commits}, {dates[0]} to {dates[-1]}"
    found["Devices"] = ", ".join(sorted({e["device"] for e in environments}))
    found["Versions"] = ", ".join(
        sorted({f"{name} {e[name]}" for e in environments for name in PACKAGES if name in e})
    )
    return found


def train_runs(
    study: str,
    runs: Mapping[str, Config],
    folder: Path,
    *,
    quick: bool,
    workers: int,
    only_read: Collection[str] = (),
) -> list[TrainedRun]:
    """Train the runs that `folder` lacks, then read all.

    Each run is a file, written atomically. An interruption loses only the runs in progress; the
    same call continues. A file with other settings (after a change of the protocol) or without a
    run is replaced, with a message.

    Args:
        study: module whose `settings_of(run, quick)` gives the settings of a run. If it has a
            function `before_iteration(run, trainer, index)`, that is called before each iteration.
        runs: name of the file, without its ending -> settings.
        folder: folder of the files.
        quick: passed to `settings_of`.
        workers: parallel processes.
        only_read: runs that cannot be made again, because a setting of theirs has left.

    Raises:
        UserError: one of `only_read` is missing.
        RunError: a worker process failed or was killed.
        Stopped: a signal came.
    """
    missing = [name for name, config in runs.items() if not _is_of(_file(folder, name), config)]
    for name in missing:
        if name in only_read:
            raise UserError(
                f"{_file(folder, name)}: this run cannot be made again, because a setting of it "
                f"has left; expected the runs of the study's archive in {folder} "
                "(benchmarks/results)"
            )
    if missing:
        folder.mkdir(parents=True, exist_ok=True)
        workers = min(workers, len(missing))
        log.info(f"{len(runs)} runs, {len(missing)} of them to be made, {workers} at once")
        # Set by `env`: the number of threads is fixed when torch is imported.
        command = [
            "env",
            f"OMP_NUM_THREADS={max(available_cpus() // workers, 1)}",
            *WORKER,
            study,
            str(folder),
        ]
        if quick:
            command.append("--quick")
        if not shows():
            command.append("--quiet")
        jobs = [(f"process {i + 1}", [*command, *missing[i::workers]]) for i in range(workers)]
        run_many(jobs, _ended, workers=workers)
    return [_read(_file(folder, name), config.seed) for name, config in runs.items()]


WORKER = [sys.executable, "-m", "studies.runs"]


def _file(folder: Path, name: str) -> Path:
    return folder / f"{name}.json"


def _ended(name: str, status: int) -> None:
    if status:
        why = ""
        if status < 0:
            why = "; killed, as by the system when memory runs out: fewer --workers take less"
        raise RunError(
            f"{name} ended with status {status}{why}; runs that are whole are kept, and the same "
            "command goes on"
        )


def main(arguments: Sequence[str]) -> int:
    """Run a worker of `train_runs`; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m studies.runs")
    parser.add_argument("study")
    parser.add_argument("folder", type=Path)
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--quiet", action="store_true")
    options = parser.parse_args(arguments)
    log_to_screen(quiet=options.quiet)
    return guarded("studies", lambda: _make(options))


def _make(options: argparse.Namespace) -> int:
    """Train runs in sequence in this process, for as long as the parent process lives."""
    study = importlib.import_module(options.study)
    prepare = getattr(study, "before_iteration", _nothing)
    parent, begun, count = os.getppid(), time.monotonic(), len(options.runs)
    for done, name in enumerate(options.runs, start=1):
        if os.getppid() != parent:
            return 1
        score = train_one(
            study.settings_of(name, options.quick),
            _file(options.folder, name),
            functools.partial(prepare, name),
        )
        left = (time.monotonic() - begun) / done * (count - done) / 60
        log.info(
            f"{name}: {score:.3f}; {done} of {count} runs of this process, about {left:.0f} "
            "minutes left"
        )
    return 0


def _nothing(*_: object) -> None:
    pass


@quiet()
def train_one(
    config: Config, file: Path, before_iteration: Callable[[Trainer, int], object] = _nothing
) -> float:
    """Train and evaluate as `sage-fast train` does, but without a run folder; return the last
    held-out score.

    Args:
        before_iteration: called with the trainer and the index of each iteration.
    """
    import torch

    from sage_fast.eval.evaluation import evaluate
    from sage_fast.loading import load_setup, resolve
    from sage_fast.trainer import Trainer
    from sage_fast.util.environment import environment

    # of the start, as is the commit
    facts = environment(torch.device("cpu"), implementation(torch.device("cpu")))
    setup = load_setup(resolve(config))
    setup.encode()
    trainer = Trainer(
        setup.resolved,
        setup.model,
        setup.reward,
        setup.prompts,
        setup.embeddings,
        graphs=setup.graphs,
    )
    evaluations = [evaluate(setup, iteration=0)[0]]
    rows = []
    for index in range(config.train.iterations):
        before_iteration(trainer, index)
        rows.append(trainer.iteration(index))
        if (index + 1) % config.eval.interval == 0 or index + 1 == config.train.iterations:
            with trainer.engine.averaged_weights():
                evaluations.append(evaluate(setup, iteration=index + 1)[0])
    scores = [statistics.fmean(scores_of(evaluation, "reward")) for evaluation in evaluations]
    write_json(
        {"settings": dump(config), "environment": facts, "evaluations": evaluations, "rows": rows},
        file,
    )
    return scores[-1]


OLDER = {
    "sampler: exact\n": "sampler: precise\n",
    "surrogate: nft_adaptive\n": "surrogate: nft\n",
    "eps: 1.0e-15\n": "eps: null\n",  # the default then, of adapters and of all weights
}
"""Line of an older run's settings -> the same today."""
LEFT = {
    "objective.direction",
    "objective.hand_over_iterations",
    "eval.sampler",
    "kl.lambda_limit",
    "kl.position_fraction",
    "kl.target_share",
    "reward.normalisation",
    "train.deepspeed_config",
    "train.offload",
    "train.timestep_permutation",
    "train.trained_samples",
}
"""Settings of older runs that are no choice any more. They have one value in all runs of a protocol
as it is, or the runs with another one are only read (`has_left`)."""


def has_left(overlay: Mapping[str, Any]) -> bool:
    """Return whether an overlay has a setting that has left, so that its runs can only be read."""
    return not LEFT.isdisjoint(overlay)


def without_left(overlay: Mapping[str, Any]) -> dict[str, Any]:
    """Return an overlay without the settings that have left."""
    return {key: value for key, value in overlay.items() if key not in LEFT}


def _is_of(file: Path, config: Config) -> bool:
    """Whether the file holds a run with these settings, whatever its output folder was.

    Settings newer than the run count as their defaults.
    """
    from sage_fast.algorithm.objective import KL_STRATEGIES

    if not file.is_file():
        return False
    try:
        tree = read_json(file)
        if not tree.keys() >= {"settings", "environment", "evaluations", "rows"}:
            raise UserError(f"{file}: holds no run")
        settings = str(tree["settings"])
        for older, now in OLDER.items():
            settings = settings.replace(older, now)
        given = {
            key: value for key, value in leaves(parse_yaml(settings)).items() if key not in LEFT
        }
        strategy = KL_STRATEGIES[given["kl.strategy"]]
        if strategy.anchor is None and not strategy.velocity:
            # without a KL it did nothing, and an older one may not be offered any more
            given.pop("kl.feedback", None)
        # both by `build`, so that a relative path is the same file in both
        expected = build(leaves(dataclasses.asdict(config)))
        if _trained(build(given)) != _trained(expected):
            raise UserError(f"{file}: a run with other settings")
    except ValueError as error:
        log.info(f"{error}; it is made again")
        return False
    return True


def _trained(config: Config) -> Config:
    """Return the settings with one output folder for all, and with the layers that get an adapter
    spelled out."""
    from sage_fast.models.find import find_spec

    model = config.model
    targets = model.lora_targets or find_spec(model.path).lora_targets
    return dataclasses.replace(
        config, output=Config.output, model=dataclasses.replace(model, lora_targets=targets)
    )


def _read(file: Path, seed: int) -> TrainedRun:
    tree = read_json(file)
    return TrainedRun(
        seed=seed,
        evaluations=tree["evaluations"],
        rows=tree["rows"],
        environment=tree["environment"],
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
