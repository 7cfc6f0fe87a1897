"""Distilled checkpoints: a network that predicts the mean velocity of a step (MeanFlow), and what
suits one."""

import copy
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import HunyuanVideo15ImageToVideoPipeline
from PIL import Image
from sage_fast.benchmarks.stock import StockPolicy
from torch import Tensor

from sage_fast.algorithm.distilled import check_distilled
from sage_fast.algorithm.objective import Objective
from sage_fast.algorithm.resolved import ResolvedConfig
from sage_fast.algorithm.transitions import sigma_schedule, transition_table
from sage_fast.config.schema import Config
from sage_fast.data.prompts import Prompt
from sage_fast.loading import load_setup, resolve
from sage_fast.models.find import find_spec
from sage_fast.models.hunyuan15.lora_names import comfyui, original
from sage_fast.models.hunyuan15.policy import HunyuanVideo15Policy
from sage_fast.models.hunyuan15.spec import HunyuanVideo15
from sage_fast.models.spec import Distillation
from sage_fast.rewards import CompositeReward
from sage_fast.rollout.loop import initial_latents, rollout
from sage_fast.run.messages import config_warnings
from sage_fast.testbed.tiny_model import TestbedTransformer
from sage_fast.tools.dry_run import dry_run
from sage_fast.trainer import Trainer
from sage_fast.util.errors import UserError
from tests.tiny import CPU, BrightnessReward, embeddings, keys_of, settings
from tests.tiny_checkpoint import SHIFT, write_tiny_checkpoint

