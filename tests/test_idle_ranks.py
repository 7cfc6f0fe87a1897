"""A rank without work makes the collectives of the others, and adds nothing: every case is trained as by one process.

A rank may have nothing to train (the rewards of its samples are equal, or failed), no sample, or fewer forwards than
others. One group of gloo processes per number of ranks runs its cases. A rank that waits for another in vain ends after
TIMEOUT, and prints where.
"""

import dataclasses
import faulthandler
import importlib.util
import itertools
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sage_fast.config.schema import Config
from sage_fast.models.attention.sequence import SequenceParallel
from sage_fast.models.hunyuan15.conditioning import TextEmbedding
from sage_fast.models.interface import pass_lengths
from sage_fast.rewards import Reward
from sage_fast.testbed.world import train_prompts
from sage_fast.trainer import Trainer
from sage_fast.util.process_group import initialize
from sage_fast.util.ranks import join_sequence_group, rank, sequence_group, shutdown
from tests.ranks import run_ranks, screens
from tests.tiny import CPU, BrightnessReward, planned, settings, tiny_trainer

SOAK = "SAGE_FAST_SOAK" in os.environ
TIMEOUT = 1.5
"""Minutes until a case has failed."""
ITERATIONS = 3
"""The first has a free anchor, the second an old one, the third a fresh one (`kl.anchor_interval`)."""
Record = dict[str, Any]

BASE: dict[str, Any] = {
    "kl__strategy": "dual",
    "kl__anchor_interval": 3,
    "kl__lambda_min": 1e-3,
    "kl__lambda_max": 1e-2,
    "sampling__steps": 3,
    "sampling__batch_size": 2,
    "train__prompts_per_iteration": 2,
    "train__group_size": 2,
    "train__batch_size": 1,
    "train__optimizer_steps": 2,
    "train__eps": 1e-6,
    "reward__max_dropped": 1,
    "objective__clip_range": 1e-2,
}


# -- what leaves ranks without work -----------------------------------------------------------------------------------


def first_prompts(**given: Any) -> set[str]:
    """The first prompt of each iteration; no other prompt of these iterations is one of them."""
    config = settings(**BASE | given)
    plans = [planned(config, train_prompts(), index) for index in range(ITERATIONS)]
    return {plan.samples[0].prompt for plan in plans}


