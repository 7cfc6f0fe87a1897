"""Runs of tests/test_engine_deepspeed.py, in processes of their own."""

from __future__ import annotations

import functools
import gc
import json
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from sage_fast.algorithm.resolved import ResolvedConfig
from sage_fast.config.schema import Config
from sage_fast.models.hunyuan15.policy import HunyuanVideo15Policy, freeze_dead_ends
from sage_fast.models.lora.adapter import LORA_FILE
from sage_fast.parallel import Engine, deepspeed_config, make_engine
from sage_fast.rewards import CompositeReward
from sage_fast.run.checkpoint import (
    TrainingState,
    load_checkpoint,
    save_checkpoint,
    save_training_state,
)
from sage_fast.run.weights import save_weights
from sage_fast.testbed.tiny_model import TestbedTransformer
from sage_fast.testbed.world import train_prompts
from sage_fast.tools.plan import plan
from sage_fast.trainer import Trainer
from sage_fast.util.errors import NonFiniteError
from sage_fast.util.process_group import initialize
from sage_fast.util.ranks import rank, shutdown, world_size
from tests import tiny
from tests.tiny import (
    BrightnessReward,
    embedding,
    embeddings,
    keys_of,
    settings,
    tiny_model,
    tiny_trainer,
)

SETTINGS: dict[str, Any] = {
    "train__optimizer_steps": 2,
    "train__prompts_per_iteration": 4,
    "train__group_size": 2,
    "train__batch_size": 4,
    "train__ema_decay": 0.5,
    "train__weight_decay": 0.01,
    "kl__anchor_interval": 3,
    "sampling__steps": 3,
    "sampling__batch_size": 2,
    "reward__max_dropped": 1,
    "objective__advantage_std": "batch",
}


