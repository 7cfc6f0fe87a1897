"""From prompts to the paper's table by the command: embed, train, eval and compare, on one process
and on two ranks.

VideoAlign, CLIPScore, PickScore and the generator are tiny models of the real classes, in the
published layouts.
"""

from pathlib import Path
from typing import Any

import pytest
import yaml

from sage_fast.cli import main
from sage_fast.eval.video_folder import read_folder
from sage_fast.util.files import read_json, read_metrics
from tests.ranks import command_on_ranks
from tests.test_judging import folder_of_videos
from tests.tiny_checkpoint import write_tiny_checkpoint
from tests.tiny_rewards import published_weights, write_clip, write_qwen2_vl, write_video_reward

pytestmark = pytest.mark.soak

PROMPTS = ["a red ball rolls", "the blue table falls", "a red table", "the ball falls over"]
HELD_OUT = ["a blue ball falls", "the red ball rolls over the table"]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration, and one process's chain of commands; then two ranks'."""
    folder = tmp_path_factory.mktemp("chain")
    base = write_qwen2_vl(folder / "qwen2-vl")
    published = write_video_reward(folder / "VideoReward", published_weights(base))
    video_align = {"path": str(published), "base": str(base)}
    clip = str(write_clip(folder / "clip"))
    (folder / "prompts.txt").write_text("\n".join(PROMPTS))
    (folder / "heldout.txt").write_text("\n".join(HELD_OUT))
    config: dict[str, Any] = {
        "model": {"path": str(write_tiny_checkpoint(folder / "model", seed=1)), "dtype": "float32",
            "lora_rank": 2},
        "data": {"prompts": str(folder / "prompts.txt"),
            "eval_prompts": str(folder / "heldout.txt"),
                 "embedding_cache": str(folder / "embeddings")},
        "sampling": {"steps": 2, "num_frames": 5, "height": 32, "width": 32, "guidance_scale": 1},
        "reward": {"several": [
            {"name": "videoalign", "args": video_align, "weights": {"vq": 0.5, "mq": 0.5, "ta": 1}},
            {"name": "clipscore", "args": {"path": clip, "num_frames": 2}, "weights": {}},
            {"name": "pickscore", "args": {"path": clip, "processor": clip, "num_frames": 2},
             "weights": {}},
        ]},
        "train": {"iterations": 2, "prompts_per_iteration": 2, "group_size": 2,
            "learning_rate": 1e-2},
        "eval": {"steps": 2, "num_prompts": 2, "num_videos": 1},
        "tracking": {"trackers": []},
    }  # fmt: skip
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    folder_of_videos(folder / "videos", HELD_OUT)
    for words in chain(folder, "one"):
        assert main(words) == 0
    *_, evaluated = (command_on_ranks(words, folder) for words in chain(folder, "two"))
    assert evaluated.count("| reward ") == 2  # one rank prints the means and the gains
    return folder


def chain(folder: Path, name: str) -> list[list[str]]:
    config, run = str(folder / "config.yaml"), str(folder / name)
    return [
        ["embed", config, "--quiet"],
        ["train", config, "--output", run, "--quiet"],
        ["eval", "base", f"trained={run}", str(folder / "videos"), "--folder", f"{run}-evaluation",
         "--json", f"{run}.json", "--quiet"],
    ]  # fmt: skip


def test_the_papers_columns_stand_in_one_table(work: Path) -> None:
    assert len(list((work / "embeddings").glob("*.safetensors"))) == 1 + len(PROMPTS) + len(
        HELD_OUT
    )
    for name in ("one", "two"):
        table = (work / f"{name}-evaluation" / "evaluation.md").read_text()
        rows = {line.split("|")[1].strip() for line in table.splitlines() if line.startswith("|")}
        assert {"reward", "vq", "mq", "ta", "vq_raw", "clipscore", "pickscore"} <= rows, table
        assert (work / f"{name}-evaluation" / "evaluation.html").stat().st_size > 10_000


def test_two_ranks_train_and_score_as_one_process(work: Path) -> None:
    one, two = (read_metrics(work / name / "metrics.jsonl") for name in ("one", "two"))
    assert len(one) == len(two) == 2
    for row, other in zip(one, two):
        for key in (
            "reward/mean",
            "reward_part/vq",
            "reward_part/vq_raw",
            "reward_part/clipscore",
            "grad_norm",
        ):
            assert row[key] == pytest.approx(other[key], rel=1e-2), key
        assert row["reward/std"] > 0
    before = [read_json(work / name / "eval" / "before.json")["parts"] for name in ("one", "two")]
    for part in ("vq", "mq_raw", "ta", "clip_cosine", "pickscore"):
        assert before[0][part] == pytest.approx(before[1][part], abs=0.05), part
    ours, theirs = (read_json(work / f"{name}.json")["sources"] for name in ("one", "two"))
    for source in ("base", "trained", "videos"):
        assert ours[source]["prompts"] == theirs[source]["prompts"]
        assert ours[source]["reward"] == pytest.approx(theirs[source]["reward"], abs=0.05), source
    assert len(read_folder("x", work / "two-evaluation" / "videos" / "trained").shown) == len(
        HELD_OUT
    )


def test_both_are_compared(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            ["compare", str(work / "one"), str(work / "two"), "--folder", str(work / "comparison")]
        )
        == 0
    )
    page = Path(capsys.readouterr().out.strip().splitlines()[-1])
    text = page.read_text()
    assert "pickscore" in text
    assert text.count("<video") >= 2
