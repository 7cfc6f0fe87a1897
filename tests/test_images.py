"""Prompts with images: how files are read and checked, what tells two images apart, and where it is
seen."""

import base64
import contextlib
import csv
import dataclasses
import html
import io
import json
import os
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from PIL import Image

import sage_fast.data.embeddings
from sage_fast.cli import main
from sage_fast.commands.card import model_card
from sage_fast.commands.init import init
from sage_fast.config.command_line import split_settings
from sage_fast.config.loader import dump, load
from sage_fast.config.schema import RewardConfig, SamplingConfig
from sage_fast.data.embeddings import cache_key, encode_cached
from sage_fast.data.prompt_checks import check_captions
from sage_fast.data.prompts import captions_of, metadata_of, negatives_of, read_prompts
from sage_fast.eval.video_folder import read_folder, write_folder
from sage_fast.eval.videoset import VideoSet
from sage_fast.models.find import find_spec
from sage_fast.models.hunyuan15.conditioning import TextEmbedding
from sage_fast.report.html import image_address
from sage_fast.rewards import CompositeReward
from sage_fast.rewards.server import RewardServer
from sage_fast.run_folder import RunFolder
from sage_fast.util.captions import Caption, PromptKey
from sage_fast.util.errors import UserError
from sage_fast.util.files import read_json, read_metrics
from sage_fast.util.images import read_image
from tests.ranks import command_on_ranks
from tests.test_docs import REPOSITORY
from tests.tiny import arguments, settings
from tests.tiny_checkpoint import write_tiny_checkpoint

BALL = "a red ball rolls"


def picture(
    path: Path, color: str | int = "red", size: tuple[int, int] = (48, 32), mode: str = "RGB"
) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, color).save(path)
    return path


def write(path: Path, *rows: dict[str, object]) -> str:
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


# -- files -----------------------------------------------------------------------------------------


def test_an_image_is_beside_its_prompt_file(there: Path) -> None:
    """Whatever the working directory is, and by its whole path if the file names that."""
    near, far = picture(there / "data" / "images" / "ball.png"), picture(there / "far.jpg")
    rows = [
        {"prompt": BALL, "image": "images/ball.png"},
        {"prompt": BALL, "image": str(far), "negative_prompt": "fog"},
    ]
    first, second = read_prompts(write(there / "data" / "p.jsonl", *rows))
    assert (first.key, first.caption) == (
        PromptKey(BALL, "images/ball.png"),
        Caption(BALL, str(near)),
    )
    assert (second.key, second.caption) == (PromptKey(BALL, str(far)), Caption(BALL, str(far)))
    os.chdir(there / "data")
    assert [prompt.caption for prompt in read_prompts("p.jsonl")] == [first.caption, second.caption]


def test_the_image_is_in_every_key_of_a_prompt_and_in_its_metadata(there: Path) -> None:
    paths = [str(picture(there / name)) for name in ("a.png", "b.png")]
    rows = [
        {"prompt": BALL, "image": "a.png", "speed": 2},
        {"prompt": BALL, "image": "b.png", "negative_prompt": "fog"},
    ]
    prompts = read_prompts(write(there / "p.jsonl", *rows))
    a, b = (PromptKey(BALL, name) for name in ("a.png", "b.png"))
    assert captions_of(prompts) == {
        PromptKey("", "a.png"): Caption("", paths[0]),
        PromptKey("", "b.png"): Caption("", paths[1]),
        a: Caption(BALL, paths[0]),
        b: Caption(BALL, paths[1]),
        PromptKey("fog", "b.png"): Caption("fog", paths[1]),
    }
    assert negatives_of(prompts) == {b: "fog"}
    assert metadata_of(prompts) == {a: {"speed": 2, "image": paths[0]}, b: {"image": paths[1]}}


