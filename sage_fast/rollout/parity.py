"""Before the first update, check that the importance ratio is larger than rounding error.

At the rollout's weights the ratio is exactly 1 if training reproduces the rollout's log-probs.
After any update, however small, low precision rounds every activation differently: the velocity
moves at random, and the log-ratio falls by the KL of that movement (bias) and scatters (noise).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sage_fast.algorithm.objective import Objective, StepConstants
from sage_fast.config.schema import TrainConfig
from sage_fast.rollout.batch import Batch
from sage_fast.rollout.replay import Replay
from sage_fast.rollout.trajectories import on_device
from sage_fast.util.console import wrapped
from sage_fast.util.errors import ParityError
from sage_fast.util.ranks import all_reduce
from sage_fast.util.seeding import derive_seed

log = logging.getLogger(__name__)

LARGEST_MOVE = 1e-5
"""Largest distance by which `moments_after_an_update` moves a weight.

An adapter's response is a product of two weights, so it is not proportional to larger movements.
Rounding grows a little with the distance: on the testbed its bias was 4.0e-4 at 1e-5, 4.9e-4 at
1e-4 and 6.0e-4 at 1e-3.
"""
Micro = Sequence[tuple[int, int]]
"""Transitions (sample, step) that are scored together: a micro-batch."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parity:
    """What the gate measured.

    Attributes:
        metrics: `log_prob/parity`; after a moved scoring, `kl/rounding`, and `log_prob/rounding` if
            a limit sees it.
        kl: KL that rounding makes between velocities of equal weights, float64 `[T]` on the host; 0
            where it was not measured.
    """

    metrics: dict[str, float]
    kl: Tensor


def check_parity(
    replay: Replay,
    batch: Batch,
    constants: StepConstants,
    train: TrainConfig,
    seed: int,
    *,
    measures_kl: bool = True,
) -> Parity:
    """Score stored transitions with the rollout's weights, and with moved weights if a limit or a
    KL sees an update.

    Args:
        replay: scores with the rollout's weights.
        batch: batch of the first iteration.
        constants: those of all steps, `[T]`.
        train: section `train`.
        seed: of the run; draws the movement of the weights.
        measures_kl: whether to measure the KL that rounding makes; a resumed run has the value of
            its start.

    Raises:
        ParityError: rounding would drown the ratio, or the KL that masks.
    """
    objective = replay.objective
    row = objective.surrogate
    stored = batch.trajectories

    def first(samples: int) -> list[Micro]:
        """Return micro-batches of the first samples that each step has."""
        by_step = itertools.groupby(stored.trained, key=lambda transition: transition[1])
        transitions = [
            transition
            for _, of_step in by_step
            for transition in itertools.islice(of_step, samples)
        ]
        return replay.micro_batches(batch, transitions, train.batch_size)

    sums = torch.zeros(len(constants.bias), 2, dtype=torch.float64, device=replay.policy.device)
    change = torch.zeros((), device=replay.policy.device)
    for micro in replay.policy.states.pad_to_largest(first(2), batch.idle.replay):
        v_old = stored.gather(stored.velocities, micro) if stored.velocities else None
        scores = replay.score(batch, micro, v_old)
        change = change.maximum((scores.log_prob - scores.log_prob_old).detach().abs().max())
        kl = scores.kl_old.detach()
        kl_and_count = torch.stack([kl, torch.ones_like(kl)], dim=1)
        sums.index_add_(0, steps_of(micro, kl), kl_and_count.double())

    delta = float(all_reduce(change, "max"))
    sums = all_reduce(sums).cpu()
    kl = sums[:, 0] / sums[:, 1].clamp(min=1)

    metrics = {"log_prob/parity": delta}
    if row.uses_ratio:
        check_replay(delta, objective.settings.clip_range)

    limited = objective.off_policy and (row.uses_ratio or row.uses_kl)
    if limited or (measures_kl and objective.kl_pulls):
        distance = min(train.learning_rate, LARGEST_MOVE)
        # A limit needs the scatter between samples; a KL is a mean over all elements of one.
        micros = first(4 if limited else 2)
        moments = moments_after_an_update(
            replay, batch, micros, constants, distance=distance, seed=seed
        )
        if limited:
            metrics["log_prob/rounding"] = check_rounding(
                *moments.log_ratio, constants.equalizer, objective, distance
            )
        kl = torch.maximum(kl, without_response(*moments.kl))
        if measures_kl:
            metrics["kl/rounding"] = float(kl.max())
    return Parity(metrics=metrics, kl=kl)


def check_replay(delta: float, clip_range: float) -> None:
    """Check that training reproduces the rollout's log-probs.

    Args:
        delta: largest |log-prob difference| between rollout and training.
        clip_range: `objective.clip_range`.

    Raises:
        ParityError: `delta` is above a tenth of the clip range, so the ratio could not be told from
            noise.
    """
    limit = clip_range / 10
    if not delta <= limit:
        raise ParityError(
            f"scoring stored transitions again changes the log-prob by up to {delta:.3e}, more "
            f"than a tenth of objective.clip_range ({limit:.1e}): the ratio would measure "
            "rounding, not the policy. Use the same batch size in sampling and training, "
            "model.dtype = float32, or a wider clip range"
        )


def moved(state: Mapping[str, Tensor], distance: float, seed: int) -> dict[str, Tensor]:
    """Return `state` with each element moved by plus or minus `distance`, like one update of Adam.

    `seed` draws the signs.
    """
    seed = derive_seed(seed, "rounding")
    generators = {t.device: torch.Generator(t.device).manual_seed(seed) for t in state.values()}
    found = {}
    for name, t in state.items():
        ones = torch.empty_like(t).bernoulli_(0.5, generator=generators[t.device])
        found[name] = t + distance * (2 * ones - 1)
    return found


