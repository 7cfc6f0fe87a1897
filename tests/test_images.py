"""Prompts with images: how files are read and checked, what tells two images apart, and where it is seen."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image

import sage_fast.data.embeddings
from sage_fast.config.schema import SamplingConfig
from sage_fast.data.embeddings import cache_key, encode_cached, fill_cache
from sage_fast.data.prompts import captions_of, metadata_of, negatives_of, read_prompts
from sage_fast.loading import check_captions
from sage_fast.models.hunyuan15.text import TextEmbedding
from sage_fast.models.load import find_spec
from sage_fast.models.spec import Spec
from sage_fast.util.errors import UserError
from sage_fast.util.images import Caption, prompt_key, read_image, split_key

BALL = "a red ball rolls"


def picture(path: Path, color: str | int = "red", size: tuple[int, int] = (48, 32), mode: str = "RGB") -> Path:
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


# -- files ------------------------------------------------------------------------------------------------------------


def test_an_image_is_beside_its_prompt_file(there: Path) -> None:
    """Whatever the working directory is, and by its whole path if the file names that."""
    near, far = picture(there / "data" / "images" / "ball.png"), picture(there / "far.jpg")
    rows = [{"prompt": BALL, "image": "images/ball.png"}, {"prompt": BALL, "image": str(far), "negative_prompt": "fog"}]
    first, second = read_prompts(write(there / "data" / "p.jsonl", *rows))
    assert (first.key, first.caption) == (f"{BALL} [image: images/ball.png]", Caption(BALL, str(near)))
    assert (second.key, second.caption) == (f"{BALL} [image: {far}]", Caption(BALL, str(far)))
    os.chdir(there / "data")
    assert [prompt.caption for prompt in read_prompts("p.jsonl")] == [first.caption, second.caption]


def test_the_image_is_in_every_key_of_a_prompt_and_in_its_metadata(there: Path) -> None:
    paths = [str(picture(there / name)) for name in ("a.png", "b.png")]
    rows = [
        {"prompt": BALL, "image": "a.png", "speed": 2},
        {"prompt": BALL, "image": "b.png", "negative_prompt": "fog"},
    ]
    prompts = read_prompts(write(there / "p.jsonl", *rows))
    a, b = (f"{BALL} [image: {name}]" for name in ("a.png", "b.png"))
    assert captions_of(prompts) == {
        "[image: a.png]": Caption("", paths[0]),
        "[image: b.png]": Caption("", paths[1]),
        a: Caption(BALL, paths[0]),
        b: Caption(BALL, paths[1]),
        "fog [image: b.png]": Caption("fog", paths[1]),
    }
    assert negatives_of(prompts) == {b: "fog"}
    assert metadata_of(prompts) == {a: {"speed": 2, "image": paths[0]}, b: {"image": paths[1]}}


@pytest.mark.parametrize("image", ["ball.png", "/a/b c.png", "a]b.png", "[image.png", "ä\n.png"])
@pytest.mark.parametrize("text", ["", "a", "a [image: x] b", "two\nlines"])
def test_a_key_is_split_into_what_it_was_made_of(text: str, image: str) -> None:
    assert split_key(prompt_key(text, image)) == (text, image)
    assert split_key(prompt_key(text, "")) == (text, "")


def truncated(path: Path) -> None:
    Image.effect_noise((64, 64), 90).save(path)
    path.write_bytes(path.read_bytes()[:-900])


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda path: None, "image '{path}': no such file"),
    "a folder": (Path.mkdir, "image '{path}' cannot be read: [Errno 21] Is a directory: '{path}'"),
    "text": (
        lambda path: path.write_text("a red ball"),
        "image '{path}' is no image that Pillow reads; expected PNG, JPEG or WebP",
    ),
    "empty": (
        lambda path: path.write_bytes(b""),
        "image '{path}' is no image that Pillow reads; expected PNG, JPEG or WebP",
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
    file = write(there / "p.jsonl", {"prompt": "a", "image": "good.png"}, {"prompt": "b", "image": "bad.png"})
    with pytest.raises(UserError) as error:
        read_prompts(file)
    assert str(error.value) == f"prompt file {file!r}, line 2: {expected.format(path=there / 'bad.png')}"


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "a", "image": 3}, "image = 3: expected text"),
        ({"prompt": "a", "image": ["a.png"]}, "image = ['a.png']: expected text"),
        (
            {"prompt": "a [image: b.png]"},
            "'a [image: b.png]' ends like the name of a prompt with an image; expected the image in the key \"image\" "
            "of a .jsonl file",
        ),
        ({"prompt": "a", "image": "\0.png"}, "image '{there}/\\x00.png' cannot be read: embedded null byte"),
    ],
)
def test_a_wrong_value_is_named_with_its_line(row: dict[str, object], expected: str, there: Path) -> None:
    file = write(there / "p.jsonl", row)
    with pytest.raises(UserError) as error:
        read_prompts(file)
    assert str(error.value) == f"prompt file {file!r}, line 1: {expected.format(there=there)}"


def test_one_name_means_one_image(there: Path) -> None:
    """Two files whose folders differ may both say ball.png."""
    prompts = []
    for folder in ("train", "test"):
        picture(there / folder / "ball.png")
        prompts += read_prompts(write(there / folder / "p.jsonl", {"prompt": BALL, "image": "ball.png"}))
    with pytest.raises(UserError) as error:
        captions_of(prompts)
    assert str(error.value) == (
        f"prompt file '{there}/test/p.jsonl', line 1: image = '{there}/test/ball.png'; the same prompt has "
        f"'{there}/train/ball.png' in prompt file '{there}/train/p.jsonl', line 1; expected one image for a prompt, in "
        "training and evaluation alike"
    )


def test_an_image_is_read_upright_and_in_color(there: Path) -> None:
    image = Image.new("RGBA", (32, 16), (255, 0, 0, 10))
    image.getexif()[0x0112] = 6  # the camera was turned
    image.save(there / "a.png", exif=image.getexif())
    read = read_image(str(there / "a.png"))
    assert (read.mode, read.size, read.getpixel((0, 0))) == ("RGB", (16, 32), (255, 0, 0))
    assert read_image(str(picture(there / "b.png", 7, mode="L"))).getpixel((0, 0)) == (7, 7, 7)


# -- models -----------------------------------------------------------------------------------------------------------


class TakesImages(Spec):
    path = "checkpoint"
    takes_images = True  # type: ignore[assignment]


def test_a_model_with_images_needs_one_for_every_prompt(there: Path) -> None:
    picture(there / "a.png")
    file = write(there / "p.jsonl", {"prompt": "a", "image": "a.png"}, {"prompt": "b"})
    with pytest.raises(UserError) as error:
        check_captions(read_prompts(file), TakesImages("checkpoint"))
    assert str(error.value) == (
        f"prompt file {file!r}, line 2: model.path = 'checkpoint' is image-to-video; expected an image for each "
        'prompt, in the key "image" of a .jsonl file'
    )


def test_a_model_without_images_refuses_one(there: Path) -> None:
    picture(there / "a.png")
    file = write(there / "p.jsonl", {"prompt": "b"}, {"prompt": "a", "image": "a.png"})
    with pytest.raises(UserError) as error:
        check_captions(read_prompts(file), find_spec("random:testbed"))
    assert str(error.value) == (
        f"prompt file {file!r}, line 2: image = 'a.png', and model.path = 'random:testbed' is text-to-video; expected "
        "a prompt without an image"
    )


@pytest.mark.parametrize("kind", ["png", "jpg", "webp"])
def test_a_cut_image_is_found_before_a_model_is_loaded(kind: str, there: Path) -> None:
    truncated(there / f"bad.{kind}")
    file = write(there / "p.jsonl", {"prompt": "a", "image": f"bad.{kind}"})
    with pytest.raises(UserError, match=rf"line 1: image '{there}/bad.{kind}' cannot be read: .*") as error:
        check_captions(read_prompts(file), TakesImages("checkpoint"))
    assert str(error.value).startswith(f"prompt file {file!r}, line 1")


# -- the cache of embeddings ------------------------------------------------------------------------------------------


def test_the_cache_follows_what_an_image_shows_and_its_size(there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what it is called; text alone keeps its file."""
    encoded: list[Caption] = []

    def encode(caption: Caption) -> TextEmbedding:
        encoded.append(caption)
        return TextEmbedding(text=torch.full((1, 2), float(len(encoded))), glyphs=torch.zeros(0, 2))

    a, b, same = (
        str(picture(there / name, color)) for name, color in (("a.png", "red"), ("b.png", "green"), ("c.png", "red"))
    )
    captions = {"a": Caption(BALL, a), "b": Caption(BALL, b), "c": Caption(BALL, same), "": Caption("")}
    fill_cache(captions, lambda: encode, there / "cache", "m")
    encoded.clear()
    assert len([*(there / "cache").iterdir()]) == 3
    found = encode_cached(captions, lambda: encode, there / "cache", "m", TextEmbedding)
    assert not encoded
    assert torch.equal(found["a"].text, found["c"].text)
    assert not torch.equal(found["a"].text, found["b"].text)
    text = sage_fast.data.embeddings._digest("m", "")
    assert (there / "cache" / f"{text}.safetensors").is_file()
    picture(Path(a), "blue")
    assert fill_cache(captions, lambda: encode, there / "cache", "m") == 1
    for spec, count in ((TakesImages("x"), 2), (find_spec("random:testbed"), 1)):
        names = {cache_key(spec, "float32", there / "cache", SamplingConfig(height=h)) for h in (32, 64)}
        assert len(names) == count
