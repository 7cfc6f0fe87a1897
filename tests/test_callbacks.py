"""Callbacks of a user's: when they are called and with what, their columns, states and errors."""

import importlib.util
import json
import logging
import os
import shutil
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from sage_fast.callbacks.built_in import built_in
from sage_fast.callbacks.columns import counts_and_edges, make_plain
from sage_fast.callbacks.dispatch import HOOKS as ALL_HOOKS
from sage_fast.callbacks.dispatch import HOOKS_ELSEWHERE, CallbackError, Callbacks
from sage_fast.callbacks.evaluations import Evaluations
from sage_fast.callbacks.interface import Callback, Histogram, Rollouts
from sage_fast.callbacks.metrics import Metrics as BuiltInMetrics
from sage_fast.callbacks.profiler import Profiler
from sage_fast.cli import main
from sage_fast.config.loader import build, load
from sage_fast.config.schema import Config
from sage_fast.config.secrets import secret
from sage_fast.run.train import Run, train
from sage_fast.run_folder import STATE, RunFolder, iteration_of
from sage_fast.util.captions import PromptKey
from sage_fast.util.console import leave_logs, log_to
from sage_fast.util.errors import RankError, Stopped, UserError
from sage_fast.util.files import read_json, read_metrics
from sage_fast.util.ranks import rank
from tests.ranks import run_ranks, screens
from tests.tiny import settings
from tests.waits import wait_until

PAPER = Path(__file__).parent.parent / "configs" / "recipes" / "paper.yaml"
HOOKS = (
    "on_run_start",
    "on_iteration_start",
    "videos_wanted",
    "on_rollout_end",
    "on_update_start",
    "on_update_end",
    "on_iteration_end",
    "on_evaluation_start",
    "on_evaluation_end",
    "on_checkpoint",
    "on_run_end",
    "state_dict",
)


def config(folder: Path, **overrides: Any) -> Config:
    small: dict[str, Any] = {
        "sampling__steps": 2,
        "train__iterations": 2,
        "train__prompts_per_iteration": 1,
        "train__checkpoint_interval": 50,
        "train__parity_gate": False,
        "eval__steps": 1,
        "eval__num_prompts": 1,
        "eval__seeds_per_prompt": 1,
        "tracking__trackers": [],
    }
    return settings(output=str(folder), **small | overrides)


def weights(run: Path) -> dict[str, torch.Tensor]:
    (file,) = (run / "weights").glob("*.safetensors")
    return load_file(file)


def saved(run: Path) -> list[int]:
    return [iteration_of(folder) for folder in RunFolder(run).checkpoints()]


# -- when and with what ----------------------------------------------------------------------------


