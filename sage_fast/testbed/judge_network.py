"""The held-out judge: a small network trained on examples, independent of the training reward."""

from collections.abc import Sequence
from pathlib import Path

import torch
from diffusers import ModelMixin
from diffusers.configuration_utils import ConfigMixin, register_to_config
from torch import Tensor, nn

from sage_fast.testbed.world import ATTRIBUTES

JUDGE = Path(__file__).parent / "judge_weights"  # the trained weights that ship with the package
SIZES = {attribute: len(words) for attribute, words in ATTRIBUTES.items()}


class JudgeNetwork(ModelMixin, ConfigMixin):
    """Classifier of a clip, with a score of its cleanness.

    Args:
        sizes: what is classified and the number of its classes: by default shape, colour, direction and speed.
    """

    @register_to_config
    def __init__(
        self, channels: tuple[int, ...] = (16, 32, 48, 48), sizes: Sequence[tuple[str, int]] = tuple(SIZES.items())
    ) -> None:
        super().__init__()
        self.sizes = dict(sizes)
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
        self.head = nn.Sequential(nn.Linear(2 * d, 64), nn.SiLU(), nn.Linear(64, sum(self.sizes.values()) + 1))

    def forward(self, videos: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Return logits: attribute -> [B, classes] in the order of `sizes`, and [B] for being clean.

        Args:
            videos: [B, F, 3, H, W] in [0, 1], of the size it was trained on: 17 frames of 32 x 32 for the testbed's.
        """
        seen = self.body(4.0 * videos.transpose(1, 2) - 1.0)
        output = self.head(torch.cat([seen.mean((2, 3, 4)), seen.amax((2, 3, 4))], dim=1))
        *words, clean = output.split([*self.sizes.values(), 1], dim=1)
        return dict(zip(self.sizes, words)), clean[:, 0]


def load_judge(folder: Path = JUDGE) -> JudgeNetwork:
    """Load the trained network in float32 (stored as float16) and in evaluation mode."""
    network: JudgeNetwork = JudgeNetwork.from_pretrained(folder, torch_dtype=torch.float32)
    return network.eval()
