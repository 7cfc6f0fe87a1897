"""`sage-fast embed`: cache the embeddings of a run's prompts on disk, so that training loads no text encoder."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path

import torch

from sage_fast.config.schema import Config
from sage_fast.data.embeddings import cache_key, fill_cache
from sage_fast.data.prompts import negatives_of, read_prompts
from sage_fast.loading import configured_prompts
from sage_fast.models.load import find_spec
from sage_fast.util.errors import UserError
from sage_fast.util.ranks import initialize, shutdown


def embed_prompts(config: Config, source: str | None) -> str:
    """Add missing embeddings to `data.embedding_cache`: prompts, negative prompts and the empty prompt.

    The ranks share the work. Only the text encoders are loaded, and only if an embedding is missing.

    Args:
        source: prompts that replace the configured training and evaluation prompts.

    Returns:
        A one-line summary.

    Raises:
        UserError: no cache is configured, a prompt has two negative prompts, or the text encoders cannot be read.
    """
    if config.data.embedding_cache is None:
        raise UserError(
            "data.embedding_cache = None: expected the folder that runs share, such as --data.embedding_cache "
            "embeddings, here and in training"
        )
    prompts = read_prompts(source) if source else [*itertools.chain(*configured_prompts(config.data))]
    texts = dict.fromkeys(["", *(prompt.text for prompt in prompts), *negatives_of(prompts).values()])
    device = initialize(config.timeout_minutes)
    spec, cache = find_spec(config.model.path, fetch=True), Path(config.data.embedding_cache)
    load = functools.partial(spec.load_encoder, getattr(torch, config.model.dtype), device)
    key = cache_key(spec.path, config.model.dtype, cache, spec.encoder_version)
    encoded = fill_cache(list(texts), load, cache, key)
    shutdown()
    return f"{cache}: {len(texts)} texts, of which {encoded} were encoded now"
