"""What the race decides: gain for compute, and the judge."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from sage_fast.report.charts import COLORS
from studies.differences import Difference
from studies.figures import draw_intervals
from studies.finding import Claim, Finding, Material, Verdict
from studies.race.ratio import Ratio, gains, mean_of, ratio, scaled
from studies.race.runs import Raced, ahead, comparisons, iterations, reference, used
from studies.runs import TrainedRun, difference

GOAL, LEAST = 2.0, 1.3
"""Ratio of gain per FLOP to be reached, and the ratio that its interval has to exclude."""
CUT = 6.0
"""Ratio at which the figure cuts an interval."""
JUDGE = ("judge/alignment", "judge/naturalness")


def ratios(raced: Mapping[str, Raced]) -> dict[str, Ratio]:
    """Return recipe -> ratio of its gain per FLOP to the reference's, corrected for the number of recipes."""
    rates = {name: _rate(found, found.final) for name, found in raced.items()}
    others = [name for name in raced if name != reference()]
    return {name: ratio(rates[name], rates[reference()], comparisons=len(others)) for name in others}


def used_by(found: Raced) -> float:
    """Return exaFLOPs of a run."""
    return used(found.best.recipe, found.best.world)


def _rate(found: Raced, runs: Sequence[TrainedRun]) -> list[dict[str, float]]:
    """Return the gain per exaFLOP of a recipe's runs: prompt -> value, for each of them."""
    return scaled(gains(runs), 1 / used_by(found))


def confirmed(raced: Mapping[str, Raced]) -> Ratio:
    """Return the ratio of the recipe ahead, on the seeds of the confirmation."""
    return _confirmed(raced, ahead(raced))


def transferred(raced: Mapping[str, Raced], again: Mapping[str, Raced]) -> Ratio:
    """Return the ratio in the second world of the recipe ahead in the first, on the seeds of the confirmation there."""
    return _confirmed(again, ahead(raced))


def _confirmed(raced: Mapping[str, Raced], name: str) -> Ratio:
    """Return the ratio of a recipe on the seeds of the confirmation, corrected for how often that was decided."""
    first, second = (_rate(raced[one], raced[one].confirmation) for one in (name, reference()))
    return ratio(first, second, comparisons=comparisons())


def judge_race(found: Ratio) -> Verdict:
    """Decide "the recipe gains `GOAL` times as much per FLOP as the reference"."""
    if found.value >= GOAL and found.low > LEAST:
        return "held"
    return "not held" if found.high < GOAL else "not decidable"


def judge_gain(runs: Sequence[TrainedRun]) -> Difference:
    """Return the gain of the judge, both its scores added."""
    first, second = (gains(runs, part) for part in JUDGE)
    total = [{prompt: a[prompt] + b[prompt] for prompt in a} for a, b in zip(first, second)]
    return mean_of(total)


def judge_judge(gain: Difference) -> Verdict:
    """Decide "the judge rises"."""
    return "held" if gain.low > 0 else "not held" if gain.high < 0 else "not decidable"


def gain(runs: Sequence[TrainedRun]) -> Difference:
    """Return the gain on held-out prompts over the model before training."""
    return mean_of(gains(runs))


def _find_race(raced: Mapping[str, Raced], material: Material) -> Finding:
    found, first, base = ratios(raced), ahead(raced), reference()
    decisive, runs, others = confirmed(raced), raced[first].confirmation, raced[base].confirmation
    above = difference(runs, others)
    text = (
        f"Of the table, {first} has the highest gain per FLOP. On {len(runs)} further seeds it gains {decisive} times "
        f"as much per FLOP as {base} (95 % interval, corrected for {comparisons()} comparisons): {gain(runs)} for "
        f"{used(first):.1f} exaFLOPs against {gain(others)} for {used(base):.1f}. It ends {above} above "
        f"(p {above.p:.2g}), and the judge gains {judge_gain(runs)} against {judge_gain(others)}. The table's gain per "
        f"FLOP is a multiple of {base}'s on the five seeds that chose, its intervals corrected for {len(found)} "
        f"recipes. {_ends(raced)}"
    )
    return _finding(raced, found, judge_race(decisive), text)


def _find_again(raced: Mapping[str, Raced], again: Mapping[str, Raced], material: Material) -> Finding:
    found, first, base = transferred(raced, again), ahead(raced), reference()
    runs, others = again[first].confirmation, again[base].confirmation
    spent, reference_spent = used_by(again[first]), used_by(again[base])
    above = difference(runs, others)
    text = (
        f"The gain per FLOP of {first}, which is ahead in the first world, is {found} times that of {base} here (95 % "
        f"interval, corrected for {comparisons()} comparisons): {gain(runs)} for {spent:.1f} exaFLOPs against "
        f"{gain(others)} for {reference_spent:.1f}, on {len(runs)} seeds that chose nothing. The difference of their "
        f"scores is {above} (p {above.p:.2g}), and the judge gains {judge_gain(runs)} against {judge_gain(others)}. "
        f"The table's intervals are corrected for {len(again) - 1} recipes. {_ends(again)}"
    )
    return _finding(again, ratios(again), judge_race(found), text)


