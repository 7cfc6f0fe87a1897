"""What scripts/first_real_run.sh asks of sage-fast: the cost of its steps, what it downloads, the
GPUs of this machine, and what a measured signal means for the run.

The script runs this file from the folder that its user is in.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import constants

from sage_fast.cli import guarded
from sage_fast.config.command_line import split_settings
from sage_fast.config.fields import is_hub_id
from sage_fast.config.loader import load
from sage_fast.config.schema import Config
from sage_fast.models.find import find_spec
from sage_fast.models.registry import split_path
from sage_fast.rewards.load import reward_bytes, reward_sources
from sage_fast.tools.plan import (
    Plan,
    evaluation_flops,
    iteration_flops,
    plan_of_run,
    run_copies,
    run_flops,
    seconds_on_a_gpu,
)
from sage_fast.tools.plan_text import duration, verdict
from sage_fast.util.console import wrapped
from sage_fast.util.environment import format_bytes
from sage_fast.util.errors import UserError
from sage_fast.util.text import counted

SCRIPT = "first_real_run.sh"
ENCODER_BYTES = 16e9
"""Size of the published text encoders (`sage_fast/models/encoders.py`)."""
EXPORTED_COPIES = 5
"""Sizes of the adapter that an export takes at most: one each for diffusers and peft, and one and a
half for each other layout, whose fused layers need it."""
TOKENIZER_FILES = ("*.json", "*.txt")
READ_IN_PART = {
    "Qwen/Qwen2-VL-2B-Instruct": TOKENIZER_FILES,
    "laion/CLIP-ViT-H-14-laion2B-s32B-b79K": TOKENIZER_FILES,
}
"""Hub id -> patterns of the files that are read, where a reward does not read all of them."""
WARMUP = 1
"""Iterations that `sage-fast profile` runs before those that it measures."""
RATIO = "signal / noise of an iteration"
"""Row of signal.json."""
TOLD_FROM_0 = 2.0
"""Standard errors that a ratio must have to be told from 0."""
TOO_NOISY = 3
"""Exit status of the action `signal` where it does not say to train."""


# -- cost ------------------------------------------------------------------------------------------


class Step(NamedTuple):
    """A step that takes GPU time.

    Attributes:
        seconds: at the fastest rate of an H200, and at the rates of its measured iteration.
    """

    name: str
    what: str
    seconds: tuple[float, float]


def gpu_steps(planned: Plan, guided: Plan, signal: int, scales: tuple[float, float]) -> list[Step]:
    """Return the steps that take GPU time.

    Args:
        planned: plan of the run.
        guided: the same with evaluations at the second of `scales`.
        signal: iterations of the step `signal`.
        scales: guidance scales at which the base model is scored.
    """
    evaluations = planned.evaluations
    videos = counted(evaluations.videos, "video")

    own, other = (
        seconds_on_a_gpu(evaluation_flops(each), None, each.card) for each in (planned, guided)
    )
    scored = (own[0] + other[0], own[1] + other[1])

    least, measured = seconds_on_a_gpu(iteration_flops(planned), planned.copies, planned.card)
    collected = ((signal + WARMUP) * least, (signal + WARMUP) * measured)

    trained = seconds_on_a_gpu(run_flops(planned), run_copies(planned), planned.card)
    iterations = counted(planned.iterations, "iteration")
    return [
        Step("base", f"{videos} at guidance {scales[0]:g}, {videos} at {scales[1]:g}", scored),
        Step("signal", f"{signal} iterations and a warm-up", collected),
        Step("train", f"{iterations}, {evaluations.count} evaluations", trained),
    ]


def format_cost(title: str, planned: Plan, steps: Sequence[Step], sizes: Mapping[str, str]) -> str:
    """Format what the run takes for a terminal.

    Args:
        sizes: what -> how much memory or disk it takes.
    """
    least, measured = (sum(step.seconds[which] for step in steps) for which in (0, 1))
    rows = [*steps, Step("together", "", (least, measured))]
    lines = [f"by the plan, on {title}", f"  {'step':<10}{'':<38}{'time':>22}  GPU-hours"]
    for name, what, seconds in rows:
        times = " to ".join(map(duration, seconds))
        hours = " to ".join(f"{planned.ranks * each / 3600:.3g}" for each in seconds)
        lines.append(f"  {name:<10}{what:<38}{times:>22}  {hours}")
    lines += [f"  {what:<48}{size:>22}" for what, size in sizes.items()]
    notes = (
        "The lower time has every operation at the fastest rate that one H200 reached, the upper "
        "one at the rates of its measured iteration. Rewards, text encoders, loading and "
        "communication come on top."
    )
    lines.append(wrapped(notes, first="  "))
    return "\n".join(lines)


def cost_of(
    config: Config, *, gpus: int, gpu_memory: float, signal: int, used_at: float
) -> tuple[str, Plan]:
    """Return what the run takes, as text, and its plan.

    Args:
        gpu_memory: of a GPU, in GB.
        signal: iterations of the step `signal`.
        used_at: second guidance scale at which the base model is scored.
    """
    spec = find_spec(config.model.path)
    of_guided = config.replace({"eval.guidance_scale": used_at})
    planned, guided = (
        plan_of_run(each, spec, ranks=gpus, gpu_memory=1e9 * gpu_memory)
        for each in (config, of_guided)
    )
    steps = gpu_steps(planned, guided, signal, (config.eval_guidance_scale, used_at))

    together, available = planned.together / 2**30, planned.gpu_memory / 2**30
    sizes = {
        "memory of each GPU while it trains": f"{together:.2f} of {available:.2f} GiB",
        "host memory while the model loads": format_bytes(planned.loaded),
        "host memory for the gradients of signal": format_bytes(4.0 * signal * planned.trainable),
        "disk of FOLDER, without videos": format_bytes(run_bytes(planned)),
        "disk of the downloads, at least": format_bytes(download_bytes(config, planned)),
    }
    title = f"{counted(gpus, 'GPU')} of {gpu_memory:g} GB"
    return format_cost(title, planned, steps, sizes), planned


def print_cost(options: argparse.Namespace, config: Config) -> None:
    """Print what the run takes, and check that it fits the GPUs and the disks.

    Raises:
        UserError: it does not.
    """
    text, planned = cost_of(
        config,
        gpus=options.gpus,
        gpu_memory=options.gpu_memory,
        signal=options.signal,
        used_at=options.used_at,
    )
    print(text)
    if not planned.fits:
        raise UserError(verdict(planned))

    needs = {options.folder: max(0.0, run_bytes(planned) - bytes_in(options.folder))}
    if not (options.folder / "done" / "fetch").exists():
        needs[Path(constants.HF_HUB_CACHE)] = download_bytes(config, planned)
    check_disks(needs)


def run_bytes(planned: Plan) -> float:
    """Return the bytes of the run and its export."""
    return sum(planned.disk.values()) + EXPORTED_COPIES * planned.disk["weights: final"]


def download_bytes(config: Config, planned: Plan) -> float:
    """Return the bytes that are downloaded at least: 0 where all models are in folders."""
    if not list(downloads(config)):
        return 0.0
    of_rewards = (reward_bytes(entry, key) or 0.0 for key, entry in config.named_rewards.items())
    return planned.loaded + ENCODER_BYTES + sum(of_rewards)


def bytes_in(folder: Path) -> int:
    """Return the bytes of a folder's files; 0 if there is none."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def check_disks(needs: Mapping[Path, float]) -> None:
    """Check that disks have room.

    Args:
        needs: folder, which may have to be made -> bytes that are to be written into it.

    Raises:
        UserError: a disk has less than its folders need.
    """
    folders_of: dict[int, list[Path]] = {}
    for folder in needs:
        disk = _first_that_exists(folder).stat().st_dev
        folders_of.setdefault(disk, []).append(folder)

    for folders in folders_of.values():
        free = shutil.disk_usage(_first_that_exists(folders[0])).free
        needed = sum(needs[folder] for folder in folders)
        if free < needed:
            raise UserError(
                f"the disk of {' and '.join(map(str, folders))} has {format_bytes(free)} free, and "
                f"about {format_bytes(needed)} are needed; choose another FOLDER, or another "
                "HF_HOME for the downloads"
            )


