"""Prompt files: how they are read, what each field does, and the embeddings that `sage-fast embed`
leaves."""

import contextlib
import dataclasses
import io
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub import HfApi, constants
from huggingface_hub.hf_api import BlobLfsInfo, RepoSibling

import sage_fast.data.embeddings
from sage_fast.cli import main
from sage_fast.config.command_line import split_settings
from sage_fast.config.loader import dump, load
from sage_fast.config.schema import ModelConfig, SamplingConfig
from sage_fast.data.embeddings import cache_key, encode_cached
from sage_fast.data.prompts import (
    Prompt,
    configured_prompts,
    metadata_of,
    negatives_of,
    read_prompts,
)
from sage_fast.eval.evaluation import prompts_and_seeds
from sage_fast.loading import load_setup, resolve
from sage_fast.models.encoders import fingerprint
from sage_fast.models.hub import reachable
from sage_fast.models.hunyuan15.conditioning import TextEmbedding
from sage_fast.models.hunyuan15.encoder import ENCODING, PARTS, load_encoder
from sage_fast.models.interface import pass_lengths
from sage_fast.models.load import load_model
from sage_fast.trainer import Trainer
from sage_fast.util.captions import Caption, PromptKey
from sage_fast.util.errors import UserError
from sage_fast.util.files import read_json, read_metrics
from tests.test_cli import CONFIGS
from tests.test_docs import REPOSITORY, blocks
from tests.tiny import CPU, arguments, captions, embeddings, keys_of, settings, tiny_model
from tests.tiny_checkpoint import write_tiny_checkpoint

CAT, DOG = "a cat, asleep", 'a dog under a sign that says "open"'


@pytest.mark.parametrize(
    "command", ["train", "train --dry-run", "embed --data.embedding_cache cache", "sample"]
)
def test_every_command_refuses_a_prompt_in_one_line_that_steers_no_terminal(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    name, *options = command.split()
    Path("c.yaml").write_text(f"base: {REPOSITORY / 'configs' / 'demo.yaml'}\noutput: run\n")
    Path("p.txt").write_text("a small red ball moves left \x1b[2Jquickly\n")
    options += ["--prompts", "p.txt"] if name == "sample" else ["--data.prompts", "p.txt"]
    assert main([name, "c.yaml", *options]) == 2
    out, err = capfd.readouterr()
    assert 'does not know "\\x1b[2Jquickly"' in err
    assert (out + err).replace("\n", "").isprintable()
    assert not Path("run").exists()
    assert not list(tmp_path.glob("cache/*.safetensors"))


# -- files -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("content", "line", "why"), [
    ("a cat\na dog\n".encode("utf-16-le"), 1, "holds a NUL, as UTF-16 does"),
    ("a cat\ra dog\r".encode("utf-16-be"), 1, "holds a NUL, as UTF-16 does"),
    (b"a cat\r\na\0dog\n", 2, "holds a NUL"), ("ä\rb\rc\r".encode() + b"\xff", 4, "not UTF-8"),
    ("a cat\r\u200b\u2060\u00ad\n".encode(), 2, "all of its characters are invisible"),
    ("a cat\n\u3164\u2800 \ufe0f\n".encode(), 2, "all of its characters are invisible"),
    ("\u200e\u202a\u202c".encode(), 1, "all of its characters are invisible"),
])  # fmt: skip
def test_what_is_no_line_of_text_is_named(
    content: bytes, line: int, why: str, tmp_path: Path
) -> None:
    (tmp_path / "prompts.txt").write_bytes(content)
    with pytest.raises(UserError, match=f"line {line}: .*{why}"):
        read_prompts(str(tmp_path / "prompts.txt"))


