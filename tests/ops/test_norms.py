"""The normalisations as declared: against diffusers' and PyTorch's, padding, autograd, messages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.transformers import transformer_wan
from diffusers.models.transformers.transformer_wan import (
    WanAttention,
    WanAttnProcessor,
    WanRotaryPosEmbed,
)
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from sage_fast.models.attention.backends import ATTENTION
from sage_fast.ops.gated_norm import gated_norm
from sage_fast.ops.gated_sum import gated_sum
from sage_fast.ops.norm_modulate import norm_modulate, residual_norm
from sage_fast.ops.norm_rotate import norm_rotate, recomputed_in_backward
from sage_fast.tools.operators import inputs
from tests.ops.checks import Kernels

FP32, BF16 = torch.float32, torch.bfloat16
pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []


@pytest.mark.parametrize(("pad", "pad_rows"), [(1, 0), (24, 0), (8, 3)])
def test_norm_modulate_leaves_padding(
    kernels: tuple[Kernels, torch.device], pad: int, pad_rows: int
) -> None:
    """The output has the same bits with any padding; padding rows are zero; the backward reads
    neither."""
    functions, device = kernels
    x, scale, shift, _ = inputs("norm_modulate", (2, 5, 64), (BF16,), device)
    out = functions("norm_modulate")(x, scale, shift, 1e-6, pad, pad_rows)
    assert out.shape == (2, 5 + pad_rows, 64 + pad)
    assert out.is_contiguous()
    assert torch.equal(out[:, :5, :64], functions("norm_modulate")(x, scale, shift, 1e-6))
    assert not out[:, 5:].any()
    grad = torch.randn_like(x)
    wide = F.pad(grad, (0, pad, 0, pad_rows), value=torch.nan)
    for mine, plain in zip(
        functions("norm_modulate_backward")(wide, x, scale, 1e-6, True),
        functions("norm_modulate_backward")(grad, x, scale, 1e-6, True),
    ):
        assert torch.equal(mine, plain)


def test_the_reference_is_layer_norm_and_its_gradients() -> None:
    x, scale, shift = (
        torch.randn(2, 5, 7).double(),
        torch.randn(2, 7).double(),
        torch.randn(2, 7).double(),
    )
    inputs = [t.requires_grad_() for t in (x, scale, shift)]
    expected = F.layer_norm(x, (7,), eps=1e-6) * (1 + scale[:, None]) + shift[:, None]
    torch.testing.assert_close(norm_modulate(*inputs), expected)
    upstream = torch.randn(2, 5, 7).double()
    for mine, theirs in zip(
        torch.autograd.grad(norm_modulate(*inputs), inputs, upstream),
        torch.autograd.grad(expected, inputs, upstream),
    ):
        torch.testing.assert_close(mine, theirs)


def test_the_residual_stream_and_its_norm() -> None:
    """The gradient is the sum of the gradients through both outputs."""
    x, scale, shift = torch.randn(2, 5, 8), torch.randn(2, 8), torch.randn(2, 8)
    inputs = [t.double().requires_grad_() for t in (x, scale, shift)]
    same, out = residual_norm(*inputs, pad=2, pad_rows=1)
    assert torch.equal(same, inputs[0])
    assert torch.equal(out, norm_modulate(*inputs, pad=2, pad_rows=1))
    upstream = torch.randn_like(same), torch.randn_like(out)
    expected = torch.autograd.grad(
        (inputs[0] * 1, norm_modulate(*inputs, pad=2, pad_rows=1)), inputs, upstream
    )
    for mine, theirs in zip(torch.autograd.grad((same, out), inputs, upstream), expected):
        torch.testing.assert_close(mine, theirs)


def test_gated_norm_leaves_room(kernels: tuple[Kernels, torch.device]) -> None:
    functions, device = kernels
    x, y, gate, scale, shift, _ = inputs("gated_norm", (3, 10, 10), (FP32,), device)
    grad_sum, grad = torch.randn_like(x), torch.randn_like(x)
    total, out = functions("gated_norm")(x, y, gate, scale, shift, 1e-6, 6)
    assert out.shape == (3, 10, 16)
    for mine, plain in zip(
        (total, out[..., :10]), functions("gated_norm")(x, y, gate, scale, shift, 1e-6)
    ):
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
        torch.autograd.grad(actual, inputs, upstream),
        torch.autograd.grad(expected, inputs, upstream),
    ):
        torch.testing.assert_close(mine, theirs)


def test_a_gated_sum_is_the_plain_formula_and_its_gradients() -> None:
    """With a gate that is trained, and with a frozen one, for which y is not kept."""
    x, y, gate = (
        torch.randn(*size).double().requires_grad_() for size in ((2, 5, 7), (2, 5, 7), (2, 7))
    )
    upstream = torch.randn_like(x)
    expected, actual = x + gate[:, None] * y, gated_sum(x, y, gate)
    torch.testing.assert_close(actual, expected)
    exact = torch.autograd.grad(expected, [x, y, gate], upstream)
    for mine, theirs in zip(torch.autograd.grad(actual, [x, y, gate], upstream), exact):
        torch.testing.assert_close(mine, theirs)
    for mine, theirs in zip(
        torch.autograd.grad(gated_sum(x, y, gate.detach()), [x, y], upstream), exact
    ):
        torch.testing.assert_close(mine, theirs)
    with pytest.raises(
        ValueError, match=r"y: expected torch.float64 \[2, 5, 7\], got torch.float64 \[2, 4, 7\]"
    ):
        gated_sum(x, y[:, :4], gate)


def test_the_reference_is_that_of_diffusers() -> None:
    """Compare queries, keys and values of both streams, and all gradients; video and text are
    separate tensors."""
    joint, text, *weights, rotary, eps = inputs("norm_rotate", (2, 5, 3, 4, 16), (FP32,))
    joint, text = joint.double(), text.double().requires_grad_()
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


def test_text_that_the_joint_tensor_already_holds() -> None:
    """The same bits as for text that is written there, and the gradient of its rows stays in
    them."""
    joint, text, *weights, rotary, eps = inputs("norm_rotate", (2, 5, 3, 4, 16), (FP32,))
    whole = torch.cat([joint[:, :5], text], dim=1)
    leaves = [t.requires_grad_() for t in (joint, text, whole, *weights)]
    written = norm_rotate(joint * 1, text, *weights, rotary, eps)
    held = norm_rotate(whole * 1, None, *weights, rotary, eps)
    upstream = [torch.randn_like(t) for t in written]
    ours, theirs = (
        torch.autograd.grad(outputs, leaves, upstream, allow_unused=True)
        for outputs in (held, written)
    )
    for mine, given in zip(held, written):
        assert torch.equal(mine, given)
    assert torch.equal(ours[2], torch.cat([theirs[0][:, :5], theirs[1]], dim=1))
    for mine, given in zip(ours[3:], theirs[3:]):
        assert torch.equal(mine, given)


def rotated_by_diffusers(x: Tensor, attention: WanAttention, tables: list[Tensor]) -> list[Tensor]:
    """Return the queries, keys and values that diffusers' processor gives attention."""
    given: list[Tensor] = []

    def attend(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
        given.extend([query, key, value])
        return value

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformer_wan, "dispatch_attention_fn", attend)
        attention(x, rotary_emb=tables)
    return given


