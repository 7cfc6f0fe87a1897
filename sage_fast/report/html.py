"""Self-contained HTML pages: templates, number formatting and embedded videos."""

from __future__ import annotations

import base64
import io
import math
from pathlib import Path
from typing import Any

import jinja2
from PIL import Image

from sage_fast.eval.scores import format_number
from sage_fast.report.playback import for_browser
from sage_fast.util.images import read_image
from sage_fast.util.videos import MIN_SIDE

SHOWN_SIDE = 480
"""Most pixels on a side of an image."""


def render(template: str | Path, **values: Any) -> str:
    """Render a template: a name in this folder, or any file, which may extend those. Values are escaped."""
    here = Path(__file__).parent
    file = here / template
    loader = jinja2.FileSystemLoader([file.parent, here])
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters["number"] = shown_number
    return environment.get_template(file.name).render(**values)


def shown_number(value: float | None, digits: int = 3, sign: bool = False) -> str:
    """Format a number for a table cell; a dash for None and non-finite values."""
    if value is None or not math.isfinite(value):
        return "\N{EN DASH}"
    return format_number(value, digits, sign=sign).replace("-", "\N{MINUS SIGN}")


def data_address(file: Path) -> str:
    """Return a video as a `data:` URL.

    Raises:
        UserError: the video cannot be read.
    """
    kind, content = for_browser(file)
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def image_address(path: str) -> str:
    """Return an image as a `data:` URL, reduced or enlarged to about the size that videos are shown in.

    Raises:
        UserError: the image cannot be read.
    """
    image, content = read_image(path), io.BytesIO()
    factor = max(1, -(-MIN_SIDE // min(image.size)))
    image = image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)
    image.thumbnail((SHOWN_SIDE, SHOWN_SIDE))
    image.save(content, "JPEG", quality=90)
    return f"data:image/jpeg;base64,{base64.b64encode(content.getvalue()).decode()}"
