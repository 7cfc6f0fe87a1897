"""Write and read videos, and lay out their frames. Without imageio-ffmpeg, animated images replace MP4."""

from __future__ import annotations

import errno
import functools
import io
import math
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont, ImageSequence, features
from torch import Tensor

from sage_fast.report.shown import scores_of, shown_pairs
from sage_fast.rewards.frames import evenly_spaced
from sage_fast.util.errors import UserError
from sage_fast.util.files import aside, read_json
from sage_fast.util.ranks import rank

MIN_SIDE = 128
"""Smallest side in pixels; smaller videos are enlarged, since players would blur them."""

_INK = (28, 30, 34)
_MUTED = (105, 110, 118)
_RULE = (222, 225, 229)
_PAPER = (255, 255, 255)


def _pixels(video: Tensor) -> np.ndarray:
    """Convert float `[F, 3, H, W]` in [0, 1] to uint8 `[F, H, W, 3]`; values outside are clamped.

    Raises:
        ValueError: wrong shape, an integer dtype, or non-finite values.
    """
    if video.ndim != 4 or video.shape[1] != 3 or 0 in video.shape:
        raise ValueError(f"video: expected shape [F, 3, H, W] without empty sides, got {list(video.shape)}")
    if not video.is_floating_point():
        raise ValueError(f"video: expected floating point in [0, 1], got {video.dtype}")
    video = video.detach().float().cpu()
    if not video.isfinite().all():
        raise ValueError("video: holds values that are not finite")
    return (video.clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous().numpy()


@functools.cache
def video_suffix() -> str:
    """Return the suffix of written videos: `.mp4`, or without imageio-ffmpeg `.webp` or `.png`, with one notice."""
    try:
        import imageio_ffmpeg

        imageio_ffmpeg.get_ffmpeg_exe()
    except (ImportError, RuntimeError) as error:  # RuntimeError: the package has no ffmpeg binary
        suffix, name = (".webp", "WebP") if features.check("webp") else (".png", "PNG")
        if rank() == 0:
            why = f"no MP4 without imageio-ffmpeg ({error}); pip install imageio-ffmpeg"
            print(f"videos are written as animated {name}: {why}", file=sys.stderr)
        return suffix
    return ".mp4"


def write_video(path: str | Path, video: Tensor, fps: float) -> None:
    """Write `.mp4` with `save_mp4`, `.webp` or `.png` as a lossless looping animation.

    Args:
        path: output file; its folder must exist.
        video: float `[F, 3, H, W]` in [0, 1].
        fps: frames per second.

    Raises:
        ValueError: as `save_mp4`.
    """
    path = Path(path)
    if path.suffix == ".mp4":
        return save_mp4(path, video, fps)
    first, *rest = (Image.fromarray(frame) for frame in _enlarged(video, fps))
    with aside(path) as file:
        first.save(file, path.suffix[1:], save_all=True, append_images=rest, duration=1000 / fps, loop=0, lossless=True)


def _enlarged(video: Tensor, fps: float) -> np.ndarray:
    """Return uint8 frames `[F, H, W, 3]`, enlarged so that no side is below `MIN_SIDE`."""
    if not fps > 0:
        raise ValueError(f"fps = {fps}: expected above 0")
    frames = _pixels(video)
    factor = max(1, math.ceil(MIN_SIDE / min(frames.shape[1:3])))
    return frames.repeat(factor, axis=1).repeat(factor, axis=2)


def save_mp4(path: str | Path, video: Tensor, fps: float) -> None:
    """Write H.264 in yuv420p, which every browser plays.

    Videos with a side below 128 pixels are enlarged by an integer factor (nearest neighbour). Odd sizes, which yuv420p
    cannot hold, are padded by repeating the last row or column.

    Args:
        path: `.mp4` file; its folder must exist.
        video: float `[F, 3, H, W]` in [0, 1].
        fps: frames per second.

    Raises:
        ValueError: `video` has the wrong shape, dtype or non-finite values; `fps` is not above 0.
        OSError: ffmpeg failed, for example on a full disk; no file is left.
    """
    import imageio_ffmpeg

    frames = _enlarged(video, fps)
    frames = np.pad(frames, ((0, 0), (0, frames.shape[1] % 2), (0, frames.shape[2] % 2), (0, 0)), mode="edge")
    # `imageio_ffmpeg.write_frames` would ignore ffmpeg's exit status.
    source = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{frames.shape[2]}x{frames.shape[1]}", "-r", str(fps)]
    # faststart: playback can begin before the download ends. bitexact: deterministic bytes.
    coded = ["-vcodec", "libx264", "-pix_fmt", "yuv420p", "-crf", "18", "-movflags", "+faststart"]
    exact = ["-fflags", "+bitexact", "-flags:v", "+bitexact", "-f", "mp4"]
    with aside(Path(path)) as file:
        command = [imageio_ffmpeg.get_ffmpeg_exe(), "-y", "-v", "error", *source, "-i", "-", *coded, *exact, str(file)]
        # Own process group: Ctrl-C must not reach ffmpeg.
        done = subprocess.run(command, input=frames.tobytes(), capture_output=True, process_group=0)
        if done.returncode:
            why = done.stderr.decode(errors="replace").strip().splitlines()[:1] or [f"status {done.returncode}"]
            raise OSError(errno.EIO, f"ffmpeg cannot write it: {why[0]}", str(path))


ANIMATIONS = (".webp", ".gif", ".png")
_PLAYED = ("h264", "vp8", "vp9", "av1")
"""Codecs that browsers play in 4:2:0."""


def _frames(path: Path) -> Iterator[np.ndarray]:
    """Yield frames, uint8 `[H, W, 3]`.

    Raises:
        UserError: the file cannot be read, or ends earlier than its header says.
    """
    try:
        if path.suffix.lower() in ANIMATIONS:
            with Image.open(path) as animation:
                yield from (np.asarray(frame.convert("RGB")) for frame in ImageSequence.Iterator(animation))
            return
        import imageio_ffmpeg

        reader = imageio_ffmpeg.read_frames(str(path))
        about = next(reader)
        width, height = about["size"]
        count = 0
        for frame in reader:
            yield np.frombuffer(frame, dtype=np.uint8).reshape(height, width, 3)
            count += 1
    # SyntaxError: Pillow on a broken PNG. IndexError, AttributeError: imageio-ffmpeg on a file without video.
    except (OSError, RuntimeError, SyntaxError, ValueError, IndexError, AttributeError) as error:
        if not path.is_file():
            raise
        raise UserError(f"{path}: cannot be read as a video: {str(error).strip().splitlines()[-1]}") from error
    expected = about["duration"] * about["fps"]
    if count == 0 or count < 0.8 * expected - 1:
        raise UserError(f"{path}: cannot be read as a video: it ends after {count} of about {expected:.0f} frames")


def read_video(path: Path, num_frames: int | None = None) -> Tensor:
    """Read float32 `[F, 3, H, W]` in [0, 1]: all frames, or `num_frames` evenly spaced ones from first to last.

    Raises:
        UserError: the file cannot be read, or is cut off.
    """
    frames = list(_frames(path))
    frames = [frames[i] for i in evenly_spaced(len(frames), num_frames or len(frames))]
    return torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2) / 255


