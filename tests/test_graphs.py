"""Recorded denoising steps: the same bits as without, bounded, recorded again after weights are
replaced.

Without a GPU a recording runs its Python again over the same buffers: everything but CUDA's own
replay is what a GPU runs. The tests at the end need one.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from sage_fast.algorithm.transitions import TransitionTable, sigma_schedule, transition_table
from sage_fast.eval.evaluation import evaluate
from sage_fast.loading import load_setup, resolve
from sage_fast.models.hunyuan15.conditioning import TextEmbedding
from sage_fast.models.hunyuan15.policy import HunyuanVideo15Policy
from sage_fast.models.policy import Policy
from sage_fast.rollout import graphs as module
from sage_fast.rollout.graphs import Recordable, StepGraph, StepGraphs
from sage_fast.rollout.loop import initial_latents, rollout
from sage_fast.rollout.recorder import CudaRecorder
from sage_fast.testbed.tiny_model import LATENT_SHAPE
from sage_fast.util.captions import PromptKey
from sage_fast.util.seeding import sample_seeds
from tests.pretend_cuda import PretendCuda
from tests.tiny import embeddings, keys_of, settings, tiny_model, tiny_trainer, with_images

PROMPTS = keys_of(
    [
        "a small red ball moves left quickly",
        "a big blue ball moves up slowly",
        "a small green ball moves down slowly",
    ]
)
STEPS = 5
POOL = 2**29  # bytes by which each recording is said to enlarge the pool


def rerun(run: Recordable) -> tuple[Callable[[], object], tuple[Tensor, ...], int]:
    """What a CUDA graph does, by running the step again over its buffers."""
    outputs = run()

    def replay() -> None:
        for output, value in zip(outputs, run()):
            output.copy_(value)

    return replay, outputs, POOL


TABLE = transition_table(sigma_schedule(STEPS, 3.0), "sage", 0.7)


def roll(
    policy: Policy,
    prompts: Sequence[PromptKey],
    index: int = 0,
    graphs: StepGraphs | None = None,
    table: TransitionTable = TABLE,
    texts: Mapping[PromptKey, Any] | None = None,
) -> list[Tensor]:
    """The last latents of a sample per prompt, and all tensors of every step; `index` seeds the
    noise."""
    seeds = sample_seeds(0, index, 0, range(len(prompts)))
    recorded: list[Tensor] = []
    last = rollout(
        policy,
        table,
        table.coefficients().to(policy.device),
        policy.conditioning_table(table.sigmas[:-1], texts or embeddings(PROMPTS)),
        prompts,
        seeds,
        initial_latents(seeds, LATENT_SHAPE, policy.device),
        record=lambda step, x, x_next, log_prob, v: recorded.extend(
            t.clone() for t in (x, x_next, log_prob, v())
        ),
        graphs=graphs,
    )
    return [last, *recorded]


def difference(
    graphs: StepGraphs,
    batches: Sequence[Sequence[PromptKey]],
    table: TransitionTable = TABLE,
    images: bool = False,
) -> str:
    """How replays differ from rollouts without graphs; with `images`, each prompt has one.

    A shape is recorded at its second batch and replayed with other values at its third.
    """
    texts = with_images(embeddings(PROMPTS)) if images else embeddings(PROMPTS)
    for index, prompts in enumerate(batches):
        ours, plain = (
            roll(graphs.policy, prompts, index, on, table, texts) for on in (graphs, None)
        )
        if odd := [
            place
            for place, pair in enumerate(zip(ours, plain, strict=True))
            if not torch.equal(*pair)
        ]:
            return f"rollout {index + 1} differs in {len(odd)} tensors"
    return ""


def twice(policy: HunyuanVideo15Policy, prompts: list[PromptKey], graphs: StepGraphs) -> Any:
    """The second rollout of a shape, which is recorded."""
    roll(policy, prompts, 0, graphs)
    return roll(policy, prompts, 0, graphs)


def assert_same_bits(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(("guidance", "images"), [(1.0, False), (3.0, False), (3.0, True)])
def test_same_bits_and_one_recording_for_one_shape(guidance: float, images: bool) -> None:
    policy = tiny_model(settings(sampling__guidance_scale=guidance)).policy
    graphs = StepGraphs(policy, rerun, max_memory=math.inf)
    batches = [[prompt] * 2 for prompt in PROMPTS]
    assert not difference(graphs, batches[:1], images=images)
    assert len(graphs) == 0  # recorded when the shape comes for the second time
    assert not difference(graphs, batches, images=images)
    assert len(graphs) == 1
    assert not difference(graphs, [PROMPTS[:2]] * 2, images=images)  # a prompt for each sample
    assert len(graphs) == 2


def test_weights_in_place_and_replaced() -> None:
    policy = tiny_model(settings()).policy
    recordings: list[Recordable] = []
    graphs = StepGraphs(
        policy, lambda run: (recordings.append(run), rerun(run))[1], max_memory=math.inf
    )
    before = twice(policy, PROMPTS[:1], graphs)[0]
    with torch.no_grad():
        for p in policy.parameters().values():
            p.add_(0.05)
    after = roll(policy, PROMPTS[:1], 0, graphs)
    assert not torch.equal(before, after[0])
    assert_same_bits(after, roll(policy, PROMPTS[:1]))
    assert len(recordings) == 1  # in place: the recording sees the new weights
    name, p = next(iter(policy.parameters().items()))
    policy.transformer.get_parameter(name).data = p.detach().clone()
    assert_same_bits(twice(policy, PROMPTS[:1], graphs), after)
    assert len(recordings) == 2
    policy.transformer.disable_adapters()
    assert_same_bits(twice(policy, PROMPTS[:1], graphs), roll(policy, PROMPTS[:1]))
    assert len(recordings) == 3
    assert len(graphs) == 1  # those of other weights are gone


def test_evaluations_with_another_guidance_leave_the_graphs_of_training() -> None:
    """`eval.guidance_scale`: its graphs and those of training are recorded once."""
    policy = tiny_model(settings()).policy
    recordings: list[Recordable] = []
    graphs = StepGraphs(
        policy, lambda run: (recordings.append(run), rerun(run))[1], max_memory=math.inf
    )
    for _ in range(2):
        for guidance in (1.0, 3.0, 5.0):
            with policy.at_guidance(guidance):
                assert_same_bits(twice(policy, PROMPTS[:1], graphs), roll(policy, PROMPTS[:1]))
    assert len(recordings) == len(graphs) == 3


def test_bounded_number_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool is freed with the last graph only, so a graph that does not fit into it is not
    recorded again."""
    policy = tiny_model(settings()).policy
    graphs = StepGraphs(policy, rerun, max_memory=2.5 * POOL)
    for count in (1, 2, 3, 3):
        assert_same_bits(
            twice(policy, PROMPTS[:1] * count, graphs), roll(policy, PROMPTS[:1] * count)
        )
    assert len(graphs) == 2
    assert [*graphs.refused.values()] == [
        "no CUDA graph for this rollout: it would keep 1.50 GiB, and all may keep 1.25 GiB"
    ]
    monkeypatch.setattr(module, "MAX_GRAPHS", 3)
    graphs = StepGraphs(policy, rerun, max_memory=math.inf)
    for count in range(1, 6):
        twice(policy, PROMPTS[:1] * count, graphs)
    assert len(graphs) == 3


