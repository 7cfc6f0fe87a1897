"""Tiny instances of the real HunyuanVideo 1.5 classes, small enough to be trained on a laptop
core."""

import functools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import diffusers
import torch
from diffusers import AutoencoderKLHunyuanVideo15, HunyuanVideo15Transformer3DModel
from diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15 import HunyuanVideo15AttnBlock
from diffusers.models.transformers.transformer_hunyuan_video15 import (
    HunyuanVideo15ByT5TextProjection,
)
from PIL import Image
from torch import Tensor
from transformers import SiglipImageProcessorPil, SiglipVisionModel

from sage_fast.config.schema import SamplingConfig
from sage_fast.models.encoders import fingerprint, load_network
from sage_fast.models.hub import progress_bars_of
from sage_fast.models.hunyuan15.conditioning import TextEmbedding
from sage_fast.models.hunyuan15.encoder import ENCODING, check_width, encode_image, try_images
from sage_fast.models.hunyuan15.spec import HunyuanVideo15
from sage_fast.models.interface import Encoder
from sage_fast.models.random_weights import is_random
from sage_fast.testbed import BASE, BASE_I2V
from sage_fast.testbed.text_encoder import TEXT_EMBED_DIM, embed
from sage_fast.util.encoders import grey_picture, reading
from sage_fast.util.errors import UserError
from sage_fast.util.images import read_image

LATENT_SHAPE = (32, 5, 4, 4)
"""As many channels as in the real model; of 17 frames, the first one alone, then four to a latent
frame."""


TINY: dict[str, Any] = {
    "num_attention_heads": 4,
    "attention_head_dim": 16,
    "num_layers": 3,
    "num_refiner_layers": 1,
    "text_embed_dim": TEXT_EMBED_DIM,
    "text_embed_2_dim": 8,
    "image_embed_dim": 8,
    "rope_axes_dim": (4, 6, 6),
    "target_size": 32,
    "task_type": "t2v",
}
"""Default arguments of `TestbedTransformer` that differ from the stock class's."""


class TestbedTransformer(HunyuanVideo15Transformer3DModel):
    """The stock transformer with `TINY` defaults and a second text projection whose hidden width is
    `text_embed_2_dim`.

    The stock class hard-codes a hidden width of 2048 there (7 M parameters, fifteen times the rest
    of this model). Nothing else differs, forward included.
    """

    __test__ = False  # the name begins with Test: keep pytest from collecting it

    # from_pretrained reads the names of the arguments.
    @functools.wraps(HunyuanVideo15Transformer3DModel.__init__)  # type: ignore[misc]
    def __init__(self, **config: Any) -> None:
        super().__init__(**TINY | config)
        width, inner = (
            self.config.text_embed_2_dim,
            self.config.num_attention_heads * self.config.attention_head_dim,
        )
        self.context_embedder_2 = HunyuanVideo15ByT5TextProjection(width, width, inner)


TINY_VAE: dict[str, Any] = {
    "latent_channels": LATENT_SHAPE[0],
    "block_out_channels": (8, 16, 32, 64),
    "layers_per_block": 1,
    "spatial_compression_ratio": 8,
    "temporal_compression_ratio": 4,
    "scaling_factor": 1.0,
}
"""Arguments of the autoencoder."""


def tiny_vae(scaling_factor: float = 1.0) -> AutoencoderKLHunyuanVideo15:
    """A stock video autoencoder with random weights: video [B, 3, 17, 32, 32] in [-1, 1] <-> [B,
    *LATENT_SHAPE]."""
    return AutoencoderKLHunyuanVideo15(**TINY_VAE | {"scaling_factor": scaling_factor})


def allow_batches(vae: AutoencoderKLHunyuanVideo15) -> AutoencoderKLHunyuanVideo15:
    """Patch the stock autoencoder to accept batches of more than one video; results are unchanged.

    Its attention mask has shape [B, S, S], which broadcasts against [B, 1, S, S] only for B = 1.
    The alternative without a patch is `enable_slicing()`, one video at a time.
    """
    for module in vae.modules():
        if isinstance(module, HunyuanVideo15AttnBlock):
            module.prepare_causal_attention_mask = _causal_mask
    return vae


def _causal_mask(
    n_frame: int, n_hw: int, dtype: torch.dtype, device: torch.device, batch_size: int | None = None
) -> Tensor:
    """Return bool [S, S], S = n_frame * n_hw: a position sees its own frame and all earlier
    ones."""
    frame = torch.arange(n_frame, device=device).repeat_interleave(n_hw)
    return frame[:, None] >= frame[None, :]


