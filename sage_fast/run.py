"""One run from configuration to report: checks, model, evaluation before and after, iterations, checkpoints.

<output>/config.yaml run.json metrics.jsonl tensorboard/ checkpoints/ weights/ eval/ videos/ report.html
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import math
import os
import platform
import re
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from sage_fast import __version__, ops
from sage_fast.config import Config, dump
from sage_fast.data.prompts import read_prompts
from sage_fast.engine.checkpoint import load_checkpoint, save_checkpoint
from sage_fast.engine.distributed import barrier, initialize, rank, shutdown, world_size
from sage_fast.evaluation import Evaluation, evaluate
from sage_fast.metrics import MetricsWriter, read_lines
from sage_fast.plan import format_bytes, trajectory_bytes
from sage_fast.policy.load import Model, check_path, load_model
from sage_fast.policy.text import TextEmbedding, encode_cached
from sage_fast.report import format_paired_table, paired_table, write_report
from sage_fast.rewards import CompositeReward, RewardError, load_reward
from sage_fast.schedule import check_trainable
from sage_fast.trainer import Trainer
from sage_fast.videos import comparison_sheet, contact_sheet, save_mp4


@dataclasses.dataclass(kw_only=True)
class Setup:
    """Everything a command needs before it samples or trains; `embeddings` are filled by `encode`."""

    config: Config
    model: Model
    reward: CompositeReward
    prompts: list[str]
    eval_prompts: list[str]
    embeddings: dict[str, TextEmbedding] = dataclasses.field(default_factory=dict)

    def encode(self, cache: Path, *, quiet: bool) -> None:
        """Embed all prompts; one rank fills the cache, all read it."""
        folder = Path(self.config.data.embedding_cache or cache)
        wanted = list(dict.fromkeys(["", *self.prompts, *self.eval_prompts]))
        source = f"{self.model.path} {self.config.model.dtype}"
        if rank() == 0:
            encode_cached(wanted, self.model.load_encoder, folder, source, quiet)
        barrier()
        self.embeddings = encode_cached(wanted, self.model.load_encoder, folder, source, quiet=True)


def _attention_of(config: Config, resume: bool) -> str:
    """A run goes on with the attention it began with: a new measurement could change its bits."""
    file = Path(config.output) / "run.json"
    if config.model.attention != "auto" or not resume or not file.is_file():
        return config.model.attention
    return json.loads(file.read_text()).get("attention", "auto")


def load_setup(config: Config, prompts: list[str] | None = None, attention: str | None = None) -> Setup:
    """Read prompts, then the reward, then the model: what is cheap to find wrong comes first.

    Args:
        prompts: in place of the configured prompt files.
        attention: in place of `model.attention`.
    """
    train_prompts = read_prompts(config.data.prompts) if prompts is None else prompts
    eval_prompts = read_prompts(config.data.eval_prompts) if prompts is None else prompts
    check_path(config.model.path)
    reward = CompositeReward(load_reward(config.reward), config.reward)
    settings = dataclasses.replace(config.model, attention=attention or config.model.attention)
    model = load_model(settings, config.sampling, initialize(), config.seed)
    return Setup(config=config, model=model, reward=reward, prompts=train_prompts, eval_prompts=eval_prompts)


def check_output(config: Config, *, resume: bool) -> None:
    """Look at the output folder without touching it.

    Raises:
        ValueError: it holds another run or other files (without `resume`), or no run (with it).
    """
    run = Path(config.output)
    holds_run = (run / "config.yaml").exists()
    if resume and not holds_run:
        raise ValueError(f"output = {config.output!r}: no run to resume there; leave --resume out to start one")
    if not resume and run.exists() and (not run.is_dir() or any(run.iterdir())):
        found = "a run: continue it with --resume" if holds_run else "other files: it must be new or empty"
        raise ValueError(
            f"output = {config.output!r} already holds {found}, or choose another folder with --output; "
            "nothing was changed"
        )


def claim_output(config: Config, *, resume: bool) -> Path:
    """Make the run folder and write the settings; those of a run that is resumed are kept under another name."""
    run = Path(config.output)
    settings = run / "config.yaml"
    barrier()  # all ranks have looked before the first one writes
    if rank() == 0:
        run.mkdir(parents=True, exist_ok=True)
        if resume and settings.read_text(encoding="utf-8") != dump(config):
            settings.rename(run / f"config.until-{len(read_lines(run / 'metrics.jsonl')):06d}.yaml")
        settings.write_text(dump(config), encoding="utf-8")
    barrier()
    return run


def check_trajectories(config: Config, model: Model) -> str:
    """Size of an iteration's stored rollouts on this rank, in words.

    Raises:
        ValueError: more than is free where they are to be held.
    """
    samples = -(-config.train.prompts_per_iteration * config.train.group_size // world_size())
    size = sum(trajectory_bytes(config, math.prod(model.latent_shape(config.sampling)), samples))
    device = model.policy.device
    on_gpu = device.type == "cuda" and not config.sampling.offload_trajectories
    if on_gpu:
        free, where = torch.cuda.mem_get_info(device)[0], "GPU memory"
    else:
        free, where = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "host memory"
    if size > free:
        way = "set sampling.offload_trajectories = true, or " if on_gpu else ""
        raise ValueError(
            f"the rollouts of an iteration take {format_bytes(size)} of {where}; {format_bytes(free)} are free; "
            f"{way}lower train.group_size, train.prompts_per_iteration or train.timestep_fraction"
        )
    return f"stored rollouts: {samples} of {format_bytes(size / samples)}, {format_bytes(size)} of {where}"


def train(config: Config, *, resume: bool = False, quiet: bool = False) -> Path:
    """Train, and leave a run folder with a report; Ctrl-C leaves a checkpoint that `resume` continues.

    Returns:
        The run folder.
    """
    initialize()
    check_trainable(config)
    check_output(config, resume=resume)
    setup = load_setup(config, attention=_attention_of(config, resume))
    trajectories = check_trajectories(config, setup.model)
    run = claim_output(config, resume=resume)
    say = _say if rank() == 0 and not quiet else _nothing
    setup.encode(run / "embeddings", quiet=quiet or rank() > 0)
    trainer = Trainer(config, setup.model, setup.reward, setup.prompts, setup.embeddings, say)
    start = load_checkpoint(trainer, run) if resume else 0
    describe(trainer, run, say)
    say(trajectories)
    evaluations = []
    if not (run / "eval" / "before.json").exists():
        evaluations.append(_evaluate(trainer, setup, run, "before", 0, say))
    writer = MetricsWriter(run, start) if rank() == 0 else None
    iterations = range(start, config.train.iterations)
    done = start
    try:
        for index in tqdm(iterations, "iterations", config.train.iterations, initial=start, disable=say is _nothing):
            row = trainer.iteration(index)
            done = index + 1
            if writer is not None:
                writer.write(row)
            say(format_row(row, config.train.iterations))
            if config.eval.interval and done % config.eval.interval == 0 and done < config.train.iterations:
                evaluations.append(_evaluate(trainer, setup, run, f"iteration-{done:06d}", done, say))
            if done % config.train.checkpoint_interval == 0 or done == config.train.iterations:
                save_checkpoint(trainer, run, done)
    except (KeyboardInterrupt, RewardError) as reason:
        # A reward fails on one rank alone, where waiting for the others would never end.
        if isinstance(reason, KeyboardInterrupt) or world_size() == 1:
            save_checkpoint(trainer, run, done)
            say(f"stopped after {done} iterations; continue with --resume")
        raise
    finally:
        if writer is not None:
            writer.close()
    _finish(trainer, setup, run, evaluations, say)
    shutdown()
    return run


def _finish(trainer: Trainer, setup: Setup, run: Path, evaluations: list[Evaluation], say: Any) -> None:
    """Save the weights, evaluate them, and write the comparison and the report."""
    done = trainer.config.train.iterations
    if trainer.engine.ema is not None:
        trainer.policy.load(trainer.engine.ema)
    if rank() == 0:
        trainer.policy.save_weights(run / "weights")
    evaluations.append(_evaluate(trainer, setup, run, "after", done, say))
    if rank() == 0:
        shown = [*evaluations[:2], evaluations[-1]]
        columns = {f"{e.iteration} iterations" if e.iteration else "base": e.videos for e in shown}
        comparison_sheet(columns, evaluations[-1].prompts[: len(evaluations[-1].videos)]).save(run / "comparison.png")
        before, after = (json.loads((run / "eval" / f"{name}.json").read_text()) for name in ("before", "after"))
        say(format_paired_table(paired_table(before, after)))
        say(f"report: {write_report(run)}")


def _evaluate(trainer: Trainer, setup: Setup, run: Path, name: str, iteration: int, say: Any) -> Evaluation:
    """Evaluate with the averaged weights where there are any; scores and videos go into the run folder."""
    say(f"evaluate ({name})")
    ema = trainer.engine.ema
    with trainer.policy.using(ema if ema is not None else trainer.policy.snapshot()):
        result = evaluate(
            setup.config,
            setup.model,
            setup.reward,
            setup.eval_prompts,
            setup.embeddings,
            iteration=iteration,
            progress=say is _say,
        )
    if rank() == 0:
        (run / "eval").mkdir(exist_ok=True)
        (run / "eval" / f"{name}.json").write_text(json.dumps(result.to_json()))
        save_videos(result.videos, result.prompts, run / "videos" / name, setup.model.fps)
    return result


def save_videos(videos: list[torch.Tensor], prompts: list[str], folder: Path, fps: int) -> list[Path]:
    """One MP4 a video, named by number and prompt, and a contact sheet beside the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for i, (video, prompt) in enumerate(zip(videos, prompts)):
        slug = re.sub(r"[^a-z0-9]+", "-", prompt.lower()).strip("-")[:60]
        paths.append(folder / f"{i:02d}-{slug}.mp4")
        save_mp4(paths[-1], video, fps)
    if videos:
        contact_sheet(videos, prompts[: len(videos)]).save(folder.with_suffix(".png"))
    return paths


