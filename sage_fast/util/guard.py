"""What a run depends on, compared before and after the code of a plug-in, and put back.

A plug-in is a reward or a model family of a user's. Its code runs in the process of the run, where
it could change how the policy trains without a word. `guarded` compares as wholes: the functions of
PyTorch, of every layer class and of this package; the modes, backends and hooks of PyTorch; the
process group; random numbers; signals, loggers, streams and the current folder.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import pkgutil
import random
import signal
import socket
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.util import Finalize
from operator import attrgetter, is_
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist

from sage_fast.util.console import wrapped
from sage_fast.util.errors import UserError, printable
from sage_fast.util.launchers import GROUP

log = logging.getLogger(__name__)


class NotPutBack(UserError):
    """Code of a plug-in has changed what a run depends on for good, so the run ends."""


Accessors = tuple[Callable[[], Any], Callable[[Any], object]]
"""Functions that read and write a setting."""


def _attributes(owner: str, *names: str) -> dict[str, Accessors]:
    holder = pkgutil.resolve_name(owner)
    return {
        f"{owner}.{name}": (
            functools.partial(getattr, holder, name),
            functools.partial(setattr, holder, name),
        )
        for name in names
    }


def _set_device(device: torch.device) -> None:
    torch.set_default_device(None if device.type == "cpu" else device)  # None: as at the start


def _refill(hooks: dict[int, Any], held: dict[int, Any]) -> None:
    hooks.clear()
    hooks.update(held)


def _loggers() -> list[logging.Logger]:
    known = logging.root.manager.loggerDict.items()
    return [
        logger
        for name, logger in known
        if isinstance(logger, logging.Logger) and name.startswith("sage_fast")
    ]


def _muted_loggers() -> dict[logging.Logger, tuple[bool, int]]:
    return {
        logger: (logger.disabled, logger.level)
        for logger in _loggers()
        if logger.disabled or logger.level
    }


def _mute(muted: dict[logging.Logger, tuple[bool, int]]) -> None:
    for logger in _loggers():
        disabled, level = muted.get(logger, (False, logging.NOTSET))
        logger.disabled = disabled
        logger.setLevel(level)


def _alarms() -> tuple[float, ...]:
    """Return the seconds until each timer of the process sends its signal, whole; 0: none is
    set."""
    return tuple(float(signal.getitimer(timer)[0] > 0) for timer in TIMERS)


def _end_alarms(wanted: tuple[float, ...]) -> None:
    for timer, seconds in zip(TIMERS, wanted):
        if not seconds:
            signal.setitimer(timer, 0)


def _wakeup_end() -> int:
    """Return the file that a signal is written to, which a run's thread for signals reads."""
    end = signal.set_wakeup_fd(-1)
    _set_wakeup_end(end)
    return end


def _set_wakeup_end(end: int) -> None:
    signal.set_wakeup_fd(end, warn_on_full_buffer=False)


def _launched() -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in GROUP}


