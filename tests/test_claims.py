"""README and docs/results/gpu.md say of speed what their files give."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from scripts import claims, gpu_seconds, measured


def test_the_pages_say_what_the_files_say() -> None:
    assert claims.problems() == []


@pytest.mark.parametrize("name", [measured.ROLLOUT, measured.ITERATION, measured.SMALL])
def test_a_changed_file_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were a measurement 5 % slower, some sentence would be wrong."""

    def slower(tree: Any) -> Any:
        if isinstance(tree, dict):
            return {
                key: value * 1.05 if key in SECONDS and isinstance(value, float) else slower(value)
                for key, value in tree.items()
            }
        if isinstance(tree, list):
            return [slower(value) for value in tree]
        return tree

    read = measured.result
    other = slower(read(name))
    for module in (claims, measured):
        monkeypatch.setattr(module, "result", lambda asked: other if asked == name else read(asked))
    found = claims.problems()
    assert any("does not say" in problem for problem in found)


SECONDS = {"seconds", "eager"}


def test_a_number_that_no_file_gives_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for page in {claim.page for claim in claims.claims()}:
        text = (claims.REPOSITORY / page).read_text(encoding="utf-8")
        (tmp_path / page).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / page).write_text(text, encoding="utf-8")
    monkeypatch.setattr(claims, "REPOSITORY", tmp_path)
    assert claims.problems() == []
    page = tmp_path / claims.GPU
    page.write_text(page.read_text(encoding="utf-8") + "\nIt is 7 times as fast.\n")
    (problem,) = claims.problems()
    assert "no file gives" in problem
    assert "7 times" in problem


def test_a_claim_names_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    first, *_ = claims.claims()
    elsewhere = dataclasses.replace(first, files=(measured.SMALL,))
    monkeypatch.setattr(claims, "claims", lambda: [elsewhere])
    assert f"{claims.README}: name {measured.SMALL} beside: {first.words}" in claims.problems()


def test_a_trained_step_is_a_sixth_of_the_phase() -> None:
    """By the kernel table: attention's backward ran once in each block of each trained step."""
    calls, _ = measured.kernels("kernel_cutlass_kernel_flash_attncuteflash_bwd")
    assert calls == measured.SAMPLES * measured.STEPS * measured.BLOCKS
    settings = json.loads((measured.RESULTS / measured.ITERATION).read_text())["settings"]
    assert settings["sampling.steps"] == str(measured.STEPS)
    assert settings["train.group_size"] == str(measured.SAMPLES)


def test_the_figure_is_of_the_files() -> None:
    """Its classes add up to the phases of the iteration, and the picture is drawn from them."""
    diffusers, ours, floor = gpu_seconds.bars().values()
    phases = measured.result(measured.ITERATION)["phases"]
    steps = sum(phases[name]["seconds"] for name in ("rollout", "anchor", "train")) / 6
    assert sum(ours.values()) == pytest.approx(20 * steps + phases["decode"]["seconds"] / 2)
    assert min(*ours.values(), *floor.values()) > 0
    assert sum(floor.values()) < sum(ours.values()) < sum(diffusers.values())
    assert gpu_seconds.FILE.read_bytes() == gpu_seconds.drawn(), "run python -m scripts.gpu_seconds"
