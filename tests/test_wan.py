"""Wan over tiny checkpoints of the real classes: diffusers' own forward and pipeline are the
oracle."""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline
from safetensors.torch import load_file, save_file
from torch import Tensor

from sage_fast.algorithm.transitions import sigma_schedule, transition_table
from sage_fast.config.schema import ModelConfig, SamplingConfig
from sage_fast.models.attention import choose
from sage_fast.models.checkpointing import CheckpointPlan
from sage_fast.models.find import family_note, find_spec
from sage_fast.models.load import load_model
from sage_fast.models.model import Model
from sage_fast.models.trainable import meta_policy
from sage_fast.models.wan.conditioning import TEXT_TOKENS
from sage_fast.models.wan.spec import Wan
from sage_fast.rollout.loop import initial_latents, rollout
from sage_fast.util.captions import Caption, PromptKey
from sage_fast.util.errors import UserError
from tests.tiny import CPU
from tests.tiny_wan import SHIFT, SIZES, VAES, write_tiny_wan

PROMPTS = ["snow falls on a quiet village", "a red kite"]


class Euler(FlowMatchEulerDiscreteScheduler):
    """First-order steps at the noise levels of a run.

    The pipeline gives no levels, and the class's own are shifted twice.
    """

    def set_timesteps(self, num_inference_steps: int, device: Any = None) -> None:
        sigmas = torch.linspace(1, 0, num_inference_steps + 1)[:-1].tolist()
        super().set_timesteps(sigmas=sigmas, device=device)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Any:
    """Rounding then does not depend on the machine's cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=[*VAES])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wan") / request.param
    return write_tiny_wan(folder, request.param)


@pytest.fixture(scope="module")
def pipeline(checkpoint: Path) -> WanPipeline:
    pipeline = WanPipeline.from_pretrained(checkpoint, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.scheduler = Euler(shift=SHIFT)
    return pipeline


def sampling_of(checkpoint: Path, guidance_scale: float = 1.0) -> SamplingConfig:
    height, width = SIZES[checkpoint.name]
    return SamplingConfig(
        height=height, width=width, num_frames=9, shift=SHIFT, guidance_scale=guidance_scale
    )


def load(checkpoint: Path, guidance_scale: float = 1.0, **settings: Any) -> Model:
    """Load a model whose adapter has an effect."""
    given = {"dtype": "float32", "lora_rank": 4, "lora_alpha": 12, "gradient_checkpointing": "none"}
    config = ModelConfig(path=str(checkpoint), **given | settings)
    model = load_model(config, sampling_of(checkpoint, guidance_scale), CPU, seed=3)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, p in model.policy.named_parameters():
            if ".lora_B." in name:
                p.normal_(std=0.1, generator=generator)
    return model


def latents_of(model: Model, count: int = 2) -> Tensor:
    shape = model.spec.latent_shape(sampling_of(Path(model.spec.path)))
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(0))


def embedded(model: Model) -> dict[PromptKey, Any]:
    encode = model.load_encoder(sampling_of(Path(model.spec.path)))
    return {PromptKey(text): encode(Caption(text)) for text in ["", *PROMPTS]}


KEYS = [PromptKey(text) for text in PROMPTS]


def velocity_and_gradients(model: Model) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the guided velocity of two samples at two noise levels, and the gradients of all
    trained weights."""
    policy = model.policy
    table = policy.conditioning_table(torch.tensor([1.0, 0.8, 0.4]), embedded(model))
    x = latents_of(model)
    steps = torch.tensor([1, 2])
    v = policy.guided_velocity(x, table.at(KEYS, steps))
    upstream = torch.randn(v.shape, generator=torch.Generator().manual_seed(1))
    v.float().backward(upstream)
    gradients = {name: p.grad for name, p in policy.parameters().items() if p.grad is not None}
    return v.detach().float(), gradients