class Recorder(Callback):
    """Notes which hooks are called, with what."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.rollouts: list[Rollouts] = []

    def on_run_start(self, run: Run) -> None:
        self.calls.append(("run start", run.iteration))

    def on_run_end(self, run: Run) -> None:
        self.calls.append(("run end", run.iteration, run.complete))

    def on_exception(self, run: Run, error: BaseException) -> None:
        self.calls.append(("exception", type(error).__name__, saved(run.folder)))

    def on_iteration_start(self, run: Run, iteration: int) -> None:
        self.calls.append(("iteration start", iteration))

    def videos_wanted(self, run: Run, rollouts: Sequence[tuple[int, int]]) -> Sequence[int]:
        self.calls.append(("videos wanted", [*rollouts]))
        return [1, 2]

    def on_rollout_end(self, run: Run, rollouts: Rollouts) -> None:
        self.calls.append(("rollout end", rollouts.iteration))
        self.rollouts.append(rollouts)

    def on_update_start(self, run: Run, update: int) -> None:
        self.calls.append(("update start", update, run.trainer.engine.steps))

    def on_update_end(self, run: Run, update: int) -> None:
        self.calls.append(("update end", update, run.trainer.engine.steps))

    def on_iteration_end(self, run: Run, row: dict[str, Any]) -> None:
        self.calls.append(("iteration end", row["iteration"], run.iteration))

    def on_evaluation_start(self, run: Run, name: str) -> None:
        self.calls.append(("evaluation start", name))

    def on_evaluation_end(self, run: Run, name: str, scores: Mapping[str, Any]) -> None:
        assert scores == RunFolder(run.folder).evaluation(name)
        self.calls.append(("evaluation end", name))

    def on_checkpoint(self, run: Run, folder: Path) -> None:
        assert (folder / "manifest.json").is_file()
        self.calls.append(("checkpoint", folder.name))


def test_every_hook_is_called_at_its_point(tmp_path: Path) -> None:
    recorder = Recorder()
    group = [(0, index) for index in range(settings().train.group_size)]
    run = train(
        config(tmp_path / "run", train__optimizer_steps=2, eval__interval=1), callbacks=[recorder]
    )

    def iteration(index: int) -> list[tuple[Any, ...]]:
        steps = 2 * index
        return [
            ("iteration start", index),
            ("videos wanted", group),
            ("rollout end", index),
            ("update start", 0, steps),
            ("update end", 0, steps + 1),
            ("update start", 1, steps + 1),
            ("update end", 1, steps + 2),
            ("iteration end", index, index + 1),
        ]

    def evaluation(name: str) -> list[tuple[Any, ...]]:
        return [("evaluation start", name), ("evaluation end", name)]

    assert recorder.calls == [
        ("run start", 0),
        *evaluation("before"),
        *iteration(0),
        *evaluation("iteration-000001"),
        ("checkpoint", "iteration-000001"),  # no checkpoint yet has a better evaluation
        *iteration(1),
        ("checkpoint", "iteration-000002"),
        *evaluation("after"),
        ("run end", 2, True),
    ]
    assert run.folder == tmp_path / "run"
    assert run.iteration == 2
    assert [*run.metrics["iteration"]] == [0, 1]


def test_rollouts_are_this_ranks_samples(tmp_path: Path) -> None:
    recorder = Recorder()
    run = train(config(tmp_path / "run", train__prompts_per_iteration=2), callbacks=[recorder])
    size = run.config.train.group_size
    for rollouts, row in zip(recorder.rollouts, read_metrics(run.folder / "metrics.jsonl")):
        assert [*rollouts.groups] == [0] * size + [1] * size
        assert len(set(rollouts.prompts)) == 2
        assert len(set(rollouts.seeds)) == 2 * size
        assert rollouts.rewards.mean().item() == pytest.approx(row["reward/mean"])
        assert rollouts.advantages.view(2, size).sum(1).tolist() == pytest.approx([0, 0], abs=1e-4)
        assert {name: len(values) for name, values in rollouts.parts.items()} == dict.fromkeys(
            rollouts.parts, 2 * size
        )
        assert [*rollouts.videos] == [1, 2]
        for video in rollouts.videos.values():
            assert video.dtype == torch.uint8
            assert [*video.shape[:2]] == [run.config.sampling.num_frames, 3]
        # the videos are those of the samples: the reward scores them again
        scored = run.setup.reward(
            torch.stack([*rollouts.videos.values()]) / 255,
            [PromptKey(rollouts.prompts[index]) for index in rollouts.videos],
        )
        expected = rollouts.rewards[[*rollouts.videos]]
        torch.testing.assert_close(scored.rewards.float(), expected.float(), atol=0.05, rtol=0.05)


def test_a_run_with_callbacks_computes_the_same(tmp_path: Path) -> None:
    plain = train(config(tmp_path / "plain")).folder
    watched = train(config(tmp_path / "watched"), callbacks=[Recorder()]).folder
    for name, tensor in weights(plain).items():
        assert torch.equal(tensor, weights(watched)[name])


# -- columns ---------------------------------------------------------------------------------------


class Columns(Callback):
    def on_rollout_end(self, run: Run, rollouts: Rollouts) -> None:
        self.advantages = rollouts.advantages

    def on_iteration_end(self, run: Run, row: dict[str, Any]) -> None:
        row["mine/number"] = torch.tensor(1.5)
        row["mine/list"] = [1, float("nan")]
        row["mine/advantages"] = Histogram(self.advantages)


def test_columns_reach_metrics_and_trackers(tmp_path: Path) -> None:
    run = train(config(tmp_path / "run", tracking__trackers=["tensorboard"]), callbacks=[Columns()])
    for row in read_metrics(run.folder / "metrics.jsonl"):
        assert row["mine/number"] == 1.5
        assert row["mine/list"] == [1, None]
        drawn = row["mine/advantages"]
        assert sum(drawn["counts"]) == run.config.train.group_size
        assert len(drawn["edges"]) == len(drawn["counts"]) + 1
    assert [*run.metrics["mine/number"]] == [1.5, 1.5]
    events = EventAccumulator(str(run.folder / "tensorboard"), size_guidance={"histograms": 0})
    events.Reload()
    assert [event.step for event in events.Histograms("mine/advantages")] == [1, 2]
    assert [event.value for event in events.Scalars("mine/number")] == [1.5, 1.5]
    assert (run.folder / "report.html").is_file()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("mine", object(), r"column 'mine' = <object .*expected a number, a list of numbers or a"),
        ("mine", "text", "column 'mine' = 'text': expected a number"),
        (1, 2.0, "1: expected a text as the name of a column"),
        ("loss", 0.0, "'loss' is a column of the run's: expected another name"),
    ],
)
def test_a_wrong_column_is_named_and_left_out(
    name: Any, value: Any, message: str, tmp_path: Path
) -> None:
    class Wrong(Callback):
        def on_iteration_end(self, run: Run, row: dict[str, Any]) -> None:
            row[name] = value

    with pytest.raises(CallbackError, match=f"Wrong, on_iteration_end: {message}"):
        train(config(tmp_path / "run"), callbacks=[Wrong()])
    (row,) = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert row.get("mine") is None
    assert row["loss"] != 0.0
    assert saved(tmp_path / "run") == [1]


# -- errors ----------------------------------------------------------------------------------------


class Faulty(Callback):
    """Fails in one hook, at the second call of it that an iteration makes."""

    def __init__(self, hook: str, at: int = 2) -> None:
        self.hook = hook
        self.at = at
        self.calls = 0
        setattr(self, hook, self._fail)

    def _fail(self, *_: Any) -> Any:
        self.calls += 1
        if self.calls == self.at:
            raise ValueError("no such thing")
        return {} if self.hook == "state_dict" else ()


FIRST = {"on_run_start": 1, "on_run_end": 1}
"""Hooks that are called once a run."""


@pytest.mark.fault(
    "an error in each hook of a user's callback",
    "the line names the callback; a checkpoint of the last whole iteration, from which it resumes",
)
@pytest.mark.parametrize("hook", HOOKS)
def test_an_error_names_the_callback_and_leaves_a_checkpoint(hook: str, tmp_path: Path) -> None:
    small = config(tmp_path / "run", eval__interval=1)
    recorder = Recorder()
    place = rf"callback tests\.test_callbacks:Faulty, {hook}: ValueError: no such thing \(.*\.py:"
    with pytest.raises(CallbackError, match=place):
        train(small, callbacks=[Faulty(hook, FIRST.get(hook, 2)), recorder])
    done = saved(tmp_path / "run")
    rows = len(read_metrics(tmp_path / "run" / "metrics.jsonl"))
    assert done[-1:] == [rows] if hook != "on_run_start" else done == [0]
    assert recorder.calls[-1] == ("exception", "CallbackError", done)

    resumed = train(small, resume=True).folder
    whole = train(config(tmp_path / "whole", eval__interval=1)).folder
    for name, tensor in weights(whole).items():
        assert torch.equal(tensor, weights(resumed)[name]), name


def test_an_error_while_ending_does_not_hide_the_first(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    class Both(Callback):
        def on_iteration_end(self, run: Run, row: dict[str, Any]) -> None:
            raise ValueError("first")

        def on_exception(self, run: Run, error: BaseException) -> None:
            raise ValueError("second")

    with pytest.raises(CallbackError, match="on_iteration_end: ValueError: first"):
        train(config(tmp_path / "run"), callbacks=[Both()])
    told = " ".join(caplog.text.split())
    assert "note: callback tests.test_callbacks:" in told
    assert "on_exception: ValueError: second" in told


def test_two_of_one_name_and_what_is_no_callback_are_refused(tmp_path: Path) -> None:
    for given, message in (
        ([Columns(), Columns()], "callbacks: two are named 'Columns'; give one of them another"),
        ([Columns], r"callbacks\[0\] is a class: expected an object, such as Columns\(\)"),
        (Columns(), r"callbacks = .*: expected a list, such as \[Columns\(\)\]"),
        ([print], r"callbacks\[0\] = <built-in function print>: expected an object"),
    ):
        with pytest.raises(UserError, match=message):
            train(config(tmp_path / "run"), callbacks=given)  # type: ignore[arg-type]
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "hook"),
    [
        ("on_iteration_finish", "on_iteration_end"),
        ("on_rollouts_end", "on_rollout_end"),
        *HOOKS_ELSEWHERE.items(),
    ],
)
def test_a_method_that_would_never_be_called_is_refused(
    name: str, hook: str, tmp_path: Path
) -> None:
    def method(*_: Any) -> None:
        raise AssertionError

    kind = type("Foreign", (Callback,), {name: method})
    expected = (
        f"callback .*:(Foreign|Odd): {name} is no hook, and would never be called .*; did you mean "
        f"'{hook}'"
    )
    for callback in (kind(), Odd(**{name: method})):
        with pytest.raises(UserError, match=expected):
            train(config(tmp_path / "run"), callbacks=[callback])
    assert not (tmp_path / "run").exists()


def test_what_is_no_method_may_begin_as_a_hook_does(tmp_path: Path) -> None:
    class Own(Callback):
        on_gpu = False

        def __init__(self) -> None:
            self.on_disk = True

        @property
        def on_read(self) -> None:
            raise AssertionError

        def _on_fall(self) -> None:
            raise AssertionError

    Callbacks([Own(), Profiler(iterations=[1])], built_in(config(tmp_path / "run"), Evaluations()))


def test_the_hooks_of_other_libraries_stand_for_ours() -> None:
    assert set(HOOKS_ELSEWHERE.values()) <= set(ALL_HOOKS)
    assert not HOOKS_ELSEWHERE.keys() & set(ALL_HOOKS)


@pytest.mark.parametrize(
    ("values", "bins"),
    [
        (["a"], None),
        ([[1], [1, 2]], None),
        (torch.tensor([1j]), None),
        ([], 32),
        ([float("nan")], 32),
        ([1e20] * 3, 1),  # float64 has no edges between them
        ([-1.7e308, 1.7e308], 1),
        ([torch.ones((), requires_grad=True)], 32),
    ],
)
def test_a_histogram_of_anything_leaves_the_row(values: Any, bins: int | None) -> None:
    """Else the checkpoint lacks the line of its iteration, and no resume is possible."""
    row: dict[str, Any] = {"iteration": 0, "mine": Histogram(values)}
    problem = make_plain(row, {"iteration": row["iteration"]})
    if bins is None:
        assert problem is not None
        assert "'mine'" in problem
        assert "mine" not in row
    else:
        assert problem is None
        assert len(counts_and_edges(row["mine"].values)[0]) == bins


class Odd(Callback):
    """Does at a hook what it is given."""

    def __init__(self, **hooks: Any) -> None:
        for hook, does in hooks.items():
            setattr(self, hook, does)


def test_a_wrong_histogram_is_named_and_the_run_resumes(tmp_path: Path) -> None:
    small = config(tmp_path / "run", train__iterations=1)

    def wrong(run: Run, row: dict[str, Any]) -> None:
        row["mine"] = Histogram(["a"])

    with pytest.raises(CallbackError, match="Odd, on_iteration_end: column 'mine' = Histogram"):
        train(small, callbacks=[Odd(on_iteration_end=wrong)])
    assert saved(tmp_path / "run") == [1]
    assert train(small, resume=True).iteration == 1


def test_columns_may_have_any_name_and_numbers_of_any_library(tmp_path: Path) -> None:
    """Also names like those of the run's own, which its notes read."""

    def add(run: Run, row: dict[str, Any]) -> None:
        row["reward_part/mine"] = [torch.tensor(1.5), np.int64(2)]
        row["time/ranks"] = None

    run = train(
        config(tmp_path / "run", train__iterations=1), callbacks=[Odd(on_iteration_end=add)]
    )
    (row,) = read_metrics(run.folder / "metrics.jsonl")
    assert row["reward_part/mine"] == [1.5, 2]


