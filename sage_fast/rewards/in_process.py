"""A call of a reward in the process that it lives in: the run's own, or a worker's.

A call is a call: on the main thread, without a time limit. A reward that hangs, needs a time limit
or changes what cannot be put back is given a process of its own with `reward.workers: 1`.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import logging
import re
import threading
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sage_fast.config.secrets import names_for_values
from sage_fast.rewards.failure_policy import RewardFailure, failure
from sage_fast.rewards.interface import (
    RESERVED_NAMES,
    Backend,
    Request,
    compares_group,
    in_unit_range,
)
from sage_fast.rewards.load import score_of
from sage_fast.util.console import wrapped
from sage_fast.util.guard import NotPutBack, guarded, seed_random_numbers
from sage_fast.util.parking import Parked, bytes_on
from sage_fast.util.text import counted

log = logging.getLogger(__name__)

MAX_PARTS = 100
"""Largest number of parts of an answer; each becomes a metric, a column and a line of a chart."""
NARROW = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
"""Dtypes whose numbers float32 tells apart."""
SLOW_CALL_S = 120.0
"""Seconds after which a call that goes on is named, so that a run that waits for a reward says so.
"""
PART = re.compile(r"(?! )[\w.+/%$ -]{1,100}(?<! )")
"""Name of a part, which becomes one of metrics, columns and lines of a chart.

