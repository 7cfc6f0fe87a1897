"""docs/tutorials/eight-gpus.md, every command, on a tiny checkpoint of the real classes and two CPU
ranks."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from sage_fast.cli import main
from sage_fast.models.lora.adapter import LORA_FILE
from sage_fast.rewards.shipped.videoalign import VideoAlignReward
from sage_fast.util.files import read_metrics
from tests.ranks import command_on_ranks
from tests.test_docs import REPOSITORY, blocks, commands
from tests.tiny_checkpoint import write_tiny_checkpoint
from tests.tiny_rewards import published_weights, write_qwen2_vl, write_video_reward

PAGE = REPOSITORY / "docs" / "tutorials" / "eight-gpus.md"
PUBLISHED = "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v"
SMALL: dict[str, dict[str, Any]] = {
    "model": {"dtype": "float32", "lora_rank": 2},
    "sampling": {"steps": 2, "num_frames": 5, "height": 32, "width": 32},
    "train": {
        "iterations": 2,
        "prompts_per_iteration": 4,
        "group_size": 2,
        "learning_rate": 1e-2,
        "warmup_steps": 0,
    },
    "eval": {"steps": 1, "num_prompts": 2, "num_videos": 1, "interval": 0},
    "tracking": {"trackers": []},
}


def make_small(config: Path, model: Path) -> None:
    """A new user's file with the page's section `reward`, and the sizes of the tiny checkpoint."""
    tree = yaml.safe_load(config.read_text())
    assert tree["model"]["path"] == PUBLISHED
    (section,) = re.findall(r"^```yaml\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    tree |= yaml.safe_load(section)
    for section, settings in SMALL.items():
        tree.setdefault(section, {}).update(settings)
    tree["model"]["path"] = str(model)
    config.write_text(yaml.safe_dump(tree))


def download(repository: str, folder: Path) -> None:
    """Tiny models in the published layouts, in place of `hf download`."""
    if repository == "KwaiVGI/VideoReward":
        write_video_reward(
            folder, published_weights(write_qwen2_vl(folder.parent / "of-these-weights"))
        )
    else:
        assert repository == VideoAlignReward.__init__.__kwdefaults__["base"]
        write_qwen2_vl(folder)


def test_every_command_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_tiny_checkpoint(tmp_path / "model", seed=1)
    monkeypatch.chdir(tmp_path)
    printed: dict[str, str] = {"ranks": ""}
    started: list[list[str]] = []
    (python,) = (block for block in blocks(PAGE) if block.kind == "python")
    for words in [
        words for block in blocks(PAGE) if block is not python for words in commands(block)
    ]:
        if words[0] == "torchrun":
            assert words[:5] == ["torchrun", "--nproc-per-node", "8", "-m", "sage_fast"]
            started.append([re.sub("^300$", "3", word) for word in words[5:]])
            printed["ranks"] += command_on_ranks(started[-1], Path.cwd())
        elif words[0] == "cd":
            monkeypatch.chdir(words[1])
            make_small(Path("config.yaml"), model)
            for file, count in (("prompts.txt", 4), ("heldout.txt", 2)):  # the user's own
                lines = Path(file).read_text().splitlines(keepends=True)
                Path(file).write_text("".join(lines[:count]))
        elif words[0] == "hf":
            download(words[2], Path(words[words.index("--local-dir") + 1]))
        elif words[0] == "sage-fast":
            assert main(words[1:]) == 0
            printed[words[1]] = capsys.readouterr().out
            started.append(words[1:])
    did = ["init", "train", "embed", "train", "train", "eval", "sample", "eval", "export"]
    assert [words[0] for words in started] == did
    assert "one iteration on 8 GPUs" in printed["train"]
    assert "reward videoalign: 0.5 mq + 1 ta + 0.5 vq" in printed["train"]
    assert "not in the hub's cache" not in printed["train"]  # both folders of the page are found
    texts = (
        1
        + len(Path("prompts.txt").read_text().splitlines())
        + len(Path("heldout.txt").read_text().splitlines())
    )
    assert f"embeddings: {texts} texts" in printed["ranks"]
    assert len(list(Path("embeddings").glob("*.safetensors"))) == texts + 1  # that of `sample`
    run = Path("runs/first")
    assert not (run / "embeddings").exists()
    assert [row["iteration"] for row in read_metrics(run / "metrics.jsonl")] == [0, 1, 2]
    assert "resumed after 2 iterations" in printed["ranks"]
    table = Path("evaluation/evaluation.md").read_text()
    rows = {line.split("|")[1].strip() for line in table.splitlines() if line.startswith("|")}
    assert {"mq", "mq_raw", "ta", "ta_raw", "vq", "vq_raw"} <= rows
    assert Path("evaluation/evaluation.html").is_file()
    assert Path("evaluation-6/evaluation.md").read_text() != table  # guided
    assert (Path("exported") / LORA_FILE).is_file()
    assert (run / "report.html").is_file()
    assert Path("samples/00-a-red-fox-trots-through-fresh-snow.mp4").stat().st_size > 300

    code = python.text
    for theirs, ours in (
        (f'"{PUBLISHED}"', repr(str(model))),
        ('"cuda"', '"cpu"'),
        ("height=480", "height=32"),
        ("width=832", "width=32"),
        ("num_frames=81", "num_frames=5"),
        ("num_inference_steps=40", "num_inference_steps=2"),
    ):
        assert code.count(theirs) == 1
        code = code.replace(theirs, ours)
    names: dict[str, Any] = {}
    exec(compile(code, PAGE.name, "exec"), names)
    assert Path("first.mp4").stat().st_size > 300
    assert (run / "weights" / LORA_FILE).is_file()
    pipeline = names["pipeline"]

    def latents() -> torch.Tensor:
        made = pipeline("a small red ball", height=32, width=32, num_frames=5,
            num_inference_steps=2,
            output_type="latent",
                        generator=torch.Generator().manual_seed(0))  # fmt: skip
        return made.frames

    trained = latents()
    pipeline.transformer.disable_lora()
    assert not torch.equal(latents(), trained)
