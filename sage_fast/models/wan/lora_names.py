"""Names of Wan's layers outside diffusers: in the checkpoint as Wan published it, which also
DiffSynth-Studio reads, and in ComfyUI, which puts a prefix before them."""

from __future__ import annotations

import re

from sage_fast.models.spec import ExportTarget
from sage_fast.util.errors import UserError

PREFIX = "diffusion_model."
"""Stands in front of every layer's name: ComfyUI, diffusion-pipe, musubi-tuner and Wan2GP ask for
it."""

BLOCK = {
    **{f"attn1.to_{part}": f"self_attn.{part}" for part in "qkv"},
    "attn1.to_out.0": "self_attn.o",
    **{f"attn2.to_{part}": f"cross_attn.{part}" for part in "qkv"},
    "attn2.to_out.0": "cross_attn.o",
    "ffn.net.0.proj": "ffn.0",
    "ffn.net.2": "ffn.2",
}
REST = {
    "condition_embedder.text_embedder.linear_1": "text_embedding.0",
    "condition_embedder.text_embedder.linear_2": "text_embedding.2",
    "condition_embedder.time_embedder.linear_1": "time_embedding.0",
    "condition_embedder.time_embedder.linear_2": "time_embedding.2",
    "condition_embedder.time_proj": "time_projection.1",
    "patch_embedding": "patch_embedding",
    "proj_out": "head.head",
}


def original(layer: str) -> ExportTarget:
    """Target of a diffusers layer in the checkpoint as Wan published it.

    Raises:
        UserError: there is no such layer.
    """
    found = re.fullmatch(r"blocks\.(\d+)\.(.+)", layer)
    if found is not None and found[2] in BLOCK:
        return ExportTarget(f"blocks.{found[1]}.{BLOCK[found[2]]}")
    if layer not in REST:
        raise UserError(f"{layer!r}: Wan has no layer of this name outside diffusers")
    return ExportTarget(REST[layer])


def comfyui(layer: str) -> ExportTarget:
    """Target of a diffusers layer in ComfyUI and diffusion-pipe.

    Raises:
        UserError: there is no such layer.
    """
    return ExportTarget(PREFIX + original(layer).layer)
