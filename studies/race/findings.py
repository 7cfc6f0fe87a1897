"""What the race decides: gain for compute, and the judge."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from sage_fast.report.charts import COLORS
from studies.differences import Difference, mean_and_half
from studies.figures import draw_intervals
from studies.finding import Claim, Finding, Material, Verdict
from studies.race.ratio import Ratio, gains, mean_of, ratio, scaled
from studies.race.runs import (
    Raced,
    affordable,
    ahead,
    comparisons,
    iterations,
    reference,
    sage_at_its_best,
    used,
)
from studies.runs import TrainedRun, difference

JUDGE = ("judge/alignment", "judge/naturalness")


def differences(raced: Mapping[str, Raced]) -> dict[str, Difference]:
    """Return recipe -> its final score less the reference's, corrected for the number of
    recipes."""
    others = [name for name in raced if name != reference()]
    base = raced[reference()].final
    return {name: _above(raced[name].final, base, len(others)) for name in others}


def _above(runs: Sequence[TrainedRun], others: Sequence[TrainedRun], compared: int) -> Difference:
    return difference(runs, others).widened(len(runs), compared)


def used_by(found: Raced, count: int = 0) -> float:
    """Return exaFLOPs of `count` iterations, or of a run."""
    return used(found.best.recipe, found.best.world, count)


def per_flop(raced: Mapping[str, Raced], name: str, count: int = 0) -> Ratio | None:
    """Return a recipe's gain per FLOP over the reference's on the seeds of the confirmation.

    Args:
        count: iterations that are counted for the recipe; by default those of its runs.
    """
    first, base = raced[name], raced[reference()]
    rate = scaled(gains(first.confirmation), 1 / used_by(first, count))
    return ratio(
        rate,
        scaled(gains(base.confirmation), 1 / used_by(base)),
        comparisons=comparisons(base.best.world),
    )


def judge_above(found: Difference) -> Verdict:
    """Decide "the difference is positive"."""
    return "held" if found.low > 0 else "not held" if found.high < 0 else "not decidable"


def judge_gain(runs: Sequence[TrainedRun], scores: Sequence[str] = JUDGE) -> Difference:
    """Return the gain of the judge, all its scores added."""
    by_score = [gains(runs, score) for score in scores]
    total = [
        {prompt: sum(one[prompt] for one in of_run) for prompt in of_run[0]}
        for of_run in zip(*by_score, strict=True)
    ]
    return mean_of(total)


def gain(runs: Sequence[TrainedRun], score: str = "reward") -> Difference:
    """Return the gain of a score on held-out prompts over the model before training."""
    return mean_of(gains(runs, score))


def _find_race(raced: Mapping[str, Raced], first: str, material: Material) -> Finding:
    """Decide whether `first` ends above the reference, on seeds that chose nothing."""
    found = differences(raced)
    above, text = _confirmed(raced, first)
    text = (
        f"{first} gains most in the table of the first world. {text}{_not_the_budget(raced)}The "
        f"table's differences are those of its seeds, corrected for {len(found)} recipes. "
        f"{_ends(raced)}"
    )
    draw = functools.partial(_draw, raced, found)
    return Finding(
        verdict=judge_above(above),
        text=text,
        draw=draw,
        rows=_rows(raced),
        table=_table(raced, found),
    )


def _confirmed(raced: Mapping[str, Raced], name: str) -> tuple[Difference, str]:
    """Return how far a recipe ends above the reference on the seeds of the confirmation, and say
    it."""
    base, one = raced[reference()], raced[name]
    runs, others, compared = one.confirmation, base.confirmation, comparisons(base.best.world)
    above = _above(runs, others, compared)
    return above, (
        f"{name} ends {above} above {reference()} on {len(runs)} seeds that chose nothing (95 % "
        f"interval, corrected for {compared} comparisons; p {above.p:.2g}, uncorrected): "
        f"{gain(runs)} for {used_by(one):.1f} exaFLOPs against {gain(others)} for "
        f"{used_by(base):.1f}. The judge gains {judge_gain(runs)} against {judge_gain(others)}. "
        f"{_per_flop(raced, name)}{_same_weights(raced, name)}"
    )


def _find_sage(raced: Mapping[str, Raced], first: str, material: Material) -> Finding:
    """Decide whether SAGE-GRPO at its best ends above the reference, and say how far it is from the
    recipe ahead."""
    best = sage_at_its_best()
    above, text = _confirmed(raced, best)
    shown = {reference(): raced[reference()], best: raced[best], first: raced[first]}
    if first != best:
        behind = _above(raced[best].confirmation, raced[first].confirmation, 1)
        judge = (
            judge_gain(raced[best].confirmation).value - judge_gain(raced[first].confirmation).value
        )
        text += (
            f"On the same seeds it ends {behind} above {first} (uncorrected), its judge "
            f"{judge:+.3f}, for {used_by(raced[best]):.1f} exaFLOPs against "
            f"{used_by(raced[first]):.1f}. "
        )
    scores = {name: gain(one.confirmation) for name, one in shown.items()}
    rows = [
        {"recipe": name, "gain": d.value, "low": d.low, "high": d.high}
        for name, d in scores.items()
    ]

    def draw(figure: Figure) -> None:
        intervals = {name: score.interval for name, score in scores.items()}
        draw_intervals(
            figure.subplots(), intervals, "gain on the seeds of the confirmation, 95 % interval"
        )

    return Finding(verdict=judge_above(above), text=text.rstrip(), draw=draw, rows=rows)


def _per_flop(raced: Mapping[str, Raced], name: str) -> str:
    """Say what a recipe gains per FLOP, and what the iterations that it was not run for could
    change."""
    rate, one = per_flop(raced, name), raced[name]
    if rate is None:
        return ""
    text = f"Per FLOP it gains {rate} times as much. "
    count, paid = _counts(one)
    if count < paid:
        before, end = list(one.confirmation[0].course())[-2:]
        late = [list(run.course().values())[-2:] for run in one.confirmation]
        change, half = mean_and_half([last - other for other, last in late])
        text += (
            f"The budget pays {paid - count} more iterations of it. From iteration {before} to "
            f"{end} its score changes by {change:+.3f} ± {half:.3f}, while the learning rate falls "
            "to 0. At this pace the others would add "
            f"{change * (paid - count) / (end - before):+.3f}; if they added nothing, it would be "
            f"{per_flop(raced, name, paid)} times. "
        )
    return text


def _counts(found: Raced) -> tuple[int, int]:
    """Return the number of iterations of a recipe's runs, and of those that the budget pays."""
    cell = found.best
    return iterations(cell.recipe, cell.world), affordable(cell.recipe, cell.world)


