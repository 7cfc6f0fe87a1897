"""Random weights for `model.path = random:NAME`: the published sizes without a checkpoint, to time and to weigh.

What such a model makes is noise. What it costs is what the published one costs: the classes, shapes and types are the
same, and an iteration runs from the prompt to the checkpoint.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from diffusers import AutoencoderKLHunyuanVideo15, HunyuanVideo15Transformer3DModel
from torch import nn

from sage_fast.config import RANDOM
from sage_fast.errors import UserError, nearest
from sage_fast.models.hunyuan15.text import Encoder, TextEmbedding
from sage_fast.models.testbed.model import TestbedTransformer, allow_batches, tiny_vae

MODELS: dict[str, dict[str, Callable[[], Any]]] = {
    "random:hunyuanvideo15-480p": {
        "transformer": lambda: HunyuanVideo15Transformer3DModel(task_type="t2v"),  # otherwise as published
        "vae": AutoencoderKLHunyuanVideo15,
    },
    "random:testbed": {"transformer": TestbedTransformer, "vae": lambda: allow_batches(tiny_vae())},
}
"""model.path -> part -> makes it; called on the meta device."""
BYTES_OF_A_TOKEN, MAX_TOKENS = 4, 1000
"""Of a prompt: what a token of the published tokenizer holds of English, and the length that the pipeline cuts at."""


def is_random(path: str) -> bool:
    """Whether `path` asks for random weights."""
    return path.startswith(RANDOM)


def check_random(path: str) -> str:
    """`path` itself.

    Raises:
        UserError: there is no such model.
    """
    if path not in MODELS:
        raise UserError(f"model.path = {path!r}: {nearest(path, MODELS)}")
    return path


def _on_meta(path: str, part: str) -> Any:
    with torch.device("meta"):
        return MODELS[path][part]()


def random_layout(path: str, part: str) -> dict[str, Any]:
    """What config.json of a part would hold."""
    module = _on_meta(check_random(path), part)
    return {key: value for key, value in module.config.items() if not key.startswith("_")} | {
        "_class_name": type(module).__name__
    }


def random_module(path: str, part: str, dtype: torch.dtype, device: torch.device) -> Any:
    """A part with random weights, made on the device in `dtype`: nothing of its size is held anywhere else.

    Args:
        path: a name of MODELS.
        part: `transformer` or `vae`.
        dtype: of the weights.
        device: where they are drawn, always from the same seed: one kind of device gives one model.
    """
    module = nn.Module.to(_on_meta(path, part), dtype)
    assert not list(module.buffers()), "they would stay uninitialised"
    return randomize(module.to_empty(device=device)).eval()


@torch.no_grad()
def randomize(module: Any) -> Any:
    """Draw all weights. Gates are small, as in a trained model, so that rounding does not grow from block to block."""
    generator = torch.Generator(device=next(module.parameters()).device).manual_seed(0)
    for name, p in module.named_parameters():
        if name.endswith("gamma") or ("norm" in name and p.ndim == 1 and name.endswith("weight")):
            p.fill_(1)
        elif p.ndim == 1:
            p.fill_(0.1)
        else:
            p.normal_(std=p[0].numel() ** -0.5, generator=generator)
        if ".linear." in name and "norm1" in name:
            p.mul_(0.1)
    return module


def random_encoder(config: Any) -> Encoder:
    """Embeddings made up from the text of a prompt: the same for the same text, of the published shapes, no glyphs.

    Args:
        config: the transformer's.
    """

    def encode(prompt: str) -> TextEmbedding:
        text = prompt.encode()
        generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1)
        tokens = min(1 + len(text) // BYTES_OF_A_TOKEN, MAX_TOKENS)
        return TextEmbedding(
            text=torch.randn(tokens, config.text_embed_dim, generator=generator),
            glyphs=torch.zeros(0, config.text_embed_2_dim),
        )

    return encode