def for_browser(path: Path) -> tuple[str, bytes]:
    """Return MIME type and content of a video that every browser plays; re-encode the file only if it must.

    Raises:
        UserError: the file cannot be read, or is cut off.
    """
    frames = sum(1 for _ in _frames(path))
    suffix = path.suffix.lower()
    if suffix in ANIMATIONS:
        return f"image/{suffix[1:]}", path.read_bytes()
    import imageio_ffmpeg

    reader = imageio_ffmpeg.read_frames(str(path))
    about = next(reader)
    reader.close()
    if suffix in (".mp4", ".webm") and about["codec"] in _PLAYED and about["pix_fmt"].split("(")[0] == "yuv420p":
        return f"video/{suffix[1:]}", path.read_bytes()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "video.mp4"
        save_mp4(file, read_video(path, frames), about["fps"])
        return "video/mp4", file.read_bytes()


def poster(path: Path) -> bytes:
    """Return the first frame as JPEG."""
    buffer = io.BytesIO()
    Image.fromarray(next(_frames(path))).save(buffer, "JPEG", quality=85)
    return buffer.getvalue()


def numbered(folder: Path) -> dict[int, Path]:
    """Return number -> file for the videos of an evaluation; empty if the folder does not exist."""
    found = {path: re.match(r"(\d+)-.*\.(mp4|webp|png)$", path.name) for path in folder.glob("*")}
    return dict(sorted((int(number.group(1)), path) for path, number in found.items() if number))


