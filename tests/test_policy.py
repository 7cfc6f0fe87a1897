"""The policy against diffusers' own pipeline, on a tiny checkpoint of the published classes."""

import dataclasses
import errno
import json
import logging
import os
import shutil
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from diffusers import HunyuanVideo15Pipeline, HunyuanVideo15Transformer3DModel
from safetensors.torch import load_file, save_file
from torch import Tensor

from sage_fast.algorithm.transitions import sigma_schedule, transition_table
from sage_fast.config.schema import ModelConfig, SamplingConfig
from sage_fast.data.embeddings import encode_cached
from sage_fast.models.attention.backends import ATTENTION
from sage_fast.models.checkpointing import CheckpointPlan
from sage_fast.models.find import find_spec
from sage_fast.models.hunyuan15.conditioning import TextEmbedding
from sage_fast.models.hunyuan15.policy import HunyuanVideo15Policy, freeze_dead_ends
from sage_fast.models.hunyuan15.spec import HunyuanVideo15
from sage_fast.models.load import load_model
from sage_fast.models.lora.adapter import LORA_FILE, add_lora, load_lora
from sage_fast.models.model import Model
from sage_fast.models.trainable import make_trainable
from sage_fast.rollout.loop import initial_latents, rollout
from sage_fast.run.weights import save_weights
from sage_fast.util.captions import Caption, PromptKey
from sage_fast.util.errors import UserError
from tests.tiny import captions, keys_of
from tests.tiny_checkpoint import (
    GUIDANCE_SCALE,
    IMAGE_DIM,
    SHIFT,
    tiny_transformer,
    write_tiny_checkpoint,
)

CPU = torch.device("cpu")
SPACE = (32, 2, 3, 4)
PLAIN = "the cat sings"
QUOTED = 'a sign that says "the END" and “bye”'
LONG = (
    "a red bird is flying over the sea, and the sea is blue, and the wind is rising in the evening"
)
# float32 sums in another order (padded or not) differ by a few ulp of 1
ROUNDING = {"rtol": 2e-5, "atol": 2e-6}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"), seed=1)


