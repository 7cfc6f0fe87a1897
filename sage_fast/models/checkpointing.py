"""Gradient checkpointing of transformer blocks: `model.gradient_checkpointing`.

`full` keeps a block's inputs and recomputes the whole block. `attention` also keeps attention's
output, so the recomputation skips attention: 73 % of its FLOPs for HunyuanVideo 1.5 at 480p, 81
frames. On the CPU both give the gradients of `none` bit for bit. On a GPU the gradients of any mode
vary in rounding from one backward to the next: the backward of cuDNN's attention and of
FlashAttention sums by atomics.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

from torch import nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode_temporarily
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from sage_fast.models.attention.backends import is_attention

RECOMPUTED: dict[str, tuple[str, ...]] = {
    "none": (),
    "attention": ("linear",),
    "full": ("linear", "attention"),
}
"""Mode -> what the backward recomputes, from fastest to least memory."""
MODES = tuple(RECOMPUTED)


@dataclasses.dataclass(frozen=True)
class CheckpointPlan:
    """What the backward recomputes: `mode` in the first `count` of the blocks, the next faster mode
    in the others.

    By default all blocks have the mode. The last blocks keep more, since the backward begins with
    them: what they keep is freed before the first recomputation needs room.
    """

    mode: str
    count: int = 1
    blocks: int = 1

    @property
    def faster(self) -> str:
        """Mode of the other blocks."""
        return MODES[max(MODES.index(self.mode) - 1, 0)]

    def mean(self, by_mode: Mapping[str, float]) -> float:
        """Return the mean over the blocks of a value that each mode has."""
        rest = self.blocks - self.count
        return (self.count * by_mode[self.mode] + rest * by_mode[self.faster]) / self.blocks

    def __str__(self) -> str:
        return (
            self.mode
            if self.count == self.blocks
            else f"{self.mode} in {self.count} of {self.blocks} blocks"
        )


NO_RECOMPUTE = CheckpointPlan(MODES[0])


def fastest_that_fits(needed: Mapping[str, float], room: float, blocks: int) -> CheckpointPlan:
    """Return what to recompute in `blocks` so that activations, of `needed` bytes in each mode, fit
    into `room` bytes.

    If they fit in no mode, everything is recomputed.
    """
    if needed[MODES[0]] <= room:
        return CheckpointPlan(MODES[0], blocks, blocks)
    for faster, mode in itertools.pairwise(MODES):
        if needed[mode] <= room:
            share = (needed[faster] - room) / (needed[faster] - needed[mode])
            return CheckpointPlan(mode, math.ceil(share * blocks), blocks)
    return CheckpointPlan(MODES[-1], blocks, blocks)


def set_checkpointing(
    transformer: Any, mode: str, *, others: str | None = None, first: Iterable[Any] = ()
) -> None:
    """Set one of `MODES` through diffusers' own switch.

    Args:
        others: mode of the blocks that are not among the modules `first`; None: all blocks have
            `mode`.
    """
    if not RECOMPUTED[mode]:
        transformer.disable_gradient_checkpointing()
        return
    run, run_other = (_runner(m) for m in (mode, others or mode))
    # Told apart by their modules: a model may run blocks of its own over those of diffusers'.
    modules = {id(module) for block in first for module in block.modules()}

    def run_block(block: Any, *arguments: Any) -> Any:
        return (run if others is None or id(next(block.children())) in modules else run_other)(
            block, *arguments
        )

    transformer.enable_gradient_checkpointing(run_block)


def _runner(mode: str) -> Callable[..., Any]:
    """Return the function (block, *arguments) that runs a block in a mode."""
    if not RECOMPUTED[mode]:
        return lambda block, *arguments: block(*arguments)

    def run(block: nn.Module, *arguments: Any) -> Any:
        before = _checkpointed.set(True)
        try:
            return checkpoint(
                block, *arguments, use_reentrant=False, context_fn=lambda: _contexts(mode, block)
            )
        finally:
            _checkpointed.reset(before)

    return run


READS_NO_RESULTS = "reads_no_results"
"""Attribute of a module's hook that reads nothing of what the module returns."""


def reads_no_results(hook: Callable[..., None]) -> Callable[..., None]:
    """Mark a hook of a module: a recomputation may leave out what only results need."""
    setattr(hook, READS_NO_RESULTS, True)
    return hook


def _is_harmless(hook: Any) -> bool:
    module = str(getattr(hook, "__module__", ""))
    known = module.startswith(("torch.distributed.fsdp", "torch.utils."))
    return known or hasattr(hook, READS_NO_RESULTS)


def _can_skip_outputs(block: nn.Module) -> bool:
    """Whether the block alone reads what its last layers return: it has no wrapper, subclass, patch
    or hook.

    Hooks of FSDP2, of what counts FLOPs, and those that say so compute nothing with results.
    """
    modules = [*block.modules()]
    hooks = [
        hook
        for m in modules
        for hook in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())
    ]
    hooks += [*_global_forward_hooks.values(), *_global_forward_pre_hooks.values()]
    foreign = any(not _is_harmless(hook) for hook in hooks)
    ends = [m for m in modules if hasattr(type(m), "omits_last_matmul")]
    direct = ends[:1] == [block] and {*ends} <= {block, *block.children()}
    patched = any(vars(type(m)).get("omits_last_matmul") is not type(m).forward for m in ends)
    return direct and not foreign and not patched and not any("forward" in vars(m) for m in modules)


_recomputes = contextvars.ContextVar("_recomputes", default=False)


def is_recomputing() -> bool:
    """Whether a backward recomputes a block whose results nothing reads, but only what autograd
    saves."""
    return _recomputes.get()


_checkpointed = contextvars.ContextVar("_checkpointed", default=False)


def is_checkpointed() -> bool:
    """Whether a block runs within a checkpoint, in its forward or recomputed.

    Then hooks of PyTorch see every tensor that autograd would save. Hooks within them would hide
    the tensors, which would stay alive.
    """
    return _checkpointed.get()


Context = contextlib.AbstractContextManager[Any]


def unseen() -> Context:
    """Return a context whose operators selective checkpointing does not see.

    It counts those of a block, and there must be as many in the recomputation as in the forward.
    """
    if isinstance(_get_current_dispatch_mode(), _SELECTIVE):
        return _pop_mode_temporarily()
    return contextlib.nullcontext()


def _contexts(mode: str, block: nn.Module) -> tuple[Context, Context]:
    """Return the contexts of a block's forward and of its recomputation."""
    forward, again = contextlib.nullcontext(), contextlib.nullcontext()
    if "attention" not in RECOMPUTED[mode]:
        forward, again = create_selective_checkpoint_contexts(_policy)
    return forward, _Recomputation(block, again)


class _Recomputation(contextlib.ExitStack):
    """The context of a block's recomputation, which every backward through the block enters
    again."""

    def __init__(self, block: nn.Module, selective: Context) -> None:
        super().__init__()
        self.block = block
        self.selective = selective

    def __enter__(self) -> Self:
        self.callback(_checkpointed.reset, _checkpointed.set(True))
        self.callback(_recomputes.reset, _recomputes.set(_can_skip_outputs(self.block)))
        self.enter_context(self.selective)
        return self


def _policy(_context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    return (
        CheckpointPolicy.MUST_SAVE if is_attention(operator) else CheckpointPolicy.PREFER_RECOMPUTE
    )


_SELECTIVE = tuple(type(context) for context in create_selective_checkpoint_contexts(_policy))
"""Classes of the contexts of selective checkpointing."""
