"""A random tiny instance of the real classes, and a trainer around it."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from sage_fast.algorithm.iteration_plan import IterationPlan, plan_iteration
from sage_fast.algorithm.objective import Objective
from sage_fast.algorithm.resolved import ResolvedConfig
from sage_fast.callbacks.interface import Callback
from sage_fast.config.loader import build, load
from sage_fast.config.schema import Config, KLConfig, ModelConfig, ObjectiveConfig
from sage_fast.loading import load_setup, resolve
from sage_fast.models.checkpointing import CheckpointPlan
from sage_fast.models.hunyuan15.conditioning import TextEmbedding
from sage_fast.models.hunyuan15.decode import VideoDecoder
from sage_fast.models.hunyuan15.policy import HunyuanVideo15Policy
from sage_fast.models.model import Model
from sage_fast.models.trainable import make_trainable
from sage_fast.rewards import CompositeReward, Reward
from sage_fast.run import train as run
from sage_fast.testbed.text_encoder import embed
from sage_fast.testbed.tiny_model import Testbed, TestbedTransformer, allow_batches, tiny_vae
from sage_fast.testbed.world import train_prompts
from sage_fast.trainer import Trainer
from sage_fast.util.captions import Caption, PromptKey

CPU = torch.device("cpu")
BASE_SETTINGS: dict[str, Any] = {
    "model.path": "testbed",
    "model.dtype": "float32",
    "model.lora_rank": 4,
    "model.lora_alpha": 4,
    "model.gradient_checkpointing": "none",
    "sampling.eta": 0.7,
    "sampling.steps": 5,
    "sampling.shift": 3.0,
    "sampling.num_frames": 9,
    "sampling.height": 32,
    "sampling.width": 32,
    "sampling.batch_size": 8,
    "objective.clip_range": 1e-3,
    "kl.velocity_term": "rollout",  # the KL as the paper prints it
    "kl.feedback": "paper",
    "train.prompts_per_iteration": 2,
    "train.group_size": 3,
    "train.batch_size": 8,
    "train.learning_rate": 1e-3,
    "train.iterations": 2,
    "eval.steps": 3,
    "eval.num_prompts": 2,
}


def settings(**overrides: Any) -> Config:
    """A tiny config; keys as `kl__strategy="fixed"`."""
    return build(
        BASE_SETTINGS | {key.replace("__", "."): value for key, value in overrides.items()}
    )


def arguments(**overrides: Any) -> list[str]:
    """Settings as a user types them; keys as for `settings`."""
    return [
        text
        for key, value in overrides.items()
        for text in (f"--{key.replace('__', '.')}", str(value))
    ]


FEW_STEPS = arguments(
    sampling__num_frames=9, sampling__steps=3, train__optimizer_steps=2, eval__steps=2
)
"""For a run of the command from `configs/recipes/paper.yaml` that takes seconds."""


class BrightnessReward:
    """Smooth in the pixels, so that every rollout of a random model gets a reward of its own."""

    def __call__(self, videos: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
        return {
            "vq": videos.mean((1, 2, 3, 4)),
            "mq": videos[:, -1].mean((1, 2, 3)),
            "ta": videos[:, 0].mean((1, 2, 3)),
        }


def tiny_spec(policy: HunyuanVideo15Policy) -> Testbed:
    spec = Testbed("tiny", {"transformer": policy.transformer.config})
    spec.vae = _tiny_autoencoder()
    return spec


@functools.cache
def _tiny_autoencoder() -> Any:
    """The sizes of the autoencoder, on the meta device."""
    return Testbed().meta("vae")


@functools.lru_cache(maxsize=4)
def _made(settings: tuple[tuple[str, Any], ...]) -> tuple[Any, Any, Tensor]:
    """Make the transformer, the autoencoder (which all share), and the state of the random numbers
    after them."""
    config = ModelConfig(**dict(settings))
    torch.manual_seed(1)
    transformer = TestbedTransformer().eval()
    if config.tuning == "lora":
        make_trainable(Testbed(), transformer, config)
    return transformer, allow_batches(tiny_vae().eval()), torch.get_rng_state()


def tiny_model(
    config: Config, dtype: torch.dtype = torch.float32, device: torch.device = CPU
) -> Model:
    transformer, vae, numbers = _made(tuple(vars(config.model).items()))
    transformer = torch.nn.Module.to(copy.deepcopy(transformer), device, dtype)
    vae = vae if device == CPU else copy.deepcopy(vae).to(device)
    torch.set_rng_state(numbers)
    policy = HunyuanVideo15Policy(
        transformer, dtype=dtype, guidance_scale=config.sampling.guidance_scale
    )
    decoder = VideoDecoder(vae)
    model = Model(spec=tiny_spec(policy), policy=policy, decoder=decoder)
    model.set_checkpointing(CheckpointPlan(config.model.gradient_checkpointing))
    return model


def keys_of(texts: Iterable[str]) -> list[PromptKey]:
    """Keys of prompts without an image."""
    return [PromptKey(text) for text in texts]


def embedding(text: str, dtype: torch.dtype = torch.float32) -> TextEmbedding:
    return TextEmbedding(text=embed(text).to(dtype), glyphs=torch.zeros(0, 8, dtype=dtype))


def embeddings(
    prompts: Sequence[PromptKey], dtype: torch.dtype = torch.float32
) -> dict[PromptKey, TextEmbedding]:
    """Key -> embedding of its text, for these prompts and the empty one."""
    return {key: embedding(key.text, dtype) for key in [PromptKey(""), *prompts]}


def with_images(
    texts: Mapping[PromptKey, TextEmbedding], height: int = 4, width: int = 4
) -> dict[PromptKey, TextEmbedding]:
    """Give each prompt a random image of its own; height and width are those of latents."""
    return {
        prompt: dataclasses.replace(
            text, image=torch.randn(6, 8), frame=torch.randn(32, 1, height, width)
        )
        for prompt, text in texts.items()
    }


def captions(*texts: str) -> dict[PromptKey, Caption]:
    """Key -> caption of prompts without an image."""
    return {PromptKey(text): Caption(text) for text in texts}


def resolved(objective: ObjectiveConfig, kl: KLConfig | None = None) -> Objective:
    """Resolve these sections, by default without a KL; the other settings do not matter to a
    loss."""
    kl = kl or KLConfig(strategy="none")
    return Objective(dataclasses.replace(settings(), objective=objective, kl=kl))


def tiny_trainer(
    config: Config,
    reward: Reward | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
) -> Trainer:
    prompts = keys_of(train_prompts())
    composite = CompositeReward(reward or BrightnessReward(), config.reward)
    return Trainer(
        ResolvedConfig(config),
        tiny_model(config, dtype, device),
        composite,
        prompts,
        embeddings(prompts, dtype),
    )


def planned(config: Config, prompts: Sequence[PromptKey], iteration: int = 0) -> IterationPlan:
    """The plan of an iteration on one rank, with prompts of one length."""
    return plan_iteration(ResolvedConfig(config), prompts, lambda prompt: 1, iteration)


def rounding_of_advantages(row: dict[str, Any]) -> float:
    """What float32 leaves open in an advantage, and so in a loss, a mean of advantages that nearly
    cancel.

    An advantage is (R - mean) / std: a rounding of R, or of the mean, moves it by up to 2**-23 R /
    std, and that of the mean moves a whole group alike. R is the sum of three parts: four
    roundings. A ratio near 1 adds far less.
    """
    return 4 * 2**-23 * abs(row["reward/mean"]) / row["reward/std"]


def perturb(trainer: Trainer, scale: float = 0.05, seed: int = 3) -> None:
    """Move the trainable weights away from where the rollout was made."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in trainer.engine.parameters:
            p.add_(scale * torch.randn(p.shape, generator=generator).to(p.dtype))


def train(
    config: Config,
    *,
    report: Callable[[Path, bool, bool], object] = lambda *about: None,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
    reward_funcs: object = None,
) -> Path:
    """Train as `sage-fast train` does, by default without a page; return the run folder."""
    with mock.patch("sage_fast.callbacks.page.report_run", report):
        done = run.train(config, callbacks=callbacks, reward_funcs=reward_funcs, resume=resume)
    return done.folder


def paper_trainer(folder: Path, **overrides: Any) -> Trainer:
    """The trainer of `configs/recipes/paper.yaml`, whose prompts are embedded into `folder`; keys
    as for `settings`."""
    given = {key.replace("__", "."): str(value) for key, value in overrides.items()}
    config = load(Path(__file__).parent.parent / "configs" / "recipes" / "paper.yaml", given)
    setup = load_setup(resolve(config))
    setup.encode(folder)
    return Trainer(setup.resolved, setup.model, setup.reward, setup.prompts, setup.embeddings)
