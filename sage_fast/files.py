"""Permissions of what we write, for the libraries that do not ask the umask."""

from __future__ import annotations

import os
from pathlib import Path


def share(path: Path) -> None:
    """Give a file, or all files below a folder, the permissions of any new file: 0644 under the usual umask.

    safetensors writes through a temporary file of mode 0600, which colleagues cannot read.
    """
    umask = os.umask(0)
    os.umask(umask)
    for file in [path] if path.is_file() else path.rglob("*"):
        if file.is_file():
            file.chmod(0o666 & ~umask)
