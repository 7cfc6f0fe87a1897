"""Noise of the samplers: how much each step adds, and how far from the data the samples end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from sage_fast.algorithm.transitions import (
    SAGE_CLAMP,
    TransitionTable,
    sigma_schedule,
    transition_table,
)
from sage_fast.report.charts import COLORS, GREY
from studies.finding import Claim, Finding, Material, Verdict
from studies.paper.manifold import manifold_distances
from studies.paper.mixture import Mixture, sample
from studies.runs import shipped
from studies.shapes.world import WORLD_SETTINGS

if TYPE_CHECKING:
    from sage_fast.loading import Setup
    from sage_fast.util.captions import PromptKey

NOISY = ("sage", "flow", "dance", "cps", "exact")
"""`exact` is the sampler `precise`, as the study's variants call it."""
COLOR = dict(zip(NOISY, COLORS)) | {"ode": GREY}


def _table(sigmas: Tensor, name: str, eta: float) -> TransitionTable:
    return transition_table(sigmas, "precise" if name == "exact" else name, eta)


# -- step-noise ------------------------------------------------------------------------------------

REGIMES = {
    "a": "(a) both on flow's schedule",
    "b": "(b) 1 - sigma clamped at 3e-3",
    "c": "(c) each its own default",
}
GRID = tuple(product((20, 40), (1.0, 5.0, 9.0)))
"""(steps, shift)."""
STEP_ETA = 0.5
NEAR_ZERO, RATIO = 0.05, 1.5
"""Limits for step 0: sage's standard deviation in units of eta, and the ratio of flow's to sage's.
"""

Noise = Mapping[str, Tensor]
"""Sampler -> standard deviation of each step."""


def step_noise(steps: int, shift: float, regime: str) -> dict[str, Tensor]:
    """Return sampler -> standard deviation of each step, float64 `[steps]`, in a regime of Figure
    9.

    The regimes only differ for `sage` and `flow`.
    """
    sigmas = sigma_schedule(steps, shift)
    std = {name: _table(sigmas, name, STEP_ETA).c for name in NOISY}
    s, n = sigmas[:-1], sigmas[1:]
    if regime == "a":  # sigma_0 = sigma_max = sigma_1
        s = torch.where(s == 1, n, s)
        std["sage"] = STEP_ETA * (n - s + torch.log((1 - n) / (1 - s))).sqrt()
    if regime == "b":
        std["flow"] = STEP_ETA * ((s - n) * s / (1 - s).clamp(min=SAGE_CLAMP)).sqrt()
    return std


def judge_step_noise(
    noise: Mapping[tuple[str, int, float], Noise],
) -> tuple[Verdict, dict[str, bool]]:
    """Decide whether each of the paper's three statements is true on every schedule; also return
    them.

    Args:
        noise: (regime, steps, shift) -> noise.
    """
    by_regime = {
        regime: [value for key, value in noise.items() if key[0] == regime] for regime in REGIMES
    }
    statements = {
        "a": all(float(std["sage"][0]) < NEAR_ZERO * STEP_ETA for std in by_regime["a"]),
        "b": all(float(std["flow"][0]) > RATIO * float(std["sage"][0]) for std in by_regime["b"]),
        "c": all(_below(std) > len(std["sage"]) / 2 for std in by_regime["c"]),
    }
    return "held" if all(statements.values()) else "not held", statements


def _below(std: Noise) -> int:
    """Return the number of steps at which sage adds less noise than flow."""
    return int((std["sage"] < std["flow"]).sum())


