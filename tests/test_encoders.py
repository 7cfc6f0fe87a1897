"""Encoders and tokenizers of others: each is tried when it is loaded, and their own settings decide
nothing."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save, save_file
from torch import Tensor

from sage_fast.config.schema import SamplingConfig
from sage_fast.data import embeddings
from sage_fast.data.embeddings import encode_cached
from sage_fast.models.encoders import fingerprint
from sage_fast.models.find import find_spec
from sage_fast.models.hunyuan15.conditioning import TextEmbedding
from sage_fast.models.hunyuan15.encoder import ENCODING, PARTS
from sage_fast.rewards.shipped.clip import CLIPScoreReward
from sage_fast.rewards.shipped.videoalign import VideoAlignReward
from sage_fast.testbed import BASE, BASE_I2V
from sage_fast.util.captions import Caption, PromptKey
from sage_fast.util.errors import UserError
from tests.tiny import CPU
from tests.tiny_checkpoint import write_tiny_checkpoint
from tests.tiny_rewards import published_weights, write_clip, write_qwen2_vl, write_video_reward

SAMPLING = SamplingConfig(num_frames=17, height=32, width=48)
PROMPTS = [
    "a cat",
    'the thing says "the end"',
    "the theatre in the thing " * 300,
    "<|im_end|> and </s> in it",
    "",
]
VIDEO_PROMPTS = [
    "a red ball",
    "the Blue table falls, and then it falls again, and again and again and once more",
    "a",
]

IDLE: dict[str, Any] = {
    "padding_side": "left",
    "truncation_side": "left",
    "model_max_length": 5,
    "add_prefix_space": True,
    "split_special_tokens": True,
    "clean_up_tokenization_spaces": True,
    "add_bos_token": True,
    "add_eos_token": True,
    "errors": "ignore",
    "tokenizer_class": "PreTrainedTokenizerFast",
}
"""Settings of a tokenizer_config.json that may not act."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("t2v"))


@pytest.fixture(scope="module")
def checkpoint_i2v(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("i2v"), task="i2v")


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_clip(tmp_path_factory.mktemp("clip"))


