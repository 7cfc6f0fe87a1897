"""What the study of the first forty iterations found."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sage_fast.report.charts import COLORS
from studies.demo.early import (
    DEMO,
    ENDPOINT,
    GROWING,
    HAND_OVER,
    NFT,
    QUARTER,
    RANK,
    Runs,
    flops_of,
    lengths,
    looks,
    margin,
)
from studies.demo.titles import TITLES
from studies.differences import Difference, difference_of_runs, means_by_prompt
from studies.figures import draw_intervals
from studies.finding import Claim, Finding, Material, Verdict
from studies.race.findings import judge_above
from studies.race.ratio import Scores, mean_of
from studies.runs import TrainedRun

PARTS = ("vq", "mq", "ta")
"""Parts of the composite, which every arm is evaluated by, whatever it was trained on."""
LAST = max(looks())


def scores_after(run: TrainedRun, iteration: int) -> dict[str, float]:
    """Return prompt -> mean composite over its videos in the evaluation after `iteration`."""
    [evaluation] = [each for each in run.evaluations if each["iteration"] == iteration]
    columns = [evaluation["parts"][part] for part in PARTS]
    return means_by_prompt(evaluation["prompts"], [sum(values) for values in zip(*columns)])


def gains_after(runs: Sequence[TrainedRun], iteration: int) -> list[dict[str, float]]:
    """Return prompt -> gain in the composite over the model before training, for each run."""
    found = []
    for run in runs:
        before = scores_after(run, 0)
        after = scores_after(run, iteration)
        found.append({prompt: score - before[prompt] for prompt, score in after.items()})
    return found


def above(first: Sequence[TrainedRun], second: Sequence[TrainedRun], iteration: int) -> Difference:
    """Return the difference of two arms after `iteration`, paired over seeds and prompts."""
    return difference_of_runs(gains_after(first, iteration), gains_after(second, iteration))


def gains_on_the_way(found: Runs, arm: str, budget: float) -> list[dict[str, float]]:
    """Return prompt -> mean gain over the FLOPs up to `budget`, for each seed.

    The gains of the runs annealed to each end are joined by straight lines, from 0 before training;
    after its last run a course stays where it is.
    """
    x = [0.0] + [flops_of(arm, length) for length in lengths(arm)]
    ends = [gains_after(found[arm][length], _last(found[arm][length])) for length in lengths(arm)]
    grid = [place for place in x if place < budget] + [budget]
    by_seed = []
    for of_lengths in zip(*ends, strict=True):
        means = {}
        for prompt in of_lengths[0]:
            y = [0.0] + [gains[prompt] for gains in of_lengths]
            means[prompt] = float(np.trapezoid(np.interp(grid, x, y), grid)) / budget
        by_seed.append(means)
    return by_seed


def _last(runs: Sequence[TrainedRun]) -> int:
    """Return the iteration of the last evaluation: with `--quick` an earlier one than was asked."""
    return int(runs[0].evaluations[-1]["iteration"])


def _budget() -> float:
    return flops_of(DEMO, LAST)


def _on_the_way(found: Runs, first: str, second: str) -> Difference:
    scores: list[Scores] = [gains_on_the_way(found, arm, _budget()) for arm in (first, second)]
    return difference_of_runs(*scores)


def _ends(found: Runs, arm: str) -> list[tuple[int, list[dict[str, float]]]]:
    """Return the length of each of an arm's runs, and the gains at their end by seed."""
    return [
        (length, gains_after(found[arm][length], _last(found[arm][length])))
        for length in lengths(arm)
    ]


def _course_table(found: Runs, arms: Sequence[str]) -> list[Sequence[str]]:
    """Return a row for each run length of an arm, and one of its mean gain on the way."""
    heading = ("runs", "iterations", "exaFLOPs at 8.3 B", "gain", "ahead of SAGE-GRPO")
    table: list[Sequence[str]] = [heading]
    for arm in arms:
        for (length, gains), (_, plain) in zip(_ends(found, arm), _ends(found, DEMO), strict=True):
            flops = f"{flops_of(arm, length):.2f}"
            ahead = difference_of_runs(gains, plain).widened(len(gains), len(looks()))
            cells = (TITLES[arm], f"{length}", flops, str(mean_of(gains)))
            table.append((*cells, "" if arm == DEMO else str(ahead)))
        way = mean_of(gains_on_the_way(found, arm, _budget()))
        cells = (TITLES[arm], "on the way", f"{_budget():.2f}", str(way))
        table.append((*cells, "" if arm == DEMO else str(_on_the_way(found, arm, DEMO))))
    return table


def _course_rows(found: Runs, arms: Sequence[str]) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for arm in arms:
        for length, by_seed in _ends(found, arm):
            flops = flops_of(arm, length)
            rows += _rows(arm, found[arm][length], by_seed, {"iterations": length, "FLOPs": flops})
    return rows


