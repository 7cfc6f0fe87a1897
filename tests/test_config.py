"""Settings: files, overrides, and the message for every kind of mistake."""

from pathlib import Path
from typing import Any

import pytest

from sage_fast.config import Config, build, dump, load
from sage_fast.data.prompts import prompts_of_iteration, read_prompts

REPOSITORY = Path(__file__).parent.parent


@pytest.mark.parametrize("path", sorted((REPOSITORY / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_configs_are_valid(path: Path) -> None:
    assert isinstance(load(path), Config)


def test_dump_is_what_load_reads(tmp_path: Path) -> None:
    config = build({"sampling.eta": 0.3, "reward.weights.vq": 2.0, "train.group_size": 7})
    assert config.reward.weights == {"vq": 2.0}  # named weights replace the default three
    (tmp_path / "config.yaml").write_text(dump(config))
    assert load(tmp_path / "config.yaml") == config


def test_overrides_win_and_are_typed(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("sampling: {eta: 0.3, steps: 7}\n")
    config = load(file, {"sampling.eta": "0.9", "kl.lambda_max": "1e-3", "sampling.shared_initial_noise": "true"})
    assert (config.sampling.eta, config.sampling.steps) == (0.9, 7)
    assert config.kl.lambda_max == 1e-3
    assert config.sampling.shared_initial_noise is True


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"sampling.sampler": "sagee"}, "'sagee'.*did you mean 'sage'"),
        ({"sampling.eta": -0.5}, "sampling.eta = -0.5.*nearest is 0"),
        ({"sampling.eta": 1.5, "sampling.sampler": "cps"}, "cps is defined up to 1"),
        ({"sampling.eta": "much"}, "sampling.eta = 'much'.*Float"),
        ({"sampling.steps": 0}, "sampling.steps = 0.*nearest is 1"),
        ({"sampling.shift": 0}, "sampling.shift = 0.*above 0"),
        ({"sampling.num_frames": 80}, "num_frames = 80: expected 4k . 1; the nearest valid values are 77 and 81"),
        ({"sampling.num_frames": 0}, "num_frames = 0.*nearest valid values are 1"),
        ({"sampling.height": 481}, "height = 481: expected a multiple of 16; the nearest valid values are 480 and 496"),
        ({"sampling.width": 8}, "width = 8: expected a multiple of 16; the nearest valid values are 16"),
        ({"train.group_size": 1}, "group of 1.*nearest is 2"),
        ({"reward.weights.vq": 0.0, "reward.weights.ta": 0.0}, "at least one of them not zero"),
        ({"reward.weights.vq": float("nan")}, "expected finite weights"),
        ({"eval.num_videos": 0}, "num_videos = 0.*nearest is 1"),
        ({"kl.strategy": "duel"}, "did you mean 'dual'"),
        ({"objective.clip_range": 0.0}, "clip_range = 0.0.*above 0"),
        ({"kl.lambda_min": 1.0}, "lambda_min = 1.0.*lambda_max"),
        ({"sampling.sde_window": 99}, "sde_window = 99.*20"),
        ({"train.timestep_fraction": 0.0}, "timestep_fraction"),
        ({"sampling.etta": 1}, "unknown setting 'sampling.etta'; did you mean 'sampling.eta'"),
        ({"eta": 1}, "did you mean 'sampling.eta'"),
        ({"optimizer.learning_rate": 1}, "did you mean 'train.learning_rate'"),
    ],
)
def test_messages(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(setting)


def test_config_file_messages(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such file"):
        load(tmp_path / "missing.yaml")
    (tmp_path / "bad.yaml").write_text("a: [1, 2\n")
    with pytest.raises(ValueError, match="not valid YAML"):
        load(tmp_path / "bad.yaml")
    (tmp_path / "list.yaml").write_text("- 1\n- 2\n")
    with pytest.raises(ValueError, match="expected a mapping"):
        load(tmp_path / "list.yaml")


def test_prompt_files(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes(b"\xef\xbb\xbfa cat\r\n\r\n  a dog \n")
    assert read_prompts(str(file)) == ["a cat", "a dog"]
    with pytest.raises(ValueError, match=r"missing.txt.*no such file"):
        read_prompts(str(tmp_path / "missing.txt"))
    file.write_text("\n \n")
    with pytest.raises(ValueError, match="is empty"):
        read_prompts(str(file))
    file.write_bytes("ein schöner Tag\n".encode("latin-1"))
    with pytest.raises(ValueError, match="not UTF-8"):
        read_prompts(str(file))
    with pytest.raises(ValueError, match="testbed:train or testbed:heldout"):
        read_prompts("testbed:all")


def test_every_prompt_once_an_epoch() -> None:
    drawn = [i for iteration in range(5) for i in prompts_of_iteration(10, 4, iteration, seed=3)]
    assert sorted(drawn[:10]) == sorted(drawn[10:20]) == list(range(10))
    assert drawn[:10] != drawn[10:20]
    assert prompts_of_iteration(10, 4, 2, seed=3) == drawn[8:12]
