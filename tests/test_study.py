"""The results page: its statistics, its protocol, and the command, with a claim at its smallest
size."""

import csv
import json
import math
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from sage_fast.algorithm.trainable import check_trainable
from sage_fast.util.errors import RunError
from studies import page, runs
from studies.demo import early
from studies.demo import runs as demo
from studies.differences import Difference, holm
from studies.finding import KINDS, Claim, Finding, Material, corrected
from studies.paper import comparisons, training
from studies.paper.__main__ import main
from studies.paper.claims import CLAIMS
from studies.paper.comparisons import Compared, Versus, judge_better, judge_equal
from studies.paper.compute import front
from studies.paper.training import config_of, protocol
from studies.race import runs as race
from studies.runs import TrainedRun, difference, exaflops
from studies.search import runs as search
from tests.waits import HANG, wait_until

pytestmark = pytest.mark.soak

REPOSITORY = Path(__file__).parent.parent
PROMPTS = [f"prompt {i}" for i in range(24)]


def made_up(values: np.ndarray) -> list[TrainedRun]:
    """Runs whose composite averages `values` `[seeds, prompts]` over the last evaluations, and is 0
    before them."""

    def evaluation(iteration: int, scores: np.ndarray) -> dict:
        parts = {"vq": scores.tolist(), "mq": [0.0] * len(scores), "ta": [0.0] * len(scores)}
        return {"iteration": iteration, "prompts": PROMPTS[: len(scores)], "parts": parts}

    return [
        TrainedRun(
            seed=seed,
            evaluations=[evaluation(i, k * v + h) for i, k, h in ((0, 0, 0), (20, 0, 0), (30, 1,
                -0.5), (40, 1, 0.5))],
            rows=[{"reward/mean": 0.0, "reward/std": 1.0}],
            environment={},
        )
        for seed, v in enumerate(values)
    ]  # fmt: skip


def test_the_score_of_a_run_is_the_mean_of_the_evaluations_of_its_last_third() -> None:
    (run,) = made_up(np.array([[1.0, 2.0]]))
    assert run.score() == {"prompt 0": 1.0, "prompt 1": 2.0}
    assert run.course() == {0: 0.0, 20: 0.0, 30: 1.0, 40: 2.0}


def test_a_difference_by_hand() -> None:
    """Two seeds and two prompts: the cells are 1, 3 and 2, 6, their mean is 3."""
    result = difference(made_up(np.array([[1.0, 3.0], [2.0, 6.0]])), made_up(np.zeros((2, 2))))
    # the means are 2, 4 and 1.5, 4.5
    by_seed, by_prompt, by_cell = (
        2.0 / 2,
        4.5 / 2,
        (4 + 0 + 1 + 9) / 3 / 4,
    )
    assert result.value == 3.0
    error = math.sqrt(max(by_seed + by_prompt - by_cell, by_seed, by_prompt))
    assert result.high - result.value == pytest.approx(
        12.706 * error, rel=1e-3
    )  # Student's t with one degree of freedom
    assert result.p == pytest.approx(1 - 2 / math.pi * math.atan(3 / error))


def test_intervals_cover_as_often_as_they_say() -> None:
    """Seeds and prompts shift their cells; 95 % intervals cover the true difference in 91 to 99 %
    of trials."""
    draw = np.random.default_rng(0)
    held = 0
    for _ in range(400):
        cells = (
            0.3
            + 0.1 * draw.normal(size=(5, 1))
            + 0.1 * draw.normal(size=(1, 24))
            + 0.2 * draw.normal(size=(5, 24))
        )
        result = difference(made_up(cells), made_up(np.zeros((5, 24))))
        held += result.low < 0.3 < result.high
    assert 0.91 < held / 400 < 0.99


def found(value: float, half: float, p: float) -> Difference:
    return Difference(value=value, low=value - half, high=value + half, p=p, corrected=p)


def test_holm_by_hand() -> None:
    corrected = holm({"a": found(1, 1, 0.04), "b": found(1, 1, 0.01), "c": found(1, 1, 0.03)})
    assert {name: result.corrected for name, result in corrected.items()} == {
        "b": 0.03,
        "c": 0.06,
        "a": 0.06,
    }


def compared(pooled: Difference, *single: Difference, margin: float = 0.05) -> Compared:
    """A comparison of five seeds; without `single` the pooled difference is the only one."""
    named = {str(i): difference for i, difference in enumerate(single or (pooled,))}
    return Compared(pooled=pooled, single=holm(named), margin=margin, seeds=5)


