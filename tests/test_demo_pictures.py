"""README's pictures, drawn from a tiny run of the demo."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image

from sage_fast.cli import main
from scripts import demo_pictures
from tests.test_docs import SMALL
from tests.tiny import arguments

DEMO = Path(__file__).parent.parent / "configs" / "demo.yaml"


def test_the_rows_are_the_prompts_of_largest_median_and_smallest_mean_gain() -> None:
    prompts = [
        "a small red ball moves up slowly",
        "a small blue ball moves up slowly",
        "a small green ball moves up slowly",
    ] * 2
    found = demo_pictures.chosen(prompts, torch.tensor([1.0, 0.9, -0.2, 0.0, 0.7, 0.0]))
    assert found == {
        "a small blue ball moves up slowly (largest gain, +0.80)": 1,
        "a small red ball moves up slowly (median gain, +0.50)": 0,
        "a small green ball moves up slowly (smallest gain, -0.10)": 2,
    }


@pytest.mark.charts
def test_all_pictures_are_drawn_from_one_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, folder = tmp_path / "run", tmp_path / "images"
    few = arguments(
        train__iterations=2, eval__interval=1, eval__num_prompts=3, eval__seeds_per_prompt=2
    )
    assert main(["train", str(DEMO), "--output", str(run), *SMALL, *few]) == 0
    capsys.readouterr()
    demo_pictures.main(run, folder)
    with Image.open(folder / "demo.png") as still, Image.open(folder / "demo.webp") as moving:
        assert min(still.size) > 300
        assert moving.n_frames == 9  # type: ignore[attr-defined]
    assert (folder / "demo.webp").stat().st_size < 400_000
    assert (folder / "report.png").is_file() == bool(
        shutil.which("chromium") or shutil.which("google-chrome")
    )
    after = json.loads((run / "eval" / "after.json").read_text())
    printed = capsys.readouterr().out
    assert f"after: reward {sum(after['reward']) / 6:.3f} of 3, " in printed
    for part in ("clean ball", "steady motion", "colour", "size", "direction", "speed"):
        assert len(re.findall(rf", {part} [01]\.\d\d", printed)) == 3

    (run / "eval" / "after.json").write_text(
        json.dumps(after | {"reward": [x + 0.1 for x in after["reward"]]})
    )
    with pytest.raises(AssertionError, match="not close"):
        demo_pictures.main(run, folder)