def test_a_refused_graph_that_leaves_a_large_pool_ends_no_run() -> None:
    """The pool is freed with the graphs that fitted before; the next rollout records theirs
    again."""
    growth = iter([POOL, 2 * POOL, POOL])
    policy = tiny_model(settings()).policy
    graphs = StepGraphs(policy, lambda run: (*rerun(run)[:2], next(growth)), max_memory=2.5 * POOL)
    found = []
    for count in (1, 1, 2, 2, 1, 1, 1):
        assert_same_bits(
            roll(policy, PROMPTS[:1] * count, 0, graphs), roll(policy, PROMPTS[:1] * count)
        )
        found.append(len(graphs))
    assert found == [0, 1, 1, 1, 0, 1, 1]
    assert len(graphs.refused) == 1


def test_a_graph_keeps_buffers_of_its_own_only_for_what_has_another_shape() -> None:
    """A further text length costs its text; the least recently used gives way when that is too
    much."""
    policy = tiny_model(settings()).policy
    lengths = {f"{count} words": count for count in (5, 9, 40)}
    texts = {
        PromptKey(p): TextEmbedding(text=torch.randn(n, 32), glyphs=torch.zeros(0, 8))
        for p, n in {"": 1, **lengths}.items()
    }

    def rolled(graphs: StepGraphs | None, prompt: str) -> list[Tensor]:
        return roll(policy, [PromptKey(prompt)] * 2, 0, graphs, texts=texts)

    def kept(graphs: StepGraphs) -> int:
        return graphs._kept(graphs._graphs.values()) - graphs._pool

    graphs = StepGraphs(policy, rerun, max_memory=math.inf)
    found = []
    for prompt in lengths:
        rolled(graphs, prompt)
        rolled(graphs, prompt)
        found.append(kept(graphs))
    config = policy.transformer.config
    # bytes of a token at every step
    row = 5 * 4 * config.num_attention_heads * config.attention_head_dim
    assert found[1] - found[0] == 9 * row
    assert found[2] - found[1] == 40 * row
    # what one rollout leaves in a buffer does not reach another
    for prompt in (*lengths, *reversed(lengths)):
        assert_same_bits(rolled(graphs, prompt), rolled(None, prompt))
    assert len(graphs) == 3

    graphs = StepGraphs(policy, lambda run: (*rerun(run)[:2], 0), max_memory=found[2] - 1)
    for prompt in (*lengths, *lengths):
        rolled(graphs, prompt)
    assert [len(graphs), kept(graphs)] == [2, found[2] - 5 * row]


