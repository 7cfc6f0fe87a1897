"""Image-to-video against diffusers' own pipeline, on a tiny checkpoint of the published classes."""

import dataclasses
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from diffusers import HunyuanVideo15ImageToVideoPipeline, HunyuanVideo15Transformer3DModel
from PIL import Image
from sage_fast.benchmarks.stock import StockPolicy
from torch import Tensor
from torch.utils._pytree import tree_map_only

from sage_fast.algorithm.transitions import sigma_schedule, transition_table
from sage_fast.cli import main
from sage_fast.config.loader import dump
from sage_fast.config.schema import ModelConfig, SamplingConfig
from sage_fast.data.embeddings import encode_cached
from sage_fast.models.find import find_spec
from sage_fast.models.hunyuan15.conditioning import TextEmbedding
from sage_fast.models.hunyuan15.policy import HunyuanVideo15Policy
from sage_fast.models.hunyuan15.spec import HunyuanVideo15
from sage_fast.models.load import load_model
from sage_fast.models.lora.adapter import LORA_FILE
from sage_fast.models.model import Model
from sage_fast.rollout.loop import initial_latents, rollout
from sage_fast.run.weights import save_weights
from sage_fast.util.captions import Caption, PromptKey
from sage_fast.util.files import read_json, read_metrics
from tests.ranks import command_on_ranks
from tests.tiny import settings
from tests.tiny_checkpoint import (
    GUIDANCE_SCALE,
    IMAGE_DIM,
    IMAGE_PATCHES,
    SHIFT,
    write_tiny_checkpoint,
)

