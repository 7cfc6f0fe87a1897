"""Claims decided by training runs: which variant ends with the higher held-out score."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sage_fast.report.charts import COLORS, GREY
from studies.differences import Difference, difference_of_runs, holm
from studies.figures import draw_courses, draw_differences, draw_scores
from studies.finding import LEVEL, MARGIN, Claim, Finding, Kind, Material, Verdict
from studies.runs import TrainedRun, difference, mean_interval

Runs = Mapping[str, Sequence[TrainedRun]]
PARTS = ("vq", "mq", "ta")
JUDGE = ("judge/alignment", "judge/naturalness")


@dataclasses.dataclass(frozen=True)
class Versus:
    """A comparison: whether `first` is better than `second`."""

    first: str
    second: str

    def __str__(self) -> str:
        return f"{self.first} over {self.second}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compared:
    """The comparisons of a claim.

    Attributes:
        pooled: mean of their differences: the one test of the claim.
        single: each difference, with p corrected for their number; its own interval is not.
        margin: smallest difference that matters.
        seeds: number of seeds.
    """

    pooled: Difference
    single: Mapping[str, Difference]
    margin: float
    seeds: int

    def corrected(self, name: str) -> Difference:
        """Return a single difference, its interval corrected for their number by Bonferroni's
        method."""
        return self.single[name].widened(self.seeds, len(self.single))

    def excludes(self, name: str) -> bool:
        """Whether the corrected interval of a single difference excludes a gain of the margin."""
        return self.corrected(name).high < self.margin


def judge_better(result: Compared) -> Verdict:
    """Decide "first is better than second", over the comparisons taken together.

    `not held` if the pooled difference, or a single one after the correction, excludes a gain of
    the margin. Otherwise `held` if the pooled difference is significantly positive.
    """
    if result.pooled.high < result.margin or any(result.excludes(name) for name in result.single):
        return "not held"
    return "held" if result.pooled.value > 0 and result.pooled.p < LEVEL else "not decidable"


def judge_equal(result: Compared) -> Verdict:
    """Decide "it makes no difference".

    `held` if every interval lies within the margin of 0, even if a smaller difference is
    significant; as all of them have to, none is corrected. Otherwise `not held` if a difference is
    significant after the correction.
    """
    if all(-result.margin < d.low and d.high < result.margin for d in result.single.values()):
        return "held"
    return (
        "not held" if any(d.corrected < LEVEL for d in result.single.values()) else "not decidable"
    )


def compare(versus: Sequence[Versus], runs: Runs, part: str = "reward") -> Compared:
    """Compare runs that share their seeds and held-out prompts."""
    sides = [
        _mean_scores([runs[name] for name in names], part)
        for names in zip(*((v.first, v.second) for v in versus))
    ]
    used = {name: runs[name] for v in versus for name in (v.first, v.second)}
    return Compared(
        pooled=difference_of_runs(*sides),
        single=holm({str(v): difference(runs[v.first], runs[v.second], part) for v in versus}),
        margin=margin_of(used, part),
        seeds=len(sides[0]),
    )


def _mean_scores(variants: Sequence[Sequence[TrainedRun]], part: str) -> list[dict[str, float]]:
    """Return prompt -> mean score over the variants, for each seed."""
    scores = [[run.score(part) for run in seeds] for seeds in zip(*variants)]
    return [
        {prompt: float(np.mean([row[prompt] for row in seed])) for prompt in seed[0]}
        for seed in scores
    ]


def margin_of(runs: Runs, part: str = "reward") -> float:
    """Return the smallest difference that matters: a share of the largest mean gain over the base
    model."""
    return MARGIN * max(
        float(np.mean([run.mean(part) - run.course(part)[0] for run in seeds]))
        for seeds in runs.values()
    )


def base_score(runs: Runs) -> float:
    """Return the held-out composite before training."""
    return float(np.mean([run.course()[0] for seeds in runs.values() for run in seeds]))


def describe(result: Compared) -> str:
    """Name the margin, and the comparisons that exclude a gain of it."""
    margin = f"Margin {result.margin:.3f}."
    refuted = [name for name in result.single if result.excludes(name)]
    if not refuted:
        return margin
    which = f" for {', '.join(refuted)}" if len(refuted) < len(result.single) else ""
    return f"{margin} A gain of the margin is excluded{which}."


def comparison_table(result: Compared) -> list[list[str]]:
    """Return a table of the differences: a row for each, then the pooled one."""
    rows = [[name, *_corrected(result, name)] for name in result.single]
    if len(rows) > 1:
        rows.append(["pooled", *_pooled(result)])
    return [["comparison", "difference", "p"], *rows]


def _corrected(result: Compared, name: str) -> list[str]:
    return [str(result.corrected(name)), f"{result.single[name].corrected:.2g}"]


def _pooled(result: Compared) -> list[str]:
    return [str(result.pooled), f"{result.pooled.p:.2g}"]


def _mean(seeds: Sequence[TrainedRun]) -> str:
    return f"{np.mean([run.mean() for run in seeds]):.3f}"


def rows_of(runs: Runs) -> list[dict[str, object]]:
    """Return one row per run: held-out scores by part, at the end (mean of the last third) and
    before training."""
    rows = []
    for variant, seeds in runs.items():
        for run in seeds:
            row: dict[str, object] = {
                "variant": variant,
                "seed": run.seed,
                "before": run.course()[0],
            }
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


def _finding(
    result: Compared,
    runs: Runs,
    text: str,
    draw: Callable[[Figure], None],
    *,
    judge: Callable[[Compared], Verdict] = judge_better,
    compared: Sequence[Sequence[str]] = (),
    table: Sequence[Sequence[str]] = (),
) -> Finding:
    return Finding(
        verdict=judge(result), text=text, draw=draw, rows=rows_of(runs), compared=compared,
        table=table,
        tested=result.pooled,
    )  # fmt: skip


def draw_compared(axes: Axes, result: Compared) -> None:
    """Draw a row per difference with its corrected interval, and one for the pooled difference."""
    rows = {name: result.corrected(name) for name in result.single}
    if len(rows) > 1:
        rows["pooled"] = result.pooled
    draw_differences(axes, rows, "difference of the held-out score, 95 % interval")


def better(
    name: str,
    title: str,
    kind: Kind,
    source: str,
    says: str,
    versus: Sequence[Versus],
    *,
    judge: Callable[[Compared], Verdict] = judge_better,
) -> Claim:
    """Make a claim about held-out scores at the end of the runs; its figure shows courses and
    differences."""
    variants = tuple(dict.fromkeys(variant for v in versus for variant in (v.first, v.second)))

    def find(material: Material) -> Finding:
        runs = {variant: material.runs[variant] for variant in variants}
        result = compare(versus, runs)

        def draw(figure: Figure) -> None:
            left, right = figure.subplots(1, 2)
            draw_courses(left, runs)
            left.legend(ncols=1 + len(runs) // 6)
            draw_compared(right, result)

        table = comparison_table(result)
        return _finding(result, runs, describe(result), draw, judge=judge, compared=table)

    height = max(3.4, 1.2 + 0.32 * len(versus))
    return Claim(
        name=name, title=title, kind=kind, source=source, says=says, find=find, variants=variants,
        size=(10.0, height),
        by_p=judge is judge_better,
    )  # fmt: skip


SAMPLERS = ("dance", "flow", "cps", "sage")
ALL_SAMPLERS = (*SAMPLERS, "exact")


def _find_equalizer(material: Material) -> Finding:
    versus = [Versus(f"{sampler}-equalized", sampler) for sampler in ALL_SAMPLERS]
    runs = {name: material.runs[name] for v in versus for name in (v.second, v.first)}
    result, all_five = compare(versus[:-1], runs), compare(versus, runs)
    table = [*comparison_table(result), ["pooled, with exact", *_pooled(all_five)]]

    def draw(figure: Figure) -> None:
        axes = figure.subplots(
            1, len(ALL_SAMPLERS) + 1, sharey=False, width_ratios=[1] * len(ALL_SAMPLERS) + [1.6]
        )
        for panel, sampler in zip(axes, ALL_SAMPLERS):
            draw_courses(
                panel,
                {"without": runs[sampler], "equalized": runs[f"{sampler}-equalized"]},
                ylabel=" ",
            )
            panel.set_title(sampler)
            panel.sharey(axes[0])
        axes[0].set_ylabel("held-out composite")
        axes[0].legend()
        short = {name.split("-")[0]: d for name, d in result.single.items()}
        draw_compared(axes[-1], dataclasses.replace(result, single=short))

    return _finding(result, runs, describe(result), draw, compared=table)


KL = ("fixed", "stepwise", "moving")


def _find_strategies(material: Material) -> Finding:
    runs = {name: material.runs[name] for name in (*KL, "dual")}
    result = compare([Versus("dual", name) for name in KL], runs)

    def draw(figure: Figure) -> None:
        left, middle, right = figure.subplots(1, 3)
        draw_courses(left, runs)
        left.legend()
        for color, seeds in zip(COLORS, runs.values()):
            spread = np.mean(
                [[float(row["reward/std"]) for row in run.rows] for run in seeds], axis=0
            )
            middle.plot(np.arange(1, len(spread) + 1), spread, color=color)
        middle.set_xlabel("iteration")
        middle.set_ylabel("std of the rewards within a group")
        draw_compared(right, result)

    return _finding(result, runs, describe(result), draw, compared=comparison_table(result))


SCHEDULES = {"fixed": "dual", "two-stage": "two-stage", "milder": "milder"}


def _find_schedules(material: Material) -> Finding:
    runs = {label: material.runs[variant] for label, variant in SCHEDULES.items()}
    versus = [Versus("two-stage", other) for other in ("fixed", "milder")]
    result = compare(versus, runs)

    def draw(figure: Figure) -> None:
        *panels, right = figure.subplots(1, 4, width_ratios=[1, 1, 1, 1.3])
        for panel, part in zip(panels, PARTS):
            draw_courses(panel, runs, part, ylabel=" ")
            panel.set_title(part)
        panels[0].legend()
        draw_compared(right, result)

    return _finding(result, runs, describe(result), draw, compared=comparison_table(result))


def table_of(runs: Runs, result: Compared) -> list[list[str]]:
    """Return a table of held-out scores, with the difference of `OURS` from each baseline: a row
    per label."""
    rows = []
    for name, seeds in runs.items():
        versus = str(Versus(OURS, name))
        differs = _corrected(result, versus) if versus in result.single else ["", ""]
        rows.append([name, _mean(seeds), *differs])
    return [["", "composite", f"{OURS} over it", "p"], *rows, ["pooled", "", *_pooled(result)]]


OURS = "sage, dual"


def _find_methods(rows: Mapping[str, str], material: Material) -> Finding:
    """Compare the row `OURS` with the rows of the baselines. `rows` is label -> variant."""
    runs = {label: material.runs[variant] for label, variant in rows.items()}
    versus = [Versus(OURS, label) for label in rows if not label.startswith("sage")]
    result = compare(versus, runs)
    judged = {
        f"{name}, {part}": d
        for part in JUDGE
        for name, d in compare(versus, runs, part).single.items()
    }
    fell = [name for name, d in holm(judged).items() if d.value < 0 and d.corrected < LEVEL]
    named = f": {'; '.join(fell)}" if fell else ""
    text = (
        f"{describe(result)} By the judge SAGE-GRPO is significantly behind a baseline in "
        f"{len(fell)} of {len(judged)} comparisons{named}."
    )

    def draw(figure: Figure) -> None:
        for panel, part in zip(figure.subplots(1, 3, sharey=True), ("reward", *JUDGE)):
            draw_scores(panel, runs, part, "composite" if part == "reward" else part)

    return _finding(result, runs, text, draw, table=table_of(runs, result))


def methods(
    name: str, title: str, kind: Kind, source: str, says: str, rows: Mapping[str, str]
) -> Claim:
    """Make a claim about methods; `rows` is label -> variant, and the row `OURS` is judged."""
    return Claim(
        name=name, title=title, kind=kind, source=source, says=says, find=partial(_find_methods,
            rows),
        variants=tuple(rows.values()), size=(13.0, 1.2 + 0.3 * len(rows)),
    )  # fmt: skip


def _with_and_without_kl(samplers: Sequence[str], setting: str) -> dict[str, str]:
    """Row -> variant of each sampler, without a KL and with a fixed one, in a reward setting."""
    rows = {}
    for sampler in samplers:
        rows[f"{sampler}, none"] = f"{sampler}{setting}"
        rows[f"{sampler}, fixed"] = f"{sampler}-fixed{setting}"
    return rows


METHODS = {
    "A": _with_and_without_kl(SAMPLERS[:3], "")
    | {"sage, none": "sage-equalized", "sage, fixed": "fixed", OURS: "dual"},
    "B": _with_and_without_kl(SAMPLERS, "-B") | {OURS: "sage-dual-B"},
    "published": {f"{sampler}, none": f"{sampler}-B-published" for sampler in SAMPLERS[:3]}
    | {OURS: "sage-dual-B-published"},
}
"""Table 2: reward setting -> row -> variant; `published` is setting B with the published eta of
each."""

SEARCHED = {
    "dance": (0.3, 0.5, 0.7, 1.4), "flow": (0.5, 0.7, 1.4), "cps": (0.5, 0.7),
    "sage": (0.5, 0.7, 1.4), "exact": (0.5, 0.7, 1.4, 1.5),
}  # fmt: skip
ETAS = {
    sampler: dict(
        sorted(
            {1.0: f"{sampler}-equalized", **{eta: f"{sampler}-eta-{eta}" for eta in etas}}.items()
        )
    )
    for sampler, etas in SEARCHED.items()
}
"""Sampler -> eta -> variant."""
SEARCH = tuple(variant for etas in ETAS.values() for variant in etas.values())


def searched(variants: Sequence[str], runs: Runs) -> tuple[list[str], list[TrainedRun]]:
    """Return for each seed the variant with the highest mean score of the other seeds, and its run
    of this seed."""
    scores = {name: np.array([run.mean() for run in runs[name]]) for name in variants}
    seeds = range(len(runs[variants[0]]))
    chosen = [
        max(variants, key=lambda name: float(np.delete(scores[name], seed).mean()))
        for seed in seeds
    ]
    return chosen, [runs[name][seed] for seed, name in zip(seeds, chosen)]


def _best(samplers: Sequence[str], runs: Runs) -> tuple[dict[str, list[TrainedRun]], str]:
    """Return `<sampler>-best` -> runs, and the values of eta that were chosen."""
    best, said = {}, []
    for sampler in samplers:
        names = {variant: f"{eta:g}" for eta, variant in ETAS[sampler].items()}
        chosen, best[f"{sampler}-best"] = searched(tuple(names), runs)
        said.append(
            f"{sampler} {'/'.join(name for variant, name in names.items() if variant in chosen)}"
        )
    return best, f"Best eta: {', '.join(said)}."


def _table_of_etas(runs: Runs) -> list[list[str]]:
    """Return a table of held-out scores: a row per sampler with the equalizer and without KL, a
    column per eta."""
    etas = sorted({eta for names in ETAS.values() for eta in names})
    rows = [
        [sampler, *(_mean(runs[names[eta]]) if eta in names else "" for eta in etas)]
        for sampler, names in ETAS.items()
    ]
    return [["eta", *(f"{eta:g}" for eta in etas)], *rows]


def _draw_etas(axes: Axes, samplers: Sequence[str], runs: Runs) -> None:
    for sampler in samplers:
        means, halves = zip(*(mean_interval(runs[variant]) for variant in ETAS[sampler].values()))
        axes.errorbar(
            list(ETAS[sampler]),
            means,
            yerr=halves,
            marker="o",
            markersize=4,
            capsize=3,
            label=sampler,
        )
    axes.axhline(base_score(runs), color=GREY, linestyle="--", linewidth=1, label="base model")
    axes.set_xlabel("eta")
    axes.set_ylabel("held-out composite, 95 % interval")
    axes.legend(ncols=2, fontsize=8)


def _draw_by_eta(result: Compared, runs: Runs, figure: Figure) -> None:
    left, right = figure.subplots(1, 2)
    _draw_etas(left, ALL_SAMPLERS, runs)
    draw_compared(right, result)


def _find_search(material: Material) -> Finding:
    runs = {name: material.runs[name] for name in SEARCH}
    best, chosen = _best(ALL_SAMPLERS, runs)
    result = compare([Versus("sage-best", f"{s}-best") for s in SAMPLERS[:3]], best)
    return _finding(
        result, runs, f"{describe(result)} {chosen}", partial(_draw_by_eta, result, runs),
        compared=comparison_table(result), table=_table_of_etas(runs),
    )  # fmt: skip


EXACT = (*SEARCH, "sage-equal-noise", "exact-dual", "dual")


def _find_exact(material: Material) -> Finding:
    runs = {name: material.runs[name] for name in EXACT}
    best, _ = _best(("sage", "exact"), runs)
    versus = [
        Versus("exact-equalized", "sage-equalized"),
        Versus("exact-equalized", "sage-equal-noise"),
        Versus("exact-dual", "dual"),
        Versus("exact-best", "sage-best"),
    ]
    result = compare(versus, runs | best)
    draw = partial(_draw_by_eta, result, runs)
    return _finding(result, runs, describe(result), draw, compared=comparison_table(result))


CLAIMS: tuple[Claim, ...] = (
    Claim(
        name="equalizer", title="The temporal gradient equalizer", kind="paper", source="Figure 3",
        says="With the equalizer the paper's four samplers end higher.",
        find=_find_equalizer, size=(14.0, 3.4),
        variants=tuple(name for sampler in ALL_SAMPLERS for name in (sampler,
            f"{sampler}-equalized")),
    ),
    Claim(
        name="kl-strategies", title="KL strategies where the KL acts", kind="paper",
        source="Figure 8",
        says="Where the KL acts (lambda 0.2) the dual KL ends above fixed, stepwise and moving.",
        find=_find_strategies, size=(13.0, 3.6), variants=(*KL, "dual"),
    ),
    Claim(
        name="kl-schedules", title="Schedules of lambda", kind="paper", source="Figure 7",
        says="The two-stage schedule ends above a fixed lambda and a milder schedule.",
        find=_find_schedules, size=(14.0, 3.4), variants=tuple(SCHEDULES.values()),
    ),
    methods(
        "methods", "Methods, KL and rewards", "paper", "Table 2, Setting B",
        "With alignment-focused rewards, all at eta 1, SAGE-GRPO with the dual KL ends above the "
        "baselines with and "
        "without KL.", METHODS["B"],
    ),
    methods(
        "methods-published", "Methods at their published eta", "ours",
        "Table 2, Setting B, which states no eta",
        "With alignment-focused rewards, each at its published eta (dance 0.3, flow and cps 0.7, "
        "sage 0.5), SAGE-GRPO with the dual KL ends above the baselines without KL.",
        METHODS["published"],
    ),
    methods(
        "methods-A", "Methods with averaged rewards", "ours",
        "Table 2, Setting A, which has it below each baseline without KL",
        "With averaged rewards, all at eta 1, SAGE-GRPO with the dual KL ends above the baselines "
        "with and without KL.",
        METHODS["A"],
    ),
    better(
        "samplers", "The samplers alone", "ours", "Table 1",
        "Without equalizer and KL, at eta 1, sage ends above dance, flow and cps.",
        [Versus("sage", other) for other in SAMPLERS[:3]],
    ),
    Claim(
        name="eta-search", title="Each sampler at its best eta", kind="ours",
        source="Table 1, without its eta",
        says=(
            "With the equalizer and without KL, sage at its best eta ends above dance, flow and "
            "cps at theirs."
        ),
        find=_find_search, size=(11.0, 3.8), variants=SEARCH,
    ),
    better(
        "kl-acts", "A KL against none", "ours", "Table 2, which has it both ways",
        "The four KLs, where they act (lambda 0.2), end above none.",
        [Versus(name, "sage-equalized") for name in (*KL, "dual")],
    ),
    better(
        "kl-paper-lambda", "KL strategies at the paper's lambda", "ours",
        "Figure 8 and Appendix A.6 say that it does",
        "At lambda 1e-7 to 1e-5 it makes no difference to have a KL.",
        [Versus(f"{name}-paper-lambda", "sage-equalized") for name in (*KL, "dual")],
        judge=judge_equal,
    ),
    better(
        "kl-feedback", "Feedback on lambda", "ours", "Eq. 42, compared with nothing",
        "Feedback in the printed direction ends above none.",
        [Versus("two-stage-paper", "two-stage")],
    ),
    better(
        "velocity-term", "The velocity term in closed form", "ours", "Eq. 15, which is sampled",
        "The KL to the rollout policy ends higher in closed form than sampled.",
        [Versus("dual", "velocity-term-sampled")],
    ),
    Claim(
        name="exact", title="The closed-form sampler", kind="beyond",
        source="arXiv 2605.23522 (Precise)",
        says="`exact` ends above `sage`: at the same eta with and without KL, at the same "
             "injected noise, and each at its best eta.",
        find=_find_exact, size=(11.0, 3.8),
        variants=EXACT,
    ),
    better(
        "dance-precise", "The SDE of dance in closed form", "beyond", "arXiv 2605.23522 (Precise)",
        "At dance's published eta its SDE ends higher in closed form than in Euler steps.",
        [Versus("dance-precise-eta-0.3", "dance-eta-0.3")],
    ),
    better(
        "ratio", "The ratio that is clipped", "beyond", "",
        "In float32 it makes no difference which ratio is clipped.",
        [Versus("ratio-centred", "dual"), Versus("ratio-normalised", "dual")], judge=judge_equal,
    ),
    better(
        "bfloat16", "Training in bfloat16", "beyond", "",
        "With frozen weights and activations in bfloat16 a policy ends where one in float32 does.",
        [Versus("bfloat16", "dual")], judge=judge_equal,
    ),
    better("ema", "Averaged weights", "beyond", "",
        "An average of the weights scores higher than the last ones.",
           [Versus("dual", "no-ema")]),
    better("initial-noise", "Shared initial noise", "beyond", "",
           "Groups end higher with initial noise for each sample than with one for all.",
           [Versus("dual", "shared-initial-noise")]),
    better("groups", "Group size against prompts", "beyond", "",
           "Of 32 videos an iteration, 4 prompts with 8 each end above 2, 8 and 16 prompts.",
           [Versus("dual", f"groups-{name}") for name in ("2x16", "8x4", "16x2")]),
    better("fewer-steps", "Fewer noisy or trained steps", "beyond", "",
           "A window of noisy steps, or a part of the trained steps, ends where all 8 steps do "
           "(fewer than 4 trained steps also have fewer updates).",
           [Versus(name, "steps-8") for name in
            ("window-4", "window-2", "window-1", "fraction-1/2", "fraction-1/4", "fraction-1/8")],
            judge=judge_equal),
    better("nft", "DiffusionNFT", "beyond", "our variant of arXiv 2509.16117",
           (
               "SAGE-GRPO with the dual KL ends above DiffusionNFT with either beta, on as many "
               "videos."
           ),
           [Versus("dual", "nft"), Versus("dual", "nft-beta-0.1"), Versus("exact-dual", "nft")]),
)  # fmt: skip