def test_a_checkpoint_that_a_callback_asks_for_is_of_a_whole_iteration(tmp_path: Path) -> None:
    """Asked for between two updates, or before all columns are there; and resumes to the bit."""

    def after_update(run: Run, update: int) -> None:
        if (run.iteration, update) == (0, 0):
            run.checkpoint()

    def add(run: Run, row: dict[str, Any]) -> None:
        row["first"] = torch.tensor(1.0)
        if run.iteration == 2:
            run.checkpoint()
        row["second"] = 2

    asks = Odd(on_update_end=after_update, on_iteration_end=add)
    asks.on_checkpoint = lambda run, folder: run.checkpoint()  # type: ignore[method-assign]
    small: dict[str, Any] = {"train__iterations": 3, "train__optimizer_steps": 2}
    small["train__keep_checkpoints"] = 3
    run = train(config(tmp_path / "run", **small), callbacks=[asks]).folder
    assert saved(run) == [1, 2, 3]
    assert [row["second"] for row in read_metrics(run / "metrics.jsonl")] == [2, 2, 2]
    for number in (2, 3):
        shutil.rmtree(RunFolder(run).checkpoint(number))
    whole = weights(run)
    train(config(tmp_path / "run", **small), callbacks=[asks], resume=True)
    for name, tensor in whole.items():
        assert torch.equal(tensor, weights(run)[name]), name


