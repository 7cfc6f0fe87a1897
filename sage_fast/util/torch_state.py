"""PyTorch's process-wide settings: what the code of a plug-in changes is put back, and a note names it."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

import torch

from sage_fast.util.console import wrapped

log = logging.getLogger(__name__)

Accessors = tuple[Callable[[], Any], Callable[[Any], object]]
"""Functions that read and write a setting."""


def _attributes(owner: str, *names: str) -> dict[str, Accessors]:
    holder = attrgetter(owner)(torch)
    return {
        f"{owner}.{x}": (functools.partial(getattr, holder, x), functools.partial(setattr, holder, x)) for x in names
    }


def _set_device(device: torch.device) -> None:
    torch.set_default_device(None if device.type == "cpu" else device)  # None: as at the start


SETTINGS: dict[str, Accessors] = {
    "set_grad_enabled": (torch.is_grad_enabled, torch.set_grad_enabled),
    "set_default_dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "set_default_device": (torch.get_default_device, _set_device),
    "set_num_threads": (torch.get_num_threads, torch.set_num_threads),
    "use_deterministic_algorithms": (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    "autograd.set_detect_anomaly": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    "set_float32_matmul_precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    **_attributes("backends.cudnn", "enabled", "benchmark", "deterministic", "allow_tf32"),
    **_attributes("backends.mkldnn", "enabled", "deterministic"),
    **_attributes("backends.cuda.matmul", "allow_fp16_accumulation", "allow_fp16_reduced_precision_reduction"),
    **_attributes("backends.cuda.matmul", "allow_bf16_reduced_precision_reduction"),
    **_attributes("utils.deterministic", "fill_uninitialized_memory"),
}
"""Settings of `torch`: name -> its functions. Those of TF32 come last, since older ones write to them."""
for kind in ("cpu", "cuda"):
    for what, read in (("enabled", torch.is_autocast_enabled), ("dtype", torch.get_autocast_dtype)):
        write = attrgetter(f"set_autocast_{what}")(torch)
        SETTINGS[f"autocast({kind!r}, {what})"] = functools.partial(read, kind), functools.partial(write, kind)
for kind in ("flash", "mem_efficient", "math", "cudnn"):
    reads, writes = (attrgetter(name)(torch.backends.cuda) for name in (f"{kind}_sdp_enabled", f"enable_{kind}_sdp"))
    SETTINGS[f"backends.cuda.enable_{kind}_sdp"] = reads, writes
for part in ("", ".cudnn", ".mkldnn", ".cuda.matmul", ".cudnn.conv", ".cudnn.rnn", ".mkldnn.matmul"):
    SETTINGS |= _attributes(f"backends{part}", "fp32_precision")

_noted: set[tuple[str, str]] = set()


def _value(name: str) -> Any:
    """Read a setting; None where it cannot be said, as for an old function of TF32 beside the new attributes."""
    with contextlib.suppress(RuntimeError):
        return SETTINGS[name][0]()


@contextlib.contextmanager
def restored(who: str) -> Iterator[None]:
    """Put the settings back after the code of a plug-in, whose name is `who`; a note says once which it changed."""
    before = {name: _value(name) for name in SETTINGS}
    try:
        yield
    finally:
        changed = [name for name, value in before.items() if _value(name) != value]
        for name in SETTINGS if changed else ():
            if before[name] is not None and _value(name) != before[name]:
                SETTINGS[name][1](before[name])
        if new := [f"torch.{name}" for name in changed if (who, name) not in _noted]:
            _noted.update((who, name) for name in changed)
            log.warning(wrapped(f"note: {who} changes {', '.join(new)} for the whole process; it was put back"))
