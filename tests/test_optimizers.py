"""Optimizers and schedules: which weights they move, how far, what they keep, and that a resume
changes nothing."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sage_fast.config.loader import build
from sage_fast.config.schema import TrainConfig
from sage_fast.models.hunyuan15.policy import freeze_dead_ends
from sage_fast.models.policy import Policy
from sage_fast.parallel.muon import Muon
from sage_fast.parallel.optimizers import learning_rate, make_optimizers
from sage_fast.parallel.plain import PlainEngine
from sage_fast.run import train as train_module
from sage_fast.run.checkpoint import load_checkpoint, save_checkpoint
from sage_fast.tools.plan import plan
from sage_fast.util.errors import UserError
from tests.tiny import settings, tiny_model, tiny_spec, tiny_trainer

IS_MUON = Policy({}, dtype=torch.float32).is_muon


def first_step(
    optimizer: str,
    gradient: Tensor,
    name: str = "weight",
    trains_adapter: bool = True,
    **overrides: float,
) -> Tensor:
    """What one update with `gradient` adds to a weight of that shape."""
    weight, bias = nn.Parameter(torch.zeros_like(gradient)), nn.Parameter(torch.zeros(1))
    weight.grad = gradient
    parameters = {name: weight, "proj_out.bias": bias}
    matrices = {key for key, p in parameters.items() if IS_MUON(key, p)}
    config = build({"train.learning_rate": 1e-3, "train.optimizer": optimizer}).train
    for made in make_optimizers(
        parameters, dataclasses.replace(config, **overrides), matrices, {}, trains_adapter
    ):
        made.step()
    return weight.detach()


def test_gradients_of_2e_9_move_weights_by_the_learning_rate() -> None:
    """What a LoRA of the 8.3 B model gets per element; with torch's own eps the step is a sixth of
    it."""
    gradient = 2e-9 * torch.tensor([-1.0, 1.0]).repeat(64, 64)
    step = first_step("adamw", gradient)
    torch.testing.assert_close(step, -1e-3 * gradient.sign(), rtol=1e-5, atol=0)
    small = first_step("adamw", gradient, eps=1e-8)
    torch.testing.assert_close(small, step / 6, rtol=1e-5, atol=0)


def test_weights_whose_gradients_are_rounding_move_with_an_adapter_alone() -> None:
    """About 1e-13 is what a bias whose gradient is zero gets from rounding: at 1e-15 it would walk
    at the full rate."""
    gradient = 1e-13 * torch.tensor([-1.0, 1.0]).repeat(64, 64)
    assert first_step("adamw", gradient).abs().min() > 0.9e-3
    assert first_step("adamw", gradient, trains_adapter=False).abs().max() < 2e-6
    assert first_step("adamw", 2e4 * gradient, trains_adapter=False).abs().min() > 0.9e-3
    assert first_step("adamw", gradient, trains_adapter=False, eps=1e-15).abs().min() > 0.9e-3


@pytest.mark.parametrize("scale", [1.0, 2e-9])
def test_muon_steps_are_orthogonal_and_of_the_size_of_adamw(scale: float) -> None:
    """Whatever the size of the gradient: rms about 0.2 lr, and no direction of the matrix is
    preferred."""
    gradient = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    step = first_step("muon", scale * gradient, "transformer_blocks.0.attn.to_q.weight")
    assert step.square().mean().sqrt() == pytest.approx(0.2e-3, rel=0.15)
    singular, before = torch.linalg.svdvals(step), torch.linalg.svdvals(gradient)
    assert singular.max() / singular.min() < 2 < before.max() / before.min()


@pytest.mark.parametrize("batch", [1, 2**24])
def test_muon_of_batches_is_muon_of_each_matrix(
    batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal to torch's own, to the last bit but of bfloat16's products: wide, tall and square
    matrices, one unused."""
    monkeypatch.setattr("sage_fast.parallel.muon.BATCH_ELEMENTS", batch)
    draw = torch.Generator().manual_seed(0)
    ours = [
        nn.Parameter(torch.randn(*shape, generator=draw))
        for shape in [(8, 24), (24, 8), (8, 8)] * 2 + [(8, 24)]
    ]
    torchs = [nn.Parameter(p.detach().clone()) for p in ours]
    settings = {"lr": 1e-2, "weight_decay": 0.5, "eps": 1e-8}
    optimizers = [
        Muon(ours, **settings),
        torch.optim.Muon(torchs, adjust_lr_fn="match_rms_adamw", **settings),
    ]
    start = ours[-1].detach().clone()
    for _ in range(3):
        for mine, other in zip(ours[:-1], torchs):
            mine.grad = torch.randn(mine.shape, generator=draw)
            other.grad = mine.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(ours[-1], start)
    for mine, other in zip(ours, torchs):
        torch.testing.assert_close(mine, other, rtol=0, atol=3 * 0.2e-2 * 24**0.5 * 2**-7)


