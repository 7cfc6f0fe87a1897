"""A prompt as encoders read it, and its key: the name that it has everywhere else."""

from __future__ import annotations

import re
from typing import NamedTuple

_KEY = re.compile(r"(?:(.*) )?\[image: (.+)\]", re.DOTALL)


class Caption(NamedTuple):
    """What an encoder reads of a prompt.

    Attributes:
        text: the prompt.
        image: absolute path of the image that the video begins from; empty if there is none.
    """

    text: str
    image: str = ""


def prompt_key(text: str, image: str) -> str:
    """Return the key of a prompt: its text, and its image as the prompt file names it.

    Without an image, the text.
    """
    return f"{text} [image: {image}]".lstrip() if image else text


def split_key(key: str) -> tuple[str, str]:
    """Return the text and the image of a key; the image is empty if it has none."""
    found = _KEY.fullmatch(key)
    return (found[1] or "", found[2]) if found else (key, "")
