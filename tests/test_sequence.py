"""Samples that ranks share (`model.sequence_parallel`), on gloo: the values and gradients of one
process, the same iterations, and what does not fit is said before a model is loaded."""

import dataclasses
import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.scaling import exchange_bytes
from sage_fast.cli import main
from sage_fast.config.loader import load
from sage_fast.config.rank_checks import check_sequence_parallel
from sage_fast.eval.evaluation import evaluate
from sage_fast.loading import load_setup, resolve
from sage_fast.models.attention.choose import choose_attention
from sage_fast.models.attention.sequence import SequenceParallel
from sage_fast.models.checkpointing import MODES, set_checkpointing
from sage_fast.models.find import find_spec
from sage_fast.models.load import load_model
from sage_fast.models.model import Model
from sage_fast.rewards.composite import Pending
from sage_fast.tools.plan import plan
from sage_fast.trainer import Trainer
from sage_fast.util.captions import PromptKey
from sage_fast.util.errors import RewardError, RunError, UserError
from sage_fast.util.process_group import initialize
from sage_fast.util.ranks import all_reduce, join_sequence_group, rank, sequence_group, shutdown
from tests.ranks import run_ranks, screens
from tests.tiny import (
    embeddings,
    keys_of,
    rounding_of_advantages,
    settings,
    tiny_model,
    tiny_trainer,
    with_images,
)

REPOSITORY = Path(__file__).parent.parent
SOAK = "SAGE_FAST_SOAK" in os.environ
TRAINED = (2, 4) if SOAK else (2,)
"""Ranks to a sample, of four: with two, there are two groups, and samples are dealt out between
them too."""

PROMPTS = {
    "one length": ["a small red ball moves left quickly"] * 2,
    "two prompts": ["a small red ball moves left quickly", "a big blue ball moves up slowly"],
    "one token": ["", ""],
    "images": ["a small red ball moves left quickly", "a big blue ball moves up slowly"],
}

FORWARDS = list(
    itertools.product(
        (2, 4),
        (
            ("lora", 1.0, "one length", (5, 4, 4)),
            ("lora", 3.0, "two prompts", (5, 3, 3)),
            ("full", 1.0, "one token", (5, 3, 3)),
            ("full", 3.0, "two prompts", (5, 4, 4)),
            ("full", 3.0, "images", (5, 3, 3)),
        ),
    )
)
"""Ranks to a sample, and tuning, guidance, prompts and latent shape. `make test` has all of them
once, `make soak` with both numbers of ranks."""
if not SOAK:
    FORWARDS = [FORWARDS[i] for i in (1, 2, 4, 5, 8)]


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm().clamp(min=1e-30))


@dataclasses.dataclass
class Sent:
    """What a rank has sent in all-to-alls."""

    calls: int = 0
    bytes: float = 0.0

    def count(self, exchange: Any) -> Any:
        """Return `exchange`, counted."""

        def counted(
            output: Tensor, input: Tensor, *arguments: Any, group: Any = None, **options: Any
        ) -> Any:
            size = dist.get_world_size(group)
            self.calls += 1
            self.bytes += input.numel() * input.element_size() * (size - 1) / size
            return exchange(output, input, *arguments, group=group, **options)

        return counted


@dataclasses.dataclass
class Result:
    """Velocity and gradients, and the all-to-alls of the forward and of the backward."""

    velocity: Tensor
    gradients: dict[str, Tensor | None]
    ahead: int
    behind: int


def run(model: Model, x: Tensor, upstream: Tensor, conditions: Any, sent: Sent) -> Result:
    parameters = model.policy.parameters()
    sigma, text, negative = conditions
    before = sent.calls
    v = model.policy.guided_velocity(x, model.policy.condition(sigma, text, negative))
    ahead = sent.calls - before
    gradients = torch.autograd.grad(v, list(parameters.values()), upstream, allow_unused=True)
    behind = sent.calls - before - ahead
    return Result(v.detach(), dict(zip(parameters, gradients)), ahead, behind)