@pytest.mark.parametrize(
    ("result", "better", "equal"),
    [
        (compared(found(0.2, 0.05, 0.001)), "held", "not held"),
        # The pooled difference is significant, though no single comparison is.
        (
            compared(found(0.2, 0.1, 0.01), found(0.2, 0.3, 0.2), found(0.2, 0.3, 0.2)),
            "held",
            "not decidable",
        ),
        (compared(found(0.1, 0.2, 0.3)), "not decidable", "not decidable"),
        # A gain of the margin is excluded: pooled, or in one of several, even if the difference is
        # significant.
        (compared(found(0.0, 0.04, 0.9)), "not held", "held"),
        (compared(found(0.02, 0.01, 0.005)), "not held", "held"),
        (
            compared(found(0.2, 0.1, 0.01), found(0.4, 0.1, 0.01), found(0.0, 0.01, 0.9)),
            "not held",
            "not held",
        ),
        (compared(found(-0.2, 0.1, 0.001)), "not held", "not held"),
    ],
)
def test_verdicts(result: Compared, better: str, equal: str) -> None:
    assert (judge_better(result), judge_equal(result)) == (better, equal)


def test_an_uncorrected_interval_refutes_nothing() -> None:
    """Alone it excludes a gain of the margin; corrected as one of six, it does not."""
    one = found(0.0, 0.04, 0.9)
    assert judge_better(compared(one)) == "not held"
    six = compared(found(0.03, 0.1, 0.4), *[one] * 6)
    assert judge_better(six) == "not decidable"
    wider = six.corrected("0")
    # t of 0.025 / 6
    assert (wider.low, wider.high) == (-wider.high, pytest.approx(0.04 * 4.851 / 2.776, rel=1e-3))


def test_a_claim_is_held_only_if_its_p_stands_among_all_claims() -> None:
    """That two are alike is no claim of a difference: no p decides it."""
    claims = {claim.name: claim for claim in CLAIMS}
    p = {"equalizer": 0.01, "methods": 0.02, "samplers": 0.9, "ratio": 0.9, "print": None}
    findings = {
        claims[name]: Finding(
            verdict="held",
            text="As found.",
            draw=lambda figure: None,
            rows=[],
            tested=p and found(0.1, 0.05, p),
        )
        for name, p in p.items()
    }
    by_name = {claim.name: finding for claim, finding in corrected(findings).items()}
    assert {name: finding.verdict for name, finding in by_name.items()} == {
        "equalizer": "held", "methods": "not decidable", "samplers": "not decidable",
        "ratio": "held", "print": "held",
    }  # fmt: skip
    assert by_name["methods"].text == "p 0.06. As found."
    assert by_name["print"].text == "As found."


def test_the_margin_is_a_tenth_of_what_is_gained() -> None:
    """The gain is the largest mean over the base model, whose composite is 0 here."""
    runs = {"a": made_up(np.full((5, 24), 0.2)), "b": made_up(np.full((5, 24), 0.5))}
    result = comparisons.compare([Versus("a", "b")], runs)
    assert result.margin == pytest.approx(0.05)


def test_a_pooled_difference_is_that_of_the_means() -> None:
    """Each of two comparisons alternates between +1 and -1 over the seeds and is uncertain; their
    mean is 0."""
    zero, up = np.zeros((4, 24)), np.tile([[1.0], [-1.0], [1.0], [-1.0]], (1, 24))
    runs = {"zero": made_up(zero), "up": made_up(up), "down": made_up(-up)}
    result = comparisons.compare([Versus("up", "zero"), Versus("down", "zero")], runs)
    assert (result.pooled.value, result.pooled.low, result.pooled.high) == (0, 0, 0)
    assert [d.high > 1 for d in result.single.values()] == [True, True]


def test_no_run_is_chosen_by_its_own_score() -> None:
    """Seed 0 is the only good run of `a`, so every seed except seed 0 itself chooses `a`."""
    good = np.zeros((5, 24))
    good[0] = 1
    runs = {"a": made_up(good), "b": made_up(np.full((5, 24), 0.1))}
    chosen, best = comparisons.searched(["a", "b"], runs)
    assert chosen == ["b", "a", "a", "a", "a"]
    assert [round(run.mean(), 6) for run in best] == [0.1, 0, 0, 0, 0]
    assert [run.seed for run in best] == list(range(5))


def test_claims_of_the_paper_are_counted_apart() -> None:
    finding = Finding(verdict="held", text="", draw=lambda figure: None, rows=[])
    text = page.markdown(dict.fromkeys(CLAIMS, finding), {}, [], "", "Results")
    for kind in KINDS:
        count = sum(claim.kind == kind for claim in CLAIMS)
        assert (
            f"{count} of {count} held"
            in text.partition(f"## {KINDS[kind]}\n")[2].partition("\n##")[0]
        )


def test_a_run_that_costs_more_and_gains_less_is_not_on_the_front() -> None:
    assert front({"a": (1.0, 0.1), "b": (2.0, 0.05), "c": (2.0, 0.3), "d": (3.0, 0.3)}) == [
        "a",
        "c",
    ]


