"""Locate a checkpoint: a local folder, the Hugging Face hub, or the hub's download cache."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers
import transformers
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HTTPError, RepositoryNotFoundError
from huggingface_hub.file_download import repo_folder_name

from sage_fast.models.random_weights import is_random
from sage_fast.util.errors import UserError, first_line
from sage_fast.util.files import read_text

HUB_SECONDS = 5.0
"""Timeout for the hub's first response."""


@functools.cache
def reachable(path: str) -> str:
    """Return `path` if it is a folder or a model on a reachable hub, else the folder of its cached
    download.

    Cached per path: without network, `from_pretrained` retries for every file, even for cached
        ones.

    Raises:
        UserError: there is no local copy, and the hub cannot be reached or has no such model.
    """
    if is_random(path) or Path(path).is_dir():
        return path
    try:
        HfApi().model_info(path, timeout=HUB_SECONDS)
        return path
    except RepositoryNotFoundError as error:
        raise UserError(
            f"model.path = {path!r}: no such folder, and no such model on the hub (or a private "
            "one: hf auth login)"
        ) from error
    except (HTTPError, OSError) as error:
        # `snapshot_download` would refuse a snapshot without files that no run reads, such as
        # README.md.
        cache = Path(constants.HF_HUB_CACHE)
        home = cache / repo_folder_name(repo_id=path, repo_type="model")
        main, cached = home / "refs" / "main", sorted((home / "snapshots").glob("*/"))
        commit = (
            main.read_text(encoding="utf-8", errors="replace").strip() if main.is_file() else ""
        )
        if commit and (snapshot := home / "snapshots" / commit).is_dir():
            return str(snapshot)
        raise UserError(
            f"model.path = {path!r}: the Hugging Face hub cannot be reached ({first_line(error)}), "
            "and the model is "
            + (
                f"in the cache by its commit alone: --model.path {cached[0]}"
                if cached
                else f"not in the cache {cache}"
            )
            + f". On a machine with network: hf download {path} --local-dir FOLDER; "
            "then here --model.path FOLDER. Or set HF_HOME to a cache that has it"
        ) from error


def stated_config(cls: Any, source: str, part: str = "") -> Any:
    """Return what a checkpoint's file states for a class of diffusers, such as model_index.json of
    a pipeline.

    Args:
        cls: class whose `config_name` is the file's name.
        source: a folder, or a hub id.
        part: folder in it.

    Raises:
        OSError: there is no such file, or it holds no JSON.
    """
    file = Path(source, part, cls.config_name)
    if not file.is_file():
        return cls.load_config(source, subfolder=part or None)
    try:
        return json.loads(read_text(file))  # diffusers would refuse a byte-order mark
    except ValueError as error:
        raise OSError(f"{file} holds no JSON: {error}") from error


@contextlib.contextmanager
def progress_bars_of(source: str) -> Iterator[None]:
    """Show download progress for a hub id; hide progress bars for a local folder."""
    with contextlib.ExitStack() as stack:
        for logging in (diffusers.utils.logging, transformers.utils.logging):
            if Path(source).is_dir() and logging.is_progress_bar_enabled():
                logging.disable_progress_bar()
                stack.callback(logging.enable_progress_bar)
        yield