def _first_that_exists(folder: Path) -> Path:
    return next(place for place in (folder, *folder.parents) if place.exists())


# -- downloads -------------------------------------------------------------------------------------


def downloads(config: Config) -> Iterator[list[str]]:
    """Yield the arguments of `hf download` for each model that is named by its hub id: that of the
    policy, those of the rewards and of the judge."""
    names = [split_path(config.model.path)[1]]
    for key, entry in config.named_rewards.items():
        names += [source for source, _ in reward_sources(entry, key).values()]

    for name in dict.fromkeys(names):
        if not is_hub_id(name) or Path(name).is_dir():
            continue
        arguments = [name]
        for pattern in READ_IN_PART.get(name, ()):
            arguments += ["--include", pattern]
        yield arguments


def print_downloads(options: argparse.Namespace, config: Config) -> None:
    for arguments in downloads(config):
        print(*arguments)


# -- GPUs ------------------------------------------------------------------------------------------


def check_gpus(options: argparse.Namespace, config: Config) -> None:
    """Check that this machine has as many GPUs as are wanted.

    Raises:
        UserError: it has fewer.
    """
    found, wanted = torch.cuda.device_count(), options.gpus
    if found >= wanted:
        return
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    hidden = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"
    if not found:
        raise UserError(
            f"PyTorch sees no GPU here{hidden}, and {wanted} are wanted. If this is a login node, "
            f"the steps cost and fetch run here: {SCRIPT} FOLDER cost fetch. For the others start "
            "the same command on the node with the GPUs, through the scheduler or by ssh. GPUS=0 "
            "CONFIG=configs/demo.yaml and --eval.judge testbed-judge rehearse on the CPU"
        )
    raise UserError(
        f"PyTorch sees {counted(found, 'GPU')} here{hidden}, and {wanted} are wanted. GPUS={found} "
        f"trains the same on {found}, in more time (GPUS={found} {SCRIPT} FOLDER cost says how "
        "long); nvidia-smi says whether one is missing"
    )