@pytest.fixture(scope="module")
def pipeline(checkpoint: Path) -> HunyuanVideo15Pipeline:
    pipeline = HunyuanVideo15Pipeline.from_pretrained(checkpoint, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def load(checkpoint: Path | str, guidance_scale: float = 1.0, **settings: object) -> Model:
    settings = {
        "dtype": "float32",
        "lora_rank": 4,
        "lora_alpha": 12,
        "gradient_checkpointing": "none",
    } | settings
    config = ModelConfig(path=str(checkpoint), **settings)  # type: ignore[arg-type]
    return load_model(config, SamplingConfig(guidance_scale=guidance_scale), CPU, seed=3)


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Model:
    """LoRA in float32, as loaded; tests that train or change a model load their own."""
    return load(checkpoint)


@pytest.fixture(scope="module")
def embeddings(model: Model) -> dict[str, TextEmbedding]:
    encode = model.load_encoder(SamplingConfig())
    return {prompt: encode(Caption(prompt)) for prompt in ("", PLAIN, QUOTED, LONG)}


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def velocity(
    policy: HunyuanVideo15Policy, x: Tensor, sigma: Tensor, texts: Sequence[TextEmbedding]
) -> Tensor:
    """Return the velocity of each sample alone, since a batch has prompts of one length."""
    samples = zip(x.split(1), sigma.split(1), texts, strict=True)
    return torch.cat(
        [policy.velocity(x, policy.condition(sigma, [text])) for x, sigma, text in samples]
    )


def perturb_adapter(policy: HunyuanVideo15Policy) -> None:
    """Give the up-projections values; zeros would hide everything below them."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, p in policy.transformer.named_parameters():
            if ".lora_B." in name:
                p.normal_(std=0.1, generator=generator)


# -- loading ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tuning", ["lora", "full"])
def test_load_model_stores_weights_as_the_tuning_needs_them(
    checkpoint: Path, embeddings: dict[str, TextEmbedding], tuning: str, dtype: str
) -> None:
    model = load(checkpoint, tuning=tuning, dtype=dtype)
    policy, activations = model.policy, getattr(torch, dtype)
    assert not policy.transformer.training
    assert not model.decoder.vae.training
    assert {p.dtype for p in policy.parameters().values()} == {torch.float32}
    frozen = {p.dtype for p in policy.transformer.parameters() if not p.requires_grad}
    base = torch.float32 if tuning == "full" else activations
    assert base in frozen
    assert frozen <= {base, torch.float32}  # float32: adapters of the dead ends
    assert not any(p.requires_grad for p in model.decoder.vae.parameters())
    text = [embeddings[PLAIN], embeddings[QUOTED]]
    v = velocity(policy, noise(2, *SPACE), torch.tensor([0.9, 0.3]), text)
    assert v.shape == (2, *SPACE)
    assert v.dtype == activations
    assert v.isfinite().all()


def test_bfloat16_stays_near_float32(
    checkpoint: Path, model: Model, embeddings: dict[str, TextEmbedding]
) -> None:
    x, sigma = noise(1, *SPACE), torch.tensor([0.7])
    exact = velocity(model.policy, x, sigma, [embeddings[QUOTED]])
    for tuning in ("lora", "full"):
        policy = load(checkpoint, tuning=tuning, dtype="bfloat16").policy
        v = velocity(policy, x, sigma, [embeddings[QUOTED]]).float()
        assert 0 < (v - exact).norm() / exact.norm() < 0.03


def changed(checkpoint: Path, folder: Path, part: str, **values: object) -> Path:
    """Copy the checkpoint with other values in the configuration of a part."""
    copy = shutil.copytree(checkpoint, folder / "copy", copy_function=os.link)
    (file,) = (copy / part).glob("*config.json")
    text = json.loads(file.read_text()) | values
    file.unlink()  # a link to the original
    file.write_text(json.dumps(text))
    return copy


def test_checkpoints_of_another_task_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    """The error names the task, in a dry run too."""
    other = changed(checkpoint, tmp_path, "transformer", task_type="sr")
    message = "its transformer has task_type = 'sr'; expected 't2v' or 'i2v'"
    with pytest.raises(UserError, match=message):
        find_spec(str(other))
    with pytest.raises(UserError, match=message):
        load(other)


def test_a_checkpoint_of_the_hub_is_refused_likewise(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task is known only once the checkpoint is read."""
    other = changed(checkpoint, tmp_path, "transformer", task_type="sr")
    monkeypatch.setattr("sage_fast.models.find.reachable", lambda path: str(other))
    with pytest.raises(
        UserError, match=r"model.path = 'owner/name': its transformer has task_type = 'sr'"
    ):
        load("owner/name")


def test_another_shift_or_guidance_than_the_checkpoints_is_said(
    checkpoint: Path, tmp_path: Path
) -> None:
    # the published 480p pipeline
    assert load(checkpoint, guidance_scale=GUIDANCE_SCALE).notes == []
    assert load(checkpoint).notes == [
        "sampling.guidance_scale = 1, and the checkpoint's guider has 6"
    ]
    other = changed(checkpoint, tmp_path, "scheduler", shift=9.0)
    assert load(other, guidance_scale=GUIDANCE_SCALE).notes == [
        "sampling.shift = 5, and the checkpoint's scheduler has shift 9"
    ]
    (other / "guider" / "guider_config.json").unlink()
    assert load(other).notes == [
        "the checkpoint lacks scheduler/ or guider/: sampling.shift and sampling.guidance_scale "
        "are not compared"
    ]


def test_a_distilled_checkpoint_is_not_guided_unknowingly(checkpoint: Path, tmp_path: Path) -> None:
    other = changed(checkpoint, tmp_path, "guider", enabled=False)
    assert load(other).notes == []
    (note,) = load(other, guidance_scale=6.0).notes
    assert note.endswith("and the checkpoint's guider has 1 (off: a model distilled from guidance)")


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (107, "begins the prompt at token 107, .* words of the prompt would be lost"),
        (110, "system message would be left"),
    ],
)
def test_a_crop_that_does_not_end_at_the_prompt_is_refused(
    checkpoint: Path, tmp_path: Path, tokens: int, message: str
) -> None:
    other = shutil.copytree(checkpoint, tmp_path / "copy", copy_function=os.link)
    template = (other / "tokenizer" / "chat_template.jinja").read_text()
    assert template.count(" * 108 ") == 1
    (other / "tokenizer" / "chat_template.jinja").unlink()
    (other / "tokenizer" / "chat_template.jinja").write_text(
        template.replace(" * 108 ", f" * {tokens} ")
    )
    with pytest.raises(UserError, match=message):
        load(other).load_encoder(SamplingConfig())


def test_loading_and_saving_say_nothing(
    checkpoint: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING):
        warnings.simplefilter("error")
        model = load(checkpoint, dtype="bfloat16")
        model.load_encoder(SamplingConfig())(Caption(QUOTED))
        save_weights(model.policy, tmp_path)
        load(checkpoint, dtype="bfloat16", weights=str(tmp_path))
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""
    assert not caplog.records


