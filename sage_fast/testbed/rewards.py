"""Rewards of the world of balls, measured from the pixels.

Three scores, each about 0 (noise, an empty frame) to 1 (a rendered video):

    vq  visual quality: in each frame, how well the lit pixels match one clean ball of one pure
        colour
    mq  motion quality: one compact thing, always there, moving in a straight line at a constant
        speed
    ta  text alignment: the size, colour, direction and speed that the prompt names

All are continuous, without flat regions where samplers go, so rollouts of one prompt get different
scores. They are not without traps: a ball between the two sizes scores less than one of the wrong
size, and a haze over the whole frame that nobody sees, of 0.01, costs all three scores much. Only
`ta` depends on the prompt. What is measured serves every `World`; "form" stands for
what the world's captions call size or shape.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d

from sage_fast.testbed.render import coverage
from sage_fast.testbed.world import (
    BACKGROUND,
    BALLS,
    COLORS,
    DIRECTIONS,
    HEIGHT,
    PEAK,
    SPEEDS,
    WIDTH,
    World,
)

COLOR_TOLERANCE = 0.3  # RGB distance at which a colour's score falls to exp(-1/2)
STILL = 0.12  # pixels per frame: a speed this low counts as half moving
PATH_TOLERANCE = 1.0  # pixels: distance from the fitted path
SIZE_TOLERANCE = 0.35  # relative change of the lit area from frame to frame
TINT_TOLERANCE = 0.25  # RGB change of the mean colour from frame to frame
SPEED_TOLERANCE = 0.25  # pixels per frame


@dataclass(frozen=True)
class Measurement:
    """Prompt-independent measurements of each video."""

    # [B, F, forms] in [0, 1]: intersection over union with each form drawn at the centroid
    overlap: Tensor
    purity: Tensor  # [B, F, colors] in [0, 1]: how close the lit pixels are to each colour
    presence: Tensor  # [B, F] in [0, 1]: one compact thing of the area of a form is in the frame
    area: Tensor  # [B, F] pixels: how much is lit
    tint: Tensor  # [B, F, 3]: the mean RGB of the lit pixels
    velocity: Tensor  # [B, 2] pixels per frame: straight-line fit of the centroid
    residual: Tensor  # [B] pixels: rms distance of the centroid from that line


class CaptionScorer:
    """What scores clips against captions of a world; other prompts are refused before a run
    begins."""

    __test__ = False  # keep pytest from collecting it as a test class
    world = BALLS

    @classmethod
    def check_prompt(cls, text: str, metadata: Mapping[str, Any]) -> None:
        """Check that a prompt is a caption of the world.

        Raises:
            UserError: it is not; names the word at fault.
        """
        cls.world.parse(text)


class TestbedReward(CaptionScorer):
    """Scores videos float [B, F, 3, H, W] in [0, 1] (F >= 2) against one caption each."""

    gpu_bytes = 0.0

    @torch.no_grad()
    def __call__(self, videos: Tensor, prompts: list[str]) -> dict[str, Tensor]:
        """Return "vq", "mq" and "ta", float32 [B]; NaN for a video with a NaN pixel, which is no
        video."""
        seen = measure(as_sampled(videos), self.world)
        return {
            "vq": visual_quality(seen),
            "mq": motion_quality(seen),
            "ta": text_alignment(seen, prompts, self.world),
        }


def as_sampled(videos: Tensor) -> Tensor:
    """Reduce videos [B, F, 3, H, W] whose sides are the same multiple of the world's to its size.

    So are those of saved files, which are enlarged for players.
    """
    height, width = videos.shape[3:]
    factor = height // HEIGHT
    if factor < 2 or (height, width) != (factor * HEIGHT, factor * WIDTH):
        return videos
    return avg_pool2d(videos.flatten(0, 1), factor).unflatten(0, videos.shape[:2])


def measure(videos: Tensor, world: World = BALLS) -> Measurement:
    """Do all pixel work of the three scores, once."""
    pixels, lit = lit_pixels(videos)
    center = centroid(lit)
    palette = [pixels.new_tensor(color) - BACKGROUND for color in COLORS.values()]
    velocity, residual = line_fit(center)
    height, width = lit.shape[2:]
    overlaps = [
        soft_iou(lit, coverage(form, center, height, width)) for form in world.forms.values()
    ]
    purities = [purity(pixels, lit, full) for full in palette]
    return Measurement(
        overlap=torch.stack(overlaps, dim=-1),
        purity=torch.stack(purities, dim=-1),
        presence=presence(lit, center, world),
        area=lit.sum(dim=(2, 3)),
        tint=tint(pixels, lit),
        velocity=velocity,
        residual=residual,
    )


def visual_quality(seen: Measurement) -> Tensor:
    """Return [B]: overlap with the best form times purity of the best colour, mean over frames."""
    best_overlap = seen.overlap.amax(dim=-1)
    best_purity = seen.purity.amax(dim=-1)
    return (best_overlap * best_purity).mean(dim=1)


def motion_quality(seen: Measurement) -> Tensor:
    """Return [B]: present throughout x moving at all x straight and steady x constant size and
    colour.

    A product, so that no factor makes up for another: a perfect ball that stands still scores
    about 0.
    """
    speed2 = seen.velocity.square().sum(dim=-1)
    moving = speed2 / (speed2 + STILL**2)
    steady = 1.0 / (1.0 + (seen.residual / PATH_TOLERANCE) ** 2)
    resized = seen.area.std(dim=1) / seen.area.mean(dim=1).clamp(min=1.0)
    tinted = seen.tint.var(dim=1).sum(dim=-1).sqrt()
    constant = 1.0 / (1.0 + (resized / SIZE_TOLERANCE) ** 2 + (tinted / TINT_TOLERANCE) ** 2)
    return seen.presence.mean(dim=1) * moving * steady * constant


def text_alignment(seen: Measurement, prompts: list[str], world: World = BALLS) -> Tensor:
    """Return [B]: the mean match of the four attributes, times the presence of the ball."""
    found = matches(seen, prompts, world)
    return seen.presence.mean(dim=1) * sum(found.values()) / len(found)


def matches(seen: Measurement, prompts: list[str], world: World = BALLS) -> dict[str, Tensor]:
    """Return attribute -> [B] in [0, 1]: how well the form, colour, direction and speed are those
    of the prompts."""
    device = seen.overlap.device
    scenes = [world.parse(prompt) for prompt in prompts]
    forms = list(world.forms)
    row = torch.arange(len(scenes), device=device)
    colors = [list(COLORS).index(scene.color) for scene in scenes]
    color = torch.tensor(colors, dtype=torch.long, device=device)
    form = torch.tensor(
        [forms.index(scene.form) for scene in scenes], dtype=torch.long, device=device
    )
    headings = [DIRECTIONS[scene.direction] for scene in scenes]
    heading = torch.tensor(headings, device=device).view(-1, 2)
    wanted_speed = torch.tensor([SPEEDS[scene.speed] for scene in scenes], device=device)

    color_match = seen.purity[row, :, color].mean(dim=1)
    form_match = contest(seen, world)[row, :, form].mean(dim=1)
    along = (seen.velocity * heading).sum(dim=-1)
    speed2 = seen.velocity.square().sum(dim=-1)
    cosine = along / (speed2 + STILL**2).sqrt()
    direction_match = ((1.0 + cosine) / 2) ** 2  # 1 ahead, 1/4 sideways or still, 0 backwards
    speed_error = (speed2.sqrt() - wanted_speed) / SPEED_TOLERANCE
    speed_match = 1.0 / (1.0 + speed_error**2)
    return {
        "color": color_match,
        world.form_name: form_match,
        "direction": direction_match,
        "speed": speed_match,
    }


def contest(seen: Measurement, world: World = BALLS) -> Tensor:
    """Return [B, F, forms], which sum to 1: which form a frame shows.

    Forms overlap a lot, so this is a softmax over them, not the overlap itself.
    """
    return torch.softmax(seen.overlap / world.temperature, dim=-1)


def centroid(lit: Tensor) -> Tensor:
    """Return the centroid [B, F, 2]. Squared weights keep a faint haze from pulling it."""
    weight = lit.square()
    total = weight.sum(dim=(2, 3))
    x = torch.arange(lit.shape[3], device=lit.device) + 0.5
    y = torch.arange(lit.shape[2], device=lit.device) + 0.5
    # The prior puts the centroid of an empty frame in the middle, not in a corner, so that nothing
    # seems to move.
    prior = 1e-2
    middle = lit.new_tensor([lit.shape[3] / 2, lit.shape[2] / 2])
    moment_x = (weight.sum(dim=2) * x).sum(dim=2)
    moment_y = (weight.sum(dim=3) * y).sum(dim=2)
    moment = torch.stack([moment_x, moment_y], dim=-1)
    return (moment + prior * middle) / (total + prior)[..., None]


def soft_iou(lit: Tensor, drawn: Tensor) -> Tensor:
    """Return the soft intersection over union, [B, F]."""
    both = torch.minimum(lit, drawn).sum(dim=(2, 3))
    either = lit.sum(dim=(2, 3)) + drawn.sum(dim=(2, 3)) - both
    return both / either.clamp(min=1.0)


def lit_pixels(videos: Tensor) -> tuple[Tensor, Tensor]:
    """Return the pixels above the background [B, F, 3, H, W], and how much each is lit [B, F, H, W]
    in [0, 1]."""
    pixels = videos.float().clamp(0.0, 1.0) - BACKGROUND
    # Each palette colour peaks at PEAK, so the largest channel gives a pixel's coverage.
    return pixels, (pixels.amax(dim=2) / (PEAK - BACKGROUND)).clamp(0.0, 1.0)


def presence(lit: Tensor, center: Tensor, world: World = BALLS) -> Tensor:
    """Return [B, F] in [0, 1]: one compact thing of the area of a form is around `center`."""
    area = lit.sum(dim=(2, 3))
    within = window(center, world.window, *lit.shape[2:])
    nearby = (lit * within).sum(dim=(2, 3)) / area.clamp(min=1.0)
    closeness = [area_match(area, form.area) for form in world.forms.values()]
    return nearby.clamp(max=1.0) * torch.stack(closeness).amax(dim=0)


def area_match(area: Tensor, expected: float) -> Tensor:
    """Return how close an area in pixels is to the expected one, in [0, 1]: 1 there, and less on
    both sides."""
    smaller = torch.minimum(area, expected * expected / area.clamp(min=1e-3))
    return (smaller / expected).clamp(0.0, 1.0)


def tint(pixels: Tensor, lit: Tensor) -> Tensor:
    """Return the mean RGB above the background of the lit pixels, [B, F, 3]."""
    total = (pixels * lit[:, :, None]).sum(dim=(3, 4))
    weight = lit.square().sum(dim=(2, 3)).clamp(min=1e-3)
    return total / weight[..., None]


def purity(pixels: Tensor, lit: Tensor, full: Tensor) -> Tensor:
    """Return [B, F]: how close lit pixels are to colour `full` scaled by `lit`, averaged over the
    lit area.

    Args:
        full: RGB above the background, [3] or a row per video [B, 1, 3].
    """
    weight = lit / lit.sum(dim=(2, 3), keepdim=True).clamp(min=1.0)
    expected = lit[:, :, None] * full[..., None, None]
    distance2 = (pixels - expected).square().sum(dim=2)
    closeness = torch.exp(distance2 / (-2 * COLOR_TOLERANCE**2))
    return (weight * closeness).sum(dim=(2, 3))


def window(center: Tensor, radius: float, height: int, width: int) -> Tensor:
    """Return a soft disc of a radius in pixels around the centroid, [B, F, height, width]."""
    x = torch.arange(width, device=center.device) + 0.5 - center[..., 0, None]
    y = torch.arange(height, device=center.device) + 0.5 - center[..., 1, None]
    distance = torch.sqrt(x.square()[..., None, :] + y.square()[..., :, None])
    return torch.sigmoid(2.0 * (radius - distance))


def line_fit(center: Tensor) -> tuple[Tensor, Tensor]:
    """Fit the centroid to the frame number by least squares; return velocity [B, 2] and rms
    residual [B]."""
    time = torch.arange(center.shape[1], device=center.device, dtype=center.dtype)
    time = time - time.mean()
    offset = center - center.mean(dim=1, keepdim=True)
    velocity = (offset * time[:, None]).sum(dim=1) / time.square().sum()
    error = offset - time[:, None] * velocity[:, None]
    return velocity, error.square().sum(dim=-1).mean(dim=1).sqrt()