@pytest.mark.parametrize(("content", "line", "why"), [
    (b'{"prompt": "a"}\r{"prompt": "b", "negative_prompt": "a\\u0000b"}\r', 2,
     "the prompt holds a NUL"),
    (b'{"prompt": "a"}\n{"prompt": "a\\u0000b"}\r', 2, "the prompt holds a NUL"),
    ('{"prompt": "a"}\n'.encode("utf-16-le"), 1, "holds a NUL, as UTF-16 does"),
    (b'{"prompt": "a"}\r\n{"prompt": "\\u200b \\u2060"}', 2, "all of its characters are invisible"),
    (b'{"prompt": "a \\ud800 b"}', 1, "half of a character"),
    (b'{"prompt": "a"}\n{"prompt": "b", "negative_prompt": "\\udfff"}', 2, "half of a character"),
])  # fmt: skip
def test_json_is_checked_alike(content: bytes, line: int, why: str, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_bytes(content)
    with pytest.raises(UserError, match=f"line {line}: .*{why}"):
        read_prompts(str(tmp_path / "prompts.jsonl"))


def test_text_files(tmp_path: Path) -> None:
    def texts() -> list[str]:
        return [prompt.text for prompt in read_prompts(str(file))]

    file = tmp_path / "prompts.txt"
    file.write_bytes(b"\xef\xbb\xbfa cat\r\n\r\n  a dog \n")
    assert texts() == ["a cat", "a dog"]
    file.write_bytes("one\u2028line\x85of\x0ctext\x0b, whole\ranother\r\n".encode())
    assert texts() == ["one\u2028line\x85of\x0ctext\x0b, whole", "another"]
    file.write_bytes(b"a red ball\ra blue ball\r")
    assert texts() == ["a red ball", "a blue ball"]
    file.write_bytes(b"\r\n\r\ra cat\r\r\na dog\n\r\xef\xbb\xbfa hat, \xef\xbb\xbfred")
    assert texts() == ["a cat", "a dog", "a hat, red"]
    file = tmp_path / "prompts"  # without a suffix it is plain text
    file.write_text("a cat\n")
    assert texts() == ["a cat"]


def test_both_formats_hold_the_same(tmp_path: Path) -> None:
    rows = [
        {"prompt": CAT, "negative_prompt": " blurry ", "seed": 7},
        {"prompt": DOG, "seed": None},
    ]
    (tmp_path / "P.JSONL").write_text(
        "\ufeff" + "\r\n\n".join(map(json.dumps, rows)), encoding="utf-8"
    )
    (tmp_path / "p.txt").write_text(f"{CAT}\n{DOG}\n")
    expected = [Prompt(text=CAT, negative="blurry", seed=7), Prompt(text=DOG)]
    assert read_prompts(str(tmp_path / "P.JSONL")) == expected
    assert [p.text for p in read_prompts(str(tmp_path / "p.txt"))] == [CAT, DOG]
    assert negatives_of(expected) == {PromptKey(CAT): "blurry"}


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("p.txt", "\n \n", "is empty; expected at least one prompt"),
        ("p.txt", "one\nein schöner Tag\n".encode("latin-1"), "line 2: not UTF-8"),
        ("p.jsonl", b'{"prompt": "a"}\n{"prompt": "\xff"}\n', "line 2: not UTF-8"),
        (
            "p.jsonl",
            '{"prompt": "a"}\n\n{"prompt": a}\n',
            "line 3: not valid JSON: Expecting value at column 12",
        ),
        ("p.jsonl", "[" * 100_000, "line 1: not valid JSON"),
        (
            "p.jsonl",
            '{"prompt": "a", "seed": ' + 5000 * "9" + "}",
            "line 1: not valid JSON: Exceeds the limit",
        ),
        (
            "p.jsonl",
            '{"prompt": "a", "weight": NaN}\n',
            "line 1: not valid JSON: NaN is no number there",
        ),
        (
            "p.jsonl",
            '{"prompt": "a", "w": [1, {"x": -Infinity}]}\n',
            "line 1: not valid JSON: -Infinity is no number",
        ),
        ("p.jsonl", '"a cat"\n', "line 1: expected an object"),
        ("p.jsonl", '{"promt": "a"}\n', "line 1: unknown key 'promt'; .*did you mean 'prompt'"),
        ("p.jsonl", '{"seed": 1}\n', "line 1: 'prompt' is missing"),
        ("p.jsonl", '{"prompt": null}\n', "line 1: prompt = None: expected text"),
        ("p.jsonl", '{"prompt": "a"}\n{"prompt": "  "}\n', "line 2: the prompt is empty"),
        (
            "p.jsonl",
            '{"prompt": "a", "negative_prompt": 3}\n',
            "line 1: negative_prompt = 3: expected text",
        ),
        (
            "p.jsonl",
            '{"prompt": "a", "seed": "3"}\n',
            "line 1: seed = '3': expected a whole number",
        ),
        (
            "p.jsonl",
            '{"prompt": "a", "seed": true}\n',
            "line 1: seed = True: expected a whole number",
        ),
        ("p.jsonl", '{"prompt": "a", "seed": -1}\n', "line 1: seed = -1: expected a whole number"),
        (
            "p.jsonl",
            '{"prompt": "a", "seed": 1e99}\n',
            "line 1: seed = 1e\\+99: expected a whole number",
        ),
        (
            "p.jsonl",
            '{"prompt": "a", "negative_promt": "b"}\n',
            "unknown key 'negative_promt'; .*'negative_prompt'",
        ),
        ("p.json", "[]", "expected UTF-8 text .*the nearest is .jsonl"),
        ("p.csv", "prompt,seed\n", "the nearest is .jsonl"),
        ("p.jsonlines", '{"prompt": "a"}\n', "the nearest is .jsonl"),
        ("p.yaml", "- a cat\n", "the nearest is .jsonl"),
        ("my_rewards.py", "import torch\n", "a .py file; expected UTF-8 text with one prompt"),
    ],
)
def test_a_broken_file_is_named_with_its_line(
    name: str, content: str | bytes, expected: str, tmp_path: Path
) -> None:
    file = tmp_path / name
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(UserError, match=expected) as error:
        read_prompts(str(file))
    assert str(file) in str(error.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"missing.txt.*no such file; expected UTF-8 text .*\.jsonl"
    ):
        read_prompts(str(tmp_path / "missing.txt"))
    with pytest.raises(
        UserError,
        match=r"expected one of testbed:train, testbed:heldout; did you mean 'testbed:tr.*file$",
    ):
        read_prompts("testbed:trian")


