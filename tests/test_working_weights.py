"""ZeRO-1 and 2 in bfloat16: working weights on every rank are the rounded values of a sharded
float32 master."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sage_fast.config.schema import TrainConfig
from sage_fast.models.hunyuan15.policy import HunyuanVideo15Policy, freeze_dead_ends
from sage_fast.parallel import Engine, make_engine
from sage_fast.rollout.samples import SampleRollouts
from sage_fast.run.checkpoint import TrainingState, save_training_state
from sage_fast.util.errors import NonFiniteError
from sage_fast.util.process_group import initialize
from sage_fast.util.ranks import rank, shutdown
from tests.ranks import run_ranks, screens
from tests.tiny import embedding, settings, tiny_model
from tests.zero_runs import mixed_trainer

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="DeepSpeed is not installed: pip install 'sage-fast[deepspeed]'",
)
WORDS = "a small red ball moves left quickly"
UPDATES = 2
OTHERS = ["full zero1 muon", "full zero2 muon", "lora zero1 adamw", "lora zero2 adamw"]


def train_settings(name: str, **overrides: Any) -> TrainConfig:
    """The settings of `<tuning> <engine> <optimizer>`."""
    _, engine, optimizer = name.split()
    given = {
        "train__weight_decay": 0.5,
        "train__max_grad_norm": 0.1,
        "train__eps": 1e-8,
        "train__ema_decay": 0.5,
    }
    given |= {
        "train__engine": engine,
        "train__optimizer": optimizer,
    }
    return settings(**given | overrides).train


def mixed_policy(name: str) -> HunyuanVideo15Policy:
    """Activations in bfloat16, and the dtypes of `load_model`: trained weights in float32, with
    values that bfloat16 does not hold, and the base of an adapter in bfloat16."""
    policy = tiny_model(settings(model__tuning=name.split()[0])).policy
    policy.dtype = policy.forward.dtype = torch.bfloat16
    if policy.trains_adapter:
        for p in policy.transformer.parameters():
            p.data = p.data if p.requires_grad else p.data.bfloat16()
    freeze_dead_ends(policy.transformer)
    return policy


def loss_of(policy: HunyuanVideo15Policy, number: int) -> Tensor:
    text = [embedding(WORDS, torch.bfloat16)]
    x = torch.randn(1, 32, 5, 4, 4, generator=torch.Generator().manual_seed(number))
    return policy.velocity(x, policy.condition(torch.tensor([0.4]), text)).float().square().mean()


def reference(name: str) -> Iterator[tuple[float, dict[str, Tensor]]]:
    """Yield the norm and the weights after each update of one process in plain torch.

    Float32 weights are updated by torch's optimizers; their rounded copies make the gradients,
    which add up in float32.
    """
    policy, config = mixed_policy(name), train_settings(name)
    rounded = policy.parameters()
    master = {n: torch.nn.Parameter(p.detach().clone()) for n, p in rounded.items()}
    policy.uses_all_weights = True
    by_muon = {n for n, p in master.items() if name.endswith("muon") and policy.is_muon(n, p)}
    kind = {"lr": config.learning_rate, "weight_decay": config.weight_decay}
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(
            [p for n, p in master.items() if n not in by_muon], eps=config.eps, **kind
        )
    ]
    if by_muon:
        matrices = [master[n] for n in sorted(by_muon)]
        optimizers.append(
            torch.optim.Muon(
                matrices, momentum=0.95, adjust_lr_fn="match_rms_adamw", eps=config.eps, **kind
            )
        )
    for update in range(UPDATES):
        for n, p in rounded.items():
            p.data, master[n].grad = master[n].detach().bfloat16(), torch.zeros_like(master[n])
        for number in range(4):
            loss = loss_of(policy, 4 * update + number) / 4
            for n, grad in zip(rounded, torch.autograd.grad(loss, list(rounded.values()))):
                assert grad.dtype == torch.bfloat16
                master[n].grad += grad.float()
        norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in master.values()))
        for p in master.values():
            p.grad = p.grad * min(1.0, config.max_grad_norm / norm) if p.grad.any() else None
        for optimizer in optimizers:
            optimizer.step()
        yield norm, {n: p.detach().clone() for n, p in master.items()}


class Sent(TorchDispatchMode):
    """Collectives: (name, dtype, elements) of what each sends."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, torch.dtype, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            sent = [x for x in tree_leaves(args) if isinstance(x, Tensor)]
            self.found.append((func._opname, sent[0].dtype, sum(x.numel() for x in sent)))
        return func(*args, **(kwargs or {}))


