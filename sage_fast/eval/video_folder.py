"""A folder of scored videos with a `videos.csv`, which any program can write.

`videos.csv` has a header with `file` and `prompt`, then one line per video; `file` is relative to
the folder, and so is `image`, of a prompt that has one. `sage-fast eval` adds `seed` and the
scores. Any other purely numeric column is a score too. Values stand between commas, semicolons or
tabs, as spreadsheets write them.
"""

from __future__ import annotations

import csv
import io
import logging
import math
import os
import re
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sage_fast.data.prompt_habits import meant_key
from sage_fast.eval.videoset import VideoSet
from sage_fast.util.captions import PromptKey
from sage_fast.util.errors import UserError, nearest
from sage_fast.util.files import VIDEOS, why_no_file, write_atomic
from sage_fast.util.text import counted

OWN = ("file", "prompt", "image", "seed", "")
"""Columns of a `videos.csv` that are no scores; one without a name is the index that pandas writes.
"""
OTHERS_COLUMNS = {"filename": "file", "prompts": "prompt", "seeds": "seed"}
"""Names that other programs give `OWN` columns, as `squeezed`, -> the column."""
SUFFIXES = (".mp4", ".webm", ".mov", ".mkv", ".avi", ".gif")
"""Of files that are taken for videos, where a folder holds some that `videos.csv` does not name."""
DELIMITERS = ",;\t"

log = logging.getLogger(__name__)


def read_folder(label: str, folder: Path) -> VideoSet:
    """Read a folder with a `videos.csv`.

    Raises:
        UserError: `videos.csv` is not UTF-8, has no rows or the wrong header, names a missing file
            or a video twice, or writes numbers with a decimal comma.
    """
    index = folder / VIDEOS
    columns, rows = _read_table(index)
    files: list[Path] = []
    images: dict[str, str] = {}
    lines: dict[tuple[Path, str], int] = {}
    for line, row in enumerate(rows, start=1):
        if len(row) != len(columns):
            raise UserError(
                f"{index}, video {line}: expected {len(columns)} values; text with commas needs "
                "quotes"
            )
        values = dict(zip(columns, row))
        name, prompt = values["file"], values["prompt"].strip()
        file = _find(folder, name)
        if file is None:
            what = why_no_file(folder / name) if name.strip() else "no such file"
            raise UserError(f"{index}, video {line}: {name!r}: {what} in {folder}")
        if not prompt:
            raise UserError(f"{index}, video {line}: {name!r} has no prompt")
        first = lines.setdefault((file, prompt), line)
        if first != line:
            raise UserError(
                f"{index}, video {line}: {name!r} with this prompt is video {first} already"
            )
        files.append(file)
        image = values.get("image")
        if image and PromptKey.parse(prompt).image:
            images[prompt] = os.path.realpath(folder / image)
    _note_others(index, files)
    by_column = {name: [row[place] for row in rows] for place, name in enumerate(columns)}
    scores = {
        name: _numbers(texts, name, index) for name, texts in by_column.items() if name not in OWN
    }
    return VideoSet(
        label=label,
        prompts=[prompt.strip() for prompt in by_column["prompt"]],
        files=[*files],
        seeds=_seeds(by_column.get("seed", []), index),
        scores={name: values for name, values in scores.items() if values is not None},
        images=images,
    )


def _read_table(index: Path) -> tuple[list[str], list[list[str]]]:
    """Read a CSV file; return the names of its columns, and its rows.

    Raises:
        UserError: it is not UTF-8 or no CSV, has no rows, or lacks, repeats or misspells a column.
    """
    try:
        text = index.read_bytes().decode("utf-8-sig")
        chosen = re.match(r"sep=(.)\r?\n", text)  # as Excel writes it
        if chosen:
            text = text[chosen.end() :]
        header = text.partition("\n")[0]
        # Prompts have commas within, so the header decides.
        delimiter = chosen[1] if chosen else max(DELIMITERS, key=header.count)
        table = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
        rows = [row for row in table if row]
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{index}: not a CSV file in UTF-8: {error}") from error
    if len(rows) < 2:
        raise UserError(
            f"{index}: holds no video; expected a header with file and prompt, then a line for "
            "each video"
        )
    columns, *rows = rows
    for name in columns:
        meant = meant_key(name, OWN, OTHERS_COLUMNS)
        if meant is not None and meant not in columns:
            raise UserError(f"{index}: column {name!r}: did you mean {meant!r}?")
        if columns.count(name) > 1 and name:
            raise UserError(f"{index}: column {name!r} stands there twice; expected one")
    for wanted in ("file", "prompt"):
        if wanted not in columns:
            raise UserError(f"{index}: column {wanted!r} is missing; {nearest(wanted, columns)}")
    return columns, rows