def test_muon_leaves_a_matrix_without_elements() -> None:
    empty = torch.nn.Parameter(torch.zeros(3, 0))
    empty.grad = torch.zeros(3, 0)
    Muon([empty], lr=0.1, weight_decay=0.0, eps=1e-8).step()
    assert empty.shape == (3, 0)


def test_muon_takes_the_matrices_of_the_blocks_and_adamw_all_else() -> None:
    trainer = tiny_trainer(settings(train__optimizer="muon", model__tuning="full"))
    names = {id(p): name for name, p in trainer.policy.parameters().items()}
    muon, adamw = (
        [names.pop(id(p)) for p in o.param_groups[0]["params"]] for o in trainer.engine.optimizers
    )
    assert not names
    assert isinstance(trainer.engine.optimizers[0], Muon)
    assert "transformer_blocks.0.attn.to_q.weight" in muon
    assert all(name.startswith("transformer_blocks.") and name.endswith(".weight") for name in muon)
    assert {
        "x_embedder.proj.weight",
        "proj_out.weight",
        "transformer_blocks.0.attn.to_q.bias",
    } <= set(adamw)


def test_muon_takes_the_factors_of_an_adapter() -> None:
    """The first update gives every B the learning rate's size, without a preferred direction. A
    follows with the second, since its gradient is 0 while B is."""
    trainer = tiny_trainer(
        settings(train__optimizer="muon", train__learning_rate=1e-2, train__weight_decay=0)
    )
    (muon,) = trainer.engine.optimizers
    assert len(muon.param_groups[0]["params"]) == len(trainer.policy.parameters())
    before = trainer.policy.snapshot()
    trainer.iteration(0)
    first = trainer.policy.snapshot()
    trainer.iteration(1)
    second = trainer.policy.snapshot()
    for name, factor in first.items():
        if ".lora_A." in name:
            assert torch.equal(factor, before[name]), name
            assert not torch.equal(factor, second[name]), name
        else:
            singular = torch.linalg.svdvals(factor)
            assert singular[0] == pytest.approx(0.2e-2 * max(factor.shape) ** 0.5, rel=0.3), name
            assert singular[1] > singular[0] / 2, name


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_weight_without_a_gradient_is_left_alone(optimizer: str) -> None:
    """At B = 0 the gradient of A is exactly 0: no decay, and AdamW's bias correction does not count
    the update."""
    trainer = tiny_trainer(
        settings(train__weight_decay=0.5, train__learning_rate=1e-2, train__optimizer=optimizer)
    )
    names = [name for name in trainer.policy.parameters() if ".lora_A." in name]
    start = trainer.policy.snapshot()
    trainer.iteration(0)
    first = trainer.policy.snapshot()
    assert all(torch.equal(first[name], start[name]) for name in names)
    assert any(first[name].any() for name in first if ".lora_B." in name)
    trainer.iteration(1)
    for name in names:
        moved = trainer.policy.parameters()[name] - first[name] * (1 - 0.5e-2)
        assert moved.any()
        if optimizer == "adamw":  # the first step is the learning rate times the gradient's sign
            assert float(moved.detach().abs().median()) == pytest.approx(1e-2, rel=1e-3), name


def test_a_missing_library_is_named_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("sage_fast.config.rank_checks.importlib.util.find_spec", lambda name: None)
    config = settings(train__engine="zero1", output=str(tmp_path / "run"))
    monkeypatch.setattr(
        train_module, "load_setup", lambda *args, **kwargs: pytest.fail("the model was loaded")
    )
    with pytest.raises(
        UserError, match=r"'zero1' needs deepspeed.*pip install 'sage-fast\[deepspeed\]'"
    ):
        train_module.train(config)


def numbers(row: dict[str, Any]) -> dict[str, Any]:
    once = ("log_prob/parity", "log_prob/rounding", "kl/rounding")  # measured once in every process
    return {
        key: value for key, value in row.items() if not key.startswith("time/") and key not in once
    }


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_resume_is_bit_identical(optimizer: str, tmp_path: Path) -> None:
    """Optimizer, warm-up and schedule go on as if never stopped."""
    config = settings(
        train__optimizer=optimizer, model__tuning="full",
        train__schedule="cosine", train__warmup_steps=1, train__optimizer_steps=2,
        train__iterations=3,
    )  # fmt: skip
    whole = tiny_trainer(config)
    rows = [numbers(whole.iteration(index)) for index in range(3)]
    assert [row["learning_rate"] for row in rows] == [
        learning_rate(config.train, step) for step in (1, 3, 5)
    ]

    first, second = tiny_trainer(config), tiny_trainer(config)
    first.iteration(0)
    save_checkpoint(tmp_path, 1, first.engine, first.state_dict(), first.anchor)
    found = load_checkpoint(tmp_path, second.engine)
    assert found is not None
    second.load_state_dict(*found[1:])
    assert [numbers(second.iteration(index)) for index in (1, 2)] == rows[1:]
    weights = second.policy.snapshot()
    assert all(
        torch.equal(weights[name], tensor) for name, tensor in whole.policy.snapshot().items()
    )


