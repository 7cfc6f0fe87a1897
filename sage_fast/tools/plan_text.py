"""The plan of a run as text for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sage_fast.tools.harness import BURST_FLOPS
from sage_fast.tools.plan import (
    MEASURED_FLOPS,
    Plan,
    evaluation_flops,
    iteration_flops,
    run_copies,
    run_flops,
    seconds_on_a_gpu,
    seconds_on_cpu,
)
from sage_fast.util.cards import COPY_RATE, MEASURED_CARD, Card
from sage_fast.util.console import wrapped
from sage_fast.util.environment import format_bytes
from sage_fast.util.text import counted

DURATIONS = (
    ("days", 86400.0),
    ("h", 3600.0),
    ("min", 60.0),
    ("s", 1.0),
    ("ms", 1e-3),
    ("us", 1e-6),
)
"""Units of time and their seconds, the largest first."""


def format_cpu_plan(plan: Plan, reward: float = 0.0) -> str:
    """Format the plan of a run on this machine's CPU for a terminal; `reward` as in
    `format_plan`."""
    memory = {part: size for part, size in plan.memory.items() if part != "CUDA graphs"}
    iteration = iteration_flops(plan)
    lines = [
        *_format_model(plan),
        "",
        f"one iteration: {plan.samples:,} samples, {plan.trained_steps} trained steps of each",
        _line("", "forwards", "FLOPs", "on 2 cores", width=29),
    ]
    for part, work in iteration.items():
        seconds = duration(seconds_on_cpu({part: work}))
        forwards = plan.forwards.get(part)
        count = f"{forwards:,}" if forwards else ""
        lines.append(_line(part, count, f"{work:.3g}", seconds, width=29))
    if reward > 0:
        lines.append(_line("rewards, by metrics.jsonl", "", "", duration(reward), width=29))
    together = sum(iteration.values())
    seconds = duration(reward + seconds_on_cpu(iteration))
    lines.append(_line("together", "", f"{together:.3g}", seconds, width=29))

    e = plan.evaluations
    whole_run = run_flops(plan)
    run_seconds = plan.iterations * reward + seconds_on_cpu(whole_run)
    evaluation = duration(seconds_on_cpu(evaluation_flops(plan)))
    not_counted = "" if reward else " Rewards are not counted."
    lines += [
        "",
        f"the run: {plan.iterations:,} iterations, {e.count:,} evaluations of {e.videos:,} videos",
        _line("one evaluation", "", f"{e.flops:.3g}", evaluation, width=29),
        _line(
            "all of the run", "", f"{sum(whole_run.values()):.3g}", duration(run_seconds), width=29
        ),
        wrapped(
            "'on 2 cores' is at the rates that two quiet cores of an AMD EPYC reached with the "
            "testbed; on busy cores the same run has taken three times as long."
            f"{not_counted} --gpus 1 plans for a GPU.",
            first="  ",
        ),
        "",
        f"memory while it trains, engine {plan.engine}",
        *(_line(part, format_bytes(size)) for part, size in memory.items()),
        _line("together", format_bytes(sum(memory.values()))),
        "  Not counted: Python and PyTorch themselves.",
        *_format_gathering(plan),
        "",
        *_format_disk(plan),
    ]
    return "\n".join(text.rstrip() for text in lines)


def format_plan(plan: Plan, price: float = 0.0, reward: float = 0.0) -> str:
    """Format a plan for a terminal.

    Args:
        price: of an hour of a GPU, in any currency; 0 if unknown.
        reward: seconds that an iteration waits for its rewards; 0 if unknown.
    """
    gpus = counted(plan.ranks, "GPU")
    in_host_memory = []
    if plan.in_host_memory:
        size = format_bytes(plan.in_host_memory)
        what = "blocks and what is parked" if plan.streamed else "shards"
        in_host_memory.append(_line(f"host memory of each rank, for {what}", size))
    lines = [
        *_format_model(plan),
        "",
        *_format_work(plan, gpus, price, reward),
        "",
        f"memory on each of {gpus} while it trains, engine {plan.engine}",
        *(_line(part, format_bytes(count)) for part, count in plan.memory.items()),
        _line("together", format_bytes(plan.together)),
        f"  {'fits' if plan.fits else 'does not fit'}: {plan.together / 2**30:.2f} of the "
        f"{plan.gpu_memory / 2**30:.2f} GiB of a card of {plan.gpu_memory / 1e9:g} GB",
        wrapped(f"Not counted: {', '.join(plan.uncounted)}.", first="  ", rest="    "),
        *in_host_memory,
        *_format_gathering(plan),
        "",
        *_format_disk(plan),
    ]
    return "\n".join(text.rstrip() for text in lines)


def verdict(plan: Plan, changes: Mapping[str, Any] | None = None) -> str:
    """Return whether a plan fits, and how; if it does not, with what it does.

    Args:
        changes: of the settings, with which it fits; empty if there are none, None if they are not
            known.
    """
    cards = f"{counted(plan.ranks, 'GPU')} of {plan.gpu_memory / 1e9:g} GB"
    each = " on each" if plan.ranks > 1 else ""
    sizes = f"{plan.together / 2**30:.2f} of {plan.gpu_memory / 2**30:.2f} GiB{each}"
    if not plan.fits:
        start = f"This does not fit {cards}: {sizes}."
        if changes:
            options = " ".join(f"--{key} {_as_typed(value)}" for key, value in changes.items())
            return f"{start} It fits with {options}."
        if changes is not None:
            advice = "All that takes less memory is not enough: take a larger card, or several."
            return f"{start} {advice}"
        return f"{start} Try {', or '.join(plan.remedies)}."

    seconds = seconds_on_a_gpu(iteration_flops(plan), plan.copies, plan.card)
    least, estimated = (duration(each) for each in seconds)
    sentences = [
        f"This fits {cards}: {sizes}.",
        f"An iteration is estimated at {least} to {estimated}, without rewards.",
    ]
    if plan.in_host_memory:
        of_rank = " for each GPU" if plan.ranks > 1 else ""
        sentences.append(f"It takes {format_bytes(plan.in_host_memory)} of host memory{of_rank}.")
    if plan.streamed:
        sentences.append(f"{plan.streamed} of {plan.blocks} blocks are streamed.")
    if plan.parked:
        sentences.append(f"Parked (on the card only while used): {', '.join(plan.parked)}.")
    return " ".join(sentences)


def _as_typed(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _format_model(plan: Plan) -> list[str]:
    return [
        "model",
        _line("parameters", _count(plan.parameters)),
        _line("trained parameters", _count(plan.trainable)),
        _line("latents C x T x H x W", " x ".join(map(str, plan.latent_shape))),
        _line("tokens of a video", f"{plan.tokens:,}"),
    ]


def _format_gathering(plan: Plan) -> list[str]:
    """Format what it takes to compare the videos of a group on one rank; nothing if none are."""
    gathering = plan.gathering
    if gathering is None:
        return []
    groups = counted(gathering.groups, "group")
    return [
        "",
        f"videos gathered by group for {', '.join(gathering.rewards)}: {groups} an iteration",
        _line("sent between ranks in an iteration", format_bytes(gathering.sent)),
        _line("host memory of each rank, for videos", format_bytes(gathering.in_host_memory)),
    ]


def _format_disk(plan: Plan) -> list[str]:
    return [
        "start and disk",
        _line("host memory of a node while it loads", format_bytes(plan.loaded)),
        _line("a checkpoint, to which each rank writes", format_bytes(plan.checkpoint)),
        *(_line(part, format_bytes(count)) for part, count in plan.disk.items()),
        _line("disk, without videos and embeddings", format_bytes(sum(plan.disk.values()))),
    ]


def _line(label: str, *cells: str, width: int = 41) -> str:
    return f"  {label:<{width}}{''.join(f'{cell:>12}' for cell in cells)}"


def _format_work(plan: Plan, gpus: str, price: float, reward: float) -> list[str]:
    """Format FLOPs, times and GPU-hours of an iteration and of the run."""

    def work(
        label: str,
        count: int,
        flops: float,
        of_busiest: Mapping[str, float],
        copies: Mapping[str, float] | None = None,
        waited: float = 0.0,
    ) -> str:
        both = seconds_on_a_gpu(of_busiest, copies, plan.card)
        times = (duration(waited + seconds) for seconds in both)
        return _line(label, f"{count:,}" if count else "", f"{flops:.3g}", *times, width=29)

    forward = plan.flops["forward"]
    parts = {part: flops for part, flops in plan.flops.items() if part != "forward"}
    together = sum(parts.values())
    e = plan.evaluations

    # FLOPs of the GPU with the most work
    longest = iteration_flops(plan)
    evaluation = evaluation_flops(plan)
    whole_run = run_flops(plan)

    waited = plan.iterations * reward
    of_run = seconds_on_a_gpu(whole_run, run_copies(plan), plan.card)
    hours = [plan.ranks * (waited + seconds) / 3600 for seconds in of_run]

    lines = [
        f"one iteration on {gpus}: {counted(plan.samples, 'sample')}, "
        f"{counted(plan.trained_steps, 'trained step')} of each",
        _line("", "forwards", "FLOPs", "at least", _column(plan.card), width=29),
        work("one forward of one sample", 0, forward, {"rollout": forward}),
    ]
    for part, total in parts.items():
        of_part = {part: longest[part]}
        lines.append(work(part, plan.forwards.get(part, 0), total, of_part, plan.copies))
    if reward > 0:
        seconds = duration(reward)
        lines.append(_line("rewards, by metrics.jsonl", "", "", seconds, seconds, width=29))
    lines += [
        work(
            "together", sum(plan.forwards.values()), together, longest, plan.copies, waited=reward
        ),
        "",
        f"the run: {counted(plan.iterations, 'iteration')}, {counted(e.count, 'evaluation')} of "
        f"{counted(e.videos, 'video')}",
        work("one evaluation", 0, e.flops, evaluation),
        work(
            "all of the run",
            0,
            plan.iterations * together + e.count * e.flops,
            whole_run,
            run_copies(plan),
            waited=waited,
        ),
        _line("GPU-hours", "", "", *(_number(h) for h in hours), width=29),
    ]
    if price > 0:
        prices = [_number(price * h) for h in hours]
        lines.append(_line(f"at {price:g} an hour", "", "", *prices, width=29))
    lines.append(wrapped(_how_times_are_found(plan, reward), first="  "))
    return lines


def _column(card: Card) -> str:
    """Return the head of the column of a card's times."""
    if card.flops == MEASURED_CARD.flops:
        return "on H200s"
    return f"on {card.model}"


