"""Corruptions of the clips of a world, each with a strength from 0 (clean) to 1.

The held-out judge is trained on them; the training reward knows none of them.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.nn.functional import conv2d, grid_sample, interpolate

from sage_fast.testbed.render import coverage
from sage_fast.testbed.world import (
    BACKGROUND,
    COLORS,
    FRAMES,
    HEIGHT,
    WIDTH,
    Scene,
    World,
)
from studies.testbed.render import paint, random_start, render

CLEAN_SHARE, TWICE_SHARE = 0.2, 0.3  # shares of clips with no corruption and with two

FIELDS = tuple(field.name for field in dataclasses.fields(Scene))
"""What a caption names: the form, the colour, the direction and the speed."""
OUTLINE = "outline"
"""What tells forms of equal area apart. A blurred ball is still small or big; a blurred square may
be a circle."""
Pixels = Callable[[Tensor, float, torch.Generator], Tensor]
"""(video float32 [F, 3, H, W] in [0, 1], strength, generator) -> video."""


@dataclasses.dataclass(frozen=True)
class Corruption:
    """A function on the pixels, and the fields of a `Scene`, or `OUTLINE`, that nobody could name
    at full strength."""

    apply: Pixels
    erases: tuple[str, ...] = ()


def _uniform(generator: torch.Generator, low: float, high: float) -> float:
    return low + (high - low) * float(torch.rand((), generator=generator))


def _other(words: Iterable[str], word: str, generator: torch.Generator) -> str:
    others = [choice for choice in words if choice != word]
    return others[int(torch.randint(len(others), (), generator=generator))]


# -- corruptions of the pixels ---------------------------------------------------------------------


def _blur(video: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    sigma = 0.3 + 2.7 * strength
    kernel = torch.exp(-torch.arange(-8, 9).square() / (2 * sigma**2))
    kernel = kernel / kernel.sum()
    rows = conv2d(video.flatten(0, 1)[:, None], kernel.view(1, 1, 1, 17), padding=(0, 8))
    blurred = conv2d(rows, kernel.view(1, 1, 17, 1), padding=(8, 0)).view_as(video)
    return video + min(1.0, 4 * strength) * (blurred - video)


def _noise(video: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    noise = torch.randn(video.shape, generator=generator)
    if _uniform(generator, 0, 1) < 0.5:  # same noise in every frame
        noise = noise[:1]
    return video + 0.5 * strength * noise


def _speckle(video: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """Add pixels of random colour, everywhere or only in the thing."""
    hit = torch.rand(len(video), 1, *video.shape[2:], generator=generator) < 0.6 * strength
    if _uniform(generator, 0, 1) < 0.7:
        hit = hit & (video.amax(dim=1, keepdim=True) > 0.3)
    colors = torch.rand(video.shape, generator=generator)
    if _uniform(generator, 0, 1) < 0.5:  # one colour for all of them
        colors = colors[:1, :, :1, :1]
    return torch.where(hit, colors, video)


def _flicker(video: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    gain = 1 - strength * torch.rand(len(video), 1, 1, 1, generator=generator)
    return BACKGROUND + gain * (video - BACKGROUND)


def _fade(video: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """Fade in, fade out, or dim throughout."""
    time = torch.linspace(0, 1, len(video))
    ramp = (time, 1 - time, torch.ones_like(time))[int(torch.randint(3, (), generator=generator))]
    return BACKGROUND + (1 - strength * ramp)[:, None, None, None] * (video - BACKGROUND)


def _shuffle(video: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    chosen = torch.randperm(len(video), generator=generator)[: round(strength * len(video))]
    order = torch.arange(len(video))
    order[chosen.sort().values] = chosen
    return video[order]


def _freeze(video: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """Repeat one frame at the end or at the start."""
    last = round((1 - strength) * (len(video) - 1))
    if _uniform(generator, 0, 1) < 0.5:
        return video[torch.arange(len(video)).clamp(max=last)]
    return video[torch.arange(len(video)).clamp(min=len(video) - 1 - last)]


def _pixelate(video: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """Downscale and upscale again, as strong compression does."""
    size = round(HEIGHT - 28 * strength)
    mode = "nearest" if _uniform(generator, 0, 1) < 0.5 else "bilinear"
    return interpolate(interpolate(video, (size, size), mode="area"), video.shape[2:], mode=mode)


def _haze(video: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """Add a smooth glow of random colour behind everything."""
    size = int(torch.randint(1, 5, (), generator=generator))
    glow = interpolate(
        torch.rand(1, 3, size, size, generator=generator), video.shape[2:], mode="bilinear"
    )
    return video + 0.7 * strength * glow * (1 - video)


def _texture(video: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """Blend in coloured patches of random size, still or changing."""
    size = [int(torch.randint(2, 17, (), generator=generator)) for _ in range(2)]
    frames = (
        1
        if _uniform(generator, 0, 1) < 0.5
        else int(torch.randint(2, FRAMES + 1, (), generator=generator))
    )
    patches = torch.rand(1, 3, frames, *size, generator=generator) ** _uniform(generator, 0.5, 3)
    patches = interpolate(patches, (len(video), *video.shape[2:]), mode="trilinear")[0].transpose(
        0, 1
    )
    return video + strength * (patches - video)


def _blocks(video: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """Replace random blocks by those of another frame and another place."""
    size = (2, 4, 8)[int(torch.randint(3, (), generator=generator))]
    lost = torch.rand(len(video), 1, HEIGHT // size, WIDTH // size, generator=generator) < strength
    other = video[torch.randperm(len(video), generator=generator)].roll(
        [int(k) for k in torch.randint(-8, 9, (2,), generator=generator)], (2, 3)
    )
    return torch.where(interpolate(lost.float(), video.shape[2:]) > 0, other, video)


def _warp(video: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """Bend the picture, the same way in all frames or not, until it is no form of the world."""
    frames = (
        1 if _uniform(generator, 0, 1) < 0.3 else int(torch.randint(2, 9, (), generator=generator))
    )
    field = torch.randn(1, 2, frames, 6, 6, generator=generator) * 6.0 * strength / WIDTH
    field = interpolate(field, (len(video), *video.shape[2:]), mode="trilinear")[0].permute(
        1, 2, 3, 0
    )
    axis = (torch.arange(WIDTH) + 0.5) * 2 / WIDTH - 1
    grid = torch.stack(torch.meshgrid(axis, axis, indexing="ij")[::-1], dim=-1)
    return grid_sample(video, grid + field, padding_mode="border", align_corners=False)


def _ghost(world: World, video: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """Add a second thing of the world with its own path."""
    scenes = world.scenes
    chosen = scenes[int(torch.randint(len(scenes), (), generator=generator))]
    second = render(world, chosen, generator)
    return torch.maximum(video, BACKGROUND + strength * (second - BACKGROUND))


CORRUPTIONS: dict[str, Corruption] = {
    "blur": Corruption(_blur, (OUTLINE,)),
    "noise": Corruption(_noise),
    "speckle": Corruption(_speckle, ("color",)),
    "flicker": Corruption(_flicker),
    "fade": Corruption(_fade, FIELDS),
    "shuffle": Corruption(_shuffle, ("direction", "speed")),
    "freeze": Corruption(_freeze, ("direction", "speed")),
    "pixelate": Corruption(_pixelate, (OUTLINE,)),
    "haze": Corruption(_haze),
    "texture": Corruption(_texture, FIELDS),
    "blocks": Corruption(_blocks, ("form", "direction", "speed")),
    "warp": Corruption(_warp, (OUTLINE,)),
}
SCENE_CORRUPTIONS: dict[str, tuple[str, ...]] = {
    "jitter": (),
    "bend": ("direction", "speed"),
    "morph": ("form",),
    "recolor": ("color",),
}
"""Corruptions that change what is drawn -> the fields of a `Scene` that they erase."""


def pixel_corruptions(world: World) -> dict[str, Corruption]:
    """Return the corruptions of the pixels of a world's clips, by name."""
    ghost = Corruption(functools.partial(_ghost, world), FIELDS)
    return {**CORRUPTIONS, "ghost": ghost}