class NamedReward(BrightnessReward):
    """Returns NaN for some prompts, so that ranks have different numbers of samples to train."""

    def __call__(self, videos: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
        parts = super().__call__(videos, prompts)
        for i, prompt in enumerate(prompts):
            if "red" in prompt:
                parts["mq"][i] = math.nan
        return parts


class Peak(TorchDispatchMode):
    """Largest number of bytes in live tensors; the garbage collector finds those that exist at the
    start.

    FSDP2 empties and refills the storage of a gathered weight, so sizes are read whenever a large
    tensor is made.
    """

    LARGE = 2**14

    def __enter__(self) -> Any:
        self.live = {storage._cdata: StorageWeakRef(storage) for storage in self._storages()}
        self.peak = self.now()
        return super().__enter__()

    @staticmethod
    def _storages() -> list[torch.UntypedStorage]:
        gc.collect()
        things = [
            thing
            for thing in gc.get_objects()
            if issubclass(type(thing), Tensor) and not thing.is_meta
        ]
        # it has none of its own
        return [thing.untyped_storage() for thing in things if not isinstance(thing, DTensor)]

    @classmethod
    def now(cls) -> int:
        return sum({storage._cdata: storage.nbytes() for storage in cls._storages()}.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [
            t for t in (out if isinstance(out, tuple | list) else (out,)) if isinstance(t, Tensor)
        ]
        self.live |= {t.untyped_storage()._cdata: StorageWeakRef(t.untyped_storage()) for t in made}
        if any(t.nbytes >= self.LARGE for t in made):
            self.live = {key: kept for key, kept in self.live.items() if not kept.expired()}
            alive = (
                torch.UntypedStorage._new_with_weak_ptr(kept.cdata) for kept in self.live.values()
            )
            self.peak = max(
                self.peak, sum(storage.nbytes() for storage in alive if storage is not None)
            )
        return out


def mixed_trainer(config: Config) -> Trainer:
    """A trainer of float32 weights that run in bfloat16 under autocast, as full tuning on GPUs
    does."""
    model, prompts = tiny_model(config, torch.bfloat16), keys_of(train_prompts())
    model.policy.networks["transformer"].float()
    reward = CompositeReward(BrightnessReward(), config.reward)
    return Trainer(
        ResolvedConfig(config), model, reward, prompts, embeddings(prompts, torch.bfloat16)
    )


def memory(folder: Path, mode: str, engine: str = "zero3") -> None:
    """Write the bytes of rank 0, all weights trained in bfloat16: planned, and alive at the peak of
    a backward.

    The model is wider than in the other runs, so that its weights count, and the videos are longer.
    """
    os.environ["DS_ACCELERATOR"] = "cpu"
    initialize()
    given = {"train__engine": engine, "model__tuning": "full", "model__dtype": "bfloat16",
             "model__gradient_checkpointing": mode, "sampling__num_frames": 17}  # fmt: skip
    if engine != "zero3":
        deepspeed_config.BUCKET = 50_000
    config = settings(
        **SETTINGS | {"train__prompts_per_iteration": 2, "train__optimizer_steps": 1} | given
    )
    before = Peak.now()
    wide = {"attention_head_dim": 32, "num_layers": 6, "rope_axes_dim": (8, 12, 12)}
    transformer = functools.partial(TestbedTransformer, **wide)
    with (
        mock.patch.object(tiny, "TestbedTransformer", transformer),
        mock.patch.object(tiny, "_made", tiny._made.__wrapped__),
    ):
        trainer = mixed_trainer(config)
    planned = plan(config, trainer.model.spec, ranks=world_size()).memory
    planned["autoencoder"] *= 2  # the tests' own is stored in float32
    trainer.iteration(0)
    backward, peaks = trainer.engine.backward, []

    def loss(*arguments: Any) -> Any:
        peaks.append(Peak())
        peaks[-1].__enter__()
        return original(*arguments)

    def measured(*arguments: Any) -> None:
        backward(*arguments)
        peaks[-1].__exit__(None, None, None)

    original, trainer._loss, trainer.engine.backward = trainer._loss, loss, measured  # type: ignore[method-assign]
    trainer.iteration(1)
    if rank() == 0:
        found = {"planned": planned, "measured": max(peak.peak for peak in peaks) - before}
        (folder / "memory.json").write_text(json.dumps(found))
    shutdown()


def run(
    folder: Path, tuning: str, engine: str, start: str | None, iterations: range, **overrides: Any
) -> list[Any]:
    """Resume from the checkpoint `start`, train `iterations`, and leave a checkpoint; return the
    rows."""
    config = settings(**SETTINGS, model__tuning=tuning, train__engine=engine, **overrides)
    trainer = tiny_trainer(config, NamedReward())
    if start is not None:
        resume(trainer, folder / start)
    rows = [trainer.iteration(index) for index in iterations]
    name = f"{tuning}-{engine}-on-{world_size()}"
    save_checkpoint(
        folder / name, iterations.stop, trainer.engine, trainer.state_dict(), trainer.anchor
    )
    return rows


def resume(trainer: Trainer, run: Path) -> None:
    found = load_checkpoint(run, trainer.engine)
    assert found is not None
    trainer.load_state_dict(found[1], found[2])


def losses(policy: HunyuanVideo15Policy) -> Iterator[Tensor]:
    """Yield a loss of all weights, one of the blocks' weights alone, and one that is NaN."""
    text = [embedding("a small red ball moves left quickly")]
    x, sigma = (
        torch.randn(1, 32, 5, 4, 4, generator=torch.Generator().manual_seed(5)),
        torch.tensor([0.4]),
    )
    yield policy.velocity(x, policy.condition(sigma, text)).square().mean()
    with torch.no_grad():
        frozen = policy.condition(sigma, text)
    yield policy.velocity(x, frozen).square().mean()
    yield policy.velocity(x, policy.condition(sigma, text)).mean() * math.nan


def checks(folder: Path) -> None:
    """Compare with the plain engine: weights without a gradient, a non-finite update."""
    # imports DeepSpeed, which the tests' own process does without
    from sage_fast.parallel.zero import (
        ZeroEngine,
    )

    found = {}
    for name in ("plain", "zero1", "zero2"):
        config = settings(
            model__tuning="full", train__engine=name, train__weight_decay=0.5, train__eps=1e-8
        )
        trainer = tiny_trainer(config)
        policy, engine = trainer.policy, trainer.engine
        if isinstance(engine, ZeroEngine):  # the group with the timeout of `timeout_minutes`
            assert engine.deepspeed.data_parallel_group is dist.group.WORLD
        for number, loss in enumerate(losses(policy)):
            before = policy.snapshot()
            engine.backward(loss, world_size())
            if number < 2:
                engine.step()
                continue
            with pytest.raises(
                NonFiniteError, match="optimizer step 2; the weights were not updated"
            ):
                engine.step()
            assert all(torch.equal(part, before[n]) for n, part in policy.parts().items()), name
        found[name] = {n: policy.states.whole(p).clone() for n, p in policy.parameters().items()}
    for name in ("zero1", "zero2"):
        for n, expected in found["plain"].items():
            off = float((found[name][n] - expected).abs().max())
            assert off < 1e-5, (name, n, off)  # an update is 1e-3, decay 5e-4 of a weight
    for name in ("plain", "zero3"):
        save_weights(tiny_trainer(settings(train__engine=name)).policy, folder / name)
    plain, sharded = (load_file(folder / name / LORA_FILE) for name in ("plain", "zero3"))
    assert plain.keys() == sharded.keys()
    for name, factor in plain.items():  # also in dead ends, which are frozen
        assert torch.equal(factor, sharded[name]), (name, factor.shape, sharded[name].shape)


MUON = ("full zero1", "full zero2", "lora zero2")
"""Tuning and engine."""


def muon_engine(name: str) -> Engine:
    """An engine with Muon; `eps` keeps AdamW's updates small for gradients that are only
    rounding."""
    tuning, engine = name.split()
    given = {"train__learning_rate": 1e-2, "train__weight_decay": 0.5, "train__eps": 1e-8}
    config = settings(model__tuning=tuning, train__engine=engine, train__optimizer="muon", **given)
    policy = tiny_model(config).policy
    freeze_dead_ends(policy.transformer)
    return make_engine(policy, config.train)


def muon_step(engine: Engine, number: int, ranks: Sequence[int]) -> dict[str, Tensor]:
    """Update by the mean of two losses, with this process computing those of `ranks`; return the
    whole weights."""
    policy, words = engine.policy, "a small red ball moves left quickly"
    text = [embedding(words)]
    for place in ranks:
        x = torch.randn(
            1, 32, 5, 4, 4, generator=torch.Generator().manual_seed(10 * number + place)
        )
        engine.backward(
            policy.velocity(x, policy.condition(torch.tensor([0.4]), text)).square().mean(), 2
        )
    engine.step()
    return {name: policy.states.whole(p).clone() for name, p in policy.parameters().items()}


def muon(folder: Path) -> None:
    """Make three updates with a checkpoint after the second, then one from the checkpoint of the
    plain process."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    initialize()
    for name in MUON:
        engine = muon_engine(name)
        steps = [muon_step(engine, number, [rank()]) for number in range(2)]
        (folder / name).mkdir(exist_ok=True)
        save_training_state(folder / name, engine)
        dist.barrier()
        steps.append(muon_step(engine, 2, [rank()]))
        TrainingState(folder / f"{name.split()[0]} plain", engine, 2).restore(engine)
        steps.append(muon_step(engine, 2, [rank()]))
        if rank() == 0:
            torch.save(steps, folder / name / "steps.pt")
    shutdown()


def main(folder: Path) -> None:
    """Run all cases for one rank, or those for two."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    initialize()
    rows = {}
    if world_size() == 2:
        rows["full zero2 0"] = run(folder, "full", "zero2", None, range(2))
        rows["full zero3 2"] = run(
            folder,
            "full",
            "zero3",
            "full-2",
            range(2, 3),
            model__gradient_checkpointing="attention",
        )
    else:
        rows["full zero3 2"] = run(folder, "full", "zero3", "full-zero2-on-2", range(2, 3))
        rows["lora zero1 1"] = run(folder, "lora", "zero1", "lora-1", range(1, 3))
        checks(folder)
    if rank() == 0:
        (folder / f"on-{world_size()}.json").write_text(json.dumps({"rows": rows}))
    shutdown()