def test_what_a_callback_does_with_advantages_changes_no_update(tmp_path: Path) -> None:
    def in_place(run: Run, rollouts: Rollouts) -> None:
        rollouts.advantages.zero_()

    one = {"train__iterations": 1}
    plain = train(config(tmp_path / "plain", **one)).folder
    other = train(config(tmp_path / "o", **one), callbacks=[Odd(on_rollout_end=in_place)]).folder
    for name, tensor in weights(plain).items():
        assert torch.equal(tensor, weights(other)[name])


@pytest.mark.parametrize("wanted", [None, 3, [[0]], ["a", None], [7], "01"])
def test_wanted_videos_that_are_no_indices_are_named(wanted: Any) -> None:
    odd = Odd(videos_wanted=lambda run, rollouts: wanted)
    with pytest.raises(CallbackError, match=r"Odd, videos_wanted: .*: expected a list of indices"):
        Callbacks([odd], []).videos_wanted(None, [(0, 0), (0, 1)])  # type: ignore[arg-type]
    odd = Odd(videos_wanted=lambda run, rollouts: torch.tensor([1]))
    assert Callbacks([odd], []).videos_wanted(None, [(0, 0), (0, 1)]) == {1}  # type: ignore[arg-type]


def test_a_key_that_json_would_change_is_named() -> None:
    odd = Odd(state_dict=lambda: {"seen": [{3: "a"}]})
    with pytest.raises(CallbackError, match="state_dict: key 3: expected a text"):
        Callbacks([odd], []).states()


