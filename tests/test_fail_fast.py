"""An error on one of several gloo ranks: all end, with its cause, also where it leaves others
inside a collective.

Two ranks; `make soak` takes four.
"""

import contextlib
import importlib.util
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from sage_fast.callbacks.evaluations import Evaluations
from sage_fast.cli import main
from sage_fast.models.policy import Policy
from sage_fast.run import fail_fast
from sage_fast.run_folder import RunFolder
from sage_fast.trainer import Trainer
from tests.ranks import run_ranks, screens
from tests.tiny import FEW_STEPS, arguments
from tests.waits import HANG, wait_until

PAPER = Path(__file__).parent.parent / "configs" / "recipes" / "paper.yaml"
RANKS = 4 if "SAGE_FAST_SOAK" in os.environ else 2
CAUSE = "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
ZERO3 = {"train__engine": "zero3", "sampling__averaged_weights": True, "train__ema_decay": 0.5,
         "train__optimizer_steps": 1}  # fmt: skip
SEQUENCE = {"model__sequence_parallel": 2}
needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"
)


def out_of_memory(*_: Any, **__: Any) -> None:
    raise torch.OutOfMemoryError(CAUSE.partition(": ")[2])


@contextlib.contextmanager
def failing(owner: Any, name: str, phase: str) -> Any:
    """Make the second call of `owner.name` within the method `phase` of the trainer or the run
    fail."""
    place: Any = Evaluations if phase == "evaluate" else Trainer
    method, around, calls = getattr(owner, name), getattr(place, phase), list[int]()

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(1)
        return out_of_memory() if len(calls) == 2 else method(*args, **options)

    def armed(*args: Any, **options: Any) -> Any:
        with mock.patch.object(owner, name, counted):
            return around(*args, **options)

    with mock.patch.object(place, phase, armed):
        yield


def train(folder: Path, phase: str, given: dict[str, Any]) -> None:
    """Train on this rank. The second rank fails, and ends only after the first one, or in vain.

    Open connections are what the others see with NCCL, which does not notice that another process
    has ended.
    """
    os.environ["DS_ACCELERATOR"] = "cpu"
    (folder / f"process-{os.environ['RANK']}").write_text(str(os.getpid()))
    words = ["train", str(PAPER), "--output", str(folder / "run"), *FEW_STEPS]
    words += arguments(
        train__iterations=1, train__prompts_per_iteration=1, train__group_size=4,
        sampling__batch_size=1,
        train__batch_size=2, eval__num_prompts=2, eval__seeds_per_prompt=1, eval__judge="null",
        timeout_minutes=HANG,
        tracking__trackers="[]", **given,
    )  # fmt: skip
    if os.environ["RANK"] != "1":
        sys.exit(main(words))
    owner, name = (Trainer, "_loss") if phase == "update" else (Policy, "velocities")
    lingering = SimpleNamespace(sleep=lambda seconds: wait_for_the_first(folder))
    with failing(owner, name, phase), mock.patch.object(fail_fast, "time", lingering):
        sys.exit(main(words))


def wait_for_the_first(folder: Path) -> None:
    process = int((folder / "process-0").read_text())

    def is_gone() -> bool:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, 0)
            return False
        return True

    wait_until(is_gone)
    (folder / "first").write_text("has ended")


@pytest.mark.parametrize(
    ("phase", "given"),
    [
        pytest.param("rollout", ZERO3, id="zero3 rollout"),
        pytest.param("rollout", SEQUENCE, id="sequence parallel rollout"),
        pytest.param("update", {}, id="plain update"),
        pytest.param("update", ZERO3 | {"sampling__averaged_weights": False}, id="zero3 update",
                     marks=pytest.mark.soak),
        pytest.param("update", {"train__engine": "zero2"}, id="zero2 update",
                     marks=[needs_deepspeed, pytest.mark.soak]),
        pytest.param("evaluate", ZERO3, id="zero3 evaluation", marks=pytest.mark.soak),
        pytest.param("anchor_velocities", ZERO3, id="zero3 anchor", marks=pytest.mark.soak),
    ],
)  # fmt: skip
@pytest.mark.fault(
    "out of memory on one of four ranks while others wait in a collective: update, ZeRO-2 and 3, "
    "sequence parallelism",
    "all end, with status 1 and the same line; the last checkpoint counts",
)
def test_the_other_rank_ends_too_and_says_why(
    phase: str, given: dict[str, Any], tmp_path: Path
) -> None:
    assert run_ranks(train, RANKS, tmp_path, phase, given) == [1] * RANKS, screens(tmp_path, RANKS)
    first, second, *others = screens(tmp_path, RANKS)
    assert (tmp_path / "first").read_text() == "has ended", (
        "while the connections of the second were open"
    )
    for screen in (first, *others):
        assert f"sage-fast: rank 1 failed: {CAUSE}\n" in screen
        assert "Traceback" not in screen
    assert second.splitlines()[-1].endswith(CAUSE), second
    assert "no answer" not in second
    (dump,) = (tmp_path / "run" / "hangs").iterdir()
    for number in range(RANKS):
        stacks = (dump / f"stacks-{number}.txt").read_text()
        assert f"rank 1 failed: {CAUSE}\n" in stacks
        assert "\nwaits in " in stacks
    assert second.index("Traceback") < second.index(CAUSE), "where it was"


@pytest.mark.parametrize(("ranks", "looks"), [(2, 40), (64, 40), (65, 10), (512, 10)])
def test_many_ranks_look_less_often(
    ranks: int, looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How often a rank asks the store within ten seconds, and how long one that fails stays."""
    monkeypatch.setattr(fail_fast, "world_size", lambda: ranks)
    store = SimpleNamespace(check=mock.Mock(return_value=False))
    waited: list[float] = []

    def wait(seconds: float) -> bool:
        waited.append(seconds)
        return sum(waited) > 10

    fail_fast._watch(store, SimpleNamespace(wait=wait), mock.Mock())
    assert store.check.call_count == 2 * looks
    assert fail_fast.exit_grace() >= 2 * waited[0], "the others look meanwhile"


@pytest.mark.fault(
    "out of memory on one of two ranks in a rollout of its own",
    "both end, with a checkpoint of the last iteration",
)
def test_ranks_with_rollouts_of_their_own_save_together(tmp_path: Path) -> None:
    assert run_ranks(train, 2, tmp_path, "rollout", {}) == [1, 1], screens(tmp_path)
    first, second = screens(tmp_path)
    assert f"sage-fast train: rank 1 failed: {CAUSE}\n" in first
    assert "Traceback" in second
    assert second.splitlines()[-1].endswith(CAUSE), second
    assert [folder.name for folder in RunFolder(tmp_path / "run").checkpoints()] == [
        "iteration-000000"
    ]
