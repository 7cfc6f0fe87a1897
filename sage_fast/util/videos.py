"""Choose the frames of videos, and write them as MP4."""

from __future__ import annotations

import contextlib
import errno
import functools
import math
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import imageio_ffmpeg
import numpy as np
import torch
from torch import Tensor

from sage_fast.util.errors import SIGNALS, UserError, first_line
from sage_fast.util.files import atomic_path
from sage_fast.util.text import in_file_name

BT709 = [
    "-vf",
    "scale=out_color_matrix=bt709:out_range=tv",
    "-colorspace",
    "bt709",
    "-color_range",
    "tv",
]
BT709 += ["-color_primaries", "bt709", "-color_trc", "bt709"]
"""Conversion of RGB, and the tags that say so: without tags, a player takes BT.601 or BT.709 by the
size of a video."""
CODED = ["-vcodec", "libx264", "-pix_fmt", "yuv420p", *BT709, "-crf", "18"]
"""H.264 that every browser plays."""
MIN_SIDE = 128
"""Smallest side in pixels; smaller videos are enlarged, since players would blur them."""


def evenly_spaced(total: int, count: int) -> list[int]:
    """Return `count` evenly spaced indices in [0, total), including first and last; all if there
    are fewer."""
    positions = torch.linspace(0, total - 1, min(count, total), dtype=torch.float64)
    return positions.round().long().tolist()


def pixels(video: Tensor) -> np.ndarray:
    """Convert float `[F, 3, H, W]` in [0, 1], or uint8, to uint8 `[F, H, W, 3]`; floats outside are
    clamped.

    Raises:
        ValueError: wrong shape, another integer dtype, or non-finite values (a `UserError`).
    """
    if video.ndim != 4 or video.shape[1] != 3 or 0 in video.shape:
        raise ValueError(
            f"video: expected shape [F, 3, H, W] without empty sides, got {list(video.shape)}"
        )
    if video.dtype == torch.uint8:
        return video.cpu().permute(0, 2, 3, 1).contiguous().numpy()
    if not video.is_floating_point():
        raise ValueError(f"video: expected floating point in [0, 1] or uint8, got {video.dtype}")
    video = video.detach().float().cpu()
    if not video.isfinite().all():
        raise UserError(
            "video: holds values that are not finite; the weights or the autoencoder gave them"
        )
    levels = (video.clamp(0, 1) * 255).round().to(torch.uint8)
    return levels.permute(0, 2, 3, 1).contiguous().numpy()


def for_ffmpeg(file: Path) -> str:
    """Return a file as an argument of ffmpeg, which would take `a:b` for a protocol and `-b` for an
    option."""
    return f"file:{file.absolute()}"


@functools.cache
def check_encoder() -> str:
    """Check that videos can be written, by encoding one frame to nowhere; return the path of
    ffmpeg.

    Call it before anything is generated: an ffmpeg of a distribution may be built without libx264.

    Raises:
        UserError: there is no ffmpeg, or it does not write H.264.
    """
    expected = (
        "expected one with libx264: pip install imageio-ffmpeg, or its path in IMAGEIO_FFMPEG_EXE"
    )
    try:
        program = imageio_ffmpeg.get_ffmpeg_exe()
        frame = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{MIN_SIDE}x{MIN_SIDE}", "-i", "-"]
        command = [program, "-v", "error", *frame, *CODED, "-f", "null", "-"]
        done = subprocess.run(
            command, input=bytes(3 * MIN_SIDE**2), capture_output=True, process_group=0
        )
    except (OSError, RuntimeError) as error:
        raise UserError(f"ffmpeg cannot be run ({first_line(error)}); {expected}") from error
    if done.returncode:
        why = first_line(done.stderr.decode(errors="replace")) or f"status {done.returncode}"
        raise UserError(f"ffmpeg {program} cannot write H.264 ({why}); {expected}")
    return program


def save_mp4(path: str | Path, video: Tensor, fps: float) -> None:
    """Write H.264 in yuv420p, which every browser plays.

    Videos with a side below 128 pixels are enlarged by an integer factor (nearest neighbour). Odd
    sizes, which yuv420p cannot hold, are padded by repeating the last row or column.

    Args:
        path: `.mp4` file; its folder must exist.
        video: float `[F, 3, H, W]` in [0, 1], or uint8.
        fps: frames per second.

    Raises:
        ValueError: `video` has the wrong shape, dtype or non-finite values.
        OSError: ffmpeg failed, for example on a full disk; no file is left.
    """
    frames = pixels(video)
    factor = max(1, math.ceil(MIN_SIDE / min(frames.shape[1:3])))
    frames = frames.repeat(factor, axis=1).repeat(factor, axis=2)
    odd_rows, odd_columns = frames.shape[1] % 2, frames.shape[2] % 2
    frames = np.pad(frames, ((0, 0), (0, odd_rows), (0, odd_columns), (0, 0)), mode="edge")
    # `imageio_ffmpeg.write_frames` would ignore ffmpeg's exit status.
    source = [
        "-f",
        "rawvideo",
        "-pix_fmt",
        "rgb24",
        "-s",
        f"{frames.shape[2]}x{frames.shape[1]}",
        "-r",
        str(fps),
    ]
    # faststart: playback can begin before the download ends. bitexact: deterministic bytes.
    exact = [
        "-movflags",
        "+faststart",
        "-fflags",
        "+bitexact",
        "-flags:v",
        "+bitexact",
        "-f",
        "mp4",
    ]
    ffmpeg = [
        imageio_ffmpeg.get_ffmpeg_exe(),
        "-y",
        "-v",
        "error",
        *source,
        "-i",
        "-",
        *CODED,
        *exact,
    ]
    with atomic_path(Path(path)) as file:
        status, said = _run([*ffmpeg, for_ffmpeg(file)], frames.tobytes())
        if status:
            why = said.strip().splitlines()[:1] or [f"status {status}"]
            raise OSError(errno.EIO, f"ffmpeg cannot write it: {why[0]}", str(path))


def _run(command: list[str], given: bytes) -> tuple[int, str]:
    """Run a command with bytes on its stdin, out of reach of the signals that stop a run; return
    status and stderr."""
    pipe = subprocess.PIPE
    # a scheduler sends them to every process of a job, a terminal to its process group
    with _blocked_signals():
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, process_group=0)
    with process:
        try:
            _, said = process.communicate(given)
        except BaseException:
            process.kill()
            raise
    return process.returncode, said.decode(errors="replace")


@contextlib.contextmanager
def _blocked_signals() -> Iterator[None]:
    """Block the signals that stop a run in this thread; a process that the block starts keeps them
    blocked."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def save_video(video: Tensor, prompt: str, folder: Path, number: int, fps: float) -> Path:
    """Write a video as `save_mp4` does, to a file of `folder` named by number and prompt."""
    path = folder / f"{number:02d}-{in_file_name(prompt)}.mp4"
    save_mp4(path, video, fps)
    return path


def numbered(folder: Path) -> dict[int, Path]:
    """Return number -> file for the videos of an evaluation; empty if the folder does not exist."""
    found = {}
    for path in folder.glob("*.mp4"):
        number = re.match(r"(\d+)-", path.name)
        if number is not None and path.is_file():
            found[int(number[1])] = path
    return dict(sorted(found.items()))