def _find(folder: Path, name: str) -> Path | None:
    """Return the file of this name; None if there is none.

    Names from another system may have its separators, or accents that are letters of their own.
    """
    plain = name.strip().replace("\\", "/")
    forms = (name, plain, unicodedata.normalize("NFC", plain), unicodedata.normalize("NFD", plain))
    for form in forms:
        try:
            if (folder / form).is_file():
                return folder / form
        except OSError:  # not a possible file name
            continue
    return None


def _note_others(index: Path, files: Sequence[Path]) -> None:
    """Say that a folder holds videos which its table does not name."""
    named = {os.path.realpath(file) for file in files}
    others = sorted(path for path in index.parent.iterdir() if path.suffix.lower() in SUFFIXES)
    others = [path for path in others if os.path.realpath(path) not in named]
    if others:
        log.info(
            f"note: {index} does not name {counted(len(others), 'video')} beside it, such as "
            f"{others[0].name!r}"
        )


def _numbers(texts: Sequence[str], name: str, index: Path) -> list[float] | None:
    """Parse a column of numbers, NaN where empty; None if a value is no number or all are empty.

    Raises:
        UserError: the numbers have a decimal comma.
    """
    values: list[float] = []
    wrong: list[int] = []
    for line, text in enumerate(texts, start=1):
        try:
            values.append(float(text) if text.strip() else math.nan)
        except ValueError:
            wrong.append(line)
    if not wrong:
        return values if any(text.strip() for text in texts) else None
    first = texts[wrong[0] - 1]
    if all(re.fullmatch(r"\s*[+-]?\d+,\d+\s*", texts[line - 1]) for line in wrong):
        raise UserError(
            f"{index}, video {wrong[0]}: {name} = {first!r}: expected a decimal point, as "
            f"{first.replace(',', '.')!r}"
        )
    if any(math.isfinite(value) for value in values):
        log.info(
            f"note: {index}: {name} is no score, as video {wrong[0]} has {first[:60]!r}; expected "
            "numbers alone"
        )
    return None


def _seeds(texts: Sequence[str], index: Path) -> list[int] | None:
    """Parse the column of seeds; None if there is none, or if one is no seed."""
    wrong = [
        line for line, text in enumerate(texts, start=1) if not re.fullmatch("[0-9]{1,19}", text)
    ]
    if not wrong:
        return [int(text) for text in texts] or None
    if any(texts):
        first = texts[wrong[0] - 1]
        log.info(
            f"note: {index}: seeds are left out, as video {wrong[0]} has {first[:60]!r}; expected "
            "whole numbers"
        )
    return None


def _relative(path: str, folder: Path) -> str:
    return os.path.relpath(os.path.realpath(path), os.path.realpath(folder))


def write_folder(videos: VideoSet, folder: Path) -> None:
    """Write `videos.csv`; every video must have a file."""
    columns = ["file", "prompt"]
    if videos.images:
        columns.append("image")
    if videos.seeds:
        columns.append("seed")
    columns += videos.scores

    # csv.QUOTE_MINIMAL would leave a carriage return bare
    has_returns = "\r" in "".join(videos.prompts)
    quoting: Any = csv.QUOTE_ALL if has_returns else csv.QUOTE_MINIMAL
    table = io.StringIO(newline="")
    writer = csv.DictWriter(table, columns, lineterminator="\n", quoting=quoting)
    writer.writeheader()
    for i, (file, prompt) in enumerate(zip(videos.files, videos.prompts, strict=True)):
        assert file is not None
        row: dict[str, object] = {}
        for name, values in videos.scores.items():
            row[name] = repr(values[i]) if math.isfinite(values[i]) else ""
        row["file"] = os.path.relpath(file, folder)
        row["prompt"] = prompt
        if videos.images:
            image = videos.images.get(prompt)
            row["image"] = _relative(image, folder) if image else ""
        if videos.seeds:
            row["seed"] = videos.seeds[i]
        writer.writerow(row)
    write_atomic(folder / VIDEOS, table.getvalue())