def test_an_error_does_not_tell_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "sesame-open-sesame")
    token = secret("MY_TOKEN")

    def fail(run: Run) -> None:
        raise OSError(f"no answer for {token}")

    with pytest.raises(CallbackError, match=r"no answer for \$\{MY_TOKEN\}"):
        Callbacks([Odd(on_run_start=fail)], []).call("on_run_start", None)  # type: ignore[arg-type]


def test_a_call_within_a_hook_leaves_the_log_of_the_run(tmp_path: Path) -> None:
    log_to(tmp_path / "log")
    Callbacks([Odd(on_run_start=lambda run: leave_logs())], []).call("on_run_start", None)  # type: ignore[arg-type]
    logging.getLogger("sage_fast.mine").info("goes on")
    leave_logs()
    assert "goes on" in (tmp_path / "log").read_text()


def test_a_name_of_the_runs_own_is_free_but_not_twice_the_same(tmp_path: Path) -> None:
    class Metrics(Callback):
        pass

    profiler = Profiler(iterations=[1])
    assert [each.name for each in Callbacks([Metrics()], [BuiltInMetrics()]).users] == ["Metrics"]
    with pytest.raises(UserError, match="Profiler: the settings of the run have one already"):
        Callbacks([profiler], [Profiler(iterations=[2])])


@pytest.mark.parametrize("settings", ["run.yaml", {"output": "run"}, None])
def test_what_is_no_config_is_refused(settings: Any) -> None:
    with pytest.raises(UserError, match=r"config = .*: expected settings, of sf\.load"):
        train(settings)


def test_no_callbacks_may_be_none(tmp_path: Path) -> None:
    small = config(tmp_path / "run", train__iterations=1)
    with pytest.raises(UserError, match="callbacks = 3: expected a list of callbacks"):
        train(small, callbacks=3)  # type: ignore[arg-type]
    assert train(small, callbacks=None).iteration == 1  # type: ignore[arg-type]


# -- ending a run ----------------------------------------------------------------------------------


class StopsAfter(Callback):
    def __init__(self, iterations: int, on_rank: int = 0) -> None:
        self.iterations = iterations
        self.on_rank = on_rank

    def on_iteration_end(self, run: Run, row: dict[str, Any]) -> None:
        if run.iteration == self.iterations and rank() == self.on_rank:
            run.stop("a part of the reward falls")


