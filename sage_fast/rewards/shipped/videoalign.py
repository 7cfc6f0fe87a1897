"""VideoAlign (Liu et al. 2025, arXiv:2501.13918): visual quality, motion quality and text alignment
by Qwen2-VL.

The published checkpoint, KwaiVGI/VideoReward, is Qwen2-VL-2B-Instruct with a trained vision tower,
an unmerged LoRA on the language model, and one linear head without bias. The head reads each of the
three scores at its own special token. It was saved by transformers 4.45 and peft as
`model_config.json` and `checkpoint-11352/model.pth`: all weights, 1123 bfloat16 tensors.

Scoring follows the code the checkpoint was trained with: github.com/KwaiVGI/VideoAlign
(inference.py, data.py, trainer.py, vision_process.py) under transformers 4.45.2 (its
environment.yaml). The network is transformers' own; loading, prompt and frame processing are ours.
"""

from __future__ import annotations

import json
import math
import pickle
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import torch
from accelerate import init_empty_weights
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from torch import Tensor, nn
from transformers import AutoTokenizer, Qwen2VLConfig, Qwen2VLModel
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from sage_fast.rewards.interface import USUAL_FPS
from sage_fast.rewards.shipped.frame_reward import FrameReward, levels, resize
from sage_fast.util.encoders import check_tokenizer, load_tokenizer, reading
from sage_fast.util.errors import UserError, first_line, in_one_line, nearest
from sage_fast.util.files import read_text
from sage_fast.util.videos import evenly_spaced

PARTS = ("vq", "mq", "ta")
"""Visual quality, motion quality, text alignment."""
MOST_FRAMES = 768
"""Maximum number of frames, as published."""
TEMPLATE = (Path(__file__).parent / "videoalign_prompt.txt").read_text(encoding="utf-8")
"""The training prompt, verbatim: "detailed_special" in prompt_template.py of
github.com/KwaiVGI/VideoAlign (MIT, Copyright 2025 Kling Team, Kuaishou Technology)."""
Precision = Literal["bfloat16", "float32"]

CHAT = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\n<|vision_start|>{video}<|vision_end|>{text}<|im_end|>\n<|im_start|>assistant\n"
)
"""Chat template of Qwen2-VL-Instruct for one video and one text."""

PATCH, MERGED, FRAMES_TOGETHER = 14, 2, 2
"""Vision tower: pixels per patch side, patches per token side, frames merged into one."""
CELL = PATCH * MERGED
MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)
"""Normalisation of RGB in [0, 1], from preprocessor_config.json of Qwen2-VL-Instruct."""
BASE, HUB = "Qwen2-VL-2B-Instruct", "KwaiVGI/VideoReward"
"""Published names of the base model and of the checkpoint."""
SPECIAL_TOKENS = ["<|VQ_reward|>", "<|MQ_reward|>", "<|TA_reward|>"]
"""Tokens of the prompt at which the head reads a score, added to those of the base model."""