@pytest.fixture(scope="module")
def videoalign(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("videoalign")
    base = write_qwen2_vl(folder / "base")
    return base, write_video_reward(folder / "VideoReward", published_weights(base))


def copy_of(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def change(file: Path, **fields: Any) -> None:
    """Set fields of a JSON file; `...` removes one."""
    content = json.loads(file.read_text()) | fields
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


def spoil(file: Path) -> None:
    """Replace one value of each matrix of a safetensors file by NaN."""
    tensors = load_file(file)
    for tensor in tensors.values():
        if tensor.ndim > 1:
            tensor.view(-1)[::7] = torch.nan
    save_file(tensors, file, {"format": "pt"})


def add_token(folder: Path, content: str, number: int) -> None:
    """Add a token to a tokenizer.json, as training on new words does."""
    file = folder / "tokenizer.json"
    stored = json.loads(file.read_text())
    fields = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    stored["added_tokens"].append({"id": number, "content": content} | fields)
    file.write_text(json.dumps(stored))


def load(folder: Path) -> Callable[[Caption], Any]:
    return find_spec(str(folder)).load_encoder(torch.float32, CPU, SAMPLING)


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(UserError) as error:
        call()
    assert "\n" not in str(error.value)
    return str(error.value)


def videos(count: int) -> Tensor:
    draw = torch.Generator().manual_seed(count)
    return torch.randint(0, 256, (count, 4, 3, 41, 60), generator=draw) / 255


# -- settings of tokenizers ------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["tokenizer", "tokenizer_2"])
def test_settings_of_a_tokenizer_do_not_change_an_embedding(
    checkpoint: Path, tmp_path: Path, part: str
) -> None:
    copied = copy_of(checkpoint, tmp_path)
    change(copied / part / "tokenizer_config.json", **IDLE)
    expected, found = load(checkpoint), load(copied)
    for prompt in PROMPTS:
        for name, tensor in expected(Caption(prompt)).tensors().items():
            assert torch.equal(found(Caption(prompt)).tensors()[name], tensor), (prompt[:30], name)


def test_settings_of_a_tokenizer_do_not_change_a_clip_score(clip: Path, tmp_path: Path) -> None:
    """Nor does the padding token, even where it is a word of a prompt."""
    expected = CLIPScoreReward(str(clip)).score(videos(3), VIDEO_PROMPTS)["clip_cosine"]
    copied = copy_of(clip, tmp_path)
    for fields in ({}, {"pad_token": "a"}):
        change(
            copied / "tokenizer_config.json", **IDLE | {"tokenizer_class": "CLIPTokenizer"} | fields
        )
        reward = CLIPScoreReward(str(copied))
        torch.testing.assert_close(
            reward.score(videos(3), VIDEO_PROMPTS)["clip_cosine"], expected, rtol=0, atol=0
        )
        alone = [
            reward.score(videos(3)[i : i + 1], [VIDEO_PROMPTS[i]])["clip_cosine"] for i in range(3)
        ]
        torch.testing.assert_close(torch.cat(alone), expected)


def test_settings_of_a_tokenizer_do_not_change_a_videoalign_score(
    videoalign: tuple[Path, Path], tmp_path: Path
) -> None:
    base, path = videoalign
    expected = VideoAlignReward(str(path), base=str(base)).score(videos(3), VIDEO_PROMPTS)["ta"]
    copied = copy_of(base, tmp_path)
    change(copied / "tokenizer_config.json", **IDLE | {"tokenizer_class": "Qwen2Tokenizer"})
    reward = VideoAlignReward(str(path), base=str(copied))
    torch.testing.assert_close(
        reward.score(videos(3), VIDEO_PROMPTS)["ta"], expected, rtol=0, atol=0
    )
    alone = [reward.score(videos(3)[i : i + 1], [VIDEO_PROMPTS[i]])["ta"] for i in range(3)]
    torch.testing.assert_close(torch.cat(alone), expected, rtol=1e-4, atol=1e-4)


def test_a_byte_order_mark_is_no_part_of_a_checkpoints_files(
    checkpoint_i2v: Path, tmp_path: Path
) -> None:
    copied = copy_of(checkpoint_i2v, tmp_path)
    sampling = SamplingConfig(guidance_scale=1.0)
    plain = find_spec(str(copied)).notes(sampling)
    for name in (
        "model_index.json",
        "scheduler/scheduler_config.json",
        "guider/guider_config.json",
    ):
        file = copied / name
        file.write_text("\ufeff" + file.read_text(), encoding="utf-8")
    spec = find_spec(str(copied))
    assert spec.takes_images
    assert spec.notes(sampling) == plain
    load(copied)


# -- the trial at load -----------------------------------------------------------------------------

NAN = "NaN"
MISSING = "missing"
Damage = dict[str, Any] | str | Callable[[Path], None]

TEXT_DAMAGES: list[tuple[str, Damage, str]] = [
    ("tokenizer/tokenizer_config.json", {"pad_token": None}, "tokenizer: has no padding token"),
    (
        "tokenizer/tokenizer_config.json",
        {"pad_token": "<pad>"},
        "tokenizer: text_encoder has 266 tokens",
    ),
    ("tokenizer/tokenizer_config.json", {"pad_token": "the"}, "tokenizer: adds the token 'the'"),
    ("tokenizer/tokenizer_config.json", {"eos_token": "a"}, "tokenizer: adds the token 'a'"),
    ("tokenizer/tokenizer.json", MISSING, "tokenizer"),
    ("tokenizer/chat_template.jinja", MISSING, "tokenizer: "),
    (
        "tokenizer",
        lambda folder: add_token(folder, "cat", 266),
        "tokenizer: text_encoder has 266 tokens",
    ),
    ("tokenizer_2/tokenizer_config.json", {"pad_token": None}, "tokenizer_2: has no padding token"),
    ("tokenizer_2/tokenizer_config.json", {"extra_special_tokens": ["the"]}, "tokenizer_2: "),
    ("text_encoder/config.json", {"rope_parameters": ...}, "text_encoder: "),
    (
        "text_encoder/config.json",
        {"max_position_embeddings": 100},
        "text_encoder: has 100 positions",
    ),
    ("text_encoder/config.json", {"hidden_size": 16}, "text_encoder"),
    ("text_encoder/config.json", {"pad_token_id": 9999}, "text_encoder: "),
    ("text_encoder/config.json", {"num_attention_heads": 3}, "text_encoder"),
    (
        "text_encoder/model.safetensors",
        NAN,
        "text_encoder gives values that are not finite for the word",
    ),
    (
        "text_encoder_2/model.safetensors",
        NAN,
        "text_encoder_2 gives values that are not finite for the word",
    ),
    ("text_encoder_2/config.json", {"d_kv": 4}, "text_encoder_2"),
    ("text_encoder_2", MISSING, "text_encoder_2"),
    (
        "model_index.json",
        {"tokenizer": ["transformers", "Qwen9Tokenizer"]},
        "tokenizer is a Qwen9Tokenizer",
    ),
    ("model_index.json", {"tokenizer_2": ...}, "tokenizer_2 is None"),
]
IMAGE_DAMAGES: list[tuple[str, Damage, str]] = [
    (
        "feature_extractor/preprocessor_config.json",
        {"size": {"height": 28, "width": 28}},
        "feature_extractor: makes",
    ),
    ("feature_extractor/preprocessor_config.json", {"size": 3}, "feature_extractor: "),
    (
        "feature_extractor/preprocessor_config.json",
        {"image_std": [0, 0, 0]},
        "feature_extractor gives values that",
    ),
    ("feature_extractor/preprocessor_config.json", MISSING, "feature_extractor: "),
    ("image_encoder/config.json", {"image_size": 28}, "image_encoder: "),
    ("image_encoder/config.json", {"hidden_size": 32}, "image_encoder"),
    (
        "image_encoder/model.safetensors",
        NAN,
        "image_encoder gives values that are not finite for a grey picture",
    ),
    (
        "vae/diffusion_pytorch_model.safetensors",
        NAN,
        "vae gives values that are not finite for a grey picture",
    ),
    ("vae/diffusion_pytorch_model.safetensors", MISSING, "vae: "),
]


def damage(path: Path, how: Damage) -> None:
    if how == NAN:
        spoil(path)
    elif how == MISSING:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    elif isinstance(how, dict):
        change(path, **how)
    else:
        how(path)  # type: ignore[operator]


@pytest.mark.parametrize(("file", "how", "words"), TEXT_DAMAGES)
def test_a_text_encoder_that_cannot_work_is_one_line_at_load(
    checkpoint: Path, tmp_path: Path, file: str, how: Damage, words: str
) -> None:
    copied = copy_of(checkpoint, tmp_path)
    damage(copied / file, how)
    text = refusal(lambda: load(copied))
    assert f"model.path = {str(copied)!r}: cannot read the encoders: " in text
    assert words in text


@pytest.mark.parametrize(("file", "how", "words"), IMAGE_DAMAGES)
def test_an_image_encoder_that_cannot_work_is_one_line_at_load(
    checkpoint_i2v: Path, tmp_path: Path, file: str, how: Damage, words: str
) -> None:
    copied = copy_of(checkpoint_i2v, tmp_path)
    damage(copied / file, how)
    text = refusal(lambda: load(copied))
    assert str(copied) in text
    assert words in text


@pytest.mark.parametrize(
    ("file", "how", "words"),
    [
        (
            "feature_extractor/preprocessor_config.json",
            {"size": {"height": 8, "width": 8}},
            "feature_extractor: makes",
        ),
        ("image_encoder/model.safetensors", NAN, "image_encoder gives values that are not finite"),
        ("image_encoder/config.json", {"num_hidden_layers": 9}, "image_encoder lacks "),
        ("transformer/config.json", {"image_embed_dim": 12}, "the transformer expects 12"),
    ],
    ids=str,
)
def test_the_testbeds_image_encoder_is_tried_too(
    tmp_path: Path, file: str, how: Damage, words: str
) -> None:
    copied = copy_of(BASE_I2V, tmp_path)
    shutil.copytree(BASE / "vae", copied / "vae")
    load(copied)
    damage(copied / file, how)
    assert words in refusal(lambda: load(copied))


CLIP_DAMAGES: list[tuple[str, Damage, str]] = [
    ("tokenizer_config.json", {"pad_token": None}, "tokenizer: has no padding token"),
    (
        "tokenizer_config.json",
        {"pad_token": "<pad>"},
        "tokenizer: text_model has 545 tokens, and its tokenizer 546",
    ),
    ("tokenizer_config.json", {"bos_token": "<|endoftext|>"}, "tokenizer: reads a word as "),
    ("tokenizer_config.json", {"eos_token": "<end>"}, "tokenizer: "),
    ("tokenizer_config.json", {"tokenizer_class": "NoSuchTokenizer"}, ""),
    ("tokenizer.json", MISSING, "tokenizer: "),
    (
        "tokenizer_config.json",
        {"extra_special_tokens": ["red"]},
        "tokenizer: text_model has 545 tokens",
    ),
    (".", lambda folder: add_token(folder, "red", 545), "tokenizer: text_model has 545 tokens"),
    ("processor_config.json", MISSING, "image processor: "),
    ("model.safetensors", NAN, "text_model gives values that are not finite for a word"),
]


@pytest.mark.parametrize(("file", "how", "words"), CLIP_DAMAGES)
def test_a_clip_model_that_cannot_work_is_one_line_at_load(
    clip: Path, tmp_path: Path, file: str, how: Damage, words: str
) -> None:
    copied = copy_of(clip, tmp_path)
    damage(copied / file, how)
    if words:
        text = refusal(lambda: CLIPScoreReward(str(copied)))
        assert repr(str(copied)) in text
        assert words in text
        return
    expected = CLIPScoreReward(str(clip)).score(videos(1), ["a red ball"])
    torch.testing.assert_close(
        CLIPScoreReward(str(copied)).score(videos(1), ["a red ball"]), expected
    )


@pytest.mark.parametrize(
    ("part", "fields", "words"),
    [
        ("vision_config", {"image_size": 64}, "missing or of another shape: "),
        (
            "text_config",
            {"eos_token_id": 543},
            "ends a text with token 544, of 545; the network looks for 543",
        ),
        ("text_config", {"max_position_embeddings": 2}, "missing or of another shape: "),
    ],
    ids=str,
)
def test_a_clip_configuration_that_cannot_work_is_one_line_at_load(
    clip: Path, tmp_path: Path, part: str, fields: dict[str, Any], words: str
) -> None:
    copied = copy_of(clip, tmp_path)
    config = json.loads((copied / "config.json").read_text())
    change(copied / "config.json", **{part: config[part] | fields})
    assert words in refusal(lambda: CLIPScoreReward(str(copied)))


def test_a_picture_of_another_size_than_clip_reads_is_one_line_at_load(
    clip: Path, tmp_path: Path
) -> None:
    copied = copy_of(clip, tmp_path)
    images = json.loads((copied / "processor_config.json").read_text())["image_processor"]
    sizes = {"size": {"shortest_edge": 48}, "crop_size": {"height": 48, "width": 48}}
    change(copied / "processor_config.json", image_processor=images | sizes)
    text = refusal(lambda: CLIPScoreReward(str(copied)))
    assert (
        "image processor: makes a picture of shape [3, 48, 48]; the network reads [3, 32, 32]"
        in text
    )


@pytest.mark.parametrize(
    ("file", "how", "words"),
    [
        ("tokenizer_config.json", {"pad_token": None}, "tokenizer: has no padding token"),
        ("tokenizer_config.json", {"tokenizer_class": 3}, "tokenizer: "),
        ("tokenizer.json", MISSING, "tokenizer"),
        ("config.json", {"rope_scaling": ...}, ""),
        ("config.json", {"vision_config": 3}, "'vision_config'"),
    ],
    ids=str,
)
def test_a_base_of_videoalign_that_cannot_work_is_one_line_at_load(
    videoalign: tuple[Path, Path], tmp_path: Path, file: str, how: Damage, words: str
) -> None:
    base, path = videoalign
    copied = copy_of(base, tmp_path)
    damage(copied / file, how)
    text = refusal(lambda: VideoAlignReward(str(path), base=str(copied)))
    assert repr(str(copied)) in text
    assert words in text


def test_weights_of_videoalign_that_are_not_finite_are_one_line_at_load(
    videoalign: tuple[Path, Path], tmp_path: Path
) -> None:
    base, _ = videoalign
    weights = published_weights(base)
    weights["base_model.model.rm_head.weight"][0, 0] = torch.nan
    path = write_video_reward(tmp_path / "VideoReward", weights)
    text = refusal(lambda: VideoAlignReward(str(path), base=str(base)))
    assert (
        "a trial with a grey video: the network of vq gives values that are not finite for a grey "
        "video" in text
    )


# -- values that are not finite --------------------------------------------------------------------


def test_a_reward_that_is_not_finite_names_its_network_and_the_prompts(
    clip: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is no score of its video, and the others keep theirs."""
    reward = CLIPScoreReward(str(clip))
    row = int(reward.tokenizer("red", add_special_tokens=False)["input_ids"][0])
    reward.network.text_model.embeddings.token_embedding.weight[row] = torch.inf
    clips = videos(3)
    clips[2, 0] = torch.nan  # a video that is not finite itself is no fault of the network
    scores = reward.score(clips, ["a blue ball", "a red ball", "a ball"])
    assert scores["clipscore"].isfinite().tolist() == [True, False, False]
    lines = {" ".join(message.split()) for message in caplog.messages}
    start = "note: CLIPScoreReward: its network gives nan as"
    assert lines == {
        f"{start} {part} for prompt 'a red ball'" for part in ("clip_cosine", "clipscore")
    }


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize(
    ("field", "part"),
    [
        ("text", "text_encoder"),
        ("glyphs", "text_encoder_2"),
        ("image", "image_encoder"),
        ("frame", "vae"),
    ],
)
def test_an_embedding_that_is_not_finite_names_its_encoder_and_is_not_kept(
    tmp_path: Path, field: str, part: str, value: float
) -> None:
    tensors = {"text": torch.ones(2, 4), "glyphs": torch.ones(1, 4), "image": torch.ones(2, 3)}
    tensors["frame"] = torch.ones(2, 1, 2, 2)
    assert tensors.keys() == TextEmbedding.encoders.keys()
    odd = {**tensors, field: tensors[field].index_fill(0, torch.tensor([0]), value)}

    def encoder(caption: Caption) -> TextEmbedding:
        return TextEmbedding(**(odd if caption.text == "a dog" else tensors))

    captions = {PromptKey(text): Caption(text) for text in ("a cat", "a dog", "a bird")}
    text = refusal(lambda: encode_cached(captions, lambda: encoder, tmp_path, "m", TextEmbedding))
    assert text == f"{part} gives values that are not finite for prompt 'a dog'"
    assert len(list(tmp_path.iterdir())) == 1, "what was encoded before is kept, and nothing else"


def test_a_cached_embedding_that_is_not_finite_is_made_again(tmp_path: Path) -> None:
    """Such as one that another version has kept."""
    right = TextEmbedding(text=torch.ones(2, 4), glyphs=torch.zeros(0, 4))
    captions = {PromptKey("a cat"): Caption("a cat")}
    encode_cached(captions, lambda: lambda caption: right, tmp_path, "m", TextEmbedding)
    (file,) = tmp_path.iterdir()
    content = file.read_bytes()
    spoilt = {name: tensor.clone() for name, tensor in right.tensors().items()}
    spoilt["text"][0, 0] = torch.nan
    file.write_bytes(save(spoilt, {"sha256": embeddings._checksum(file, spoilt)}))
    found = encode_cached(captions, lambda: lambda caption: right, tmp_path, "m", TextEmbedding)
    assert torch.equal(found[PromptKey("a cat")].text, right.text)
    assert file.read_bytes() == content


# -- the version of the encoders -------------------------------------------------------------------


@pytest.mark.parametrize("part", ["text_encoder", "text_encoder_2"])
def test_every_byte_of_an_encoder_counts(tmp_path: Path, part: str) -> None:
    """Wherever it is in a large file; size and times stay, as `cp -p` keeps them.

    Mended, it is the same encoder.
    """
    folder = tmp_path / "model"
    for name in ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"):
        (folder / name).mkdir(parents=True)
    file = folder / part / "model.safetensors"
    content = bytearray(3_000_003)
    file.write_bytes(content)
    stat = file.stat()

    def version() -> str | None:
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        return fingerprint(str(folder), PARTS, ENCODING)

    sound = version()
    for place in (0, 4_097, 1_234_567, 2_999_000, 3_000_002):
        content[place] ^= 1
        file.write_bytes(content)
        assert version() != sound, place
        content[place] ^= 1
    file.write_bytes(content)
    assert version() == sound


def test_the_autoencoder_of_an_image_model_counts(tmp_path: Path, checkpoint_i2v: Path) -> None:
    testbed = Path(shutil.copytree(BASE_I2V, tmp_path / "testbed"))
    shutil.copytree(BASE / "vae", testbed / "vae")
    for folder in (copy_of(checkpoint_i2v, tmp_path), testbed):
        before = find_spec(str(folder)).encoder_version()
        file = folder / "vae" / "diffusion_pytorch_model.safetensors"
        content = bytearray(file.read_bytes())
        content[len(content) // 3] ^= 1
        file.write_bytes(content)
        assert find_spec(str(folder)).encoder_version() != before