def _how_times_are_found(plan: Plan, reward: float) -> str:
    rates = ", ".join(f"{part} {rate / 1e12:.0f}" for part, rate in MEASURED_FLOPS.items())
    reached = f"with 480p videos of 81 frames: {rates}"
    tokens = f"with {plan.prompt_tokens} tokens a prompt"
    card = plan.card
    if card.flops == MEASURED_CARD.flops:
        sentences = [
            f"'at least' is a lower bound: every FLOP at {BURST_FLOPS / 1e12:.0f} TFLOP/s (a "
            f"matrix product in bf16, a burst on one H200), {tokens}.",
            f"'{_column(card)}' is at the TFLOP/s that one H200 reached by FlashAttention 4 "
            f"{reached}; several GPUs also wait for each other.",
        ]
    else:
        peak, of_h200 = (f"{flops / 1e12:.0f}" for flops in (card.flops, MEASURED_CARD.flops))
        sentences = [
            f"A card of this memory is taken for {card.name}; no time is measured on one.",
            f"'at least' has every FLOP at the {peak} TFLOP/s of its data sheet, {tokens}.",
            f"'{_column(card)}' has it at the share of that which one H200 reached of its "
            f"{of_h200} {reached}; several GPUs also wait for each other.",
        ]
    if plan.streamed:
        sentences.append(
            f"Streamed blocks are copied at an assumed {COPY_RATE / 1e9:.0f} GB/s, behind the "
            "computation unless that is shorter."
        )
    not_counted = "Communication is" if reward else "Rewards and communication are"
    sentences += [
        "Training holds the backward and the recomputation with checkpointing.",
        "The anchor is free in the iteration after its refresh.",
        f"Times are those of the GPU with the most work. {not_counted} not counted.",
    ]
    return " ".join(sentences)


def _count(count: int) -> str:
    """Return a count with its short form, such as `8.33 B = 8,326,608,160`."""
    if count >= 1e9:
        unit, scale = "B", 1e9
    elif count >= 1e6:
        unit, scale = "M", 1e6
    else:
        unit, scale = "k", 1e3
    return f"{count / scale:.3g} {unit} = {count:,}"


def duration(seconds: float) -> str:
    """Return a time in the unit that fits, such as `9.74 min`."""
    for unit, scale in DURATIONS:
        least = 2 * scale if scale > 1 else scale  # 90 s rather than 1.5 min
        if seconds >= least:
            return f"{_number(seconds / scale)} {unit}"
    smallest, scale = DURATIONS[-1]
    return f"{_number(seconds / scale)} {smallest}"


def _number(value: float) -> str:
    """Return three digits, and all of a number from 1000 on."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
