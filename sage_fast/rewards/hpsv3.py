"""HPSv3 (Ma et al. 2025, arXiv:2508.03789): how much people would prefer a frame, given its prompt, by Qwen2-VL.

The published checkpoint, MizzenAI/HPSv3, is a fully trained Qwen2-VL-7B-Instruct with a head of three layers that is
read at one special token. The head returns mean and spread of a normal distribution over scores; the mean counts.

Scoring follows github.com/MizzenAI/HPSv3 (inference.py, data_collator_qwen.py, qwen2vl_trainer.py, HPSv3_7B.yaml).
HPSv3 scores images: the score of a video is the mean over evenly spaced frames.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from sage_fast.rewards.qwen2_vl import CELL, Precision, Qwen2VLReward, local_folder
from sage_fast.util.errors import UserError

TEMPLATE = (Path(__file__).parent / "hpsv3_prompt.txt").read_text(encoding="utf-8")
"""The training prompt, verbatim, spaces at the ends of lines included: INSTRUCTION and prompt_with_special_token in
data_collator_qwen.py of github.com/MizzenAI/HPSv3 (MIT, Copyright 2024 HPSv3 Team)."""
PIXELS = 256 * CELL * CELL
"""Size of a frame: the largest multiples of 28 within it, or the smallest beyond it for a frame that is smaller."""


class HPSv3Reward(Qwen2VLReward):
    """Scores `hpsv3`, the head's mean, averaged over frames; it has no bounds.

    Args:
        path: folder of the published checkpoint (`HPSv3.safetensors`), or its hub id.
        base, device, dtype: as for `Qwen2VLReward`.
        num_frames: as for `FrameReward`.

    Raises:
        UserError: an argument, the checkpoint or the base is not as expected. The error lists all keys of the
            checkpoint that are missing, unknown or of the wrong shape.
    """

    files: ClassVar = {"path": ("HPSv3.safetensors",), "base": ("config.json",)}
    gpu_bytes = 2.0 * 7_744_923_136
    base_model = "Qwen2-VL-7B-Instruct"
    special_tokens = ("<|Reward|>",)
    template = TEMPLATE
    vision = "image"
    min_frame_pixels = max_frame_pixels = PIXELS

    def __init__(
        self,
        path: str = "MizzenAI/HPSv3",
        *,
        base: str = "Qwen/Qwen2-VL-7B-Instruct",
        device: str = "cpu",
        dtype: Precision | None = None,
        num_frames: int = 8,
    ) -> None:
        super().__init__(base, device, dtype, num_frames)
        file = local_folder(path, "MizzenAI/HPSv3", self.files["path"]) / "HPSv3.safetensors"
        try:
            weights = load_file(file)
        except (OSError, SafetensorError) as error:
            raise UserError(f"path = {path!r}: expected a folder with {file.name}: {error}") from error
        width = self.config.text_config.hidden_size
        with torch.device("meta"):
            head = nn.Sequential(
                nn.Linear(width, 1024), nn.ReLU(), nn.Dropout(), nn.Linear(1024, 16), nn.ReLU(), nn.Linear(16, 2)
            )
        self.network = self.build(head, weights)

    def of_frames(self, videos: Sequence[Tensor], prompts: Sequence[str]) -> dict[str, Tensor]:
        """Return the part, float32 `[B]`."""
        scores = []
        for frames, prompt in zip(videos, prompts):
            read = self.read([frame.expand(2, -1, -1, -1) for frame in frames], [prompt] * len(frames))
            scores.append(self.network.rm_head(read[:, 0])[:, 0].mean())
        return {"hpsv3": torch.stack(scores)}
