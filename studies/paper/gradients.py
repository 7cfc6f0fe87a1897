"""Gradient norms by noise level, with and without the equalizer."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from sage_fast.report.charts import COLORS, GREY
from studies.finding import Claim, Finding, Material, Verdict
from studies.runs import shipped
from studies.shapes.world import WORLD_SETTINGS

if TYPE_CHECKING:
    from sage_fast.algorithm.iteration_plan import Transition
    from sage_fast.rollout.batch import Batch
    from sage_fast.trainer import Trainer
    from sage_fast.util.console import Progress

SETTINGS: Mapping[str, object] = {
    "sampling.shift": 5.0,
    "kl.strategy": "none",
    "train.optimizer_steps": 1,
    "train.parity_gate": False,
}
"""Overrides of configs/recipes/paper.yaml: the paper's schedule, and one update over every step of
every sample."""
ORDER, SMALL = 10.0, 3.0
"""Limits on largest norm / smallest norm: the paper's "more than one order of magnitude" and "a
small constant factor"."""
MATCHES = 2.0
"""Factor within which a prediction must match the measured norms, after dividing both by their
geometric mean."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Norms:
    """Gradient norms by step, float64 `[T]`; per-sample norms are averaged over the samples.

    Attributes:
        sigma: noise level of the step.
        by_std: prediction 1 / sqrt(Sigma_t), Eq. 37.
        by_row: prediction N_t = |b| / c, Eq. 38.
        weight: S_t of the equalizer.
        velocity: measured gradient of the log-prob w.r.t. the velocity.
        log_prob: measured gradient of the log-prob w.r.t. the trained weights.
        policy: measured policy gradient of all samples together w.r.t. the trained weights.
    """

    sigma: np.ndarray
    by_std: np.ndarray
    by_row: np.ndarray
    weight: np.ndarray
    velocity: np.ndarray
    log_prob: np.ndarray
    policy: np.ndarray


def spread(norms: np.ndarray) -> float:
    """Return largest / smallest."""
    return float(norms.max() / norms.min())


def mismatch(norms: np.ndarray, predicted: np.ndarray) -> float:
    """Return the factor by which a prediction is off at the worst step, up to an overall scale."""
    ratio = np.log(norms) - np.log(predicted)
    return float(np.exp(np.abs(ratio - ratio.mean()).max()))


def judge_law(norms: Norms) -> Verdict:
    """Decide whether the policy gradient on the weights follows 1/sqrt(Sigma)."""
    return "held" if mismatch(norms.policy, norms.by_std) < MATCHES else "not held"


def judge_range(norms: Norms) -> Verdict:
    """Decide whether it varies by more than an order of magnitude."""
    return "held" if spread(norms.policy) > ORDER else "not held"


def judge_equalizer(norms: Norms) -> Verdict:
    """Decide whether the equalizer reduces that spread from above an order of magnitude to a small
    factor."""
    levels = spread(norms.policy) > ORDER and spread(norms.weight * norms.policy) < SMALL
    return "held" if levels else "not held"


def room_for_importance(norms: np.ndarray) -> float:
    """Return the saving of importance sampling over uniform sampling of steps: 1 - mean(norms)^2 /
    mean(norms^2).

    It is the share of the gradient estimate's second moment that sampling steps in proportion to
    their norms, the best choice, would save.
    """
    return float(1 - norms.mean() ** 2 / (norms**2).mean())


def find_law(material: Material) -> Finding:
    """Check Figure 4 and Equation 37 on the base of the world of shapes with a new adapter."""
    norms = _measured(material)
    text = (
        f"From sigma {norms.sigma[0]:.2f} down to {norms.sigma[-1]:.2f}, at the worst step, the "
        "log-prob's gradient on the velocity is off from N_t (Eq. 38) by a factor of "
        f"{mismatch(norms.velocity, norms.by_row):.2f} and from 1/sqrt(Sigma) by "
        f"{mismatch(norms.velocity, norms.by_std):.1f}; the policy gradient on the weights by "
        f"{mismatch(norms.policy, norms.by_row):.1f} and "
        f"{mismatch(norms.policy, norms.by_std):.1f}."
    )
    return Finding(
        verdict=judge_law(norms),
        text=text,
        draw=lambda figure: _draw(figure, norms),
        rows=_rows(norms),
    )


def find_range(material: Material) -> Finding:
    """Check Figure 4 with the same measurement."""
    norms = _measured(material)
    text = (
        f"From sigma {norms.sigma[0]:.2f} down to {norms.sigma[-1]:.2f} the policy gradient on the "
        f"trained weights varies by a factor of {spread(norms.policy):.0f}, and the log-prob's "
        f"gradient on the velocity by {spread(norms.velocity):.0f}."
    )
    return Finding(
        verdict=judge_range(norms),
        text=text,
        draw=lambda figure: _draw(figure, norms),
        rows=_rows(norms),
    )


def _measured(material: Material) -> Norms:
    return measure_gradients(eta=0.5, groups=1 if material.quick else 4)


def find_equalizer(material: Material) -> Finding:
    """Check the caption of Figure 3 with the same measurement."""
    norms = _measured(material)

    text = (
        "Largest over smallest norm, and the second moment that drawing the trained steps in "
        "proportion to the norms would save over drawing them evenly."
    )
    table = [
        ["gradient", "ratio without", "ratio with", "saved without", "saved with the equalizer"]
    ]
    for name, values in (
        ("log-prob, on the velocity", norms.velocity),
        ("log-prob, on the weights", norms.log_prob),
        ("policy gradient, on the weights", norms.policy),
    ):
        both = (values, norms.weight * values)
        saved = [f"{100 * room_for_importance(norm):.1f} %" for norm in both]
        table.append([name, f"{spread(both[0]):.1f}", f"{spread(both[1]):.2f}", *saved])
    rows = [
        {name: row[name] for name in ("step", "sigma", "weight")}
        | {
            f"equalized_{name}": row["weight"] * row[name]
            for name in ("velocity", "log_prob", "policy")
        }
        for row in _rows(norms)
    ]
    draw = functools.partial(_draw, norms=norms)
    return Finding(verdict=judge_equalizer(norms), text=text, draw=draw, rows=rows, table=table)


def _rows(norms: Norms) -> list[dict[str, float]]:
    names = [field.name for field in dataclasses.fields(norms)]
    return [
        {"step": t, **{n: float(getattr(norms, n)[t]) for n in names}}
        for t in range(len(norms.sigma))
    ]


@functools.cache
def measure_gradients(*, eta: float, groups: int, steps: int = 20) -> Norms:
    """Measure gradient norms in one iteration of the trainer, up to its update, on the
    base model of the world of shapes.

    Args:
        eta: eta of the sampler `sage`.
        groups: number of groups of 8 samples.
        steps: steps of the schedule; the paper has 20.
    """
    from sage_fast.loading import load_setup, resolve
    from sage_fast.trainer import Trainer

    found: list[Tensor] = []

    class Measuring(Trainer):
        """A trainer that measures the gradients of an update instead of applying it."""

        def update(self, batch: Batch, update: Sequence[Transition], bar: Progress) -> None:
            found.extend(_gradients(self, batch, t) for t in range(config.sampling.steps))

    overlay = {
        **SETTINGS,
        "sampling.eta": eta,
        "sampling.steps": steps,
        "train.prompts_per_iteration": groups,
    }
    config = shipped("recipes/paper", WORLD_SETTINGS, overlay)
    setup = load_setup(resolve(config))
    setup.encode()
    trainer = Measuring(setup.resolved, setup.model, setup.reward, setup.prompts, setup.embeddings)
    trainer.iteration(0)
    velocity, log_prob, policy = torch.stack(found, 1).numpy()
    table = trainer.resolved.table
    return Norms(
        sigma=table.sigmas[:-1].numpy(),
        by_std=1 / table.c.numpy(),
        by_row=table.gradient_scale().numpy(),
        weight=table.equalizer().numpy(),
        velocity=velocity,
        log_prob=log_prob,
        policy=policy,
    )


def _gradients(trainer: Trainer, batch: Batch, t: int) -> Tensor:
    """Return `velocity`, `log_prob` and `policy` of `Norms` at step t, float64 `[3]`.

    At the rollout's weights every ratio is 1, so the policy gradient is the mean of A_i times the
    log-prob's gradient.
    """
    from sage_fast.ops import transition_score

    rows, weights = batch.trajectories, trainer.engine.parameters
    sizes, policy = [], torch.zeros(sum(w.numel() for w in weights), dtype=torch.float64)
    for i, advantage in enumerate(batch.advantages.double()):
        micro = [(i, t)]
        x = rows.gather(rows.states, micro)
        v = trainer.replay.velocity(batch, micro)
        log_prob, *_ = transition_score(
            x, rows.next_states(micro), v, batch.coefs, torch.tensor([t])
        )
        grad_v, *grads = torch.autograd.grad(log_prob.sum(), [v, *weights], allow_unused=True)
        whole = torch.cat(
            [(torch.zeros_like(w) if g is None else g).flatten() for w, g in zip(weights, grads)]
        ).double()
        sizes.append(torch.stack([grad_v.double().norm(), whole.norm()]))
        policy += advantage * whole / len(batch.advantages)
    return torch.cat([torch.stack(sizes).mean(0), policy.norm()[None]])


def _draw(figure: Figure, norms: Norms) -> None:
    left, middle, right = figure.subplots(1, 3, sharey=True)
    for axes, name, title in (
        (left, "velocity", "on the velocity"),
        (middle, "log_prob", "log-prob, on the weights"),
        (right, "policy", "policy gradient, on the weights"),
    ):
        measured = getattr(norms, name)
        size = np.exp(np.log(measured).mean())
        axes.plot(
            norms.sigma,
            measured / size,
            color=COLORS[0],
            marker="o",
            markersize=3,
            label="measured",
        )
        axes.plot(
            norms.sigma,
            norms.weight * measured / size,
            color=COLORS[2],
            marker="o",
            markersize=3,
            label="equalized",
        )
        for predicted, color, label in (
            (norms.by_std, COLORS[5], "1/sqrt(Sigma)"),
            (norms.by_row, GREY, "N_t = |b|/c"),
        ):
            level = np.exp(np.log(predicted).mean())
            axes.plot(norms.sigma, predicted / level, "--", color=color, linewidth=1.2, label=label)
        axes.set_yscale("log")
        axes.set_title(title, fontsize=9.5)
        axes.set_xlabel("sigma")
    left.set_ylabel("norm of the gradient / its geometric mean")
    left.legend(fontsize=8)


CLAIMS: tuple[Claim, ...] = (
    Claim(
        name="gradient-norm",
        title="Size of the gradient by noise level",
        kind="paper",
        source="Figure 4 and Appendix A.5",
        says="The gradient follows 1/sqrt(Sigma_t) over the steps.",
        find=find_law,
    ),
    Claim(
        name="gradient-range",
        title="Range of the gradient",
        kind="paper",
        source="Figure 4",
        says="The gradient varies by more than one order of magnitude over the steps.",
        find=find_range,
    ),
    Claim(
        name="gradient-equalized",
        title="What the equalizer levels",
        kind="paper",
        source="caption of Figure 3",
        says="The equalizer brings the gradients of all steps to within a small constant factor.",
        find=find_equalizer,
    ),
)
