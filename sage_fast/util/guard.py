"""What a run depends on, compared before and after the code of a plug-in, and put back.

A plug-in is a reward or a model family of a user's. Its code runs in the process of the run, where it could change
how the policy trains without a word. `guarded` compares as wholes: the functions of PyTorch, of every layer class and
of this package; the modes, backends and hooks of PyTorch; the process group; random numbers; signals, loggers, streams
and the current folder.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import pkgutil
import random
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.util import Finalize
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist

from sage_fast.util.console import wrapped
from sage_fast.util.errors import SIGNALS, UserError, printable

log = logging.getLogger(__name__)

Accessors = tuple[Callable[[], Any], Callable[[Any], object]]
"""Functions that read and write a setting."""


def _attributes(owner: str, *names: str) -> dict[str, Accessors]:
    holder = pkgutil.resolve_name(owner)
    return {
        f"{owner}.{name}": (functools.partial(getattr, holder, name), functools.partial(setattr, holder, name))
        for name in names
    }


def _set_device(device: torch.device) -> None:
    torch.set_default_device(None if device.type == "cpu" else device)  # None: as at the start


def _refill(hooks: dict[int, Any], held: dict[int, Any]) -> None:
    hooks.clear()
    hooks.update(held)


def _loggers() -> list[logging.Logger]:
    known = logging.root.manager.loggerDict.items()
    return [logger for name, logger in known if isinstance(logger, logging.Logger) and name.startswith("sage_fast")]


def _muted_loggers() -> dict[logging.Logger, tuple[bool, int]]:
    return {logger: (logger.disabled, logger.level) for logger in _loggers() if logger.disabled or logger.level}


def _mute(muted: dict[logging.Logger, tuple[bool, int]]) -> None:
    for logger in _loggers():
        disabled, level = muted.get(logger, (False, logging.NOTSET))
        logger.disabled = disabled
        logger.setLevel(level)


_left = contextlib.ExitStack()
"""Keeps what leaves inference mode: its end would bring the mode back."""

SETTINGS: dict[str, Accessors] = {
    "os.chdir": (os.getcwd, os.chdir),
    "logging of loggers": (_muted_loggers, _mute),
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


# -- functions that the policy's forward may call ---------------------------------------------------------------------

_FUNCTIONS = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    classmethod,
    staticmethod,
    property,
    type,
)
"""Types of what can be called; a module may change its other values, such as caches."""


def _layer_classes() -> list[type]:
    """Return every layer class that is loaded: PyTorch's, those of libraries, and the policy's own."""
    found: dict[type, None] = {}
    todo: list[type] = [torch.nn.Module]
    while todo:
        layer = todo.pop()
        if layer not in found:
            found[layer] = None
            todo += layer.__subclasses__()
    return list(found)


def _own_modules() -> list[types.ModuleType]:
    """Return the modules of this package that are loaded, its operators among them."""
    package = __name__.partition(".")[0]
    return [module for name, module in list(sys.modules.items()) if name.partition(".")[0] == package and module]


def _functions_of(owner: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(owner).items() if isinstance(value, _FUNCTIONS)}


def _functions() -> dict[Any, dict[str, Any]]:
    """Return owner -> name -> function, of every owner whose functions a forward may call."""
    modules = [torch, torch.nn.functional, torch.nn.init, *_own_modules()]
    return {owner: _functions_of(owner) for owner in (*modules, torch.Tensor, *_layer_classes())}


def _put_functions_back(before: Mapping[Any, Mapping[str, Any]]) -> list[str]:
    """Restore the functions that differ; return their names."""
    changed = []
    for owner, functions in before.items():
        now = _functions_of(owner)
        if now == functions:
            continue
        place = "" if isinstance(owner, types.ModuleType) else f"{owner.__module__}."
        name_of_owner = place + owner.__name__
        for name, function in functions.items():
            if vars(owner).get(name) is not function:
                setattr(owner, name, function)
                changed.append(f"{name_of_owner}.{name}")
        # What a class gains hides a function that it inherits; what a module gains hides nothing.
        for name in now.keys() - functions.keys() if isinstance(owner, type) else ():
            delattr(owner, name)
            changed.append(f"{name_of_owner}.{name}")
    return changed


# -- random numbers, process group, processes -------------------------------------------------------------------------


def _random_state() -> tuple[Any, ...]:
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    return torch.get_rng_state(), cuda, np.random.get_state(), random.getstate()


def _put_random_back(state: tuple[Any, ...]) -> None:
    ours, cuda, numpy_state, python_state = state
    torch.set_rng_state(ours)
    if cuda is not None:
        torch.cuda.set_rng_state(cuda)
    np.random.set_state(numpy_state)
    random.setstate(python_state)


def seed_random_numbers(seed: int) -> None:
    """Seed torch (every device), NumPy and Python's `random`."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def _groups() -> set[Any]:
    """Return the process groups that exist."""
    return set(dist.distributed_c10d._world.pg_map) if dist.is_initialized() else set()