def test_resume_takes_new_settings_but_no_other_optimizer(tmp_path: Path) -> None:
    trainer = tiny_trainer(settings(model__tuning="full"))
    trainer.iteration(0)
    save_checkpoint(tmp_path, 1, trainer.engine, trainer.state_dict(), trainer.anchor)

    changed = tiny_trainer(
        settings(model__tuning="full", train__weight_decay=0.5, train__learning_rate=2e-3)
    )
    load_checkpoint(tmp_path, changed.engine)
    assert changed.engine.optimizers[0].param_groups[0]["weight_decay"] == 0.5
    assert (
        changed.iteration(1)["learning_rate"]
        == changed.engine.optimizers[0].param_groups[0]["lr"]
        == 2e-3
    )

    other = tiny_trainer(settings(model__tuning="full", train__optimizer="muon"))
    before = other.policy.snapshot()
    with pytest.raises(
        UserError, match=r"train.optimizer = 'muon': the checkpoint is of 'adamw'; resume with that"
    ):
        load_checkpoint(tmp_path, other.engine)
    assert all(
        torch.equal(tensor, before[name]) for name, tensor in other.policy.snapshot().items()
    )


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_state_is_as_large_as_the_plan_says(optimizer: str) -> None:
    """Every element of it, apart from step counters."""
    config = settings(train__optimizer=optimizer, model__tuning="full")
    policy = tiny_model(config).policy
    freeze_dead_ends(policy.transformer)
    engine = PlainEngine(policy, config.train)
    for p in engine.parameters:
        p.grad = torch.ones_like(p)
    engine.step()
    held = sum(
        tensor.nbytes
        for made in engine.optimizers
        for state in made.state.values()
        for name, tensor in state.items()
        if torch.is_tensor(tensor) and name != "step"
    )
    planned = plan(config, tiny_spec(policy)).memory["optimizer state"]
    assert held == planned


def test_schedules_by_hand() -> None:
    """12 updates: 2 of warm-up and 10 on the curve, each at the share of the rate where it
    starts."""

    def rates(schedule: Any, warmup: int = 2, iterations: int = 6) -> list[float]:
        config = TrainConfig(
            learning_rate=2.0,
            schedule=schedule,
            warmup_steps=warmup,
            iterations=iterations,
            optimizer_steps=2,
        )
        return [learning_rate(config, step) for step in range(12)]

    assert rates("constant") == [1] + 11 * [2]
    assert rates("constant", warmup=0) == 12 * [2]
    assert rates("linear") == pytest.approx([1, 2, 2, 1.8, 1.6, 1.4, 1.2, 1.0, 0.8, 0.6, 0.4, 0.2])
    assert rates("cosine") == pytest.approx(
        [1, 2] + [1 + math.cos(math.pi * k / 10) for k in range(10)]
    )
    # as of a run that was extended to 22 updates
    assert rates("linear", iterations=11)[2:4] == pytest.approx([2, 1.9])
    assert rates("linear", iterations=1)[3:] == 9 * [0]
    assert rates("linear", warmup=20)[-1] == pytest.approx(1.2)


@pytest.mark.parametrize("calls", [1, 2])
def test_gradients_cross_the_ranks_in_as_few_calls_as_memory_allows(
    calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Averaged over two equal ranks, they stay as they are; a weight without one on any rank keeps
    none."""
    if calls == 2:
        monkeypatch.setattr("sage_fast.parallel.gradients.FLAT_BYTES", 8)
    engine = PlainEngine(tiny_model(settings()).policy, settings().train)
    first, second, third = engine.parameters[:3]
    given = [torch.randn_like(first), torch.randn_like(third)]
    for p in engine.parameters:
        p.grad = None
    first.grad, third.grad = (grad.clone() for grad in given)
    sent: list[int] = []

    def of_two_ranks(tensor: Tensor, op: str = "sum", group: Any = None) -> Tensor:
        sent.append(tensor.numel())
        return tensor.mul_(2) if op == "sum" else tensor

    monkeypatch.setattr("sage_fast.parallel.gradients.all_reduce", of_two_ranks)
    monkeypatch.setattr("sage_fast.parallel.gradients.world_size", lambda group: 2)
    engine._reduce_gradients()
    crossed = [first.numel(), third.numel()]
    assert sent == [len(engine.parameters), *(crossed if calls == 2 else [sum(crossed)])]
    assert torch.equal(first.grad, given[0])
    assert torch.equal(third.grad, given[1])
    assert second.grad is None
