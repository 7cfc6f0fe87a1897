"""Wan by the command, from `init` to an exported LoRA, over a tiny checkpoint of the real
classes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanPipeline, WanTransformer3DModel
from peft import PeftModel
from safetensors.torch import load_file

from sage_fast.cli import main
from sage_fast.models.lora.adapter import LORA_FILE
from sage_fast.models.wan.lora_names import BLOCK, comfyui, original
from sage_fast.util.errors import UserError
from sage_fast.util.files import read_metrics
from tests.ranks import command_on_ranks
from tests.tiny import arguments
from tests.tiny_wan import write_tiny_wan

NAME = "wan21-1.3b"
REWARD = "def brightness(videos, prompts):\n    return {'mean': videos.mean((1, 2, 3, 4))}\n"


def small(folder: Path) -> list[str]:
    """The shipped settings over the tiny checkpoint, in seconds on a CPU."""
    return arguments(
        model__path=folder / "checkpoint",
        model__dtype="float32",
        model__lora_rank=4,
        sampling__height=64,
        sampling__width=48,
        sampling__num_frames=9,
        sampling__steps=4,
        reward__name="any_video:brightness",
        reward__args="{}",
        reward__weights="{mean: 1}",
        train__group_size=2,
        train__optimizer_steps=2,
        train__iterations=2,
        train__learning_rate=1e-2,
        train__checkpoint_interval=1,
        eval__steps=2,
        eval__num_prompts=2,
        tracking__trackers="[]",
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A starter folder of the shipped configuration, with a finished run of two iterations."""
    parent = tmp_path_factory.mktemp("user")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(parent)
        assert main(["init", "wan", "--config", NAME]) == 0
        folder = parent / "wan"
        write_tiny_wan(folder / "checkpoint")
        (folder / "any_video.py").write_text(REWARD)
        patch.chdir(folder)
        words = ["train", "config.yaml", "--quiet", *small(folder), "--output", "run"]
        assert main(words) == 0
        yield folder


def test_the_starter_folder_plans_the_published_model(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "config.yaml", "--dry-run", "--gpu-memory", "24"]) == 0
    text = capsys.readouterr().out
    assert "1,418,996,800" in text
    assert "16 x 9 x 60 x 104" in text
    assert "This fits 1 GPU of 24 GB" in text


def test_a_run_trains_and_evaluates(folder: Path) -> None:
    rows = read_metrics(folder / "run" / "metrics.jsonl")
    assert len(rows) == 2
    assert all(min(row["reward/std"], row["grad_norm"]) > 0 for row in rows)
    assert rows[0]["log_prob/parity"] < 1e-6
    before, after = (
        json.loads((folder / "run" / "eval" / f"{name}.json").read_text())
        for name in ("before", "after")
    )
    assert before["reward"] != after["reward"]


def test_a_resume_goes_on_as_if_never_stopped(folder: Path) -> None:
    words = ["train", "config.yaml", "--quiet", *small(folder), "--output", "stopped"]
    assert main([*words, "--train.iterations", "1"]) == 0
    again = ["train", "stopped/config.yaml", "--quiet", "--resume", "--train.iterations", "2"]
    assert main(again) == 0
    whole, resumed = (read_metrics(folder / name / "metrics.jsonl") for name in ("run", "stopped"))
    for key in ("reward/mean", "grad_norm", "kl/anchor", "ratio/max"):
        assert whole[1][key] == resumed[1][key], key


@pytest.mark.parametrize(
    "given",
    [{"train.engine": "zero3"}, {"model.sequence_parallel": 2}, {"train.engine": "zero2"}],
    ids=lambda given: str(*given.values()),
)
def test_two_ranks_train_as_one_process(folder: Path, given: dict[str, Any]) -> None:
    name = f"ranks-{'-'.join(map(str, given.values()))}"
    words = ["train", "config.yaml", "--quiet", *small(folder), "--output", name]
    for key, value in given.items():
        words += [f"--{key}", str(value)]
    command_on_ranks([*words, "--train.iterations", "1"], folder, DS_ACCELERATOR="cpu")
    (one, *_), (two,) = (read_metrics(folder / each / "metrics.jsonl") for each in ("run", name))
    for key in ("reward/mean", "grad_norm"):
        assert two[key] == pytest.approx(one[key], rel=1e-3), key