def whole(engine: Engine) -> dict[str, Tensor]:
    return {n: engine.policy.states.whole(p).clone() for n, p in engine.policy.parameters().items()}


def assert_rounded(engine: Engine, state: dict[str, Tensor]) -> None:
    """The working weights of this rank are those of `state`, rounded."""
    for n, p in engine.policy.parameters().items():
        assert p.dtype == torch.bfloat16
        assert torch.equal(p, state[n].bfloat16()), n


def check_updates(name: str) -> Engine:
    """Compare with `reference`; the next forward reads the updated weights at their old
    addresses."""
    policy = mixed_policy(name)
    stored = {n: p.detach().clone() for n, p in policy.parameters().items()}
    engine = make_engine(policy, train_settings(name))
    assert all(torch.equal(value, stored[n]) for n, value in whole(engine).items())
    assert_rounded(engine, stored)
    addresses, before = [p.data_ptr() for p in engine.parameters], stored
    count = sum(p.numel() for p in engine.parameters)
    # Muon orthogonalises in bfloat16: the second update starts from weights that differ by its
    # rounding.
    tolerances = [2**-8, 0.1] if name.endswith("muon") else [2**-16] * UPDATES
    for update, (tolerance, (norm, expected)) in enumerate(zip(tolerances, reference(name))):
        with Sent() as sent:
            for micro in range(2):
                engine.backward(loss_of(policy, 4 * update + 2 * micro + rank()), 4)
            found = engine.step()
        assert found == pytest.approx(norm, rel=tolerance)
        after = whole(engine)
        off, way = (
            sum(float((expected[n] - o[n]).square().sum()) for n in o) ** 0.5
            for o in (after, before)
        )
        assert off <= tolerance * way, (name, update, off, way)
        assert_rounded(engine, after)
        before = after
        # Gradients cross ranks in float32, and the weights are gathered once, in bfloat16.
        assert not [one for one in sent.found if "reduce" in one[0] and one[1] == torch.bfloat16]
        assert (
            sum(
                size
                for kind, dtype, size in sent.found
                if "reduce" in kind and dtype == torch.float32
            )
            >= count
        )
        assert (
            len([one for one in sent.found if "gather" in one[0] and one[1] == torch.bfloat16]) == 1
        )
    assert addresses == [p.data_ptr() for p in engine.parameters]
    return engine


def check_swaps(engine: Engine) -> None:
    """Averaged weights and an anchor go into the working weights and out again; a NaN changes
    nothing."""
    policy, present = engine.policy, whole(engine)
    assert engine.ema is not None
    anchor = {n: part + 0.25 for n, part in policy.snapshot().items()}
    for state in (engine.ema, anchor):
        expected = {n: policy.states.join(state[n], p) for n, p in policy.parameters().items()}
        assert any(not torch.equal(expected[n].bfloat16(), present[n].bfloat16()) for n in present)
        with policy.using(state):
            assert_rounded(engine, expected)
        assert_rounded(engine, present)
    state = policy.snapshot()
    with Sent() as sent, contextlib.suppress(ZeroDivisionError), policy.using(anchor):
        sent.found.clear()
        raise ZeroDivisionError
    assert sent.found == [], "the other rank may wait in another collective"
    policy.load(state)
    engine.backward(loss_of(policy, 1) * (math.nan if rank() == 0 else 1), 2)
    with pytest.raises(
        NonFiniteError, match=f"optimizer step {UPDATES}; the weights were not updated"
    ):
        engine.step()
    assert_rounded(engine, present)
    assert all(torch.equal(value, present[n]) for n, value in whole(engine).items())