@pytest.mark.parametrize("implementation", ["reference", "fused"])
@pytest.mark.parametrize("heads", [1, 3, 4])
def test_all_heads_together_are_those_of_diffusers(heads: int, implementation: str) -> None:
    """Its norm is torch.nn.RMSNorm over all heads at once. Compare values and all gradients."""
    wide = implementation == "reference"
    dtype = torch.float64 if wide else FP32
    width, tokens, eps = 12, 8, 1e-5
    processor = WanAttnProcessor()
    attention = WanAttention(heads * width, heads, width, eps, processor=processor).to(dtype)
    assert type(attention.norm_q) is torch.nn.RMSNorm
    norms = [attention.norm_q.weight, attention.norm_k.weight]
    for weight in norms:
        torch.nn.init.normal_(weight)
    cos, sin = WanRotaryPosEmbed(width, (1, 1, 1), 16)(torch.zeros(1, 1, 2, 2, 2))
    rotary = torch.stack([cos[0, :, 0, ::2], sin[0, :, 0, 1::2]], dim=-1).float()
    # the same table for both: ours is float32
    tables = [part.repeat_interleave(2, dim=-1)[None, :, None] for part in rotary.unbind(-1)]
    x = torch.randn(2, tokens, heads * width, dtype=dtype, requires_grad=True)
    projections = [attention.to_q, attention.to_k, attention.to_v]
    parameters = [p for layer in projections for p in layer.parameters()]
    wanted = [x, *norms, *parameters]

    expected = rotated_by_diffusers(x, attention, tables)
    joint = torch.stack([layer(x) for layer in projections], dim=2)
    query, key = (weight.view(heads, width) for weight in norms)
    actual = norm_rotate(
        joint.unflatten(-1, (heads, width)), None, query, None, key, None, rotary, eps
    )
    upstream = [torch.randn_like(t) for t in expected]
    tolerance = {"rtol": 1e-10, "atol": 1e-10} if wide else {"rtol": 1e-4, "atol": 1e-5}
    for mine, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, theirs, **tolerance)
    gradients = torch.autograd.grad(actual, wanted, upstream)
    for mine, theirs in zip(
        gradients, torch.autograd.grad(expected, wanted, upstream), strict=True
    ):
        torch.testing.assert_close(mine, theirs, **tolerance)


