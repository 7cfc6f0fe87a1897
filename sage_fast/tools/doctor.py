"""`sage-fast doctor`: check what this machine has installed, that it computes correctly, and how
fast.

Each row gives a verdict (ok, wrong, missing or slow), what was found, and what to do. Nothing is
downloaded.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import itertools
import logging
import os
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
from packaging.requirements import Requirement

from sage_fast.models.attention.backends import ATTENTION
from sage_fast.ops import implementation
from sage_fast.tools.checks import VERDICTS, Check, tried
from sage_fast.tools.harness import head_line
from sage_fast.util.environment import environment, version_of
from sage_fast.util.errors import UserError, in_one_line
from sage_fast.util.files import write_json
from sage_fast.util.ranks import local_device

log = logging.getLogger(__name__)

OPTIONAL = {
    "triton": (
        "the fused operators on a GPU",
        "it comes with torch for CUDA: pip install triton",
        "triton",
    ),
    "flash-attn": ("an attention kernel", ATTENTION["flash"].install, "flash_attn"),
    "xformers": ("an attention kernel", ATTENTION["xformers"].install, "xformers.ops"),
    "deepspeed": ("train.engine = zero1 and zero2", "pip install 'sage-fast[deepspeed]'", ""),
    "wandb": ("a tracker", "pip install 'sage-fast[trackers]'", ""),
    "rapidocr": ("the reward ocr", "pip install 'sage-fast[ocr]'", ""),
}
"""Distribution -> use, how to get it, and the module to import of one that may be built for another
torch or CUDA."""


def doctor(file: Path | None = None) -> int:
    """Run all checks, print each when it is done, and return the exit status: 1 if anything is
    wrong.

    The first compilation of kernels may hang.

    Args:
        file: JSON, written after every row.
    """
    start, device = time.perf_counter(), local_device()
    # First: after an illegal memory access the device cannot be queried.
    about = environment(device, implementation(device))
    torch.manual_seed(0)
    done: list[Check] = []
    # The late import keeps the earlier rows if, say, diffusers is missing.
    selftest = tried("the package", lambda: _selftest(device))
    for check in itertools.chain(packages(), tools(device), selftest):
        done.append(check)
        advice = f"\n{'':43}-> {check.advice}" if check.advice else ""
        log.info(f"{check.verdict:<9}{check.name:<34}{check.found}{advice}")
        if file is not None:
            rows = [each._asdict() for each in done]
            write_json(
                {"environment": about, "seconds": time.perf_counter() - start, "checks": rows}, file
            )
    counts = Counter(check.verdict for check in done)
    summary = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict])
    log.info(f"\n{head_line(about)}\n{summary}, in {time.perf_counter() - start:.0f} s")
    return int(counts["wrong"] > 0)


def _selftest(device: torch.device) -> Iterator[Check]:
    from sage_fast.tools.selftest import checks

    return checks(device)


# -- installed packages and tools ------------------------------------------------------------------


def packages() -> Iterator[Check]:
    """Check the required packages and their versions, then the optional ones."""
    try:
        requirements = [
            Requirement(line) for line in importlib.metadata.requires("sage-fast") or []
        ]
    except importlib.metadata.PackageNotFoundError:
        requirements = []
        advice = (
            "pip install --no-build-isolation -e . in the checkout; without it the Triton kernels "
            "are not found"
        )
        yield Check("sage-fast", "wrong", "not installed: runs from a folder", advice)
    for requirement in requirements:
        if requirement.marker is None:
            yield _required(requirement)
    for name, row in OPTIONAL.items():
        yield _optional(name, *row)


def _required(requirement: Requirement) -> Check:
    name, version, advice = (
        requirement.name,
        version_of(requirement.name),
        f"pip install '{requirement}'",
    )
    if version is None:
        return Check(name, "missing" if name == "argcomplete" else "wrong", "not installed", advice)
    if not requirement.specifier.contains(version, prereleases=True):
        return Check(name, "wrong", f"{version}, expected {requirement.specifier}", advice)
    return Check(name, "ok", version)


def _optional(name: str, use: str, advice: str, module: str) -> Check:
    version = version_of(name)
    if version is None:
        return Check(name, "missing", f"not installed; used for {use}", advice)
    if module:
        try:
            importlib.import_module(module)
        except Exception as error:  # a broken package may raise anything
            found = f"{version} is installed and cannot be imported: {in_one_line(error)}"
            return Check(name, "wrong", found, f"pip uninstall {name}, or for this torch: {advice}")
    return Check(name, "ok", version)


def _encoder() -> Check:
    """Check that ffmpeg writes the videos of evaluations and samples."""
    name = "ffmpeg with libx264"
    try:
        from sage_fast.util.videos import check_encoder  # its package may be missing

        return Check(name, "ok", check_encoder())
    except ImportError as error:
        return Check(name, "wrong", in_one_line(error), "pip install imageio-ffmpeg")
    except UserError as error:
        found, _, advice = str(error).partition("; ")
        return Check(name, "wrong", found, advice.removeprefix("expected "))


def tools(device: torch.device) -> Iterator[Check]:
    """Check the compiler, the implementation of the operators on each device, the Triton kernels
    and the GPU."""
    gpu, compiler = device.type == "cuda", shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        found = f"none; {'Triton and ' if gpu else ''}the C++ operators need it"
        yield Check(
            "C++ compiler",
            "wrong" if gpu else "missing",
            found,
            "apt install g++, or set CXX (and CC)",
        )
    else:
        version = subprocess.run(
            [compiler, "--version"],
            capture_output=True,
            text=True,
            encoding="utf-8",
            errors="replace",
        ).stdout
        yield Check("C++ compiler", "ok", next(iter(version.splitlines()), compiler))
    yield _encoder()
    advice = (
        "reinstall the package where torch, triton and a C++ compiler are available; unset "
        "SAGE_FAST_OPS"
    )
    for place, wanted in {torch.device("cpu"): "C++", device: "Triton" if gpu else "C++"}.items():
        name, serving = f"operators, {place.type}", implementation(place)
        right = serving == wanted
        yield Check(
            name, "ok" if right else "missing", f"served by {serving}", "" if right else advice
        )
    if importlib.util.find_spec("sage_fast.kernels") is None:
        advice = "pip install --no-build-isolation -e . in the checkout"
        yield Check("Triton kernels", "wrong", "sage_fast.kernels is not found", advice)
    if gpu:
        major, minor = torch.cuda.get_device_capability(device)
        memory = torch.cuda.get_device_properties(device).total_memory / 2**30
        found = f"compute capability {major}.{minor}, {memory:.0f} GiB, CUDA {torch.version.cuda}"
        yield Check(torch.cuda.get_device_name(device), "ok", found)
    else:
        advice = "the testbed trains on a CPU; the 8.3 B model needs one"
        yield Check("GPU", "missing", f"torch {torch.__version__} sees none", advice)
