"""norm_modulate, gated_norm and norm_rotate against float64, value and every gradient, in C++ and in Triton.

Triton's launchers are called directly; without a GPU its interpreter runs them.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.embeddings import apply_rotary_emb
from torch import Tensor

from sage_fast.ops import implementation
from sage_fast.ops.gated_norm import gated_norm
from sage_fast.ops.norm_modulate import norm_modulate, residual_norm
from sage_fast.ops.norm_rotate import norm_rotate
from sage_fast.tools.checks import Kernels, check_gated_norm, check_norm_modulate, check_norm_rotate
from tests.ops.accuracy import assert_accurate

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
GPU = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = [pytest.mark.gpu] if GPU.type == "cuda" else []


def _kernels(implementation_name: str) -> tuple[Kernels, torch.device]:
    """The functions of an implementation, and the device that runs them."""
    if implementation_name == "triton":
        pytest.importorskip("triton")

        def launcher(name: str) -> Callable[..., Any]:
            return getattr(importlib.import_module(f"sage_fast.kernels.{name.removesuffix('_backward')}"), name)

        return launcher, GPU
    if implementation(torch.device("cpu")) != "C++":
        pytest.skip("the C++ extension is not built (or SAGE_FAST_OPS is set)")
    return lambda name: getattr(torch.ops.sage_fast_cpu, name), torch.device("cpu")


@pytest.fixture(params=["C++", "triton"])
def kernels(request: pytest.FixtureRequest, guarded_empty: None) -> tuple[Kernels, torch.device]:
    return _kernels(request.param)


# -- norm_modulate ----------------------------------------------------------------------------------------------------

MODULATE_SHAPES = {
    "testbed": (2, 5, 64),
    "odd": (3, 3, 65),
    "one value": (2, 3, 1),
    "wide": (1, 3, 2048),
    "no tokens": (2, 0, 8),
    "no samples": (0, 4, 8),
}


def crossed(names: str, shapes: dict[str, Any], types: Sequence[tuple[Any, ...]]) -> pytest.MarkDecorator:
    """Parametrize with every shape and every type, in C++ and in Triton.

    Triton's interpreter is slow: `make test` gives it every type at the odd shape and the last type at every shape,
    `make soak` the rest.
    """
    rows = []
    for implementation_name, shape, of_values in itertools.product(("C++", "triton"), shapes, types):
        slow = implementation_name == "triton" and GPU.type == "cpu"
        alike = slow and shape != "odd" and of_values != types[-1]
        words = [implementation_name, shape, *map(str, of_values)]
        marks = [pytest.mark.soak] if alike else []
        rows.append(pytest.param(implementation_name, shapes[shape], *of_values, id="-".join(words), marks=marks))
    return pytest.mark.parametrize(("kernels", "shape", *names.split()), rows, indirect=["kernels"])


modulated_cases = crossed(
    "dtype modulated kind",
    MODULATE_SHAPES,
    [(FP32, FP32, "chunks"), (BF16, BF16, "chunks"), (FP16, FP16, "chunks"), (BF16, FP32, "chunks"),
     (BF16, FP32, "expanded")],
)  # fmt: skip
"""Also with one row of scale and shift for all samples."""


def modulation(batch: int, width: int, dtype: torch.dtype, kind: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """scale and shift as the model passes them: chunks of [B, 6 d], or one row for all samples."""
    rows = torch.randn(1 if kind == "expanded" else batch, 6, width, dtype=dtype, device=device)
    parts = rows.expand(batch, 6, width).unbind(1)
    return parts[1], parts[0]


@modulated_cases
def test_norm_modulate(
    kernels: tuple[Kernels, torch.device],
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    modulated: torch.dtype,
    kind: str,
) -> None:
    functions, device = kernels
    x, grad = (torch.randn(shape, device=device).mul(2).add(0.5).to(dtype) for _ in range(2))
    scale, shift = modulation(shape[0], shape[2], modulated, kind, device)
    assert_accurate(check_norm_modulate(functions, grad, x, scale, shift))


def test_norm_modulate_reads_any_layout(kernels: tuple[Kernels, torch.device]) -> None:
    functions, device = kernels
    wide, grads = (torch.randn(3, 20, 10, device=device) for _ in range(2))
    x, grad = wide.transpose(1, 2)[:, :, ::2], grads.transpose(1, 2)[:, :, ::2]
    scale, shift = torch.randn(10, 3, device=device).T, torch.randn(10, 6, device=device).T[::2]
    assert not x.is_contiguous()
    assert_accurate(check_norm_modulate(functions, grad, x, scale, shift))


@pytest.mark.parametrize("room", [1, 24])
def test_norm_modulate_leaves_room(kernels: tuple[Kernels, torch.device], room: int) -> None:
    """The output has the same bits with any room, and the backward does not read the gradient there."""
    functions, device = kernels
    x, grad = (torch.randn(2, 5, 64, device=device).bfloat16() for _ in range(2))
    scale, shift = modulation(2, 64, BF16, "chunks", device)
    out = functions("norm_modulate")(x, scale, shift, 1e-6, room)
    assert out.shape == (2, 5, 64 + room)
    assert out.is_contiguous()
    assert torch.equal(out[..., :64], functions("norm_modulate")(x, scale, shift, 1e-6))
    wide = F.pad(grad, (0, room), value=torch.nan)
    for mine, plain in zip(
        functions("norm_modulate_backward")(wide, x, scale, 1e-6, True),
        functions("norm_modulate_backward")(grad, x, scale, 1e-6, True),
    ):
        assert torch.equal(mine, plain)


def test_norm_modulate_leaves_spare_rows(kernels: tuple[Kernels, torch.device]) -> None:
    """Spare rows are zero, and the backward does not read their gradient."""
    functions, device = kernels
    x, grad = (torch.randn(2, 5, 64, device=device).bfloat16() for _ in range(2))
    scale, shift = modulation(2, 64, BF16, "chunks", device)
    out = functions("norm_modulate")(x, scale, shift, 1e-6, 8, 3)
    assert out.shape == (2, 8, 72)
    assert torch.equal(out[:, :5, :64], functions("norm_modulate")(x, scale, shift, 1e-6))
    assert not out[:, 5:].any()
    wide = F.pad(grad, (0, 8, 0, 3), value=torch.nan)
    for mine, plain in zip(
        functions("norm_modulate_backward")(wide, x, scale, 1e-6, True),
        functions("norm_modulate_backward")(grad, x, scale, 1e-6, True),
    ):
        assert torch.equal(mine, plain)


def test_the_reference_is_layer_norm_and_its_gradients() -> None:
    x, scale, shift = torch.randn(2, 5, 7).double(), torch.randn(2, 7).double(), torch.randn(2, 7).double()
    inputs = [t.requires_grad_() for t in (x, scale, shift)]
    expected = F.layer_norm(x, (7,), eps=1e-6) * (1 + scale[:, None]) + shift[:, None]
    torch.testing.assert_close(norm_modulate(*inputs), expected)
    upstream = torch.randn(2, 5, 7).double()
    for mine, theirs in zip(
        torch.autograd.grad(norm_modulate(*inputs), inputs, upstream), torch.autograd.grad(expected, inputs, upstream)
    ):
        torch.testing.assert_close(mine, theirs)


def test_the_residual_stream_and_its_norm() -> None:
    """The gradient is the sum of the gradients through both outputs."""
    x, scale, shift = torch.randn(2, 5, 8), torch.randn(2, 8), torch.randn(2, 8)
    inputs = [t.double().requires_grad_() for t in (x, scale, shift)]
    same, out = residual_norm(*inputs, room=2, spare=1)
    assert torch.equal(same, inputs[0])
    assert torch.equal(out, norm_modulate(*inputs, room=2, spare=1))
    upstream = torch.randn_like(same), torch.randn_like(out)
    expected = torch.autograd.grad((inputs[0] * 1, norm_modulate(*inputs, room=2, spare=1)), inputs, upstream)
    for mine, theirs in zip(torch.autograd.grad((same, out), inputs, upstream), expected):
        torch.testing.assert_close(mine, theirs)


# -- gated_norm -------------------------------------------------------------------------------------------------------


@modulated_cases
def test_gated_norm(
    kernels: tuple[Kernels, torch.device],
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    modulated: torch.dtype,
    kind: str,
) -> None:
    functions, device = kernels
    x, y, grad, grad_sum = (torch.randn(shape, device=device).mul(2).add(0.5).to(dtype) for _ in range(4))
    scale, shift = modulation(shape[0], shape[2], modulated, kind, device)
    gate, _ = modulation(shape[0], shape[2], modulated, kind, device)
    assert_accurate(check_gated_norm(functions, grad_sum, grad, x, y, gate, scale, shift))


def test_gated_norm_reads_any_layout_and_leaves_room(kernels: tuple[Kernels, torch.device]) -> None:
    functions, device = kernels
    x, y, grad_sum, grad = (torch.randn(3, 20, 10, device=device).transpose(1, 2)[:, :, ::2] for _ in range(4))
    gate, scale, shift = (torch.randn(10, 3, device=device).T for _ in range(3))
    assert not x.is_contiguous()
    assert_accurate(check_gated_norm(functions, grad_sum, grad, x, y, gate, scale, shift))
    total, out = functions("gated_norm")(x, y, gate, scale, shift, 1e-6, 6)
    assert out.shape == (3, 10, 16)
    for mine, plain in zip((total, out[..., :10]), functions("gated_norm")(x, y, gate, scale, shift, 1e-6)):
        assert torch.equal(mine, plain)
    wide = F.pad(grad, (0, 6), value=torch.nan)
    for mine, plain in zip(
        functions("gated_norm_backward")(grad_sum, wide, total, gate, scale, y, 1e-6),
        functions("gated_norm_backward")(grad_sum, grad, total, gate, scale, y, 1e-6),
    ):
        assert torch.equal(mine, plain)


def test_the_gated_reference_is_the_plain_formula_and_its_gradients() -> None:
    x, y = (torch.randn(2, 5, 7).double().requires_grad_() for _ in range(2))
    gate, scale, shift = (torch.randn(2, 7).double().requires_grad_() for _ in range(3))
    inputs = [x, y, gate, scale, shift]
    total = x + gate[:, None] * y
    expected = total, F.layer_norm(total, (7,), eps=1e-6) * (1 + scale[:, None]) + shift[:, None]
    actual = gated_norm(*inputs)
    upstream = [torch.randn_like(t) for t in expected]
    for mine, theirs in zip(actual, expected):
        torch.testing.assert_close(mine, theirs)
    for mine, theirs in zip(
        torch.autograd.grad(actual, inputs, upstream), torch.autograd.grad(expected, inputs, upstream)
    ):
        torch.testing.assert_close(mine, theirs)


# -- norm_rotate ------------------------------------------------------------------------------------------------------

ROTATE_SHAPES = {  # B, N, L, H, D
    "testbed": (2, 4, 3, 4, 16),
    "published head": (1, 2, 1, 16, 128),
    "odd": (2, 3, 2, 3, 6),
    "one pair": (1, 2, 1, 1, 2),
    "long heads": (1, 2, 2, 2, 258),
    "no text": (2, 2, 0, 2, 16),
    "no video": (2, 0, 2, 2, 16),
    "no samples": (0, 4, 2, 2, 16),
}


def rotate_inputs(shape: tuple[int, ...], dtype: torch.dtype, weights: torch.dtype, device: torch.device) -> list[Any]:
    """Arguments of the operator: joint, four weights, rotary, eps."""
    batch, tokens, texts, heads, width = shape
    angle = 10 * torch.randn(tokens, width // 2)
    joint = torch.randn(batch, tokens + texts, 3, heads, width).to(dtype)
    tensors = (torch.randn(width).add(1).to(weights) for _ in range(4))
    return [*(t.to(device) for t in (joint, *tensors, torch.stack([angle.cos(), angle.sin()], -1))), 1e-6]


@crossed("dtype weights", ROTATE_SHAPES, [(FP32, FP32), (BF16, BF16), (FP16, FP16), (BF16, FP32)])
def test_norm_rotate(
    kernels: tuple[Kernels, torch.device], shape: tuple[int, ...], dtype: torch.dtype, weights: torch.dtype
) -> None:
    functions, device = kernels
    batch, tokens, texts, heads, width = shape
    grads = [torch.randn(batch, tokens + texts, heads, width, device=device).to(dtype) for _ in range(3)]
    assert_accurate(check_norm_rotate(functions, *grads, *rotate_inputs(shape, dtype, weights, device)))


def test_norm_rotate_reads_any_layout(kernels: tuple[Kernels, torch.device]) -> None:
    """Inputs are slices of wider tensors; gradients have heads before tokens, as attention leaves them."""
    functions, device = kernels
    joint, *rest = rotate_inputs((2, 5, 3, 2, 32), FP32, FP32, device)
    rest = [*(weight[::2] for weight in rest[:4]), rest[4][:, ::2], rest[5]]
    grads = [torch.randn(2, 2, 8, 16, device=device).transpose(1, 2) for _ in range(3)]
    assert_accurate(check_norm_rotate(functions, *grads, joint[..., ::2], *rest))
    assert_accurate(check_norm_rotate(functions, *(grad.flip(-1) for grad in grads), joint[..., ::2], *rest))


def test_the_reference_is_that_of_diffusers() -> None:
    """Compare queries, keys and values of both streams, and all gradients; video and text are separate tensors."""
    joint, *weights, rotary, eps = rotate_inputs((2, 5, 3, 4, 16), FP32, FP32, torch.device("cpu"))
    joint, text = joint.double(), torch.randn(2, 3, 3, 4, 16).double().requires_grad_()
    given, own = (joint.clone().requires_grad_() for _ in range(2))
    weights = [w.double().requires_grad_() for w in weights]
    cos, sin = (part.repeat_interleave(2, dim=1) for part in rotary.unbind(-1))

    def expected_of(part: int) -> Tensor:
        of_video, of_text = weights[2 * part : 2 * part + 2]
        normed = F.rms_norm(given[:, :5, part], (16,), of_video, eps)
        turned = apply_rotary_emb(normed, (cos, sin), sequence_dim=1)
        return torch.cat([turned, F.rms_norm(text[:, :, part], (16,), of_text, eps)], dim=1)

    expected = expected_of(0), expected_of(1), torch.cat([given[:, :5, 2], text[:, :, 2]], dim=1)
    actual = norm_rotate(own * 1, text, *weights, rotary, eps)
    upstream = [torch.randn_like(t) for t in expected]
    for mine, theirs in zip(actual, expected):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)
    mine = torch.autograd.grad(actual, [own, text, *weights], upstream)
    for ours, theirs in zip(mine, torch.autograd.grad(expected, [given, text, *weights], upstream)):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_several_rows_a_program(monkeypatch: pytest.MonkeyPatch, guarded_empty: None) -> None:
    """For long videos programs loop over rows, and the last one also over rows past the end."""
    functions, device = _kernels("triton")
    monkeypatch.setattr("sage_fast.kernels.common.MAX_PROGRAMS", 1)
    x, grad = (torch.randn(2, 11, 20, device=device) for _ in range(2))
    scale, shift = modulation(2, 20, FP32, "chunks", device)
    assert_accurate(check_norm_modulate(functions, grad, x, scale, shift))
    assert_accurate(check_gated_norm(functions, torch.randn_like(x), grad, x, torch.randn_like(x), scale, shift, scale))
    grads = [torch.randn(2, 11, 2, 16, device=device) for _ in range(3)]
    assert_accurate(check_norm_rotate(functions, *grads, *rotate_inputs((2, 9, 2, 2, 16), FP32, FP32, device)))


# -- all of them ------------------------------------------------------------------------------------------------------


def test_the_same_bits_twice_and_on_any_number_of_threads(kernels: tuple[Kernels, torch.device]) -> None:
    functions, device = kernels
    in_cpp = isinstance(functions("norm_modulate"), torch._ops.OpOverloadPacket)
    rows, tokens, counts = (301, 90, (1, 2, 3, 1)) if in_cpp else (5, 3, (1, 1))  # Triton has no threads to vary
    x, grad = (torch.randn(2, rows, 64, device=device) for _ in range(2))
    scale, shift = modulation(2, 64, FP32, "chunks", device)
    heads = rotate_inputs((2, tokens, 3, 4, 16), FP32, FP32, device)
    head_grads = [torch.randn(2, tokens + 3, 4, 16, device=device) for _ in range(3)]
    threads = torch.get_num_threads()
    results = []
    for count in counts:
        torch.set_num_threads(count)
        results.append(
            [
                functions("norm_modulate")(x, scale, shift, 1e-6),
                *functions("norm_modulate_backward")(grad, x, scale, 1e-6, True),
                *functions("gated_norm")(x, grad, scale, scale, shift, 1e-6),
                *functions("gated_norm_backward")(grad, x, grad, scale, shift, x, 1e-6),
                *functions("norm_rotate")(*heads),
                *functions("norm_rotate_backward")(*head_grads, *heads, True),
            ]
        )
    torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other))


def test_with_and_without_autograd_and_frozen_parts() -> None:
    """Rollout and training give the same bits; the backward skips the sums for frozen parts."""
    x, y = torch.randn(2, 9, 64), torch.randn(2, 9, 64)
    scale, shift = torch.randn(2, 64), torch.randn(2, 64)
    joint, *rest = rotate_inputs((2, 9, 3, 4, 16), FP32, FP32, torch.device("cpu"))
    text = torch.randn(2, 3, 3, 4, 16)

    def results() -> list[Tensor]:
        return [
            norm_modulate(x, scale, shift),
            *residual_norm(x, scale, shift),
            *gated_norm(x, y, scale, scale, shift),
            *norm_rotate(joint * 1, text, *rest),
        ]

    with torch.no_grad():
        plain = results()
    for leaf in (x, y, joint, text):
        leaf.requires_grad_()
    trained = results()
    assert all(torch.equal(a, b) for a, b in zip(plain, trained, strict=True))
    calls: list[tuple[str, object]] = []

    class Spy(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if "backward" in func.name() and func.namespace == "sage_fast":
                calls.append((func.name().removeprefix("sage_fast::"), sum(t.numel() == 0 for t in out)))
            return out

    with Spy():
        torch.autograd.backward(trained, [torch.randn_like(t) for t in trained])
    empty = [("gated_norm_backward", 3), *[("norm_modulate_backward", 2)] * 2, ("norm_rotate_backward", 1)]
    assert sorted(calls) == empty
    assert all(leaf.grad is not None for leaf in (x, y, joint, text))
    scale.requires_grad_()
    gated_norm(x, y, scale, shift, shift)[0].sum().backward()
    assert scale.grad is not None


def test_schemas() -> None:
    x, scale, shift = torch.randn(2, 5, 8, requires_grad=True), torch.randn(2, 8), torch.randn(2, 8)
    heads = rotate_inputs((2, 5, 3, 2, 8), FP32, FP32, torch.device("cpu"))
    torch.library.opcheck(torch.ops.sage_fast.norm_modulate.default, (x, scale.requires_grad_(), shift, 1e-6, 0, 2))
    torch.library.opcheck(torch.ops.sage_fast.gated_norm.default, (x, torch.randn_like(x), shift, scale, shift, 1e-6))
    torch.library.opcheck(torch.ops.sage_fast.norm_rotate.default, tuple(heads))


def test_bad_inputs() -> None:
    x, row = torch.zeros(2, 3, 8), torch.zeros(2, 8)
    with pytest.raises(ValueError, match=r"scale: expected \[2, 8\], got \[1, 8\]"):
        norm_modulate(x, row[:1], row)
    with pytest.raises(ValueError, match=r"x: expected \[B, S, d\], got \[2, 8\]"):
        norm_modulate(row, row, row)
    with pytest.raises(ValueError, match=r"gate: expected \[2, 8\], got \[2, 7\]"):
        gated_norm(x, x, row[:, :7], row, row)
    with pytest.raises(ValueError, match=r"y: expected torch.float32 \[2, 3, 8\], got torch.bfloat16"):
        gated_norm(x, x.bfloat16(), row, row, row)
    joint, *weights, rotary, _ = rotate_inputs((2, 3, 1, 2, 8), FP32, FP32, torch.device("cpu"))
    text = torch.zeros(2, 1, 3, 2, 8)
    with pytest.raises(ValueError, match=r"text: expected torch.float32 \[2, 1, 3, 2, 8\], got torch.bfloat16"):
        norm_rotate(joint, text.bfloat16(), *weights, rotary)
    with pytest.raises(ValueError, match=r"text: expected torch.float32 \[2, 2, 3, 2, 8\]"):
        norm_rotate(joint, text, *weights, rotary[:2])
    with pytest.raises(ValueError, match=r"rotary: expected float32 \[N, 4, 2\], got torch.float32 \[3, 3, 2\]"):
        norm_rotate(joint, text, *weights, rotary[:, :3])
    with pytest.raises(ValueError, match=r"text_key: expected \[8\], got \[7\]"):
        norm_rotate(joint, text, *weights[:3], weights[3][:7], rotary)
    with pytest.raises(ValueError, match="even D"):
        norm_rotate(joint[..., :7], text[..., :7], *(w[:7] for w in weights), rotary)
