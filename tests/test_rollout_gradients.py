"""`train.rollout_gradients`: training in the rollout gives the update of rollout and replay, with fewer forwards."""

import dataclasses
import itertools
import math
import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from sage_fast import loading
from sage_fast.algorithm.objective import Objective
from sage_fast.algorithm.schedule import Transition, check_trainable, missing_for_rollout_gradients
from sage_fast.cli import main
from sage_fast.config.loader import build, dump
from sage_fast.config.schema import Config
from sage_fast.rewards import Reward
from sage_fast.rollout.batch import Batch
from sage_fast.rollout.graphs import StepGraphs
from sage_fast.run.checkpoint import load_checkpoint, save_checkpoint
from sage_fast.tools.plan import plan
from sage_fast.trainer import Trainer
from sage_fast.util.errors import NonFiniteError, ParityError, Stopped, UserError
from sage_fast.util.files import read_json
from sage_fast.util.ranks import initialize, rank, shutdown
from tests.ranks import run_ranks, screens
from tests.test_graphs import rerun
from tests.test_ranks import OneGroupIsEqual, SomeAreNotFinite
from tests.tiny import BASE_SETTINGS, BrightnessReward, perturb, rounding_of_advantages, settings, tiny_trainer

ONE_PASS = {
    "sampling__batch_size": 1, "sampling__steps": 3, "train__batch_size": 2, "train__group_size": 2,
    "kl__velocity_term": "closed_form", "kl__feedback": "none", "kl__warmup_steps": 0, "kl__lambda_max": 1.0,
    "kl__anchor_interval": 1, "kl__position_fraction": 0.4, "train__parity_gate": False, "reward__max_dropped": 1,
}  # fmt: skip
CASES: dict[str, tuple[dict[str, Any], type[Reward]]] = {
    "equalizer": ({}, BrightnessReward),
    "no equalizer, no anchor": ({"objective__equalizer": False, "kl__strategy": "none"}, BrightnessReward),
    "a window for each prompt": (
        {"sampling__sampler": "precise", "sampling__steps": 4, "sampling__sde_window": 2, "seed": 7,
         "sampling__window_per_prompt": True},
        BrightnessReward,
    ),
    "guidance, checkpointing": (
        {"sampling__guidance_scale": 3.0, "model__gradient_checkpointing": "attention"}, BrightnessReward
    ),
    "dropped samples, a fixed anchor": ({"kl__strategy": "fixed", "train__group_size": 4}, SomeAreNotFinite),
    "an equal group, some steps": (
        {"sampling__steps": 5, "train__timestep_fraction": 0.6, "train__group_size": 3}, OneGroupIsEqual
    ),
    "normalised ratio": ({"objective__ratio": "normalised"}, BrightnessReward),
    "no ratio": ({"objective__surrogate": "log_prob", "objective__log_prob": "unscaled"}, BrightnessReward),
    "KL mask, average": ({"objective__surrogate": "kl_mask", "train__ema_decay": 0.9}, BrightnessReward),
    "trained conditioning": (
        {"model__lora_targets": r".*(attn\.to_q|time_in\.\S*linear_1|context_embedder\.proj_in)"}, BrightnessReward
    ),
}  # fmt: skip


def one_pass_trainer(overrides: Mapping[str, Any], reward: type[Reward] = BrightnessReward, **kwargs: Any) -> Trainer:
    """A trainer with a trained adapter, in float32 as it is loaded, that has left its anchor."""
    trainer = tiny_trainer(settings(**ONE_PASS | dict(overrides)), reward(), **kwargs)
    for p in trainer.engine.parameters:
        p.data = p.data.float()
    perturb(trainer)  # the up-projections start at zero, where half of the gradient is zero
    trainer.anchor_is_current, trainer.model.trains_in_rollout = False, True
    return trainer


class Run:
    """Iterations, the first away from the anchor and the second at it: metrics, gradients and forwards."""

    def __init__(self, trainer: Trainer, iterations: int = 2) -> None:
        self.gradients: list[list[Tensor | None]] = []
        self.forwards: list[dict[str, int]] = []
        self.made: list[Counter[bool]] = []
        step, velocity = trainer.engine.step, trainer.policy.velocity

        def noting() -> Any:
            self.gradients.append([None if p.grad is None else p.grad.clone() for p in trainer.engine.parameters])
            return step()

        def counting(*arguments: Any) -> Tensor:
            self.made[-1][torch.is_grad_enabled()] += len(arguments[0])
            return velocity(*arguments)

        trainer.engine.step = noting  # type: ignore[method-assign]
        trainer.policy.velocity = counting  # type: ignore[method-assign]
        self.rows: list[dict[str, Any]] = []
        for index in range(iterations):
            self.made.append(Counter())
            self.rows.append(trainer.iteration(index))
            self.forwards.append(trainer.forwards)