def test_every_variant_can_be_trained_and_serves_a_claim() -> None:
    for variant in protocol():
        check_trainable(config_of(variant, 0))
    used = {variant for claim in CLAIMS for variant in claim.variants if claim.name != "compute"}
    assert used == protocol().keys()


def test_cost_is_that_of_the_large_model() -> None:
    """Training two of 8 steps costs a quarter of the backward; the rollout stays."""
    names = ("steps-8", "fraction-1/4", "dual", "sage-equalized")
    whole, quarter, dual, without = (sum(exaflops(config_of(name, 0)).values()) for name in names)
    assert 0.3 < quarter / whole < 0.45
    assert dual > without  # the anchor's forwards


@pytest.mark.parametrize("claim", comparisons.CLAIMS, ids=lambda claim: claim.name)
def test_what_is_found_follows_from_the_runs(claim: Claim) -> None:
    """If all variants are alike, nothing is better and no claimed difference is held; figure and
    data are complete."""
    draw = np.random.default_rng(1)
    shared = 1 + 0.2 * draw.normal(size=(5, 24))
    runs = {v: made_up(shared + 0.01 * draw.normal(size=shared.shape)) for v in claim.variants}
    for group in runs.values():
        for run in group:
            for evaluation in run.evaluations:
                evaluation["parts"] |= dict.fromkeys(comparisons.JUDGE, evaluation["parts"]["vq"])
    found = claim.find(Material(quick=True, runs=runs))
    assert found.verdict == ("not held" if claim.by_p else "held")
    assert len(found.rows) == 5 * len(set(claim.variants))
    found.draw(figure := Figure(figsize=claim.size))
    assert len(figure.axes) >= 2


# -- the command -----------------------------------------------------------------------------------


def test_an_unknown_claim_is_refused_with_the_nearest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["equaliser"]) == 2
    assert "did you mean 'equalizer'?" in capsys.readouterr().err
    assert main(["ema", "--workers", "0"]) == 2
    (file := tmp_path / "file").touch()
    assert main(["excess-noise", "--output", str(file)]) == 1  # before any work
    assert main(["all", "list"]) == 0
    assert "\nstep-noise  " in capsys.readouterr().out


@pytest.mark.usefixtures("study_in_process")
def test_a_claim_from_the_runs_to_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = {
        "train.iterations": 2,
        "eval.interval": 1,
        "eval.num_prompts": 3,
        "eval.seeds_per_prompt": 1,
    }
    tiny |= {"train.prompts_per_iteration": 1, "train.group_size": 2, "train.optimizer_steps": 1}
    monkeypatch.setattr(training, "QUICK", tiny)

    command = ["ema", "--quick", "--workers", "1", "--output", str(tmp_path)]
    assert main(command) == 0
    first = capsys.readouterr().out
    assert "4 runs, 4 of them to be made" in first
    assert re.search(r"no-ema-seed1: \d\.\d+; 4 of 4 runs", first)
    assert first.splitlines()[-1] == str(tmp_path / "results.html")

    with (tmp_path / "results" / "ema.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["variant"], row["seed"]) for row in rows] == [
        ("dual", "0"),
        ("dual", "1"),
        ("no-ema", "0"),
        ("no-ema", "1"),
    ]
    assert {file.name for file in (tmp_path / "results").iterdir()} == {
        "ema.csv",
        "ema.svg",
        "results.md",
    }
    assert (tmp_path / "results" / "ema.svg").read_bytes().startswith(b"<?xml")
    page, text = (
        (tmp_path / "results.html").read_text(),
        (tmp_path / "results" / "results.md").read_text(),
    )
    (claim,) = (claim for claim in CLAIMS if claim.name == "ema")
    for shown in (page, text):
        assert "python -m studies.paper ema --quick" in shown
        assert claim.says in shown
    assert page.count("<svg") == 1
    # Markdown syntax, which HTML would show as it is
    assert "`" not in page.split("<main")[-1].split("<svg")[0]
    assert not re.search(r'(src|href)="https?:', page)

    # The same settings train no run twice, even if its file predates a setting with a default.
    file = tmp_path / "runs-quick" / "dual-seed0.json"
    tree = json.loads(file.read_text())
    tree["settings"] = tree["settings"].replace("  anchor_interval: 10\n", "")
    file.write_text(json.dumps(tree))
    made = {file: file.stat().st_mtime_ns for file in (tmp_path / "runs-quick").iterdir()}
    assert main(command) == 0
    assert "to be made" not in capsys.readouterr().out
    assert made == {file: file.stat().st_mtime_ns for file in made}
    config = config_of("dual", 0, quick=True)
    assert runs._is_of(file, config)
    assert not capsys.readouterr().out
    monkeypatch.setitem(tiny, "sampling.eta", 0.9)
    assert not runs._is_of(file, config_of("dual", 0, quick=True))
    for content in (file.read_text()[:500], '{"version": 1}'):
        file.write_text(content)
        assert not runs._is_of(file, config)
    printed = capsys.readouterr().out.splitlines()
    for line, why in zip(printed, ("other settings", "not valid JSON", "no run"), strict=True):
        assert f"{file}: " in line
        assert why in line


