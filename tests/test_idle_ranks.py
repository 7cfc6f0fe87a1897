"""A rank without work makes the collectives of the others, and adds nothing: every case is trained
as by one process.

A rank may have nothing to train (the rewards of its samples are equal, or failed), no sample, or
fewer forwards than others. One group of gloo processes per number of ranks runs its cases. A rank
that waits for another in vain ends after TIMEOUT, and prints where.
"""

import dataclasses
import faulthandler
import importlib.util
import itertools
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from sage_fast.algorithm.trainable import check_same_settings
from sage_fast.cli import main
from sage_fast.config.loader import load
from sage_fast.config.schema import Config
from sage_fast.loading import load_setup, resolve
from sage_fast.models.attention.sequence import SequenceParallel
from sage_fast.models.hunyuan15.conditioning import TextEmbedding
from sage_fast.models.interface import pass_lengths
from sage_fast.parallel import fsdp
from sage_fast.rewards import Reward
from sage_fast.run.fail_fast import fail_fast
from sage_fast.testbed.world import train_prompts
from sage_fast.trainer import Trainer
from sage_fast.util.errors import UserError
from sage_fast.util.files import read_metrics
from sage_fast.util.process_group import initialize
from sage_fast.util.ranks import barrier, join_sequence_group, rank, sequence_group, shutdown
from tests.ranks import run_ranks, screens
from tests.tiny import (
    CPU,
    FEW_STEPS,
    BrightnessReward,
    arguments,
    keys_of,
    planned,
    settings,
    tiny_trainer,
    with_images,
)

SOAK = "SAGE_FAST_SOAK" in os.environ
TIMEOUT = 1.5
"""Minutes until a case has failed."""
ITERATIONS = 3
"""The first has a free anchor, the second an old one, the third a fresh one (`kl.anchor_interval`).
"""
TOGETHER = 8
"""Cases of one group of processes, whose time `run_ranks` limits."""
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


# -- what leaves ranks without work ----------------------------------------------------------------


def first_prompts(**given: Any) -> set[str]:
    """The first prompt of each iteration; no other prompt of these iterations is one of them."""
    config = settings(**BASE | given)
    plans = [planned(config, keys_of(train_prompts()), index) for index in range(ITERATIONS)]
    return {plan.samples[0].prompt.text for plan in plans}


