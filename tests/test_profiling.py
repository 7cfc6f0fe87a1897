"""Ranges for profilers, and the command that profiles one iteration."""

import contextlib
import gzip
import io
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nvtx
import pytest
import torch
from torch import Tensor
from torch.autograd import DeviceType

from sage_fast.cli import main
from sage_fast.config.loader import load
from sage_fast.models.find import find_spec
from sage_fast.tools.phases import (
    KERNELS,
    _window,
    format_profile,
    kernel_table,
    matmul_ceiling,
    phase_table,
)
from sage_fast.tools.plan import plan
from sage_fast.util import profiling
from sage_fast.util.meters import Stopwatch
from sage_fast.util.profiling import PHASES, annotate, annotate_backward, ranges
from tests.ranks import command_on_ranks
from tests.test_cli import PAPER, SMALL
from tests.tiny import settings, tiny_trainer


class Recording:
    """Stands in for NVTX: the stack of names at every push."""

    def __init__(self) -> None:
        self.stacks: dict[int, list[str]] = {}
        self.pushed: list[tuple[str, ...]] = []

    @contextlib.contextmanager
    def annotate(self, name: str, *, domain: str) -> Iterator[None]:
        assert domain == "sage_fast"
        stack = self.stacks.setdefault(threading.get_ident(), [])
        stack.append(name)
        self.pushed.append(tuple(stack))
        try:
            yield
        finally:
            stack.pop()


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recording:
    recording = Recording()
    monkeypatch.setattr(nvtx, "annotate", recording.annotate)
    return recording


