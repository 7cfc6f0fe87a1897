"""A prompt as encoders read it, and its key: the name that it has everywhere else."""

from __future__ import annotations

import dataclasses
import re
from typing import NamedTuple

_WRITTEN = re.compile(r"(?:(.*) )?\[image: (.+)\]", re.DOTALL)


class Caption(NamedTuple):
    """What an encoder reads of a prompt.

    Attributes:
        text: the prompt.
        image: absolute path of the image that the video begins from; empty if there is none.
    """

    text: str
    image: str = ""


@dataclasses.dataclass(frozen=True, order=True)
class PromptKey:
    """The key of a prompt.

    `str` writes it as files, messages and the names of videos hold it, and `parse` reads that back.

    Attributes:
        text: the prompt.
        image: path of the image that the video begins from, as the prompt file names it; empty if
            there is none.
    """

    text: str
    image: str = ""

    def __str__(self) -> str:
        if not self.image:
            return self.text
        return f"{self.text} [image: {self.image}]".lstrip()

    @classmethod
    def parse(cls, written: str) -> PromptKey:
        """Return the key that `str` has written."""
        found = _WRITTEN.fullmatch(written)
        if found is None:
            return cls(written)
        return cls(found[1] or "", found[2])
