"""The testbed's held-out judge; it plays the role that CLIPScore and PickScore have for the real
model.

Five scores, each about 0 to 1, by a network trained on rendered clips and their corruptions, never
on the reward:

    size, color, direction, speed   probability of the word that the prompt names
    naturalness                     how clean the clip is: 1 as rendered, 0 corrupted beyond
                                    recognition

Use it as `eval.judge` only: a policy trained on it would learn to fool it, like any reward.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from diffusers import ModelMixin
from diffusers.configuration_utils import ConfigMixin, register_to_config
from torch import Tensor, nn

from sage_fast.testbed.rewards import CaptionScorer, as_sampled
from sage_fast.testbed.world import BALLS, World

JUDGE = Path(__file__).parent / "judge_weights"  # the trained weights that ship with the package


def class_counts_of(world: World) -> list[tuple[str, int]]:
    """Return what a judge of this world tells apart: attribute and number of its words."""
    return [(attribute, len(words)) for attribute, words in world.attributes.items()]


class JudgeNetwork(ModelMixin, ConfigMixin):
    """Classifier of a clip, with a score of its cleanness.

    Args:
        class_counts: what is classified and its number of classes: by default size, colour,
            direction and speed.
    """

    @register_to_config
    def __init__(
        self,
        channels: tuple[int, ...] = (16, 32, 48, 48),
        class_counts: Sequence[tuple[str, int]] = tuple(class_counts_of(BALLS)),
    ) -> None:
        super().__init__()
        self.class_counts = dict(class_counts)
        a, b, c, d = channels
        self.body = nn.Sequential(
            nn.Conv3d(3, a, (1, 3, 3), stride=(1, 2, 2), padding=(0, 1, 1)),  # [17, 16, 16]
            nn.GroupNorm(4, a),
            nn.SiLU(),
            nn.Conv3d(a, b, 3, stride=(1, 2, 2), padding=1),  # [17, 8, 8]
            nn.GroupNorm(4, b),
            nn.SiLU(),
            nn.Conv3d(b, c, 3, stride=(2, 1, 1), padding=1),  # [9, 8, 8]
            nn.GroupNorm(4, c),
            nn.SiLU(),
            nn.Conv3d(c, d, 3, stride=2, padding=1),  # [5, 4, 4]
            nn.SiLU(),
        )
        self.head = nn.Sequential(
            nn.Linear(2 * d, 64), nn.SiLU(), nn.Linear(64, sum(self.class_counts.values()) + 1)
        )

    def forward(self, videos: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Return logits: attribute -> [B, classes] in the order of `class_counts`, and [B] for
        being clean.

        Args:
            videos: [B, F, 3, H, W] in [0, 1], of the size it was trained on: 17 frames of 32 x 32
                for the testbed's.
        """
        seen = self.body(4.0 * videos.transpose(1, 2) - 1.0)
        output = self.head(torch.cat([seen.mean((2, 3, 4)), seen.amax((2, 3, 4))], dim=1))
        *words, clean = output.split([*self.class_counts.values(), 1], dim=1)
        return dict(zip(self.class_counts, words)), clean[:, 0]


def load_judge(folder: Path = JUDGE) -> JudgeNetwork:
    """Load the trained network in float32 (stored as float16) and in evaluation mode."""
    network: JudgeNetwork = JudgeNetwork.from_pretrained(folder, torch_dtype=torch.float32)
    return network.eval()


class TestbedJudge(CaptionScorer):
    """Scores videos float [B, F, 3, H, W] in [0, 1] against one caption each; it was trained on 17
    frames of 32 x 32, and reads other numbers and sizes less well."""

    gpu_bytes = 501_300.0
    weights = JUDGE

    def __init__(self) -> None:
        self.network = load_judge(self.weights)

    @torch.no_grad()
    def __call__(self, videos: Tensor, prompts: list[str]) -> dict[str, Tensor]:
        """Return "size", "color", "direction", "speed" and "naturalness", float32 [B]; NaN for a
        video with a NaN pixel.

        Raises:
            UserError: a prompt is no caption of the world; names the word at fault.
        """
        videos = as_sampled(videos)
        wanted = [self.world.words_of(self.world.parse(prompt)) for prompt in prompts]
        logits, clean = self.network.to(videos.device)(videos.float().clamp(0.0, 1.0))
        scores = {}
        for attribute, words in self.world.attributes.items():
            named = [words.index(row[attribute]) for row in wanted]
            probable = logits[attribute].softmax(dim=1)
            scores[attribute] = probable[torch.arange(len(named)), named]
        return {**scores, "naturalness": clean.sigmoid()}
