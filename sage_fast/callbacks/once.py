"""Notes that are said once."""

from __future__ import annotations

import logging

from sage_fast.util.console import wrapped

log = logging.getLogger(__name__)


class NotesOnce:
    """Says once that something which is only shown is lacking.

    Later failures of its kind are for the log file alone.
    """

    def __init__(self) -> None:
        self._said: set[str] = set()

    def say(self, lacking: str, why: str) -> None:
        level = logging.DEBUG if lacking in self._said else logging.WARNING
        self._said.add(lacking)
        log.log(level, wrapped(f"note: {lacking} {why}"))
