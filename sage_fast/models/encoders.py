"""Encoders of checkpoints, whatever the family: load them strictly, place them, fingerprint their
files."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import accelerate
import diffusers
import torch
import transformers
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HTTPError
from huggingface_hub.file_download import repo_folder_name
from safetensors import safe_open
from torch import Tensor, nn

from sage_fast.models.hub import HUB_SECONDS, reachable
from sage_fast.util.errors import UserError, first_line, reason

SCALED = {"I8", "U8", "F8_E4M3", "F8_E5M2"}
"""Types of weights that mean nothing without scales, which another program keeps in its own way."""
FILES_AT_ONCE = 4
"""Number of files that a fingerprint reads at a time."""
GIT_DIGITS = 40
"""Length of the name of a blob that git hashes; the hub's large files have 64 digits."""
ENCODER_SHARE = 0.9
"""Share of the free memory that encoders may take; the rest is for their activations."""


def classes_of(index: Any, parts: Sequence[str]) -> dict[str, Any]:
    """Return part -> its class in transformers, as a pipeline's model_index.json names it.

    Raises:
        ValueError: it names none, or one that transformers does not have.
    """
    if not isinstance(index, Mapping):
        raise ValueError(f"model_index.json holds {index!r}; expected a mapping")
    found = {}
    for part in parts:
        entry = index.get(part)
        if not isinstance(entry, list | tuple) or len(entry) != 2 or not isinstance(entry[1], str):
            raise ValueError(
                f"{part} is {entry!r} in model_index.json; expected a package and a class"
            )
        if not hasattr(transformers, entry[1]):
            raise ValueError(
                f"{part} is a {entry[1]} in model_index.json, which transformers does not have"
            )
        found[part] = getattr(transformers, entry[1])
    return found


def load_network(cls: Any, source: str, part: str, dtype: torch.dtype) -> Any:
    """Load an encoder of a checkpoint, strictly.

    Raises:
        OSError: it lacks weights, which transformers would fill with random numbers, or holds some
            of another shape or scaled ones.
    """
    for file in Path(source, part).glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            types = {opened.get_slice(key).get_dtype() for key in opened.keys()}  # noqa: SIM118
        if odd := types & SCALED:
            raise OSError(f"{part}/{file.name} holds weights in {odd.pop()}; expected floats")
    network, found = cls.from_pretrained(
        source, subfolder=part, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True
    )
    if lacking := sorted(found["missing_keys"]):
        raise OSError(f"{part} lacks {len(lacking)} weights, such as {lacking[0]}")
    if found["mismatched_keys"]:  # transformers has filled these with random numbers too
        key, stored, expected = min(found["mismatched_keys"])
        raise OSError(
            f"{part}: {key} has shape {list(stored)}; its config.json asks for {list(expected)}"
        )
    return network.eval()


def place(networks: Sequence[nn.Module], device: torch.device, free: float) -> None:
    """Move encoders to the device; if they are larger than its free memory, the largest stays in
    host memory, and its layers come to the device one by one for each prompt.

    accelerate's hooks do that; the numbers are the same.

    Args:
        free: bytes of free memory.
    """
    sizes = [sum(p.nbytes for p in network.parameters()) for network in networks]
    largest = networks[sizes.index(max(sizes))]
    is_short = sum(sizes) > ENCODER_SHARE * free
    for network in networks:
        if network is largest and is_short:
            accelerate.cpu_offload(network, device)
        else:
            network.to(device)


def fingerprint(path: str, parts: Sequence[str], encoding: int) -> str | None:
    """Return a fingerprint of a checkpoint's encoders: every byte of their files, and the code that
    runs them.

    It reads whole files, several at a time: a sample would miss a damaged file that was mended, and
    times and sizes are kept by `rsync -t` and `cp -p`. The published encoders, 16 GB, take about 10
    s from memory or a fast disk.

    Args:
        path: the checkpoint.
        parts: folders of the encoders in it.
        encoding: version of the family's own code; it is raised when equal files give other
            embeddings.

    Returns:
        None if a local checkpoint lacks one of the `parts`.

    Raises:
        UserError: the hub does not answer, or a file cannot be read.
    """
    source = reachable(path)
    folder = Path(source)
    if folder.is_dir():
        if not all((folder / part).is_dir() for part in parts):
            return None
        files = {
            file.relative_to(folder).as_posix(): _blob(file)
            for part in parts
            for file in (folder / part).rglob("*")
            if file.is_file()
        }
        known = {}
    else:
        try:
            found = (
                HfApi().model_info(source, files_metadata=True, timeout=HUB_SECONDS).siblings or []
            )
        except (HTTPError, OSError) as error:
            raise UserError(
                f"model.path = {path!r}: the hub does not list its files: {first_line(error)}"
            ) from error
        listed = [file for file in found if file.rfilename.split("/")[0] in parts]
        known = {
            file.rfilename: str(file.lfs.sha256 if file.lfs else file.blob_id) for file in listed
        }
        # What is in the cache is loaded from there, so that its own bytes count.
        blobs = Path(
            constants.HF_HUB_CACHE, repo_folder_name(repo_id=source, repo_type="model"), "blobs"
        )
        files = {name: blobs / blob for name, blob in known.items() if (blobs / blob).is_file()}
    try:
        with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
            contents = known | dict(zip(files, pool.map(_content, files.values()), strict=True))
    except OSError as error:
        raise UserError(
            f"model.path = {path!r}: cannot read the encoders: {reason(error)}"
        ) from error
    code = (encoding, diffusers.__version__, transformers.__version__)
    described = repr((code, sorted(contents.items())))
    return hashlib.sha256(described.encode()).hexdigest()[:32]


def _blob(file: Path) -> Path:
    """Return the file that a link of the hub's cache leads to, whose name tells how the hub hashes
    it."""
    if file.is_symlink() and file.readlink().parent.name == "blobs":
        return file.parent / file.readlink()
    return file


def _content(file: Path) -> str:
    """Return the hash of a whole file: its SHA-256, or for a small file of the hub's cache git's
    SHA-1, as the hub has it.
    """
    is_git_blob = file.parent.name == "blobs" and len(file.name) == GIT_DIGITS
    with file.open("rb") as opened:
        if not is_git_blob:
            return hashlib.file_digest(opened, "sha256").hexdigest()
        content = opened.read()
    return hashlib.sha1(
        f"blob {len(content)}\0".encode() + content, usedforsecurity=False
    ).hexdigest()


def drawn(name: str, *shapes: Sequence[int]) -> list[Tensor]:
    """Return random tensors that follow from a name, such as a prompt."""
    digest = hashlib.sha256(name.encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return [torch.randn(tuple(shape), generator=generator) for shape in shapes]