@torch.no_grad()
def test_a_step_may_be_replayed_anywhere_in_a_rollout() -> None:
    """Steps between replays may run without: with gradients, for example."""
    policy = tiny_model(settings()).policy
    graphs = StepGraphs(policy, rerun, max_memory=math.inf)
    twice(policy, PROMPTS[:1], graphs)
    expected = roll(policy, PROMPTS[:1])
    (graph,) = graphs._graphs.values()
    for t in (3, 0, 4):
        found = graph.step(expected[1 + 4 * t], torch.tensor([t]))
        assert_same_bits(list(found), expected[1 + 4 * t : 5 + 4 * t])


def test_falls_back_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    policy = tiny_model(settings()).policy
    caplog.set_level(logging.INFO)

    def fail(run: Recordable) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nand a page of advice")

    graphs = StepGraphs(policy, fail, max_memory=math.inf)
    for _ in range(3):
        assert_same_bits(roll(policy, PROMPTS[:1], 0, graphs), roll(policy, PROMPTS[:1]))
    assert caplog.messages == [
        "no CUDA graph for this rollout: operation not permitted when stream is capturing"
    ]
    graphs.record = rerun  # after a failure nothing more is recorded, of other shapes neither
    twice(policy, PROMPTS[:2], graphs)
    assert len(graphs) == 0


def test_another_threads_calls_do_not_spoil_a_capture() -> None:
    """Rewards run beside rollouts, in threads of their own."""
    modes: list[str] = []

    def graph(*arguments: Any, capture_error_mode: str = "global", **options: Any) -> Any:
        modes.append(capture_error_mode)
        return capture(*arguments, capture_error_mode=capture_error_mode, **options)

    with PretendCuda():
        capture, x = torch.cuda.graph, torch.zeros(2, device="cuda")
        with mock.patch.object(torch.cuda, "graph", graph):
            CudaRecorder()(lambda: (x.add_(1),))
    assert modes == ["thread_local"]


def test_the_cpu_has_none() -> None:
    assert load_setup(resolve(settings())).graphs is None


def test_training_on_recorded_rollouts_gives_the_same_metrics() -> None:
    plain, recorded = tiny_trainer(settings()), tiny_trainer(settings())
    recorded.graphs = StepGraphs(recorded.policy, rerun, max_memory=math.inf)
    for index in range(2):
        rows = [
            {
                key: value
                for key, value in trainer.iteration(index).items()
                if not key.startswith("time/")
            }
            for trainer in (plain, recorded)
        ]
        assert rows[0] == rows[1]
    assert len(recorded.graphs) > 0


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The index of each replayed step."""
    found: list[int] = []
    step = StepGraph.step

    def counted(graph: StepGraph, x: Tensor, index: Tensor) -> Any:
        found.append(int(index))
        return step(graph, x, index)

    monkeypatch.setattr(StepGraph, "step", counted)
    return found


def test_evaluations_replay_the_graphs_of_the_one_before(
    tmp_path: Path, replayed: list[int]
) -> None:
    config = settings(sampling__batch_size=2, eval__num_prompts=2)
    setup = load_setup(resolve(config))
    setup.encode(tmp_path)
    expected = evaluate(setup, iteration=0)[0]
    setup.graphs = graphs = StepGraphs(setup.model.policy, rerun, max_memory=math.inf)
    for share in (0, 1, 1):
        replayed.clear()
        assert evaluate(setup, iteration=0)[0] == expected
        assert replayed == [*range(config.eval.steps)] * share
    assert len(graphs) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("guidance", [1.0, 3.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replay_gives_the_same_bits_on_a_gpu(guidance: float, dtype: torch.dtype) -> None:
    policy = tiny_model(settings(sampling__guidance_scale=guidance), dtype).policy
    policy.transformer.cuda()
    graphs = StepGraphs(policy, CudaRecorder(), max_memory=2**30)
    assert not difference(graphs, [PROMPTS[:1] * 2] * 3)
    assert not graphs.refused
    assert len(graphs) == 1


@pytest.mark.gpu
def test_a_step_never_synchronises_on_a_gpu() -> None:
    policy = tiny_model(settings()).policy
    policy.transformer.cuda()
    table = transition_table(sigma_schedule(STEPS, 3.0), "sage", 0.7)
    coefs = table.coefficients().cuda()
    schedule = policy.conditioning_table(table.sigmas[:-1], embeddings(PROMPTS)).of(PROMPTS[:1])
    seeds, x = (
        torch.zeros(1, dtype=torch.int64, device="cuda"),
        torch.randn(1, *LATENT_SHAPE, device="cuda"),
    )
    step = torch.zeros(1, dtype=torch.int64, device="cuda")
    with torch.no_grad():
        # kernels compile, tables are made
        module.denoise(policy, coefs, schedule.at(step), seeds, x, step)
        torch.cuda.set_sync_debug_mode("error")
        try:
            module.denoise(policy, coefs, schedule.at(step), seeds, x, step)
        finally:
            torch.cuda.set_sync_debug_mode("default")