def flat(gradients: Sequence[Tensor | None]) -> Tensor:
    return torch.cat([gradient.flatten() for gradient in gradients if gradient is not None])


def assert_same_updates(ours: Run, theirs: Run, tolerance: float) -> None:
    """Check gradients and metrics, to `tolerance` relative to the largest element of a tensor."""
    for of_ours, of_theirs in zip(ours.gradients, theirs.gradients, strict=True):
        assert sum(grad is not None and bool(grad.any()) for grad in of_theirs) > 4
        for mine, wanted in zip(of_ours, of_theirs, strict=True):
            assert (mine is None) == (wanted is None)
            if mine is not None and wanted is not None:
                torch.testing.assert_close(mine, wanted, rtol=0, atol=tolerance * float(wanted.abs().max()))
    for mine, wanted in zip(ours.rows, theirs.rows, strict=True):
        assert {key for key in mine if key != "time/anchor"} == {key for key in wanted if key != "time/anchor"}
        for key, value in wanted.items():
            advantages = rounding_of_advantages(wanted) * key.startswith("loss")
            if key == "velocity_grad_norm":
                pairs = list(zip(mine[key], value, strict=True))
                assert all((a is None) == (b is None) for a, b in pairs)
                assert [a for a, _ in pairs if a is not None] == pytest.approx(
                    [b for _, b in pairs if b is not None], rel=tolerance
                )
            elif not key.startswith(("time/", "memory/")):
                assert mine[key] == pytest.approx(value, rel=tolerance, abs=advantages + 1e-3 * tolerance), key


