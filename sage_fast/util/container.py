"""Memory and CPUs that this process may use: those of its container or job, not those of the host.

Docker, Kubernetes and Slurm limit them by control groups (cgroups), of version 1 or 2. PyTorch and
psutil see the host.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import psutil

ROOT = Path("/")
"""Where `proc` and `sys` are."""

NO_LIMIT = 2**60
"""Version 1 writes a number of bytes above this one where version 2 has `max`."""


def available_memory() -> int:
    """Return the bytes of host memory that can still be allocated, page cache that can be evicted
    included."""
    free = [psutil.virtual_memory().available]
    for folder in _groups("memory"):
        limit = _number(folder, "memory.max", "memory.limit_in_bytes")
        used = _number(folder, "memory.current", "memory.usage_in_bytes")
        if limit is not None and used is not None and limit < NO_LIMIT:
            free.append(max(0, limit - max(0, used - _page_cache(folder / "memory.stat"))))
    return min(free)


def available_cpus() -> int:
    """Return the number of CPUs that this process may keep busy, at least 1: its affinity (cpuset),
    and its quota.

    A thread more than the quota would make all of them wait for the rest of each period.
    """
    cpus = [float(len(os.sched_getaffinity(0)))]
    for folder in _groups("cpu"):
        quota, period = _quota(folder)
        if quota > 0 and period > 0:
            cpus.append(quota / period)
    return max(1, int(min(cpus)))


def _groups(controller: str) -> Iterator[Path]:
    """Yield the folders of the control groups that this process is in, up to the root.

    A limit of any of them holds. Within a container the process may be named by its path on the
    host, which does not exist here: then the root is the container's own group.
    """
    text = _text(ROOT / "proc" / "self" / "cgroup")
    mounts = ROOT / "sys" / "fs" / "cgroup"
    for line in text.splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers == "":  # version 2, alone or beside version 1
            roots = [mounts, mounts / "unified"]
        elif controller in controllers.split(","):
            roots = [mounts / controllers, mounts / controller]
        else:
            continue
        inside = PurePosixPath(path.removeprefix("/"))
        if ".." in inside.parts:  # the group lies outside of what this container sees
            inside = PurePosixPath()
        for root in roots:
            for group in (inside, *inside.parents):
                yield root / group


def _quota(folder: Path) -> tuple[float, float]:
    """Return the CPU time of a period and the period, in microseconds; 0 without a quota."""
    words = _text(folder / "cpu.max").split()
    if len(words) != 2:
        words = [_text(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
    quota, period = ((float(word) if word.isdecimal() else 0.0) for word in words)
    return quota, period


def _page_cache(stat: Path) -> int:
    """Return the bytes of files in memory, which the kernel evicts before a group reaches its
    limit."""
    fields = dict(line.split(maxsplit=1) for line in _text(stat).splitlines() if " " in line)
    names = ("inactive_file", "active_file")
    # v1: `total_`, with subgroups
    counts = [fields.get(f"total_{name}", fields.get(name, "0")) for name in names]
    return sum(int(count) for count in counts if count.isdecimal())


def _number(folder: Path, *names: str) -> int | None:
    """Return the number in the file of version 2, or else of version 1; None where neither holds
    one."""
    texts = [_text(folder / name).strip() for name in names]
    return next((int(text) for text in texts if text.isdecimal()), None)


def _text(file: Path) -> str:
    """Return the content of a file of the kernel; empty where it is missing or may not be read."""
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