def check_resume(folder: Path, engine: Engine) -> None:
    """Other engines and the plain process keep every bit of the master, and this engine of
    theirs."""
    (folder / "saved").mkdir(exist_ok=True)
    save_training_state(folder / "saved", engine)
    present = whole(engine)
    if rank() == 0:
        torch.save(present, folder / "saved.pt")
    for name in ("full zero1 adamw", "full plain adamw"):
        other = make_engine(mixed_policy(name), train_settings(name))
        TrainingState(folder / "saved", other, engine.steps).restore(other)
        assert all(torch.equal(value, present[n]) for n, value in whole(other).items()), name
    TrainingState(folder / "plain", engine, 1).restore(engine)
    stored = torch.load(folder / "plain.pt")
    assert all(torch.equal(value, stored[n]) for n, value in whole(engine).items())
    assert_rounded(engine, stored)


def check_small_updates(name: str) -> None:
    """At a learning rate of 1e-6 the master moves, and in the end the working weights do."""
    engine = make_engine(mixed_policy(name), train_settings(name, train__learning_rate=1e-6))
    start, moved = whole(engine), []
    large = torch.cat([start[n].abs().flatten() > 0.01 for n in start])  # smaller ones see 1e-6
    for _ in range(8):
        engine.backward(loss_of(engine.policy, rank()), 2)
        engine.step()
        now = whole(engine)
        assert_rounded(engine, now)
        changed = (
            torch.cat([(now[n].to(dtype) != start[n].to(dtype)).flatten() for n in now])[large]
            .float()
            .mean()
            for dtype in (torch.float32, torch.bfloat16)
        )
        moved.append([float(share) for share in changed])
    assert moved[0][0] > 0.9, moved
    assert 5 * moved[0][1] < moved[-1][1] < 0.1, moved


def check_rollouts() -> None:
    """A rollout has no collective, though one rank has more samples; the anchor's forwards have two
    gathers."""
    given = {"train__prompts_per_iteration": 1, "train__group_size": 3, "sampling__batch_size": 1}
    config = settings(**given, model__tuning="full", model__dtype="bfloat16", train__engine="zero2")
    trainer = mixed_trainer(config)
    trainer.iteration(0)
    finished, sent = SampleRollouts.finished, Sent()

    def counted(self: SampleRollouts, *given: Any) -> Iterator[Any]:
        with sent:
            return iter(list(finished(self, *given)))

    with mock.patch.object(SampleRollouts, "finished", counted):
        batch, _ = trainer.rollout(trainer.plan(1))
    assert len(batch.samples) == 2 - rank()
    assert sent.found == []
    with sent:
        trainer.replay.anchor_velocities(batch, batch.trajectories.trained, trainer.anchor)
    assert [(kind, dtype) for kind, dtype, _ in sent.found] == [
        ("_allgather_base_", torch.bfloat16)
    ] * 2


def on_ranks(folder: Path, names: Sequence[str]) -> None:
    os.environ["DS_ACCELERATOR"] = "cpu"
    initialize()
    for name in names:
        check_swaps(engine := check_updates(name))
        if name == "full zero2 adamw":
            check_resume(folder, engine)
            check_small_updates(name)
            check_rollouts()
    shutdown()


@pytest.mark.parametrize(
    "names",
    [
        ["full zero2 adamw", "full zero1 adamw"],
        pytest.param(OTHERS, marks=pytest.mark.soak),
    ],
    ids=["adamw", "others"],
)
def test_working_weights_on_two_ranks(names: Sequence[str], tmp_path: Path) -> None:
    plain = make_engine(mixed_policy("full"), train_settings("full plain adamw"))
    plain.backward(loss_of(plain.policy, 7), 1)
    plain.step()
    (tmp_path / "plain").mkdir()
    save_training_state(tmp_path / "plain", plain)
    torch.save(plain.policy.snapshot(), tmp_path / "plain.pt")
    assert run_ranks(on_ranks, 2, tmp_path, names) == [0, 0], screens(tmp_path)
    if names[0] == "full zero2 adamw":
        TrainingState(tmp_path / "saved", plain, UPDATES).restore(plain)
        stored = torch.load(tmp_path / "saved.pt")
        assert all(torch.equal(value, stored[n]) for n, value in plain.policy.parts().items())
