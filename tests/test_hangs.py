"""A run that hangs: what is printed, and what lies where. docs/how-to/hangs.md shows it."""

import contextlib
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from sage_fast.cli import main
from sage_fast.run import hang_dump
from sage_fast.run.hang_dump import HangDump, what_waits
from sage_fast.trainer import Trainer
from sage_fast.util import process_group
from sage_fast.util.errors import UserError
from sage_fast.util.files import check_new_folder
from tests.ranks import run_ranks, screens
from tests.test_docs import blocks
from tests.tiny import FEW_STEPS, arguments
from tests.waits import wait_until

REPOSITORY = Path(__file__).parent.parent
PAGE = REPOSITORY / "docs" / "how-to" / "hangs.md"
PAPER = REPOSITORY / "configs" / "recipes" / "paper.yaml"
TIMEOUT_S = 15


def train(folder: Path) -> None:
    """Train on this rank. The second rank stops in the update of the second iteration."""
    (folder / f"process-{os.environ['RANK']}").write_text(str(os.getpid()))
    os.chdir(folder)
    words = ["train", str(PAPER), "--output", "runs/first", *FEW_STEPS]
    words += arguments(
        train__iterations=3, train__prompts_per_iteration=1, train__group_size=4,
        sampling__batch_size=1, train__batch_size=2, eval__num_prompts=2, eval__seeds_per_prompt=1,
        eval__judge="null", tracking__trackers="[]", timeout_minutes=TIMEOUT_S / 60,
    )  # fmt: skip
    if os.environ["RANK"] == "1":
        with stopping():
            sys.exit(main(words))
    sys.exit(main(words))