def _rows(
    arm: str,
    runs: Sequence[TrainedRun],
    by_seed: Scores,
    others: Mapping[str, object],
) -> list[dict[str, object]]:
    """Return a row of data for each seed."""
    return [
        {"runs": arm, **others, "seed": run.seed, "gain": statistics.fmean(gains.values())}
        for run, gains in zip(runs, by_seed, strict=True)
    ]


def _draw_course(found: Runs, arms: Sequence[str], axes: Axes) -> None:
    """Draw the gain by FLOPs, a line for each arm with a band of its standard error over seeds."""
    for color, arm in zip(COLORS, arms):
        x = [0.0] + [flops_of(arm, length) for length in lengths(arm)]
        mean, error = [0.0], [0.0]
        for length in lengths(arm):
            runs = found[arm][length]
            by_seed = [statistics.fmean(gains.values()) for gains in gains_after(runs, _last(runs))]
            mean.append(statistics.fmean(by_seed))
            error.append(statistics.stdev(by_seed) / len(by_seed) ** 0.5)
        low = np.subtract(mean, error)
        high = np.add(mean, error)
        axes.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)
        axes.plot(x, mean, color=color, label=TITLES[arm], marker="o", markersize=3)
    axes.set_xlabel("exaFLOPs of the same algorithm at 8.3 B")
    axes.set_ylabel("gain in the held-out composite")
    axes.legend()


def _course_finding(
    found: Runs,
    arms: Sequence[str],
    difference: Difference,
    text: str,
    compared: Sequence[Sequence[str]] = (),
) -> Finding:
    """Return what is found of a difference on the way, with figure, data and table of the arms."""
    return Finding(
        verdict=judge_above(difference),
        text=text,
        draw=lambda figure: _draw_course(found, arms, figure.subplots()),
        rows=_course_rows(found, arms),
        table=_course_table(found, arms),
        compared=compared,
    )


def _find_course(
    found: Runs, signal: Sequence[Sequence[str]], about_signal: str, material: Material
) -> Finding:
    """Decide whether SAGE-GRPO gains more on the way than DiffusionNFT."""
    difference = _on_the_way(found, DEMO, NFT)
    text = (
        f"DiffusionNFT's mean gain on the way to the FLOPs of {LAST} iterations is "
        f"{-difference.value:+.4f} [{-difference.high:+.4f}, {-difference.low:+.4f}] above the "
        "demo's (one look). Each run has its rate annealed to its own end, and the runs of one "
        "length have unequal FLOPs: on the way they are equal. The table's "
        f"differences at an end are corrected for {len(looks())} looks, those on the way are not. "
        "FLOPs are those of the same algorithm at 8.3 B, where decoding is a small part; on the "
        "testbed it is three quarters. The table of the signal has 32 iterations each, with one "
        f"standard error. {about_signal}"
    )
    return _course_finding(found, (DEMO, NFT), difference, text, signal)


def _find_growing(found: Runs, material: Material) -> Finding:
    """Decide whether a growing batch gains more on the way than 8 prompts throughout."""
    difference = _on_the_way(found, GROWING, DEMO)
    text = (
        f"The mean gain on the way differs from that of 8 prompts throughout by {difference} (one "
        "look). "
        f"The table's differences at an end are at equal FLOPs, corrected for {len(looks())} looks."
    )
    return _course_finding(found, (DEMO, GROWING), difference, text)


def hand_over_verdict(by_look: Mapping[int, Difference]) -> Verdict:
    """Decide by the rule of the protocol: ahead after each look but the last, and not behind at
    it."""
    *early, _ = sorted(by_look)
    if any(difference.high < 0 for difference in by_look.values()):
        return "not held"
    if all(by_look[look].low > 0 for look in early):
        return "held"
    return "not decidable"


def _find_hand_over(found: Runs, material: Material) -> Finding:
    """Decide whether the hand-over gains more after 10 and after 20 iterations."""
    arms = (HAND_OVER, ENDPOINT, NFT)
    plain = found[DEMO][LAST]
    differences = {}
    for arm in arms:
        for look in _looks(plain):
            found_here = above(found[arm][LAST], plain, look)
            differences[arm, look] = found_here.widened(len(plain), len(looks()))
    table: list[Sequence[str]] = [
        ("runs of 40 iterations", *(f"after {look}" for look in _looks(plain)))
    ]
    for arm in (DEMO, *arms):
        gains = [str(mean_of(gains_after(found[arm][LAST], look))) for look in _looks(plain)]
        table.append((TITLES[arm], *gains))
    compared: list[Sequence[str]] = [
        ("ahead of SAGE-GRPO", *(f"after {look}" for look in _looks(plain)))
    ]
    for arm in arms:
        compared.append((TITLES[arm], *(str(differences[arm, look]) for look in _looks(plain))))
    rows: list[dict[str, object]] = []
    for arm in (DEMO, *arms):
        for look in _looks(plain):
            by_seed = gains_after(found[arm][LAST], look)
            rows += _rows(arm, found[arm][LAST], by_seed, {"after": look})

    def draw(figure: Figure) -> None:
        intervals = {
            f"{TITLES[arm]}, after {look}": one.interval for (arm, look), one in differences.items()
        }
        draw_intervals(figure.subplots(), intervals, "gain above SAGE-GRPO's, 95 % interval")

    text = (
        "An endpoint direction points from the group's mean final sample to the video's own; the "
        "hand-over turns it into the noise within 20 iterations. These are runs of 40 iterations, "
        "looked at on the way, where their rate has not yet ended. "
        f"Differences are paired over {len(plain)} seeds and {len(gains_after(plain, 0)[0])} "
        f"held-out prompts; each interval is corrected for {len(looks())} looks. The setting of "
        "the endpoint direction has left, so these runs cannot be made again."
    )
    return Finding(
        verdict=hand_over_verdict({look: differences[HAND_OVER, look] for look in _looks(plain)}),
        text=text,
        draw=draw,
        rows=rows,
        table=table,
        compared=compared,
    )


