"""The judge of the world of pairs, which no run trains on: a network trained on clips and their
corruptions."""

from __future__ import annotations

import torch
from torch import Tensor

from sage_fast.testbed.judge import JudgeNetwork, load_judge
from sage_fast.testbed.world import COLORS, DIRECTIONS
from studies.pairs.world import BASE, Thing, paint, parse, paths, scenes
from studies.shapes.world import SHAPES
from studies.testbed.corruptions import CLEAN_SHARE, CORRUPTIONS, TWICE_SHARE
from studies.testbed.judge import judge_loss

KINDS = {"shape": tuple(SHAPES.forms), "direction": tuple(DIRECTIONS)}
CLASS_COUNTS = [
    (f"{color} {kind}", len(words) + 1) for color in COLORS for kind, words in KINDS.items()
]
"""What is classified, and its classes: the words of the kind, and one more for a colour that is not
there."""
USED = {name: change for name, change in CORRUPTIONS.items() if name != "warp"}
"""All but `warp`, which assumes a frame of 32 x 32. `pixelate` begins at half the resolution here,
so the judge takes that for clean."""


class PairsJudge:
    """Scores videos float [B, 5, 3, 64, 64] in [0, 1] against one caption each: "alignment" and
    "naturalness", [B]."""

    def __init__(self) -> None:
        self.network = load_judge(BASE / "judge")

    @torch.no_grad()
    def __call__(self, videos: Tensor, prompts: list[str]) -> dict[str, Tensor]:
        logits, clean = self.network(videos.float().clamp(0.0, 1.0))
        probable = {name: found.softmax(dim=1) for name, found in logits.items()}
        alignment = [
            sum(
                float(probable[name][row, word])
                for thing in parse(prompt)
                for name, word in _classes(thing).items()
            )
            for row, prompt in enumerate(prompts)
        ]
        return {
            "alignment": torch.tensor(alignment) / (2 * len(KINDS)),
            "naturalness": clean.sigmoid(),
        }


def _classes(thing: Thing) -> dict[str, int]:
    """Return what is classified -> class, for the thing's colour."""
    return {
        f"{thing.color} {kind}": words.index(getattr(thing, kind)) for kind, words in KINDS.items()
    }


def loss_of_clips(network: JudgeNetwork, batch: int, generator: torch.Generator) -> Tensor:
    """Draw clips of one or two things, and compute the judge's loss.

    Shape and direction are equally legible in a clip, unlike the testbed's.
    """
    videos, words, clean, legible = zip(*(_clip(generator) for _ in range(batch)))
    classes = {
        name: torch.tensor([found.get(name, size - 1) for found in words])
        for name, size in CLASS_COUNTS
    }
    return judge_loss(
        network,
        torch.stack(videos),
        classes,
        torch.tensor(clean),
        dict.fromkeys(classes, torch.tensor(legible)),
    )


def _clip(generator: torch.Generator) -> tuple[Tensor, dict[str, int], float, float]:
    """Draw a clip with zero to two corruptions; return it, its classes, its cleanness and its
    legibility, 1 to 0."""
    every = list(scenes().values())
    u, v, *strengths = torch.rand(4, generator=generator).tolist()
    scene: tuple[Thing, ...] = every[int(torch.randint(len(every), (), generator=generator))]
    shown = slice(0, 2) if v < 0.8 else slice(0, 1) if v < 0.9 else slice(1, 2)
    things = scene[shown]
    video, clean, legible = paint(things, paths(scene, generator)[shown]), 1.0, 1.0
    count = 0 if u < CLEAN_SHARE else (2 if u > 1 - TWICE_SHARE else 1)
    names = list(USED)
    chosen = torch.randperm(len(names), generator=generator)[:count].tolist()
    for i, strength in zip(chosen, strengths):
        corruption, strength = USED[names[i]], strength**1.5  # small strengths are more frequent
        video = corruption.apply(video, strength, generator)
        clean *= 1 - strength
        if corruption.erases:
            legible *= 1 - strength**2  # a weak corruption erases little
    classes = {name: word for thing in things for name, word in _classes(thing).items()}
    return video.clamp(0, 1), classes, clean, legible
