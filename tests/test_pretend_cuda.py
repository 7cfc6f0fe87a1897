"""The CUDA path on the CPU: the same numbers, nothing on two devices, and no copy and no wait in
the step loop.

`tests/pretend_cuda.py` is the device. What comes first is that it refuses and notes what CUDA
would.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sage_fast.benchmarks import rollout as rollout_bench
from sage_fast.benchmarks.stock import StockPolicy
from torch import Tensor

from sage_fast.algorithm.resolved import ResolvedConfig
from sage_fast.algorithm.transitions import sigma_schedule, transition_table
from sage_fast.cli import main
from sage_fast.config.schema import Config
from sage_fast.eval.evaluation import Evaluation, evaluate
from sage_fast.loading import load_setup, resolve
from sage_fast.models.hunyuan15 import decode
from sage_fast.models.load import load_model
from sage_fast.parallel.fit import graph_bytes
from sage_fast.rollout.graphs import StepGraphs
from sage_fast.rollout.loop import initial_latents, rollout
from sage_fast.rollout.recorder import step_graphs
from sage_fast.rollout.step import denoise
from sage_fast.testbed.tiny_model import LATENT_SHAPE
from sage_fast.tools.operators import OPERATORS
from sage_fast.trainer import Trainer
from sage_fast.util.captions import PromptKey
from sage_fast.util.seeding import sample_seeds
from tests.pretend_cuda import CUDA, CudaTensor, PretendCuda
from tests.tiny import embeddings, settings, tiny_model, with_images

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real one")
PROMPT = PromptKey("a small red ball moves left quickly")


FEW = {
    "sampling__steps": 3,
    "sampling__batch_size": 2,
    "train__group_size": 2,
    "train__batch_size": 4,
}


# -- the device itself -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mix",
    [
        lambda x, y: x + y,
        lambda x, y: y * x.sum(),  # of the two, only a host's scalar can be read by the other
        lambda x, y: torch.cat([x, y]),
        lambda x, y: x @ y.outer(y),
        lambda x, y: x.mul_(y),
        lambda x, y: y[x.long()],
        lambda x, y: torch.nn.functional.linear(x[None], y[None]),
        lambda x, y: torch.empty_like(x).normal_(generator=torch.Generator().manual_seed(0)),
    ],
)
def test_two_devices_are_refused(mix: Callable[[Tensor, Tensor], Tensor]) -> None:
    with (
        PretendCuda(),
        pytest.raises(
            RuntimeError, match=r"tensors on two devices|host tensor is indexed|generator"
        ),
    ):
        mix(torch.ones(3, device="cuda"), torch.ones(3))


PINNED = "asynchronous copy to device"


@pytest.mark.parametrize(
    ("act", "kinds"),
    [
        (lambda x: x * torch.tensor(2.0) + 1, []),
        (lambda x: x[torch.arange(2, device="cuda")], []),
        (lambda x: x.masked_fill(x > 0, 0), []),
        (lambda x: x.to(CUDA, torch.bfloat16), []),
        (lambda x: torch.tensor([1, 2], device=CUDA), ["copy to device"]),
        # nothing is pinned: it waits
        (lambda x: torch.ones(3).to(CUDA, non_blocking=True), ["copy to device"]),
        (lambda x: torch.ones(3).pin_memory().to(CUDA, non_blocking=True), [PINNED]),
        (lambda x: torch.ones(3, pin_memory=True)[1:].to(CUDA, non_blocking=True), [PINNED]),
        (lambda x: x[[0, 1]], ["copy to device"]),
        (lambda x: x[x > 0], ["wait"]),
        (lambda x: x.nonzero(), ["wait"]),
        (lambda x: x.sum().item(), ["wait"]),
        (lambda x: float(x[0]), ["wait"]),
        (lambda x: bool(x.any()), ["wait"]),
        (lambda x: x.cpu(), ["copy to host"]),
        (lambda x: x.tolist(), ["copy to host"]),
        (lambda x: torch.empty(3).copy_(x), ["copy to host"]),
        (lambda x: torch.cuda.synchronize(), ["wait"]),
    ],
)
def test_copies_and_waits_are_noted_and_refused_in_a_capture(
    act: Callable[[Tensor], Any], kinds: list[str]
) -> None:
    with PretendCuda() as device:
        x = torch.ones(3, device="cuda")
        act(x)
        assert [event.kind for event in device.events] == kinds
        graph = torch.cuda.CUDAGraph()
        if kinds:
            with (
                pytest.raises(RuntimeError, match="not permitted when stream is capturing"),
                torch.cuda.graph(graph),
            ):
                act(x)
        else:
            with torch.cuda.graph(graph):
                act(x)


# -- training --------------------------------------------------------------------------------------


def train(
    config: Config, folder: Path
) -> tuple[Trainer, list[dict[str, Any]], Evaluation, list[str]]:
    """Load, train two iterations and evaluate; the last is what the graphs said."""
    setup = load_setup(resolve(config))
    setup.encode(folder)
    trainer = Trainer(
        setup.resolved,
        setup.model,
        setup.reward,
        setup.prompts,
        setup.embeddings,
        graphs=setup.graphs,
    )
    rows = [trainer.iteration(index) for index in range(2)]
    said = [] if trainer.graphs is None else [*trainer.graphs.refused.values()]
    return trainer, rows, evaluate(setup, iteration=2)[0], said


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param({"model__gradient_checkpointing": "full"}, id="lora"),
        pytest.param(
            {"model__tuning": "full", "train__optimizer": "muon"}, id="full", marks=pytest.mark.soak
        ),
        pytest.param(
            {"model__tuning": "full", "model__dtype": "bfloat16", "objective__clip_range": 1},
            id="bfloat16",
        ),
        pytest.param(
            {"sampling__guidance_scale": 3, "reward__on_failure": "drop"},
            id="guidance",
            marks=pytest.mark.soak,
        ),
        pytest.param(
            {
                "kl__velocity_term": "closed_form",
                "train__optimizer_steps": 2,
                "train__ema_decay": 0.9,
            },
            id="closed form",
            marks=pytest.mark.soak,
        ),
        pytest.param(
            {"sampling__offload_trajectories": True, "kl__anchor_interval": 1}, id="offload"
        ),
        pytest.param(
            {
                "objective__surrogate": "nft",
                "sampling__sampler": "ode",
                "kl__velocity_term": "closed_form",
                "train__optimizer_steps": 2,
            },
            id="noised again",
            marks=pytest.mark.soak,
        ),
        pytest.param(
            {"sampling__cuda_graphs": False, "sampling__sde_window": 2},
            id="no graphs",
            marks=pytest.mark.soak,
        ),
        pytest.param(
            {"sampling__sde_window": 2, "sampling__window_per_prompt": True}, id="windows"
        ),
    ],
)
def test_training_gives_the_metrics_of_the_cpu(
    overrides: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(**FEW | overrides)
    with monkeypatch.context() as as_on_a_gpu:  # how much is decoded at a time changes rounding
        as_on_a_gpu.setitem(decode.TARGET_CHUNK_BYTES, "cpu", decode.TARGET_CHUNK_BYTES["cuda"])
        _, expected, expected_evaluation, _ = train(config, tmp_path)
    with PretendCuda() as device:
        trainer, rows, evaluation, said = train(config, tmp_path)
        assert isinstance(next(trainer.policy.transformer.parameters()), CudaTensor)

    for row, expected_row in zip(rows, expected, strict=True):
        assert {k: v for k, v in row.items() if not k.startswith(("time/", "memory/"))} == {
            k: v for k, v in expected_row.items() if not k.startswith("time/")
        }
    assert evaluation == expected_evaluation

    assert said == []
    assert device.captures == (1 if config.sampling.cuda_graphs else 0)
    in_steps = device.within("step ")
    if config.sampling.offload_trajectories:  # to pinned memory, which the host does not wait for
        assert in_steps
        assert not any(event.waits for event in in_steps)
    else:
        assert in_steps == []
    # An update reads its loss, the phase ends: in no micro-batch the host waits.
    waits = [
        event for event in device.within("train") if "optimizer" not in event.ranges and event.waits
    ]
    assert len(waits) == trainer.engine.steps + len(rows), waits


# -- graphs ----------------------------------------------------------------------------------------


def recorded(count: int, room: float = math.inf) -> tuple[StepGraphs, list[str]]:
    """The graphs after several rollouts of one shape, and what they said."""
    config = settings(sampling__batch_size=2)
    model = load_model(config.model, config.sampling, CUDA, seed=0)
    policy, graphs = model.policy, step_graphs(model.policy, model.spec.cost(config), room)
    assert graphs is not None
    table = transition_table(sigma_schedule(3, 3.0), "sage", 0.7)
    coefs = table.coefficients().to(CUDA)
    conditioning = policy.conditioning_table(table.sigmas[:-1], embeddings([PROMPT]))
    for index in range(count):
        seeds = sample_seeds(0, index, 0, range(2))
        latents = initial_latents(seeds, LATENT_SHAPE, CUDA)
        rollout(policy, table, coefs, conditioning, [PROMPT] * 2, seeds, latents, graphs=graphs)
    return graphs, [*graphs.refused.values()]


def test_graphs_keep_to_what_training_leaves() -> None:
    """What the warm-up leaves in the allocator's cache is not to be set against what the capture
    adds."""
    with PretendCuda():
        graphs, said = recorded(3)
        kept = torch.cuda.memory_allocated()
        assert said == []
        assert len(graphs) == 1
    assert kept > 0
    with PretendCuda() as device:
        graphs, said = recorded(3, room=kept - 1)
        assert device.captures == 1
        assert len(graphs) == 0
        assert len(said) == 1
        assert "it would keep" in said[0]
        assert torch.cuda.memory_allocated() == 0


def test_a_step_without_room_has_no_graph(caplog: pytest.LogCaptureFixture) -> None:
    """It is not recorded first."""
    caplog.set_level(logging.INFO)
    config = settings()
    with PretendCuda():
        model = tiny_model(config, device=CUDA)
        cost = model.spec.cost(config)
        first = cost.step + cost.context
        assert step_graphs(model.policy, cost, first) is not None
        assert step_graphs(model.policy, cost, 0.0) is None
        assert caplog.messages == []
        assert step_graphs(model.policy, cost, first - 1) is None
    (said,) = caplog.messages
    assert said.startswith("no CUDA graphs: a step keeps ")


@pytest.mark.parametrize(
    "overrides",
    [{"sampling__cuda_graphs": False}, {"train__engine": "zero3"}, {"model__sequence_parallel": 2}],
)
def test_steps_that_cannot_be_recorded_take_no_memory(overrides: dict[str, Any]) -> None:
    def taken(config: Config) -> float:
        cost = tiny_model(config).spec.cost(config)
        return graph_bytes(cost, ResolvedConfig(config))

    assert taken(settings()) > 0
    assert taken(settings(**overrides)) == 0


@pytest.mark.parametrize(
    "given", [embeddings, lambda prompts: with_images(embeddings(prompts))], ids=["text", "image"]
)
@torch.no_grad()
def test_a_step_never_waits_where_the_stock_forward_waits_for_every_sample(given: Any) -> None:
    """diffusers' forward finds the valid text tokens of B samples with 12 B + 1
    synchronisations."""
    with PretendCuda() as device:
        ours = tiny_model(settings(), device=CUDA).policy
        table = transition_table(sigma_schedule(3, 3.0), "sage", 0.7)
        coefs, seeds = table.coefficients().to(CUDA), torch.arange(3, device=CUDA)
        latents, step = (
            initial_latents(seeds, LATENT_SHAPE, CUDA),
            torch.zeros(1, dtype=torch.int64, device=CUDA),
        )
        counts = []
        for policy in (StockPolicy(ours.transformer, dtype=torch.float32), ours):
            schedule = policy.conditioning_table(table.sigmas[:-1], given([PROMPT])).of(
                [PROMPT] * 3
            )
            for _ in range(2):  # the first makes the rotary table
                device.events.clear()
                denoise(policy, coefs, schedule.at(step), seeds, latents, step)
            counts.append(len(device.events))
    assert counts == [12 * 3 + 1, 0]


# -- benchmarks ------------------------------------------------------------------------------------


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor makes code for the device that is there."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)


def bench(file: Path, *arguments: str) -> dict[str, Any]:
    assert (
        main(["bench", *arguments, "--size", "tiny", "--repetitions", "1", "--json", str(file)])
        == 0
    )
    return json.loads(file.read_text())


@pytest.mark.usefixtures("uncompiled")
def test_operator_benchmark(tmp_path: Path) -> None:
    with PretendCuda() as device:
        rows = bench(tmp_path / "operators.json", "--size", "tiny tokens", "--size", "tiny pixels")[
            "rows"
        ]
    assert {row["operator"] for row in rows} == {*OPERATORS}
    # every contender is timed by a graph
    assert device.captures >= sum(len(row["seconds"]) for row in rows)


@pytest.mark.usefixtures("uncompiled")
def test_rollout_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        rollout_bench.SIZES, "tiny", dataclasses.replace(rollout_bench.SIZES["tiny"], steps=2)
    )
    # of products for a GPU
    monkeypatch.setattr(rollout_bench, "matmul_ceiling", lambda device, dtype: 1e12)
    monkeypatch.setattr(rollout_bench, "sustained_ceiling", lambda device, dtype: None)
    with PretendCuda() as device:
        paths = [
            f"--path={path}"
            for path in ("stock", "eager", "graphed", "contiguous", "channels last")
        ]
        rows = bench(tmp_path / "rollout.json", "rollout", *paths)["rows"]
    assert {row["part"] for row in rows if "graphed" in row["seconds"]} == {"step", "rollout"}
    assert device.captures > 0


def test_a_copy_to_the_host_is_in_order_with_copies_from_it() -> None:
    with PretendCuda():
        host = torch.empty(8, pin_memory=True)
        slot, copies = torch.empty(8, device="cuda"), torch.cuda.Stream()
        copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(copies):
            slot.copy_(host, non_blocking=True)
        with pytest.raises(RuntimeError, match="read while another stream perhaps still writes"):
            slot[:4].tolist()
        torch.cuda.current_stream().wait_stream(copies)
        slot[:4].tolist()