class Equal(BrightnessReward):
    """Gives all videos of the first prompt of an iteration the same reward."""

    def __call__(self, videos: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
        first = first_prompts()
        equal = torch.tensor([prompt in first for prompt in prompts])
        return {part: torch.where(equal, 0.5, value) for part, value in super().__call__(videos, prompts).items()}


class Failed(BrightnessReward):
    """Has no score for the first prompt of an iteration."""

    def __call__(self, videos: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
        first = first_prompts()
        failed = torch.tensor([prompt in first for prompt in prompts])
        return {part: torch.where(failed, math.nan, value) for part, value in super().__call__(videos, prompts).items()}


class Broken(Failed):
    """Likewise, by an error that every retry repeats."""

    def __call__(self, videos: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
        if first_prompts() & {*prompts}:
            raise OSError("scoring server went away")
        return super().__call__(videos, prompts)


class OneFails(BrightnessReward):
    """Has no score for one of the four videos of an iteration: by their means, which differ by far more than rounding.

    These are the brightest of the first and the third iteration, and that of the second.
    """

    def __call__(self, videos: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
        means = videos.mean((1, 2, 3, 4))
        failed = (means > 0.5345) | ((means > 0.5330) & (means < 0.5332))
        return {part: torch.where(failed, math.nan, value) for part, value in super().__call__(videos, prompts).items()}


ONE_GROUP = {"train__prompts_per_iteration": 1, "train__group_size": 4}
NOISED = {"objective__surrogate": "nft", "kl__velocity_term": "closed_form", "sampling__sampler": "ode"}
SITUATIONS: dict[str, tuple[type[Reward], dict[str, Any]]] = {
    "equal rewards": (Equal, {}),
    "failed rewards": (Failed, {}),
    "a reward that raises": (Broken, {}),
    "one of a group fails": (OneFails, ONE_GROUP),
    "noised again": (Equal, NOISED),
    "guidance": (Equal, {"sampling__guidance_scale": 3.0}),
    "windows apart": (
        Failed,
        {"sampling__sampler": "precise", "sampling__steps": 4, "sampling__sde_window": 2,
         "sampling__window_per_prompt": True, "sampling__shared_initial_noise": True},
    ),
    "averaged weights": (Equal, {"sampling__averaged_weights": True, "train__ema_decay": 0.5}),
    "more ranks than samples": (BrightnessReward, {"train__prompts_per_iteration": 1}),
}  # fmt: skip
LENGTHS = "guidance"
"""The situation whose prompts differ in length, so that ranks have different numbers of micro-batches."""


@dataclasses.dataclass(frozen=True)
class Case:
    """What runs on so many ranks, `sequence` of them to a sample."""

    ranks: int
    engine: str
    tuning: str
    situation: str
    sequence: int = 1

    def __str__(self) -> str:
        shared = f", {self.sequence} to a sample" if self.sequence > 1 else ""
        return f"{self.engine} {self.tuning} on {self.ranks}{shared}: {self.situation}"

    @property
    def config(self) -> Config:
        given = BASE | SITUATIONS[self.situation][1]
        given |= {"train__engine": self.engine, "model__tuning": self.tuning, "model__sequence_parallel": self.sequence}
        return settings(**given)


ENGINES = ["plain", "zero1", "zero2", "zero3"]
if importlib.util.find_spec("deepspeed") is None:
    ENGINES = ["plain", "zero3"]

FEW = [
    Case(2, "zero3", "lora", "equal rewards"),
    Case(2, "zero3", "full", "failed rewards"),
    Case(2, "zero3", "full", "noised again"),
    Case(2, "zero2", "full", "equal rewards"),
    Case(2, "zero1", "lora", "a reward that raises"),
    Case(2, "plain", "lora", "failed rewards"),
    Case(4, "zero3", "full", "guidance", sequence=2),
    Case(4, "zero3", "lora", "one of a group fails"),
    Case(4, "zero3", "lora", "more ranks than samples"),
]
ALL = [
    Case(ranks, engine, tuning, situation, sequence)
    for ranks, sequence in ((2, 1), (4, 1), (4, 2))
    for engine, tuning, situation in itertools.product(ENGINES, ("lora", "full"), SITUATIONS)
    if situation != "more ranks than samples" or (ranks, sequence) == (4, 1)
]
CASES = ALL if SOAK else [case for case in FEW if case.engine in ENGINES]


# -- running them -----------------------------------------------------------------------------------------------------


def train(case: Case) -> Record:
    """Train the iterations on this rank; return what it had to train, the rows and how far the weights moved."""
    trainer: Trainer = tiny_trainer(case.config, SITUATIONS[case.situation][0]())
    if (group := sequence_group()) is not None:
        trainer.policy.sequence = SequenceParallel(group, CPU)
    if case.situation == LENGTHS:
        trainer.embeddings = {
            prompt: TextEmbedding(text=known.text.repeat(1 + 3 * (len(prompt) % 3), 1), glyphs=known.glyphs)
            for prompt, known in trainer.embeddings.items()
        }
        trainer.replay.lengths = pass_lengths(trainer.embeddings, guided=trainer.policy.uses_guidance)
    start = whole_weights(trainer)
    local = []

    def update(batch: Any, transitions: Any, bar: Any, original: Any = trainer.update) -> None:
        local.append((len(batch.samples), len(batch.own(transitions)), len(transitions)))
        original(batch, transitions, bar)

    trainer.update = update  # type: ignore[method-assign]
    rows = [trainer.iteration(index) for index in range(ITERATIONS)]
    end = whole_weights(trainer)
    return {"rows": rows, "local": local, "moved": torch.cat([(end[name] - start[name]).flatten() for name in start])}


def whole_weights(trainer: Trainer) -> dict[str, Tensor]:
    policy = trainer.policy
    return {name: policy.states.whole(p).clone() for name, p in policy.parameters().items()}


def on_rank(folder: Path, cases: list[Case]) -> None:
    """Run the cases of this number of ranks."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    initialize(timeout_minutes=TIMEOUT)
    for case in cases:
        print(case, flush=True)  # the last one on the screen is the one that hung
        faulthandler.dump_traceback_later(60 * TIMEOUT, exit=True)
        join_sequence_group(case.sequence, TIMEOUT)
        torch.save(train(case), folder / f"{case}-{rank()}.pt")
    faulthandler.cancel_dump_traceback_later()
    shutdown()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, list[Record]]:
    """What every rank recorded."""
    folder = tmp_path_factory.mktemp("ranks")
    for count in sorted({case.ranks for case in CASES}):
        cases = [case for case in CASES if case.ranks == count]
        assert run_ranks(on_rank, count, folder, cases) == [0] * count, screens(folder, count)
    return {case: [torch.load(folder / f"{case}-{n}.pt") for n in range(case.ranks)] for case in CASES}


@pytest.fixture(scope="module")
def one_process() -> dict[tuple[str, str], Record]:
    """The same by one process with the plain engine, by tuning and situation."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        pairs = dict.fromkeys((case.tuning, case.situation) for case in CASES)
        return {pair: train(Case(1, "plain", *pair)) for pair in pairs}
    finally:
        torch.set_num_threads(threads)


METRICS = (
    "reward/mean", "reward/std", "reward/zero_std_groups", "reward/dropped", "reward/dropped_groups",
    "advantage/abs_mean", "grad_norm", "kl/lambda", "kl/anchor", "ratio/mean", "learning_rate", "optimizer_step",
)  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.fault(
    "a rank has nothing to train, no scored sample or no sample: every engine, two and four ranks",
    "trained as by one process",
)
def test_ranks_without_work_train_as_one_process(case: Case, results: Any, one_process: Any) -> None:
    """Compare the metrics of three iterations, and the weights relative to how far they moved."""
    expected = one_process[case.tuning, case.situation]
    for found in results[case]:
        for row, of_one in zip(found["rows"], expected["rows"], strict=True):
            assert all(name.startswith("time/") for name in row.keys() ^ of_one.keys())
            for name in METRICS:
                value = of_one.get(name, 0.0)  # a mean over nothing has no row
                assert row.get(name, 0.0) == pytest.approx(value, rel=1e-3, abs=1e-10), (row["iteration"], name)
        moved, way = found["moved"], expected["moved"]
        assert float((moved - way).norm()) <= 0.03 * float(way.norm())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_cases_are_what_they_are_called(case: Case, results: Any) -> None:
    """Some rank has nothing to train in an update in which another has."""
    if case.situation == LENGTHS:
        return
    by_update = zip(*(of_rank["local"] for of_rank in results[case]), strict=True)
    idle = [any(own == 0 for _, own, _ in update) and update[0][2] > 0 for update in by_update]
    assert any(idle), results[case]
    if case.situation == "more ranks than samples":
        assert any(samples == 0 for of_rank in results[case] for samples, _, _ in of_rank["local"])
