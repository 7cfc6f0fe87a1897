"""`sage-fast embed`: cache the embeddings of a run's prompts on disk, so that training loads no
text encoder."""

from __future__ import annotations

import argparse
import functools
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from sage_fast.commands.sources import load_run
from sage_fast.data.prompts import captions_of, read_prompts, with_negative
from sage_fast.util.console import heavy_imports
from sage_fast.util.errors import UserError
from sage_fast.util.paths import TypedPath

log = logging.getLogger(__name__)


def add_arguments(add: Callable[..., object]) -> None:
    add("config", type=TypedPath, metavar="CONFIG", help="YAML file")
    add(
        "--prompts",
        type=TypedPath,
        metavar="FILE",
        help="encode these instead of data.prompts and data.eval_prompts",
    )
    add("--quiet", action="store_true", help="print nothing but errors")


def run(options: argparse.Namespace, overrides: Mapping[str, str]) -> None:
    """Add missing embeddings to `data.embedding_cache`: prompts, negative prompts and the empty
    prompt.

    The ranks share the work. Only the text encoders are loaded, and only if an embedding is
    missing.

    Raises:
        UserError: no cache is configured, a prompt has two negative prompts, or the text encoders
            cannot be read.
    """
    config = load_run(options.config, overrides)[0]
    if config.data.embedding_cache is None:
        raise UserError(
            "data.embedding_cache = None: expected the folder that runs share, such as embeddings"
        )
    sources = [config.data.prompts, config.data.eval_prompts]
    if options.prompts:
        sources = [options.prompts]
    prompts = [prompt for source in sources for prompt in read_prompts(source)]
    captions = captions_of(with_negative(prompts, config.data))
    cache = Path(config.data.embedding_cache)
    with heavy_imports("embed"):
        import torch

        from sage_fast.data.embeddings import cache_key, encode_cached
        from sage_fast.data.prompt_checks import check_captions, notes_on_prompts
        from sage_fast.models.find import find_spec
        from sage_fast.run.fail_fast import fail_fast
        from sage_fast.util.ranks import local_device, shutdown

    for note in notes_on_prompts(prompts):
        log.info(f"note: {note}")
    dtype = config.model.dtype
    with fail_fast(config.timeout_minutes, cache):
        spec = find_spec(config.model.path, fetch=True)
        check_captions(prompts, spec)
        load = functools.partial(
            spec.load_encoder, getattr(torch, dtype), local_device(), config.sampling
        )
        key = cache_key(spec, dtype, cache, config.sampling)
        encode_cached(captions, load, cache, key, spec.condition)
    shutdown()
    log.info(f"{cache}: {len(captions)} texts")
