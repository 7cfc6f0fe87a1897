"""Claims and findings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from matplotlib.figure import Figure

from studies.differences import Difference, holm
from studies.runs import TrainedRun

MARGIN = 0.1
"""Smallest difference that matters, as a share of what the compared runs gain over the base model.
"""
LEVEL = 0.05
"""Significance level of corrected p-values."""

Verdict = Literal["held", "not held", "not decidable"]
Kind = Literal["paper", "ours", "beyond"]
KINDS: Mapping[Kind, str] = {
    "paper": "Claims of the paper",
    "ours": "Our questions about the paper",
    "beyond": "Questions beyond the paper",
}
"""Kind of a claim -> heading."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """The result for a claim.

    Attributes:
        verdict: verdict on the claim at this size.
        text: what no table has, in a sentence or two.
        draw: draws into an empty figure whose colours and fonts are set.
        rows: data of figure and text, column -> value.
        compared: table of the comparisons: a row of headings, then the others.
        table: another table, likewise.
        tested: the pooled difference of a claim about training runs of the paper's study.
    """

    verdict: Verdict
    text: str
    draw: Callable[[Figure], None]
    rows: Sequence[Mapping[str, object]]
    compared: Sequence[Sequence[str]] = ()
    table: Sequence[Sequence[str]] = ()
    tested: Difference | None = None


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
        kind: whether the paper claims it, we ask it about the paper, or it goes beyond the paper.
        source: where the paper, or which other paper, speaks of it; what it says there if that is
            something else.
        says: the claim in one sentence.
        find: decides the claim.
        variants: variants of the protocol whose runs it needs.
        size: size of the figure in inches.
        by_p: whether it is held by the p of `Finding.tested`, if there is one.
    """

    name: str
    title: str
    kind: Kind
    source: str
    says: str
    find: Callable[[Material], Finding]
    variants: tuple[str, ...] = ()
    size: tuple[float, float] = (8.6, 3.4)
    by_p: bool = True

    @property
    def label(self) -> str:
        """Kind and source in a few words."""
        kinds = {"paper": "Paper", "ours": "Ours", "beyond": "Beyond the paper"}
        kind = kinds[self.kind]
        return f"{kind}, {self.source}" if self.source else kind


def corrected(findings: Mapping[Claim, Finding]) -> dict[Claim, Finding]:
    """Correct the p of pooled differences for the number of claims by Holm's method, and the
    verdicts with them."""
    tested = holm(
        {claim.name: finding.tested for claim, finding in findings.items() if finding.tested}
    )
    found = dict(findings)
    for claim, finding in findings.items():
        if difference := tested.get(claim.name):
            fell = claim.by_p and finding.verdict == "held" and difference.corrected >= LEVEL
            verdict = "not decidable" if fell else finding.verdict
            text = f"p {difference.corrected:.2g}. {finding.text}"
            found[claim] = dataclasses.replace(finding, verdict=verdict, text=text)
    return found
