"""Small versions of the published reward checkpoints: real classes, file formats and key names,
random weights."""

import copy
import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import (
    CLIPConfig,
    CLIPImageProcessorPil,
    CLIPModel,
    CLIPProcessor,
    CLIPTokenizer,
    Qwen2Tokenizer,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)

from sage_fast.rewards.shipped.videoalign import TEMPLATE

# chat_template.json of Qwen/Qwen2-VL-2B-Instruct
QWEN2_VL_CHAT_TEMPLATE = (
    "{% set image_count = namespace(value=0) %}{% set video_count = namespace(value=0) %}{% for "
    "message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}<|im_start|>system\nYou are a helpful "
    "assistant.<|im_end|>\n"
    "{% endif %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}{{ "
    "message['content'] }}"
    "<|im_end|>\n{% else %}{% for content in message['content'] %}{% if content['type'] == 'image' "
    "or 'image' in "
    "content or 'image_url' in content %}{% set image_count.value = image_count.value + 1 %}{% if "
    "add_vision_id %}"
    "Picture {{ image_count.value }}: {% endif %}<|vision_start|><|image_pad|><|vision_end|>{% "
    "elif content['type'] == "
    "'video' or 'video' in content %}{% set video_count.value = video_count.value + 1 %}{% if "
    "add_vision_id %}Video "
    "{{ video_count.value }}: {% endif %}<|vision_start|><|video_pad|><|vision_end|>{% elif 'text' "
    "in content %}"
    "{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endif %}{% endfor %}{% if "
    "add_generation_prompt %}"
    "<|im_start|>assistant\n{% endif %}"
)
QWEN2_VL_SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
RANK, ALPHA = 4, 8
ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
INFERENCE_CONFIG = {
    "VQ_mean": 3.6757, "VQ_std": 2.2476, "MQ_mean": 1.1646, "MQ_std": 1.3811, "TA_mean": 2.8105,
    "TA_std": 2.5121,
}  # fmt: skip


