"""The C++ operators against the float64 reference, value and gradient."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from sage_fast.algorithm.transitions import SAMPLERS, sigma_schedule, transition_table
from sage_fast.ops import implementation, transition_score, transition_step
from sage_fast.ops.philox import philox_normal
from sage_fast.tools.checks import check_transition_score, check_transition_step
from tests.ops.accuracy import assert_accurate

pytestmark = pytest.mark.skipif(
    implementation(torch.device("cpu")) != "C++", reason="the C++ extension is not built (or SAGE_FAST_OPS=reference)"
)

SHAPES = {
    "one element": (1, 1),
    "no sample dims": (5,),
    "odd": (3, 7, 11),
    "prime": (2, 1021),
    "across chunks": (2, 33_001),
    "testbed latents": (4, 32, 5, 4, 4),
    "no samples": (0, 4, 3),
    "empty samples": (2, 0),
}
DTYPES = [
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float32),
    (torch.float32, torch.float16),
    (torch.bfloat16, torch.bfloat16),
]


@pytest.fixture(autouse=True)
def uninitialized_memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)  # torch.empty is filled with NaN while this is on
    yield
    torch.use_deterministic_algorithms(False)


def make(shape: tuple[int, ...], x_dtype: torch.dtype, v_dtype: torch.dtype, sampler: str) -> tuple[Tensor, ...]:
    """x, x_next, v, v_anchor, v_old, coefs, step, seed; every sample at a step of its own, the last one included."""
    generator = torch.Generator().manual_seed(len(shape))
    x, x_next, v, v_anchor, v_old = (torch.randn(shape, generator=generator) for _ in range(5))
    coefs = transition_table(sigma_schedule(8, 5.0), sampler, 0.7).coefficients(100)
    step = 7 - 3 * torch.arange(shape[0]) % 8
    seed = torch.randint(2**62, (shape[0],), generator=generator)
    return x.to(x_dtype), x_next.to(x_dtype), v.to(v_dtype), v_anchor.to(v_dtype), v_old.to(v_dtype), coefs, step, seed


def kernels(name: str) -> Callable[..., Any]:
    return getattr(torch.ops.sage_fast_cpu, name)


def check_step(x: Tensor, v: Tensor, v_uncond: Tensor | None, coefs: Tensor, step: Tensor, seed: Tensor) -> None:
    guidance = torch.tensor(3.5) if v_uncond is not None else None
    assert_accurate(check_transition_step(kernels, x, v, v_uncond, guidance, coefs, step, seed))


def check_score(
    x: Tensor, x_next: Tensor, v: Tensor, v_anchor: Tensor | None, v_old: Tensor | None, coefs: Tensor, step: Tensor
) -> None:
    for beta in (None, 0.3):
        assert_accurate(check_transition_score(kernels, x, x_next, v, v_anchor, v_old, coefs, step, beta))


@pytest.mark.parametrize(("x_dtype", "v_dtype"), DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_against_float64(shape: tuple[int, ...], x_dtype: torch.dtype, v_dtype: torch.dtype) -> None:
    x, x_next, v, v_anchor, v_old, coefs, step, seed = make(shape, x_dtype, v_dtype, "flow")
    for v_uncond in (None, v_anchor):
        check_step(x, v, v_uncond, coefs, step, seed)
    for others in ((None, None), (v_anchor, None), (None, v_old), (v_anchor, v_old)):
        check_score(x, x_next, v, *others, coefs, step)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_samplers_with_mixed_steps(sampler: str) -> None:
    """All rows of every table, those with c = 0 among them."""
    x, x_next, v, v_anchor, v_old, coefs, _, seed = make((8, 129), torch.float32, torch.bfloat16, sampler)
    check_step(x, v, v_anchor, coefs, torch.arange(8), seed)
    check_score(x, x_next, v, v_anchor, v_old, coefs, torch.arange(8))
    check_score(x, x_next, v, v_anchor, v_old, coefs, torch.tensor(3))


def test_non_contiguous_inputs() -> None:
    def strided(t: Tensor) -> Tensor:
        return t.transpose(1, 2).contiguous().transpose(1, 2)[..., ::2]

    x, x_next, v, v_anchor, v_old, coefs, step, seed = make((3, 6, 5, 8), torch.float32, torch.bfloat16, "sage")
    parts = [strided(t) for t in (x, x_next, v, v_anchor, v_old)]
    assert not parts[0].is_contiguous()
    check_step(parts[0], parts[2], parts[3], coefs, step, seed)
    check_score(*parts, coefs, step)


def test_same_noise_as_the_reference() -> None:
    """With a = b = 0 and c = 1 the step returns its noise."""
    coefs = torch.tensor([[0.0, 0.0, 1.0, 0.0, 0.0, 0.0]] * 4)
    seed = torch.tensor([0, 2**63 - 1, -5, 123456789])
    step = torch.tensor([0, 1, 2, 3])
    zeros = torch.zeros(4, 40_003)
    noise, _ = transition_step(zeros, zeros, coefs, step, seed)
    torch.testing.assert_close(noise, philox_normal(seed, step, (40_003,)), rtol=1e-5, atol=2e-6)


def test_same_bits_with_any_number_of_threads() -> None:
    x, x_next, v, v_anchor, v_old, coefs, step, seed = make((3, 70_001), torch.float32, torch.bfloat16, "sage")
    threads = torch.get_num_threads()
    results = []
    for count in (1, 2, 3, 1):
        torch.set_num_threads(count)
        w = v.detach().requires_grad_()
        outputs = transition_score(x, x_next, w, coefs, step, v_anchor, v_old, 0.3)
        gradient = torch.autograd.grad(outputs[:3], w, [torch.ones(3)] * 3)[0]
        results.append([*transition_step(x, v, coefs, step, seed), *(o.detach() for o in outputs), gradient])
    torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other))


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
def test_scoring_what_was_stepped(x_dtype: torch.dtype) -> None:
    x, _, v, _, _, coefs, step, seed = make((4, 32, 3, 6, 7), x_dtype, torch.bfloat16, "sage")
    x_next, rolled = transition_step(x, v, coefs, step, seed)
    scored, *_ = transition_score(x, x_next, v, coefs, step)
    torch.testing.assert_close(scored, rolled, rtol=1e-6, atol=1e-6)


def test_schemas() -> None:
    x, x_next, v, v_anchor, _, coefs, step, seed = make((3, 10), torch.float32, torch.bfloat16, "sage")
    torch.use_deterministic_algorithms(False)
    ops = torch.ops.sage_fast
    torch.library.opcheck(ops.transition_step.default, (x, v, None, None, coefs, step, seed))
    torch.library.opcheck(
        ops.transition_score.default, (x, x_next, v.requires_grad_(), v_anchor, None, coefs, step, 0.3),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )  # fmt: skip


def test_step_outside_the_table() -> None:
    x, _, v, _, _, coefs, _, seed = make((1, 10), torch.float32, torch.float32, "sage")
    with pytest.raises(RuntimeError, match="step 8 is outside the table of 8 rows"):
        transition_step(x, v, coefs, torch.tensor(8), seed)
