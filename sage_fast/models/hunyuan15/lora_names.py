"""Names of HunyuanVideo 1.5's layers outside diffusers: in the checkpoint as Tencent published it,
and in ComfyUI.

Tencent keeps the queries, keys and values of a block apart and fuses those of the text refiner.
ComfyUI fuses both.
"""

from __future__ import annotations

import re

from sage_fast.models.lora.export_target import ExportTarget
from sage_fast.util.errors import UserError

PREFIX = "diffusion_model."
"""Stands in front of every layer's name: ComfyUI, diffusion-pipe, musubi-tuner and mmgp (Wan2GP)
ask for it."""

BLOCK = {
    "norm1.linear": "img_mod.linear",
    "norm1_context.linear": "txt_mod.linear",
    **{f"attn.to_{part}": f"img_attn_{part}" for part in "qkv"},
    **{f"attn.add_{part}_proj": f"txt_attn_{part}" for part in "qkv"},
    "attn.to_out.0": "img_attn_proj",
    "attn.to_add_out": "txt_attn_proj",
    "ff.net.0.proj": "img_mlp.fc1",
    "ff.net.2": "img_mlp.fc2",
    "ff_context.net.0.proj": "txt_mlp.fc1",
    "ff_context.net.2": "txt_mlp.fc2",
}
REFINER_BLOCK = {
    **{f"attn.to_{part}": f"self_attn_{part}" for part in "qkv"},
    "attn.to_out.0": "self_attn_proj",
    "ff.net.0.proj": "mlp.fc1",
    "ff.net.2": "mlp.fc2",
    "norm_out.linear": "adaLN_modulation.1",
}
LISTS = {
    "transformer_blocks": ("double_blocks", BLOCK),
    "context_embedder.token_refiner.refiner_blocks": (
        "txt_in.individual_token_refiner.blocks",
        REFINER_BLOCK,
    ),
}
REST = {
    "x_embedder.proj": "img_in.proj",
    "time_embed.timestep_embedder.linear_1": "time_in.mlp.0",
    "time_embed.timestep_embedder.linear_2": "time_in.mlp.2",
    "time_embed.timestep_embedder_r.linear_1": "time_r_in.mlp.0",
    "time_embed.timestep_embedder_r.linear_2": "time_r_in.mlp.2",
    "context_embedder.time_text_embed.timestep_embedder.linear_1": "txt_in.t_embedder.mlp.0",
    "context_embedder.time_text_embed.timestep_embedder.linear_2": "txt_in.t_embedder.mlp.2",
    "context_embedder.time_text_embed.text_embedder.linear_1": "txt_in.c_embedder.linear_1",
    "context_embedder.time_text_embed.text_embedder.linear_2": "txt_in.c_embedder.linear_2",
    "context_embedder.proj_in": "txt_in.input_embedder",
    **{f"context_embedder_2.linear_{i}": f"byt5_in.fc{i}" for i in (1, 2, 3)},
    "image_embedder.linear_1": "vision_in.proj.1",
    "image_embedder.linear_2": "vision_in.proj.3",
    "norm_out.linear": "final_layer.adaLN_modulation.1",
    "proj_out": "final_layer.linear",
}
SWAPPED = "norm_out.linear"
"""Its rows are (scale, shift) in diffusers and (shift, scale) elsewhere."""

COMFYUI = (
    (r"_attn_(qkv|proj)$", r"_attn.\1"),
    (r"_mod\.linear$", r"_mod.lin"),
    (r"mlp\.fc1$", "mlp.0"),
    (r"mlp\.fc2$", "mlp.2"),
    (r"(time_in|time_r_in|t_embedder)\.mlp\.0$", r"\1.in_layer"),
    (r"(time_in|time_r_in|t_embedder)\.mlp\.2$", r"\1.out_layer"),
    (r"c_embedder\.linear_1$", "c_embedder.in_layer"),
    (r"c_embedder\.linear_2$", "c_embedder.out_layer"),
)
"""What ComfyUI replaces in a name, one rule for each."""


def original(layer: str) -> ExportTarget:
    """Target of a diffusers layer in the checkpoint as Tencent published it.

    Raises:
        UserError: there is no such layer.
    """
    return _target(layer, fused="self")


def comfyui(layer: str) -> ExportTarget:
    """Target of a diffusers layer in ComfyUI and diffusion-pipe.

    Raises:
        UserError: there is no such layer.
    """
    target = _target(layer, fused="self|img|txt")
    name = target.layer
    for pattern, replacement in COMFYUI:
        name, count = re.subn(pattern, replacement, name)
        if count:
            break
    return target._replace(layer=name)


def _target(layer: str, *, fused: str) -> ExportTarget:
    names, prefix, rest = REST, PREFIX, layer
    found = re.fullmatch(r"(.*?)\.(\d+)\.(.+)", layer)
    if found and found[1] in LISTS:
        (theirs, names), rest = LISTS[found[1]], found[3]
        prefix += f"{theirs}.{found[2]}."
    if rest not in names:
        raise UserError(f"{layer!r}: HunyuanVideo 1.5 has no layer of this name outside diffusers")
    name = prefix + names[rest]
    if qkv := re.fullmatch(rf"(.*\.(?:{fused})_attn_)([qkv])", name):
        return ExportTarget(qkv[1] + "qkv", "qkv".index(qkv[2]), 3)
    return ExportTarget(name, swaps_halves=layer == SWAPPED)