class VideoAlignReward(FrameReward):
    """Scores `vq`, `mq` and `ta`, normalised as published, and the head's raw `vq_raw`, `mq_raw`
    and `ta_raw`.

    Args:
        path: folder of the published checkpoint (`model_config.json`,
            `checkpoint-11352/model.pth`), or its hub id "KwaiVGI/VideoReward". The highest
            `checkpoint-N` is used.
        base: folder or hub id of the base model; only its configuration and tokenizer are read.
        device: as for `FrameReward`.
        dtype: dtype of the weights; None for bfloat16 on CUDA, else float32. The head is always
            float32.
        video_fps: frames per second of the videos, in place of their own; None for their own, or 24
            where they are not known.

    Attributes:
        min_frame_pixels, max_frame_pixels: smaller frames are enlarged, larger ones reduced.

    Raises:
        UserError: an argument, the checkpoint or the base is not as expected. The error lists all
            keys of the checkpoint that are missing, unknown or of the wrong shape.
    """

    files: ClassVar = {
        "path": ("model_config.json", "checkpoint-*/model.pth"),
        "base": ("config.json",),
    }
    gpu_bytes = 2.0 * 2_208_561_664
    min_frame_pixels = 128 * CELL * CELL

    def __init__(
        self,
        path: str,
        *,
        base: str = "Qwen/Qwen2-VL-2B-Instruct",
        device: str = "cpu",
        dtype: Precision | None = None,
        video_fps: float | None = None,
    ) -> None:
        super().__init__(device, num_frames=MOST_FRAMES)
        dtype = dtype or ("bfloat16" if self.device.type == "cuda" else "float32")
        if dtype not in get_args(Precision):
            raise UserError(f"dtype = {dtype!r}: {nearest(dtype, get_args(Precision))}")
        self.dtype = getattr(torch, dtype)
        of_base = f"base = {base!r}: expected a folder or hub id of {BASE}"
        with reading(of_base, "tokenizer"):
            self.tokenizer = load_tokenizer(AutoTokenizer, base)
        with reading(of_base, "config.json"):
            self.config = Qwen2VLConfig.from_pretrained(base)
        if self.tokenizer.convert_tokens_to_ids("<|video_pad|>") != self.config.video_token_id:
            raise UserError(
                f"base = {base!r}: its tokenizer does not know <|video_pad|>; expected {BASE}"
            )
        self.tokenizer.add_tokens(SPECIAL_TOKENS, special_tokens=True)
        self.config.text_config.vocab_size = len(self.tokenizer)
        with reading(of_base, "tokenizer"):
            check_tokenizer(self.tokenizer, "the network", len(self.tokenizer))
        self.token_ids = self.tokenizer.convert_tokens_to_ids(SPECIAL_TOKENS)
        folder = local_folder(path, self.files["path"])
        settings = read_settings(folder)
        if video_fps is not None and not (math.isfinite(video_fps) and video_fps > 0):
            raise UserError(
                f"video_fps = {video_fps}: expected frames per second above 0, such as 24"
            )
        self.fps, self.video_fps, self.max_frame_pixels = (
            settings["fps"],
            video_fps,
            settings["max_frame_pixels"],
        )
        self.network = self.build(read_weights(folder), *settings["lora"])
        self.mean, self.std = settings["mean"], settings["std"]
        self.try_once(f"path = {path!r} with base = {base!r}")

    def build(self, published: Mapping[str, Tensor], rank: int, scale: float) -> nn.Module:
        """Return the frozen network on the CPU, with its LoRA merged and a float32 head as
        `rm_head`.

        Args:
            published: weights by their published names.
            rank, scale: of the LoRA, in weight = base + scale x B A.

        Raises:
            UserError: keys are missing, unknown or of the wrong shape (all are listed).
        """
        with init_empty_weights(include_buffers=False):
            network = Qwen2VLModel(self.config)
        network.rm_head = nn.Linear(
            self.config.text_config.hidden_size, 1, bias=False, device="meta"
        )
        # Checkpoints have the names of transformers 4.45; transformers 5 calls the language model's
        # weights `language_model.*` (github.com/KlingAIResearch/VideoAlign, issue 15).
        weights = {
            re.sub("^model[.]", "language_model.", key.removeprefix(PEFT)): published[key]
            for key in published
        }
        weights.pop("lm_head.weight", None)  # predicts the next token: not needed
        _merge(weights, rank, scale)
        weights = {
            key: value.to(torch.float32 if "rm_head." in key else self.dtype)
            for key, value in weights.items()
        }
        try:
            network.load_state_dict(weights, strict=True, assign=True)
        except RuntimeError as error:
            raise UserError(f"the checkpoint does not fit {BASE}: {error}") from error
        # The authors train and score with `model.to(torch.bfloat16)`, which also rounds the rotary
        # frequencies. Over the prompt's 1000 tokens, that rotates the fast ones by a radian and
        # more.
        for buffer_name, buffer in network.named_buffers():
            if buffer_name.endswith("inv_freq"):
                buffer.copy_(buffer.bfloat16())
        network.set_attn_implementation("sdpa")
        return network.eval().requires_grad_(False)

    def choose(self, total: int, fps: float | None = None) -> list[int]:
        """Return an even number of evenly spaced indices from first to last; at least 4 if the
        video has them.

        There are `self.fps` of them a second.

        Raises:
            ValueError: there are fewer than 2 frames.
        """
        if total < FRAMES_TOGETHER:
            raise ValueError(
                f"VideoAlign needs videos of at least {FRAMES_TOGETHER} frames, got {total}"
            )
        most = min(self.num_frames, total) // 2 * 2
        seconds = total / (self.video_fps or fps or USUAL_FPS)
        return evenly_spaced(total, round(min(max(seconds * self.fps, 4), most) / 2) * 2)

    def of_frames(self, videos: Sequence[Tensor], prompts: Sequence[str]) -> dict[str, Tensor]:
        """Return each part, float32 `[B]`."""
        read = self.read(videos, prompts)
        raw = (read @ self.network.rm_head.weight.T)[..., 0]
        scores = (raw - raw.new_tensor(self.mean)) / raw.new_tensor(self.std)
        names = [*PARTS, *(f"{part}_raw" for part in PARTS)]
        return dict(zip(names, torch.cat([scores, raw], dim=1).T))

    def patches(self, frames: Tensor) -> tuple[Tensor, tuple[int, int, int]]:
        """Prepare a video for the vision tower.

        Args:
            frames: float `[n, 3, H, W]` in [0, 1], n even.

        Returns:
            Patches, float32 `[t h w, 3 * 2 * 14 * 14]`, and their grid (t, h, w). The patches of a
            token are adjacent.
        """
        size = smart_resize(*frames.shape[-2:], CELL, self.min_frame_pixels, self.max_frame_pixels)
        pixels = resize(levels(frames), *size)
        pixels = (pixels / 255 - pixels.new_tensor(MEAN)[:, None, None]) / pixels.new_tensor(STD)[
            :, None, None
        ]
        t, h, w = len(frames) // FRAMES_TOGETHER, pixels.shape[2] // PATCH, pixels.shape[3] // PATCH
        split = pixels.reshape(
            t, FRAMES_TOGETHER, 3, h // MERGED, MERGED, PATCH, w // MERGED, MERGED, PATCH
        )
        return split.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(t * h * w, -1), (t, h, w)

    def text(self, prompt: str, grid: tuple[int, int, int]) -> str:
        """Return the whole conversation about one video."""
        tokens = math.prod(grid) // MERGED**2
        text = TEMPLATE.replace("{text_prompt}", prompt)
        return CHAT.format(video="<|video_pad|>" * tokens, text=text)

    def read(self, frames: Sequence[Tensor], prompts: Sequence[str]) -> Tensor:
        """Return the hidden states at the special tokens, float32 `[B, tokens, hidden]`.

        Args:
            frames: B videos, as for `patches`.

        Raises:
            ValueError: a prompt holds a special token.
        """
        prepared = [self.patches(one) for one in frames]
        grids = torch.tensor([grid for _, grid in prepared], device=self.device)
        texts = [self.text(prompt, grid) for prompt, (_, grid) in zip(prompts, prepared)]
        ids = self.tokenizer(
            texts,
            add_special_tokens=False,
            padding=True,
            padding_side="right",
            truncation=False,
            return_tensors="pt",
        )["input_ids"]
        places = torch.tensor(
            [self._place(row, prompt) for row, prompt in zip(ids.tolist(), prompts)]
        )
        rows, length = ids.shape
        # As in training: transformers 4.45, called without positions, numbered the tokens as in
        # plain text. transformers 5 would give vision tokens 3-D positions. No mask: attention is
        # causal and padding comes last.
        positions = torch.arange(length, device=self.device).expand(3, rows, length)
        hidden = self.network(
            input_ids=ids.to(self.device),
            position_ids=positions,
            use_cache=False,
            pixel_values_videos=torch.cat([patches for patches, _ in prepared]),
            video_grid_thw=grids,
        ).last_hidden_state
        return hidden[
            torch.arange(rows, device=hidden.device)[:, None], places.to(hidden.device)
        ].float()

    def _place(self, row: list[int], prompt: str) -> list[int]:
        """Return the positions of the special tokens."""
        found = [i for i, token in enumerate(row) if token in self.token_ids]
        if [row[i] for i in found] != self.token_ids or "<|video_pad|>" in prompt:
            raise ValueError(
                f"prompt {prompt!r} holds a special token of the reward, so it cannot be scored"
            )
        return found


