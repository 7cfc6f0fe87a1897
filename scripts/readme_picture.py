"""Draw README's picture from a finished run of the demo: three prompts before and after, beside the held-out reward.

    sage-fast train configs/demo.yaml --output runs/demo
    python -m scripts.readme_picture runs/demo docs/images/demo.png

The prompts are the one with the largest gain and the two medians of the six whose videos the run keeps.
"""

import sys
from pathlib import Path
from typing import Any

from sage_fast.eval.playback import read_video
from sage_fast.report.charts import BLUE
from sage_fast.report.html import choose
from sage_fast.report.page import read_run
from studies.drawn import picture

FRAMES = 3
"""Frames of a video: the first, the last, and those between at equal distances."""


def main(run: Path, output: Path) -> None:
    trained = read_run(run)
    sides = trained.ends
    largest, _, *medians, _, _ = choose(sides, 6)
    points = trained.points["reward"]

    def draw(figure: Any) -> None:
        figure.set_layout_engine("constrained", w_pad=0.015, h_pad=0.03, wspace=0.01, hspace=0.01)
        *blocks, chart = figure.subfigures(1, 4, width_ratios=[1, 1, 1, 1.15], wspace=0.05)
        for key, block in zip((largest, *medians), blocks):
            grid = block.subplots(2, FRAMES)
            block.suptitle(key[0], fontsize=9.5)
            for row, side in zip(grid, sides):
                video = read_video(side.shown[key])
                row[0].set_ylabel(side.label, fontsize=10)
                for i, axes in enumerate(row):
                    frame = video[i * (len(video) - 1) // (FRAMES - 1)]
                    axes.imshow(frame.permute(1, 2, 0).numpy(), interpolation="nearest")
                    axes.set(xticks=[], yticks=[])
                    axes.spines[:].set_visible(False)
        axes = chart.subplots()
        x = sorted(points)
        means, margins = zip(*(points[i] for i in x))
        low, high = ([m + sign * margin for m, margin in zip(means, margins)] for sign in (-1, 1))
        axes.fill_between(x, low, high, color=BLUE, alpha=0.18, linewidth=0)
        axes.plot(x, means, color=BLUE, marker="o", markersize=3)
        axes.set_title("Reward, held-out prompts", fontsize=10)
        axes.set_xlabel("iteration")

    output.write_bytes(picture(draw, (11, 2.25), "png", "readme"))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
