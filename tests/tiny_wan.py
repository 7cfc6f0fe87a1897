"""Complete Wan checkpoints of a few megabytes: every class is the published one, only the sizes
differ.

`python -m tests.tiny_wan FOLDER [2.1 | 2.2]` writes one; `model.path = FOLDER` then takes every
path of a real model.
"""

import string
import sys
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLWan,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from transformers import T5TokenizerFast, UMT5Config, UMT5EncoderModel

TEXT_DIM = 32
SHIFT = 5.0
WORDS = ("▁a", "▁the", "▁red", "▁kite", "▁snow", "▁falls", "▁on", "▁otter")
VAES: dict[str, dict[str, Any]] = {
    "2.1": {
        "base_dim": 8,
        "z_dim": 16,
        "dim_mult": [1, 2, 2, 2],
        "num_res_blocks": 1,
    },
    "2.2": {
        "base_dim": 8,
        "decoder_base_dim": 8,
        "z_dim": 48,
        "dim_mult": [1, 2, 2, 2],
        "num_res_blocks": 1,
        "is_residual": True,
        "in_channels": 12,
        "out_channels": 12,
        "patch_size": 2,
        "scale_factor_spatial": 16,
        "latents_mean": [0.1] * 48,
        "latents_std": [0.7] * 48,
    },
}
"""Version -> arguments of its autoencoder. That of 2.2 works on patches of 2 x 2 pixels."""

SIZES = {"2.1": (64, 48), "2.2": (64, 96)}
"""Version -> (height, width) of small videos."""


def tiny_tokenizer() -> T5TokenizerFast:
    """A unigram model of letters and a few words."""
    special = [(piece, 0.0) for piece in ("<pad>", "</s>", "<unk>")]
    letters = [(piece, -9.0) for piece in ("▁", *string.ascii_letters, *string.punctuation)]
    return T5TokenizerFast(
        vocab=[*special, *letters, *((word, -4.0) for word in WORDS)], extra_ids=0
    )


def tiny_transformer(channels: int = 16, width_of_a_head: int = 24) -> WanTransformer3DModel:
    """2 heads, 2 blocks, random weights."""
    return WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=width_of_a_head,
        in_channels=channels,
        out_channels=channels,
        text_dim=TEXT_DIM,
        freq_dim=32,
        ffn_dim=96,
        num_layers=2,
    )


def write_tiny_wan(folder: Path, version: str = "2.1", seed: int = 0) -> Path:
    """Write the text-to-video pipeline of a version with random weights; return the folder."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokenizer = tiny_tokenizer()
        encoder = UMT5EncoderModel(
            UMT5Config(
                vocab_size=len(tokenizer),
                d_model=TEXT_DIM,
                d_kv=8,
                d_ff=48,
                num_layers=2,
                num_heads=4,
                feed_forward_proj="gated-gelu",
            )
        )
        vae = AutoencoderKLWan(**VAES[version])
        transformer = tiny_transformer(vae.config.z_dim)
        # The default initialisation leaves the text all but without effect on the velocity; tests
        # want to see it.
        for module in (transformer.condition_embedder.text_embedder, transformer.blocks):
            for p in module.parameters():
                if p.ndim == 2:
                    torch.nn.init.normal_(p, std=1.5 / p.shape[1] ** 0.5)
    WanPipeline(
        tokenizer=tokenizer,
        text_encoder=encoder.eval(),
        vae=vae.eval(),
        transformer=transformer.eval(),
        scheduler=UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=SHIFT
        ),
        expand_timesteps=version == "2.2",
    ).save_pretrained(folder)
    return folder


if __name__ == "__main__":
    print(write_tiny_wan(Path(sys.argv[1]), *sys.argv[2:3]))
