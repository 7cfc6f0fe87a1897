"""What the search found."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from studies.differences import Difference
from studies.figures import draw_intervals
from studies.finding import Claim, Finding, Material, Verdict
from studies.race.findings import JUDGE, gain, judge_above, judge_gain
from studies.runs import TrainedRun, decoder_share, difference, seeds_behind, teraflops
from studies.search.runs import (
    NFT,
    SAGE,
    Made,
    looks,
    looks_at_variant,
    own_settings,
    score,
    variants,
)

Table = Sequence[Sequence[str]]

EARLIER = (
    "With the three seeds of a confirmation from the earlier base model it ends ahead on each of "
    "seven seeds, and the interval of each comparison reaches 0. The mean of these seven "
    "differences is -0.028 (p 0.007 by a t-test over the runs, uncorrected). On the base model "
    "that ships the [demo](demo.md) has ten seeds."
)
"""What the two confirmations say together. The runs of the earlier one are not in the archive."""


def method_of(name: str) -> str:
    """Return the method of a configuration or of a variant of the second search."""
    return "DiffusionNFT" if name in (NFT, *variants(NFT)) else "SAGE-GRPO"


def risen(runs: Sequence[TrainedRun], part: str = "reward") -> float:
    """Return the mean gain of the runs; one run is enough."""
    return statistics.fmean(run.mean(part) - run.course(part)[0] for run in runs)


def _above(runs: Sequence[TrainedRun], others: Sequence[TrainedRun], count: int) -> Difference:
    """Return the difference of confirmed runs, corrected for `count` looks."""
    return difference(runs, others).widened(len(runs), count)


def _cells(name: str, runs: Sequence[TrainedRun]) -> tuple[str, str, str]:
    """Return the mean gain of the runs of `name`, that of the judge, and the TFLOPs of one."""
    judge = sum(map(functools.partial(risen, runs), JUDGE))
    return f"{risen(runs):+.3f}", f"{judge:+.3f}", f"{teraflops(own_settings(name)):.1f}"


def _rows(
    column: str, found: Mapping[str, Sequence[TrainedRun]], parts: Sequence[str] = ()
) -> list[dict[str, object]]:
    """Return a row for each run; `column` has its name."""
    return [
        {column: name, "seed": run.seed, "before": run.course()[0], "score": run.mean()}
        | {part: run.mean(part) for part in parts}
        for name, runs in found.items()
        for run in runs
    ]


def _means(
    column: str,
    found: Mapping[str, Sequence[TrainedRun]],
    verdict: Verdict,
    text: str,
    table: Table,
    seed: str = "",
) -> Finding:
    """Return a finding that draws the mean gains of `found`, by the names in `column`."""

    def draw(figure: Figure) -> None:
        means = {name: (risen(runs),) * 3 for name, runs in found.items()}
        draw_intervals(figure.subplots(), means, f"gain in the held-out reward{seed}")

    return Finding(verdict=verdict, text=text, draw=draw, rows=_rows(column, found), table=table)


def _find_gain(made: Made, material: Material) -> Finding:
    """Decide whether SAGE-GRPO ends above its challenger; show all that was confirmed."""
    gains = {name: gain(runs) for name, runs in made.confirmation.items()}
    judges = {name: judge_gain(runs) for name, runs in made.confirmation.items()}
    runs, others, best = made.confirmation[SAGE], made.confirmation[NFT], made.best(SAGE)
    above = _above(runs, others, looks())
    text = (
        f"The difference of the gains is {above} (95 % interval over {len(runs)} seeds and "
        f"{len(runs[0].score())} prompts, corrected for {looks()} looks; the base model was "
        f"trained on their captions, the runs were not). That of `{best}` and `{NFT}` is "
        f"{_above(made.confirmation[best], others, looks())}. DiffusionNFT ends ahead "
        f"on {seeds_behind(runs, others)} of {len(runs)} seeds. "
        f"{EARLIER} A correct clip of these prompts scores "
        f"{made.correct[0]:.2f} as drawn, and {made.correct[1]:.2f} through the autoencoder, which "
        "every sample passes. The judge is a network that no run is trained on. FLOPs are planned; "
        f"{100 * decoder_share(own_settings(SAGE)):.0f} % of those of `{SAGE}` are the decoder's, "
        "so equal compute means here about equally many videos."
    )
    table = [("configuration", "method", "before", "after", "gain", "judge", "TFLOPs")] + [
        (
            f"`{name}`",
            method_of(name),
            f"{statistics.fmean(run.course()[0] for run in trained):.3f}",
            f"{score(trained):.3f}",
            str(gains[name]),
            str(judges[name]),
            f"{teraflops(own_settings(name)):.1f}",
        )
        for name, trained in made.confirmation.items()
    ]
    rows = _rows("configuration", made.confirmation, list(runs[0].evaluations[0]["parts"]))

    def draw(figure: Figure) -> None:
        shown = {name: found.interval for name, found in gains.items()}
        draw_intervals(figure.subplots(), shown, "gain in the held-out reward, 95 % interval")

    return Finding(verdict=judge_above(above), text=text, draw=draw, rows=rows, table=table)


def _find_variant(made: Made, material: Material) -> Finding:
    """Decide whether the variant that was chosen ends above the demo, and show the second
    search."""
    best, challenger = made.best(SAGE), made.best(NFT)
    runs, others = made.confirmation[best], made.confirmation[SAGE]
    above = _above(runs, others, looks_at_variant())
    text = (
        f"The difference of the gains of `{best}` and `{SAGE}` is {above}, on the seeds and "
        f"prompts above, corrected for {looks_at_variant()} looks: after three seeds, when both "
        "had ended on the fourth and the challenger had not, and at the end. The second search "
        f"chose `{best}` and `{challenger}` by their scores on seed "
        f"{made.second[best][0].seed}; that seed decides nothing."
    )
    table = [("variant", "method", "mean gain", "judge", "TFLOPs")] + [
        (f"`{name}`", method_of(name), *_cells(name, trained))
        for name, trained in sorted(made.second.items(), key=lambda item: -score(item[1]))
    ]
    return _means("variant", made.second, judge_above(above), text, table, seed=", seed 0")


def _find_best(made: Made, material: Material) -> Finding:
    """Rank the cells.

    The seeds that chose a cell cannot decide whether it is better than the next.
    """
    ranked = sorted(
        (cell for cell in made.search if len(made.search[cell]) > 1),
        key=lambda c: -score(made.search[c]),
    )
    best, second = ranked[:2]
    spent = [teraflops(own_settings(cell)) for cell in made.search]
    text = (
        f"Of the cells that were run on all seeds `{best}` has the highest mean score, "
        f"{score(made.search[best]):.3f}, and `{second}` the next, "
        f"{score(made.search[second]):.3f}. The seeds that chose a cell decide nothing about it. "
        "Cells that were not among the best on the first seed have that one alone. Scores are "
        "means over the evaluations of the last third: one for `window4` and `all`, two for the "
        f"others. Cells had {min(spent):.1f} to {max(spent):.1f} TFLOPs, as planned; `{best}` had "
        f"{teraflops(own_settings(best)):.1f}."
    )
    table = [
        ("cell", *(f"seed {run.seed}" for run in made.search[best]), "mean gain", "judge", "TFLOPs")
    ]
    for cell, runs in sorted(
        made.search.items(), key=lambda item: (-len(item[1]), -score(item[1]))
    ):
        own = [f"{run.mean() - run.course()[0]:+.3f}" for run in runs]
        own += [""] * (len(made.search[best]) - len(runs))
        table.append((f"`{cell}`", *own, *_cells(cell, runs)))
    return _means("cell", made.search, "not decidable", text, table)


def claims(made: Made) -> list[Claim]:
    """Return the claims in the order of the page."""
    return [
        Claim(
            name="search-gain",
            title="SAGE-GRPO and its challenger",
            kind="beyond",
            source="",
            says=(
                "On prompts and seeds that chose nothing the demo by SAGE-GRPO ends above that by "
                "DiffusionNFT."
            ),
            find=functools.partial(_find_gain, made),
            size=(8.6, 2.2),
        ),
        Claim(
            name="search-variant",
            title="The second search",
            kind="beyond",
            source="",
            says=(
                "On prompts and seeds that chose nothing the chosen variant of SAGE-GRPO ends "
                "above the demo."
            ),
            find=functools.partial(_find_variant, made),
            size=(8.6, 3.4),
        ),
        Claim(
            name="search-cells",
            title="The first search",
            kind="beyond",
            source="",
            says="The cell that the search chose is better than the second.",
            find=functools.partial(_find_best, made),
        ),
    ]
