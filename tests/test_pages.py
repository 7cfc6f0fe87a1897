"""The pages in Debian's Chromium, 390 and 1400 pixels wide: no console error, no violation of axe,
every video plays.

Skipped if there is no browser.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sage_fast.cli import main
from sage_fast.report.page import write_report
from studies import blind
from tests.test_judging import run_folder

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
if CHROMIUM is None:
    pytest.skip("no chromium: the pages are not opened", allow_module_level=True)
sync_api: Any = pytest.importorskip(
    "playwright.sync_api", reason="no playwright: the pages are not opened"
)
axe: Any = pytest.importorskip(
    "axe_playwright_python.sync_playwright", reason="no axe: the pages are not opened"
)

pytestmark = pytest.mark.charts
WIDTHS = (390, 1400)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        # for root
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report, a comparison of three runs and a blind page of two, with prompts of every kind."""
    folder = tmp_path_factory.mktemp("pages")
    runs = [
        str(run_folder(folder / name, gain, eta=gain))
        for name, gain in (("one", 0.0), ("two", -0.2), ("<3>", 0.3))
    ]
    assert main(["compare", *runs, "--folder", str(folder)]) == 0
    assert blind.main(["make", *runs[:2], "--pairs", "3", "--folder", str(folder)]) == 0
    shutil.copy(write_report(Path(runs[0])), folder)
    return folder


def opened(browser: Any, file: Path, width: int) -> tuple[Any, list[str]]:
    """Open a page; return it and a list that collects its complaints."""
    page = browser.new_page(viewport={"width": width, "height": 900})
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on(
        "request",
        lambda request: (
            request.url.startswith(("file:", "data:", "blob:")) or complaints.append(request.url)
        ),
    )
    page.goto(file.as_uri())
    return page, complaints


PLAYED = """() => Promise.all(
[...document.querySelectorAll("video")].map((video) => new Promise((done) => {
  const played = () => video.currentTime > 0 && video.videoWidth > 0 && done(true);
  video.addEventListener("timeupdate", played);
  video.addEventListener("error", () => done(video.error.message));
  setTimeout(() => done(`still at ${video.currentTime} of ${video.duration}`), 15000);
  played();
})))"""


def sound(page: Any, complaints: list[str], videos: int) -> None:
    assert page.evaluate(PLAYED) == [True] * videos
    width = page.viewport_size["width"]
    assert page.evaluate("document.documentElement.scrollWidth") <= width, (
        "the page itself does not scroll sideways"
    )
    violations = axe.Axe().run(page).response["violations"]
    assert {v["id"]: [node["html"][:200] for node in v["nodes"]] for v in violations} == {}
    assert complaints == []


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("name", "videos"), [("comparison", 15), ("report", 10)])
def test_pages_open_and_play(
    name: str, videos: int, width: int, browser: Any, folder: Path
) -> None:
    page, complaints = opened(browser, folder / f"{name}.html", width)
    sound(page, complaints, videos)
    cut = (
        "[...document.querySelectorAll('.scroll')].filter((table) => table.scrollWidth > "
        "table.clientWidth).length"
    )
    assert page.evaluate(cut) == 0, "no table is cut"
    page.close()


@pytest.mark.parametrize("width", WIDTHS)
def test_a_voter_votes(width: int, browser: Any, folder: Path, tmp_path: Path) -> None:
    """Vote on all pairs, with a reload that keeps the answers; the saved file can be counted."""
    page, complaints = opened(browser, folder / "blind.html", width)
    key = json.loads((folder / "blind-key.json").read_text())
    assert page.is_disabled("#save")
    for number, question in enumerate(key["questions"]):
        assert page.text_content("#prompt") == question["prompt"]
        if number == 0:
            sound(page, complaints, 2)
        else:
            assert page.evaluate(PLAYED) == [True, True]
        for criterion in blind.CRITERIA:
            side = "Left" if question["left"] == "one" else "Right"
            page.get_by_role("group", name=criterion).get_by_label(
                side if criterion != blind.CRITERIA[2] else "No pref"
            ).check()
        assert f"{number + 1} answered" in page.text_content("#progress")
        if number == 1:
            page.reload()
            assert page.get_by_role("group", name=blind.CRITERIA[0]).get_by_label(side).is_checked()
        if number < 2:
            page.click("#next")
    assert page.is_disabled("#next")
    page.fill("#voter", "Ann <b> 1/2")
    with page.expect_download() as download:
        page.click("#save")
    assert download.value.suggested_filename == "votes-Ann-b-1-2.json"
    votes = tmp_path / "votes.json"
    download.value.save_as(votes)
    assert json.loads(votes.read_text())["voter"] == "Ann <b> 1/2"
    rates, _ = blind.count_votes(folder / "blind-key.json", [votes])
    assert [(rate.wins, rate.same, rate.losses) for rate in rates] == [
        (3, 0, 0),
        (3, 0, 0),
        (0, 3, 0),
    ]
    assert complaints == []
    page.context.close()


def test_small_videos_are_not_blown_up(browser: Any, folder: Path) -> None:
    """A video of 32 pixels is shown at 160 at most, at any page width, and no wider than its
    place."""
    for name in ("comparison", "report"):
        page, complaints = opened(browser, folder / f"{name}.html", 1400)
        assert page.evaluate(PLAYED)
        sizes = page.evaluate(
            "[...document.querySelectorAll('video')].map((v) => [v.videoWidth, v.clientWidth])"
        )
        assert all(shown <= max(160, width) for width, shown in sizes), sizes
        assert complaints == []
        page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_documentation_from_the_disk(scheme: str, browser: Any, site: Path) -> None:
    """Search works, links are underlined, text and code have contrast, no table is cut, and colours
    can be switched."""
    page = browser.new_page(viewport={"width": 1400, "height": 900}, color_scheme=scheme)
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on(
        "request", lambda request: request.url.startswith("file:") or complaints.append(request.url)
    )
    page.goto((site / "how-to" / "choose-settings.html").as_uri())
    cut = (
        "[...document.querySelectorAll('.md-typeset__scrollwrap')].filter((e) => e.scrollWidth > "
        "e.clientWidth + 1)"
    )
    assert page.evaluate(f"{cut}.length") == 0
    links = "[...document.querySelectorAll('.md-typeset p a:not(.headerlink)')]"
    assert page.evaluate(f"{links}.length") > 5
    assert page.evaluate(
        f"{links}.every((a) => getComputedStyle(a).textDecorationLine === 'underline')"
    )
    page.fill("input.md-search__input", "velocity KL")
    found = page.locator(".md-search-result__item")
    # the page misses what is typed before its search has loaded: press a key again
    for _ in range(120):
        if found.count():
            break
        page.press("input.md-search__input", "End")
        page.wait_for_timeout(500)
    assert found.count()
    page.goto((site / "tutorials" / "first-run.html").as_uri())
    options = {"runOnly": ["color-contrast", "link-in-text-block"]}
    violations = axe.Axe().run(page, context=".md-typeset", options=options).response["violations"]
    assert {v["id"]: [node["html"][:200] for node in v["nodes"]] for v in violations} == {}
    seen = set()
    for _ in range(3):  # system, light, dark
        seen.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        page.click("label[for^='__palette']:visible")
    assert len(seen) == 2
    assert complaints == []
    page.close()