# -- signal ----------------------------------------------------------------------------------------


def what_a_signal_means(ratio: float | None, error: float | None, iterations: int) -> str:
    """Return what a ratio of signal to noise at the base means for a run.

    The signals of N iterations add up, and so do the variances of their noises: the squared signal
    of the sum is N^2 times that of one, its noise N times.

    Args:
        ratio: squared signal over the variance of the noise, of one iteration.
        error: its standard error.
    """
    if ratio is None or error is None:
        return "The ratio is undefined: measure more iterations."
    if ratio < TOLD_FROM_0 * error:
        return (
            f"Signal / noise of an iteration is {ratio:.3g} ± {error:.2g}: not told from 0. Do not "
            "train before you have measured more iterations, or found a batch or a reward with "
            "more signal."
        )
    total = f"{iterations * ratio:.3g} ± {iterations * error:.2g}"
    added = (
        f"Signal / noise of an iteration is {ratio:.3g} ± {error:.2g}. Were it to stay so, "
        f"{iterations} iterations would add up to {total}."
    )
    if is_enough(ratio, error, iterations):
        return f"{added} Signal outweighs noise: train."
    return f"{added} Noise would outweigh signal: take larger groups or more prompts."


def is_enough(ratio: float | None, error: float | None, iterations: int) -> bool:
    """Return whether `what_a_signal_means` says to train."""
    if ratio is None or error is None or ratio < TOLD_FROM_0 * error:
        return False
    return iterations * ratio >= 1


def print_signal(options: argparse.Namespace, config: Config) -> int:
    """Print what the measured signal means; return `TOO_NOISY` unless it says to train."""
    file = options.folder / "signal" / "signal.json"
    (rows,) = json.loads(file.read_text(encoding="utf-8"))["signal"].values()
    cell: dict[str, Any] = rows[RATIO]
    measured = cell["value"], cell["error"], config.train.iterations
    print(wrapped(what_a_signal_means(*measured)))
    return 0 if is_enough(*measured) else TOO_NOISY


# -- command line ----------------------------------------------------------------------------------

ACTIONS: dict[str, Callable[[argparse.Namespace, Config], int | None]] = {
    "cost": print_cost,
    "downloads": print_downloads,
    "gpus": check_gpus,
    "signal": print_signal,
}


def run(arguments: Sequence[str]) -> int:
    words, settings = split_settings(arguments)
    parser = argparse.ArgumentParser(prog=SCRIPT, allow_abbrev=False)
    parser.add_argument("action", choices=ACTIONS)
    parser.add_argument("config", type=Path)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--gpus", type=int)
    parser.add_argument("--gpu-memory", type=float)
    parser.add_argument("--signal", type=int)
    parser.add_argument("--used-at", type=float)
    options = parser.parse_args(words)
    return ACTIONS[options.action](options, load(options.config, settings)) or 0


if __name__ == "__main__":
    sys.exit(guarded(SCRIPT, lambda: run(sys.argv[1:])))
