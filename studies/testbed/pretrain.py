"""Pre-train a small world's base model: python -m studies.testbed.pretrain FOLDER [--world pairs]

The testbed's weights ship in sage_fast/models/testbed/base and sage_fast/testbed/base; those of the world of pairs are
in studies/pairs/base.

Trains an autoencoder on rendered videos, a flow-matching transformer on its latents, and the held-out judge, a
classifier of clips and their corruptions.

The base is under-trained on purpose. Its shapes are recognisable, but often the wrong ones, blurred, or moving the
wrong way, which leaves reinforcement learning something to improve.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import logging
import math
from collections.abc import Callable
from pathlib import Path

import torch
from diffusers import AutoencoderKLHunyuanVideo15
from torch import Tensor

from sage_fast.models.testbed import text
from sage_fast.models.testbed.model import TestbedTransformer, allow_batches, load_vae, tiny_vae
from sage_fast.testbed import world as testbed
from sage_fast.testbed.judge import JudgeNetwork, load_judge
from sage_fast.testbed.world import BACKGROUND
from sage_fast.util.console import log_to_screen, progress
from studies.pairs import judge as pairs_judge
from studies.pairs import model as pairs_model
from studies.pairs import world as pairs
from studies.testbed import judge, render

log = logging.getLogger("sage_fast.studies")

SHIFT = 3.0  # sigma = SHIFT u / (1 + (SHIFT - 1) u) for u uniform: more training at high noise, as in the real model
PROMPT_DROPOUT = 0.1  # share of samples trained without a prompt, for classifier-free guidance
EMA_DECAY = 0.998
KL_WEIGHT = 5e-4
SCALED = 72  # videos that the scale of the latents is measured on: one of each of the testbed's captions


@dataclasses.dataclass(frozen=True, kw_only=True)
class Steps:
    """How long each part is trained, and its batch size."""

    vae_steps: int
    decoder_steps: int
    steps: int
    vae_batch: int = 4
    batch: int = 64
    videos_per_prompt: int
    judge_steps: int
    judge_batch: int = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class World:
    """What is learned.

    Attributes:
        name: value of `--world`.
        prompts: captions that the base model is trained on.
        video: caption -> random video, float32 [F, 3, H, W] in [0, 1].
        embed: caption, or "" -> word vectors [L, D].
        vae, transformer, judge: make the network that training begins with.
        judge_loss: loss on a batch of random clips.
        steps: how long.
    """

    name: str
    prompts: list[str]
    video: Callable[[str, torch.Generator], Tensor]
    embed: Callable[[str], Tensor]
    vae: Callable[[], AutoencoderKLHunyuanVideo15]
    transformer: Callable[[], TestbedTransformer]
    judge: Callable[[], JudgeNetwork]
    judge_loss: Callable[[JudgeNetwork, int, torch.Generator], Tensor]
    steps: Steps


def _testbed_vae() -> AutoencoderKLHunyuanVideo15:
    """The testbed's autoencoder: it is convolutional and knows the shapes; only the scale of the latents differs."""
    vae = allow_batches(tiny_vae())
    vae.load_state_dict(load_vae().state_dict())
    return vae


def _judge_of_pairs() -> JudgeNetwork:
    """A judge that begins with what the testbed's sees."""
    network = JudgeNetwork(sizes=pairs_judge.SIZES)
    network.body.load_state_dict(load_judge().body.state_dict())
    return network


_TESTBED = World(
    name="testbed",
    prompts=testbed.train_prompts(),
    video=lambda prompt, generator: render.render(testbed.parse(prompt), generator),
    embed=text.embed,
    vae=lambda: allow_batches(tiny_vae()),
    transformer=TestbedTransformer,
    judge=JudgeNetwork,
    judge_loss=judge.loss_of_clips,
    steps=Steps(vae_steps=9000, decoder_steps=6000, steps=1300, videos_per_prompt=32, judge_steps=2500),
)
_PAIRS = World(
    name="pairs",
    prompts=pairs.train_prompts(),
    video=lambda prompt, generator: pairs.render(pairs.parse(prompt), generator),
    embed=pairs_model.embed,
    vae=_testbed_vae,
    transformer=TestbedTransformer,
    judge=_judge_of_pairs,
    judge_loss=pairs_judge.loss_of_clips,
    steps=Steps(vae_steps=0, decoder_steps=0, steps=3000, videos_per_prompt=4, judge_steps=1000, judge_batch=16),
)
WORLDS = {world.name: world for world in (_TESTBED, _PAIRS)}


