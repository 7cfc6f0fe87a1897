"""Choose the frames that represent a video."""

from __future__ import annotations

import torch


def evenly_spaced(total: int, count: int) -> list[int]:
    """Return `count` evenly spaced indices in [0, total), including first and last; all if there are fewer."""
    return torch.linspace(0, total - 1, min(count, total), dtype=torch.float64).round().long().tolist()
