"""`sage-fast doctor`: check what this machine has installed, that it computes correctly, and how fast.

Each row gives a verdict (ok, wrong, missing or slow), what was found, and what to do. Nothing is downloaded.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.metadata
import importlib.util
import itertools
import logging
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from packaging.requirements import Requirement

from sage_fast.models.attention.backends import ATTENTION
from sage_fast.ops import implementation
from sage_fast.tools.harness import Save, head_line, save_nothing
from sage_fast.util.environment import environment
from sage_fast.util.errors import in_one_line
from sage_fast.util.files import write_json
from sage_fast.util.ranks import local_device

log = logging.getLogger(__name__)

Verdict = Literal["ok", "wrong", "missing", "slow"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)

OPTIONAL = {
    "triton": ("the fused operators on a GPU", "it comes with torch for CUDA: pip install triton"),
    "nvtx": ("ranges in Nsight", "pip install nvtx"),
    "flash-attn": ("an attention kernel", ATTENTION["flash"].install),
    "xformers": ("an attention kernel", ATTENTION["xformers"].install),
    "deepspeed": ("train.engine = zero1 and zero2", "pip install 'sage-fast[deepspeed]'"),
    "wandb": ("a tracker", "pip install 'sage-fast[trackers]'"),
    "trackio": ("a tracker", "pip install 'sage-fast[trackers]'"),
}
"""Distribution -> (use, how to get it). All are optional."""
COMPILED = {"triton": "triton", "nvtx": "nvtx", "flash-attn": "flash_attn", "xformers": "xformers.ops"}
"""Distribution -> module, for those that may be installed but broken: built for another torch or CUDA."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """A row of the table."""

    name: str
    verdict: Verdict
    found: str
    advice: str = ""


def tried(name: str, checks: Callable[[], Iterable[Check]]) -> Iterator[Check]:
    """Yield the rows of `checks`. If it raises, yield the error as a row: broken machines are what doctor is for."""
    try:
        yield from checks()
    except Exception as error:  # from a compiler, a driver or a package
        yield Check(name=name, verdict="wrong", found=f"ended in {in_one_line(error)}")


def run(device: torch.device | None = None, save: Save = save_nothing) -> dict[str, Any]:
    """Run all checks, log each when it is done, and return what `sage-fast doctor` writes as JSON.

    The first compilation of kernels takes minutes, or hangs.

    Args:
        device: where to run; by default a GPU if there is one.
        save: called with the result after every check.
    """
    start = time.perf_counter()
    device = device or local_device()
    # First: after an illegal memory access the device cannot be queried.
    about = environment(device, implementation(device))
    torch.manual_seed(0)
    checks: list[dict[str, Any]] = []
    result: dict[str, Any] = {"environment": about, "seconds": 0.0, "checks": checks}
    for check in itertools.chain(packages(), tools(device), tried("the package", lambda: _selftest(device))):
        log.info(format_check(check))
        checks.append(dataclasses.asdict(check))
        result["seconds"] = time.perf_counter() - start
        save(result)
    return result


def _selftest(device: torch.device) -> Iterator[Check]:
    """Run the self-test. The late import keeps the earlier rows if, say, diffusers is missing."""
    from sage_fast.tools import selftest

    yield from selftest.checks(device)


# -- installed packages and tools -------------------------------------------------------------------------------------


def packages() -> Iterator[Check]:
    """Check the required packages and their versions, then the optional ones."""
    try:
        requirements = [Requirement(line) for line in importlib.metadata.requires("sage-fast") or []]
    except importlib.metadata.PackageNotFoundError:
        requirements = []
        yield Check(
            name="sage-fast",
            verdict="wrong",
            found="not installed: runs from a folder",
            advice="pip install --no-build-isolation -e . in the checkout; without it the Triton kernels are not found",
        )
    for requirement in requirements:
        if requirement.marker is None:
            yield _required(requirement)
    for name, (use, advice) in OPTIONAL.items():
        yield _optional(name, use, advice)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _required(requirement: Requirement) -> Check:
    name, version = requirement.name, _version(requirement.name)
    advice = f"pip install '{requirement}'"
    if version is None:
        verdict: Verdict = "missing" if name == "argcomplete" else "wrong"
        return Check(name=name, verdict=verdict, found="not installed", advice=advice)
    if not requirement.specifier.contains(version, prereleases=True):
        return Check(name=name, verdict="wrong", found=f"{version}, expected {requirement.specifier}", advice=advice)
    return Check(name=name, verdict="ok", found=version)


def _optional(name: str, use: str, advice: str) -> Check:
    version = _version(name)
    if version is None:
        return Check(name=name, verdict="missing", found=f"not installed; used for {use}", advice=advice)
    if name in COMPILED:
        try:
            importlib.import_module(COMPILED[name])
        except Exception as error:  # a broken package may raise anything
            why = f"{version} is installed and cannot be imported: {in_one_line(error)}"
            return Check(
                name=name, verdict="wrong", found=why, advice=f"pip uninstall {name}, or for this torch: {advice}"
            )
    return Check(name=name, verdict="ok", found=version)


def tools(device: torch.device) -> Iterator[Check]:
    """Check the compiler, the implementation of the operators on each device, the Triton kernels and the GPU."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        uses = "Triton and the C++ operators" if device.type == "cuda" else "the C++ operators"
        verdict: Verdict = "wrong" if device.type == "cuda" else "missing"
        advice = "apt install g++, or set CXX (and CC)"
        yield Check(name="C++ compiler", verdict=verdict, found=f"none; {uses} need it", advice=advice)
    else:
        version = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
        yield Check(name="C++ compiler", verdict="ok", found=next(iter(version.splitlines()), compiler))
    for place, wanted in {torch.device("cpu"): "C++", device: {"cuda": "Triton"}.get(device.type, "C++")}.items():
        serving = implementation(place)
        right = serving == wanted
        advice = (
            ""
            if right
            else "reinstall the package where torch, triton and a C++ compiler are available; unset SAGE_FAST_OPS"
        )
        yield Check(
            name=f"operators, {place.type}",
            verdict="ok" if right else "missing",
            found=f"served by {serving}",
            advice=advice,
        )
    if importlib.util.find_spec("sage_fast.kernels") is None:
        advice = "pip install --no-build-isolation -e . in the checkout"
        yield Check(name="Triton kernels", verdict="wrong", found="sage_fast.kernels is not found", advice=advice)
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        memory = torch.cuda.get_device_properties(device).total_memory / 2**30
        found = f"compute capability {major}.{minor}, {memory:.0f} GiB, CUDA {torch.version.cuda}"
        yield Check(name=torch.cuda.get_device_name(device), verdict="ok", found=found)
    else:
        yield Check(
            name="GPU",
            verdict="missing",
            found=f"torch {torch.__version__} sees none",
            advice="the testbed trains on a CPU; the 8.3 B model needs one",
        )


# -- the report -------------------------------------------------------------------------------------------------------


def doctor(json: str | None = None) -> int:
    """Print the table and write the file `json` after every row. Return the exit status: 1 if anything is wrong."""
    save: Save = save_nothing if json is None else functools.partial(write_json, path=Path(json))
    result = run(save=save)
    log.info(format_summary(result))
    return int(any(check["verdict"] == "wrong" for check in result["checks"]))


def format_check(check: Check) -> str:
    """Format a row for a terminal, with its advice on the next line."""
    advice = f"\n{'':43}-> {check.advice}" if check.advice else ""
    return f"{check.verdict:<9}{check.name:<34}{check.found}{advice}"


def format_summary(result: Mapping[str, Any]) -> str:
    """Format the lines below the rows: the machine, and the count of each verdict."""
    counts = {verdict: sum(check["verdict"] == verdict for check in result["checks"]) for verdict in VERDICTS}
    summary = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
    return "\n".join(["", head_line(result["environment"]), f"{summary}, in {result['seconds']:.0f} s"])