def forwards(folder: Path) -> None:
    """What a rank of four computes and sends."""
    rows, sent, exchange = {}, Sent(), dist.all_to_all_single
    dist.all_to_all_single = sent.count(exchange)
    for size, (tuning, guidance, prompts, latents) in FORWARDS:
        join_sequence_group(size)
        torch.manual_seed(5)
        model = tiny_model(settings(model__tuning=tuning, sampling__guidance_scale=guidance))
        for p in model.policy.parameters().values():
            p.data.add_(0.05 * torch.randn(p.shape))
        keys = keys_of(PROMPTS[prompts])
        chosen = embeddings(keys)
        if prompts == "images":
            chosen = with_images(chosen, *latents[1:])
        text, negative = ([chosen[key] for key in named] for named in (keys, keys_of(["", ""])))
        x = torch.randn(2, 32, *latents)
        upstream = torch.randn_like(x)
        conditions = (torch.rand(2), text, negative if guidance != 1 else None)
        alone = run(model, x, upstream, conditions, sent)
        group = sequence_group()
        assert group is not None
        model.policy.sequence = SequenceParallel(group, torch.device("cpu"))
        results: dict[str, Result] = {}
        bytes_sent: dict[str, float] = {}
        every_mode = size == 2 and prompts == "two prompts"  # which has a second pass
        # "attention" keeps what the ranks exchanged
        for mode in MODES if every_mode else ("none", "attention"):
            set_checkpointing(model.policy.transformer, mode)
            sent.bytes = 0.0
            results[mode] = run(model, x, upstream, conditions, sent)
            bytes_sent.setdefault("a forward and a backward", sent.bytes)
        shared = results["none"]
        worst = {}
        for name, gradient in shared.gradients.items():
            exact = alone.gradients[name]
            if exact is None:
                assert gradient is None or not gradient.any(), name
                continue
            total = all_reduce(torch.zeros_like(exact) if gradient is None else gradient.clone())
            worst[name] = (relative(total / 4, exact), float(exact.norm()))
        same = all(
            torch.equal(shared.velocity, other.velocity)
            and all(
                a is b or torch.equal(a, b)
                for a, b in zip(shared.gradients.values(), other.gradients.values())
            )
            for other in results.values()
        )
        rows[f"{size} {tuning} {guidance:g} {prompts} {latents}"] = {
            "value": relative(shared.velocity, alone.velocity),
            "gradients": {name: error for name, (error, norm) in worst.items() if norm > 1e-4},
            "count": len(worst),
            "checkpointing": same,
            "sent": bytes_sent["a forward and a backward"],
            "calls": {mode: (found.ahead, found.behind) for mode, found in results.items()},
            "forwards": 1 if guidance == 1 else 2,
        }
    dist.all_to_all_single = exchange
    (folder / f"rank{rank()}.json").write_text(json.dumps(rows))


STREAMS = ((8,), (5, 3), (7, 1), (1, 9), (6, 4, 2))
"""Tokens of the streams that are exchanged: that four ranks divide and that they do not, fewer than
ranks, and one stream alone, as in self-attention beside cross-attention."""


def exchanges(folder: Path) -> None:
    """What a rank of four gets by an exchange and its undoing, and their gradients."""
    join_sequence_group(4)
    group = sequence_group()
    assert group is not None
    sequence = SequenceParallel(group, torch.device("cpu"))
    torch.manual_seed(3)
    number = rank()
    found = {}
    for counts in STREAMS:
        exchange = sequence.token_exchange(*counts)
        whole = [torch.randn(2, count, 3, 8, 4) for count in counts]
        upstream = [torch.randn_like(stream) for stream in whole]
        own = [sequence.part(stream).requires_grad_() for stream in whole]
        heads = slice(2 * number, 2 * number + 2)
        expected, of_heads = (torch.cat(t, dim=1)[..., heads, :] for t in (whole, upstream))

        joint = exchange.to_heads(*own)
        parts = torch.autograd.grad(joint, own, of_heads)
        leaf = expected.clone().requires_grad_()
        back = exchange.to_tokens(leaf)
        of_parts = [sequence.part(stream) for stream in upstream]
        # A gradient in the padding has no effect.
        noise = [torch.randn_like(part) for part in of_parts]
        ones = [sequence.part(torch.ones_like(stream)) for stream in whole]
        of_back = torch.cat([g + n * (1 - m) for g, n, m in zip(of_parts, noise, ones)], dim=1)
        (of_leaf,) = torch.autograd.grad(back, leaf, of_back)
        found[str(counts)] = [
            torch.equal(joint, expected),
            all(torch.equal(part, given) for part, given in zip(parts, of_parts)),
            torch.equal(back, torch.cat([part.detach() for part in own], dim=1)),
            torch.equal(of_leaf, of_heads),
        ]
    (folder / f"exchanges{number}.json").write_text(json.dumps(found))