def _byte_pairs(
    text: str, size: int, **options: Any
) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges of byte-level BPE trained on `text`."""
    tokenizer = Tokenizer(models.BPE(**options))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(
        [text],
        trainers.BpeTrainer(
            vocab_size=size, initial_alphabet=alphabet, show_progress=False, **options
        ),
    )
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [tuple(pair) for pair in model["merges"]]


def write_qwen2_vl(folder: Path) -> Path:
    """Write what is needed of Qwen2-VL-2B-Instruct: a tokenizer, and config.json in the flat form
    of the hub."""
    vocab, merges = _byte_pairs(TEMPLATE, 600)
    vocab |= {token: len(vocab) + i for i, token in enumerate(QWEN2_VL_SPECIAL)}
    tokenizer = Qwen2Tokenizer(
        vocab=vocab, merges=merges, extra_special_tokens=list(QWEN2_VL_SPECIAL[1:])
    )
    tokenizer.chat_template = QWEN2_VL_CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    config = {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "attention_dropout": 0.0,
        "bos_token_id": vocab["<|endoftext|>"],
        "eos_token_id": vocab["<|im_end|>"],
        "vision_start_token_id": vocab["<|vision_start|>"],
        "vision_end_token_id": vocab["<|vision_end|>"],
        "vision_token_id": vocab["<|vision_pad|>"],
        "image_token_id": vocab["<|image_pad|>"],
        "video_token_id": vocab["<|video_pad|>"],
        "hidden_act": "silu",
        "hidden_size": 32,
        "initializer_range": 0.02,
        "intermediate_size": 48,
        "max_position_embeddings": 32768,
        "max_window_layers": 2,
        "model_type": "qwen2_vl",
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vision_config": {
            "depth": 2, "embed_dim": 32, "mlp_ratio": 2, "num_heads": 2, "in_chans": 3,
            "hidden_size": 32,
            "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14,
            "temporal_patch_size": 2,
        },
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        # as published: more rows than tokens, until `resize_token_embeddings`
        "vocab_size": len(tokenizer) + 40,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder


def qwen2_vl_shapes(config: Qwen2VLConfig, tokens: int) -> dict[str, torch.Size]:
    """Shapes by the key names of transformers 4.45.

    `config` is that of the base model, without the rows of the `tokens` special tokens.
    """
    config = copy.deepcopy(config)
    config.text_config.vocab_size += tokens
    with torch.device("meta"):
        model = Qwen2VLForConditionalGeneration(config)
    return {
        key.removeprefix("model.").replace("language_model.", "model."): value.shape
        for key, value in model.state_dict().items()
    }


def published_config(width: int, feed_forward: int, heads: int, key_heads: int) -> Qwen2VLConfig:
    """config.json of a Qwen2-VL-Instruct of Qwen, of which a size has its own widths.

    It has as many rows as the tokenizer has tokens.
    """
    return Qwen2VLConfig(
        text_config={
            "vocab_size": 151657, "hidden_size": width, "intermediate_size": feed_forward,
            "num_hidden_layers": 28,
            "num_attention_heads": heads, "num_key_value_heads": key_heads, "max_window_layers": 28,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24,
                24]},
        },
        vision_config={"depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16,
            "hidden_size": width},
    )  # fmt: skip


def published_shapes(config: Qwen2VLConfig, rank: int = RANK) -> dict[str, torch.Size]:
    """Shapes by the key names of KwaiVGI/VideoReward: in peft, LoRA in the language model only."""
    shapes = {"base_model.model.rm_head.weight": torch.Size([1, config.text_config.hidden_size])}
    for key, shape in qwen2_vl_shapes(config, 3).items():
        old = f"base_model.model.{key}"
        module, _, kind = old.rpartition(".")
        if not (old.startswith("base_model.model.model.") and module.endswith(ADAPTED)):
            shapes[old] = shape
            continue
        shapes[f"{module}.base_layer.{kind}"] = shape
        if kind == "weight":
            shapes[f"{module}.lora_A.default.weight"] = torch.Size([rank, shape[1]])
            shapes[f"{module}.lora_B.default.weight"] = torch.Size([shape[0], rank])
    return shapes


def published_weights(base: Path) -> dict[str, Tensor]:
    """Random bfloat16 weights under the published names."""
    config = Qwen2VLConfig.from_pretrained(base)
    config.text_config.vocab_size = len(Qwen2Tokenizer.from_pretrained(base))
    draw = torch.Generator().manual_seed(0)
    weights = {}
    for key, shape in published_shapes(config).items():
        scale = (
            0.2 if len(shape) == 1 else 0.3 if "lora_" in key else 1.5 / shape[1:].numel() ** 0.5
        )
        norm = len(shape) == 1 and key.endswith("weight")
        weights[key] = (torch.randn(shape, generator=draw) * scale + norm).bfloat16()
    return weights


def model_config() -> dict[str, dict[str, Any]]:
    """Content of model_config.json: the dataclasses that training saved, and the statistics for
    normalising."""
    return {
        "data_config": {
            "meta_data": "/path/meta.csv", "data_dir": "/path", "meta_data_test": None,
            "max_frame_pixels": 200704,
            "num_frames": None, "fps": 2.0, "p_shuffle_frames": 0.0, "p_color_jitter": 0.0,
            "eval_dim": ["VQ", "MQ", "TA"], "prompt_template_type": "detailed_special",
            "add_noise": False,
            "sample_type": "uniform", "use_tied_data": True,
        },
        "training_args": {"bf16": True},
        "model_config": {
            "model_name_or_path": "Qwen/Qwen2-VL-2B-Instruct", "output_dim": 1,
            "use_special_tokens": True,
            "reward_token": "special", "loss_type": "btt",
        },
        "peft_lora_config": {
            "lora_enable": True, "vision_lora": False, "lora_r": RANK, "lora_alpha": ALPHA,
            "lora_dropout": 0.05,
            "lora_namespan_exclude": ["lm_head", "rm_head", "embed_tokens", "visual"],
            "lora_task_type": "CAUSAL_LM", "use_rslora": False, "num_lora_modules": -1,
        },
        "inference_config": dict(INFERENCE_CONFIG),
    }  # fmt: skip


def write_video_reward(folder: Path, weights: dict[str, Tensor]) -> Path:
    """Write the folder KwaiVGI/VideoReward."""
    (folder / "checkpoint-11352").mkdir(parents=True)
    torch.save(weights, folder / "checkpoint-11352" / "model.pth")
    (folder / "model_config.json").write_text(json.dumps(model_config()))
    return folder


def write_clip(folder: Path, seed: int = 0, side: int = 32) -> Path:
    """Write a CLIP model with its tokenizer and image processor."""
    vocab, merges = _byte_pairs(
        "a red ball rolls over the blue table and falls", 560, end_of_word_suffix="</w>"
    )
    vocab |= {
        letter + "</w>": len(vocab) + i
        for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    vocab = {token: i for i, token in enumerate([*vocab, "<|startoftext|>", "<|endoftext|>"])}
    tokenizer = CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=24)
    text = {"vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2,
            "num_attention_heads": 2, "max_position_embeddings": 24,
            "bos_token_id": vocab["<|startoftext|>"],
            "eos_token_id": vocab["<|endoftext|>"],
            "pad_token_id": vocab["<|endoftext|>"]}  # fmt: skip
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 2,
              "image_size": side, "patch_size": 8}  # fmt: skip
    config = CLIPConfig(
        text_config=text, vision_config=vision, projection_dim=24, logit_scale_init_value=3.0
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = CLIPModel(config)
        for p in model.parameters():
            if p.ndim >= 2:
                torch.nn.init.normal_(p, std=1.5 / p[0].numel() ** 0.5)
    model.save_pretrained(folder)
    images = CLIPImageProcessorPil(
        size={"shortest_edge": side}, crop_size={"height": side, "width": side}
    )
    CLIPProcessor(image_processor=images, tokenizer=tokenizer).save_pretrained(folder)
    return folder
