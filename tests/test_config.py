"""Settings: files, overrides, and the message for every kind of mistake."""

import copy
import dataclasses
import math
import pickle
from pathlib import Path
from typing import Any

import pytest

from sage_fast.algorithm.iteration_plan import prompts_of_iteration
from sage_fast.config.fields import (
    Section,
    meanings,
    own_settings,
    section_name,
    sections,
    settings_of,
    within,
)
from sage_fast.config.loader import build, dump, keys_of, load, read_yaml, similar
from sage_fast.config.other_trainers import INSTEAD, MEANINGS, Counterpart, names_elsewhere
from sage_fast.config.schema import Config, KLConfig, RewardConfig, SamplingConfig
from sage_fast.run.train import train
from sage_fast.util.errors import UserError, nearest

REPOSITORY = Path(__file__).parent.parent
LAUGHS = "a0: &a0 [x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 9)
)
"""A short text whose value would fill the memory."""


@pytest.mark.parametrize(
    "path", sorted((REPOSITORY / "configs").glob("*.yaml")), ids=lambda path: path.stem
)
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
    config = load(
        file,
        {"sampling.eta": "0.9", "kl.lambda_max": "1e-3", "sampling.shared_initial_noise": "true"},
    )
    assert (config.sampling.eta, config.sampling.steps) == (0.9, 7)
    assert config.kl.lambda_max == 1e-3
    assert config.sampling.shared_initial_noise is True


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"sampling.sampler": "sagee"}, "'sagee'.*did you mean 'sage'"),
        ({"sampling.eta": -0.5}, "sampling.eta = -0.5.*nearest is 0"),
        ({"sampling.eta": "much"}, "sampling.eta = 'much': expected a number"),
        ({"sampling.steps": 0}, "sampling.steps = 0.*nearest is 1"),
        ({"sampling.steps": 10**23}, "sampling.steps = 1.*at least 1 and at most 1000"),
        ({"sampling.shift": 1e30}, "sampling.shift = 1e.30.*nearest is 100"),
        ({"sampling.shift": 0}, "sampling.shift = 0.*above 0"),
        (
            {"sampling.num_frames": 80},
            "num_frames = 80: expected 4k . 1; the nearest valid values are 77 and 81",
        ),
        ({"sampling.num_frames": 0}, "num_frames = 0.*nearest valid values are 1"),
        (
            {"sampling.height": 481},
            "height = 481: expected a multiple of 16; the nearest valid values are 480 and 496",
        ),
        (
            {"sampling.width": 8},
            "width = 8: expected a multiple of 16; the nearest valid values are 16",
        ),
        (
            {"train.group_size": 1},
            "train.group_size = 1: expected at least 2 and at most 1048576; the nearest is 2",
        ),
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
        ({"train.beta": 1}, "unknown setting 'train.beta'; did you mean 'kl.lambda_max'"),
        (
            {"sample.sde_type": "sde"},
            "unknown setting 'sample.sde_type'; did you mean 'sampling.sampler'?",
        ),
        ({"train.lr": 1}, "unknown setting 'train.lr'; did you mean 'train.learning_rate'"),
        (
            {"train": {"epochs": 1}},
            "unknown setting 'train.epochs'; did you mean 'train.iterations'",
        ),
        ({"batch_size": 1}, "did you mean 'sampling.batch_size' or 'train.batch_size'"),
        ({"xyz": 1}, "unknown setting 'xyz'; --help lists them"),
        ({"sampling": 3}, "'sampling' is a section of settings: sampling.sampler, sampling.eta"),
        (
            {"model.attention": "flsh"},
            "model.attention = 'flsh': expected one of auto, .*; did you mean 'flash'",
        ),
        ({"model.lora_alpha": 0}, "model.lora_alpha = 0: expected at least 1; the nearest is 1"),
        ({"model.lora_alpha": -4}, "model.lora_alpha = -4"),
        (
            {"model.lora_targets": "(to_q"},
            r"model.lora_targets = '\(to_q': not a regular expression",
        ),
        ({"model.path": ""}, "model.path = '': expected text that is not empty"),
        ({"model.path": None}, "model.path = None: expected text"),
        ({"sampling.eta": True}, "sampling.eta = True: expected a number"),
        ({"sampling.steps": 2.5}, "sampling.steps = 2.5: expected a whole number"),
        ({"sampling.steps": [2]}, r"sampling.steps = \[2\]: expected a whole number"),
        (
            {"sampling.cuda_graphs": "perhaps"},
            "sampling.cuda_graphs = 'perhaps': expected true or false",
        ),
        ({"sampling.batch_size": 0}, "sampling.batch_size = 0"),
        (
            {"sampling.eta": 1e200},
            "sampling.eta = .*: expected at least 0 and at most 10; the nearest is 10",
        ),
        (
            {"sampling.sde_window": -1},
            "sampling.sde_window = -1: expected at least 0; the nearest is 0",
        ),
        (
            {"sampling.guidance_scale": 0.5},
            "sampling.guidance_scale = 0.5: expected at least 1; the nearest is 1",
        ),
        (
            {"sampling.sampler": "${kl.strategy}"},
            "sampling.sampler = '.{kl.strategy}': expected one of sage, flow",
        ),
        ({"sampling.eta": "0.5"}, "sampling.eta = '0.5': expected a number"),
        ({"sampling.cuda_graphs": 1}, "sampling.cuda_graphs = 1: expected true or false"),
        ({"tracking.project": 2026}, "tracking.project = 2026: expected text, such as '2026'"),
        ({"reward.weights.vq": 10**400}, "expected finite weights"),
        (
            {"reward.weights": {1: 2}},
            "reward.weights = {1: 2}: expected a mapping of names to numbers",
        ),
        ({"reward.args": {1: 2}}, "reward.args = {1: 2}: expected a mapping of names"),
        (
            {"reward.weights": "red"},
            "reward.weights = 'red': expected a mapping of names to numbers",
        ),
        (
            {"reward.weights": {"red": "much"}},
            "reward.weights = {'red': 'much'}: expected a number",
        ),
        ({"reward.weights": {"red": {"a": 1}}}, "reward.weights = .*: expected a number"),
        ({"reward.weights": {}}, "at least one of them not zero"),
        (
            {"reward.weights": "red", "reward.weights.vq": 1},
            "reward.weights = 'red': expected a mapping",
        ),
        ({"kl.beta_pos": -1.0}, "kl.beta_pos = -1.0: expected at least 0; the nearest is 0"),
        ({"kl.beta_vel": -0.1}, "kl.beta_vel = -0.1: expected at least 0"),
        ({"kl.target": 0.0}, "kl.target = 0.0: expected above 0, such as 0.0001"),
        ({"kl.target": -1e-4}, "kl.target = -0.0001: expected above 0"),
        (
            {"kl.feedback": "share"},
            "kl.feedback = 'share': expected one of none, paper: .* nearest choice is none",
        ),
        (
            {"kl.target_share": 0.02},
            "unknown setting 'kl.target_share'; did you mean 'kl.lambda_max'",
        ),
        (
            {"kl.lambda_limit": 10.0},
            "unknown setting 'kl.lambda_limit'; did you mean 'kl.lambda_max'",
        ),
        ({"objective.ratio": "centered"}, "objective.ratio = 'centered': .*did you mean 'centred'"),
        ({"kl.warmup_steps": -1}, "kl.warmup_steps = -1: expected at least 0"),
        ({"kl.anchor_interval": 0}, "kl.anchor_interval = 0"),
        ({"kl.history": 0}, "kl.history = 0"),
        ({"kl.lambda_min": -1e-9}, "kl.lambda_min = -1e-09: expected at least 0"),
        (
            {"objective.advantage_clamp": 0},
            "objective.advantage_clamp = 0.0: expected above 0, such as 5.0",
        ),
        (
            {"train.learning_rate": 0.0},
            "train.learning_rate = 0.0: expected above 0, such as 1e-05",
        ),
        ({"train.weight_decay": -0.01}, "train.weight_decay = -0.01: expected at least 0"),
        ({"train.max_grad_norm": 0.0}, "train.max_grad_norm = 0.0: expected above 0"),
        ({"train.ema_decay": 1.0}, "train.ema_decay = 1.0: expected at least 0 and below 1"),
        (
            {"train.timestep_fraction": 1.5},
            "fraction = 1.5: expected above 0 and at most 1; the nearest is 1",
        ),
        ({"train.iterations": 0}, "train.iterations = 0"),
        ({"train.checkpoint_interval": 0}, "train.checkpoint_interval = 0"),
        ({"train.optimizer_steps": 0}, "train.optimizer_steps = 0"),
        ({"train.prompts_per_iteration": 0}, "train.prompts_per_iteration = 0"),
        ({"train.batch_size": -1}, "train.batch_size = -1"),
        ({"eval.interval": -3}, "eval.interval = -3: expected at least 0; the nearest is 0"),
        (
            {"seed": -1},
            "seed = -1: expected at least 0 and below 9223372036854775808; the nearest is 0",
        ),
        (
            {"seed": 2**63},
            "seed = 9223372036854775808: expected at least 0 and below 9223372036854775808",
        ),
        ({"output": ""}, "output = '': expected text that is not empty"),
    ],
)
def test_messages(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build(setting)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize(
    "name", [name for name, setting in settings_of(Config).items() if setting.type is float]
)
def test_numbers_are_finite(name: str, value: float) -> None:
    with pytest.raises(UserError, match=rf"^{name} = {value}: expected a finite number, such as"):
        build({name: value})


def test_a_section_is_checked_however_it_is_made() -> None:
    with pytest.raises(UserError, match=r"'sagee': expected one of sage, .*; did you mean 'sage'"):
        SamplingConfig(sampler="sagee")  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"sampling.eta = 'much': expected a number"):
        SamplingConfig(eta="much")  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"sampling.steps = True: expected a whole number"):
        SamplingConfig(steps=True)
    with pytest.raises(UserError, match="sde_window = 7"):
        dataclasses.replace(SamplingConfig(sde_window=5), sde_window=7, steps=6)
    with pytest.raises(UserError, match=r"reward.weights = .*: expected finite weights"):
        RewardConfig(weights={"vq": 1.0, "mq": math.inf})