class FailsOnRankOne:
    def __call__(self, videos: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
        if rank() == 1:
            raise ValueError("no more disk")
        return {part: videos.mean((1, 2, 3, 4)) for part in ("vq", "mq", "ta")}


def all_of_it(folder: Path) -> None:
    """What a rank of four does."""
    initialize()
    exchanges(folder)
    forwards(folder)
    for size in TRAINED:
        rows, weights = train(folder / "embeddings", size)
        if rank() == 0:
            (folder / f"train{size}.json").write_text(json.dumps(rows))
            save_file(weights, folder / f"train{size}.safetensors")
    join_sequence_group(4)
    config = settings(sampling__batch_size=2, sampling__steps=2, reward__on_failure="stop")
    trainer = tiny_trainer(config, FailsOnRankOne())
    trainer.policy.sequence = SequenceParallel(sequence_group(), torch.device("cpu"))
    try:
        trainer.iteration(0)
    except RewardError as error:
        (folder / f"failure{rank()}.txt").write_text(str(error))
    (folder / f"evaluated{rank()}.json").write_text(
        json.dumps(evaluations_that_fail(folder / "embeddings"))
    )
    shutdown()


def evaluations_that_fail(folder: Path) -> list[str]:
    """What an inline reward that is overdue on one rank raises, and a disk that is full on one, in
    the first of three chunks of videos: the second one has been sampled by then."""
    given = {"model.sequence_parallel": 2, "sampling.batch_size": 1, "eval.num_prompts": 6,
        "timeout_minutes": 0.3,
             "eval.steps": 1, "eval.seeds_per_prompt": 1, "eval.judge": "null"}  # fmt: skip
    setup = load_setup(
        resolve(
            load(
                REPOSITORY / "configs" / "recipes" / "paper.yaml",
                {key: str(value) for key, value in given.items()},
            )
        )
    )
    setup.encode(folder)
    submit = setup.reward.submit

    def overdue(videos: Tensor, prompts: Sequence[PromptKey], *rest: Any) -> Pending:
        if rank() == 1:
            raise RewardError("gave no answer")
        return submit(videos, prompts, *rest)

    def full(number: int, prompt: str, video: Tensor) -> None:
        if rank() == 0:
            raise OSError("no more disk")

    raised = []
    for scored, save in ((overdue, None), (submit, full)):
        setup.reward.submit = scored
        with pytest.raises((RunError, OSError)) as error:
            evaluate(setup, iteration=0, save=save)
        raised.append(f"{error.typename} {error.value}")
    return raised


def train(folder: Path, size: int) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """Train two iterations of `recipes/paper.yaml` at a small size and an evaluation; return
    numbers and weights."""
    given = {
        "model.sequence_parallel": size, "sampling.steps": 3, "sampling.batch_size": 3,
        "eval.steps": 2,
        "train.prompts_per_iteration": 2, "train.group_size": 4, "train.optimizer_steps": 2,
        "train.batch_size": 5,
        "eval.num_prompts": 3, "eval.seeds_per_prompt": 1,
    }  # fmt: skip
    setup = load_setup(
        resolve(
            load(
                REPOSITORY / "configs" / "recipes" / "paper.yaml",
                {key: str(value) for key, value in given.items()},
            )
        )
    )
    setup.encode(folder)
    trainer = Trainer(setup.resolved, setup.model, setup.reward, setup.prompts, setup.embeddings)
    rows = [trainer.iteration(index) for index in range(2)]
    return [*rows, evaluate(setup, iteration=2)[0]], trainer.policy.snapshot()


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What four gloo ranks left."""
    folder = tmp_path_factory.mktemp("ranks")
    assert run_ranks(all_of_it, 4, folder) == [0] * 4, screens(folder, 4)
    return folder


def test_values_and_gradients_are_those_of_one_process(four_ranks: Path) -> None:
    """Two and four ranks to a sample: LoRA and full tuning, with and without guidance, prompts of
    one length and of several, tokens that the ranks divide and that they do not, fewer text tokens
    than ranks, each with two modes of checkpointing (two ranks and guidance: with all), whose
    gradients are the same to the bit."""
    for number in range(4):
        rows = json.loads((four_ranks / f"rank{number}.json").read_text())
        assert len(rows) == len(FORWARDS)
        for case, row in rows.items():
            assert row["value"] < 2e-6, case
            assert row["count"] > 20
            assert len(row["gradients"]) > 0.9 * row["count"]
            worst = max(row["gradients"], key=row["gradients"].__getitem__)
            assert row["gradients"][worst] < 2e-5, f"{case}: {worst}"
            assert row["checkpointing"], case
        for size in (2, 4) if SOAK else (4,):
            # Forward and backward of two samples in float32: 80 video and 7 text tokens.
            layers, one = 3, exchange_bytes(87, size, width=64, bytes_per_value=4)
            assert rows[f"{size} lora 1 one length (5, 4, 4)"]["sent"] == 2 * 2 * layers * one


def test_a_block_makes_two_exchanges_forward_and_two_backward(four_ranks: Path) -> None:
    """Queries, keys and values cross together, and the outputs; a recomputation sends both
    again."""
    layers = 3
    for number in range(4):
        rows = json.loads((four_ranks / f"rank{number}.json").read_text())
        assert any(row["calls"].keys() == set(MODES) for row in rows.values())
        for case, row in rows.items():
            once = 2 * layers * row["forwards"]
            for mode, calls in row["calls"].items():
                assert calls == [once, once if mode == "none" else 2 * once], (case, mode)


def test_an_exchange_and_its_undoing(four_ranks: Path) -> None:
    """All tokens of a rank's heads in the order of one process, without padding; undone, the rank's
    parts with zero padding; and gradients likewise."""
    for number in range(4):
        found = json.loads((four_ranks / f"exchanges{number}.json").read_text())
        assert found == {str(counts): [True] * 4 for counts in STREAMS}


@pytest.fixture(scope="module")
def one_process(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """With one thread, as the ranks have: another number rounds otherwise, and OMP_NUM_THREADS
    would decide."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return train(tmp_path_factory.mktemp("alone"), 1)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "size",
    [2, pytest.param(4, marks=pytest.mark.soak)],
    ids=["two groups of two", "one group of four"],
)
def test_iterations_are_those_of_one_process(four_ranks: Path, size: int, one_process: Any) -> None:
    """Rollouts, rewards, advantages, updates and an evaluation, through the trainer."""
    expected, exact = one_process
    rows = json.loads((four_ranks / f"train{size}.json").read_text())
    weights = load_file(four_ranks / f"train{size}.safetensors")
    for one, several in zip(expected, rows, strict=True):
        assert several.keys() ^ one.keys() <= {"time/ranks", "time/wait"}
        for name, value in one.items():
            # What rounding itself adds, and times, are others.
            if name.startswith("time/") or name in (
                "log_prob/rounding",
                "log_prob/parity",
                "kl/rounding",
            ):
                continue
            cancels = name in ("loss", "policy_loss")
            assert several[name] == (
                pytest.approx(value, rel=1e-4, abs=rounding_of_advantages(one) if cancels else 1e-9)
                if isinstance(value, float)
                else [pytest.approx(v, rel=1e-4) for v in value]
                if isinstance(value, list) and isinstance(value[0], float)
                else {part: pytest.approx(v, rel=1e-4) for part, v in value.items()}
                if isinstance(value, dict)
                else value
            ), name
    ups = [name for name in exact if "lora_B" in name]  # they began at zero
    assert len(ups) > 20
    for name in ups:
        assert (weights[name] - exact[name]).norm() < 1e-4 * exact[name].norm(), name


