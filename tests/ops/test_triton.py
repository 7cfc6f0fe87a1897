"""The Triton kernels against the reference: values, gradients, noise, edges, determinism.

Without a GPU the launchers run in Triton's interpreter on CPU tensors (tests/conftest.py sets TRITON_INTERPRET); with
one the same tests run the compiled kernels. Either way the launchers are called directly, past the dispatcher.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from sage_fast.kernels import common  # noqa: E402
from sage_fast.kernels.common import _noise  # noqa: E402
from sage_fast.kernels.transition_score import transition_score, transition_score_backward  # noqa: E402
from sage_fast.kernels.transition_step import transition_step  # noqa: E402

from sage_fast.algorithm.transitions import SAMPLERS, Reduction, sigma_schedule, transition_table  # noqa: E402
from sage_fast.ops import _dispatch  # noqa: E402
from sage_fast.ops.philox import philox4x32, philox_normal  # noqa: E402
from sage_fast.ops.transition_step import transition_step_reference  # noqa: E402
from sage_fast.tools.checks import Comparison, check_transition_score, check_transition_step  # noqa: E402
from tests.ops.accuracy import assert_accurate  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu" and isinstance(_noise, triton.runtime.JITFunction):
    raise RuntimeError(
        "Triton was imported before TRITON_INTERPRET=1 was set "
        f"(now {os.environ.get('TRITON_INTERPRET')!r}); tests/conftest.py must set it first"
    )

pytestmark = [pytest.mark.usefixtures("guarded_empty"), *([pytest.mark.gpu] if DEVICE.type == "cuda" else [])]

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16

SHAPES = [
    pytest.param((1, 1), id="one-element"),
    pytest.param((3, 59), id="odd"),
    pytest.param((2, 1009), id="prime"),
    pytest.param((2, 1026), id="not-a-multiple-of-4"),
    pytest.param((2, 3, 1024), id="whole-tiles"),
    pytest.param((0, 7), id="empty-batch"),
    pytest.param((2, 0), id="empty-sample"),
]

DTYPES = [  # x, v, v_uncond or v_anchor, v_old
    pytest.param((FP32, BF16, BF16, BF16), id="fp32-bf16"),
    pytest.param((FP32, FP32, FP16, BF16), id="fp32-mixed"),
    pytest.param((BF16, BF16, BF16, FP16), id="16-bit"),
    pytest.param((BF16, FP16, FP32, BF16), id="bf16-mixed"),
]


def crossed(names: str, ones: Sequence[Any], others: Sequence[Any], one: str, other: str) -> pytest.MarkDecorator:
    """Parametrize with all pairs. Triton's interpreter is slow: there `make test` has those with the id `one` or
    `other`, which are all of `ones` and of `others`, and `make soak` the rest.
    """
    pairs = []
    for a, b in itertools.product(ones, others):
        alike = DEVICE.type == "cpu" and a.id != one and b.id != other
        marks = [pytest.mark.soak] if alike else []
        pairs.append(pytest.param(*a.values, *b.values, id=f"{a.id}-{b.id}", marks=marks))
    return pytest.mark.parametrize(names.split(), pairs)


def named(names: Sequence[str]) -> list[Any]:
    return [pytest.param(name, id=name) for name in names]


of_shapes_and_dtypes = crossed("shape dtypes", SHAPES, DTYPES, "odd", "bf16-mixed")


@dataclasses.dataclass
class Case:
    """Random inputs of both transition operators on one table."""

    x: Tensor
    v: Tensor
    other: Tensor
    old: Tensor
    coefs: Tensor
    step: Tensor
    seed: Tensor
    guidance: Tensor

    def step_args(self, with_guidance: bool = True) -> tuple[Tensor | None, ...]:
        pair = (self.other, self.guidance) if with_guidance else (None, None)
        return self.x, self.v, *pair, self.coefs, self.step, self.seed


def make(
    shape: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
    sampler: str = "flow",
    reduction: str = "mean",
    seed: int = 0,
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    x, v, other, old = (torch.randn(shape, generator=generator).to(DEVICE, dtype) for dtype in dtypes)
    table = transition_table(sigma_schedule(10, 5.0), sampler, 0.7).window(0, 9)  # step 9: an ODE row, c = 0
    return Case(
        x=x,
        v=v,
        other=other,
        old=old,
        coefs=table.coefficients(max(x[:1].numel(), 1), reduction).to(DEVICE),
        step=(torch.arange(shape[0]) * 4 + 9).remainder(10).to(DEVICE),  # 9, 3, 7, ...
        seed=torch.randint(-(2**63), 2**63 - 1, shape[:1], generator=generator).to(DEVICE),
        guidance=torch.tensor(6.0, device=DEVICE),
    )


def kernels(name: str) -> Callable[..., Any]:
    return {
        "transition_step": transition_step,
        "transition_score": transition_score,
        "transition_score_backward": transition_score_backward,
    }[name]


SCORES = ("score", "kl_anchor", "kl_old", "error_plus", "error_minus")
BOUNDS = {
    "x_next": {"absolute": 1e-6, "relative": 0.0},
    "kl_anchor": {"absolute": 1e-6, "relative": 0.0},
    "kl_old": {"absolute": 1e-6, "relative": 0.0},
    "error_plus": {"absolute": 1e-6, "relative": 0.0},
    "error_minus": {"absolute": 1e-6, "relative": 0.0},
    "dv": {"relative": 1e-7},
}


def check_step(case: Case, with_guidance: bool) -> None:
    compared = list(check_transition_step(kernels, *case.step_args(with_guidance)))
    assert_accurate(compared, **BOUNDS, logp={"absolute": 2e-6, "relative": 0.0})
    assert (compared[1].fused[case.coefs[case.step, 2] == 0] == 0).all(), "logp must be exactly 0 where c = 0"


def check_score(case: Case, anchor: Tensor | None, old: Tensor | None, beta: float | None = 0.3) -> None:
    x_next, _ = transition_step_reference(*case.step_args(False))
    compared = check_transition_score(kernels, case.x, x_next, case.v, anchor, old, case.coefs, case.step, beta)
    assert_accurate(compared, **BOUNDS, logp={"absolute": 1e-6, "relative": 0.0})


@of_shapes_and_dtypes
def test_step_matches_the_reference(shape, dtypes):
    case = make(shape, dtypes)
    check_step(case, with_guidance=False)
    check_step(case, with_guidance=True)


@of_shapes_and_dtypes
def test_score_and_its_gradient_match_the_reference(shape, dtypes):
    case = make(shape, dtypes)
    check_score(case, case.other, case.old)


@pytest.mark.parametrize(("anchor", "old"), [(False, False), (True, False), (False, True)])
def test_absent_velocities_score_zero(anchor, old):
    case = make((2, 1026), (FP32, BF16, BF16, BF16))
    for beta in (None, 0.3):
        check_score(case, case.other if anchor else None, case.old if old else None, beta)


@crossed("sampler reduction", named(SAMPLERS), named(get_args(Reduction)), "flow", "mean")
def test_every_sampler_and_reduction(sampler, reduction):
    case = make((5, 131), (FP32, BF16, BF16, BF16), sampler, reduction)
    if reduction == "sum":  # summed log-probs grow with the sample
        case.coefs[:, 3:] /= 131
    check_step(case, with_guidance=True)
    check_score(case, case.other, case.old)


def test_one_step_for_the_whole_batch():
    case = make((3, 131), (FP32, BF16, BF16, BF16))
    case.step = torch.tensor(4, device=DEVICE)
    check_step(case, with_guidance=True)
    check_score(case, case.other, case.old)


def test_rows_without_noise_are_the_mean_and_carry_no_gradient():
    case = make((2, 131), (FP32, FP32, FP32, FP32), "ode")
    x_next, logp = transition_step(*case.step_args(False))
    a, b = (case.coefs[case.step, column, None] for column in (0, 1))
    torch.testing.assert_close(x_next, a * case.x + b * case.v)
    assert (logp == 0).all()
    ones = torch.ones(2, device=DEVICE)
    score = (case.x, x_next, case.v, case.other, case.old, case.coefs, case.step)
    assert (transition_score_backward(ones, ones, ones, *score) == 0).all()


def test_several_tiles_a_program(monkeypatch):
    monkeypatch.setattr(common, "MAX_PROGRAMS", 4)
    numel = 9 * common.BLOCK + 16
    assert common.split(numel) == (4, 3)  # 10 tiles: 3, 3, 2 and 2
    case = make((2, numel), (FP32, BF16, BF16, BF16))
    check_step(case, with_guidance=True)
    check_score(case, case.other, case.old)


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


@pytest.mark.parametrize("layout", ["transposed", "strided", "expanded", "offset"])
def test_layouts(layout):
    def layout_of(tensor: Tensor) -> Tensor:
        if layout == "transposed":
            return tensor.transpose(1, 2)
        if layout == "strided":
            return tensor.repeat_interleave(2, dim=2)[:, :, ::2]
        if layout == "expanded":
            return tensor[:1].expand(tensor.shape)
        guarded = torch.full((tensor.numel() + 2,), float("nan"), dtype=tensor.dtype, device=DEVICE)
        guarded[1:-1] = tensor.flatten()  # neighbours are NaN: reading past either end would show
        return guarded[1:-1].view(tensor.shape)

    case = make((3, 16, 10), (FP32, BF16, BF16, BF16))
    for name in ("x", "v", "other", "old"):
        setattr(case, name, layout_of(getattr(case, name)))
    check_step(case, with_guidance=True)
    check_score(case, case.other, case.old)
    wide = torch.stack([case.coefs, case.coefs], dim=2).flatten(1)
    case.coefs, case.step, case.seed = wide[:, ::2], case.step[:1].expand(3), case.seed[:1].expand(3)
    check_step(case, with_guidance=True)
    check_score(case, case.other, case.old)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["4-a-thread", "8-a-thread"])
@pytest.mark.parametrize("numel", [1, 59, 2048, 2051])
def test_noise_is_the_reference_noise(numel, dtype):
    """With a = b = 0 and c = 1 the step returns its noise."""
    seed = torch.tensor([0, 1, -1, 2**63 - 1, 1234 + 2**32], device=DEVICE)
    step = torch.tensor([0, 3, 1, 2, 3], device=DEVICE)
    coefs = torch.tensor([0.0, 0, 1, 0, 0, 0], device=DEVICE).repeat(4, 1)
    zero = torch.zeros(5, numel, dtype=dtype, device=DEVICE)
    noise, _ = transition_step(zero, zero, None, None, coefs, step, seed)
    expected = philox_normal(seed, step, (numel,))
    if dtype == FP32:
        exact = philox_normal(seed, step, (numel,), dtype=torch.float64)
        assert_accurate([Comparison("noise", noise, expected, exact)], noise={"absolute": 1e-6, "relative": 0.0})
        torch.testing.assert_close(noise, expected, rtol=0, atol=5e-6)
    else:  # the same number, rounded once
        assert ((noise.float() - expected).abs() <= expected.abs() * 2.0**-8 + 5e-6).all()


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_stores_round_to_nearest_even(dtype):
    """Compiled kernels round like this; without our code the interpreter would truncate fp32 to bf16."""
    v = torch.randn(2, 64, device=DEVICE)
    v[0, :2] = 1 + torch.tensor([1, 3], device=DEVICE) * 2.0**-8  # ties of bf16: to 1 and to 1 + 2^-6
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
    torch.testing.assert_close(noise.double(), (radii * torch.cos(angles - quarter)).flatten(), rtol=0, atol=1e-5)


def test_two_runs_give_the_same_bits():
    case = make((3, 2051), (FP32, BF16, BF16, BF16))
    step_args = case.step_args()
    runs = [transition_step(*step_args) for _ in range(2)]
    score_args = (case.x, runs[0][0], case.v, case.other, case.old, case.coefs, case.step, 0.3)
    runs = [(*run, *transition_score(*score_args)) for run in runs]
    for name, one, two in zip(("x_next", "logp", *SCORES), *runs, strict=True):
        assert torch.equal(one, two), name


def test_a_sample_does_not_depend_on_its_batch():
    case = make((3, 2051), (FP32, BF16, BF16, BF16))
    x_next, logp = transition_step(*case.step_args())
    scores = transition_score(case.x, x_next, case.v, case.other, case.old, case.coefs, case.step, 0.3)
    for i in range(3):
        one = slice(i, i + 1)
        alone = transition_step(
            case.x[one], case.v[one], case.other[one], case.guidance, case.coefs, case.step[i], case.seed[one]
        )
        assert torch.equal(alone[0], x_next[one]), f"x_next of sample {i}"
        assert torch.equal(alone[1], logp[one]), f"logp of sample {i}"
        rest = (tensor[one] for tensor in (case.x, x_next, case.v, case.other, case.old))
        alone = transition_score(*rest, case.coefs, case.step[one], 0.3)
        for name, batched, single in zip(SCORES, scores, alone, strict=True):
            assert torch.equal(single, batched[one]), f"{name} of sample {i}"


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("numel", [59, 2048])
def test_scoring_a_step_repeats_its_log_prob(numel, dtypes):
    """On-policy the ratio is 1: the score of a stored transition is the log-prob of its step, to the last bits."""
    case = make((3, numel), dtypes)
    x_next, logp = transition_step(*case.step_args(False))
    again, *_ = transition_score(case.x, x_next, case.v, None, None, case.coefs, case.step, None)
    torch.testing.assert_close(again, logp, rtol=3e-7, atol=1e-7)


def test_a_step_outside_the_table_is_nan_and_leaves_the_others_alone():
    case = make((3, 59), (FP32, BF16, BF16, BF16))
    good = transition_step(*case.step_args())
    case.step = torch.tensor([-1, int(case.step[1]), 10], device=DEVICE)
    bad = transition_step(*case.step_args())
    score = (case.x, good[0], case.v, case.other, case.old, case.coefs, case.step)
    ones = torch.ones(3, device=DEVICE)
    results = dict(zip(("x_next", "logp"), bad)) | dict(zip(SCORES, transition_score(*score, 0.3), strict=True))
    results["dv"] = transition_score_backward(ones, ones, ones, *score)
    for name, value in results.items():
        assert value[[0, 2]].isnan().all(), name
        assert value[1].isfinite().all(), name
    assert torch.equal(bad[0][1], good[0][1])


def test_the_gpu_implementations_are_registered():
    for name in ("transition_step", "transition_score", "transition_score_backward"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"sage_fast::{name}", "CUDA"), name


def test_registered_function_launches_the_kernel_except_in_float64():
    case = make((2, 59), (FP32, BF16, BF16, BF16))
    registered = _dispatch._serve(_dispatch._triton("transition_step"), transition_step_reference)
    for ours, kernels in zip(registered(*case.step_args()), transition_step(*case.step_args())):
        assert torch.equal(ours, kernels)
    wide = [case.x.double(), *case.step_args()[1:]]
    for ours, plain in zip(registered(*wide), transition_step_reference(*wide)):
        assert ours.dtype == torch.float64
        assert torch.equal(ours, plain)
