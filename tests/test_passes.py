"""Passes of a block over its tokens besides matmuls and attention, counted by
`sage_fast.benchmarks.passes`."""

from pathlib import Path
from typing import Literal

import pytest
import torch
from sage_fast.benchmarks import wan_passes
from sage_fast.benchmarks.passes import MARKS, UNIT, Traffic, count_block, table

from sage_fast.config.schema import ModelConfig

PAGE = Path(__file__).parents[1] / "docs" / "explanation" / "rollout-engine.md"


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize(
    ("tuning", "forward", "backward"), [("lora", 25.8, 51.7), ("full", 26.6, 47.6)]
)
def test_passes_of_a_block(
    tuning: Literal["lora", "full"], forward: float, backward: float
) -> None:
    """No more passes than the page says, and next to none of them in PyTorch's kernel for strided
    operands."""
    counted = count_block(ModelConfig(tuning=tuning))
    for traffic, most in zip(counted, (forward, backward), strict=True):
        assert sum(traffic.passes.values()) <= most, traffic.passes
        # A LoRA's backward keeps narrow products, copied out of their rows.
        assert traffic.strided["clone"] < 0.13 * UNIT, traffic.strided
        others = sum(traffic.strided.values()) - traffic.strided["clone"]
        assert others < 0.1 * UNIT, traffic.strided
        # Nothing joins the gradients of the streams after attention.
        assert traffic.bytes["cat"] < UNIT
    assert counted[1].bytes["cat"] == 0
    assert (counted[1].bytes["narrow mm"] > 0) == (tuning == "lora")  # the adapters are counted


def test_bytes_of_operators() -> None:
    """By hand: in-place operators, `out=`, operands of two strides; a wide matmul is left out."""
    a, b = torch.zeros(300, 300), torch.zeros(300, 600)
    with Traffic() as traffic:
        a.add_(a)
        a.copy_(b[:, :300])
        torch.mm(a, b)
        torch.mm(a, b[:, :1])
        torch.add(a, a, out=b[:, 300:])
    n = a.nbytes
    assert traffic.bytes == {"add_": 3 * n, "copy_": 2 * n, "narrow mm": n + 600 * 4, "add": 3 * n}
    assert traffic.strided == {"copy_": 2 * n, "add": 3 * n}
    assert traffic.launches == 4


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_the_page_has_todays_table() -> None:
    """`python -m sage_fast.benchmarks.passes docs/explanation/rollout-engine.md` writes it."""
    written = PAGE.read_text().split(MARKS[0])[1].split(MARKS[1])[0].strip()
    assert written == table()


def test_a_block_of_wan_moves_a_fraction_of_what_diffusers_block_moves() -> None:
    """`python -m sage_fast.benchmarks.wan_passes docs/how-to/wan.md` writes its table."""
    page = Path(__file__).parents[1] / "docs" / "how-to" / "wan.md"
    begin, end = wan_passes.MARKS
    assert page.read_text().split(begin)[1].split(end)[0].strip() == wan_passes.table()
    unit = wan_passes.count_unit()
    passes = {
        path: [sum(t.bytes.values()) / unit for t in wan_passes.count(path)]
        for path in wan_passes.COLUMNS
    }
    for ours, stock in zip(passes["ours"], passes["stock"], strict=True):
        assert 4 * ours < stock
