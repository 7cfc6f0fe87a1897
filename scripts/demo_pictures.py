"""Draw README's pictures again from a finished run of the demo: python -m scripts.demo_pictures
runs/demo

demo.webp: the held-out prompts with the largest, the median and the smallest gain, moving: before
training, after it, and a correct clip. demo.png: the means of the reward's parts, and the held-out
reward by iteration. report.png: the top of the run's report, by Chromium. All go into docs/images,
or into the folder that is named second.

A correct clip is drawn as its prompt says and passes through the autoencoder. The clips before and
after are sampled again, with the seeds of the run's evaluations; their rewards must be those that
the run has logged.
"""

from __future__ import annotations

import dataclasses
import io
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from sage_fast.commands.sources import load_run
from sage_fast.loading import Setup, load_setup, resolve
from sage_fast.report.charts import BLUE, GREEN, GREY
from sage_fast.report.page import RunReport, read_run, write_report
from sage_fast.run_folder import RunFolder
from sage_fast.testbed.rewards import measure
from sage_fast.util.captions import PromptKey
from sage_fast.util.videos import pixels
from studies.drawn import picture
from studies.testbed.look import drawn_by, mean_parts
from studies.testbed.pretrain import LESSONS, correct_clips

FOLDER = Path(__file__).parents[1] / "docs" / "images"
CLIP, GAP, LINE = 128, 8, 24
"""Pixels of the moving picture: side of a clip, gap, height of a line of text."""
GROUND, INK = (21, 23, 28), (232, 234, 238)
"""Colours of the moving picture, which stands on light and dark pages alike."""
FRAME_MS, LAST_FRAME_MS = 120, 900
REPORT_WIDTH = 840
"""Pixels of a window for the report."""
COLORS = {"before": GREY, "after": BLUE, "correct clip": GREEN}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Clips:
    """One clip for each video of an evaluation.

    Attributes:
        videos: [N, F, 3, H, W] in [0, 1].
        rewards: [N].
        parts: part of the reward -> its mean, in [0, 1].
    """

    videos: Tensor
    rewards: Tensor
    parts: dict[str, float]


def scored(setup: Setup, videos: Tensor, prompts: list[str]) -> Clips:
    keys = [PromptKey(text) for text in prompts]
    rewards = setup.reward.submit(videos, keys).result().rewards
    return Clips(videos=videos, rewards=rewards, parts=mean_parts(measure(videos), prompts))


def sampled(setup: Setup, logged: dict[str, Any]) -> Clips:
    """Sample the videos of an evaluation again."""
    videos, _ = drawn_by(setup)
    found = scored(setup, videos, logged["prompts"])
    torch.testing.assert_close(found.rewards, torch.tensor(logged["reward"]), rtol=0, atol=1e-2)
    return found


