"""Prompts that begin from an image: their keys, and the image files."""

from __future__ import annotations

import re
import warnings

from PIL import Image, ImageOps

from sage_fast.util.errors import UserError, first_line

SMALLEST = 16
"""Least pixels on a side."""
_KEY = re.compile(r"(?:(.*) )?\[image: (.+)\]", re.DOTALL)


def prompt_key(text: str, image: str) -> str:
    """Return the key of a prompt: its text, and its image as the prompt file names it. Without an image, the text."""
    return f"{text} [image: {image}]".lstrip() if image else text


def split_key(key: str) -> tuple[str, str]:
    """Return the text and the image of a key; the image is empty if it has none."""
    found = _KEY.fullmatch(key)
    return (found[1] or "", found[2]) if found else (key, "")


def read_image(path: str) -> Image.Image:
    """Read an image upright, in RGB.

    Raises:
        UserError: it is missing, no image, cut off, too small or too large, or has more than 8 bits a channel.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path) as image:
                if min(image.size) < SMALLEST:
                    raise UserError(f"image {path!r} has {image.width} x {image.height} pixels; {_SIZES}")
                if image.mode.startswith(("I", "F")):
                    raise UserError(f"image {path!r} has mode {image.mode}; expected 8 bits a channel, such as RGB")
                return ImageOps.exif_transpose(image).convert("RGB")
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        raise UserError(f"image {path!r} is too large; {_SIZES}") from error
    except FileNotFoundError as error:
        raise UserError(f"image {path!r}: no such file") from error
    except (OSError, SyntaxError, ValueError) as error:  # PIL raises all three for broken files
        raise UserError(f"image {path!r} cannot be read: {first_line(error)}") from error


_SIZES = f"expected from {SMALLEST} pixels on a side to {Image.MAX_IMAGE_PIXELS:,} pixels"
