"""What `run.json` and the first lines of a run say of it, and its throughput."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sage_fast.algorithm.flops import flops
from sage_fast.ops import implementation
from sage_fast.run import claim
from sage_fast.run.messages import method_of
from sage_fast.run_folder import RunFolder
from sage_fast.trainer import Trainer
from sage_fast.util.console import wrapped
from sage_fast.util.environment import command_line, environment, format_bytes, peak_flops
from sage_fast.util.files import write_json
from sage_fast.util.ranks import rank, world_size
from sage_fast.util.text import counted

log = logging.getLogger(__name__)


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
    parameters = 0
    for name, parameter in trainer.policy.named_parameters():
        if ".lora_" not in name:
            parameters += shape(parameter).numel()
    trainable = sum(shape(parameter).numel() for parameter in trainer.engine.parameters)

    stream = trainer.policy.stream
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
        "streamed_blocks": 0 if stream is None else stream.count,
        "parked": trainer.model.parked,
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
        f"{facts['device']} x {world_size()}, {counted(facts['threads'], 'thread')}",
        f"{parameters / 1e6:.2f} M parameters, {trainable / 1e6:.2f} M trained",
        f"operators: {facts['operators']}, attention: {facts['attention']}",
        f"decode: {facts['decode']}",
        f"gradient checkpointing: {facts['gradient_checkpointing']}",
        *_kept_off_the_device(trainer),
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


def _kept_off_the_device(trainer: Trainer) -> list[str]:
    """Return what is on the device only while it is used."""
    lines = []
    stream = trainer.policy.stream
    if stream is not None:
        host = format_bytes(stream.host_bytes)
        blocks = len(trainer.policy.block_list())
        lines.append(f"streamed blocks: {stream.count} of {blocks}, {host} in host memory")
    if trainer.model.parked:
        lines.append(f"in host memory while training: {', '.join(trainer.model.parked)}")
    return lines


def _named_things(trainer: Trainer) -> list[str]:
    """Return what a run reads, by its whole path: the settings file may stand in another folder."""
    config = trainer.config
    lines = [
        f"model: {config.model.path}",
        f"prompts: {config.data.prompts}; held out: {config.data.eval_prompts}",
    ]
    for key, entry in config.named_rewards.items():
        lines.append(f"{key.removesuffix('.name')}: {entry.name}")
    if config.model.weights:
        lines.append(f"weights: {config.model.weights}")
    return lines


def throughput(trainer: Trainer, row: Mapping[str, Any]) -> dict[str, float]:
    """Return samples per GPU-hour of an iteration and, where the GPU's peak is known, its MFU and
    HFU.

    All are over all ranks and the whole iteration, rewards and waiting included. HFU counts what a
    backward recomputes.
    """
    config = trainer.config
    samples = config.train.samples
    gpu_seconds = row["time/total"] * world_size()
    found = {"throughput/samples_per_gpu_hour": 3600 * samples / gpu_seconds}

    peak = peak_flops(trainer.device, trainer.policy.dtype)
    if not peak:
        return found
    cost = trainer.model.spec.cost(config)
    for name, mode in (("mfu", None), ("hfu", trainer.model.checkpointing)):
        by_part = flops(
            cost,
            trainer.forwards,
            samples,
            checkpointing=mode,
            trains_adapter=config.model.trains_adapter,
        )
        found[f"throughput/{name}"] = sum(by_part.values()) / (gpu_seconds * peak)
    return found
