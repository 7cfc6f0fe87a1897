"""Memory and CPUs of a container or job, in made-up trees of control groups of both versions."""

import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sage_fast.util import container, ranks
from sage_fast.util.environment import free_bytes

GIB = 2**30
V1_NO_LIMIT = 9223372036854771712


def in_container(
    monkeypatch: pytest.MonkeyPatch,
    root: Path,
    groups: str,
    written: Mapping[str, object],
    host_gib: int = 64,
) -> None:
    """Pretend to be a process of these groups on a host with 64 GiB free and 32 CPUs."""
    for name, content in {"proc/self/cgroup": groups, **written}.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{content}\n")
    monkeypatch.setattr(container, "ROOT", root)
    monkeypatch.setattr(
        container.psutil, "virtual_memory", lambda: SimpleNamespace(available=host_gib * GIB)
    )
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(32)))


V2 = "sys/fs/cgroup"
V1 = "sys/fs/cgroup/memory"
STAT = f"anon {GIB}\ninactive_file {GIB}\nactive_file {2 * GIB}\nslab 5"
V1_STAT = f"inactive_file 5\nactive_file 6\ntotal_inactive_file {GIB}\ntotal_active_file {2 * GIB}"


@pytest.mark.parametrize(
    ("groups", "written", "expected"),
    [
        pytest.param("0::/", {}, 64, id="none"),
        pytest.param(
            "0::/", {f"{V2}/memory.max": 8 * GIB, f"{V2}/memory.current": 5 * GIB,
                     f"{V2}/memory.stat": STAT}, 6,
            id="v2, with page cache",
        ),
        pytest.param("0::/", {f"{V2}/memory.max": "max", f"{V2}/memory.current": 5 * GIB}, 64,
                     id="v2, no limit"),
        pytest.param(
            "0::/job/step",
            {f"{V2}/job/memory.max": 4 * GIB, f"{V2}/job/memory.current": 3 * GIB,
             f"{V2}/job/step/memory.max": "max"},
            1, id="v2, of a parent",
        ),
        pytest.param("0::/", {f"{V2}/memory.max": 4 * GIB, f"{V2}/memory.current": 0}, 4,
                     id="v2, unused"),
        pytest.param("0::/", {f"{V2}/memory.max": 4 * GIB, f"{V2}/memory.current": 5 * GIB}, 0,
                     id="v2, above it"),
        pytest.param("0::/", {f"{V2}/memory.max": 99 * GIB, f"{V2}/memory.current": 0}, 64,
                     id="v2, above the host"),
        pytest.param(
            "0::/../../pod", {f"{V2}/memory.max": 4 * GIB, f"{V2}/memory.current": GIB}, 3,
            id="v2, outside"
        ),
        pytest.param(
            "9:name=systemd:/\n4:memory:/slurm/job_7",
            {
                f"{V1}/slurm/job_7/memory.limit_in_bytes": 8 * GIB,
                f"{V1}/slurm/job_7/memory.usage_in_bytes": 5 * GIB,
                f"{V1}/slurm/job_7/memory.stat": V1_STAT,
            },
            6, id="v1",
        ),
        pytest.param(
            "4:memory:/docker/0a1b",
            {f"{V1}/memory.limit_in_bytes": 2 * GIB, f"{V1}/memory.usage_in_bytes": GIB}, 1,
            id="v1, in a container that sees its own group as the root",
        ),
        pytest.param(
            "4:memory:/", {f"{V1}/memory.limit_in_bytes": V1_NO_LIMIT,
                           f"{V1}/memory.usage_in_bytes": GIB}, 64,
            id="v1, no limit",
        ),
        pytest.param(
            "4:memory:/a\n0::/",
            {f"{V1}/a/memory.limit_in_bytes": 2 * GIB, f"{V1}/a/memory.usage_in_bytes": GIB,
             "sys/fs/cgroup/unified/cgroup.procs": 1},
            1, id="both versions",
        ),
        pytest.param("no such line", {}, 64, id="a file of another kind"),
        pytest.param("0::/", {f"{V2}/memory.max": "much", f"{V2}/memory.current": 1}, 64,
                     id="not a number"),
    ],
)  # fmt: skip
def test_memory(
    groups: str,
    written: dict[str, object],
    expected: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    in_container(monkeypatch, tmp_path, groups, written)
    assert container.available_memory() == expected * GIB
    assert free_bytes(torch.device("cpu")) == expected * GIB


@pytest.mark.parametrize(
    ("groups", "written", "expected"),
    [
        pytest.param("0::/", {}, 32, id="none"),
        pytest.param("0::/", {f"{V2}/cpu.max": "400000 100000"}, 4, id="v2"),
        pytest.param("0::/", {f"{V2}/cpu.max": "350000 100000"}, 3, id="v2, not whole"),
        pytest.param("0::/", {f"{V2}/cpu.max": "50000 100000"}, 1, id="v2, below one"),
        pytest.param("0::/", {f"{V2}/cpu.max": "max 100000"}, 32, id="v2, no quota"),
        pytest.param(
            "0::/a/b", {f"{V2}/a/cpu.max": "200000 100000", f"{V2}/a/b/cpu.max": "max 100000"}, 2,
            id="v2, of a parent"
        ),
        pytest.param("0::/", {f"{V2}/cpu.max": "6400000 100000"}, 32, id="v2, more than the host"),
        pytest.param(
            "2:cpu,cpuacct:/docker/0a1b",
            {f"{V2}/cpu,cpuacct/cpu.cfs_quota_us": 200000,
             f"{V2}/cpu,cpuacct/cpu.cfs_period_us": 100000}, 2, id="v1",
        ),
        pytest.param(
            "1:cpu:/", {f"{V2}/cpu/cpu.cfs_quota_us": -1, f"{V2}/cpu/cpu.cfs_period_us": 100000},
            32,
            id="v1, no quota",
        ),
        pytest.param(
            "1:cpuset:/a", {f"{V2}/cpuset/a/cpu.cfs_quota_us": 100000,
                            f"{V2}/cpuset/a/cpu.cfs_period_us": 100000}, 32,
            id="another controller",
        ),
    ],
)  # fmt: skip
def test_cpus(
    groups: str,
    written: dict[str, object],
    expected: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    in_container(monkeypatch, tmp_path, groups, written)
    assert container.available_cpus() == expected


def test_cpus_are_those_of_the_affinity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which a cpuset and `taskset` set."""
    in_container(monkeypatch, tmp_path, "0::/", {f"{V2}/cpu.max": "400000 100000"})
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {5, 7})
    assert container.available_cpus() == 2


@pytest.mark.parametrize(
    ("variable", "expected"), [(None, 3), ("OMP_NUM_THREADS", 16), ("MKL_NUM_THREADS", 16)]
)
def test_threads_are_those_of_the_container_unless_someone_says_how_many(
    variable: str | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [16]
    monkeypatch.setattr(ranks, "available_cpus", lambda: 3)
    monkeypatch.setattr(torch, "get_num_threads", lambda: asked[-1])
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    if variable is not None:
        monkeypatch.setenv(variable, "16")
    ranks.local_device()
    assert asked[-1] == expected
