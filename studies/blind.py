"""The blind pairwise study of the paper's section 4.4: a page for voting, a separate key, and the
vote count."""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import special

from sage_fast.cli import guarded
from sage_fast.commands.sources import labelled
from sage_fast.eval.scores import MIN_PROMPTS, UPPER, clustered_variance, t_quantile
from sage_fast.eval.videoset import Key, VideoSet
from sage_fast.report.comparison_page import read_sets
from sage_fast.report.html import data_address, render
from sage_fast.util.errors import UserError
from sage_fast.util.files import read_json, write_atomic, write_json
from sage_fast.util.paths import TypedFile, expand_options
from studies.differences import two_way_variance

Interval = tuple[float, float]

CRITERIA = ("Visual quality", "Motion quality", "Semantic alignment")
"""Criteria for judging each pair, as in Table 3."""

CHOICES = {"left": 1.0, "same": 0.5, "right": 0.0}
"""Answer -> its value for the video on the left."""

MIN_VOTERS = 5
"""Fewest voters for an interval that speaks of others: with fewer, the spread between voters is
hardly known."""

TEMPLATE = Path(__file__).parent / "blind.html.j2"
PAGE, KEY = "blind.html", "blind-key.json"


def blind_study(
    sources: Mapping[str, Path], count: int, seed: int, folder: Path
) -> tuple[Path, Path]:
    """Write a voting page and its key: `count` pairs of videos for the first source against each
    other source.

    Pairs are drawn at random regardless of their scores, one per prompt before any second one. The
    order is random, and each source is on the left in half of its pairs.

    Args:
        sources: label -> run folder or folder of videos.
        count: pairs per comparison, at least 1.
        seed: determines the pairs, their order and their sides.
        folder: created if missing.

    Returns:
        The page, which does not name the sources, and the key, which says which source is on which
        side.

    Raises:
        UserError: there are fewer than two sources, a source has no videos, there are fewer than
            `count` pairs, a video cannot be read, or the folder holds the key of another study.
    """
    if (folder / KEY).exists():
        raise UserError(
            f"{folder / KEY} is the key of a study, without which its votes cannot be counted: "
            "choose another --folder"
        )
    if count < 1:
        raise UserError(f"--pairs {count}: expected at least 1")
    sets = read_sets(sources)[1]
    for label in sources:
        if not any(videos.label == label and videos.shown for videos in sets):
            raise UserError(f"{label} has no videos of an evaluation to show")
    first, *others = sets
    if not others:
        raise UserError("a study compares pairs: expected at least two sources")
    generator = np.random.default_rng(seed)
    questions = []
    for other in others:
        pairs = _drawn(first, other, generator)
        if len(pairs) < count:
            raise UserError(
                f"--pairs {count}: {first.label} and {other.label} have {len(pairs)} videos of the "
                "same prompts; `sage-fast eval --folder` makes more"
            )
        sides = generator.permutation([i % 2 for i in range(count)])
        questions += [
            (key, *((other, first) if swapped else (first, other)))
            for key, swapped in zip(pairs, sides)
        ]
    questions = [questions[i] for i in generator.permutation(len(questions))]
    secret = {
        "seed": seed,
        "sources": [videos.label for videos in sets],
        "criteria": list(CRITERIA),
        "questions": [
            {"prompt": key[0], "video": key[1], "left": left.label, "right": right.label}
            for key, left, right in questions
        ],
    }
    files = list(dict.fromkeys(side.shown[key] for key, *sides in questions for side in sides))
    # Shuffle the files: in the order of the questions, they would give the sources away.
    files = [files[i] for i in generator.permutation(len(files))]
    page = render(
        TEMPLATE,
        study=_name_of(secret),
        criteria=CRITERIA,
        videos=[data_address(file) for file in files],
        questions=[
            {
                "prompt": key[0],
                "left": files.index(left.shown[key]),
                "right": files.index(right.shown[key]),
            }
            for key, left, right in questions
        ],
    )
    write_json({"study": _name_of(secret), **secret}, folder / KEY)
    write_atomic(folder / PAGE, page)
    return folder / PAGE, folder / KEY


def _name_of(secret: Mapping[str, Any]) -> str:
    """Return the study's name, which does not tell what the key holds."""
    return hashlib.sha256(json.dumps(secret).encode()).hexdigest()[:16]


