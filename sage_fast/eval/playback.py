"""Read videos back: each frame once, the rate of the picture, and a form that every browser plays.

A frame counts once, however long it is shown: a player at a constant rate would repeat or leave out
frames where their times are uneven. The duration is the picture's own, since sound may be longer.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import IO

import imageio_ffmpeg
import numpy as np
import torch
from torch import Tensor

from sage_fast.util.errors import UserError, printable
from sage_fast.util.videos import for_ffmpeg, save_mp4

log = logging.getLogger(__name__)

_PLAYED = ("h264", "vp8", "vp9", "av1")
"""Codecs that browsers play in 4:2:0."""
_FORMATS = "mov,matroska,avi,gif,apng,mpegts,mpeg,flv,asf,ogg,yuv4mpegpipe"
"""Names by which ffmpeg knows MP4, MOV, WebM, MKV, AVI, GIF and a few more files of one video."""
_HDR = ("smpte2084", "arib-std-b67")
"""Transfer functions of HDR, as ffmpeg calls PQ and HLG. Their levels are no levels of a screen."""
_SHOWN = re.compile(
    r"n: *\d+ pts: *(?P<pts>-?\d+|NOPTS) pts_time:.*? duration: *(?P<duration>-?\d+|NOPTS) "
    r".*?fmt:(?P<format>\w+)"
    r".*? i:(?P<interlaced>\w)"
)
"""A line of ffmpeg's filter `showinfo`, which it writes for each frame."""
_FRAME_BY_FRAME = ["-map", "0:V:0", "-fps_mode", "passthrough", "-enc_time_base", "1:1"]
"""Arguments of ffmpeg for the first picture that is no cover, each frame once."""
_NUMBERED = "setpts=N/TB"
"""Filter that makes the time of a frame its number, so that none is too near to the one before."""


@dataclasses.dataclass(frozen=True)
class Clip:
    """A video as its file holds it.

    Attributes:
        frames: float32 `[F, 3, H, W]` in [0, 1], as they are shown: upright, with square pixels.
        fps: frames per second: their number over the duration of the picture.
    """

    frames: Tensor
    fps: float


@dataclasses.dataclass(kw_only=True)
class _Told:
    """What ffmpeg says of a file, known after its last frame.

    Attributes:
        codec: its name, such as h264.
        format: pixel format of the frames, such as yuv420p.
        fps: frames per second.
    """

    codec: str = ""
    format: str = ""
    fps: float = 0.0


def read_clip(path: Path) -> Clip:
    """Read all frames of a video, and their rate.

    Raises:
        UserError: the file cannot be read, is cut off or damaged, has transparent pixels, or is
            HDR.
    """
    told = _Told()
    frames = np.stack([*_frames(path, told)])
    return Clip(torch.from_numpy(frames).permute(0, 3, 1, 2) / 255, told.fps)


def read_video(path: Path) -> Tensor:
    """Return the frames of `read_clip`, with its errors."""
    return read_clip(path).frames


def for_browser(path: Path) -> tuple[str, bytes]:
    """Return MIME type and content of a video that every browser plays; re-encode the file only if
    it must.

    Raises:
        UserError: as `read_clip`.
    """
    told = _Told()
    for _ in _frames(path, told):  # also a check
        pass
    suffix = path.suffix.lower()
    if suffix in (".mp4", ".webm") and told.codec in _PLAYED and told.format == "yuv420p":
        return f"video/{suffix[1:]}", path.read_bytes()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "video.mp4"
        save_mp4(file, read_video(path), told.fps)
        return "video/mp4", file.read_bytes()