# -- corruptions of the scene ----------------------------------------------------------------------


def draw(
    world: World, scene: Scene, kind: str | None, strength: float, generator: torch.Generator
) -> Tensor:
    """Draw a clip of the scene, float32 [F, 3, H, W], with a corruption of `SCENE_CORRUPTIONS` or
    with None."""
    time = torch.arange(FRAMES, dtype=torch.float64)[:, None]
    velocity = torch.tensor(scene.velocity, dtype=torch.float64)
    center = (
        torch.tensor(random_start(world, scene, generator), dtype=torch.float64) + time * velocity
    )
    if kind == "jitter":
        center = center + 2.5 * strength * torch.randn(center.shape, generator=generator)
    if kind == "bend":
        heading = torch.tensor([_uniform(generator, -1, 1), _uniform(generator, -1, 1)])
        phase, turns = _uniform(generator, 0, 2 * math.pi), _uniform(generator, 0.5, 2)
        center = center + 6 * strength * heading * torch.sin(
            phase + 2 * math.pi * turns * time / FRAMES
        )
    if _uniform(generator, 0, 1) < 0.5:  # change once on the way, or again and again
        change = torch.sigmoid((time - _uniform(generator, 4, 12)) * _uniform(generator, 0.4, 3))
    else:
        change = (torch.rand(time.shape, generator=generator) < 0.5).double()
    change = strength * change[:, None]
    alpha = coverage(world.forms[scene.form], center)
    if kind == "morph":
        other_form = world.forms[_other(world.forms, scene.form, generator)]
        alpha = alpha + change * (coverage(other_form, center) - alpha)
    video = paint(alpha, scene.color)
    if kind == "recolor":
        other = paint(alpha, _other(COLORS, scene.color, generator))
        video = video + change[..., None].float() * (other - video)
    return video


