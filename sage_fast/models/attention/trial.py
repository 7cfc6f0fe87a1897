"""Trials of attention backends on this machine: whether each is right, and how fast it is."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sage_fast.models.attention.backends import ATTENTION, REFERENCE, Attention, sdpa, usable
from sage_fast.util.environment import synchronize
from sage_fast.util.errors import in_one_line

LARGEST_ERROR = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4}
"""Tolerance: relative error, in norm, of the output and of each gradient against SDPA in float32 on
the same inputs. Rounding to the dtype alone gives a quarter of it; dropping the last tile of keys
at 480p gives twice as much."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """Result of trying a backend.

    Attributes:
        milliseconds: time of a forward and a backward; NaN if it does not run or is wrong.
        error: largest relative error of output and gradients; NaN if it does not run.
        agrees: whether its output under `no_grad`, as in a rollout, is that with gradients to the
            bit.
        problem: why it cannot be used; empty if it can.
    """

    milliseconds: float = float("nan")
    error: float = float("nan")
    agrees: bool = True
    problem: str = ""

    def why_skipped(self, needs_agreement: bool) -> str:
        """Return why `auto` skips it; empty if it does not."""
        if self.problem or self.agrees or not needs_agreement:
            return self.problem
        return (
            "its output under no_grad is not that with gradients to the bit: rollouts and training "
            "would disagree"
        )


def fastest(trials: Mapping[str, Trial]) -> str:
    """Return the fastest backend without a problem; `REFERENCE` if there is none."""
    times = {name: trial.milliseconds for name, trial in trials.items() if not trial.problem}
    return min(times, key=times.__getitem__, default=REFERENCE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Use:
    """An attention that a model runs.

    Attributes:
        shape: (B, S, H, D) of the queries on a rank.
        keys: number of keys, as in attention to a text; None: as many as queries.
    """

    shape: tuple[int, int, int, int]
    keys: int | None = None


def measure_attention(
    uses: Sequence[Use], device: torch.device, dtype: torch.dtype
) -> dict[str, Trial]:
    """Try every usable backend in all of its uses, for correctness and then speed; return name ->
    trial.

    Empty if only one backend is usable.
    """
    names = usable(device, dtype)
    if len(names) == 1:
        return {}
    return {name: try_uses(ATTENTION[name], uses, device, dtype) for name in names}


def try_uses(
    attention: Attention, uses: Sequence[Use], device: torch.device, dtype: torch.dtype
) -> Trial:
    """Try a backend in all of its uses; return the sum of the times, and the first problem."""
    trials = []
    for use in uses:
        trial = try_attention(attention, use.shape, device, dtype, use.keys)
        trials.append(trial)
        if trial.problem:
            return trial
    return Trial(
        milliseconds=sum(trial.milliseconds for trial in trials),
        error=max(trial.error for trial in trials),
        agrees=all(trial.agrees for trial in trials),
    )


def try_attention(
    attention: Attention,
    shape: tuple[int, int, int, int],
    device: torch.device,
    dtype: torch.dtype,
    keys: int | None = None,
) -> Trial:
    """Check a backend against SDPA in float32, then time it.

    Failures are reported in `Trial.problem`, not raised.

    Args:
        attention: the backend.
        shape: (B, S, H, D) of the queries.
        device: where it runs.
        dtype: of the activations.
        keys: number of keys, as in attention to a text; None: as many as queries.
    """
    batch, tokens, *heads = shape
    keys = tokens if keys is None else keys
    query = torch.randn(shape, device=device, dtype=dtype)
    key = torch.randn(batch, keys, *heads, device=device, dtype=dtype)
    # strided, as in the blocks
    value = torch.randn(batch, keys, 3, *heads, device=device, dtype=dtype)[:, :, 2]
    inputs = [tensor.requires_grad_() for tensor in (query, key, value)]
    upstream = torch.randn(shape, device=device, dtype=dtype)

    def forward_and_backward() -> tuple[Tensor, ...]:
        out = attention(query, key, value)
        return out, *torch.autograd.grad(out, inputs, upstream)

    times = []
    try:
        results = forward_and_backward()
        with torch.no_grad():
            agrees = torch.equal(
                attention(query.detach(), key.detach(), value.detach()), results[0]
            )
        errors = dict(zip(("values", "dq", "dk", "dv"), _errors(results, inputs, upstream)))
        del results
        for _ in range(3):
            synchronize(device)
            start = time.perf_counter()
            forward_and_backward()
            synchronize(device)
            times.append(1e3 * (time.perf_counter() - start))
    # whatever a broken package raises, from ImportError to a compiler's own
    except Exception as error:
        return Trial(problem=f"it does not run: {in_one_line(error)}")
    limit = LARGEST_ERROR[dtype]
    largest = max(errors.values())
    wrong = [f"{name} {error:.1e}" for name, error in errors.items() if not error <= limit]
    if wrong:
        why = (
            f"it is wrong: relative error against SDPA in float32 of {', '.join(wrong)}, expected "
            f"at most {limit:.0e}"
        )
        return Trial(error=largest, problem=why)
    return Trial(milliseconds=statistics.median(times), error=largest, agrees=agrees)


def _errors(results: tuple[Tensor, ...], inputs: list[Tensor], upstream: Tensor) -> list[float]:
    """Return the relative errors of `[out, dq, dk, dv]`: for each, the larger of the first and the
    last head's.

    Heads are independent. Two of them in float32 cover the whole sequence and both ends of the
    layout at a fraction of the cost.
    """
    largest = [0.0 for _ in results]
    shapes = [tensor.shape for tensor in (inputs[0], *inputs)]
    for batch, head in ((0, 0), (-1, -1)):
        q, k, v, up = (
            t.detach()[batch, :, head].float()[None, :, None] for t in (*inputs, upstream)
        )
        out = sdpa(q.requires_grad_(), k.requires_grad_(), v.requires_grad_())
        expected = (out, *torch.autograd.grad(out, (q, k, v), up))
        for i, (result, reference) in enumerate(zip(results, expected)):
            if result.shape != shapes[i]:
                largest[i] = float("inf")
                continue
            difference = result.detach()[batch, :, head].float() - reference.detach()[0, :, 0]
            error = float(difference.norm() / reference.detach().norm())
            largest[i] = max(largest[i], error) if error == error else float("inf")
    return largest
