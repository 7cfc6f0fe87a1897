"""Runs of tests/test_engine_deepspeed.py, in processes of their own."""

from __future__ import annotations

import functools
import gc
import itertools
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
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from sage_fast.config.schema import Config
from sage_fast.models.hunyuan15.policy import HunyuanVideo15Policy, freeze_dead_ends
from sage_fast.models.hunyuan15.text import collate
from sage_fast.models.lora import LORA_FILE
from sage_fast.models.save import save_weights
from sage_fast.models.testbed.model import TestbedTransformer
from sage_fast.parallel import Engine, make_engine
from sage_fast.rewards import CompositeReward
from sage_fast.run.checkpoint import load_checkpoint, save_checkpoint
from sage_fast.run.training_state import load_training_state, save_training_state
from sage_fast.testbed.world import train_prompts
from sage_fast.tools.plan import plan
from sage_fast.trainer import Trainer
from sage_fast.util.errors import NonFiniteError
from sage_fast.util.ranks import initialize, rank, shutdown, world_size
from tests import tiny
from tests.tiny import CPU, BrightnessReward, embeddings, settings, tiny_model, tiny_trainer

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
    """Largest number of bytes in live tensors; the garbage collector finds those that exist at the start."""

    def __enter__(self) -> Any:
        self.live = {tensor.untyped_storage()._cdata: self._entry(tensor) for tensor in self._tensors()}
        self.total = self.peak = sum(size for _, size in self.live.values())
        return super().__enter__()

    @staticmethod
    def _tensors() -> list[Tensor]:
        gc.collect()
        return [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor) and not thing.is_meta]

    @staticmethod
    def _entry(tensor: Tensor) -> tuple[StorageWeakRef, int]:
        return StorageWeakRef(tensor.untyped_storage()), tensor.untyped_storage().nbytes()

    @classmethod
    def now(cls) -> int:
        found = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in cls._tensors()}
        return sum(found.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor) and (key := tensor.untyped_storage()._cdata) not in self.live:
                self.live[key] = self._entry(tensor)
                self.total += self.live[key][1]
        if self.total > self.peak:  # unless some have been freed
            self.live = {key: kept for key, kept in self.live.items() if not kept[0].expired()}
            self.total = sum(size for _, size in self.live.values())
            self.peak = max(self.peak, self.total)
        return out


def mixed_trainer(config: Config) -> Trainer:
    """A trainer of float32 weights that run in bfloat16 under autocast, as full tuning on GPUs does."""
    model, prompts = tiny_model(config, torch.bfloat16), train_prompts()
    model.policy.networks["transformer"].float()
    reward = CompositeReward(BrightnessReward(), config.reward)
    return Trainer(config, model, reward, prompts, embeddings(prompts, torch.bfloat16))


def memory(folder: Path, mode: str) -> dict[str, Any]:
    """Bytes of this rank with ZeRO-3, all weights trained in bfloat16: planned, and alive at the peak of a backward.

    The model is wider than in the other runs, so that its weights count, and the videos are longer. As in the published
    model, a bucket of gradients is a small part of all gradients.
    """
    (folder / "bucket.json").write_text('{"zero_optimization": {"reduce_bucket_size": 50000}}')
    given = {"train__engine": "zero3", "train__deepspeed_config": str(folder / "bucket.json"), "model__tuning": "full",
             "model__dtype": "bfloat16", "model__gradient_checkpointing": mode, "sampling__num_frames": 17}  # fmt: skip
    config = settings(**SETTINGS | {"train__prompts_per_iteration": 2, "train__optimizer_steps": 1} | given)
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
    return {"planned": planned, "measured": max(peak.peak for peak in peaks) - before}


def run(folder: Path, tuning: str, engine: str, start: str | None, iterations: range, **overrides: Any) -> list[Any]:
    """Resume from the checkpoint `start`, train `iterations`, and leave a checkpoint; return the rows."""
    config = settings(**SETTINGS, model__tuning=tuning, train__engine=engine, **overrides)
    trainer = tiny_trainer(config, NamedReward())
    if start is not None:
        resume(trainer, folder / start)
    rows = [trainer.iteration(index) for index in iterations]
    name = f"{tuning}-{engine}-on-{world_size()}"
    save_checkpoint(folder / name, iterations.stop, trainer.engine, trainer.state_dict(), trainer.anchor)
    return rows