@contextlib.contextmanager
def stopping() -> Any:
    """Stop this process, as a hang does, when it begins its second update."""
    update = Trainer.update
    calls: list[int] = []

    def stop_at_second(*given: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        return update(*given, **options)

    with mock.patch.object(Trainer, "update", stop_at_second):
        yield


def kill_second_after_first(folder: Path) -> None:
    """Kill the rank that is stopped once the other one has ended, as a launcher does."""

    def first_has_failed() -> bool:
        screen = folder / "screen-0"
        return screen.is_file() and "rank 0 failed" in screen.read_text()

    wait_until(first_has_failed)
    os.kill(int((folder / "process-1").read_text()), signal.SIGKILL)


@pytest.fixture(scope="module")
def hung(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which two ranks ran, of which the second one was stopped."""
    folder = tmp_path_factory.mktemp("hung")
    launcher = threading.Thread(target=kill_second_after_first, args=(folder,))
    launcher.start()
    statuses = run_ranks(train, 2, folder)
    launcher.join()
    assert statuses == [1, -signal.SIGKILL], screens(folder)
    return folder


def commands_of_page() -> list[str]:
    return [block.text for block in blocks(PAGE) if block.key == "run by"]


def dump_of(folder: Path) -> Path:
    (dump,) = (folder / "runs" / "first" / "hangs").iterdir()
    return dump


@pytest.mark.fault(
    "one of two ranks stops in an update (SIGSTOP)",
    "after `timeout_minutes` the other says where it waited and which rank does not answer; its "
    "stacks and collectives are in `hangs` of the run folder",
)
def test_the_other_rank_says_what_it_waited_for_and_who_does_not_answer(hung: Path) -> None:
    waited, silent, where, why = screens(hung)[0].splitlines()[-4:]
    place = r"all_reduce, called in update, \S+/sage_fast/trainer.py:\d+"
    assert re.match(rf"sage-fast: rank 0 waited in {place} \(gloo:all_reduce of ", waited)
    assert re.match(r"sage-fast: no answer from rank 1 on \S+ \(hangs, gone, or", silent)
    assert where == f"sage-fast: what the ranks were doing is in {dump_of(hung)}"
    assert "rank 0 failed: another rank is gone, hangs or cannot be reached" in why
    assert f"Timed out waiting {TIMEOUT_S}000ms" in why


def plain(text: str) -> str:
    """The text without what differs from machine to machine and from run to run."""
    text = re.sub(r"/\S*?/(?=sage_fast/|runs/first|gloo/transport)", ".../", text)
    text = re.sub(r"on [\w.-]+ \(hangs", "on HOST (hangs", text)
    text = re.sub(r"\d{4}-\d\d-\d\dT[\d-]+", "TIME", text)
    return re.sub(r"\d+(?=[\s,\])m]|$)", "N", text)


def test_the_page_shows_what_is_printed(hung: Path) -> None:
    shown = re.search(r"```text\n(sage-fast: rank 0 waited.*?)```", PAGE.read_text(), re.DOTALL)
    assert shown is not None
    printed = screens(hung)[0].splitlines()[-4:]
    assert plain(shown[1]).splitlines() == [plain(line) for line in printed]


def test_the_dump_has_stacks_and_collectives(hung: Path) -> None:
    dump = dump_of(hung)
    assert {file.name for file in dump.iterdir()} == {"stacks-0.txt", "collectives-0"}
    stacks = (dump / "stacks-0.txt").read_text()
    assert stacks.startswith("rank 0 on ")
    assert "Timed out waiting" in stacks
    assert "in update\n" in stacks, "the traceback of the error"
    assert " MainThread\n" in stacks
    assert "most recent call first" in stacks, "the stacks of the threads"

    record = pickle.loads((dump / "collectives-0").read_bytes())
    assert 10 < len(record["entries"]) <= 2000
    assert stacks.endswith(f"waits in {what_waits(record)}\n")


def test_the_command_of_the_page_counts_what_the_ranks_wait_in(hung: Path) -> None:
    count, _ = commands_of_page()
    done = subprocess.run(count, shell=True, cwd=hung, capture_output=True, text=True)
    assert re.match(r" *1 waits in all_reduce, called in update", done.stdout)


def test_the_analyser_of_pytorch_reads_a_dump_of_nccl(hung: Path, tmp_path: Path) -> None:
    """The records of gloo name a group otherwise than its entries do; those of NCCL do not."""
    record = pickle.loads((dump_of(hung) / "collectives-0").read_bytes())
    (group,) = record["pg_config"].values()
    record["pg_config"] = {"0": group | {"name": "0", "desc": "default_pg"}}
    for entry in record["entries"]:
        entry["profiling_name"] = entry["profiling_name"].replace("gloo", "nccl")
    (tmp_path / "collectives-0").write_bytes(pickle.dumps(record))
    (tmp_path / "stacks-0.txt").write_text("stacks")

    _, analyse = commands_of_page()
    command, *options, _ = analyse.split()
    assert command == "torchfrtrace"
    module = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace"]
    done = subprocess.run([*module, *options, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def fails_at_start(folder: Path) -> None:
    """Train on this rank. The second rank fails before the run has a folder."""
    os.chdir(folder)
    words = ["train", str(PAPER), "--output", "run", "--resume", *FEW_STEPS]
    words += arguments(
        train__iterations=1, train__prompts_per_iteration=1, train__group_size=4,
        train__batch_size=2, eval__num_prompts=2, eval__seeds_per_prompt=1, eval__judge="null",
        tracking__trackers="[]", timeout_minutes=1,
    )  # fmt: skip
    fails = os.environ["RANK"] == "1" and not (folder / "again").exists()
    failing = mock.patch("sage_fast.run.train.check_here", side_effect=RuntimeError("no such GPU"))
    with failing if fails else contextlib.nullcontext():
        sys.exit(main(words))


def test_the_dump_of_a_run_that_did_not_begin_is_not_in_its_way(tmp_path: Path) -> None:
    assert run_ranks(fails_at_start, 2, tmp_path) == [1, 1], screens(tmp_path)
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"hangs"}
    (tmp_path / "again").touch()
    assert run_ranks(fails_at_start, 2, tmp_path) == [0, 0], screens(tmp_path)
    assert len(list((tmp_path / "run" / "hangs").iterdir())) == 1


# -- the parts -------------------------------------------------------------------------------------

AT_TRAINER = {"name": "update", "filename": "/home/me/sage_fast/trainer.py", "line": 7}
AT_RANKS = {"name": "all_reduce", "filename": "/home/me/sage_fast/util/ranks.py", "line": 3}
IN_TORCH = {"name": "all_reduce", "filename": f"{hang_dump.TORCH}/distributed/c10.py", "line": 1}


def entry(number: int, retired: bool, frames: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "retired": retired,
        "frames": frames,
        "profiling_name": "nccl:all_reduce",
        "process_group": ("0", "default_pg"),
        "input_sizes": [[4, 2]],
        "collective_seq_id": number,
    }


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ([], ""),
        ([(1, True, []), (2, False, []), (3, False, [])], "nccl:all_reduce (.*collective 2 of"),
        ([(1, True, []), (2, True, [])], "nccl:all_reduce (.*collective 2 of"),
        (
            [(1, False, [IN_TORCH, AT_RANKS, AT_TRAINER])],
            "all_reduce, called in update, /home/me/sage_fast/trainer.py:7 (",
        ),
    ],
    ids=["nothing recorded", "oldest that has not ended", "all ended", "frames"],
)
def test_the_collective_that_a_rank_waits_in(
    entries: list[tuple[int, bool, list[dict[str, Any]]]], said: str
) -> None:
    found = what_waits({"entries": [entry(*given) for given in entries]})
    start, _, rest = said.partition(".*")
    assert found.startswith(start)
    assert rest in found


def test_the_watchdog_of_nccl_dumps_into_the_same_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    dump = HangDump(tmp_path / "run", "now")
    with dump.for_watchdog():
        prefix = os.environ["TORCH_FR_DUMP_TEMP_FILE"]
        assert prefix == str(tmp_path / "run" / "hangs" / "now" / "collectives-")
        assert dump.folder.is_dir()
    assert not (tmp_path / "run" / "hangs").exists(), "nothing was dumped"

    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", "/elsewhere/rank-")
    with dump.for_watchdog():
        assert os.environ["TORCH_FR_DUMP_TEMP_FILE"] == "/elsewhere/rank-"
        assert not dump.folder.exists()


def test_nccl_has_a_flight_recorder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = {"entries": [entry(5, False, [])]}
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(
        hang_dump.c10d, "_dump_nccl_trace", lambda: pickle.dumps(record), raising=False
    )
    waited_for = HangDump(tmp_path, "now").write("rank 1 failed")
    assert "collective 5 of group default_pg" in waited_for
    files = sorted(file.name for file in (tmp_path / "hangs" / "now").iterdir())
    assert files == ["collectives-0", "stacks-0.txt"]


def test_without_a_flight_recorder_there_are_stacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    monkeypatch.delattr(hang_dump.c10d, "_dump_fr_trace", raising=False)
    assert HangDump(tmp_path, "now").write("rank 1 failed") == ""
    (file,) = (tmp_path / "hangs" / "now").iterdir()
    assert "test_without_a_flight_recorder_there_are_stacks" in file.read_text()


HANGING = """
import sys, time
from pathlib import Path
import torch.distributed as dist
from sage_fast.run import hang_dump

dist.get_backend = lambda: "gloo"
hang_dump.DUMP_TIMEOUT_S = 0.2
hang_dump._flight_record = lambda: time.sleep(600)
hang_dump.HangDump(Path(sys.argv[1]), "now").write("rank 1 failed")
"""


def test_a_dump_that_hangs_does_not_keep_the_rank(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HANGING, str(tmp_path)],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 1
    assert "Timeout" in done.stderr
    assert "rank 1 failed" in (tmp_path / "hangs" / "now" / "stacks-0.txt").read_text()


@pytest.mark.parametrize("given", [{}, {"TORCH_NCCL_TRACE_BUFFER_SIZE": "7"},
                                   {"TORCH_FR_BUFFER_SIZE": "0"}])  # fmt: skip
def test_the_environment_decides_about_the_flight_recorder(
    given: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*process_group.FLIGHT_RECORDER, "TORCH_NCCL_TRACE_BUFFER_SIZE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    process_group._record_collectives()
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" in given:
        assert "TORCH_FR_BUFFER_SIZE" not in os.environ
    else:
        expected = process_group.FLIGHT_RECORDER | given
        assert {name: os.environ[name] for name in expected} == expected


def fail_while_others_wait(folder: Path, words: list[str], function: str) -> None:
    """Run a command on this rank; the second rank fails in a function of it."""
    os.chdir(folder)
    broken = RuntimeError("out of memory")
    with contextlib.ExitStack() as stack:
        if os.environ["RANK"] == "1":
            stack.enter_context(mock.patch(function, side_effect=broken))
        sys.exit(main([*words, *FEW_STEPS]))


COMMANDS = {
    "sample": (["--prompt", "a red ball", "--folder", "out"], "out"),
    "eval": (["--folder", "out"], "out"),
    "eval --json": (["--json", "scores/all.json"], "scores"),
    "profile": (["--folder", "out"], "out"),
}
"""Command -> its words, and the folder in which it leaves its dumps."""


@pytest.mark.parametrize("command", COMMANDS)
def test_other_commands_leave_their_dumps_where_they_write(command: str, tmp_path: Path) -> None:
    words, folder = COMMANDS[command]
    name = command.split()[0]
    function = "sage_fast.loading.load_model"
    given = [name, str(PAPER), *words]
    assert run_ranks(fail_while_others_wait, 2, tmp_path, given, function) == [1, 1]
    (dump,) = (tmp_path / folder / "hangs").iterdir()
    assert "out of memory" in (dump / "stacks-1.txt").read_text()
    assert not (tmp_path / "hangs").exists()
    assert f"what the ranks were doing is in {dump}" in screens(tmp_path)[1]


def test_an_evaluation_that_failed_may_be_started_again(tmp_path: Path) -> None:
    """Its folder then has its dumps, and nothing else."""
    (tmp_path / "hangs" / "2026-11-29T15-40-59").mkdir(parents=True)
    check_new_folder(tmp_path)
    (tmp_path / "videos.csv").touch()
    with pytest.raises(UserError, match="expected a new or an empty folder"):
        check_new_folder(tmp_path)
