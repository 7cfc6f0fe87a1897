"""Claims decided by training runs: which variant ends with the higher held-out score."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from sage_fast.report.charts import COLORS
from sage_fast.report.scores import Difference, holm
from studies.paper.figures import draw_courses, draw_differences, draw_scores
from studies.paper.finding import LEVEL, SMALLEST, Claim, Finding, Material, Verdict
from studies.paper.training import TrainedRun, difference, mean_interval

Runs = Mapping[str, Sequence[TrainedRun]]
PARTS = ("vq", "mq", "ta")
JUDGE = ("judge/alignment", "judge/naturalness")


@dataclasses.dataclass(frozen=True)
class Versus:
    """A comparison: whether `first` is better than `second` in `part`."""

    first: str
    second: str
    part: str = "reward"

    def __str__(self) -> str:
        suffix = f", {self.part}" if self.part != "reward" else ""
        return f"{self.first} over {self.second}{suffix}"


def judge_better(differences: Mapping[str, Difference], smallest: float = SMALLEST) -> Verdict:
    """Decide "each first is better than its second".

    `held` if every difference is significantly positive after the correction. `not held` if one is significantly
    negative, or if one excludes a gain that matters: its uncorrected interval ends below `smallest`.
    """
    if all(d.value > 0 and d.corrected < LEVEL for d in differences.values()):
        return "held"
    if any(d.high < smallest or (d.value < 0 and d.corrected < LEVEL) for d in differences.values()):
        return "not held"
    return "not decidable"


def judge_equal(differences: Mapping[str, Difference]) -> Verdict:
    """Decide "it makes no difference".

    `held` if every interval lies within `SMALLEST` of 0, even if a smaller difference is significant. Otherwise
    `not held` if a difference is significant after the correction.
    """
    if all(d.low > -SMALLEST and d.high < SMALLEST for d in differences.values()):
        return "held"
    if any(d.corrected < LEVEL for d in differences.values()):
        return "not held"
    return "not decidable"


def compare(versus: Sequence[Versus], runs: Runs, part: str | None = None) -> dict[str, Difference]:
    """Return the differences, corrected for their number."""
    return holm({str(v): difference(runs[v.first], runs[v.second], part or v.part) for v in versus})


def told(differences: Mapping[str, Difference], runs: Runs) -> str:
    """Describe the runs in two sentences: the scores, then the differences with their corrected p-values."""
    scores = ", ".join(f"{name} {mean:.3f} ± {half:.3f}" for name, (mean, half) in _scores(runs).items())
    found = "; ".join(f"{name} {d}, p {d.corrected:.2g}" for name, d in differences.items())
    return (
        f"Held-out composite with 95 % interval over the seeds: {scores}. Differences, over seeds and prompts: {found}."
    )


def _scores(runs: Runs) -> dict[str, tuple[float, float]]:
    return {name: mean_interval(seeds) for name, seeds in runs.items()}


def rows_of(runs: Runs) -> list[dict[str, object]]:
    """Return one row per run: held-out scores by part, at the end (mean of the last third) and before training."""
    rows = []
    for variant, seeds in runs.items():
        for run in seeds:
            row: dict[str, object] = {"variant": variant, "seed": run.seed, "before": run.course()[0]}
            parts = ("reward", *run.evaluations[0]["parts"])
            row |= {part: run.mean(part) for part in parts}
            row |= {f"at iteration {i}": score for i, score in run.course().items()}
            row["training reward, last third"] = _late(run, "reward/mean")
            row["std within a group, last third"] = _late(run, "reward/std")
            row["commit"] = run.environment.get("commit")
            rows.append(row)
    return rows


def _late(run: TrainedRun, key: str) -> float:
    values = [float(row[key]) for row in run.rows]
    return float(np.mean(values[-max(len(values) // 3, 1) :]))


def better(
    name: str,
    title: str,
    source: str,
    says: str,
    versus: Sequence[Versus],
    *,
    judge: Callable[[Mapping[str, Difference]], Verdict] = judge_better,
) -> Claim:
    """Make a claim about held-out scores at the end of the runs; its figure shows courses and differences."""
    variants = tuple(dict.fromkeys(variant for v in versus for variant in (v.first, v.second)))

    def find(material: Material) -> Finding:
        runs = {variant: material.runs[variant] for variant in variants}
        differences = compare(versus, runs)

        def draw(figure: Figure) -> None:
            left, right = figure.subplots(1, 2)
            draw_courses(left, runs)
            left.legend(ncols=1 + len(runs) // 6)
            draw_differences(right, differences, "difference of the held-out score, 95 % interval")

        return Finding(verdict=judge(differences), text=told(differences, runs), draw=draw, rows=rows_of(runs))

    height = max(3.4, 1.2 + 0.32 * len(versus))
    return Claim(name=name, title=title, source=source, says=says, find=find, variants=variants, size=(10.0, height))


SAMPLERS = ("dance", "flow", "cps", "sage")
ALL_SAMPLERS = (*SAMPLERS, "exact")


def _find_equalizer(material: Material) -> Finding:
    versus = [Versus(f"{sampler}-equalized", sampler) for sampler in ALL_SAMPLERS]
    runs = {name: material.runs[name] for v in versus for name in (v.second, v.first)}
    every = compare(versus, runs)
    judged = {name: d for name, d in every.items() if "exact" not in name}

    def draw(figure: Figure) -> None:
        axes = figure.subplots(1, len(ALL_SAMPLERS) + 1, sharey=False, width_ratios=[1] * len(ALL_SAMPLERS) + [1.6])
        for panel, sampler in zip(axes, ALL_SAMPLERS):
            draw_courses(panel, {"without": runs[sampler], "equalized": runs[f"{sampler}-equalized"]}, ylabel=" ")
            panel.set_title(sampler)
            panel.sharey(axes[0])
        axes[0].set_ylabel("held-out composite")
        axes[0].legend()
        short = {name.split("-")[0]: d for name, d in every.items()}
        draw_differences(axes[-1], short, "equalized minus without")

    return Finding(verdict=judge_better(judged), text=told(every, runs), draw=draw, rows=rows_of(runs))


KL = ("fixed", "stepwise", "moving")


def _find_strategies(material: Material) -> Finding:
    names = {"none": "sage-equalized", **{name: name for name in (*KL, "dual")}}
    runs = {label: material.runs[variant] for label, variant in names.items()}
    differences = compare([Versus("dual", label) for label in names if label != "dual"], runs)

    def draw(figure: Figure) -> None:
        left, middle, right = figure.subplots(1, 3)
        draw_courses(left, runs)
        left.legend()
        for color, seeds in zip(COLORS, runs.values()):
            spread = np.mean([[float(row["reward/std"]) for row in run.rows] for run in seeds], axis=0)
            middle.plot(np.arange(1, len(spread) + 1), spread, color=color)
        middle.set_xlabel("iteration")
        middle.set_ylabel("std of the rewards within a group")
        draw_differences(right, differences, "difference of the held-out score, 95 % interval")

    return Finding(verdict=judge_better(differences), text=told(differences, runs), draw=draw, rows=rows_of(runs))


SCHEDULES = {"fixed": "dual", "two-stage": "two-stage", "milder": "milder"}


def _find_schedules(material: Material) -> Finding:
    runs = {label: material.runs[variant] for label, variant in SCHEDULES.items()}
    versus = [Versus("two-stage", other, part) for part in PARTS for other in ("fixed", "milder")]
    differences = compare(versus, runs)

    def draw(figure: Figure) -> None:
        *panels, right = figure.subplots(1, 4, width_ratios=[1, 1, 1, 1.3])
        for panel, part in zip(panels, PARTS):
            draw_courses(panel, runs, part, ylabel=" ")
            panel.set_title(part)
        panels[0].legend()
        draw_differences(right, differences, "difference, 95 % interval")

    verdict = judge_better(differences, SMALLEST / len(PARTS))
    return Finding(verdict=verdict, text=told(differences, runs), draw=draw, rows=rows_of(runs))


GRID = {
    "A": {**{f"{s}, {kl}": f"{s}{'-fixed' * (kl == 'fixed')}" for s in SAMPLERS[:3] for kl in ("none", "fixed")},
          "sage, none": "sage-equalized", "sage, fixed": "fixed", "sage, dual": "dual"},
    "B": {**{f"{s}, {kl}": f"{s}{'-fixed' * (kl == 'fixed')}-B" for s in SAMPLERS for kl in ("none", "fixed")},
          "sage, dual": "sage-dual-B"},
}  # fmt: skip
"""Table 2: reward setting -> row -> variant."""


def _find_grid(material: Material) -> Finding:
    runs = {
        f"{setting}: {row}": material.runs[variant] for setting, rows in GRID.items() for row, variant in rows.items()
    }
    versus = [
        Versus(f"{setting}: sage, dual", f"{setting}: {row}")
        for setting, rows in GRID.items()
        for row in rows
        if not row.startswith("sage")
    ]
    differences = compare(versus, runs)
    judged: dict[str, Difference] = {}
    for part in JUDGE:
        judged |= {f"{name}, {part}": d for name, d in compare(versus, runs, part).items()}
    fell = [name for name, d in holm(judged).items() if d.value < 0 and d.corrected < LEVEL]
    best = max(runs, key=lambda name: mean_interval(runs[name])[0])
    ahead = [d for d in differences.values() if d.value > 0]
    text = (
        f"Of the {len(runs)} rows {best!r} has the highest held-out composite, {mean_interval(runs[best])[0]:.3f}; "
        f"sage with the dual KL is ahead of a baseline in {len(ahead)} of {len(differences)} comparisons, and "
        f"{sum(d.corrected < LEVEL for d in ahead)} of them stand after the correction. By the judge, which no run "
        f"is trained on, it is behind a baseline in {len(fell)} of {len(judged)} comparisons that stand"
        f"{': ' * bool(fell)}{'; '.join(fell)}."
    )

    def draw(figure: Figure) -> None:
        for panel, part in zip(figure.subplots(1, 3, sharey=True), ("reward", *JUDGE)):
            draw_scores(panel, runs, part, "composite" if part == "reward" else part)

    return Finding(verdict=judge_better(differences), text=text, draw=draw, rows=rows_of(runs))


SEARCHED = {"dance": (0.5,), "flow": (0.5,), "cps": (0.5,), "sage": (0.5, 0.7, 1.4), "exact": (0.5, 0.7, 1.4)}
ETAS = {
    sampler: dict(sorted({1.0: f"{sampler}-equalized", **{eta: f"{sampler}-eta-{eta}" for eta in etas}}.items()))
    for sampler, etas in SEARCHED.items()
}
"""Sampler -> eta -> variant."""
EXACT = (*(variant for etas in ETAS.values() for variant in etas.values()), "sage-equal-noise", "exact-dual", "dual")


def _find_exact(material: Material) -> Finding:
    def best(sampler: str) -> str:
        return max(ETAS[sampler].values(), key=lambda variant: mean_interval(material.runs[variant])[0])

    runs = {name: material.runs[name] for name in EXACT}
    versus = [
        Versus("exact-equalized", "sage-equalized"),
        Versus("exact-equalized", "sage-equal-noise"),
        Versus("exact-dual", "dual"),
        Versus(best("exact"), best("sage")),
    ]
    differences = compare(list(dict.fromkeys(versus)), runs)

    def draw(figure: Figure) -> None:
        left, right = figure.subplots(1, 2)
        for sampler, etas in ETAS.items():
            means, halves = zip(*(mean_interval(runs[variant]) for variant in etas.values()))
            left.errorbar(list(etas), means, yerr=halves, marker="o", markersize=4, capsize=3, label=sampler)
        left.set_xlabel("eta")
        left.set_ylabel("held-out composite, 95 % interval")
        left.legend()
        draw_differences(right, differences, "difference of the held-out score, 95 % interval")

    compared = {name: runs[name] for v in versus for name in (v.first, v.second)}
    return Finding(verdict=judge_better(differences), text=told(differences, compared), draw=draw, rows=rows_of(runs))


CLAIMS: tuple[Claim, ...] = (
    Claim(
        name="equalizer", title="The temporal gradient equalizer", source="paper, Figure 3",
        says="With the equalizer the reward ends higher, with each sampler.",
        find=_find_equalizer, size=(14.0, 3.4),
        variants=tuple(name for sampler in ALL_SAMPLERS for name in (sampler, f"{sampler}-equalized")),
    ),
    Claim(
        name="kl-strategies", title="KL strategies where the KL acts", source="paper, Figure 8",
        says="The dual KL ends with a higher reward than none, fixed, stepwise and moving.",
        find=_find_strategies, size=(13.0, 3.6), variants=("sage-equalized", *KL, "dual"),
    ),
    better(
        "kl-paper-lambda", "KL strategies at the paper's lambda", "paper, Figure 8 and Appendix A.6",
        "At lambda 1e-7 to 1e-5 it makes no difference to have a KL, whichever it is.",
        [Versus(f"{name}-paper-lambda", "sage-equalized") for name in (*KL, "dual")], judge=judge_equal,
    ),
    Claim(
        name="kl-schedules", title="Schedules of lambda", source="paper, Figure 7",
        says="The two-stage schedule ends higher than a fixed lambda and than a milder schedule, in VQ, MQ and TA.",
        find=_find_schedules, size=(14.0, 3.4), variants=tuple(SCHEDULES.values()),
    ),
    better(
        "kl-feedback", "Feedback on lambda", "paper, Equation 42",
        "Feedback in the printed direction is better than none and than the usual direction.",
        [Versus("two-stage-paper", "two-stage"), Versus("two-stage-paper", "two-stage-ppo")],
    ),
    Claim(
        name="methods", title="Methods, KL and rewards", source="paper, Table 2",
        says="SAGE-GRPO with the dual KL is better than each baseline, with and without KL, for both rewards.",
        find=_find_grid, size=(13.0, 5.2),
        variants=tuple(dict.fromkeys(variant for rows in GRID.values() for variant in rows.values())),
    ),
    Claim(
        name="exact", title="The closed-form sampler", source="beyond the paper",
        says="Training on rollouts of `exact` is better than on those of `sage`: at the same eta with and without KL, "
             "at the same injected noise, and each at its best eta.",
        find=_find_exact, size=(11.0, 3.8),
        variants=EXACT,
    ),
    better(
        "velocity-term", "The velocity term in closed form", "beyond the paper, Equation 15",
        "The KL to the rollout policy in closed form is better than the sampled one.",
        [Versus("dual", "velocity-term-sampled")],
    ),
    better(
        "ratio", "The ratio that is clipped", "beyond the paper",
        "In float32 it makes no difference which ratio is clipped.",
        [Versus("ratio-centred", "dual"), Versus("ratio-normalised", "dual")], judge=judge_equal,
    ),
    better(
        "bfloat16", "Training in bfloat16", "beyond the paper",
        "A policy whose frozen weights and activations are bfloat16 ends where one in float32 does.",
        [Versus("bfloat16", "dual")], judge=judge_equal,
    ),
    better("ema", "Averaged weights", "beyond the paper", "An average of the weights scores higher than the last ones.",
           [Versus("dual", "no-ema")]),
    better("initial-noise", "Shared initial noise", "beyond the paper",
           "Groups with initial noise of their own for each sample are better than groups that share it.",
           [Versus("dual", "shared-initial-noise")]),
    better("groups", "Group size against prompts", "beyond the paper",
           "At 32 videos an iteration, 4 prompts with 8 videos each are better than 2, 8 and 16 prompts.",
           [Versus("dual", f"groups-{name}") for name in ("2x16", "8x4", "16x2")]),
    better("fewer-steps", "Fewer noisy or trained steps", "beyond the paper",
           "A window of noisy steps, or a part of the trained steps, ends where all 8 steps do (with fewer than 4 "
           "trained steps there are also fewer updates, one for each).",
           [Versus(name, "steps-8") for name in
            ("window-4", "window-2", "window-1", "fraction-1/2", "fraction-1/4", "fraction-1/8")], judge=judge_equal),
    better("nft", "DiffusionNFT", "beyond the paper, arXiv 2509.16117",
           "SAGE-GRPO with the dual KL is better than DiffusionNFT, with as many videos for the same prompts.",
           [Versus("dual", "nft"), Versus("dual", "nft-beta-0.1"), Versus("exact-dual", "nft")]),
)  # fmt: skip
