"""The loop as a whole: on-policy start, determinism, resume, ranks, dropped samples, gates."""

import dataclasses
import json
import math
import os
import socket
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sage_fast.algorithm.iteration_plan import IterationPlan, Transition
from sage_fast.algorithm.objective import Objective
from sage_fast.algorithm.trainable import check_trainable
from sage_fast.commands.sample_videos import generate
from sage_fast.config.schema import RewardConfig
from sage_fast.eval.evaluation import evaluate
from sage_fast.loading import Setup
from sage_fast.ops import transition_score
from sage_fast.rewards import CompositeReward, Scores, join_scores
from sage_fast.rollout.batch import Batch
from sage_fast.rollout.graphs import StepGraphs
from sage_fast.rollout.recorder import CudaRecorder
from sage_fast.run.checkpoint import load_checkpoint, save_checkpoint
from sage_fast.run.facts import describe
from sage_fast.testbed.world import train_prompts
from sage_fast.trainer import Trainer
from sage_fast.util.errors import NonFiniteError, ParityError, RewardError, UserError
from tests.tiny import (
    BrightnessReward,
    keys_of,
    planned,
    rounding_of_advantages,
    settings,
    tiny_trainer,
)

PROMPTS = keys_of(train_prompts())


def numbers(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if not key.startswith("time/")}


def test_first_update_is_on_policy() -> None:
    row = tiny_trainer(settings()).iteration(0)
    assert row["ratio/min"] == pytest.approx(1, abs=2e-6)
    assert row["ratio/max"] == pytest.approx(1, abs=2e-6)
    assert row["ratio/clip_fraction"] == 0
    assert row["log_prob/max_delta"] < 2e-6
    assert row["log_prob/parity"] < 1e-4 / 10
    assert row["kl/anchor"] == pytest.approx(0, abs=1e-9)
    assert row["grad_norm"] > 0
    assert all(value is not None for value in row["velocity_grad_norm"])


def test_second_update_moves() -> None:
    row = tiny_trainer(settings(train__optimizer_steps=2)).iteration(0)
    assert row["log_prob/max_delta"] > 1e-6
    assert row["kl/anchor"] > 0
    assert row["optimizer_step"] == 2


@pytest.mark.parametrize("tuning", ["lora", "full"])
def test_same_seed_same_metrics(tuning: str) -> None:
    config = settings(train__optimizer_steps=2, model__tuning=tuning, train__ema_decay=0.9)
    first, second = tiny_trainer(config), tiny_trainer(config)
    for index in range(2):
        assert numbers(first.iteration(index)) == numbers(second.iteration(index))
    other = tiny_trainer(
        settings(train__optimizer_steps=2, model__tuning=tuning, seed=1)
    ).iteration(0)
    assert other["reward/mean"] != first.iteration(0)["reward/mean"]


@pytest.mark.parametrize("mode", ["full", "attention"])
def test_checkpointing_of_activations_changes_nothing(mode: str) -> None:
    plain = tiny_trainer(settings()).iteration(0)
    checkpointed = tiny_trainer(settings(model__gradient_checkpointing=mode)).iteration(0)
    assert checkpointed["grad_norm"] == plain["grad_norm"]


def test_micro_batches_and_rollout_batches_do_not_matter() -> None:
    """Micro-batches of 1, 4 and 64 accumulate to the same update; batches of 2 give the same
    rollouts."""
    rows = [
        tiny_trainer(settings(train__batch_size=size, sampling__batch_size=chunk)).iteration(0)
        for size, chunk in ((64, 8), (4, 8), (1, 2))
    ]
    for row in rows[1:]:
        assert row["grad_norm"] == pytest.approx(rows[0]["grad_norm"], rel=1e-3)
        assert row["loss"] == pytest.approx(rows[0]["loss"], abs=rounding_of_advantages(row))
        assert row["reward/mean"] == pytest.approx(rows[0]["reward/mean"], rel=1e-5)