def pretrain(folder: Path, world: World, *, seed: int = 0) -> None:
    """Train the autoencoder, the transformer and the judge; write `vae/`, `transformer/` and `judge/` into `folder`.

    Runs on the CPU and is deterministic: the same seed, steps and number of threads give the same weights. A part that
    `folder` already holds is kept; the others do not change, since each part has its own random numbers.
    """
    folder.mkdir(parents=True, exist_ok=True)  # fail early: training takes minutes

    def missing(part: str) -> bool:
        torch.manual_seed(seed)  # for the initial weights; all data comes from generators
        return not (folder / part).exists()

    with torch.random.fork_rng(devices=[]):
        if missing("judge"):
            train_judge(world, torch.Generator().manual_seed(seed)).half().save_pretrained(folder / "judge")
        if missing("vae"):
            train_vae(world, seed).half().save_pretrained(folder / "vae")
        if missing("transformer"):
            vae, generator = load_vae(folder), torch.Generator().manual_seed(seed)
            videos = encode_prompts(world, vae, world.prompts, world.steps.videos_per_prompt, generator)
            transformer = train_flow(world, vae.config.scaling_factor * videos, generator)
            transformer.half().save_pretrained(folder / "transformer")

    record = {
        "command": f"python -m studies.testbed.pretrain FOLDER --world {world.name} --seed {seed}",
        "seed": seed,
        **dataclasses.asdict(world.steps),
        "torch": torch.__version__.split("+")[0],
    }
    (folder / "testbed.json").write_text(json.dumps(record, indent=2) + "\n")


def train_vae(world: World, seed: int) -> AutoencoderKLHunyuanVideo15:
    """Train an autoencoder on rendered videos: first both halves, then the decoder alone; measure its latents' scale.

    Decoder steps are cheaper, and only the decoder's output is seen.
    """
    vae = world.vae().train()
    # A shape covers a tenth of the frame; without a larger weight the autoencoder would blur it first.
    _reconstruct(world, vae, seed, steps=world.steps.vae_steps, foreground=8.0)
    vae.half().float()  # train the decoder on the encoder as stored, in half precision
    vae.encoder.requires_grad_(False)
    # The remaining error is a haze over the background: it covers most of the frame, but each pixel weighs little.
    _reconstruct(world, vae, seed, steps=world.steps.decoder_steps, foreground=3.0)
    latents = encode_prompts(world, vae.eval(), world.prompts[:SCALED], 1, torch.Generator().manual_seed(seed))
    vae.register_to_config(scaling_factor=1.0 / latents.std().item())
    return vae


def _reconstruct(world: World, vae: AutoencoderKLHunyuanVideo15, seed: int, *, steps: int, foreground: float) -> None:
    """Train what requires gradients on freshly rendered videos. A pixel of a shape weighs 1 + `foreground`."""
    for weight in vae.parameters():
        if weight.ndim == 5:  # channels innermost, in weights and input, is a fifth faster
            weight.data = weight.data.contiguous(memory_format=torch.channels_last_3d)
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(
        [p for p in vae.parameters() if p.requires_grad], lr=1e-3, betas=(0.9, 0.99), weight_decay=1e-4
    )
    error = kl = torch.zeros(())
    for step in progress(range(steps), "autoencoder", steps):
        _set_cosine_lr(optimizer, 1e-3, step, steps)
        picks = torch.randint(len(world.prompts), (world.steps.vae_batch,), generator=generator).tolist()
        video = _to_vae(torch.stack([world.video(world.prompts[i], generator) for i in picks]))
        video = video.contiguous(memory_format=torch.channels_last_3d)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            posterior = vae.encode(video).latent_dist
            mean, logvar = posterior.mean.float(), posterior.logvar.float()
            noise = torch.randn(mean.shape, generator=generator)
            decoded = vae.decode(mean + torch.exp(0.5 * logvar) * noise).sample.float()
        error = decoded - video
        weight = 1.0 + foreground * (video > 2 * BACKGROUND - 0.9).any(dim=1, keepdim=True)
        kl = 0.5 * (mean.square() + logvar.exp() - 1.0 - logvar).mean()
        _update(optimizer, (weight * error.abs()).mean() + KL_WEIGHT * kl)
    if steps:
        rms = error.detach().square().mean().sqrt()
        log.info(f"autoencoder: rms error {rms:.3f}, kl {kl.detach():.2f} in the last step")


