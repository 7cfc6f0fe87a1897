"""Claims and findings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from matplotlib.figure import Figure

from studies.paper.training import TrainedRun

SMALLEST = 0.05
"""Smallest difference of the composite that matters here: about a tenth of the demo's whole gain."""
LEVEL = 0.05
"""Significance level of corrected p-values."""

Verdict = Literal["held", "not held", "not decidable"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """The result for a claim.

    Attributes:
        verdict: verdict on the claim at this size.
        text: two sentences with the numbers.
        draw: draws into an empty figure whose colours and fonts are set.
        rows: data of figure and text, column -> value.
    """

    verdict: Verdict
    text: str
    draw: Callable[[Figure], None]
    rows: Sequence[Mapping[str, object]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Material:
    """The input for deciding a claim.

    Attributes:
        quick: whether to keep the computation short.
        runs: variant -> its runs, by seed.
    """

    quick: bool
    runs: Mapping[str, Sequence[TrainedRun]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claim:
    """A claim to decide.

    Attributes:
        name: name on the command line and of its files.
        title: heading.
        source: figure, table or equation of the paper, or "beyond the paper".
        says: the claim in one sentence.
        find: decides the claim.
        variants: variants of the protocol whose runs it needs.
        size: size of the figure in inches.
    """

    name: str
    title: str
    source: str
    says: str
    find: Callable[[Material], Finding]
    variants: tuple[str, ...] = ()
    size: tuple[float, float] = (8.6, 3.4)