def test_a_reward_that_fails_on_one_rank_ends_all(four_ranks: Path) -> None:
    """In place of ranks that wait in the rollout for one that is gone."""
    failures = [(four_ranks / f"failure{number}.txt").read_text() for number in range(4)]
    assert len(set(failures)) == 1
    assert "no more disk" in failures[0]


def test_an_evaluation_that_fails_on_one_rank_ends_all(four_ranks: Path) -> None:
    """Likewise, be it the reward or the writing of a video that fails, with another chunk of videos
    to come."""
    raised = [
        json.loads((four_ranks / f"evaluated{number}.json").read_text()) for number in range(4)
    ]
    other = [
        "RankError rank 1 failed: RewardError: gave no answer",
        "RankError rank 0 failed: OSError: no more disk",
    ]
    assert raised == [
        [other[0], "OSError no more disk"],
        ["RewardError gave no answer", other[1]],
        other,
        other,
    ]


def test_what_does_not_fit_is_said_before_a_model_is_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    demo = [
        "train",
        str(REPOSITORY / "configs" / "recipes" / "paper.yaml"),
        "--model.sequence_parallel",
    ]
    monkeypatch.setattr("sage_fast.models.load._load", None)
    for arguments, message in (
        (["2"],
         "model.sequence_parallel = 2: expected a divisor of the number of ranks, which is 1; "
         "the nearest is 1, or start torchrun --nproc-per-node 2"),
        (["4", "--dry-run", "--gpus", "6"], "which is 6; the nearest is 3, or start 8 ranks"),
        (["3", "--dry-run", "--gpus", "3"],
         "model.sequence_parallel = 3: expected a divisor of the transformer's 4"
         " attention heads, which the GPUs of a sample share; the nearest is 2"),
        (["0"], "model.sequence_parallel = 0: expected at least 1"),
    ):  # fmt: skip
        assert main([*demo, *arguments]) == 2
        assert message in " ".join(capsys.readouterr().err.split())
    with pytest.raises(UserError, match="4 attention heads"):
        load_model(
            settings(model__sequence_parallel=3).model, settings().sampling, torch.device("cpu"), 0
        )
    assert check_sequence_parallel(1, 4) == 4


