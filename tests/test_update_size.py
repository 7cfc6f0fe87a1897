"""The relative size of updates against direct computation, and the warning if bfloat16 would swallow them."""

import logging
from typing import Any

import pytest
import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from sage_fast.parallel.update_size import BFLOAT16_RESOLUTION, watch_updates
from sage_fast.trainer import Trainer
from tests.tiny import perturb, settings, tiny_trainer


def adapters(trainer: Trainer) -> dict[str, LoraLayer]:
    """The trained adapters: not those in dead ends of the last block's text stream."""
    layers = {n: m for n, m in trainer.policy.transformer.named_modules() if isinstance(m, LoraLayer)}
    return {name: layer for name, layer in layers.items() if layer.lora_B["default"].weight.requires_grad}


def products(trainer: Trainer) -> dict[str, Tensor]:
    """Product s B A of every layer, in float64."""
    return {
        name: layer.scaling["default"]
        * (layer.lora_B["default"].weight.detach().double() @ layer.lora_A["default"].weight.detach().double())
        for name, layer in adapters(trainer).items()
    }


def norm(tensors: list[Tensor]) -> float:
    return float(torch.cat([t.double().flatten() for t in tensors]).norm())


@pytest.mark.parametrize("scale", [0.0, 0.05])
@pytest.mark.parametrize("rate", [1e-3, 1e-7])
def test_of_an_adapter_is_that_of_its_product(rate: float, scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The adapter starts at zero or has some size, where rounding of s B A itself would hide an update of 1e-7."""
    monkeypatch.setattr("sage_fast.parallel.update_size.LAYERS", 1000)
    trainer = tiny_trainer(settings(train__learning_rate=rate, model__lora_alpha=12, train__parity_gate=False))
    if scale:
        perturb(trainer, scale)
    before = products(trainer)
    relative = trainer.iteration(0)["update/relative"]
    change = [after - before[name] for name, after in products(trainer).items()]
    assert relative == pytest.approx(norm(change) / norm([m.weight for m in adapters(trainer).values()]), rel=1e-5)
    assert relative > 0


def test_of_an_adapter_looks_at_layers_over_the_whole_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sage_fast.parallel.update_size.LAYERS", 4)
    trainer = tiny_trainer(settings())
    names = {id(layer): i for i, layer in enumerate(adapters(trainer).values())}
    seen = [names[id(layer)] for layer in watch_updates(trainer.policy.transformer).layers]
    assert seen == [i * len(names) // 4 for i in range(4)]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_of_full_weights_is_that_of_the_weights(optimizer: str) -> None:
    trainer = tiny_trainer(settings(model__tuning="full", train__optimizer=optimizer))
    matrices = [p for p in trainer.engine.parameters if p.ndim > 1]
    before = [p.detach().clone() for p in matrices]
    relative = trainer.iteration(0)["update/relative"]
    direct = norm([p.detach() - old for p, old in zip(matrices, before)]) / norm(before)
    assert relative == pytest.approx(direct, rel=0.1)  # estimated from a sample
    assert relative > 0


class OneMatrix(nn.Module):
    """80,000 weights of size 1; the measurement looks at 4,096 of them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(200, 400, generator=torch.Generator().manual_seed(1)))


def test_of_full_weights_is_measured_on_the_same_elements() -> None:
    """The size is 1e-3 if every weight changes by that share of itself, and 0 if none changes."""
    model = OneMatrix()
    updates = watch_updates(model)
    updates.remember()
    assert updates.size().relative == 0
    with torch.no_grad():
        model.weight *= 1.001
    assert float(updates.size().relative) == pytest.approx(1e-3, rel=1e-3)


class HostReads(TorchDispatchMode):
    """Counts the values that the host waits for."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("tuning", ["lora", "full"])
def test_nothing_waits_for_the_device(tuning: str) -> None:
    updates = tiny_trainer(settings(model__tuning=tuning)).engine._updates
    with HostReads() as reads:
        updates.remember()
        size = updates.size()
    assert reads.count == 0
    with reads:
        float(size.relative)
    assert reads.count == 1


class SkippedReward:
    def __call__(self, videos: Tensor, prompts: list[str]) -> dict[str, Tensor]:
        return {part: torch.ones(len(prompts)) for part in ("vq", "mq", "ta")}


def test_an_iteration_without_an_update_has_no_size() -> None:
    assert "update/relative" not in tiny_trainer(settings(), SkippedReward()).iteration(0)


def warnings_of(
    caplog: pytest.LogCaptureFixture,
    dtype: torch.dtype = torch.bfloat16,
    start: float = 0.0,
    steps: int = 1,
    **overrides: Any,
) -> list[str]:
    """Messages after `steps` updates with random gradients, of an adapter moved by `start` or of all weights."""
    trainer = tiny_trainer(settings(train__weight_decay=0.0, **overrides), dtype=dtype)
    if trainer.config.model.tuning == "full":
        trainer.policy.transformer.float()  # as they are loaded
    else:
        perturb(trainer, start)
    caplog.clear()
    caplog.set_level(logging.INFO)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        for p in trainer.engine.parameters:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        trainer.engine.step()
    return caplog.messages


@pytest.mark.parametrize("tuning", ["lora", "full"])
def test_updates_below_the_resolution_of_bfloat16_are_warned_of_once(
    tuning: str, caplog: pytest.LogCaptureFixture
) -> None:
    small: dict[str, Any] = {"model__tuning": tuning, "start": 0.5, "train__learning_rate": 1e-5}
    text = " ".join(" ".join(warnings_of(caplog, steps=3, **small)).split())
    assert text.count("bfloat16 resolves 2.0e-03: the forward sees it only once several updates have added up") == 1
    assert "Raise train.learning_rate = 1e-05, or set model.dtype = float32" in text
    assert ("adapter" if tuning == "lora" else "weights") in text
    assert warnings_of(caplog, **small | {"train__learning_rate": 1e-2}) == []
    assert warnings_of(caplog, dtype=torch.float32, **small) == []


def test_an_adapter_that_starts_at_zero_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """At lr 1e-5 A moves by less than bfloat16 resolves, but the update comes through B, which is all new."""
    assert warnings_of(caplog, train__learning_rate=1e-5, steps=3) == []


def test_the_warm_up_of_the_learning_rate_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    small: dict[str, Any] = {"start": 0.5, "train__learning_rate": 1e-5, "train__warmup_steps": 2}
    assert warnings_of(caplog, steps=2, **small) == []
    assert warnings_of(caplog, steps=3, **small) != []


@pytest.mark.parametrize("tuning", ["lora", "full"])
def test_nothing_is_warned_of_later_in_the_run(tuning: str, caplog: pytest.LogCaptureFixture) -> None:
    """Only the first three iterations warn (one update each here); later sizes depend on the schedule."""
    trainer = tiny_trainer(settings(model__tuning=tuning), dtype=torch.bfloat16)
    caplog.set_level(logging.INFO)
    trainer.engine.steps = 3
    trainer.engine.step()
    assert caplog.messages == []


def test_resolution_is_half_a_unit_in_the_last_place() -> None:
    """It is the smallest relative change that can move an exact bfloat16 weight, at the top of a binade."""
    weight = torch.tensor(2.0)
    below, above = (float((weight * (1 - share * BFLOAT16_RESOLUTION)).bfloat16()) for share in (0.9, 1.1))
    assert below == 2.0
    assert above < 2.0
