"""What the Triton kernels alone owe: noise, edges, launches; test_operators.py holds them to
float64.

Without a GPU the launchers run in Triton's interpreter on CPU tensors (tests/conftest.py sets
TRITON_INTERPRET); with one the same tests run the compiled kernels. Either way the launchers are
called directly, past the dispatcher.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import gelu

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from sage_fast.kernels import adapter_rows, common  # noqa: E402
from sage_fast.kernels.common import _noise  # noqa: E402
from sage_fast.kernels.norm_silu import norm_silu  # noqa: E402
from sage_fast.kernels.transition_score import transition_score, transition_score_backward  # noqa: E402
from sage_fast.kernels.transition_step import transition_step  # noqa: E402
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle  # noqa: E402

from sage_fast.algorithm.transitions import sigma_schedule, transition_table  # noqa: E402
from sage_fast.ops import _dispatch  # noqa: E402
from sage_fast.ops.adapter_rows import adapter_rows_backward_reference  # noqa: E402
from sage_fast.ops.philox import philox4x32  # noqa: E402
from sage_fast.ops.transition_step import transition_step_reference  # noqa: E402
from sage_fast.tools.operators import UNIT, OperatorResult, inputs  # noqa: E402
from tests.ops.accuracy import assert_accurate, launcher  # noqa: E402
from tests.ops.checks import check  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu" and isinstance(_noise, triton.runtime.JITFunction):
    raise RuntimeError(
        "Triton was imported before TRITON_INTERPRET=1 was set (now "
        f"{os.environ.get('TRITON_INTERPRET')!r}); tests/conftest.py must set it first"
    )

pytestmark = [
    pytest.mark.usefixtures("guarded_empty"),
    *([pytest.mark.gpu] if DEVICE.type == "cuda" else []),
]

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


def test_rows_without_noise_are_the_mean_and_carry_no_gradient():
    coefs = transition_table(sigma_schedule(10, 5.0), "ode", 0.7).coefficients()
    x, _, v, *rest, _ = inputs("transition_score", (2, 131), (FP32,), DEVICE, coefs=coefs)
    coefs, step = rest[-2:]
    x_next, logp = transition_step(x, v, None, None, coefs, step, torch.arange(2, device=DEVICE))
    a, b = (coefs[step, column, None] for column in (0, 1))
    torch.testing.assert_close(x_next, a * x + b * v)
    assert (logp == 0).all()
    ones = torch.ones(2, device=DEVICE)
    assert all(
        (gradient == 0).all()
        for gradient in transition_score_backward(ones, ones, ones, x, x_next, v, *rest)
    )


@pytest.mark.parametrize("operator", ["transition_step", "transition_score"])
def test_several_tiles_a_program(operator, monkeypatch):
    monkeypatch.setattr(common, "MAX_PROGRAMS", 4)
    numel = 9 * common.BLOCK + 16
    assert common.split(numel) == (4, 3)  # 10 tiles: 3, 3, 2 and 2
    assert_accurate(check(operator, launcher, inputs(operator, (3, numel), (FP32, BF16), DEVICE)))


@pytest.mark.parametrize(
    ("operator", "shape"),
    [
        ("norm_modulate", (2, 11, 20)),
        ("gated_norm", (2, 11, 20)),
        ("norm_rotate", (2, 9, 2, 2, 16)),
        ("norm_rotate", (2, 9, 2, 2, 16, 2)),
        ("norm_rotate", (2, 9, 0, 2, 16, 2)),
    ],
)
def test_several_rows_a_program(operator, shape, monkeypatch):
    """For long videos programs loop over rows, and the last one also over rows past the end."""
    monkeypatch.setattr(common, "MAX_PROGRAMS", 1)
    assert_accurate(check(operator, launcher, inputs(operator, shape, (FP32,), DEVICE)))


@pytest.mark.parametrize("rank", [0, 20, 257])
def test_rows_beside_an_adapter_of_any_rank(rank):
    """Over several tiles of rows and columns, with ranks that differ; above MAX_RANK the reference
    serves."""
    x, _, _ = inputs("adapter_rows", (2, 70, 130), (BF16,), DEVICE)
    assert_accurate(
        check("adapter_rows", launcher, [x, torch.randn(rank, 130, device=DEVICE).to(BF16), True])
    )


@pytest.mark.parametrize("arch", [86, 100, 120])
@pytest.mark.parametrize(("dtype", "rank"), [(BF16, 64), (FP32, 256)], ids=str)
def test_the_tiles_of_other_architectures_compute_the_same(arch, dtype, rank, monkeypatch):
    monkeypatch.setattr(adapter_rows, "architecture", lambda x: arch)
    x, _, _ = inputs("adapter_rows", (2, 40, 70), (dtype,), DEVICE)
    down = torch.randn(rank, 70, device=DEVICE).to(dtype)
    assert_accurate(check("adapter_rows", launcher, [x, down, True]))


@pytest.mark.parametrize("ranks", [(20, 3), (3, 40), (0, 1)], ids=str)
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_gradients_of_two_adapters_of_different_ranks(dtype, ranks):
    """As fields of wider rows; the second may be one column of ones, whose rows are one in
    memory."""
    x, dh = (torch.randn(70, 130, device=DEVICE).to(dtype) for _ in range(2))
    inner, up = (torch.randn(70, 51, device=DEVICE).to(dtype)[:, 2:][:, :rank] for rank in ranks)
    up = up[:1].expand(70, 1) if ranks[1] == 1 else up
    results = []
    for function, given in (
        (adapter_rows.adapter_rows_backward, (dh, inner, x, up)),
        (adapter_rows_backward_reference, (dh, inner, x, up)),
        (adapter_rows_backward_reference, [t.double() for t in (dh, inner, x, up)]),
    ):
        grad, *rest = (t.clone() if t is not up else t for t in given)
        results.append([grad, *function(grad, *rest)])
    assert_accurate(map(OperatorResult, ("dx", "dA", "dB"), *results))


PTX = {"ex2": np.exp2, "rcp": np.reciprocal, "add": np.add, "mul": np.multiply, "min": np.fmin}


class _Assembly:
    """Run the PTX of an elementwise assembly block in the interpreter: float32, denormal numbers
    flushed to zero."""

    @staticmethod
    def flushed(x: np.ndarray) -> np.ndarray:
        return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.float32(0), x).astype(np.float32)

    def __init__(self, asm: str, values: Sequence[Any], types: Sequence[Any]) -> None:
        self.types = types
        self.registers = {
            f"${len(types) + i}": self.flushed(value.data) for i, value in enumerate(values)
        }
        for name, target, sources in re.findall(r"(\w+)(?:\.approx)?\.ftz\.f32 (\S+), (.*);", asm):
            with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
                result = PTX[name](*map(self.value, sources.split(", ")))
            self.registers[target] = self.flushed(result)

    def value(self, operand: str) -> np.ndarray:
        if operand.startswith("0f"):
            return np.frombuffer(bytes.fromhex(operand[2:]), ">f4").astype(np.float32)
        return self.registers[operand]

    def get_result(self, index: int) -> Any:
        return TensorHandle(self.registers[f"${index}"], self.types[index].scalar)


@pytest.fixture
def assembly(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kernels take their assembly, which a GPU runs as it is; returns what the interpreter was
    given."""
    seen: list[str] = []

    def create_inline_asm(self, asm, constraints, values, types, is_pure, pack):
        assert (is_pure, pack) == (False, 1)
        seen.append(asm)
        return _Assembly(asm, values, types)

    monkeypatch.setattr(adapter_rows, "ASSEMBLY", tl.constexpr(True))
    monkeypatch.setattr(InterpreterBuilder, "create_inline_asm", create_inline_asm)
    return seen


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("shape", [(2, 75, 130), (3, 3, 65), (2, 3, 1), (0, 4, 8), (2, 0, 8)])
def test_gelu_in_assembly(shape, dtype, assembly):
    assert_accurate(
        check("adapter_rows", launcher, inputs("adapter_rows", shape, (dtype,), DEVICE))
    )
    if DEVICE.type == "cpu":
        assert bool(assembly) == (dtype != FP32 and 0 not in shape)


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_gelu_in_assembly_far_from_zero(dtype, assembly):
    """Where e^(-2 u) is 0 or infinite, GELU is x or 0 and its slope 1 or 0; in between it has no
    jump."""
    x = torch.cat([torch.tensor([1e4, 300.0, 40.0]), torch.linspace(0, 12, 122)]).to(dtype)
    x = torch.cat([x, -x]).to(DEVICE)[None]
    out = adapter_rows.adapter_rows(x[None], x[:0], True)
    assert_accurate(
        [
            OperatorResult(
                "gelu", out[0], gelu(x, approximate="tanh"), gelu(x.double(), approximate="tanh")
            )
        ]
    )
    grad, none = torch.ones_like(x), x[:, :0]
    adapter_rows.adapter_rows_backward(grad, none, x, none)
    exact, plain = (
        torch.ops.aten.gelu_backward(torch.ones_like(v), v, approximate="tanh")
        for v in (x.double(), x)
    )
    assert_accurate([OperatorResult("slope", grad, plain, exact)])
    assert grad[0, :3].tolist() == [1, 1, 1]
    assert not grad[0, 125:128].any()