@contextlib.contextmanager
def _groups_kept(who: str) -> Iterator[None]:
    """Keep the run's process groups within the block, whose clean-up code may destroy them.

    A rank without them would go on alone in the same folder, so it ends if one is destroyed all the same.
    """
    kept = _groups()
    destroy = dist.destroy_process_group

    def destroy_others(group: Any = None) -> None:
        if kept and (group is None or group in kept):
            _note(who, "torch.distributed.destroy_process_group")
        else:
            destroy(group)

    for module in (dist, dist.distributed_c10d):
        vars(module)["destroy_process_group"] = destroy_others
    try:
        yield
    finally:
        for module in (dist, dist.distributed_c10d):
            vars(module)["destroy_process_group"] = destroy
        now = _groups()
        if not kept and now:  # later collectives of this process would be those of the plug-in's group
            destroy()
            _note(who, "torch.distributed.init_process_group")
        if lost := kept - now:
            print(
                printable(
                    f"sage-fast: {who} destroyed {len(lost)} process groups of the run, so this rank ends; give it a "
                    "process of its own (a reward: workers = 1)"
                ),
                file=sys.stderr,
                flush=True,
            )
            os._exit(1)


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


# -- the guard --------------------------------------------------------------------------------------------------------


def _note(who: str, *names: str) -> None:
    """Say once for each name that a plug-in changed it."""
    new = [name for name in names if (who, name) not in _noted]
    if not new:
        return
    _noted.update((who, name) for name in new)
    shown = ", ".join(new[:5]) + (f" and {len(new) - 5} more" if len(new) > 5 else "")
    log.warning(wrapped(f"note: {who} changes {shown} for the whole process; it was put back"))


@contextlib.contextmanager
def guarded(who: str) -> Iterator[None]:
    """Run the code of the plug-in `who`; put back what it changes, and say once what that was.

    A process that the code forks, and that returns from it, ends there: it would be a second run in the same folder.

    Raises:
        UserError: something cannot be put back, such as a device whose `with` block was entered and never left.
    """
    own = os.getpid()
    # Python sets signal handlers in the main thread alone.
    in_main = threading.current_thread() is threading.main_thread()
    before = {name: _value(name) for name in SETTINGS if in_main or name.startswith("torch.")}
    functions = _functions()
    state = _random_state()
    others = _children()
    try:
        with _groups_kept(who):
            yield
    finally:
        if os.getpid() != own:
            os._exit(1)
        if (started := _children() - others) and not _started:
            Finalize(None, end_started, exitpriority=0)  # before multiprocessing waits for its children
        _started.update(started)
        changed = [name for name, value in before.items() if _value(name) != value]
        for name in before if changed else ():
            if before[name] is not None and _value(name) != before[name]:
                SETTINGS[name][1](before[name])
        if held := [name for name in changed if before[name] is not None and _value(name) != before[name]]:
            raise UserError(f"{who} changes {', '.join(held)} for the whole process, which cannot be put back")
        changed += _put_functions_back(functions)
        _put_random_back(state)
        _note(who, *changed)