def steps_of(micro: Micro, like: Tensor) -> Tensor:
    """Return the steps of transitions, int64 `[B]` on the device of `like`."""
    return on_device([t for _, t in micro], like.device)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Moments:
    """What scoring with moved weights measured, once and twice as far, float64 on the host; 0 at
    steps without it.

    Attributes:
        log_ratio: for each distance `[T, 2]`: bias and squared noise by step, averaged over the
            samples of all ranks. The bias is minus the expected log-ratio, or the KL that masks.
        kl: for each distance `[T]`: KL to the rollout policy by step.
    """

    log_ratio: tuple[Tensor, Tensor]
    kl: tuple[Tensor, Tensor]


@torch.no_grad()
def moments_after_an_update(
    replay: Replay,
    batch: Batch,
    micros: Sequence[Micro],
    constants: StepConstants,
    *,
    distance: float,
    seed: int,
) -> Moments:
    """Measure the log-ratio with every weight moved, then moved twice as far; restore the weights
    afterwards.

    Collective.

    Args:
        replay: its policy's weights are moved.
        batch: the samples.
        micros: micro-batches to score.
        constants: those of all steps, `[T]`.
        distance: of the first movement.
        seed: draws its direction.
    """
    policy = replay.policy
    found = []
    padded = functools.partial(policy.states.pad_to_largest, idle=batch.idle.replay)
    v_old = [replay.velocity(batch, micro) for micro in padded(micros)]
    for factor in (1, 2):
        sums = torch.zeros(len(constants.bias), 4, dtype=torch.float64, device=policy.device)
        with policy.using(moved(policy.parts(), factor * distance, seed)):
            for micro, v in padded(list(zip(micros, v_old))):
                scores = replay.score(batch, micro, v)
                steps = steps_of(micro, scores.kl_old)
                kl = scores.kl_old
                bias = kl if replay.objective.surrogate.uses_kl else constants.bias[steps] * kl
                noise = scores.log_prob - scores.log_prob_old + bias
                values = torch.stack([bias, noise.square(), kl, torch.ones_like(kl)], dim=1)
                sums.index_add_(0, steps, values.double())
        sums = all_reduce(sums).cpu()
        found.append(sums[:, :3] / sums[:, 3:].clamp(min=1))
    moments_1x, moments_2x = found
    return Moments(
        log_ratio=(moments_1x[:, :2], moments_2x[:, :2]),
        kl=(moments_1x[:, 2], moments_2x[:, 2]),
    )


def without_response(kl_1x: Tensor, kl_2x: Tensor) -> Tensor:
    """Return what is left of a KL when the movement goes to 0, which is rounding.

    Twice the movement has four times the true KL but the same rounding: kl_1x = r + true, kl_2x =
    r + 4 true.
    """
    return ((4 * kl_1x - kl_2x) / 3).clamp(min=0)


def rounding_of(moments_1x: Tensor, moments_2x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bias and noise of rounding alone, each `[T]`, from the moments after the two
    movements.

    The squared noise is split in proportion to the bias, which few samples determine well.
    """
    bias = without_response(moments_1x[:, 0], moments_2x[:, 0])
    squares = [
        torch.where(moments[:, 0] == 0, 0, bias / moments[:, 0] * moments[:, 1])
        for moments in (moments_1x, moments_2x)
    ]
    return bias, torch.stack(squares).mean(0).sqrt()


def check_rounding(
    moments_1x: Tensor, moments_2x: Tensor, equalizer: Tensor, objective: Objective, distance: float
) -> float:
    """Report how much of the limit on the ratio or the KL rounding takes up after one update; raise
    if it is too much.

    Args:
        moments_1x, moments_2x: `Moments.log_ratio`.
        equalizer: S_t by step, `[T]`.
        objective: the resolved settings.
        distance: of the first movement.

    Returns:
        Rounding in the clipped log-ratio, or in the KL that masks, at the step where it is largest.

    Raises:
        ParityError: rounding is above a third of the limit.
    """
    bias, noise = rounding_of(moments_1x, moments_2x)
    if objective.surrogate.uses_kl:
        used = bias
        limited = "KL that masks"
        setting = "kl_limit"
    else:
        used = noise if objective.centres_ratio else bias + noise
        if objective.normalises_ratio:
            used = used * equalizer.to(used)
        limited = "log-ratio that is clipped"
        setting = "clip_range"

    step = int(used.argmax())
    value = float(used[step])
    limit = getattr(objective.settings, setting)
    share = value / limit
    found = (
        f"rounding after an update of {distance:.0e} a weight: {value:.1e} in the {limited}, at "
        f"step {step} (bias {-float(bias[step]):.1e}, noise {float(noise[step]):.1e}), {share:.1e} "
        f"of objective.{setting} ({limit:.0e})"
    )
    would_centre = (
        setting == "clip_range" and not objective.centres_ratio and bias[step] > noise[step]
    )
    centring = "objective.ratio = centred, " if would_centre else ""
    advice = (
        "the limit acts on rounding, not on the policy. Use train.optimizer_steps = 1, "
        f"{centring}a wider objective.{setting}, model.dtype = float32, or a larger sampling.eta"
    )
    if not share <= 1 / 3:
        raise ParityError(f"{found}, more than a third: {advice}")
    if share > 0.1:
        log.info(wrapped(f"{found}, more than a tenth: {advice}"))
    else:
        name = setting.replace("_", " ")
        log.info(f"rounding moves the ratio by {100 * share:.1g} % of the {name} (fine)")
        log.debug(found)  # only into the log file
    return value
