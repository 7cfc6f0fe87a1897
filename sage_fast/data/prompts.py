"""Read prompt files: plain text, JSON lines or CSV."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import pkgutil
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from sage_fast.config.fields import is_unicode
from sage_fast.config.schema import SamplingConfig
from sage_fast.util.errors import UserError, nearest

SIZES = ("width", "height", "num_frames")
KEYS = ("prompt", "negative_prompt", "seed", *SIZES)
UNREAD = {".json": ".jsonl", ".ndjson": ".jsonl", ".tsv": ".csv"}
"""Suffixes that would wrongly be read as text -> the nearest supported suffix."""
SETS = {
    "testbed:train": "sage_fast.testbed.world:train_prompts",
    "testbed:heldout": "sage_fast.testbed.world:heldout_prompts",
}
"""Named prompts -> the function that returns them, for the models that list them in `Spec.prompt_sets`."""
FORMATS = "UTF-8 text with one prompt a line, .jsonl or .csv"

Fields = Mapping[str, object]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
    """A record of a prompt file.

    Attributes:
        text: the prompt.
        negative: negative prompt for guidance; empty if the record has none.
        seed: seed of the first video in `eval` and `sample`; None derives it from the seed of the run.
        where: file and line.
    """

    text: str
    negative: str = ""
    seed: int | None = None
    where: str = dataclasses.field(default="", compare=False)


def read_prompts(source: str, sampling: SamplingConfig) -> list[Prompt]:
    """Read the prompts of a UTF-8 file, or of a shipped set.

    `.jsonl` has one object per line and `.csv` has a header; their keys are `KEYS`, of which only `prompt` is required.
    Any other file is text with one prompt per line; blank lines are skipped.

    Args:
        source: path, or a name in `SETS`.
        sampling: video size of the run; a record that names a size must agree with it.

    Raises:
        UserError: missing, not UTF-8, malformed, or with an unknown key, a wrong type or another size; names file and
            line.
    """
    if source in SETS:
        return [Prompt(text=text) for text in pkgutil.resolve_name(SETS[source])()]
    if source.startswith(tuple(f"{name.partition(':')[0]}:" for name in SETS)):
        raise UserError(f"prompts {source!r}: {nearest(source, SETS)}; or a file")
    suffix = Path(source).suffix.lower()
    if suffix in UNREAD:
        raise UserError(f"prompt file {source!r}: expected {FORMATS}; the nearest is {UNREAD[suffix]}")
    rows = {".jsonl": _json_rows, ".csv": _csv_rows}.get(suffix, _text_rows)
    prompts = [_prompt(fields, where, sampling) for where, fields in rows(_text_of(source), f"prompt file {source!r}")]
    if not prompts:
        raise UserError(f"prompt file {source!r} is empty; expected at least one prompt")
    return prompts


def negatives_of(prompts: Iterable[Prompt]) -> dict[str, str]:
    """Return prompt -> negative prompt for the prompts that have one.

    Raises:
        UserError: a prompt has two. Sampling, training and evaluation must use the same policy for a prompt.
    """
    known: dict[str, Prompt] = {}
    for prompt in prompts:
        first = known.setdefault(prompt.text, prompt)
        if first.negative != prompt.negative:
            raise UserError(
                f"{prompt.where}: negative_prompt = {prompt.negative!r}; the same prompt has {first.negative!r} in "
                f"{first.where}; expected one negative prompt for a prompt, in training and evaluation alike"
            )
    return {text: prompt.negative for text, prompt in known.items() if prompt.negative}


def _text_of(source: str) -> str:
    path = Path(source)
    try:
        found = path.is_file()
    except OSError:  # not a possible file name
        found = False
    if not found:
        raise UserError(f"prompt file {source!r}: no such file; expected {FORMATS}")
    content = path.read_bytes()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = 1 + content.count(b"\n", 0, error.start)
        raise UserError(
            f"prompt file {source!r}, line {line}: not UTF-8 (byte {error.start}); save it as UTF-8 text"
        ) from error


# -- formats: text -> (where, fields) of each record ------------------------------------------------------------------


def _text_rows(text: str, file: str) -> Iterator[tuple[str, Fields]]:
    for number, line in enumerate(text.split("\n"), start=1):  # splitlines() also splits at U+2028, form feeds, ...
        if line.strip():
            yield f"{file}, line {number}", {"prompt": line}


def _json_rows(text: str, file: str) -> Iterator[tuple[str, Fields]]:
    for number, line in enumerate(text.split("\n"), start=1):
        where = f"{file}, line {number}"
        if not line.strip():
            continue
        try:
            fields = json.loads(line, object_pairs_hook=_without_duplicates)
        except json.JSONDecodeError as error:
            raise UserError(f"{where}: not valid JSON: {error.msg} at column {error.colno}") from error
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where}: not valid JSON: {error}") from error
        if not isinstance(fields, dict):
            raise UserError(f'{where}: expected an object, such as {{"prompt": "a cat"}}')
        yield where, {key: value for key, value in fields.items() if value is not None or key == "prompt"}


def _without_duplicates(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    keys = [key for key, _ in pairs]
    if duplicates := [key for key in keys if keys.count(key) > 1]:
        raise ValueError(f"the key {duplicates[0]!r} appears twice")
    return dict(pairs)


def _csv_rows(text: str, file: str) -> Iterator[tuple[str, Fields]]:
    """Yield the rows of a CSV file; empty cells are dropped, and cells of numeric columns become int if they can."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    header: list[str] = []
    while True:
        where = f"{file}, line {reader.line_num + 1}"
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise UserError(f"{where}: not valid CSV: {error}") from error
        if not cells:
            continue
        if not header:
            header = _header(cells, where)
        elif len(cells) != len(header):
            raise UserError(
                f"{where}: {len(cells)} cells for {len(header)} columns; text with commas or quotes needs double "
                'quotes around it, as in "a cat, asleep"'
            )
        else:
            row = {key: cell for key, cell in zip(header, cells) if cell.strip() or key == "prompt"}
            yield where, {key: _number(cell) if key in ("seed", *SIZES) else cell for key, cell in row.items()}