def load_vae(folder: Path = BASE) -> AutoencoderKLHunyuanVideo15:
    """Load the pre-trained autoencoder in float32 (stored as float16), in evaluation mode.

    To decode: `vae.decode(latents / vae.config.scaling_factor).sample` is a video [B, 3, 17, 32,
    32] in [-1, 1].
    """
    return allow_batches(
        AutoencoderKLHunyuanVideo15.from_pretrained(folder / "vae", torch_dtype=torch.float32)
    ).eval()


def load_image_encoder(
    folder: Path, vae: AutoencoderKLHunyuanVideo15, size: tuple[int, int]
) -> Callable[[Image.Image], dict[str, Tensor]]:
    """Load the image encoder of a folder into the stock pipeline, for videos of a (height, width):
    `encode_image`.

    Raises:
        UserError: it cannot be read, or fails on a grey picture.
    """
    start, device = f"model.path = {str(folder)!r}: cannot read the encoders", torch.device("cpu")
    with progress_bars_of(str(folder)), reading(start, "image_encoder"):
        tower = load_network(SiglipVisionModel, str(folder), "image_encoder", torch.float32)
    with reading(start, "feature_extractor"):
        features = SiglipImageProcessorPil.from_pretrained(folder / "feature_extractor")
    idle = (
        "text_encoder",
        "text_encoder_2",
        "tokenizer",
        "tokenizer_2",
        "transformer",
        "scheduler",
        "guider",
    )
    pipeline = diffusers.HunyuanVideo15ImageToVideoPipeline(
        vae=vae, image_encoder=tower, feature_extractor=features, **dict.fromkeys(idle)
    )
    try_images(pipeline, start, size, device, torch.float32)
    return lambda image: encode_image(pipeline, image, size, device, torch.float32)


class Testbed(HunyuanVideo15):
    """The tiny model; its text encoder is a table of words."""

    __test__ = False
    title = "the testbed"
    networks: ClassVar = {"transformer": TestbedTransformer}
    hub_names = ""  # it is on no hub
    randoms: ClassVar[tuple[str, ...]] = ("random:testbed",)
    license = None
    fps = 8
    text_tokens = 8  # every prompt has this length
    encoder_bytes = 0.0
    image_tokens = 4
    prompt_sets: ClassVar[tuple[str, ...]] = ("testbed:train", "testbed:heldout")
    embed = staticmethod(embed)

    @classmethod
    def source(cls, part: str, checkpoint: str) -> str:
        return str(BASE) if part == "vae" and checkpoint == str(BASE_I2V) else checkpoint

    def published_sizes(self, part: str) -> Mapping[str, Any]:
        return TINY_VAE if part == "vae" else {}

    def build(self, part: str) -> Any:
        module = super().build(part)
        return allow_batches(module) if part == "vae" else module

    def notes(self, sampling: SamplingConfig) -> list[str]:
        return []

    def check_prompts(self, prompts: Iterable[str]) -> None:
        for prompt in [] if is_random(self.path) else prompts:
            self.embed(prompt)

    def load_encoder(
        self, dtype: torch.dtype, device: torch.device, sampling: SamplingConfig
    ) -> Encoder:
        if is_random(self.path):
            return super().load_encoder(dtype, device, sampling)
        no_glyphs = torch.zeros(0, self.transformer_config.text_embed_2_dim)
        if not self.takes_images:
            return lambda caption: TextEmbedding(text=self.embed(caption.text), glyphs=no_glyphs)
        if self.encoder_version() is None:
            raise UserError(
                f"model.path = {self.path!r}: expected folders image_encoder and feature_extractor"
            )
        vae, size = load_vae(Path(self.source("vae", self.path))), (sampling.height, sampling.width)
        see = load_image_encoder(Path(self.path), vae, size)
        with reading(f"model.path = {self.path!r}: cannot read the encoders", "image_encoder"):
            width = see(grey_picture(*size))["image"].shape[-1]
            check_width(
                "image_encoder", width, {"image_embed_dim": self.transformer_config.image_embed_dim}
            )
        return lambda caption: TextEmbedding(
            text=self.embed(caption.text), glyphs=no_glyphs, **see(read_image(caption.image))
        )

    def encoder_version(self) -> str | None:
        if not self.takes_images or is_random(self.path):
            return ""
        own = fingerprint(self.path, ("image_encoder", "feature_extractor"), ENCODING)
        vae = fingerprint(self.source("vae", self.path), ("vae",), ENCODING)
        return None if own is None or vae is None else f"{own} {vae}"
