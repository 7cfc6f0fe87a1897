"""Where another layout of a checkpoint has the layers of ours."""

from __future__ import annotations

from typing import NamedTuple


class ExportTarget(NamedTuple):
    """Where a layer is in another layout of the checkpoint.

    Attributes:
        layer: its name there; that layer may fuse several of ours.
        position: its index among the fused layers, in the order of their rows.
        fused: number of fused layers.
        swaps_halves: whether the two halves of the rows are swapped.
    """

    layer: str
    position: int = 0
    fused: int = 1
    swaps_halves: bool = False