@pytest.mark.parametrize("image", ["ball.png", "/a/b c.png", "a]b.png", "[image.png", "ä\n.png"])
@pytest.mark.parametrize("text", ["", "a", "a [image: x] b", "two\nlines"])
def test_a_key_that_is_written_is_read_back(text: str, image: str) -> None:
    for key in (PromptKey(text, image), PromptKey(text)):
        assert PromptKey.parse(str(key)) == key


def truncated(path: Path) -> None:
    Image.effect_noise((64, 64), 90).save(path)
    path.write_bytes(path.read_bytes()[:-900])


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda path: None, "image '{path}': no such file"),
    "a folder": (Path.mkdir, "image '{path}' is a folder, not a file; expected PNG, JPEG, WEBP"),
    "a pipe": (os.mkfifo, "image '{path}' is no regular file; expected PNG, JPEG, WEBP"),
    "a device": (
        lambda path: path.symlink_to("/dev/zero"),
        "image '{path}' is no regular file; expected PNG, JPEG, WEBP",
    ),
    "PostScript": (
        lambda path: Image.new("RGB", (64, 64)).save(path, "EPS"),
        "image '{path}' has another format; expected PNG, JPEG, WEBP",
    ),
    "a bitmap": (
        lambda path: Image.new("RGB", (64, 64)).save(path, "BMP"),
        "image '{path}' has another format; expected PNG, JPEG, WEBP",
    ),
    "PDF": (
        lambda path: path.write_bytes(b"%PDF-1.4 "),
        "image '{path}' has another format; expected PNG, JPEG, WEBP",
    ),
    "text": (
        lambda path: path.write_text("a red ball"),
        "image '{path}' has another format; expected PNG, JPEG, WEBP",
    ),
    "empty": (
        lambda path: path.write_bytes(b""),
        "image '{path}' has another format; expected PNG, JPEG, WEBP",
    ),
    "small": (
        lambda path: picture(path, size=(48, 15)),
        "image '{path}' has 48 x 15 pixels; expected from 16 pixels on a side to 89,478,485 pixels",
    ),
    "large": (
        lambda path: picture(path, 0, (10_000, 10_000), "1"),
        "image '{path}' is too large; expected from 16 pixels on a side to 89,478,485 pixels",
    ),
    "huge": (
        lambda path: picture(path, 0, (20_000, 10_000), "1"),
        "image '{path}' is too large; expected from 16 pixels on a side to 89,478,485 pixels",
    ),
    "deep": (
        lambda path: picture(path, 70, mode="I;16"),
        "image '{path}' has mode I;16; expected 8 bits a channel, such as RGB",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_image_that_cannot_be_used_is_named_with_its_line(fault: str, there: Path) -> None:
    make, expected = FAULTS[fault]
    picture(there / "good.png")
    make(there / "bad.png")
    file = write(
        there / "p.jsonl", {"prompt": "a", "image": "good.png"}, {"prompt": "b", "image": "bad.png"}
    )
    with pytest.raises(UserError) as error:
        read_prompts(file)
    assert (
        str(error.value)
        == f"prompt file {file!r}, line 2: {expected.format(path=there / 'bad.png')}"
    )


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "a", "image": 3}, "image = 3: expected text"),
        ({"prompt": "a", "image": ["a.png"]}, "image = ['a.png']: expected text"),
        (
            {"prompt": "a [image: b.png]"},
            "'a [image: b.png]' ends like the name of a prompt with an image; expected the image "
            'in the key "image" '
            "of a .jsonl file",
        ),
        (
            {"prompt": "a", "negative_prompt": "[image: b.png]"},
            "'[image: b.png]' ends like the name of a prompt with an image; expected the image in "
            'the key "image" '
            "of a .jsonl file",
        ),
        (
            {"prompt": "a", "image": "\0.png"},
            "'\\x00.png': no path holds the character of number 0",
        ),
    ],
)
def test_a_wrong_value_is_named_with_its_line(
    row: dict[str, object], expected: str, there: Path
) -> None:
    file = write(there / "p.jsonl", row)
    with pytest.raises(UserError) as error:
        read_prompts(file)
    assert str(error.value) == f"prompt file {file!r}, line 1: {expected.format(there=there)}"


