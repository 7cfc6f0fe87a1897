"""diffusers' own forward and decode behind our interfaces: the baseline of benchmarks and tests.

It runs in our process, so cuBLAS sums its matmuls in float32 too (`local_device`), where PyTorch's
default need not.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from diffusers import AutoencoderKLHunyuanVideo15, HunyuanVideo15Transformer3DModel
from diffusers.models.attention_dispatch import (
    AttentionBackendName,
    _AttentionBackendRegistry,
    _check_attention_backend_requirements,
    _maybe_download_kernel_for_backend,
    dispatch_attention_fn,
)
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.transformers.transformer_hunyuan_video15 import HunyuanVideo15AttnProcessor2_0
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from sage_fast.models.attention.backends import ATTENTION, REFERENCE, Attention, check_attention
from sage_fast.models.hunyuan15.conditioning import TextEmbedding
from sage_fast.models.hunyuan15.decode import VideoDecoder
from sage_fast.models.hunyuan15.encoder import IMAGE_TOKENS
from sage_fast.models.hunyuan15.policy import HunyuanVideo15Policy
from sage_fast.testbed.tiny_model import allow_batches

PADDED_TEXT, PADDED_GLYPHS = 1000, 256
"""Token counts to which the published pipeline pads a prompt; without an image, that has masked
tokens too."""

CUDNN = "_native_cudnn"
FLASH3 = "_flash_3_varlen_hub"
FLASH4 = "flash_4_hub"
"""Attention backends by their names in diffusers. `FLASH3` takes a mask, `FLASH4` takes none."""

LOCAL_FLASH4 = "flash"
INSTALLED = {LOCAL_FLASH4: "flash4"}
"""Name in diffusers' registry -> row of `ATTENTION` that `load_kernel` puts there: the
FlashAttention 4 that is installed here. By that name diffusers would call FlashAttention 2, which
no path needs."""

STOCK: dict[str, dict[str, Any]] = {
    "stock": {},
    "stock compiled": {"compiled": True},
    "stock padded": {"padded": True},
    "stock cudnn": {"kernel": CUDNN},
    "stock cudnn compiled": {"kernel": CUDNN, "compiled": True},
    "stock flash3 compiled": {"kernel": FLASH3, "compiled": True},
    "tuned": {"kernel": CUDNN, "unmasked": True},
    "tuned compiled": {"kernel": CUDNN, "unmasked": True, "compiled": True},
    "tuned flash4 compiled": {"kernel": FLASH4, "unmasked": True, "compiled": True},
    "local flash4 compiled": {"kernel": LOCAL_FLASH4, "unmasked": True, "compiled": True},
}
"""Path -> how it runs diffusers' forward (`StockPolicy`). `stock` is diffusers as it comes, with
masked attention; `tuned` is without the mask, by cuDNN's attention on a GPU. `local` is `tuned` by
the kernel that our own forward takes, for a machine that cannot reach the Hub."""

MERGED = {
    f"{path} merged": path
    for path in (
        "tuned compiled",
        "tuned flash4 compiled",
        "stock flash3 compiled",
        "local flash4 compiled",
    )
}
"""Path of a rollout whose LoRA is merged into the weights -> its path in `STOCK`. It cannot train,
and in bfloat16 it rounds a young adapter away (tests/test_merged.py)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextBatch:
    """A batch of prompts: `text [B, L, D]`, `glyphs [B, L2, D2]`, and bool masks `[B, L]`, `[B,
    L2]`.

    A mask is None if all lengths are equal. With images: `images [B, N, D3]` and `frames [B, C, 1,
    H, W]`.
    """

    text: Tensor
    text_mask: Tensor | None
    glyphs: Tensor
    glyphs_mask: Tensor | None
    images: Tensor | None = None
    frames: Tensor | None = None


