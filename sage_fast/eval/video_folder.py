"""A folder of scored videos with a `videos.csv`, which any program can write.

`videos.csv` has a header with `file` and `prompt`, then one line per video; `file` is relative to the folder, and so is
`image`, of a prompt that has one. `sage-fast eval` adds `seed` and the scores. Any other purely numeric column is a
score too.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sage_fast.eval.videoset import VideoSet
from sage_fast.util.captions import split_key
from sage_fast.util.errors import UserError, nearest
from sage_fast.util.files import VIDEOS, read_json, write_atomic, write_json

OWN = ("file", "prompt", "image", "seed")
"""Columns of a `videos.csv` that are no scores."""
SCORERS = "scorers.json"
"""File beside a `videos.csv` of `sage-fast eval`: `VideoSet.scorers`."""


def scorers_of(
    reward: Mapping[str, Any], watching: Mapping[str, str | None], scores: Mapping[str, Any]
) -> dict[str, str]:
    """Return score -> what computed it, as text that is equal for equal scorers: name, arguments and normalisation.

    Args:
        reward: the section `reward` of the settings.
        watching: prefix of parts, such as that of `eval.judge` -> name of the reward that computed them.
        scores: the evaluation; its weights, if it holds them, belong to the composite's scorer.
    """
    entries = reward.get("several") or [reward]
    scorers = [[entry.get(key) or None for key in ("name", "args", "normalisation")] for entry in entries]
    weighed = [{f"{e.get('prefix') or ''}{part}": w for part, w in (e.get("weights") or {}).items()} for e in entries]
    found: dict[str, str] = {}
    for part in scores["parts"]:
        own = [scorer for scorer, parts in zip(scorers, weighed) if part in parts]
        watcher = next((name for prefix, name in watching.items() if part.startswith(prefix)), None)
        found[part] = json.dumps(watcher or (own if len(own) == 1 else scorers), sort_keys=True)
    weights = scores.get("weights") or {part: weight for parts in weighed for part, weight in parts.items()}
    composite = {part: [weight, found.get(part)] for part, weight in weights.items() if weight != 0}
    return found | {"reward": json.dumps(composite, sort_keys=True)}


def read_folder(label: str, folder: Path) -> VideoSet:
    """Read a folder with a `videos.csv`.

    Raises:
        UserError: `videos.csv` is not UTF-8, has no rows or the wrong header, or names a missing file.
    """
    index = folder / VIDEOS
    try:
        rows = list(csv.DictReader(io.StringIO(index.read_text(encoding="utf-8-sig"), newline=""), strict=True))
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{index}: not a CSV file in UTF-8: {error}") from error
    columns = [name for name in (rows[0] if rows else {}) if name is not None]
    if not rows:
        raise UserError(f"{index}: holds no video; expected a header with file and prompt, then a line for each video")
    for wanted in ("file", "prompt"):
        if wanted not in columns:
            raise UserError(f"{index}: column {wanted!r} is missing; found {nearest(wanted, columns)}")
    files: list[Path | None] = []
    images: dict[str, str] = {}
    for line, row in enumerate(rows, start=1):
        if None in row or any(value is None for value in row.values()):
            raise UserError(f"{index}, video {line}: expected {len(columns)} values; text with commas needs quotes")
        image = row.get("image", "") if split_key(row["prompt"].strip())[1] else ""
        if not (folder / row["file"]).is_file():
            raise UserError(f"{index}, video {line}: {row['file']!r}: no such file in {folder}")
        if not row["prompt"].strip():
            raise UserError(f"{index}, video {line}: {row['file']!r} has no prompt")
        files.append(folder / row["file"])
        if image:
            images[row["prompt"].strip()] = os.path.realpath(folder / image)
    scores = {name: _numbers([row[name] for row in rows]) for name in columns if name not in OWN}
    seeds = [row.get("seed", "") for row in rows]
    scorers = folder / SCORERS
    return VideoSet(
        label=label,
        prompts=[row["prompt"].strip() for row in rows],
        files=files,
        seeds=[int(seed) for seed in seeds] if all(seed.isdecimal() for seed in seeds) else None,
        scores={name: values for name, values in scores.items() if values is not None},
        scorers=read_json(scorers) if scorers.is_file() else {},
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
    """Write `videos.csv` and what computed its scores; every video must have a file."""
    table = io.StringIO(newline="")
    given = {"image": bool(videos.images), "seed": bool(videos.seeds)}
    columns = ["file", "prompt", *(name for name, has in given.items() if has), *videos.scores]
    writer = csv.DictWriter(table, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for i, (file, prompt) in enumerate(zip(videos.files, videos.prompts, strict=True)):
        assert file is not None
        path, seed = videos.images.get(prompt), videos.seeds and videos.seeds[i]
        image = os.path.relpath(os.path.realpath(path), os.path.realpath(folder)) if path else ""
        numbers = {name: repr(values[i]) if math.isfinite(values[i]) else "" for name, values in videos.scores.items()}
        writer.writerow(
            numbers | {"file": os.path.relpath(file, folder), "prompt": prompt, "image": image, "seed": seed}
        )
    if videos.scorers:
        write_json(videos.scorers, folder / SCORERS)
    write_atomic(folder / VIDEOS, table.getvalue())
