"""Score a policy on held-out prompts with fixed seeds and the ODE, so that two evaluations are paired."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sage_fast.config import Config
from sage_fast.console import Progress, speaker
from sage_fast.distributed import (
    all_gather_object,
    broadcast_object,
    data_rank,
    data_size,
    rank,
    sequence_rank,
    sequence_size,
    together,
)
from sage_fast.errors import UserError
from sage_fast.metrics import JUDGE_PART
from sage_fast.policy.load import Model
from sage_fast.policy.text import TextEmbedding
from sage_fast.report.comparison import read_scores
from sage_fast.rewards import CompositeReward
from sage_fast.rollout.graphs import step_graphs
from sage_fast.rollout.loop import equal_runs, initial_latents, rollout
from sage_fast.rollout.scoring import Scores, join_scores
from sage_fast.run.setup import Setup
from sage_fast.seeding import sample_seeds
from sage_fast.transitions import sigma_schedule, transition_table


@dataclasses.dataclass(kw_only=True)
class Evaluation:
    """Scores of N videos, the same on every rank, and the first videos of this rank, float32 `[F, 3, H, W]`.

    The parts of `eval.judge` are among `parts` as `judge/<part>`.
    """

    iteration: int
    prompts: list[str]
    seeds: list[int]
    reward: list[float]
    parts: dict[str, list[float]]
    weights: dict[str, float]
    videos: list[Tensor]

    def to_json(self) -> dict[str, Any]:
        fields = ("iteration", "prompts", "seeds", "reward", "parts", "weights")
        return {field: getattr(self, field) for field in fields}


def read_evaluation(run: Path, name: str) -> dict[str, Any] | None:
    """`eval/<name>.json` as the first rank finds it; None if the evaluation was interrupted."""
    scores = None
    file = run / "eval" / f"{name}.json"
    if rank() == 0 and file.is_file():
        with contextlib.suppress(UserError):  # cut off while it was written
            scores = read_scores(file)
    return broadcast_object(scores, 0)


def check_pairs(setup: Setup, run: Path) -> None:
    """
    Raises:
        UserError: what is evaluated now is not what the run in `run` evaluated before training.
    """
    before = read_evaluation(run, "before")
    texts, seeds = prompts_and_seeds(setup)
    if before is not None and (before["prompts"], before["seeds"]) != (texts, seeds.tolist()):
        raise UserError(
            f"data.eval_prompts = {setup.config.data.eval_prompts!r} holds other prompts than those that the run in "
            f"{str(run)!r} was evaluated on before training; restore the file, or begin another run; nothing was "
            "changed"
        )


@torch.no_grad()
def video_chunks(
    config: Config,
    model: Model,
    prompts: Sequence[str],
    embeddings: Mapping[str, TextEmbedding],
    seeds: Tensor,
    *,
    quiet: bool = True,
    pause: Callable[[], object] = lambda: None,
) -> Iterator[tuple[list[int], Tensor]]:
    """Indices of at most `sampling.batch_size` prompts and their videos `[B, F, 3, H, W]` in [0, 1], by the ODE.

    On a GPU a chunk is decoded beside the rollout of the next one.

    Args:
        pause: called after each step; what it raises ends the work.
    """
    table = transition_table(sigma_schedule(config.eval.steps, config.sampling.shift), "ode", 0.0)
    device = model.policy.device
    coefs = table.coefficients(1).to(device)
    shape = model.latent_shape(config.sampling)
    # Prompts of one length together, so that none is padded.
    order = sorted(range(len(prompts)), key=lambda i: embeddings[prompts[i]].tokens)
    runs = equal_runs([embeddings[prompts[i]].tokens for i in order], config.sampling.batch_size)
    graphs = step_graphs(model.policy, speaker(quiet)) if config.sampling.cuda_graphs else None
    idle = model.policy.states.behind(len(runs))
    pending = None
    with Progress("sample", len(runs) * len(table), quiet=quiet, pause=pause) as bar:

        def sample(prompts: Sequence[str], seeds: Tensor) -> Tensor:
            conditioning = model.policy.conditioning_table(table.sigmas[:-1], embeddings)
            x = initial_latents(seeds, shape, device)
            return rollout(
                model.policy, table, coefs, conditioning, prompts, seeds, x, on_step=bar.update, graphs=graphs
            )

        for run in runs:
            chosen = order[run]
            latents = sample([prompts[i] for i in chosen], seeds[chosen])
            if pending is not None:
                yield pending[0], pending[1].result()
            pending = chosen, model.decoder.submit(latents)
        for _ in range(idle):  # beside ranks that make more: weights are gathered only together
            sample([""], torch.zeros(1, dtype=torch.int64))
        if pending is not None:
            yield pending[0], pending[1].result()


def generate(
    config: Config,
    model: Model,
    prompts: Sequence[str],
    embeddings: Mapping[str, TextEmbedding],
    seeds: Tensor,
    *,
    quiet: bool = True,
) -> list[Tensor]:
    """All the videos of `video_chunks`, each `[F, 3, H, W]` on the CPU, in the order of the prompts."""
    videos: dict[int, Tensor] = {}
    for chosen, chunk in video_chunks(config, model, prompts, embeddings, seeds, quiet=quiet):
        videos.update(zip(chosen, chunk.cpu()))
    return [videos[i] for i in range(len(prompts))]


def prompts_and_seeds(setup: Setup) -> tuple[list[str], Tensor]:
    """Prompt and seed (int64 `[N]`) of each of the N videos of an evaluation."""
    config = setup.config
    chosen = setup.eval_prompts[: config.eval.num_prompts]
    pairs = [(prompt, k) for k in range(config.eval.seeds_per_prompt) for prompt in range(len(chosen))]
    seeds = [sample_seeds(config.seed, 0, prompt, range(k, k + 1), "evaluation") for prompt, k in pairs]
    return [chosen[prompt] for prompt, _ in pairs], torch.cat(seeds)


Scorer = Callable[[Tensor, Sequence[str]], Mapping[str, Tensor]]
"""Parts, each `[B]`, of videos `[B, F, 3, H, W]` in [0, 1] and their prompts."""

Chunks = Iterator[tuple[list[int], Tensor]]
"""Indices of videos, and these videos `[B, F, 3, H, W]` in [0, 1]."""


def evaluate(
    setup: Setup,
    *,
    iteration: int,
    quiet: bool = True,
    save: Callable[[int, str, Tensor], object] | None = None,
    pause: Callable[[], object] = lambda: None,
    scorers: Mapping[str, Scorer] | None = None,
    videos_of: Callable[[range], Chunks] | None = None,
) -> Evaluation:
    """Rewards on the first `eval.num_prompts` held-out prompts, `eval.seeds_per_prompt` videos each.

    The videos are spread over the ranks; a failed reward is an error here whatever `reward.on_failure` says, since a
    paired comparison needs every pair.

    Args:
        save: told the number, the prompt and the video (on the CPU) of each of this rank's videos as it is made.
        pause: called after each step; what it raises on one rank ends the evaluation on all.
        scorers: further ones, whose parts are among `parts` as `<name>/<part>`.
        videos_of: gives the videos of these numbers, counted from 0 on each rank, in place of the policy.
    """
    config = setup.config
    texts, seeds = prompts_and_seeds(setup)
    # Rounded up: the first rank, which writes the files, is never without a video.
    first, last = (-(-number * len(texts) // data_size()) for number in (data_rank(), data_rank() + 1))
    texts, seeds = texts[first:last], seeds[first:last]
    config_of_pairs = dataclasses.replace(config.reward, on_failure="stop")
    strict = CompositeReward(setup.reward.reward, config_of_pairs, "an evaluation needs every score")
    chunks: list[Scores] = []
    order: list[int] = []
    videos: dict[int, Tensor] = {}
    with together():
        if videos_of is None:
            made = video_chunks(config, setup.model, texts, setup.embeddings, seeds, quiet=quiet, pause=pause)
        else:
            made = videos_of(range(first, last))
        for chosen_texts, chunk in made:
            chunk_texts = [texts[i] for i in chosen_texts]
            rewards, parts = strict(chunk, chunk_texts)
            if setup.judge is not None:
                judged = setup.judge(chunk, chunk_texts)
                parts = parts | {JUDGE_PART + part: value for part, value in judged.items()}
            for name, scorer in (scorers or {}).items():
                found = scorer(chunk, chunk_texts)
                parts = parts | {f"{name}/{part}": value for part, value in found.items()}
            chunks.append((rewards, parts))
            order += chosen_texts
            if save is not None and sequence_rank() == 0:
                for i, video in zip(chosen_texts, chunk.cpu()):
                    save(first + i, texts[i], video)
            # Copies: a view would keep the whole chunk.
            kept = [(i, video) for i, video in zip(chosen_texts, chunk) if i < config.eval.num_videos]
            videos.update((i, video.to("cpu", copy=True)) for i, video in kept)
    scores, parts = join_scores(chunks) if chunks else (torch.zeros(0), {})
    back = torch.tensor(order, dtype=torch.int64).argsort()
    scores, parts = scores[back], {part: value[back] for part, value in parts.items()}
    rows = all_gather_object(
        (texts, seeds.tolist(), scores.tolist(), {part: value.tolist() for part, value in parts.items()})
    )[:: sequence_size()]  # ranks that share samples have the same
    # A part that a rank with videos lacks is dropped, as one that a chunk lacks.
    named = [part for part in rows[0][3] if all(part in row[3] for row in rows if row[0])]
    return Evaluation(
        iteration=iteration,
        prompts=[text for row in rows for text in row[0]],
        seeds=[seed for row in rows for seed in row[1]],
        reward=[score for row in rows for score in row[2]],
        parts={part: [value for row in rows if row[0] for value in row[3][part]] for part in named},
        weights=config.reward.weights,
        videos=[videos[i] for i in sorted(videos)],
    )
