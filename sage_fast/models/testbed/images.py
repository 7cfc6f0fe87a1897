"""What the image-to-video testbed is given of an image, as the stock pipeline makes it.

The pipeline's own functions would do, but importing it warns that torchvision is missing, which nothing here needs.
"""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import AutoencoderKLHunyuanVideo15
from diffusers.pipelines.hunyuan_video1_5.image_processor import HunyuanVideo15ImageProcessor
from PIL import Image
from torch import Tensor
from transformers import SiglipImageProcessorPil, SiglipVisionModel


class ImageEncoder:
    """Encodes images for videos of one size.

    Args:
        folder: checkpoint with `image_encoder` and `feature_extractor`.
        vae: autoencoder of the videos.
        size: height and width of the videos, to which images are resized and cropped.
    """

    def __init__(self, folder: Path, vae: AutoencoderKLHunyuanVideo15, size: tuple[int, int]) -> None:
        self.tower = SiglipVisionModel.from_pretrained(folder / "image_encoder", dtype=torch.float32).eval()
        self.features = SiglipImageProcessorPil.from_pretrained(folder / "feature_extractor")
        self.pixels = HunyuanVideo15ImageProcessor(vae_scale_factor=vae.config.spatial_compression_ratio)
        self.vae, self.size = vae, size

    @torch.no_grad()
    def __call__(self, image: Image.Image) -> tuple[Tensor, Tensor]:
        """Return its tokens [N, D], and the scaled latents [C, 1, H, W] of a video that is this one frame."""
        image = self.pixels.resize(image, *self.size, resize_mode="crop")
        tokens = self.tower(**self.features(images=image, return_tensors="pt")).last_hidden_state
        video = self.pixels.preprocess(image, *self.size)[:, :, None]
        frame = self.vae.config.scaling_factor * self.vae.encode(video).latent_dist.mode()
        return tokens[0], frame[0]
