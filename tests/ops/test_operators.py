"""Every operator against float64, values and every gradient, in C++ and in Triton.

Triton's launchers are called directly, past the dispatcher: on a GPU they run the compiled kernels,
without one Triton's interpreter runs them on CPU tensors (tests/conftest.py sets TRITON_INTERPRET).
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sage_fast.algorithm.transitions import REDUCTIONS, SAMPLERS, sigma_schedule, transition_table
from sage_fast.ops import implementation
from sage_fast.ops._calls import registered
from sage_fast.ops.guidance import guided
from sage_fast.ops.philox import philox_normal
from sage_fast.tools.operators import OPERATORS, UNIT, OperatorResult, inputs, wrong
from tests.ops.accuracy import assert_accurate
from tests.ops.checks import Kernels, check

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
GPU = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = [pytest.mark.gpu] if GPU.type == "cuda" else []

LATENTS = {
    "one element": (1, 1),
    "no sample dims": (5,),
    "odd": (3, 59),
    "prime": (2, 1009),
    "not a multiple of 4": (2, 1026),
    "whole tiles": (2, 3, 1024),
    "across chunks": (2, 33_001),
    "testbed latents": (4, 32, 5, 4, 4),
    "no samples": (0, 4, 3),
    "empty samples": (2, 0),
}
TOKENS = {  # B, S, d
    "testbed": (2, 5, 64),
    "odd": (3, 3, 65),
    "one value": (2, 3, 1),
    "wide": (1, 3, 2048),
    "no tokens": (2, 0, 8),
    "no samples": (0, 4, 8),
}
HEADS = {  # B, N, L, H, D, and H again where all heads of a token are normalised together
    "testbed": (2, 4, 3, 4, 16),
    "published head": (1, 2, 1, 16, 128),
    "odd": (2, 3, 2, 3, 6),
    "one pair": (1, 2, 1, 1, 2),
    "long heads": (1, 2, 2, 2, 258),
    "no text": (2, 2, 0, 2, 16),
    "no video": (2, 0, 2, 2, 16),
    "no samples": (0, 4, 2, 2, 16),
    "testbed together": (2, 4, 3, 4, 16, 4),
    "published heads together": (1, 2, 0, 12, 128, 12),
    "odd together": (2, 3, 2, 3, 6, 3),
    "one pair together": (1, 2, 1, 1, 2, 1),
    "long heads together": (1, 2, 2, 2, 258, 2),
    "no video together": (2, 0, 2, 2, 16, 2),
    "no samples together": (0, 4, 2, 2, 16, 2),
}
OF_LATENTS = [
    (FP32, BF16),
    (FP32,),
    (FP32, FP32, FP16, BF16),
    (BF16, BF16, BF16, FP16),
    (BF16, FP16, FP32, BF16),
]
"""Types of the latents and of the velocities."""
OF_TOKENS = [(FP32,), (BF16,), (FP16,), (BF16, FP32)]
"""Types of the tokens, and of their modulation or weights."""
PIXELS = {  # B, T, H, W, C
    "testbed": (2, 3, 2, 4, 16),
    "odd": (2, 3, 2, 5, 7),
    "one value": (1, 1, 1, 1, 1),
    "wide": (1, 1, 2, 3, 1024),
    "long rows": (1, 1, 1, 300, 24),
    "no frames": (2, 0, 3, 2, 8),
    "no samples": (0, 1, 3, 2, 8),
}
CASES = {
    "transition_step": (LATENTS, OF_LATENTS),
    "transition_score": (LATENTS, OF_LATENTS),
    "adapter_rows": (TOKENS | {"no columns": (2, 3, 0)}, OF_TOKENS[:3]),
    "gated_norm": (TOKENS, OF_TOKENS),
    "gated_sum": (TOKENS, OF_TOKENS),
    "norm_modulate": (TOKENS, OF_TOKENS),
    "norm_rotate": (HEADS, OF_TOKENS),
    "norm_silu": (PIXELS, OF_TOKENS),
}
ODD = {operator: shapes["odd"] for operator, (shapes, _) in CASES.items()}


def cases() -> list[Any]:
    """Every shape and every type, in C++ and in Triton.

    Triton's interpreter is slow: `make test` gives it every type at the odd shapes and the last
    type at every shape, `make soak` the rest.
    """
    rows = []
    for operator, (shapes, types) in CASES.items():
        for name, shape, dtypes in itertools.product(("C++", "triton"), shapes, types):
            slow = name == "triton" and GPU.type == "cpu" and dtypes != types[-1]
            slow = slow and shape not in ("odd", "odd together")
            words = "-".join(
                [operator, name, shape, *(str(dtype).removeprefix("torch.") for dtype in dtypes)]
            )
            marks = [pytest.mark.soak] if slow else []
            rows.append(pytest.param(name, operator, shapes[shape], dtypes, id=words, marks=marks))
    return rows


def test_every_operator_is_here() -> None:
    assert CASES.keys() == OPERATORS.keys()


@pytest.mark.parametrize(("kernels", "operator", "shape", "dtypes"), cases(), indirect=["kernels"])
def test_values_and_gradients(
    kernels: tuple[Kernels, torch.device],
    operator: str,
    shape: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
) -> None:
    functions, device = kernels
    assert_accurate(check(operator, functions, inputs(operator, shape, dtypes, device)))


# -- memory ----------------------------------------------------------------------------------------


def offset(x: Tensor) -> Tensor:
    """Between neighbours that are NaN or extreme: reading past either end would show."""
    wide = torch.full(
        (x.numel() + 2,),
        torch.nan if x.is_floating_point() else -(2**62),
        dtype=x.dtype,
        device=x.device,
    )
    wide[1:-1] = x.flatten()
    return wide[1:-1].view(x.shape)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.mT.contiguous().mT if x.ndim > 1 else x,
    "reversed": lambda x: (
        x.permute(*range(x.ndim)[::-1]).contiguous().permute(*range(x.ndim)[::-1])
    ),
    "strided": lambda x: x.repeat_interleave(2, dim=-1)[..., ::2],
    "expanded": lambda x: x[:1].expand(x.shape),
    "offset": offset,
}
SHAPES = dict.fromkeys(OPERATORS, (3, 16, 10)) | {
    "norm_rotate": (2, 5, 3, 2, 16),
    "norm_silu": (2, 2, 3, 5, 16),
}
IN_ANY_LAYOUT = [
    *(pytest.param(*row, id=row[0]) for row in SHAPES.items()),
    pytest.param("norm_rotate", (2, 5, 3, 2, 16, 2), id="norm_rotate together"),
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("operator", "shape"), IN_ANY_LAYOUT)
def test_any_layout(
    operator: str, shape: tuple[int, ...], layout: str, kernels: tuple[Kernels, torch.device]
) -> None:
    functions, device = kernels
    arguments = inputs(operator, shape, (FP32, BF16), device, layout=LAYOUTS[layout])
    assert_accurate(check(operator, functions, arguments, LAYOUTS[layout]))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["reference", "fused"])
@pytest.mark.parametrize(("operator", "shape"), IN_ANY_LAYOUT)
def test_outputs_are_those_of_the_fake(
    operator: str, shape: tuple[int, ...], dtype: torch.dtype, layout: str
) -> None:
    """Strides, types and aliases, backward included; float64 is the reference's, float32 whatever
    serves the CPU."""
    calls: list[tuple[str, tuple[Any, ...]]] = []

    def recorded(name: str) -> Callable[..., Any]:
        return lambda *arguments: calls.append((name, arguments)) or registered(name)(*arguments)

    arguments = inputs(operator, shape, (dtype,), layout=LAYOUTS[layout])
    list(check(operator, recorded, arguments, LAYOUTS[layout]))
    if operator == "norm_modulate":
        calls.append((operator, (*arguments, 2, 1)))  # with padding
    backward = {f"{operator}_backward"} - {"transition_step_backward", "norm_silu_backward"}
    assert {name for name, _ in calls} >= {operator} | backward
    for name, given in calls:
        torch.library.opcheck(
            registered(name), given, test_utils=("test_schema", "test_faketensor")
        )


@pytest.mark.skipif(
    implementation(torch.device("cpu")) == "Triton interpreter", reason="this run is that test"
)
def test_outputs_of_triton_are_those_of_the_fake() -> None:
    """`make soak` has all layouts."""
    pytest.importorskip("triton")
    chosen = "fake and fused" if "SAGE_FAST_SOAK" in os.environ else "fake and fused and expanded"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", __file__, "-k", chosen],
        env=os.environ | {"TRITON_INTERPRET": "1", "SAGE_FAST_OPS": "triton"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.parametrize("operator", OPERATORS)
def test_schemas(operator: str) -> None:
    """As registered; `norm_rotate` and `norm_modulate` are differentiated by functions around
    them."""
    given = inputs(operator, ODD[operator], (FP32,))
    for place in {"transition_score": (2, 3), "gated_norm": range(5)}.get(operator, ()):
        given[place] = given[place].detach().clone().requires_grad_()
    if operator == "norm_rotate":
        del given[1]
    torch.library.opcheck(registered(operator), tuple(given))


# -- the transitions' rows and optional inputs -----------------------------------------------------


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_every_sampler_and_reduction(
    sampler: str, reduction: str, kernels: tuple[Kernels, torch.device]
) -> None:
    """All rows of every table, those with c = 0 among them."""
    functions, device = kernels
    coefs = (
        transition_table(sigma_schedule(10, 5.0), sampler, 0.7).window(0, 9).coefficients(reduction)
    )
    for operator in ("transition_step", "transition_score"):
        arguments = inputs(operator, (10, 131), (FP32, BF16), device, coefs=coefs)
        assert arguments[-2].unique().tolist() == list(range(10))
        assert_accurate(check(operator, functions, arguments))


def test_one_sample_is_at_a_step_with_noise() -> None:
    """At one without noise the log-prob, both KLs and the gradient are 0, whatever the kernel
    does."""
    *_, coefs, step, _ = inputs("transition_score", LATENTS["one element"], (FP32,))
    assert coefs[step, 2].all()


@pytest.mark.parametrize("operator", ["transition_step", "transition_score"])
def test_one_step_for_the_whole_batch(operator: str, kernels: tuple[Kernels, torch.device]) -> None:
    functions, device = kernels
    assert_accurate(
        check(operator, functions, inputs(operator, (3, 131), (FP32, BF16), device, optional=False))
    )


@pytest.mark.parametrize("guidance", [False, True], ids=["plain", "guided"])
@pytest.mark.parametrize(("anchor", "old"), [(False, False), (True, False), (False, True)])
def test_absent_velocities_score_zero(
    anchor: bool, old: bool, guidance: bool, kernels: tuple[Kernels, torch.device]
) -> None:
    functions, device = kernels
    x, x_next, v, *others, coefs, step, beta = inputs(
        "transition_score", (2, 1026), (FP32, BF16), device
    )
    others = [
        other if kept else None for other, kept in zip(others, (guidance, guidance, anchor, old))
    ]
    for branch in (None, beta):
        compared = {
            c.name: c
            for c in check(
                "transition_score", functions, [x, x_next, v, *others, coefs, step, branch]
            )
        }
        # Without noise x_next is the mean as the kernel rounds it, and without v_old the errors are
        # of it alone: 0 for the kernel, and that rounding in float64.
        rounding = {"absolute": 0.0 if old else UNIT * x_next.abs().mean().item()}
        assert_accurate(compared.values(), error_plus=rounding, error_minus=rounding)
        assert anchor or not compared["kl_anchor"].fused.any()
        assert old or not compared["kl_old"].fused.any()
        assert compared["dv_uncond"].fused.numel() == guidance * v.numel()


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["4-a-thread", "8-a-thread"])
@pytest.mark.parametrize(
    ("kernels", "numel"),  # Triton's interpreter is slow
    [
        (name, n)
        for name, most in (("C++", 40_003), ("triton", 5_003))
        for n in (1, 59, 2048, 2051, most)
    ],
    indirect=["kernels"],
)
def test_noise_is_that_of_the_reference(
    numel: int, dtype: torch.dtype, kernels: tuple[Kernels, torch.device]
) -> None:
    """With a = b = 0 and c = 1 the step returns its noise."""
    functions, device = kernels
    seed = torch.tensor([0, 1, -1, 2**63 - 1, 1234 + 2**32], device=device)
    step = torch.tensor([0, 3, 1, 2, 3], device=device)
    coefs = torch.tensor([0.0, 0, 1, 0, 0, 0], device=device).repeat(4, 1)
    zero = torch.zeros(5, numel, dtype=dtype, device=device)
    noise, _ = functions("transition_step")(zero, zero, None, None, coefs, step, seed)
    expected = philox_normal(seed, step, (numel,))
    if dtype == FP32:
        exact = philox_normal(seed, step, (numel,), dtype=torch.float64)
        assert_accurate(
            [OperatorResult("noise", noise, expected, exact)],
            noise={"absolute": 1e-6, "relative": 0.0},
        )
    else:  # the same number, rounded once
        assert ((noise.float() - expected).abs() <= expected.abs() * 2.0**-8 + 5e-6).all()


# -- bits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operator", "together"),
    [*((operator, ()) for operator in OPERATORS), ("norm_rotate", (4,))],
)
def test_the_same_bits_twice_and_on_any_number_of_threads(
    operator: str, together: tuple[int, ...], kernels: tuple[Kernels, torch.device]
) -> None:
    functions, device = kernels
    in_cpp = isinstance(functions(operator), torch._ops.OpOverloadPacket)
    shape, counts = ODD[operator], (1, 1)  # Triton has no threads to vary
    if in_cpp:
        # Of the last one C++ takes several rows a task, or there would be more than 128 of a
        # sample.
        large = {
            "norm_rotate": (2, 90, 3, 4, 16),
            "gated_norm": (2, 301, 64),
            "norm_modulate": (1, 131, 8192),
        }
        shape, counts = large.get(operator, (3, 70_001)), (1, 2, 3, 1)
    if together:
        shape = (*shape[:3], *together, shape[4], *together)
    arguments = inputs(operator, shape, (FP32, BF16), device)
    threads, results = torch.get_num_threads(), []
    for count in counts:
        torch.set_num_threads(count)
        torch.manual_seed(0)
        compared = check(operator, functions, arguments)
        assert not wrong(compared, units=64)
        results.append([each.fused for each in compared])
    torch.set_num_threads(threads)
    assert all(
        torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True)
    )


@pytest.mark.parametrize("operator", ["transition_step", "transition_score"])
def test_a_sample_does_not_depend_on_its_batch(
    operator: str, kernels: tuple[Kernels, torch.device]
) -> None:
    functions, device = kernels
    arguments = inputs(operator, (3, 2051), (FP32, BF16), device)
    outputs = functions(operator)(*arguments)
    for i in range(3):
        alone = [
            a[i : i + 1] if isinstance(a, Tensor) and len(a.shape) and len(a) == 3 else a
            for a in arguments
        ]
        for out, single in zip(outputs, functions(operator)(*alone), strict=True):
            assert torch.equal(single, out[i : i + 1])


@pytest.mark.parametrize("guidance", [None, 6.3])
@pytest.mark.parametrize("dtypes", OF_LATENTS, ids=str)
@pytest.mark.parametrize("numel", [59, 2048])
def test_scoring_a_step_repeats_its_log_prob(
    numel: int,
    dtypes: tuple[torch.dtype, ...],
    guidance: float | None,
    kernels: tuple[Kernels, torch.device],
) -> None:
    """On-policy the ratio is 1: the score of a stored transition is the log-prob of its step, to
    the last bits."""
    functions, device = kernels
    x, v, v_uncond, _, *table = inputs("transition_step", (3, numel), dtypes, device)
    pair = (v_uncond if guidance else None, guidance)
    x_next, logp = functions("transition_step")(x, v, *pair, *table)
    again, *_ = functions("transition_score")(x, x_next, v, *pair, None, None, *table[:2], None)
    torch.testing.assert_close(again, logp, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtypes", OF_LATENTS, ids=str)
@pytest.mark.parametrize("numel", [59, 2048])
def test_the_guided_velocity_is_that_of_plain_pytorch_to_the_bit(
    numel: int, dtypes: tuple[torch.dtype, ...], kernels: tuple[Kernels, torch.device]
) -> None:
    """In the step and in the score: the KL to a stored velocity of the same weights is 0, without
    any rounding."""
    functions, device = kernels
    x, v, v_uncond, _, *table = inputs("transition_step", (3, numel), dtypes, device)
    v_old = guided(v, v_uncond, 6.3, FP32)
    results = functions("transition_step")(x, v, v_uncond, 6.3, *table)
    x_next, logp = functions("transition_step")(x, v_old, None, None, *table)
    assert torch.equal(results[0], x_next)
    # v_old is float32. Next to 16-bit latents a thread then holds 4 elements, not 8, and adds in
    # another order.
    torch.testing.assert_close(results[1], logp, rtol=1e-6, atol=1e-6)
    coefs, step, _ = table
    ours = functions("transition_score")(
        x, results[0], v, v_uncond, 6.3, v_old, v_old, coefs, step, 0.3
    )
    expected = functions("transition_score")(
        x, results[0], v_old, None, None, v_old, v_old, coefs, step, 0.3
    )
    assert not ours[1].any()
    assert not ours[2].any()
    for value, same in zip(ours, expected, strict=True):
        assert torch.equal(value, same)
