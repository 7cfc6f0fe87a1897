"""Any number of ranks gives the rollouts, rewards, advantages and lambda of one process, and its
updates to rounding.

One group of gloo processes per number of ranks runs all cases.
"""

import json
import os
import random
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import sage_fast.trainer
from sage_fast.algorithm.iteration_plan import Rollouts, assign_to_ranks
from sage_fast.algorithm.metrics import Observer
from sage_fast.algorithm.trainable import check_trainable
from sage_fast.cli import main
from sage_fast.config.loader import load
from sage_fast.data.embeddings import encode_cached
from sage_fast.models.hunyuan15.conditioning import TextEmbedding
from sage_fast.models.interface import pass_lengths
from sage_fast.rewards import Reward, Scores
from sage_fast.rollout.loop import bucket_by_length
from sage_fast.rollout.scoring import gather_scores
from sage_fast.run.checkpoint import load_checkpoint, save_checkpoint
from sage_fast.testbed.world import train_prompts
from sage_fast.trainer import Trainer
from sage_fast.util import meters
from sage_fast.util.captions import Caption
from sage_fast.util.errors import UserError
from sage_fast.util.files import read_json
from sage_fast.util.meters import Stopwatch, slowest_and_fastest
from sage_fast.util.process_group import initialize
from sage_fast.util.ranks import rank, shutdown, world_size
from tests.ranks import run_ranks, screens
from tests.tiny import (
    CPU,
    FEW_STEPS,
    BrightnessReward,
    arguments,
    captions,
    keys_of,
    planned,
    rounding_of_advantages,
    settings,
    tiny_trainer,
)

COUNTS = (1, 2, 3, 4) if "SAGE_FAST_SOAK" in os.environ else (1, 2)
Record = dict[str, Any]


# -- rewards that depend on the video and the prompt alone -----------------------------------------


def odd(video: Tensor) -> bool:
    """True for about half of the videos, the same on any rank: coarser than rounding, finer than
    their differences."""
    return int(400 * float(video.mean())) % 2 == 1