def _finding(raced: Mapping[str, Raced], found: Mapping[str, Ratio], verdict: Verdict, text: str) -> Finding:
    """Return the finding of a world, with its figure and its table."""
    draw = functools.partial(_draw, raced, found)
    return Finding(verdict=verdict, text=text, draw=draw, rows=_rows(raced), table=_table(raced, found))


def _table(raced: Mapping[str, Raced], found: Mapping[str, Ratio]) -> Sequence[Sequence[str]]:
    heading = ("recipe", "learning rate", "lambda", "iterations", "exaFLOPs", "gain", "gain per FLOP", "judge")
    return [heading] + [
        (
            name,
            f"{one.best.learning_rate:g}",
            f"{one.best.kl_weight:g}",
            str(iterations(name, one.best.world)),
            f"{used_by(one):.1f}",
            str(gain(one.final)),
            str(found.get(name, 1)),
            str(judge_gain(one.final)),
        )
        for name, one in raced.items()
    ]


def _rows(raced: Mapping[str, Raced]) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for name, found in raced.items():
        for purpose, made in (
            {
                "confirmation": {found.best: found.confirmation},
                "final": {found.best: found.final},
                "search": found.search,
            }
        ).items():
            for cell, trained in made.items():
                for run in trained:
                    row = {"recipe": name, "learning rate": cell.learning_rate, "lambda": cell.kl_weight}
                    row |= {"purpose": purpose, "seed": run.seed, "before": run.course()[0], "score": run.mean()}
                    row |= {part: run.mean(part) for part in run.evaluations[0]["parts"]}
                    rows.append(row | {f"evaluation {i}": score for i, score in enumerate(run.course().values())})
    return rows


def _draw(raced: Mapping[str, Raced], found: Mapping[str, Ratio], figure: Figure) -> None:
    left, right = figure.subplots(1, 2, width_ratios=[1.4, 1])
    styles = itertools.product(("-", "--", ":"), COLORS)  # colors come round again, with another line
    for (line, color), (name, one) in zip(styles, raced.items()):
        courses = np.array([list(run.course().values()) for run in one.final])
        curve = courses.mean(0) - courses[:, 0].mean()
        spent = np.array(list(one.final[0].course())) * used_by(one) / iterations(name, one.best.world)
        left.plot(spent, curve, color=color, linestyle=line, label=name, marker="o", markersize=2.5)
    left.set_xlabel("exaFLOPs of the run with the 8.3 B model")
    left.set_ylabel("gain of the held-out composite")
    left.legend(ncols=2)
    shown = {name: (_cut(one.value), _cut(one.low), _cut(one.high)) for name, one in found.items()}
    draw_intervals(right, shown, f"gain per FLOP over that of {reference()} (cut at {CUT:g})", lines=(1, GOAL))


def _cut(ratio: float) -> float:
    return min(max(ratio, -CUT), CUT)


def _ends(raced: Mapping[str, Raced]) -> str:
    """Name the recipes whose best cell has the lowest or the highest learning rate of their search."""
    at_end = []
    for name, found in raced.items():
        rates = [cell.learning_rate for cell in found.search]
        if found.best.learning_rate in (min(rates), max(rates)):
            at_end.append(name)
    return (
        f"A lowest or highest learning rate of the search was best for {', '.join(at_end) or 'no recipe'}: a wider "
        "search may find more."
    )


def _find_judge(raced: Mapping[str, Raced], material: Material) -> Finding:
    first = ahead(raced)
    rises = {name: judge_gain(one.confirmation or one.final) for name, one in raced.items()}
    text = (
        f"Of {first}, which gains most per FLOP, both scores of the judge together gain {rises[first]}. Here {first} "
        f"and {reference()} have the seeds of the confirmation, the others those of the table."
    )
    rows = [{"recipe": name, "gain": d.value, "low": d.low, "high": d.high, "p": d.p} for name, d in rises.items()]

    def draw(figure: Figure) -> None:
        shown = {name: (d.value, d.low, d.high) for name, d in rises.items()}
        draw_intervals(figure.subplots(), shown, "gain of the judge, which no run trains on, 95 % interval", lines=(0,))

    return Finding(verdict=judge_judge(rises[first]), text=text, draw=draw, rows=rows)


def claims(raced: Mapping[str, Raced], again: Mapping[str, Raced]) -> list[Claim]:
    """Return the claims about the runs in both worlds, in the order of the page."""
    return [
        Claim(
            name="race",
            title="Gain for compute",
            kind="beyond",
            source="",
            says=f"A recipe gains at least {GOAL:g} times as much per FLOP as `{reference()}`, and surely more than "
            f"{LEAST:g} times.",
            find=functools.partial(_find_race, raced),
            size=(10.0, 4.4),
        ),
        Claim(
            name="race-judge",
            title="The judge",
            kind="beyond",
            source="",
            says="The judge, which no run trains on, rises with the recipe that gains most per FLOP.",
            find=functools.partial(_find_judge, raced),
        ),
        Claim(
            name="race-pairs",
            title="The second world",
            kind="beyond",
            source="",
            says=f"In a second world, too, the recipe that is ahead gains at least {GOAL:g} times as much per FLOP as "
            f"`{reference()}`, and surely more than {LEAST:g} times.",
            find=functools.partial(_find_again, raced, again),
            size=(10.0, 4.4),
        ),
    ]
