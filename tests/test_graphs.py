"""Recorded denoising steps: the same bits as without, bounded, recorded again after weights are replaced.

Without a GPU a recording runs its Python again over the same buffers: everything but CUDA's own replay is what a GPU
runs. The tests at the end need one.
"""

import logging
import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from sage_fast.algorithm.transitions import TransitionTable, sigma_schedule, transition_table
from sage_fast.models.hunyuan15.policy import HunyuanVideo15Policy
from sage_fast.models.testbed.model import LATENT_SHAPE
from sage_fast.rollout import graphs as module
from sage_fast.rollout.graphs import CudaRecorder, Recordable, StepGraphs, step_graphs
from sage_fast.tools import replays
from tests.pretend_cuda import PretendCuda
from tests.tiny import embeddings, settings, tiny_model, tiny_trainer

PROMPTS = ["a red circle moves left quickly", "a blue square moves up slowly", "a green circle moves down slowly"]
STEPS = 5


def rerun(run: Recordable) -> tuple[Callable[[], object], tuple[Tensor, ...], int]:
    """What a CUDA graph does, by running the step again over its buffers."""
    outputs = run()

    def replay() -> None:
        for output, value in zip(outputs, run()):
            output.copy_(value)

    return replay, outputs, 100


def roll(policy: HunyuanVideo15Policy, prompts: list[str], index: int = 0, graphs: StepGraphs | None = None) -> Any:
    return replays.roll(policy, embeddings(PROMPTS), prompts, index, graphs)


def difference(graphs: StepGraphs, batches: list[list[str]], table: TransitionTable = replays.TABLE) -> str:
    return replays.replay_problem(graphs, embeddings(PROMPTS), batches, table)


def ode2(shift: float) -> TransitionTable:
    return transition_table(sigma_schedule(STEPS, shift), "ode2", 0.0)


def twice(policy: HunyuanVideo15Policy, prompts: list[str], graphs: StepGraphs) -> Any:
    """The second rollout of a shape, which is recorded."""
    roll(policy, prompts, 0, graphs)
    return roll(policy, prompts, 0, graphs)


