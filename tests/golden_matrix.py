"""Proof of a refactoring: train many tiny configurations and print, for each, a hash of all metrics
and of the weights.

    OMP_NUM_THREADS=1 python -m tests.golden_matrix [CASE...] > after.txt

Run it in the tree before and in the tree after, on one machine, and diff the outputs: an empty diff
means equal to the bit. Times and memory are left out.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sage_fast.algorithm.resolved import ResolvedConfig
from sage_fast.config.loader import load
from sage_fast.eval.evaluation import evaluate
from sage_fast.loading import load_setup, resolve
from sage_fast.models.interface import EMPTY_PROMPT
from sage_fast.models.load import load_model
from sage_fast.rewards import CompositeReward
from sage_fast.run.checkpoint import load_checkpoint, save_checkpoint
from sage_fast.trainer import Trainer
from sage_fast.util.captions import Caption
from sage_fast.util.process_group import initialize
from sage_fast.util.ranks import rank, shutdown
from tests.ranks import run_ranks, screens
from tests.tiny import CPU, BrightnessReward, keys_of, settings, tiny_trainer
from tests.tiny_wan import SIZES as WAN_SIZES
from tests.tiny_wan import write_tiny_wan

CONFIGS = Path(__file__).parent.parent / "configs"
DEMO, PAPER = CONFIGS / "demo.yaml", CONFIGS / "recipes" / "paper.yaml"
TWO_UPDATES = {"train__optimizer_steps": 2}
TINY: dict[str, dict[str, Any]] = {
    "plain": {},
    **{f"sampler-{name}": {"sampling__sampler": name} for name in ("flow", "dance", "cps",
        "precise")},
    **{
        f"kl-{strategy}-{term}": {"kl__strategy": strategy, "kl__velocity_term": term,
            **TWO_UPDATES}
        for strategy, term in itertools.product(
            ("none", "fixed", "stepwise", "moving", "dual"), ("rollout", "closed_form")
        )
    },
    **{
        f"ratio-{ratio}": {"objective__ratio": ratio, "objective__clip_range": 1.0, **TWO_UPDATES}
        for ratio in ("centred", "normalised")
    },
    "clipped": {"objective__clip_range": 1e-6, "train__parity_gate": False, **TWO_UPDATES},
    "log_prob": {"objective__surrogate": "log_prob"},
    "reduction-unscaled": {
        "objective__log_prob": "unscaled", "objective__ratio": "centred",
        "objective__clip_range": 1e3, **TWO_UPDATES,
    },
    "window": {"sampling__sde_window": 2},
    "windows": {"sampling__sde_window": 2, "sampling__window_per_prompt": True},
    "fraction": {"train__timestep_fraction": 0.5},
    "anchor-fraction": {"kl__anchor_fraction": 0.25, **TWO_UPDATES},
    "refreshed-anchor": {"kl__anchor_interval": 1, **TWO_UPDATES},
    "guidance": {"sampling__guidance_scale": 3.0},
    "shared-noise": {"sampling__shared_initial_noise": True},
    "shared-steps": {"sampling__shared_initial_noise": True, "sampling__sde_window": 2},
    "full": {"model__tuning": "full"},
    "ema": {"train__ema_decay": 0.9},
    "batch-std": {"objective__advantage_std": "batch"},
    "offload": {"sampling__offload_trajectories": True},
    "muon": {"train__optimizer": "muon", "model__tuning": "full"},
    "checkpointed": {"model__gradient_checkpointing": "attention"},
    "kl_mask": {"objective__surrogate": "kl_mask", **TWO_UPDATES},
    **{
        name: {"objective__surrogate": name, "sampling__sampler": "ode", "kl__strategy": "none",
            **TWO_UPDATES}
        for name in ("nft", "awm")
    },
    "balanced": {"objective__balanced_rewards": True},
    "averaged": {"sampling__averaged_weights": True, "train__ema_decay": 0.9, **TWO_UPDATES},
    "averaged-nft": {
        "sampling__averaged_weights": True, "train__ema_decay": 0.9, "objective__surrogate": "nft",
        "kl__strategy": "moving",
    },
}  # fmt: skip
"""Case -> settings of `tests.tiny`, two iterations each."""
FRAMES = {"sampling__num_frames": 17}  # as many as the testbed's videos have

LOADED: dict[str, tuple[Path, dict[str, Any]]] = {
    "demo": (DEMO, {"train.optimizer_steps": 2}),
    "demo-nft": (CONFIGS / "demo-nft.yaml", {"train.optimizer_steps": 2}),
    "paper": (PAPER, {}),
    "paper-bfloat16": (
        PAPER,
        {"model.dtype": "bfloat16", "sampling.batch_size": 1, "train.batch_size": 1},
    ),
    "paper-bfloat16-full": (
        PAPER,
        {"model.dtype": "bfloat16", "model.tuning": "full", "train.parity_gate": False},
    ),
}
"""Case -> file, and settings over it: the testbed's weights, its reward and judge, and an
evaluation."""
FEW = {
    "sampling.steps": 3, "train.prompts_per_iteration": 2, "train.group_size": 3,
    "train.optimizer_steps": 1,
    "eval.steps": 2, "eval.num_prompts": 3, "eval.seeds_per_prompt": 1,
}  # fmt: skip

WAN: dict[str, dict[str, Any]] = {
    "plain": {},
    "guidance": {"sampling__guidance_scale": 3.0, **TWO_UPDATES},
    "full": {"model__tuning": "full"},
    "checkpointed": {"model__gradient_checkpointing": "attention"},
    "bfloat16": {"model__dtype": "bfloat16", "train__parity_gate": False},
}
"""Case -> settings of `tests.tiny` over a tiny Wan of each version, two iterations each."""

RANKS: dict[str, dict[str, Any]] = {
    "plain": {}, "zero2": {"train.engine": "zero2"}, "zero3": {"train.engine": "zero3"},
    "zero3-full": {"train.engine": "zero3", "model.tuning": "full"},
    "sequence": {"model.sequence_parallel": 2},
    "zero3-windows": {
        "train.engine": "zero3", "sampling.sampler": "precise", "sampling.sde_window": 2,
        "sampling.window_per_prompt": "true", "kl.anchor_interval": 1,
    },
    "zero3-averaged": {
        "train.engine": "zero3", "model.tuning": "full", "sampling.averaged_weights": "true",
        "train.ema_decay": 0.5,
        "train.optimizer_steps": 2,
    },
    "compared": {
        "reward.name": f"{Path(__file__).parent.parent}/tests.golden_matrix:ComparedLevels",
        "reward.weights": "{vq: 1}", "eval.seeds_per_prompt": 2,
    },
}  # fmt: skip
"""Case -> settings over configs/recipes/paper.yaml, on two ranks."""


class Levels:
    """Brightness of each video at 8 bits, summed in float64 and apart from the others: the same in
    any batch."""

    def score(self, videos: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
        levels = (videos.float().clamp(0, 1) * 255).round() / 255
        return {"vq": torch.stack([video.double().mean() for video in levels])}


class ComparedLevels(Levels):
    """The same of all videos of a prompt."""

    compares_group = True


def digest(rows: list[dict[str, Any]], trainer: Trainer) -> str:
    """Two hashes: of the metrics, and of the trained weights with their average and the anchor."""
    kept = [
        {k: v for k, v in row.items() if not k.startswith(("time/", "memory/"))} for row in rows
    ]
    trained = {
        name: trainer.policy.states.whole(p) for name, p in trainer.policy.parameters().items()
    }
    weights = hashlib.sha256()
    for state in (trained, trainer.engine.ema or {}, trainer.anchor or {}):
        for _, tensor in sorted(state.items()):
            weights.update(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    metrics = hashlib.sha256(json.dumps(kept, sort_keys=True).encode())
    return f"{metrics.hexdigest()[:16]} {weights.hexdigest()[:16]}"


def tiny(overrides: dict[str, Any], reward: Any = None) -> str:
    trainer = tiny_trainer(settings(**FRAMES | overrides), reward)
    return digest([trainer.iteration(index) for index in range(2)], trainer)


def loaded(file: Path, overrides: dict[str, Any]) -> str:
    """As the command loads it: one iteration and an evaluation."""
    setup = load_setup(
        resolve(load(file, {key: str(value) for key, value in (FEW | overrides).items()}))
    )
    setup.encode()
    trainer = Trainer(setup.resolved, setup.model, setup.reward, setup.prompts, setup.embeddings)
    return digest([trainer.iteration(0), evaluate(setup, iteration=1)[0]], trainer)


def wan(version: str, overrides: dict[str, Any]) -> str:
    """Two iterations of a tiny Wan, whose prompts its own encoder embeds."""
    height, width = WAN_SIZES[version]
    with tempfile.TemporaryDirectory() as folder:
        path = write_tiny_wan(Path(folder) / "wan", version)
        size = {"sampling__height": height, "sampling__width": width, "model__path": str(path)}
        config = settings(**size | overrides)
        model = load_model(config.model, config.sampling, CPU, config.seed)
        encode = model.load_encoder(config.sampling)
    keys = keys_of(["a red kite", "snow falls", "an otter on the snow"])
    embeddings = {key: encode(Caption(key.text)) for key in [*keys, EMPTY_PROMPT]}
    reward = CompositeReward(BrightnessReward(), config.reward)
    trainer = Trainer(ResolvedConfig(config), model, reward, keys, embeddings)
    return digest([trainer.iteration(index) for index in range(2)], trainer)


def resumed() -> str:
    """The second of two iterations, in a trainer that has loaded the checkpoint of the first."""
    config = settings(**FRAMES, train__ema_decay=0.9, train__weight_decay=0.01)
    with tempfile.TemporaryDirectory() as folder:
        first, second = tiny_trainer(config), tiny_trainer(config)
        rows = [first.iteration(0)]
        save_checkpoint(Path(folder), 1, first.engine, first.state_dict(), first.anchor)
        found = load_checkpoint(Path(folder), second.engine)
        assert found is not None
        second.load_state_dict(found[1], found[2])
        return digest([*rows, second.iteration(found[0])], second)


def on_two_ranks(name: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        statuses = run_ranks(_on_a_rank, 2, Path(folder), name)
        assert statuses == [0, 0], "\n".join(screens(Path(folder)))
        return (Path(folder) / "digest").read_text()


def _on_a_rank(folder: Path, name: str) -> None:
    os.environ["DS_ACCELERATOR"] = "cpu"
    initialize()
    found = loaded(PAPER, RANKS[name])
    if rank() == 0:
        (folder / "digest").write_text(found)
    shutdown()


def cases() -> Iterator[tuple[str, Callable[[], str]]]:
    for name, overrides in TINY.items():
        yield name, lambda overrides=overrides: tiny(overrides)
    of_levels = {"reward__weights": {"vq": 1.0}}
    yield "levels", lambda: tiny(of_levels, Levels())
    yield "compared", lambda: tiny(of_levels, ComparedLevels())
    for name, (file, overrides) in LOADED.items():
        yield name, lambda file=file, overrides=overrides: loaded(file, overrides)
    for version, name in itertools.product(WAN_SIZES, WAN):
        yield f"wan{version}-{name}", lambda v=version, name=name: wan(v, WAN[name])
    yield "resumed", resumed
    for name in RANKS:
        yield f"two-ranks-{name}", lambda name=name: on_two_ranks(name)


if __name__ == "__main__":
    torch.set_num_threads(1)
    known = dict(cases())
    if unknown := [name for name in sys.argv[1:] if name not in known]:
        sys.exit(f"unknown case {unknown[0]!r}; expected some of {', '.join(known)}")
    for name in sys.argv[1:] or known:
        print(f"{name:28}{known[name]()}", flush=True)
