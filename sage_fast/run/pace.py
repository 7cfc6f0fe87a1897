"""Settings that are counted in iterations or updates, and too slow to act within a run."""

from __future__ import annotations

from collections.abc import Callable

from sage_fast.algorithm.kl_weight import feedback_row
from sage_fast.algorithm.resolved import ResolvedConfig
from sage_fast.parallel.ema import ema_decay


def _updates(resolved: ResolvedConfig) -> int:
    """Return the number of updates of a run."""
    return resolved.config.train.iterations * resolved.config.train.optimizer_steps


def _anchor_interval(resolved: ResolvedConfig) -> str | None:
    objective, train = resolved.objective, resolved.config.train
    if not objective.kl_acts or not objective.strategy.moves or objective.kl.beta_pos == 0:
        return None
    # The anchor moves between iterations; after the last one nothing is left to compare with it.
    before_last = (train.iterations - 1) * train.optimizer_steps
    return (
        None
        if objective.kl.anchor_interval <= before_last
        else "the anchor stays at the start, as with `fixed`"
    )


def _kl_warmup_steps(resolved: ResolvedConfig) -> str | None:
    kl = resolved.objective.kl
    if (
        not resolved.objective.kl_acts
        or kl.lambda_min == kl.lambda_max
        or kl.warmup_steps < _updates(resolved)
    ):
        return None
    # The last update has the weight that the updates before it led to.
    reached = (
        kl.lambda_min + (kl.lambda_max - kl.lambda_min) * (_updates(resolved) - 1) / kl.warmup_steps
    )
    return f"lambda ends at {reached:.1e} and never reaches kl.lambda_max"


def _history(resolved: ResolvedConfig) -> str | None:
    kl = resolved.objective.kl
    if not resolved.objective.kl_acts or feedback_row(kl.feedback).factors is None:
        return None
    if kl.history < _updates(resolved):
        return None
    return "the average is over all updates, never over the last ones"


def _warmup_steps(resolved: ResolvedConfig) -> str | None:
    train, updates = resolved.config.train, _updates(resolved)
    if train.warmup_steps <= updates:
        return None
    reached = train.learning_rate * updates / train.warmup_steps
    return f"the learning rate ends at {reached:.1e} and never reaches train.learning_rate"


def _ema_decay(resolved: ResolvedConfig) -> str | None:
    train, updates = resolved.config.train, _updates(resolved)
    if train.ema_decay == 0:
        return None
    if resolved.config.sampling.averaged_weights:
        left = train.ema_decay**updates
        return (
            None
            if left <= 0.5
            else f"the average still is {100 * left:.0f} % of the weights at the start"
        )
    last = ema_decay(train, updates, warms_up=True)
    return None if last == train.ema_decay else f"the decay rises to {last:.3f} only"


def _checkpoint_interval(resolved: ResolvedConfig) -> str | None:
    train = resolved.config.train
    return None if train.checkpoint_interval < train.iterations else "no checkpoint before the end"


def _eval_interval(resolved: ResolvedConfig) -> str | None:
    interval = resolved.config.eval.interval
    return (
        None
        if interval < resolved.config.train.iterations
        else "no evaluation between the first and the last"
    )


PACED: dict[str, Callable[[ResolvedConfig], str | None]] = {
    "kl.anchor_interval": _anchor_interval,
    "kl.warmup_steps": _kl_warmup_steps,
    "kl.history": _history,
    "train.warmup_steps": _warmup_steps,
    "train.ema_decay": _ema_decay,
    "train.checkpoint_interval": _checkpoint_interval,
    "eval.interval": _eval_interval,
}
"""Setting in units of iterations or updates -> what it leaves undone in this run; None where it
acts."""


def pace_warning(resolved: ResolvedConfig) -> str | None:
    """Return which settings cannot act within the run's updates, and what follows; None if all
    can."""
    train = resolved.config.train
    found = []
    for name, problem_of in PACED.items():
        if problem := problem_of(resolved):
            section, _, field = name.partition(".")
            value = getattr(getattr(resolved.config, section), field)
            found.append(f"{name} = {value:g} ({problem})")
    if not found:
        return None
    updates = _counted(_updates(resolved), "update")
    iterations = _counted(train.iterations, "iteration")
    return f"too few updates ({updates} in {iterations}) for {'; '.join(found)}"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
