"""The testbed's held-out judge; it plays the role that CLIPScore and PickScore have for the real model.

Two scores, each about 0 to 1, by a network trained on rendered clips and their corruptions, never on the reward:

    alignment     mean probability of the shape, colour, direction and speed that the prompt names
    naturalness   how clean the clip is: 1 as rendered, 0 corrupted beyond recognition

Use it as `eval.judge` only: a policy trained on it would learn to fool it, like any reward.
"""

import torch
from torch import Tensor

from sage_fast.testbed.judge_network import load_judge
from sage_fast.testbed.world import ATTRIBUTES

WORDS = [word for words in ATTRIBUTES.values() for word in words]


class TestbedJudge:
    """Scores videos float [B, F, 3, H, W] in [0, 1] (17 frames of 32 x 32) against one caption each."""

    __test__ = False  # keep pytest from collecting it as a test class
    gpu_bytes = 501_560.0

    def __init__(self) -> None:
        self.network = load_judge()

    @torch.no_grad()
    def __call__(self, videos: Tensor, prompts: list[str]) -> dict[str, Tensor]:
        """Return "alignment" and "naturalness", float32 [B]; NaN for a video with a NaN pixel."""
        named = torch.tensor([[word in prompt.split() for word in WORDS] for prompt in prompts], device=videos.device)
        if not named.any(dim=1).all():
            prompt = next(prompt for prompt, words in zip(prompts, named) if not words.any())
            raise ValueError(f'prompt "{prompt}" names nothing that the judge knows: {", ".join(WORDS)}')
        logits, clean = self.network.to(videos.device)(videos.float().clamp(0.0, 1.0))
        probable = torch.cat([logits[attribute].softmax(dim=1) for attribute in ATTRIBUTES], dim=1)
        alignment = (probable * named).sum(dim=1) / named.sum(dim=1)
        return {"alignment": alignment, "naturalness": clean.sigmoid()}
