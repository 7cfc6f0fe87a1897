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
from studies.race.ratio import gains
from studies.runs import TrainedRun, decoder_share, difference, seeds_behind, shipped, teraflops

Runs = Mapping[str, Sequence[TrainedRun]]
METHODS = {SAGE: "SAGE-GRPO", NFT: "DiffusionNFT"}
WORDS = tuple(BALLS.attributes)
"""What a caption names; the judge has a score of each."""
SCORES = {word: f"judge/{word}" for word in WORDS}
JUDGE = {**SCORES, "naturalness": "judge/naturalness"}
PARTS = {"reward": "reward", **JUDGE}
"""Column of a table -> the score that it holds."""
READ_SO = ("read so before", "read so after")
"""Columns with the shares of clips that read as their captions ask."""


def word_gains(runs: Sequence[TrainedRun]) -> dict[str, Difference]:
    """Return word -> the gain of its score, corrected for the number of words."""
    return {
        word: gain(runs, score).widened(len(runs), len(WORDS)) for word, score in SCORES.items()
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


def _falling(runs: Sequence[TrainedRun], score: str) -> int:
    """Return the number of prompts on which the mean of a score over the seeds falls."""
    by_seed = gains(runs, score)
    means = [statistics.fmean(one[prompt] for one in by_seed) for prompt in by_seed[0]]
    return sum(mean < 0 for mean in means)


def _read_so(runs: Sequence[TrainedRun], score: str, end: int) -> float:
    """Return the share of the clips of an evaluation, 0 for the first and -1 for the last, that
    read as asked: the judge gives the word more than one half."""
    values = [value for run in runs for value in run.evaluations[end]["parts"][score]]
    return statistics.fmean(value > 0.5 for value in values)


def _by_word(runs: Sequence[TrainedRun], attribute: str) -> str:
    """Return the gain of each word of an attribute, over the prompts that have it."""
    by_seed = gains(runs, SCORES[attribute])
    found = []
    for word in BALLS.attributes[attribute]:
        values = [one[prompt] for one in by_seed for prompt in one if word in prompt.split()]
        found.append(f"{word} {statistics.fmean(values):+.3f}")
    return ", ".join(found)


def _find_words(found: Runs, correct: tuple[float, float], material: Material) -> Finding:
    """Decide whether each word of a caption gains."""
    runs = found[SAGE]
    gained = word_gains(runs)
    shown = gained | {"naturalness": gain(runs, JUDGE["naturalness"])}
    in_table = shown | {"reward": gain(runs)}
    most = f"{len(shipped(SAGE).reward.weights)}"
    heading = ("score", "of at most", "before", "after", "gain", "seeds that gain")
    table: list[Sequence[str]] = [(*heading, "prompts that fall", *READ_SO)]
    for part, score in PARTS.items():
        before = [run.course(score)[0] for run in runs]
        after = [run.mean(score) for run in runs]
        rising = sum(low < high for low, high in zip(before, after, strict=True))
        limit = most if part == "reward" else "1"
        ends = f"{statistics.fmean(before):.3f}", f"{statistics.fmean(after):.3f}"
        counts = f"{rising}", f"{_falling(runs, score)}"
        shares = [f"{_read_so(runs, score, end):.3f}" if part in WORDS else "" for end in (0, -1)]
        table.append((part, limit, *ends, str(in_table[part]), *counts, *shares))
    plain = ", ".join(f"{word} {gain(runs, SCORES[word])}" for word in WORDS)
    by_word = "; ".join(_by_word(runs, attribute) for attribute in WORDS)
    text = (
        f"Scores are means over {len(runs)} seeds, {len(runs[0].score())} held-out prompts and "
        "their videos. The words and the naturalness are scores of the judge, a network that no "
        "run is trained on. The table's intervals of the words are corrected for their number; "
        f"uncorrected the gains are {plain}. The gain by word: {by_word}. A clip reads as asked if "
        "the judge gives the word more than one half; where nearly all clips did so before, the "
        "word had little to learn, and the gain is one of certainty on clearer clips. A correct "
        f"clip has a reward of {correct[0]:.2f} as drawn, and of {correct[1]:.2f} through the "
        "autoencoder, which every sample passes."
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
    judged = {name: judge_gain(made, tuple(JUDGE.values())) for name, made in found.items()}
    text = (
        f"The difference of the gains is {above}; DiffusionNFT ends ahead on "
        f"{seeds_behind(runs, others)} of {len(runs)} seeds. The judge's gain is that of its "
        f"{len(JUDGE)} scores together. FLOPs are planned; "
        f"{100 * decoder_share(shipped(SAGE)):.0f} % of those of `{SAGE}` are the decoder's, so "
        "equal compute means here about equally many videos."
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
            says="After the demo the judge is surer of each word of a caption than before.",
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
