"""One run from configuration to report: checks, model, evaluations, iterations and checkpoints."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

from sage_fast.algorithm.schedule import check_log_prob, check_trainable
from sage_fast.config.schema import AttentionBackend, Config
from sage_fast.models.policy import State, numel
from sage_fast.ops import implementation
from sage_fast.parallel.optimizers import check_optimizer
from sage_fast.parallel.settings import check_engine
from sage_fast.report.hacking import verdict
from sage_fast.report.page import write_report
from sage_fast.report.scores import format_number, format_paired_table, paired_table, read_scores
from sage_fast.report.videos import contact_sheet, keep_shown, numbered, write_comparison
from sage_fast.run.checkpoint import load_checkpoint, prune_checkpoints, save_checkpoint
from sage_fast.run.evaluation import check_pairs, evaluate, read_evaluation
from sage_fast.run.folder import (
    check_output,
    claim_output,
    locked,
    remove_partials,
    replace_settings,
    run_facts,
    save_video,
)
from sage_fast.run.setup import Setup, check_trajectories, load_setup
from sage_fast.run.stop import Stop
from sage_fast.run.trackers import MetricsWriter, check_trackers
from sage_fast.run.weights import checkpoints, iteration_of
from sage_fast.trainer import Trainer
from sage_fast.util.console import Say, log_to, say_wrapped, speaker
from sage_fast.util.environment import command_line, environment
from sage_fast.util.errors import RankError, Stopped, UserError
from sage_fast.util.files import aside, read_json, write_atomic, write_json
from sage_fast.util.metrics import REWARD_PART, straggler_line
from sage_fast.util.ranks import barrier, initialize, rank, shutdown, world_size


def train(config: Config, *, resume: bool = False, quiet: bool = False) -> Path:
    """Train and write a run folder with a report. An interrupted run leaves a checkpoint for `resume`.

    Returns:
        The run folder.

    Raises:
        Stopped: after SIGINT or SIGTERM.
    """
    initialize(config.timeout_minutes)
    check_trainable(config)
    check_optimizer(config.train.optimizer)
    check_engine(config.train)
    check_trackers(config.tracking.trackers)
    check_output(config, resume=resume)
    run, quiet = Path(config.output), quiet or rank() > 0
    tell = speaker(quiet)
    with Stop(config.train.grace_seconds, tell) as stop, locked(run, tell):
        _train(config, run, stop, resume=resume, quiet=quiet)
    return run


def _train(config: Config, run: Path, stop: Stop, *, resume: bool, quiet: bool) -> None:
    tell = speaker(quiet)
    setup = load_setup(config, attention=_attention_of(config, resume))
    trajectories = check_trajectories(config, setup.model)
    check_log_prob(config, math.prod(setup.model.latent_shape(config.sampling)))
    lacks_before = resume and not check_pairs(setup, run)
    if not resume:
        claim_output(config)
    if world_size() > 1:
        log_to(run / "logs" / f"rank-{rank():03d}.log")
    setup.encode(run / "embeddings", quiet=quiet)
    trainer = Trainer(config, setup.model, setup.reward, setup.prompts, setup.embeddings, quiet)
    if not trainer.policy.in_step:
        trainer.pause = stop.pause
    trainer.before_update = functools.partial(stop.before_update, trainer.device)
    start_weights = trainer.policy.snapshot() if lacks_before else None
    start = _resume(trainer, run, tell) if resume else 0
    if resume:  # only after every check of the new settings
        if rank() == 0:
            remove_partials(run, tell)
        replace_settings(config, tell)
    facts = describe(trainer, run, start, tell)
    tell(trajectories)
    if resume:
        tell(f"resumed after {start} iterations" if start else "no checkpoint yet: starting at the first iteration")
    writer = MetricsWriter(config, run, facts["run_id"], start, tell) if rank() == 0 else None
    stop.training = True
    try:
        _iterate(trainer, setup, run, start, start_weights, writer, tell, stop)
        _finish(trainer, setup, run, writer, tell)
    finally:
        if writer is not None:
            writer.close()
    barrier()  # wait for rank 0 to write the report
    shutdown()


def _iterate(
    trainer: Trainer,
    setup: Setup,
    run: Path,
    start: int,
    start_weights: State | None,
    writer: MetricsWriter | None,
    tell: Say,
    stop: Stop,
) -> None:
    """Run all iterations from `start` on, with evaluations and checkpoints.

    An interrupted evaluation is repeated first; the one before training uses `start_weights` if given. An exception
    that all ranks share still leaves a checkpoint of the last complete iteration.
    """
    config = setup.config
    done = start
    whole: _Whole | None = None

    def due() -> bool:
        return config.eval.interval > 0 and done % config.eval.interval == 0 and 0 < done < config.train.iterations

    try:
        if read_evaluation(run, "before") is None:
            _evaluate(trainer, setup, run, "before", 0, writer, tell, start_weights)
        if due() and read_evaluation(run, f"iteration-{done:06d}") is None:
            _evaluate(trainer, setup, run, f"iteration-{done:06d}", done, writer, tell)
        for index in range(start, config.train.iterations):
            stop.boundary(trainer.device)
            whole = _Whole(trainer)
            row = trainer.iteration(index)
            done, trainer.mid_iteration = index + 1, False  # the iteration is complete, whatever fails below
            if writer is not None:
                writer.write(row)
            tell(format_row(row, config.train.iterations))
            if evaluated := due():
                _evaluate(trainer, setup, run, f"iteration-{done:06d}", done, writer, tell)
            last = done == config.train.iterations
            if last or done % config.train.checkpoint_interval == 0 or (evaluated and config.train.keep_best):
                _save(trainer, run, done, writer, stop)
        stop.boundary(trainer.device)
    except BaseException as reason:
        # If only this rank failed, waiting for the others would hang.
        if world_size() == 1 or getattr(reason, "on_all_ranks", False):
            if trainer.mid_iteration and not (whole is not None and whole.restore(trainer)):
                kept = checkpoints(run)
                tell(
                    f"stopped within iteration {done + 1}, whose updates are lost; continue with --resume, "
                    + (f"from the checkpoint of {iteration_of(kept[-1])} iterations" if kept else "from the beginning")
                )
                raise
            try:
                _save(trainer, run, done, writer, stop)
                tell(f"stopped after {done} iterations; continue with --resume")
            except (OSError, RankError) as error:
                tell(f"stopped after {done} iterations, and no checkpoint could be written: {error}")
                if isinstance(reason, Stopped):  # its exit status would claim that nothing is lost
                    raise
        raise


class _Whole:
    """The state at the end of an iteration, for rolling back an unfinished next one.

    With one update per iteration the weights are not copied: hardly anything can fail after the update.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.counters, self.anchor = (
            trainer.state_dict(),
            trainer.anchor,
        )  # an anchor is replaced, never changed in place
        self.held = trainer.config.train.optimizer_steps > 1 and trainer.engine.remember()

    def restore(self, trainer: Trainer) -> bool:
        """Roll back; return False if the weights were not held."""
        if self.held:
            trainer.engine.rewind()
            trainer.load_state_dict(self.counters, self.anchor)
            trainer.mid_iteration = False
        return self.held