def test_equalizer_levels_the_gradient_over_steps() -> None:
    """Figure 4: the gradient that reaches the network varies widely over steps without it, and
    hardly with it."""
    overrides = {"sampling__steps": 10, "sampling__sampler": "flow", "train__group_size": 4}

    def spread(equalizer: bool) -> float:
        norms = tiny_trainer(settings(objective__equalizer=equalizer, **overrides)).iteration(0)[
            "velocity_grad_norm"
        ]
        return max(norms) / min(norms)

    assert spread(True) < 1.6
    assert spread(False) > 2.5


def test_anchor_moves_and_is_not_computed_needlessly(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = tiny_trainer(
        settings(kl__strategy="moving", kl__anchor_interval=2, train__parity_gate=False)
    )
    forwards = 0
    original = trainer.policy.velocity

    def counted(*args: Any) -> Tensor:
        nonlocal forwards
        forwards += torch.is_grad_enabled() is False
        return original(*args)

    monkeypatch.setattr(trainer.policy, "velocity", counted)
    counts = []
    for index in range(4):
        forwards = 0
        row = trainer.iteration(index)
        counts.append(forwards)
        assert (row["kl/anchor"] > 1e-12) == (index % 2 == 1)
    # 5 steps for the rollout, and 5 more if the anchor is not the rollout policy (every second
    # iteration here).
    assert counts == [5, 10, 5, 10]


def test_fixed_anchor_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = tiny_trainer(settings(kl__strategy="fixed", kl__anchor_interval=1))
    start = trainer.policy.snapshot()
    trainer.iteration(0)
    trainer.iteration(1)
    assert trainer.anchor is not None
    assert all(torch.equal(trainer.anchor[name], start[name]) for name in start)


def test_shared_initial_noise() -> None:
    samples = planned(settings(sampling__shared_initial_noise=True), PROMPTS).samples
    assert len({sample.seed for sample in samples}) == len(samples) == 6
    assert len({(sample.group, sample.latent_seed) for sample in samples}) == 2
    assert len({sample.latent_seed for sample in samples}) == 2


def test_no_seed_is_used_twice() -> None:
    config = settings(train__prompts_per_iteration=4)
    seeds = [
        sample.seed for index in range(50) for sample in planned(config, PROMPTS, index).samples
    ]
    assert len(set(seeds)) == len(seeds) == 50 * 4 * 3


def test_every_kept_sample_is_in_every_update() -> None:
    config = settings(train__optimizer_steps=2, sampling__steps=6)
    schedule = planned(config, PROMPTS).updates([True, False, True, True, True, True])
    assert [len(update) for update in schedule] == [15, 15]
    assert {i for i, _ in schedule[0]} == {i for i, _ in schedule[1]} == {0, 2, 3, 4, 5}
    assert sorted(schedule[0] + schedule[1]) == [(i, t) for i in (0, 2, 3, 4, 5) for t in range(6)]


class ConstantReward:
    def __call__(self, videos: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
        return {part: torch.ones(len(prompts)) for part in ("vq", "mq", "ta")}


def test_equal_groups_are_dropped_and_counted() -> None:
    trainer = tiny_trainer(settings(), ConstantReward())
    before = trainer.policy.snapshot()
    row = trainer.iteration(0)
    assert row["reward/zero_std_groups"] == 1
    assert row["update/skipped"] == 1
    assert trainer.engine.steps == 0
    assert all(
        torch.equal(tensor, before[name]) for name, tensor in trainer.policy.snapshot().items()
    )


class NanReward(BrightnessReward):
    """Returns NaN for the first sample of a batch."""

    def __call__(self, videos: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
        parts = super().__call__(videos, prompts)
        parts["mq"] = parts["mq"].clone()
        parts["mq"][0] = math.nan
        return parts


class RaisingReward(BrightnessReward):
    """Fails for about half of the videos."""

    def __call__(self, videos: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
        if len(prompts) > 1 or int(1e6 * float(videos.mean())) % 2:
            raise OSError("scoring server went away")
        return super().__call__(videos, prompts)


class LateFailure(BrightnessReward):
    """Scores the check at the start, one evaluation and one iteration, then fails."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, videos: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
        self.calls += 1
        if self.calls > 3:
            raise OSError("scoring server went away later")
        return super().__call__(videos, prompts)


def test_failed_rewards_stop_the_run() -> None:
    stops = settings(reward__on_failure="stop")
    with pytest.raises(
        RewardError,
        match=r"(?s)for prompt 'a .*'mq' is nan, not finite.*reward.on_failure = 'drop'",
    ):
        tiny_trainer(stops, NanReward()).iteration(0)
    with pytest.raises(
        RewardError, match=r"(?s)OSError: scoring server went away.*reward.on_failure = 'drop'"
    ):
        tiny_trainer(stops, RaisingReward()).iteration(0)


def test_failed_rewards_can_be_dropped_and_are_counted() -> None:
    row = tiny_trainer(settings(), NanReward()).iteration(0)
    assert row["reward/dropped"] == row["reward/retried"] == 1
    assert row["reward/dropped_groups"] == 0
    assert math.isfinite(row["reward/mean"])
    assert row["grad_norm"] > 0
    row = tiny_trainer(settings(reward__max_dropped=1), RaisingReward()).iteration(0)
    assert 0 < row["reward/dropped"] < 6
    assert row["reward/retried"] == 6
    with pytest.raises(
        RewardError, match=r"of 6 samples have no score, more than reward.max_dropped = 0.1"
    ) as error:
        tiny_trainer(settings(reward__max_dropped=0.1), RaisingReward()).iteration(0)
    assert error.value.on_all_ranks, "so that a checkpoint is saved"


def test_as_many_may_be_dropped_as_the_decimal_says() -> None:
    """0.29 of 100 are 29, though the product of the two floats is below it."""
    assert 0.29 * 100 < 29
    reward = CompositeReward([], RewardConfig(max_dropped=0.29))
    values = torch.ones(100)
    values[:29] = math.nan
    reward.check_share(Scores(rewards=values, parts={}))
    values[29] = math.nan
    with pytest.raises(RewardError, match="30 of 100 samples"):
        reward.check_share(Scores(rewards=values, parts={}))


class LeavesOne(BrightnessReward):
    """Leaves one sample of the first group, whose three samples come first in the only batch."""

    def __call__(self, videos: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
        parts = super().__call__(videos, prompts)
        parts["mq"][[i for i, prompt in enumerate(prompts) if prompt == prompts[0]][1:]] = math.nan
        return parts


def test_a_sample_left_alone_in_its_group_is_not_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not trained even if groups of equal rewards are."""
    kept: list[bool] = []

    updates = IterationPlan.updates

    def noting(plan: IterationPlan, trained: Sequence[bool]) -> Any:
        kept[:] = trained
        return updates(plan, trained)

    monkeypatch.setattr(IterationPlan, "updates", noting)
    config = settings(
        objective__drop_equal_groups=False, reward__max_dropped=0.5, reward__retries=0
    )
    row = tiny_trainer(config, LeavesOne()).iteration(0)
    assert row["reward/dropped"] == 2
    assert row["reward/dropped_groups"] == 1
    assert sorted([kept[:3], kept[3:]]) == [[False] * 3, [True] * 3]


def test_missing_reward_part() -> None:
    config = settings(**{"reward__weights__aesthetics": 1.0})
    with pytest.raises(
        UserError,
        match=r"reward.weights names 'aesthetics'; reward 'testbed' returns \['mq', 'ta', 'vq'",
    ):
        tiny_trainer(config).reward.check(
            config.sampling, keys_of(["a small red ball moves left slowly"])
        )
    with pytest.raises(RewardError, match=r"without \['aesthetics'\]"):
        tiny_trainer(config).iteration(0)


def test_parity_gate_stops_a_run_that_cannot_reproduce_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer = tiny_trainer(settings())
    original = trainer.policy.velocity

    def drifting(*args: Any) -> Tensor:
        return original(*args) * (1.1 if torch.is_grad_enabled() else 1.0)

    monkeypatch.setattr(trainer.policy, "velocity", drifting)
    before = trainer.policy.snapshot()
    with pytest.raises(ParityError, match=r"log-prob by up to \d.*e-0\d.*clip_range"):
        trainer.iteration(0)
    assert all(
        torch.equal(tensor, before[name]) for name, tensor in trainer.policy.snapshot().items()
    )


def test_the_gate_measures_and_lets_pass_where_there_is_no_ratio(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer = tiny_trainer(settings(objective__surrogate="log_prob"))
    original = trainer.policy.velocity
    monkeypatch.setattr(
        trainer.policy,
        "velocity",
        lambda *args: original(*args) * (1.1 if torch.is_grad_enabled() else 1.0),
    )
    assert trainer.iteration(0)["log_prob/parity"] > 1e-4


@pytest.mark.parametrize("overrides", [{}, {"objective__ratio": "centred"}])
def test_one_update_needs_no_velocities_of_the_rollout(overrides: dict[str, Any]) -> None:
    """In the first update the closed-form KL to the rollout policy and its gradient are 0, to
    rounding."""
    config = settings(kl__velocity_term="closed_form", **overrides)
    assert not Objective(config).stores_velocities
    config = config.replace({"train.optimizer_steps": 2})
    assert Objective(config).stores_velocities


@pytest.mark.parametrize(
    "kl",
    [
        {"kl__strategy": "stepwise"},
        {"kl__strategy": "dual", "kl__beta_pos": 0.0},
        {"kl__strategy": "dual", "kl__anchor_interval": 1},
        {"kl__strategy": "moving", "kl__anchor_interval": 1},
        {
            "kl__strategy": "moving",
            "kl__anchor_interval": 1,
            "objective__surrogate": "nft",
            "kl__feedback": "none",
        },
    ],
)
def test_a_kl_that_is_always_zero_is_refused(kl: dict[str, Any]) -> None:
    given = {"kl__velocity_term": "closed_form"} | kl
    with pytest.raises(
        UserError, match=r"train.optimizer_steps = 1: the KL of .* is 0.*at least 2"
    ):
        check_trainable(settings(**given))
    check_trainable(settings(**given, train__optimizer_steps=2))
    assert "kl__anchor_interval" not in kl or check_trainable(
        settings(**given | {"kl__anchor_interval": 2})
    )


def test_the_kl_of_an_anchor_that_is_refreshed_in_each_iteration_is_zero() -> None:
    """Which is why its settings are refused."""
    trainer = tiny_trainer(
        settings(kl__strategy="moving", kl__anchor_interval=1, kl__velocity_term="closed_form")
    )
    assert [trainer.iteration(index)["kl/anchor"] for index in range(3)] == pytest.approx(
        [0.0] * 3, abs=1e-12
    )


def test_the_rollouts_log_ratio_keeps_a_kl_that_an_anchor_of_one_step_has_not() -> None:
    check_trainable(
        settings(kl__strategy="dual", kl__anchor_interval=1, kl__velocity_term="rollout")
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"sampling__sampler": "cps", "sampling__eta": 1.5},
            r"sampling.eta = 1.5: cps is defined up to 1; the nearest",
        ),
    ],
)
def test_what_a_row_cannot_do_is_refused(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_trainable(settings(**overrides))


def test_non_finite_gradients_are_not_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = tiny_trainer(settings(train__parity_gate=False))
    nan = trainer.constants.equalizer * math.nan
    trainer.constants = dataclasses.replace(trainer.constants, equalizer=nan)
    before = trainer.policy.snapshot()
    with pytest.raises(NonFiniteError, match="nothing was updated"):
        trainer.iteration(0)
    assert all(
        torch.equal(tensor, before[name]) for name, tensor in trainer.policy.snapshot().items()
    )


def test_ode_has_nothing_to_train() -> None:
    with pytest.raises(ValueError, match="no stochastic step"):
        check_trainable(settings(sampling__sampler="ode"))
    with pytest.raises(ValueError, match=r"optimizer_steps = 9.*nearest valid value is 5"):
        check_trainable(settings(train__optimizer_steps=9))


def resume(trainer: Trainer, run: Path) -> int:
    found = load_checkpoint(run, trainer.engine)
    assert found is not None
    iteration, counters, anchor = found
    trainer.load_state_dict(counters, anchor)
    return iteration


@pytest.mark.parametrize("averaged", [False, True])
def test_resume_continues_as_if_never_stopped(averaged: bool, tmp_path: Path) -> None:
    config = settings(
        train__optimizer_steps=2, train__ema_decay=0.9, kl__anchor_interval=3,
        sampling__averaged_weights=averaged,
        train__parity_gate=not averaged,
    )  # fmt: skip
    whole = tiny_trainer(config)
    rows = [numbers(whole.iteration(index)) for index in range(3)]

    first = tiny_trainer(config)
    first.iteration(0)
    first.iteration(1)
    save_checkpoint(tmp_path, 2, first.engine, first.state_dict(), first.anchor)
    second = tiny_trainer(config)
    assert resume(second, tmp_path) == 2
    row = numbers(second.iteration(2))
    for key in ("log_prob/parity", "log_prob/rounding", "kl/rounding"):  # measured once per process
        row.pop(key, None)
    assert row == rows[2]
    for name, tensor in whole.policy.snapshot().items():
        assert torch.equal(second.policy.snapshot()[name], tensor), name
    assert whole.engine.ema is not None
    assert second.engine.ema is not None
    assert all(
        torch.equal(second.engine.ema[name], tensor) for name, tensor in whole.engine.ema.items()
    )


@pytest.mark.parametrize(
    ("setting", "before", "after"),
    [("kl__strategy", "none", "dual"), ("train__ema_decay", 0.0, 0.9)],
)
def test_resume_asks_for_what_the_checkpoint_lacks(
    setting: str, before: Any, after: Any, tmp_path: Path
) -> None:
    """A run cannot continue an anchor or an average that it did not have; it refuses instead of
    starting a new one."""
    first = tiny_trainer(settings(**{setting: before}))
    save_checkpoint(tmp_path, 0, first.engine, first.state_dict(), first.anchor)
    second = tiny_trainer(settings(**{setting: after}))
    with pytest.raises(UserError, match=f"{setting.replace('__', '.')} = {after!r}"):
        resume(second, tmp_path)


TWO_RANKS = """
import json, sys, torch
torch.set_num_threads(1)
from sage_fast.util.process_group import initialize
from sage_fast.util.ranks import shutdown
from sage_fast.util.ranks import rank
from tests.tiny import settings, tiny_trainer
device = initialize()
config = settings(train__optimizer_steps=2, train__group_size=4, objective__advantage_std="batch")
trainer = tiny_trainer(config, device=device)
rows = [trainer.iteration(i) for i in range(2)]
if rank() == 0:
    open(sys.argv[1], "w").write(json.dumps(rows))
shutdown()
"""


def on_two_ranks(code: str, folder: Path) -> Any:
    """Run `code` on two ranks; return the JSON that it writes into the file `sys.argv[1]`."""
    script, result = folder / "ranks.py", folder / "rows.json"
    script.write_text(code)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        f"--master-port={port}",
    ]
    done = subprocess.run(
        [*command, str(script), str(result)],
        cwd=Path(__file__).parent.parent,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(result.read_text())


@pytest.mark.gpu(2)
def test_two_gpus_train_as_one(tmp_path: Path) -> None:
    """Two ranks under NCCL make the rollouts and the update of one process; tests/test_ranks.py
    does this with gloo.

    Seeds follow the group, not the rank.
    """
    rows = on_two_ranks(TWO_RANKS, tmp_path)
    config = settings(
        train__optimizer_steps=2, train__group_size=4, objective__advantage_std="batch"
    )
    trainer: Trainer = tiny_trainer(config)
    for index, row in enumerate(rows):
        alone = trainer.iteration(index)
        for key in (
            "reward/mean", "reward/std", "advantage/abs_mean", "grad_norm", "kl/lambda",
            "ratio/mean"
        ):  # fmt: skip
            assert row[key] == pytest.approx(alone[key], rel=2e-3), (index, key)
        for ours, theirs in zip(alone["velocity_grad_norm"], row["velocity_grad_norm"]):
            assert theirs == pytest.approx(ours, rel=1e-2)


@pytest.mark.parametrize(("surrogate", "used"), [("clip", True), ("nft", False)])
def test_run_json_holds_the_equalizer_only_where_the_loss_uses_it(
    surrogate: str, used: bool, tmp_path: Path
) -> None:
    trainer = tiny_trainer(settings(objective__surrogate=surrogate, objective__equalizer=True))
    assert (describe(trainer, {}, tmp_path, 0)["equalizer"] is not None) == used


@pytest.mark.gpu
@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_a_gpu_trains_as_the_cpu(guidance: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeds are the same; rewards and updates agree to the rounding of other kernels."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    config = settings(
        model__tuning="full",
        train__optimizer_steps=2,
        train__ema_decay=0.9,
        sampling__guidance_scale=guidance,
    )
    here, there = tiny_trainer(config), tiny_trainer(config, device=torch.device("cuda"))
    there.graphs = StepGraphs(there.policy, CudaRecorder(), max_memory=math.inf)
    for index in range(2):
        expected, row = here.iteration(index), there.iteration(index)
        assert {key for key in row if not key.startswith("memory/")} == expected.keys()
        for key in ("reward/mean", "reward/std", "advantage/abs_mean", "grad_norm", "kl/anchor"):
            assert row[key] == pytest.approx(expected[key], rel=1e-2, abs=1e-7), (index, key)
        for key in ("ratio/min", "ratio/max"):
            assert row[key] == pytest.approx(expected[key], abs=1e-4), (index, key)
        assert row["velocity_grad_norm"] == pytest.approx(expected["velocity_grad_norm"], rel=1e-2)
    assert len(there.graphs) > 0


def test_what_is_held_in_memory_is_judged_again_with_the_optimizers_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer = tiny_trainer(settings(train__optimizer_steps=2, train__parity_gate=False))
    weights = sum(p.nbytes for p in trainer.policy.parameters().values())
    monkeypatch.setattr("sage_fast.parallel.plain.free_bytes", lambda device: 3 * weights)
    assert trainer.engine.remember()
    trainer.iteration(0)
    assert not trainer.engine.remember()  # with the optimizer's state it takes three times as much
    monkeypatch.setattr("sage_fast.parallel.plain.free_bytes", lambda device: 7 * weights)
    assert trainer.engine.remember()


def test_dummy_backward_takes_no_sample_that_was_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """0 x NaN is NaN, so a dropped sample with latents that are not finite would end the run."""
    trainer = tiny_trainer(settings(train__parity_gate=False))
    monkeypatch.setattr(trainer.policy.states, "padding", lambda count, backward=False: 1)
    update = trainer.update

    def dropped(batch: Batch, planned: Sequence[Transition], *others: Any) -> None:
        for (sample, _), state in batch.trajectories.states.items():
            state[:] = math.nan if sample == 0 else state
        update(
            batch,
            [transition for transition in planned if transition[0] != batch.numbers[0]],
            *others,
        )

    monkeypatch.setattr(trainer, "update", dropped)
    assert math.isfinite(trainer.iteration(0)["grad_norm"])


@pytest.mark.parametrize("batch_size", [1, 8])
def test_recorded_gradient_norm_is_that_at_the_velocity(
    batch_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare the closed-form norm of each step with the gradients that autograd delivers to the
    scored velocities."""
    trainer = tiny_trainer(settings(train__batch_size=batch_size, train__parity_gate=False))
    norms: dict[int, list[float]] = defaultdict(list)

    def watched(
        x: Tensor, x_next: Tensor, v: Tensor, coefs: Tensor, step: Tensor, *others: Any
    ) -> Any:
        def note(grad: Tensor) -> None:
            for index, norm in zip(step.tolist(), grad.flatten(1).norm(dim=1).tolist()):
                norms[index].append(norm)

        v.register_hook(note)
        return transition_score(x, x_next, v, coefs, step, *others)

    monkeypatch.setattr("sage_fast.rollout.replay.transition_score", watched)
    recorded = trainer.iteration(0)["velocity_grad_norm"]
    samples, transitions = 2 * 3, 2 * 3 * 5
    assert len(recorded) == 5
    # The loss is a mean over all transitions; the record has the transition's own loss, averaged
    # over the samples.
    for t, value in enumerate(recorded):
        assert len(norms[t]) == samples
        assert value == pytest.approx(sum(norms[t]) / samples * transitions, rel=1e-4), f"step {t}"


def test_videos_come_back_in_the_order_of_the_prompts() -> None:
    """Videos are sampled by length and returned in the order of the call; each is what it is
    alone."""
    setup = setup_of(1, sampling__batch_size=2)
    prompts = keys_of(
        ["a small red ball moves left quickly", "", "a big blue ball moves up slowly", ""]
    )
    seeds = torch.arange(4)
    videos = generate(setup, prompts, seeds)
    for i, prompt in enumerate(prompts):
        (alone,) = generate(setup, [prompt], seeds[i : i + 1])
        torch.testing.assert_close(videos[i], alone, rtol=1e-3, atol=1e-3)
    assert (videos[0] - videos[2]).abs().max() > 0.01
    assert (videos[1] - videos[3]).abs().max() > 0.01


def setup_of(videos: int, **changes: Any) -> Setup:
    trainer = tiny_trainer(settings(eval__num_prompts=videos, **changes))
    return Setup(
        resolved=trainer.resolved,
        model=trainer.model,
        reward=trainer.reward,
        prompts=PROMPTS,
        eval_prompts=PROMPTS,
        embeddings=trainer.embeddings,
    )


def test_the_first_rank_has_a_video_of_its_own_to_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank writes the files, so it gets a video even if there are more ranks than
    videos."""
    setup = setup_of(1)
    monkeypatch.setattr("sage_fast.eval.evaluation.data_size", lambda: 2)
    counts = []
    for number in (0, 1):
        monkeypatch.setattr("sage_fast.eval.evaluation.data_rank", lambda number=number: number)
        scores, videos = evaluate(setup, iteration=0)
        counts.append((len(videos), len(scores["reward"]), sorted(scores["parts"])))
    assert counts == [(1, 1, ["mq", "ta", "vq"]), (0, 0, [])]


def test_a_part_that_one_rank_lacks_has_no_score_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the other ranks' scores would stand beside the wrong prompts.

    A rank without videos has no parts.
    """
    setup = setup_of(2)
    theirs = Scores(rewards=torch.ones(1), parts={"vq": torch.full((1,), 0.5)})

    def gathered(own: Any) -> list[Any]:
        return [own, ([1], theirs), ([], join_scores([]))]

    monkeypatch.setattr("sage_fast.eval.evaluation.data_size", lambda: 3)
    monkeypatch.setattr("sage_fast.rollout.scoring.all_gather_object", gathered)
    result, _ = evaluate(setup, iteration=0)
    assert result["parts"]["vq"][1] == 0.5
    assert result["parts"]["mq"][1] is None
    for values in (result["prompts"], result["seeds"], result["reward"], *result["parts"].values()):
        assert len(values) == 2


def test_weights_are_put_back_if_borrowing_others_is_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ctrl-C comes during the copy; the checkpoint that follows must have the original weights."""
    policy = tiny_trainer(settings()).policy
    before, copy_in = policy.snapshot(), policy.load
    interrupts = [KeyboardInterrupt]

    def load(state: dict[str, Tensor]) -> None:
        copy_in(state)
        if interrupts:
            raise interrupts.pop()

    monkeypatch.setattr(policy, "load", load)
    with (
        pytest.raises(KeyboardInterrupt),
        policy.using({name: tensor + 1 for name, tensor in before.items()}),
    ):
        pytest.fail("the block ran")
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.snapshot().items())
