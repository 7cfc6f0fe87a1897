"""The training runs of the protocol: their settings, and training the missing ones in parallel."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from sage_fast.cli import guarded
from sage_fast.config.load import build, dump, leaves, load
from sage_fast.config.schema import Config
from sage_fast.ops import implementation
from sage_fast.report.scores import Difference, difference_of_runs, mean_and_half, means_by_prompt
from sage_fast.run.grid import run_many
from sage_fast.util.console import Say, speaker
from sage_fast.util.errors import RunError, UserError
from sage_fast.util.files import read_json, write_json

SEEDS, QUICK_SEEDS = 5, 2
QUICK: Mapping[str, object] = {
    "train.iterations": 3,
    "eval.interval": 3,
    "eval.seeds_per_prompt": 1,
}
"""Overrides of `--quick`: enough to check that everything works, too little to decide anything."""


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
        """Return prompt -> mean score over its videos and the evaluations of the last third of the run.

        While the policy still moves, a single evaluation is largely luck.

        Args:
            part: `reward` (with weights 1, 1, 1, whatever the run was trained on), `vq`, `judge/alignment`, ...
        """
        last = self.evaluations[-1]["iteration"]
        late = [evaluation for evaluation in self.evaluations if evaluation["iteration"] > 2 * last / 3]
        prompts = [prompt for evaluation in late for prompt in evaluation["prompts"]]
        return means_by_prompt(prompts, [value for evaluation in late for value in scores_of(evaluation, part)])

    def mean(self, part: str = "reward") -> float:
        """Return the mean of `score` over the prompts."""
        return statistics.fmean(self.score(part).values())

    def course(self, part: str = "reward") -> dict[int, float]:
        """Return iteration -> mean held-out score."""
        return {e["iteration"]: statistics.fmean(scores_of(e, part)) for e in self.evaluations}


def difference(first: Sequence[TrainedRun], second: Sequence[TrainedRun], part: str = "reward") -> Difference:
    """Return the difference paired over seeds and held-out prompts, which both must share."""
    return difference_of_runs([run.score(part) for run in first], [run.score(part) for run in second])


def mean_interval(runs: Sequence[TrainedRun], part: str = "reward") -> tuple[float, float]:
    """Return the mean held-out score over the seeds, and the half-width of its 95 % interval over the seeds."""
    return mean_and_half([run.mean(part) for run in runs])


def scores_of(evaluation: Mapping[str, Any], part: str) -> list[float]:
    """Return the score of each video. The composite has weights 1, 1, 1 to make runs with other weights comparable.

    Raises:
        RunError: a video has no score because its reward failed.
    """
    columns = [evaluation["parts"][name] for name in (("vq", "mq", "ta") if part == "reward" else (part,))]
    if any(None in column for column in columns):
        raise RunError(f"a held-out video of iteration {evaluation['iteration']} has no {part} that is a number")
    return [sum(values) for values in zip(*columns)]


@functools.cache
def _protocol() -> dict[str, Any]:
    return yaml.safe_load(Path(__file__).with_name("protocol.yaml").read_text(encoding="utf-8"))


def protocol() -> dict[str, dict[str, Any]]:
    """Return variant -> its overrides of configs/demo.yaml."""
    tree = _protocol()
    return {name: tree["base"] | settings for name, settings in tree["variants"].items()}


def protocol_text() -> list[str]:
    """Return the protocol's paragraphs, which were written before the runs."""
    return list(_protocol()["text"])


def facts(runs: Mapping[str, Sequence[TrainedRun]], command: str) -> dict[str, str]:
    """Return the provenance of the findings: this process and the runs."""
    import torch

    from sage_fast.util.environment import PACKAGES, environment

    here = environment(torch.device("cpu"), implementation(torch.device("cpu")))
    every = [run for seeds in runs.values() for run in seeds]
    environments = [run.environment for run in every] or [here]
    found = {"Command": command, "Findings": f"by commit {here['commit']}, {here['date']}"}
    if every:
        iterations = every[0].evaluations[-1]["iteration"]
        seeds = ", ".join(map(str, sorted({run.seed for run in every})))
        commits = ", ".join(sorted({str(e["commit"]) for e in environments}))
        dates = sorted(e["date"] for e in environments)
        found["Runs"] = f"{len(runs)} variants, seeds {seeds}, {iterations} iterations each"
        found["Runs made"] = f"by commit {commits}, {dates[0]} to {dates[-1]}"
    found["Devices"] = ", ".join(sorted({e["device"] for e in environments}))
    found["Versions"] = ", ".join(sorted({f"{name} {e[name]}" for e in environments for name in PACKAGES if name in e}))
    return found


def shipped(name: str, *overlays: Mapping[str, Any]) -> Config:
    """Load a shipped configuration with overlays."""
    return load(str(files("sage_fast.configs") / f"{name}.yaml"), overlays=overlays)


def config_of(variant: str, seed: int, quick: bool = False) -> Config:
    """Return the settings of a run."""
    return shipped("demo", protocol()[variant], QUICK if quick else {}, {"seed": seed})


def full_size(config: Config) -> Config:
    """Return the same algorithm with a LoRA on the 8.3 B model, for videos of 480 x 832 and 81 frames."""
    large = shipped("hunyuanvideo15-480p")
    size = {name: getattr(large.sampling, name) for name in ("num_frames", "height", "width", "shift", "batch_size")}
    return dataclasses.replace(
        config,
        model=large.model,
        sampling=dataclasses.replace(config.sampling, **size),
        train=dataclasses.replace(config.train, batch_size=large.train.batch_size),
    )


