"""Self-contained HTML pages: templates, number formatting, and cards of videos side by side."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
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
    available = [
        key for key in dict.fromkeys(key for videos in sets for key in videos.keys) if key in wanted
    ]
    score = next((name for name in last.scores if name in first.scores), "")
    gains = gains_of(score, first, last) if len(sets) > 1 else first.by_key(score)
    ordered = sorted((key for key in available if key in gains), key=lambda key: -gains[key])
    if not ordered:
        return dict.fromkeys(available[:count], "")
    count = min(count, len(ordered))
    ends = (count + 1) // 3
    middle = (len(ordered) - count) // 2 + ends
    shown = (
        ordered[:ends]
        + ordered[middle : middle + count - 2 * ends]
        + ordered[len(ordered) - ends :]
    )
    return {key: f"{score} {gains[key]:+.2f}" if len(sets) > 1 else "" for key in shown}


def cards(sets: Sequence[VideoSet], count: int, notes: list[str]) -> list[dict[str, Any]]:
    """Return the videos to show: prompt, reason, and label, scores and address for its image, if
    any, and each set.

    A video or an image that cannot be read has no address, and a line in `notes`.
    """
    found = []
    images = {
        prompt: Path(path) for videos in reversed(sets) for prompt, path in videos.images.items()
    }
    for key, why in choose(sets, count).items() if sets else ():
        shown: list[Any] = (
            [("image", {}, images[key[0]], image_address)] if key[0] in images else []
        )
        shown += [
            (side.label, scores_of(side, key), side.shown.get(key), data_address) for side in sets
        ]
        cells: list[dict[str, Any]] = []
        for label, scores, file, address_of in shown:
            cells.append({"label": label, "scores": scores})
            try:
                if file is not None:
                    cells[-1]["address"] = address_of(file)
            except UserError as error:
                notes.append(f"left out: {error}")
        found.append({"prompt": key[0], "why": why, "cells": cells})
    return found


def scores_of(videos: VideoSet, key: VideoKey) -> dict[str, float]:
    """Return the known scores of one video."""
    return {
        name: value for name in videos.scores if (value := videos.by_key(name).get(key)) is not None
    }
