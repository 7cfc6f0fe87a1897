"""The blind study as `python -m studies.blind` makes and counts it; its page in a browser:
test_pages.py."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from studies.blind import CRITERIA, Vote, count_votes, main, share_interval
from tests.test_docs import REPOSITORY, blocks, commands
from tests.test_judging import folder_of_videos, run_folder

pytestmark = pytest.mark.soak


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four pairs of `ours` against each of two others."""
    folder = tmp_path_factory.mktemp("study")
    for name in ("ours", "flow", "dance"):
        run_folder(folder / name)
    sources = [str(folder / name) for name in ("ours", "flow", "dance")]
    assert (
        main(["make", *sources, "--pairs", "4", "--seed", "3", "--folder", str(folder / "blind")])
        == 0
    )
    return folder


def vote(
    folder: Path,
    voter: str,
    choose: Callable[[dict[str, str]], str],
    numbers: Sequence[int] = range(8),
) -> Path:
    """A file as the page saves it."""
    key = json.loads((folder / "blind-key.json").read_text())
    votes = {str(n): dict.fromkeys(CRITERIA, choose(key["questions"][n])) for n in numbers}
    file = folder / f"votes-{voter}.json"
    file.write_text(json.dumps({"study": key["study"], "voter": voter, "votes": votes}))
    return file


def test_the_page_does_not_say_who_is_on_which_side(study: Path) -> None:
    page = (study / "blind" / "blind.html").read_text()
    key = json.loads((study / "blind" / "blind-key.json").read_text())
    assert not [
        name for name in ("ours", "flow", "dance") if f'"{name}"' in page or str(study) in page
    ]
    questions = key["questions"]
    assert len(questions) == 8
    for other in ("flow", "dance"):
        pairs = [q for q in questions if other in (q["left"], q["right"])]
        assert len({q["prompt"] for q in pairs}) == 4
        assert [q["left"] for q in pairs].count("ours") == 2, "each side equally often"
        assert all("ours" in (q["left"], q["right"]) for q in pairs)


def test_the_same_seed_makes_the_same_study(study: Path, tmp_path: Path) -> None:
    sources = [str(study / name) for name in ("ours", "flow", "dance")]
    for seed, same in (("3", True), ("4", False)):
        assert (
            main(
                ["make", *sources, "--pairs", "4", "--seed", seed, "--folder", str(tmp_path / seed)]
            )
            == 0
        )
        for name in ("blind-key.json", "blind.html"):
            assert (
                (tmp_path / seed / name).read_bytes() == (study / "blind" / name).read_bytes()
            ) == same


