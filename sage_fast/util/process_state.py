"""Process-wide settings, mostly PyTorch's: what the code of a plug-in changes is put back, and a note names it.

Functions count too that inference code is known to replace: attention, and initialisations that it skips.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import pkgutil
import signal
import threading
from collections.abc import Callable, Iterator
from multiprocessing.util import Finalize
from operator import attrgetter
from pathlib import Path
from typing import Any

import psutil
import torch

from sage_fast.util.console import wrapped
from sage_fast.util.errors import SIGNALS, UserError

log = logging.getLogger(__name__)

Accessors = tuple[Callable[[], Any], Callable[[Any], object]]
"""Functions that read and write a setting."""


def _attributes(owner: str, *names: str) -> dict[str, Accessors]:
    holder = pkgutil.resolve_name(owner)
    return {
        f"{owner}.{x}": (functools.partial(getattr, holder, x), functools.partial(setattr, holder, x)) for x in names
    }


def _set_device(device: torch.device) -> None:
    torch.set_default_device(None if device.type == "cpu" else device)  # None: as at the start


def _refill(hooks: dict[int, Any], held: dict[int, Any]) -> None:
    hooks.clear()
    hooks.update(held)


def _loggers() -> list[logging.Logger]:
    known = logging.root.manager.loggerDict.items()
    return [logger for name, logger in known if isinstance(logger, logging.Logger) and name.startswith("sage_fast")]


def _silence(silent: dict[logging.Logger, tuple[bool, int]]) -> None:
    for logger in _loggers():
        logger.disabled, level = silent.get(logger, (False, logging.NOTSET))
        logger.setLevel(level)


_left = contextlib.ExitStack()
"""Keeps what leaves inference mode: its end would bring the mode back."""

SETTINGS: dict[str, Accessors] = {
    "os.chdir": (os.getcwd, os.chdir),
    "logging of loggers": (lambda: {x: (x.disabled, x.level) for x in _loggers() if x.disabled or x.level}, _silence),
    "logging": (lambda: logging.root.manager.disable, logging.disable),
    **_attributes("sys", "stdout", "stderr"),
    **_attributes("PIL.Image", "MAX_IMAGE_PIXELS"),
    "torch.inference_mode": (torch.is_inference_mode_enabled, lambda on: _left.enter_context(torch.inference_mode(on))),
    "torch.set_grad_enabled": (torch.is_grad_enabled, torch.set_grad_enabled),
    "torch.set_default_dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "torch.set_default_device": (torch.get_default_device, _set_device),
    "torch.set_num_threads": (torch.get_num_threads, torch.set_num_threads),
    "torch.use_deterministic_algorithms": (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    "torch.autograd.set_detect_anomaly": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    "torch.set_float32_matmul_precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    **_attributes("torch.backends.cudnn", "enabled", "benchmark", "deterministic", "allow_tf32"),
    **_attributes("torch.backends.mkldnn", "enabled", "deterministic"),
    **_attributes("torch.backends.cuda.matmul", "allow_fp16_accumulation", "allow_fp16_reduced_precision_reduction"),
    **_attributes("torch.backends.cuda.matmul", "allow_bf16_reduced_precision_reduction"),
    **_attributes("torch.utils.deterministic", "fill_uninitialized_memory"),
    **_attributes("torch.nn.functional", "scaled_dot_product_attention"),
    **_attributes("torch.nn.init", *(name for name in vars(torch.nn.init) if name.endswith("_") and name[0] != "_")),
}
"""Name -> its functions. A setting comes after those that write to it, as leaving inference mode does to gradients."""
for n in (*SIGNALS, signal.SIGPIPE, signal.SIGCHLD):
    SETTINGS[f"signal.{n.name}"] = functools.partial(signal.getsignal, n), functools.partial(signal.signal, n)
for kind in ("cpu", "cuda"):
    for what, read in (("enabled", torch.is_autocast_enabled), ("dtype", torch.get_autocast_dtype)):
        write = attrgetter(f"set_autocast_{what}")(torch)
        SETTINGS[f"torch.autocast({kind!r}, {what})"] = functools.partial(read, kind), functools.partial(write, kind)
for kind in ("flash", "mem_efficient", "math", "cudnn"):
    reads, writes = (attrgetter(name)(torch.backends.cuda) for name in (f"{kind}_sdp_enabled", f"enable_{kind}_sdp"))
    SETTINGS[f"torch.backends.cuda.enable_{kind}_sdp"] = reads, writes
for layer in ("Linear", "LayerNorm", "RMSNorm", "GroupNorm", "Conv2d", "Conv3d", "Embedding"):
    SETTINGS |= _attributes(f"torch.nn.{layer}", "reset_parameters")
for part in ("", ".cudnn", ".mkldnn", ".cuda.matmul", ".cudnn.conv", ".cudnn.rnn", ".mkldnn.matmul"):
    SETTINGS |= _attributes(f"torch.backends{part}", "fp32_precision")
for name, hooks in vars(torch.nn.modules.module).items():
    if name.startswith("_global_") and isinstance(hooks, dict):  # they run in every module, the trained model too
        SETTINGS[f"torch.nn.modules.module.{name}"] = hooks.copy, functools.partial(_refill, hooks)

_noted: set[tuple[str, str]] = set()
_started: set[psutil.Process] = set()


def _value(name: str) -> Any:
    """Read a setting; None where it cannot be said, as for an old function of TF32 beside the new attributes."""
    with contextlib.suppress(RuntimeError, OSError):
        return SETTINGS[name][0]()


def end_started() -> None:
    """Kill the processes that the code of plug-ins has started, and theirs. It is registered to run at exit."""
    for process in _started:
        with contextlib.suppress(psutil.NoSuchProcess):
            for each in (*process.children(recursive=True), process):
                each.kill()


def _children() -> set[psutil.Process]:
    found: set[psutil.Process] = set()
    for file in Path("/proc/self/task").glob("*/children"):  # of a thread; psutil would read all of /proc
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            found.update(map(psutil.Process, map(int, file.read_text(encoding="utf-8").split())))
    return found


@contextlib.contextmanager
def restored(who: str) -> Iterator[None]:
    """Put the settings back after the code of a plug-in, whose name is `who`; a note says once which it changed.

    Raises:
        UserError: one cannot be put back, such as a device whose `with` block was entered and never left.
    """
    # A call that is overdue ends on its thread when others own the folder; Python sets handlers in the main one alone.
    in_main = threading.current_thread() is threading.main_thread()
    before = {name: _value(name) for name in SETTINGS if in_main or name.startswith("torch.")}
    others = _children()
    try:
        yield
    finally:
        if (started := _children() - others) and not _started:
            Finalize(None, end_started, exitpriority=0)  # before multiprocessing waits for its children
        _started.update(started)
        changed = [name for name, value in before.items() if _value(name) != value]
        for name in before if changed else ():
            if before[name] is not None and _value(name) != before[name]:
                SETTINGS[name][1](before[name])
        if held := [name for name in changed if before[name] is not None and _value(name) != before[name]]:
            raise UserError(f"{who} changes {', '.join(held)} for the whole process, which cannot be put back")
        if new := [name for name in changed if (who, name) not in _noted]:
            _noted.update((who, name) for name in changed)
            log.warning(wrapped(f"note: {who} changes {', '.join(new)} for the whole process; it was put back"))