@pytest.mark.parametrize("backward", [False, True])
def test_a_long_float32_sum_of_an_adapter_errs_by_its_last_bits(backward, monkeypatch):
    """Of 512 positive products of 16, added one by one."""
    monkeypatch.setattr(adapter_rows, "MAX_PROGRAMS", 1)
    long, few = torch.rand(2**13, 16, device=DEVICE) + 0.5, torch.rand(2**13, 16, device=DEVICE)
    exact = long.double().t() @ few.double()
    if backward:  # x = 40, where GELU's slope is 1: both sums are of the long side as it is
        x = torch.full_like(long, 40.0)
        d_down, d_up = adapter_rows.adapter_rows_backward(long.clone(), few, x, few)
        sums = [(d_up, exact), (d_down, few.double().t() @ x.double())]
    else:
        out = adapter_rows.adapter_rows(few.t()[None].contiguous(), long.t().contiguous(), False)
        sums = [(out[0, :, 2**13 :], exact.t())]
    for ours, expected in sums:
        error = ((ours.double() - expected).abs() / expected).max()
        assert error <= UNIT, error / UNIT


def test_a_pixel_with_nan_is_nan_in_all_channels_of_the_decoder():
    """As in the reference, whose norm is NaN: a maximum with the smallest length would give finite
    channels."""
    x = torch.ones(1, 16, 1, 1, 4, device=DEVICE)
    x[0, 3, 0, 0, 1] = float("nan")
    out = torch.empty_like(x)
    norm_silu(x, x.new_ones(16, 1, 1, 1), 4.0, out)
    assert out.isnan().all(1).flatten().tolist() == [False, True, False, False]
    assert out.isnan().sum() == 16


