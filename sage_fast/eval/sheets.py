"""Lay out frames of videos as a picture: contact sheets and comparisons."""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from sage_fast.util.frames import evenly_spaced
from sage_fast.util.videos import pixels

_INK = (28, 30, 34)
_MUTED = (105, 110, 118)
_RULE = (222, 225, 229)
_PAPER = (255, 255, 255)


def contact_sheet(
    videos: Sequence[Tensor], captions: Sequence[str], *, num_frames: int = 6, height: int = 128
) -> Image.Image:
    """Lay out one row per video: its caption, then evenly spaced frames from first to last.

    Args:
        videos: float `[F, 3, H, W]` in [0, 1] each.
        captions: one per video.
        num_frames: frames shown; fewer if a video is shorter.
        height: height of a frame in pixels.
    """
    return comparison_sheet({"": videos}, captions, num_frames=num_frames, height=height)


def comparison_sheet(
    columns: Mapping[str, Sequence[Tensor]],
    captions: Sequence[str],
    *,
    notes: Sequence[Sequence[str]] | None = None,
    num_frames: int = 3,
    height: int = 128,
) -> Image.Image:
    """Lay out one row per prompt and one group of frames per label (such as base, iteration 10, final).

    Args:
        columns: label -> the videos of all prompts, float `[F, 3, H, W]` in [0, 1] each.
        captions: one per row.
        notes: for each column, one line under each of its videos.
        num_frames: frames shown per video, evenly spaced from first to last.
        height: height of a frame in pixels.
    """
    gap, group_gap, margin, caption_width = 3, 24, 20, 200
    row_gap = 14 if notes is None else 38  # leaves room for the notes
    cells = [[_cells(video, num_frames, height) for video in videos] for videos in columns.values()]
    widths = [max(sum(c.width + gap for c in row) - gap for row in group) for group in cells]
    header = 34 if any(columns) else 0
    left = margin + caption_width + group_gap
    size = (
        left + sum(widths) + group_gap * (len(widths) - 1) + margin,
        margin + header + len(captions) * (height + row_gap) - 14 + margin,
    )
    sheet = Image.new("RGB", size, _PAPER)
    draw = ImageDraw.Draw(sheet)
    if header:
        x = left
        for label, width in zip(columns, widths):
            draw.text((x, margin), _fit(draw, label, _font(16, bold=True), width), fill=_INK, font=_font(16, bold=True))
            x += width + group_gap
        draw.line([(margin, margin + header - 9), (size[0] - margin, margin + header - 9)], fill=_RULE)
    for i, caption in enumerate(captions):
        y = margin + header + i * (height + row_gap)
        text = _wrap(draw, caption, caption_width, height)
        draw.multiline_text((margin, y), text, fill=_MUTED, font=_font(14), spacing=5)
        x = left
        for column, (group, width) in enumerate(zip(cells, widths)):
            if notes is not None:
                note = _fit(draw, notes[column][i], _font(13), width)
                draw.text((x, y + height + 4), note, fill=_INK, font=_font(13))
            offset = x
            for cell in group[i]:
                sheet.paste(cell, (offset, y))
                offset += cell.width + gap
            x += width + group_gap
    return sheet


def _cells(video: Tensor, count: int, height: int) -> list[Image.Image]:
    """Return evenly spaced frames, `height` pixels high: enlarged by nearest neighbour, reduced by averaging."""
    frames = pixels(video)
    chosen = evenly_spaced(len(frames), count)
    width = max(1, round(height * frames.shape[2] / frames.shape[1]))
    method = Image.Resampling.NEAREST if height >= frames.shape[1] else Image.Resampling.BOX
    return [Image.fromarray(frames[i]).resize((width, height), method) for i in chosen]


@functools.cache
def _font(size: int, bold: bool = False) -> ImageFont.FreeTypeFont:
    """Load DejaVu Sans from matplotlib: it has Latin, Greek, Cyrillic and more, but no Chinese."""
    import matplotlib  # takes as long to import as the rest of a run

    return ImageFont.truetype(Path(matplotlib.get_data_path()) / "fonts/ttf" / f"DejaVuSans{'-Bold' * bold}.ttf", size)


def _fit(draw: ImageDraw.ImageDraw, text: str, font: ImageFont.FreeTypeFont, width: float) -> str:
    """Shorten `text` to `width` pixels with an ellipsis."""
    if draw.textlength(text, font=font) <= width:
        return text
    while text and draw.textlength(text + "…", font=font) > width:
        text = text[:-1]
    return text.rstrip() + "…"


def _wrap(draw: ImageDraw.ImageDraw, text: str, width: float, height: float) -> str:
    """Break `text` into lines of at most `width` pixels; cut with an ellipsis if they exceed `height`."""
    font = _font(14)
    per_line = max(1, int(width / draw.textlength("n", font=font)))
    lines = textwrap.wrap(text, per_line, max_lines=max(1, int(height // 20)), placeholder=" …")
    return "\n".join(_fit(draw, line, font, width) for line in lines)
