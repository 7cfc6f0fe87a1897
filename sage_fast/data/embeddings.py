"""Prompt embeddings, computed once over all ranks and cached on disk."""

from __future__ import annotations

import functools
import hashlib
import itertools
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from sage_fast.config.schema import SamplingConfig
from sage_fast.models.interface import Condition, Encoder
from sage_fast.models.spec import Spec
from sage_fast.util.captions import Caption, PromptKey
from sage_fast.util.console import Progress, wrapped
from sage_fast.util.files import write_atomic
from sage_fast.util.ranks import all_gather_object, broadcast_object, rank, world_size

log = logging.getLogger(__name__)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _files(cache: Path, model: str, captions: Mapping[PromptKey, Caption]) -> dict[PromptKey, Path]:
    """Return key -> the file of its embedding, which follows from the model, the text, and what is
    in the image."""
    images = {
        path: [hashlib.sha256(Path(path).read_bytes()).hexdigest()]
        for _, path in {*captions.values()}
        if path
    }
    names = {
        key: _digest(model, text, *images.get(path, [])) for key, (text, path) in captions.items()
    }
    return {key: cache / f"{name}.safetensors" for key, name in names.items()}


def cache_key(spec: Spec, dtype: str, cache: Path | None, sampling: SamplingConfig) -> str:
    """Return model, dtype, version of the encoders and size of images as one string, alike on all
    ranks. Collective.

    Training needs no text encoders once all prompts are embedded. If the checkpoint has none, the
    version is the one that last filled the cache.

    Args:
        spec: the checkpoint.
        dtype: dtype of the encoders.
        cache: cache folder; None keeps nothing on disk.
        sampling: has the size that images are resized to.
    """
    model = f"{Path(spec.path).resolve() if Path(spec.path).is_dir() else spec.path} {dtype}"
    if cache is None:
        return model
    version = spec.encoder_version() if rank() == 0 else None
    if rank() == 0:
        last = cache / f"{_digest(model)}.encoder"
        known = last.read_text(encoding="utf-8") if last.is_file() else ""
        if version is None:
            version = known
        elif version and version != known:  # runs may share a full cache that they cannot write
            cache.mkdir(parents=True, exist_ok=True)
            write_atomic(last, version)
    size = f" {sampling.height} x {sampling.width}" if spec.takes_images else ""
    return f"{model} {broadcast_object(version, 0)}{size}"


def encode_cached(
    captions: Mapping[PromptKey, Caption],
    encoder_factory: Callable[[], Encoder],
    cache: Path | None,
    model: str,
    kind: type[Condition],
) -> dict[PromptKey, Any]:
    """Return key -> embedding on every rank, from `cache` or from the rank that encodes them.
    Collective.

    No rank waits longer than another takes to load the encoders and encode one caption. The ranks
    need no shared file system: a rank that lacks an embedding receives it from one that has it.

    Args:
        captions: key -> what to encode, the same on every rank.
        encoder_factory: loads the encoders and returns a function from caption to embedding; called
            only on a rank that has a caption to encode.
        cache: folder with one safetensors file per (model, caption), with a checksum; None keeps
            nothing on disk.
        model: result of `cache_key`.
        kind: class of the embeddings.

    Raises:
        UserError: an encoder gives values that are not finite; they are not kept.
    """
    files = {} if cache is None else _files(cache, model, captions)
    known = _read_known(files, kind)
    held = all_gather_object([key in known for key in captions])
    turns = itertools.cycle(range(world_size()))
    # key that some rank lacks -> a rank that has it, or the next in turn, which encodes it
    sources = {}
    for key, *holds in zip(captions, *held, strict=True):
        if not all(holds):
            sources[key] = holds.index(True) if any(holds) else next(turns)
    encoder = functools.cache(encoder_factory)
    with Progress("encode", len(sources), "prompt") as bar:
        for first in range(0, len(sources), world_size()):
            block = list(itertools.islice(sources, first, first + world_size()))
            for key in block:
                if sources[key] == rank() and key not in known:
                    known[key] = encoder()(captions[key])
                    known[key].check_finite(key)
                    if key in files:
                        _write(known[key], files[key])
            for key in block:
                sent = broadcast_object(known.get(key), sources[key])
                for note in sent.notes:
                    log.warning(wrapped(f"note: {note}"))
                # Prefer the file if this rank sees it: memory-mapped, the ranks of a node share it
                # in the page cache.
                tensors = _read(files[key]) if key in files else None
                known[key] = sent if tensors is None else kind(**tensors)
            bar.update(len(block))
    firsts: dict[str, PromptKey] = {}  # checksum -> the first prompt with that embedding
    if rank() == 0:
        for key, condition in known.items():
            earlier = firsts.setdefault(_checksum(Path(), condition.tensors()), key)
            if earlier != key:
                log.warning(
                    wrapped(
                        f"note: the model cannot tell prompts {str(earlier)!r} and {str(key)!r} "
                        "apart"
                    )
                )
    return {key: known[key] for key in captions}


def _read_known(files: Mapping[PromptKey, Path], kind: type[Condition]) -> dict[PromptKey, Any]:
    """Return key -> embedding, of those that can be read; name a file that is damaged."""
    known = {}
    damaged = []
    for key, file in files.items():
        tensors = _read(file)
        if tensors is not None:
            known[key] = kind(**tensors)
        elif file.exists():
            damaged.append(file)
    if damaged:
        log.warning(
            f"note: {len(damaged)} embeddings are damaged and are made again: {damaged[0]} ..."
        )
    return known


def _write(condition: Condition, file: Path) -> None:
    """Write a condition atomically: a kill leaves no partial file, and runs that share the cache do
    not collide."""
    file.parent.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.contiguous() for name, tensor in condition.tensors().items()}
    write_atomic(file, save(tensors, {"sha256": _checksum(file, tensors)}))


def _read(file: Path) -> dict[str, Tensor] | None:
    """Read the tensors of an embedding; None if the file is missing, damaged, or not the one
    written under its name."""
    if not file.is_file():  # a pipe would block
        return None
    try:
        with safe_open(file, "pt") as opened:
            written = (opened.metadata() or {}).get("sha256")
        tensors = load_file(file)
    except (FileNotFoundError, SafetensorError):
        return None
    is_whole = written == _checksum(file, tensors)
    is_finite = all(tensor.isfinite().all() for tensor in tensors.values())
    return tensors if is_whole and is_finite else None


def _checksum(file: Path, tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of the name of a file, which follows from model and prompt, and of its
    content."""
    found = hashlib.sha256(file.name.encode())
    for name, tensor in sorted(tensors.items()):
        found.update(f"\0{name} {tensor.dtype} {list(tensor.shape)}\0".encode())
        found.update(tensor.cpu().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()