CPU = torch.device("cpu")
SPACE = (32, 2, 3, 4)
SAMPLING = SamplingConfig(num_frames=5, height=48, width=64)
PLAIN, QUOTED = "the cat sings", 'a sign that says "the END" and “bye”'
KEYS = [PLAIN, QUOTED]
OTHER = "PLAIN with the image of QUOTED"
EXACT = {"rtol": 2e-5, "atol": 2e-6}
"""Sums in float32 in another order, padded or not, differ by a few ulp of 1."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"), seed=1, task="i2v")


@pytest.fixture(scope="module")
def pipeline(checkpoint: Path) -> HunyuanVideo15ImageToVideoPipeline:
    pipeline = HunyuanVideo15ImageToVideoPipeline.from_pretrained(checkpoint, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An image for each prompt, of which the pipeline makes 64 x 48 pixels; one has a palette."""
    folder, found = tmp_path_factory.mktemp("images"), {}
    for seed, (prompt, size) in enumerate({PLAIN: (86, 61), QUOTED: (81, 60)}.items()):
        pixels = torch.randint(
            256, (3, 3, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8
        )
        found[prompt] = folder / f"{seed}.png"
        Image.fromarray(pixels.numpy()).resize(size, Image.Resampling.BICUBIC).save(found[prompt])
    Image.open(found[QUOTED]).convert("P").save(found[QUOTED])
    return found


def load(checkpoint: Path, guidance_scale: float = 1.0, **settings: object) -> Model:
    given = {
        "dtype": "float32",
        "lora_rank": 4,
        "lora_alpha": 12,
        "gradient_checkpointing": "none",
    } | settings
    sampling = dataclasses.replace(SAMPLING, guidance_scale=guidance_scale)
    return load_model(ModelConfig(path=str(checkpoint), **given), sampling, CPU, seed=3)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Model:
    return load(checkpoint)


@pytest.fixture(scope="module")
def embeddings(model: Model, images: dict[str, Path]) -> dict[str, TextEmbedding]:
    """Key -> embedding, of prompts and of their negatives, which have the same image."""
    encode, found = model.load_encoder(SAMPLING), {}
    for key, image in images.items():
        found[f"not {key}"] = encode(Caption("", str(image)))
        found[key] = dataclasses.replace(encode(Caption(key, str(image))), negative=f"not {key}")
    found[OTHER] = dataclasses.replace(
        encode(Caption(PLAIN, str(images[QUOTED]))), negative=f"not {QUOTED}"
    )
    return found


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def batch_of(embeddings: dict[str, TextEmbedding], *keys: str) -> list[TextEmbedding]:
    return [embeddings[key] for key in keys]


def perturb_adapter(policy: HunyuanVideo15Policy) -> None:
    """Give the up-projections values; zeros would hide everything below them."""
    for name, p in policy.transformer.named_parameters():
        if ".lora_B." in name:
            p.data = noise(*p.shape) / 10


# -- encoders --------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", KEYS)
def test_what_the_encoder_gives_is_what_the_pipeline_reads(
    pipeline: HunyuanVideo15ImageToVideoPipeline,
    embeddings: dict[str, TextEmbedding],
    images: dict[str, Path],
    key: str,
) -> None:
    """To the bit, from an image of any mode; its tokens count, and its negative has the same
    ones."""
    image = Image.open(images[key]).convert("RGB")
    image = pipeline.video_processor.resize(image, height=48, width=64, resize_mode="crop")
    with torch.no_grad():
        tokens = pipeline.encode_image(image, 1, CPU, torch.float32)
        frames, mask = pipeline.prepare_cond_latents_and_mask(
            noise(1, *SPACE), image, 1, 48, 64, torch.float32, CPU
        )
    ours, negative = embeddings[key], embeddings[f"not {key}"]
    assert ours.image.shape == (IMAGE_PATCHES**2, IMAGE_DIM)
    assert ours.tokens == len(ours.text) + len(ours.glyphs) + IMAGE_PATCHES**2
    assert torch.equal(ours.image, tokens[0])
    assert torch.equal(ours.frame, frames[0, :, :1])
    assert mask[0, 0, :, 0, 0].tolist() == [1, 0]
    assert not frames[0, :, 1:].any()
    assert torch.equal(ours.image, negative.image)
    assert torch.equal(ours.frame, negative.frame)
    assert not torch.equal(embeddings[PLAIN].frame, embeddings[QUOTED].frame)


def test_images_are_cached_with_their_prompts(
    embeddings: dict[str, TextEmbedding], tmp_path: Path
) -> None:
    captions = {PromptKey(key): Caption(key) for key in KEYS}
    read = [
        encode_cached(
            captions, lambda: lambda caption: embeddings[caption.text], tmp_path, "m", TextEmbedding
        ),
        encode_cached(captions, lambda: pytest.fail("it is cached"), tmp_path, "m", TextEmbedding),
    ]
    for found in read:
        for key in KEYS:
            read_back = found[PromptKey(key)].tensors()
            assert read_back.keys() == {"text", "glyphs", "image", "frame"}
            assert all(
                torch.equal(t, embeddings[key].tensors()[name]) for name, t in read_back.items()
            )
    half = embeddings[PLAIN].to(CPU, torch.bfloat16)
    assert {t.dtype for t in half.tensors().values()} == {torch.bfloat16}


def test_the_version_is_that_of_all_encoders(checkpoint: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(checkpoint, tmp_path / "copy", copy_function=os.link)
    versions = {find_spec(str(copy)).encoder_version()}
    for part in (
        "image_encoder/config.json",
        "feature_extractor/preprocessor_config.json",
        "vae/config.json",
    ):
        text = (copy / part).read_text()
        (copy / part).unlink()  # a link to the original
        (copy / part).write_text(text + "\n")
        versions.add(find_spec(str(copy)).encoder_version())
    assert len(versions) == 4
    shutil.rmtree(copy / "feature_extractor")
    assert find_spec(str(copy)).encoder_version() is None


# -- forward ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("guidance_scale", [1.0, GUIDANCE_SCALE])
def test_ode_rollout_and_decode_reproduce_the_pipeline(
    checkpoint: Path,
    pipeline: HunyuanVideo15ImageToVideoPipeline,
    embeddings: dict[str, TextEmbedding],
    images: dict[str, Path],
    guidance_scale: float,
) -> None:
    """Two images, whose prompts have different lengths, against a call for each.

    Guidance multiplies the rounding of what the two passes differ in.
    """
    steps, model = 4, load(checkpoint, guidance_scale)
    latents = initial_latents(torch.tensor([1, 2]), SPACE, CPU)
    table = transition_table(sigma_schedule(steps, SHIFT), "ode", 0.0)
    conditions = model.policy.conditioning_table(table.sigmas[:-1], embeddings)
    coefs, seeds = table.coefficients(), torch.tensor([1, 2])
    samples = zip(KEYS, seeds.split(1), latents.split(1))
    ours = torch.cat(
        [
            rollout(model.policy, table, coefs, conditions, [key], *sample)
            for key, *sample in samples
        ]
    )
    videos = model.decoder(ours)
    pipeline.guider.guidance_scale = guidance_scale
    for key, start, latent, video in zip(KEYS, latents, ours, videos):
        given = {"image": Image.open(images[key]).convert("RGB"), "prompt": key,
            "negative_prompt": "",
                 "num_frames": 5, "num_inference_steps": steps, "latents": start[None]}  # fmt: skip
        theirs = pipeline(**given, output_type="latent").frames[0]
        assert (theirs - start).abs().max() > 0.5
        assert (latent - theirs).norm() < (5e-7 if guidance_scale == 1 else 1e-6) * theirs.norm()
        theirs = pipeline(**given, output_type="pt").frames[0]
        torch.testing.assert_close(video, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "keys",
    [[PLAIN], [QUOTED], [OTHER, PLAIN], [PLAIN, PLAIN]],
    ids=["one", "glyphs", "two images", "a group"],
)
@pytest.mark.parametrize("tuning", ["lora", "full"])
def test_values_and_gradients(
    checkpoint: Path, embeddings: dict[str, TextEmbedding], tuning: str, keys: list[str]
) -> None:
    """Against the stock forward; every trained weight gets a gradient but the embedder of glyphs
    without glyphs."""
    ours = load(checkpoint, tuning=tuning).policy
    perturb_adapter(ours)
    stock = StockPolicy(ours.transformer, dtype=torch.float32)
    x, sigma, batch = (
        noise(len(keys), *SPACE),
        torch.linspace(0.9, 0.2, len(keys)),
        batch_of(embeddings, *keys),
    )
    found = []
    for policy in (ours, stock):
        v = policy.velocity(x, policy.condition(sigma, batch))
        gradients = torch.autograd.grad(
            v, list(ours.parameters().values()), noise(*v.shape, seed=9), allow_unused=True
        )
        found.append((v.detach(), dict(zip(ours.parameters(), gradients))))
    (mine, gradients), (theirs, exact) = found
    torch.testing.assert_close(mine, theirs, **EXACT)
    for (name, p), *pair in zip(ours.parameters().items(), gradients.values(), exact.values()):
        gradient, expected = (torch.zeros_like(p) if g is None else g for g in pair)
        assert (gradient - expected).norm() <= 1e-4 * expected.norm() + 1e-6, name
    idle = {name.split(".")[0] for name, g in gradients.items() if g is None or not g.any()}
    assert idle == ({"context_embedder_2"} if tuning == "full" and QUOTED not in keys else set())
    assert ("image_embedder.linear_1.weight" in gradients) == (tuning == "full")


@torch.no_grad()
def test_image_and_text_matter(model: Model, embeddings: dict[str, TextEmbedding]) -> None:
    """Each of them alone changes the velocity, the latents most where the frame is."""
    x, sigma, known = noise(1, *SPACE), torch.tensor([0.6]), embeddings[PLAIN]
    other = embeddings[QUOTED]

    def velocity(embedding: TextEmbedding) -> Tensor:
        return model.policy.velocity(x, model.policy.condition(sigma, [embedding]))

    v = velocity(known)
    for change in ({"text": other.text}, {"image": other.image}, {"frame": other.frame}):
        assert (velocity(dataclasses.replace(known, **change)) - v).abs().max() > 1e-4, (
            change.keys()
        )


@pytest.mark.parametrize(
    "keys", [[PLAIN] * 3, [PLAIN, OTHER, PLAIN]], ids=["a group", "two images"]
)
@pytest.mark.parametrize("guidance_scale", [1.0, GUIDANCE_SCALE])
@torch.no_grad()
def test_tabulated_conditioning_is_that_of_the_step(
    checkpoint: Path, embeddings: dict[str, TextEmbedding], keys: list[str], guidance_scale: float
) -> None:
    """Rollouts ask for one step of all samples, training for a step of each; a CUDA graph reads
    copies."""
    policy = load(checkpoint, guidance_scale).policy
    sigmas, x = torch.tensor([0.95, 0.6, 0.2]), noise(3, *SPACE)
    tabulated = policy.conditioning_table(sigmas, embeddings).of(keys)
    copied = tree_map_only(torch.Tensor, torch.clone, tabulated)
    negatives = (
        batch_of(embeddings, *(embeddings[key].negative for key in keys))
        if guidance_scale != 1
        else None
    )
    for steps in ([1], [2, 0, 1]):
        fresh = policy.condition(sigmas[steps].expand(3), batch_of(embeddings, *keys), negatives)
        for conditions in (tabulated, copied):
            at = conditions.at(torch.tensor(steps))
            assert (at.negative is None) == (guidance_scale == 1)
            for mine, theirs in zip(policy.velocities(x, at), policy.velocities(x, fresh)):
                if theirs is not None:
                    torch.testing.assert_close(mine, theirs, **EXACT)


def test_an_image_is_held_once_for_all_steps(
    model: Model, embeddings: dict[str, TextEmbedding]
) -> None:
    few, many = (
        model.policy.conditioning_table(torch.linspace(1, 0.1, steps), embeddings).of([PLAIN] * 4)
        for steps in (2, 8)
    )
    for conditions in (few, many):
        assert conditions.images is not None
        assert conditions.images.tokens.shape == (1, IMAGE_PATCHES**2, 32)
        assert conditions.images.frame.shape == (1, 32, 1, 3, 4)
        assert conditions.context.shape[2] == len(embeddings[PLAIN].text)


def test_a_trained_image_embedder_is_not_tabulated(
    checkpoint: Path, embeddings: dict[str, TextEmbedding]
) -> None:
    policy = load(checkpoint, lora_targets=r"image_embedder\.linear_[12]").policy
    assert not policy.forward.conditioning_is_frozen
    table = policy.conditioning_table(torch.tensor([0.7]), embeddings)
    v = policy.velocity(noise(2, *SPACE), table.at([PLAIN, OTHER], torch.tensor([0, 0])))
    v.square().mean().backward()
    assert all(p.grad is not None for p in policy.parameters().values())


@torch.no_grad()
def test_an_adapter_of_the_patches_reads_the_frame(
    checkpoint: Path, embeddings: dict[str, TextEmbedding]
) -> None:
    policy = load(checkpoint, lora_targets=r"x_embedder\.proj").policy
    perturb_adapter(policy)
    x, sigma, batch = noise(2, *SPACE), torch.tensor([0.9, 0.3]), batch_of(embeddings, PLAIN, OTHER)
    stock = StockPolicy(policy.transformer, dtype=torch.float32)
    expected = stock.velocity(x, stock.condition(sigma, batch))
    torch.testing.assert_close(
        policy.velocity(x, policy.condition(sigma, batch)), expected, **EXACT
    )


@torch.no_grad()
def test_saved_lora_loads_into_the_pipelines_transformer(
    checkpoint: Path, embeddings: dict[str, TextEmbedding], tmp_path: Path
) -> None:
    trained = load(checkpoint).policy
    perturb_adapter(trained)
    save_weights(trained, tmp_path)
    stock = HunyuanVideo15Transformer3DModel.from_pretrained(checkpoint, subfolder="transformer")
    x, sigma, batch = noise(2, *SPACE), torch.tensor([0.9, 0.3]), batch_of(embeddings, PLAIN, OTHER)
    found = [StockPolicy(stock, dtype=torch.float32), trained]
    before, expected = (policy.velocity(x, policy.condition(sigma, batch)) for policy in found)
    assert (before - expected).abs().max() > 0.01
    stock.load_lora_adapter(tmp_path, weight_name=LORA_FILE, prefix=None)
    v = found[0].velocity(x, found[0].condition(sigma, batch))
    torch.testing.assert_close(v, expected, **EXACT)


# -- settings --------------------------------------------------------------------------------------


def test_a_shift_of_another_size_is_said(checkpoint: Path) -> None:
    """The checkpoint is that of 480p, with shift 5; 720p has 7."""
    spec = find_spec(str(checkpoint))
    assert spec.takes_images
    given = dataclasses.replace(SAMPLING, guidance_scale=GUIDANCE_SCALE)
    assert spec.notes(given) == []
    assert spec.notes(dataclasses.replace(given, shift=7)) == [
        "sampling.shift = 7, and the checkpoint's scheduler has shift 5"
    ]


def test_the_pipeline_tells_the_task(checkpoint: Path, tmp_path: Path) -> None:
    """diffusers' converter gives the transformer of 480p text-to-video the task i2v."""
    plain = write_tiny_checkpoint(tmp_path / "plain", seed=1)
    config = plain / "transformer" / "config.json"
    config.write_text(config.read_text().replace('"t2v"', '"i2v"'))
    spec = find_spec(str(plain))
    assert spec.transformer_config.task_type == "i2v"
    assert not spec.takes_images
    assert not load(
        plain, tuning="full"
    ).policy.transformer.image_embedder.linear_1.weight.requires_grad
    (plain / "model_index.json").unlink()
    assert find_spec(str(plain)).takes_images
    assert find_spec(str(checkpoint)).takes_images


@pytest.mark.parametrize(
    "index", ["{}", "[]", "cut", '{"_class_name": "Mine"}', '{"_class_name": ["a", "Mine"]}']
)
def test_a_pipeline_that_is_not_known_leaves_the_task_to_the_transformer(
    index: str, checkpoint: Path, tmp_path: Path
) -> None:
    for task, image in (("t2v", False), ("i2v", True)):
        for part in ("transformer", "vae"):
            shutil.copytree(
                checkpoint / part,
                tmp_path / task / part,
                ignore=shutil.ignore_patterns("*.safetensors"),
            )
        config = tmp_path / task / "transformer" / "config.json"
        config.write_text(config.read_text().replace('"i2v"', f'"{task}"'))
        (tmp_path / task / "model_index.json").write_text(index)
        assert find_spec(str(tmp_path / task)).takes_images is image


@pytest.mark.parametrize(
    ("path", "takes"),
    [
        ("random:hunyuanvideo15-480p", False),
        ("random:hunyuanvideo15-480p-i2v", True),
        ("hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v", False),
        ("hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_i2v", True),
    ],
)
def test_a_name_tells_the_task_before_the_configuration_is_read(path: str, takes: bool) -> None:
    assert find_spec(path).takes_images is takes


def test_random_images_follow_from_their_path() -> None:
    sampling = SamplingConfig(num_frames=81, height=480, width=832)
    encode = find_spec("random:hunyuanvideo15-480p-i2v").load_encoder(torch.float32, CPU, sampling)
    first, other, negative = (
        encode(Caption(*caption)) for caption in (("a", "1.png"), ("a", "2.png"), ("", "1.png"))
    )
    assert first.image.shape == (729, 1152)
    assert first.frame.shape == (32, 1, 30, 52)
    assert first.tokens == 730
    for name in ("image", "frame"):
        assert torch.equal(getattr(first, name), getattr(negative, name))
        assert not torch.equal(getattr(first, name), getattr(other, name))
    assert torch.equal(first.text, other.text)


# -- a run -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tuning", ["lora", "full"])
def test_a_run_from_images_to_weights_and_back(
    checkpoint: Path,
    images: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tuning: str,
) -> None:
    """Guided rollouts of two images, evaluations, two ranks that shard, and a resume that needs no
    encoders."""
    monkeypatch.chdir(tmp_path)
    Path("any_pixel.py").write_text(
        "def mean(videos, prompts):\n    return {'mean': videos.mean((1, 2, 3, 4))}\n"
    )
    records = [
        json.dumps({"prompt": prompt, "image": str(image)}) for prompt, image in images.items()
    ]
    Path("prompts.jsonl").write_text("\n".join(records))
    config = settings(
        model__path=str(checkpoint), model__tuning=tuning, reward__name="any_pixel:mean",
        reward__weights={"mean": 1.0},
        data__prompts="prompts.jsonl", data__eval_prompts="prompts.jsonl", sampling__num_frames=5,
        sampling__height=48,
        sampling__width=64, sampling__steps=2, sampling__guidance_scale=2.0, eval__steps=1,
        train__iterations=1,
        train__optimizer_steps=2, tracking__trackers=[], output="run",
    )  # fmt: skip
    Path("images.yaml").write_text(dump(config))
    assert main(["train", "images.yaml", "--quiet"]) == 0
    if tuning == "full":
        command_on_ranks(
            ["train", "images.yaml", "--train.engine", "zero3", "--output", "sharded"], tmp_path
        )
        (alone,), (sharded,) = (
            read_metrics(Path(run, "metrics.jsonl")) for run in ("run", "sharded")
        )
        for name in ("reward/mean", "grad_norm"):
            assert sharded[name] == pytest.approx(alone[name], rel=1e-5), name
        own, shared = (read_json(Path(run, "eval/before.json")) for run in ("run", "sharded"))
        assert shared["images"] == own["images"]
        assert shared["parts"]["mean"] == pytest.approx(own["parts"]["mean"], rel=1e-5)
    monkeypatch.setattr(
        HunyuanVideo15, "load_encoder", lambda *_: pytest.fail("its embeddings are cached")
    )
    assert main(["train", "images.yaml", "--resume", "--train.iterations", "2", "--quiet"]) == 0
    rows = read_metrics(Path("run/metrics.jsonl"))
    assert [row["iteration"] for row in rows] == [0, 1]
    for row in rows:
        assert row["grad_norm"] > 0
        assert row["log_prob/parity"] < 1e-4
    assert set(read_json(Path("run/eval/after.json"))["prompts"]) == {
        f"{prompt} [image: {image}]" for prompt, image in images.items()
    }
