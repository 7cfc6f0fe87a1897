"""Lay out frames of videos as a picture: contact sheets and comparisons."""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from sage_fast.util.frames import evenly_spaced
from sage_fast.util.videos import pixels

INK, MUTED, PAPER = (28, 30, 34), (105, 110, 118), (255, 255, 255)
HEIGHT, MARGIN, COLUMN_GAP, ROW_GAP, FRAME_GAP = 128, 20, 24, 14, 3
"""Pixels: height of a frame, margin of the sheet, and gaps between columns, rows and frames."""
CAPTION_WIDTH, CAPTION_LETTERS, LINE = 200, 24, 20
"""Pixels and letters of a line of a caption, and pixels from one line to the next."""


def contact_sheet(videos: Sequence[Tensor], captions: Sequence[str], *, num_frames: int = 6) -> Image.Image:
    """Lay out one row per video: its caption, then evenly spaced frames from first to last.

    Args:
        videos: float `[F, 3, H, W]` in [0, 1] each.
        captions: one per video.
        num_frames: frames shown; fewer if a video is shorter.
    """
    return comparison_sheet({"": videos}, captions, num_frames=num_frames)


def comparison_sheet(
    columns: Mapping[str, Sequence[Tensor]], captions: Sequence[str], *, num_frames: int = 3
) -> Image.Image:
    """Lay out one row per prompt and one group of frames per label (such as base, iteration 10, final).

    Args:
        columns: label -> the videos of all prompts, float `[F, 3, H, W]` in [0, 1] each.
        captions: one per row.
        num_frames: frames shown per video, evenly spaced from first to last.
    """
    strips = {label: [_strip(video, num_frames) for video in videos] for label, videos in columns.items()}
    widths = {label: max(strip.width for strip in column) + COLUMN_GAP for label, column in strips.items()}
    top, left = MARGIN + 34 * any(columns), MARGIN + CAPTION_WIDTH + COLUMN_GAP
    size = (
        left + sum(widths.values()) - COLUMN_GAP + MARGIN,
        top + len(captions) * (HEIGHT + ROW_GAP) - ROW_GAP + MARGIN,
    )
    sheet = Image.new("RGB", size, PAPER)
    draw = ImageDraw.Draw(sheet)
    for i, caption in enumerate(captions):
        lines = textwrap.wrap(caption, CAPTION_LETTERS, max_lines=HEIGHT // LINE, placeholder=" …")
        at = MARGIN, top + i * (HEIGHT + ROW_GAP)
        draw.multiline_text(at, "\n".join(lines), fill=MUTED, font=_font(14), spacing=5)
    for label, column in strips.items():
        draw.text((left, MARGIN), label, fill=INK, font=_font(16, bold=True))
        for i, strip in enumerate(column):
            sheet.paste(strip, (left, top + i * (HEIGHT + ROW_GAP)))
        left += widths[label]
    return sheet


def _strip(video: Tensor, count: int) -> Image.Image:
    """Return evenly spaced frames side by side: enlarged by nearest neighbour, reduced by averaging."""
    frames = pixels(video)
    _, height, width, _ = frames.shape
    size = max(1, round(HEIGHT * width / height)), HEIGHT
    method = Image.Resampling.NEAREST if height <= HEIGHT else Image.Resampling.BOX
    chosen = [np.asarray(Image.fromarray(frames[i]).resize(size, method)) for i in evenly_spaced(len(frames), count)]
    gap = np.full((HEIGHT, FRAME_GAP, 3), PAPER, dtype=np.uint8)
    return Image.fromarray(np.hstack([part for frame in chosen for part in (gap, frame)][1:]))


@functools.cache
def _font(size: int, bold: bool = False) -> ImageFont.FreeTypeFont:
    """Load DejaVu Sans from matplotlib: it has Latin, Greek, Cyrillic and more, but no Chinese."""
    import matplotlib  # takes as long to import as the rest of a run

    return ImageFont.truetype(Path(matplotlib.get_data_path()) / "fonts/ttf" / f"DejaVuSans{'-Bold' * bold}.ttf", size)