def test_links_are_followed_as_the_system_does(there: Path) -> None:
    """`..` of a linked folder is where the folder is, not where the link is; so it is in
    `videos.csv`."""
    (there / "disk" / "data").mkdir(parents=True)
    (there / "data").symlink_to("disk/data")
    picture(there / "ball.png", "blue")
    picture(there / "disk" / "ball.png", "red")
    write(there / "disk" / "data" / "p.jsonl", {"prompt": BALL, "image": "../ball.png"})
    (prompt,) = read_prompts("data/p.jsonl")
    assert read_image(prompt.caption.image).getpixel((0, 0)) == (255, 0, 0)
    (there / "data" / "a.png").touch()
    written = str(prompt.key)
    videos = VideoSet(
        label="a", prompts=[written], files=[Path("data/a.png")], images={written: "ball.png"}
    )
    write_folder(videos, Path("data"))
    assert read_image(read_folder("a", Path("data")).images[written]).getpixel((0, 0)) == (
        0,
        0,
        255,
    )


def test_a_row_without_a_file_is_refused(there: Path) -> None:
    (there / "videos.csv").write_text("file,prompt\n,a ball\n")
    with pytest.raises(UserError, match="video 1: '': no such file in "):
        read_folder("a", there)


def test_one_name_means_one_image(there: Path) -> None:
    """Two files whose folders differ may both say ball.png."""
    prompts = []
    for folder in ("train", "test"):
        picture(there / folder / "ball.png")
        prompts += read_prompts(
            write(there / folder / "p.jsonl", {"prompt": BALL, "image": "ball.png"})
        )
    with pytest.raises(UserError) as error:
        captions_of(prompts)
    assert str(error.value) == (
        f"prompt file '{there}/test/p.jsonl', line 1: image = '{there}/test/ball.png'; the same "
        f"prompt has '{there}/train/ball.png' in prompt file '{there}/train/p.jsonl', line 1; "
        "expected one image for a prompt everywhere"
    )


def test_an_image_is_read_upright_and_in_color(there: Path) -> None:
    image = Image.new("RGBA", (32, 16), (255, 0, 0, 10))
    image.getexif()[0x0112] = 6  # the camera was turned
    image.save(there / "a.png", exif=image.getexif())
    read = read_image(str(there / "a.png"))
    assert (read.mode, read.size, read.getpixel((0, 0))) == ("RGB", (16, 32), (255, 0, 0))
    assert read_image(str(picture(there / "b.png", 7, mode="L"))).getpixel((0, 0)) == (7, 7, 7)


def test_what_reading_would_refuse_is_found_by_the_check(there: Path) -> None:
    """Not by an encoder in a run: here EXIF data that Pillow reads and cannot write, as it must to
    turn the image."""
    image = Image.new("RGB", (32, 16))
    exif = image.getexif()
    exif[0x0112], exif[0x011A] = 6, 72.0
    image.save(there / "a.jpg", exif=exif)
    content = bytearray((there / "a.jpg").read_bytes())
    content[content.index(b"Exif") + 31] = 1  # the resolution is a byte
    (there / "a.jpg").write_bytes(content)
    file = write(there / "p.jsonl", {"prompt": "a", "image": "a.jpg"})
    with pytest.raises(UserError, match=rf"line 1: image '{there}/a.jpg' cannot be read: "):
        check_captions(read_prompts(file), find_spec(I2V))


