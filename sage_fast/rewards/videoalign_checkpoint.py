"""Load the published VideoAlign checkpoint, KwaiVGI/VideoReward, strictly, into transformers' Qwen2-VL.

It was saved by transformers 4.45 and peft as `model_config.json` and `checkpoint-11352/model.pth`: all weights, 1123
bfloat16 tensors. The LoRA, on the language model only, is not merged.
"""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import init_empty_weights
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedTokenizerBase, Qwen2VLConfig, Qwen2VLModel

from sage_fast.util.errors import UserError, first_line

SPECIAL_TOKENS = ("<|VQ_reward|>", "<|MQ_reward|>", "<|TA_reward|>")
"""Tokens added to the base model's; their ids are 151657 to 151659 with the published tokenizer."""


@dataclass(frozen=True)
class Lora:
    """LoRA settings: weight = base + scale x B A."""

    rank: int
    scale: float


@dataclass(frozen=True)
class Settings:
    """The needed fields of `model_config.json`; `mean` and `std` are those of raw VQ, MQ and TA."""

    fps: float
    max_frame_pixels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    lora: Lora


def local_folder(path: str) -> Path:
    """Return the checkpoint's folder; download it if `path` is a hub id."""
    if Path(path).is_dir():
        return Path(path)
    try:
        return Path(snapshot_download(path, allow_patterns=["model_config.json", "checkpoint-*/model.pth"]))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise UserError(
            f"path = {path!r}: no such folder, and not found on the hub or in its cache; expected the VideoAlign "
            "checkpoint: hf download KwaiVGI/VideoReward --local-dir VideoReward"
        ) from error


def read_settings(folder: Path) -> Settings:
    """Read the needed fields of `model_config.json`.

    Raises:
        UserError: the file is missing, lacks a field, or describes another kind of reward model.
    """
    file = folder / "model_config.json"
    try:
        config = json.loads(file.read_text())
        data, model, lora, scale = (
            config[name] for name in ("data_config", "model_config", "peft_lora_config", "inference_config")
        )
        expected = [
            ("data_config.prompt_template_type", data["prompt_template_type"], "detailed_special"),
            ("data_config.num_frames", data["num_frames"], None),
            ("data_config.sample_type", data["sample_type"], "uniform"),
            ("model_config.use_special_tokens", model["use_special_tokens"], True),
            ("model_config.output_dim", model["output_dim"], 1),
        ]
        for name, value, wanted in expected:
            if value != wanted:
                raise UserError(f"{file}: {name} = {value!r}: expected {wanted!r}, as in KwaiVGI/VideoReward")
        rank = int(lora["lora_r"])
        return Settings(
            fps=float(data["fps"]),
            max_frame_pixels=int(data["max_frame_pixels"]),
            mean=tuple(float(scale[f"{part}_mean"]) for part in ("VQ", "MQ", "TA")),
            std=tuple(float(scale[f"{part}_std"]) for part in ("VQ", "MQ", "TA")),
            lora=Lora(rank, lora["lora_alpha"] / (math.sqrt(rank) if lora["use_rslora"] else rank)),
        )
    except OSError as error:
        raise UserError(f"path = {str(folder)!r}: expected the VideoAlign checkpoint, with {file.name}") from error
    except KeyError as error:
        raise UserError(f"{file}: {error.args[0]!r} is missing") from error
    except UserError:
        raise
    except (TypeError, ValueError) as error:
        raise UserError(f"{file}: not the settings of VideoAlign: {error}") from error


def read_base(base: str) -> tuple[PreTrainedTokenizerBase, Qwen2VLConfig]:
    """Return the tokenizer with the three special tokens, and the configuration with a matching vocabulary size."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(base)
        config = Qwen2VLConfig.from_pretrained(base)
    except (OSError, ValueError) as error:
        raise UserError(f"base = {base!r}: expected a folder or hub id of Qwen2-VL-2B-Instruct: {error}") from error
    if tokenizer.convert_tokens_to_ids("<|video_pad|>") != config.video_token_id:
        raise UserError(f"base = {base!r}: its tokenizer does not know <|video_pad|>; expected Qwen2-VL-2B-Instruct")
    tokenizer.add_tokens(list(SPECIAL_TOKENS), special_tokens=True)
    config.text_config.vocab_size = len(tokenizer)
    return tokenizer, config


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


PREFIXES = {
    "base_model.model.visual.": "visual.",
    "base_model.model.model.": "language_model.",
    "base_model.model.rm_head.": "rm_head.",
    "base_model.model.lm_head.": "lm_head.",
}
"""Key prefix in the published file (peft's `base_model.model.`, then the name in transformers 4.45) -> prefix in
transformers 5; see github.com/KlingAIResearch/VideoAlign, issue 15."""


def build_network(
    config: Qwen2VLConfig, published: Mapping[str, Tensor], lora: Lora, dtype: torch.dtype, attention: str
) -> tuple[nn.Module, Tensor]:
    """Return the frozen network on the CPU with its LoRA merged, and the head, float32 `[1, hidden]`.

    Raises:
        UserError: keys are missing, unknown or of the wrong shape (all are listed), or `attention` is not installed.
    """
    with init_empty_weights(include_buffers=False):
        network = Qwen2VLModel(config)
    shapes = {key: list(p.shape) for key, p in network.named_parameters()}
    shapes["rm_head.weight"] = [1, config.text_config.hidden_size]
    left, unknown, missing, misshaped = {}, [], [], []
    for key, value in published.items():
        old = next((prefix for prefix in PREFIXES if key.startswith(prefix)), None)
        if old is None:
            unknown.append(key)
        else:
            left[PREFIXES[old] + key.removeprefix(old)] = value
    left.pop("lm_head.weight", None)  # predicts the next token: not needed

    def take(key: str, shape: list[int]) -> Tensor:
        value = left.pop(key, None)
        if value is None:
            missing.append(key)
        elif list(value.shape) != shape:
            misshaped.append(f"{key} {list(value.shape)} instead of {shape}")
        else:
            return value
        return torch.zeros(shape)  # never used: an error follows

    merged = {}
    for key, shape in shapes.items():
        module, _, kind = key.rpartition(".")
        adapted = f"{module}.base_layer.{kind}"
        if adapted not in left:
            value = take(key, shape)
        elif kind == "weight":
            a = take(f"{module}.lora_A.default.weight", [lora.rank, shape[1]])
            b = take(f"{module}.lora_B.default.weight", [shape[0], lora.rank])
            value = take(adapted, shape).float() + lora.scale * (b.float() @ a.float())
        else:
            value = take(adapted, shape)
        merged[key] = value.to(torch.float32 if key == "rm_head.weight" else dtype)
    problems = {"missing": missing, "not known": [*unknown, *left], "of another shape": misshaped}
    if any(problems.values()):
        listed = "".join(f"\n{len(keys)} {what}: {', '.join(keys)}" for what, keys in problems.items() if keys)
        raise UserError(f"the VideoAlign checkpoint does not fit the base model; its keys by their new names:{listed}")
    head = merged.pop("rm_head.weight")
    network.load_state_dict(merged, strict=True, assign=True)
    # The authors train and score with `model.to(torch.bfloat16)`, which also rounds the rotary frequencies. Over the
    # prompt's 1000 tokens, that rotates the fast ones by a radian and more.
    for name, buffer in network.named_buffers():
        if name.endswith("inv_freq"):
            buffer.copy_(buffer.bfloat16())
    try:
        network.set_attn_implementation(attention)
    except (ImportError, ValueError) as error:
        raise UserError(f"attention = {attention!r}: {error}") from error
    return network.eval().requires_grad_(False), head
