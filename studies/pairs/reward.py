"""Rewards of the world of pairs, measured from the pixels. Other parts than the testbed's, and all
follow the prompt.

Each is about 0 (noise, an empty frame) to 1 (a rendered video):

    shape   both colours that the prompt names are there, each once, in one piece, with its shape
    motion  each moves in its direction, in a straight line, at the world's speed
    clean   in each frame, how well the lit pixels match the two shapes and nothing else
"""

import torch
from torch import Tensor

from sage_fast.testbed.render import coverage
from sage_fast.testbed.rewards import (
    COLOR_TOLERANCE,
    PATH_TOLERANCE,
    SPEED_TOLERANCE,
    STILL,
    area_match,
    centroid,
    line_fit,
    soft_iou,
    window,
)
from sage_fast.testbed.world import BACKGROUND, COLORS, DIRECTIONS, PEAK
from studies.pairs.world import SPEED, parse
from studies.shapes.world import AREA, SHAPES


@torch.no_grad()
def pairs_reward(videos: Tensor, prompts: list[str]) -> dict[str, Tensor]:
    """Return "shape", "motion" and "clean", float32 [B].

    Args:
        videos: [B, F >= 2, 3, H, W] in [0, 1].
        prompts: B captions.
    """
    pixels = videos.float().clamp(0.0, 1.0) - BACKGROUND
    lit = (pixels.amax(dim=2) / (PEAK - BACKGROUND)).clamp(0.0, 1.0)  # [B, F, H, W]
    scenes = [parse(prompt) for prompt in prompts]
    device = lit.device
    names = list(SHAPES.forms)
    shape = motion = torch.zeros(len(videos), device=device)
    drawn = torch.zeros_like(lit)
    for k in range(2):
        things = [scene[k] for scene in scenes]
        color = torch.tensor([COLORS[thing.color] for thing in things], device=device) - BACKGROUND
        difference = pixels - lit[:, :, None] * color[:, None, :, None, None]
        own = lit * torch.exp(
            difference.square().sum(dim=2) / (-2 * COLOR_TOLERANCE**2)
        )  # [B, F, H, W]
        center = centroid(own)
        area = own.sum(dim=(2, 3))
        nearby = (own * window(center, SHAPES.window, *own.shape[2:])).sum(dim=(2, 3)) / area.clamp(
            min=1.0
        )
        presence = nearby.clamp(max=1.0) * area_match(area, AREA)  # [B, F]

        # [shapes, B, F, H, W]
        each = torch.stack(
            [coverage(form, center, *own.shape[2:]) for form in SHAPES.forms.values()]
        )
        contest = torch.softmax(
            torch.stack([soft_iou(own, one) for one in each]) / SHAPES.temperature, dim=0
        )
        named = [names.index(thing.shape) for thing in things], range(len(things))
        shape = shape + (presence * contest[named]).mean(dim=1) / 2
        drawn = torch.maximum(drawn, each[named])

        velocity, residual = line_fit(center)
        heading = torch.tensor([DIRECTIONS[thing.direction] for thing in things], device=device)
        speed2 = velocity.square().sum(dim=-1)
        cosine = (velocity * heading).sum(dim=-1) / (speed2 + STILL**2).sqrt()
        steady = 1.0 / (1.0 + (residual / PATH_TOLERANCE) ** 2)
        fast = 1.0 / (1.0 + ((speed2.sqrt() - SPEED) / (SPEED * SPEED_TOLERANCE)) ** 2)
        motion = motion + presence.mean(dim=1) * ((1.0 + cosine) / 2) ** 2 * (steady + fast) / 4
    return {"shape": shape, "motion": motion, "clean": soft_iou(lit, drawn).mean(dim=1)}
