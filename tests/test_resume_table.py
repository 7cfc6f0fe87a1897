"""The tables of what a resume takes over: every setting and everything in a checkpoint has a row,
which holds."""

import dataclasses
import shutil
from collections import Counter
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch

from sage_fast.algorithm.iteration_plan import prompts_of_iteration
from sage_fast.cli import main
from sage_fast.config.fields import Setting, settings_of
from sage_fast.config.loader import build, leaves
from sage_fast.config.schema import Config, TrainConfig
from sage_fast.data.prompt_order import PromptOrder
from sage_fast.parallel.optimizers import learning_rate
from sage_fast.run.checkpoint import OPTIMIZER, load_checkpoint, save_checkpoint
from sage_fast.run.claim import check_output
from sage_fast.run.resume import CHECKPOINT, KINDS, RULES, rule_of
from sage_fast.run_folder import STATE, TRAINING, RunFolder
from sage_fast.trainer import Trainer
from sage_fast.util.captions import PromptKey
from sage_fast.util.errors import UserError
from sage_fast.util.files import read_json, read_metrics
from tests.test_cli import PAPER, SMALL
from tests.test_resume import OTHERS as KEPT_OTHERS
from tests.tiny import settings, tiny_trainer

SETTINGS = settings_of(Config)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two iterations, whose settings have another value for each of them."""
    run = tmp_path_factory.mktemp("begun") / "run"
    assert main(["train", str(PAPER), "--output", str(run), "--quiet", *SMALL]) == 0
    return run


# -- every setting ---------------------------------------------------------------------------------

OTHERS: dict[str, Any] = KEPT_OTHERS | {
    "callbacks": ["tests.test_callbacks:Columns"],
    "data.prompts": "testbed:heldout",
    "data.negative_prompt": "a small red ball",
    "data.embedding_cache": "elsewhere",
    "reward.weights": {"vq": 2.0},
    "reward.device": "cpu",
    "train.eps": 1e-7,
    "train.deepspeed_config": {"wall_clock_breakdown": True},
    "eval.judge": "testbed",
    "tracking.trackers": [],
    "profile.iterations": [1],
    "kl.lambda_max": 0.5,
}
"""Another value of settings for which `other` finds none."""
WITH = {"sampling.window_per_prompt": {"sampling.sde_window": 2}}
"""Setting -> what its other value needs."""


def other(setting: Setting, value: Any) -> Any:
    """Return a valid value that differs from the run's."""
    if setting.name in OTHERS:
        return OTHERS[setting.name]
    if setting.choices:
        return next(choice for choice in setting.choices if choice != value)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + int(setting.bounds.get("every", 1))
    assert isinstance(value, float), f"{setting.name}: give it a value in OTHERS"
    return value / 2 if value else 0.5


def test_every_setting_has_one_row_and_every_row_a_setting() -> None:
    rows = Counter(name for rule in RULES for name in rule.settings)
    assert rows == dict.fromkeys(SETTINGS, 1)
    assert {rule.kind for rule in RULES} == set(KINDS)


@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "output"])
def test_every_setting_is_refused_or_accepted_as_its_row_says(name: str, begun: Path) -> None:
    config = RunFolder(begun).settings()
    old = attrgetter(name)(config)
    new = other(SETTINGS[name], old)
    assert new != old
    tree = (
        leaves(dataclasses.asdict(config)) | {"output": str(begun), name: new} | WITH.get(name, {})
    )
    if name == "reward.several":  # takes the place of the single one
        tree = {
            key: value
            for key, value in tree.items()
            if not key.startswith("reward.") or key == name
        }
    changed = build(tree)
    if rule_of(name).kind == "kept":
        with pytest.raises(
            UserError, match=r"the run in .* began with .* and keeps it; continue without --"
        ):
            check_output(changed, resume=True)
    else:
        check_output(changed, resume=True)


FREE = {
    "sampling.sampler": "dance",
    "sampling.eta": 0.6,
    "sampling.steps": 5,
    "sampling.batch_size": 2,
    "sampling.offload_trajectories": True,
    "train.group_size": 2,
    "train.prompts_per_iteration": 3,
    "train.optimizer_steps": 2,
    "train.learning_rate": 5e-4,
    "train.schedule": "linear",
    "train.warmup_steps": 1,
    "train.weight_decay": 0.1,
    "train.eps": 1e-9,
    "train.max_grad_norm": 0.5,
    "train.batch_size": 3,
    "train.checkpoint_interval": 1,
    "objective.clip_range": 0.01,
    "objective.advantage_std": "batch",
    "kl.strategy": "fixed",
    "kl.anchor_interval": 1,
    "kl.lambda_max": 0.3,
    "kl.warmup_steps": 3,
    "kl.history": 3,
    "reward.weights": "{vq: 2}",
    "reward.on_failure": "stop",
    "data.prompts": "testbed:heldout",
    "eval.interval": 1,
    "tracking.trackers": "[]",
}


