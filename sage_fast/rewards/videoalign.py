"""VideoAlign (Liu et al. 2025, arXiv:2501.13918): visual quality, motion quality and text alignment by Qwen2-VL.

The published checkpoint, KwaiVGI/VideoReward, is Qwen2-VL-2B-Instruct with a trained vision tower, an unmerged LoRA on
the language model, and one linear head without bias. The head reads each of the three scores at its own special token.
It was saved by transformers 4.45 and peft as `model_config.json` and `checkpoint-11352/model.pth`: all weights, 1123
bfloat16 tensors.

Scoring follows the code the checkpoint was trained with: github.com/KwaiVGI/VideoAlign (inference.py, data.py,
trainer.py, vision_process.py) under transformers 4.45.2 (its environment.yaml).
"""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from sage_fast.rewards.qwen2_vl import CELL, FRAMES_TOGETHER, Precision, Qwen2VLReward, local_folder
from sage_fast.util.errors import UserError, first_line, in_one_line
from sage_fast.util.videos import evenly_spaced

PARTS = ("vq", "mq", "ta")
"""Visual quality, motion quality, text alignment."""
MOST_FRAMES = 768
"""Maximum number of frames, as published."""
TEMPLATE = (Path(__file__).parent / "videoalign_prompt.txt").read_text(encoding="utf-8")
"""The training prompt, verbatim: "detailed_special" in prompt_template.py of github.com/KwaiVGI/VideoAlign (MIT,
Copyright 2025 Kling Team, Kuaishou Technology)."""


class VideoAlignReward(Qwen2VLReward):
    """Scores `vq`, `mq` and `ta`, normalised as published, and the head's raw `vq_raw`, `mq_raw` and `ta_raw`.

    Args:
        path: folder of the published checkpoint (`model_config.json`, `checkpoint-11352/model.pth`), or its hub id
            "KwaiVGI/VideoReward". The highest `checkpoint-N` is used.
        base, device, dtype: as for `Qwen2VLReward`.
        video_fps: frames per second of the videos passed to `score`.

    Raises:
        UserError: an argument, the checkpoint or the base is not as expected. The error lists all keys of the
            checkpoint that are missing, unknown or of the wrong shape.
    """

    files: ClassVar = {"path": ("model_config.json", "checkpoint-*/model.pth"), "base": ("config.json",)}
    gpu_bytes = 2.0 * 2_208_561_664
    base_model = "Qwen2-VL-2B-Instruct"
    special_tokens = ("<|VQ_reward|>", "<|MQ_reward|>", "<|TA_reward|>")
    vision = "video"
    template = TEMPLATE
    min_frame_pixels = 128 * CELL * CELL

    def __init__(
        self,
        path: str,
        *,
        base: str = "Qwen/Qwen2-VL-2B-Instruct",
        device: str = "cpu",
        dtype: Precision | None = None,
        video_fps: float = 24.0,
    ) -> None:
        super().__init__(base, device, dtype, num_frames=MOST_FRAMES)
        folder = local_folder(path, "KwaiVGI/VideoReward", self.files["path"])
        settings = read_settings(folder)
        if not (math.isfinite(video_fps) and video_fps > 0):
            raise UserError(f"video_fps = {video_fps}: expected frames per second above 0, such as 24")
        self.fps, self.video_fps, self.max_frame_pixels = settings["fps"], video_fps, settings["max_frame_pixels"]
        head = nn.Linear(self.config.text_config.hidden_size, 1, bias=False, device="meta")
        self.network = self.build(head, read_weights(folder), prefix=PEFT, lora=settings["lora"])
        self.mean, self.std = settings["mean"], settings["std"]

    def choose(self, total: int) -> list[int]:
        """Return an even number of evenly spaced indices from first to last; at least 4 if the video has them.

        Raises:
            ValueError: there are fewer than 2 frames.
        """
        if total < FRAMES_TOGETHER:
            raise ValueError(f"VideoAlign needs videos of at least {FRAMES_TOGETHER} frames, got {total}")
        most = min(self.num_frames, total) // 2 * 2
        return evenly_spaced(total, round(min(max(total / self.video_fps * self.fps, 4), most) / 2) * 2)

    def of_frames(self, videos: Sequence[Tensor], prompts: Sequence[str]) -> dict[str, Tensor]:
        """Return each part, float32 `[B]`."""
        read = self.read(videos, prompts)
        raw = (read @ self.network.rm_head.weight.T)[..., 0]
        scores = (raw - raw.new_tensor(self.mean)) / raw.new_tensor(self.std)
        names = [*PARTS, *(f"{part}_raw" for part in PARTS)]
        return dict(zip(names, torch.cat([scores, raw], dim=1).T))


# -- the checkpoint ---------------------------------------------------------------------------------------------------

PEFT = "base_model.model."
"""Prefix that peft gives to the names of all weights."""


def read_settings(folder: Path) -> dict[str, Any]:
    """Read the needed fields of `model_config.json`.

    Returns:
        `fps` and `max_frame_pixels`; `mean` and `std` of raw VQ, MQ and TA; `lora`, its rank and scale.

    Raises:
        UserError: the file is missing, lacks a field, or describes another kind of reward model.
    """
    file = folder / "model_config.json"
    try:
        config = json.loads(file.read_text())
        data, model, lora, scale = (
            config[name] for name in ("data_config", "model_config", "peft_lora_config", "inference_config")
        )
        for name, value, wanted in (
            ("data_config.prompt_template_type", data["prompt_template_type"], "detailed_special"),
            ("data_config.num_frames", data["num_frames"], None),
            ("data_config.sample_type", data["sample_type"], "uniform"),
            ("model_config.use_special_tokens", model["use_special_tokens"], True),
            ("model_config.output_dim", model["output_dim"], 1),
        ):
            if value != wanted:
                raise ValueError(f"{name} = {value!r}: expected {wanted!r}")
        rank = int(lora["lora_r"])
        normal = {name: [float(scale[f"{part.upper()}_{name}"]) for part in PARTS] for name in ("mean", "std")}
        return normal | {
            "fps": float(data["fps"]),
            "max_frame_pixels": int(data["max_frame_pixels"]),
            "lora": (rank, lora["lora_alpha"] / (math.sqrt(rank) if lora["use_rslora"] else rank)),
        }
    except OSError as error:
        raise UserError(f"path = {str(folder)!r}: expected the VideoAlign checkpoint, with {file.name}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{file}: not the settings of KwaiVGI/VideoReward: {in_one_line(error)}") from error


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Return the tensors in `model.pth` of the highest `checkpoint-N`."""
    found = [path for path in folder.glob("checkpoint-*/model.pth") if path.parent.name[11:].isdigit()]
    if not found:
        raise UserError(f"path = {str(folder)!r}: no checkpoint-N/model.pth in it, such as checkpoint-11352/model.pth")
    path = max(found, key=lambda path: int(path.parent.name[11:]))
    try:
        weights = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise UserError(f"{path}: not read: {first_line(error)}") from error
    if not (isinstance(weights, dict) and all(isinstance(value, Tensor) for value in weights.values())):
        raise UserError(f"{path}: expected the tensors of a model by their names")
    return weights