def chosen(prompts: list[str], gains: Tensor) -> dict[str, int]:
    """Return heading -> number of the first clip of the prompts with the largest, the median and
    the smallest gain."""
    means = {
        prompt: float(gains[[other == prompt for other in prompts]].mean()) for prompt in prompts
    }
    ordered = sorted(means, key=lambda prompt: -means[prompt])
    shown = {"largest": ordered[0], "median": ordered[len(ordered) // 2], "smallest": ordered[-1]}
    return {
        f"{prompt} ({name} gain, {means[prompt]:+.2f})": prompts.index(prompt)
        for name, prompt in shown.items()
    }


def moving_frames(sets: dict[str, Clips], rows: dict[str, int]) -> list[Image.Image]:
    """Draw each frame of the moving picture: a column for each set of clips, and a row for each
    chosen clip under its heading."""
    width = GAP + len(sets) * (CLIP + GAP)
    height = LINE + GAP + len(rows) * (LINE + CLIP + GAP)
    font = ImageFont.load_default(size=12)
    lefts = {label: GAP + k * (CLIP + GAP) for k, label in enumerate(sets)}
    tops = {heading: LINE + GAP + k * (LINE + CLIP + GAP) for k, heading in enumerate(rows)}
    clips = {
        (label, heading): pixels(one.videos[number])
        for label, one in sets.items()
        for heading, number in rows.items()
    }
    frames = []
    for number in range(len(next(iter(clips.values())))):
        image = Image.new("RGB", (width, height), GROUND)
        draw = ImageDraw.Draw(image)
        for label, left in lefts.items():
            draw.text((left, GAP), label, fill=INK, font=font)
        for heading, top in tops.items():
            draw.text((GAP, top + 4), heading, fill=INK, font=font)
            for label, left in lefts.items():
                frame = Image.fromarray(clips[label, heading][number])
                enlarged = frame.resize((CLIP, CLIP), Image.Resampling.NEAREST)
                image.paste(enlarged, (left, top + LINE))
        frames.append(image)
    return frames


def draw_parts(axes: Any, sets: dict[str, Clips]) -> None:
    """Draw a group of bars for each part of the reward."""
    for i, (label, clips) in enumerate(sets.items()):
        places = [part + 0.27 * (i - 1) for part in range(len(clips.parts))]
        axes.barh(places, [*clips.parts.values()], 0.25, color=COLORS[label], label=label)
    axes.set_yticks(range(len(clips.parts)), [*clips.parts])
    axes.set(
        xlim=(0, 1),
        ylim=(len(clips.parts) - 0.5, -0.5),
        title="What the reward measures (at most 1)",
    )
    axes.grid(axis="y", visible=False)


def draw_course(axes: Any, trained: RunReport, sets: dict[str, Clips], most: float) -> None:
    """Draw the reward by iteration with its intervals, and that of the correct clips."""
    points = trained.points["reward"]
    x = sorted(points)
    means, margins = (torch.tensor([points[i][k] for i in x]) for k in (0, 1))
    axes.fill_between(x, means - margins, means + margins, color=BLUE, alpha=0.18, linewidth=0)
    axes.plot(x, means, color=BLUE, marker="o", markersize=3)
    axes.axhline(float(sets["correct clip"].rewards.mean()), color=GREEN)
    axes.set(title=f"Reward (at most {most:g})", xlabel="iteration", ylim=(None, most))


def report_picture(page: Path) -> Image.Image | None:
    """Return the report as a picture, down to its checks; None without Chromium."""
    if (browser := shutil.which("chromium") or shutil.which("google-chrome")) is None:
        return None
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # for root
        chromium = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        shown = chromium.new_page(
            viewport={"width": REPORT_WIDTH, "height": 900}, device_scale_factor=1.25
        )
        shown.goto(page.absolute().as_uri())
        box = shown.locator(".checks").bounding_box()
        assert box is not None
        height = box["y"] + box["height"] + 16
        content = shown.screenshot(
            full_page=True, clip={"x": 0, "y": 0, "width": REPORT_WIDTH, "height": height}
        )
        chromium.close()
    return Image.open(io.BytesIO(content)).convert("RGB")


def main(run: Path, folder: Path = FOLDER) -> None:
    trained, files = read_run(run), RunFolder(run)
    logged = {name: files.evaluation(name) or {} for name in ("before", "after")}
    begun, ended = (
        load_setup(resolve(config)) for config in (files.settings(), load_run(str(run), {})[0])
    )
    prompts = logged["after"]["prompts"]
    sets = {"before": sampled(begun, logged["before"]), "after": sampled(ended, logged["after"])}
    _, decoded = correct_clips(LESSONS["testbed"], ended.model.decoder, prompts)
    decoded = decoded[:, : ended.config.sampling.num_frames]
    sets["correct clip"] = scored(ended, decoded, prompts)
    shown = chosen(prompts, sets["after"].rewards - sets["before"].rewards)
    most = sum(ended.reward.weights.values())

    def charts(figure: Any) -> None:
        bars, course = figure.subplots(1, 2, width_ratios=[1.25, 1])
        draw_parts(bars, sets)
        draw_course(course, trained, sets, most)
        figure.legend(
            *bars.get_legend_handles_labels(), loc="outside lower center", ncols=len(sets)
        )

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "demo.png").write_bytes(picture(charts, (6.2, 2.8), "png", "demo"))
    moving = moving_frames(sets, shown)
    times = [*[FRAME_MS] * (len(moving) - 1), LAST_FRAME_MS]
    moving[0].save(
        folder / "demo.webp",
        save_all=True,
        append_images=moving[1:],
        duration=times,
        loop=0,
        quality=80,
    )
    if (report := report_picture(write_report(run))) is None:
        print("no Chromium: report.png is not drawn")
    else:
        report.save(folder / "report.png", optimize=True)
    before, after, truth = (float(clips.rewards.mean()) for clips in sets.values())
    print(
        f"*The reward, at most {most:g}, rises from {before:.3f} to {after:.3f}; correct clips get "
        f"{truth:.2f}.*"
    )
    for label, clips in sets.items():
        print(
            f"{label}: reward {float(clips.rewards.mean()):.3f} of {most:g}, "
            + ", ".join(f"{part} {mean:.2f}" for part, mean in clips.parts.items())
        )


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
