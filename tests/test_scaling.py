"""docs/explanation/scaling.md says what benchmarks/scaling.py computes, which is what the plan and PyTorch count."""

import inspect
import json
import re
from pathlib import Path

import pytest
from diffusers import HunyuanVideo15Transformer3DModel

from benchmarks import scaling
from benchmarks.scaling import ARCHITECTURE, Layout, Work, exchange_bytes
from sage_fast.models.hunyuan15.forward import ADALN_UNITS
from sage_fast.tools import links
from sage_fast.tools.links import Ring
from sage_fast.tools.plan import plan
from tests.tiny import settings

PAGE = scaling.PAGE.read_text(encoding="utf-8")


def test_the_tables_of_the_page_are_those_of_the_formulas() -> None:
    assert re.findall(r"<!-- table: (\w+) -->", PAGE) == ["sizes", "small", "collectives", "layouts", "overlap"]
    assert scaling.written(PAGE) == PAGE, "run python -m benchmarks.scaling"


def test_the_formulas_are_the_plans() -> None:
    """Compare the published model at 480p: tokens, FLOPs of every part, weights and activations."""
    defaults = inspect.signature(HunyuanVideo15Transformer3DModel.__init__).parameters
    assert {name: defaults[name].default for name in ARCHITECTURE} == ARCHITECTURE
    config = settings(
        model__dtype="bfloat16", model__lora_rank=64, model__gradient_checkpointing="attention",
        model__sequence_parallel=8, sampling__num_frames=81, sampling__height=480, sampling__width=832,
        sampling__steps=20, train__prompts_per_iteration=8, train__group_size=4, train__batch_size=1,
    )  # fmt: skip
    planned, work = plan(config, ranks=8), Work()
    assert (planned.tokens, planned.latent_shape) == (work.tokens, work.latents)
    assert planned.flops["forward"] == work.forward
    assert planned.flops["decode"] == work.samples * work.decode
    parts = sum(planned.flops[part] for part in ("rollout", "training", "anchor"))
    assert parts == pytest.approx(work.samples * work.of_a_sample)
    assert planned.trainable == pytest.approx(Layout(work=work, gpus=8).trained_bytes / 4, rel=0.01)
    units, elements = scaling.published_gathers()["anchor"]
    assert units == 54 + ADALN_UNITS
    assert elements == pytest.approx(planned.parameters, rel=0.03)  # the rest is not in the blocks
    assert f"| {planned.memory['activations, checkpointing attention'] / 2**30:.1f} GiB |" in PAGE


def test_what_is_sent_is_what_the_model_counts() -> None:
    """Two GPUs exchange 4 tensors of 5 tokens with 4 channels of 2 bytes; half of each leaves a GPU."""
    assert exchange_bytes(10, 2, width=4, bytes_per_value=2) == 4 * 5 * 4 * 2 / 2
    assert exchange_bytes(11, 2, width=4, bytes_per_value=2) == 4 * 6 * 4 * 2 / 2
    assert exchange_bytes(10, 1) == 0
    assert 2 * Ring(ranks=4).sent(8.0) == 12.0


def test_a_ring_across_nodes_leaves_through_all_ports() -> None:
    """Two nodes with two GPUs each send 3 GB per GPU, a half of it through each port; hops are 2 inside, 1 between."""
    size, hops = 4e9, links.START + 2 * links.HOP_IN_NODE + links.HOP_BETWEEN
    assert Ring(ranks=4, per_node=2).seconds(size) == pytest.approx(hops + 1.5e9 / links.PORT)
    assert Ring(ranks=2, per_node=1).seconds(size) == pytest.approx(links.START + links.HOP_BETWEEN + 2e9 / links.PORT)
    alone = links.START + 3 * links.HOP_IN_NODE
    assert Ring(ranks=4).seconds(size, 3) == pytest.approx(3 * alone + 3e9 / links.IN_NODE)
    assert Ring(ranks=64).seconds(size) > Ring(ranks=8).seconds(size)


def test_a_layout_that_sends_nothing_and_divides_evenly_is_efficient() -> None:
    assert Layout(work=Work(), gpus=1).efficiency() == pytest.approx(1, abs=1e-4)
    assert Layout(work=Work(samples=96), gpus=64).efficiency() == pytest.approx(0.75, abs=1e-3)
    shared, alone = Layout(work=Work(), gpus=8, sharing=8), Layout(work=Work(), gpus=8)
    assert shared.efficiency() < alone.efficiency()
    sharded = Layout(work=Work(), gpus=8, sharded=8)
    assert sharded.efficiency() < sharded.efficiency(prefetch=True) < alone.efficiency()


def test_numbers_in_the_text() -> None:
    """Check the numbers in the prose around the tables."""
    work, flops = Work(), scaling.H200_BF16_FLOPS
    across = ARCHITECTURE["num_layers"] * exchange_bytes(work.joint, 8) / links.PORT
    text = " ".join(PAGE.split())
    for number in (
        f"{work.training / work.forward:.1f} for a training step",
        f"{1e3 * across:.0f} ms on top of {1e3 * work.forward / 8 / flops:.0f} at U = 8",
        f"{flops / 1e12:.0f} TFLOP/s",
        f"{links.IN_NODE / 1e9:.0f} GB/s within a node",
        f"{links.PORT / 1e9:.0f} GB/s through its port",
    ):
        assert number in text, number


def test_what_was_measured_says_where() -> None:
    measured = json.loads(Path(scaling.MEASURED).read_text(encoding="utf-8"))
    assert list(measured["rows"]) == list(scaling.SMALL)
    assert measured["environment"]["threads"] == 1
    assert all(row["settings"] == scaling.SMALL[name] for name, row in measured["rows"].items())
