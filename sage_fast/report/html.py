"""Self-contained HTML pages: templates, number formatting, and cards of videos side by side."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jinja2
from PIL import Image

from sage_fast.eval.gains import gains_of
from sage_fast.eval.playback import for_browser
from sage_fast.eval.scores import format_number
from sage_fast.eval.videoset import VideoKey, VideoSet
from sage_fast.util.errors import UserError
from sage_fast.util.images import read_image
from sage_fast.util.videos import MIN_SIDE

SHOWN_SIDE = 480
"""Most pixels on a side of an image."""


def render(template: str | Path, **values: Any) -> str:
    """Render a template: a name in this folder, or any file, which may extend those.

    Values are escaped.
    """
    here = Path(__file__).parent
    file = here / template
    loader = jinja2.FileSystemLoader([file.parent, here])
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    environment.filters["number"] = shown_number
    return environment.get_template(file.name).render(**values)


def shown_number(value: float | None, digits: int = 3, sign: bool = False) -> str:
    """Format a number for a table cell; a dash for None and non-finite values."""
    if value is None or not math.isfinite(value):
        return "\N{EN DASH}"
    return format_number(value, digits, sign=sign).replace("-", "\N{MINUS SIGN}")


def data_address(file: Path) -> str:
    """Return a video as a `data:` URL.

    Raises:
        UserError: the video cannot be read.
    """
    kind, content = for_browser(file)
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def image_address(file: str | Path) -> str:
    """Return an image as a `data:` URL, reduced or enlarged to about the size that videos are shown
    in.

    Raises:
        UserError: the image cannot be read.
    """
    image, content = read_image(str(file)), io.BytesIO()
    factor = max(1, -(-MIN_SIDE // min(image.size)))
    image = image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)
    image.thumbnail((SHOWN_SIDE, SHOWN_SIDE))
    image.save(content, "JPEG", quality=90)
    return f"data:image/jpeg;base64,{base64.b64encode(content.getvalue()).decode()}"


# -- videos ----------------------------------------------------------------------------------------


def choose(sets: Sequence[VideoSet], count: int) -> dict[VideoKey, str]:
    """Choose videos that all sets have: a third each of largest gains, medians and largest losses
    of the first score.

    This way a good run cannot hide what got worse. Of three videos, one is of each kind; a single
    one is the median. Gains are those of the last set over the first; a single set is ordered by
    its score. Sets without a video in common show any video.

    Returns:
        Key -> gain as text, from the largest to the smallest; empty for a single set. If no score
        is known: the first `count` videos, with empty texts.
    """
    first, last = sets[0], sets[-1]
    kept = [set(videos.shown) for videos in sets]
    wanted = set.intersection(*kept) or set.union(*kept)
    all_keys = dict.fromkeys(key for videos in sets for key in videos.keys)
    available = [key for key in all_keys if key in wanted]
    score = next((name for name in last.scores if name in first.scores), "")
    gains = gains_of(score, first, last) if len(sets) > 1 else first.by_key(score)
    ordered = sorted((key for key in available if key in gains), key=lambda key: -gains[key])
    if not ordered:
        return dict.fromkeys(available[:count], "")
    count = min(count, len(ordered))
    ends = (count + 1) // 3
    middle = (len(ordered) - count) // 2 + ends
    best = ordered[:ends]
    medians = ordered[middle : middle + count - 2 * ends]
    worst = ordered[len(ordered) - ends :]
    if len(sets) == 1:
        return dict.fromkeys([*best, *medians, *worst], "")
    return {key: f"{score} {gains[key]:+.2f}" for key in [*best, *medians, *worst]}


def cards(sets: Sequence[VideoSet], count: int, notes: list[str]) -> list[dict[str, Any]]:
    """Return the videos to show: prompt, reason, and label, scores and address for its image, if
    any, and each set.

    A video or an image that cannot be read has no address, and a line in `notes`.
    """
    if not sets:
        return []
    images: dict[str, Path] = {}
    for videos in reversed(sets):  # the first set's image counts
        for prompt, path in videos.images.items():
            images[prompt] = Path(path)

    found = []
    for key, why in choose(sets, count).items():
        prompt, _ = key
        cells: list[dict[str, Any]] = []
        if prompt in images:
            cells.append(_cell("image", {}, images[prompt], image_address, notes))
        for side in sets:
            scores, file = scores_of(side, key), side.shown.get(key)
            cells.append(_cell(side.label, scores, file, data_address, notes))
        found.append({"prompt": prompt, "why": why, "cells": cells})
    return found


def _cell(
    label: str,
    scores: dict[str, float],
    file: Path | None,
    address_of: Callable[[Path], str],
    notes: list[str],
) -> dict[str, Any]:
    """Return a video or an image of a card; without an address if there is none to show.

    Args:
        address_of: makes the file a `data:` URL.
        notes: receives a line if the file cannot be read.
    """
    cell: dict[str, Any] = {"label": label, "scores": scores}
    if file is not None:
        try:
            cell["address"] = address_of(file)
        except UserError as error:
            notes.append(f"left out: {error}")
    return cell


def training_cards(videos: VideoSet, notes: list[str]) -> list[dict[str, Any]]:
    """Return the shown samples of a training iteration, a card for each group, as `cards` does.

    Args:
        videos: group by group, the highest advantage first.
        notes: receives a line for each video that cannot be read.
    """
    found: list[dict[str, Any]] = []
    for number, prompt in enumerate(videos.prompts):
        begins_group = not found or found[-1]["prompt"] != prompt or len(found[-1]["cells"]) == 2
        if begins_group:
            found.append({"prompt": prompt, "why": "", "cells": []})
        label = "highest advantage" if begins_group else "lowest advantage"
        scores = {name: values[number] for name, values in videos.scores.items()}
        cell = _cell(label, scores, videos.files[number], data_address, notes)
        found[-1]["cells"].append(cell)
    return found


def scores_of(videos: VideoSet, key: VideoKey) -> dict[str, float]:
    """Return the known scores of one video."""
    scores = {}
    for name in videos.scores:
        value = videos.by_key(name).get(key)
        if value is not None:
            scores[name] = value
    return scores
