"""Score a policy on held-out prompts with fixed seeds and the ODE, so that two evaluations are paired."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sage_fast.config import Config
from sage_fast.console import Progress, speaker
from sage_fast.distributed import all_gather_object, data_rank, data_size, sequence_rank, sequence_size
from sage_fast.metrics import JUDGE_PART
from sage_fast.policy.load import Model
from sage_fast.policy.text import TextEmbedding
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


@torch.no_grad()
def video_chunks(
    config: Config,
    model: Model,
    prompts: Sequence[str],
    embeddings: Mapping[str, TextEmbedding],
    seeds: Tensor,
    *,
    quiet: bool = True,
) -> Iterator[tuple[list[int], Tensor]]:
    """Indices of at most `sampling.batch_size` prompts and their videos `[B, F, 3, H, W]` in [0, 1], by the ODE.

    On a GPU a chunk is decoded beside the rollout of the next one.
    """
    table = transition_table(sigma_schedule(config.eval.steps, config.sampling.shift), "ode", 0.0)
    device = model.policy.device
    coefs = table.coefficients(1).to(device)
    shape = model.latent_shape(config.sampling)
    # Prompts of one length together, so that none is padded.
    order = sorted(range(len(prompts)), key=lambda i: embeddings[prompts[i]].tokens)
    runs = equal_runs([embeddings[prompts[i]].tokens for i in order], config.sampling.batch_size)
    graphs = step_graphs(model.policy, speaker(quiet)) if config.sampling.cuda_graphs else None
    pending = None
    with Progress("sample", len(runs) * len(table), quiet=quiet) as bar:
        for run in runs:
            chosen = order[run]
            latents = rollout(
                model.policy,
                table,
                coefs,
                model.policy.conditioning_table(table.sigmas[:-1], embeddings),
                [prompts[i] for i in chosen],
                seeds[chosen],
                initial_latents(seeds[chosen], shape, device),
                on_step=bar.update,
                graphs=graphs,
            )
            if pending is not None:
                yield pending[0], pending[1].result()
            pending = chosen, model.decoder.submit(latents)
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


def evaluate(
    setup: Setup, *, iteration: int, quiet: bool = True, save: Callable[[int, str, Tensor], object] | None = None
) -> Evaluation:
    """Rewards on the first `eval.num_prompts` held-out prompts, `eval.seeds_per_prompt` videos each.

    The videos are spread over the ranks; a failed reward is an error here whatever `reward.on_failure` says, since a
    paired comparison needs every pair.

    Args:
        save: told the number, the prompt and the video (on the CPU) of each of this rank's videos as it is made.
    """
    config = setup.config
    chosen = setup.eval_prompts[: config.eval.num_prompts]
    pairs = [(prompt, k) for k in range(config.eval.seeds_per_prompt) for prompt in range(len(chosen))]
    first, last = (-(-number * len(pairs) // data_size()) for number in (data_rank(), data_rank() + 1))
    mine = pairs[first:last]  # rounded up: the first rank, which writes the files, is never without a video
    texts = [chosen[prompt] for prompt, _ in mine]
    seeds = torch.cat(
        [sample_seeds(config.seed, 0, prompt, range(k, k + 1), "evaluation") for prompt, k in mine]
        or [torch.zeros(0, dtype=torch.int64)]
    )
    config_of_pairs = dataclasses.replace(config.reward, on_failure="stop")
    strict = CompositeReward(setup.reward.reward, config_of_pairs, "an evaluation needs every score")
    chunks: list[Scores] = []
    order: list[int] = []
    videos: dict[int, Tensor] = {}
    for chosen_texts, chunk in video_chunks(config, setup.model, texts, setup.embeddings, seeds, quiet=quiet):
        chunk_texts = [texts[i] for i in chosen_texts]
        rewards, parts = strict(chunk, chunk_texts)
        if setup.judge is not None:
            judged = setup.judge(chunk, chunk_texts)
            parts = parts | {JUDGE_PART + part: value for part, value in judged.items()}
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
    return Evaluation(
        iteration=iteration,
        prompts=[text for row in rows for text in row[0]],
        seeds=[seed for row in rows for seed in row[1]],
        reward=[score for row in rows for score in row[2]],
        parts={part: [value for row in rows for value in row[3].get(part, [])] for part in rows[0][3]},
        weights=config.reward.weights,
        videos=[videos[i] for i in sorted(videos)],
    )