def resume(trainer: Trainer, run: Path) -> None:
    found = load_checkpoint(run, trainer.engine)
    assert found is not None
    trainer.load_state_dict(found[1], found[2])


def losses(policy: HunyuanVideo15Policy) -> Iterator[Tensor]:
    """Yield a loss of all weights, one of the blocks' weights alone, and one that is NaN."""
    text = collate(
        [embeddings(["a red circle moves left quickly"])["a red circle moves left quickly"]], CPU, torch.float32
    )
    x, sigma = torch.randn(1, 32, 5, 4, 4, generator=torch.Generator().manual_seed(5)), torch.tensor([0.4])
    yield policy.velocity(x, policy.condition(sigma, text)).square().mean()
    with torch.no_grad():
        frozen = policy.condition(sigma, text)
    yield policy.velocity(x, frozen).square().mean()
    yield policy.velocity(x, policy.condition(sigma, text)).mean() * math.nan


def checks(folder: Path) -> None:
    """Compare with the plain engine: weights without a gradient, a non-finite update, a LoRA file of ZeRO-3."""
    from sage_fast.parallel.zero import ZeroEngine  # imports DeepSpeed, which the tests' own process does without

    found = {}
    for name in ("plain", "zero1", "zero2", "zero3"):
        config = settings(model__tuning="full", train__engine=name, train__weight_decay=0.5, train__eps=1e-8)
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
            with pytest.raises(NonFiniteError, match="optimizer step 2; the weights were not updated"):
                engine.step()
            assert all(torch.equal(part, before[n]) for n, part in policy.parts().items()), name
        found[name] = {n: policy.whole(p).clone() for n, p in policy.parameters().items()}
    for name in ("zero1", "zero2", "zero3"):
        for n, expected in found["plain"].items():
            off = float((found[name][n] - expected).abs().max())
            assert off < 1e-5, (name, n, off)  # an update is 1e-3, decay 5e-4 of a weight
    for name in ("plain", "zero3"):
        save_weights(tiny_trainer(settings(train__engine=name)).policy, folder / name)
    plain, sharded = (load_file(folder / name / LORA_FILE) for name in ("plain", "zero3"))
    assert plain.keys() == sharded.keys()
    for name, factor in plain.items():  # also in dead ends, which are frozen
        assert torch.equal(factor, sharded[name]), (name, factor.shape, sharded[name].shape)


MUON = {"full zero1": {"train__offload": "optimizer"}, "full zero2": {}, "full zero3": {}, "lora zero2": {}}
"""Tuning and engine -> further settings."""


def muon_engine(name: str) -> Engine:
    """An engine with Muon; `eps` keeps AdamW's updates small for gradients that are only rounding."""
    tuning, engine = name.split()
    given = {"train__learning_rate": 1e-2, "train__weight_decay": 0.5, "train__eps": 1e-8, **MUON.get(name, {})}
    config = settings(model__tuning=tuning, train__engine=engine, train__optimizer="muon", **given)
    policy = tiny_model(config).policy
    freeze_dead_ends(policy.transformer)
    return make_engine(policy, config.train)


def muon_step(engine: Engine, number: int, ranks: Sequence[int]) -> dict[str, Tensor]:
    """Update by the mean of two losses, with this process computing those of `ranks`; return the whole weights."""
    policy, words = engine.policy, "a red circle moves left quickly"
    text = collate([embeddings([words])[words]], CPU, torch.float32)
    for place in ranks:
        x = torch.randn(1, 32, 5, 4, 4, generator=torch.Generator().manual_seed(10 * number + place))
        engine.backward(policy.velocity(x, policy.condition(torch.tensor([0.4]), text)).square().mean(), 2)
    engine.step()
    return {name: policy.whole(p).clone() for name, p in policy.parameters().items()}


