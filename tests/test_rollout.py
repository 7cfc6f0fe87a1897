"""Rollouts: parity with training, independence of the batch, equality with diffusers' Euler
loop."""

import functools
import itertools

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from sage_fast.algorithm.transitions import sigma_schedule, transition_table
from sage_fast.ops import transition_score
from sage_fast.ops.philox import philox_normal
from sage_fast.rollout.loop import bucket_by_length, initial_latents, rollout
from sage_fast.rollout.trajectories import Trajectories
from sage_fast.testbed.tiny_model import LATENT_SHAPE
from sage_fast.util.captions import PromptKey
from sage_fast.util.seeding import sample_seeds
from tests.tiny import embeddings, keys_of, settings, tiny_model

PROMPTS = keys_of(["a small red ball moves left quickly", "a big blue ball moves up slowly"])
CPU = torch.device("cpu")


def roll(
    seeds: torch.Tensor,
    sampler: str = "sage",
    guidance: float = 1.0,
    dtype: torch.dtype = torch.float32,
    steps: int = 6,
    offload: bool = False,
) -> tuple[Trajectories, torch.Tensor, torch.Tensor, object, torch.Tensor]:
    config = settings(sampling__guidance_scale=guidance)
    model = tiny_model(config, dtype)
    table = transition_table(sigma_schedule(steps, 3.0), sampler, 0.7)
    coefs = table.coefficients()
    conditioning = model.policy.conditioning_table(table.sigmas[:-1], embeddings(PROMPTS))
    trained = list(itertools.product(range(len(seeds)), table.stochastic_steps))
    trajectories = Trajectories(
        LATENT_SHAPE, trained, len(table), CPU,
        velocities=torch.float32 if guidance != 1 else dtype, offload=offload,
    )  # fmt: skip
    latents = rollout(
        model.policy,
        table,
        coefs,
        conditioning,
        [PROMPTS[i % 2] for i in range(len(seeds))],
        seeds,
        initial_latents(seeds, LATENT_SHAPE, CPU),
        record=functools.partial(trajectories.record, slice(0, len(seeds))),
    )
    return trajectories, table.sigmas.float(), coefs, model.policy, latents


@pytest.mark.parametrize("guidance", [1.0, 3.0])
@pytest.mark.parametrize("sampler", ["sage", "flow", "dance", "cps", "precise"])
def test_training_recomputes_the_log_prob(sampler: str, guidance: float) -> None:
    """To 1e-5 relative in fp32, for every kept step, with gradients on."""
    seeds = sample_seeds(0, 0, 0, range(4))
    rows, sigmas, coefs, policy, _ = roll(seeds, sampler, guidance)
    texts = embeddings(PROMPTS)
    text = [texts[PROMPTS[i % 2]] for i in range(4)]
    negative = [texts[PromptKey("")]] * 4
    assert rows.log_probs
    for t in sorted({t for _, t in rows.trained}):
        micro = [(i, t) for i in range(4)]
        x, old = rows.gather(rows.states, micro), rows.gather(rows.log_probs, micro)
        conditioning = policy.condition(
            sigmas[t].expand(4), text, negative if guidance != 1 else None
        )
        v, v_uncond = policy.velocities(x, conditioning)
        assert v.requires_grad
        stored = rows.gather(rows.velocities, micro)
        new, kl, *_ = transition_score(
            x,
            rows.next_states(micro),
            v,
            coefs,
            torch.tensor(t),
            stored,
            v_uncond=v_uncond,
            guidance=policy.guidance,
        )
        torch.testing.assert_close(new, old, rtol=1e-5, atol=1e-5)
        assert float(kl.detach().abs().max()) < 1e-9


def test_a_sample_does_not_depend_on_its_batch() -> None:
    """The same seeds alone, in pairs and together: the same noise to the bit, the same latents to
    rounding."""
    seeds = sample_seeds(0, 5, 1, range(4))
    *_, together = roll(seeds)
    pairs = torch.cat([roll(seeds[:2])[-1], roll(seeds[2:])[-1]])
    torch.testing.assert_close(together, pairs, rtol=1e-4, atol=1e-4)
    assert torch.equal(
        initial_latents(seeds, (5, 7), CPU)[2:], initial_latents(seeds[2:], (5, 7), CPU)
    )
    step = torch.tensor(3)
    assert torch.equal(
        philox_normal(seeds, step, (33,))[1], philox_normal(seeds[1:2], step, (33,))[0]
    )


def test_ode_is_the_euler_loop_of_diffusers() -> None:
    """The transformer driven by the published scheduler gives our ODE rollout."""
    seeds = sample_seeds(0, 0, 0, range(2))
    rows, _, _, policy, latents = roll(seeds, "ode")
    assert not rows.log_probs
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(sigmas=torch.linspace(1, 0, 7)[:-1].numpy())
    texts = embeddings(PROMPTS)
    text = [texts[prompt] for prompt in PROMPTS]
    x = initial_latents(seeds, LATENT_SHAPE, CPU)
    with torch.no_grad():
        for timestep in scheduler.timesteps:
            v = policy.velocity(x, policy.condition((timestep / 1000).expand(2), text))
            x = scheduler.step(v, timestep, x).prev_sample
    torch.testing.assert_close(latents, x, rtol=1e-4, atol=1e-5)


def test_only_trained_steps_are_stored() -> None:
    trained = list(itertools.product(range(2), [1, 2, 5]))
    rows = Trajectories(LATENT_SHAPE, trained, 6, CPU)
    x = [torch.randn(2, *LATENT_SHAPE) for _ in range(7)]
    for t in range(6):
        rows.record(
            slice(0, 2),
            t,
            x[t],
            x[t + 1],
            torch.full((2,), float(t)),
            lambda: pytest.fail("no velocity is kept"),
        )
    assert sorted(rows.states) == list(itertools.product(range(2), [1, 2, 3, 5, 6]))
    assert sorted(rows.log_probs) == trained
    assert not rows.velocities
    for (i, t), state in rows.states.items():
        assert state.dtype == torch.float32
        assert torch.equal(state, x[t][i])
    gathered = rows.next_states([(1, 5), (0, 2)])
    assert torch.equal(gathered, torch.stack([x[6][1], x[3][0]]))


def test_offloaded_trajectories_hold_the_same() -> None:
    seeds = sample_seeds(0, 0, 0, range(2))
    (here, *_, latents), (there, *_, same) = roll(seeds), roll(seeds, offload=True)
    assert torch.equal(latents, same)
    assert all(torch.equal(here.states[key], there.states[key]) for key in here.states)
    assert all(torch.equal(here.velocities[key], there.velocities[key]) for key in here.velocities)


def test_runs_never_mix_lengths() -> None:
    assert bucket_by_length([7, 7, 7, 9, 9, 4], 2) == [
        slice(0, 2),
        slice(2, 3),
        slice(3, 5),
        slice(5, 6),
    ]
    assert bucket_by_length([], 4) == []


def test_bfloat16_activations_keep_float32_latents() -> None:
    rows, *_, latents = roll(sample_seeds(0, 0, 0, range(2)), dtype=torch.bfloat16)
    assert latents.dtype == torch.float32
    assert all(v.dtype == torch.bfloat16 for v in rows.velocities.values())
    assert all(p.dtype == torch.float32 and p.isfinite().all() for p in rows.log_probs.values())
