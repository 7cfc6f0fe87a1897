"""Lay out frames of videos as a picture: the contact sheet of trackers and of `sage-fast
sample`."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from sage_fast.util.videos import evenly_spaced, pixels

MUTED, PAPER = (105, 110, 118), (255, 255, 255)
HEIGHT, MARGIN, COLUMN_GAP, ROW_GAP, FRAME_GAP = 128, 20, 24, 14, 3
"""Pixels: height of a frame, margin of the sheet, and gaps between columns, rows and frames."""
CAPTION_WIDTH, CAPTION_LETTERS, LINE = 200, 24, 20
"""Pixels and letters of a line of a caption, and pixels from one line to the next."""


def contact_sheet(
    videos: Sequence[Tensor], captions: Sequence[str], *, num_frames: int = 6
) -> Image.Image:
    """Lay out one row per video: its caption, then evenly spaced frames from first to last.

    Args:
        videos: `[F, 3, H, W]` each, float in [0, 1] or uint8.
        captions: one per video.
        num_frames: frames shown; fewer if a video is shorter.
    """
    return sheet_of([frame_strip(video, num_frames) for video in videos], captions)


def sheet_of(strips: Sequence[Image.Image], captions: Sequence[str]) -> Image.Image:
    """Lay out one row per strip of frames, as `frame_strip` returns it: its caption, then the
    strip."""
    import matplotlib  # takes as long to import as the rest of a run

    # It has Latin, Greek, Cyrillic and more, but no Chinese.
    font = ImageFont.truetype(Path(matplotlib.get_data_path()) / "fonts/ttf/DejaVuSans.ttf", 14)
    left = MARGIN + CAPTION_WIDTH + COLUMN_GAP
    width = left + max(strip.width for strip in strips) + MARGIN
    height = 2 * MARGIN + len(strips) * (HEIGHT + ROW_GAP) - ROW_GAP
    sheet = Image.new("RGB", (width, height), PAPER)
    draw = ImageDraw.Draw(sheet)
    for i, (strip, caption) in enumerate(zip(strips, captions)):
        top = MARGIN + i * (HEIGHT + ROW_GAP)
        lines = textwrap.wrap(caption, CAPTION_LETTERS, max_lines=HEIGHT // LINE, placeholder=" …")
        draw.multiline_text((MARGIN, top), "\n".join(lines), fill=MUTED, font=font, spacing=5)
        sheet.paste(strip, (left, top))
    return sheet


def frame_strip(video: Tensor, count: int = 6) -> Image.Image:
    """Return evenly spaced frames side by side, `HEIGHT` pixels high: enlarged by nearest
    neighbour, reduced by averaging."""
    frames = pixels(video)
    _, height, width, _ = frames.shape
    size = max(1, round(HEIGHT * width / height)), HEIGHT
    method = Image.Resampling.NEAREST if height <= HEIGHT else Image.Resampling.BOX
    gap = np.full((HEIGHT, FRAME_GAP, 3), PAPER, dtype=np.uint8)

    parts: list[np.ndarray] = []
    for index in evenly_spaced(len(frames), count):
        if parts:
            parts.append(gap)
        parts.append(np.asarray(Image.fromarray(frames[index]).resize(size, method)))
    return Image.fromarray(np.hstack(parts))