def test_a_callback_ends_a_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    small = config(tmp_path / "run", train__iterations=3)
    run = train(small, callbacks=[StopsAfter(1)])
    assert run.iteration == 1
    assert run.complete
    assert saved(run.folder) == [1]
    after = RunFolder(run.folder).evaluation("after")
    assert after is not None
    assert after["iteration"] == 1
    assert RunFolder(run.folder).facts["stopped"] == "a part of the reward falls"
    assert "ends after 1 iteration: a part of the reward falls" in " ".join(caplog.text.split())

    resumed = train(small, resume=True)  # it goes on if it is told to
    assert resumed.iteration == 3
    assert "stopped" not in RunFolder(run.folder).facts
    whole = train(config(tmp_path / "whole", train__iterations=3)).folder
    for name, tensor in weights(whole).items():
        assert torch.equal(tensor, weights(resumed.folder)[name])


@pytest.mark.fault(
    "a signal between the end that a callback asks for and its evaluation",
    "a resume ends the run there, with its final weights and evaluation; the next one goes on",
)
def test_an_end_that_a_signal_has_interrupted_is_the_end(tmp_path: Path) -> None:
    small = config(tmp_path / "run", train__iterations=3)

    def terminate(run: Run, folder: Path) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        wait_until(lambda: run.signals.number)  # a thread takes note of it

    with pytest.raises(Stopped):
        train(small, callbacks=[StopsAfter(1), Odd(on_checkpoint=terminate)])
    resumed = train(small, resume=True)
    assert (resumed.iteration, resumed.complete) == (1, True)
    assert RunFolder(resumed.folder).facts["stopped"] == "a part of the reward falls"
    assert train(small, resume=True).iteration == 3


# -- states ----------------------------------------------------------------------------------------


class Counting(Callback):
    def __init__(self, name: str = "count") -> None:
        self._name = name
        self.seen: list[int] = []

    @property
    def name(self) -> str:
        return self._name

    def on_rollout_end(self, run: Run, rollouts: Rollouts) -> None:
        self.seen.append(rollouts.iteration)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.seen = [*state["seen"]]