class SomeAreNotFinite(BrightnessReward):
    def __call__(self, videos: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
        parts = super().__call__(videos, prompts)
        failed = torch.tensor([odd(video) for video in videos])
        return {part: torch.where(failed, torch.nan, value) for part, value in parts.items()}


class SomeFail(BrightnessReward):
    def __call__(self, videos: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
        if any(odd(video) for video in videos):
            raise OSError("scoring server went away")
        return {"seen": torch.ones(len(prompts)), **super().__call__(videos, prompts)}


class OneGroupIsEqual(BrightnessReward):
    """Gives all videos of the first prompt of an iteration the same reward."""

    def __call__(self, videos: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
        first = {
            planned(settings(), keys_of(train_prompts()), index).samples[0].prompt.text
            for index in range(2)
        }
        equal = torch.tensor([prompt in first for prompt in prompts])
        return {
            part: torch.where(equal, 0.5, value)
            for part, value in super().__call__(videos, prompts).items()
        }


# -- the cases: settings and reward; six samples in two groups, one by one -------------------------

ALONE = {
    "sampling__batch_size": 1,
    "train__batch_size": 1,
    "sampling__steps": 3,
    "train__parity_gate": False,
}
CASES: dict[str, tuple[dict[str, Any], type[Reward]]] = {
    "std of the group, two updates": (
        ALONE | {"train__optimizer_steps": 2, "kl__anchor_interval": 3, "train__parity_gate": True},
        BrightnessReward
    ),
    "std of the batch, half of the steps": (
        ALONE | {"objective__advantage_std": "batch", "train__timestep_fraction": 0.5,
            "train__ema_decay": 0.9,
                 "kl__strategy": "fixed", "kl__lambda_min": 100, "kl__lambda_max": 200},
        BrightnessReward,
    ),
    "five samples of one prompt, not finite": (
        ALONE | {"train__prompts_per_iteration": 1, "train__group_size": 5,
            "reward__max_dropped": 1,
                 "train__optimizer_steps": 3},
        SomeAreNotFinite,
    ),
    "failures, std of the batch": (
        ALONE | {"reward__max_dropped": 1, "objective__advantage_std": "batch"}, SomeFail
    ),
    "an equal group, noised again": (
        ALONE | {"train__optimizer_steps": 2, "kl__warmup_steps": 0, "sampling__sampler": "ode",
                 "objective__surrogate": "nft", "kl__velocity_term": "closed_form",
                 "sampling__averaged_weights": True, "train__ema_decay": 0.5},
        OneGroupIsEqual,
    ),
    "batches, lengths, guidance": (
        {"sampling__steps": 3, "sampling__batch_size": 2, "train__batch_size": 3,
         "sampling__guidance_scale": 3.0,
         "train__parity_gate": False},
        BrightnessReward,
    ),
    "shared steps, windows that start apart": (
        ALONE | {"sampling__sampler": "precise", "sampling__steps": 4, "sampling__sde_window": 2,
            "seed": 7,
                 "sampling__window_per_prompt": True, "sampling__shared_initial_noise": True},
        BrightnessReward,
    ),
    "a window for each prompt": (
        ALONE | {"sampling__sampler": "precise", "sampling__steps": 4, "sampling__sde_window": 2,
            "seed": 7,
                 "sampling__window_per_prompt": True, "kl__anchor_interval": 1},
        BrightnessReward,
    ),
}  # fmt: skip
IN_BATCHES = "batches, lengths, guidance"


def train(config: Any, reward: type[Reward], lengths: bool) -> Record:
    """Train two iterations; return what every rank knows, and each update's gradients averaged over
    the ranks."""
    trainer: Trainer = tiny_trainer(config, reward())
    if lengths:
        trainer.embeddings = {
            key: TextEmbedding(
                text=known.text.repeat(1 + 3 * (len(key.text) % 3), 1), glyphs=known.glyphs
            )
            for key, known in trainer.embeddings.items()
        }
        trainer.replay.lengths = pass_lengths(
            trainer.embeddings, guided=trainer.policy.uses_guidance
        )
    record: Record = {"rows": [], "rewards": [], "advantages": [], "gradients": []}
    start = trainer.policy.snapshot()
    advantages, step = sage_fast.trainer.group_advantages, trainer.engine.step

    def noting_advantages(rewards: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        result = advantages(rewards, *args, **kwargs)
        record["rewards"].append(rewards.nan_to_num(-1.0))
        record["advantages"].append(result[0])
        return result

    def noting_gradients() -> Any:
        mine = [
            torch.zeros_like(p) if p.grad is None else p.grad for p in trainer.engine.parameters
        ]
        mean = torch.cat([grad.flatten() for grad in mine]) / world_size()
        if dist.is_initialized():
            dist.all_reduce(mean)
        record["gradients"].append(mean)
        return step()

    trainer.engine.step = noting_gradients  # type: ignore[method-assign]
    sage_fast.trainer.group_advantages = noting_advantages
    try:
        record["rows"] = [trainer.iteration(index) for index in range(2)]
    finally:
        sage_fast.trainer.group_advantages = advantages
    moved = trainer.policy.snapshot()
    record["moved"] = torch.cat([(moved[name] - start[name]).flatten() for name in start])
    return record


def encode(folder: Path) -> Record:
    """Embed prompts with one cache for all ranks, one for each, and none; return the prompts that
    this rank encoded."""
    encoded: list[str] = []

    def factory() -> Callable[[Caption], TextEmbedding]:
        def one(caption: Caption) -> TextEmbedding:
            encoded.append(caption.text)
            return TextEmbedding(
                text=torch.full((2, 3), float(len(caption.text))), glyphs=torch.zeros(0, 2)
            )

        return one

    def round_of(prompts: list[str], cache: Path | None) -> list[str]:
        encoded.clear()
        found = encode_cached(captions(*prompts), factory, cache, "m", TextEmbedding)
        assert list(found) == keys_of(prompts)
        for key, condition in found.items():
            assert condition.text.tolist() == [[float(len(key.text))] * 3] * 2
        return list(encoded)

    prompts = ["a" * length for length in range(1, 8)]
    own = folder / f"disk-of-{rank()}"
    return {
        "none": round_of(prompts[:2], None),
        "shared": round_of(prompts, folder / "shared"),
        "shared again": round_of(prompts, folder / "shared"),
        "own": round_of(prompts, own),
        "own again": round_of(["b" * 20, *prompts], own),
        "files": sorted(file.suffix for file in own.iterdir()) if own.exists() else [],
    }


def parts() -> dict[str, float]:
    """After a failure ranks have fewer parts, in any order; the gathered scores have all parts in
    one order."""
    values = [
        {"seen": 1, "vq": 2, "mq": 3},
        {"mq": 5, "vq": 4},
        {"vq": 6, "seen": 1, "mq": 7},
        {"vq": 8, "mq": 9},
    ]
    mine = {name: torch.full((1,), float(value)) for name, value in values[rank()].items()}
    own = Scores(rewards=torch.tensor([float(rank())]), parts=mine, retried=1)
    of_all = gather_scores([world_size() - 1 - rank()], own)
    rewards, gathered = of_all.rewards, of_all.parts
    assert rewards.tolist() == list(reversed(range(world_size())))
    assert list(gathered) == sorted(gathered)
    assert of_all.retried == world_size()
    observer, valid = Observer(CPU), torch.ones(1, world_size(), dtype=torch.bool)
    observer.record_rewards(of_all, rewards[None], valid, torch.zeros(1, dtype=torch.bool))
    return observer.metrics.reduce()


def stale_view(folder: Path) -> Record:
    """Save and load while only the first rank sees new folders, as with NFS's caches of names."""
    is_dir = Path.is_dir
    trainer = tiny_trainer(settings(train__ema_decay=0.9))
    state = (trainer.engine, trainer.state_dict(), trainer.anchor)
    with pytest.MonkeyPatch.context() as patch:
        if rank() > 0:
            patch.setattr(
                Path, "is_dir", lambda path: "checkpoints" not in path.parts and is_dir(path)
            )
            patch.setattr(Path, "glob", lambda path, pattern: iter(()))
        for iteration in (1, 2, 2):
            save_checkpoint(folder, iteration, *state)
        found = load_checkpoint(folder, trainer.engine)
    (newest,) = (folder / "checkpoints").glob("*2")
    files = {path.relative_to(newest).as_posix() for path in newest.rglob("*") if path.is_file()}
    return {
        "iteration": None if found is None else found[0],
        "anchor": found is not None and found[2] is not None,
        "not in the manifest": sorted(files - read_json(newest / "manifest.json")["files"].keys()),
    }


def waiting() -> dict[str, Any]:
    """Times of this rank's phases by a clock of its own; the last rank is the slow one."""
    now = 0.0
    with mock.patch.object(meters, "time", SimpleNamespace(perf_counter=lambda: now)):
        watch = Stopwatch(torch.device("cpu"))
        with watch("train"):
            now = 4.0 if rank() == world_size() - 1 else 1.0
            with watch.waiting():
                now = 4.0
        return watch.seconds()


class SecondRankFails(BrightnessReward):
    """Fails on the second rank in the second iteration, after an evaluation."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, videos: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
        self.calls += 1
        if self.calls > 3 and rank() == 1:  # the first is the check
            raise OSError("scoring server went away")
        return super().__call__(videos, prompts)


def logged_run(folder: Path) -> None:
    """Run `sage-fast train` with TensorBoard."""
    given = arguments(
        reward__name=f"{__name__}:SecondRankFails", reward__on_failure="stop",
        train__prompts_per_iteration=1,
        train__group_size=2, eval__num_prompts=2, eval__seeds_per_prompt=1, train__iterations=2,
        timeout_minutes=1,
    )  # fmt: skip
    config = Path(__file__).parent.parent / "configs" / "recipes" / "paper.yaml"
    sys.exit(main(["train", str(config), "--output", str(folder / "run"), *FEW_STEPS, *given]))


def all_cases(folder: Path, count: int) -> None:
    """Run all cases on each of `count` ranks."""
    initialize(timeout_minutes=2)
    assert world_size() == count
    result: Record = {
        name: train(settings(**given), reward, name == IN_BATCHES)
        for name, (given, reward) in CASES.items()
    }
    result |= {"encode": encode(folder / str(count)), "parts": parts(), "waiting": waiting()}
    result["stale"] = stale_view(folder / f"stale-{count}")
    torch.save(result, folder / f"{count}-{rank()}.pt")
    shutdown()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Record]]:
    """Results of every rank, by number of ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    for count in COUNTS:
        assert run_ranks(all_cases, count, folder, count) == [0] * count, screens(folder, count)
    return {
        count: [torch.load(folder / f"{count}-{n}.pt", weights_only=True) for n in range(count)]
        for count in COUNTS
    }


several = pytest.mark.parametrize("count", COUNTS[1:])
cases = pytest.mark.parametrize("case", CASES)


def relative(value: Tensor, expected: Tensor) -> float:
    return float((value - expected).norm() / expected.norm())


def close(value: float | None, tolerance: float) -> Any:
    """Approximate value.

    None means that nothing was trained; KLs below 1e-13 are those of two equal policies.
    """
    return None if value is None else pytest.approx(value, rel=tolerance, abs=1e-13)


@several
@cases
def test_rewards_and_advantages_are_those_of_one_process(
    results: Any, count: int, case: str
) -> None:
    """Every rank knows those of all.

    The first iteration is exact to the bit if a batch is one sample.
    """
    (alone,) = (outcome[case] for outcome in results[1])
    exact, rounded = {"rtol": 0, "atol": 0}, {"rtol": 0, "atol": 2e-6}
    rounds = [rounded if case == IN_BATCHES else exact, rounded]
    for of_rank in (outcome[case] for outcome in results[count]):
        pairs = zip(of_rank["rewards"], alone["rewards"], rounds, strict=True)
        for rewards, expected, tolerance in pairs:
            torch.testing.assert_close(rewards, expected, **tolerance)
        for advantages, expected, tolerance in zip(
            of_rank["advantages"], alone["advantages"], rounds, strict=True
        ):
            # Rewards of a random model differ by about 1e-3, which is the unit of advantages.
            torch.testing.assert_close(advantages, expected, rtol=0, atol=1e3 * tolerance["atol"])


@several
@cases
def test_gradients_are_the_mean_over_all_kept_transitions(
    results: Any, count: int, case: str
) -> None:
    (alone,) = (outcome[case] for outcome in results[1])
    for of_rank in (outcome[case] for outcome in results[count]):
        assert len(of_rank["gradients"]) == len(alone["gradients"]) > 0
        for update, (ours, expected) in enumerate(zip(of_rank["gradients"], alone["gradients"])):
            # The next rollouts depend on what Adam makes of rounding in small gradients.
            tolerance = 3e-6 if update == 0 and case != IN_BATCHES else 1e-3
            assert relative(ours, expected) < tolerance, update
        # Adam moves a weight whose gradient is rounding as far as any other.
        assert relative(of_rank["moved"], alone["moved"]) < (0.05 if case == IN_BATCHES else 1e-3)


@several
@cases
def test_metrics_and_lambda_are_those_of_one_process(results: Any, count: int, case: str) -> None:
    (alone,) = (outcome[case] for outcome in results[1])
    for of_rank in (outcome[case] for outcome in results[count]):
        for index, (row, expected) in enumerate(zip(of_rank["rows"], alone["rows"], strict=True)):
            assert {k for k in row if not k.startswith("time/")} == {
                k for k in expected if not k.startswith("time/")
            }
            for key in ("reward/dropped", "reward/zero_std_groups", "optimizer_step"):
                assert row[key] == expected[key], (index, key)
            # Advantages are exact in the first iteration if a batch is one sample.
            rounded = rounding_of_advantages(expected) if index or case == IN_BATCHES else 0
            for key in (
                "reward/mean",
                "reward/std",
                "advantage/abs_mean",
                "kl/lambda",
                "grad_norm",
            ):
                assert row.get(key) == close(expected.get(key), max(1e-4, rounded)), (index, key)
            for key in ("kl/anchor", "kl/gradient_share"):
                assert row.get(key) == close(expected.get(key), 1e-3), (index, key)
            for norm, wanted in zip(
                row["velocity_grad_norm"], expected["velocity_grad_norm"], strict=True
            ):
                assert norm == close(wanted, 1e-3), index


@several
def test_ranks_agree_to_the_bit(results: Any, count: int) -> None:
    """Otherwise their weights would drift apart."""
    first, *others = results[count]
    for case in CASES:
        for other in others:
            assert torch.equal(other[case]["moved"], first[case]["moved"])
            for ours, expected in zip(other[case]["rows"], first[case]["rows"]):
                assert ours["kl/lambda"] == expected["kl/lambda"]
                assert ours["reward/mean"] == expected["reward/mean"]


def test_the_cases_are_what_they_are_called(results: Any) -> None:
    (alone,) = results[1]
    for case in ("five samples of one prompt, not finite", "failures, std of the batch"):
        assert any(0 < row["reward/dropped"] < 5 for row in alone[case]["rows"]), case
    assert [
        row["reward/zero_std_groups"] for row in alone["an equal group, noised again"]["rows"]
    ] == [0.5, 0.5]
    first, second = (
        row["kl/lambda"] for row in alone["std of the batch, half of the steps"]["rows"]
    )
    assert first < second  # the warm-up of lambda


@several
def test_each_prompt_is_encoded_by_one_rank(results: Any, count: int) -> None:
    """The ranks may share a disk or not; a prompt that one rank has already is not encoded
    again."""
    found = [outcome["encode"] for outcome in results[count]]

    def encoded(what: str) -> list[str]:
        return sorted(prompt for of_rank in found for prompt in of_rank[what])

    seven = sorted("a" * length for length in range(1, 8))
    assert encoded("none") == ["a", "aa"]
    for what in ("shared", "own"):
        assert encoded(what) == seven
        shares = [len(of_rank[what]) for of_rank in found]
        assert max(shares) - min(shares) <= 1
    assert encoded("shared again") == []
    assert encoded("own again") == ["b" * 20]
    assert sum(len(of_rank["files"]) for of_rank in found) == 8


@several
@pytest.mark.fault(
    "after failed rewards, ranks have other parts in another order",
    "matched by name; those that a rank lacks are dropped",
)
def test_parts_of_a_reward_are_matched_by_name(results: Any, count: int) -> None:
    """The metric of a part that some ranks lack is the mean over the ranks that have it."""
    for of_rank in results[count]:
        means = {name: value for name, value in of_rank["parts"].items() if "part" in name}
        vq, mq = ((2 + 4, 3 + 5), (2 + 4 + 6, 3 + 5 + 7), (2 + 4 + 6 + 8, 3 + 5 + 7 + 9))[count - 2]
        assert means == pytest.approx(
            {"reward_part/vq": vq / count, "reward_part/mq": mq / count, "reward_part/seen": 1}
        )


@several
def test_the_first_rank_says_which_checkpoints_there_are(results: Any, count: int) -> None:
    """It decides which files are kept, which a manifest lists and which are loaded."""
    for of_rank in results[count]:
        assert of_rank["stale"] == {
            "iteration": 2,
            "anchor": True,
            "not in the manifest": ["manifest.json"],
        }


@several
def test_waiting_for_others_is_no_work(results: Any, count: int) -> None:
    """Time inside a collective would make all ranks look equally slow."""
    (alone,) = (outcome["waiting"] for outcome in results[1])
    assert "time/wait" not in alone
    seconds = [outcome["waiting"] for outcome in results[count]]
    ends = slowest_and_fastest(seconds)
    assert ends.keys() == {"train", "work"}
    assert ends["train"]["slowest"][0] == count - 1
    assert ends["train"]["slowest"][1] == 4.0
    assert ends["train"]["fastest"][1] == 1.0
    assert seconds[0]["time/wait"] == 3.0


def test_each_rank_writes_a_log_and_says_there_what_ended_it(tmp_path: Path) -> None:
    statuses = run_ranks(logged_run, 2, tmp_path)
    assert all(status not in (0, None) for status in statuses)
    logs = [
        (tmp_path / "run" / "logs" / f"rank-{number:03d}.log").read_text() for number in range(2)
    ]
    first, second = screens(tmp_path)
    for log in logs:
        assert "evaluate (before)" in log
        assert "1/2  reward" in log
    assert "1/2  reward" in first
    assert "1/2  reward" not in second
    assert "scoring server went away" in logs[1]
    assert "scoring server went away" in second  # torchrun shows the standard error of every rank
    (row,) = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    ends = row["time/ranks"]
    assert ends.keys() >= {"rollout", "decode", "reward", "train", "optimizer", "work"}
    assert all(outcome["slowest"][1] >= outcome["fastest"][1] for outcome in ends.values())
    assert {outcome[end][0] for outcome in ends.values() for end in outcome} == {0, 1}
    assert len(list((tmp_path / "run" / "tensorboard").iterdir())) == 1, (
        "the first rank alone owns the trackers"
    )


# -- without a process group -----------------------------------------------------------------------


def assigned(
    tokens: list[int], ranks: int, batch: int, windows: list[int] | None = None
) -> list[list[int]]:
    """Assign samples that share no steps."""
    rollouts = Rollouts(steps=5, group_size=1, windows=windows or [0] * len(tokens), shared=False)
    return assign_to_ranks(tokens, ranks, batch, rollouts)


def contiguous(tokens: list[int], ranks: int) -> int:
    """Tokens of the busiest rank if sorted samples were split into contiguous shares."""
    order = sorted(tokens)
    return max(
        sum(order[r * len(order) // ranks : (r + 1) * len(order) // ranks]) for r in range(ranks)
    )


def test_samples_are_dealt_out_evenly() -> None:
    """Every sample has a rank; counts differ by at most one, and tokens by little more than those
    of one batch."""
    generator = random.Random(0)
    for _ in range(300):
        groups, size, batch = (generator.randint(1, most) for most in (12, 9, 4))
        lengths = [generator.randint(1600, 2800) for _ in range(groups)]
        tokens = [length for length in lengths for _ in range(size)]
        ranks = generator.randint(1, len(tokens))
        shares = assigned(tokens, ranks, batch)
        assert sorted(sample for share in shares for sample in share) == list(range(len(tokens)))
        counts = [len(share) for share in shares]
        assert max(counts) - min(counts) <= 1
        assert all(
            [tokens[i] for i in share] == sorted(tokens[i] for i in share) for share in shares
        )
        loads = [sum(tokens[i] for i in share) for share in shares]
        assert max(loads) <= contiguous(tokens, ranks)
        if len(tokens) % ranks == 0:
            assert max(loads) - min(loads) <= batch * (max(lengths) - min(lengths))


def test_prompts_of_many_lengths_are_balanced_by_tokens() -> None:
    """Deal eight groups of eight to eight ranks: with one group each, most would wait for the
    longest prompt."""
    tokens = [1560 + 100 * group for group in range(8) for _ in range(8)]
    for batch in (1, 4):
        loads = [sum(tokens[i] for i in share) for share in assigned(tokens, 8, batch)]
        assert max(loads) == min(loads) == sum(tokens) / 8
        assert max(loads) < 0.85 * contiguous(tokens, 8)
    in_fours = [bucket_by_length([tokens[i] for i in share], 4) for share in assigned(tokens, 8, 4)]
    # full batches, as few as with one group per rank
    assert all(len(runs) == 2 for runs in in_fours)


def test_one_rank_has_all_samples_in_the_order_of_their_lengths() -> None:
    assert assigned([7, 7, 4, 4, 9, 9], 1, 8) == [[2, 3, 0, 1, 4, 5]]
    assert assigned([7, 7, 7, 4, 4, 4], 1, 8, windows=[2, 0, 2, 3, 3, 1]) == [[5, 3, 4, 1, 0, 2]]


def test_more_ranks_than_samples() -> None:
    config = settings(train__prompts_per_iteration=2, train__group_size=3)
    for ranks in (1, 4, 5, 6):
        check_trainable(config, ranks)
    with pytest.raises(
        UserError,
        match=r"6 samples an iteration for 7 ranks.*nearest is 6 ranks, or .*iteration = 3",
    ):
        check_trainable(config, 7)


@pytest.mark.parametrize("ranks", [8, 16, 32, 64])
def test_shipped_configurations_train_on_up_to_64_gpus_or_say_what_to_set(ranks: int) -> None:
    for file in sorted((Path(__file__).parent.parent / "configs").glob("*480p*.yaml")):
        config = load(file)
        try:
            check_trainable(config, ranks)
        except UserError as error:
            assert (ranks, config.train.samples) == (64, 32)
            advice = re.findall(r"(?:, or )(\S+) = (\d+)", str(error))
            assert [name for name, _ in advice] == [
                "train.prompts_per_iteration",
                "model.sequence_parallel",
            ]
            for name, value in advice:
                check_trainable(load(file, {name: value}), ranks)