def _same_weights(raced: Mapping[str, Raced], first: str) -> str:
    """Compare the recipe ahead with the reference's method over all weights, if both are raced."""
    other = f"{reference()}_full"
    if first == other or other not in raced:
        return ""
    above = difference(raced[first].final, raced[other].final)
    return (
        f"On the seeds of the table it ends {above} above {other}, the reference's method over all "
        "weights (uncorrected). "
    )


def _not_the_budget(raced: Mapping[str, Raced]) -> str:
    """Name the recipes whose runs are not as long as the budget pays."""
    counts = {name: _counts(found) for name, found in raced.items()}
    named = [f"{name} {count} ({paid})" for name, (count, paid) in counts.items() if count != paid]
    if not named:
        return ""
    return f"Iterations run, where the budget as counted now pays others: {', '.join(named)}. "


def _table(raced: Mapping[str, Raced], found: Mapping[str, Difference]) -> Sequence[Sequence[str]]:
    above = f"above `{reference()}`"
    heading = (
        "recipe",
        "learning rate",
        "lambda",
        "iterations",
        "exaFLOPs",
        "gain",
        "judge",
        above,
    )
    return [heading] + [
        (
            name,
            f"{one.best.learning_rate:g}",
            f"{one.best.kl_weight:g}",
            str(iterations(name, one.best.world)),
            f"{used_by(one):.1f}",
            str(gain(one.final)),
            str(judge_gain(one.final)),
            str(found.get(name, "")),
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
                    row = {
                        "recipe": name,
                        "learning rate": cell.learning_rate,
                        "lambda": cell.kl_weight,
                    }
                    row |= {
                        "purpose": purpose,
                        "seed": run.seed,
                        "before": run.course()[0],
                        "score": run.mean(),
                    }
                    row |= {part: run.mean(part) for part in run.evaluations[0]["parts"]}
                    rows.append(
                        row
                        | {
                            f"evaluation {i}": score
                            for i, score in enumerate(run.course().values())
                        }
                    )
    return rows


def _draw(raced: Mapping[str, Raced], found: Mapping[str, Difference], figure: Figure) -> None:
    left, right = figure.subplots(1, 2, width_ratios=[1.4, 1])
    # colors come round again, with another line
    styles = itertools.product(("-", "--", ":"), COLORS)
    for (line, color), (name, one) in zip(styles, raced.items()):
        courses = np.array([list(run.course().values()) for run in one.final])
        curve = courses.mean(0) - courses[:, 0].mean()
        spent = (
            np.array(list(one.final[0].course())) * used_by(one) / iterations(name, one.best.world)
        )
        left.plot(spent, curve, color=color, linestyle=line, label=name, marker="o", markersize=2.5)
    left.set_xlabel("exaFLOPs of the run with the 8.3 B model")
    left.set_ylabel("gain of the held-out composite")
    left.legend(ncols=2)
    shown = {name: above.interval for name, above in found.items()}
    draw_intervals(right, shown, f"score above that of {reference()}, corrected 95 % interval")


def _ends(raced: Mapping[str, Raced]) -> str:
    """Name the recipes whose best cell has the lowest or the highest learning rate of their
    search."""
    at_end = []
    for name, found in raced.items():
        rates = [cell.learning_rate for cell in found.search]
        if found.best.learning_rate in (min(rates), max(rates)):
            at_end.append(name)
    return (
        "A lowest or highest learning rate of the search was best for "
        f"{', '.join(at_end) or 'no recipe'}: a wider search may find more."
    )


def _find_judge(raced: Mapping[str, Raced], material: Material) -> Finding:
    first = ahead(raced)
    compared = comparisons(raced[first].best.world)
    runs = {name: one.confirmation or one.final for name, one in raced.items()}
    rises = {name: judge_gain(own).widened(len(own), compared) for name, own in runs.items()}
    text = (
        f"Of {first}, which gains most, both scores of the judge together gain {rises[first]} (95 "
        f"% interval, corrected for {compared} comparisons). Recipes that were confirmed have the "
        "seeds of the confirmation, the others those of the table."
    )
    rows = [
        {"recipe": name, "gain": d.value, "low": d.low, "high": d.high, "p": d.p}
        for name, d in rises.items()
    ]

    def draw(figure: Figure) -> None:
        shown = {name: rise.interval for name, rise in rises.items()}
        draw_intervals(
            figure.subplots(),
            shown,
            "gain of the judge, which no run trains on, corrected 95 % interval",
        )

    return Finding(verdict=judge_above(rises[first]), text=text, draw=draw, rows=rows)


def claims(raced: Mapping[str, Raced], again: Mapping[str, Raced]) -> list[Claim]:
    """Return the claims about the runs in both worlds, in the order of the page."""
    first = ahead(raced)
    best = [
        Claim(
            name="race-sage",
            title="SAGE-GRPO at its best",
            kind="beyond",
            source="",
            says=(
                f"At the same budget `{name}`, SAGE-GRPO as its search found it, ends above "
                f"`{reference()}`."
            ),
            find=functools.partial(_find_sage, raced, first),
        )
        for name in raced
        if name == sage_at_its_best()
    ]
    return [
        Claim(
            name="race",
            title="Gain for compute",
            kind="beyond",
            source="",
            says=f"At the same budget the recipe that gains most ends above `{reference()}`.",
            find=functools.partial(_find_race, raced, first),
            size=(10.0, 4.4),
        ),
        *best,
        Claim(
            name="race-judge",
            title="The judge",
            kind="beyond",
            source="",
            says="The judge, which no run trains on, rises with the recipe that gains most.",
            find=functools.partial(_find_judge, raced),
        ),
        Claim(
            name="race-pairs",
            title="The second world",
            kind="beyond",
            source="",
            says=f"In a second world, too, that recipe ends above `{reference()}`.",
            find=functools.partial(_find_race, again, first),
            size=(10.0, 4.4),
        ),
    ]
