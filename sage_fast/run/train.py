"""A training run from its settings to its final weights: checks, model, evaluations, iterations and
checkpoints."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import pkgutil
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from sage_fast.algorithm.flops import flops
from sage_fast.algorithm.resolved import ResolvedConfig
from sage_fast.algorithm.trainable import check_same_settings, check_trainable
from sage_fast.config.loader import dump, leaves
from sage_fast.config.rank_checks import check_engine
from sage_fast.config.schema import Config
from sage_fast.eval.evaluation import evaluate, negatives_for, prompts_and_seeds
from sage_fast.eval.gains import hacking_in_run
from sage_fast.models.policy import State
from sage_fast.ops import implementation
from sage_fast.parallel.stored_rollouts import check_trajectories
from sage_fast.rollout.setup import Setup
from sage_fast.run import claim
from sage_fast.run.checkpoint import (
    load_checkpoint,
    prune_checkpoints,
    save_checkpoint,
    save_final_weights,
)
from sage_fast.run.folder import RunFolder, check_weights, iteration_of
from sage_fast.run.messages import config_warnings, format_row, grace_warning, method_of
from sage_fast.run.stop import Stop
from sage_fast.run.writer import MetricsWriter
from sage_fast.trainer import Trainer
from sage_fast.util.console import log_to, wrapped
from sage_fast.util.environment import command_line, environment, peak_flops
from sage_fast.util.errors import RankError, Stopped, UserError, in_one_line, reason
from sage_fast.util.files import discard, write_json
from sage_fast.util.process_group import initialize
from sage_fast.util.ranks import barrier, broadcast_object, fails_alone, rank, shutdown, world_size
from sage_fast.util.videos import check_encoder, numbered, save_video

log = logging.getLogger(__name__)

Load = Callable[..., Setup]
"""Loads prompts, rewards and the model of settings that are resolved; `attention` replaces
`model.attention`."""
Report = Callable[[Path, bool, bool], object]
"""Draws the page of a run: its folder, whether the run is complete, and whether it goes on."""
PAGE_SHARE = 0.02
"""Share of the time of a run that its page may take between two evaluations: the other ranks wait.
"""


def train(config: Config, load: Load, report: Report, *, resume: bool = False) -> Path:
    """Train and write a run folder. An interrupted run leaves a checkpoint for `resume`.

    Args:
        load: called once the folder is locked; the commands pass `sage_fast.loading.load_setup`.
        report: called on rank 0 after evaluations, after iterations and at the end; the commands
            pass `sage_fast.report.page.report_run`.

    Returns:
        The run folder.

    Raises:
        Stopped: after a signal.
    """
    initialize(config.timeout_minutes)
    check_same_settings(config, resume=resume)
    resolved = check_trainable(config)
    log.info(wrapped(method_of(resolved.objective, config.sampling)))
    check_here(config, resume=resume)
    with Stop(config.train.grace_seconds) as stop, claim.locked(Path(config.output)) as own_claim:
        run = Run(resolved, stop, own_claim, load, report, resume=resume)
        try:
            run.iterate()
            own_claim.check()
            save_final_weights(run.folder, run.done, run.trainer.engine)
            run.evaluate("after", run.done)
            run.complete = True
        finally:
            run.draw(running=False)
            if run.writer is not None:
                run.writer.close()
        barrier()  # wait for rank 0 to write the report
        shutdown()
    return run.folder


def check_here(config: Config, *, resume: bool) -> None:
    """Check that a run can start on this machine: its packages, its output folder, and the weights
    it starts from.

    Raises:
        UserError: it cannot.
    """
    check_engine(config.train)
    pkgutil.resolve_name("sage_fast.run.trackers:check_trackers")(config.tracking.trackers)
    claim.check_output(config, resume=resume)
    if not resume:
        check_weights(config.model.weights)


class Run:
    """A run and its folder: loaded or resumed, then iterated, evaluated and saved until it is
    complete or stopped.

    Every method is collective.

    Args:
        resolved: settings, checked against the output folder.
        stop: its signals end the run.
        own_claim: to the output folder, which is locked.
        load, report: as for `train`.
        resume: continue the run in the folder.

    Attributes:
        done: complete iterations.
        complete: whether the run has come to its end.
        writer: metrics and trackers; None on ranks other than 0.
    """

    def __init__(
        self,
        resolved: ResolvedConfig,
        stop: Stop,
        own_claim: claim.Claim,
        load: Load,
        report: Report,
        *,
        resume: bool,
    ) -> None:
        config = resolved.config
        self.config, self.stop, self.report = config, stop, report
        self.claim = own_claim
        self.folder, self.done, self.complete, self._next_page = Path(config.output), 0, False, 0.0
        self._noted = set[str]()
        self.writer: MetricsWriter | None = None
        self._checkpoint: int | None = None  # iteration of the newest checkpoint
        check_encoder()
        run, attention = RunFolder(self.folder), config.model.attention
        if resume and attention == "auto":  # a new measurement could change the bits
            attention = run.facts.get("attention", attention)
        self.setup = setup = load(resolved, attention=attention)
        trajectories = check_trajectories(resolved, setup.model)
        lacks_before = resume and not check_pairs(setup, self.folder)
        if not resume:
            claim.claim_output(own_claim, self.folder, dump(config))
        own_log = run.log_file(rank())
        if world_size() > 1:
            log_to(own_log)
        setup.encode(run.embeddings)
        policy = setup.model.policy
        pause = (lambda: None) if policy.collective_forwards else stop.pause
        check = functools.partial(stop.before_update, policy.device)
        about = setup.model, setup.reward, setup.prompts, setup.embeddings
        self.trainer = trainer = Trainer(
            resolved, *about, graphs=setup.graphs, pause=pause, before_update=check
        )
        self._start_weights = trainer.policy.snapshot() if lacks_before else None
        if resume:
            self._resume()
        if world_size() == 1:  # a refused resume has left the folder as it was
            log_to(own_log)
        trackers = run.facts.get("trackers", []) if resume else []
        facts = describe(trainer, setup.contents, self.folder, self.done, self._checkpoint)
        if resume and rank() == 0:
            claim.forget_beyond(RunFolder(self.folder), self.done)
        log.info(trajectories)
        for warning in config_warnings(resolved, setup.model.spec.distillation):
            log.warning(wrapped(f"warning: {warning}"))
        if resume:
            log.info(
                f"resumed after {self.done} iterations"
                if self.done
                else "no checkpoint: starting at iteration 1"
            )
        if rank() == 0:
            settings = leaves(dataclasses.asdict(config))
            self.writer = MetricsWriter(
                config.tracking,
                settings,
                self.folder,
                facts["run_id"],
                self.done,
                continued=trackers,
            )
        stop.training = True

    def _resume(self) -> None:
        """Restore the newest intact checkpoint, if there is one, and put the new settings into the
        folder."""
        if (
            found := load_checkpoint(self.folder, self.trainer.engine, self.trainer.state_dict())
        ) is not None:
            self.done, counters, anchor = found
            self._checkpoint = self.done
            self.trainer.load_state_dict(counters, anchor)
        run = RunFolder(self.folder)
        claim.check_checkpoints(run)  # again: loading takes minutes
        claim.check_metrics(run, self.done)
        if (newest := run.facts.get("checkpoint")) is not None and newest > self.done:
            log.info(
                wrapped(
                    f"note: the checkpoint of {newest} iterations, the newest that the run has "
                    f"written, cannot be used: iterations {self.done + 1} to {newest} are done "
                    "again"
                )
            )
        if rank() == 0:  # only after every check of the new settings
            self.claim.take()
            claim.remove_partials(self.folder)
        claim.replace_settings(self.config, self.done)

    def iterate(self) -> None:
        """Run the iterations that are left, with evaluations and checkpoints.

        An interrupted evaluation is repeated first. An exception that all ranks share still leaves
        a checkpoint of the last complete iteration.
        """
        config, trainer = self.config, self.trainer
        completed: _Completed | None = None
        try:
            if read_evaluation(self.folder, "before") is None:
                self.evaluate("before", 0, self._start_weights)
            if (
                self._evaluation_is_due
                and read_evaluation(self.folder, f"iteration-{self.done:06d}") is None
            ):
                self.evaluate(f"iteration-{self.done:06d}", self.done)
            began, first, count = time.monotonic(), self.done, config.train.iterations
            for index in range(first, count):
                self.stop.boundary(trainer.device)
                completed = _Completed(trainer)
                row = trainer.iteration(index)
                # complete even if the lines below fail
                self.done, trainer.mid_iteration = (
                    index + 1,
                    False,
                )
                row |= throughput(trainer, row)
                self.claim.check()
                if self.writer is not None:
                    self.writer.write(row)
                seconds = (time.monotonic() - began) / (self.done - first)
                log.info(format_row(row, count, seconds * (count - self.done)))
                if index == first and (
                    warning := grace_warning(
                        row, config.train, collective=trainer.policy.collective_forwards
                    )
                ):
                    log.warning(wrapped(f"warning: {warning}"))
                if self._evaluation_is_due:
                    self.evaluate(f"iteration-{self.done:06d}", self.done)
                elif time.monotonic() >= self._next_page:
                    self.draw(running=True)
                if self.done == count or self.done % config.train.checkpoint_interval == 0:
                    self.checkpoint()
            self.stop.boundary(trainer.device)
        except BaseException as reason:
            if not fails_alone() and not self.claim.lost:
                self._save_last_complete(completed, reason)
            raise

    @property
    def _evaluation_is_due(self) -> bool:
        interval = self.config.eval.interval
        return (
            interval > 0
            and self.done % interval == 0
            and 0 < self.done < self.config.train.iterations
        )

    def evaluate(self, name: str, iteration: int, weights: State | None = None) -> None:
        """Evaluate `weights`, by default the averaged ones if any, else the trained ones.

        Scores and videos go into the run folder and the trackers.
        """
        log.info(f"evaluate ({name})")
        self.claim.check()
        folder, shown = RunFolder(self.folder).videos(name), self.config.eval.num_videos
        keep_all = name in ("before", "after")  # the report chooses its videos by the final scores
        if self.writer is not None:
            discard(folder)  # left by an interrupted evaluation
        barrier()

        def save(number: int, prompt: str, video: torch.Tensor) -> None:
            if not keep_all and number >= shown:
                return
            try:
                folder.mkdir(parents=True, exist_ok=True)
                save_video(video, prompt, folder, number, self.setup.model.spec.fps)
            except OSError as error:  # a video is only shown
                self._note_once("no video", reason(error))

        trainer = self.trainer
        with (
            trainer.engine.averaged_weights() if weights is None else trainer.policy.using(weights)
        ):
            scores, videos = evaluate(
                self.setup, iteration=iteration, save=save, pause=trainer.pause
            )
        self.claim.check()
        if self.writer is not None:
            files = [path for number, path in numbered(folder).items() if number < shown]
            RunFolder(self.folder).write_evaluation(name, scores)
            self.writer.write_evaluation(scores, files, videos)
            evaluations = RunFolder(self.folder).video_sets().values()
            if found := hacking_in_run(
                [videos for videos in evaluations if videos.iteration <= iteration]
            ):
                log.warning(wrapped(f"warning: {found}"))
        if name != "after":  # `train` draws the complete run
            self.draw(running=True)

    def draw(self, *, running: bool) -> None:
        """Draw the run's page on rank 0. A failure is reported, and never ends a run."""
        if self.writer is None or self.claim.lost:
            return
        began = time.monotonic()
        try:
            self.report(self.folder, self.complete, running)
        except Exception as error:  # libraries that draw have their own exceptions
            self._note_once(
                "no report", f"({in_one_line(error)}); later: sage-fast report {self.folder}"
            )
        self._next_page = began + (time.monotonic() - began) / PAGE_SHARE

    def _note_once(self, lacking: str, why: str) -> None:
        """Say that something which is only shown is lacking.

        Later failures of its kind are for the log file alone.
        """
        level = logging.DEBUG if lacking in self._noted else logging.WARNING
        self._noted.add(lacking)
        log.log(level, wrapped(f"note: {lacking} {why}"))

    def checkpoint(self) -> None:
        """Save the state between two iterations and remove the checkpoints that are not kept."""
        with self.stop.saving():
            self.claim.check()
            if self.writer is not None:
                self.writer.sync()
            trainer, config = self.trainer, self.config.train
            save_checkpoint(
                self.folder, self.done, trainer.engine, trainer.state_dict(), trainer.anchor
            )
            if rank() == 0:
                claim.record_checkpoint(RunFolder(self.folder), self.done)
                weights = self.config.reward.part_weights if config.keep_best else None
                prune_checkpoints(
                    self.folder, config.keep_checkpoints, weights, self.config.eval.interval
                )

    def _save_last_complete(self, completed: _Completed | None, reason: BaseException) -> None:
        """Save the last complete iteration of a run that ends early, for `reason`."""
        if self.trainer.mid_iteration and not (
            completed is not None and completed.restore(self.trainer)
        ):
            kept = RunFolder(self.folder).checkpoints()
            log.info(
                f"stopped within iteration {self.done + 1}, whose updates are lost; continue with "
                "--resume, "
                + (
                    f"from the checkpoint of {iteration_of(kept[-1])} iterations"
                    if kept
                    else "from the beginning"
                )
            )
            return
        try:
            self.checkpoint()
            first = "" if isinstance(reason, Stopped) else "fix the cause, then "
            log.info(f"stopped after {self.done} iterations; {first}continue with --resume")
        except (OSError, RankError) as error:
            log.info(
                f"stopped after {self.done} iterations, and no checkpoint could be written: {error}"
            )
            if isinstance(reason, Stopped):  # its exit status would claim that nothing is lost
                raise