class Equal(BrightnessReward):
    """Gives all videos of the first prompt of an iteration the same reward."""

    def __call__(self, videos: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
        first = first_prompts()
        equal = torch.tensor([prompt in first for prompt in prompts])
        return {
            part: torch.where(equal, 0.5, value)
            for part, value in super().__call__(videos, prompts).items()
        }


class Failed(BrightnessReward):
    """Has no score for the first prompt of an iteration."""

    def __call__(self, videos: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
        first = first_prompts()
        failed = torch.tensor([prompt in first for prompt in prompts])
        return {
            part: torch.where(failed, math.nan, value)
            for part, value in super().__call__(videos, prompts).items()
        }


class Broken(Failed):
    """Likewise, by an error that every retry repeats."""

    def __call__(self, videos: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
        if first_prompts() & {*prompts}:
            raise OSError("scoring server went away")
        return super().__call__(videos, prompts)


class OneFails(BrightnessReward):
    """Has no score for one of the four videos of an iteration: by their means, which differ by far
    more than rounding.

    These are the brightest of the first and the third iteration, and that of the second.
    """

    def __call__(self, videos: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
        means = videos.mean((1, 2, 3, 4))
        failed = (means > 0.5345) | ((means > 0.5330) & (means < 0.5332))
        return {
            part: torch.where(failed, math.nan, value)
            for part, value in super().__call__(videos, prompts).items()
        }


ONE_GROUP = {"train__prompts_per_iteration": 1, "train__group_size": 4}
NOISED = {
    "objective__surrogate": "nft",
    "kl__velocity_term": "closed_form",
    "sampling__sampler": "ode",
}
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
    "images": (Failed, {}),
    "more ranks than samples": (BrightnessReward, {"train__prompts_per_iteration": 1}),
}  # fmt: skip
LENGTHS = "guidance"
"""The situation whose prompts differ in length, so that ranks have different numbers of
micro-batches."""


IMAGES = "images"
"""The situation whose prompts have an image each, with weights of their own."""


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
        given |= {
            "train__engine": self.engine,
            "model__tuning": self.tuning,
            "model__sequence_parallel": self.sequence,
        }
        return settings(**given)


ENGINES = ["plain", "zero1", "zero2", "zero3"]
if importlib.util.find_spec("deepspeed") is None:
    ENGINES = ["plain", "zero3"]

FEW = [
    Case(2, "zero3", "lora", "equal rewards"),
    Case(2, "zero3", "full", "noised again"),
    Case(2, "zero2", "full", "failed rewards"),
    Case(2, "plain", "lora", "a reward that raises"),
    Case(4, "zero3", "full", "guidance", sequence=2),
    Case(4, "zero3", "lora", "one of a group fails"),
]
EVERYWHERE = ("equal rewards", "failed rewards", "one of a group fails")
"""Situations of all engines; the others change what is gathered, so that they matter where forwards
are collective."""
RANKS = {
    "one of a group fails": [(4, 1)],
    "more ranks than samples": [(4, 1)],
    "failed rewards": [(2, 1), (4, 1), (4, 2)],
}
"""Situation -> ranks, and ranks to a sample; four ranks have one sample each."""
ALL = [
    Case(ranks, engine, tuning, situation, sequence)
    for engine, tuning, situation in itertools.product(ENGINES, ("lora", "full"), SITUATIONS)
    for ranks, sequence in RANKS.get(situation, [(2, 1), (4, 2)])
    if engine == "zero3" or situation in (*EVERYWHERE, IMAGES)
]
CASES = ALL if SOAK else [case for case in FEW if case.engine in ENGINES]


# -- running them ----------------------------------------------------------------------------------


def train(case: Case) -> Record:
    """Train the iterations on this rank; return what it had to train, the rows and how far the
    weights moved."""
    trainer: Trainer = tiny_trainer(case.config, SITUATIONS[case.situation][0]())
    if (group := sequence_group()) is not None:
        trainer.policy.sequence = SequenceParallel(group, CPU)
    if case.situation == LENGTHS:
        trainer.embeddings = {
            key: TextEmbedding(
                text=known.text.repeat(1 + 3 * (len(key.text) % 3), 1), glyphs=known.glyphs
            )
            for key, known in trainer.embeddings.items()
        }
    if case.situation == IMAGES:
        torch.manual_seed(7)
        trainer.embeddings = with_images(trainer.embeddings)
    trainer.replay.lengths = pass_lengths(trainer.embeddings, guided=trainer.policy.uses_guidance)
    start = whole_weights(trainer)
    local = []

    def update(batch: Any, transitions: Any, bar: Any, original: Any = trainer.update) -> None:
        local.append((len(batch.samples), len(batch.own(transitions)), len(transitions)))
        original(batch, transitions, bar)

    trainer.update = update  # type: ignore[method-assign]
    rows = [trainer.iteration(index) for index in range(ITERATIONS)]
    end = whole_weights(trainer)
    return {
        "rows": rows,
        "local": local,
        "moved": torch.cat([(end[name] - start[name]).flatten() for name in start]),
    }


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
        for first in range(0, len(cases), TOGETHER):
            some = cases[first : first + TOGETHER]
            assert run_ranks(on_rank, count, folder, some) == [0] * count, screens(folder, count)
    return {
        case: [torch.load(folder / f"{case}-{n}.pt") for n in range(case.ranks)] for case in CASES
    }


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
    "reward/mean", "reward/std", "reward/zero_std_groups", "reward/dropped",
    "reward/dropped_groups",
    "advantage/abs_mean", "grad_norm", "kl/lambda", "kl/anchor", "ratio/mean", "learning_rate",
    "optimizer_step",
)  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.fault(
    "a rank has nothing to train, no scored sample or no sample: every engine, two and four ranks",
    "trained as by one process",
)
def test_ranks_without_work_train_as_one_process(
    case: Case, results: Any, one_process: Any
) -> None:
    """Compare the metrics of three iterations, and the weights relative to how far they moved."""
    expected = one_process[case.tuning, case.situation]
    for found in results[case]:
        for row, of_one in zip(found["rows"], expected["rows"], strict=True):
            assert all(name.startswith("time/") for name in row.keys() ^ of_one.keys())
            for name in METRICS:
                value = of_one.get(name, 0.0)  # a mean over nothing has no row
                assert row.get(name, 0.0) == pytest.approx(value, rel=1e-3, abs=1e-10), (
                    row["iteration"],
                    name,
                )
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


# -- a run -----------------------------------------------------------------------------------------

PAPER = Path(__file__).parent.parent / "configs" / "recipes" / "paper.yaml"


class FailsOnRankOne(BrightnessReward):
    """Scores the dummy videos of the check, and no others on the second rank, which has no video in
    an evaluation."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, videos: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
        self.calls += 1
        if self.calls > 1 and rank() == 1:
            raise OSError("scoring server went away")
        return super().__call__(videos, prompts)


def run(folder: Path, on_failure: str) -> None:
    """Train on this rank, or continue: one sample a rank, one video to evaluate."""
    given = arguments(
        reward__name=f"{__name__}:FailsOnRankOne", reward__on_failure=on_failure,
        reward__max_dropped=0.5,
        reward__retries=0, train__engine="zero3", train__prompts_per_iteration=1,
        train__group_size=3,
        train__iterations=3, eval__num_prompts=1, eval__seeds_per_prompt=1, eval__judge="null",
        timeout_minutes=TIMEOUT,
        tracking__trackers="[]",
    )  # fmt: skip
    sys.exit(
        main(["train", str(PAPER), "--output", str(folder / "run"), "--resume", *FEW_STEPS, *given])
    )


@pytest.mark.soak
@pytest.mark.fault(
    "the reward of one of three ranks, which have one sample each, fails in every iteration "
    "(ZeRO-3)",
    "its sample is dropped; with `reward.on_failure: stop` all end with one line, and `--resume` "
    "goes on",
)
def test_a_run_goes_on_without_the_sample_of_one_rank(tmp_path: Path) -> None:
    assert run_ranks(run, 3, tmp_path, "stop") == [1] * 3, screens(tmp_path, 3)
    for screen in screens(tmp_path, 3):
        assert "scoring server went away" in screen
        assert "Traceback" not in screen
    assert run_ranks(run, 3, tmp_path, "drop") == [0] * 3, screens(tmp_path, 3)
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [(row["iteration"], row["reward/dropped"]) for row in rows] == [(0, 1), (1, 1), (2, 1)]
    assert all(row["grad_norm"] > 0 for row in rows)


# -- other things that would make ranks differ in their collectives --------------------------------


def disagree(folder: Path) -> None:
    """Give each rank settings, prompts and an optimizer state of its own."""
    initialize(timeout_minutes=TIMEOUT)
    faulthandler.dump_traceback_later(60 * TIMEOUT, exit=True)
    with pytest.raises(
        UserError, match=r"train.optimizer_steps = 2 on rank 1, and 1 on rank 0; expected the same"
    ):
        check_same_settings(settings(train__optimizer_steps=1 + rank()))
    check_same_settings(settings(data__embedding_cache=f"disk-of-{rank()}"))
    with pytest.raises(UserError, match=r"resume = False on rank 1, and True on rank 0"):
        check_same_settings(settings(), resume=rank() == 0)

    setup = load_setup(resolve(load(PAPER)))
    setup.prompts = setup.prompts[rank() :]
    with pytest.raises(
        UserError, match=r"data.prompts = .* on rank 1, and .* on rank 0; .*copy the prompt file"
    ):
        setup.encode()

    engine = tiny_trainer(settings()).engine
    assert engine.remember()
    if rank() == 1:  # as where the other rank's part of a weight is empty
        engine.optimizers[0].state[engine.parameters[0]]["momentum_buffer"] = torch.ones(10)  # type: ignore[attr-defined]
    assert engine.remember()
    barrier()
    shutdown()


def test_ranks_that_disagree_say_so_in_place_of_waiting(tmp_path: Path) -> None:
    assert run_ranks(disagree, 2, tmp_path) == [0, 0], screens(tmp_path)


def refuse(folder: Path) -> None:
    """Refuse something on the second rank, for which the first one waits."""
    faulthandler.dump_traceback_later(60 * TIMEOUT, exit=True)
    try:
        with fail_fast(TIMEOUT):
            if rank() == 1:
                raise UserError("text encoder: not there")
            barrier()
    except UserError as error:
        print(error, flush=True)
        sys.exit(2)


@pytest.mark.fault(
    "one of two ranks refuses a file that the other has", "both end with its line and status 2"
)
def test_what_one_rank_refuses_ends_the_others(tmp_path: Path) -> None:
    assert run_ranks(refuse, 2, tmp_path) == [2, 2], screens(tmp_path)
    first, second = screens(tmp_path)
    assert first.splitlines()[-1] == "sage-fast: rank 1 failed: UserError: text encoder: not there"
    assert second.splitlines()[-1] == "text encoder: not there"


def test_a_norm_of_no_gradients_is_on_the_device_that_reduces_it() -> None:
    """NCCL reduces nothing on the CPU, where PyTorch makes a norm of nothing."""
    device = torch.device("meta")
    engine = SimpleNamespace(
        parameters=[], optimized={}, replicate_group=None, policy=SimpleNamespace(device=device)
    )
    seen = []
    with mock.patch.object(fsdp, "all_reduce", lambda tensor: seen.append(tensor) or tensor):
        fsdp.FsdpEngine._gradient_norm(engine)  # type: ignore[arg-type]
    assert [tensor.device for tensor in seen] == [device]