def test_a_prompt_has_one_negative_prompt() -> None:
    first = Prompt(text=CAT, where="train.jsonl, line 1")
    with pytest.raises(
        UserError,
        match=r"test.jsonl, line 3: negative_prompt = 'dark'; .* '' in train.jsonl, line 1",
    ):
        negatives_of([first, Prompt(text=CAT, negative="dark", where="test.jsonl, line 3")])
    assert negatives_of([first, first]) == {}


def test_further_keys_are_metadata(tmp_path: Path) -> None:
    row = {
        "prompt": CAT,
        "seed": 3,
        "speed": 2.5,
        "target": {"text": "open", "box": [1, None]},
        "note": None,
    }
    (tmp_path / "p.jsonl").write_text(json.dumps(row))
    (prompt,) = read_prompts(str(tmp_path / "p.jsonl"))
    assert prompt.metadata == {
        "speed": 2.5,
        "target": {"text": "open", "box": [1, None]},
        "note": None,
    }
    assert metadata_of([prompt, Prompt(text=DOG), prompt]) == {PromptKey(CAT): prompt.metadata}
    other = Prompt(text=CAT, metadata={"speed": 3}, where="test.jsonl, line 2")
    with pytest.raises(
        UserError, match=r"test.jsonl, line 2: speed = 3; the same prompt has 2.5 in .*p.json"
    ):
        metadata_of([prompt, other])


# -- negative prompts and seeds --------------------------------------------------------------------

RED, BLUE, GREEN = keys_of(
    f"a small {color} ball moves left quickly" for color in ("red", "blue", "green")
)
LONG, OTHER = keys_of(["a small red ball", "a small blue ball"])