def _header(cells: Sequence[str], where: str) -> list[str]:
    names = [cell.strip() for cell in cells]
    for name in names:
        _check_key(name, f"{where}, columns separated by commas")
        if names.count(name) > 1:
            raise UserError(f"{where}: the column {name!r} appears twice")
    if "prompt" not in names:
        raise UserError(f"{where}: expected a header with the column 'prompt', found {', '.join(names)}")
    return names


def _number(cell: str) -> int | str:
    return int(cell) if re.fullmatch(r"\s*-?[0-9]{1,30}\s*", cell) else cell


# -- one record -------------------------------------------------------------------------------------------------------


def _check_key(key: str, where: str) -> None:
    if key not in KEYS:
        raise UserError(f"{where}: unknown key {textwrap.shorten(key, 60)!r}; {nearest(key, KEYS)}")


def _prompt(fields: Fields, where: str, sampling: SamplingConfig) -> Prompt:
    for key in fields:
        _check_key(key, where)
    if "prompt" not in fields:
        raise UserError(f"{where}: 'prompt' is missing")
    text, negative = (_text(fields, key, where) for key in ("prompt", "negative_prompt"))
    if not text:
        raise UserError(f"{where}: the prompt is empty")
    for key in SIZES:
        size, expected = _whole(fields, key, where), getattr(sampling, key)
        if size is not None and size != expected:
            raise UserError(
                f"{where}: {key} = {size}: all videos of a run have one size, here sampling.{key} = {expected}; the "
                f"nearest is {expected}, or a run of its own with --sampling.{key} {size}"
            )
    seed = _whole(fields, "seed", where)
    if seed is not None and not 0 <= seed < 2**63:
        raise UserError(f"{where}: seed = {seed}: expected at least 0 and below 2^63; the nearest is "
                        f"{0 if seed < 0 else 2**63 - 1}")  # fmt: skip
    return Prompt(text=text, negative=negative, seed=seed, where=where)


def _text(fields: Fields, key: str, where: str) -> str:
    value = fields.get(key, "")
    if not isinstance(value, str) or not is_unicode(value):
        raise UserError(f"{where}: {key} = {repr(value)[:60]}: expected text")
    return value.strip()


def _whole(fields: Fields, key: str, where: str) -> int | None:
    value = fields.get(key)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        raise UserError(f"{where}: {key} = {repr(value)[:60]}: expected a whole number")
    return value
