"""What parts measured, beside what was expected of them.

The expectations are for the sizes of a GPU and for an H100 or H200: beside another result stands
`not for this`.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from scripts.gpu.parts import Part, Prediction, result_of
from scripts.gpu.values import Found

CARDS = ("H100", "H200")
HOLDS = {
    "below": operator.lt,
    "above": operator.gt,
    "or more": operator.ge,
    "or below": operator.le,
    "exactly": operator.eq,
}
"""Words of a bound -> (value, number) -> whether it is kept."""


def missed(expected: str, value: float) -> bool:
    """Whether a value is outside an expected bound; other expectations are not bounds."""
    bound = re.fullmatch(r"(below|above|exactly)? ?([\d.]+) ?(or more|or below)?", expected)
    holds = HOLDS.get(bound[1] or bound[3]) if bound else None
    return bound is not None and holds is not None and not holds(value, float(bound[2]))


def measured(prediction: Prediction, found: Found, expected: str) -> str:
    """Return the measured number, with a word if it is outside the expected bound; `absent` if the
    result lacks it."""
    try:
        number = prediction.value(found)
    # a path or a backend that is not there, or did not run
    except (KeyError, StopIteration, ValueError):
        return "absent"
    text = f"{number:.4g}"
    return f"{text}  missed" if missed(expected, number) else text


def predicted(parts: Sequence[Part], out: Path, *, tiny: bool = False) -> Iterator[str]:
    """Yield the lines of a table, for the parts that have left a result in `out`; nothing if none
    has."""
    lines = []
    for part in parts:
        found = result_of(part, out)
        if found is None:
            continue
        is_for_this = not tiny and any(card in found["environment"]["device"] for card in CARDS)
        for prediction in part.predictions:
            expected = prediction.expected if is_for_this else "not for this"
            number = measured(prediction, found, expected)
            lines.append(f"{part.name:<19}{prediction.quantity:<43}{expected:>14}  {number}")
    if lines:
        yield f"{'part':<19}{'quantity':<43}{'expected':>14}  measured"
        yield from lines