def find_step_noise(material: Material) -> Finding:
    """Check Table 1 and Figure 9; the computation is exact, so `material.quick` changes nothing."""
    noise = {(regime, *cell): step_noise(*cell, regime) for regime in REGIMES for cell in GRID}
    verdict, statements = judge_step_noise(noise)
    a, b, c = (noise[regime, 20, 5.0] for regime in REGIMES)
    fewest = min(_below(noise["c", *cell]) / cell[0] for cell in GRID)
    said = ", ".join(f"({name}) {'true' if true else 'false'}" for name, true in statements.items())
    text = (
        f"Over {len(GRID)} schedules: {said}. The table has 20 steps, shift 5, eta {STEP_ETA:g}. "
        "In (a) the interval of sage's step 0 is empty. In (c) sage adds less than flow at "
        f"{_below(c)} of 20 steps, and at {fewest:.0%} or more on every schedule, but not at step "
        "0, which its clamp sets."
    )
    table = [
        ["std of the noise", *NOISY],
        *(
            [f"step 0 in ({name})", *_cells(std, lambda value: float(value[0]))]
            for name, std in zip("abc", (a, b, c))
        ),
        ["all steps in (c)", *_cells(c, _total)],
    ]
    rows = [
        {
            "regime": regime,
            "steps": steps,
            "shift": shift,
            "eta": STEP_ETA,
            "sampler": name,
            "step": t,
            "std": value,
        }
        for (regime, steps, shift), std in noise.items()
        for name in NOISY
        for t, value in enumerate(std[name].tolist())
    ]
    return Finding(
        verdict=verdict,
        text=text,
        draw=lambda figure: _draw_step_noise(figure, noise),
        rows=rows,
        table=table,
    )


def _cells(std: Noise, value: Callable[[Tensor], float]) -> list[str]:
    return [f"{value(std[name]):.3f}" for name in NOISY]


def _total(std: Tensor) -> float:
    return float(std.square().sum().sqrt())


def _draw_step_noise(figure: Figure, noise: Mapping[tuple[str, int, float], Noise]) -> None:
    shifts = sorted({shift for _, shift in GRID})
    grid = figure.subplots(len(shifts), len(REGIMES), sharex=True, sharey=True)
    for (row, shift), (column, regime) in product(enumerate(shifts), enumerate(REGIMES)):
        axes = grid[row, column]
        for steps, style in ((20, "-"), (40, ":")):
            for name in NOISY:
                std = noise[regime, steps, shift][name]
                label = name if steps == 20 else None
                axes.plot(
                    np.arange(steps) / steps,
                    std,
                    style,
                    color=COLOR[name],
                    label=label,
                    linewidth=1.3,
                )
        if row == 0:
            axes.set_title(REGIMES[regime], fontsize=9)
        if row == len(shifts) - 1:
            axes.set_xlabel("step / steps")
        if column == 0:
            axes.set_ylabel(f"std, shift {shift:g}")
        axes.set_yscale("function", functions=(np.sqrt, np.square))  # magnifies small values
        axes.set_yticks([0, 0.05, 0.2, 0.5, 1, 2])
        axes.set_ylim(0, 2.2)
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside upper center", ncols=len(NOISY), title="20 steps; dotted: 40"
    )


# -- excess-noise ----------------------------------------------------------------------------------

STEPS, SHIFT = 20, 5.0
ETAS, QUICK_ETAS = (0.25, 0.5, 0.75, 1.0), (0.5, 1.0)
LINEAR = ("flow", "dance")
"""The first-order samplers that the paper compares with."""
SURE = 3.0
"""Standard errors a difference must exceed to count; there are sixteen differences."""

Distances = Mapping[tuple[str, float], np.ndarray]
"""(sampler, eta) -> distance per sample, paired: entry i always has the same prompt and noise."""


def judge_excess_noise(worlds: Sequence[Distances]) -> Verdict:
    """Decide whether sage's samples are nearer to the data than those of `flow` and `dance`, at
    every eta and world."""
    z = [
        _z(distances["sage", eta] - distances[other, eta])
        for distances in worlds
        for other in LINEAR
        for eta in _etas(distances)
    ]
    if all(value < -SURE for value in z):
        return "held"
    return "not held" if any(value > SURE for value in z) else "not decidable"


