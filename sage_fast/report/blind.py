"""The blind pairwise study of the paper's section 4.4: a page for voting, a separate key, and the vote count."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sage_fast.eval.intervals import share_interval
from sage_fast.eval.scores import Interval
from sage_fast.eval.videoset import Key, VideoSet
from sage_fast.report.compare import read_sets
from sage_fast.report.html import data_address, render
from sage_fast.util.errors import UserError
from sage_fast.util.files import read_json, write_atomic, write_json

CRITERIA = ("Visual quality", "Motion quality", "Semantic alignment")
"""Criteria for judging each pair, as in Table 3."""

CHOICES = {"left": 1.0, "same": 0.5, "right": 0.0}
"""Answer -> its value for the video on the left."""

PAGE, KEY = "blind.html", "blind-key.json"


def blind_study(sources: Mapping[str, Path], count: int, seed: int, folder: Path) -> tuple[Path, Path]:
    """Write a voting page and its key: `count` pairs of videos for the first source against each other source.

    Pairs are drawn at random regardless of their scores, one per prompt before any second one. The order is random, and
    each source is on the left in half of its pairs.

    Args:
        sources: label -> run folder or folder of videos.
        count: pairs per comparison, at least 1.
        seed: determines the pairs, their order and their sides.
        folder: created if missing.

    Returns:
        The page, which does not name the sources, and the key, which says which source is on which side.

    Raises:
        UserError: there are fewer than two sources, a source has no videos, there are fewer than `count` pairs, a
            video cannot be read, or the folder holds the key of another study.
    """
    if (folder / KEY).exists():
        raise UserError(
            f"{folder / KEY} is the key of a study, without which its votes cannot be counted: choose another --folder"
        )
    sets = read_sets(sources)[1]
    for label in sources:
        if not any(videos.label == label and videos.shown for videos in sets):
            raise UserError(f"{label} has no videos of an evaluation to show")
    if len(sets) < 2:
        raise UserError("--blind compares pairs: expected at least two sources")
    if count < 1:
        raise UserError(f"--blind {count}: expected at least 1")
    generator = np.random.default_rng(seed)
    questions = []
    first = sets[0]
    for other in sets[1:]:
        pairs = _drawn(first, other, generator)
        if len(pairs) < count:
            raise UserError(
                f"--blind {count}: {first.label} and {other.label} have {len(pairs)} videos of the same prompts; a run "
                "keeps eval.num_videos of them, and `sage-fast eval --folder` all"
            )
        sides = generator.permutation([i % 2 for i in range(count)])
        for key, swapped in zip(pairs[:count], sides):
            left, right = (other, first) if swapped else (first, other)
            questions.append((key, left, right))
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
    study = hashlib.sha256(json.dumps(secret).encode()).hexdigest()[:16]
    files = list(dict.fromkeys(side.shown[key] for key, *sides in questions for side in sides))
    # Shuffle the files: in the order of the questions, they would give the sources away.
    files = [files[i] for i in generator.permutation(len(files))]
    page = render(
        "blind.html.j2",
        study=study,
        criteria=CRITERIA,
        videos=[data_address(file) for file in files],
        questions=[
            {"prompt": key[0], "left": files.index(left.shown[key]), "right": files.index(right.shown[key])}
            for key, left, right in questions
        ],
    )
    write_json({"study": study, **secret}, folder / KEY)
    write_atomic(folder / PAGE, page)
    return folder / PAGE, folder / KEY


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


# -- the votes --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class WinRate:
    """How often the first source was preferred over another on one criterion.

    Attributes:
        first, other: labels.
        criterion: one of `CRITERIA`.
        share: share of the votes for the first; "no preference" counts half for each.
        interval: 95 % interval of the share, by `share_interval`.
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
        UserError: a file is no key, holds no votes or votes for another page, or two files are from the same voter.
    """
    secret = _read_key(key)
    questions, criteria = secret["questions"], secret["criteria"]
    first, *others = secret["sources"]
    votes: dict[tuple[str, str], list[tuple[str, float]]] = {}
    voters: dict[str, Path] = {}
    for file in files:
        voter, answers = _read_votes(file, secret)
        if voter in voters:
            raise UserError(f"{file}: voter {voter!r} has voted in {voters[voter]} already; keep one of the two")
        voters[voter] = file
        for number, chosen in answers.items():
            question = questions[number]
            left = question["left"] == first
            for criterion, choice in chosen.items():
                value = CHOICES[choice] if left else 1 - CHOICES[choice]
                other = question["right" if left else "left"]
                votes.setdefault((other, criterion), []).append((question["prompt"], value))
    rates = []
    for other in others:
        for criterion in criteria:
            found = votes.get((other, criterion), [])
            values = [value for _, value in found]
            if found:
                rates.append(
                    WinRate(
                        first=first,
                        other=other,
                        criterion=criterion,
                        share=sum(values) / len(values),
                        interval=share_interval([prompt for prompt, _ in found], values),
                        wins=values.count(1.0),
                        same=values.count(0.5),
                        losses=values.count(0.0),
                    )
                )
    return rates, len(voters)


def _read_key(file: Path) -> dict[str, Any]:
    secret = _read(file)
    questions = secret.get("questions")
    sound = isinstance(questions, list) and len(questions) > 0
    sound = sound and isinstance(secret.get("study"), str)
    for name in ("criteria", "sources"):
        names = secret.get(name)
        sound = sound and isinstance(names, list) and len(names) > 1 and all(isinstance(text, str) for text in names)
    for question in questions if isinstance(questions, list) else ():
        texts = [question.get(key) for key in ("prompt", "left", "right")] if isinstance(question, dict) else [None]
        sound = sound and all(isinstance(text, str) for text in texts)
    if not sound:
        raise UserError(f"{file}: no key of a blind page; expected {KEY}, as `sage-fast compare --blind` wrote it")
    return secret


def _read_votes(file: Path, secret: dict[str, Any]) -> tuple[str, dict[int, dict[str, str]]]:
    """Return the voter, and question -> criterion -> choice."""
    content = _read(file)
    answers, voter = content.get("votes"), content.get("voter")
    if not isinstance(answers, dict) or not isinstance(voter, str):
        raise UserError(f"{file}: no votes; expected a file that the blind page saved")
    if content.get("study") != secret["study"]:
        raise UserError(f"{file}: votes of study {content.get('study')!r}; the key is that of {secret['study']!r}")
    numbers = [str(i) for i in range(len(secret["questions"]))]
    for number, chosen in answers.items():
        sound = number in numbers and isinstance(chosen, dict)
        if not sound or not all(c in secret["criteria"] and v in list(CHOICES) for c, v in chosen.items()):
            raise UserError(f"{file}: question {number!r}: {chosen!r} is no vote of this page")
    if not answers:
        raise UserError(f"{file}: holds no vote")
    return voter, {int(number): chosen for number, chosen in answers.items()}


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise UserError(f"{str(file)!r}: no such file")
    return read_json(file)


def format_win_rates(rates: Sequence[WinRate], voters: int) -> str:
    lines = []
    for other in dict.fromkeys(rate.other for rate in rates):
        chosen = [rate for rate in rates if rate.other == other]
        lines.append(f"{chosen[0].first} vs. {other}")
        lines.append(f"  {'':<20}{'preferred':>9}  {'95 % interval':<18}{'won':>6}{'same':>6}{'lost':>6}")
        for rate in chosen:
            interval = "-" if rate.interval is None else " to ".join(f"{100 * x:.1f} %" for x in rate.interval)
            counts = f"{rate.wins:>6}{rate.same:>6}{rate.losses:>6}"
            lines.append(f"  {rate.criterion:<20}{100 * rate.share:>7.1f} %  {interval:<18}{counts}")
    lines.append(f"{voters} voter{'s' * (voters != 1)}; no preference counts half; intervals by Wilson, over prompts")
    return "\n".join(lines)