def test_a_video_without_a_score_is_named() -> None:
    (run,) = made_up(np.array([[1.0, 2.0]]))
    run.evaluations[-1]["parts"]["vq"][0] = None
    with pytest.raises(RunError, match="a held-out video of iteration 40 has no reward"):
        run.score()


ENDED = """
import os, signal, sys, time

from studies import runs


def train_one(config, file):
    file.with_suffix(".begun").touch()
    if sys.argv[1] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if sys.argv[1] == "fails":
        raise RuntimeError("out of memory")
    time.sleep(6000)

if __name__ == "__main__":
    runs.train_one = train_one
    runs.WORKER = [sys.executable, __file__, sys.argv[1], "worker"]
    if sys.argv[2] == "worker":
        sys.exit(runs.main(sys.argv[3:]))
    from studies.paper import __main__ as study
    sys.exit(study.main(sys.argv[2:]))
"""


@pytest.mark.parametrize(
    ("how", "status", "says"),
    [
        ("Ctrl-C", 130, ""),
        # as for a run that a scheduler stops
        pytest.param("SIGTERM", 0, "", marks=pytest.mark.soak),
        pytest.param("killed", 1, "process 1 ended with status -9; killed", marks=pytest.mark.soak),
        ("fails", 1, "process 1 ended with status 1; "),
    ],
)
def test_what_ends_it(how: str, status: int, says: str, tmp_path: Path) -> None:
    """Ctrl-C to the whole group, SIGTERM to the command, and a run that is killed or fails end the
    command at once.

    It leaves no process and, except for a signal, says what happened in one line.
    """
    (script := tmp_path / "script.py").write_text(ENDED)
    runs = tmp_path / "runs-quick"
    command = [
        sys.executable,
        str(script),
        how,
        "ema",
        "--quick",
        "--workers",
        "1",
        "--output",
        str(tmp_path),
    ]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen(
        command, start_new_session=True, stderr=subprocess.PIPE, text=True, env=environment
    )
    while process.poll() is None and not list(runs.glob("*.begun")):
        time.sleep(0.05)
    if how == "Ctrl-C":
        os.killpg(process.pid, signal.SIGINT)
    elif how == "SIGTERM":
        os.kill(process.pid, signal.SIGTERM)
    printed = process.communicate(timeout=HANG)[1]
    assert process.returncode == status
    lines = printed.splitlines()
    assert not says or lines[-1].startswith(f"studies.paper: {says}")
    assert how == "fails" or len(lines) == bool(says)
    assert how != "fails" or lines[0].startswith("Traceback")
    assert len(list(runs.glob("*.begun"))) == 1
    wait_until(lambda: not _alive(process.pid))  # the semaphore tracker ends last


def _alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("study", ["reproduce", "race", "search", "demo"])
def test_the_archived_runs_are_those_of_the_settings_as_they_are(
    study: str, tmp_path: Path
) -> None:
    """The studies continue from the archives; every tenth run is looked at."""
    settings_of = {
        "reproduce": training.settings_of,
        "race": race.settings_of,
        "search": search.settings_of,
        "demo": lambda run, quick: (early if "-it" in run else demo).settings_of(run, quick),
    }[study]
    left = [*training._protocol()["archived"], *search._protocol()["archived"]]
    (archive,) = (Path(__file__).parent.parent / "benchmarks" / "results").glob(
        f"*-cpu-{study}-runs.tar.xz"
    )
    with tarfile.open(archive, "r|xz") as archived:
        for place, file in enumerate(file for file in archived if file.isfile()):
            if place % 10 == 0 and Path(file.name).stem.rpartition("-seed")[0] not in left:
                archived.extract(file, tmp_path, filter="data")
                assert runs._is_of(
                    tmp_path / file.name, settings_of(Path(file.name).stem, quick=False)
                ), file.name
    assert place >= 19  # of the smallest study


def test_an_interval_has_a_column_of_its_own() -> None:
    table = [
        ("recipe", "gain", "above"),
        ("a", "+0.191 [+0.046, +0.336]", ""),
        ("b", "+0.1 [-0.1, +0.3]", "+1"),
    ]
    finding = Finding(verdict="held", text="", draw=lambda figure: None, rows=[], table=table)
    assert page._tables(finding) == [
        [
            ["recipe", "gain", "interval", "above"],
            ["a", "+0.191", "[+0.046, +0.336]", ""],
            ["b", "+0.1", "[-0.1, +0.3]", "+1"],
        ]
    ]
