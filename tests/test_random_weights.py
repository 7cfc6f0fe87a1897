"""`model.path = random:NAME`: every command of a model without a checkpoint, at its true sizes."""

from pathlib import Path

import pytest
import torch

from sage_fast.cli import main
from sage_fast.config.loader import build, dump
from sage_fast.models.find import find_spec
from sage_fast.models.hunyuan15.encoder import random_encoder
from sage_fast.models.load import load_model
from sage_fast.models.lora.adapter import LORA_FILE
from sage_fast.models.random_weights import random_module
from sage_fast.tools.plan import plan
from sage_fast.tools.plan_text import format_plan
from sage_fast.util.captions import Caption
from sage_fast.util.files import read_metrics
from tests.tiny import settings

PUBLISHED = "random:hunyuanvideo15-480p"
CPU = torch.device("cpu")
REWARD = "def brightness(videos, prompts):\n    return {'mean': videos.mean((1, 2, 3, 4))}\n"


def test_a_run_from_the_prompt_to_the_checkpoint_and_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prompts of any words and a reward of any video; the updates are made, and another process
    finds the same base."""
    monkeypatch.chdir(tmp_path)
    Path("any_video.py").write_text(REWARD)
    Path("prompts.txt").write_text(
        "An otter juggles three stones.\nSnow falls on the harbour of a small town.\n"
    )
    config = settings(
        model__path="random:testbed", reward__name="any_video:brightness",
        reward__weights={"mean": 1.0},
        data__prompts="prompts.txt", data__eval_prompts="prompts.txt", sampling__steps=2,
        eval__steps=1,
        train__iterations=1, tracking__trackers=[], output="run",
    )  # fmt: skip
    Path("random.yaml").write_text(dump(config))
    assert main(["train", "random.yaml"]) == 0
    assert capsys.readouterr().out.count("the weights are random") == 1
    (row,) = read_metrics(Path("run/metrics.jsonl"))
    assert row["reward/std"] > 0
    assert row["grad_norm"] > 0
    assert {path.name for path in Path("run/weights").iterdir()} == {LORA_FILE, "manifest.json"}
    assert not list(Path("run/checkpoints").rglob("transformer"))
    assert main(["train", "random.yaml", "--resume", "--train.iterations", "2", "--quiet"]) == 0
    assert len(read_metrics(Path("run/metrics.jsonl"))) == 2
    capsys.readouterr()
    assert main(["sample", "run", "--prompt", "A kite."]) == 0
    assert capsys.readouterr().out.count("the weights are random") == 1


def test_the_plan_is_that_of_the_published_model() -> None:
    config = build({"model.path": PUBLISHED, "sampling.num_frames": 81})
    assert plan(config, find_spec(PUBLISHED)) == plan(config)
    assert find_spec(PUBLISHED).meta("transformer").config.task_type == "t2v"
    assert (
        main(["train", "configs/hunyuanvideo15-480p.yaml", "--model.path", PUBLISHED, "--dry-run"])
        == 0
    )


def test_few_blocks_are_as_wide_as_the_published_ones() -> None:
    few, whole = (
        find_spec(path).transformer_config for path in (f"{PUBLISHED}-4-blocks", PUBLISHED)
    )
    differs = {name: value for name, value in few.items() if whole[name] != value}
    assert {name: value for name, value in differs.items() if not name.startswith("_")} == {
        "num_layers": 4
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_drawn_in_their_type_and_the_same_each_time(dtype: torch.dtype) -> None:
    spec = find_spec("random:testbed")
    for part in ("transformer", "vae"):
        one, two = (random_module(spec, part, dtype, CPU) for _ in range(2))
        for (name, p), q in zip(one.named_parameters(), two.parameters()):
            assert p.dtype == dtype
            assert torch.equal(p, q), name
            if p.ndim > 1 and p.numel() > 4000 and not spec.is_gate(name):
                assert float(p.detach().float().std()) * p[0].numel() ** 0.5 == pytest.approx(
                    1, abs=0.1
                ), name


def test_full_tuning_trains_float32_weights() -> None:
    config = settings(model__path="random:testbed", model__tuning="full", model__dtype="bfloat16")
    model = load_model(config.model, config.sampling, CPU, seed=0)
    assert {p.dtype for p in model.policy.parameters().values()} == {torch.float32}
    assert model.decoder.vae.dtype == torch.bfloat16


def test_embeddings_follow_from_the_text() -> None:
    encode = random_encoder(find_spec(PUBLISHED).meta("transformer").config)
    first, again, other, empty = (
        encode(Caption(text)) for text in ("a red kite", "a red kite", "a red kita", "")
    )
    assert torch.equal(first.text, again.text)
    assert not torch.equal(first.text, other.text)
    assert first.text.shape == (1 + 10 // 4, 3584)
    assert empty.text.shape == (1, 3584)
    assert first.glyphs.shape == (0, 1472)
    assert encode(Caption("word " * 2000)).text.shape == (1000, 3584)


def test_unknown_names(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for command in (["train", "--dry-run"], ["train"], ["sample", "--prompt", "a"]):
        name, *options = command
        given = ["--model.path", "random:hunyuanvideo15-720p", "--output", str(tmp_path / "none")]
        assert main([name, "configs/recipes/paper.yaml", *options, *given]) == 2
        assert "did you mean 'random:hunyuanvideo15-480p'" in capsys.readouterr().err
        assert not (tmp_path / "none").exists()


def test_images_take_tokens_and_encoders() -> None:
    """A forward of 480p has 729 tokens of an image beside those of the text; the transformer is the
    same."""
    config = build({"sampling.num_frames": 81, "model.gradient_checkpointing": "full"})
    text, image = (find_spec(path) for path in (PUBLISHED, f"{PUBLISHED}-i2v"))
    assert (image.prompt_tokens, text.prompt_tokens) == (929, 200)
    assert image.attention_shape(config.sampling)[0] == 32_760 + 929
    less, more = (plan(config, spec) for spec in (text, image))
    assert (more.parameters, more.trainable) == (less.parameters, less.trainable)
    for part in ("forward", "training"):
        assert 1.03 < more.flops[part] / less.flops[part] < 1.05
    assert (
        main(
            [
                "train",
                "configs/hunyuanvideo15-480p-i2v.yaml",
                "--model.path",
                image.path,
                "--dry-run",
            ]
        )
        == 0
    )
    part = "activations, checkpointing full"
    assert more.memory[part] / less.memory[part] == pytest.approx(
        (32_760 + 929) / (32_760 + 200), rel=0.005
    )
    assert "with 929 tokens a prompt" in " ".join(format_plan(more).split())
