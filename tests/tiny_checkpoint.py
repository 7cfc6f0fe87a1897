"""Complete HunyuanVideo 1.5 checkpoints of a few megabytes: every class is the published one, only
the sizes differ.

`python tests/tiny_checkpoint.py FOLDER` writes it; `model.path = FOLDER` then takes every path of a
real model.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLHunyuanVideo15,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideo15ImageToVideoPipeline,
    HunyuanVideo15Pipeline,
    HunyuanVideo15Transformer3DModel,
)
from diffusers.guiders import ClassifierFreeGuidance
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    ByT5Tokenizer,
    Qwen2_5_VLTextConfig,
    Qwen2_5_VLTextModel,
    Qwen2Tokenizer,
    SiglipImageProcessor,
    SiglipVisionConfig,
    SiglipVisionModel,
    T5Config,
    T5EncoderModel,
)

TEXT_DIM = 32
GLYPH_DIM = 24
IMAGE_DIM = 16
IMAGE_PATCHES = 3
"""On each side of an image, of 14 pixels."""
GUIDANCE_SCALE = 6.0
SHIFT = 5.0
PREFIX_TOKENS = 108
"""The pipeline drops that many tokens, which is what the published tokenizer makes of its system
message."""

# The system turn is PREFIX_TOKENS tokens whatever it says, so that the crop ends exactly where the
# prompt begins.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ '<|system|>' * " + str(PREFIX_TOKENS) + " }}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>' }}{% endif %}"
)
MERGES = (("t", "h"), ("th", "e"), ("Ġ", "a"), ("Ġ", "the"), ("i", "n"), ("in", "g"))
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|system|>")


def tiny_transformer(
    width_of_a_head: int = 16, task: str = "t2v", *, step_distilled: bool = False
) -> HunyuanVideo15Transformer3DModel:
    """2 heads, 2 blocks, random weights; 4.4 M parameters, nearly all in the projection with a
    fixed width of 2048."""
    assert width_of_a_head % 8 == 0
    quarter = width_of_a_head // 4
    return HunyuanVideo15Transformer3DModel(
        in_channels=65,
        out_channels=32,
        num_attention_heads=2,
        attention_head_dim=width_of_a_head,
        num_layers=2,
        num_refiner_layers=1,
        text_embed_dim=TEXT_DIM,
        text_embed_2_dim=GLYPH_DIM,
        image_embed_dim=IMAGE_DIM,
        rope_axes_dim=(quarter, (width_of_a_head - quarter) // 2, (width_of_a_head - quarter) // 2),
        target_size=64,
        task_type=task,
        use_meanflow=step_distilled,
    )


def tiny_tokenizer() -> Qwen2Tokenizer:
    """Byte-level BPE with six merges."""
    pieces = [*sorted(ByteLevel.alphabet()), *("".join(pair) for pair in MERGES), *SPECIAL]
    return Qwen2Tokenizer(
        vocab={piece: i for i, piece in enumerate(pieces)},
        merges=list(MERGES),
        chat_template=CHAT_TEMPLATE,
        extra_special_tokens=list(SPECIAL[1:]),
        padding_side="right",
    )


def write_tiny_checkpoint(
    folder: Path, seed: int = 0, task: str = "t2v", *, step_distilled: bool = False
) -> Path:
    """Write the pipeline of a task with random weights to `folder`; returns the folder."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokenizer = tiny_tokenizer()
        text_encoder = Qwen2_5_VLTextModel(
            Qwen2_5_VLTextConfig(
                vocab_size=len(tokenizer),
                hidden_size=TEXT_DIM,
                intermediate_size=48,
                num_hidden_layers=3,
                num_attention_heads=2,
                num_key_value_heads=1,
                rope_parameters={
                    "rope_type": "default",
                    "rope_theta": 1e4,
                    "mrope_section": [2, 3, 3],
                },
                initializer_range=0.2,
                bos_token_id=None,
                eos_token_id=0,
            )
        )
        tokenizer_2 = ByT5Tokenizer()
        text_encoder_2 = T5EncoderModel(
            T5Config(
                vocab_size=len(tokenizer_2),
                d_model=GLYPH_DIM,
                d_kv=8,
                d_ff=32,
                num_layers=1,
                num_heads=2,
                feed_forward_proj="gated-gelu",
            )
        )
        vae = AutoencoderKLHunyuanVideo15(
            latent_channels=32,
            block_out_channels=(8, 16, 16, 32, 64),
            layers_per_block=1,
            spatial_compression_ratio=16,
            temporal_compression_ratio=4,
        )
        transformer = tiny_transformer(task=task, step_distilled=step_distilled)
        # The default initialisation leaves the text all but without effect on the velocity; tests
        # want to see it.
        for module in (
            transformer.context_embedder,
            transformer.context_embedder_2,
            transformer.transformer_blocks,
        ):
            for p in module.parameters():
                if p.ndim == 2:
                    torch.nn.init.normal_(p, std=1.5 / p.shape[1] ** 0.5)
        pipeline, images = (
            (HunyuanVideo15ImageToVideoPipeline, tiny_siglip())
            if task == "i2v"
            else (HunyuanVideo15Pipeline, {})
        )
    pipeline(
        text_encoder=text_encoder.eval(),
        tokenizer=tokenizer,
        transformer=transformer.eval(),
        vae=vae.eval(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=SHIFT),
        text_encoder_2=text_encoder_2.eval(),
        tokenizer_2=tokenizer_2,
        guider=ClassifierFreeGuidance(guidance_scale=1.0 if step_distilled else GUIDANCE_SCALE),
        **images,
    ).save_pretrained(folder)
    return folder


def tiny_siglip() -> dict[str, Any]:
    """The parts of an image-to-video pipeline that read its image."""
    size = 14 * IMAGE_PATCHES
    config = SiglipVisionConfig(
        hidden_size=IMAGE_DIM, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        image_size=size,
        patch_size=14,
    )  # fmt: skip
    extractor = SiglipImageProcessor(size={"height": size, "width": size})
    return {"image_encoder": SiglipVisionModel(config).eval(), "feature_extractor": extractor}


if __name__ == "__main__":
    print(write_tiny_checkpoint(Path(sys.argv[1])))