def test_a_resume_restores_states(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    run = train(config(tmp_path / "run"), callbacks=[Counting(), Counting("gone")]).folder
    state = read_json(RunFolder(run).checkpoint(2) / STATE)
    assert state["callbacks"] == {"count": {"seen": [0, 1]}, "gone": {"seen": [0, 1]}}

    counting, new = Counting(), Counting("new")
    train(config(tmp_path / "run", train__iterations=3), callbacks=[counting, new], resume=True)
    assert counting.seen == [0, 1, 2]
    assert new.seen == [2]
    told = " ".join(caplog.text.split())
    assert "note: callbacks without a state in the checkpoint: new" in told
    assert "note: the state of these callbacks is lost: gone" in told


@pytest.mark.parametrize("hook", ["on_update_start", "on_update_end"])
def test_an_iteration_that_is_rolled_back_rolls_states_back(hook: str, tmp_path: Path) -> None:
    """The state is that of the last whole iteration, as the weights are; also before an update."""
    small = config(tmp_path / "run", train__optimizer_steps=2)
    with pytest.raises(CallbackError, match=f"Faulty, {hook}"):
        train(small, callbacks=[Counting(), Faulty(hook, at=3)])
    counting = Counting()
    train(small, callbacks=[counting], resume=True)
    assert counting.seen == [0, 1]


def test_a_checkpoint_of_a_version_without_states_is_resumed(tmp_path: Path) -> None:
    run = train(config(tmp_path / "run")).folder
    folder = RunFolder(run).checkpoint(2)
    file = folder / STATE
    state = read_json(file)
    del state["callbacks"]
    file.write_text(json.dumps(state))
    manifest = read_json(folder / "manifest.json")
    from sage_fast.run_folder import digest

    manifest["files"][STATE] = digest(file)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    again = train(config(tmp_path / "run", train__iterations=3), resume=True)
    assert again.iteration == 3


def test_a_state_that_is_not_json_is_named(tmp_path: Path) -> None:
    class Odd(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"weights": torch.zeros(2)}

    with pytest.raises(CallbackError, match=r"Odd, state_dict: expected plain JSON: .*Tensor"):
        train(config(tmp_path / "run"), callbacks=[Odd()])


# -- the setting -----------------------------------------------------------------------------------

MODULE = """
from sage_fast.callbacks.interface import Callback

class Writes(Callback):
    def __init__(self, column="mine", value=1.0):
        self.column, self.value = column, value

    @property
    def name(self):
        return self.column

    def on_iteration_end(self, run, row):
        row[self.column] = self.value

ready = Writes("ready", 3.0)
text = "nothing"

class Fails(Callback):
    def __init__(self):
        raise OSError("no server")
"""


def test_callbacks_are_named_in_the_settings(tmp_path: Path) -> None:
    """Beside the settings file, by class with and without arguments, or by object."""
    (tmp_path / "own_callbacks.py").write_text(MODULE)
    names = (
        "[own_callbacks:Writes, {name: 'own_callbacks:Writes', args: {column: two, value: 2}}, "
        "own_callbacks:ready]"
    )
    (tmp_path / "own.yaml").write_text(f"base: {PAPER}\ncallbacks: {names}\n")
    own = load(tmp_path / "own.yaml")
    assert own.callbacks[0] == f"{tmp_path}/own_callbacks:Writes"
    small = config(tmp_path / "run", callbacks=own.callbacks)
    run = train(small, callbacks=[Columns()])
    row = read_metrics(run.folder / "metrics.jsonl")[0]
    assert (row["mine"], row["two"], row["ready"], row["mine/number"]) == (1.0, 2, 3.0, 1.5)
    assert [*row][-6:-3] == ["mine", "two", "ready"], "those of the settings come first"
    facts = RunFolder(run.folder).facts
    assert facts["contents"]["callbacks[0]"].startswith("code (")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (1, r"callbacks\[0\] = 1: expected 'package.module:name'"),
        ("Name", r"callbacks\[0\] = 'Name': expected 'package.module:name'"),
        ({"nam": "a:b"}, r"callbacks\[0\]: unknown key 'nam'; expected one of name, args; did you"),
        ({"args": {}}, r"callbacks\[0\]: 'name' is missing"),
        ({"name": "a:b", "args": [1]}, r"callbacks\[0\]\.args = \[1\]: expected a mapping"),
    ],
)
def test_an_entry_of_another_form_is_refused(entry: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        build({"callbacks": [entry]})


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("no_such_module_x:A", "no module 'no_such_module_x' is installed"),
        ("{0}/own_callbacks:Wrties", "has no 'Wrties'.*did you mean 'Writes'"),
        ("{0}/own_callbacks:text", "expected a class that derives from sage_fast.Callback"),
        ("{0}/own_callbacks:Fails", r"Fails\(\) failed: .*OSError: no server"),
        ({"name": "{0}/own_callbacks:ready", "args": {"a": 1}}, "is not a class, so it takes no"),
        ({"name": "{0}/own_callbacks:Writes", "args": {"colum": 1}}, "no 'colum'.*'column'"),
    ],
)
def test_a_callback_that_cannot_be_made_is_refused_early(
    entry: Any, message: str, tmp_path: Path
) -> None:
    (tmp_path / "own_callbacks.py").write_text(MODULE)
    placed = json.loads(json.dumps(entry).replace("{0}", str(tmp_path)))
    with pytest.raises(UserError, match=message):
        train(config(tmp_path / "run", callbacks=[placed]))
    assert not (tmp_path / "run").exists()


