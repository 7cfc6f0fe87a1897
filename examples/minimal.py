"""SAGE-GRPO in one file, top to bottom: roll out, score, compare, update. For readers of nanochat's
chat_rl.py.

    python examples/minimal.py --iterations 10

The model is the testbed's: HunyuanVideo 1.5's own classes, tiny, on the CPU. `sage_fast.trainer` is
the same loop with an anchor and its KL, several ranks, guidance, CUDA graphs, metrics and
checkpoints. It learns slowly: see docs/tutorials/first-run.md for settings that learn in minutes.
"""

import argparse
import dataclasses

import torch
from torch import Tensor

from sage_fast.algorithm.advantages import group_advantages
from sage_fast.algorithm.transitions import sigma_schedule, transition_table
from sage_fast.config.loader import build
from sage_fast.loading import Setup, load_setup, resolve
from sage_fast.ops import transition_score
from sage_fast.rollout.loop import initial_latents, rollout
from sage_fast.util.captions import PromptKey

STEPS, ETA, SHIFT = 6, 0.7, 5.0  # denoising steps, noise of the sampler, timestep shift
PROMPTS, GROUP = 2, 8  # groups of an iteration, videos of a group
CLIP = 1e-3  # of the ratio: a log-prob is a mean over elements, so ratios stay near 1
UPDATES, RATE = 2, 3e-4  # optimizer steps of an iteration, learning rate


@dataclasses.dataclass
class Transition:
    """One stochastic step of a rollout, of all B videos of an iteration."""

    step: Tensor  # int64 [1], index in the schedule
    x: Tensor  # float32 [B, C, T, H, W], latents before the step
    x_next: Tensor  # float32 [B, C, T, H, W], latents after it
    log_prob: Tensor  # float32 [B], of x_next given x, under the policy that made it


def main(iterations: int) -> list[float]:
    """Train a LoRA adapter; return the mean reward of each iteration."""
    # 1. The model and the reward. The policy maps latents and conditions to velocities. The reward
    # gives each video
    #    one score for each of its named parts; `Scores.rewards` is their weighted sum.
    sizes = {"sampling.num_frames": 17, "sampling.height": 32, "sampling.width": 32}
    setup = load_setup(
        resolve(build(sizes | {"model.dtype": "float32", "sampling.guidance_scale": 1.0}))
    )
    setup.encode()  # prompt -> embedding
    policy = setup.model.policy
    optimizer = torch.optim.AdamW(policy.parameters().values(), lr=RATE, weight_decay=0.0)

    # 2. The sampler: each step is x_next = a x + b v + c noise, a row of numbers (Eq. 5 for
    # "sage").
    table = transition_table(sigma_schedule(STEPS, SHIFT), "sage", ETA)
    coefs = table.coefficients().to(policy.device)
    # S_t of Eq. 9: every step learns at the same rate
    equalizer = table.equalizer().to(policy.device, torch.float32)

    stored: list[Transition] = []

    def record(t: int, x: Tensor, x_next: Tensor, log_prob: Tensor, _: object) -> None:
        if table.c[t] > 0:  # a step without noise has no log-prob
            step = torch.tensor([t], device=x.device)
            stored.append(Transition(step, x.clone(), x_next.clone(), log_prob.clone()))

    history = []
    for iteration in range(iterations):
        # 3. Rollout: a group of videos for each prompt, that differ in their noise alone.
        # Everything is a function of
        #    the seeds. Decoded and scored at once: there are few.
        chosen = [
            setup.prompts[(iteration * PROMPTS + i) % len(setup.prompts)] for i in range(PROMPTS)
        ]
        prompts = [prompt for prompt in chosen for _ in range(GROUP)]
        seeds = torch.arange(len(prompts)) + iteration * len(prompts)
        stored.clear()
        conditioning = policy.conditioning_table(table.sigmas[:-1], setup.embeddings)
        noise = initial_latents(
            seeds, setup.model.spec.latent_shape(setup.config.sampling), policy.device
        )
        latents = rollout(policy, table, coefs, conditioning, prompts, seeds, noise, record=record)
        with torch.no_grad():
            videos = setup.model.decoder(latents)  # float32 [B, F, 3, H, W] in [0, 1]

        # 4. Rewards and advantages: each video against its group, A = (R - mean) / std (Eq. 10).
        rewards = setup.reward(videos, prompts).rewards.view(PROMPTS, GROUP)
        advantages, _ = group_advantages(rewards, rewards.isfinite())
        advantages = advantages.flatten().float().to(policy.device)
        history.append(float(rewards.nanmean()))

        # 5. Updates: each takes a share of the stored steps, so no transition is trained twice.
        for update in range(UPDATES):
            share = stored[update::UPDATES]
            for transition in share:
                loss = policy_loss(setup, prompts, transition, coefs, equalizer, advantages)
                (loss / len(share)).backward()  # gradients add up over the steps
            norm = torch.nn.utils.clip_grad_norm_(policy.parameters().values(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        print(f"iteration {iteration}: reward {history[-1]:.4f}, gradient norm {float(norm):.1e}")
    return history


def policy_loss(
    setup: Setup,
    prompts: list[PromptKey],
    stored: Transition,
    coefs: Tensor,
    equalizer: Tensor,
    advantages: Tensor,
) -> Tensor:
    """Return -mean(S_t min(ratio A, clip(ratio) A)) of one step's transitions, differentiable in
    the policy.

    The ratio compares the present policy's log-prob of the stored step with that of the rollout's
    policy; before the first update it is 1.
    """
    policy, sigmas = setup.model.policy, sigma_schedule(STEPS, SHIFT)[:-1]
    # with the present weights
    inputs = policy.conditioning_table(sigmas, setup.embeddings).at(prompts, stored.step)
    velocity, _ = policy.velocities(stored.x, inputs)  # the second one is for guidance
    log_prob, *_ = transition_score(stored.x, stored.x_next, velocity, coefs, stored.step[0])
    ratio = (log_prob - stored.log_prob).exp()
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    return -(equalizer[stored.step] * surrogate).mean()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=10)
    main(parser.parse_args().iterations)
