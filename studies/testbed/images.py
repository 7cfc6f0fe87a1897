"""Draw the images of the image-to-video testbed: python -m studies.testbed.images [FOLDER]

Each is the first frame of a true clip. FOLDER (configs/prompts/i2v) gets them in `images`, and the
prompt files train.jsonl and heldout.jsonl; the captions are from the testbed's two sets. Each
caption has two images, which differ in the place.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from sage_fast.testbed.world import BALLS, heldout_prompts
from studies.testbed.pretrain import picture
from studies.testbed.render import render

FOLDER = Path(__file__).parents[2] / "configs" / "prompts" / "i2v"
COLUMNS = (1, 3)
"""Columns of the scenes that are trained on: each word meets each other one equally often."""
SETS = {
    "train": [BALLS.caption(scene) for scene in BALLS.scenes if BALLS.column(scene) in COLUMNS],
    "heldout": heldout_prompts(),
}
"""Name of a prompt file -> its captions."""
SEEDS = {"train": 7, "heldout": 8}
IMAGES_PER_CAPTION = 2


def draw(folder: Path, name: str) -> None:
    """Write `<name>.jsonl` and its images."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    generator, lines = torch.Generator().manual_seed(SEEDS[name]), []
    for i, caption in enumerate(SETS[name] * IMAGES_PER_CAPTION):
        image = f"images/{name}-{i:02d}.png"
        picture(render(BALLS, BALLS.parse(caption), generator)[0]).save(
            folder / image, optimize=True
        )
        lines.append(json.dumps({"prompt": caption, "image": image}) + "\n")
    (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    for name in SETS:
        draw(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER, name)
