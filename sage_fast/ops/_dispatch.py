"""Choose the implementation of the operators for each device. No other module does.

Each operator registers its PyTorch reference for every device here. Fused implementations replace
it where they are installed: Triton on CUDA, the C++ extension on the CPU. float64 (tests) stays
with the reference.

`SAGE_FAST_OPS=reference` in the environment disables the fused implementations.
`SAGE_FAST_OPS=triton` with `TRITON_INTERPRET=1` runs Triton's interpreter on the CPU: slow, for
checks only, with the rounding of a GPU (kernels/common.py).
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sage_fast.ops._common import LIBRARY, Implementation
from sage_fast.ops._derivatives import autograd_kernel
from sage_fast.util.errors import UserError, first_line, nearest

log = logging.getLogger("sage_fast")

_serving: dict[str, str] = {}


def implementation(device: torch.device) -> str:
    """Name of the implementation on `device`: `C++`, `Triton`, `Triton interpreter` or `PyTorch
    reference`."""
    return _serving.get(device.type, "PyTorch reference")


REFERENCES: dict[str, Implementation] = {}
"""Operator, or its backward -> its reference."""


def _serve(fused: Implementation, reference: Implementation) -> Implementation:
    """Return a function that calls `reference` for float64 and `fused` for all else."""

    def call(*args: Any) -> Any:
        in_double = any(isinstance(arg, Tensor) and arg.dtype == torch.float64 for arg in args)
        return (reference if in_double else fused)(*args)

    return call


def _triton(name: str) -> Implementation:
    """Return a kernel that is imported at the first call, so that CPU users never load Triton."""
    module = f"sage_fast.kernels.{name.removesuffix('_backward')}"
    return lambda *args: getattr(importlib.import_module(module), name)(*args)


def _cpp(name: str) -> Implementation:
    packet = getattr(torch.ops.sage_fast_cpu, name, None)
    operator: Implementation = REFERENCES[name] if packet is None else packet.default
    if packet is None:
        log.warning(
            f"the C++ operators are an older build, without {name}; the CPU runs its PyTorch "
            "reference"
        )
    return operator


def _choose() -> dict[str, Callable[[str], Implementation]]:
    """Return device -> (operator name -> its fused implementation); record each device's in
    `_serving`."""
    choice = os.environ.get("SAGE_FAST_OPS", "")
    if choice not in ("", "reference", "triton"):
        raise UserError(f"SAGE_FAST_OPS = {choice!r}: {nearest(choice, ('reference', 'triton'))}")
    if choice == "reference":
        return {}
    fused: dict[str, Callable[[str], Implementation]] = {}
    if importlib.util.find_spec("triton") is not None:
        fused["cuda"], _serving["cuda"] = _triton, "Triton"
    if choice == "triton":
        fused["cpu"], _serving["cpu"] = _triton, "Triton interpreter"
        return fused
    if problem := _load_extension(Path(__file__).parents[1]):
        log.warning(
            f"the C++ operators {problem}; the CPU runs the slower PyTorch reference (reinstall "
            "where torch and a C++ compiler are available)"
        )
        return fused
    fused["cpu"], _serving["cpu"] = _cpp, "C++"
    return fused


def _load_extension(folder: Path) -> str | None:
    """Load the newest build of the C++ operators in `folder` that can be loaded; return why there
    is none.

    A build may be of another PyTorch, Python or processor, as on a disk that several machines
    share: it costs speed alone.
    """
    # also a broken link
    builds = sorted(folder.glob("_C.*so"), key=lambda path: path.lstat().st_mtime, reverse=True)
    reasons = []
    for build in builds:
        try:
            _check_whole(build)
            torch.ops.load_library(build)
        except (OSError, RuntimeError) as error:
            reasons.append(first_line(error.__cause__ or error))  # the loader's own, below torch's
        else:
            return None
    return f"cannot be loaded ({'; '.join(reasons)})" if reasons else "are not built"


def _check_whole(build: Path) -> None:
    """Check that a library does not end before its table of sections: to load it would end the
    process by a signal.

    Raises:
        OSError: it does, as after a copy that was interrupted, or it cannot be read.
    """
    with build.open("rb") as file:
        header = file.read(64)
        size = os.fstat(file.fileno()).st_size
    is_elf_of_64_bits = header.startswith(b"\x7fELF\x02\x01")  # the loader tells of any other
    if is_elf_of_64_bits and len(header) == 64:
        (start,) = struct.unpack_from("<Q", header, 40)
        entry_bytes, entries = struct.unpack_from("<HH", header, 58)
        expected = start + entry_bytes * entries
        if size < expected:
            raise OSError(f"{build}: file cut short, {size:,} of {expected:,} bytes")


_FUSED = _choose()


def register(
    reference: Implementation,
    *,
    mutates: Sequence[str] = (),
    cpp: bool = True,
    backward: Implementation | None = None,
    setup_context: Implementation | None = None,
) -> None:
    """Define the operator of LIBRARY that `reference`, called `<operator>_reference`, specifies.

    The reference gives its schema, runs for every device, and tells the shapes of meta and fake
    tensors. Fused implementations replace it where they are installed.

    Args:
        mutates: arguments that it writes to.
        cpp: whether the C++ extension has it; if not, the CPU runs the reference.
        backward, setup_context: its first derivative, as `torch.library.register_autograd` takes
            them. Without, any derivative raises; an operator that writes to an argument raises
            where that requires a gradient.
    """
    name = reference.__name__.removesuffix("_reference")
    REFERENCES[name] = reference
    LIBRARY.define(name + torch.library.infer_schema(reference, mutates_args=mutates))
    LIBRARY.impl(name, reference, "CompositeExplicitAutograd")
    for device, fused in _FUSED.items():
        if cpp or fused is not _cpp:
            LIBRARY.impl(name, _serve(fused(name), reference), device.upper())
    operator = getattr(torch.ops.sage_fast, name).default
    kernel = autograd_kernel(name, operator, backward, setup_context, mutates=bool(mutates))
    LIBRARY.impl(name, kernel, "Autograd", with_keyset=True)
