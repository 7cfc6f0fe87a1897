"""Check the files of a checkpoint by their headers, before any weight is read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from diffusers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFETENSORS_WEIGHTS_NAME
from safetensors import SafetensorError, safe_open

from sage_fast.models.find import read_config
from sage_fast.models.spec import Spec
from sage_fast.util.errors import UserError
from sage_fast.util.files import read_text

FLOATS = ("F32", "BF16", "F16", "F64")
"""Types of weights in a file that are read as they are meant."""


class _Header(NamedTuple):
    """What a file says of a tensor: its shape, its type and the file's name."""

    shape: list[int]
    dtype: str
    file: str


def check_weights(spec: Spec) -> None:
    """Check that a local folder holds the weights that its config.json asks for; reads headers
    alone.

    Raises:
        UserError: one is missing, or has another shape or type, or a file is damaged.
    """
    for part in (*spec.networks, "vae"):
        check_part(spec, "model.path", spec.source(part, spec.path), part)


def check_part(spec: Spec, setting: str, source: str, part: str) -> None:
    """Check one part as `check_weights` does; what is not a local folder passes, and is checked
    once it is loaded."""
    if not Path(source).is_dir():
        return
    start = f"{setting} = {source!r}:"
    headers = _read_headers(start, Path(source, part), part)
    expected = {key: list(tensor.shape) for key, tensor in spec.meta(part).state_dict().items()}
    for key, header in headers.items():
        what = f"{start} {key} has shape {header.shape} and type {header.dtype} in"
        what = f"{what} {part}/{header.file}"
        if header.shape != expected.get(key):
            wanted = expected.get(key, "no such weight")
            raise UserError(f"{what}; its config.json asks for {wanted}")
        if header.dtype not in FLOATS:
            raise UserError(f"{what}; expected one of {', '.join(FLOATS)}")

    lacking = sorted(expected.keys() - headers.keys())
    if lacking:
        raise UserError(f"{start} {part} lacks {len(lacking)} weights, such as {lacking[0]}")


def _read_headers(start: str, folder: Path, part: str) -> dict[str, _Header]:
    """Return weight -> its header, of the files that an index lists, or of the single file.

    Args:
        start: what errors begin with.
        folder: of the part.

    Raises:
        UserError: a file is missing or damaged.
    """
    is_indexed = (folder / SAFE_WEIGHTS_INDEX_NAME).is_file()
    name = SAFE_WEIGHTS_INDEX_NAME if is_indexed else SAFETENSORS_WEIGHTS_NAME
    if not (folder / name).is_file():
        raise UserError(
            f"{start} {part}/ holds no {name} and no index; save_pretrained writes them, without a "
            "variant"
        )
    headers: dict[str, _Header] = {}
    try:
        if is_indexed:
            files = _indexed_files(folder)
            for name in sorted({*files.values()}):
                keys = [key for key, file in files.items() if file == name]
                headers |= _headers_in(folder / name, keys)
        else:
            headers = _headers_in(folder / name)
    except (
        SafetensorError,
        OSError,
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        RecursionError,
    ) as error:
        raise UserError(f"{start} cannot read {part}/{name}: {error}") from error
    return headers


def _headers_in(path: Path, keys: Iterable[str] | None = None) -> dict[str, _Header]:
    """Return the headers of the weights `keys` of a file, by default of all."""
    headers = {}
    with safe_open(path, "pt") as opened:
        for key in opened.keys() if keys is None else keys:
            tensor = opened.get_slice(key)
            headers[key] = _Header(tensor.get_shape(), tensor.get_dtype(), path.name)
    return headers


def _indexed_files(folder: Path) -> dict[str, str]:
    """Return weight -> its file, as the index of a folder says.

    Raises:
        ValueError, LookupError, TypeError: it is damaged, or names a file elsewhere.
    """
    index = json.loads(read_text(folder / SAFE_WEIGHTS_INDEX_NAME))
    files = dict(index["weight_map"])
    dict(index["metadata"])  # diffusers reads it
    outside = [file for file in files.values() if Path(file).name != file]
    if outside:
        raise ValueError(
            f"it names {outside[0]!r}; expected files beside it, as save_pretrained writes them"
        )
    return files


def check_same(source: str, part: str, config: Mapping[str, Any]) -> None:
    """Check that `source` holds weights for a network with this configuration, which spells out its
    defaults.

    Raises:
        UserError: it does not.
    """
    if not (Path(source) / part / "config.json").is_file():
        raise UserError(
            f"model.weights = {source!r}: expected a folder that holds {part}/config.json"
        )
    for key, value in read_config("model.weights", source, part).items():
        if key not in ("_diffusers_version", "_name_or_path") and config.get(key, value) != value:
            raise UserError(
                f"model.weights = {source!r} was made for another model: {key} is {value!r}, "
                f"model.path has {config[key]!r}"
            )
