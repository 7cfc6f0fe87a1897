"""What the demo's study found."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from sage_fast.testbed.world import BALLS
from studies.demo.runs import NFT, SAGE
from studies.differences import Difference
from studies.figures import draw_intervals
from studies.finding import Claim, Finding, Material, Verdict
from studies.race.findings import gain, judge_above, judge_gain
from studies.race.ratio import gains, mean_of
from studies.runs import TrainedRun, decoder_share, difference, shipped, teraflops

Runs = Mapping[str, Sequence[TrainedRun]]
METHODS = {SAGE: "SAGE-GRPO", NFT: "DiffusionNFT"}
WORDS = tuple(BALLS.attributes)
"""What a caption names; the judge has a score of each."""
SCORES = {word: f"judge/{word}" for word in WORDS}
JUDGE = {**SCORES, "naturalness": "judge/naturalness"}
PARTS = {"reward": "reward", **JUDGE}
"""Column of a table -> the score that it holds."""
SPREADS = ("over prompts", "over seeds")
"""Columns with the standard deviations of a gain."""


def gain_of(runs: Sequence[TrainedRun], score: str) -> Difference:
    """Return the gain of one score on held-out prompts over the model before training."""
    return mean_of(gains(runs, score))


def word_gains(runs: Sequence[TrainedRun]) -> dict[str, Difference]:
    """Return word -> the gain of its score, corrected for the number of words."""
    return {
        word: gain_of(runs, score).widened(len(runs), len(WORDS)) for word, score in SCORES.items()
    }


def _rows(found: Runs, parts: Mapping[str, str]) -> list[dict[str, object]]:
    """Return a row for each run: these scores before and after."""
    return [
        {"configuration": name, "seed": run.seed}
        | {f"{part} before": run.course(score)[0] for part, score in parts.items()}
        | {f"{part} after": run.mean(score) for part, score in parts.items()}
        for name, runs in found.items()
        for run in runs
    ]


def _spreads(runs: Sequence[TrainedRun], score: str) -> tuple[float, float]:
    """Return the standard deviation of a score's gain over the prompts, and over the seeds."""
    by_seed = gains(runs, score)
    by_prompt = [[one[prompt] for one in by_seed] for prompt in by_seed[0]]
    over_prompts = statistics.stdev(statistics.fmean(values) for values in by_prompt)
    over_seeds = statistics.stdev(statistics.fmean(one.values()) for one in by_seed)
    return over_prompts, over_seeds


def _find_words(found: Runs, correct: tuple[float, float], material: Material) -> Finding:
    """Decide whether each word of a caption gains."""
    runs = found[SAGE]
    gained = word_gains(runs)
    shown = gained | {"naturalness": gain_of(runs, JUDGE["naturalness"])}
    in_table = shown | {"reward": gain_of(runs, "reward")}
    most = f"{len(shipped(SAGE).reward.weights)}"
    table: list[Sequence[str]] = [
        ("score", "of at most", "before", "after", "gain", "seeds that gain", *SPREADS)
    ]
    for part, score in PARTS.items():
        before = [run.course(score)[0] for run in runs]
        after = [run.mean(score) for run in runs]
        rising = sum(low < high for low, high in zip(before, after, strict=True))
        limit = most if part == "reward" else "1"
        ends = f"{statistics.fmean(before):.3f}", f"{statistics.fmean(after):.3f}"
        spreads = (f"{spread:.3f}" for spread in _spreads(runs, score))
        table.append((part, limit, *ends, str(in_table[part]), f"{rising}", *spreads))
    plain = ", ".join(f"{word} {gain_of(runs, SCORES[word])}" for word in WORDS)
    text = (
        f"Scores are means over {len(runs)} seeds, {len(runs[0].score())} held-out prompts and "
        "their videos. The words and the naturalness are scores of the judge, a network that no "
        "run is trained on. The table's intervals of the words are corrected for their number; "
        f"uncorrected the gains are {plain}. The last two columns are standard deviations of the "
        "gain: what a word gains differs more from prompt to prompt than from seed to seed, so "
        "more prompts would narrow the intervals and more seeds would not. A correct clip has a "
        f"reward of {correct[0]:.2f} as drawn, and of {correct[1]:.2f} through the autoencoder, "
        "which every sample passes."
    )

    def draw(figure: Figure) -> None:
        intervals = {part: one.interval for part, one in shown.items()}
        draw_intervals(figure.subplots(), intervals, "gain in the judge's score, 95 % interval")

    verdict: Verdict = "not decidable"
    if all(one.low > 0 for one in gained.values()):
        verdict = "held"
    elif any(one.high < 0 for one in gained.values()):
        verdict = "not held"
    rows = _rows({SAGE: runs}, PARTS)
    return Finding(verdict=verdict, text=text, draw=draw, rows=rows, table=table)


def _find_challenger(found: Runs, material: Material) -> Finding:
    """Decide whether the demo ends above its challenger."""
    runs, others = found[SAGE], found[NFT]
    above = difference(runs, others)
    theirs = {run.seed: run.mean() for run in others}
    behind = sum(run.mean() < theirs[run.seed] for run in runs)
    judged = {name: judge_gain(made, tuple(JUDGE.values())) for name, made in found.items()}
    text = (
        f"The difference of the gains is {above}; DiffusionNFT ends ahead on {behind} of "
        f"{len(runs)} seeds. The judge's gain is that of its {len(JUDGE)} scores together. FLOPs "
        f"are planned; {100 * decoder_share(shipped(SAGE)):.0f} % of those of `{SAGE}` are the "
        "decoder's, so equal compute means here about equally many videos."
    )
    table: list[Sequence[str]] = [
        ("configuration", "method", "before", "after", "gain", "judge", "TFLOPs")
    ]
    for name, made in found.items():
        before = statistics.fmean(run.course()[0] for run in made)
        after = statistics.fmean(run.mean() for run in made)
        ends = (f"{before:.3f}", f"{after:.3f}", str(gain(made)), str(judged[name]))
        table.append((f"`{name}`", METHODS[name], *ends, f"{teraflops(shipped(name)):.1f}"))

    def draw(figure: Figure) -> None:
        intervals = {name: gain(made).interval for name, made in found.items()}
        draw_intervals(figure.subplots(), intervals, "gain in the held-out reward, 95 % interval")

    rows = _rows(found, PARTS)
    return Finding(verdict=judge_above(above), text=text, draw=draw, rows=rows, table=table)


def claims(found: Runs, correct: tuple[float, float]) -> list[Claim]:
    """Return the claims in the order of the page."""
    return [
        Claim(
            name="demo-words",
            title="Every word of a caption",
            kind="beyond",
            source="",
            says="After the demo a clip shows each word of its caption more often than before.",
            find=functools.partial(_find_words, found, correct),
            size=(8.6, 2.6),
        ),
        Claim(
            name="demo-gain",
            title="SAGE-GRPO and its challenger",
            kind="beyond",
            source="",
            says="On seeds that chose nothing SAGE-GRPO ends with a higher reward than "
            "DiffusionNFT.",
            find=functools.partial(_find_challenger, found),
            size=(8.6, 2.0),
        ),
    ]