@torch.no_grad()
def encode_prompts(
    world: World,
    vae: AutoencoderKLHunyuanVideo15,
    prompts: list[str],
    videos_per_prompt: int,
    generator: torch.Generator,
) -> Tensor:
    """Return the unscaled posterior means of freshly rendered videos, float32 [prompts, videos, C, T, H, W]."""
    latents = []
    for prompt in prompts:
        videos = torch.stack([world.video(prompt, generator) for _ in range(videos_per_prompt)])
        latents.append(vae.encode(_to_vae(videos)).latent_dist.mode())
    return torch.stack(latents)


def train_flow(world: World, latents: Tensor, generator: torch.Generator) -> TestbedTransformer:
    """Train by flow matching on scaled latents [prompts, videos, C, T, H, W]; return the averaged weights."""
    steps, batch = world.steps.steps, world.steps.batch
    model = world.transformer().train()
    average = copy.deepcopy(model).eval().requires_grad_(False)
    text = torch.stack([world.embed(prompt) for prompt in world.prompts])
    no_text = world.embed("")[None]
    unprompted = round(PROMPT_DROPOUT * batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=1e-2)
    for step in progress(range(steps), "transformer", steps):
        _set_cosine_lr(optimizer, 2e-3, step, steps)
        prompt = torch.randint(latents.shape[0], (batch,), generator=generator)
        x0 = latents[prompt, torch.randint(latents.shape[1], (batch,), generator=generator)]
        noise = torch.randn(x0.shape, generator=generator)
        u = torch.rand(batch, generator=generator)
        sigma = SHIFT * u / (1.0 + (SHIFT - 1.0) * u)
        s = sigma[:, None, None, None, None]
        x, target = (1.0 - s) * x0 + s * noise, noise - x0
        # Two forwards rather than one with padding: no masks, and prompts of different lengths never meet.
        rows = ((slice(0, unprompted), no_text.expand(unprompted, -1, -1)), (slice(unprompted, None), text[prompt]))
        loss = torch.zeros(())
        for part, words in rows:
            if x[part].shape[0] > 0:
                v = velocity(model, x[part], sigma[part], words[-x[part].shape[0] :])
                loss = loss + (v - target[part]).square().sum() / target.numel()
        _update(optimizer, loss)
        decay = min(EMA_DECAY, (1 + step) / (10 + step))
        torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 1.0 - decay)
    log.info(f"transformer: loss {loss.detach():.3f} in the last step")
    return average


def train_judge(world: World, generator: torch.Generator) -> JudgeNetwork:
    """Train the judge on clips, clean and corrupted."""
    network, steps = world.judge().train(), world.steps.judge_steps
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3, weight_decay=1e-2)
    loss = torch.zeros(())
    for step in progress(range(steps), "judge", steps):
        _set_cosine_lr(optimizer, 2e-3, step, steps)
        loss = world.judge_loss(network, world.steps.judge_batch, generator)
        _update(optimizer, loss)
    log.info(f"judge: loss {loss.detach():.3f} in the last step")
    return network.eval()


def velocity(model: TestbedTransformer, x: Tensor, sigma: Tensor, text: Tensor) -> Tensor:
    """Return the model's v [B, C, T, H, W] at latents x, noise levels sigma [B] and word vectors text [B, L, D]."""
    rows = x.shape[0]
    condition_and_mask = x.new_zeros(rows, model.config.in_channels - x.shape[1], *x.shape[2:])
    output: Tensor = model(
        hidden_states=torch.cat([x, condition_and_mask], dim=1),
        timestep=1000.0 * sigma,
        encoder_hidden_states=text,
        encoder_attention_mask=x.new_ones(text.shape[:2]),
        encoder_hidden_states_2=x.new_zeros(rows, 0, model.config.text_embed_2_dim),
        encoder_attention_mask_2=x.new_zeros(rows, 0),
        image_embeds=x.new_zeros(rows, 0, model.config.image_embed_dim),
        return_dict=False,
    )[0]
    return output


def _to_vae(videos: Tensor) -> Tensor:
    """Convert [B, F, 3, H, W] in [0, 1] to [B, 3, F, H, W] in [-1, 1]."""
    return 2.0 * videos.transpose(1, 2) - 1.0


def _set_cosine_lr(optimizer: torch.optim.Optimizer, peak: float, step: int, steps: int, warmup: int = 50) -> None:
    scale = min(1.0, (step + 1) / warmup) * 0.5 * (1.0 + math.cos(math.pi * step / steps))
    for group in optimizer.param_groups:
        group["lr"] = peak * scale


def _update(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Pre-train a world's base model and its judge.")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where transformer/, vae/ and judge/ go")
    parser.add_argument("--world", choices=WORLDS, default="testbed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    options = parser.parse_args()
    log_to_screen(quiet=options.quiet)
    pretrain(options.folder, WORLDS[options.world], seed=options.seed)
