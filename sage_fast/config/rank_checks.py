"""Checks of `model.sequence_parallel` and the number of ranks, made before PyTorch is imported."""

from __future__ import annotations

from sage_fast.config.schema import TrainConfig
from sage_fast.util.errors import UserError


def check_ranks(train: TrainConfig, size: int, ranks: int) -> None:
    """Check that an iteration has a sample for every rank, or for every group of `model.sequence_parallel` ranks.

    Args:
        train: section `train`.
        size: `model.sequence_parallel`.
        ranks: number of ranks of the run.

    Raises:
        UserError: it has too few, or as `check_sequence_parallel`.
    """
    groups, samples = check_sequence_parallel(size, ranks), train.samples
    if samples < groups:
        sharing = next((n for n in (2, 4, 8) if ranks % n == 0 and ranks // n <= samples), None)
        raise UserError(
            f"train.prompts_per_iteration = {train.prompts_per_iteration} and train.group_size = {train.group_size}: "
            f"{samples} samples an iteration for {groups} ranks; expected at least one each. The nearest is {samples} "
            f"ranks, or train.prompts_per_iteration = {-(-groups // train.group_size)}"
            + (f", or model.sequence_parallel = {sharing}" if sharing else "")
        )


def check_sequence_parallel(size: int, ranks: int) -> int:
    """Return the number of sequence groups; each acts as one data-parallel rank.

    Args:
        size: `model.sequence_parallel`.
        ranks: number of ranks of the run.

    Raises:
        UserError: `size` does not divide the ranks.
    """
    if ranks % size:
        more = f"torchrun --nproc-per-node {size} ..." if ranks == 1 else f"{-(-ranks // size) * size} ranks"
        raise UserError(
            f"model.sequence_parallel = {size}: expected a divisor of the number of ranks, which is {ranks}; the "
            f"nearest is {_largest_divisor(ranks, size)}, or start {more}"
        )
    return ranks // size


def check_heads(size: int, heads: int) -> None:
    """Check that a group of `size` ranks can share the heads evenly.

    Raises:
        UserError: it cannot.
    """
    if heads % size:
        raise UserError(
            f"model.sequence_parallel = {size}: expected a divisor of the transformer's {heads} attention heads, which "
            f"the GPUs of a sample share; the nearest is {_largest_divisor(heads, size)}"
        )


def _largest_divisor(number: int, most: int) -> int:
    return max(d for d in range(1, min(number, most) + 1) if number % d == 0)
