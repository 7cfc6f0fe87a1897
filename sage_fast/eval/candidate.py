"""A candidate for an evaluation. Imports nothing heavy."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from sage_fast.config.schema import Config, SamplingConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """What is evaluated: a model if it has settings, else a folder of videos.

    Attributes:
        label: name in tables and pages.
        path: as given.
        config: settings, including the weights.
        iteration: iterations the weights were trained for; 0 for settings and the base model.
    """

    label: str
    path: str
    config: Config | None = None
    iteration: int = 0


def notes_on(
    candidates: Sequence[Candidate], sampling: SamplingConfig, guidance_scale: float
) -> list[str]:
    """Return lines that name the evaluated weights, and the settings of a candidate that others
    replace."""
    lines = []
    for candidate in candidates:
        own = candidate.config
        if own is None:
            continue
        if candidate.iteration:
            lines.append(f"weights of iteration {candidate.iteration}: {own.model.weights}")
        # what ODE samples depend on, with the guidance scale
        pairs: dict[str, tuple[object, object]] = {}
        for name in ("shift", "num_frames", "height", "width"):
            pairs[f"sampling.{name}"] = (getattr(own.sampling, name), getattr(sampling, name))
        pairs["eval.guidance_scale"] = (own.eval_guidance_scale, guidance_scale)
        for name, (mine, used) in pairs.items():
            if mine != used:
                lines.append(
                    f"note: {candidate.label} has {name} = {mine}, but is sampled with {used}, "
                    "like the first"
                )
    return lines