# -- the checkpoint --------------------------------------------------------------------------------

PEFT = "base_model.model."
"""Prefix that peft gives to the names of all weights."""


def local_folder(path: str, files: Sequence[str]) -> Path:
    """Return the checkpoint's folder; download its files if `path` is a hub id."""
    if Path(path).is_dir():
        return Path(path)
    try:
        return Path(snapshot_download(path, allow_patterns=list(files)))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        get = f"hf download {HUB} --local-dir VideoReward"
        raise UserError(
            f"path = {path!r}: no such folder, and not found on the hub or in its cache; {get}"
        ) from error


def read_settings(folder: Path) -> dict[str, Any]:
    """Read the needed fields of `model_config.json`.

    Returns:
        `fps` and `max_frame_pixels`; `mean` and `std` of raw VQ, MQ and TA; `lora`, its rank and
        scale.

    Raises:
        UserError: the file is missing, lacks a field, or describes another kind of reward model.
    """
    file = folder / "model_config.json"
    try:
        config = json.loads(read_text(file))
        data, model, lora, scale = (
            config[name]
            for name in ("data_config", "model_config", "peft_lora_config", "inference_config")
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
        normal = {
            name: [float(scale[f"{part.upper()}_{name}"]) for part in PARTS]
            for name in ("mean", "std")
        }
        return normal | {
            "fps": float(data["fps"]),
            "max_frame_pixels": int(data["max_frame_pixels"]),
            "lora": (rank, lora["lora_alpha"] / (math.sqrt(rank) if lora["use_rslora"] else rank)),
        }
    except OSError as error:
        raise UserError(
            f"path = {str(folder)!r}: expected the VideoAlign checkpoint, with {file.name}"
        ) from error
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{file}: not the settings of KwaiVGI/VideoReward: {in_one_line(error)}"
        ) from error


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Return the tensors in `model.pth` of the highest `checkpoint-N`."""
    found = [
        path for path in folder.glob("checkpoint-*/model.pth") if path.parent.name[11:].isdigit()
    ]
    if not found:
        raise UserError(
            f"path = {str(folder)!r}: no checkpoint-N/model.pth in it, such as "
            "checkpoint-11352/model.pth"
        )
    path = max(found, key=lambda path: int(path.parent.name[11:]))
    try:
        weights = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise UserError(f"{path}: not read: {first_line(error)}") from error
    if not (
        isinstance(weights, dict) and all(isinstance(value, Tensor) for value in weights.values())
    ):
        raise UserError(f"{path}: expected the tensors of a model by their names")
    return weights


def _merge(weights: dict[str, Tensor], rank: int, scale: float) -> None:
    """Replace adapted layers by base + scale x B A.

    Those without a LoRA of this shape keep their names.
    """
    for key in [key for key in weights if ".base_layer." in key]:
        module, kind = key.split(".base_layer.")
        base, (a, b) = (
            weights[key],
            (weights.get(f"{module}.lora_{x}.default.weight", torch.empty(0)) for x in "AB"),
        )
        if kind == "bias":
            weights[f"{module}.bias"] = weights.pop(key)
        elif (a.shape, b.shape) == ((rank, base.shape[-1]), (len(base), rank)):
            for name in ("base_layer", "lora_A.default", "lora_B.default"):
                del weights[f"{module}.{name}.weight"]
            weights[f"{module}.weight"] = base.float() + scale * (b.float() @ a.float())