def test_latent_shape_and_decode_equal_the_pipeline(
    checkpoint: Path, pipeline: HunyuanVideo15Pipeline, model: Model
) -> None:
    sampling = SamplingConfig(num_frames=5, height=48, width=64)
    assert model.spec.latent_shape(sampling) == SPACE
    latents = noise(2, *SPACE)
    videos = model.decoder(latents)
    assert videos.shape == (2, 5, 3, 48, 64)
    assert videos.dtype == torch.float32
    assert 0 <= videos.min() < 0.4
    assert 0.6 < videos.max() <= 1
    for latent, video in zip(latents, videos):  # the stock autoencoder takes one video at a time
        scaled = latent[None] / pipeline.vae.config.scaling_factor
        with torch.no_grad():
            stock = pipeline.vae.decode(scaled, return_dict=False)[0]
        torch.testing.assert_close(
            video[None],
            pipeline.video_processor.postprocess_video(stock, output_type="pt"),
            rtol=0,
            atol=1e-5,
        )


# -- text ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["", PLAIN, QUOTED])
def test_embeddings_are_the_valid_tokens_of_the_pipeline(
    pipeline: HunyuanVideo15Pipeline, embeddings: dict[str, TextEmbedding], prompt: str
) -> None:
    text, text_mask, glyphs, glyphs_mask = pipeline.encode_prompt(prompt, device=CPU)
    assert text.shape[1] == 1000
    assert glyphs.shape[1] == 256
    embedding = embeddings[prompt]
    torch.testing.assert_close(embedding.text, text[0][text_mask[0] == 1], **ROUNDING)
    torch.testing.assert_close(embedding.glyphs, glyphs[0][glyphs_mask[0] == 1], **ROUNDING)
    # cropping the system message loses no token: the prompt, end of message, start of answer
    assert len(embedding.text) == len(pipeline.tokenizer(prompt or " ").input_ids) + 2
    # ByT5 reads `Text "the END". Text "bye". ` byte by byte, then the end of sequence
    assert len(embedding.glyphs) == (
        len('Text "the END". Text "bye". ') + 1 if prompt == QUOTED else 0
    )


@torch.no_grad()
def test_prompts_of_one_length_share_a_batch_whatever_they_quote(
    model: Model, embeddings: dict[str, TextEmbedding]
) -> None:
    """One has fewer tokens of text and as many more of glyphs."""
    text, glyphs = embeddings[QUOTED].text, embeddings[QUOTED].glyphs
    texts = [TextEmbedding(text=text[:n], glyphs=glyphs[: 10 - n]) for n in (4, 7)]
    x, sigma = noise(2, *SPACE), torch.tensor([0.8, 0.2])
    alone = velocity(model.policy, x, sigma, texts)
    assert (alone - velocity(model.policy, x, sigma, texts[::-1])).abs().max() > 0.01
    torch.testing.assert_close(
        model.policy.velocity(x, model.policy.condition(sigma, texts)), alone, **ROUNDING
    )
    table = model.policy.conditioning_table(torch.tensor([0.8, 0.2]), dict(enumerate(texts)))
    torch.testing.assert_close(
        model.policy.velocity(x, table.at([0, 1], torch.tensor([0, 1]))), alone, **ROUNDING
    )


def test_cache_is_read_without_the_encoders(
    tmp_path: Path, embeddings: dict[str, TextEmbedding]
) -> None:
    calls = []

    def factory():
        calls.append("load")
        return lambda caption: calls.append(caption.text) or embeddings[caption.text]

    def check(found: dict[PromptKey, TextEmbedding]) -> None:
        assert list(found) == keys_of([PLAIN, QUOTED])
        for key, read in found.items():
            made = embeddings[key.text]
            torch.testing.assert_close(read.text, made.text, rtol=0, atol=0)
            torch.testing.assert_close(read.glyphs, made.glyphs, rtol=0, atol=0)

    found = encode_cached(captions(PLAIN, QUOTED, PLAIN), factory, tmp_path, "m", TextEmbedding)
    check(found)
    maps = Path(
        "/proc/self/maps"
    ).read_text()  # mapped into memory, so that the ranks of a node share it
    assert all(str(file) in maps for file in tmp_path.iterdir())
    assert calls == ["load", PLAIN, QUOTED]
    check(encode_cached(captions(PLAIN, QUOTED), factory, tmp_path, "m", TextEmbedding))
    assert calls == ["load", PLAIN, QUOTED]
    files = sorted(tmp_path.iterdir())
    assert [file.suffix for file in files] == [".safetensors"] * 2
    files[0].write_bytes(files[0].read_bytes()[:-7])  # a truncated copy
    check(encode_cached(captions(PLAIN, QUOTED), factory, tmp_path, "m", TextEmbedding))
    assert calls[3] == "load"
    assert len(calls) == 5
    encode_cached(captions(PLAIN), factory, tmp_path, "another model", TextEmbedding)
    assert calls[5:] == ["load", PLAIN]