# -- words ------------------------------------------------------------------------------------------------------------


def describe(trainer: Trainer, run: Path, say: Any) -> None:
    """Print and record what this run is made of."""
    parameters = sum(p.numel() for p in trainer.policy.transformer.parameters())
    trainable = sum(p.numel() for p in trainer.engine.parameters)
    on_gpu = trainer.device.type == "cuda"
    facts = {
        "sage_fast": __version__,
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("torch", "diffusers", "peft")},
        "device": torch.cuda.get_device_name() if on_gpu else f"CPU, {torch.get_num_threads()} threads",
        "ranks": world_size(),
        "operators": ops.implementation(trainer.device),
        "attention": trainer.model.attention,
        "attention_milliseconds": trainer.model.attention_milliseconds,
        "parameters": parameters,
        "trainable_parameters": trainable,
        "decode": str(trainer.model.decoder.plan(trainer.latent_shape)),
        "sampler": trainer.config.sampling.sampler,
        "notes": list(trainer.full_table.notes),
        "sigmas": trainer.full_table.sigmas.tolist(),
        "transition_std": trainer.full_table.c.tolist(),
        "equalizer": trainer.equalizer.tolist(),
    }
    if rank() == 0:
        (run / "run.json").write_text(json.dumps(facts, indent=1))
    say(f"{facts['device']} x {world_size()} | {parameters / 1e6:.2f} M parameters, {trainable / 1e6:.2f} M trained | "
        f"operators: {facts['operators']} | attention: {facts['attention']}")  # fmt: skip
    if measured := trainer.model.attention_milliseconds:
        say("attention, forward and backward: " + ", ".join(f"{name} {ms:.2f} ms" for name, ms in measured.items()))
    say(f"decode: {facts['decode']}")
    for note in trainer.full_table.notes:
        say(f"note: {note}")


def format_row(row: dict[str, Any], iterations: int) -> str:
    """One line of numbers for an iteration."""
    skip = {"mean", "std", "zero_std_groups", "dropped"}
    rewards = {key.removeprefix("reward/"): value for key, value in row.items() if key.startswith("reward/")}
    parts = " ".join(f"{part} {value:.3f}" for part, value in rewards.items() if part not in skip)
    line = f"{row['iteration'] + 1:>5}/{iterations}  reward {rewards['mean']:.4f} ({parts})  std {rewards['std']:.3f}  "
    if "ratio/mean" not in row:
        return line + "no update: the rewards of every group are equal"
    return line + (
        f"kl {row['kl/anchor']:.1e}  ratio 1{row['ratio/min'] - 1:+.1e}/{row['ratio/max'] - 1:+.1e}  "
        f"clip {row['ratio/clip_fraction']:.2f}  |g| {row['grad_norm']:.2e}  {row['time/total']:.1f} s"
    )


def _say(line: str) -> None:
    tqdm.write(line)


def _nothing(line: str) -> None:
    del line
