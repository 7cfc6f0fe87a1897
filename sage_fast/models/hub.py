"""Where a checkpoint lies: in a folder, on the Hugging Face hub, or in the cache of what was downloaded."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path

import diffusers
import transformers
from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import HTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

from sage_fast.models.random_weights import is_random
from sage_fast.util.errors import UserError

HUB_SECONDS = 5.0
"""Longest wait for the hub's first answer."""


@functools.cache
def reachable(path: str) -> str:
    """`path` itself if it is a folder or a model that the hub answers for, else the folder of its cached download.

    Asked once: `from_pretrained` without network tries for half a minute for every file, cached or not.

    Raises:
        UserError: only on the hub, which cannot be reached, or has no such model.
    """
    if is_random(path) or Path(path).is_dir():
        return path
    try:
        HfApi().model_info(path, timeout=HUB_SECONDS)
        return path
    except RepositoryNotFoundError as error:
        raise UserError(
            f"model.path = {path!r}: no such folder, and no such model on the hub (or a private one: hf auth login)"
        ) from error
    except (HTTPError, OSError) as error:
        why = str(error).strip().splitlines()[0]
        try:
            return snapshot_download(path, local_files_only=True)
        except LocalEntryNotFoundError:
            raise UserError(
                f"model.path = {path!r}: the Hugging Face hub cannot be reached ({why}), and the model is not in the "
                f"cache {constants.HF_HUB_CACHE}. On a machine with network: hf download {path} --local-dir FOLDER; "
                "then here --model.path FOLDER. Or set HF_HOME to a cache that has it"
            ) from error


@contextlib.contextmanager
def progress_bars_of(source: str) -> Iterator[None]:
    """Show the progress of a download; a local folder is read in silence."""
    with contextlib.ExitStack() as stack:
        for logging in (diffusers.utils.logging, transformers.utils.logging):
            if Path(source).is_dir() and logging.is_progress_bar_enabled():
                logging.disable_progress_bar()
                stack.callback(logging.enable_progress_bar)
        yield