def stock_velocity(model: Model, pipeline: WanPipeline, guidance_scale: float) -> Tensor:
    """Return the same by diffusers' forward over the model's own network, differentiable."""
    network = model.policy.networks["transformer"]
    x = latents_of(model)
    timestep = 1000 * torch.tensor([0.8, 0.4])
    if pipeline.config.expand_timesteps:
        tokens = model.spec.tokens(x.shape[1:])
        timestep = timestep[:, None].expand(-1, tokens)
    passes = []
    for texts in (PROMPTS, ["", ""])[: 1 if guidance_scale == 1 else 2]:
        with torch.no_grad():
            rows, _ = pipeline.encode_prompt(
                texts, do_classifier_free_guidance=False, max_sequence_length=512
            )
        passes.append(network(x, timestep, rows, return_dict=False)[0])
    if len(passes) == 1:
        return passes[0]
    conditional, unconditional = passes
    return unconditional + guidance_scale * (conditional - unconditional)


@pytest.mark.parametrize("guidance_scale", [1.0, 3.0])
@pytest.mark.parametrize("tuning", ["lora", "full"])
def test_values_and_gradients_are_those_of_diffusers(
    checkpoint: Path, pipeline: WanPipeline, tuning: str, guidance_scale: float
) -> None:
    model = load(checkpoint, guidance_scale, tuning=tuning)
    v, gradients = velocity_and_gradients(model)
    parameters = model.policy.parameters()
    for p in parameters.values():
        p.grad = None
    stock = stock_velocity(model, pipeline, guidance_scale)
    assert stock.abs().max() > 0.1
    torch.testing.assert_close(v, stock.detach(), rtol=1e-5, atol=2e-5)
    upstream = torch.randn(v.shape, generator=torch.Generator().manual_seed(1))
    stock.backward(upstream)
    exact = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    assert gradients.keys() == exact.keys() == parameters.keys()
    for name, gradient in exact.items():
        assert (gradients[name] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-6, name


def test_text_and_noise_level_act(checkpoint: Path) -> None:
    """So that the comparisons above can fail."""
    model = load(checkpoint)
    table = model.policy.conditioning_table(torch.tensor([1.0, 0.4]), embedded(model))
    x = latents_of(model)
    with torch.no_grad():
        v, other_time, other_text = (
            model.policy.velocity(x, table.of(keys).at(torch.tensor([step])))
            for keys, step in ((KEYS, 0), (KEYS, 1), (KEYS[::-1], 0))
        )
    assert (v - other_time).abs().max() > 0.01
    assert (v - other_text).abs().max() > 0.01


@pytest.mark.parametrize("tuning", ["lora", "full"])
def test_bfloat16_stays_near_float32(checkpoint: Path, tuning: str) -> None:
    exact, _ = velocity_and_gradients(load(checkpoint, 3.0, tuning=tuning))
    rounded, gradients = velocity_and_gradients(
        load(checkpoint, 3.0, tuning=tuning, dtype="bfloat16")
    )
    assert (rounded - exact).norm() < 0.02 * exact.norm()
    assert all(gradient.isfinite().all() for gradient in gradients.values())


def test_what_diffusers_keeps_in_float32_stays_so(checkpoint: Path) -> None:
    """The embedder of timesteps and the tables of AdaLN; the rest runs in bfloat16, and not under
    autocast, which would round both."""
    model = load(checkpoint, dtype="bfloat16")
    network = model.policy.networks["transformer"]
    assert network.blocks[0].scale_shift_table.dtype == torch.float32
    assert network.condition_embedder.time_embedder.linear_1.weight.dtype == torch.float32
    assert network.blocks[0].attn1.to_out[0].weight.dtype == torch.bfloat16
    sigmas = torch.tensor([0.9987654, 0.5])
    exact, _ = load(checkpoint).policy.modulation(sigmas)
    modulation, final = model.policy.modulation(sigmas)
    assert modulation.dtype == final.dtype == torch.float32
    assert (modulation - exact).norm() < 0.01 * exact.norm()
    assert not model.policy._autocast()._enabled


@pytest.mark.parametrize("tuning", ["lora", "full"])
@pytest.mark.parametrize("mode", ["attention", "full"])
def test_checkpointing_changes_no_bit(checkpoint: Path, tuning: str, mode: str) -> None:
    plain, checkpointed = (load(checkpoint, 3.0, tuning=tuning) for _ in range(2))
    checkpointed.set_checkpointing(CheckpointPlan(mode))
    expected = velocity_and_gradients(plain)
    actual = velocity_and_gradients(checkpointed)
    assert torch.equal(actual[0], expected[0])
    for name, gradient in expected[1].items():
        assert torch.equal(actual[1][name], gradient), name


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("mode", ["none", "attention", "full"])
def test_streamed_blocks_change_no_bit(checkpoint: Path, mode: str, count: int) -> None:
    settings = ModelConfig(path=str(checkpoint), dtype="float32", lora_rank=4, lora_alpha=12)
    sampling = sampling_of(checkpoint, 3.0)
    found = []
    for streamed in (0, count):
        model = load_model(settings, sampling, CPU, seed=3, streamed=streamed)
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for name, p in model.policy.parameters().items():
                if ".lora_B." in name:
                    p.normal_(std=0.1, generator=generator)
        model.set_checkpointing(CheckpointPlan(mode))
        found.append(velocity_and_gradients(model))
    (v, gradients), (streamed_v, streamed_gradients) = found
    assert torch.equal(streamed_v, v)
    for name, gradient in gradients.items():
        assert torch.equal(streamed_gradients[name], gradient), name


def test_a_sample_comes_out_the_same_alone_and_in_a_batch(checkpoint: Path) -> None:
    model = load(checkpoint, 3.0)
    known = embedded(model)
    table = transition_table(sigma_schedule(3, SHIFT), "sage", 0.7)
    conditions = model.policy.conditioning_table(table.sigmas[:-1], known)
    x, seeds = latents_of(model), torch.arange(2)
    given = model.policy, table, table.coefficients(), conditions
    both = rollout(*given, KEYS, seeds, x)
    alone = rollout(*given, KEYS[1:], seeds[1:], x[1:])
    torch.testing.assert_close(both[1:], alone, rtol=1e-4, atol=1e-5)
    other = rollout(*given, KEYS[:1], seeds[1:], x[1:])
    assert not torch.allclose(both[1:], other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("guidance_scale", [1.0, 5.0])
def test_an_ode_rollout_is_the_pipeline_at_every_step(
    checkpoint: Path, pipeline: WanPipeline, guidance_scale: float
) -> None:
    model, steps = load(checkpoint, guidance_scale), 4
    adapter = {n: p for n, p in model.policy.parameters().items() if ".lora_B." in n}
    with torch.no_grad():
        for p in adapter.values():
            p.zero_()
    shape = model.spec.latent_shape(sampling_of(checkpoint))
    seeds = torch.tensor([1, 2])
    latents = initial_latents(seeds, shape, CPU)
    table = transition_table(sigma_schedule(steps, SHIFT), "ode", 0.0)
    conditions = model.policy.conditioning_table(table.sigmas[:-1], embedded(model))
    theirs = []

    def keep(_: Any, step: int, timestep: Tensor, given: dict[str, Any]) -> dict[str, Any]:
        torch.testing.assert_close(timestep, 1000 * table.sigmas[step].float())
        theirs.append(given["latents"])
        return {}

    height, width = SIZES[checkpoint.name]
    pipeline(
        PROMPTS,
        ["", ""],
        height=height,
        width=width,
        num_frames=9,
        num_inference_steps=steps,
        guidance_scale=guidance_scale,
        latents=latents,
        output_type="latent",
        callback_on_step_end=keep,
    )
    coefs = table.coefficients()
    x = latents
    for step in range(steps):
        at = conditions.of(KEYS).at(torch.tensor([step]))
        with torch.no_grad():
            v = model.policy.guided_velocity(x, at)
        x = x + (table.sigmas[step + 1] - table.sigmas[step]).float() * v
        torch.testing.assert_close(x, theirs[step], rtol=2e-5, atol=2e-5)
    ours = rollout(model.policy, table, coefs, conditions, KEYS, seeds, latents)
    torch.testing.assert_close(ours, theirs[-1], rtol=2e-5, atol=2e-5)


def test_embeddings_are_those_of_the_pipeline(checkpoint: Path, pipeline: WanPipeline) -> None:
    model = load(checkpoint)
    encode = model.load_encoder(sampling_of(checkpoint))
    for text in ["", *PROMPTS, "  spaces   and &amp; marks "]:
        condition = encode(Caption(text))
        rows, _ = pipeline.encode_prompt(
            text, do_classifier_free_guidance=False, max_sequence_length=TEXT_TOKENS
        )
        count = len(condition.text)
        torch.testing.assert_close(condition.text, rows[0, :count])
        assert not rows[0, count:].any()
        assert rows[0, count - 1].any()
        assert condition.tokens == TEXT_TOKENS
    long = encode(Caption("otter " * 600))
    assert len(long.text) == TEXT_TOKENS
    assert f"tokens; {TEXT_TOKENS} are read" in long.notes[0]


def test_videos_are_those_of_the_pipeline(checkpoint: Path, pipeline: WanPipeline) -> None:
    model = load(checkpoint)
    latents = latents_of(model)
    videos = model.decoder(latents)
    height, width = SIZES[checkpoint.name]
    assert videos.shape == (2, 9, 3, height, width)
    assert videos.dtype == torch.float32
    config = pipeline.vae.config
    mean, std = (
        torch.tensor(config[key]).view(1, -1, 1, 1, 1) for key in ("latents_mean", "latents_std")
    )
    with torch.no_grad():
        stock = pipeline.vae.decode(latents * std + mean, return_dict=False)[0]
    expected = pipeline.video_processor.postprocess_video(stock, output_type="pt")
    torch.testing.assert_close(videos, expected, rtol=0, atol=1e-5)
    assert videos.std() > 0.01


def test_the_stock_forward_still_works(checkpoint: Path, pipeline: WanPipeline) -> None:
    model = load(checkpoint)
    network = model.policy.networks["transformer"]
    with torch.no_grad():
        before = stock_velocity(model, pipeline, 1.0)
        model.policy.refresh()  # joins the weights with their adapters
        torch.testing.assert_close(stock_velocity(model, pipeline, 1.0), before)
    assert not any("forward" in vars(module) for module in network.modules())
    copy.deepcopy(network)


@pytest.mark.parametrize(
    ("path", "weights", "tokens", "size"),
    [
        ("Wan-AI/Wan2.2-TI2V-5B-Diffusers", 4_999_787_712, 27_280, (704, 1280, 121)),
        ("Wan-AI/Wan2.1-T2V-1.3B-Diffusers", 1_418_996_800, 32_760, (480, 832, 81)),
        ("Wan-AI/Wan2.1-T2V-14B-Diffusers", 14_288_491_584, 32_760, (480, 832, 81)),
    ],
)
def test_the_published_models(
    path: str, weights: int, tokens: int, size: tuple[int, int, int]
) -> None:
    spec = find_spec(path)
    height, width, frames = size
    sampling = SamplingConfig(height=height, width=width, num_frames=frames)
    assert spec.tokens(spec.latent_shape(sampling)) == tokens
    policy = meta_policy(spec, ModelConfig(path=path))
    found = sum(p.numel() for name, p in policy.named_parameters() if ".lora_" not in name)
    assert found == weights
    assert spec.fps == (24 if "2.2" in path else 16)


@pytest.mark.parametrize(
    "path",
    [
        "Wan-AI/Wan2.2-T2V-A14B-Diffusers",
        "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers",
        "Wan-AI/Wan2.1-VACE-1.3B-diffusers",
    ],
)
def test_a_hub_id_of_another_task_is_not_planned(path: str) -> None:
    with pytest.raises(UserError, match=r"by its name.*such as Wan-AI/Wan2.2-TI2V-5B-Diffusers"):
        find_spec(path)


def test_sizes_that_no_name_tells_are_said_to_be_assumed() -> None:
    assert family_note(find_spec(Wan.published)) == ""
    assert "its sizes are assumed" in family_note(find_spec("someone/wan2.1-anime"))
    assert find_spec("someone/Taiwan2.1-video").title != Wan.title


@pytest.mark.parametrize("kept", [[], ["tokenizer_config.json"]])
def test_a_tokenizer_without_its_files_is_refused(tmp_path: Path, kept: list[str]) -> None:
    """transformers would make one that reads every word as unknown."""
    folder = write_tiny_wan(tmp_path / "wan")
    for file in (folder / "tokenizer").iterdir():
        if file.name not in kept:
            file.unlink()
    changed(folder, "text_encoder", vocab_size=300)
    weights = folder / "text_encoder" / "model.safetensors"
    tensors = load_file(weights)
    tensors["shared.weight"] = torch.randn(300, tensors["shared.weight"].shape[1])
    save_file(tensors, weights, {"format": "pt"})
    spec = find_spec(str(folder))
    with pytest.raises(UserError, match="tokenizer"):
        spec.load_encoder(torch.float32, CPU, SamplingConfig())


def changed(folder: Path, part: str, **values: Any) -> None:
    file = folder / part / "config.json" if part else folder / "model_index.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: changed(folder, "transformer", image_dim=1280), "image_dim 1280"),
        (lambda folder: changed(folder, "transformer", in_channels=36), "in_channels 36"),
        (lambda folder: changed(folder, "transformer", cross_attn_norm=False), "cross_attn_norm"),
        (lambda folder: changed(folder, "", boundary_ratio=0.9), "A14B"),
        (
            lambda folder: changed(
                folder, "", transformer_2=["diffusers", "WanTransformer3DModel"]
            ),
            "A14B",
        ),
        (lambda folder: changed(folder, "transformer", in_channels=8, out_channels=8), "its vae"),
        (lambda folder: changed(folder, "", _class_name="WanImageToVideoPipeline"), "WanImageTo"),
        (lambda folder: changed(folder, "vae", scale_factor_spatial=0), "scale_factor_spatial = 0"),
        (lambda folder: changed(folder, "vae", latents_mean=[0.0]), "expected 16 numbers"),
    ],
)
def test_checkpoints_of_another_task_are_refused(
    tmp_path: Path, change: Callable[[Path], None], message: str
) -> None:
    folder = write_tiny_wan(tmp_path / "wan")
    find_spec(str(folder))
    change(folder)
    with pytest.raises(UserError, match=message):
        find_spec(str(folder))


