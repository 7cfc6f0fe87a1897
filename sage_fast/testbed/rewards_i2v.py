"""Reward of the image-to-video testbed: what the image shows keeps its look, starts in its place,
moves as prompted.

Four scores, each about 0 (noise, an empty frame) to 1 (a rendered video):

    color   in each frame, how well the lit pixels match the colour of the image's object
    outline in each frame, their overlap with the image's object, moved to where they are
    place   how close the object is to its place in the image in the first frame
    motion  how close it is, in the later frames, to that place moved at the velocity that the
    prompt names

The image is the only source of colour, outline and place. All scores are continuous, without flat
regions.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample

from sage_fast.testbed.rewards import (
    CaptionScorer,
    as_sampled,
    centroid,
    lit_pixels,
    presence,
    purity,
    soft_iou,
    tint,
)
from sage_fast.util.errors import UserError
from sage_fast.util.images import read_image

DISTANCE = 1.5  # pixels: a distance from the right place that halves the score


class TestbedImageReward(CaptionScorer):
    """Scores videos float [B, F, 3, H, W] in [0, 1] (F >= 2) against one caption and one image
    each."""

    gpu_bytes = 0.0

    @torch.no_grad()
    def __call__(
        self, videos: Tensor, prompts: list[str], metadata: list[Mapping[str, Any]]
    ) -> dict[str, Tensor]:
        """Return the four scores, float32 [B]; colour and outline are NaN for a video with a NaN
        pixel.

        Args:
            metadata: the path of each prompt's image as "image".

        Raises:
            UserError: a prompt has no image.
        """
        videos = as_sampled(videos)
        height, width = videos.shape[3:]
        images = torch.stack(
            [_read(record.get("image", ""), height, width) for record in metadata]
        )[:, None]
        images = images.to(videos.device)
        pixels, lit = lit_pixels(videos)
        given_pixels, given = lit_pixels(images)
        center, start = centroid(lit), centroid(given)
        present = presence(lit, center)
        velocity = torch.tensor(
            [self.world.parse(prompt).velocity for prompt in prompts], device=lit.device
        )
        time = torch.arange(lit.shape[1], device=lit.device)
        path = start + time[:, None] * velocity[:, None]
        near = present / (1.0 + ((center - path) / DISTANCE).square().sum(dim=-1))
        return {
            "color": (present * purity(pixels, lit, tint(given_pixels, given))).mean(dim=1),
            "outline": soft_iou(lit, _moved(given, center - start)).mean(dim=1),
            "place": near[:, 0],
            "motion": near[:, 1:].mean(dim=1),
        }


@cache
def _read(path: str, height: int, width: int) -> Tensor:
    """Read an image, resized and cropped to this size as for the model, float32 [3, H, W] in [0,
    1]."""
    if not path:
        raise UserError(
            'reward testbed-i2v: a prompt has no image; expected one, as in {"prompt": ..., '
            '"image": ...}'
        )
    image = ImageOps.fit(read_image(path), (width, height), Image.Resampling.LANCZOS)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255


def _moved(lit: Tensor, offset: Tensor) -> Tensor:
    """Move one frame per video, [B, 1, H, W], by each (x, y) of `offset` [B, F, 2] in pixels;
    return [B, F, H, W]."""
    rows, frames = offset.shape[:2]
    height, width = lit.shape[2:]
    maps = lit.new_zeros(rows * frames, 2, 3)
    maps[:, 0, 0] = maps[:, 1, 1] = 1.0
    maps[:, :, 2] = -2.0 * offset.flatten(0, 1) / lit.new_tensor([width, height])
    grid = affine_grid(maps, [rows * frames, 1, height, width], align_corners=False)
    source = lit.expand(-1, frames, -1, -1).flatten(0, 1)[:, None]
    return grid_sample(source, grid, align_corners=False)[:, 0].unflatten(0, (rows, frames))