Spaces may stand within it.
"""


_noted_training: set[str] = set()
"""Names of rewards whose networks were said to be in training mode."""


class InProcess(Backend):
    """Calls a reward in this process.

    Args:
        name: name of the reward, for messages.
        device: device that the videos are moved to; None: none.
    """

    in_background = False

    def __init__(self, name: str, reward: Any, device: str | None = None) -> None:
        self.name = name
        self.reward = reward
        self.device = device
        self.compares_group = compares_group(reward)
        self._writes_into_videos = False
        self._parked = Parked([], torch.device("cpu"))

    def score(self, request: Request, seconds: float = 0.0) -> dict[str, Tensor]:
        """Score videos; `seconds` has no effect, since nothing can end a call in this process."""
        videos = request.videos
        gpu = torch.cuda.is_available()
        device = torch.cuda.current_device() if gpu else -1
        stream = torch.cuda.current_stream() if gpu else None
        try:
            # Both are restored if the reward changes them.
            with torch.cuda.device(device), torch.cuda.stream(stream):
                # A copy: other rewards, the judge and the saved files get what was decoded.
                own = in_unit_range(videos.to(self.device or videos.device, copy=True))
                with self._parked.on_device():
                    parts = call(self.name, self.reward, dataclasses.replace(request, videos=own))
                self._note_writes(own, videos)
                return parts
        except (KeyboardInterrupt, NotPutBack):
            raise
        except (
            BaseException
        ) as error:  # also what derives from no Exception: cancelled tasks, panics of Rust
            raise RewardFailure(failure(error)) from error

    def bytes_on(self, device: torch.device) -> int:
        return bytes_on(_distinct(_networks_of(self.reward)), device)

    def park(self, device: torch.device) -> None:
        self._parked = Parked(_distinct(_networks_of(self.reward)), device)

    def _note_writes(self, own: Tensor, videos: Tensor) -> None:
        """Say once that the reward wrote into its copy of the videos."""
        if self._writes_into_videos:
            return
        freed = own.untyped_storage().nbytes() < own.nbytes  # a reward may even free them
        if not freed and torch.equal(own, in_unit_range(videos.to(own.device))):
            return
        if not videos.isnan().any():  # NaN equals nothing, itself neither
            self._writes_into_videos = True
            log.warning(
                wrapped(
                    f"note: reward {self.name!r} writes into the videos, of which it has a copy"
                )
            )


def call(name: str, reward: Any, request: Request) -> dict[str, Tensor]:
    """Call the reward of this name without gradients; return each part, `[B]` on the CPU, sorted by
    name.

    Its networks are in evaluation mode, its random numbers are those of the request's seed, and it
    gets `metadata` and `fps` if it has parameters of these names. Where the rate is not known, a
    default of the reward's own stays.

    Raises:
        RewardFailure: it did not return parts. Whatever the reward raises passes through.
    """
    score = score_of(reward)
    taken = inspect.signature(score).parameters
    known: dict[str, Any] = {}
    if "metadata" in taken:
        known["metadata"] = copy.deepcopy(request.metadata)
    if "fps" in taken and (
        request.fps is not None or taken["fps"].default is inspect.Parameter.empty
    ):
        known["fps"] = request.fps
    with torch.no_grad():
        with (
            guarded(f"reward {name!r}"),
            _named_if_slow(name, request),
            _evaluation_mode(name, reward),
        ):
            seed_random_numbers(request.seed)
            returned = score(request.videos, list(request.prompts), **known)
        return checked(returned, len(request), own_name(reward))


@contextlib.contextmanager
def _named_if_slow(name: str, request: Request) -> Iterator[None]:
    """Name the reward on the screen and in the log if the block takes longer than `SLOW_CALL_S`."""
    since = time.strftime("%H:%M:%S")
    text = (
        f"reward {name!r} has been scoring {counted(len(request), 'video')} since {since}; the "
        "run waits for it"
    )
    timer = threading.Timer(SLOW_CALL_S, log.info, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


# -- evaluation mode -------------------------------------------------------------------------------


@contextlib.contextmanager
def _evaluation_mode(name: str, reward: Any) -> Iterator[None]:
    """Put networks into evaluation mode before the block runs them: dropout and batch norm would
    score by chance.

    Those that the reward holds are found before it; others, such as those of a cache, when they
    run. What the block itself puts into training mode stays there.
    """
    kinds: set[str] = set()
    chosen: set[int] = set()
    train = nn.Module.train

    def train_by_choice(network: nn.Module, mode: bool = True) -> nn.Module:
        if mode:
            chosen.add(id(network))
        return train(network, mode)

    def leave(network: nn.Module, inputs: object = None) -> None:
        if network.training and id(network) not in chosen:
            kinds.add(type(network).__name__)
            network.eval()

    for network in _networks_of(reward):
        if any(module.training for module in network.modules()):
            kinds.add(type(network).__name__)
            network.eval()
    # A compiled network is asked twice, which does no harm.
    warnings.filterwarnings(
        "ignore", r"Using `torch\.compile\(module\)` when there are global hooks"
    )
    hook = nn.modules.module.register_module_forward_pre_hook(leave)
    nn.Module.train = train_by_choice  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.train = train  # type: ignore[method-assign]
        hook.remove()
        if kinds and name not in _noted_training:
            _noted_training.add(name)
            shown = ", ".join(sorted(kinds)[:5])
            log.warning(
                wrapped(
                    f"note: reward {name!r} has networks in training mode ({shown}); they are set "
                    "to eval"
                )
            )


def _networks_of(reward: Any) -> list[nn.Module]:
    """Return the networks that a reward holds: in its attributes, or for a function in its closure
    and in what its code names of its module. A script's other variables are not the reward's."""
    owner = getattr(reward, "__self__", reward)  # of a method
    if not inspect.isfunction(owner):
        return _networks_in(owner)
    named = [owner.__globals__.get(name) for name in owner.__code__.co_names]
    values = [*named, *vars(owner).values()]
    for cell in owner.__closure__ or ():
        with contextlib.suppress(ValueError):  # an empty cell
            values.append(cell.cell_contents)
    return [network for value in values for network in _networks_in(value)]


def _distinct(networks: Iterable[nn.Module]) -> list[nn.Module]:
    return [*{id(network): network for network in networks}.values()]


def _networks_in(value: Any, depth: int = 3) -> list[nn.Module]:
    """Return the networks in a value, in its items, and in the attributes of plain objects, to a
    small depth."""
    if isinstance(value, nn.Module):
        return [value]
    if depth == 0 or isinstance(value, type | Tensor | str | bytes):
        return []
    if isinstance(value, Mapping):
        inner = list(value.values())
    elif isinstance(value, list | tuple | set):
        inner = list(value)
    elif type(value).__module__ not in ("builtins", "types") and hasattr(value, "__dict__"):
        inner = list(vars(value).values())
    else:
        return []
    return [network for item in inner for network in _networks_in(item, depth - 1)]


# -- what a reward returned ------------------------------------------------------------------------


def own_name(reward: object) -> str:
    """Return the name of a reward's function or class, which its only part gets if it returns
    numbers without a name.

    It is `score` where that would be no name of a part, as of a lambda or a function `reward`.
    """
    code = reward.func if isinstance(reward, functools.partial) else reward
    name = getattr(code, "__name__", type(code).__name__)
    is_part = PART.fullmatch(name) is not None and name not in RESERVED_NAMES
    return name if is_part else "score"


def checked(returned: object, count: int, name: str | None = None) -> dict[str, Tensor]:
    """Check what a reward returned; return its parts, `[count]` on the CPU, sorted by name.

    A part is float64 if the reward's numbers are, as Python's own are, else float32.

    Args:
        name: name of the part if it returned numbers alone; None: they need a name.

    Raises:
        RewardFailure: it is not a mapping of names to `count` numbers each.
    """
    if name is not None and isinstance(returned, Tensor | list | tuple | np.ndarray):
        returned = {name: returned}
    if not isinstance(returned, Mapping):
        raise RewardFailure(
            f"returned {type(returned).__name__}; expected a mapping of parts to [{count}]"
        )
    if len(returned) > MAX_PARTS:
        raise RewardFailure(f"returned {len(returned):,} parts; expected at most {MAX_PARTS}")
    parts = {}
    for name, value in returned.items():
        part = names_for_values(name[:200]) if isinstance(name, str) else name
        if not isinstance(part, str) or not PART.fullmatch(part):
            shown = repr(part)[:200]
            raise RewardFailure(
                f"returned a part named {shown}; expected 1 to 100 letters, digits and _ . - + / % "
                "$"
            )
        parts[part] = _numbers(part, value, count)
    return dict(sorted(parts.items()))


def _numbers(part: str, value: Any, count: int) -> Tensor:
    """Return the numbers of a part, float32 or float64 `[count]`."""
    try:
        if isinstance(value, Tensor):
            values = value.detach().to_dense().cpu()
        elif isinstance(value, list | tuple) and any(isinstance(item, Tensor) for item in value):
            values = torch.stack(
                [torch.as_tensor(item).detach().to_dense().cpu() for item in value]
            )
        else:
            values = torch.as_tensor(np.asarray(value))  # Python's numbers stay float64
        shape = list(values.shape)
    except (TypeError, ValueError, RuntimeError) as error:
        raise RewardFailure(
            f"part {part!r}: expected numbers [{count}], got {type(value).__name__}"
        ) from error
    if shape != [count]:
        raise RewardFailure(f"part {part!r}: expected shape [{count}], got {shape}")
    if values.is_complex():
        raise RewardFailure(f"part {part!r}: expected real numbers, got {values.dtype}")
    return values.float() if values.dtype in NARROW else values.double()
