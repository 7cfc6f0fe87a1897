"""Check and read the images that videos begin from."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator

from PIL import Image, ImageOps

from sage_fast.util.errors import UserError, first_line
from sage_fast.util.files import why_no_file

FORMATS = ("PNG", "JPEG", "WEBP")
"""Formats that are read. For others, such as EPS, Pillow may start another program."""
SMALLEST = 16
"""Least pixels on a side."""


def check_image(path: str) -> None:
    """Check an image by its header; errors as `read_image`, except that the end of the file may be
    missing."""
    with _opened(path):
        pass


def read_image(path: str, *, reduced: bool = False) -> Image.Image:
    """Read an image upright, in RGB.

    Args:
        reduced: read a JPEG at a fraction of its size.

    Raises:
        UserError: it is missing, no image, cut off, too small or too large, or has more than 8 bits
            a channel.
    """
    with _opened(path) as image:
        if reduced:
            image.draft("RGB", (SMALLEST, SMALLEST))
        image.load()
        # it is dropped anyway, for some palettes with a warning
        image.info.pop("transparency", None)
        return ImageOps.exif_transpose(image).convert("RGB")


@contextlib.contextmanager
def _opened(path: str) -> Iterator[Image.Image]:
    sizes = f"expected from {SMALLEST} pixels on a side to {Image.MAX_IMAGE_PIXELS:,} pixels"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            # such as a pipe, which would block
            if os.path.exists(path) and not os.path.isfile(path):
                raise UserError(
                    f"image {path!r} is {why_no_file(path)}; expected {', '.join(FORMATS)}"
                )
            opened = Image.open(path, formats=FORMATS)
        with opened as image:
            if min(image.size) < SMALLEST:
                raise UserError(
                    f"image {path!r} has {image.width} x {image.height} pixels; {sizes}"
                )
            if image.mode.startswith(("I", "F")):
                raise UserError(
                    f"image {path!r} has mode {image.mode}; expected 8 bits a channel, such as RGB"
                )
            yield image
    except UserError:
        raise
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        raise UserError(f"image {path!r} is too large; {sizes}") from error
    except FileNotFoundError as error:
        raise UserError(f"image {path!r}: no such file") from error
    except Image.UnidentifiedImageError as error:
        raise UserError(
            f"image {path!r} has another format; expected {', '.join(FORMATS)}"
        ) from error
    except Exception as error:  # Pillow raises many kinds for broken files, struct.error among them
        raise UserError(f"image {path!r} cannot be read: {first_line(error)}") from error