def _attention_of(config: Config, resume: bool) -> AttentionBackend:
    """Return the attention backend. A resumed run keeps its own: a new measurement could change the bits."""
    file = Path(config.output) / "run.json"
    if config.model.attention != "auto" or not resume or not file.is_file():
        return config.model.attention
    return read_json(file).get("attention", "auto")


def _save(trainer: Trainer, run: Path, iteration: int, writer: MetricsWriter | None, stop: Stop) -> None:
    with stop.saving():
        if writer is not None:
            writer.sync()
        save_checkpoint(run, iteration, trainer.engine, trainer.state_dict(), trainer.anchor)
        if rank() == 0:
            config = trainer.config.train
            prune_checkpoints(run, config.keep_checkpoints, config.keep_best, speaker(trainer.quiet))


def _resume(trainer: Trainer, run: Path, tell: Say) -> int:
    """Restore the newest intact checkpoint; return the iteration to continue with."""
    found = load_checkpoint(run, trainer.engine, tell)
    if found is None:
        return 0
    iteration, counters, anchor = found
    trainer.load_state_dict(counters, anchor)
    return iteration


def _finish(trainer: Trainer, setup: Setup, run: Path, writer: MetricsWriter | None, tell: Say) -> None:
    """Save and evaluate the weights, then write the comparison and the report."""
    folder = run / "weights"
    with trainer.engine.averaged_weights(), aside(folder) if rank() == 0 else contextlib.nullcontext(folder) as written:
        trainer.engine.save_weights(written)
    _evaluate(trainer, setup, run, "after", trainer.config.train.iterations, writer, tell)
    if rank() == 0:
        write_comparison(run, trainer.config.eval.num_videos)
        keep_shown(run, trainer.config.eval.num_videos)
        before, after = (read_json(run / "eval" / f"{name}.json") for name in ("before", "after"))
        tell(format_paired_table(paired_table(before, after)))
        tell(f"report: {write_report(run)}")


