"""What an iteration records: its metrics, and the times of its phases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sage_fast.algorithm.objective import Loss
from sage_fast.rewards.interface import Scores
from sage_fast.util.errors import NonFiniteError
from sage_fast.util.meters import REWARD_PART, Metrics, Stopwatch, slowest_and_fastest
from sage_fast.util.ranks import all_gather_object, world_size


class Observer:
    """Collects what the trainer reports in an iteration, and makes its row of `metrics.jsonl`.

    Attributes:
        watch: times the phases.
        metrics: numbers by name.
    """

    def __init__(self, device: torch.device) -> None:
        self.watch = Stopwatch(device)
        self.metrics = Metrics()

    def record_rewards(
        self, scores: Scores, advantages: Tensor, valid: Tensor, equal: Tensor
    ) -> None:
        """Record statistics of the composite as `reward/<statistic>` and means of its parts as
        `reward_part/<part>`.

        Args:
            scores: of the samples of all ranks, group by group.
            advantages: `[P, G]`.
            valid: bool `[P, G]`, False for a failed reward.
            equal: bool `[P]`, True for a group without advantages.

        Raises:
            NonFiniteError: every reward failed.
        """
        rewards = scores.rewards.view_as(valid)
        counted = rewards[valid]
        if not counted.numel():
            raise NonFiniteError(
                "every reward of this iteration failed; nothing can be learned from it"
            )
        deviations = []
        for of_group, valid_of_group in zip(rewards, valid):
            if valid_of_group.any():
                deviations.append(of_group[valid_of_group].std(correction=0))
        too_few = valid.sum(1) < 2  # no advantage

        record = self.metrics.set
        record("reward/mean", float(counted.mean()))
        record("reward/std", float(torch.stack(deviations).mean()))
        record("reward/zero_std_groups", float(equal.float().mean()))
        record("reward/dropped", int((~valid).sum()))
        record("reward/dropped_groups", int(too_few.sum()))
        record("reward/retried", scores.retried)
        record("advantage/abs_mean", float(advantages[valid].abs().mean()))
        for part, values in scores.parts.items():
            finite = values[values.isfinite()]
            record(REWARD_PART + part, float(finite.mean()))

    def record_losses(self, loss: Loss, policy_norm: Tensor, steps: Sequence[int]) -> None:
        """Record the loss, the KLs and the ratio of a micro-batch.

        Args:
            loss: of the micro-batch.
            policy_norm: gradient norm of the policy term in the velocity, `[B]`, which the
                equalizer levels (Eq. 38).
            steps: step of each transition.
        """
        add = self.metrics.add
        add("loss", loss.total)
        add("policy_loss", loss.policy)
        add("kl/anchor", loss.kl_anchor)
        add("kl/velocity", loss.kl_velocity)
        add("ratio/mean", loss.ratio)
        add("ratio/min", loss.ratio, "min")
        add("ratio/max", loss.ratio, "max")
        add("ratio/clip_fraction", loss.clipped)
        add("log_prob/max_delta", loss.ratio.log().abs(), "max")
        self.metrics.add_by_step(steps, policy_norm)

    def row(self, state: Mapping[str, float], steps: int) -> dict[str, object]:
        """Return the metrics of the iteration. Collective.

        Args:
            state: what the trainer knows at the end, by name.
            steps: T.
        """
        row: dict[str, object] = {**state, **self.metrics.reduce()}
        row["velocity_grad_norm"] = self.metrics.by_step(steps)
        seconds = self.watch.seconds()
        if world_size() > 1:
            row["time/ranks"] = slowest_and_fastest(all_gather_object(seconds))
        return row | seconds | self.watch.peaks()