PROMPTS = ["a small red ball moves left quickly", "a big blue ball moves up slowly"]
KEYS = keys_of(PROMPTS)
SPACE = (32, 2, 3, 4)
PUBLISHED = "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_"
STEP_DISTILLED = Distillation(steps=(8, 12), mean_velocity=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"), seed=1, step_distilled=True)


def tiny(checkpoint: Path | str, **overrides: Any) -> Config:
    size = {"sampling__height": 48, "sampling__width": 64, "sampling__num_frames": 5}
    return settings(model__path=str(checkpoint), sampling__eta=0.2, **size, **overrides)


# -- the network -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("guidance_scale", "rounding"), [(1.0, 5e-7), (4.0, 2e-6)])
def test_an_ode_rollout_from_an_image_reproduces_the_pipeline(
    tmp_path: Path, guidance_scale: float, rounding: float
) -> None:
    """The task of the one published step-distilled checkpoint, and the one pipeline that tells the
    ends of steps."""
    folder = write_tiny_checkpoint(tmp_path / "model", seed=1, task="i2v", step_distilled=True)
    pipeline = HunyuanVideo15ImageToVideoPipeline.from_pretrained(folder, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.guider.guidance_scale = guidance_scale
    image = Image.effect_mandelbrot((64, 48), (-2, -1, 1, 1), 20).convert("RGB")
    image.save(tmp_path / "image.png")
    prompt = Prompt(text=PROMPTS[0], image=str(tmp_path / "image.png"))
    setup = load_setup(
        resolve(tiny(folder, sampling__guidance_scale=guidance_scale)), [prompt], rewards=False
    )
    setup.encode()
    policy, seeds, keys = setup.model.policy, torch.tensor([1]), setup.prompts
    table, latents = (
        transition_table(sigma_schedule(8, SHIFT), "ode", 0.0),
        initial_latents(seeds, SPACE, CPU),
    )
    conditioning = policy.conditioning_table(table.sigmas[:-1], setup.embeddings)
    ours = rollout(policy, table, table.coefficients(), conditioning, keys, seeds, latents)
    given = {
        "image": image,
        "prompt": PROMPTS[0],
        "negative_prompt": "",
        "num_frames": 5,
        "latents": latents,
    }
    exact = pipeline(**given, num_inference_steps=8, output_type="latent").frames
    assert (exact - latents).abs().max() > 0.5
    assert (ours - exact).norm() < rounding * exact.norm()


@pytest.fixture
def pair() -> tuple[StockPolicy, HunyuanVideo15Policy]:
    """The stock forward and ours, over copies of a transformer; all weights are trained."""
    torch.manual_seed(1)
    transformer = TestbedTransformer(use_meanflow=True).eval()
    stock, ours = (
        kind(copy.deepcopy(transformer), dtype=torch.float32)
        for kind in (StockPolicy, HunyuanVideo15Policy)
    )
    return stock, ours


def test_values_and_gradients(pair: tuple[StockPolicy, HunyuanVideo15Policy]) -> None:
    """The tables of both, trained: every step knows where it ends."""
    x = torch.randn(2, 32, 5, 4, 4)
    upstream, sigmas, steps = (
        torch.randn_like(x),
        torch.tensor([0.95, 0.6, 0.2]),
        torch.tensor([2, 0]),
    )
    found = []
    for policy in pair:
        v = policy.velocity(x, policy.conditioning_table(sigmas, embeddings(KEYS)).at(KEYS, steps))
        named = dict(policy.transformer.named_parameters())
        found.append(
            (
                v,
                dict(
                    zip(
                        named,
                        torch.autograd.grad(v, [*named.values()], upstream, allow_unused=True),
                    )
                ),
            )
        )
    (expected, exact), (actual, gradients) = found
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    for name, gradient in gradients.items():
        if gradient is not None and exact[name] is not None:
            assert (gradient - exact[name]).norm() <= 1e-4 * exact[name].norm() + 1e-6, name
    ends = [name for name in gradients if "timestep_embedder_r" in name]
    assert len(ends) == 4
    assert all(gradients[name] is not None and gradients[name].norm() > 0 for name in ends)


@torch.no_grad()
def test_the_table_knows_each_end(pair: tuple[StockPolicy, HunyuanVideo15Policy]) -> None:
    _, policy = pair
    sigmas, x, texts = (
        torch.tensor([0.95, 0.6, 0.2]),
        torch.randn(3, 32, 5, 4, 4),
        embeddings(KEYS),
    )
    prompts = [KEYS[0]] * 3
    table, ends = policy.conditioning_table(sigmas, texts), torch.tensor([0.6, 0.2, 0.0])
    for steps in ([1], [2, 0, 1]):
        fresh = table.trained(prompts, torch.tensor(steps))
        torch.testing.assert_close(
            policy.velocity(x, table.of(prompts).at(torch.tensor(steps))),
            policy.velocity(x, fresh),
            rtol=0,
            atol=1e-6,
        )
        by_hand, _ = policy.forward.modulation(
            1000 * sigmas[steps], torch.float32, 1000 * ends[steps]
        )
        torch.testing.assert_close(table.modulation[steps], by_hand, rtol=0, atol=1e-6)
    with pytest.raises(AssertionError):  # never without an end
        policy.forward.modulation(1000 * sigmas, torch.float32)


# -- training --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "overrides", [{}, {"model__tuning": "full", "train__optimizer_steps": 2}], ids=["lora", "full"]
)
def test_an_iteration(checkpoint: Path, overrides: dict[str, Any]) -> None:
    config = tiny(checkpoint, sampling__sampler="precise", sampling__sde_window=2, **overrides)
    setup = load_setup(resolve(config), PROMPTS, rewards=False)
    setup.encode()
    reward = CompositeReward(BrightnessReward(), config.reward)
    trainer = Trainer(setup.resolved, setup.model, reward, setup.prompts, setup.embeddings)
    embedder = trainer.policy.networks["transformer"].time_embed.timestep_embedder_r
    before = embedder.linear_1.weight.clone()
    row = trainer.iteration(0)
    assert row["grad_norm"] > 0
    assert row["log_prob/parity"] < 1e-4
    assert torch.equal(before, embedder.linear_1.weight) == (config.model.tuning == "lora")


@pytest.mark.parametrize(
    ("sampler", "eta", "of_velocity", "of_mean"),
    [
        ("ode", 0.0, 0.0849, 0.3000),
        ("precise", 0.2, 0.0848, 0.2999),
        ("precise", 0.7, 0.0845, 0.2984),
        ("sage", 0.2, 0.1179, 0.3104),
        ("sage", 0.5, 0.2238, 0.3598),
    ],
)
def test_a_step_of_the_mean_velocity(
    sampler: str, eta: float, of_velocity: float, of_mean: float
) -> None:
    """samplers.md: final std of data N(0, 0.3^2) in 8 steps, shift 7, along the exact velocity and
    its exact mean."""

    def width(s: float) -> float:
        return math.sqrt((1 - s) ** 2 * 0.09 + s**2)  # of x_s; the ODE keeps x_s / width(s)

    table = transition_table(sigma_schedule(8, 7.0), sampler, eta)
    rows = [
        row.tolist() for row in (table.sigmas[:-1], table.sigmas[1:], table.a, table.b, table.c)
    ]
    for takes_mean, std in ((False, of_velocity), (True, of_mean)):
        variance = 1.0
        for s, n, a, b, c in zip(*rows):
            mean, velocity = (
                (1 - width(n) / width(s)) / (s - n),
                (s - (1 - s) * 0.09) / width(s) ** 2,
            )
            variance = (a + b * (mean if takes_mean else velocity)) ** 2 * variance + c**2
        assert math.sqrt(variance) == pytest.approx(std, abs=5e-5)


# -- what suits it ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"objective__surrogate": "nft", "kl__velocity_term": "closed_form"},
            "objective.surrogate = 'nft': fits the velocity at one noise level.*the nearest choice "
            "is 'clip'",
        ),
        (
            {"objective__surrogate": "awm", "kl__strategy": "none", "sampling__sampler": "ode"},
            "objective.surrogate = 'awm'",
        ),
    ],
)
def test_methods_that_a_mean_velocity_rules_out(
    checkpoint: Path, overrides: dict[str, Any], message: str
) -> None:
    config = tiny(checkpoint, **overrides)
    with pytest.raises(UserError, match=message):
        load_setup(resolve(config), PROMPTS, rewards=False)
    objective = Objective(config)
    check_distilled(None, objective)
    check_distilled(Distillation(steps=(50,)), objective)