def test_each_prompt_is_led_away_from_its_own_negative_prompt() -> None:
    """Compare the table of a rollout with conditioning made by hand, in a batch and alone."""
    config = settings(sampling__guidance_scale=4.0)
    policy = tiny_model(config).policy
    for p in policy.transformer.parameters():  # a new model hardly depends on its text
        if p.ndim == 2:
            torch.nn.init.normal_(p, std=p.shape[1] ** -0.5)
    known = embeddings([RED, BLUE, GREEN, LONG, OTHER])
    known |= {
        key: dataclasses.replace(known[key], negative=away)
        for key, away in ((RED, LONG), (BLUE, OTHER))
    }
    assert pass_lengths(known, guided=True)[RED] == (known[RED].tokens, known[LONG].tokens)
    assert pass_lengths(known, guided=True)[GREEN] == (
        known[GREEN].tokens,
        known[PromptKey("")].tokens,
    )
    sigmas = torch.tensor([0.9, 0.4])
    table = policy.conditioning_table(sigmas, known)
    x = torch.randn(2, policy.transformer.config.out_channels, 2, 4, 4)

    def by_hand(row: int, prompt: PromptKey, negative: PromptKey, step: int) -> torch.Tensor:
        text, away = ([known[key]] for key in (prompt, negative))
        at = policy.condition(sigmas[step : step + 1], text, away)
        return policy.guided_velocity(x[row : row + 1], at)

    for step in range(2):
        expected = torch.cat([by_hand(0, RED, LONG, step), by_hand(1, BLUE, OTHER, step)])
        other = torch.cat([by_hand(0, RED, OTHER, step), by_hand(1, BLUE, PromptKey(""), step)])
        together = policy.guided_velocity(x, table.of([RED, BLUE]).at(torch.tensor([step])))
        torch.testing.assert_close(together, expected, rtol=1e-4, atol=1e-5)
        assert (expected - other).abs().amax((1, 2, 3, 4)).min() > 1e-2
        alone = policy.guided_velocity(x[:1], table.of([RED]).at(torch.tensor([step])))
        torch.testing.assert_close(alone, expected[:1], rtol=1e-4, atol=1e-5)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    lines = [
        {"prompt": RED.text, "negative_prompt": LONG.text, "seed": 3},
        {"prompt": BLUE.text, "negative_prompt": "a small blue ball moves"},
        {"prompt": GREEN.text},
    ]
    Path("train.jsonl").write_text("\n".join(map(json.dumps, lines)))
    heldout = [
        {"prompt": RED.text, "seed": 11, "negative_prompt": LONG.text},
        {"prompt": GREEN.text},
    ]
    Path("heldout.jsonl").write_text("\n".join(map(json.dumps, heldout)))
    return tmp_path


def tiny_config(**overrides: Any) -> Any:
    given = {
        "data__prompts": "train.jsonl",
        "data__eval_prompts": "heldout.jsonl",
        "sampling__guidance_scale": 3.0,
    }
    return settings(**given | overrides)


@pytest.mark.parametrize("tuning", ["lora", "full"])
def test_rollout_and_training_share_the_negative_prompts(files: Path, tuning: str) -> None:
    """Otherwise the replay of the first rollouts would differ.

    `full` recomputes the conditioning, with gradients.
    """
    # the gate replays two
    Path("train.jsonl").write_text("\n".join(Path("train.jsonl").read_text().splitlines()[:2]))
    config = tiny_config(model__tuning=tuning, train__prompts_per_iteration=2, train__group_size=2)
    setup = load_setup(resolve(config))
    setup.encode()
    negatives = {key: known.negative for key, known in setup.embeddings.items()}
    assert {key: negative for key, negative in negatives.items() if negative.text} == {
        RED: LONG,
        BLUE: PromptKey("a small blue ball moves"),
    }
    trainer = Trainer(setup.resolved, setup.model, setup.reward, setup.prompts, setup.embeddings)
    row = trainer.iteration(0)
    assert row["log_prob/parity"] < 1e-5


def test_seeds_of_prompts(files: Path) -> None:
    """The seed of a record is that of its first video, whatever the run's seed and the place in the
    file."""
    setup = load_setup(resolve(tiny_config(eval__seeds_per_prompt=2)))
    keys, seeds = prompts_and_seeds(setup)
    assert keys == [RED, GREEN, RED, GREEN]
    assert seeds[0] == 11
    other = load_setup(resolve(tiny_config(eval__seeds_per_prompt=2, seed=5)))
    changed = (prompts_and_seeds(other)[1] != seeds).tolist()
    assert changed == [False, True, False, True]
    assert len(set(seeds.tolist())) == 4
    assert any("training draws new noise" in note for note in setup.model.notes)
    assert not any("guidance" in note for note in setup.model.notes)
    unguided = load_setup(resolve(tiny_config(sampling__guidance_scale=1.0)))
    assert any("negative prompts have no effect" in note for note in unguided.model.notes)


def trained(words: list[str], folder: str) -> tuple[dict[str, float], list[Any]]:
    """What the policy decides of the metrics of a run of one iteration, and the scores of its
    evaluations."""
    assert main(["train", "c.yaml", "--quiet", "--output", folder, *words]) == 0
    scores = [read_json(Path(folder, "eval", f"{name}.json")) for name in ("before", "after")]
    (row,) = read_metrics(Path(folder, "metrics.jsonl"))
    keys = ("reward/mean", "reward/std", "loss", "grad_norm", "kl/anchor", "ratio/max")
    return {key: row[key] for key in keys}, scores


