"""The accuracy that every operator owes."""

from collections.abc import Iterable

from sage_fast.tools.checks import Comparison


def assert_accurate(comparisons: Iterable[Comparison], **bounds: dict[str, float]) -> None:
    """Fail on the first tensor that is not finite or errs more than `Comparison.problem` allows.

    Args:
        comparisons: what a check of `sage_fast.tools.checks` yields.
        bounds: name of a tensor -> arguments of `Comparison.problem` for it.
    """
    for comparison in comparisons:
        assert comparison.fused.isfinite().all(), f"{comparison.name}: not finite"
        problem = comparison.problem(**bounds.get(comparison.name, {}))
        assert not problem, problem