def without_blocks(paths: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """The paths that do not lead into the blocks of the transformer."""
    return [path for path in paths if not any(name.startswith("block ") for name in path)]


def test_ranges_of_an_iteration(recorded: Recording) -> None:
    config = settings(kl__strategy="fixed", sampling__batch_size=4)  # 6 samples: two batches
    trainer = tiny_trainer(config)
    trainer.iteration(0)
    with ranges("nvtx"):
        trainer.iteration(1)
    steps = [
        [
            ("rollout", f"step {k}"),
            ("rollout", f"step {k}", "transformer"),
            ("rollout", f"step {k}", "transition"),
        ]
        for k in range(config.sampling.steps)
    ]
    rollout = [("rollout",), *[path for step in steps for path in step]]
    scored = [("decode",), ("reward",)]
    micro = [("train", "forward"), ("train", "backward")]
    assert without_blocks(recorded.pushed) == [
        ("rollout",),  # conditioning
        *[*rollout, *scored, *rollout, *scored],
        # 30 transitions, 8 at a time
        *[("anchor",), ("train",), *micro * 4, ("train", "optimizer")],
    ]
    assert not any(recorded.stacks.values())


def test_off_means_nothing(recorded: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = tiny_trainer(settings())
    monkeypatch.setattr(torch.profiler, "record_function", None)
    trainer.iteration(0)
    assert recorded.pushed == []
    # one shared null context, and no name is made
    assert annotate("step", 3) is annotate("rollout")
    y = 2 * torch.ones(2, requires_grad=True)
    annotate_backward([y], "block", 3)
    assert y._backward_hooks is None


def test_ranges_close_on_an_error_and_stay_on_their_thread(recorded: Recording) -> None:
    def other() -> None:
        with annotate("elsewhere"):
            pass

    def failing_reward() -> None:
        with Stopwatch(torch.device("cpu"))("reward"):
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
            raise OSError("went away")

    with ranges("nvtx"), pytest.raises(OSError, match="away"):
        failing_reward()
    assert recorded.pushed == [("reward",), ("elsewhere",)]
    assert not any(recorded.stacks.values())


def test_a_backward_runs_in_the_thread_of_its_range() -> None:
    """On a device to which the engine gives a thread, as it does to CUDA: nodes, recomputations and
    hooks that unpack what was saved."""
    script = [sys.executable, "-m", "tests.device_threads"]
    printed = subprocess.run(script, capture_output=True, text=True, check=True).stdout
    found = json.loads(printed)
    for when, is_here in (("before", False), ("within", True), ("after", False)):
        hooked = {"forward": [], "backward": [is_here], "unpack": [is_here]}
        checkpointed = {"forward": [is_here], "backward": [is_here], "unpack": []}
        assert found["hooked"][when] == hooked
        assert found["checkpointed"][when] == checkpointed


def test_the_engine_has_its_threads_again_after_a_range() -> None:
    enabled = torch._C._is_multithreading_enabled
    elsewhere: list[bool] = []
    assert enabled()
    with annotate("train"):
        assert enabled(), "ranges are off"
    with ranges("torch"):
        assert enabled(), "no range is open"
        with annotate("train"):
            with annotate("backward"):
                assert not enabled()
            assert not enabled(), "a range is still open"
            thread = threading.Thread(target=lambda: elsewhere.append(enabled()))
            thread.start()
            thread.join()
        assert enabled()
        with pytest.raises(OSError, match="away"), annotate("train"), annotate("backward"):
            raise OSError("went away")
        assert enabled()
    assert elsewhere == [True], "a range is of one thread"


def test_peak_memory_belongs_to_all_open_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the counters that CUDA keeps: what is allocated now, and the most since the last
    reset."""
    counters = SimpleNamespace(now=1, peak=1)

    def allocate(size: int) -> None:
        counters.now += size
        counters.peak = max(counters.peak, counters.now)

    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: counters.peak)
    monkeypatch.setattr(
        torch.cuda,
        "reset_peak_memory_stats",
        lambda device: setattr(counters, "peak", counters.now),
    )
    watch = Stopwatch(torch.device("cuda"))
    allocate(90)
    allocate(-90)
    with watch("rollout"):
        allocate(10)
        allocate(-10)
    with watch("train"):
        allocate(20)
        with watch("optimizer"):
            allocate(5)
            allocate(-5)
        allocate(30)
        allocate(-50)
    with watch("rollout"):
        allocate(2)
    assert watch.peaks() == {"memory/rollout": 11, "memory/train": 51, "memory/optimizer": 26}
    assert Stopwatch(torch.device("cpu")).peaks() == {}


def listed_paths() -> list[tuple[str, ...]]:
    """Each range of the table with those around it, without indices."""
    paths: list[tuple[str, ...]] = []
    for row in profiling.RANGES:
        around = paths[-1][: row.depth] if row.depth else ()
        assert len(around) == row.depth, f"{row.name} is too deep"
        paths.append((*around, row.label))
    return paths


def test_every_listed_range_is_opened_and_no_other(
    recorded: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a run whose backward recomputes blocks, as one of several ranks."""
    monkeypatch.setattr("sage_fast.util.meters.world_size", lambda: 2)
    config = settings(kl__strategy="fixed", model__gradient_checkpointing="full")
    trainer = tiny_trainer(config)
    with ranges("nvtx"), annotate("iteration", 1):
        trainer.iteration(0)
    opened = {tuple(name.split(" ")[0] for name in path) for path in recorded.pushed}
    listed = listed_paths()
    assert len({*listed}) == len(listed)
    assert {*listed} <= opened
    assert {path[-1] for path in opened} == {path[-1] for path in listed}
    assert {*profiling.PHASES, profiling.WAIT} <= {path[-1] for path in listed}


@pytest.mark.parametrize("mode", ["none", "attention", "full"])
def test_ranges_of_blocks(recorded: Recording, mode: str) -> None:
    """Forwards from the first block on, backwards from the last; a recomputation lies within the
    backward of its block."""
    trainer = tiny_trainer(settings(model__gradient_checkpointing=mode))
    blocks = len(trainer.policy.block_list())
    assert blocks > 1
    with ranges("nvtx"):
        trainer.iteration(0)
    forward = [path[2:] for path in recorded.pushed if path[:2] == ("train", "forward")][1:]
    expected = []
    for index in range(blocks):
        expected += [(f"block {index}",), (f"block {index}", "attention")]
    assert forward[: len(expected)] == expected

    backward = [path[2:] for path in recorded.pushed if path[:2] == ("train", "backward")][1:]
    expected = []
    for index in reversed(range(blocks)):
        name = f"block {index}"
        expected.append((name,))
        if mode != "none":
            expected += [(name, name), (name, name, "attention")]
    assert backward[: len(expected)] == expected
    assert not any(recorded.stacks.values())


@pytest.mark.parametrize("mode", ["none", "attention", "full"])
def test_ranges_change_no_weight(recorded: Recording, mode: str) -> None:
    trained = []
    for tools in ([], ["nvtx", "torch"]):
        trainer = tiny_trainer(settings(model__gradient_checkpointing=mode))
        with ranges(*tools):
            trainer.iteration(0)
        trained.append(trainer.policy.snapshot())
    without, with_ranges = trained
    assert recorded.pushed
    assert without.keys() == with_ranges.keys()
    assert all(torch.equal(without[name], with_ranges[name]) for name in without)


def test_a_backward_that_fails_closes_the_range_of_its_block(recorded: Recording) -> None:
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise OSError("went away")

    with ranges("nvtx"):
        y = Failing.apply(torch.ones(2, requires_grad=True))
        annotate_backward([y, None, torch.ones(2)], "block", 3)
        with pytest.raises(OSError, match="away"), annotate("backward"):
            y.sum().backward()
        z = torch.ones(2, requires_grad=True) * 2
        annotate_backward([z], "block", 4)
    z.sum().backward()  # ranges are off
    assert recorded.pushed == [("backward",), ("backward", "block 3")]
    assert not any(recorded.stacks.values())


def test_switches_nest_without_doubling(recorded: Recording) -> None:
    with ranges("nvtx"), torch.profiler.profile() as profiler:
        with ranges("nvtx", "torch"), annotate("both"):
            pass
        with annotate("nvtx alone"):
            pass
    assert recorded.pushed == [("both",), ("nvtx alone",)]
    assert [event.name for event in profiler.events() if event.is_user_annotation] == ["both"]
    assert profiling._tools == {}


def test_the_environment_switches_ranges_on(
    recorded: Recording,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    sample = [
        "sample",
        str(PAPER),
        "--prompt",
        "a small red ball moves left quickly",
        "--folder",
        str(tmp_path),
        "--quiet",
    ]
    monkeypatch.setenv("SAGE_FAST_NVTX", "1")
    assert main([*sample, "--eval.steps", "2"]) == 0
    assert [path[-1] for path in without_blocks(recorded.pushed)] == [
        *["step 0", "transformer", "transition", "step 1", "transformer", "transition"]
    ]
    monkeypatch.setenv("SAGE_FAST_NVTX", "yes")
    assert main(sample) == 2
    assert (
        "SAGE_FAST_NVTX = 'yes' in the environment: expected 1 (ranges on) or 0"
        in capsys.readouterr().err
    )
    monkeypatch.setenv("SAGE_FAST_NVTX", "1")
    monkeypatch.setitem(sys.modules, "nvtx", None)
    assert main(sample) == 2
    assert "NVTX ranges need the nvtx package" in capsys.readouterr().err


# -- sage-fast profile -----------------------------------------------------------------------------


AUTO = "--model.gradient_checkpointing=auto"
"""Which takes none, as there is memory; the dry run, which cannot know, plans for full."""


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, dict[str, Any]]:
    """Folder, printed text and profile.json of one small profile."""
    folder = tmp_path_factory.mktemp("profile") / "tiny"
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setitem(sys.modules, "nvtx", None)  # torch.profiler needs no NVTX
        assert (
            main(
                ["profile", str(PAPER), "--folder", str(folder), *SMALL, "--sampling.eta=0.4", AUTO]
            )
            == 0
        )
    return folder, printed.getvalue(), json.loads((folder / "profile.json").read_text())


def test_profile_prints_what_it_writes(profiled: tuple[Path, str, dict[str, Any]]) -> None:
    folder, printed, result = profiled
    assert printed.endswith(format_profile(result) + "\n")
    assert sorted(path.name for path in folder.iterdir()) == [
        "embeddings",
        "profile.json",
        "rank-000.json.gz",
    ]
    for word in ("MFU", "rollout", "rank-000.json.gz"):
        assert word in printed


def test_phases_sum_to_the_whole_and_mfu_is_what_it_says(
    profiled: tuple[Path, str, dict[str, Any]],
) -> None:
    result = profiled[2]
    phases = dict(result["phases"])
    total = phases.pop("total")
    assert tuple(phases) == (*PHASES, "other")
    assert sum(row["seconds"] for row in phases.values()) == pytest.approx(total["seconds"])
    assert sum(row["share"] for row in phases.values()) == pytest.approx(1)
    assert phases["other"]["seconds"] >= 0
    assert sum(row["flops"] or 0 for row in phases.values()) == pytest.approx(total["flops"])
    assert [phase for phase, row in phases.items() if row["mfu"]] == [
        "rollout",
        "decode",
        "anchor",
        "train",
    ]
    for row in (phases["rollout"], phases["train"], total):
        rate = row["seconds"] * result["ceiling_flops_per_second"]
        assert row["hfu"] == pytest.approx(row["flops"] / rate)
        assert row["mfu"] == pytest.approx(row["model_flops"] / rate)
        assert 0 < row["mfu"] <= row["hfu"] < 1
    overrides = {
        name.removeprefix("--"): value for name, value in zip(SMALL[::2], SMALL[1::2], strict=True)
    }
    config = load(PAPER, overrides | {"model.gradient_checkpointing": "none"})
    expected = plan(config, find_spec("testbed"))
    assert phases["train"]["flops"] == pytest.approx(expected.flops["training"])
    assert phases["anchor"]["flops"] == pytest.approx(expected.flops["anchor"])
    assert result["planned_bytes"] == sum(expected.memory.values())


def test_the_commands_of_the_page_name_ranges_and_kernels_that_exist() -> None:
    repository = Path(__file__).parent.parent
    page = (repository / "docs" / "how-to" / "profile.md").read_text()
    labels = {row.label for row in profiling.RANGES}
    patterns = re.findall(r"--nvtx-include 'sage_fast@([^']+)'", page)
    assert len(patterns) == page.count("--nvtx-include") >= 2
    for pattern in patterns:
        for name in pattern.strip("/").split("/*/"):
            assert name.split(" ")[0] in labels, name

    kernels = "".join(file.read_text() for file in (repository / "kernels").glob("*.py"))
    names = re.findall(r"--kernel-name 'regex:([^']+)'", page)
    assert len(names) == len(re.findall(r"--kernel-name '", page)) > 0
    for name in "|".join(names).split("|"):
        assert re.search(rf"^def \w*{name}\w*\(", kernels, re.M), name


def test_the_profile_has_rates_of_operations(
    profiled: tuple[Path, str, dict[str, Any]],
) -> None:
    _, printed, result = profiled
    rows = {row["name"]: row for row in result["rates"]}
    assert {"attention forward", "attention backward", "norm_rotate"} <= rows.keys()
    row = rows["norm_rotate"]
    rate = row["bytes"] / row["seconds"] / 1e9
    assert re.search(rf"^ +{row['seconds']:.4f} +{row['calls']} +{rate:.4g}  norm_rotate$",
                     printed, re.M)  # fmt: skip
    done = sum(row["flops"] or 0 for row in rows.values())
    assert 0 < done <= 2 * result["phases"]["total"]["flops"]


def test_the_trace_has_the_ranges(profiled: tuple[Path, str, dict[str, Any]]) -> None:
    folder = profiled[0]
    with gzip.open(folder / "rank-000.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    names = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    assert names.count("iteration 1") == 1
    for name in (
        "rollout",
        "decode",
        "reward",
        "anchor",
        "train",
        "optimizer",
        "step 0",
        "step 3",
        "transition",
    ):
        assert name in names, name


def test_the_window_alone_writes_no_file(
    profiled: tuple[Path, str, dict[str, Any]], recorded: Recording
) -> None:
    folder = profiled[0]
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert (
        main(
            [
                "profile",
                str(PAPER),
                "--folder",
                str(folder),
                "--warmup",
                "0",
                "--window-only",
                *SMALL,
            ]
        )
        == 0
    )
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before


@pytest.mark.soak
def test_two_ranks_leave_a_trace_each_and_one_table(
    tmp_path: Path, profiled: tuple[Path, str, dict[str, Any]]
) -> None:
    printed = command_on_ranks(
        ["profile", str(PAPER), "--folder", "p", "--warmup", "0", *SMALL], tmp_path
    )
    files = ["embeddings", "profile.json", "rank-000.json.gz", "rank-001.json.gz"]
    assert sorted(path.name for path in (tmp_path / "p").iterdir()) == files
    assert [
        printed.count(line) for line in ("\nphase ", "\nwait ", "seconds of rank 0 of 2 ranks")
    ] == [1, 1, 1]
    assert "(of other ranks: rank-001.json.gz ...)" in printed
    result = json.loads((tmp_path / "p" / "profile.json").read_text())
    assert [*result["phases"]] == [*PHASES, "wait", "other", "total"]
    for phase in ("rollout", "train"):
        assert result["phases"][phase]["flops"] == pytest.approx(
            profiled[2]["phases"][phase]["flops"] / 2
        )


def test_window_only_pushes_nvtx_ranges_and_uses_no_other_profiler(
    recorded: Recording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.profiler, "profile", None)
    folder = tmp_path / "none"
    assert (
        main(
            [
                "profile",
                str(PAPER),
                "--folder",
                str(folder),
                "--window-only",
                "--warmup",
                "0",
                *SMALL,
            ]
        )
        == 0
    )
    assert recorded.pushed[:2] == [("iteration 0",), ("iteration 0", "rollout")]
    assert [path.name for path in folder.iterdir()] == ["embeddings"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--warmup", "-1"], "--warmup -1: expected 0 or more"),
        (["--sampling.etta", "1"], "did you mean 'sampling.eta'"),
        (["--sampling.sampler", "ode"], "no stochastic step"),
        (["--model.path", "./no/such/folder"], "no such folder"),
    ],
)
def test_messages(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "profile"
    assert main(["profile", str(PAPER), "--folder", str(folder), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not folder.exists()


def test_a_profile_is_not_overwritten(
    profiled: tuple[Path, str, dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = profiled[0]
    before = (folder / "profile.json").read_bytes()
    assert main(["profile", str(PAPER), "--folder", str(folder), *SMALL]) == 2
    assert "already holds a profile; choose another folder with --folder" in capsys.readouterr().err
    assert (folder / "profile.json").read_bytes() == before


# -- tables ----------------------------------------------------------------------------------------


def test_a_profile_with_a_gpu_counts_kernels_alone(
    profiled: tuple[Path, str, dict[str, Any]],
) -> None:
    def event(
        name: str, calls: int, micros: float, *, on_gpu: bool = True, is_range: bool = False
    ) -> SimpleNamespace:
        return SimpleNamespace(
            key=name, count=calls, self_device_time_total=micros, is_user_annotation=is_range,
            device_type=DeviceType.CUDA if on_gpu else DeviceType.CPU,
        )  # fmt: skip

    small = [event(f"kernel {i}", 1, 1e3) for i in range(KERNELS + 1)]
    shadow = event("rollout", 1, 9e6, is_range=True)  # of the range, on the GPU's timeline
    rows = kernel_table(
        [
            *small,
            shadow,
            event("aten::mm", 4, 5e6, on_gpu=False),
            event("nvjet_tst_128x256", 4, 3e6),
        ]
    )
    assert rows[0] == {"name": "nvjet_tst_128x256", "calls": 4, "seconds": 3.0}
    assert (len(rows), rows[-1]) == (
        KERNELS + 1,
        {"name": "all others", "calls": 2, "seconds": pytest.approx(2e-3)},
    )
    assert kernel_table(small[:2]) == [
        {"name": f"kernel {i}", "calls": 1, "seconds": 1e-3} for i in range(2)
    ]
    printed = format_profile(profiled[2] | {"kernels": rows})
    assert re.search(r"^ +3\.0000 +99\.1% +4  nvjet_tst_128x256$", printed, re.M)


def test_a_profile_has_what_is_read_of_an_event() -> None:
    with torch.profiler.profile() as profiler:
        torch.ones(2) + 1
    assert kernel_table(profiler.key_averages()) == []
    assert all(event.self_device_time_total == 0 for event in profiler.key_averages())


def test_the_window_is_the_capture_range(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("start", "stop"):
        monkeypatch.setattr(torch.cuda.profiler, name, lambda name=name: calls.append(name))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: calls.append("wait"))
    trainer = SimpleNamespace(
        device=torch.device("cuda"), iteration=lambda index: calls.append(f"iteration {index}")
    )
    _window(trainer, 3)
    assert calls == ["wait", "start", "iteration 3", "wait", "stop"]


def test_ceiling_is_a_rate_that_a_product_reaches() -> None:
    ceiling = matmul_ceiling(torch.device("cpu"), torch.float32, seconds=0.1)
    assert 1e9 < ceiling < 1e14


def test_phase_table_by_hand() -> None:
    row = {"time/rollout": 2.0, "time/train": 5.0, "time/total": 8.0}
    done, useful = ({"rollout": 4e12, "anchor": 0.0, "train": trained} for trained in (10e12, 8e12))
    table = phase_table(row, done, useful, 8e12)
    assert "wait" not in table
    assert phase_table(row | {"time/wait": 0.5}, {}, {}, 8e12)["wait"]["seconds"] == 0.5, (
        "with several ranks"
    )
    assert table["rollout"] == {
        "seconds": 2.0, "share": 0.25, "flops": 4e12, "model_flops": 4e12,
        "flops_per_second": 2e12, "mfu": 0.25, "hfu": 0.25,
    }  # fmt: skip
    assert table["anchor"]["mfu"] is None  # it took no time
    assert table["decode"]["flops"] is None
    assert table["other"]["seconds"] == 1.0
    assert (table["train"]["mfu"], table["train"]["hfu"]) == (
        pytest.approx(8 / 40),
        pytest.approx(10 / 40),
    )
    assert (table["total"]["mfu"], table["total"]["hfu"]) == (
        pytest.approx(12 / 64),
        pytest.approx(14 / 64),
    )