@pytest.mark.parametrize(
    ("rows", "batch"), [(32_760, 1), (32_960, 1), (75_600, 1), (32_760, 2), (200, 1), (1, 500)]
)
def test_programs_that_sum_run_at_once_and_none_is_empty(rows, batch):
    """At most three for each of 132 multiprocessors, and few short of that many where there are
    rows for them."""
    programs, per_program = common.rows_of_programs(rows, batch, sums=True)
    assert (programs - 1) * per_program < rows <= programs * per_program
    assert programs == 1 or 0.95 * min(rows * batch, 384) <= programs * batch <= 384


@pytest.mark.parametrize(("warps", "most"), [(4, 384), (8, 384), (16, 256), (32, 128)])
def test_large_programs_that_sum_are_fewer(warps, most):
    programs, per_program = common.rows_of_programs(32_760, 1, sums=True, warps=warps)
    assert 0.95 * most <= programs <= most
    assert programs * per_program >= 32_760


def test_power_of_2():
    numbers = [*range(1, 1030), 2048, 2049, 2**31]
    assert [common.power_of_2(n) for n in numbers] == [triton.next_power_of_2(n) for n in numbers]


@pytest.mark.parametrize(
    ("numel", "expected"),
    [
        pytest.param(0, (0, 1), id="empty"),
        pytest.param(1, (1, 1), id="one-element"),
        pytest.param(1025, (2, 1), id="two-tiles"),
        pytest.param(32 * 21 * 30 * 52, (512, 2), id="480p-81-frames"),
        pytest.param(32 * 21 * 45 * 80, (473, 5), id="720p-81-frames"),
        pytest.param(2**31 + 1, (512, 4097), id="above-2^31"),
    ],
)
def test_split_covers_a_sample(numel, expected):
    programs, tiles = common.split(numel)
    assert (programs, tiles) == expected
    assert programs <= common.MAX_PROGRAMS
    assert programs * tiles * common.BLOCK >= numel


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_stores_round_to_nearest_even(dtype):
    """Compiled kernels round like this; without our code the interpreter would truncate fp32 to
    bf16."""
    v = torch.randn(2, 64, device=DEVICE)
    # ties of bf16: to 1 and to 1 + 2^-6
    v[0, :2] = 1 + torch.tensor([1, 3], device=DEVICE) * 2.0**-8
    row = torch.eye(6, device=DEVICE)[1:2]  # x_next = v
    step, seed = torch.zeros(2, 2, dtype=torch.int64, device=DEVICE)
    x_next, _ = transition_step(torch.zeros_like(v, dtype=dtype), v, None, None, row, step, seed)
    assert torch.equal(x_next, v.to(dtype))