def test_a_negative_prompt_for_all_prompts(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is worth as much as the same one in every record, in training, evaluations and samples; a
    record's own wins."""
    config = tiny_config(
        train__iterations=1,
        train__prompts_per_iteration=3,
        train__group_size=2,
        sampling__steps=2,
        eval__steps=2,
        tracking__trackers=[],
    )
    config = dataclasses.replace(config, reward=load(CONFIGS / "demo.yaml").reward)
    Path("c.yaml").write_text(dump(config))
    everywhere = "a big green ball moves left slowly"
    in_settings = ["--data.negative_prompt", f" {everywhere} "]
    found = trained(in_settings, "settings")
    without = trained([], "without")

    for name in ("train.jsonl", "heldout.jsonl"):
        records = [json.loads(line) for line in Path(name).read_text().splitlines()]
        lines = [json.dumps({"negative_prompt": everywhere} | record) for record in records]
        Path(f"own-{name}").write_text("\n".join(lines))
    in_files = ["--data.prompts", "own-train.jsonl", "--data.eval_prompts", "own-heldout.jsonl"]
    assert trained(in_files, "files") == found
    assert without[0]["grad_norm"] != found[0]["grad_norm"]
    assert without[1][0]["reward"] != found[1][0]["reward"]
    assert found[1][0]["negatives"] == {RED.text: LONG.text, GREEN.text: everywhere}

    videos = []
    for words in (["settings"], ["without"], ["without", *in_settings]):
        folder = f"samples-{len(videos)}"
        sample = ["sample", *words, "--prompt", GREEN.text, "--model.weights", "null"]
        assert main([*sample, "--quiet", "--output", folder]) == 0
        (video,) = Path(folder).glob("*.mp4")
        videos.append(video.read_bytes())
    assert videos[0] == videos[2] != videos[1]

    # the evaluations of the run would not be paired
    capsys.readouterr()
    assert main(["train", "settings", "--resume", "--data.negative_prompt", LONG.text]) == 2
    assert "data.negative_prompt = " in capsys.readouterr().err


def test_embeddings_of_a_negative_prompt_for_all_prompts(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config(data__negative_prompt=LONG.text, data__embedding_cache="cache")
    Path("c.yaml").write_text(dump(config))
    assert main(["embed", "c.yaml"]) == 0
    setup = load_setup(resolve(config), ["a small red ball moves"], rewards=False)
    assert setup.negatives == {PromptKey("a small red ball moves"): LONG.text}
    (file,) = sage_fast.data.embeddings._files(
        Path("cache"),
        cache_key(setup.model.spec, config.model.dtype, Path("cache"), config.sampling),
        {LONG: Caption(LONG.text)},
    ).values()
    assert file.is_file()


def test_a_negative_prompt_without_guidance_is_noted(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also before a run, and not where evaluations have guidance."""
    for name in ("train.txt", "heldout.txt"):
        Path(name).write_text(f"{GREEN.text}\n")
    given = {
        "data__prompts": "train.txt",
        "data__eval_prompts": "heldout.txt",
        "data__negative_prompt": LONG.text,
    }
    idle = "negative prompts have no effect: sampling.guidance_scale = 1 turns guidance off"
    for scale, notes in ((1.0, 1), (3.0, 0)):
        config = tiny_config(sampling__guidance_scale=1.0, eval__guidance_scale=scale, **given)
        assert load_setup(resolve(config)).model.notes.count(idle) == notes
        Path("c.yaml").write_text(dump(config))
        assert main(["train", "c.yaml", "--dry-run"]) == 0
        assert " ".join(capsys.readouterr().out.split()).count(idle) == notes


def test_a_bad_negative_prompt_names_its_setting(files: Path) -> None:
    config = tiny_config(data__negative_prompt="blurry --ar 16:9")
    with pytest.raises(UserError, match=r"^data\.negative_prompt: "):
        configured_prompts(config.data)


# -- embeddings ------------------------------------------------------------------------------------

PROMPTS = [
    {"prompt": CAT, "negative_prompt": "blurry"},
    {"prompt": DOG, "negative_prompt": "blurry"},
    {"prompt": "a boat"},
    {"prompt": "a hat"},
]
TEXTS = 1 + 5 + 2  # the empty text, training prompts, held-out prompts
TINY = arguments(
    model__dtype="float32", model__lora_rank=2, data__prompts="prompts.jsonl",
    data__eval_prompts="heldout.txt",
    data__embedding_cache="cache", sampling__steps=2, sampling__num_frames=5, sampling__height=32,
    sampling__width=32,
    sampling__guidance_scale=6, reward__name="own:Bright", reward__weights="{bright: 1}",
    train__iterations=2,
    train__prompts_per_iteration=4, train__group_size=2, eval__steps=1, eval__num_prompts=2,
    eval__num_videos=1,
    tracking__trackers="[]",
)  # fmt: skip
REWARD = """
class Bright:
    def __call__(self, videos, prompts):
        return {"bright": videos.mean(dim=(1, 2, 3, 4))}
"""


def call(*words: str) -> tuple[int, str]:
    """Exit status and output of a command."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        status = main(list(words))
    return status, out.getvalue()


def embed(*words: str) -> tuple[int, str]:
    return call("embed", "c.yaml", *TINY, *words)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A checkpoint of the real classes, prompts, and a cache filled in two runs, the first cut off
    by an error."""
    folder = tmp_path_factory.mktemp("embed")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_tiny_checkpoint(folder / "model", seed=1)
        Path("c.yaml").write_text("model: {path: model}\n")
        Path("own.py").write_text(REWARD)
        Path("prompts.jsonl").write_text("\n".join(map(json.dumps, PROMPTS)))
        Path("heldout.txt").write_text("a hill\na lake\n")
        patch.setattr(sage_fast.models.hunyuan15.encoder, "load_encoder", counting(fails_at=4))
        with pytest.raises(RuntimeError):
            embed()
        assert len(list(Path("cache").glob("*.safetensors"))) == 3
        patch.setattr(sage_fast.models.hunyuan15.encoder, "load_encoder", counting(encoded := []))
        status, out = embed()
        first, *_, last = out.splitlines()  # between them a slow machine shows its progress
        assert (status, first) == (0, "sage-fast embed: loading PyTorch and diffusers")
        assert last == f"{folder}/cache: {TEXTS} texts"
        assert len(encoded) == TEXTS - 3
        yield folder


def counting(encoded: list[str] | None = None, fails_at: int | None = None) -> Callable[..., Any]:
    """`load_encoder`, whose encoder records its prompts and fails at the prompt numbered
    `fails_at`."""
    noted = [] if encoded is None else encoded

    def load(*given: Any) -> Any:
        encode = load_encoder(*given)

        def encode_one(caption: Caption) -> TextEmbedding:
            noted.append(caption.text)
            if len(noted) == fails_at:
                raise RuntimeError("killed")
            return encode(caption)

        return encode_one

    return load


@pytest.fixture
def there(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of `folder` with a link to the same checkpoint, because the cache key includes its
    path."""
    shutil.copytree(
        folder, tmp_path / "copy", ignore=lambda path, names: {"model", "runs"} & set(names)
    )
    monkeypatch.chdir(tmp_path / "copy")
    (tmp_path / "copy" / "model").symlink_to(folder / "model")
    return tmp_path / "copy"


def no_encoder(*given: Any) -> None:
    raise AssertionError("the text encoders were loaded")


def test_what_an_encoder_cuts_is_said(there: Path) -> None:
    """By prompt, tokens and limit: the language model reads 1000 tokens, and ByT5 256 of quoted
    text, a byte each."""
    long, quoted = "ab " * 1200, f'a sign says "{"x" * 300}"'
    (there / "more.txt").write_text(f"a cat\n{long}\n{quoted}\n")
    status, out = embed("--prompts", "more.txt")
    flat = " ".join(out.split())
    assert status == 0
    assert f"note: prompt '{long[:60].strip()}' has 2402 tokens; 1000 are read" in flat.replace(
        "ab ' has", "ab' has"
    )
    assert f"note: prompt {quoted[:60]!r} has 310 tokens in quotes; 256 are read" in flat
    assert out.count("note: prompt") == 2


def test_prompts_with_one_embedding_are_told(there: Path, caplog: pytest.LogCaptureFixture) -> None:
    begin = "a b c " * 600
    prompts = [begin + "one", begin + "two", "a cat", "a dog"]
    encode = load_encoder("model", torch.float32, CPU)
    found = encode_cached(captions(*prompts), lambda: encode, None, "m", TextEmbedding)
    assert torch.equal(found[PromptKey(prompts[0])].text, found[PromptKey(prompts[1])].text)
    lines = [" ".join(message.split()) for message in caplog.messages if "cannot tell" in message]
    assert len(lines) == 1
    assert f"cannot tell prompts '{begin}one' and '{begin}two' apart" in lines[0]


def test_a_full_cache_loads_no_encoder(there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sage_fast.models.hunyuan15.encoder, "load_encoder", no_encoder)
    assert embed()[0] == 0


def test_broken_and_missing_embeddings_are_encoded_again(there: Path) -> None:
    first, second, *_ = sorted((there / "cache").glob("*.safetensors"))
    content = first.read_bytes()
    first.write_bytes(content[:-1])
    second.unlink()
    assert embed()[0] == 0
    assert first.read_bytes() == content


def test_a_cache_has_to_be_named(there: Path) -> None:
    status, out = embed("--data.embedding_cache", "null")
    assert status == 2
    assert "expected the folder that runs share, such as embeddings" in out


def test_the_cache_holds_what_the_encoders_give(there: Path) -> None:
    model = load_model(ModelConfig(path="model", dtype="float32"), SamplingConfig(), CPU, seed=0)
    encode = model.load_encoder(SamplingConfig())
    found = encode_cached(captions(DOG, ""), no_encoder, there / "cache",
                          cache_key(model.spec, "float32", there / "cache", SamplingConfig()),
                          TextEmbedding)  # fmt: skip
    assert len(found[PromptKey(DOG)].glyphs) > 0
    for prompt in (DOG, ""):
        cached = found[PromptKey(prompt)]
        assert torch.equal(cached.text, encode(Caption(prompt)).text)
        assert torch.equal(cached.glyphs, encode(Caption(prompt)).glyphs)


def test_a_changed_encoder_is_not_served_what_another_gave(there: Path) -> None:
    (there / "model").unlink()
    model = shutil.copytree(
        write_tiny_checkpoint(there / "model", seed=1), there / "same", symlinks=True
    )
    assert embed()[0] == 0
    # another folder has another key
    assert len(list((there / "cache").glob("*.safetensors"))) == 2 * TEXTS
    assert fingerprint("model", PARTS, ENCODING) == fingerprint("same", PARTS, ENCODING)
    versions = {fingerprint("same", PARTS, ENCODING)}
    with (model / "text_encoder" / "model.safetensors").open("r+b") as weights:
        weights.seek(-100, 2)
        weights.write(b"\x3f")
    versions.add(fingerprint("same", PARTS, ENCODING))
    (model / "tokenizer_2" / "new.json").write_text("{}")
    versions.add(fingerprint("same", PARTS, ENCODING))
    assert len(versions) == 3
    shutil.copytree(model, there / "model", dirs_exist_ok=True)
    assert embed()[0] == 0
    assert len(list((there / "cache").glob("*.safetensors"))) == 3 * TEXTS


@contextlib.contextmanager
def without_encoders(model: Path) -> Iterator[None]:
    hidden = model.parent / "hidden"
    hidden.mkdir()
    for part in PARTS:
        (model / part).rename(hidden / part)
    try:
        yield
    finally:
        for part in PARTS:
            (hidden / part).rename(model / part)
        hidden.rmdir()


def test_the_commands_of_the_page(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Run docs/how-to/prompts.md: embed more prompts than the run's, then train without text
    encoders."""
    own = split_settings([*TINY, "--model.path", "model", "--output", "runs/page"])[1]
    del own["data.embedding_cache"]
    (there / "config.yaml").write_text(dump(load(None, own)))
    (there / "more.jsonl").write_text(
        '{"prompt": "a boat"}\n{"prompt": "a fox", "negative_prompt": "blurry"}\n'
    )
    shutil.move(there / "cache", there / "embeddings")
    (page,) = blocks(REPOSITORY / "docs" / "how-to" / "prompts.md")
    first, second, training = (line.split()[1:] for line in page.text.splitlines())
    for words, expected in ((first, f"{TEXTS} texts"), (second, "4 texts")):
        assert main(words) == 0
        assert expected in capsys.readouterr().out
    with without_encoders((there / "model").resolve()):
        assert main(training) == 0
        run = there / "runs" / "page"
        assert [row["iteration"] for row in read_metrics(run / "metrics.jsonl")] == [0, 1]
        assert read_json(run / "eval" / "after.json")["prompts"] == ["a hill", "a lake"]
        assert not (run / "embeddings").exists()


def test_metadata_reach_training_evaluations_and_saved_videos(there: Path) -> None:
    """The reward fails without a count, so that each place that scores a video has to pass it
    on."""
    Path("counted.py").write_text(
        "def count(videos, prompts, metadata):\n    return {'bright': [float(one['count']) for one "
        "in metadata]}\n"
    )
    Path("prompts.jsonl").write_text("\n".join(json.dumps(row | {"count": 3}) for row in PROMPTS))
    held = [{"prompt": text, "count": count} for count, text in enumerate(("a hill", "a lake"))]
    Path("held.jsonl").write_text("\n".join(map(json.dumps, held)))
    own = [
        *TINY,
        *arguments(
            reward__name="counted:count", reward__on_failure="stop", data__eval_prompts="held.jsonl"
        ),
    ]
    own += ["--eval.judge", "counted:count"]
    status, out = call("train", "c.yaml", *own, "--output", "runs/counted")
    assert status == 0, out
    for name in ("before", "after"):
        scores = read_json(Path("runs", "counted", "eval", f"{name}.json"))
        assert scores["parts"] == {"bright": [0, 1], "judge/bright": [0, 1]}
    assert read_metrics(Path("runs", "counted", "metrics.jsonl"))[0]["reward/mean"] == 3
    assert "prompts (metadata: count)" in call("train", "c.yaml", *own, "--dry-run")[1]
    assert call("eval", "runs/counted", "--folder", "out", "--scorer", "counted:count")[0] == 0
    folder = next(Path("out", "videos").iterdir())
    videos = [
        "eval",
        str(folder),
        *arguments(reward__name="counted:count", reward__weights="{bright: 1}"),
    ]
    status, out = call(*videos, "--json", "scores.json", "--data.eval_prompts", "held.jsonl")
    assert status == 0, out
    assert read_json(Path("scores.json"))["parts"]["bright"] == [0, 1]
    status, out = call(*videos)
    assert (status, "KeyError: 'count'" in out) == (2, True)


def test_a_prompt_that_is_not_embedded_asks_for_the_encoders(there: Path) -> None:
    (there / "heldout.txt").write_text("a new one\n")
    with without_encoders((there / "model").resolve()):
        for status, out in (call("train", "c.yaml", *TINY, "--output", "runs/two"), embed()):
            assert status == 2
            assert "cannot read the encoders" in out


def test_the_version_on_the_hub_is_that_of_what_was_downloaded(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub identifies contents by their hashes, and so do the links in its cache."""
    cache, snapshot = (
        tmp_path / "models--someone--tiny",
        tmp_path / "models--someone--tiny" / "snapshots" / ("0" * 40),
    )
    (cache / "blobs").mkdir(parents=True)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("0" * 40)
    siblings = []
    for number, file in enumerate(
        sorted(path for path in (folder / "model").rglob("*") if path.is_file())
    ):
        name = file.relative_to(folder / "model").as_posix()
        shutil.copy(file, cache / "blobs" / f"{number:040x}")
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / name).symlink_to(
            Path(*[".."] * (2 + name.count("/")), "blobs", f"{number:040x}")
        )
        large = name.endswith("safetensors")
        lfs = BlobLfsInfo(size=1, sha256=f"{number:040x}", pointer_size=1) if large else None
        siblings.append(
            RepoSibling(rfilename=name, blob_id="pointer" if large else f"{number:040x}", lfs=lfs)
        )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    reachable.cache_clear()
    offline = fingerprint("someone/tiny", PARTS, ENCODING)
    assert offline is not None
    reachable.cache_clear()
    monkeypatch.setattr(
        HfApi, "model_info", lambda *given, **options: SimpleNamespace(siblings=siblings)
    )
    assert fingerprint("someone/tiny", PARTS, ENCODING) == offline
    siblings[:] = [file for file in siblings if not file.rfilename.startswith("vae/")]
    assert fingerprint("someone/tiny", PARTS, ENCODING) == offline
    siblings[:] = [file for file in siblings if file.rfilename != "text_encoder/config.json"]
    assert fingerprint("someone/tiny", PARTS, ENCODING) != offline
    reachable.cache_clear()