@pytest.mark.fault(
    "a resume with 28 other settings that are free", "each is applied from the next iteration on"
)
def test_settings_that_are_free_change_in_one_resume(begun: Path, tmp_path: Path) -> None:
    run = shutil.copytree(begun, tmp_path / "run")
    assert all(rule_of(name).kind != "kept" for name in FREE)
    options = [text for name, value in FREE.items() for text in (f"--{name}", str(value))]
    assert (
        main(["train", str(run), "--resume", "--quiet", "--train.iterations", "4", *options]) == 0
    )
    rows = read_metrics(run / "metrics.jsonl")
    assert [row["iteration"] for row in rows] == [0, 1, 2, 3]
    assert [row["optimizer_step"] for row in rows] == [4, 8, 10, 12]
    # 8 planned updates, 1 of warm-up: the last of iteration 2 is number 5, that of iteration 3
    # number 7.
    assert [row["learning_rate"] for row in rows[2:]] == pytest.approx(
        [5e-4 * (1 - 4 / 7), 5e-4 * (1 - 6 / 7)]
    )


# -- everything in a checkpoint --------------------------------------------------------------------


def test_everything_in_a_checkpoint_has_a_row(tmp_path: Path) -> None:
    held: set[str] = set()
    for optimizer in ("adamw", "muon"):
        run = tmp_path / optimizer
        trainer = tiny_trainer(
            settings(train__ema_decay=0.9, kl__strategy="dual", train__optimizer=optimizer)
        )
        trainer.iteration(0)
        counters = trainer.state_dict() | {"callbacks": {}}  # as a run saves them
        save_checkpoint(run, 1, trainer.engine, counters, trainer.anchor)
        folder = RunFolder(run).checkpoint(1)
        kinds = {path.name.rsplit("-", 3)[0] for path in (folder / TRAINING).glob("*.safetensors")}
        held |= {*read_json(folder / STATE), *read_json(folder / TRAINING / OPTIMIZER), *kinds}
    assert held == CHECKPOINT.keys()


# -- what is converted -----------------------------------------------------------------------------


def rates(before: TrainConfig, after: TrainConfig, resumed_at: int) -> list[float]:
    """Learning rate of every update of a run that is resumed with other settings."""
    found = []
    for index in range(after.iterations):
        config = before if index < resumed_at else after
        for number in range(config.optimizer_steps):
            planned = index * config.optimizer_steps + number
            found.append(learning_rate(config, len(found), planned))
    return found


def test_a_decay_ends_with_the_run_whatever_the_updates_of_an_iteration_were() -> None:
    """By hand: progress is (i + u / n) / iterations."""
    four = TrainConfig(learning_rate=1.0, schedule="linear", iterations=2, optimizer_steps=4)
    one = TrainConfig(learning_rate=1.0, schedule="linear", iterations=6, optimizer_steps=1)
    begun = [1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8]
    assert rates(four, one, 2) == pytest.approx([*begun, 4 / 6, 3 / 6, 2 / 6, 1 / 6])

    two = dataclasses.replace(one, iterations=2)
    longer = dataclasses.replace(four, iterations=4)
    eighths = [1 - (2 + k / 4) / 4 for k in range(8)]
    assert rates(two, longer, 2) == pytest.approx([1, 1 / 2, *eighths])
    assert rates(two, longer, 2)[-1] == pytest.approx(1 / 16)


@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear"])
@pytest.mark.parametrize("updates", [1, 3, 4])
def test_plain_runs_have_the_bits_of_a_count_of_updates(schedule: Any, updates: int) -> None:
    config = TrainConfig(
        learning_rate=3e-4, schedule=schedule, iterations=7, optimizer_steps=updates, warmup_steps=2
    )
    assert rates(config, config, 0) == [learning_rate(config, step) for step in range(7 * updates)]


def test_a_warm_up_counts_the_updates_that_were_made() -> None:
    config = TrainConfig(learning_rate=1.0, schedule="linear", iterations=10, warmup_steps=2)
    # four of five were skipped: the second step of the warm-up
    assert learning_rate(config, 1, 5) == 1.0
    assert learning_rate(config, 2, 6) == pytest.approx(1 - 4 / 8)
    more = dataclasses.replace(config, optimizer_steps=4, warmup_steps=8)
    # over, and the decay has not begun: 4 of 40 updates, 8 of warm-up
    assert learning_rate(more, 20, 4) == 1.0


