"""Pre-train a small world's base model: python -m studies.testbed.pretrain FOLDER [--world i2v |
shapes | pairs]

The testbed's weights ship in sage_fast/testbed/base and sage_fast/testbed/judge_weights, those of
its image-to-video world in sage_fast/testbed/base_i2v; those of the worlds of shapes and of pairs
are in studies/shapes/base and studies/pairs/base.

Trains an autoencoder on rendered videos, a flow-matching transformer on its latents, and the
held-out judge, a classifier of clips and their corruptions.

A base is under-trained on purpose. Its balls are recognisable, but often of the wrong colour,
blurred, or moving the wrong way, which leaves reinforcement learning something to improve.

The image-to-video world has the testbed's autoencoder and judge; its transformer is given the first
frame of a clip. Its base copies that frame, then often loses the ball's colour, its outline or its
way.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import json
import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from diffusers import AutoencoderKLHunyuanVideo15
from PIL import Image
from torch import Tensor
from transformers import SiglipImageProcessorPil, SiglipVisionConfig, SiglipVisionModel

from sage_fast.models.decoder import Decoder
from sage_fast.parallel.muon import Muon
from sage_fast.testbed import BASE
from sage_fast.testbed.judge import JudgeNetwork, class_counts_of, load_judge
from sage_fast.testbed.text_encoder import embedder
from sage_fast.testbed.tiny_model import (
    TestbedTransformer,
    allow_batches,
    load_image_encoder,
    load_vae,
    tiny_vae,
)
from sage_fast.testbed.world import BACKGROUND, BALLS, HEIGHT, WIDTH, World
from sage_fast.util.console import log_to_screen, progress
from studies.pairs import judge as pairs_judge
from studies.pairs import model as pairs_model
from studies.pairs import world as pairs
from studies.shapes.world import BASE as SHAPES_BASE
from studies.shapes.world import SHAPES
from studies.testbed.judge import loss_of_clips
from studies.testbed.render import render

log = logging.getLogger("sage_fast.studies")

# sigma = SHIFT u / (1 + (SHIFT - 1) u) for u uniform: more training at high noise, as in the real
# model
SHIFT = 3.0
PROMPT_DROPOUT = 0.1  # share of samples trained without a prompt, for classifier-free guidance
EMA_DECAY = 0.998
KL_WEIGHT = 5e-4
IMAGE_SIZE = 32  # pixels that the image encoder reads: four patches of half this size
SCALED = 72  # videos that the scale of the latents is measured on, at most; one of each caption


@dataclasses.dataclass(frozen=True, kw_only=True)
class Steps:
    """How long each part is trained, and its batch size."""

    vae_steps: int = 0
    decoder_steps: int = 0
    steps: int
    vae_batch: int = 4
    batch: int = 64
    videos_per_prompt: int
    judge_steps: int = 0
    judge_batch: int = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lesson:
    """What a base model learns in a world, and how long.

    Attributes:
        name: value of `--world`.
        prompts: captions that the base model is trained on.
        video: caption -> random video, float32 [F, 3, H, W] in [0, 1].
        embed: caption, or "" -> word vectors [L, D].
        vae, transformer, judge: make the network that training begins with; None: the testbed's as
            it is, not saved.
        judge_loss: loss on a batch of random clips.
        takes_images: whether the transformer is given the first frame of a clip.
        muon: whether Muon trains the matrices of the transformer's blocks; AdamW trains all else.
        steps: how long.
    """

    name: str
    prompts: list[str]
    video: Callable[[str, torch.Generator], Tensor]
    embed: Callable[[str], Tensor]
    vae: Callable[[], AutoencoderKLHunyuanVideo15] | None
    transformer: Callable[[], TestbedTransformer]
    judge: Callable[[], JudgeNetwork] | None
    judge_loss: Callable[[JudgeNetwork, int, torch.Generator], Tensor]
    takes_images: bool = False
    muon: bool = False
    steps: Steps


class Clips(NamedTuple):
    """Random clips of each caption, encoded: all tensors begin with [prompts, videos].

    Attributes:
        latents: scaled latents [..., C, T, H, W].
        tokens, frame: what `encode_image` makes of the first frame; None in a world without images.
    """

    latents: Tensor
    tokens: Tensor | None = None
    frame: Tensor | None = None


def _vae_of_shapes() -> AutoencoderKLHunyuanVideo15:
    """The autoencoder of the world of shapes: it is convolutional and knows the shapes; only the
    scale of the latents differs."""
    vae = allow_batches(tiny_vae())
    vae.load_state_dict(load_vae(SHAPES_BASE).state_dict())
    return vae


def _judge_of_pairs() -> JudgeNetwork:
    """A judge that begins with what that of the world of shapes sees."""
    network = JudgeNetwork(class_counts=pairs_judge.CLASS_COUNTS)
    network.body.load_state_dict(load_judge(SHAPES_BASE / "judge").body.state_dict())
    return network


def _of_one_thing(name: str, world: World, steps: Steps) -> Lesson:
    """Return the lesson of a world of one thing that crosses the frame."""
    return Lesson(
        name=name,
        prompts=world.train_prompts(),
        video=lambda prompt, generator: render(world, world.parse(prompt), generator),
        embed=embedder(world),
        vae=lambda: allow_batches(tiny_vae()),
        transformer=TestbedTransformer,
        judge=lambda: JudgeNetwork(class_counts=class_counts_of(world)),
        judge_loss=functools.partial(loss_of_clips, world),
        muon=True,
        steps=steps,
    )


_TESTBED = _of_one_thing(
    "testbed",
    BALLS,
    Steps(vae_steps=9000, decoder_steps=6000, steps=1500, videos_per_prompt=32, judge_steps=2500),
)
_SHAPES = _of_one_thing(
    "shapes",
    SHAPES,
    Steps(vae_steps=9000, decoder_steps=6000, steps=1200, videos_per_prompt=32, judge_steps=2500),
)
_PAIRS = Lesson(
    name="pairs",
    prompts=pairs.train_prompts(),
    video=lambda prompt, generator: pairs.render(pairs.parse(prompt), generator),
    embed=pairs_model.embed,
    vae=_vae_of_shapes,
    transformer=TestbedTransformer,
    judge=_judge_of_pairs,
    judge_loss=pairs_judge.loss_of_clips,
    steps=Steps(
        vae_steps=0,
        decoder_steps=0,
        steps=3000,
        videos_per_prompt=4,
        judge_steps=1000,
        judge_batch=16,
    ),
)
_I2V = dataclasses.replace(
    _TESTBED,
    name="i2v",
    vae=None,
    transformer=functools.partial(TestbedTransformer, task_type="i2v"),
    judge=None,
    takes_images=True,
    muon=False,
    steps=Steps(steps=300, videos_per_prompt=32),
)
LESSONS = {lesson.name: lesson for lesson in (_TESTBED, _I2V, _SHAPES, _PAIRS)}


def pretrain(folder: Path, lesson: Lesson, *, seed: int = 0) -> None:
    """Train what a lesson has into `folder`: `vae/`, `transformer/`, `judge/` and the encoder of
    images.

    Runs on the CPU and is deterministic: the same seed, steps and number of threads give the same
    weights. A part that `folder` already holds is kept; the others do not change, since each part
    has its own random numbers.
    """
    folder.mkdir(parents=True, exist_ok=True)  # fail early: training takes minutes

    def missing(part: str) -> bool:
        torch.manual_seed(seed)  # for the initial weights; all data comes from generators
        return not (folder / part).exists()

    with torch.random.fork_rng(devices=[]):
        if lesson.judge is not None and missing("judge"):
            network = train_judge(lesson, lesson.judge(), torch.Generator().manual_seed(seed))
            network.half().save_pretrained(folder / "judge")
        if lesson.vae is not None and missing("vae"):
            train_vae(lesson, lesson.vae(), seed).half().save_pretrained(folder / "vae")
        if lesson.takes_images and missing("image_encoder"):
            random_image_encoder().half().save_pretrained(folder / "image_encoder")
            features = SiglipImageProcessorPil(size={"height": IMAGE_SIZE, "width": IMAGE_SIZE})
            features.save_pretrained(folder / "feature_extractor")
        if missing("transformer"):
            generator = torch.Generator().manual_seed(seed)
            transformer = train_flow(lesson, encode_clips(lesson, folder, generator), generator)
            transformer.half().save_pretrained(folder / "transformer")

    record = {
        "command": f"python -m studies.testbed.pretrain FOLDER --world {lesson.name} --seed {seed}",
        "seed": seed,
        **dataclasses.asdict(lesson.steps),
        "torch": torch.__version__.split("+")[0],
    }
    (folder / "testbed.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def random_image_encoder() -> SiglipVisionModel:
    """The smallest stock vision tower, with random weights: the first frame's latent tells the
    transformer enough."""
    width = TestbedTransformer().config.image_embed_dim
    return SiglipVisionModel(
        SiglipVisionConfig(
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=1,
            num_attention_heads=2,
            image_size=IMAGE_SIZE,
            patch_size=IMAGE_SIZE // 2,
        )
    ).eval()


def train_vae(
    lesson: Lesson, vae: AutoencoderKLHunyuanVideo15, seed: int
) -> AutoencoderKLHunyuanVideo15:
    """Train an autoencoder on rendered videos: first both halves, then the decoder alone; measure
    its latents' scale.

    Decoder steps are cheaper, and only the decoder's output is seen.
    """
    vae.train()
    # A ball covers 4 or 13 % of the frame; without a larger weight the autoencoder would blur it
    # first.
    _reconstruct(lesson, vae, seed, steps=lesson.steps.vae_steps, foreground=8.0)
    vae.half().float()  # train the decoder on the encoder as stored, in half precision
    vae.encoder.requires_grad_(False)
    # The remaining error is a haze over the background: it covers most of the frame, but each pixel
    # weighs little.
    _reconstruct(lesson, vae, seed, steps=lesson.steps.decoder_steps, foreground=3.0)
    generator = torch.Generator().manual_seed(seed)
    latents = torch.stack(
        [
            encode(vae.eval(), draw(lesson, prompt, 1, generator))
            for prompt in lesson.prompts[:SCALED]
        ]
    )
    vae.register_to_config(scaling_factor=1.0 / latents.std().item())
    return vae


def _reconstruct(
    lesson: Lesson, vae: AutoencoderKLHunyuanVideo15, seed: int, *, steps: int, foreground: float
) -> None:
    """Train what requires gradients on freshly rendered videos.

    A pixel of the thing weighs 1 + `foreground`.
    """
    for weight in vae.parameters():
        if weight.ndim == 5:  # channels innermost, in weights and input
            weight.data = weight.data.contiguous(memory_format=torch.channels_last_3d)
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(
        [p for p in vae.parameters() if p.requires_grad],
        lr=1e-3,
        betas=(0.9, 0.99),
        weight_decay=1e-4,
    )
    error = kl = torch.zeros(())
    for step in progress(range(steps), "autoencoder", steps):
        _set_cosine_lr(1e-3, step, steps, optimizer)
        picks = torch.randint(
            len(lesson.prompts), (lesson.steps.vae_batch,), generator=generator
        ).tolist()
        video = _to_vae(torch.stack([lesson.video(lesson.prompts[i], generator) for i in picks]))
        video = video.contiguous(memory_format=torch.channels_last_3d)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            posterior = vae.encode(video).latent_dist
            mean, logvar = posterior.mean.float(), posterior.logvar.float()
            noise = torch.randn(mean.shape, generator=generator)
            decoded = vae.decode(mean + torch.exp(0.5 * logvar) * noise).sample.float()
        error = decoded - video
        weight = 1.0 + foreground * (video > 2 * BACKGROUND - 0.9).any(dim=1, keepdim=True)
        kl = 0.5 * (mean.square() + logvar.exp() - 1.0 - logvar).mean()
        _update((weight * error.abs()).mean() + KL_WEIGHT * kl, optimizer)
    if steps:
        rms = error.detach().square().mean().sqrt()
        log.info(f"autoencoder: rms error {rms:.3f}, kl {kl.detach():.2f} in the last step")


def encode_clips(lesson: Lesson, folder: Path, generator: torch.Generator) -> Clips:
    """Draw and encode `videos_per_prompt` clips of each caption, with the encoders in `folder`."""
    vae = load_vae(folder if lesson.vae is not None else BASE)
    latents, images = [], []
    see = load_image_encoder(folder, vae, (HEIGHT, WIDTH)) if lesson.takes_images else None
    for prompt in lesson.prompts:
        videos = draw(lesson, prompt, lesson.steps.videos_per_prompt, generator)
        latents.append(vae.config.scaling_factor * encode(vae, videos))
        if see is not None:
            images.append(
                [
                    torch.stack(each)
                    for each in zip(*(see(picture(video[0])).values() for video in videos))
                ]
            )
    if not images:
        return Clips(torch.stack(latents))
    return Clips(torch.stack(latents), *(torch.stack(each) for each in zip(*images)))


def draw(lesson: Lesson, prompt: str, count: int, generator: torch.Generator) -> Tensor:
    """Draw clips of one caption, float32 [count, F, 3, H, W] in [0, 1]."""
    return torch.stack([lesson.video(prompt, generator) for _ in range(count)])


@torch.no_grad()
def encode(vae: AutoencoderKLHunyuanVideo15, videos: Tensor) -> Tensor:
    """Return the unscaled posterior means of videos [B, F, 3, H, W], float32 [B, C, T, H', W']."""
    mean: Tensor = vae.encode(_to_vae(videos)).latent_dist.mode()
    return mean


@torch.no_grad()
def correct_clips(lesson: Lesson, decoder: Decoder, prompts: list[str]) -> tuple[Tensor, Tensor]:
    """Draw a correct clip of each prompt of a lesson, as drawn and through the autoencoder.

    Args:
        lesson: the lesson of the prompts' world.
        decoder: that of a loaded model, with its autoencoder as `vae`.
        prompts: N captions.

    Returns:
        Both [N, F, 3, H, W] in [0, 1].
    """
    generator = torch.Generator().manual_seed(0)
    vae = allow_batches(decoder.vae)
    drawn = torch.cat([draw(lesson, prompt, 1, generator) for prompt in prompts])
    latents = vae.config.scaling_factor * torch.cat([encode(vae, part) for part in drawn.split(32)])
    return drawn, decoder(latents)


def picture(frame: Tensor) -> Image.Image:
    """Convert [3, H, W] in [0, 1] to an image."""
    return Image.fromarray((255 * frame).round().byte().permute(1, 2, 0).contiguous().numpy())


def train_flow(lesson: Lesson, clips: Clips, generator: torch.Generator) -> TestbedTransformer:
    """Train by flow matching; return the averaged weights."""
    steps, batch, latents = lesson.steps.steps, lesson.steps.batch, clips.latents
    model = lesson.transformer().train()
    average = copy.deepcopy(model).eval().requires_grad_(False)
    text = torch.stack([lesson.embed(prompt) for prompt in lesson.prompts])
    no_text = lesson.embed("")[None]
    unprompted = round(PROMPT_DROPOUT * batch)
    matrices, others = list[Tensor](), list[Tensor]()
    for name, p in model.named_parameters():
        by_muon = lesson.muon and p.ndim == 2 and name.startswith("transformer_blocks.")
        (matrices if by_muon else others).append(p)
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(others, lr=2e-3, betas=(0.9, 0.95), weight_decay=1e-2)
    ]
    if matrices:
        optimizers.append(Muon(matrices, lr=2e-3, weight_decay=1e-2, eps=1e-10))
    for step in progress(range(steps), "transformer", steps):
        _set_cosine_lr(2e-3, step, steps, *optimizers)
        prompt = torch.randint(latents.shape[0], (batch,), generator=generator)
        drawn = prompt, torch.randint(latents.shape[1], (batch,), generator=generator)
        x0, image = (
            latents[drawn],
            [None if each is None else each[drawn] for each in (clips.tokens, clips.frame)],
        )
        noise = torch.randn(x0.shape, generator=generator)
        u = torch.rand(batch, generator=generator)
        sigma = SHIFT * u / (1.0 + (SHIFT - 1.0) * u)
        s = sigma[:, None, None, None, None]
        x, target = (1.0 - s) * x0 + s * noise, noise - x0
        # Two forwards rather than one with padding: no masks, and prompts of different lengths
        # never meet.
        rows = (
            (slice(0, unprompted), no_text.expand(unprompted, -1, -1)),
            (slice(unprompted, None), text[prompt]),
        )
        loss = torch.zeros(())
        for part, words in rows:
            if x[part].shape[0] > 0:
                own = (None if each is None else each[part] for each in image)
                v = velocity(model, x[part], sigma[part], words[-x[part].shape[0] :], *own)
                loss = loss + (v - target[part]).square().sum() / target.numel()
        _update(loss, *optimizers)
        decay = min(EMA_DECAY, (1 + step) / (10 + step))
        torch._foreach_lerp_(
            list(average.parameters()), [p.detach() for p in model.parameters()], 1.0 - decay
        )
    log.info(f"transformer: loss {loss.detach():.3f} in the last step")
    return average


def train_judge(lesson: Lesson, network: JudgeNetwork, generator: torch.Generator) -> JudgeNetwork:
    """Train the judge on clips, clean and corrupted."""
    network, steps = network.train(), lesson.steps.judge_steps
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3, weight_decay=1e-2)
    loss = torch.zeros(())
    for step in progress(range(steps), "judge", steps):
        _set_cosine_lr(2e-3, step, steps, optimizer)
        loss = lesson.judge_loss(network, lesson.steps.judge_batch, generator)
        _update(loss, optimizer)
    log.info(f"judge: loss {loss.detach():.3f} in the last step")
    return network.eval()


def velocity(
    model: TestbedTransformer,
    x: Tensor,
    sigma: Tensor,
    text: Tensor,
    tokens: Tensor | None = None,
    frame: Tensor | None = None,
) -> Tensor:
    """Return the model's v [B, C, T, H, W].

    Args:
        x: latents.
        sigma: noise levels [B].
        text: word vectors [B, L, D].
        tokens, frame: what the B samples are given of an image.
    """
    rows, channels = x.shape[:2]
    condition_and_mask = x.new_zeros(rows, model.config.in_channels - channels, *x.shape[2:])
    if frame is not None:
        condition_and_mask[:, :channels, :1] = frame
        condition_and_mask[:, channels:, :1] = 1.0
    output: Tensor = model(
        hidden_states=torch.cat([x, condition_and_mask], dim=1),
        timestep=1000.0 * sigma,
        encoder_hidden_states=text,
        encoder_attention_mask=x.new_ones(text.shape[:2]),
        encoder_hidden_states_2=x.new_zeros(rows, 0, model.config.text_embed_2_dim),
        encoder_attention_mask_2=x.new_zeros(rows, 0),
        image_embeds=x.new_zeros(rows, 0, model.config.image_embed_dim)
        if tokens is None
        else tokens,
        return_dict=False,
    )[0]
    return output


def _to_vae(videos: Tensor) -> Tensor:
    """Convert [B, F, 3, H, W] in [0, 1] to [B, 3, F, H, W] in [-1, 1]."""
    return 2.0 * videos.transpose(1, 2) - 1.0


def _set_cosine_lr(
    peak: float, step: int, steps: int, *optimizers: torch.optim.Optimizer, warmup: int = 50
) -> None:
    scale = min(1.0, (step + 1) / warmup) * 0.5 * (1.0 + math.cos(math.pi * step / steps))
    for group in _groups(optimizers):
        group["lr"] = peak * scale


def _update(loss: Tensor, *optimizers: torch.optim.Optimizer) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(
        [p for group in _groups(optimizers) for p in group["params"]], 1.0
    )
    for optimizer in optimizers:
        optimizer.step()


def _groups(optimizers: Sequence[torch.optim.Optimizer]) -> list[dict[str, Any]]:
    return [group for optimizer in optimizers for group in optimizer.param_groups]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Pre-train a world's base model and its judge.")
    parser.add_argument(
        "folder", type=Path, metavar="FOLDER", help="where transformer/, vae/ and judge/ go"
    )
    parser.add_argument("--world", choices=LESSONS, default="testbed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    options = parser.parse_args()
    log_to_screen(quiet=options.quiet)
    pretrain(options.folder, LESSONS[options.world], seed=options.seed)
