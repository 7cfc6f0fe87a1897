"""Score a policy on held-out prompts with the ODE and fixed seeds, so that evaluations can be
compared in pairs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sage_fast.algorithm.iteration_plan import share_of
from sage_fast.algorithm.transitions import sigma_schedule, transition_table
from sage_fast.loading import Setup
from sage_fast.models.interface import pass_lengths
from sage_fast.rewards.interface import Pending, Scorer, Scores, join_scores
from sage_fast.rollout.groups import Group, HeldVideo, compare_groups, gather_groups, grouped
from sage_fast.rollout.loop import bucket_by_length, initial_latents, rollout
from sage_fast.rollout.scoring import as_bytes, gather_checked
from sage_fast.util.captions import PromptKey
from sage_fast.util.console import Progress
from sage_fast.util.errors import RewardError, UserError
from sage_fast.util.files import json_value
from sage_fast.util.meters import JUDGE_PART
from sage_fast.util.ranks import data_rank, data_size, fail_together, sequence_rank
from sage_fast.util.seeding import derive_seed, sample_seeds


class Chunk(NamedTuple):
    """A batch of videos of one shape and rate.

    Attributes:
        indices: their B indices.
        videos: `[B, F, 3, H, W]` in [0, 1].
        fps: frames per second; None: not known.
    """

    indices: list[int]
    videos: Tensor
    fps: float | None = None


Chunks = Iterator[Chunk]
Evaluation = dict[str, Any]
"""Scores of N videos, identical on every rank, as in `eval/*.json`; null where a reward failed.