def _looks(runs: Sequence[TrainedRun]) -> list[int]:
    """Return the looks that these runs reach: with `--quick` the last evaluation alone."""
    evaluated = {evaluation["iteration"] for evaluation in runs[0].evaluations}
    return [look for look in looks() if look in evaluated] or [_last(runs)]


def no_lower(difference: Difference) -> Verdict:
    """Decide "it is at most `margin` lower"."""
    if difference.low > -margin():
        return "held"
    return "not held" if difference.high < -margin() else "not decidable"


def _find_no_lower(found: Runs, arm: str, about: str, material: Material) -> Finding:
    """Decide whether an arm ends no lower than the demo, by the margin of the protocol."""
    plain, others = found[DEMO][LAST], found[arm][LAST]
    last = _last(plain)
    difference = above(others, plain, last)
    behind = sum(
        statistics.fmean(ours.values()) < statistics.fmean(theirs.values())
        for ours, theirs in zip(gains_after(others, last), gains_after(plain, last), strict=True)
    )
    text = (
        f"{about}After {last} iterations the difference is {difference} (one look), and the margin "
        f"{-margin():+.2f}; it ends lower on {behind} of {len(plain)} seeds."
    )
    table: list[Sequence[str]] = [("runs of 40 iterations", *(f"after {n}" for n in _looks(plain)))]
    for name in (DEMO, arm):
        cells = [str(mean_of(gains_after(found[name][LAST], look))) for look in _looks(plain)]
        table.append((TITLES[name], *cells))
    rows: list[dict[str, object]] = []
    for name in (DEMO, arm):
        rows += _rows(name, found[name][LAST], gains_after(found[name][LAST], last), {})

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        draw_intervals(axes, {"difference": difference.interval}, "gain above SAGE-GRPO's")
        axes.axvline(-margin(), color=COLORS[1], linewidth=0.8, linestyle="--")

    return Finding(verdict=no_lower(difference), text=text, draw=draw, rows=rows, table=table)


def claims(found: Runs, signal: Sequence[Sequence[str]], about_signal: str = "") -> list[Claim]:
    """Return the claims in the order of the page."""

    def claim(name: str, title: str, says: str, find: Any, height: float) -> Claim:
        return Claim(
            name=name,
            title=title,
            kind="beyond",
            source="",
            says=says,
            find=find,
            size=(8.6, height),
        )

    all_claims = [
        claim(
            "demo-course",
            "The first forty iterations",
            "On the way to forty iterations SAGE-GRPO gains more for its FLOPs than DiffusionNFT.",
            functools.partial(_find_course, found, signal, about_signal),
            3.0,
        ),
        claim(
            "demo-hand-over",
            "From the endpoint to the noise",
            "A direction that hands over from the endpoint to the noise gains more after 10 and "
            "after 20 iterations, and no less after 40.",
            functools.partial(_find_hand_over, found),
            3.0,
        ),
        claim(
            "demo-growing",
            "A growing batch",
            "A batch that grows from 2 to 16 prompts gains more on the way for the same FLOPs.",
            functools.partial(_find_growing, found),
            3.0,
        ),
        claim(
            "demo-anchor",
            "The anchor on a quarter of the steps",
            "With the KL to the anchor on a quarter of the steps, runs end at most 0.03 lower.",
            functools.partial(_find_no_lower, found, QUARTER, ""),
            1.6,
        ),
        claim(
            "demo-ranks",
            "A reward that only ranks",
            "With a reward that only ranks the videos of a prompt, runs end at most 0.03 lower.",
            functools.partial(_find_no_lower, found, RANK, "Both are evaluated by the composite. "),
            1.6,
        ),
    ]
    if HAND_OVER not in found:
        return [each for each in all_claims if each.name != "demo-hand-over"]
    return all_claims