def test_a_skipped_update_takes_its_place_in_the_decay(monkeypatch: pytest.MonkeyPatch) -> None:
    """All groups of the first two iterations are equal, so that nothing is trained in them."""
    trainer = tiny_trainer(
        settings(train__schedule="linear", train__iterations=4, train__learning_rate=1.0)
    )
    advantages = trainer.advantages

    def equal(*given: Any) -> Any:
        found, kept = advantages(*given)
        return found, [False] * len(kept)

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "advantages", equal)
        assert [trainer.iteration(index)["learning_rate"] for index in (0, 1)] == [1.0, 0.75]
    assert trainer.engine.steps == 0
    assert trainer.iteration(2)["learning_rate"] == 0.5
    assert trainer.engine.optimizers[0].param_groups[0]["lr"] == 0.5


def resumed(
    run: Path, first: Trainer, iteration: int, config: Config, prompts: Any = None
) -> Trainer:
    """Return a trainer with other settings that goes on from the state of `first`."""
    save_checkpoint(run, iteration, first.engine, first.state_dict(), first.anchor)
    second = tiny_trainer(config)
    if prompts is not None:
        second.prompts = prompts
        second.prompt_order = PromptOrder(prompts, config.train.prompts_per_iteration)
    found = load_checkpoint(run, second.engine, second.state_dict())
    assert found is not None
    second.load_state_dict(found[1], found[2])
    return second


def taken(trainer: Trainer, iterations: range) -> list[PromptKey]:
    plans = [trainer.plan(index) for index in iterations]
    return [sample.prompt for plan in plans for sample in plan.samples if sample.index == 0]


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2), (1, 3), (3, 2)])
def test_an_epoch_has_every_prompt_once_whatever_an_iteration_takes(
    before: int, after: int, tmp_path: Path
) -> None:
    first = tiny_trainer(settings(train__prompts_per_iteration=before))
    order = list(first.prompts)
    done = 2
    found = taken(first, range(done))
    second = resumed(tmp_path / "1", first, done, settings(train__prompts_per_iteration=after))
    found += taken(second, range(done, done + 3))
    third = resumed(tmp_path / "2", second, done + 3, settings(train__prompts_per_iteration=before))
    found += taken(third, range(done + 3, done + 3 + 2 * len(order)))

    epochs = [
        found[start : start + len(order)]
        for start in range(0, len(found) - len(order) + 1, len(order))
    ]
    assert len(epochs) >= 2
    assert all(sorted(epoch) == sorted(order) for epoch in epochs)
    plain = [
        order[i]
        for k in range(len(found))
        for i in prompts_of_iteration(len(order), 1, k, first.config.seed)
    ]
    assert found == plain, "the order is that of a run that never changed"


def test_other_prompts_begin_an_epoch_of_their_own(tmp_path: Path) -> None:
    first = tiny_trainer(settings())
    reversed_file = list(first.prompts)[::-1]
    assert len(reversed_file) > 2
    second = resumed(tmp_path / "1", first, 1, settings(), reversed_file)
    assert second.prompt_order.offset + 1 * 2 == len(reversed_file), "the second epoch"
    third = resumed(tmp_path / "2", second, 2, settings(), reversed_file)
    assert third.prompt_order.offset == second.prompt_order.offset, "the same prompts go on"


def test_a_fixed_anchor_is_the_start_of_the_run_after_any_strategy(tmp_path: Path) -> None:
    """The checkpoint's anchor has moved since; a resume that took it would penalise the wrong
    distance."""
    for number, strategy in enumerate(("moving", "none", "fixed")):
        first = tiny_trainer(settings(kl__strategy=strategy, kl__anchor_interval=1))
        start = first.policy.snapshot()
        first.iteration(0)
        second = resumed(tmp_path / str(number), first, 1, settings(kl__strategy="fixed"))
        assert second.anchor is not None
        assert all(torch.equal(second.anchor[name], tensor) for name, tensor in start.items())
        assert not second.anchor_is_current
        assert any(
            not torch.equal(second.policy.snapshot()[name], tensor)
            for name, tensor in start.items()
        )
        moving = resumed(tmp_path / f"{number}-moving", second, 1, settings(kl__strategy="moving"))
        assert moving.anchor is not None