def pad(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """Stack `[L, ...]` tensors, zero-padded, with a bool mask `[B, max L]`; the mask is None for
    equal lengths."""
    lengths = [len(row) for row in rows]
    if min(lengths) == max(lengths):
        return torch.stack(list(rows)), None
    padded = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
    mask = torch.arange(max(lengths))[None, :] < torch.tensor(lengths)[:, None]
    return padded, mask.to(padded.device)


def collate(
    embeddings: Sequence[TextEmbedding], device: torch.device, dtype: torch.dtype
) -> TextBatch:
    """Stack prompts, padded to the longest of them, on `device` in `dtype`."""
    text, text_mask = pad([embedding.text.to(device, dtype) for embedding in embeddings])
    glyphs, glyphs_mask = pad([embedding.glyphs.to(device, dtype) for embedding in embeddings])

    def stack(tensors: Sequence[Tensor | None]) -> Tensor | None:
        found = [tensor for tensor in tensors if tensor is not None]
        return torch.stack(found).to(device, dtype) if found else None

    return TextBatch(
        text=text,
        text_mask=text_mask,
        glyphs=glyphs,
        glyphs_mask=glyphs_mask,
        images=stack([embedding.image for embedding in embeddings]),
        frames=stack([embedding.frame for embedding in embeddings]),
    )


@dataclasses.dataclass(frozen=True)
class StockConditioning:
    """Inputs of the stock forward, which computes everything else in every forward."""

    sigma: Tensor
    text: TextBatch
    negative: StockConditioning | None = None
    end: Tensor | None = None


@dataclasses.dataclass(frozen=True)
class StockSchedule:
    sigmas: Tensor
    ends: Tensor | None
    text: TextBatch
    negative: StockSchedule | None = None

    def at(self, steps: Tensor) -> StockConditioning:
        sigma = self.sigmas[steps].expand(len(self.text.text))
        end = None if self.ends is None else self.ends[steps].expand(len(self.text.text))
        return StockConditioning(
            sigma, self.text, self.negative.at(steps) if self.negative else None, end
        )


@dataclasses.dataclass(frozen=True)
class StockTable:
    policy: StockPolicy
    sigmas: Tensor
    embeddings: Mapping[Any, TextEmbedding]

    def of(self, keys: Sequence[Any]) -> StockSchedule:
        texts = [self.embeddings[key] for key in keys]
        negatives = (
            [self.embeddings[text.negative] for text in texts] if self.policy.uses_guidance else []
        )
        ends = self.policy.step_ends(self.sigmas)
        negative = (
            StockSchedule(self.sigmas, ends, self.policy.batch(negatives)) if negatives else None
        )
        return StockSchedule(self.sigmas, ends, self.policy.batch(texts), negative)

    def at(self, keys: Sequence[Any], steps: Tensor) -> StockConditioning:
        return self.of(keys).at(steps)


def load_kernel(name: str) -> AttentionBackendName:
    """Return diffusers' attention backend of this name, after fetching its kernel if it has one on
    the Hub.

    Raises:
        Exception: whatever diffusers raises where the backend's package or kernel is missing; a
            `UserError` if that is the installed FlashAttention 4.
    """
    backend = AttentionBackendName(name)
    installed = INSTALLED.get(name)
    if installed is not None:
        check_attention(installed, torch.device("cuda"), torch.bfloat16)
        register_attention(backend, ATTENTION[installed])
        return backend
    # what `set_attention_backend` of a diffusers model does first
    _check_attention_backend_requirements(backend)
    _maybe_download_kernel_for_backend(backend)
    return backend


def register_attention(backend: AttentionBackendName, attention: Attention) -> None:
    """Let diffusers' registry call one of our attention kernels by the name of `backend`."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attention(query, key, value)

    _AttentionBackendRegistry.register(backend)(attend)


def merged_copy(transformer: HunyuanVideo15Transformer3DModel) -> HunyuanVideo15Transformer3DModel:
    """Return a transformer with weights of its own, into which the LoRA is merged."""
    for block in transformer.transformer_blocks:
        block._compiled_call_impl = None  # a compiled function cannot be copied
    copied = copy.deepcopy(transformer).requires_grad_(False)
    for module in copied.modules():
        if isinstance(module, BaseTunerLayer):
            module.merge()
    return copied


class UnmaskedProcessor:
    """Attention of a diffusers block, with its modules and its kernels but without a mask."""

    _attention_backend: Any = None

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        image_rotary_emb: Any,
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        def split(projection: Any, tokens: Tensor) -> Tensor:
            return projection(tokens).unflatten(2, (attn.heads, -1))

        query, key = (
            apply_rotary_emb(
                norm(split(projection, hidden_states)), image_rotary_emb, sequence_dim=1
            )
            for projection, norm in ((attn.to_q, attn.norm_q), (attn.to_k, attn.norm_k))
        )
        text_query, text_key = (
            norm(split(projection, encoder_hidden_states))
            for projection, norm in (
                (attn.add_q_proj, attn.norm_added_q),
                (attn.add_k_proj, attn.norm_added_k),
            )
        )
        value, text_value = (
            split(attn.to_v, hidden_states),
            split(attn.add_v_proj, encoder_hidden_states),
        )
        streams = (query, text_query), (key, text_key), (value, text_value)
        joint = [torch.cat(pair, dim=1) for pair in streams]
        out = dispatch_attention_fn(*joint, backend=self._attention_backend).flatten(2)
        video, text = out.split([hidden_states.shape[1], encoder_hidden_states.shape[1]], dim=1)
        return attn.to_out[0](video), attn.to_add_out(text)


class StockPolicy(HunyuanVideo15Policy):
    """The policy through diffusers' own forward.

    Several may share a transformer: each sets its attention and its blocks before a forward, and a
    recomputation during the backward finds them so.

    Args:
        padded: pad the text as the published pipeline does.
        kernel: name of diffusers' attention backend on a GPU; None: its own choice. On a CPU,
            PyTorch's attention stands in.
        unmasked: attend without a mask where texts have one length and no padding, so that it hides
            nothing.
        compiled: compile the blocks by `torch.compile`, as `compile_repeated_blocks` of diffusers
            does.
    """

    def __init__(
        self,
        transformer: HunyuanVideo15Transformer3DModel,
        *,
        padded: bool = False,
        kernel: str | None = None,
        unmasked: bool = False,
        compiled: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(transformer, **options)
        self.padded = padded
        # The stock forward hands its fp32 timestep to an embedder that may have bf16 weights.
        transformer.time_embed.timestep_embedder.register_forward_pre_hook(_match_weight_dtype)
        for module in transformer.modules():
            if isinstance(module, BaseTunerLayer):
                module.cast_input_dtype_enabled = (
                    False  # else an adapter's dtype decides, not autocast
                )
        self.autocasts = any(p.dtype != self.dtype for p in transformer.parameters())
        self.masked: Any = HunyuanVideo15AttnProcessor2_0()
        self.unmasked: Any = UnmaskedProcessor() if unmasked and not padded else self.masked
        if kernel is not None:
            backend = self._backend(kernel)
            self.masked._attention_backend = backend
            self.unmasked._attention_backend = backend
        self.calls = [
            torch.compile(block._call_impl, dynamic=False) if compiled else None
            for block in transformer.transformer_blocks
        ]

    def _backend(self, kernel: str) -> AttentionBackendName | None:
        """Return diffusers' backend of this name; on a CPU what stands in for it, where None is
        diffusers' own choice."""
        if self.device.type == "cuda":
            return load_kernel(kernel)
        if kernel not in INSTALLED:
            return None
        # so that a rehearsal calls diffusers' registry as a GPU does
        backend = AttentionBackendName(kernel)
        register_attention(backend, ATTENTION[REFERENCE])
        return backend

    def velocity(self, x: Tensor, inputs: Any) -> Tensor:
        pads = inputs.text.text_mask is not None or inputs.text.glyphs_mask is not None
        for block, call in zip(self.transformer.transformer_blocks, self.calls):
            block.attn.processor = self.masked if pads else self.unmasked
            block._compiled_call_impl = call
        with torch.autocast(self.device.type, dtype=self.dtype, enabled=self.autocasts):
            end = None if inputs.end is None else 1000 * inputs.end
            return self.stock_forward(x.to(self.dtype), 1000 * inputs.sigma, inputs.text, end)

    def batch(self, texts: Sequence[TextEmbedding]) -> TextBatch:
        return collate(texts, self.device, self.dtype)

    def condition(
        self,
        sigma: Tensor,
        texts: Sequence[TextEmbedding],
        negatives: Sequence[TextEmbedding] | None = None,
        end: Tensor | None = None,
    ) -> Any:
        negative = (
            None if negatives is None else StockConditioning(sigma, self.batch(negatives), end=end)
        )
        return StockConditioning(sigma, self.batch(texts), negative, end)

    def conditioning_table(self, sigmas: Tensor, embeddings: Mapping[Any, TextEmbedding]) -> Any:
        return StockTable(self, sigmas.to(self.device, torch.float32), embeddings)

    def stock_forward(
        self, x: Tensor, timestep: Tensor, text: TextBatch, end: Tensor | None = None
    ) -> Tensor:
        config, batch, channels = self.transformer.config, len(x), x.shape[1]
        tokens, mask = _padded(text.text, text.text_mask, PADDED_TEXT if self.padded else 0)
        glyphs, glyphs_mask = _padded(
            text.glyphs, text.glyphs_mask, PADDED_GLYPHS if self.padded else 0
        )
        condition = x.new_zeros(batch, config.in_channels - channels, *x.shape[2:])
        images = x.new_zeros(batch, IMAGE_TOKENS if self.padded else 0, config.image_embed_dim)
        if text.images is not None and text.frames is not None:
            images, condition[:, :channels, :1] = text.images, text.frames
            condition[:, channels:, :1].fill_(1)
        return self.transformer(
            torch.cat([x, condition], dim=1), timestep, tokens, mask,
            encoder_hidden_states_2=glyphs,
            encoder_attention_mask_2=glyphs_mask, image_embeds=images, timestep_r=end,
            return_dict=False,
        )[0]  # fmt: skip


class StockDecoder(VideoDecoder):
    """diffusers' own decode. With `batches`, it patches the autoencoder, and decodes `BATCH` videos
    at once.

    Otherwise it decodes one video at a time.
    """

    BATCH = 8
    """Videos that `batches` decodes at once."""

    def __init__(self, vae: AutoencoderKLHunyuanVideo15, batches: bool) -> None:
        super().__init__(vae, channels_last=False)
        if batches:
            allow_batches(vae)
        else:
            vae.enable_slicing()

    @torch.no_grad()
    def __call__(self, latents: Tensor) -> Tensor:
        latents = latents.to(self.vae.dtype) / self.vae.config.scaling_factor
        batches = [
            self.vae.decode(batch, return_dict=False)[0] for batch in latents.split(self.BATCH)
        ]
        return (torch.cat(batches).float() * 0.5 + 0.5).clamp(0, 1).transpose(1, 2)


def _match_weight_dtype(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(arg.to(next(module.parameters()).dtype) for arg in args)


def _padded(tokens: Tensor, mask: Tensor | None, length: int) -> tuple[Tensor, Tensor]:
    if mask is None:
        mask = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
    extra = max(length - tokens.shape[1], 0)
    return (
        torch.nn.functional.pad(tokens, (0, 0, 0, extra)),
        torch.nn.functional.pad(mask, (0, extra)).to(torch.int64),
    )