def assert_same_bits(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_same_bits_and_one_recording_for_one_shape(guidance: float) -> None:
    policy = tiny_model(settings(sampling__guidance_scale=guidance)).policy
    graphs = StepGraphs(policy, rerun, max_memory=1000)
    batches = [[prompt] * 2 for prompt in PROMPTS]
    assert not difference(graphs, batches[:1])
    assert len(graphs) == 0  # recorded when the shape comes for the second time
    assert not difference(graphs, batches)
    assert len(graphs) == 1
    assert not difference(graphs, [PROMPTS[:2]] * 2)  # a prompt for each sample
    assert len(graphs) == 2


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_a_second_order_sampler_begins_each_replayed_rollout_anew(guidance: float) -> None:
    """A rollout that diverged left NaN behind, and another schedule has other weights."""
    graphs = StepGraphs(tiny_model(settings(sampling__guidance_scale=guidance)).policy, rerun, max_memory=1000)
    assert not difference(graphs, [[prompt] * 2 for prompt in PROMPTS], ode2(3.0))
    (graph,) = graphs._graphs.values()
    graph._buffers[-1].fill_(math.nan)
    assert not difference(graphs, [[prompt] * 2 for prompt in PROMPTS], ode2(1.0))
    assert len(graphs) == 1


def test_weights_in_place_and_replaced() -> None:
    policy = tiny_model(settings()).policy
    recordings: list[Recordable] = []
    graphs = StepGraphs(policy, lambda run: (recordings.append(run), rerun(run))[1], max_memory=1000)
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


def test_bounded_number_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tiny_model(settings()).policy
    graphs = StepGraphs(policy, rerun, max_memory=250)
    for count in (1, 2, 3):
        twice(policy, PROMPTS[:1] * count, graphs)
    assert len(graphs) == 2  # 100 bytes each
    graphs = StepGraphs(policy, rerun, max_memory=50)
    for _ in range(3):
        assert_same_bits(roll(policy, PROMPTS[:1], 0, graphs), roll(policy, PROMPTS[:1]))
    assert len(graphs) == 0
    assert len(graphs.refused) == 1
    graphs = StepGraphs(policy, rerun, max_memory=10**6)
    monkeypatch.setattr(module, "MAX_GRAPHS", 3)
    for count in range(1, 6):
        twice(policy, PROMPTS[:1] * count, graphs)
    assert len(graphs) == 3


def test_falls_back_with_one_line(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    policy = tiny_model(settings()).policy
    caplog.set_level(logging.INFO)

    def fail(run: Recordable) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nand a page of advice")

    graphs = StepGraphs(policy, fail, max_memory=1000)
    for _ in range(3):
        assert_same_bits(roll(policy, PROMPTS[:1], 0, graphs), roll(policy, PROMPTS[:1]))
    assert caplog.messages == ["no CUDA graph for this rollout: operation not permitted when stream is capturing"]
    graphs.record = rerun  # after a failure nothing more is recorded, of other shapes neither
    twice(policy, PROMPTS[:2], graphs)
    assert len(graphs) == 0

    monkeypatch.setattr(module, "MAX_TOKENS", 2 * 87 - 1)
    graphs = StepGraphs(policy, rerun, max_memory=1000)
    roll(policy, PROMPTS[:1], 0, graphs)
    assert len(caplog.messages) == 1
    for count in (2, 3):
        roll(policy, PROMPTS[:1] * count, 0, graphs)
    assert len(caplog.messages) == 2
    assert "a step has 174 tokens" in caplog.messages[1]


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
    assert step_graphs(tiny_model(settings()).policy) is None


def test_training_on_recorded_rollouts_gives_the_same_metrics() -> None:
    plain, recorded = tiny_trainer(settings()), tiny_trainer(settings())
    recorded.graphs = StepGraphs(recorded.policy, rerun, max_memory=1000)
    for index in range(2):
        rows = [
            {key: value for key, value in trainer.iteration(index).items() if not key.startswith("time/")}
            for trainer in (plain, recorded)
        ]
        assert rows[0] == rows[1]
    assert len(recorded.graphs) > 0


@pytest.mark.gpu
@pytest.mark.parametrize("guidance", [1.0, 3.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replay_gives_the_same_bits_on_a_gpu(guidance: float, dtype: torch.dtype) -> None:
    policy = tiny_model(settings(sampling__guidance_scale=guidance), dtype).policy
    policy.transformer.cuda()
    graphs = StepGraphs(policy, CudaRecorder(), max_memory=2**30)
    assert not difference(graphs, [PROMPTS[:1] * 2] * 3)
    assert not difference(graphs, [PROMPTS[:1] * 2] * 3, ode2(3.0))
    assert not graphs.refused
    assert len(graphs) == 2


@pytest.mark.gpu
def test_a_step_never_synchronises_on_a_gpu() -> None:
    policy = tiny_model(settings()).policy
    policy.transformer.cuda()
    table = transition_table(sigma_schedule(STEPS, 3.0), "sage", 0.7)
    coefs = table.coefficients(2560).cuda()
    schedule = policy.conditioning_table(table.sigmas[:-1], embeddings(PROMPTS)).of(PROMPTS[:1])
    seeds, x = torch.zeros(1, dtype=torch.int64, device="cuda"), torch.randn(1, *LATENT_SHAPE, device="cuda")
    step = torch.zeros(1, dtype=torch.int64, device="cuda")
    with torch.no_grad():
        module.denoise(policy, coefs, schedule, seeds, x, step)  # kernels compile, tables are made
        torch.cuda.set_sync_debug_mode("error")
        try:
            module.denoise(policy, coefs, schedule, seeds, x, step)
        finally:
            torch.cuda.set_sync_debug_mode("default")
