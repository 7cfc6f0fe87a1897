"""Base class of rewards that are a Qwen2-VL with a head, read at special tokens; strict loading of their weights.

The network is transformers' own; loading, prompt and frame processing are ours. They follow transformers 4.45.2, with
which VideoAlign and HPSv3 were published, and whose names of weights their files have.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Literal, get_args

import torch
from accelerate import init_empty_weights
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from torch import Tensor, nn
from transformers import AutoTokenizer, Qwen2VLConfig, Qwen2VLModel
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from sage_fast.rewards.frame_reward import FrameReward, levels, resize
from sage_fast.util.errors import UserError, nearest

Precision = Literal["bfloat16", "float32"]

CHAT = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\n<|vision_start|>{vision}<|vision_end|>{text}<|im_end|>\n<|im_start|>assistant\n"
)
"""Chat template of Qwen2-VL-Instruct for one image or video and one text."""

PATCH, MERGED, FRAMES_TOGETHER = 14, 2, 2
"""Vision tower: pixels per patch side, patches per token side, frames merged into one. An image is two equal frames."""
CELL = PATCH * MERGED
MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)
"""Normalisation of RGB in [0, 1], from preprocessor_config.json of Qwen2-VL-Instruct."""


class Qwen2VLReward(FrameReward):
    """A frozen Qwen2-VL whose last hidden states are read at special tokens of the prompt.

    Args:
        base: folder or hub id of the base model; only its configuration and tokenizer are read.
        device, num_frames: as for `FrameReward`.
        dtype: dtype of the weights; None for bfloat16 on CUDA, else float32. The head is always float32.

    Attributes:
        min_frame_pixels, max_frame_pixels: smaller frames are enlarged, larger ones reduced.
        base_model: its published name, for messages.
        special_tokens: tokens added to those of the base model.
        template: text of the request, with `{text_prompt}`.
        vision: what the network sees.

    Raises:
        UserError: an argument or the base is not as expected.
    """

    base_model: ClassVar[str]
    special_tokens: ClassVar[tuple[str, ...]]
    template: ClassVar[str]
    vision: ClassVar[Literal["image", "video"]]
    min_frame_pixels: int
    max_frame_pixels: int

    def __init__(self, base: str, device: str, dtype: Precision | None, num_frames: int) -> None:
        super().__init__(device, num_frames)
        dtype = dtype or ("bfloat16" if self.device.type == "cuda" else "float32")
        if dtype not in get_args(Precision):
            raise UserError(f"dtype = {dtype!r}: {nearest(dtype, get_args(Precision))}")
        self.dtype = getattr(torch, dtype)
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(base)
            self.config = Qwen2VLConfig.from_pretrained(base)
        except (OSError, ValueError) as error:
            raise UserError(f"base = {base!r}: expected a folder or hub id of {self.base_model}: {error}") from error
        if self.tokenizer.convert_tokens_to_ids("<|video_pad|>") != self.config.video_token_id:
            raise UserError(f"base = {base!r}: its tokenizer does not know <|video_pad|>; expected {self.base_model}")
        self.tokenizer.add_tokens(list(self.special_tokens), special_tokens=True)
        self.config.text_config.vocab_size = len(self.tokenizer)
        self.token_ids = self.tokenizer.convert_tokens_to_ids(list(self.special_tokens))

    def build(
        self, head: nn.Module, published: Mapping[str, Tensor], prefix: str = "", lora: tuple[int, float] | None = None
    ) -> nn.Module:
        """Return the frozen network on the CPU, with its LoRA merged and a float32 head as `rm_head`.

        Args:
            head: on the meta device.
            published: weights by their published names.
            prefix: what all published names begin with.
            lora: its rank, and the scale in weight = base + scale x B A.

        Raises:
            UserError: keys are missing, unknown or of the wrong shape (all are listed).
        """
        with init_empty_weights(include_buffers=False):
            network = Qwen2VLModel(self.config)
        network.rm_head = head
        # Checkpoints have the names of transformers 4.45; transformers 5 calls the language model's weights
        # `language_model.*` (github.com/KlingAIResearch/VideoAlign, issue 15).
        weights = {
            re.sub("^model[.]", "language_model.", key.removeprefix(prefix)): published[key] for key in published
        }
        weights.pop("lm_head.weight", None)  # predicts the next token: not needed
        if lora is not None:
            _merge(weights, *lora)
        weights = {key: value.to(torch.float32 if "rm_head." in key else self.dtype) for key, value in weights.items()}
        try:
            network.load_state_dict(weights, strict=True, assign=True)
        except RuntimeError as error:
            raise UserError(f"the checkpoint does not fit {self.base_model}: {error}") from error
        # The authors train and score with `model.to(torch.bfloat16)`, which also rounds the rotary frequencies. Over
        # the prompt's 1000 tokens, that rotates the fast ones by a radian and more.
        for buffer_name, buffer in network.named_buffers():
            if buffer_name.endswith("inv_freq"):
                buffer.copy_(buffer.bfloat16())
        network.set_attn_implementation("sdpa")
        return network.eval().requires_grad_(False)

    def patches(self, frames: Tensor) -> tuple[Tensor, tuple[int, int, int]]:
        """Prepare an image or a video for the vision tower.

        Args:
            frames: float `[n, 3, H, W]` in [0, 1], n even.

        Returns:
            Patches, float32 `[t h w, 3 * 2 * 14 * 14]`, and their grid (t, h, w). The patches of a token are adjacent.
        """
        size = smart_resize(*frames.shape[-2:], CELL, self.min_frame_pixels, self.max_frame_pixels)
        pixels = resize(levels(frames), *size)
        pixels = (pixels / 255 - pixels.new_tensor(MEAN)[:, None, None]) / pixels.new_tensor(STD)[:, None, None]
        t, h, w = len(frames) // FRAMES_TOGETHER, pixels.shape[2] // PATCH, pixels.shape[3] // PATCH
        split = pixels.reshape(t, FRAMES_TOGETHER, 3, h // MERGED, MERGED, PATCH, w // MERGED, MERGED, PATCH)
        return split.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(t * h * w, -1), (t, h, w)

    def text(self, prompt: str, grid: tuple[int, int, int]) -> str:
        """Return the whole conversation about one image or video."""
        tokens = math.prod(grid) // MERGED**2
        text = self.template.replace("{text_prompt}", prompt)
        return CHAT.format(vision=f"<|{self.vision}_pad|>" * tokens, text=text)

    def read(self, frames: Sequence[Tensor], prompts: Sequence[str]) -> Tensor:
        """Return the hidden states at the special tokens, float32 `[B, tokens, hidden]`.

        Args:
            frames: B images or videos, as for `patches`.

        Raises:
            ValueError: a prompt holds a special token.
        """
        prepared = [self.patches(one) for one in frames]
        grids = torch.tensor([grid for _, grid in prepared], device=self.device)
        texts = [self.text(prompt, grid) for prompt, (_, grid) in zip(prompts, prepared)]
        ids = self.tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")["input_ids"]
        places = torch.tensor([self._place(row, prompt) for row, prompt in zip(ids.tolist(), prompts)])
        rows, length = ids.shape
        # As in training: transformers 4.45, called without positions, numbered the tokens as in plain text.
        # transformers 5 would give vision tokens 3-D positions. No mask: attention is causal and padding comes last.
        positions = torch.arange(length, device=self.device).expand(3, rows, length)
        kind = "pixel_values" if self.vision == "image" else "pixel_values_videos"
        hidden = self.network(
            input_ids=ids.to(self.device),
            position_ids=positions,
            use_cache=False,
            **{kind: torch.cat([patches for patches, _ in prepared]), f"{self.vision}_grid_thw": grids},
        ).last_hidden_state
        return hidden[torch.arange(rows, device=hidden.device)[:, None], places.to(hidden.device)].float()

    def _place(self, row: list[int], prompt: str) -> list[int]:
        """Return the positions of the special tokens."""
        found = [i for i, token in enumerate(row) if token in self.token_ids]
        if [row[i] for i in found] != self.token_ids or f"<|{self.vision}_pad|>" in prompt:
            raise ValueError(f"prompt {prompt!r} holds a special token of the reward, so it cannot be scored")
        return found


# -- weights ----------------------------------------------------------------------------------------------------------


def local_folder(path: str, hub: str, files: Sequence[str]) -> Path:
    """Return the checkpoint's folder; download its files if `path` is a hub id.

    Args:
        hub: hub id of the published checkpoint, for messages.
    """
    if Path(path).is_dir():
        return Path(path)
    try:
        return Path(snapshot_download(path, allow_patterns=list(files)))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        get = f"hf download {hub} --local-dir {hub.partition('/')[2]}"
        raise UserError(f"path = {path!r}: no such folder, and not found on the hub or in its cache; {get}") from error


def _merge(weights: dict[str, Tensor], rank: int, scale: float) -> None:
    """Replace adapted layers by base + scale x B A. Those without a LoRA of this shape keep their names."""
    for key in [key for key in weights if ".base_layer." in key]:
        module, kind = key.split(".base_layer.")
        base, (a, b) = weights[key], (weights.get(f"{module}.lora_{x}.default.weight", torch.empty(0)) for x in "AB")
        if kind == "bias":
            weights[f"{module}.bias"] = weights.pop(key)
        elif (a.shape, b.shape) == ((rank, base.shape[-1]), (len(base), rank)):
            for name in ("base_layer", "lora_A.default", "lora_B.default"):
                del weights[f"{module}.{name}.weight"]
            weights[f"{module}.weight"] = base.float() + scale * (b.float() @ a.float())