@pytest.mark.parametrize("together", [(), (4,)], ids=["each head", "all heads"])
def test_without_text_nothing_of_it_is_needed(together: tuple[int, ...]) -> None:
    """The same bits as with no text tokens; nothing is asked of weights that do not exist."""
    shape = (2, 9, 0, 4, 16, *together)
    joint, text, *weights, rotary, eps = inputs("norm_rotate", shape, (BF16, FP32))
    video = [weights[0], weights[2]]
    leaves = [joint, *video]
    for leaf in leaves:
        leaf.requires_grad_()
    expected = norm_rotate(joint * 1, text, *weights, rotary, eps)
    actual = norm_rotate(joint * 1, None, video[0], None, video[1], None, rotary, eps)
    assert all(map(torch.equal, actual, expected))
    upstream = [torch.randn_like(t) for t in expected]
    mine, theirs = (torch.autograd.grad(out, leaves, upstream) for out in (actual, expected))
    assert all(gradient.any() for gradient in mine)
    assert all(map(torch.equal, mine, theirs))


def test_one_head_normalised_by_itself_or_together_is_the_same() -> None:
    *tensors, rotary, eps = inputs("norm_rotate", (2, 5, 3, 1, 16), (FP32,))
    joint, text, *weights = tensors
    alone = norm_rotate(joint.clone(), text, *weights, rotary, eps)
    together = norm_rotate(joint.clone(), text, *(w[None] for w in weights), rotary, eps)
    assert all(map(torch.equal, alone, together))


