"""What a claim is, and what is found about it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from matplotlib.figure import Figure

from studies.paper.training import TrainedRun

SMALLEST = 0.05
"""The smallest difference of the composite that matters here: about a tenth of what the whole demo gains."""
LEVEL = 0.05
"""A difference stands if its corrected p-value is below this."""

Verdict = Literal["held", "not held", "not decidable"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """
    Attributes:
        verdict: on the claim, at this size.
        text: two sentences of what was found, with its numbers.
        draw: draws into an empty figure, whose colours and fonts are set.
        rows: the data of the figure and of the text, column -> value.
    """

    verdict: Verdict
    text: str
    draw: Callable[[Figure], None]
    rows: Sequence[Mapping[str, object]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Material:
    """What a claim is decided from.

    Attributes:
        quick: a short computation is asked for.
        runs: variant -> its runs, in the order of their seeds.
    """

    quick: bool
    runs: Mapping[str, Sequence[TrainedRun]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claim:
    """
    Attributes:
        name: on the command line, and of its files.
        title: heading.
        source: figure, table or equation of the paper, or "beyond the paper".
        says: the claim, one sentence.
        find: decides it.
        variants: of the protocol, whose runs it needs.
        size: of the figure, inches.
    """

    name: str
    title: str
    source: str
    says: str
    find: Callable[[Material], Finding]
    variants: tuple[str, ...] = ()
    size: tuple[float, float] = (8.6, 3.4)