def random_clip(
    world: World, scene: Scene, generator: torch.Generator
) -> tuple[Tensor, float, dict[str, float]]:
    """Draw a clip of the scene with zero, one or two random corruptions of random strength.

    Returns:
        The clip, float32 [F, 3, H, W] in [0, 1]; its cleanness from 1 to 0; the legibility of each
        attribute, 1 to 0.
    """
    u = _uniform(generator, 0, 1)
    count = 0 if u < CLEAN_SHARE else (2 if u > 1 - TWICE_SHARE else 1)
    of_pixels = pixel_corruptions(world)
    names = [*of_pixels, *SCENE_CORRUPTIONS]
    chosen = [names[int(i)] for i in torch.randperm(len(names), generator=generator)[:count]]
    # small strengths are more frequent
    strengths = {name: _uniform(generator, 0, 1) ** 1.5 for name in chosen}
    kind = next((name for name in chosen if name in SCENE_CORRUPTIONS), None)
    video = draw(world, scene, kind, strengths.get(kind or "", 0.0), generator)
    clean, legible = 1.0, dict.fromkeys(FIELDS, 1.0)
    for name, strength in strengths.items():
        if name in of_pixels:
            video = of_pixels[name].apply(video, strength, generator)
            erased = of_pixels[name].erases
        elif name == kind:
            erased = SCENE_CORRUPTIONS[name]
        else:  # a second corruption of the scene was not drawn
            continue
        clean *= 1 - strength
        for field in _fields(world, erased):
            legible[field] *= 1 - strength**2  # a weak corruption erases little
    named = {world.attribute_of(field): share for field, share in legible.items()}
    return video.clamp(0, 1), clean, named


def _fields(world: World, erased: tuple[str, ...]) -> list[str]:
    """Return the fields that are erased in a world, where the outline may be no field's mark."""
    by_outline = "form" if world.told_by_outline else None
    named = [by_outline if field == OUTLINE else field for field in erased]
    return [field for field in named if field is not None]