def test_samples_and_an_evaluation_of_a_run(folder: Path) -> None:
    assert main(["sample", "run", "--prompt", "a red kite", "--folder", "samples", "--quiet"]) == 0
    (video,) = Path("samples").glob("*.mp4")
    assert video.stat().st_size > 0
    assert main(["eval", "run", "--quiet"]) == 0


@pytest.fixture(scope="module")
def exported(folder: Path) -> Path:
    assert main(["export", "run", "out", "--base", "someone/wan"]) == 0
    return folder / "out"


def test_four_layouts_are_exported(folder: Path, exported: Path) -> None:
    names = {file.name for file in exported.iterdir()}
    assert names == {
        LORA_FILE,
        "adapter_model.safetensors",
        "adapter_config.json",
        "run-original.safetensors",
        "run-comfyui.safetensors",
        "README.md",
    }
    tuned = PeftModel.from_pretrained(
        WanTransformer3DModel.from_pretrained(folder / "checkpoint" / "transformer"), exported
    )
    stored = load_file(exported / LORA_FILE)
    loaded = {
        name.replace(".default", "").removeprefix("base_model.model."): p
        for name, p in tuned.named_parameters()
    }
    assert all(torch.equal(loaded[name], tensor) for name, tensor in stored.items())


def test_diffusers_reads_what_comfyui_reads(folder: Path, exported: Path) -> None:
    """Its own converter of Wan's names, which it applies to files with ComfyUI's prefix, gives the
    adapter back."""
    found = []
    for name in (LORA_FILE, "run-comfyui.safetensors"):
        pipeline = WanPipeline.from_pretrained(folder / "checkpoint", text_encoder=None, vae=None)
        if name == LORA_FILE:
            pipeline.transformer.load_lora_adapter(exported, weight_name=name, prefix=None)
        else:
            pipeline.load_lora_weights(exported, weight_name=name)
        deltas = {
            layer: module.get_delta_weight(module.active_adapter[0])
            for layer, module in pipeline.transformer.named_modules()
            if hasattr(module, "get_delta_weight")
        }
        assert len(deltas) == 2 * 10
        assert all(delta.any() for delta in deltas.values())
        found.append(deltas)
    ours, theirs = found
    for layer, delta in ours.items():
        torch.testing.assert_close(theirs[layer], delta)


def test_the_original_names_are_comfyuis_without_their_prefix(exported: Path) -> None:
    plain, prefixed = (
        load_file(exported / f"run-{layout}.safetensors") for layout in ("original", "comfyui")
    )
    assert {f"diffusion_model.{name}" for name in plain} == prefixed.keys()
    assert {name.split(".", 2)[2].split(".lora_")[0] for name in plain if ".lora_A." in name} == {
        *BLOCK.values()
    }


@pytest.mark.parametrize("layout", ["original", "comfyui"])
def test_a_run_begins_from_each_layout(folder: Path, exported: Path, layout: str) -> None:
    words = ["train", "config.yaml", "--quiet", *small(folder), "--output", f"from-{layout}"]
    words += ["--model.weights", str(exported / f"run-{layout}.safetensors")]
    assert main([*words, "--train.iterations", "1"]) == 0
    before = json.loads(Path(f"from-{layout}/eval/before.json").read_text())
    after = json.loads(Path("run/eval/after.json").read_text())
    assert before["reward"] == pytest.approx(after["reward"], rel=1e-4)


@pytest.mark.parametrize("target", [original, comfyui])
def test_a_layer_without_another_name_is_said(target: Any) -> None:
    with pytest.raises(UserError, match=r"blocks.0.norm2"):
        target("blocks.0.norm2")


def test_the_card_names_the_licence_and_the_pipeline(exported: Path) -> None:
    card = (exported / "README.md").read_text()
    assert "license: apache-2.0" in card.split("---")[1]
    assert "fps=16" in card
    assert "guidance_scale=4.5" in card
    assert "negative_prompt=" in card