def train_runs(
    variants: Iterable[str], folder: Path, *, quick: bool, workers: int, quiet: bool
) -> dict[str, list[TrainedRun]]:
    """Train the runs of these variants that `folder` lacks, then read all.

    Each run is a file, written atomically. An interruption loses only the runs in progress; the same call continues. A
    file with other settings (after a change of the protocol) or without a run is replaced, with a message.

    Raises:
        RunError: a worker process failed or was killed.
        Stopped: a signal came.
    """
    runs, tell = _runs(dict.fromkeys(variants), quick), speaker(quiet)
    missing = [name for name, run in runs.items() if not _is_of(_file(folder, name), config_of(*run, quick), tell)]
    if missing:
        folder.mkdir(parents=True, exist_ok=True)
        workers = min(workers, len(missing))
        tell(f"{len(runs)} runs, {len(missing)} of them to be made, {workers} at once")
        # Set by `env`: the number of threads is fixed when torch is imported.
        command = ["env", f"OMP_NUM_THREADS={max((os.cpu_count() or 1) // workers, 1)}", *WORKER, str(folder)]
        command += ["--quick"] * quick + ["--quiet"] * quiet
        jobs = [(f"process {i + 1}", [*command, *missing[i::workers]]) for i in range(workers)]
        run_many(jobs, _ended, workers=workers)
    found: dict[str, list[TrainedRun]] = {}
    for name, (variant, seed) in runs.items():
        found.setdefault(variant, []).append(_read(_file(folder, name), seed))
    return found


WORKER = [sys.executable, "-m", "studies.paper.training"]


def _runs(variants: Iterable[str], quick: bool) -> dict[str, tuple[str, int]]:
    """Return run name -> variant and seed."""
    seeds = range(QUICK_SEEDS if quick else SEEDS)
    return {f"{variant.replace('/', '-')}-seed{seed}": (variant, seed) for variant in variants for seed in seeds}


def _file(folder: Path, name: str) -> Path:
    return folder / f"{name}.json"


def _ended(name: str, status: int) -> None:
    if status:
        why = "; killed, as by the system when memory runs out: fewer --workers take less" * (status < 0)
        raise RunError(
            f"{name} ended with status {status}{why}; runs that are whole are kept, and the same command goes on"
        )


def _make(options: argparse.Namespace) -> int:
    """Train runs in sequence in this process, for as long as the parent process lives."""
    runs, parent, begun = _runs(protocol(), options.quick), os.getppid(), time.monotonic()
    count, tell = len(options.runs), speaker(options.quiet)
    for done, name in enumerate(options.runs, start=1):
        if os.getppid() != parent:
            return 1
        score = train_one(config_of(*runs[name], options.quick), _file(options.folder, name))
        left = (time.monotonic() - begun) / done * (count - done) / 60
        tell(f"{name}: {score:.3f}; {done} of {count} runs of this process, about {left:.0f} minutes left")
    return 0


def main(arguments: Sequence[str]) -> int:
    """Run a worker of `train_runs`; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m studies.paper.training")
    parser.add_argument("folder", type=Path)
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--quiet", action="store_true")
    options = parser.parse_args(arguments)
    return guarded("studies.paper", lambda: _make(options))


def train_one(config: Config, file: Path) -> float:
    """Train and evaluate as `sage-fast train` does, but without a run folder; return the last held-out score."""
    import torch

    from sage_fast.run.evaluation import evaluate
    from sage_fast.run.setup import load_setup
    from sage_fast.trainer import Trainer
    from sage_fast.util.environment import environment

    setup = load_setup(config)
    setup.encode(None, quiet=True)
    trainer = Trainer(config, setup.model, setup.reward, setup.prompts, setup.embeddings)
    evaluations = [evaluate(setup, iteration=0).to_json()]
    rows = []
    for index in range(config.train.iterations):
        rows.append(trainer.iteration(index))
        if (index + 1) % config.eval.interval == 0 or index + 1 == config.train.iterations:
            with trainer.engine.averaged_weights():
                evaluations.append(evaluate(setup, iteration=index + 1).to_json())
    scores = [statistics.fmean(scores_of(evaluation, "reward")) for evaluation in evaluations]
    facts = environment(torch.device("cpu"), implementation(torch.device("cpu")))
    write_json({"settings": dump(config), "environment": facts, "evaluations": evaluations, "rows": rows}, file)
    return scores[-1]


def _is_of(file: Path, config: Config, tell: Say) -> bool:
    """Whether the file holds a run with these settings; settings newer than the run count as their defaults."""
    if not file.is_file():
        return False
    try:
        tree = read_json(file)
        if not tree.keys() >= {"settings", "environment", "evaluations", "rows"}:
            raise UserError(f"{file}: holds no run")
        if build(leaves(yaml.safe_load(tree["settings"]))) != config:
            raise UserError(f"{file}: a run with other settings")
    except UserError as error:
        tell(f"{error}; it is made again")
        return False
    return True


def _read(file: Path, seed: int) -> TrainedRun:
    tree = read_json(file)
    return TrainedRun(seed=seed, evaluations=tree["evaluations"], rows=tree["rows"], environment=tree["environment"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