def test_a_part_of_the_tokens_takes_a_part_of_the_memory() -> None:
    """And of the attention that is timed, a part of the heads over all tokens."""
    spec = find_spec("testbed")
    one, two = (plan(settings(model__sequence_parallel=size), spec, ranks=2) for size in (1, 2))
    activations = next(part for part in one.memory if part.startswith("activations"))
    # of 56 tokens; what is exchanged comes beside (tests/test_cost.py has two real ranks)
    half = one.memory[activations] / 2
    assert half < two.memory[activations] < 1.2 * half
    latents = "trajectories (fp32 latents)"
    # of twice the samples, which both ranks hold
    assert two.memory[latents] == 2 * one.memory[latents]


def test_the_kernel_is_chosen_for_the_heads_that_a_rank_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shapes = []
    monkeypatch.setattr(
        "sage_fast.models.attention.choose.measure_attention",
        lambda uses, *_: shapes.extend(use.shape for use in uses) or {},
    )
    model = tiny_model(settings())
    for size in (1, 2):
        monkeypatch.setattr(
            "sage_fast.models.attention.choose.sequence_size", lambda size=size: size
        )
        choose_attention(model, "auto", settings().sampling)
    tokens = model.spec.attention_shape(settings().sampling)[0]
    assert shapes == [(8, tokens, 4, 16), (8, tokens, 2, 16)]
