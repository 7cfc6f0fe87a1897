"""The judge of the world of shapes, which no run trains on."""

from __future__ import annotations

import torch
from torch import Tensor

from sage_fast.testbed.judge import TestbedJudge
from studies.shapes.world import BASE, SHAPES


class ShapesJudge(TestbedJudge):
    """Scores videos float [B, F, 3, H, W] in [0, 1] (17 frames of 32 x 32) against one caption
    each: "alignment" and "naturalness", [B]."""

    world = SHAPES
    weights = BASE / "judge"
    gpu_bytes = 501_560.0

    def __call__(self, videos: Tensor, prompts: list[str]) -> dict[str, Tensor]:
        """Return the mean over the words, and how clean a clip is."""
        scores = super().__call__(videos, prompts)
        words = torch.stack([scores[attribute] for attribute in self.world.attributes])
        return {"alignment": words.mean(dim=0), "naturalness": scores["naturalness"]}
