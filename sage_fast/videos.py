"""Videos as files that one can look at: MP4s and contact sheets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import imageio_ffmpeg
import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

SHEET_FRAMES = 6
_MARGIN = 8
_INK, _PAPER = (40, 40, 40), (255, 255, 255)


def to_uint8(video: Tensor, smallest_side: int) -> np.ndarray:
    """`[F, 3, H, W]` in [0, 1] -> uint8 `[F, H, W, 3]`, even sized, enlarged by a whole factor to `smallest_side`."""
    factor = max(1, -(-smallest_side // min(video.shape[-2:])))
    frames = (video.clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()
    frames = frames.repeat(factor, axis=1).repeat(factor, axis=2)
    return frames[:, : frames.shape[1] // 2 * 2, : frames.shape[2] // 2 * 2]


def save_mp4(path: Path, video: Tensor, fps: int) -> None:
    """Write `video [F, 3, H, W]` in [0, 1] as H.264, yuv420p; tiny videos are enlarged to at least 128 pixels."""
    frames = to_uint8(video, 128)
    writer = imageio_ffmpeg.write_frames(
        str(path), (frames.shape[2], frames.shape[1]), fps=fps, quality=8, macro_block_size=2, ffmpeg_log_level="error"
    )
    writer.send(None)
    for frame in frames:
        writer.send(np.ascontiguousarray(frame))
    writer.close()


def _strip(video: Tensor, frames: int, height: int) -> Image.Image:
    """Evenly spaced frames side by side."""
    picks = torch.linspace(0, len(video) - 1, min(frames, len(video))).round().long().tolist()
    images = [Image.fromarray(frame) for frame in to_uint8(video[picks], 1)]
    width = round(images[0].width * height / images[0].height)
    strip = Image.new("RGB", (len(images) * (width + 2) - 2, height), _PAPER)
    for i, image in enumerate(images):
        strip.paste(image.resize((width, height), Image.Resampling.NEAREST), (i * (width + 2), 0))
    return strip


def comparison_sheet(
    columns: Mapping[str, Sequence[Tensor]], captions: Sequence[str], frames: int = SHEET_FRAMES, height: int = 72
) -> Image.Image:
    """A row per prompt with its caption above, a column per label (such as base, iteration 10, final)."""
    font = ImageFont.load_default(size=14)
    cells = {label: [_strip(video, frames, height) for video in videos] for label, videos in columns.items()}
    widths = {label: max(strip.width for strip in strips) for label, strips in cells.items()}
    row_height = height + 3 * _MARGIN + 14
    sheet = Image.new(
        "RGB",
        (_MARGIN + sum(w + 2 * _MARGIN for w in widths.values()), 3 * _MARGIN + 14 + row_height * len(captions)),
        _PAPER,
    )
    draw = ImageDraw.Draw(sheet)
    left = _MARGIN
    for label, strips in cells.items():
        draw.text((left, _MARGIN), label, fill=(0, 0, 0), font=font, stroke_width=0.4)
        for row, strip in enumerate(strips):
            sheet.paste(strip, (left, 3 * _MARGIN + 14 + row * row_height + 14 + _MARGIN))
        left += widths[label] + 2 * _MARGIN
    for row, caption in enumerate(captions):
        draw.text((_MARGIN, 3 * _MARGIN + 12 + row * row_height), caption, fill=_INK, font=font)
    return sheet


def contact_sheet(videos: Sequence[Tensor], captions: Sequence[str]) -> Image.Image:
    """One row of frames per video, captioned."""
    return comparison_sheet({"": videos}, captions)