`parts` includes those of `eval.judge` as `judge/<part>`. `negatives` and `images` map prompts to
their negative prompts and to the paths of their images.
"""


@torch.no_grad()
def video_chunks(
    setup: Setup,
    prompts: Sequence[PromptKey],
    seeds: Tensor,
    *,
    pause: Callable[[], object] = lambda: None,
) -> Chunks:
    """Sample videos with the ODE and yield them in chunks of at most `sampling.batch_size` prompts.

    Args:
        pause: called after each step; an exception it raises ends the sampling.
    """
    model, sampling, embeddings = setup.model, setup.config.sampling, setup.embeddings
    table = transition_table(sigma_schedule(setup.config.eval.steps, sampling.shift), "ode", 0.0)
    device = model.policy.device
    coefs = table.coefficients().to(device)
    shape = model.spec.latent_shape(sampling)
    # Prompts of equal length share a forward, without padding.
    lengths = pass_lengths(embeddings, guided=model.policy.uses_guidance)
    order = sorted(range(len(prompts)), key=lambda i: lengths[prompts[i]])
    runs = bucket_by_length([lengths[prompts[i]] for i in order], sampling.batch_size)
    dummy = setup.eval_prompts[0]  # which every rank has, with an image where the model takes one

    def generate(keys: Sequence[PromptKey], own: Tensor) -> Tensor:
        conditioning = model.policy.conditioning_table(table.sigmas[:-1], embeddings)
        x = initial_latents(own, shape, device)
        return rollout(
            model.policy,
            table,
            coefs,
            conditioning,
            keys,
            own,
            x,
            on_step=bar.update,
            graphs=setup.graphs,
        )

    with Progress("sample", len(runs) * len(table), pause=pause) as bar:
        for run in model.policy.states.pad_to_largest(
            runs, lambda: generate([dummy], seeds.new_zeros(1))
        ):
            chosen = order[run]
            latents = generate([prompts[i] for i in chosen], seeds[chosen])
            yield Chunk(chosen, model.decoder(latents), model.spec.fps)


def prompts_and_seeds(setup: Setup) -> tuple[list[PromptKey], Tensor]:
    """Return the prompts and seeds (int64 `[N]`) of the N videos of an evaluation.

    A prompt with a seed of its own uses that seed, then seeds derived from it alone: they are the
    same in every run and file.
    """
    config = setup.config
    chosen = setup.eval_prompts[: config.eval.num_prompts]

    def seed_of(prompt: int, k: int) -> Tensor:
        own = setup.eval_seeds.get(prompt)
        if own is None:
            return sample_seeds(config.seed, 0, prompt, range(k, k + 1), "evaluation")
        if k == 0:
            return torch.tensor([own])
        return sample_seeds(own, 0, 0, range(k, k + 1), "evaluation")

    prompts: list[PromptKey] = []
    seeds: list[Tensor] = []
    for k in range(config.eval.seeds_per_prompt):
        for number, prompt in enumerate(chosen):
            prompts.append(prompt)
            seeds.append(seed_of(number, k))
    return prompts, torch.cat(seeds)


def negatives_for(setup: Setup, keys: Sequence[PromptKey]) -> dict[str, str]:
    """Return prompt, as files hold it, -> negative prompt for those of `keys` that have one."""
    return {str(key): setup.negatives[key] for key in keys if key in setup.negatives}


def evaluate(
    setup: Setup,
    *,
    iteration: int,
    save: Callable[[int, str, Tensor], object] | None = None,
    pause: Callable[[], object] = lambda: None,
    rewards: Mapping[str, Scorer] | None = None,
) -> tuple[Evaluation, list[Tensor]]:
    """Sample the first `eval.num_prompts` held-out prompts, `eval.seeds_per_prompt` videos each,
    and score them.

    Collective; `save`, result and errors as in `score_videos`.

    Args:
        pause: called after each step; an exception it raises on one rank ends the evaluation on
            all.
        rewards: as for `score_videos`; by default those of the setup.
    """
    config, model = setup.config, setup.model
    keys, seeds = prompts_and_seeds(setup)

    def sample(share: range) -> Chunks:
        return video_chunks(
            setup, [keys[i] for i in share], seeds[share.start : share.stop], pause=pause
        )

    rewards = rewards or rewards_of(setup.reward, setup.judge)
    kept, waits = config.eval.num_videos, model.policy.collective_forwards
    with model.policy.at_guidance(config.eval_guidance_scale):
        scores, videos = score_videos(
            rewards, keys, seeds.tolist(), sample, kept=kept, save=save, collective=waits
        )
    scores |= {"iteration": iteration, "negatives": negatives_for(setup, keys)}
    images = {str(key): setup.captions[key].image for key in keys if key.image}
    if images:
        scores["images"] = images
    return scores, videos


def rewards_of(reward: Scorer, judge: Scorer | None) -> dict[str, Scorer]:
    """Return prefix of the parts -> reward: the trained one, without a prefix, and the judge."""
    rewards = {"": reward}
    if judge is not None:
        rewards[JUDGE_PART] = judge
    return rewards


def score_videos(
    rewards: Mapping[str, Scorer],
    prompts: Sequence[PromptKey],
    seeds: Sequence[int],
    videos_of: Callable[[range], Chunks],
    *,
    kept: int = 0,
    save: Callable[[int, str, Tensor], object] | None = None,
    collective: bool = False,
) -> tuple[Evaluation, list[Tensor]]:
    """Score one video of each of `prompts`, which the ranks share. Collective.

    A video whose reward fails has no scores and is left out of means and pairs. It is an error with
    `reward.on_failure = stop`, or if the share of failures exceeds `reward.max_dropped`.

    Args:
        rewards: as returned by `rewards_of`. The trained one may compare the videos of a prompt.
        videos_of: returns the videos with these numbers, indexed from 0 on each rank.
        kept: number of this rank's first videos to return, float32 `[F, 3, H, W]`.
        save: called with the number, written key and video (on the CPU) of each of this rank's
            videos.
        collective: whether `videos_of` runs forwards that other ranks wait for; an error of this
            rank then waits.
    """
    # the first rank, which writes files, always has a video
    share = share_of(len(prompts), data_size(), data_rank())
    keys = [prompts[i] for i in share]
    pending: dict[str, list[Pending]] = {prefix: [] for prefix in rewards}
    order: list[int] = []
    videos: dict[int, Tensor] = {}
    held: dict[int, HeldVideo] = {}
    failure: RewardError | OSError | None = None
    with fail_together(collective):
        for indices, chunk, fps in videos_of(share):
            if failure is not None:
                continue
            try:
                drawn = derive_seed(seeds[share[indices[0]]], "reward")
                for prefix, reward in [*rewards.items()][::-1]:
                    pending[prefix].append(
                        reward.submit(chunk, [keys[i] for i in indices], fps, drawn)
                    )
                if save is not None and sequence_rank() == 0:
                    for i, video in zip(indices, chunk.cpu()):
                        save(share[i], str(keys[i]), video)
            except (RewardError, OSError) as error:
                if not collective:
                    raise
                failure = error  # raised later: other ranks wait for this rank's forwards
                continue
            order += indices
            if rewards[""].compares_group and sequence_rank() == 0:
                held |= {share[i]: HeldVideo(as_bytes(v), fps) for i, v in zip(indices, chunk)}
            # Copies: a view would keep the whole chunk.
            videos.update(
                (i, video.to("cpu", copy=True)) for i, video in zip(indices, chunk) if i < kept
            )
        if failure is not None:
            raise failure
        own = {
            prefix: join_scores([scores.result() for scores in chunks])
            for prefix, chunks in pending.items()
        }
    compared: dict[str, tuple[list[int], Scores]] = {}
    if rewards[""].compares_group:
        groups = gather_groups(_groups(prompts, seeds), held)
        with fail_together():
            compared[""] = compare_groups(rewards[""], groups, held)
    numbers = [share[i] for i in order]
    merged = {
        prefix: gather_checked(rewards[prefix], numbers, scores, compared.get(prefix))
        for prefix, scores in own.items()
    }
    scores = {
        "iteration": 0,
        "prompts": [str(prompt) for prompt in prompts],
        "negatives": {},
        "seeds": list(seeds),
        "weights": dict(rewards[""].weights),
        "reward": _numbers(merged[""].rewards),
        "parts": {
            prefix + part: _numbers(x)
            for prefix in merged
            for part, x in merged[prefix].parts.items()
        },
    }
    return scores, [videos[i] for i in sorted(videos)]


def _groups(prompts: Sequence[PromptKey], seeds: Sequence[int]) -> list[Group]:
    """Return the videos of each prompt, as rewards compare them.

    Raises:
        UserError: a prompt has a single video.
    """
    groups = grouped(prompts, prompts, seeds)
    for group in groups:
        if len(group.numbers) < 2:
            raise UserError(
                f"1 video of {str(group.prompt)!r}: expected at least 2 of each prompt, since a "
                "reward compares them"
            )
    return groups


def _numbers(scores: Tensor) -> list[float | None]:
    return [json_value(score) for score in scores.tolist()]