def test_a_module_that_is_not_there_is_told_before_pytorch_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.yaml").write_text(f"base: {PAPER}\ncallbacks: [no_such_module_x:A]\n")
    assert main(["train", str(tmp_path / "own.yaml"), "--dry-run"]) == 2
    assert "callbacks[0] = 'no_such_module_x:A'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("text", "expected a class that derives from sage_fast.Callback"),
        ("Misspelt", "on_iteration_finish is no hook"),
    ],
)
def test_a_dry_run_refuses_what_is_no_callback(
    entry: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the run would."""
    misspelt = "class Misspelt(Callback):\n    def on_iteration_finish(self, run, row): ...\n"
    (tmp_path / "dry_callbacks.py").write_text(MODULE + misspelt)
    (tmp_path / "own.yaml").write_text(f"base: {PAPER}\ncallbacks: ['dry_callbacks:{entry}']\n")
    assert main(["train", str(tmp_path / "own.yaml"), "--dry-run"]) == 2
    assert message in capsys.readouterr().err


# -- the best checkpoint ---------------------------------------------------------------------------


def test_the_best_checkpoint_is_saved_when_an_evaluation_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also between two checkpoints of the interval; one that is no better is not."""
    rewards = {"before": 9.0, "iteration-000001": 1.0, "iteration-000002": 3.0}
    rewards |= {"iteration-000003": 2.0, "after": 0.0}

    def composite(scores: Any, weights: Any) -> list[float]:
        names = {0: "before", 5: "after"}
        name = names.get(scores["iteration"], f"iteration-{scores['iteration']:06d}")
        return [rewards.get(name, 0.0)] * len(scores["prompts"])

    monkeypatch.setattr("sage_fast.callbacks.checkpoints.composite", composite)
    recorder = Recorder()
    small = config(
        tmp_path / "run",
        train__iterations=5,
        train__checkpoint_interval=4,
        train__keep_checkpoints=1,
        eval__interval=1,
    )
    train(small, callbacks=[recorder])
    made = [call[1] for call in recorder.calls if call[0] == "checkpoint"]
    assert made == [f"iteration-{number:06d}" for number in (1, 2, 4, 5)]
    assert saved(tmp_path / "run") == [2, 5]


# -- several ranks ---------------------------------------------------------------------------------


class FailsOnOne(Callback):
    def on_iteration_end(self, run: Run, row: dict[str, Any]) -> None:
        if run.iteration == 2 and rank() == 1:
            raise ValueError("on one rank")


def _train_on_ranks(folder: Path, name: str) -> None:
    small = config(folder / "run", train__iterations=3, train__prompts_per_iteration=2)
    kinds: dict[str, Callback] = {"error": FailsOnOne(), "stop": StopsAfter(1, on_rank=1)}
    try:
        run = train(small, callbacks=[kinds[name]])
    except (CallbackError, RankError) as error:
        assert name == "error"
        (folder / f"error-{rank()}").write_text(f"{type(error).__name__}: {error}")
    else:
        assert name == "stop"
        assert run.iteration == 1


def test_an_error_on_one_rank_leaves_a_checkpoint(tmp_path: Path) -> None:
    statuses = run_ranks(_train_on_ranks, 2, tmp_path, "error")
    assert statuses == [0, 0], "\n".join(screens(tmp_path))
    first, second = ((tmp_path / f"error-{number}").read_text() for number in range(2))
    told = "FailsOnOne, on_iteration_end: ValueError: on one rank"
    assert first.startswith("RankError: rank 1 failed: CallbackError: callback ")
    assert told in first
    assert second.startswith("CallbackError: callback ")
    assert told in second
    assert saved(tmp_path / "run") == [2]
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == 2


def test_one_rank_can_end_a_run(tmp_path: Path) -> None:
    statuses = run_ranks(_train_on_ranks, 2, tmp_path, "stop")
    assert statuses == [0, 0], "\n".join(screens(tmp_path))
    assert saved(tmp_path / "run") == [1]
    assert RunFolder(tmp_path / "run").evaluation("after") is not None


# -- the documentation -----------------------------------------------------------------------------


def test_the_example_ends_when_a_part_falls(tmp_path: Path) -> None:
    """`docs/how-to/callbacks.md` has the same classes; tests/test_docs.py runs its blocks."""
    file = Path(__file__).parent.parent / "examples" / "callback.py"
    spec = importlib.util.spec_from_file_location("callback_example", file)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    run = example.main(str(tmp_path / "run"), iterations=3, most=-100.0)  # at once
    assert run.iteration == 1
    assert RunFolder(run.folder).facts["stopped"].startswith("vq has fallen from ")
    assert read_json(RunFolder(run.folder).checkpoint(1) / STATE)["callbacks"].keys() == {
        "StopWhenFalling"
    }
    (row,) = read_metrics(run.folder / "metrics.jsonl")
    assert sum(row["advantages"]["counts"]) == run.config.train.samples
    source = file.read_text()
    assert [line for line in source.splitlines() if "import" in line] == ["import sage_fast as sf"]


def test_a_callback_may_name_itself_in_its_init() -> None:
    class Named(Callback):
        def __init__(self, name: str) -> None:
            self.name = name

    assert [Named("first").name, Named("second").name] == ["first", "second"]
    assert Callback().name == "Callback"