def _frames(path: Path, told: _Told) -> Iterator[np.ndarray]:
    """Yield frames, uint8 `[H, W, 3]`; then fill `told`.

    Raises:
        UserError: as `read_clip`.
    """
    if not path.is_file():  # ffmpeg would wait for a pipe
        raise _unreadable(path, "no such file")
    if _is_gif_without_end(path):
        raise _unreadable(path, "it ends before its last frame")
    try:
        program = imageio_ffmpeg.get_ffmpeg_exe()
    except RuntimeError as error:
        raise _unreadable(path, str(error)) from error
    # Pixels are made square. PAM is each frame with a header of its size; it keeps transparency,
    # which is refused.
    pictures = ["-vf", f"{_NUMBERED},scale=w=round(iw*sar):h=ih,setsar=1"]
    coded = ["-f", "image2pipe", "-c:v", "pam", "-pix_fmt", "rgba", "-"]
    command = [program, *_says("error"), *_source(path), *_FRAME_BY_FRAME, *pictures, *coded]
    count = 0
    with (
        tempfile.TemporaryFile() as said,
        # Own process group: Ctrl-C must not reach ffmpeg.
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, process_group=0) as process,
    ):
        assert process.stdout is not None
        try:
            while (frame := _next_frame(process.stdout)) is not None:
                if frame[..., 3].min() < 255:
                    raise UserError(
                        f"{path}: frame {count} has transparent pixels; expected an opaque video"
                    )
                yield frame[..., :3]
                count += 1
            process.wait()
        finally:
            process.kill()
        said.seek(0)
        lines = said.read().decode(errors="replace").splitlines()
    if problems := [line for line in lines if re.search(r"\[(?:error|fatal)\]", line)]:
        why = re.sub(r"\[[^\[\]]* @ 0x[0-9a-f]+\] |\[(?:error|fatal)\] ", "", problems[0])
        raise _unreadable(
            path, f"it ends after {count} frames, or is damaged: {why}" if count else why
        )
    if count == 0 or process.returncode:
        raise _unreadable(
            path, f"ffmpeg ended with status {process.returncode} after {count} frames"
        )
    _read_times(path, told)


def _says(level: str) -> list[str]:
    """Return arguments of ffmpeg for a log of a level and above; each line names its level."""
    return ["-hide_banner", "-nostdin", "-nostats", "-v", f"level+{level}"]


def _source(path: Path) -> list[str]:
    """Return arguments of ffmpeg that open a video file, and never what a playlist or a script
    names."""
    return ["-protocol_whitelist", "file", "-format_whitelist", _FORMATS, "-i", for_ffmpeg(path)]


def _is_gif_without_end(path: Path) -> bool:
    """Whether a file is a GIF that is cut off.

    It does not say how long it is, and ffmpeg takes any end for its own.
    """
    with path.open("rb") as file:
        begins = file.read(4)
        file.seek(-min(path.stat().st_size, 64), os.SEEK_END)
        return begins == b"GIF8" and not file.read().rstrip(b"\0\r\n ").endswith(b";")


def _next_frame(stream: IO[bytes]) -> np.ndarray | None:
    """Read a frame in PAM, uint8 `[H, W, 4]`; None at the end of the stream, or if it is cut off
    there."""
    header: dict[bytes, bytes] = {}
    while (line := stream.readline().strip()) != b"ENDHDR":
        if not line:
            return None
        name, _, value = line.partition(b" ")
        header[name] = value
    height, width = int(header[b"HEIGHT"]), int(header[b"WIDTH"])
    content = stream.read(height * width * 4)
    if len(content) < height * width * 4:
        return None
    return np.frombuffer(content, dtype=np.uint8).reshape(height, width, 4)


