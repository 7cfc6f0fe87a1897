"""A reward of the testbed that only ranks the videos of a prompt."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sage_fast.testbed.rewards import TestbedReward


class GroupRank:
    """Share of the other videos of the group with a lower composite, in [0, 1]; a tie counts
    half."""

    compares_group = True

    def __init__(self) -> None:
        self._reward = TestbedReward()

    def __call__(self, videos: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
        """Rank `videos [G, F, 3, H, W]` of one prompt; the part `rank` is `[G]`."""
        composite = torch.stack(list(self._reward(videos, list(prompts)).values())).sum(0)
        above = composite[:, None] > composite[None, :]
        equal = composite[:, None] == composite[None, :]
        others = max(len(composite) - 1, 1)
        # A video equals itself, which is no tie.
        return {"rank": (above.sum(1) + 0.5 * (equal.sum(1) - 1)) / others}
