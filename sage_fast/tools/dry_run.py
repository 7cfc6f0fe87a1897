"""What a run would do and cost, before it starts: `sage-fast train CONFIG --dry-run`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch

from sage_fast.algorithm.distilled import check_distilled
from sage_fast.algorithm.trainable import check_trainable
from sage_fast.callbacks.load import check_callbacks
from sage_fast.config.schema import Config
from sage_fast.data.prompt_checks import (
    check_captions,
    check_prompt_sets,
    idle_negatives,
    notes_on_prompts,
    shared_prompts,
)
from sage_fast.data.prompts import Prompt, configured_prompts
from sage_fast.models.find import family_note, find_spec
from sage_fast.models.headers import check_weights
from sage_fast.rewards.comparing import check_comparing, comparing_keys, notes_on_comparing
from sage_fast.rewards.load import check_prompts, dry_run_reward
from sage_fast.run.messages import config_warnings, method_of
from sage_fast.run.train import check_here
from sage_fast.run_folder import RunFolder
from sage_fast.tools.plan import (
    MOST_CPU_SECONDS,
    changes_that_fit,
    plan_of_run,
    run_flops,
    seconds_on_cpu,
)
from sage_fast.tools.plan_text import format_cpu_plan, format_plan, verdict
from sage_fast.util.console import wrapped
from sage_fast.util.errors import UserError
from sage_fast.util.text import counted
from sage_fast.util.videos import check_encoder


def dry_run(
    config: Config,
    ranks: int,
    gpu_memory: float,
    price: float = 0.0,
    *,
    resume: bool = False,
    may_be_cpu: bool = False,
) -> str:
    """Return the method of a run, what it trains on, and its plan on `ranks` ranks, as text. Loads
    no weights.

    The first line says why the run would not start on this machine, if it would not: a plan may be
        for another one.

    If a run is in the output folder, what its iterations waited for rewards enters the times.

    Args:
        may_be_cpu: plan for CPU cores if this machine has no GPU and the run is small enough.

    Raises:
        UserError: the settings are impossible, `model.path` is not a checkpoint, prompts, a reward
            or a callback are missing or are none, or ffmpeg cannot write videos.
    """
    check_encoder()
    obstacle = ""
    try:
        check_here(config, resume=resume)
    except UserError as error:
        obstacle = wrapped(f"This run does not start here: {error}") + "\n\n"
    spec = find_spec(config.model.path)
    check_weights(spec)
    assumption = family_note(spec)
    if assumption:
        assumption = wrapped(f"note: {assumption}") + "\n\n"
    resolved = check_trainable(config, ranks)
    check_distilled(spec.distillation, resolved.objective)
    check_callbacks(config)
    train, heldout = configured_prompts(config.data)
    check_prompt_sets(config.data, config.model.path, spec, train, heldout)
    check_captions([*train, *heldout], spec)
    warnings = config_warnings(resolved, spec.distillation)
    data = _format_data(config, train, heldout, warnings)  # before the plan, which takes a second
    waits = []  # of the iterations of a run that is there
    for row in RunFolder(config.output).rows:
        if isinstance(row.get("time/reward"), float):
            waits.append(row["time/reward"])
    planned = plan_of_run(config, spec, ranks=ranks, gpu_memory=gpu_memory)
    reward = statistics.median(waits) if waits else 0.0
    is_small = seconds_on_cpu(run_flops(planned)) <= MOST_CPU_SECONDS
    first = ""
    if may_be_cpu and is_small and not torch.cuda.is_available():
        costs = format_cpu_plan(planned, reward)
    else:
        changes = None
        if not planned.fits and ranks == 1:
            changes = changes_that_fit(config, spec, gpu_memory) or {}
        first = wrapped(verdict(planned, changes)) + "\n\n"
        costs = format_plan(planned, price, reward)
    method = wrapped(method_of(resolved.objective, config.sampling))
    return f"{obstacle}{assumption}{first}{method}\n\n{data}\n\n{costs}"


def _format_data(
    config: Config, train: Sequence[Prompt], heldout: Sequence[Prompt], warnings: Sequence[str]
) -> str:
    """Format the prompts, the rewards, and the warnings about the settings."""
    lines = ["prompts and rewards"]
    notes: list[str] = []
    lines.append(f"  {config.data.prompts}: {counted(len(train), 'prompt')}{_keys_of(train)}")
    evaluated = min(config.eval.num_prompts, len(heldout))
    heldout_count = counted(len(heldout), "held-out prompt")
    held = f"{heldout_count}{_keys_of(heldout)}, of which {evaluated} are evaluated"
    lines.append(f"  {config.data.eval_prompts}: {held}")
    for key, entry in config.named_rewards.items():
        weights = " + ".join(f"{weight:g} {part}" for part, weight in entry.weights.items())
        lines.append(f"  {key.removesuffix('.name')} {entry.name}: {weights or 'only observes'}")
        notes += dry_run_reward(entry, key)
        scored = heldout if key == "eval.judge" else [*train, *heldout]
        check_prompts(entry, key, {prompt.key: prompt.metadata for prompt in scored})
    comparing = comparing_keys(config.reward)
    check_comparing(config, comparing)
    notes += [f"note: {note}" for note in notes_on_comparing(config, comparing)]
    notes += [f"note: {note}" for note in notes_on_prompts(train, heldout)]
    idle = idle_negatives(config, [*train, *heldout])
    if idle:
        notes.append(f"note: {idle}")
    shared = shared_prompts(train, heldout)
    if shared:
        notes.append(f"note: {shared}")
    notes += [f"warning: {warning}" for warning in warnings]
    for note in notes:
        lines.append(wrapped(note, first="  ", rest="    "))
    return "\n".join(lines)


def _keys_of(prompts: Sequence[Prompt]) -> str:
    keys = sorted({key for prompt in prompts for key in prompt.metadata})
    images = ", each with an image" if any(prompt.image for prompt in prompts) else ""
    return f"{images} (metadata: {', '.join(keys)})" if keys else images