def _drawn(first: VideoSet, other: VideoSet, generator: np.random.Generator) -> list[Key]:
    """Return all pairs in random order, one per prompt before any second one."""
    pairs = [key for key in first.shown if key in other.shown]
    pairs = [pairs[i] for i in generator.permutation(len(pairs))]
    seen: dict[str, int] = {}
    turns = []
    for key in pairs:
        turns.append(seen.get(key[0], 0))
        seen[key[0]] = turns[-1] + 1
    return [key for _, key in sorted(zip(turns, pairs), key=lambda pair: pair[0])]


# -- the votes -------------------------------------------------------------------------------------


class Vote(NamedTuple):
    """A vote on one criterion of one pair.

    Attributes:
        prompt: prompt of the pair.
        voter: who voted.
        value: 1 for the first source, 0 for the other, 1/2 for no preference.
    """

    prompt: str
    voter: str
    value: float


class WinRate(NamedTuple):
    """How often the first source was preferred over another on one criterion.

    Attributes:
        first, other: labels.
        criterion: one of `CRITERIA`.
        share: share of the votes for the first; "no preference" counts half for each.
        interval: 95 % interval of the share over prompts and voters, by `share_interval`.
        wins, same, losses: numbers of votes.
    """

    first: str
    other: str
    criterion: str
    share: float
    interval: Interval | None
    wins: int
    same: int
    losses: int


def count_votes(key: Path, files: Sequence[Path]) -> tuple[list[WinRate], int]:
    """Return the win rates of each pair of sources on each criterion, and the number of voters.

    Raises:
        UserError: a file is no key, holds no votes or votes for another page, or two files are from
            the same voter.
    """
    secret = _read(key)
    study = secret.pop("study", None)
    if study != _name_of(secret):
        raise UserError(
            f"{key}: no key of a blind page, or changed; expected {KEY}, as it was written with "
            "the page"
        )
    first, *others = secret["sources"]
    found: dict[tuple[str, str], list[Vote]] = {
        (other, criterion): [] for other in others for criterion in secret["criteria"]
    }
    voters: dict[str, Path] = {}
    for file in files:
        voter, answers = _read_votes(file, study, secret)
        if voter in voters:
            raise UserError(
                f"{file}: voter {voter!r} has voted in {voters[voter]} already; keep one of the two"
            )
        voters[voter] = file
        for number, chosen in answers.items():
            question = secret["questions"][int(number)]
            left = question["left"] == first
            for criterion, choice in chosen.items():
                value = CHOICES[choice] if left else 1 - CHOICES[choice]
                other = question["right" if left else "left"]
                found[other, criterion].append(Vote(question["prompt"], voter, value))
    rates = [
        _rate(first, other, criterion, votes)
        for (other, criterion), votes in found.items()
        if votes
    ]
    return rates, len(voters)


def _rate(first: str, other: str, criterion: str, votes: Sequence[Vote]) -> WinRate:
    values = [vote.value for vote in votes]
    return WinRate(
        first,
        other,
        criterion,
        share=sum(values) / len(values),
        interval=share_interval(votes),
        wins=values.count(1.0),
        same=values.count(0.5),
        losses=values.count(0.0),
    )


def _read_votes(
    file: Path, study: str, secret: Mapping[str, Any]
) -> tuple[str, dict[str, dict[str, str]]]:
    """Return the voter, and question -> criterion -> choice."""
    content = _read(file)
    answers, voter = content.get("votes"), content.get("voter")
    if not isinstance(answers, dict) or not isinstance(voter, str):
        raise UserError(f"{file}: no votes; expected a file that the blind page saved")
    if content.get("study") != study:
        raise UserError(
            f"{file}: votes of study {content.get('study')!r}; the key is that of {study!r}"
        )
    numbers = [str(i) for i in range(len(secret["questions"]))]
    for number, chosen in answers.items():
        sound = number in numbers and isinstance(chosen, dict)
        if not sound or not all(
            c in secret["criteria"] and v in list(CHOICES) for c, v in chosen.items()
        ):
            raise UserError(f"{file}: question {number!r}: {chosen!r} is no vote of this page")
    if not answers:
        raise UserError(f"{file}: holds no vote")
    return voter, answers


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise UserError(f"{str(file)!r}: no such file")
    return read_json(file)


