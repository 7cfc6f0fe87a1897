"""Every command and every Python example in the documentation runs here, or says which test or
machine runs it.

A fence is marked by a comment on the line above it:

    <!-- needs: gpu -->  or  <!-- needs: network -->      not run
    <!-- run by: tests/test_new_user.py -->               that file runs every command of the block

Unmarked ```bash and ```python fences are executed: those of one page share a folder, a page's
Python its names.
"""

import dataclasses
import re
import shlex
from collections import Counter
from dataclasses import dataclass
from fnmatch import fnmatch
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from sage_fast.cli import main
from sage_fast.config.loader import leaves, load
from sage_fast.config.schema import Config
from sage_fast.data.prompts import negatives_of, read_prompts
from sage_fast.util.files import read_metrics
from scripts import gpu_page, reference
from tests import faults
from tests.tiny import FEW_STEPS, arguments

REPOSITORY = Path(__file__).parent.parent
SMALL = [*FEW_STEPS, *arguments(train__prompts_per_iteration=2, train__group_size=2)]
PAGES = [
    REPOSITORY / "README.md",
    REPOSITORY / "CONTRIBUTING.md",
    *sorted((REPOSITORY / "docs").rglob("*.md")),
]
FENCE = re.compile(
    r"^(?:<!-- (?P<key>needs|run by): (?P<value>.+?) "
    r"-->\n)?```(?P<kind>bash|python)\n(?P<text>.*?)^```$",
    re.M | re.S,
)


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    kind: str
    text: str
    key: str | None
    value: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            page,
            text.count("\n", 0, found.start()) + 1,
            found["kind"],
            found["text"],
            found["key"],
            found["value"],
        )
        for found in FENCE.finditer(text)
    ]


ALL = [block for page in PAGES for block in blocks(page)]


def commands(block: Block) -> list[list[str]]:
    lines = block.text.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


LONG = ("evaluate.md",)
"""Pages whose commands take half a minute: `make soak` runs them."""


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(
            page,
            marks=[pytest.mark.soak] * (page.name in LONG),
            id=str(page.relative_to(REPOSITORY)),
        )
        for page in PAGES
    ],
)
def test_commands_and_examples_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "configs").symlink_to(REPOSITORY / "configs")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": page.stem}
    for block in (block for block in blocks(page) if block.key is None):
        if block.kind == "python":
            exec(compile(block.text, str(block), "exec"), names)
            continue
        for words in commands(block):
            assert words[0] == "sage-fast", (
                f"{block}: mark it, or let this test run more than sage-fast"
            )
            trains = words[1] == "train" and "--dry-run" not in words
            assert main([*words[1:], *(SMALL if trains else [])]) == 0, words


@pytest.mark.parametrize("block", [block for block in ALL if block.key], ids=str)
def test_marked_blocks_say_who_runs_them(block: Block) -> None:
    if block.key == "needs":
        assert block.value in ("gpu", "network", "gpu, network")
        return
    source = (REPOSITORY / block.value).read_text(encoding="utf-8")
    if f'"{block.page.name}"' in source and "blocks(" in source:
        return  # it reads the page, and runs what stands there
    words = re.sub(r"[^\w./-]+", " ", source)  # "sage-fast", "train"  ->  sage-fast train
    for line in block.text.replace("\\\n", " ").splitlines():
        command = line.split("#")[0].split()
        if command and command[0] != "cd":
            start = " ".join(command[:2])
            in_process = start.replace("sage-fast", "main")  # main(["train", ...])
            assert start in words or in_process in words, (
                f"{block}: {block.value} does not run {start!r}"
            )


def test_every_page_is_covered() -> None:
    """Indented blocks and fences without a language would escape: commands stand only in ```bash
    fences."""
    shells = {block.page.name for block in ALL if block.kind == "bash"}
    assert shells >= {"README.md", "CONTRIBUTING.md", "rollout-engine.md"}
    for page in PAGES:
        outside = FENCE.sub("", page.read_text(encoding="utf-8"))
        outside = re.sub(r"^```\w*\n.*?^```$", "", outside, flags=re.M | re.S)
        strays = re.findall(
            r"^ {4,}(?:sage-fast|make|pip|torchrun|pytest|python|nsys|ncu) .*$", outside, re.M
        )
        assert not strays, f"{page.name}: {strays}"
        assert outside.count("```") == 0, f"{page.name}: a fence that is not closed, or is indented"