def test_votes_are_counted_for_the_first_source(
    study: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def prefers_ours(question: dict[str, str]) -> str:
        return "left" if question["left"] == "ours" else "right"

    def against_flow(question: dict[str, str]) -> str:
        if "flow" not in question.values():
            return "same"
        return "right" if question["left"] == "ours" else "left"

    files = [
        vote(study / "blind", "ann", prefers_ours),
        vote(study / "blind", "bob", against_flow, range(7)),
    ]
    key = study / "blind" / "blind-key.json"
    rates, voters = count_votes(key, files)
    assert voters == 2
    assert [(rate.other, rate.criterion) for rate in rates] == [
        (o, c) for o in ("flow", "dance") for c in CRITERIA
    ]
    sides = [
        next(side for side in (q["left"], q["right"]) if side != "ours")
        for q in json.loads(key.read_text())["questions"]
    ]
    of_bob = sides[:7].count("flow")
    assert (rates[0].wins, rates[0].same, rates[0].losses) == (4, 0, of_bob)
    assert rates[0].share == pytest.approx(4 / (4 + of_bob))
    ties = sides[:7].count("dance")
    assert (rates[3].wins, rates[3].same, rates[3].losses) == (4, ties, 0)
    assert rates[3].share == pytest.approx((4 + ties / 2) / (4 + ties))
    assert main(["count", str(key), *map(str, files)]) == 0
    out = capsys.readouterr().out
    assert "ours vs. flow" in out
    assert "2 voters" in out
    rates, _ = count_votes(key, files[:1])
    assert rates[0].interval == pytest.approx((0.5101, 1.0), abs=1e-4), "Wilson, 4 of 4"


def test_votes_that_are_no_votes_are_named(
    study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key, good = (
        study / "blind" / "blind-key.json",
        vote(study / "blind", "eve", lambda question: "left"),
    )
    content = json.loads(good.read_text())

    def refused(message: str, *files: Path, key: Path = key) -> None:
        assert main(["count", str(key), *map(str, files)]) == 2
        assert message in capsys.readouterr().err

    def changed(**values: object) -> Path:
        file = tmp_path / "votes.json"
        file.write_text(json.dumps(content | values))
        return file

    refused("voter 'eve' has voted in", good, changed())
    refused("votes of study 'x'", changed(study="x"))
    refused("is no vote of this page", changed(votes={"8": {CRITERIA[0]: "left"}}))
    refused("is no vote of this page", changed(votes={"0": {CRITERIA[0]: "best"}}))
    refused("is no vote of this page", changed(votes={"0": {"Beauty": "left"}}))
    refused("holds no vote", changed(votes={}))
    refused("expected a file that the blind page saved", changed(votes=[]))
    refused("no such file", tmp_path / "none.json")
    refused("no key of a blind page", good, key=good)
    renamed = tmp_path / "key.json"
    renamed.write_text(key.read_text().replace("flow", "ours"))
    refused("no key of a blind page, or changed", good, key=renamed)


def test_studies_that_cannot_be_made_are_named(
    study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, flow, out = str(study / "ours"), str(study / "flow"), str(tmp_path / "out")

    def refused(message: str, *arguments: str) -> None:
        assert main(["make", *arguments]) == 2
        assert message in capsys.readouterr().err

    refused("have 5 videos of the same prompts", ours, flow, "--pairs", "6", "--folder", out)
    refused("expected at least 1", ours, flow, "--pairs", "0", "--folder", out)
    refused("expected at least two sources", ours, "--pairs", "2", "--folder", out)
    refused("is the key of a study", ours, flow, "--pairs", "2", "--folder", str(study / "blind"))
    without = tmp_path / "without"
    shutil.copytree(study / "flow", without, ignore=shutil.ignore_patterns("*.mp4"))
    refused("without has no videos", ours, str(without), "--pairs", "2", "--folder", out)


def test_the_commands_of_the_documentation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("demo", "base"):
        folder_of_videos(
            tmp_path / "evaluation" / "videos" / name, [f"prompt {i}" for i in range(6)]
        )
    for block in blocks(REPOSITORY / "docs" / "how-to" / "evaluate.md"):
        for words in commands(block) if block.value == "tests/test_blind_study.py" else []:
            assert words[:3] == ["python", "-m", "studies.blind"]
            assert main(words[3:]) == 0
            for voter in ("ann", "bob"):
                vote(tmp_path / "study", voter, lambda question: "left", range(6)).rename(
                    f"votes-{voter}.json"
                )


def votes_of(
    prompts: Sequence[object], values: Sequence[float], voters: Sequence[object] | None = None
) -> list[Vote]:
    """Votes by one voter if none are named."""
    by = ["ann"] * len(prompts) if voters is None else voters
    return [
        Vote(str(prompt), str(voter), float(v))
        for prompt, voter, v in zip(prompts, by, values, strict=True)
    ]


@pytest.mark.parametrize(("wins", "votes"), [(0, 10), (7, 10), (32, 32), (1, 1)])
def test_one_vote_on_each_prompt_has_the_interval_of_wilson(wins: int, votes: int) -> None:
    theirs = stats.binomtest(wins, votes).proportion_ci(method="wilson")
    ours = share_interval(votes_of(range(votes), [1.0] * wins + [0.0] * (votes - wins)))
    assert ours == pytest.approx((theirs.low, theirs.high), abs=1e-12)


def test_votes_of_few_voters_are_clustered_by_prompt() -> None:
    """Votes are beta-binomial, 4 for each of 20 prompts; Wilson's interval takes them for 80
    independent votes."""
    generator = np.random.default_rng(0)
    held, independent = [], []
    prompts = np.arange(20).repeat(4).tolist()
    for _ in range(600):
        agreed = generator.beta(0.7, 0.3, size=20)  # mean 0.7
        values = generator.binomial(1, agreed.repeat(4)).astype(float).tolist()
        ours = share_interval(votes_of(prompts, values, list("abcd") * 20))
        theirs = stats.binomtest(int(sum(values)), 80).proportion_ci(method="wilson")
        assert ours is not None
        held.append(ours[0] <= 0.7 <= ours[1])
        independent.append(theirs.low <= 0.7 <= theirs.high)
    assert 0.925 <= np.mean(held) <= 0.98
    assert np.mean(independent) < 0.85


def test_votes_are_clustered_by_prompt_and_by_voter() -> None:
    """Voters differ in taste as prompts do: the share is that of all voters and prompts, of which
    few are seen.

    Clustered by prompt alone the interval holds less often than it says.
    """
    generator = np.random.default_rng(1)
    prompts, voters = np.arange(24).repeat(8).tolist(), [*range(8)] * 24
    both, alone = [], []
    for _ in range(500):
        by_voter, by_text = (0.2 * generator.choice([-1, 1], size=count) for count in (8, 24))
        level = 0.5 + by_voter[None, :] + by_text[:, None]
        values = generator.binomial(1, level).astype(float).ravel().tolist()
        ours = share_interval(votes_of(prompts, values, voters))
        by_prompt = share_interval(votes_of(prompts, values))
        assert ours is not None
        assert by_prompt is not None
        both.append(ours[0] <= 0.5 <= ours[1])
        alone.append(by_prompt[0] <= 0.5 <= by_prompt[1])
    assert 0.925 <= np.mean(both) <= 0.99
    assert np.mean(alone) < 0.85


def test_voters_who_all_agree_count_as_one() -> None:
    prompts = [i for i in range(8) for _ in range(4)]
    interval = share_interval(votes_of(prompts, [1.0] * 32, list("abcd") * 8))
    alone = share_interval(votes_of(range(8), [1.0] * 8))
    assert interval is not None
    assert alone is not None
    assert interval[0] < alone[0], "Student's t is wider than the normal distribution"
    assert interval[1] == 1.0
    fewer = share_interval(
        votes_of([i for i in range(8) for _ in range(6)], [1.0] * 48, list("abcdef") * 8)
    )
    assert fewer is not None
    assert fewer[0] < interval[0], "six voters are fewer than eight prompts"
    assert share_interval(votes_of(["a", "a", "b", "c"], [1.0, 0.0, 1.0, 1.0])) is None, (
        "of three prompts"
    )
