"""Read videos back: their frames, and a form that every browser plays."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sage_fast.util.errors import UserError
from sage_fast.util.videos import for_ffmpeg, save_mp4

_PLAYED = ("h264", "vp8", "vp9", "av1")
"""Codecs that browsers play in 4:2:0."""


def _frames(path: Path, about: dict[str, Any]) -> Iterator[np.ndarray]:
    """Yield frames, uint8 `[H, W, 3]`; put what ffmpeg says of the file into `about`.

    Raises:
        UserError: the file cannot be read, or ends earlier than its header says.
    """
    try:
        import imageio_ffmpeg

        reader = imageio_ffmpeg.read_frames(for_ffmpeg(path))
        about |= next(reader)
        width, height = about["size"]
        count = 0
        for frame in reader:
            yield np.frombuffer(frame, dtype=np.uint8).reshape(height, width, 3)
            count += 1
    # IndexError, AttributeError: imageio-ffmpeg on a file without video.
    except (OSError, RuntimeError, ValueError, IndexError, AttributeError) as error:
        raise UserError(f"{path}: cannot be read as a video: {str(error).strip().splitlines()[-1]}") from error
    expected = about["duration"] * about["fps"]
    if count == 0 or count < 0.8 * expected - 1:
        raise UserError(f"{path}: cannot be read as a video: it ends after {count} of about {expected:.0f} frames")


def read_video(path: Path) -> Tensor:
    """Read all frames, float32 `[F, 3, H, W]` in [0, 1].

    Raises:
        UserError: the file cannot be read, or is cut off.
    """
    return torch.from_numpy(np.stack([*_frames(path, {})])).permute(0, 3, 1, 2) / 255


def for_browser(path: Path) -> tuple[str, bytes]:
    """Return MIME type and content of a video that every browser plays; re-encode the file only if it must.

    Raises:
        UserError: the file cannot be read, or is cut off.
    """
    about: dict[str, Any] = {}
    for _ in _frames(path, about):  # also a check
        pass
    suffix = path.suffix.lower()
    if suffix in (".mp4", ".webm") and about["codec"] in _PLAYED and about["pix_fmt"].split("(")[0] == "yuv420p":
        return f"video/{suffix[1:]}", path.read_bytes()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "video.mp4"
        save_mp4(file, read_video(path), about["fps"])
        return "video/mp4", file.read_bytes()