@triton.jit
def _noise_kernel(out_ptr, seed_ptr, step_ptr, first_ptr, BLOCK: tl.constexpr, VEC: tl.constexpr):
    inner = tl.arange(0, BLOCK // VEC)[:, None] * VEC + tl.arange(0, VEC)[None, :]
    seed, step, first = tl.load(seed_ptr), tl.load(step_ptr), tl.load(first_ptr)
    tl.store(out_ptr + inner, _noise(seed, step, first, BLOCK, VEC))


@pytest.mark.parametrize("vec", [4, 8])
@pytest.mark.parametrize("first", [0, 1024, 2**31, 2**34 - 1024, 2**34, 2**40 + 1024])
def test_noise_counter_reaches_its_high_word(first, vec):
    seed, step = torch.tensor(-5, device=DEVICE), torch.tensor(2**31 + 7, device=DEVICE)
    noise = torch.zeros(1024, device=DEVICE)
    _noise_kernel[(1,)](noise, seed, step, torch.tensor(first, device=DEVICE), BLOCK=1024, VEC=vec)
    block = first // 4 + torch.arange(256, device=DEVICE)
    zero = torch.zeros_like(block)
    key = [seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF]
    words = philox4x32([block & 0xFFFFFFFF, block >> 32, zero + step, zero], key)
    u0, u1, u2, u3 = ((word >> 8).double() * 2.0**-24 + 2.0**-25 for word in words)
    angles = 2 * torch.pi * torch.stack([u1, u1, u3, u3], dim=1)
    radii = (-2 * torch.stack([u0, u0, u2, u2], dim=1).log()).sqrt()
    quarter = torch.tensor([0, 1, 0, 1], device=DEVICE) * torch.pi / 2
    torch.testing.assert_close(
        noise.double(), (radii * torch.cos(angles - quarter)).flatten(), rtol=0, atol=1e-5
    )


def test_a_step_outside_the_table_is_nan_and_leaves_the_others_alone():
    x, x_next, v, *others, coefs, step, beta = inputs(
        "transition_score", (3, 59), (FP32, BF16), DEVICE
    )
    seed, step = torch.arange(3, device=DEVICE), torch.tensor([-1, int(step[1]), 10], device=DEVICE)
    bad, logp = transition_step(x, v, None, None, coefs, step, seed)
    score = (x, x_next, v, *others, coefs, step)
    ones = torch.ones(3, device=DEVICE)
    gradients = transition_score_backward(ones, ones, ones, *score)
    for place, value in enumerate((bad, logp, *transition_score(*score, beta), *gradients)):
        assert value[[0, 2]].isnan().all(), place
        assert value[1].isfinite().all(), place
    good, _ = transition_step(x, v, None, None, coefs, step.clamp(0, 9), seed)
    assert torch.equal(bad[1], good[1])


def test_the_gpu_implementations_are_registered():
    for name in ("transition_step", "transition_score", "transition_score_backward"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"sage_fast::{name}", "CUDA"), name


def test_registered_function_launches_the_kernel_except_in_float64():
    given = inputs("transition_step", (2, 59), (FP32, BF16), DEVICE)
    registered = _dispatch._serve(_dispatch._triton("transition_step"), transition_step_reference)
    for ours, kernels in zip(registered(*given), transition_step(*given)):
        assert torch.equal(ours, kernels)
    wide = [given[0].double(), *given[1:]]
    for ours, plain in zip(registered(*wide), transition_step_reference(*wide)):
        assert ours.dtype == torch.float64
        assert torch.equal(ours, plain)