def write_comparison(run: Path, count: int = 6) -> Path | None:
    """Write a run's `comparison.png`: base model, first evaluation during training, and last one, side by side.

    It shows the largest gains, the medians and the largest losses between the first column and the last. The choice is
    only known at the end. So each evaluation that may become a column writes all its videos as they are sampled, on
    every rank, and `keep_shown` deletes the others. Memory holds one chunk of videos at a time. A video of 100 MB takes
    a few MB on disk and seconds to write; sampling it again would take minutes.

    Args:
        run: the run folder.
        count: maximum number of videos shown.

    Returns:
        The path of the image; None if the evaluations have no video in common.
    """
    evaluations, shown = _shown(run, count)
    if not shown:
        return None
    columns, notes = {}, []
    for name, scores in evaluations.items():
        label = f"{scores['iteration']} iterations" if scores["iteration"] else "base"
        files = numbered(run / "videos" / name)
        columns[label] = [read_video(files[i], num_frames=3) for i in shown]
        notes.append([", ".join(f"{part} {value:.2f}" for part, value in scores_of(scores, i)) for i in shown])
    prompts = next(iter(evaluations.values()))["prompts"]
    captions = [f"{why}: {prompts[i]}" if why else prompts[i] for i, why in shown.items()]
    path = run / "comparison.png"
    with aside(path) as file:
        comparison_sheet(columns, captions, notes=notes if any(map(any, notes)) else None).save(file, "PNG")
    return path


def keep_shown(run: Path, count: int) -> None:
    """Delete the candidate videos that `write_comparison` did not show."""
    evaluations, shown = _shown(run, count)
    for name in evaluations if shown else ():
        for number, path in numbered(run / "videos" / name).items():
            if number not in shown:
                path.unlink()


def _shown(run: Path, count: int) -> tuple[dict[str, Any], dict[int, str]]:
    """Return the columns of the comparison (name -> scores) and its videos (number -> reason)."""
    on_the_way = sorted(path.stem for path in (run / "eval").glob("iteration-*.json"))
    names = [name for name in ("before", *on_the_way[:1], "after") if (run / "eval" / f"{name}.json").is_file()]
    evaluations = {name: read_json(run / "eval" / f"{name}.json") for name in names}
    if not evaluations:
        return {}, {}
    common = set.intersection(*(set(numbered(run / "videos" / name)) for name in names))
    return evaluations, shown_pairs(evaluations[names[0]], evaluations[names[-1]], common, count)


def contact_sheet(
    videos: Sequence[Tensor], captions: Sequence[str], *, num_frames: int = 6, height: int = 128
) -> Image.Image:
    """Lay out one row per video: its caption, then evenly spaced frames from first to last.

    Args:
        videos: float `[F, 3, H, W]` in [0, 1] each.
        captions: one per video.
        num_frames: frames shown; fewer if a video is shorter.
        height: height of a frame in pixels.

    Raises:
        ValueError: there is no video, or the number of captions differs.
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

    Raises:
        ValueError: there is nothing to show, or a column does not have one video per caption.
    """
    if not columns or not captions:
        raise ValueError("nothing to lay out: expected at least one video")
    for label, videos in columns.items():
        if len(videos) != len(captions):
            raise ValueError(f"column {label!r} has {len(videos)} videos for {len(captions)} captions")

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
    frames = _pixels(video)
    chosen = evenly_spaced(len(frames), count)
    width = max(1, round(height * frames.shape[2] / frames.shape[1]))
    method = Image.Resampling.NEAREST if height >= frames.shape[1] else Image.Resampling.BOX
    return [Image.fromarray(frames[i]).resize((width, height), method) for i in chosen]


@functools.cache
def _font(size: int, bold: bool = False) -> ImageFont.FreeTypeFont:
    """Load DejaVu Sans from matplotlib: it has Latin, Greek, Cyrillic and more, but no Chinese."""
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
    lines = [_fit(draw, line, font, width) for line in textwrap.wrap(" ".join(text.split()), per_line)]
    count = max(1, int(height // 20))
    if len(lines) > count:
        lines = [*lines[: count - 1], _fit(draw, lines[count - 1], font, width - 20).rstrip("…") + " …"]
    return "\n".join(lines)
