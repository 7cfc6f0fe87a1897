"""The testbed's reward for the world of shapes."""

from __future__ import annotations

from sage_fast.testbed.rewards import TestbedReward
from studies.shapes.world import SHAPES


class ShapesReward(TestbedReward):
    """Scores videos float [B, F, 3, H, W] in [0, 1] (F >= 2) against one caption each: "vq", "mq"
    and "ta", [B]."""

    world = SHAPES
