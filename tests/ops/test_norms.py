"""norm_modulate and norm_rotate against float64, value and every gradient, in C++ and in Triton.

Triton's launchers are called directly; without a GPU its interpreter runs them.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.embeddings import apply_rotary_emb
from torch import Tensor

from sage_fast.ops import implementation, norm_modulate, norm_rotate
from sage_fast.ops.norm_modulate import norm_modulate_backward_reference, norm_modulate_reference
from sage_fast.ops.norm_rotate import norm_rotate_backward_reference, norm_rotate_reference
from tests.ops.accuracy import assert_accurate, double

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
GPU = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = [pytest.mark.gpu] if GPU.type == "cuda" else []


def _kernels(name: str) -> tuple[Any, torch.device]:
    """The four functions of an implementation and where it runs."""
    if name == "triton":
        pytest.importorskip("triton")
        from sage_fast.kernels import norm_modulate as modulate
        from sage_fast.kernels import norm_rotate as rotate

        functions = (modulate.norm_modulate, modulate.norm_modulate_backward)
        functions += (rotate.norm_rotate, rotate.norm_rotate_backward)
        return SimpleNamespace(
            **dict(zip(("modulate", "modulate_backward", "rotate", "rotate_backward"), functions))
        ), GPU
    if implementation(torch.device("cpu")) != "C++":
        pytest.skip("the C++ extension is not built (or SAGE_FAST_OPS is set)")
    ops = torch.ops.sage_fast_cpu
    return SimpleNamespace(
        modulate=ops.norm_modulate, modulate_backward=ops.norm_modulate_backward,
        rotate=ops.norm_rotate, rotate_backward=ops.norm_rotate_backward,
    ), torch.device("cpu")  # fmt: skip


@pytest.fixture(params=["C++", "triton"])
def kernels(request: pytest.FixtureRequest, guarded_empty: None) -> tuple[Any, torch.device]:
    return _kernels(request.param)


def compare(names: list[str], function: Callable[..., Any], reference: Callable[..., Any], *arguments: Any) -> None:
    fused, plain, exact = function(*arguments), reference(*arguments), reference(*double(*arguments))
    if isinstance(fused, Tensor):
        fused, plain, exact = (fused,), (plain,), (exact,)
    for name, *values in zip(names, fused, plain, exact):
        assert_accurate(name, *values)


# -- norm_modulate ----------------------------------------------------------------------------------------------------

MODULATE_SHAPES = {
    "testbed": (2, 87, 64),
    "odd": (3, 5, 65),
    "one value": (2, 3, 1),
    "wide": (1, 3, 2048),
    "no tokens": (2, 0, 8),
    "no samples": (0, 4, 8),
}


def modulation(batch: int, width: int, dtype: torch.dtype, kind: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """scale and shift as the model passes them: chunks of [B, 6 d], or one row for all samples."""
    rows = torch.randn(1 if kind == "expanded" else batch, 6, width, dtype=dtype, device=device)
    parts = rows.expand(batch, 6, width).unbind(1)
    return parts[1], parts[0]


@pytest.mark.parametrize("kind", ["chunks", "expanded"])
@pytest.mark.parametrize(("dtype", "modulated"), [(FP32, FP32), (BF16, BF16), (BF16, FP32), (FP16, FP16)], ids=str)
@pytest.mark.parametrize("shape", MODULATE_SHAPES.values(), ids=MODULATE_SHAPES.keys())
def test_norm_modulate(
    kernels: tuple[Any, torch.device],
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    modulated: torch.dtype,
    kind: str,
) -> None:
    functions, device = kernels
    x, grad = (torch.randn(shape, device=device).mul(2).add(0.5).to(dtype) for _ in range(2))
    scale, shift = modulation(shape[0], shape[2], modulated, kind, device)
    compare(["out"], functions.modulate, norm_modulate_reference, x, scale, shift, 1e-6)
    for wanted in (False, True):
        compare(
            ["dx", "dscale", "dshift"], functions.modulate_backward, norm_modulate_backward_reference,
            grad, x, scale, 1e-6, wanted,
        )  # fmt: skip


def test_norm_modulate_reads_any_layout(kernels: tuple[Any, torch.device]) -> None:
    functions, device = kernels
    wide, grads = (torch.randn(3, 20, 10, device=device) for _ in range(2))
    x, grad = wide.transpose(1, 2)[:, :, ::2], grads.transpose(1, 2)[:, :, ::2]
    scale, shift = torch.randn(10, 3, device=device).T, torch.randn(10, 6, device=device).T[::2]
    assert not x.is_contiguous()
    arguments = (x, scale, shift, 1e-6)
    compare(["out"], functions.modulate, norm_modulate_reference, *arguments)
    compare(
        ["dx", "dscale", "dshift"], functions.modulate_backward, norm_modulate_backward_reference,
        grad, x, scale, 1e-6, True,
    )  # fmt: skip


@pytest.mark.parametrize("room", [1, 24])
def test_norm_modulate_leaves_room(kernels: tuple[Any, torch.device], room: int) -> None:
    """Same bits beside any room, and a gradient that stands in the room is not read."""
    functions, device = kernels
    x, grad = (torch.randn(2, 5, 64, device=device).bfloat16() for _ in range(2))
    scale, shift = modulation(2, 64, BF16, "chunks", device)
    out = functions.modulate(x, scale, shift, 1e-6, room)
    assert out.shape == (2, 5, 64 + room)
    assert out.is_contiguous()
    assert torch.equal(out[..., :64], functions.modulate(x, scale, shift, 1e-6))
    wide = F.pad(grad, (0, room), value=torch.nan)
    for mine, plain in zip(
        functions.modulate_backward(wide, x, scale, 1e-6, True),
        functions.modulate_backward(grad, x, scale, 1e-6, True),
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


# -- norm_rotate ------------------------------------------------------------------------------------------------------

ROTATE_SHAPES = {  # B, N, L, H, D
    "testbed": (2, 10, 3, 4, 16),
    "published head": (1, 3, 2, 16, 128),
    "odd": (2, 5, 3, 3, 6),
    "one pair": (1, 2, 1, 1, 2),
    "long heads": (1, 2, 2, 2, 258),
    "no text": (2, 4, 0, 2, 16),
    "no video": (2, 0, 4, 2, 16),
    "no samples": (0, 4, 2, 2, 16),
}


def rotate_inputs(shape: tuple[int, ...], dtype: torch.dtype, weights: torch.dtype, device: torch.device) -> list[Any]:
    batch, tokens, texts, heads, width = shape
    angle = 10 * torch.randn(tokens, width // 2)
    video, text = (torch.randn(batch, count, heads, width).to(dtype) for count in (tokens, texts))
    video_weight, text_weight = (torch.randn(width).add(1).to(weights) for _ in range(2))
    tensors = (video, text, video_weight, text_weight, torch.stack([angle.cos(), angle.sin()], -1))
    return [*(t.to(device) for t in tensors), 1e-6]


def check_rotate(functions: Any, arguments: list[Any], grad: Tensor) -> None:
    compare(["out"], functions.rotate, norm_rotate_reference, *arguments)
    names = ["d video", "d text", "d video weight", "d text weight"]
    for wanted in (False, True):
        compare(names, functions.rotate_backward, norm_rotate_backward_reference, grad, *arguments, wanted)


@pytest.mark.parametrize(("dtype", "weights"), [(FP32, FP32), (BF16, BF16), (BF16, FP32), (FP16, FP16)], ids=str)
@pytest.mark.parametrize("shape", ROTATE_SHAPES.values(), ids=ROTATE_SHAPES.keys())
def test_norm_rotate(
    kernels: tuple[Any, torch.device], shape: tuple[int, ...], dtype: torch.dtype, weights: torch.dtype
) -> None:
    functions, device = kernels
    batch, tokens, texts, heads, width = shape
    grad = torch.randn(batch, tokens + texts, heads, width, device=device).to(dtype)
    check_rotate(functions, rotate_inputs(shape, dtype, weights, device), grad)


def test_norm_rotate_reads_any_layout(kernels: tuple[Any, torch.device]) -> None:
    """Slices of a joint projection, and the gradient as attention leaves it: heads before tokens."""
    functions, device = kernels
    video, text, *rest = rotate_inputs((2, 5, 3, 2, 16), FP32, FP32, device)
    joint = torch.cat([video, text], dim=1).repeat(1, 1, 1, 2)
    grad = torch.randn(2, 2, 8, 16, device=device).transpose(1, 2)
    check_rotate(functions, [joint[:, :5, :, :16], joint[:, 5:, :, 16:], *rest], grad)
    check_rotate(functions, [joint[:, :5, :, ::2], joint[:, 5:, :, ::2], *rest], grad.flip(-1))


def test_the_reference_is_that_of_diffusers() -> None:
    video, text, video_weight, text_weight, rotary, eps = rotate_inputs(
        (2, 5, 3, 4, 16), FP32, FP32, torch.device("cpu")
    )
    inputs = [t.double().requires_grad_() for t in (video, text, video_weight, text_weight)]
    rotary = rotary.double()
    cos, sin = (part.repeat_interleave(2, dim=1) for part in rotary.unbind(-1))
    turned = apply_rotary_emb(F.rms_norm(inputs[0], (16,), inputs[2], eps), (cos.float(), sin.float()), sequence_dim=1)
    expected = torch.cat([turned, F.rms_norm(inputs[1], (16,), inputs[3], eps)], dim=1)
    out = norm_rotate_reference(*inputs, rotary, eps)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)
    upstream = torch.randn(out.shape).double()
    by_hand = norm_rotate_backward_reference(upstream, *inputs, rotary, eps, True)
    for mine, theirs in zip(by_hand, torch.autograd.grad(out, inputs, upstream)):
        torch.testing.assert_close(mine, theirs)


def test_several_rows_a_program(monkeypatch: pytest.MonkeyPatch, guarded_empty: None) -> None:
    """Long videos: programs loop, the last one over rows that are not there."""
    functions, device = _kernels("triton")
    monkeypatch.setattr("sage_fast.kernels.common.MAX_PROGRAMS", 1)
    x, grad = (torch.randn(2, 37, 20, device=device) for _ in range(2))
    scale, shift = modulation(2, 20, FP32, "chunks", device)
    compare(["out"], functions.modulate, norm_modulate_reference, x, scale, shift, 1e-6)
    compare(
        ["dx", "dscale", "dshift"], functions.modulate_backward, norm_modulate_backward_reference,
        grad, x, scale, 1e-6, True,
    )  # fmt: skip
    shape = (2, 30, 7, 2, 16)
    check_rotate(functions, rotate_inputs(shape, FP32, FP32, device), torch.randn(2, 37, 2, 16, device=device))


# -- both -------------------------------------------------------------------------------------------------------------


def test_the_same_bits_twice_and_on_any_number_of_threads(kernels: tuple[Any, torch.device]) -> None:
    functions, device = kernels
    x, grad = (torch.randn(2, 301, 64, device=device) for _ in range(2))
    scale, shift = modulation(2, 64, FP32, "chunks", device)
    heads = rotate_inputs((2, 90, 7, 4, 16), FP32, FP32, device)
    head_grad = torch.randn(2, 97, 4, 16, device=device)
    threads = torch.get_num_threads()
    results = []
    for count in (1, 2, 3, 1):
        torch.set_num_threads(count)
        results.append(
            [
                functions.modulate(x, scale, shift, 1e-6),
                *functions.modulate_backward(grad, x, scale, 1e-6, True),
                functions.rotate(*heads),
                *functions.rotate_backward(head_grad, *heads, True),
            ]
        )
    torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other))


def test_with_and_without_autograd_and_frozen_parts() -> None:
    """One kernel for rollout and training; what is frozen costs no sums."""
    x = torch.randn(2, 9, 64, requires_grad=True)
    scale, shift = torch.randn(2, 64), torch.randn(2, 64)
    video, text, *rest = rotate_inputs((2, 9, 3, 4, 16), FP32, FP32, torch.device("cpu"))
    with torch.no_grad():
        plain = norm_modulate(x, scale, shift), norm_rotate(video, text, *rest)
    video.requires_grad_()
    trained = norm_modulate(x, scale, shift), norm_rotate(video, text, *rest)
    assert all(torch.equal(a, b) for a, b in zip(plain, trained))
    calls: list[tuple[str, bool]] = []

    class Spy(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "backward" in func.name() and func.namespace == "sage_fast":
                calls.append((func.name(), args[-1]))
            return func(*args, **(kwargs or {}))

    with Spy():
        (trained[0].sum() + trained[1].sum()).backward()
    assert sorted(calls) == [("sage_fast::norm_modulate_backward", False), ("sage_fast::norm_rotate_backward", False)]
    assert x.grad is not None
    assert video.grad is not None
    scale.requires_grad_()
    norm_modulate(x, scale, shift).sum().backward()
    assert scale.grad is not None


def test_schemas() -> None:
    x, scale, shift = torch.randn(2, 5, 8, requires_grad=True), torch.randn(2, 8), torch.randn(2, 8)
    heads = rotate_inputs((2, 5, 3, 2, 8), FP32, FP32, torch.device("cpu"))
    torch.library.opcheck(torch.ops.sage_fast.norm_modulate.default, (x, scale.requires_grad_(), shift, 1e-6))
    torch.library.opcheck(torch.ops.sage_fast.norm_rotate.default, (heads[0].requires_grad_(), *heads[1:]))


def test_bad_inputs() -> None:
    x, row = torch.zeros(2, 3, 8), torch.zeros(2, 8)
    with pytest.raises(ValueError, match=r"scale: expected \[2, 8\], got \[1, 8\]"):
        norm_modulate(x, row[:1], row)
    with pytest.raises(ValueError, match=r"x: expected \[B, S, d\], got \[2, 8\]"):
        norm_modulate(row, row, row)
    video, text, weight, _, rotary, _ = rotate_inputs((2, 3, 1, 2, 8), FP32, FP32, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"text: expected torch.float32 \[2, L, 2, 8\], got torch.bfloat16"):
        norm_rotate(video, text.bfloat16(), weight, weight, rotary)
    with pytest.raises(ValueError, match=r"rotary: expected float32 \[3, 4, 2\], got torch.float32 \[2, 4, 2\]"):
        norm_rotate(video, text, weight, weight, rotary[:2])
    with pytest.raises(ValueError, match=r"video_weight: expected \[8\], got \[7\]"):
        norm_rotate(video, text, weight[:7], weight, rotary)
    with pytest.raises(ValueError, match="even D"):
        norm_rotate(video[..., :7], text[..., :7], weight[:7], weight[:7], rotary)