def _z(differences: np.ndarray) -> float:
    return float(differences.mean() / (differences.std(ddof=1) / len(differences) ** 0.5))


def _etas(distances: Distances) -> list[float]:
    return sorted({eta for name, eta in distances if name == "sage"})


def find_excess_noise(material: Material) -> Finding:
    """Check Figures 1 and 2."""
    etas = QUICK_ETAS if material.quick else ETAS
    sigmas = sigma_schedule(STEPS, SHIFT)
    tables = {(name, eta): _table(sigmas, name, eta) for name in NOISY for eta in etas}
    tables["ode", 0.0] = transition_table(sigmas, "ode", 0.0)
    mixture, videos, floor = (
        _on_mixture(tables, 1000 if material.quick else 4000),
        *_on_shapes(tables, material.quick),
    )
    worlds = {"mixture": mixture, "shapes": videos}
    spread = Mixture().spread()
    verdict = judge_excess_noise(list(worlds.values()))

    text = (
        f"Mean distance with {STEPS} steps, shift {SHIFT:g} and eta {etas[-1]:g}. Over all eta the "
        "distance of sage less that of the nearer of flow and dance lies between "
        f"{' and '.join(f'{value:+.3f}' for value in _gaps(mixture))} on the mixture and between "
        f"{' and '.join(f'{value:+.3f}' for value in _gaps(videos))} in the world of shapes."
    )
    ends = {name: (name, etas[-1]) for name in NOISY} | {"ode": ("ode", 0.0)}
    table = [
        ["sampler", "mixture: to the nearest mode", "shapes: to the nearest true clip"],
        *(
            [name, f"{mixture[key].mean():.3f}", f"{videos[key].mean():.3f}"]
            for name, key in ends.items()
        ),
        ["the data; true clips through the autoencoder", f"{spread:.3f}", f"{floor.mean():.3f}"],
    ]
    rows = [
        {
            "world": world, "sampler": name, "eta": eta, "distance": values.mean(),
            "standard_error": values.std(ddof=1) / len(values) ** 0.5, "samples": len(values),
            "predicted_excess": float(tables[name, eta].excess_noise()[-1]),
        }
        for world, distances in worlds.items()
        for (name, eta), values in distances.items()
    ]  # fmt: skip
    rows.append(
        {
            "world": "shapes",
            "sampler": "autoencoder alone",
            "distance": floor.mean(),
            "samples": len(floor),
        }
    )

    def draw(figure: Figure) -> None:
        left, right = figure.subplots(1, 2)
        _draw_distances(left, mixture, "Gaussian mixture: distance to the nearest mode")
        _draw_distances(right, videos, "shapes: distance to the nearest true clip")
        for axes, y, label in (
            (left, spread, "the mixture itself"),
            (right, floor.mean(), "true clips, autoencoded"),
        ):
            axes.axhline(y, color=GREY, linestyle=":", linewidth=1)
            axes.text(etas[0], y, label, fontsize=7.5, va="bottom")
        predicted = {
            key: np.hypot(mixture["ode", 0.0].mean(), _norm_of_noise(tables[key])) for key in tables
        }
        for name in ("sage", "flow", "dance"):
            left.plot(
                etas, [predicted[name, eta] for eta in etas], ":", color=COLOR[name], linewidth=1
            )
        left.legend(fontsize=8, title="dotted: predicted from the table", title_fontsize=8)

    return Finding(verdict=verdict, text=text, draw=draw, rows=rows, table=table)


def _gaps(distances: Distances) -> tuple[float, float]:
    gaps = [
        distances["sage", eta].mean() - min(distances[other, eta].mean() for other in LINEAR)
        for eta in _etas(distances)
    ]
    return min(gaps), max(gaps)


def _norm_of_noise(table: TransitionTable) -> float:
    """Return the RMS norm of the excess noise that the table predicts for final samples of the
    mixture."""
    return float(table.excess_noise()[-1]) * Mixture().modes.shape[1] ** 0.5


