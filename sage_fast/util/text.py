"""Words for people: a number with its noun, and letters that a screen, a locale or a file name
cannot hold, which are shown as escapes or left out, never an error."""

from __future__ import annotations

import locale
import os
import re
import sys
import unicodedata


def counted(number: int, noun: str) -> str:
    """Return a number with what it counts: `1 iteration`, `2 iterations`, `1,000 iterations`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def escape_on_screen() -> None:
    """Let stdout and stderr show a letter that their encoding lacks as an escape, such as
    `\\u5706`."""
    for stream in (sys.stdout, sys.stderr):
        # a notebook's streams have none, and hold any letter
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


def restart_in_utf8() -> None:
    """Start this process again in Python's UTF-8 mode if its locale has another encoding; else
    return.

    Prompts, settings and the names of files are UTF-8 whatever the locale says, and Python cannot
    change the encoding of file names and arguments once it runs. The screen keeps the encoding of
    the locale. The process keeps its id.
    """
    is_utf8 = sys.getfilesystemencoding().lower() in ("utf-8", "utf8")
    was_asked = (
        sys.flags.ignore_environment
        or "utf8" in sys._xoptions
        or os.environ.get("PYTHONUTF8") == "1"
    )
    # not a program read from stdin
    has_program = bool(sys.executable) and sys.argv[0] not in ("", "-")
    if is_utf8 or was_asked or not has_program:
        return
    environment = {"PYTHONUTF8": "1"}
    if not os.environ.get("PYTHONIOENCODING"):
        environment["PYTHONIOENCODING"] = f"{locale.getencoding()}:backslashreplace"
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | environment)


def in_file_name(text: str) -> str:
    """Return the letters and digits of a text, in lower case and joined by hyphens, for a part of a
    file name.

    At most 60 letters and 120 bytes. Where the locale is not UTF-8, only ASCII: letters lose their
    accents, and those of other scripts are left out.
    """
    if locale.getencoding().lower() not in ("utf-8", "utf8"):
        text = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    words = re.sub(r"[\W_]+", "-", text.lower()).strip("-")
    return words[:60].encode(errors="ignore")[:120].decode(errors="ignore")