def test_paths_named_in_the_documentation_exist() -> None:
    """`folder/file.py` and links to files; names of generated files do not hold a slash or begin
    with runs/."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        named = re.findall(
            r"`((?:sage_fast|kernels|csrc|configs|docs|tests|benchmarks)/[\w./-]+)`", text
        )
        linked = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
        missing = [name for name in named if not (REPOSITORY / name).exists()]
        missing += [link for link in linked if not (page.parent / link).exists()]
        assert not missing, f"{page.name}: {missing}"


class Page(HTMLParser):
    """What a page of the site loads and links to, and how many of each element its text has."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.elements: Counter[str] = Counter()
        self._in_text = False
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {key: value or "" for key, value in attrs}
        into = (
            self.links
            if tag == "a" or values.get("rel") in ("prev", "next", "canonical")
            else self.loads
        )
        into += [
            values[key] for key in ("href", "src", "poster", "data", "srcset") if key in values
        ]
        self._in_text |= tag == "article"
        self.elements[tag] += self._in_text

    def handle_endtag(self, tag: str) -> None:
        self._in_text &= tag != "article"


def test_the_site_has_every_page_as_it_was_written(site: Path) -> None:
    """Python-Markdown wants an empty line before a list or a table, GitHub does not."""
    nav = re.findall(
        r"^ +- (?:\w+: )?([\w./-]+\.md)", (REPOSITORY / "mkdocs.yml").read_text(), re.M
    )
    for page in PAGES:
        name = (
            str(page.relative_to(REPOSITORY))
            .removeprefix("docs/")
            .replace("README.md", "readme.md")
        )
        assert nav.count(name) == 1, (
            f"{name} stands {nav.count(name)} times in the nav of mkdocs.yml"
        )
        text = re.sub(r"^```\w*\n.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
        shown = Page(site / Path(name).with_suffix(".html")).elements
        if "\n::: " not in text:
            assert shown["li"] == len(re.findall(r"^ *(?:[-*]|\d+\.) ", text, re.M)), name
            assert shown["table"] == len(re.findall(r"^\|[-|: ]+\|$", text, re.M)), name
        else:
            assert shown["h3"] > 10, f"{name}: no docstrings"
    assert "strictly decreasing from 1 to 0" in (site / "reference" / "python.html").read_text()


def test_the_site_loads_nothing_from_the_network(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > len(PAGES)
    for file in pages:
        page = Page(file)
        assert len(page.loads) > 3
        local = page.loads + [
            link for link in page.links if "://" not in link and not link.startswith("mailto:")
        ]
        root = site if file.name == "404.html" else file.parent  # which is served from any address
        missing = [
            url
            for url in local
            if not (root / url.split("#")[0].split("?")[0].lstrip("/")).exists()
        ]
        assert not missing, f"{file.name}: {missing}"
    for style in site.rglob("*.css"):
        assert not re.search(
            r"@import|url\([\"']?(?:https?:)?//", style.read_text(encoding="utf-8")
        ), style.name


def test_the_table_of_faults_is_that_of_the_tests() -> None:
    """`pytest -m fault` writes it; the numbers are those of its last run."""
    rows = faults.written()
    assert [(what, outcome, file) for what, _, outcome, file in rows] == faults.marked()
    assert len({what for what, *_ in rows}) == len(rows) > 20
    assert all(times > 0 for _, times, _, _ in rows)


@pytest.mark.parametrize("name", reference.PAGES)
def test_pages_made_from_the_code_are_current(name: str) -> None:
    page = (reference.FOLDER / name).read_text(encoding="utf-8")
    assert page == reference.PAGES[name](), "run python -m scripts.reference"


def test_the_tables_of_the_gpu_are_those_of_its_results() -> None:
    page = gpu_page.PAGE.read_text(encoding="utf-8")
    assert len(gpu_page.TABLE.findall(page)) >= 6
    assert page == gpu_page.written(page), "run python -m scripts.gpu_page"


def test_what_another_trainer_calls_a_setting_is_a_setting() -> None:
    names, *_ = tables("how-to/from-another-trainer.md")
    known, section = set(leaves(dataclasses.asdict(Config()))), ""
    assert len(names) > 35
    for name in (name.partition(":")[0] for name in names):
        if name in known:  # also `output`, which has no section
            section = name.rpartition(".")[0]
        else:  # the rest of a row: `kl.lambda_max`, `lambda_min`
            assert f"{section}.{name}" in known, name


def tables(page: str) -> list[list[str]]:
    """Names in the first column of each table: `a`, `b` | ... is two names."""
    found = re.findall(
        r"^\|---.*\n((?:\|.*\n)+)", (REPOSITORY / "docs" / page).read_text(encoding="utf-8"), re.M
    )
    return [
        re.findall(r"`([^`]+)`", "\n".join(row.split(" | ")[0] for row in table.splitlines()))
        for table in found
    ]


def test_the_page_has_the_metrics_and_files_of_a_run(tmp_path: Path) -> None:
    """Those that stand only in some runs are in the second table of each; `<part>` stands for a
    name."""
    metrics, some_metrics, files, some_files = tables("reference/metrics.md")
    config = str(REPOSITORY / "configs" / "recipes" / "paper.yaml")
    few = arguments(
        train__iterations=2,
        eval__interval=1,
        eval__num_prompts=2,
        tracking__training_videos_interval=1,
        profile__iterations="[2]",
    )
    assert main(["train", config, "--output", str(tmp_path / "run"), *SMALL, *few]) == 0

    def of(names: list[str], found: set[str]) -> set[str]:
        patterns = [re.sub(r"<\w+>", "*", name) + "*" * name.endswith("/") for name in names]
        for name, pattern in zip(names, patterns):
            assert any(fnmatch(one, pattern) for one in found), f"no run has {name}"
        return {one for one in found if any(fnmatch(one, pattern) for pattern in patterns)}

    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    keys = set().union(*rows)
    conditional = of(some_metrics[:3], keys)
    assert of(metrics, keys) == set(rows[-1]) == keys - conditional
    written = {
        str(path.relative_to(tmp_path / "run"))
        for path in (tmp_path / "run").rglob("*")
        if path.is_file()
    }
    assert of(files, written) | of(some_files[:3], written) == written
    source = "".join(
        file.read_text(encoding="utf-8") for file in (REPOSITORY / "sage_fast").rglob("*.py")
    )
    for name in (*some_metrics, *some_files):
        assert all(part in source for part in re.split(r"<\w+>|/", name)), name


def test_hooks_use_the_versions_of_the_constraints() -> None:
    pins = dict(
        line.split("==") for line in (REPOSITORY / "constraints.txt").read_text().splitlines()
    )
    hooks = (REPOSITORY / ".pre-commit-config.yaml").read_text()
    assert yaml.safe_load(hooks)["repos"][0]["rev"] == f"v{pins['ruff']}"
    assert f"mypy {pins['mypy']}" in hooks


@pytest.mark.parametrize(
    ("column", "name"),
    [
        (0, "paper-480p"),
        (1, "official-480p"),
        (2, "hunyuanvideo15-480p"),
        (3, "hunyuanvideo15-480p-full"),
    ],
)
def test_the_source_of_every_value_is_named(column: int, name: str) -> None:
    """docs/reference/configs.md tells every setting of four configurations, with its value; paths
    apart.

    The last cell of a row has that of our LoRA, and after "All weights:" that for all weights if it
    is another.
    """
    file = REPOSITORY / "configs" / f"{name}.yaml"
    sections = {
        key: value
        for key, value in yaml.safe_load(file.read_text()).items()
        if isinstance(value, dict)
    }
    given = {f"{section}.{key}" for section, values in sections.items() for key in values}
    page = (REPOSITORY / "docs" / "reference" / "configs.md").read_text()
    rows = re.findall(r"^\| `(\w+\.\w+)` \|(.*)\|(.*)\|(.*)\|$", page, re.M)
    chosen = {
        setting: [*cells, cells[2].split(" All weights:")[-1]][column] for setting, *cells in rows
    }
    stated = {
        setting: value[1]
        for setting, cell in chosen.items()
        if (value := re.match(r" `(.+?)`", cell))
    }
    assert stated.keys() == given - {
        "model.path",
        "data.prompts",
        "data.eval_prompts",
        "reward.name",
        "reward.args",
    }
    assert load(file, stated) == load(file)


@pytest.mark.parametrize(
    "file", sorted((REPOSITORY / "configs").glob("*.yaml")), ids=lambda file: file.stem
)
def test_a_shipped_configuration_names_prompts_that_are_there(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    data = load(file).data
    negatives_of(
        prompt for source in (data.prompts, data.eval_prompts) for prompt in read_prompts(source)
    )


def test_the_challenger_for_480p_has_the_method_of_the_recipe_ahead() -> None:
    full, recipe = (load(REPOSITORY / "configs" / f"{name}.yaml")
                    for name in ("hunyuanvideo15-480p-nft", "recipes/nft_full"))  # fmt: skip
    same = {
        "model": ["tuning"],
        "sampling": ["sampler", "averaged_weights"],
        "objective": ["surrogate", "nft_beta", "advantage_std"],
        "kl": ["strategy"],
        "train": ["optimizer_steps", "timestep_fraction", "ema_decay"],
    }
    for section, keys in same.items():
        for key in keys:
            assert getattr(getattr(full, section), key) == getattr(getattr(recipe, section), key), (
                key
            )
    assert full.train.engine == "zero3"


@pytest.mark.parametrize("name", ["distilled", "window", "i2v", "step-distilled"])
def test_a_variant_of_the_lora_differs_where_the_page_says(name: str) -> None:
    configs = REPOSITORY / "configs"
    ours, variant = (
        leaves(yaml.safe_load((configs / f"hunyuanvideo15-480p{end}.yaml").read_text()))
        for end in ("", f"-{name}")
    )
    differ = {key for key in variant if key not in ours or ours[key] != variant[key]}
    assert ours.keys() <= variant.keys()
    (row,) = re.findall(rf"^\| `configs/hunyuanvideo15-480p-{name}.yaml` \|(.*)\|$",
                        (REPOSITORY / "docs" / "reference" / "configs.md").read_text(),
                        re.M)  # fmt: skip
    assert set(re.findall(r"`(\w+\.\w+)`", row)) == differ - {"output"}