def _set_launched(variables: dict[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _autocast_depth() -> int:
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def _set_autocast_depth(depth: int) -> None:
    """Leave `with` blocks of autocast: within one, a weight's copy of fewer bits outlives an update
    of the weight."""
    while _autocast_depth() > depth:
        torch.autocast_decrement_nesting()
    while _autocast_depth() < depth:
        torch.autocast_increment_nesting()
    torch.clear_autocast_cache()


def _modes() -> tuple[Any, ...]:
    """Return the modes that every operator passes, and the hooks for tensors that a backward pass
    keeps."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack(), hooks


def _attention_registry() -> Any:
    module = sys.modules.get("diffusers.models.attention_dispatch")
    return getattr(module, "_AttentionBackendRegistry", None)


def _attention_backend() -> Any:
    return getattr(_attention_registry(), "_active_backend", None)


def _set_attention_backend(backend: Any) -> None:
    _attention_registry()._active_backend = backend


def _flushes_denormals() -> bool:
    return _DENORMAL / 2 == 0


_DENORMAL = sys.float_info.min / 4
TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
"""Timers that end a process by a signal; `signal.alarm` sets the first."""

_left = contextlib.ExitStack()
"""Keeps what leaves inference mode: its end would bring the mode back."""

SETTINGS: dict[str, Accessors] = {
    "os.chdir": (os.getcwd, os.chdir),
    "logging of loggers": (_muted_loggers, _mute),
    "logging": (lambda: logging.root.manager.disable, logging.disable),
    "os.environ of the launcher": (_launched, _set_launched),
    **_attributes("sys", "stdout", "stderr"),
    "sys.setrecursionlimit": (sys.getrecursionlimit, sys.setrecursionlimit),
    "socket.setdefaulttimeout": (
        lambda: (socket.getdefaulttimeout(),),  # not None, which would say that it cannot be read
        lambda seconds: socket.setdefaulttimeout(*seconds),
    ),
    "numpy.seterr": (np.geterr, lambda errors: np.seterr(**errors)),
    **_attributes("PIL.Image", "MAX_IMAGE_PIXELS"),
    "torch.inference_mode": (
        torch.is_inference_mode_enabled,
        lambda on: _left.enter_context(torch.inference_mode(on)),
    ),
    "torch.set_grad_enabled": (torch.is_grad_enabled, torch.set_grad_enabled),
    "torch.set_default_dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "torch.set_default_device": (torch.get_default_device, _set_device),
    "torch.set_num_threads": (torch.get_num_threads, torch.set_num_threads),
    "torch.use_deterministic_algorithms": (
        torch.get_deterministic_debug_mode,
        torch.set_deterministic_debug_mode,
    ),
    "torch.autograd.set_detect_anomaly": (
        torch.is_anomaly_enabled,
        torch.autograd.set_detect_anomaly,
    ),
    "torch.set_float32_matmul_precision": (
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
    ),
    **_attributes("torch.backends.cudnn", "enabled", "benchmark", "deterministic", "allow_tf32"),
    **_attributes("torch.backends.mkldnn", "enabled", "deterministic"),
    **_attributes(
        "torch.backends.cuda.matmul",
        "allow_fp16_accumulation",
        "allow_fp16_reduced_precision_reduction",
    ),
    **_attributes("torch.backends.cuda.matmul", "allow_bf16_reduced_precision_reduction"),
    **_attributes("torch.backends.opt_einsum", "enabled", "strategy"),
    "torch.backends.nnpack": (torch._C._get_nnpack_enabled, torch._C._set_nnpack_enabled),
    "torch.backends.mha.set_fastpath_enabled": (
        torch.backends.mha.get_fastpath_enabled,
        torch.backends.mha.set_fastpath_enabled,
    ),
    **_attributes("torch.utils.deterministic", "fill_uninitialized_memory"),
    "attention back end of diffusers": (_attention_backend, _set_attention_backend),
    "torch.set_flush_denormal": (_flushes_denormals, torch.set_flush_denormal),
    "torch.autocast's blocks": (_autocast_depth, _set_autocast_depth),
    "torch's modes": (_modes, lambda modes: None),
    "signal.set_wakeup_fd": (_wakeup_end, _set_wakeup_end),
    "signal.alarm": (_alarms, _end_alarms),
}
"""Name -> its functions.

A setting comes after those that write to it, as leaving inference mode does to gradients.
"""
for n in sorted(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}):
    if isinstance(n, signal.Signals):  # a number between those for real time has no name
        SETTINGS[f"signal.{n.name}"] = (
            functools.partial(signal.getsignal, n),
            functools.partial(signal.signal, n),
        )
for kind in ("cpu", "cuda"):
    for what, read in (("enabled", torch.is_autocast_enabled), ("dtype", torch.get_autocast_dtype)):
        write = attrgetter(f"set_autocast_{what}")(torch)
        SETTINGS[f"torch.autocast({kind!r}, {what})"] = (
            functools.partial(read, kind),
            functools.partial(write, kind),
        )
for kind in ("flash", "mem_efficient", "math", "cudnn"):
    reads, writes = (
        attrgetter(name)(torch.backends.cuda)
        for name in (f"{kind}_sdp_enabled", f"enable_{kind}_sdp")
    )
    SETTINGS[f"torch.backends.cuda.enable_{kind}_sdp"] = reads, writes
for part in (
    "",
    ".cudnn",
    ".mkldnn",
    ".cuda.matmul",
    ".cudnn.conv",
    ".cudnn.rnn",
    ".mkldnn.matmul",
):
    SETTINGS |= _attributes(f"torch.backends{part}", "fp32_precision")
for name, hooks in vars(torch.nn.modules.module).items():
    # they run in every module, the trained model too
    if name.startswith("_global_") and isinstance(hooks, dict):
        SETTINGS[f"torch.nn.modules.module.{name}"] = hooks.copy, functools.partial(_refill, hooks)

_noted: set[tuple[str, str]] = set()
_started: set[psutil.Process] = set()
_belongs_to_plugin = False


def _value(name: str) -> Any:
    """Read a setting; None where it cannot be said, as for an old function of TF32 beside the new
    attributes."""
    with contextlib.suppress(RuntimeError, OSError):
        return SETTINGS[name][0]()


# -- functions that the policy's forward may call --------------------------------------------------

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
    """Return every layer class that is loaded: PyTorch's, those of libraries, and the policy's
    own."""
    found: dict[type, None] = {}
    todo: list[type] = [torch.nn.Module]
    while todo:
        layer = todo.pop()
        if layer not in found:
            found[layer] = None
            todo += layer.__subclasses__()
    return list(found)


_TRAINING = (
    __name__.partition(".")[0],
    "torch.nn",
    "torch.optim",
    "torch.autograd",
    "torch.distributed",
    "torch.utils.checkpoint",
    "diffusers.models",
)
"""Packages whose functions and classes train the policy: this one, with its operators, and those
that it calls."""


def _owners() -> dict[Any, None]:
    """Return the modules and classes whose functions train the policy, of those that are loaded."""
    prefixes = tuple(f"{package}." for package in _TRAINING)
    of_pytorch = [torch, torch._C._nn, torch.Tensor, *_layer_classes()]
    owners: dict[Any, None] = dict.fromkeys(of_pytorch)
    for name, module in list(sys.modules.items()):
        if f"{name}.".startswith(prefixes) and isinstance(module, types.ModuleType):
            owners[module] = None
            for value in vars(module).values():
                # Not `isinstance`, which asks the value: a deprecated one would warn.
                if issubclass(type(value), type) and value.__module__ == name:
                    owners[value] = None
    return owners


def _functions_of(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value for name, value in attributes.items() if issubclass(type(value), _FUNCTIONS)
    }


def _attributes_of_owners() -> dict[Any, dict[str, Any]]:
    """Return owner -> its attributes, of every owner whose functions train the policy."""
    return {owner: dict(vars(owner)) for owner in _owners()}


def _is_wrapped_by_pytorch(found: Any, function: Any) -> bool:
    """Whether both are one function: PyTorch wraps some at an optimizer's first instance and when
    it first compiles."""
    if getattr(found, "__module__", "") == "torch._dynamo.mutation_guard":
        return True
    return _unwrapped(found) is _unwrapped(function)


def _unwrapped(function: Any) -> Any:
    """Return the function within the wrappers of PyTorch's compiler and of its profiler for
    optimizers."""
    while True:
        inner = getattr(function, "_torchdynamo_orig_callable", None)
        if inner is None and getattr(function, "hooked", False):
            inner = getattr(function, "__wrapped__", None)
        if inner is None:
            return function
        function = inner


def _put_functions_back(before: Mapping[Any, Mapping[str, Any]]) -> list[str]:
    """Restore the functions that differ; return their names."""
    changed = []
    for owner, attributes in before.items():
        attributes_now = vars(owner)
        if len(attributes_now) == len(attributes) and all(
            map(is_, attributes_now.values(), attributes.values())
        ):
            continue  # nearly every one, told in a millisecond for all
        functions_now = _functions_of(attributes_now)
        functions = _functions_of(attributes)
        place = "" if isinstance(owner, types.ModuleType) else f"{owner.__module__}."
        name_of_owner = place + owner.__name__
        for name, function in functions.items():
            found = vars(owner).get(name)
            if found is not function and not _is_wrapped_by_pytorch(found, function):
                setattr(owner, name, function)
                changed.append(f"{name_of_owner}.{name}")
        # What a class gains hides a function that it inherits; what a module gains hides nothing.
        gained = functions_now.keys() - functions.keys() if isinstance(owner, type) else ()
        for name in gained:
            inherited = next(
                (vars(base)[name] for base in owner.__mro__[1:] if name in vars(base)), None
            )
            if _is_wrapped_by_pytorch(functions_now[name], inherited):
                continue
            delattr(owner, name)
            changed.append(f"{name_of_owner}.{name}")
    return changed


# -- random numbers, process group, processes ------------------------------------------------------


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

    A rank without them would go on alone in the same folder, so it ends if one is destroyed all the
    same.
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
        # later collectives of this process would be those of the plug-in's group
        if not kept and now:
            destroy()
            _note(who, "torch.distributed.init_process_group")
        if kept - now:
            print(
                printable(
                    f"sage-fast: {who} destroyed a process group of the run, so this rank ends; "
                    "give it a process of its own (a reward: workers = 1)"
                ),
                file=sys.stderr,
                flush=True,
            )
            os._exit(1)


def end_started() -> None:
    """Kill the processes that the code of plug-ins has started, and theirs.

    It is registered to run at exit.
    """
    for process in _started:
        with contextlib.suppress(psutil.NoSuchProcess):
            for each in (*process.children(recursive=True), process):
                each.kill()


def _children() -> set[psutil.Process]:
    found: set[psutil.Process] = set()
    # of a thread; psutil would read all of /proc
    for file in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            found.update(map(psutil.Process, map(int, file.read_text(encoding="utf-8").split())))
    return found


# -- the guard -------------------------------------------------------------------------------------


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

    A process that the code forks, and that returns from it, ends there: it would be a second run in
    the same folder. In a process that `belongs_to_plugin`, nothing is put back: no run depends on
    it.

    Raises:
        NotPutBack: something cannot be put back, such as a device whose `with` block was entered
            and never left.
    """
    others = _children()
    try:
        with contextlib.nullcontext() if _belongs_to_plugin else _state_kept(who), _forks_ended():
            yield
    finally:
        started = _children() - others
        if started and not _started:
            # before multiprocessing waits for its children
            Finalize(None, end_started, exitpriority=0)
        _started.update(started)


@contextlib.contextmanager
def _forks_ended() -> Iterator[None]:
    """End a process that the block has forked, and that returns from it."""
    own = os.getpid()
    try:
        yield
    finally:
        if os.getpid() != own:
            os._exit(1)


@contextlib.contextmanager
def _state_kept(who: str) -> Iterator[None]:
    """Put back, after the block, what a run depends on.

    Raises:
        NotPutBack: something cannot be put back.
    """
    # Python sets signal handlers in the main thread alone.
    in_main = threading.current_thread() is threading.main_thread()
    before = {name: _value(name) for name in SETTINGS if in_main or name.startswith("torch.")}
    attributes = _attributes_of_owners()
    state = _random_state()
    try:
        with _groups_kept(who):
            yield
    finally:
        # None: cannot be read
        before = {name: value for name, value in before.items() if value is not None}
        changed = [name for name, value in before.items() if _value(name) != value]
        for name in before if changed else ():
            if _value(name) != before[name]:
                SETTINGS[name][1](before[name])
        held = [name for name in changed if _value(name) != before[name]]
        changed += _put_functions_back(attributes)
        _put_random_back(state)
        if held:
            raise NotPutBack(
                f"{who} changes {', '.join(held)} for the whole process, which cannot be put back"
            )
        _note(who, *changed)


def belongs_to_plugin() -> None:
    """Say that this process is a plug-in's own, as a worker is: `guarded` puts nothing back in it.

    A reward may need there what a run could not bear: process groups, other functions of a layer,
    another default.
    """
    global _belongs_to_plugin
    _belongs_to_plugin = True