def test_with_and_without_autograd_and_frozen_parts() -> None:
    """Rollout and training give the same bits; the backward skips the sums for frozen parts."""
    x, y = torch.randn(2, 9, 64), torch.randn(2, 9, 64)
    scale, shift = torch.randn(2, 64), torch.randn(2, 64)
    joint, text, *rest = inputs("norm_rotate", (2, 9, 3, 4, 16), (FP32,))
    *_, rotary, eps = rest
    row = torch.randn(4, 16)

    def results() -> list[Tensor]:
        return [
            norm_modulate(x, scale, shift),
            *residual_norm(x, scale, shift),
            *gated_norm(x, y, scale, scale, shift),
            *norm_rotate(joint * 1, text, *rest),
            *norm_rotate(joint[:, :9] * 1, None, row, None, row, None, rotary, eps),
        ]

    with torch.no_grad():
        plain = results()
    for leaf in (x, y, joint, text):
        leaf.requires_grad_()
    trained = results()
    assert all(torch.equal(a, b) for a, b in zip(plain, trained, strict=True))
    calls: list[tuple[str, object]] = []

    class Spy(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            if "backward" in func.name() and func.namespace == "sage_fast":
                calls.append(
                    (func.name().removeprefix("sage_fast::"), sum(t.numel() == 0 for t in out))
                )
            return out

    with Spy():
        torch.autograd.backward(trained, [torch.randn_like(t) for t in trained])
    empty = [
        ("gated_norm_backward", 3),
        *[("norm_modulate_backward", 2)] * 2,
        *[("norm_rotate_backward", 1)] * 2,
    ]
    assert sorted(calls) == empty
    assert all(leaf.grad is not None for leaf in (x, y, joint, text))
    scale.requires_grad_()
    gated_norm(x, y, scale, shift, shift)[0].sum().backward()
    assert scale.grad is not None


class RotateCalls(TorchDispatchMode):
    """Counts the calls of `norm_rotate`."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.sage_fast.norm_rotate.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("text_tokens", [3, 0], ids=["text", "no text"])
@pytest.mark.parametrize("together", [(), (4,)], ids=["each head", "all heads"])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_attention_without_kept_queries_and_keys(
    dtype: torch.dtype,
    together: tuple[int, ...],
    text_tokens: int,
    kernels: tuple[Kernels, torch.device],
) -> None:
    """Both are freed with the forward. Each backward computes them again once; same gradients to
    the bit."""
    device = kernels[1]
    shape = (2, 9, text_tokens, 4, 16, *together)
    joint, text, *weights, rotary, eps = inputs("norm_rotate", shape, (dtype,), device)
    if text_tokens == 0:
        text = weights[1] = weights[3] = None
    wanted = [leaf for leaf in (joint, text, *weights) if leaf is not None]
    for leaf in wanted:
        leaf.requires_grad_()
    upstream = torch.randn_like(joint[:, :, 0])

    def attended(*, recomputes: bool) -> tuple[Tensor, list[StorageWeakRef]]:
        query, key, value = norm_rotate(joint * 1, text, *weights, rotary, eps)
        storages = [StorageWeakRef(t.untyped_storage()) for t in (query, key)]
        if not recomputes:
            return ATTENTION["sdpa"](query, key, value), storages
        with recomputed_in_backward(query, key):
            return ATTENTION["sdpa"](query, key, value), storages

    (plain, kept), (lean, freed) = attended(recomputes=False), attended(recomputes=True)
    assert torch.equal(plain, lean)
    assert not any(storage.expired() for storage in kept)
    assert all(storage.expired() for storage in freed)
    expected = torch.autograd.grad(plain, wanted, upstream)
    for retain in (True, False):
        with RotateCalls() as calls:
            found = torch.autograd.grad(lean, wanted, upstream, retain_graph=retain)
        assert calls.count == 1
        assert all(map(torch.equal, found, expected))


def test_attention_without_gradients_is_left_as_it_is() -> None:
    joint, text, *rest = inputs("norm_rotate", (2, 9, 3, 4, 16), (FP32,))
    query, key, value = norm_rotate(joint * 1, text, *rest)
    with recomputed_in_backward(query, key):
        squares = value.requires_grad_().square()
    squares.sum().backward()
    assert value.grad is not None


def test_bad_inputs() -> None:
    x, row = torch.zeros(2, 3, 8), torch.zeros(2, 8)
    with pytest.raises(ValueError, match=r"scale: expected \[2, 8\], got \[1, 8\]"):
        norm_modulate(x, row[:1], row)
    with pytest.raises(ValueError, match=r"x: expected \[B, S, d\], got \[2, 8\]"):
        norm_modulate(row, row, row)
    with pytest.raises(ValueError, match=r"gate: expected \[2, 8\], got \[2, 7\]"):
        gated_norm(x, x, row[:, :7], row, row)
    with pytest.raises(
        ValueError, match=r"y: expected torch.float32 \[2, 3, 8\], got torch.bfloat16"
    ):
        gated_norm(x, x.bfloat16(), row, row, row)
    with pytest.raises(ValueError, match=r"expected at least 0, got {'pad': 0, 'pad_rows': -1}"):
        norm_modulate(x, row, row, pad_rows=-1)
    with pytest.raises(ValueError, match=r"expected at least 0, got {'pad': -1}"):
        gated_norm(x, x, row, row, row, pad=-1)
    joint, text, *weights, rotary, _ = inputs("norm_rotate", (2, 3, 1, 2, 8), (FP32,))
    with pytest.raises(
        ValueError, match=r"text: expected torch.float32 \[2, 1, 3, 2, 8\], got torch.bfloat16"
    ):
        norm_rotate(joint, text.bfloat16(), *weights, rotary)
    with pytest.raises(ValueError, match=r"text: expected torch.float32 \[2, 2, 3, 2, 8\]"):
        norm_rotate(joint, text, *weights, rotary[:2])
    with pytest.raises(
        ValueError, match=r"rotary: expected float32 \[N, 4, 2\], got torch.float32 \[3, 3, 2\]"
    ):
        norm_rotate(joint, text, *weights, rotary[:, :3])
    with pytest.raises(ValueError, match=r"text_key: expected \[8\], got \[7\]"):
        norm_rotate(joint, text, *weights[:3], weights[3][:7], rotary)
    with pytest.raises(
        ValueError,
        match=r"video_query: expected \[8\] or, for all heads together, \[2, 8\], got \[16\]",
    ):
        norm_rotate(joint, text, *(w.repeat(2) for w in weights), rotary)
    rows = [w.repeat(2, 1) for w in weights]
    with pytest.raises(ValueError, match=r"video_key: expected \[2, 8\], got \[8\]"):
        norm_rotate(joint, text, *rows[:2], *weights[2:], rotary)
    with pytest.raises(ValueError, match="text_query, text_key: expected both or neither"):
        norm_rotate(joint, text, *weights[:3], None, rotary)
    without = weights[0], None, weights[2], None
    for given in (text, None):
        with pytest.raises(ValueError, match="text_key: expected weights for 1 text tokens"):
            norm_rotate(joint, given, *without, rotary)
    with pytest.raises(ValueError, match="even D"):
        norm_rotate(joint[..., :7], text[..., :7], *(w[:7] for w in weights), rotary)
    with pytest.raises(ValueError, match="rotary: expected at most 2 rows, got 3"):
        norm_rotate(joint[:, :2], None, *weights, rotary)
