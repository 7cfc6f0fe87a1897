"""Before the first update, check that the importance ratio is larger than rounding error.

At the rollout's weights the ratio is exactly 1 if training reproduces the rollout's log-probs. After any update,
however small, low precision rounds every activation differently: the velocity moves at random, and the log-ratio falls
by the KL of that movement (bias) and scatters (noise).
"""

from __future__ import annotations

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

An adapter's response is a product of two weights, so it is not proportional to larger movements. Rounding grows a
little with the distance: on the testbed its bias was 4.0e-4 at 1e-5, 4.9e-4 at 1e-4 and 6.0e-4 at 1e-3.
"""
Micro = Sequence[tuple[int, int]]
"""Transitions (sample, step) that are scored together: a micro-batch."""


def check_parity(
    replay: Replay, batch: Batch, constants: StepConstants, train: TrainConfig, seed: int
) -> dict[str, float]:
    """Score stored transitions with the rollout's weights, and with moved weights if a limit will see an update.

    Args:
        replay: scores with the rollout's weights.
        batch: batch of the first iteration.
        constants: those of all steps, `[T]`.
        train: section `train`.
        seed: of the run; draws the movement of the weights.

    Returns:
        `log_prob/parity` and, after a moved scoring, `log_prob/rounding`.

    Raises:
        ParityError: rounding would drown the ratio, or the KL that masks.
    """
    objective = replay.objective
    row = objective.surrogate

    def first(samples: int) -> list[Micro]:
        """Return micro-batches of the first samples that each step has."""
        by_step = itertools.groupby(batch.trajectories.trained, key=lambda transition: transition[1])
        transitions = [transition for _, of_step in by_step for transition in itertools.islice(of_step, samples)]
        return replay.micro_batches(batch, transitions, train.batch_size)

    change = torch.zeros((), device=replay.policy.device)
    for micro in replay.policy.states.pad_to_largest(first(2), batch.idle.replay):
        scores = replay.score(batch, micro)
        change = change.maximum((scores.log_prob - scores.log_prob_old).detach().abs().max())
    delta = float(all_reduce(change, "max"))
    metrics = {"log_prob/parity": delta}
    if row.uses_ratio:
        check_replay(delta, objective.settings.clip_range)
    if objective.off_policy and (row.uses_ratio or row.uses_kl):
        distance = min(train.learning_rate, LARGEST_MOVE)
        moments = moments_after_an_update(replay, batch, first(4), constants, distance=distance, seed=seed)
        metrics["log_prob/rounding"] = check_rounding(*moments, constants.equalizer, objective, distance)
    return metrics


def check_replay(delta: float, clip_range: float) -> None:
    """Check that training reproduces the rollout's log-probs.

    Args:
        delta: largest |log-prob difference| between rollout and training.
        clip_range: `objective.clip_range`.

    Raises:
        ParityError: `delta` is above a tenth of the clip range, so the ratio could not be told from noise.
    """
    limit = clip_range / 10
    if not delta <= limit:
        raise ParityError(
            f"scoring stored transitions again changes the log-prob by up to {delta:.3e}, more than a tenth of "
            f"objective.clip_range ({limit:.1e}): the ratio would measure rounding, not the policy. Use the same "
            "batch size in sampling and training, model.dtype = float32, or a wider clip range"
        )


def moved(state: Mapping[str, Tensor], distance: float, seed: int) -> dict[str, Tensor]:
    """Return `state` with each element moved by plus or minus `distance`, like one update of Adam.

    `seed` draws the signs.
    """
    seed = derive_seed(seed, "rounding")
    generators = {t.device: torch.Generator(t.device).manual_seed(seed) for t in state.values()}
    return {
        name: t + distance * (2 * torch.empty_like(t).bernoulli_(0.5, generator=generators[t.device]) - 1)
        for name, t in state.items()
    }


@torch.no_grad()
def moments_after_an_update(
    replay: Replay, batch: Batch, micros: Sequence[Micro], constants: StepConstants, *, distance: float, seed: int
) -> tuple[Tensor, Tensor]:
    """Measure the log-ratio with every weight moved, then moved twice as far; restore the weights afterwards.

    Collective.

    Args:
        replay: its policy's weights are moved.
        batch: the samples.
        micros: micro-batches to score.
        constants: those of all steps, `[T]`.
        distance: of the first movement.
        seed: draws its direction.

    Returns:
        For each distance float64 `[T, 2]` on the host: bias and squared noise by step, averaged over the samples of all
        ranks; 0 at steps without a transition. The bias is minus the expected log-ratio, or the KL that masks.
    """
    policy, found = replay.policy, []
    padded = functools.partial(policy.states.pad_to_largest, idle=batch.idle.replay)
    v_old = [replay.velocity(batch, micro) for micro in padded(micros)]
    for factor in (1, 2):
        sums = torch.zeros(len(constants.bias), 3, dtype=torch.float64, device=policy.device)
        with policy.using(moved(policy.parts(), factor * distance, seed)):
            for micro, v in padded(list(zip(micros, v_old))):
                scores, steps = replay.score(batch, micro, v), on_device([t for _, t in micro], policy.device)
                bias = scores.kl_old if replay.objective.surrogate.uses_kl else constants.bias[steps] * scores.kl_old
                noise = scores.log_prob - scores.log_prob_old + bias
                sums.index_add_(0, steps, torch.stack([bias, noise.square(), torch.ones_like(bias)], dim=1).double())
        sums = all_reduce(sums).cpu()
        found.append(sums[:, :2] / sums[:, 2:].clamp(min=1))
    near, far = found
    return near, far


def rounding_of(near: Tensor, far: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bias and noise of rounding alone, each `[T]`, from the moments after the two movements.

    Twice the movement has four times the true KL but the same rounding: near = r + true, far = r + 4 true. The squared
    noise is split in proportion to the bias, which few samples determine well.
    """
    bias = ((4 * near[:, 0] - far[:, 0]) / 3).clamp(min=0)
    squares = [torch.where(moments[:, 0] == 0, 0, bias / moments[:, 0] * moments[:, 1]) for moments in (near, far)]
    return bias, torch.stack(squares).mean(0).sqrt()