def share_interval(votes: Sequence[Vote]) -> Interval | None:
    """Wilson interval of the mean of votes.

    Votes on one prompt agree more than votes on different prompts, and so do the votes of one
    voter, so they count for less. The effective number of votes is n divided by the design effect:
    the variance clustered by prompt and by voter over the binomial variance, at least 1. The
    degrees of freedom are those of the fewer of both (Korn and Graubard, "Confidence intervals for
    proportions with small expected number of positive counts estimated from survey data", 1998). If
    all votes are equal, each prompt or each voter counts as one vote, whichever are fewer.

    With fewer than `MIN_VOTERS` voters nothing can be said of others: the interval is over prompts
    alone, for these voters. With one vote per prompt that is the plain Wilson interval. None if a
    prompt has several votes and there are fewer than `MIN_PROMPTS` prompts.
    """
    values = [vote.value for vote in votes]
    prompts, voters = [vote.prompt for vote in votes], [vote.voter for vote in votes]
    n, clusters = len(votes), len(set(prompts))
    share = sum(values) / n
    effective, quantile = float(n), special.ndtri(UPPER)
    over_voters = len(set(voters)) >= MIN_VOTERS
    if n > clusters or over_voters:
        if clusters < MIN_PROMPTS:
            return None
        variance = (
            two_way_variance(values, prompts, voters)
            if over_voters
            else clustered_variance(values, prompts)
        )
        fewest = min(clusters, len(set(voters))) if over_voters else clusters
        binomial = share * (1 - share) / n
        effective = n / max(1.0, variance / binomial) if binomial else float(fewest)
        quantile = t_quantile(fewest)
    z2 = float(quantile) ** 2
    middle = (share + z2 / (2 * effective)) / (1 + z2 / effective)
    half = math.sqrt(share * (1 - share) * z2 / effective + (z2 / (2 * effective)) ** 2) / (
        1 + z2 / effective
    )
    return max(0.0, middle - half), min(1.0, middle + half)


def format_win_rates(rates: Sequence[WinRate], voters: int) -> str:
    lines = []
    for other in dict.fromkeys(rate.other for rate in rates):
        chosen = [rate for rate in rates if rate.other == other]
        lines.append(f"{chosen[0].first} vs. {other}")
        lines.append(
            f"  {'':<20}{'preferred':>9}  {'95 % interval':<18}{'won':>6}{'same':>6}{'lost':>6}"
        )
        for rate in chosen:
            interval = (
                "-"
                if rate.interval is None
                else " to ".join(f"{100 * x:.1f} %" for x in rate.interval)
            )
            counts = f"{rate.wins:>6}{rate.same:>6}{rate.losses:>6}"
            lines.append(
                f"  {rate.criterion:<20}{100 * rate.share:>7.1f} %  {interval:<18}{counts}"
            )
    over = "over prompts and voters" if voters >= MIN_VOTERS else "over prompts, for these voters"
    counted = "1 voter" if voters == 1 else f"{voters} voters"
    lines.append(f"{counted}; no preference counts half; intervals by Wilson, {over}")
    return "\n".join(lines)


def _study(options: argparse.Namespace) -> int:
    if options.action == "count":
        print(format_win_rates(*count_votes(options.key, options.votes)))
    else:
        sources = {label: Path(source) for label, source in labelled(options.run).items()}
        print(*blind_study(sources, options.pairs, options.seed, options.folder), sep="\n")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Make a study or count its votes; return the exit status as `sage-fast` does."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.blind", description=__doc__, allow_abbrev=False
    )
    actions = parser.add_subparsers(dest="action", required=True)
    make = actions.add_parser(
        "make", help="write a page that asks which video of a pair is better, and its key"
    )
    make.add_argument(
        "run", nargs="+", help="run folder, or folder with videos.csv; LABEL=RUN names it"
    )
    make.add_argument(
        "--pairs", type=int, required=True, help="pairs of the first run and each other run"
    )
    make.add_argument(
        "--seed", type=int, default=0, help="of the pairs, their order and their sides"
    )
    make.add_argument(
        "--folder", type=TypedFile, default=Path("blind"), help="where both go (default: blind)"
    )
    count = actions.add_parser("count", help="print win rates with intervals")
    count.add_argument("key", type=TypedFile, help=f"the {KEY} written with the page")
    count.add_argument("votes", type=TypedFile, nargs="+", help="a file for each voter")
    options = parser.parse_args(arguments)

    def study() -> int:
        expand_options(options)
        return _study(options)

    return guarded("studies.blind", study)


if __name__ == "__main__":
    sys.exit(main())
