"""Whatever a user gives, or a crash leaves, ends in a result or in one of our own errors: never in
another traceback.

The cases are the same in every run, and a failing one is shown as it is, so that the time is
bounded.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given
from hypothesis import settings as case_settings
from hypothesis import strategies as st

from sage_fast.cli import main
from sage_fast.commands.sources import load_run, resumed_settings
from sage_fast.config.command_line import split_settings
from sage_fast.config.fields import sections, settings_of
from sage_fast.config.loader import build, dump, load
from sage_fast.config.schema import Config
from sage_fast.data.prompts import KEYS, read_prompts
from sage_fast.eval.comparison import compare
from sage_fast.report.comparison_page import write_comparison
from sage_fast.report.page import checks, read_run, write_report
from sage_fast.run_folder import read_scores
from sage_fast.util.errors import RunError, UserError
from sage_fast.util.files import read_json, read_metrics
from tests.test_report import row
from tests.test_scores import pair, scores


def cases(count: int) -> Callable[[Any], Any]:
    """So many examples, always the same ones, however slow the machine is; `make test-all`
    takes the first fifth."""
    count = count if "SAGE_FAST_SOAK" in os.environ else count // 5
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]
    chosen = case_settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=checks,
    )

    def prepare(test: Any) -> Any:
        test.times = count  # of its faults
        return chosen(test)

    return prepare


@contextlib.contextmanager
def ours() -> Iterator[None]:
    """Nothing is raised, or one of our own errors."""
    with contextlib.suppress(UserError, RunError):
        yield


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


# -- what is given ---------------------------------------------------------------------------------

NUMBERS = st.one_of(
    st.integers(), st.floats(), st.sampled_from([0, -1, 1, 2**63, 10**400, 1e308, -0.0, True])
)
TEXT = st.one_of(
    st.text(max_size=20),
    st.sampled_from(
        ["", " ", "auto", "null", "off", "nan", ".inf", "1e-4", "1e400", "${seed}",
         "${oc.env:NO_SUCH}", "${", "{a: 1}",
         "[1, 2", "0x1f", "1_000", "2026-11-22", "!!python/object:os.system x", "&a [*a]", "*a",
             "\0", "\ud800",
         "a: b: c", "%", "@x", "`x`", "'", "\U0001f600", "testbed:train", "../..", "/dev/null",
         "x" * 5000,
         "9" * 5000, "0x_", "!!bool x", "[" * 5000]
    ),
)  # fmt: skip
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, TEXT)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
NAMES = st.one_of(
    st.sampled_from(
        [
            *settings_of(Config),
            *filter(None, sections(Config)),
            "reward.weights.red",
            "reward.weights.",
        ]
    ),
    TEXT,
    st.sampled_from(list(settings_of(Config))).map(lambda name: name[:-1]),
)


@pytest.mark.fault(
    "odd settings, options, commands and prompt files",
    "a result, or one line that says what is wrong",
)
@cases(450)
@given(st.dictionaries(NAMES, VALUES, min_size=1, max_size=3))
def test_settings(given_settings: dict[str, Any]) -> None:
    with ours():
        config = build(given_settings)
        assert isinstance(config, Config)


def nested(dotted: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, value in dotted.items():
        *folders, last = name.split(".")
        inside = tree
        for folder in folders:
            inside = inside.setdefault(folder, {})
            if not isinstance(inside, dict):
                break
        else:
            inside[last] = value
    return tree


FILES = st.one_of(
    st.binary(max_size=60),
    st.text(max_size=60).map(lambda text: text.encode("utf-8", "replace")),
    st.text(alphabet="{}[]:,-&*!|>%@`'\"#\n\t 0ae.$", max_size=40).map(str.encode),
    st.dictionaries(NAMES, VALUES, max_size=3).map(lambda tree: json.dumps(nested(tree)).encode()),
)


@pytest.mark.fault(
    "odd settings, options, commands and prompt files",
    "a result, or one line that says what is wrong",
)
@cases(350)
@given(FILES)
def test_settings_in_a_file(content: bytes) -> None:
    with scratch() as folder, ours():
        file = folder / "config.yaml"
        file.write_bytes(content)
        (folder / "again.yaml").write_text(
            dump(load(file)), encoding="utf-8", errors="surrogatepass"
        )
        # what a run writes down is what it was given
        assert load(folder / "again.yaml") == load(file)


WORDS = st.one_of(
    NAMES.map(lambda name: f"--{name}"), st.tuples(NAMES, TEXT).map("--{0[0]}={0[1]}".format), TEXT
)
PAPER = Path(__file__).parent.parent / "configs" / "recipes" / "paper.yaml"


@pytest.mark.fault(
    "odd settings, options, commands and prompt files",
    "a result, or one line that says what is wrong",
)
@cases(350)
@given(st.lists(WORDS, min_size=1, max_size=5))
def test_settings_on_the_command_line(arguments: list[str]) -> None:
    with ours():
        load(PAPER, split_settings(arguments)[1])


COMMANDS = st.sampled_from(
    ["train", "sample", "eval", "report", "bench", "profile", "doctor", "testbed", "init", "x", ""]
)


@pytest.mark.fault(
    "odd settings, options, commands and prompt files",
    "a result, or one line that says what is wrong",
)
@cases(150)
@given(COMMANDS, st.lists(WORDS, max_size=4))
def test_commands(command: str, arguments: list[str]) -> None:
    """Each ends with 1 or 2; an option that no command has keeps those from work that are valid."""
    with scratch() as folder, contextlib.suppress(SystemExit):
        config = [str(folder / "none.yaml")] if command not in ("doctor", "bench") else []
        assert main([command, *config, *arguments, "--no-such-option", "1"]) in (1, 2)


@pytest.mark.fault(
    "odd settings, options, commands and prompt files",
    "a result, or one line that says what is wrong",
)
@cases(250)
@given(
    st.one_of(
        st.binary(max_size=80),
        st.text(max_size=80).map(lambda text: text.encode("utf-16")),
        st.lists(
            st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=3).map(json.dumps), max_size=3
        ).map(lambda lines: "\n".join(lines).encode()),
    ),
    st.sampled_from([".txt", ".jsonl"]),
)
def test_prompt_files(content: bytes, suffix: str) -> None:
    with scratch() as folder, ours():
        file = folder / f"prompts{suffix}"
        file.write_bytes(content)
        prompts = read_prompts(str(file))
        assert prompts
        assert all(prompt.text.strip() == prompt.text != "" for prompt in prompts)


@pytest.mark.fault(
    "odd settings, options, commands and prompt files",
    "a result, or one line that says what is wrong",
)
@cases(60)
@given(TEXT)
def test_names_of_prompt_files(name: str) -> None:
    with ours():
        read_prompts(name)


# -- what a crash leaves ---------------------------------------------------------------------------


def damaged(content: bytes) -> st.SearchStrategy[bytes]:
    """Cut off, with a byte changed, with something else in its place, or with a value changed if it
    is JSON."""
    places = st.integers(0, max(len(content) - 1, 0))
    return st.one_of(
        places.map(lambda end: content[:end]),
        st.tuples(places, st.binary(min_size=1, max_size=3)).map(
            lambda change: content[: change[0]] + change[1] + content[change[0] + len(change[1]) :]
        ),
        st.binary(max_size=40),
        st.just(b"[" * 3_000),
        st.just(b"\0" * len(content)),
        changed(content),
    )


def changed(content: bytes) -> st.SearchStrategy[bytes]:
    """JSON, or lines of it, with one value replaced or removed."""
    try:
        lines = [json.loads(line) for line in content.splitlines()]
    except ValueError:
        try:
            lines = [json.loads(content)]
        except ValueError:
            return st.just(content)

    @st.composite
    def change(draw: Any) -> bytes:
        new = copy.deepcopy(lines)
        inside: Any = new
        while True:
            key = draw(
                st.sampled_from(list(inside) if isinstance(inside, dict) else range(len(inside)))
            )
            if not (isinstance(inside[key], dict | list) and inside[key] and draw(st.booleans())):
                break
            inside = inside[key]
        if isinstance(inside, dict) and draw(st.booleans()):
            del inside[key]
        else:
            inside[key] = draw(VALUES)
        return "".join(json.dumps(line) + "\n" for line in new).encode()

    return change()


@pytest.mark.fault(
    "damaged metrics, evaluations, run folders and reports",
    "a result, or one line that says what is wrong",
)
@cases(250)
@given(damaged("".join(json.dumps(row(i)) + "\n" for i in range(2)).encode()))
def test_metrics_files(content: bytes) -> None:
    with scratch() as folder, ours():
        (folder / "metrics.jsonl").write_bytes(content)
        checks(read_metrics(folder / "metrics.jsonl"), [])


@pytest.mark.fault(
    "damaged metrics, evaluations, run folders and reports",
    "a result, or one line that says what is wrong",
)
@cases(150)
@given(damaged(json.dumps(scores((1.0, 2.0), 0)).encode()))
def test_evaluations(content: bytes) -> None:
    with scratch() as folder, ours():
        (folder / "before.json").write_bytes(content)
        before = read_scores(folder / "before.json")
        for both in ((before, scores((1.0, 2.0), 3)), (scores((1.0, 2.0), 3), before)):
            with ours():
                compare(pair(*both)).text  # noqa: B018


@functools.cache
def whole_run() -> dict[str, bytes]:
    """The files of a run of three iterations, without its videos."""
    start = {"date": "2026-11-22", "commit": "a", "command": "sage-fast train"}
    facts = start | {
        "notes": ["a note"],
        "sigmas": [1.0, 0.5, 0.0],
        "resumed": [start | {"iteration": 1}],
    }
    return {
        "config.yaml": dump(build({"train.iterations": 3})).encode(),
        "run.json": json.dumps(facts).encode(),
        "metrics.jsonl": "".join(json.dumps(row(i)) + "\n" for i in range(3)).encode(),
        "eval/before.json": json.dumps(scores((1.0, 2.0), 0)).encode(),
        "eval/after.json": json.dumps(scores((1.5, 2.5), 3)).encode(),
        "checkpoints/iteration-000003/state.json": b"{}",
        "checkpoints/iteration-000003/manifest.json": (
            b'{"files": {"state.json": {"bytes": 2, "sha256": ""}}}'
        ),
    }


@st.composite
def damaged_runs(draw: Any) -> dict[str, bytes | None]:
    """One or two files damaged or lost, or files that do not belong there."""
    run: dict[str, bytes | None] = dict(whole_run())
    for _ in range(draw(st.integers(1, 2))):
        name = draw(st.sampled_from(sorted(run)))
        run[name] = draw(st.one_of(st.none(), damaged(whole_run()[name])))
    strange = draw(
        st.sampled_from(
            ["", "eval/x", "eval/x.json", "checkpoints/iteration-x/a", "videos/before", "weights/x"]
        )
    )
    return run | ({strange: b"x"} if strange else {})


def written(folder: Path, run: dict[str, bytes | None]) -> Path:
    for name, content in run.items():
        if content is not None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
    return folder


@pytest.mark.fault(
    "damaged metrics, evaluations, run folders and reports",
    "a result, or one line that says what is wrong",
)
@cases(130)
@given(damaged_runs())
def test_damaged_runs_as_the_source_of_a_command(files: dict[str, bytes | None]) -> None:
    with scratch() as folder:
        run = written(folder, files)
        for read in (
            lambda: load_run(str(run), {}),
            lambda: resumed_settings(str(run), {}),
            lambda: read_run(run),
        ):
            with ours():
                read()


@pytest.mark.fault(
    "damaged metrics, evaluations, run folders and reports",
    "a result, or one line that says what is wrong",
)
@pytest.mark.charts
@cases(30)
@given(damaged_runs())
def test_reports_of_damaged_runs(files: dict[str, bytes | None]) -> None:
    with scratch() as folder, ours():
        assert write_report(written(folder, files)).is_file()


@pytest.mark.fault(
    "damaged metrics, evaluations, run folders and reports",
    "a result, or one line that says what is wrong",
)
@pytest.mark.charts
@cases(30)
@given(st.integers(0, 8 * len(whole_run()["config.yaml"]) - 1))
def test_settings_with_one_wrong_bit(bit: int) -> None:
    content = bytearray(whole_run()["config.yaml"])
    content[bit // 8] ^= 1 << bit % 8
    with scratch() as folder:
        runs = {"a": folder / "a", "b": folder / "b"}
        for run in runs.values():
            written(run, dict(whole_run()))
        (runs["a"] / "config.yaml").write_bytes(content)
        for read in (
            lambda: write_report(runs["a"]),
            lambda: write_comparison(runs, folder / "out"),
        ):
            with ours():
                read()


@pytest.mark.fault(
    "damaged metrics, evaluations, run folders and reports",
    "a result, or one line that says what is wrong",
)
@cases(100)
@given(damaged(b'{"a": 1}'))
def test_json_files(content: bytes) -> None:
    with scratch() as folder, ours():
        (folder / "x.json").write_bytes(content)
        read_json(folder / "x.json")