@pytest.mark.parametrize("case", CASES)
def test_the_update_is_that_of_two_passes(case: str) -> None:
    one, two = one_pass_trainer(*CASES[case]), one_pass_trainer(*CASES[case])
    two.model.trains_in_rollout = False
    runs = Run(one), Run(two)
    assert_same_updates(*runs, tolerance=1e-3)
    if "dropped" in case:
        assert any(0 < row["reward/dropped"] < 8 for row in runs[0].rows)


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_bfloat16(guidance: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is at most twice that of two passes, against float32 at the same stored transitions."""
    overrides = {"kl__strategy": "none", "sampling__guidance_scale": guidance}
    one, two, exact = (one_pass_trainer(overrides, dtype=d) for d in (torch.bfloat16, torch.bfloat16, torch.float32))
    two.model.trains_in_rollout = exact.model.trains_in_rollout = False
    with torch.no_grad():
        for p, (_, same) in zip(dict(exact.policy.named_parameters()).values(), two.policy.named_parameters()):
            p.copy_(same)
    update, given = two._update, {}

    def noting(batch: Batch, mine: Sequence[Transition], *rest: Any) -> None:
        given.update(batch=batch, mine=mine)
        update(batch, mine, *rest)

    monkeypatch.setattr(two, "_update", noting)
    ours, theirs = (flat(Run(trainer, 1).gradients[0]) for trainer in (one, two))
    table = exact.policy.conditioning_table(exact.full_table.sigmas[:-1], exact.embeddings)
    batch = dataclasses.replace(given["batch"], conditioning=table)
    for micro in given["mine"]:
        exact.engine.backward(exact._loss(batch, [micro])[0].total.sum(), len(given["mine"]))
    wanted = flat([p.grad for p in exact.engine.parameters])
    errors = [float((found - wanted).norm() / wanted.norm()) for found in (ours, theirs)]
    assert 0 < errors[0] < 2 * errors[1] < 0.2


@pytest.mark.parametrize("case", ["equalizer", "an equal group, some steps", "guidance, checkpointing"])
def test_each_early_step_saves_a_forward(case: str) -> None:
    one, two = one_pass_trainer(*CASES[case]), one_pass_trainer(*CASES[case])
    two.model.trains_in_rollout = False
    runs = ours, theirs = Run(one), Run(two)
    for run in runs:
        for made, counts in zip(run.made, run.forwards, strict=True):
            assert (made[True], made.total()) == (counts["training"], sum(counts.values()))
    saved = [sum(a.values()) - sum(b.values()) for a, b in zip(theirs.forwards, ours.forwards)]
    passes, steps = (2 if "guidance" in case else 1), 3
    kept = [counts["training"] // (steps * passes) for counts in theirs.forwards]
    assert min(kept) >= 3
    # One step has a KL, until the anchor is the rollout policy.
    assert saved == [kept[0] * (steps - 1) * passes, kept[1] * steps * passes]


def on_two_ranks(folder: Path) -> None:
    initialize(timeout_minutes=2)
    found = {}
    for case in ("equalizer", "dropped samples, a fixed anchor", "a window for each prompt"):
        trainer = one_pass_trainer(*CASES[case])
        rows = [trainer.iteration(index) for index in range(2)]
        found[case] = {"weights": trainer.policy.snapshot(), "kl": [row["kl/anchor"] for row in rows]}
    torch.save(found, folder / f"rank{rank()}.pt")
    shutdown()


@pytest.mark.soak
def test_two_ranks(tmp_path: Path) -> None:
    """They make the update of one process and two passes."""
    assert run_ranks(on_two_ranks, 2, tmp_path) == [0, 0], screens(tmp_path, 2)
    first, second = (torch.load(tmp_path / f"rank{number}.pt") for number in range(2))
    for case, found in first.items():
        alone = one_pass_trainer(*CASES[case])
        alone.model.trains_in_rollout, start = False, alone.policy.snapshot()
        rows = [alone.iteration(index) for index in range(2)]
        assert found["kl"] == pytest.approx([row["kl/anchor"] for row in rows], rel=1e-3, abs=1e-9)
        for name, weight in alone.policy.snapshot().items():
            assert torch.equal(second[case]["weights"][name], found["weights"][name])
            moved, wanted = found["weights"][name] - start[name], weight - start[name]
            torch.testing.assert_close(moved, wanted, rtol=0, atol=0.05 * float(wanted.abs().max()))


def test_the_gate_replays_what_the_rollout_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay that disagrees stops the run, although no trained step was replayed."""
    overrides = {"kl__strategy": "none", "train__parity_gate": True}
    row = one_pass_trainer(overrides).iteration(0)
    assert row["log_prob/parity"] < 1e-6
    trainer = one_pass_trainer(overrides)
    score, velocity = trainer.replay.score, trainer.policy.velocity

    def drifting(*arguments: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(trainer.policy, "velocity", lambda *args: 1.1 * velocity(*args))
            return score(*arguments)

    monkeypatch.setattr(trainer.replay, "score", drifting)
    with pytest.raises(ParityError, match="scoring stored transitions again changes the log-prob"):
        trainer.iteration(0)


def test_gradients_that_are_not_finite_are_not_trained_on() -> None:
    trainer = one_pass_trainer({"kl__strategy": "none"})
    last = trainer.engine.parameters[-1]
    assert isinstance(last, Tensor)
    last.register_hook(lambda grad: grad * math.nan)
    before = trainer.policy.snapshot()
    with pytest.raises(NonFiniteError, match="gradient norm is nan"):
        trainer.iteration(0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.policy.snapshot().items())


def test_a_rollout_can_be_stopped_between_steps() -> None:
    """What it had accumulated is in no later update."""
    stopped, fresh = (one_pass_trainer({"kl__strategy": "none"}) for _ in range(2))
    calls = itertools.count()

    def pause() -> None:
        if next(calls) == 4:  # within the second rollout
            raise Stopped(signal.SIGINT)

    stopped.pause = pause
    with pytest.raises(Stopped):
        stopped.iteration(0)
    assert not stopped.mid_iteration
    row, wanted = stopped.iteration(0), fresh.iteration(0)
    assert row["grad_norm"] == wanted["grad_norm"]
    assert all(torch.equal(tensor, fresh.policy.parts()[name]) for name, tensor in stopped.policy.parts().items())


def test_a_resumed_run_repeats_the_bits(tmp_path: Path) -> None:
    """Also with the gate, which replays in the first iteration of each process."""
    whole, resumed = (one_pass_trainer({"train__parity_gate": True}) for _ in range(2))
    whole.iteration(0)
    save_checkpoint(tmp_path, 1, whole.engine, whole.state_dict(), whole.anchor)
    wanted = whole.iteration(1)
    found = load_checkpoint(tmp_path, resumed.engine)
    assert found is not None
    resumed.load_state_dict(*found[1:])
    row = resumed.iteration(1)
    assert row["log_prob/parity"] < 1e-6
    assert {key: value for key, value in row.items() if key in wanted and "time/" not in key} == {
        key: value for key, value in wanted.items() if "time/" not in key
    }


def test_a_run_says_whether_it_trains_in_the_rollout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for mode in ("on", "off"):
        given = ONE_PASS | {"train__rollout_gradients": mode, "train__iterations": 1, "eval__steps": 1,
                            "eval__num_prompts": 1}  # fmt: skip
        config = settings(output=str(tmp_path / mode), tracking__trackers=[], **given)
        (tmp_path / "tiny.yaml").write_text(dump(config))
        assert main(["train", str(tmp_path / "tiny.yaml")]) == 0
        assert ("steps without a KL are trained in them" in capsys.readouterr().out) == (mode == "on")
        assert read_json(tmp_path / mode / "run.json")["trains_in_rollout"] == (mode == "on")


def test_graphs_replay_the_steps_between() -> None:
    """The same bits as without, in rollouts where a trained step comes first, last or between two others."""
    overrides = {"kl__position_fraction": 0.6, "sampling__steps": 4}
    plain, replayed = one_pass_trainer(overrides), one_pass_trainer(overrides)
    for trainer in (plain, replayed):  # the anchor never becomes current, so that some steps are not trained
        trainer.config.kl.anchor_interval = 99
    replayed.graphs = StepGraphs(replayed.policy, rerun, max_memory=math.inf)
    for index in range(3):
        ours, theirs = replayed.iteration(index), plain.iteration(index)
        assert {k: v for k, v in ours.items() if "time/" not in k} == {
            k: v for k, v in theirs.items() if "time/" not in k
        }
    assert len(replayed.graphs) == 1


def test_time_of_a_trained_step_is_time_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a KL nothing is left to train after the rollout, and a row still says what training took."""
    row = one_pass_trainer({"kl__strategy": "none"}).iteration(0)
    assert row["time/train"] > row["time/rollout"] > 0


# -- where it is valid ------------------------------------------------------------------------------------------------


def missing_for(config: Config) -> str | None:
    return missing_for_rollout_gradients(Objective.of(config), config.model, config.train, config.sampling)


@pytest.mark.parametrize(
    ("overrides", "missing"),
    [
        ({"model__tuning": "full"}, "model.tuning = lora"),
        ({"train__engine": "zero1"}, "train.engine = plain"),
        ({"sampling__batch_size": 2}, "sampling.batch_size = 1"),
        ({"train__optimizer_steps": 2}, "train.optimizer_steps = 1"),
        ({"sampling__averaged_weights": True, "train__ema_decay": 0.9}, "sampling.averaged_weights = false"),
        ({"objective__surrogate": "awm"}, "a surrogate that scores the rollout's steps"),
        ({"kl__velocity_term": "rollout"}, "kl.velocity_term = closed_form"),
        ({"kl__position_fraction": 1.0}, "steps without a KL to the anchor"),
    ],
)
def test_what_it_needs(overrides: dict[str, Any], missing: str) -> None:
    check_trainable(settings(**ONE_PASS | {"train__rollout_gradients": "on"}))
    config = settings(**ONE_PASS | overrides)
    assert missing in str(missing_for(config))
    check_trainable(config)  # `auto`
    config.train.rollout_gradients = "on"
    with pytest.raises(
        UserError, match=rf"train.rollout_gradients = 'on': needs .*{missing}.*nearest choice is 'auto'"
    ):
        check_trainable(config)


def test_a_velocity_term_without_weight_does_not_matter() -> None:
    given = ONE_PASS | {"kl__velocity_term": "rollout", "kl__beta_vel": 0.0}
    assert missing_for(settings(**given)) is None


@pytest.mark.parametrize(("written", "value"), [("on", "on"), ("off", "off"), ("auto", "auto"), ("'on'", "on")])
def test_yaml_reads_on_and_off_as_booleans(written: str, value: str) -> None:
    given = yaml.safe_load(f"train.rollout_gradients: {written}")
    config = build(BASE_SETTINGS | given)
    assert config.train.rollout_gradients == value
    assert yaml.safe_load(dump(config))["train"]["rollout_gradients"] == value


def test_a_wrong_value_names_the_nearest() -> None:
    with pytest.raises(UserError, match=r"train.rollout_gradients = 'onn'.*'on'"):
        settings(train__rollout_gradients="onn")


def test_auto_is_on_where_the_gradients_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = one_pass_trainer({"sampling__offload_trajectories": True, "kl__strategy": "none"})
    config, model = trainer.config, trainer.model
    trained = sum(p.numel() for p in trainer.engine.parameters)
    activations = model.spec.cost(config).activations["none"]
    needed = activations + (4 + 8) * trained + 4 * 4 * trained  # gradients, moments of AdamW, four samples
    for spare, expected in ((1, True), (-1, False)):
        monkeypatch.setattr(loading, "free_bytes", lambda device, spare=spare: (needed + spare) / loading.MEMORY_SHARE)
        assert loading.choose_checkpointing(config, model)[1] is expected
    config.train.rollout_gradients = "on"
    assert loading.choose_checkpointing(config, model)[1]
    config.train.rollout_gradients = "off"
    assert not loading.choose_checkpointing(config, model)[1]


def test_gradients_that_exceed_the_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = one_pass_trainer({"train__rollout_gradients": "on"})
    trained = sum(p.numel() for p in trainer.engine.parameters)
    monkeypatch.setattr(loading, "free_bytes", lambda device: 16 * trained)
    assert "steps without a KL are trained in them" in loading.check_trajectories(trainer.config, trainer.model)
    monkeypatch.setattr(loading, "free_bytes", lambda device: 16 * trained - 1)
    with pytest.raises(UserError, match=r"train.rollout_gradients = 'on': a gradient for each of 4 samples takes"):
        loading.check_trajectories(trainer.config, trainer.model)


def test_the_plan_counts_memory_and_forwards() -> None:
    """Of 3 steps of 4 samples, one has a KL."""
    config = settings(**ONE_PASS | {"train__rollout_gradients": "on", "sampling__guidance_scale": 3.0})
    spec = tiny_trainer(config).model.spec
    one = plan(config, spec, ranks=2)
    two = plan(dataclasses.replace(config, train=dataclasses.replace(config.train, rollout_gradients="off")), spec)
    assert one.forwards == {"rollout": 4 * 1 * 2, "training": 4 * 3 * 2, "anchor": 4 * 1 * 2}
    assert two.forwards == {"rollout": 4 * 3 * 2, "training": 4 * 3 * 2, "anchor": 4 * 1 * 2}
    assert one.flops["training"] == two.flops["training"]
    assert one.memory["gradients of a rollout's samples"] == 4 * 2 * one.trainable
    assert "gradients of a rollout's samples" not in two.memory


def test_auto_of_a_plan_depends_on_the_gpu() -> None:
    """A LoRA of rank 64 of the published model takes 0.7 GB for each of four samples.

    On 80 GB more is recomputed to make room for them, and for a decode; on 40 GB not even that would do.
    """
    given = {
        "sampling.batch_size": 1, "sampling.num_frames": 81, "sampling.height": 480, "sampling.width": 832,
        "kl.position_fraction": 0.25, "train.prompts_per_iteration": 1,
    }  # fmt: skip
    large, small = (plan(build(given), gpu_memory=size) for size in (80e9, 40e9))
    assert large.memory["gradients of a rollout's samples"] == pytest.approx(4 * 0.735e9, rel=0.02)
    assert large.forwards["rollout"] == 4 * 5
    assert "gradients of a rollout's samples" not in small.memory
    assert small.forwards["rollout"] == 4 * 20
    replayed = plan(build(given | {"train.rollout_gradients": "off"}), gpu_memory=80e9)
    (kept, room), (kept_without, _) = (
        (size, plan.gpu_memory - sum(plan.memory.values()))
        for plan in (large, replayed)
        for part, size in plan.memory.items()
        if part.startswith("activations")
    )
    assert kept_without - kept == pytest.approx(4 * 0.735e9 + 8 * 2**30, abs=2.2e9)  # whole blocks, of 2.1 GB each
    assert room > 0.15 * 80e9 * 0.7 + 8 * 2**30