def any_prompt(videos: Tensor, prompts: list[str]) -> dict[str, Tensor]:
    """The mean of all pixels, which is a reward for prompts of any kind."""
    return {"mean": videos.mean(dim=(1, 2, 3, 4))}


def test_the_plan_refuses_and_warns(checkpoint: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a cat sings\na dog runs")
    of = {"data__prompts": str(prompts), "data__eval_prompts": str(prompts), "eval__steps": 12}
    of |= {"reward__name": f"{__name__}:any_prompt", "reward__weights": {"mean": 1.0}}
    planned = dry_run(tiny(checkpoint, sampling__steps=8, **of), 1, 80e9)
    assert "warning: sampling.steps = 8 and eval.steps = 12: a step-distilled model" in planned
    plain = dry_run(tiny("random:hunyuanvideo15-480p-4-blocks", **of), 1, 80e9)
    assert "step-distilled" not in plain
    assert "is distilled" not in plain
    with pytest.raises(UserError, match="surrogate = 'nft'"):
        dry_run(tiny(checkpoint, objective__surrogate="nft", kl__strategy="none", **of), 1, 80e9)


def warnings_of(distillation: Distillation | None, **overrides: Any) -> list[str]:
    suited = {
        "sampling__steps": 8,
        "eval__steps": 8,
        "sampling__sampler": "precise",
        "sampling__eta": 0.2,
    }
    long = {"train__iterations": 500}  # so that every setting acts
    return config_warnings(ResolvedConfig(settings(**suited | long | overrides)), distillation)


def test_settings_that_spoil_a_distilled_checkpoint_are_warned_of() -> None:
    assert warnings_of(STEP_DISTILLED) == []
    assert warnings_of(STEP_DISTILLED, sampling__steps=12, eval__steps=12) == []
    assert warnings_of(STEP_DISTILLED, sampling__sampler="ode", sampling__eta=0.5) == []
    assert warnings_of(None, sampling__eta=0.7, sampling__sampler="sage") == []
    (noisy,) = warnings_of(STEP_DISTILLED, sampling__eta=0.5)
    assert noisy.startswith("sampling.eta = 0.5: the checkpoint is distilled")
    assert noisy.endswith("expected at most 0.2")
    _, left = warnings_of(
        STEP_DISTILLED, sampling__eta=0.5, sampling__sampler="sage", sampling__shift=7.0
    )
    assert left == (
        "sampling.sampler = sage: with eta 0.5 and 8 steps it leaves noise of std 0.23 on the "
        "scored latent; precise leaves none"
    )
    many, other = warnings_of(STEP_DISTILLED, eval__steps=20)
    assert many == "eval.steps = 20: the checkpoint is distilled for 8 or 12 steps"
    assert other.startswith(
        "sampling.steps = 8 and eval.steps = 20: a step-distilled model learns the steps"
    )
    of_guidance = Distillation(steps=(50,))
    assert warnings_of(of_guidance, sampling__steps=50, eval__steps=50) == []
    (few,) = warnings_of(of_guidance, sampling__steps=20, eval__steps=50)
    assert few == "sampling.steps = 20: the checkpoint is distilled for 50 steps"


def test_weights_of_a_step_distilled_model_are_refused_by_one_that_does_not_say_it_is_none(
    checkpoint: Path, tmp_path: Path
) -> None:
    """As a config.json that is older than the key."""
    config = write_tiny_checkpoint(tmp_path / "plain", seed=1) / "transformer" / "config.json"
    config.write_text(
        re.sub(r'"use_meanflow": false,|,\s+"use_meanflow": false', "", config.read_text())
    )
    assert "use_meanflow" not in config.read_text()
    given = {"model__tuning": "full", "model__weights": str(checkpoint)}
    with pytest.raises(UserError, match=r"use_meanflow is True, model\.path has False"):
        load_setup(resolve(tiny(tmp_path / "plain", **given)), PROMPTS, rewards=False)


def test_a_checkpoint_says_what_it_is_distilled_to(checkpoint: Path, tmp_path: Path) -> None:
    plain = write_tiny_checkpoint(tmp_path / "plain", seed=1)
    assert find_spec(str(checkpoint)).distillation == STEP_DISTILLED
    assert find_spec(str(plain)).distillation is None
    (plain / "guider" / "guider_config.json").write_text(
        '{"_class_name": "ClassifierFreeGuidance", "enabled": false}'
    )
    assert find_spec(str(plain)).distillation == Distillation(steps=(50,))
    (plain / "guider" / "guider_config.json").unlink()
    assert find_spec(str(plain)).distillation is None
    by_name = [
        HunyuanVideo15(PUBLISHED + name).distillation
        for name in ("t2v", "t2v_distilled", "i2v_step_distilled")
    ]
    assert by_name == [None, Distillation(steps=(50,)), STEP_DISTILLED]


def test_a_lora_on_the_embedder_of_ends_has_a_name_elsewhere() -> None:
    layer = "time_embed.timestep_embedder_r.linear_2"
    assert original(layer).layer == "diffusion_model.time_r_in.mlp.2"
    assert comfyui(layer).layer == "diffusion_model.time_r_in.out_layer"
