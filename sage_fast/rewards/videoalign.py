"""VideoAlign (Liu et al. 2025, arXiv:2501.13918): visual quality, motion quality and text alignment by Qwen2-VL.

The published checkpoint, KwaiVGI/VideoReward, is Qwen2-VL-2B-Instruct with a trained vision tower, an unmerged LoRA on
the language model, and one linear head without bias. The head reads each of the three scores at its own special token.
The network is transformers'; loading, prompt and frame processing are ours.

Scoring follows the code the checkpoint was trained with: github.com/KwaiVGI/VideoAlign (inference.py, data.py,
trainer.py, vision_process.py) under transformers 4.45.2 (its environment.yaml).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from sage_fast.rewards.frames import FrameReward, levels, resize
from sage_fast.rewards.videoalign_checkpoint import (
    SPECIAL_TOKENS,
    build_network,
    local_folder,
    read_base,
    read_settings,
    read_weights,
)
from sage_fast.util.errors import UserError, nearest
from sage_fast.util.frames import evenly_spaced

Attention = Literal["sdpa", "flash_attention_2", "eager"]
Precision = Literal["bfloat16", "float32"]

PARTS = ("vq", "mq", "ta")
"""Visual quality, motion quality, text alignment."""
TEMPLATE = (Path(__file__).parent / "videoalign_prompt.txt").read_text(encoding="utf-8")
"""The training prompt, verbatim: "detailed_special" in prompt_template.py of github.com/KwaiVGI/VideoAlign (MIT,
Copyright 2025 Kling Team, Kuaishou Technology)."""

CHAT = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\n<|vision_start|>{video}<|vision_end|>{text}<|im_end|>\n<|im_start|>assistant\n"
)
"""Chat template of Qwen2-VL-2B-Instruct for one video and one text."""

PATCH, MERGED, FRAMES_TOGETHER = 14, 2, 2
"""Vision tower: pixels per patch side, patches per token side, frames merged into one."""
CELL = PATCH * MERGED
MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)
"""Normalisation of RGB in [0, 1], from preprocessor_config.json of Qwen2-VL-2B-Instruct."""


class VideoAlignReward(FrameReward):
    """Scores `vq`, `mq` and `ta`, normalised as published, and the head's raw `vq_raw`, `mq_raw` and `ta_raw`.

    Args:
        path: folder of the published checkpoint (`model_config.json`, `checkpoint-11352/model.pth`), or its hub id
            "KwaiVGI/VideoReward". The highest `checkpoint-N` is used.
        base: folder or hub id of Qwen2-VL-2B-Instruct; only its configuration and tokenizer are read.
        device: as for `FrameReward`.
        dtype: dtype of the weights; None for bfloat16 on CUDA, else float32. The head is always float32.
        attention: attention implementation of transformers.
        fps: sampling rate in frames per second; None for that of `model_config.json` (published: 2).
        video_fps: frames per second of the videos passed to `score`.
        max_frame_pixels: larger frames are reduced; None for that of `model_config.json` (published: 200704).
        min_frame_pixels: smaller frames are enlarged (published: 100352).

    Raises:
        UserError: an argument, the checkpoint or the base is not as expected. The error lists all keys of the
            checkpoint that are missing, unknown or of the wrong shape.
    """

    files: ClassVar = {"path": ("model_config.json", "checkpoint-*/model.pth"), "base": ("config.json",)}
    gpu_bytes = 2.0 * 2_208_561_664

    def __init__(
        self,
        path: str,
        *,
        base: str = "Qwen/Qwen2-VL-2B-Instruct",
        device: str | None = None,
        dtype: Precision | None = None,
        attention: Attention = "sdpa",
        fps: float | None = None,
        video_fps: float = 24.0,
        max_frame_pixels: int | None = None,
        min_frame_pixels: int = 128 * CELL * CELL,
    ) -> None:
        super().__init__(device, video_fps)
        if attention not in get_args(Attention):
            raise UserError(f"attention = {attention!r}: {nearest(attention, get_args(Attention))}")
        if dtype is None:
            on_cuda = self.device.type == "cuda" if self.device is not None else torch.cuda.is_available()
            dtype = "bfloat16" if on_cuda else "float32"
        if dtype not in get_args(Precision):
            raise UserError(f"dtype = {dtype!r}: {nearest(dtype, get_args(Precision))}")
        folder = local_folder(path)
        settings = read_settings(folder)
        self.fps = settings.fps if fps is None else fps
        self.max_frame_pixels = settings.max_frame_pixels if max_frame_pixels is None else max_frame_pixels
        self.min_frame_pixels = min_frame_pixels
        if not (math.isfinite(self.fps) and self.fps > 0):
            raise UserError(f"fps = {self.fps}: expected frames per second above 0, such as 2")
        if not CELL * CELL <= min_frame_pixels <= self.max_frame_pixels:
            raise UserError(
                f"min_frame_pixels = {min_frame_pixels}, max_frame_pixels = {self.max_frame_pixels}: expected "
                f"{CELL * CELL} <= min_frame_pixels <= max_frame_pixels"
            )
        self.tokenizer, config = read_base(base)
        precision = getattr(torch, dtype)
        self.network, self.head = build_network(config, read_weights(folder), settings.lora, precision, attention)
        self.mean, self.std = settings.mean, settings.std
        self.token_ids = self.tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS))

    def choose(self, total: int, fps: float) -> list[int]:
        """Return an even number of evenly spaced indices from first to last; at least 4 if the video has them.

        Raises:
            ValueError: there are fewer than 2 frames.
        """
        if total < FRAMES_TOGETHER:
            raise ValueError(f"VideoAlign needs videos of at least {FRAMES_TOGETHER} frames, got {total}")
        most = min(768, total) // 2 * 2
        return evenly_spaced(total, round(min(max(total / fps * self.fps, 4), most) / 2) * 2)

    def of_frames(self, videos: Sequence[Tensor], prompts: Sequence[str]) -> dict[str, Tensor]:
        """Return each part, float32 `[B]`."""
        prepared = [self.patches(frames) for frames in videos]
        grids = torch.tensor([grid for _, grid in prepared])
        texts = [self.text(prompt, grid) for prompt, (_, grid) in zip(prompts, prepared)]
        ids = self.tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")["input_ids"]
        places = [self._place(row, prompt) for row, prompt in zip(ids.tolist(), prompts)]
        raw = self._raw(ids, torch.tensor(places), torch.cat([patches for patches, _ in prepared]), grids)
        scores = (raw - raw.new_tensor(self.mean)) / raw.new_tensor(self.std)
        return {part: scores[:, i] for i, part in enumerate(PARTS)} | {
            f"{part}_raw": raw[:, i] for i, part in enumerate(PARTS)
        }

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Return multiples of 28 near `height x width` that keep the aspect ratio and respect the pixel limits."""
        nearest_height, nearest_width = (max(CELL, round(side / CELL) * CELL) for side in (height, width))
        if nearest_height * nearest_width > self.max_frame_pixels:
            shrink = math.sqrt(height * width / self.max_frame_pixels)
            return _down(height / shrink), _down(width / shrink)
        if nearest_height * nearest_width < self.min_frame_pixels:
            grow = math.sqrt(self.min_frame_pixels / (height * width))
            return math.ceil(height * grow / CELL) * CELL, math.ceil(width * grow / CELL) * CELL
        return nearest_height, nearest_width

    def patches(self, frames: Tensor) -> tuple[Tensor, tuple[int, int, int]]:
        """Prepare one video for the vision tower.

        Args:
            frames: float `[n, 3, H, W]` in [0, 1], n even.

        Returns:
            Patches, float32 `[t h w, 3 * 2 * 14 * 14]`, and their grid (t, h, w). The patches of a token are adjacent.
        """
        pixels = resize(levels(frames), *self.size(*frames.shape[-2:]))
        pixels = (pixels / 255 - pixels.new_tensor(MEAN)[:, None, None]) / pixels.new_tensor(STD)[:, None, None]
        t, h, w = len(frames) // FRAMES_TOGETHER, pixels.shape[2] // PATCH, pixels.shape[3] // PATCH
        split = pixels.reshape(t, FRAMES_TOGETHER, 3, h // MERGED, MERGED, PATCH, w // MERGED, MERGED, PATCH)
        return split.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(t * h * w, -1), (t, h, w)

    def text(self, prompt: str, grid: tuple[int, int, int]) -> str:
        """Return the whole conversation about one video."""
        tokens = math.prod(grid) // MERGED**2
        return CHAT.format(video="<|video_pad|>" * tokens, text=TEMPLATE.replace("{text_prompt}", prompt))

    def _place(self, row: list[int], prompt: str) -> list[int]:
        """Return the positions of the three special tokens."""
        found = [i for i, token in enumerate(row) if token in self.token_ids]
        if [row[i] for i in found] != self.token_ids or "<|video_pad|>" in prompt:
            raise ValueError(
                f"prompt {prompt!r} holds a special token of VideoAlign or Qwen2-VL, so it cannot be scored"
            )
        return found

    def _raw(self, ids: Tensor, places: Tensor, patches: Tensor, grids: Tensor) -> Tensor:
        """Return raw scores, float32 `[B, 3]`.

        Args:
            ids: token ids `[B, L]`, padded on the right.
            places: positions of the three special tokens, `[B, 3]`.
            patches: patches of all videos, concatenated.
            grids: grid of each video, `[B, 3]`.
        """
        rows, length = ids.shape
        # As in training: transformers 4.45, called without positions, numbered the tokens as in plain text.
        # transformers 5 would give video tokens 3-D positions. No mask: attention is causal and padding comes last.
        positions = torch.arange(length, device=self.device).expand(3, rows, length)
        hidden = self.network(
            input_ids=ids.to(self.device),
            position_ids=positions,
            pixel_values_videos=patches,
            video_grid_thw=grids.to(self.device),
            use_cache=False,
        ).last_hidden_state
        read = hidden[torch.arange(rows, device=hidden.device)[:, None], places.to(hidden.device)]
        return (read.float() @ self.head.to(hidden.device).T)[..., 0]


def _down(side: float) -> int:
    return max(CELL, math.floor(side / CELL) * CELL)
