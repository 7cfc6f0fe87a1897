"""Whether ranks can share samples (`model.sequence_parallel`), found before a model is loaded."""

from __future__ import annotations

import importlib.util

from sage_fast.util.errors import UserError


def check_sequence_parallel(size: int, ranks: int) -> int:
    """The number of sequence groups, each one data-parallel rank.

    Args:
        size: `model.sequence_parallel`.
        ranks: of the run.

    Raises:
        UserError: `size` does not divide the ranks, or DeepSpeed is not installed.
    """
    if ranks % size:
        more = (
            f"torchrun --nproc-per-node {size} -m sage_fast ..." if ranks == 1 else f"{-(-ranks // size) * size} ranks"
        )
        raise UserError(
            f"model.sequence_parallel = {size}: expected a divisor of the number of ranks, which is {ranks}; the "
            f"nearest is {_largest_divisor(ranks, size)}, or start {more}"
        )
    if size > 1 and importlib.util.find_spec("deepspeed") is None:
        raise UserError(
            f"model.sequence_parallel = {size}: needs DeepSpeed, which is not installed: pip install "
            "'sage-fast[deepspeed]'; or set 1"
        )
    return ranks // size


def check_heads(size: int, heads: int) -> None:
    """
    Raises:
        UserError: the ranks of a group cannot share the heads evenly.
    """
    if heads % size:
        raise UserError(
            f"model.sequence_parallel = {size}: expected a divisor of the transformer's {heads} attention heads, which "
            f"the GPUs of a sample share; the nearest is {_largest_divisor(heads, size)}"
        )


def _largest_divisor(number: int, most: int) -> int:
    return max(d for d in range(1, min(number, most) + 1) if number % d == 0)