def test_nested_mappings_are_settings() -> None:
    nested = {
        "train": {"iterations": 5},
        "sampling.eta": 0.5,
        "reward": {"args": {"path": {"a": 1}}},
    }
    assert build(nested) == build(
        {"train.iterations": 5, "sampling.eta": 0.5, "reward.args.path": {"a": 1}}
    )


def test_files_beside_the_configuration_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the current folder are not, even if they have the same names."""
    mine = tmp_path / "mine"
    mine.mkdir()
    for file in ("base.yaml", "config.yaml"):
        (mine / file).write_text(
            "data: {prompts: own.txt, eval_prompts: none.txt}\n"
            if file == "base.yaml"
            else "base: base.yaml\n"
        )
    (mine / "own.txt").write_text("a cat\n")
    monkeypatch.chdir(tmp_path)
    data = load("mine/config.yaml").data
    assert (data.prompts, data.eval_prompts) == (f"{mine}/own.txt", f"{mine}/none.txt")
    (tmp_path / "own.txt").write_text("a dog\n")
    assert load("mine/config.yaml").data.prompts == f"{mine}/own.txt"


def test_lists() -> None:
    assert WithoutDocstring(names=["a"]).names == ["a"]
    for value in ("a", [1]):
        with pytest.raises(
            UserError, match=r"withoutdocstring.names = .*: expected (a list of )?text"
        ):
            WithoutDocstring(names=value)  # type: ignore[arg-type]


def test_every_setting_says_what_it_means() -> None:
    for name, section in sections(Config).items():
        assert section_name(section) == name, (
            "the name in messages follows the class: `sampling` of SamplingConfig"
        )
        fields = {setting.field for setting in own_settings(section)}
        written = meanings(section)
        assert set(written) == fields | {""}, (
            f"{section.__name__}: a docstring after every field, and one at its head"
        )
        assert all(text[0].isupper() or text[0] in "`|" for text in written.values()), written
        assert all(text.endswith(".") for text in written.values()), written


def test_meanings_are_read_from_the_source() -> None:
    assert meanings(KLConfig)["history"].startswith("H of Eq. 42")
    assert meanings(WithoutDocstring) == {"": "Head.", "last": "Last."}


@dataclasses.dataclass(kw_only=True)
class WithoutDocstring(Section):
    """Head."""

    first: int = within(1, least=1)
    names: list[str] = dataclasses.field(default_factory=list)
    last: int = 2
    """Last."""


@pytest.mark.parametrize("off", ["off", "'off'", "false", "no"])
def test_no_feedback_is_called_none(off: str, tmp_path: Path) -> None:
    """YAML reads off as False, so no choice has that name; the error suggests `none`."""
    file = tmp_path / "c.yaml"
    file.write_text("kl: {feedback: none}\n")
    assert load(file).kl.feedback == "none"
    message = (
        r"kl.feedback = ('off'|False): expected one of none, paper, or package.module:name; did "
        r"you mean 'none'\?"
    )
    with pytest.raises(UserError, match=message):
        load(file, {"kl.feedback": off})
    file.write_text(f"kl: {{feedback: {off}}}\n")
    with pytest.raises(UserError, match=message):
        load(file)


@pytest.mark.parametrize(
    ("overrides", "weights"),
    [
        ({}, {"vq": 1.0, "mq": 2.0}),
        ({"reward.weights": "{red: 1}"}, {"red": 1.0}),
        ({"reward.weights.red": "1"}, {"red": 1.0}),
        ({"reward.weights.red": "1", "reward.weights": "{blue: 2}"}, {"red": 1.0, "blue": 2.0}),
        (
            {"reward.weights": "{blue: 2, red: 3}", "reward.weights.red": "1"},
            {"red": 1.0, "blue": 2.0},
        ),
        ({"reward.weights": "{clip.score: 2}"}, {"clip.score": 2.0}),
        ({"reward.weights.clip.score": "2"}, {"clip.score": 2.0}),
    ],
)
def test_weights_on_the_command_line_replace_those_of_the_file(
    overrides: dict[str, str], weights: dict[str, float], tmp_path: Path
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("reward: {weights: {vq: 1, mq: 2}}\n")
    assert load(file, overrides).reward.weights == weights


@pytest.mark.parametrize(
    "text",
    [
        "@file",
        "%x",
        "[",
        "\t",
        "{a: 1, a: 2}",
        "'open",
        "a\0b",
        "!!python/name:os.x",
        "&a [*a]",
        "[" * 50_000,
    ],
)
def test_an_override_that_is_not_yaml(text: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("seed: 1\n")
    with pytest.raises(
        UserError, match=r"^--model.path .*: not a YAML value: .*--model.path \"'...'\"$"
    ):
        load(tmp_path / "c.yaml", {"model.path": text})


def test_overrides_that_are_text(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("seed: 1\n")
    for text, value in (
        ("1e-4", "1e-4"),
        ("007", "007"),
        ("1:30", "1:30"),
        ("9" * 4000, "9" * 4000),
        ("2026-11-21", "2026-11-21"),
        ("'@file'", "@file"),
        ("a: b", "a: b"),
        ("a\nb", "a\nb"),
        ("a\u2028b\r", "a\u2028b\r"),
    ):
        config = load(tmp_path / "c.yaml", {"output": text})
        assert config.output == value
        (tmp_path / "dumped.yaml").write_text(dump(config), encoding="utf-8")
        assert load(tmp_path / "dumped.yaml") == config
    assert load(tmp_path / "c.yaml", {"model.weights": "null"}).model.weights is None
    with pytest.raises(UserError, match=r"^--output: the value is empty"):
        load(tmp_path / "c.yaml", {"output": ""})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no settings"),
        ("a: [1, 2\n", r"not valid YAML: line 2, column 1: expected ',' or '\]'"),
        (
            "sampling:\n  eta: 1\n  eta: 2\n",
            "not valid YAML: line 2, column 3: found duplicate key eta",
        ),
        ("- 1\n- 2\n", "expected a mapping"),
        ("a: " + "{a: " * 3000 + "1" + "}" * 3000, "nested too deeply"),
        ("a: " + "[" * 50_000, "nested too deeply"),
        ("seed: 1\n? [a, b]\n: 1\n", "not valid YAML: line 2, column 3: found unhashable key"),
        (
            "seed: " + "9" * 4000,
            "line 1, column 7: a number of 4,000 characters; expected at most 100",
        ),
        (
            "seed: 0x" + "f" * 4000,
            "line 1, column 7: a number of 4,002 characters; expected at most 100",
        ),
        (
            "seed: 1" + ":59" * 300 + ".0",
            "line 1, column 7: .* is a number in base 60 to some readers",
        ),
        ("seed: 0x_\n", "seed = '0x_': expected a whole number"),
        (
            "reward: {weights: {a: 1:30}}",
            "line 1, column 23: '1:30' is a number in base 60 to some readers",
        ),
        (
            "reward: {args: {a: [1:30]}}",
            "line 1, column 21: '1:30' is a number in base 60 to some readers",
        ),
        ("train: &a\n  iterations: *a\n", "line 1, column 8: an alias of what it is in"),
        ("reward: &a\n  <<: *a\n", "line 1, column 9: an alias of what it is in"),
        (LAUGHS, "line 1, column 1: longer than 1,000,000 characters with every alias written out"),
        ('seed: !!int ""\n', "not valid YAML: cannot read a value"),
        ("seed: !!bool perhaps\n", "not valid YAML: cannot read a value: 'perhaps'"),
        ("#" * 1_000_001, "not valid YAML: longer than 1,000,000 characters"),
        ("kl: {strategy: yes}\n", "kl.strategy = True: expected one of none, fixed"),
        (
            "tracking: {trackers: wandb}\n",
            r"trackers = .wandb.: expected a list of text, such as \[one, two\]",
        ),
        ("a small red ball moves left " * 20, "expected a mapping of settings"),
        (
            "seed: 3\nsampling:\n  eta: 1\n\n  etta: 2\n",
            r"c.yaml: unknown setting 'sampling.etta'; did you",
        ),
        ("# a\nsampling.etta: 2\n", r"c.yaml: unknown setting 'sampling.etta'; did you mean"),
        ("sampling: 3\n", r"c.yaml: 'sampling' is a section of settings: sampling.sampler"),
        (
            "a small red ball moves left " * 20 + ": 1",
            "unknown setting 'a small red .* \\[...\\]'; --help lists them",
        ),
    ],
)
def test_config_file_messages(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=message) as error:
        load(file)
    assert "\n" not in str(error.value)


def test_what_yaml_is_read_as(tmp_path: Path) -> None:
    """The rules are YAML 1.1's, except that `1e-4` is a number, a date is text, and `${...}` is not
    replaced."""
    file = tmp_path / "c.yaml"
    file.write_text("""
        common: &common {a: 1, b: 2}
        numbers: [1e-4, -1E+4, .5e3, 1.5e3, +1_0e-2, 1.0e-4, 1_000, .inf]
        text: [2026-11-22, '1e-4', "${seed}", e4, 1e, .e4, 1.2.3e4]
        merged: {<<: *common, b: 3}
        """)
    tree = read_yaml(file)
    assert tree["numbers"] == [1e-4, -1e4, 500.0, 1500.0, 0.1, 1e-4, 1000, math.inf]
    assert tree["text"] == ["2026-11-22", "1e-4", "${seed}", "e4", "1e", ".e4", "1.2.3e4"]
    assert tree["merged"] == {"a": 1, "b": 3}
    for text in (*tree["text"], "010", "1:30", "0o7", "0x1f", ".inf", "1_0", "+5"):
        file.write_text(dump(build({"tracking.project": text, "reward.args.x": [text]})))
        assert load(file) == build({"tracking.project": text, "reward.args.x": [text]})


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("010", 10),
        ("0100", 100),
        ("08", 8),
        ("-010", -10),
        ("+09", 9),
        ("00", 0),
        ("1_000", 1000),
        ("007.50", 7.5),
        ("0x10", 16),
        ("0o17", 15),
        ("0b11", 3),
    ],
)
def test_zeros_before_a_number_mean_nothing(text: str, number: float, tmp_path: Path) -> None:
    """As `seq -w` writes them: in a file, on the command line and in the arguments of a reward."""
    file = tmp_path / "c.yaml"
    file.write_text(
        f"reward: {{args: {{a: {text}, b: [{text}]}}}}\neval: {{guidance_scale: null}}\n"
    )
    found = [
        load(file).reward.args["a"],
        *load(file).reward.args["b"],
        load(file, {"reward.args.c": text}).reward.args["c"],
    ]
    assert found == [number] * 3
    assert {type(each) for each in found} == {type(number)}
    assert load(file, {"reward.weights.vq": text, "reward.weights.ta": "1"}).reward.weights == {
        "vq": number,
        "ta": 1,
    }
    if isinstance(number, int) and number > 0:
        assert load(file, {"seed": text, "train.iterations": text}).seed == number


@pytest.mark.parametrize("text", ["1:30", "-1:30", "12:30:45", "1:30.5"])
def test_numbers_in_base_60_are_refused(text: str, tmp_path: Path) -> None:
    for key in ("seed", "sampling.eta", "reward.weights.vq", "reward.args.fps"):
        with pytest.raises(
            UserError, match=f"^--{key} '{text}': line 1, column 1: '{text}' is a number in base 60"
        ):
            load(None, {key: text})
    assert (
        load(None, {"tracking.project": text, "reward.args.x": f"'{text}'"}).tracking.project
        == text
    )


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("sampling.cfg", ["sampling.guidance_scale"]),
        ("eval.cfg", ["eval.guidance_scale"]),
        ("cfg_scale", ["sampling.guidance_scale"]),
        ("num_inference_steps", ["sampling.steps"]),
        ("eval.num_inference_steps", ["eval.steps"]),
        ("train.steps", ["sampling.steps", "eval.steps"]),
        ("learning-rate", ["train.learning_rate"]),
        ("reward.weight", ["reward.weights"]),
        ("sampling.stesp", ["sampling.steps"]),
        ("sampling.cgf_strength", []),
        ("sampling.delta", []),
        ("sampling.cut", []),
        ("lora_r", ["model.lora_rank"]),
        ("video_bucket_hw_base_size", ["sampling.height", "sampling.width"]),
        ("backend", []),
        ("dance", []),
    ],
)
def test_hints_are_meant_or_absent(key: str, meant: list[str]) -> None:
    assert similar(key) == meant


def test_every_name_of_another_trainer_means_a_setting() -> None:
    known = settings_of(Config)
    own_names = {setting.field for setting in known.values()}
    for name, settings in MEANINGS.items():
        assert settings
        assert set(settings) <= known.keys(), name
        if name not in own_names:  # else our setting of that name wins
            assert similar(name) == settings
    assert not INSTEAD.keys() & (own_names | MEANINGS.keys())


def test_a_cell_gives_the_names_that_it_begins_with() -> None:
    """A formula, a value and a word give none; `sample.` and dashes are dropped."""
    row = Counterpart(
        "train.group_size",
        flow_grpo="`sample.a_b`, `c`",
        dancegrpo="`--d`, a folder",
        unirl="`e` / `f`",
        official="always `g`",
        elsewhere="h backend",
    )
    assert names_elsewhere(row) == ["h", "a_b", "c", "d"]


def test_nearest_of_nothing_lists_nothing() -> None:
    assert nearest("a", []) == "there is nothing to choose from"


def test_config_file_that_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        load(tmp_path / "missing.yaml")
    with pytest.raises(UserError, match=r"a folder; expected a YAML file$"):
        load(tmp_path)
    for name in ("other.yaml", "config.yaml"):  # a hint names what is there
        (tmp_path / name).touch()
        with pytest.raises(UserError, match=rf"a folder; expected a YAML file, such as .*{name}$"):
            load(tmp_path)


def test_an_unknown_key_of_a_base_is_named_with_its_own_file(tmp_path: Path) -> None:
    (tmp_path / "below.yaml").write_text("reward:\n  args: {any: 1}\n  nmae: x\n")
    (tmp_path / "top.yaml").write_text("base: below.yaml\nseed: 3\n")
    with pytest.raises(
        UserError, match=r"below.yaml: unknown setting 'reward.nmae'; did you mean 'reward.name'"
    ):
        load(tmp_path / "top.yaml")


def test_a_section_without_settings_leaves_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    for section in ("sampling:\n", "sampling: {}\n"):
        file.write_text(f"{section}seed: 7\n")
        assert load(file) == build({"seed": 7})


def test_a_config_may_change_another_one(tmp_path: Path) -> None:
    """`base` is relative to its file.

    The nearest file wins; a setting that is a mapping is replaced as a whole.
    """
    (tmp_path / "inside").mkdir()
    (tmp_path / "below.yaml").write_text(
        "seed: 3\nsampling: {eta: 0.3, steps: 7}\nreward: {weights: {vq: 1, mq: 1}}\n"
    )
    (tmp_path / "middle.yaml").write_text(
        "base: below.yaml\nsampling: {eta: 0.4}\nreward: {weights: {vq: 2}}\n"
    )
    (tmp_path / "inside" / "top.yaml").write_text("base: ../middle.yaml\n")
    file = tmp_path / "inside" / "top.yaml"
    expected = build(
        {"seed": 3, "sampling.eta": 0.4, "sampling.steps": 7, "reward.weights": {"vq": 2.0}}
    )
    assert load(file) == expected
    assert set(keys_of(file)) == {"seed", "sampling.eta", "sampling.steps", "reward.weights"}
    assert load(
        file, {"seed": "5"}, [{"seed": 4, "sampling": {"eta": 0.6}}]
    ) == dataclasses.replace(
        expected, seed=5, sampling=dataclasses.replace(expected.sampling, eta=0.6)
    )
    (tmp_path / "below.yaml").write_text("base: inside/top.yaml\n")
    with pytest.raises(UserError, match=r"top\.yaml: base = '\.\./middle\.yaml': it leads back"):
        load(file)
    (tmp_path / "below.yaml").write_text("base: [1]\n")
    with pytest.raises(UserError, match=r"base = \[1\]: expected another YAML file"):
        load(file)
    (tmp_path / "below.yaml").write_text("base: none.yaml\n")
    with pytest.raises(UserError, match=r"none.yaml: no such file"):
        load(file)


def test_every_prompt_once_an_epoch() -> None:
    drawn = [i for iteration in range(5) for i in prompts_of_iteration(10, 4, iteration, seed=3)]
    assert sorted(drawn[:10]) == sorted(drawn[10:20]) == list(range(10))
    assert drawn[:10] != drawn[10:20]
    assert prompts_of_iteration(10, 4, 2, seed=3) == drawn[8:12]


def test_one_argument_of_a_reward_on_the_command_line(tmp_path: Path) -> None:
    """Change `fps` of a scorer without repeating its `path`, as in docs/how-to/rewards.md."""
    file = tmp_path / "c.yaml"
    file.write_text("reward: {args: {path: x, fps: 2}}\n")
    assert load(file, {"reward.args.fps": "3"}).reward.args == {"path": "x", "fps": 3}
    assert load(file, {"reward.args": "{path: y}", "reward.args.fps": "3"}).reward.args == {
        "path": "y",
        "fps": 3,
    }
    assert load(file, {"reward.args": "{}"}).reward.args == {}
    assert load(file, {}, [{"reward": {"args": {"fps": 3}}}]).reward.args == {"fps": 3}, (
        "a file's mapping replaces"
    )


def test_several_rewards_replace_the_one_of_the_layer_below_and_it_them(tmp_path: Path) -> None:
    one, several = tmp_path / "one.yaml", tmp_path / "several.yaml"
    one.write_text(
        "reward: {name: videoalign, args: {path: x}, weights: {vq: 1}, workers: 2, retries: 3}\n"
    )
    several.write_text("base: one.yaml\nreward: {several: [{name: testbed, weights: {vq: 1}}]}\n")
    entries = [{"name": "testbed", "weights": {"vq": 1}}]
    text = "[{name: testbed, weights: {vq: 1}}]"
    for config in (
        load(several),
        load(one, {"reward.several": text}),
        load(one, {}, [{"reward": {"several": entries}}]),
    ):
        assert (config.reward.several, config.reward.retries) == (entries, 3)
        (tmp_path / "dumped.yaml").write_text(dump(config))
        assert load(tmp_path / "dumped.yaml") == config
    reward = load(
        several, {"reward.name": "testbed-judge", "reward.weights": "{naturalness: 1}"}
    ).reward
    assert (reward.name, reward.several, reward.args) == ("testbed-judge", [], {})
    with pytest.raises(UserError, match=r"^reward.weights = .*reward.several takes its place"):
        load(several, {"reward.weights": "{mq: 1}"})
    with pytest.raises(UserError, match=r"^reward.name = .*reward.several takes its place"):
        load(one, {"reward.name": "testbed-judge", "reward.several": text})


def test_a_mapping_may_stand_for_a_file_on_the_command_line_too(tmp_path: Path) -> None:
    given = {"zero_optimization": {"reduce_bucket_size": 5000}}
    typed = load(
        None, {"train.deepspeed_config": "{zero_optimization: {reduce_bucket_size: 5000}}"}
    )
    assert typed.train.deepspeed_config == given
    named = load(None, {"train.deepspeed_config": str(tmp_path / "ds.json")})
    assert named.train.deepspeed_config == str(tmp_path / "ds.json")


def test_checked_settings_are_frozen() -> None:
    config = build({"train.iterations": 7, "reward.weights": {"vq": 1.0}})
    with pytest.raises(
        UserError,
        match=r'^train.iterations = 5: .*frozen.*config.replace\({"train.iterations": 5}\) returns',
    ):
        config.train.iterations = 5
    with pytest.raises(UserError, match=r"^seed = 1: .*frozen"):
        config.seed = 1
    with pytest.raises(UserError, match=r"^kl.target = \.\.\.: .*frozen"):
        del config.kl.target
    assert config.train.iterations == 7


def test_a_mapping_that_was_changed_in_place_is_checked_when_training_begins(
    tmp_path: Path,
) -> None:
    """A section is frozen; the lists and mappings in it are Python's own."""
    config = build({"output": str(tmp_path / "run")})
    config.reward.weights["vq"] = "much"  # type: ignore[assignment]
    with pytest.raises(UserError, match=r"^reward.weights = .*: expected a number"):
        train(config)
    assert not (tmp_path / "run").exists()


def test_replace_returns_a_checked_copy() -> None:
    config = build({"train.iterations": 7, "reward.weights": {"vq": 1.0}})
    changed = config.replace({"train.iterations": 5, "reward.weights.mq": 2.0, "kl": {"target": 1}})
    assert (changed.train.iterations, config.train.iterations) == (5, 7)
    assert changed.reward.weights == {"mq": 2.0}
    assert changed.kl.target == 1.0
    assert config.replace({}) == config
    assert pickle.loads(pickle.dumps(changed)) == copy.deepcopy(changed) == changed

    several = config.replace({"reward.several": [{"name": "testbed", "weights": {"vq": 1}}]})
    assert several.reward.weights == build({}).reward.weights
    assert several.replace({"reward.name": "testbed-judge"}).reward.several == []
    with pytest.raises(UserError, match=r"unknown setting 'train.iteration'.*train.iterations"):
        config.replace({"train.iteration": 5})
    with pytest.raises(UserError, match=r"kl.lambda_min = 1.0: expected at most kl.lambda_max"):
        config.replace({"kl.lambda_min": 1})
