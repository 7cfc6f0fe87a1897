"""Versions, commit, device and free memory, as recorded with every run and every measurement."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shlex
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from sage_fast import __version__
from sage_fast.util.container import available_memory

PEAK_TFLOPS = {
    "H100 PCIe": 756,
    "H[12]00 NVL": 835,
    "G?H[12]00|H800": 989,
    "H20": 148,
    "A[18]00": 312,
    "B200": 2250,
    "L40S": 362,
    "L40$": 181,
    "L4$": 121,
    "A40$": 149.7,
    "A10$": 125,
    "A10G$": 70,
    "RTX A6000$": 154.8,
    "RTX 6000 Ada Generation$": 364.2,
    "RTX 3090$": 71,
    "RTX 4080$": 97.5,
    "RTX 4090$": 165.2,
    "RTX 5080$": 112.6,
    "RTX 5090$": 209.5,
}
"""Pattern of GPUs' names -> dense bfloat16 peak with sums in float32, by their data sheets or
NVIDIA's white papers of the architectures; of several that fit, the first counts.

GeForce cards, L40 and A10G add in float32 at half the rate that they multiply. `$` tells a card
from its Ti, SUPER, D, laptop and virtual namesakes, whose peaks are others.
"""

PACKAGES = ("torch", "triton", "diffusers", "transformers", "peft", "accelerate")


def version_of(name: str) -> str | None:
    """Return the version of an installed distribution; None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def environment(device: torch.device, operators: str) -> dict[str, Any]:
    """Return what it takes to repeat a result: commit, date, device, threads, operators and
    versions."""
    versions = {name: version_of(name) for name in PACKAGES}
    installed = {name: version for name, version in versions.items() if version is not None}
    return {
        "sage_fast": __version__,
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "operators": operators,
        "python": platform.python_version(),
        **installed,
    }


def command_line(arguments: Sequence[str]) -> str:
    """Return the typed command as a shell line.

    `python -m sage_fast` arrives as the path of __main__.py.
    """
    program, *others = arguments
    if program.endswith("sage_fast/__main__.py"):
        return shlex.join(["python", "-m", "sage_fast", *others])
    return shlex.join([program, *others])


def commit() -> str | None:
    """Return the commit of the checkout the package was imported from, with `+changes` if tracked
    files differ.

    Without git or `.git`, return the environment variable COMMIT, or None.
    """
    # Only this checkout, not a repository around it; and its hash, whatever tags there are.
    describe = [
        "git",
        "--git-dir=.git",
        "describe",
        "--always",
        "--abbrev=40",
        "--exclude=*",
        "--dirty=+changes",
    ]
    folder = Path(__file__).resolve().parents[2]
    try:
        return subprocess.run(
            describe,
            capture_output=True,
            text=True,
            encoding="utf-8",
            errors="replace",
            cwd=folder,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):  # no git, or no `.git`
        return os.environ.get("COMMIT") or None


def device_name(device: torch.device) -> str:
    """Return the device's name, such as `NVIDIA H200` or `AMD EPYC 9V74 80-Core Processor`."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the peak FLOP/s of a device by its data sheet; None if it is unknown: on a CPU, and
    for other types."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return None
    return data_sheet_flops(device_name(device))


def data_sheet_flops(name: str) -> float | None:
    """Return the dense bfloat16 FLOP/s of a card by its data sheet; None for a card that is not in
    `PEAK_TFLOPS`, and for a CPU.

    Args:
        name: as CUDA names the card.
    """
    if "MIG" in name:  # a slice
        return None
    for part, tflops in PEAK_TFLOPS.items():
        if re.search(rf"\b({part})\b", name):
            return 1e12 * tflops
    return None


def synchronize(device: torch.device) -> None:
    """Wait until a GPU is idle; a no-op on the CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free_bytes(device: torch.device) -> int:
    """Return the bytes PyTorch can still allocate on `device`, including its cached free blocks."""
    if device.type == "cuda":
        reserve = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + reserve
    return available_memory()


BYTE_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
"""Units and their bytes, the largest first."""


def format_bytes(count: float) -> str:
    """Format a byte count in the largest unit that fits, such as `15.51 GiB`."""
    for unit, scale in BYTE_UNITS:
        if count >= scale:
            return f"{count / scale:,.2f} {unit}"
    return f"{count:.0f} B"
