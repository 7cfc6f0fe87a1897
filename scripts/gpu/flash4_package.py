"""Try flash-attn-4 itself, which compiles its kernels at their first call, beside the kernels that
scripts/flash4_kit.py has compiled:
`python -m scripts.gpu.flash4_package --json FILE --wheels WHEELS --folder FOLDER [--tiny]`.

WHEELS holds the package and its compiler, and may lack: then there is nothing to try. A wheel that
is too large to travel may come in pieces, `NAME.whl.0`, `NAME.whl.1` and so on. All is installed
into FOLDER, which a process sees only if its PYTHONPATH names it, so that the carried kernels stay.

    first     a process that compiles, into an empty cache
    second    another one, which finds the cache
    carried   a third, with the carried kernels; its results should be the same
    doctor    `sage-fast doctor` with the package

On a CPU PyTorch's attention stands in for the kernels, and the steps are rehearsed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sage_fast.models.attention.backends import ATTENTION, REFERENCE
from sage_fast.ops import implementation
from sage_fast.util.environment import environment, synchronize, version_of
from sage_fast.util.files import read_json, write_json
from sage_fast.util.ranks import local_device
from scripts.flash4_kit import SHAPE

TINY_SHAPE = (1, 64, 2, 32)
DETERMINISTIC = ("out", "dk", "dv")
"""Results with the same bits each time; dq is summed by atomics."""


def gather_wheels(wheels: Path, folder: Path) -> list[str]:
    """Return the wheels in a folder; those in pieces are joined in another."""
    found = [str(file) for file in sorted(wheels.glob("*.whl"))]
    for first in sorted(wheels.glob("*.whl.0")):
        pieces = sorted(wheels.glob(f"{first.stem}.*"), key=lambda piece: int(piece.suffix[1:]))
        whole = folder / first.stem
        with whole.open("wb") as opened:
            for piece in pieces:
                opened.write(piece.read_bytes())
        found.append(str(whole))
    return found


def install(wheels: Path, folder: Path) -> Path:
    """Install wheels into a folder of their own, and return it."""
    site = folder / "site"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--no-index"]
    target = ["--no-deps", "--target", str(site)]
    subprocess.run([*pip, *target, *gather_wheels(wheels, folder)], check=True)
    return site


# -- a process that attends ------------------------------------------------------------------------


def attend(shape: tuple[int, int, int, int], results: Path) -> dict[str, Any]:
    """Attend once, forward and backward, then again; write the results and return the seconds."""
    device = local_device()
    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    generator = torch.Generator(device=device).manual_seed(0)
    drawn = [torch.randn(shape, device=device, dtype=dtype, generator=generator) for _ in range(4)]
    *inputs, upstream = drawn
    query, key, value = (tensor.requires_grad_() for tensor in inputs)
    attention = ATTENTION["flash4" if on_gpu else REFERENCE]

    def once() -> tuple[dict[str, Tensor], float]:
        synchronize(device)
        start = time.perf_counter()
        out = attention(query, key, value)
        dq, dk, dv = torch.autograd.grad(out, (query, key, value), upstream)
        synchronize(device)
        return {"out": out.detach(), "dq": dq, "dk": dk, "dv": dv}, time.perf_counter() - start

    found, first = once()
    _, again = once()
    torch.save({name: tensor.cpu() for name, tensor in found.items()}, results)
    return {"seconds": first, "again_seconds": again, "version": version_of("flash-attn-4")}


def child(name: str, folder: Path, variables: Mapping[str, str], *, tiny: bool) -> dict[str, Any]:
    """Attend in a process of its own; return what it found."""
    file = folder / f"{name}.json"
    size = ["--tiny"] if tiny else []
    command = [sys.executable, "-m", "scripts.gpu.flash4_package", "--json", str(file)]
    command += ["--results", str(folder / f"{name}.pt"), *size]
    start = time.perf_counter()
    subprocess.run(command, env=os.environ | variables, check=True)
    return read_json(file) | {"process_seconds": time.perf_counter() - start}


# -- the comparison --------------------------------------------------------------------------------


def compare(wheels: Path, folder: Path, file: Path, *, tiny: bool) -> dict[str, Any]:
    """Return what is written as JSON; the doctor's own lies beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    variables = {
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",
        "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": str(folder / "cache"),
    }
    if wheels.is_dir():
        variables["PYTHONPATH"] = str(install(wheels, folder))
    device = local_device()
    result: dict[str, Any] = {"environment": environment(device, implementation(device))}
    found = result["flash4"] = {}
    found["first"] = child("first", folder, variables, tiny=tiny)
    found["second"] = child("second", folder, variables, tiny=tiny)
    write_json(result, file)
    found["carried"] = child("carried", folder, {}, tiny=tiny)
    package, carried = (
        torch.load(folder / f"{name}.pt", weights_only=True) for name in ("first", "carried")
    )
    found["different"] = [
        name for name in DETERMINISTIC if not torch.equal(package[name], carried[name])
    ]
    found["relative_error"] = {
        name: float((package[name] - carried[name]).float().norm() / carried[name].float().norm())
        for name in carried
    }
    write_json(result, file)

    doctor = [sys.executable, "-m", "sage_fast", "doctor"]
    doctor += ["--json", str(file.with_name("flash4-package-doctor.json"))]
    found["doctor_status"] = subprocess.call(doctor, env=os.environ | variables)
    write_json(result, file)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--wheels", type=Path)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--results", type=Path, help="of a process that attends")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    if options.results is not None:
        write_json(attend(TINY_SHAPE if options.tiny else SHAPE, options.results), options.json)
        return 0
    if not options.wheels.is_dir() and local_device().type == "cuda":
        print(f"no folder {options.wheels}: skipped")
        return 0
    found = compare(options.wheels, options.folder, options.json, tiny=options.tiny)["flash4"]
    times = [f"{name} {found[name]['seconds']:.1f} s" for name in ("first", "second", "carried")]
    print(f"first call of each process: {', '.join(times)}")
    print(f"unlike the carried kernels: {', '.join(found['different']) or 'nothing'}")
    return int(found["doctor_status"])


if __name__ == "__main__":
    sys.exit(main())
