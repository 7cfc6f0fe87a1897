"""Embeddings of prompts, computed once over all ranks and kept on disk."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save

from sage_fast.console import Progress
from sage_fast.distributed import all_gather_object, broadcast_object, rank, world_size
from sage_fast.files import write_atomic
from sage_fast.policy.text import Encoder, TextEmbedding


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def encode_cached(
    prompts: Sequence[str],
    encoder_factory: Callable[[], Encoder],
    cache: Path | None,
    model: str,
    quiet: bool = False,
) -> dict[str, TextEmbedding]:
    """Embeddings of `prompts`, on every rank: read from `cache`, or encoded by one rank and sent to those that lack it.

    A collective. No rank waits longer than another takes to load the text encoders and encode one prompt, and nothing
    is asked of the file system: a rank that does not see the files of another is sent what it lacks.

    Args:
        prompts: the same on every rank; duplicates are encoded once.
        encoder_factory: loads the text encoders, on a rank that has a prompt to encode; returns a function from prompt
            to embedding.
        cache: folder, one safetensors file per (model, prompt); None keeps nothing on disk.
        model: name of the checkpoint, part of the key.
        quiet: show no progress.
    """
    prompts = list(dict.fromkeys(prompts))
    files = {} if cache is None else {prompt: cache / f"{_digest(model, prompt)}.safetensors" for prompt in prompts}
    known = {prompt: embedding for prompt, file in files.items() if (embedding := _read(file)) is not None}
    held = all_gather_object([prompt in known for prompt in prompts])
    turns = itertools.cycle(range(world_size()))
    sources = {}  # of the prompts that a rank lacks: one that has it, else the next in turn, which encodes it
    for prompt, *holds in zip(prompts, *held, strict=True):
        if not all(holds):
            sources[prompt] = holds.index(True) if any(holds) else next(turns)
    encode: Encoder | None = None
    with Progress("encode", len(sources), "prompt", quiet=quiet or not sources) as bar:
        for first in range(0, len(sources), world_size()):
            block = list(itertools.islice(sources, first, first + world_size()))
            for prompt in block:
                if sources[prompt] == rank() and prompt not in known:
                    encode = encode or encoder_factory()
                    known[prompt] = encode(prompt)
                    if prompt in files:
                        _write(known[prompt], files[prompt])
            for prompt in block:
                known[prompt] = broadcast_object(known.get(prompt), sources[prompt])
            bar.update(len(block))
    return {prompt: known[prompt] for prompt in prompts}


def _write(embedding: TextEmbedding, file: Path) -> None:
    """A killed run leaves no half-written embedding behind, and runs that share the cache do not meet."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(file, save({"text": embedding.text.contiguous(), "glyphs": embedding.glyphs.contiguous()}))


def _read(file: Path) -> TextEmbedding | None:
    """None if the file is missing or broken."""
    try:
        return TextEmbedding(**load_file(file))
    except (FileNotFoundError, SafetensorError):
        return None
