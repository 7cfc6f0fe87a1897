"""What a block with LoRA moves besides matmul and attention: passes over its tokens, counted by dispatch."""

from collections import Counter
from typing import Any

import pytest
import torch
from diffusers import HunyuanVideo15Transformer3DModel
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sage_fast.config.schema import ModelConfig
from sage_fast.models import lora_linear
from sage_fast.models.attention import ATTENTION
from sage_fast.models.hunyuan15.forward import TextToVideoForward
from sage_fast.models.hunyuan15.spec import HunyuanVideo15
from sage_fast.models.load import make_trainable

TOKENS, TEXT, WIDTH, HEAD, RANK = 2048, 32, 256, 16, 8
"""In the proportions of 480p with 81 frames, and of a head and of the default rank to the published width."""

MOVE_NOTHING = {
    "view", "_unsafe_view", "transpose", "t", "slice", "split_with_sizes", "split", "unsqueeze", "squeeze", "expand",
    "unbind", "detach", "alias", "select", "permute", "as_strided", "new_empty", "empty", "empty_like",
}  # fmt: skip
MATMULS = {"mm": (0, 1), "addmm": (1, 2), "addmm_": (1, 2), "bmm": (0, 1), "linear": (0, 1)}


class Traffic(TorchDispatchMode):
    """Bytes that operators read and write, by operator.

    Attention and matmuls are not counted, except a matmul with a factor as narrow as an adapter, which does no more
    work than a pass over its rows. An operator of ours reads its arguments and writes its results, once each.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in MOVE_NOTHING or "scaled_dot_product" in name:
            return out
        if name in MATMULS:
            left, right = (args[position] for position in MATMULS[name])
            if min(*left.shape[-2:], *right.shape[-2:]) > 3 * RANK:
                return out
            name = f"narrow {name}"
        # `out=` comes back as the result. An in-place operator reads and writes its tensor unless it replaces it.
        read = (args, {key: value for key, value in (kwargs or {}).items() if key != "out"})
        if name in ("copy_", "fill_", "zero_"):
            read = (args[1:], kwargs)
        if name.startswith("norm_rotate"):  # it does not touch the values in the joint tensor
            self.bytes[name] -= max(t.nbytes for t in args if isinstance(t, Tensor)) // 3
        self.bytes[name] += sum(t.nbytes for t in tree_leaves((read, out)) if isinstance(t, Tensor))
        return out

    @property
    def passes(self) -> dict[str, float]:
        """Traffic by operator; the unit is one read or write of the video tokens."""
        unit = TOKENS * WIDTH * torch.bfloat16.itemsize
        return {name: round(count / unit, 2) for name, count in self.bytes.most_common()}


def block_traffic() -> tuple[Traffic, Traffic]:
    """Traffic of the forward and the backward of a bfloat16 block with an adapter, in the published proportions."""
    transformer = HunyuanVideo15Transformer3DModel(
        num_attention_heads=WIDTH // HEAD, attention_head_dim=HEAD, num_layers=2, num_refiner_layers=1,
        rope_axes_dim=(4, 6, 6), text_embed_dim=8, text_embed_2_dim=8, image_embed_dim=8,
    )  # fmt: skip
    transformer.transformer_blocks.to(torch.bfloat16)
    make_trainable(HunyuanVideo15(), transformer, ModelConfig(lora_rank=RANK, lora_alpha=RANK))
    forward = TextToVideoForward(transformer, torch.bfloat16)
    forward.refresh()
    video, text = (torch.randn(1, count, WIDTH).bfloat16().requires_grad_() for count in (TOKENS, TEXT))
    modulation, rotary = torch.randn(1, 2, 6, WIDTH).bfloat16(), torch.randn(TOKENS, HEAD // 2, 2)
    # Gradients are returned, as inside a model, rather than accumulated in leaves.
    with Traffic() as there:
        outs = forward.blocks[0](video, text, modulation, None, rotary, ATTENTION["sdpa"], False)
    upstream = [torch.randn_like(out) for out in outs]
    trained = [p for p in forward.blocks[0].parameters() if p.requires_grad]
    with Traffic() as back:
        torch.autograd.grad(outs, [video, text, *trained], upstream)
    return there, back


def test_passes_of_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both directions take at most 60 % of the passes of the first version, 52 and 111.

    In that version each adapter was a matmul onto its layer's output; the gated residuals, the join of the values and
    the sums of gradients were passes of their own.

    Forward now: GELU 8, x read for each x A^T 7, norm_rotate 4, gated_norm 4, the last gated residual 3, the first
    norm 2, padding beside attention's output 2.

    Backward now: gradients read for the adapters' 17, their part of dx 14, GELU 12, norm_rotate 8,
    gated_norm 5, the first norm and the residual 4, the last gate 2, the join of attention's gradient 2.
    """
    monkeypatch.setattr(lora_linear, "padding_for", lambda rank, _: rank)  # as for the default rank, a multiple of 64
    forward, backward = block_traffic()
    assert sum(forward.passes.values()) <= 0.6 * 52, forward.passes
    assert sum(backward.passes.values()) <= 0.6 * 111, backward.passes
    assert forward.bytes["narrow mm"] > 0  # the adapters are counted
