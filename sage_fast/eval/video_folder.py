"""A folder of scored videos with a `videos.csv`, which any program can write.

`videos.csv` has a header with `file` and `prompt`, then one line per video; `file` is relative to the folder, and so is
`image`, of a prompt that has one. `sage-fast eval` adds `seed` and the scores. Any other purely numeric column is a
score too.
"""

from __future__ import annotations

import csv
import io
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path

from sage_fast.eval.videoset import VideoSet
from sage_fast.util.captions import split_key
from sage_fast.util.errors import UserError, nearest
from sage_fast.util.files import VIDEOS, why_no_file, write_atomic

OWN = ("file", "prompt", "image", "seed", "")
"""Columns of a `videos.csv` that are no scores; one without a name is the index that pandas writes."""


def read_folder(label: str, folder: Path) -> VideoSet:
    """Read a folder with a `videos.csv`.

    Raises:
        UserError: `videos.csv` is not UTF-8, has no rows or the wrong header, or names a missing file.
    """
    index = folder / VIDEOS
    try:
        rows = list(csv.DictReader(io.StringIO(index.read_bytes().decode("utf-8-sig"), newline=""), strict=True))
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{index}: not a CSV file in UTF-8: {error}") from error
    columns = [name for name in (rows[0] if rows else {}) if name is not None]
    if not rows:
        raise UserError(f"{index}: holds no video; expected a header with file and prompt, then a line for each video")
    for wanted in ("file", "prompt"):
        if wanted not in columns:
            raise UserError(f"{index}: column {wanted!r} is missing; {nearest(wanted, columns)}")
    images: dict[str, str] = {}
    for line, row in enumerate(rows, start=1):
        if None in row or any(value is None for value in row.values()):
            raise UserError(f"{index}, video {line}: expected {len(columns)} values; text with commas needs quotes")
        if not (folder / row["file"]).is_file():
            what = why_no_file(folder / row["file"]) if row["file"].strip() else "no such file"
            raise UserError(f"{index}, video {line}: {row['file']!r}: {what} in {folder}")
        if not row["prompt"].strip():
            raise UserError(f"{index}, video {line}: {row['file']!r} has no prompt")
        if (image := row.get("image")) and split_key(row["prompt"].strip())[1]:
            images[row["prompt"].strip()] = os.path.realpath(folder / image)
    scores = {name: _numbers([row[name] for row in rows]) for name in columns if name not in OWN}
    seeds = [row.get("seed", "") for row in rows]
    return VideoSet(
        label=label,
        prompts=[row["prompt"].strip() for row in rows],
        files=[folder / row["file"] for row in rows],
        seeds=[int(seed) for seed in seeds] if all(re.fullmatch("[0-9]{1,19}", seed) for seed in seeds) else None,
        scores={name: values for name, values in scores.items() if values is not None},
        images=images,
    )


def _numbers(texts: Sequence[str]) -> list[float] | None:
    """Parse a column of numbers, NaN where empty; None if a value is no number or all are empty."""
    try:
        values = [float(text) if text.strip() else math.nan for text in texts]
    except ValueError:
        return None
    return values if any(text.strip() for text in texts) else None


def write_folder(videos: VideoSet, folder: Path) -> None:
    """Write `videos.csv`; every video must have a file."""
    table = io.StringIO(newline="")
    given = {"image": bool(videos.images), "seed": bool(videos.seeds)}
    columns = ["file", "prompt", *(name for name, has in given.items() if has), *videos.scores]
    returns = "\r" in "".join(videos.prompts)  # csv.QUOTE_MINIMAL, which is 0, would leave them bare; QUOTE_ALL is 1
    writer = csv.DictWriter(table, columns, extrasaction="ignore", lineterminator="\n", quoting=1 if returns else 0)
    writer.writeheader()
    for i, (file, prompt) in enumerate(zip(videos.files, videos.prompts, strict=True)):
        assert file is not None
        path, seed = videos.images.get(prompt), videos.seeds and videos.seeds[i]
        image = os.path.relpath(os.path.realpath(path), os.path.realpath(folder)) if path else ""
        numbers = {name: repr(values[i]) if math.isfinite(values[i]) else "" for name, values in videos.scores.items()}
        about = {"file": os.path.relpath(file, folder), "prompt": prompt, "image": image, "seed": seed}
        writer.writerow(numbers | about)
    write_atomic(folder / VIDEOS, table.getvalue())
