"""Score a policy on held-out prompts with fixed seeds and the ODE, so that two evaluations are paired."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from sage_fast.config import Config
from sage_fast.engine.distributed import all_gather_object, rank, world_size
from sage_fast.graphs import step_graphs
from sage_fast.policy.load import Model
from sage_fast.policy.text import TextEmbedding
from sage_fast.rewards import CompositeReward
from sage_fast.rollout import equal_runs, initial_latents, rollout
from sage_fast.seeding import sample_seeds
from sage_fast.transitions import sigma_schedule, transition_table


@dataclasses.dataclass(kw_only=True)
class Evaluation:
    """Scores of N videos, the same on every rank, and the first videos of this rank, float32 `[F, 3, H, W]`."""

    iteration: int
    prompts: list[str]
    seeds: list[int]
    reward: list[float]
    parts: dict[str, list[float]]
    videos: list[Tensor]

    def to_json(self) -> dict[str, Any]:
        return {field: getattr(self, field) for field in ("iteration", "prompts", "seeds", "reward", "parts")}


@torch.no_grad()
def generate(
    config: Config,
    model: Model,
    prompts: Sequence[str],
    embeddings: Mapping[str, TextEmbedding],
    seeds: Tensor,
    *,
    progress: bool = False,
) -> list[Tensor]:
    """Videos `[F, 3, H, W]` in [0, 1] on the CPU, by the ODE with `eval.steps` steps."""
    table = transition_table(sigma_schedule(config.eval.steps, config.sampling.shift), "ode", 0.0)
    device = model.policy.device
    coefs = table.coefficients(1).to(device)
    shape = model.latent_shape(config.sampling)
    # Prompts of one length together, so that none is padded; the videos come back in the order of the prompts.
    order = sorted(range(len(prompts)), key=lambda i: embeddings[prompts[i]].tokens)
    runs = equal_runs([embeddings[prompts[i]].tokens for i in order], config.sampling.batch_size)
    graphs = step_graphs(model.policy, tqdm.write) if config.sampling.cuda_graphs else None
    videos: dict[int, Tensor] = {}
    with tqdm(total=len(runs) * len(table), desc="sample", unit="step", disable=not progress, leave=False) as bar:
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
            videos.update(zip(chosen, model.decode(latents).cpu()))
    return [videos[i] for i in range(len(prompts))]


def evaluate(
    config: Config,
    model: Model,
    reward: CompositeReward,
    prompts: Sequence[str],
    embeddings: Mapping[str, TextEmbedding],
    *,
    iteration: int,
    progress: bool = False,
) -> Evaluation:
    """Mean rewards on the first `eval.num_prompts` prompts, `eval.seeds_per_prompt` videos each.

    The videos are spread over the ranks; a failed reward is an error here whatever `reward.on_failure` says, since a
    paired comparison needs every pair.
    """
    chosen = list(prompts[: config.eval.num_prompts])
    pairs = [(prompt, k) for k in range(config.eval.seeds_per_prompt) for prompt in range(len(chosen))]
    mine = pairs[rank() * len(pairs) // world_size() : (rank() + 1) * len(pairs) // world_size()]
    texts = [chosen[prompt] for prompt, _ in mine]
    seeds = torch.cat(
        [sample_seeds(config.seed, 0, prompt, range(k, k + 1), "evaluation") for prompt, k in mine]
        or [torch.zeros(0, dtype=torch.int64)]
    )
    videos = generate(config, model, texts, embeddings, seeds, progress=progress)
    strict = CompositeReward(reward.reward, dataclasses.replace(reward.config, on_failure="stop"))
    scores, parts = strict(torch.stack(videos), texts) if videos else (torch.zeros(0), {})
    rows = all_gather_object(
        (texts, seeds.tolist(), scores.tolist(), {part: value.tolist() for part, value in parts.items()})
    )
    return Evaluation(
        iteration=iteration,
        prompts=[text for row in rows for text in row[0]],
        seeds=[seed for row in rows for seed in row[1]],
        reward=[score for row in rows for score in row[2]],
        parts={part: [value for row in rows for value in row[3].get(part, [])] for part in rows[0][3]},
        videos=videos[: config.eval.num_videos],
    )