def check_rounding(near: Tensor, far: Tensor, equalizer: Tensor, objective: Objective, distance: float) -> float:
    """Report how much of the limit on the ratio or the KL rounding takes up after one update; raise if it is too much.

    Args:
        near, far: result of `moments_after_an_update`.
        equalizer: S_t by step, `[T]`.
        objective: the resolved settings.
        distance: of the first movement.

    Returns:
        Rounding in the clipped log-ratio, or in the KL that masks, at the step where it is largest.

    Raises:
        ParityError: rounding is above a third of the limit.
    """
    bias, noise = rounding_of(near, far)
    if objective.surrogate.uses_kl:
        used, limited, setting = bias, "KL that masks", "kl_limit"
    else:
        limited, setting = "log-ratio that is clipped", "clip_range"
        used = noise if objective.centres_ratio else bias + noise
        used = used * equalizer.to(used) if objective.normalises_ratio else used
    step, limit = int(used.argmax()), getattr(objective.settings, setting)
    value = float(used[step])
    share = value / limit
    found = (
        f"rounding after an update of {distance:.0e} a weight: {value:.1e} in the {limited}, at "
        f"step {step} (bias {-float(bias[step]):.1e}, noise {float(noise[step]):.1e}), {share:.1e} of "
        f"objective.{setting} ({limit:.0e})"
    )
    would_centre = setting == "clip_range" and not objective.centres_ratio and bias[step] > noise[step]
    advice = (
        f"the limit acts on rounding, not on the policy. Use train.optimizer_steps = 1, "
        f"{'objective.ratio = centred, ' * bool(would_centre)}a wider objective.{setting}, model.dtype = float32, or a "
        "larger sampling.eta"
    )
    if not share <= 1 / 3:
        raise ParityError(f"{found}, more than a third: {advice}")
    log.info(wrapped(f"{found}, more than a tenth: {advice}" if share > 0.1 else found))
    return value