def _on_mixture(
    tables: Mapping[tuple[str, float], TransitionTable], count: int
) -> dict[tuple[str, float], np.ndarray]:
    mixture = Mixture()
    return {
        key: mixture.distance(sample(mixture, table, count, seed=0)).numpy()
        for key, table in tables.items()
    }


@torch.no_grad()
def _on_shapes(
    tables: Mapping[tuple[str, float], TransitionTable], quick: bool
) -> tuple[dict[tuple[str, float], np.ndarray], np.ndarray]:
    """Return distances of the base model's videos for held-out prompts, and of true clips after the
    autoencoder."""
    from sage_fast.loading import load_setup, resolve
    from sage_fast.testbed.tiny_model import allow_batches
    from studies.testbed.pretrain import LESSONS, draw, encode

    setup = load_setup(resolve(shipped("recipes/paper", WORLD_SETTINGS)), rewards=False)
    setup.encode()
    prompts, repeats = (setup.eval_prompts[:8], 1) if quick else (setup.eval_prompts, 2)
    videos = {
        key: torch.cat([_videos(setup, table, prompts, repeat) for repeat in range(repeats)])
        for key, table in tables.items()
    }
    vae = allow_batches(setup.model.decoder.vae)
    lesson, generator = LESSONS["shapes"], torch.Generator().manual_seed(0)
    latents = torch.cat(
        [encode(vae, draw(lesson, prompt.text, 1, generator)) for prompt in setup.eval_prompts]
    )
    floor = manifold_distances(setup.model.decoder(vae.config.scaling_factor * latents))
    return {key: manifold_distances(clips).numpy() for key, clips in videos.items()}, floor.numpy()


def _videos(
    setup: Setup, table: TransitionTable, prompts: Sequence[PromptKey], repeat: int
) -> Tensor:
    """Sample videos, float32 `[prompts, F, 3, H, W]`, with the same noise for every table."""
    from sage_fast.rollout.loop import initial_latents, rollout

    model = setup.model
    seeds = torch.arange(len(prompts)) + 1000 * repeat
    conditioning = model.policy.conditioning_table(
        table.sigmas[:-1], {p: setup.embeddings[p] for p in prompts}
    )
    x = initial_latents(seeds, model.spec.latent_shape(setup.config.sampling), model.policy.device)
    x = rollout(model.policy, table, table.coefficients(), conditioning, prompts, seeds, x)
    return model.decoder(x)


def _draw_distances(axes: Axes, distances: Distances, title: str) -> None:
    for name in NOISY:
        etas = [eta for sampler, eta in distances if sampler == name]
        samples = [distances[name, eta] for eta in etas]
        error = [values.std(ddof=1) / len(values) ** 0.5 for values in samples]
        axes.errorbar(
            etas,
            [values.mean() for values in samples],
            error,
            color=COLOR[name],
            label=name,
            marker="o",
            markersize=3,
        )
    axes.axhline(distances["ode", 0.0].mean(), color=GREY, linestyle="--", linewidth=1, label="ode")
    axes.set_xlabel("eta")
    axes.set_ylim(bottom=0)
    axes.set_title(title, fontsize=9.5)


CLAIMS: tuple[Claim, ...] = (
    Claim(
        name="step-noise",
        title="Noise of a step",
        kind="paper",
        source="Table 1 and Figure 9",
        says=(
            "The noise of sage is near zero at step 0 on flow's schedule (a), there less than two "
            "thirds of flow's under the same clamp (b), and with each one's defaults below flow's "
            "at most steps (c)."
        ),
        find=find_step_noise,
        size=(8.6, 6.6),
    ),
    Claim(
        name="excess-noise",
        title="Distance from the data",
        kind="paper",
        source="Figures 1 and 2",
        says=(
            "At the same eta, rollouts of sage stay nearer to the data than those of flow and "
            "dance."
        ),
        find=find_excess_noise,
        size=(8.6, 3.8),
    ),
)