def flip(bit: int) -> Callable[[Path, Path], None]:
    def damage(file: Path, other: Path) -> None:
        content = bytearray(file.read_bytes())
        content[-1 - bit // 8] ^= 1 << bit % 8
        file.write_bytes(content)

    return damage


def without_checksum(file: Path, other: Path) -> None:
    """As an earlier version has written it."""
    save_file(load_file(file), file)


@pytest.mark.parametrize(
    "damage",
    [
        *map(flip, (0, 7, 100, 1001)),
        lambda file, other: shutil.copyfile(other, file),
        without_checksum,
    ],
    ids=["bit 0", "bit 7", "bit 100", "bit 1001", "another prompt's file", "without checksum"],
)
def test_an_embedding_that_is_not_that_of_its_prompt_is_encoded_again(
    damage: Callable[[Path, Path], None], tmp_path: Path, embeddings: dict[str, TextEmbedding],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    def encode() -> dict[PromptKey, TextEmbedding]:
        return encode_cached(
            captions(PLAIN, QUOTED),
            lambda: lambda read: embeddings[read.text],
            tmp_path,
            "m",
            TextEmbedding,
        )

    encode()
    sound = {file: file.read_bytes() for file in tmp_path.iterdir()}
    damage(*sorted(sound))
    caplog.set_level("INFO")
    caplog.clear()
    assert torch.equal(encode()[PromptKey(PLAIN)].text, embeddings[PLAIN].text)
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == sound
    [line] = caplog.messages
    assert f"{sorted(sound)[0].name}" in line
    encode()
    assert len(caplog.messages) == 1


def test_interrupted_encoding_leaves_whole_files_alone(
    tmp_path: Path, embeddings: dict[str, TextEmbedding], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = iter(range(4))

    def full_disk(descriptor: int) -> None:
        if next(calls) == 2:  # after the first file and its folder
            raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr("sage_fast.util.files.os.fsync", full_disk)
    with pytest.raises(OSError, match="no space left"):
        encode_cached(
            captions(PLAIN, QUOTED),
            lambda: lambda read: embeddings[read.text],
            tmp_path,
            "m",
            TextEmbedding,
        )
    assert [file.suffix for file in tmp_path.iterdir()] == [".safetensors"]


# -- velocity --------------------------------------------------------------------------------------


@torch.no_grad()
def stock_velocity(
    pipeline: HunyuanVideo15Pipeline, x: Tensor, sigma: Tensor, prompts: list[str]
) -> Tensor:
    """Call the stock transformer as the stock pipeline does: 1000 + 256 + 729 tokens and their
    masks."""
    text, text_mask, glyphs, glyphs_mask = pipeline.encode_prompt(
        prompts, device=CPU, batch_size=len(prompts)
    )
    return pipeline.transformer(
        hidden_states=torch.cat([x, torch.zeros_like(x), torch.zeros_like(x[:, :1])], dim=1),
        timestep=1000 * sigma,
        encoder_hidden_states=text,
        encoder_attention_mask=text_mask,
        encoder_hidden_states_2=glyphs,
        encoder_attention_mask_2=glyphs_mask,
        image_embeds=torch.zeros(len(x), 729, IMAGE_DIM),
        return_dict=False,
    )[0]


@pytest.mark.parametrize(
    "prompts", [[PLAIN], [QUOTED], [PLAIN, QUOTED, LONG]], ids=["plain", "glyphs", "mixed lengths"]
)
def test_velocity_without_padding_equals_the_padded_stock_forward(
    pipeline: HunyuanVideo15Pipeline,
    model: Model,
    embeddings: dict[str, TextEmbedding],
    prompts: list[str],
) -> None:
    x, sigma = noise(len(prompts), *SPACE), torch.tensor([0.9876543, 0.5, 0.01])[: len(prompts)]
    with torch.no_grad():
        v = velocity(model.policy, x, sigma, [embeddings[prompt] for prompt in prompts])
        other = velocity(model.policy, x, sigma, [embeddings[""]] * len(prompts))
    assert (v - other).abs().max() > 0.01  # the text matters, so the next line can fail
    torch.testing.assert_close(v, stock_velocity(pipeline, x, sigma, prompts), **ROUNDING)


def test_timestep_stays_float32_in_a_bfloat16_model(
    checkpoint: Path, embeddings: dict[str, TextEmbedding]
) -> None:
    policy = load(checkpoint, dtype="bfloat16").policy
    time_embed = policy.transformer.time_embed
    sigma = torch.tensor([0.9987654])
    rounded = (1000 * sigma).bfloat16()
    assert abs(rounded.float() - 1000 * sigma) > 1  # 998.77 becomes 1000
    seen: list[Tensor] = []
    hooks = [
        time_embed.time_proj.register_forward_hook(lambda module, args, out: seen.append(args[0])),
        time_embed.timestep_embedder.register_forward_hook(
            lambda module, args, out: seen.append(out)
        ),
    ]
    velocity(policy, noise(1, *SPACE), sigma, [embeddings[PLAIN]])
    for hook in hooks:
        hook.remove()
    timestep, temb = seen
    assert timestep.dtype == torch.float32
    torch.testing.assert_close(timestep, 1000 * sigma, rtol=0, atol=0)
    assert temb.dtype == torch.bfloat16
    exact = load(checkpoint).policy.transformer.time_embed(1000 * sigma)
    error, stock_error = ((t.float() - exact).norm() for t in (temb, time_embed(rounded)))
    assert error < 0.02 * exact.norm()
    assert stock_error > 5 * error


@pytest.mark.parametrize("guidance_scale", [1.0, GUIDANCE_SCALE])
def test_ode_rollout_reproduces_the_pipeline(
    checkpoint: Path,
    pipeline: HunyuanVideo15Pipeline,
    embeddings: dict[str, TextEmbedding],
    guidance_scale: float,
) -> None:
    steps, prompts = 4, [PLAIN, QUOTED]
    model = load(checkpoint, guidance_scale)
    latents = initial_latents(torch.tensor([1, 2]), SPACE, CPU)
    table = transition_table(sigma_schedule(steps, SHIFT), "ode", 0.0)
    known = {PromptKey(text): embedding for text, embedding in embeddings.items()}
    conditions = model.policy.conditioning_table(table.sigmas[:-1], known)
    samples = zip(keys_of(prompts), torch.tensor([1, 2]).split(1), latents.split(1))
    ours = torch.cat(
        [
            rollout(model.policy, table, table.coefficients(), conditions, [key], *sample)
            for key, *sample in samples
        ]
    )
    keys = ("prompt_embeds", "prompt_embeds_mask", "prompt_embeds_2", "prompt_embeds_mask_2")
    texts = dict(zip(keys, pipeline.encode_prompt(prompts, device=CPU, batch_size=2)))
    pipeline.guider.guidance_scale = guidance_scale
    theirs = pipeline(
        negative_prompt=["", ""],
        height=48,
        width=64,
        num_frames=5,
        num_inference_steps=steps,
        latents=latents,
        output_type="latent",
        **texts,
    ).frames
    assert (theirs - latents).abs().max() > 0.5
    torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5 if guidance_scale > 1 else 2e-6)


# -- trainable weights -----------------------------------------------------------------------------


def test_fresh_lora_is_the_base_model_exactly(
    checkpoint: Path, model: Model, embeddings: dict[str, TextEmbedding]
) -> None:
    base = HunyuanVideo15Transformer3DModel.from_pretrained(
        checkpoint, subfolder="transformer"
    ).eval()
    x, sigma, text = (
        noise(2, *SPACE),
        torch.tensor([0.8, 0.2]),
        [embeddings[PLAIN], embeddings[QUOTED]],
    )
    with torch.no_grad():
        expected = velocity(HunyuanVideo15Policy(base, dtype=torch.float32), x, sigma, text)
        torch.testing.assert_close(velocity(model.policy, x, sigma, text), expected, rtol=0, atol=0)


@torch.no_grad()
def test_base_policy_is_the_initial_snapshot(
    checkpoint: Path, embeddings: dict[str, TextEmbedding]
) -> None:
    policy = load(checkpoint).policy
    x, sigma, text = noise(1, *SPACE), torch.tensor([0.6]), [embeddings[QUOTED]]
    initial, before = policy.snapshot(), velocity(policy, x, sigma, text)
    perturb_adapter(policy)
    trained = velocity(policy, x, sigma, text)
    assert (trained - before).abs().max() > 0.01
    with policy.using(initial):
        torch.testing.assert_close(velocity(policy, x, sigma, text), before, rtol=0, atol=0)
    policy.transformer.disable_adapters()
    torch.testing.assert_close(velocity(policy, x, sigma, text), before, rtol=0, atol=0)
    policy.transformer.enable_adapters()
    torch.testing.assert_close(velocity(policy, x, sigma, text), trained, rtol=0, atol=0)


def equal_states(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_states_come_back_bit_for_bit(checkpoint: Path) -> None:
    policy = load(checkpoint).policy
    initial = policy.snapshot()
    perturb_adapter(policy)
    trained = policy.snapshot()
    assert not equal_states(initial, trained)
    with policy.using(initial):
        assert equal_states(policy.snapshot(), initial)
    assert equal_states(policy.snapshot(), trained)

    def fail() -> None:
        with policy.using(initial):
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        fail()
    assert equal_states(policy.snapshot(), trained)

    last = list(initial)[-1]
    for broken in (
        {**initial, last: initial[last][:1]},
        {n: t for n, t in initial.items() if n != last},
    ):
        with pytest.raises(ValueError, match=last.replace(".", r"\.")), policy.using(broken):
            pass
        assert equal_states(policy.snapshot(), trained)  # no half-loaded state
    policy.load(initial)
    assert equal_states(policy.snapshot(), initial)


def test_seed_decides_the_adapter_and_leaves_the_global_generator_alone(
    checkpoint: Path, model: Model
) -> None:
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    again = load(checkpoint).policy.snapshot()
    torch.testing.assert_close(torch.rand(3), expected, rtol=0, atol=0)
    assert equal_states(again, model.policy.snapshot())


def gradients(
    policy: HunyuanVideo15Policy, texts: Sequence[TextEmbedding]
) -> tuple[Tensor, dict[str, Tensor | None]]:
    batch = len(texts)
    v = velocity(policy, noise(batch, *SPACE), torch.linspace(0.9, 0.2, batch), texts)
    parameters = policy.parameters()
    found = torch.autograd.grad(
        v.float(), list(parameters.values()), noise(*v.shape, seed=9), allow_unused=True
    )
    return v.detach(), dict(zip(parameters, found))


@pytest.mark.parametrize("tuning", ["lora", "full"])
def test_every_trainable_parameter_gets_a_gradient(
    checkpoint: Path, embeddings: dict[str, TextEmbedding], tuning: str
) -> None:
    policy = load(checkpoint, tuning=tuning).policy
    perturb_adapter(policy)
    _, found = gradients(policy, [embeddings[PLAIN], embeddings[QUOTED]])
    assert [name for name, g in found.items() if g is None or not g.any()] == []
    _, found = gradients(policy, [embeddings[PLAIN]])
    idle = {".".join(name.split(".")[:1]) for name, g in found.items() if g is None or not g.any()}
    # used only if a prompt quotes text
    assert idle == ({"context_embedder_2"} if tuning == "full" else set())


def test_frozen_dead_ends_are_dead_and_all_there_are(
    checkpoint: Path, embeddings: dict[str, TextEmbedding]
) -> None:
    policy = load(checkpoint, tuning="full").policy
    frozen = {name for name, p in policy.transformer.named_parameters() if not p.requires_grad}
    roots = (
        *(
            f"transformer_blocks.1.{part}"
            for part in ("attn.add_q_proj", "attn.norm_added_q", "attn.to_add_out")
        ),
        "transformer_blocks.1.ff_context",
        "image_embedder",
    )
    assert {name for name in frozen if not name.startswith(roots)} == set()
    assert all(any(name.startswith(root) for name in frozen) for root in roots)
    policy.transformer.requires_grad_(True)
    _, found = gradients(policy, [embeddings[PLAIN], embeddings[QUOTED]])
    assert {name for name, g in found.items() if g is None or not g.any()} == frozen
    freeze_dead_ends(policy.transformer)
    assert {
        name for name, p in policy.transformer.named_parameters() if not p.requires_grad
    } == frozen


@pytest.mark.parametrize(
    ("tuning", "dtype"), [("lora", "bfloat16"), ("full", "bfloat16"), ("lora", "float32")]
)
def test_gradient_checkpointing_changes_no_bit(
    checkpoint: Path, embeddings: dict[str, TextEmbedding], tuning: str, dtype: str
) -> None:
    text = [embeddings[PLAIN], embeddings[QUOTED]]
    results = []
    for mode in ("none", "full", "attention"):
        model = load(checkpoint, tuning=tuning, dtype=dtype)
        model.set_checkpointing(CheckpointPlan(mode))
        policy = model.policy
        assert policy.transformer.gradient_checkpointing is (mode != "none")
        perturb_adapter(policy)
        results.append(gradients(policy, text))
    (v, plain), *others = results
    for v_again, recomputed in others:
        torch.testing.assert_close(v_again, v, rtol=0, atol=0)
        for name, g in plain.items():
            message = lambda text, name=name: f"d {name}: {text}"  # noqa: E731
            torch.testing.assert_close(recomputed[name], g, rtol=0, atol=0, msg=message)


# -- files -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@torch.no_grad()
def test_saved_lora_loads_into_stock_diffusers_and_trains_on(
    checkpoint: Path, embeddings: dict[str, TextEmbedding], tmp_path: Path, dtype: str
) -> None:
    trained = load(checkpoint, dtype=dtype).policy
    perturb_adapter(trained)
    save_weights(trained, tmp_path)
    assert {t.dtype for t in load_file(tmp_path / LORA_FILE).values()} == {torch.float32}
    x, sigma, text = noise(1, *SPACE), torch.tensor([0.6]), [embeddings[QUOTED]]
    expected = velocity(trained, x, sigma, text)

    # rank and alpha come from the file (scaling 12 / 4, not the 64 / 64 given here)
    resumed = load(
        checkpoint, dtype=dtype, weights=str(tmp_path), lora_rank=64, lora_alpha=64
    ).policy
    assert equal_states(resumed.snapshot(), trained.snapshot())
    assert resumed.transformer.peft_config["default"].lora_alpha == 12
    torch.testing.assert_close(velocity(resumed, x, sigma, text), expected, rtol=0, atol=0)

    stock = HunyuanVideo15Transformer3DModel.from_pretrained(
        checkpoint, subfolder="transformer", dtype=trained.dtype
    )
    stock.load_lora_adapter(tmp_path, weight_name=LORA_FILE, prefix=None)
    v = velocity(HunyuanVideo15Policy(stock.eval(), dtype=trained.dtype), x, sigma, text)
    # stock: bf16 adapter
    rounding = {"rtol": 0, "atol": 0} if dtype == "float32" else {"rtol": 0.02, "atol": 0.02}
    torch.testing.assert_close(v, expected, **rounding)


def test_lora_of_a_pipeline_loads_too(checkpoint: Path, model: Model, tmp_path: Path) -> None:
    """A pipeline writes `transformer.` before each name; this file is bfloat16."""
    save_weights(model.policy, tmp_path)
    tensors = {
        f"transformer.{key}": t.bfloat16() for key, t in load_file(tmp_path / LORA_FILE).items()
    }
    file = tmp_path / "from_pipeline.safetensors"
    save_file(tensors, file)
    policy = load(checkpoint, dtype="bfloat16", weights=str(file)).policy
    rounded = {name: t.bfloat16().float() for name, t in model.policy.snapshot().items()}
    assert equal_states(policy.snapshot(), rounded)
    assert {t.dtype for t in policy.snapshot().values()} == {torch.float32}


@torch.no_grad()
def test_full_weights_come_back(
    checkpoint: Path, embeddings: dict[str, TextEmbedding], tmp_path: Path
) -> None:
    trained = load(checkpoint, tuning="full", dtype="bfloat16").policy
    config = tmp_path / "transformer" / "config.json"
    for p in trained.parameters().values():
        p.add_(1e-5 * noise(*p.shape))  # below the resolution of bfloat16
    save_weights(trained, tmp_path)
    layout = json.loads(config.read_text())
    assert layout.pop("use_meanflow") is False  # as written by a diffusers without this setting
    config.write_text(json.dumps(layout))
    resumed = load(checkpoint, tuning="full", dtype="bfloat16", weights=str(tmp_path)).policy
    assert equal_states(resumed.snapshot(), trained.snapshot())
    x, sigma, text = noise(1, *SPACE), torch.tensor([0.6]), [embeddings[QUOTED]]
    torch.testing.assert_close(
        velocity(resumed, x, sigma, text), velocity(trained, x, sigma, text), rtol=0, atol=0
    )


# -- errors ----------------------------------------------------------------------------------------


def message(checkpoint: Path | str, **settings: object) -> str:
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the callers compare the text
        load(checkpoint, **settings)
    return str(error.value)


def test_missing_or_incomplete_checkpoints_are_named(checkpoint: Path, tmp_path: Path) -> None:
    assert message("/nowhere/at/all") == (
        "model.path = '/nowhere/at/all': no such folder; expected one of testbed, testbed-i2v; or "
        "a local folder in diffusers format, or a hub id such as "
        "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v"
    )
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy, ignore=shutil.ignore_patterns("text_encoder*", "tokenizer*"))
    (copy / "vae" / "config.json").rename(tmp_path / "vae.json")
    assert message(copy) == (
        f"model.path = '{copy}': no checkpoint in diffusers format; vae/config.json is missing"
    )
    (tmp_path / "vae.json").rename(copy / "vae" / "config.json")
    with pytest.raises(ValueError, match=rf"^model.path = '{copy}': cannot read the encoders: "):
        load(copy).load_encoder(SamplingConfig())
    weights = copy / "vae" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(weights)
    tensors.pop("decoder.conv_in.conv.weight")
    save_file(tensors, weights, metadata={"format": "pt"})
    assert (
        message(copy)
        == f"model.path = '{copy}': vae lacks 1 weights, such as decoder.conv_in.conv.weight"
    )
    weights.write_bytes(weights.read_bytes()[:1000])
    assert message(copy).startswith(f"model.path = '{copy}': cannot read vae/{weights.name}: ")
    weights.unlink()
    assert message(copy).startswith(
        f"model.path = '{copy}': vae/ holds no {weights.name} and no index"
    )
    config = copy / "transformer" / "config.json"
    config.write_text(
        config.read_text().replace("HunyuanVideo15Transformer3DModel", "LTXVideoTransformer3DModel")
    )
    assert message(copy) == (
        f"model.path = '{copy}' holds a LTXVideoTransformer3DModel; expected one of "
        "['HunyuanVideo15Transformer3DModel', 'TestbedTransformer', 'WanTransformer3DModel']"
    )


def test_hub_model_that_cannot_be_had_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert message("nobody/no-such-model").startswith(
        "model.path = 'nobody/no-such-model': the Hugging Face hub cannot "
    )


@pytest.mark.parametrize(
    ("targets", "substance"),
    [
        (
            r"blocks\.\d+\.attn\.to_q",
            "Target modules blocks\\.\\d+\\.attn\\.to_q not found in the base model",
        ),
        (
            r"transformer_blocks\.0\.attn",
            "transformer_blocks.0.attn is of type Attention; expected linear layers",
        ),
        (r"transformer_blocks\.(", "unterminated subpattern"),
    ],
    ids=["no match", "not a layer", "no regular expression"],
)
def test_bad_lora_targets_are_named(checkpoint: Path, targets: str, substance: str) -> None:
    text = message(checkpoint, lora_targets=targets)
    assert text.startswith(f"model.lora_targets = {targets!r}: ")
    assert substance in text


def test_lora_of_another_model_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    wide = tiny_transformer(width_of_a_head=24)
    make_trainable(HunyuanVideo15(), wide, ModelConfig(lora_rank=4, lora_alpha=4))
    save_weights(HunyuanVideo15Policy(wide, dtype=torch.float32), tmp_path / "wide")
    text = message(checkpoint, weights=str(tmp_path / "wide"))
    assert text.startswith(
        f"model.weights = '{tmp_path / 'wide'}' was made for another model: transformer_blocks.0."
    )
    assert text.endswith("has shape [4, 48], expected width 32")

    narrow = tiny_transformer()
    add_lora(narrow, rank=4, alpha=4, targets=r"transformer_blocks\.0\.attn\.to_q", seed=0)
    save_weights(HunyuanVideo15Policy(narrow, dtype=torch.float32), tmp_path / "narrow")
    for names, key in (
        ("other_blocks", "other_blocks.0.attn.to_q"),
        ("transformer_blocks.7", None),
    ):
        tensors = load_file(tmp_path / "narrow" / LORA_FILE)
        old = "transformer_blocks" if key else "transformer_blocks.0"
        renamed = {k.replace(old, names): t for k, t in tensors.items()}
        save_file(renamed, tmp_path / "renamed.safetensors")
        text = message(checkpoint, weights=str(tmp_path / "renamed.safetensors"))
        assert f"was made for another model: {names}." in text
        assert text.endswith("no such layer here")


def test_weights_that_are_no_lora_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    missing = tmp_path / "nothing"
    assert message(checkpoint, weights=str(missing)) == (
        f"model.weights = '{missing}': no such file; expected {LORA_FILE} or a folder that holds it"
    )
    file = tmp_path / "x.safetensors"
    file.write_bytes(b"not at all")
    assert message(checkpoint, weights=str(file)).startswith(
        f"model.weights = '{file}': not a safetensors file: "
    )
    save_file({"a.weight": torch.zeros(2)}, file)
    assert message(checkpoint, weights=str(file)) == (
        f"model.weights = '{file}': holds no LoRA in diffusers format (`<layer>.lora_A.weight`)"
    )


def test_full_weights_of_another_model_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    missing = tmp_path / "nothing"
    assert message(checkpoint, tuning="full", weights=str(missing)) == (
        f"model.weights = '{missing}': expected a folder that holds transformer/config.json"
    )
    tiny_transformer(width_of_a_head=24).save_pretrained(tmp_path / "transformer")
    assert message(checkpoint, tuning="full", weights=str(tmp_path)) == (
        f"model.weights = '{tmp_path}' was made for another model: attention_head_dim is 24, "
        "model.path has 16"
    )


def test_load_lora_refuses_before_it_changes_anything(checkpoint: Path, tmp_path: Path) -> None:
    transformer = tiny_transformer()
    factors = {
        "proj_out.lora_A.weight": torch.zeros(2, 5),
        "proj_out.lora_B.weight": torch.zeros(32, 2),
    }
    save_file(factors, tmp_path / LORA_FILE)
    with pytest.raises(ValueError, match="expected width 32"):
        load_lora(transformer, tmp_path, "transformer")
    assert not hasattr(transformer, "peft_config")
    assert all(p.requires_grad for p in transformer.parameters())


def test_model_is_a_plain_record(model: Model, checkpoint: Path) -> None:
    names = {
        "spec",
        "policy",
        "decoder",
        "attention",
        "attention_milliseconds",
        "notes",
        "checkpointing",
        "parked",
    }
    assert {field.name for field in dataclasses.fields(model)} == names
    assert model.attention in ATTENTION
    assert model.spec.path == str(checkpoint)
    assert model.spec.fps == 24
