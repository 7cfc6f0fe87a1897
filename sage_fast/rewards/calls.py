"""One call of a reward, and the check of what it returns."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sage_fast.config.secrets import names_for_values
from sage_fast.rewards.backends import score_of
from sage_fast.rewards.failures import RewardFailure
from sage_fast.rewards.interface import Metadata
from sage_fast.util.process_state import restored

PART = re.compile(r"(?! )[\w.+/%$ -]{1,100}(?<! )")
"""Name of a part, which becomes one of metrics, columns and lines of a chart. Spaces may stand within it."""


def called(
    name: str,
    reward: Any,
    videos: Tensor,
    prompts: list[str],
    metadata: list[Metadata],
    fps: float | None = None,
) -> dict[str, Tensor]:
    """Call the reward of this name without gradients; return each part, float32 `[B]` on the CPU, sorted by name.

    It gets `metadata`, and `fps`, the frames per second of the videos, if it has a parameter of this name. Where the
    rate is not known, a default of the reward's own stays.

    Raises:
        RewardFailure: it did not return parts. Whatever the reward raises passes through.
    """
    score = score_of(reward)
    taken = inspect.signature(score).parameters
    known: dict[str, Any] = {}
    if "metadata" in taken:
        known["metadata"] = copy.deepcopy(metadata)
    if "fps" in taken and (fps is not None or taken["fps"].default is inspect.Parameter.empty):
        known["fps"] = fps
    with torch.no_grad():
        with restored(f"reward {name!r}"):
            returned = score(videos, list(prompts), **known)
        return checked(returned, len(prompts))


def checked(returned: object, count: int) -> dict[str, Tensor]:
    """Check what a reward returned; return its parts, float32 `[count]` on the CPU, sorted by name.

    Raises:
        RewardFailure: it is not a mapping of names to `count` numbers each.
    """
    if not isinstance(returned, Mapping):
        raise RewardFailure(f"returned {type(returned).__name__}; expected a mapping of parts to [{count}]")
    parts = {}
    for name, value in returned.items():
        part = names_for_values(name) if isinstance(name, str) else name
        if not isinstance(part, str) or not PART.fullmatch(part):
            raise RewardFailure(f"returned a part named {part!r}; expected 1 to 100 letters, digits and _ . - + / % $")
        try:
            values = torch.as_tensor(value).detach().to_dense().cpu()
            shape = list(values.shape)
        except (TypeError, ValueError, RuntimeError) as error:
            raise RewardFailure(f"part {part!r}: expected numbers [{count}], got {type(value).__name__}") from error
        if shape != [count]:
            raise RewardFailure(f"part {part!r}: expected shape [{count}], got {shape}")
        if values.is_complex():
            raise RewardFailure(f"part {part!r}: expected real numbers, got {values.dtype}")
        parts[part] = values.float()
    return dict(sorted(parts.items()))