def muon(folder: Path) -> None:
    """Make three updates with a checkpoint after the second, then one from the checkpoint of the plain process."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    initialize()
    for name in MUON:
        engine = muon_engine(name)
        steps = [muon_step(engine, number, [rank()]) for number in range(2)]
        (folder / name).mkdir(exist_ok=True)
        save_training_state(folder / name, engine)
        dist.barrier()
        steps.append(muon_step(engine, 2, [rank()]))
        load_training_state(folder / f"{name.split()[0]} plain", engine, 2)
        steps.append(muon_step(engine, 2, [rank()]))
        if rank() == 0:
            torch.save(steps, folder / name / "steps.pt")
    shutdown()


class Copies(TorchDispatchMode):
    """Copies of weights in bfloat16, by the weights' shapes, that are still alive."""

    def __init__(self, weights: Sequence[Any]) -> None:
        super().__init__()
        self.shapes = {weight.ds_shape for weight in weights}
        self.made: list[StorageWeakRef] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and out.dtype == torch.bfloat16 and out.shape in self.shapes:
            self.made.append(StorageWeakRef(out.untyped_storage()))
        return out

    @property
    def alive(self) -> int:
        return sum(not made.expired() for made in self.made)


def collectives(folder: Path, mode: str) -> None:
    """Write what ZeRO-3 gathers in a mode of checkpointing, and the copies of weights that a forward leaves."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    initialize()
    found = gathered(mode)
    if rank() == 0:
        (folder / "collectives.json").write_text(json.dumps(found))
    shutdown()


def gathered(mode: str) -> dict[str, tuple[int, int]]:
    """Part -> all-gathers and their elements; `copies` -> how many a forward made, and how many are alive after it."""
    from deepspeed.comm import comm

    given = {"model__gradient_checkpointing": mode, "model__tuning": "full", "train__engine": "zero3"}
    trainer = mixed_trainer(settings(**given, model__dtype="bfloat16"))
    policy, words = trainer.policy, "a red circle moves left quickly"
    text = collate([embeddings([words])[words]], CPU, torch.bfloat16)
    x, sigma = torch.randn(1, 32, 5, 4, 4), torch.tensor([0.4])
    weights = [p for unit in policy.sharded_units() for p in unit.parameters()]
    with torch.no_grad():
        table = policy.condition(sigma, text)
    sizes: list[int] = []
    all_gather, ends = comm.cdb.all_gather_function, [0]

    def counted(*, output_tensor: Tensor, **rest: Any) -> Any:
        sizes.append(output_tensor.numel())
        return all_gather(output_tensor=output_tensor, **rest)

    with mock.patch.object(comm.cdb, "all_gather_function", counted):
        with torch.no_grad():
            policy.velocity(x, table)
            ends.append(len(sizes))
            policy.velocity(x, policy.condition(sigma, text))
            ends.append(len(sizes))
        with Copies(weights) as copies:
            loss = policy.velocity(x, policy.condition(sigma, text)).float().square().mean()
        made = len(copies.made), copies.alive
        trainer.engine.backward(loss, world_size())
        ends.append(len(sizes))
    parts = zip(("rollout", "anchor", "training"), itertools.pairwise(ends))
    return {part: (last - first, sum(sizes[first:last])) for part, (first, last) in parts} | {"copies": made}


def main(folder: Path) -> None:
    """Run all cases for one rank, or those for two."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    initialize()
    rows = {}
    if world_size() == 2:
        rows["full zero2 0"] = run(folder, "full", "zero2", None, range(2))
        rows["full zero3 2"] = run(
            folder, "full", "zero3", "full-2", range(2, 3), model__gradient_checkpointing="attention"
        )
        memories = {mode: memory(folder, mode) for mode in ("none", "attention")}
    else:
        rows["full zero3 2"] = run(folder, "full", "zero3", "full-zero2-on-2", range(2, 3), train__offload="all")
        rows["lora zero1 1"] = run(folder, "lora", "zero1", "lora-1", range(1, 3), train__offload="optimizer")
        memories = {}
        checks(folder)
    if rank() == 0:
        (folder / f"on-{world_size()}.json").write_text(json.dumps({"rows": rows, "memory": memories}))
    shutdown()