def _read_times(path: Path, told: _Told) -> None:
    """Fill `told` from what ffmpeg's `showinfo` tells of each frame of a file without errors.

    It reads the file again: `showinfo` prints a line in parts, and an error of another thread that
    falls between two of them loses its level, so that nobody sees that it is an error.

    Raises:
        UserError: the picture ends before the file should, or is HDR.
    """
    shown_only = ["-vf", f"showinfo=checksum=0,{_NUMBERED}", "-f", "null", "-"]
    program = imageio_ffmpeg.get_ffmpeg_exe()
    command = [program, *_says("info"), *_source(path), *_FRAME_BY_FRAME, *shown_only]
    done = subprocess.run(command, capture_output=True, process_group=0)
    text = done.stderr.decode(errors="replace")
    matches = [_SHOWN.search(line) for line in text.splitlines()]
    shown = [match for match in matches if match is not None]
    if done.returncode or not shown:
        why = f"ffmpeg told of {len(shown)} frames and ended with status {done.returncode}"
        raise _unreadable(path, why)
    mapped = re.search(r"Stream #0:\d+ -> #0:0 \((\w+)", text)
    told.codec = mapped[1] if mapped else ""
    told.format = shown[0]["format"]
    hdr = [name for name in _HDR if re.search(rf"\b{name}\b", text)]
    if hdr:
        raise UserError(
            f"{path}: is HDR ({hdr[0]}); expected standard range, such as bt709: tone map it first"
        )
    if any(found["interlaced"] != "P" for found in shown):
        log.info(
            f"note: {path} is interlaced: each frame holds lines of two moments, which rewards see "
            "as combs"
        )
    told.fps, end = _rate(text, shown)
    stated = re.search(r"Duration: (\d+):(\d+):([\d.]+)", text)
    if stated is None:
        return
    duration = 3600 * int(stated[1]) + 60 * int(stated[2]) + float(stated[3])
    frames = 2 / told.fps
    # A file whose picture and sound both end early is cut off, perhaps between two frames. The
    # picture alone may end early: sound may be longer.
    if end < 0.9 * duration - frames and _sound_ends(path) < 0.9 * duration - frames:
        count = f"{len(shown)} frames, {end:.2f} s of {duration:.2f} s"
        raise _unreadable(path, f"it ends after {count}")


def _rate(text: str, shown: list[re.Match[str]]) -> tuple[float, float]:
    """Return the frames per second of the picture, and its duration in seconds.

    The rate is the number of frames over their duration. Where times are rounded to a thousandth of
    a second, as in WebM and MKV, it is the rate that the file states if that gives these times.
    """
    configured = re.search(r"config in time_base: (\d+)/(\d+), frame_rate: (\d+)/(\d+)", text)
    tick, stated = Fraction(1, 1000), Fraction(0)
    if configured:
        tick = Fraction(int(configured[1]), int(configured[2]))
        stated = Fraction(int(configured[3]), int(configured[4]) or 1)
    count = len(shown)
    if any(found["pts"] == "NOPTS" for found in shown):
        rate = stated or Fraction(24)
        return float(rate), float(count / rate)
    times = [int(found["pts"]) for found in shown]
    span = times[-1] - times[0]
    last = shown[-1]["duration"]
    # The last frame lasts as long as it says, or as long as the others.
    own = Fraction(0 if last == "NOPTS" else max(0, int(last)))
    duration = tick * (span + (own or Fraction(span, max(1, count - 1))))
    if stated:
        is_rounded = tick == Fraction(1, 1000)
        is_constant = all(
            abs(time - times[0] - i / stated / tick) <= 1 for i, time in enumerate(times)
        )
        if (is_rounded and is_constant) or not duration:
            return float(stated), float(count / stated)
    return float(count / duration) if duration else 24.0, float(duration)


def _sound_ends(path: Path) -> float:
    """Return the end of a file's sound in seconds; 0 if it has none."""
    command = [
        imageio_ffmpeg.get_ffmpeg_exe(),
        "-hide_banner",
        "-nostdin",
        "-stats",
        *_source(path),
    ]
    command += ["-map", "0:a", "-c", "copy", "-f", "null", "-"]
    done = subprocess.run(command, capture_output=True, process_group=0)
    said = done.stderr.decode(errors="replace")
    end = 0.0
    for hours, minutes, seconds in re.findall(r"time=(\d+):(\d+):([\d.]+)", said):
        end = max(end, 3600 * int(hours) + 60 * int(minutes) + float(seconds))
    return end


def _unreadable(path: Path, why: str) -> UserError:
    return UserError(f"{path}: cannot be read as a video: {printable(why)}")