def _evaluate(
    trainer: Trainer,
    setup: Setup,
    run: Path,
    name: str,
    iteration: int,
    writer: MetricsWriter | None,
    tell: Say,
    weights: State | None = None,
) -> None:
    """Evaluate `weights`, by default the averaged ones if any, else the trained ones.

    Scores and videos go into the run folder and the trackers.
    """
    tell(f"evaluate ({name})")
    folder, shown = run / "videos" / name, setup.config.eval.num_videos
    # The videos of `comparison.png` are chosen by the final scores, so all candidates are kept until then.
    keep_all = name in ("before", "after") or iteration == setup.config.eval.interval
    if writer is not None:
        shutil.rmtree(folder, ignore_errors=True)  # left by an interrupted evaluation
    barrier()
    folder.mkdir(parents=True, exist_ok=True)

    def save(number: int, prompt: str, video: torch.Tensor) -> None:
        if keep_all or number < shown:
            save_video(video, prompt, folder, number, setup.model.fps)

    with trainer.engine.averaged_weights() if weights is None else trainer.policy.using(weights):
        result = evaluate(setup, iteration=iteration, quiet=trainer.quiet, save=save, pause=trainer.pause)
    if writer is not None:
        scores, sheet = result.to_json(), folder.with_suffix(".png")
        with aside(sheet) as file:
            contact_sheet(result.videos, result.prompts[: len(result.videos)]).save(file, "PNG")
        videos = [path for number, path in numbered(folder).items() if number < shown]
        (run / "eval").mkdir(exist_ok=True)
        write_atomic(run / "eval" / f"{name}.json", json.dumps(scores))
        writer.write_evaluation(scores, videos, sheet)
        if found := verdict(_evaluations(run, iteration)):
            say_wrapped(f"warning: {found}", tell)


def _evaluations(run: Path, iteration: int) -> dict[str, dict[str, Any]]:
    """Return name -> scores of the run's evaluations up to an iteration; damaged files are skipped."""
    found = {}
    for file in sorted((run / "eval").glob("*.json")):
        with contextlib.suppress(UserError):  # cut off by a kill; the report names it
            found[file.stem] = read_scores(file)
    return {name: scores for name, scores in found.items() if scores["iteration"] <= iteration}


# -- text -------------------------------------------------------------------------------------------------------------


def describe(trainer: Trainer, run: Path, iteration: int, tell: Say) -> dict[str, Any]:
    """Print a summary of the run that starts or resumes at `iteration`; write `run.json` and return its content."""
    parameters = sum(numel(p) for name, p in trainer.policy.named_parameters() if ".lora_" not in name)
    trainable = sum(map(numel, trainer.engine.parameters))
    facts = environment(trainer.device, implementation(trainer.device)) | {
        "command": command_line(sys.argv),
        "ranks": world_size(),
        "attention": trainer.model.attention,
        "attention_milliseconds": trainer.model.attention_milliseconds,
        "gradient_checkpointing": trainer.model.checkpointing,
        "engine": trainer.config.train.engine,
        "parameters": parameters,
        "trainable_parameters": trainable,
        "decode": str(trainer.model.decoder.plan(trainer.latent_shape)),
        "sampler": trainer.config.sampling.sampler,
        "notes": [*trainer.full_table.notes, *trainer.model.notes],
        "sigmas": trainer.full_table.sigmas.tolist(),
        "transition_std": trainer.full_table.c.tolist(),
        "equalizer": trainer.equalizer.tolist() if trainer.config.objective.equalizer else None,
    }
    if rank() == 0:
        facts = run_facts(run, facts, iteration)
        write_json(facts, run / "run.json")
    lines = [
        f"{facts['device']} x {world_size()}, {facts['threads']} threads",
        f"{parameters / 1e6:.2f} M parameters, {trainable / 1e6:.2f} M trained",
        f"operators: {facts['operators']}, attention: {facts['attention']}",
        f"decode: {facts['decode']}",
        f"gradient checkpointing: {facts['gradient_checkpointing']}",
        *(f"note: {note}" for note in facts["notes"]),
    ]
    if measured := trainer.model.attention_milliseconds:
        times = ", ".join(f"{name} {milliseconds:.2f} ms" for name, milliseconds in measured.items())
        lines.append(f"attention, forward and backward: {times}")
    for line in lines:
        say_wrapped(line, tell)
    return facts


def format_row(row: dict[str, Any], iterations: int) -> str:
    """Format an iteration's metrics as two lines; a third names a straggling rank.

    They fit into 80 columns for up to four reward parts.
    """
    parts = {key.removeprefix(REWARD_PART): value for key, value in row.items() if key.startswith(REWARD_PART)}
    label = f"{row['iteration'] + 1:>5}/{iterations}"
    first = f"{label}  reward {row['reward/mean']:.4f}  std {format_number(row['reward/std'], 3)}  "
    first += " ".join(f"{part} {value:.3f}" for part, value in parts.items())
    if "ratio/mean" in row:
        second = (
            f"kl {row['kl/anchor']:.1e}  ratio 1{row['ratio/min'] - 1:+.1e}/{row['ratio/max'] - 1:+.1e}  "
            f"clip {row['ratio/clip_fraction']:.2f}  |g| {row['grad_norm']:.1e}  "
        )
    else:
        second = "no update: the rewards of every group are equal  "
    lines = [first, f"{'':>{len(label)}}  {second}{row['time/total']:.1f} s"]
    if slow := straggler_line(row):
        lines.append(f"{'':>{len(label)}}  {slow}")
    return "\n".join(lines)
