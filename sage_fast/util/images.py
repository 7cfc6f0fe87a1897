"""Check and read the images that videos begin from."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

from PIL import Image, ImageOps

from sage_fast.util.errors import UserError, first_line

SMALLEST = 16
"""Least pixels on a side."""


def check_image(path: str) -> None:
    """Check an image by its header; errors as `read_image`, except that the end of the file may be missing."""
    with _opened(path):
        pass


def check_pixels(path: str) -> None:
    """Check that an image is whole, a JPEG at reduced size; errors as `read_image`."""
    with _opened(path) as image:
        image.draft("RGB", (SMALLEST, SMALLEST))
        image.load()


def read_image(path: str) -> Image.Image:
    """Read an image upright, in RGB.

    Raises:
        UserError: it is missing, no image, cut off, too small or too large, or has more than 8 bits a channel.
    """
    with _opened(path) as image:
        return ImageOps.exif_transpose(image).convert("RGB")


@contextlib.contextmanager
def _opened(path: str) -> Iterator[Image.Image]:
    sizes = f"expected from {SMALLEST} pixels on a side to {Image.MAX_IMAGE_PIXELS:,} pixels"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            opened = Image.open(path)
        with opened as image:
            if min(image.size) < SMALLEST:
                raise UserError(f"image {path!r} has {image.width} x {image.height} pixels; {sizes}")
            if image.mode.startswith(("I", "F")):
                raise UserError(f"image {path!r} has mode {image.mode}; expected 8 bits a channel, such as RGB")
            yield image
    except UserError:
        raise
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        raise UserError(f"image {path!r} is too large; {sizes}") from error
    except FileNotFoundError as error:
        raise UserError(f"image {path!r}: no such file") from error
    except Image.UnidentifiedImageError as error:
        raise UserError(f"image {path!r} is no image that Pillow reads; expected PNG, JPEG or WebP") from error
    except (OSError, SyntaxError, ValueError) as error:  # Pillow raises all three for broken files
        raise UserError(f"image {path!r} cannot be read: {first_line(error)}") from error
