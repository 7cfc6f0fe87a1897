"""Which thread runs the backward on a second device: run as a script, it prints the answer as JSON.

PyTorch's engine gives every device a thread of its own, except the CPU. Here a device without
hardware has one, through PyTorch's hooks for other backends; its tensors compute on the CPU. A
process starts these threads at its first backward, so this is a process of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from typing import Any

import torch
from torch import Tensor
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)
from torch.utils.checkpoint import checkpoint

from sage_fast.util.profiling import annotate, ranges

DEVICE = "second"


class DeviceModule(_DummyBackendModule):
    """What a checkpoint asks of a device."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    def is_autocast_enabled(self) -> bool:
        return False


class OnDevice(Tensor):
    """A tensor on the second device; its numbers are in `host`, a CPU tensor."""

    host: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, host: Tensor) -> OnDevice:
        tensor = Tensor._make_wrapper_subclass(
            cls, host.shape, dtype=host.dtype, device=f"{DEVICE}:0"
        )
        tensor.host = host
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {key: value for key, value in (kwargs or {}).items() if key != "device"}
        out = func(*(x.host if isinstance(x, OnDevice) else x for x in args), **given)
        return OnDevice(out) if isinstance(out, Tensor) else out


class Observed(torch.autograd.Function):
    """Twice x; notes the threads of its forward and its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, threads: dict[str, list[int]]) -> Tensor:
        ctx.threads = threads
        threads["forward"].append(threading.get_ident())
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        assert len(ctx.saved_tensors) == 1
        ctx.threads["backward"].append(threading.get_ident())
        return grad * 2, None


def threads_of(range_: contextlib.AbstractContextManager[Any], *, checkpointed: bool) -> Any:
    """Return event -> whether the thread that opened the range ran it."""
    threads: dict[str, list[int]] = {"forward": [], "backward": [], "unpack": []}

    def unpack(saved: Tensor) -> Tensor:
        threads["unpack"].append(threading.get_ident())
        return saved

    x = OnDevice(torch.ones(3)).requires_grad_()
    if checkpointed:
        y = checkpoint(Observed.apply, x, threads, use_reentrant=False, preserve_rng_state=False)
    else:
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
            y = Observed.apply(x, threads)
    del threads["forward"][:]  # what is left is a recomputation
    with range_:
        torch.autograd.backward([y], [OnDevice(torch.ones(3))])
    here = threading.get_ident()
    assert torch.equal(x.grad.host, torch.full((3,), 2.0))  # type: ignore[union-attr, attr-defined]
    return {kind: [thread == here for thread in found] for kind, found in threads.items()}


def main() -> None:
    _setup_privateuseone_for_python_backend(DEVICE, backend_module=DeviceModule())
    found = {}
    for checkpointed in (False, True):
        kind = "checkpointed" if checkpointed else "hooked"
        before = threads_of(annotate("backward"), checkpointed=checkpointed)
        with ranges("torch"):
            within = threads_of(annotate("backward"), checkpointed=checkpointed)
        after = threads_of(annotate("backward"), checkpointed=checkpointed)
        found[kind] = {"before": before, "within": within, "after": after}
    print(json.dumps(found), flush=True)
    os._exit(0)  # PyTorch does not join the thread of such a device, and C++ would abort


if __name__ == "__main__":
    main()
