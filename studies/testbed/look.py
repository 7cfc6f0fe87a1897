"""How clips of the testbed read: python -m studies.testbed.look [--base FOLDER] [--seeds 12]

Prints a row for correct clips as they are drawn, one for the same clips through the autoencoder,
and one for what a base model draws by the ODE of `configs/demo.yaml`: the mean reward, the means of
its parts, and for each size the share of clips on prompts with this size that read as it. A clip
reads as the size that fits its frames best. The last row is the mean standard deviation of the
parts within a prompt of the base model: what a group of samples can tell apart.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor

from sage_fast.config.loader import load
from sage_fast.config.schema import Config
from sage_fast.eval.evaluation import evaluate
from sage_fast.loading import Setup, load_setup, resolve
from sage_fast.testbed import BASE
from sage_fast.testbed.rewards import (
    Measurement,
    contest,
    matches,
    measure,
    motion_quality,
    visual_quality,
)
from sage_fast.testbed.world import BALLS, train_prompts
from sage_fast.util.captions import PromptKey
from studies.testbed.pretrain import LESSONS, correct_clips

CONFIG = Path(__file__).parents[2] / "configs" / "demo.yaml"


def parts_of(seen: Measurement, prompts: list[str]) -> dict[str, Tensor]:
    """Return part of the reward -> its values for measured clips of N prompts, [N] in [0, 1]."""
    parts = {
        "clean ball": visual_quality(seen),
        "steady motion": motion_quality(seen),
        **matches(seen, prompts),
    }
    return {name.replace("color", "colour"): values for name, values in parts.items()}


def mean_parts(seen: Measurement, prompts: list[str]) -> dict[str, float]:
    """Return part of the reward -> its mean over the measured clips of N prompts, in [0, 1]."""
    return {name: float(values.mean()) for name, values in parts_of(seen, prompts).items()}


def spread_of_parts(seen: Measurement, prompts: list[str]) -> dict[str, float]:
    """Return part of the reward -> mean over prompts of its standard deviation within one."""
    groups = [torch.tensor([text == prompt for text in prompts]) for prompt in sorted(set(prompts))]
    return {
        name: float(torch.stack([values[group].std() for group in groups]).mean())
        for name, values in parts_of(seen, prompts).items()
    }


def read(videos: Tensor, prompts: list[str]) -> dict[str, float]:
    """Return `mean_parts` of clips [N, F, 3, H, W], and size -> share of those on prompts with it
    that read as it."""
    seen, sizes = measure(videos), list(BALLS.forms)
    best = contest(seen).mean(dim=1).argmax(dim=-1)
    wanted = torch.tensor([sizes.index(BALLS.parse(prompt).form) for prompt in prompts])
    return mean_parts(seen, prompts) | {
        name: float((best == i)[wanted == i].float().mean()) for i, name in enumerate(sizes)
    }


def drawn_by(setup: Setup) -> tuple[Tensor, list[str]]:
    """Return the clips [N, F, 3, H, W] of the setup's evaluation, and their prompts."""
    kept: dict[int, tuple[Tensor, str]] = {}
    setup.encode()
    evaluate(
        setup,
        iteration=0,
        save=lambda number, prompt, video: kept.update({number: (video, prompt)}),
    )
    videos, prompts = zip(*(kept[i] for i in range(len(kept))))
    return torch.stack(videos), list(prompts)


def rewards_of_correct_clips(config: Config, lesson: str) -> tuple[float, float]:
    """Return the mean reward of a correct clip of each evaluation prompt, as drawn and through the
    autoencoder.

    Args:
        config: settings of a run in the world of `lesson`.
        lesson: key of `LESSONS`.
    """
    setup = load_setup(resolve(config))
    prompts = [key.text for key in setup.eval_prompts]
    clips = correct_clips(LESSONS[lesson], setup.model.decoder, prompts)
    drawn, decoded = (
        float(setup.reward.submit(videos, setup.eval_prompts).result().rewards.mean())
        for videos in clips
    )
    return drawn, decoded


def look(base: Path, seeds: int) -> dict[str, dict[str, float]]:
    """Return row -> column -> mean, over all training prompts."""
    settings = {
        "model.path": str(base),
        "data.eval_prompts": "testbed:train",
        "eval.num_prompts": len(train_prompts()),
        "eval.seeds_per_prompt": seeds,
    }
    setup = load_setup(resolve(load(str(CONFIG), overlays=[settings])))
    prompts = [key.text for key in setup.eval_prompts]
    drawn, decoded = correct_clips(LESSONS["testbed"], setup.model.decoder, prompts)
    rows = {
        "correct": (drawn, prompts),
        "through the autoencoder": (decoded, prompts),
        "base": drawn_by(setup),
    }
    rewards = {}
    for name, (videos, texts) in rows.items():
        keys = [PromptKey(text) for text in texts]
        rewards[name] = setup.reward.submit(videos, keys).result().rewards.mean()
    found = {name: {"reward": float(rewards[name])} | read(*row) for name, row in rows.items()}
    videos, texts = rows["base"]
    found["base, within a prompt"] = spread_of_parts(measure(videos), texts)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="How clips of the testbed read.")
    parser.add_argument("--base", type=Path, default=BASE, metavar="FOLDER")
    parser.add_argument("--seeds", type=int, default=12, help="clips of each prompt")
    options = parser.parse_args()
    found = look(options.base, options.seeds)
    print(f"{'':24}" + "".join(f"{column:>15}" for column in found["base"]))
    for row, columns in found.items():
        cells = [
            f"{columns[name]:15.2f}" if name in columns else 15 * " " for name in found["base"]
        ]
        print(f"{row:24}" + "".join(cells))
