"""Policy gradients of the rollout's own forwards, so that a step is not computed again to be trained.

With one update an iteration the ratio is 1, and a sample's policy gradient is -A_i sum_t S_t grad log p_t(i). A step
without a KL is run with gradients and its backward follows at once. Its sample's sum over t waits for A_i. A step with
a KL is replayed after the rewards are known, with one backward for both terms.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sage_fast.algorithm.objective import StepConstants
from sage_fast.algorithm.schedule import Transition
from sage_fast.models.policy import Policy
from sage_fast.ops import transition_score
from sage_fast.util.metrics import Stopwatch


class RolloutGradients:
    """Sums over steps of S_t grad log p_t, one for each sample of this rank whose rollout trains steps.

    Args:
        policy: its trained weights get the gradients.
        constants: of the scored transitions, `[T]`.
        equalizes: whether S_t weighs the steps; otherwise it is 1 here.
    """

    def __init__(self, policy: Policy, constants: StepConstants, *, equalizes: bool) -> None:
        self.parameters, self.guidance, self.coefs = [*policy.parameters().values()], policy.guidance, constants.coefs
        self.weights = constants.equalizer if equalizes else torch.ones_like(constants.equalizer)
        self._log_probs: dict[Transition, Tensor] = {}
        self._sums: dict[int, list[Tensor | None]] = {}

    def train(
        self, watch: Stopwatch, sample: int, t: int, x: Tensor, run: Callable[[], tuple[Tensor, ...]]
    ) -> tuple[Tensor, ...]:
        """Run a step of one sample from latents `x`, and its backward, as phase `train`.

        Return the results of `run`, its `denoise`.
        """
        with watch("train"):
            x_next, rolled_out, v, *rest = run()
            step, v_uncond = torch.full((1,), t, device=x.device), next(iter(rest), None)
            log_prob, *_ = transition_score(x, x_next, v, self.coefs, step, v_uncond=v_uncond, guidance=self.guidance)
            weighted = (self.weights[t] * log_prob).sum()
            gradients = torch.autograd.grad(weighted, self.parameters, allow_unused=True)
            before = self._sums.get(sample, itertools.repeat(None))
            self._sums[sample] = [
                old if new is None else new if old is None else old.add_(new) for old, new in zip(before, gradients)
            ]
            self._log_probs[sample, t] = log_prob.detach()
            return x_next, rolled_out, *(velocity.detach() for velocity in (v, *rest))

    def split(self, transitions: Sequence[Transition]) -> tuple[list[list[Transition]], list[Transition]]:
        """Return the given transitions that the rollout trained, as a micro-batch for each sample, and the others."""
        trained: dict[int, list[Transition]] = defaultdict(list)
        for transition in transitions:
            if transition in self._log_probs:
                trained[transition[0]].append(transition)
        return list(trained.values()), [t for t in transitions if t not in self._log_probs]

    def score(self, micro: Sequence[Transition]) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return log-prob, KL to the anchor and KL to the rollout policy, `[B]`, of a micro-batch of `split`, once.

        The KLs are 0. The log-prob's backward gives the weights the sample's sum in place of a backward through the
        network. None if the rollout did not train it.
        """
        if micro[0] not in self._log_probs:
            return None
        log_prob = torch.cat([self._log_probs[transition] for transition in micro])
        weights = torch.stack([self.weights[t] for _, t in micro])
        log_prob = _FromSum.apply(log_prob, weights, self._sums.pop(micro[0][0]), *self.parameters)
        return log_prob, *(torch.zeros_like(log_prob, requires_grad=True) for _ in range(2))


class _FromSum(torch.autograd.Function):
    """Log-probs of a sample whose gradients are known as the weighted sum over its steps."""

    @staticmethod
    def forward(ctx: Any, log_prob: Tensor, weights: Tensor, gradients: list[Tensor | None], *_: Tensor) -> Tensor:
        ctx.weights, ctx.gradients = weights, gradients
        return log_prob.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        factor = (grad / ctx.weights).mean()  # equal at all steps up to rounding: -A_i of the loss
        return None, None, None, *(None if gradient is None else factor * gradient for gradient in ctx.gradients)
