"""A checkpoint's text encoder: load it without the rest, and encode prompts."""

from __future__ import annotations

import math
from typing import Any

import torch
from diffusers import WanPipeline
from diffusers.pipelines.wan.pipeline_wan import prompt_clean
from diffusers.utils import is_ftfy_available

from sage_fast.models.encoders import classes_of, drawn, fingerprint, load_network, place
from sage_fast.models.hub import progress_bars_of, reachable, stated_config
from sage_fast.models.interface import Encoder
from sage_fast.models.wan.conditioning import TEXT_TOKENS, TextEmbedding
from sage_fast.util.captions import Caption
from sage_fast.util.encoders import check_finite, check_tokenizer, load_tokenizer, reading
from sage_fast.util.environment import free_bytes

PARTS = ("text_encoder", "tokenizer")
ENCODING = 1
"""Version of `_encode`, part of the fingerprint: raise it when equal files give other embeddings.
"""
TRIAL = Caption("word")
"""What the text encoder is tried with."""
BYTES_OF_A_TOKEN = 4
"""Bytes of English per token of the published tokenizer."""


def load_encoder(path: str, dtype: torch.dtype, device: torch.device, width: int) -> Encoder:
    """Load a checkpoint's text encoder and nothing else; dropping the returned function releases
    it. It is tried once: the cost is that of one more prompt.

    Args:
        path: the checkpoint.
        dtype: dtype of the encoder and its embeddings.
        device: device it runs on; the embeddings are on the CPU.
        width: of the embeddings that the transformer expects.

    Raises:
        UserError: a part is missing or incomplete, or does not fit the transformer, or the encoder
            fails on a word.
    """
    source = reachable(path)
    start = f"model.path = {path!r}: cannot read the encoder"
    with reading(start, "model_index.json"):
        kinds = classes_of(stated_config(WanPipeline, source), PARTS)
    with progress_bars_of(source):
        with reading(start, "text_encoder"):
            network = load_network(kinds["text_encoder"], source, "text_encoder", dtype)
            found = network.config.hidden_size
            if found != width:
                raise ValueError(f"has width {found}; the transformer expects {width}")
        with reading(start, "tokenizer"):
            tokenizer = load_tokenizer(kinds["tokenizer"], source, subfolder="tokenizer")
            rows = network.get_input_embeddings().num_embeddings
            check_tokenizer(tokenizer, "text_encoder", rows)
    with reading(start, "model_index.json"):
        pipeline: Any = WanPipeline(
            tokenizer=tokenizer, text_encoder=network, vae=None, scheduler=None, transformer=None
        )
    place([network], device, math.inf if device.type == "cpu" else free_bytes(device))
    with reading(start, "text_encoder"):
        trial = _encode(pipeline, TRIAL, device)
        check_finite(trial.text, "text_encoder", f"the word {TRIAL.text}")
    return lambda caption: _encode(pipeline, caption, device)


@torch.no_grad()
def _encode(pipeline: Any, caption: Caption, device: torch.device) -> TextEmbedding:
    """Encode a prompt as the pipeline of the checkpoint does; keep no padding."""
    rows, _ = pipeline.encode_prompt(
        caption.text,
        do_classifier_free_guidance=False,
        max_sequence_length=TEXT_TOKENS,
        device=device,
    )
    count = len(pipeline.tokenizer(prompt_clean(caption.text)).input_ids)
    notes = []
    if count > TEXT_TOKENS:
        notes.append(f"prompt {caption.text[:60]!r} has {count} tokens; {TEXT_TOKENS} are read")
    text = rows[0, : min(count, TEXT_TOKENS)].cpu()
    return TextEmbedding(text=text, notes=tuple(notes))


def encoder_version(path: str) -> str | None:
    """Return a fingerprint of the encoder's files, and whether ftfy mends prompts for it; None if a
    part is missing."""
    found = fingerprint(path, PARTS, ENCODING)
    if found is None or not is_ftfy_available():
        return found
    return f"{found} ftfy"


def random_encoder(width: int) -> Encoder:
    """Return an encoder whose random embeddings depend only on the prompt.

    Args:
        width: values of a token.
    """

    def encode(caption: Caption) -> TextEmbedding:
        tokens = min(1 + len(caption.text.encode()) // BYTES_OF_A_TOKEN, TEXT_TOKENS)
        (text,) = drawn(caption.text, (tokens, width))
        return TextEmbedding(text=text)

    return encode