def test_sizes_that_a_model_cannot_have_name_the_nearest(checkpoint: Path) -> None:
    spec = find_spec(str(checkpoint))
    sampling = dataclasses.replace(sampling_of(checkpoint), height=720, width=1280)
    if checkpoint.name == "2.1":
        assert spec.latent_shape(sampling)[2:] == (90, 160)
    else:
        with pytest.raises(UserError, match=r"sampling.height = 720.*multiple of 32.*704"):
            spec.latent_shape(sampling)


def test_the_attention_kernel_is_tried_for_the_text_too(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(choose, "measure_attention", lambda uses, *_: seen.extend(uses) or {})
    monkeypatch.setattr(choose, "sequence_size", lambda: 2)
    model = load(checkpoint)
    tokens = model.spec.tokens(model.spec.latent_shape(sampling_of(checkpoint)))
    shapes = [(use.shape[1:], use.keys) for use in seen]
    assert shapes == [((tokens, 1, 24), None), ((-(-tokens // 2), 2, 24), TEXT_TOKENS)]


def test_another_shift_than_the_checkpoints_is_said(checkpoint: Path, tmp_path: Path) -> None:
    spec = find_spec(str(checkpoint))
    (euler,) = spec.notes(sampling_of(checkpoint))
    assert "UniPCMultistepScheduler" in euler
    notes = spec.notes(dataclasses.replace(sampling_of(checkpoint), shift=3.0))
    assert "sampling.shift = 3, and the checkpoint's scheduler has 5.0" in notes
    bare = shutil.copytree(checkpoint, tmp_path / "bare")
    shutil.rmtree(bare / "scheduler")
    (note,) = find_spec(str(bare)).notes(sampling_of(checkpoint))
    assert "lacks scheduler/" in note