class _Completed:
    """The state at the end of an iteration, for rolling back an unfinished next one.

    With one update per iteration the weights are not copied: hardly anything can fail after the
    update.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.counters = trainer.state_dict()
        self.anchor = trainer.anchor  # an anchor is replaced, never changed in place
        self.held = trainer.config.train.optimizer_steps > 1 and trainer.engine.remember()

    def restore(self, trainer: Trainer) -> bool:
        """Roll back; return False if the weights were not held."""
        if self.held:
            trainer.engine.rewind()
            trainer.load_state_dict(self.counters, self.anchor)
            trainer.mid_iteration = False
        return self.held


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
    keys, seeds = prompts_and_seeds(setup)
    held = before and (before["prompts"], before.get("negatives", {}), before["seeds"])
    if held is not None and held != (keys, negatives_for(setup, keys), seeds.tolist()):
        raise UserError(
            f"data.eval_prompts = {setup.config.data.eval_prompts!r} holds other prompts than "
            f"those that the run in {str(run)!r} was evaluated on before training; restore the "
            "file, or begin another run; nothing was changed"
        )
    return before is not None


# -- run.json and throughput -----------------------------------------------------------------------


def describe(
    trainer: Trainer,
    contents: Mapping[str, str],
    run: Path,
    iteration: int,
    checkpoint: int | None = None,
) -> dict[str, Any]:
    """Print a summary of the run that starts or resumes at `iteration`; write `run.json` and return
    its content.

    Args:
        contents: `Setup.contents`.
        checkpoint: iteration of the newest checkpoint; None before the first.
    """
    shape = trainer.policy.states.shape
    parameters = sum(
        shape(p).numel() for name, p in trainer.policy.named_parameters() if ".lora_" not in name
    )
    trainable = sum(shape(p).numel() for p in trainer.engine.parameters)
    facts = environment(trainer.device, implementation(trainer.device)) | {
        "command": command_line(sys.argv),
        "checkpoint": checkpoint,
        "trackers": trainer.config.tracking.trackers,
        "contents": dict(contents),
        "ranks": world_size(),
        "model_is_local": Path(trainer.model.spec.path).is_dir(),
        "attention": trainer.model.attention,
        "attention_milliseconds": trainer.model.attention_milliseconds,
        "gradient_checkpointing": str(trainer.model.checkpointing),
        "engine": trainer.config.train.engine,
        "parameters": parameters,
        "trainable_parameters": trainable,
        "decode": str(trainer.model.decoder.plan(trainer.latent_shape)),
        "method": method_of(trainer.objective, trainer.config.sampling),
        "sampler": trainer.config.sampling.sampler,
        "notes": [*trainer.resolved.table.notes, *trainer.model.notes],
        "sigmas": trainer.resolved.table.sigmas.tolist(),
        "transition_std": trainer.resolved.table.c.tolist(),
        "equalizer": trainer.constants.equalizer.tolist() if trainer.objective.equalizes else None,
    }
    if rank() == 0:
        facts = claim.run_facts(run, facts, iteration)
        write_json(facts, RunFolder(run).facts_file)
    lines = [
        f"{facts['device']} x {world_size()}, {facts['threads']} threads",
        f"{parameters / 1e6:.2f} M parameters, {trainable / 1e6:.2f} M trained",
        f"operators: {facts['operators']}, attention: {facts['attention']}",
        f"decode: {facts['decode']}",
        f"gradient checkpointing: {facts['gradient_checkpointing']}",
        *_named_things(trainer),
        *(f"note: {note}" for note in facts["notes"]),
    ]
    if measured := trainer.model.attention_milliseconds:
        times = ", ".join(
            f"{name} {milliseconds:.2f} ms" for name, milliseconds in measured.items()
        )
        lines.append(f"attention, forward and backward: {times}")
    for line in lines:
        log.info(wrapped(line))
    return facts


def _named_things(trainer: Trainer) -> list[str]:
    """Return what a run reads, by its whole path: the settings file may stand in another folder."""
    config = trainer.config
    rewards = [
        f"{key.removesuffix('.name')}: {entry.name}" for key, entry in config.named_rewards.items()
    ]
    lines = [
        f"model: {config.model.path}",
        f"prompts: {config.data.prompts}; held out: {config.data.eval_prompts}",
    ]
    return [
        *lines,
        *rewards,
        *([f"weights: {config.model.weights}"] if config.model.weights else []),
    ]


def throughput(trainer: Trainer, row: Mapping[str, Any]) -> dict[str, float]:
    """Return samples per GPU-hour of an iteration and, where the GPU's peak is known, its MFU and
    HFU.

    All are over all ranks and the whole iteration, rewards and waiting included. HFU counts what a
    backward recomputes.
    """
    config = trainer.config
    samples, seconds = config.train.samples, row["time/total"] * world_size()
    found = {"throughput/samples_per_gpu_hour": 3600 * samples / seconds}
    if peak := peak_flops(trainer.device, trainer.policy.dtype):
        cost, trains_adapter = trainer.model.spec.cost(config), config.model.trains_adapter
        for name, mode in (("mfu", None), ("hfu", trainer.model.checkpointing)):
            done = flops(
                cost, trainer.forwards, samples, checkpointing=mode, trains_adapter=trains_adapter
            )
            found[f"throughput/{name}"] = sum(done.values()) / (seconds * peak)
    return found
