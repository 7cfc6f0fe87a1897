"""Embeddings of prompts, computed once and kept on disk."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from sage_fast.console import progress
from sage_fast.files import saving
from sage_fast.policy.text import Encoder, TextEmbedding


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def encode_cached(
    prompts: Sequence[str], encoder_factory: Callable[[], Encoder], cache: Path, model: str, quiet: bool = False
) -> dict[str, TextEmbedding]:
    """Embeddings of `prompts`, read from `cache` if they are there; the text encoders load only if one is missing.

    Args:
        prompts: duplicates are encoded once.
        encoder_factory: loads the text encoders and returns a function from prompt to embedding.
        cache: folder; one safetensors file per (model, prompt).
        model: name of the checkpoint, part of the key.
    """
    cache.mkdir(parents=True, exist_ok=True)
    files = {prompt: cache / f"{_digest(model, prompt)}.safetensors" for prompt in prompts}
    embeddings = {prompt: _read(file) for prompt, file in files.items()}
    missing = [prompt for prompt, embedding in embeddings.items() if embedding is None]
    if missing:
        encode = encoder_factory()
        for prompt in progress(missing, "encode", len(missing), "prompt", quiet=quiet):
            embeddings[prompt] = embedding = encode(prompt)
            # A killed run leaves no half-written embedding behind, and runs that share the cache do not meet.
            partial = files[prompt].with_suffix(f".{os.getpid()}.partial")
            try:
                with saving(partial):
                    save_file({"text": embedding.text.contiguous(), "glyphs": embedding.glyphs.contiguous()}, partial)
                partial.replace(files[prompt])
            finally:
                partial.unlink(missing_ok=True)
    return {prompt: embedding for prompt, embedding in embeddings.items() if embedding is not None}


def _read(file: Path) -> TextEmbedding | None:
    """None if the file is missing or broken."""
    try:
        return TextEmbedding(**load_file(file))
    except (FileNotFoundError, SafetensorError):
        return None