def test_a_palette_with_transparency_is_read_in_silence(there: Path) -> None:
    Image.new("RGB", (32, 16)).convert("P").save(there / "a.png", transparency=bytes([0, 100]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_image("a.png").mode == "RGB"


# -- models ----------------------------------------------------------------------------------------


I2V = "random:hunyuanvideo15-480p-i2v"


def test_a_model_with_images_needs_one_for_every_prompt(there: Path) -> None:
    picture(there / "a.png")
    file = write(there / "p.jsonl", {"prompt": "a", "image": "a.png"}, {"prompt": "b"})
    with pytest.raises(UserError) as error:
        check_captions(read_prompts(file), find_spec(I2V))
    assert str(error.value) == (
        f"prompt file {file!r}, line 2: model.path = {I2V!r} is image-to-video; expected an image "
        "for each "
        'prompt, in the key "image" of a .jsonl file, or sample --image'
    )


def test_a_model_without_images_refuses_one(there: Path) -> None:
    picture(there / "a.png")
    file = write(there / "p.jsonl", {"prompt": "b"}, {"prompt": "a", "image": "a.png"})
    with pytest.raises(UserError) as error:
        check_captions(read_prompts(file), find_spec("random:testbed"))
    assert str(error.value) == (
        f"prompt file {file!r}, line 2: image = 'a.png', and model.path = 'random:testbed' is "
        "text-to-video; an image for a reward needs another key"
    )


@pytest.mark.parametrize("kind", ["png", "jpg", "webp"])
def test_a_cut_image_is_found_before_a_model_is_loaded(kind: str, there: Path) -> None:
    truncated(there / f"bad.{kind}")
    file = write(there / "p.jsonl", {"prompt": "a", "image": f"bad.{kind}"})
    with pytest.raises(
        UserError, match=rf"line 1: image '{there}/bad.{kind}' cannot be read: .*"
    ) as error:
        check_captions(read_prompts(file), find_spec(I2V))
    assert str(error.value).startswith(f"prompt file {file!r}, line 1")


# -- the cache of embeddings -----------------------------------------------------------------------


def test_the_cache_follows_what_an_image_shows_and_its_size(
    there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not what it is called; text alone keeps its file."""
    encoded: list[Caption] = []

    def encode(caption: Caption) -> TextEmbedding:
        encoded.append(caption)
        return TextEmbedding(text=torch.full((1, 2), float(len(encoded))), glyphs=torch.zeros(0, 2))

    a, b, same = (
        str(picture(there / name, color))
        for name, color in (("a.png", "red"), ("b.png", "green"), ("c.png", "red"))
    )
    captions = {
        PromptKey(BALL, "a"): Caption(BALL, a),
        PromptKey(BALL, "b"): Caption(BALL, b),
        PromptKey(BALL, "c"): Caption(BALL, same),
        PromptKey(""): Caption(""),
    }
    encode_cached(captions, lambda: encode, there / "cache", "m", TextEmbedding)
    encoded.clear()
    assert len([*(there / "cache").iterdir()]) == 3
    found = encode_cached(captions, lambda: encode, there / "cache", "m", TextEmbedding)
    assert not encoded
    red, green, same_red, _ = found.values()
    assert torch.equal(red.text, same_red.text)
    assert not torch.equal(red.text, green.text)
    text = sage_fast.data.embeddings._digest("m", "")
    assert (there / "cache" / f"{text}.safetensors").is_file()
    picture(Path(a), "blue")
    encode_cached(captions, lambda: encode, there / "cache", "m", TextEmbedding)
    assert encoded == [captions[PromptKey(BALL, "a")]]
    for spec, count in ((find_spec(I2V), 2), (find_spec("random:testbed"), 1)):
        names = {
            cache_key(spec, "float32", there / "cache", SamplingConfig(height=h)) for h in (32, 64)
        }
        assert len(names) == count


# -- from the prompt file to the report ------------------------------------------------------------

CIRCLE = "a circle moves left"
KEYS = [f"{CIRCLE} [image: {color}.png]" for color in ("red", "blue")]
REWARD = """
import re
from PIL import Image

def seen(videos, prompts, metadata):
    images = [Image.open(one["image"]).convert("RGB").getpixel((0, 0)) for one in metadata]
    assert set(prompts) == {"a circle moves left"}, prompts
    red = [float(image == (255, 0, 0)) for image in images]
    return {"red": red, "spread": videos.std((1, 2, 3, 4))}
"""


TINY = arguments(
    model__path="model", model__dtype="float32", model__lora_rank=2, data__prompts="p.jsonl",
    data__eval_prompts="p.jsonl", sampling__steps=2, sampling__num_frames=5, sampling__height=32,
    sampling__width=32,
    sampling__guidance_scale=2, reward__name="noted:seen", reward__weights="{red: 1}",
    reward__on_failure="stop",
    train__iterations=1, train__prompts_per_iteration=2, train__group_size=2, eval__steps=1,
    eval__num_prompts=2,
    eval__num_videos=2, eval__judge="noted:seen", tracking__trackers="[]",
)  # fmt: skip


def call(*words: str) -> tuple[int, str]:
    """Exit status and output of a command."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        status = main([*words])
    return status, out.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A checkpoint of the real classes, two prompts of equal text, seed and negative prompt, and a
    run on them."""
    folder = tmp_path_factory.mktemp("images")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_tiny_checkpoint(folder / "model", seed=1, task="i2v")
        row = {"prompt": CIRCLE, "negative_prompt": "a square", "seed": 3}
        write(folder / "p.jsonl", *(row | {"image": f"{color}.png"} for color in ("red", "blue")))
        for color in ("red", "blue", "green"):
            picture(folder / f"{color}.png", color)
        (folder / "noted.py").write_text(REWARD)
        (folder / "c.yaml").write_text("output: run\n")
        status, out = call("train", "c.yaml", *TINY, "--quiet")
        assert status == 0, out
        yield folder


def test_two_images_of_one_text_have_their_own_rewards_groups_and_videos(folder: Path) -> None:
    (row,) = read_metrics(folder / "run" / "metrics.jsonl")
    assert row["reward/mean"] == 0.5
    assert row["reward/zero_std_groups"] == 1  # no group has samples of both
    for name in ("before", "after"):
        scores = read_json(folder / "run" / "eval" / f"{name}.json")
        assert scores["prompts"] == KEYS
        assert scores["negatives"] == dict.fromkeys(KEYS, "a square")
        assert scores["images"] == {
            key: str(folder / f"{color}.png") for key, color in zip(KEYS, ("red", "blue"))
        }
        assert scores["parts"]["red"] == scores["parts"]["judge/red"] == [1, 0]
        red, blue = scores["parts"]["spread"]
        assert red != blue  # from the same noise


def test_the_report_shows_the_image_beside_its_video(folder: Path) -> None:
    page = (folder / "run" / "report.html").read_text()
    for key, color in zip(KEYS, ("red", "blue")):
        assert (
            f'<img alt="image: {key}" src="{image_address(str(folder / f"{color}.png"))}">' in page
        )
        assert f'aria-label="after: {key}"' in page
    data = base64.b64decode(image_address("blue.png").partition(",")[2])
    with Image.open(io.BytesIO(data)) as image:
        assert image.size == (192, 128)
        red, green, blue = image.getpixel((90, 60))  # type: ignore[misc]
        assert min(blue - red, blue - green) > 200


def test_a_report_without_the_file_of_an_image_says_so(folder: Path, tmp_path: Path) -> None:
    run = shutil.copytree(folder / "run", tmp_path / "run")
    for file in (run / "eval").glob("*.json"):
        file.write_text(file.read_text().replace(str(folder), str(tmp_path)))
    assert call("report", str(run))[0] == 0
    page = html.unescape((run / "report.html").read_text())
    assert f"left out: image '{tmp_path}/red.png': no such file" in page
    assert '<img alt="image: ' not in page


def test_a_resume_trains_on_the_same_prompts(folder: Path) -> None:
    shutil.copytree(folder / "run", folder / "again")
    status, out = call(
        "train",
        "again/config.yaml",
        "--output",
        "again",
        "--resume",
        "--train.iterations",
        "2",
        "--quiet",
    )
    assert status == 0, out
    assert [row["reward/mean"] for row in read_metrics(folder / "again" / "metrics.jsonl")] == [
        0.5,
        0.5,
    ]


def test_saved_videos_keep_prompt_and_image(folder: Path) -> None:
    """Any reward scores them later, without the prompt files; pages show the images."""
    status, out = call("eval", "run", "--folder", "out", "--quiet")
    assert status == 0, out
    (home,) = (folder / "out" / "videos").iterdir()
    with (home / "videos.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["prompt"] for row in rows] == KEYS
    assert [row["image"] for row in rows] == [f"../../../{color}.png" for color in ("red", "blue")]
    found = read_folder("saved", home)
    assert found.images == {
        key: str(folder / f"{color}.png") for key, color in zip(KEYS, ("red", "blue"))
    }
    (folder / "other.txt").write_text("a square moves left\n")
    words = [
        "--data.prompts",
        "other.txt",
        "--data.eval_prompts",
        "other.txt",
        "--json",
        "saved.json",
        "--quiet",
    ]
    status, out = call(
        "eval", str(home), "--reward.name", "noted:seen", "--reward.weights", "{red: 1}", *words
    )
    assert status == 0, out
    assert read_json(folder / "saved.json")["parts"]["red"] == [1, 0]
    status, out = call("compare", "run", f"saved={home}", "--folder", "compared")
    assert status == 0, out
    page = (folder / "compared" / "comparison.html").read_text()
    assert page.count('<img alt="image: ') == 2
    shutil.copytree(home, folder / "elsewhere" / "moved")  # without the images
    status, out = call("compare", "run", "elsewhere/moved", "--folder", "elsewhere/page")
    assert status == 0, out


def test_models_of_two_tasks_are_not_evaluated_together(folder: Path) -> None:
    """Which is said before the first of them samples anything."""
    words = ["--model.path", "testbed", "--output", "other"]
    (folder / "words.yaml").write_text(dump(load(None, split_settings([*TINY, *words])[1])))
    status, out = call("eval", "run", "words.yaml", "--folder", "both")
    assert (status, "line 1: image = 'red.png', and model.path = " in out.replace("\n", " ")) == (
        2,
        True,
    ), out
    assert not (folder / "both").exists()


def test_samples_of_the_command_line_have_images(folder: Path) -> None:
    words = ["sample", "run", "--quiet", "--folder"]
    status, out = call(
        *words, "one", "--prompt", f" {CIRCLE}", "--prompt", "a square", "--image", "green.png"
    )
    assert (status, len(out.split())) == (0, 2), out
    assert call(*words, "file", "--prompts", "p.jsonl")[0] == 0
    assert len([*(folder / "file").glob("*.mp4")]) == 2
    for images, expected in (
        (
            ["--image", "red.png"] * 3,
            "--image: 3 for 2 of --prompt; expected one for all, or one for each",
        ),
        ([], "--prompt 'a square': model.path = "),
        (["--image", "none.png"], f"--image 'none.png': image '{folder}/none.png': no such file"),
    ):
        status, out = call(*words, "none", "--prompt", "a square", "--prompt", CIRCLE, *images)
        assert (status, expected in out.replace("\n", " ")) == (2, True), out
    assert not (folder / "none").exists()
    status, out = call(*words, "none", "--prompts", "p.jsonl", "--image", "red.png")
    assert (status, "--image: 1 for 0 of --prompt" in out) == (2, True)


def test_the_cache_and_the_plan_take_images(folder: Path) -> None:
    own = [*TINY, "--data.embedding_cache", "cache"]
    for _ in range(2):
        assert "cache: 6 texts" in call("embed", "c.yaml", *own)[1]
        assert len([*Path("cache").glob("*.safetensors")]) == 6
    status, out = call("train", "c.yaml", *own, "--dry-run")
    assert (status, "p.jsonl: 2 prompts, each with an image" in out) == (0, True), out


@pytest.mark.parametrize(
    "command", ["train", "train --dry-run", "embed --data.embedding_cache cache", "sample"]
)
@pytest.mark.parametrize("path", ["testbed", "model"])
def test_every_command_refuses_prompts_of_another_task(
    command: str, path: str, folder: Path
) -> None:
    name, *options = command.split()
    rows = [{"prompt": "a square", "image": "red.png"}, {"prompt": "a square"}]
    file = write(folder / "mixed.jsonl", *(rows[::-1] if path == "testbed" else rows))
    options += ["--prompts", file] if name == "sample" else ["--data.prompts", file]
    config = ["--model.path", path, "--output", "refused"]
    status, out = call(name, "c.yaml", *TINY, *config, *options)
    assert (status, f"prompt file {file!r}, line 2: " in out.replace("\n", " ")) == (2, True), out
    assert not (folder / "refused").exists()


@pytest.mark.parametrize("how", ["here", "process", "http"])
def test_a_reward_is_told_the_text_and_the_image(how: str, folder: Path) -> None:
    config = RewardConfig(
        name="noted:seen", weights={"red": 1.0}, on_failure="stop", workers=int(how == "process")
    )
    metadata = metadata_of(read_prompts("p.jsonl"))
    with contextlib.ExitStack() as stack:
        if how == "http":
            server = RewardServer(CompositeReward.of(config), "127.0.0.1", 0)
            threading.Thread(target=server.listen, daemon=True).start()
            stack.callback(setattr, server, "should_exit", True)
            config = dataclasses.replace(config, name=server.address)
        reward = CompositeReward.of(config, metadata=metadata)
        red, blue = (PromptKey.parse(written) for written in KEYS)
        reward.check(SamplingConfig(num_frames=5, height=32, width=32), [red, blue])
        scores = reward(torch.rand(3, 5, 3, 32, 32), [blue, red, blue])
    assert scores.rewards.tolist() == [0, 1, 0]


def test_init_copies_images(there: Path) -> None:
    printed = init(there / "mine", "demo-i2v")
    assert "wrote config.yaml, my_rewards.py, prompts.jsonl, heldout.jsonl and 96 images" in printed
    assert "sage-fast sample runs/first --prompts heldout.jsonl" in printed
    config, shipped = (
        load(there / "mine" / "config.yaml"),
        load(REPOSITORY / "configs" / "demo-i2v.yaml"),
    )
    for name in ("prompts", "eval_prompts"):
        ours, theirs = (
            there / "mine" / getattr(config.data, name),
            REPOSITORY / getattr(shipped.data, name),
        )
        assert ours.read_text() == theirs.read_text()
        for copy, prompt in zip(read_prompts(str(ours)), read_prompts(str(theirs)), strict=True):
            assert Path(copy.caption.image).read_bytes() == Path(prompt.caption.image).read_bytes()
            assert copy.caption.image == str(there / "mine" / prompt.image)


def test_the_card_of_such_a_model_samples_from_an_image() -> None:
    spec = find_spec(I2V)
    card = ModelCard(
        model_card(RunFolder("none"), settings(), spec, iteration=1, base="a/b", files=[])
    )
    assert (card.data.pipeline_tag, card.data.tags[0]) == ("image-to-video", "image-to-video")
    assert (
        'image = load_image("image.png")\nvideo = pipe(image, "a prompt", num_frames=' in card.text
    )


def test_all_ranks_name_an_image_that_is_cut(folder: Path) -> None:
    truncated(folder / "cut.png")
    file = write(
        folder / "cut.jsonl", *({"prompt": "a", "image": f"{name}.png"} for name in ("red", "cut"))
    )
    with pytest.raises(AssertionError) as error:
        command_on_ranks(
            ["train", "c.yaml", *TINY, "--data.prompts", file, "--output", "none"], folder
        )
    assert (
        str(error.value).count(
            f"prompt file {file!r}, line 2: image '{folder}/cut.png' cannot be read"
        )
        == 2
    )
    assert not (folder / "none").exists()
