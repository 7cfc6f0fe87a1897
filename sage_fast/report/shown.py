"""Choose the videos that represent a comparison, and lay them out as cards for a page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sage_fast.eval.videoset import Key, VideoSet, gains_of, shown_name
from sage_fast.report.html import data_address, image_address
from sage_fast.util.errors import UserError


def choose(sets: Sequence[VideoSet], count: int) -> dict[Key, str]:
    """Choose videos that all sets have: a third each of largest gains, medians and largest losses of the first score.

    This way a good run cannot hide what got worse. Of three videos, one is of each kind; a single one is the median.
    Gains are those of the last set over the first; a single set is ordered by its score. Sets without a video in
    common show any video.

    Returns:
        Key -> reason, from the largest gain to the largest loss. The reason is only the gain if some videos have
        been deleted (the run had finished before), and empty for a single set. If no score is known: the first `count`
        videos, with empty reasons.
    """
    first, last = sets[0], sets[-1]
    kept = [set(videos.shown) for videos in sets]
    wanted = set.intersection(*kept) or set.union(*kept)
    available = [key for key in dict.fromkeys(key for videos in sets for key in videos.keys) if key in wanted]
    score = next((name for name in last.scores if last.scored_alike(name, first)), "")
    gains = gains_of(score, first, last) if len(sets) > 1 else first.by_key(score)
    ordered = sorted((key for key in available if key in gains), key=lambda key: -gains[key])
    if not ordered:
        return dict.fromkeys(available[:count], "")
    count = min(count, len(ordered))
    ends = (count + 1) // 3
    middle = (len(ordered) - count) // 2 + ends
    shown = {key: "largest gain" if gains[key] > 0 else "smallest loss" for key in ordered[:ends]}
    shown |= dict.fromkeys(ordered[middle : middle + count - 2 * ends], "median")
    shown |= {key: "largest loss" if gains[key] < 0 else "smallest gain" for key in ordered[len(ordered) - ends :]}
    if len(sets) == 1:
        return dict.fromkeys(shown, "")
    none_deleted = wanted >= gains.keys()
    return {key: f"{why} {gains[key]:+.2f}" if none_deleted else f"{gains[key]:+.2f}" for key, why in shown.items()}


def scores_of(videos: VideoSet, key: Key) -> dict[str, float]:
    """Return the known scores of one video by their names in tables."""
    found = {shown_name(name): videos.by_key(name).get(key) for name in videos.scores}
    return {name: value for name, value in found.items() if value is not None}


def cards(sets: Sequence[VideoSet], count: int, notes: list[str]) -> list[dict[str, Any]]:
    """Return the videos to show: prompt, reason, and label, scores and address for its image, if any, and each set.

    A video or an image that cannot be read is left out, with a line in `notes`.
    """
    found = []
    images = {prompt: path for videos in reversed(sets) for prompt, path in videos.images.items()}
    for key, why in choose(sets, count).items() if sets else ():
        cells: list[dict[str, Any]] = []
        if key[0] in images:
            try:
                cells.append({"label": "image", "scores": {}, "address": image_address(images[key[0]])})
            except UserError as error:
                notes.append(f"left out: {error}")
        for videos in sets:
            cells.append({"label": videos.label, "scores": scores_of(videos, key)})
            try:
                if key in videos.shown:
                    cells[-1]["address"] = data_address(videos.shown[key])
            except UserError as error:
                notes.append(f"left out, since it is damaged: {error}")
        found.append({"prompt": key[0], "why": why, "cells": cells})
    return found
