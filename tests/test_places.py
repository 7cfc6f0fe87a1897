"""What settings and options name: files, folders, checkpoints and code, from any folder."""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from sage_fast.cli import COMMANDS, _parser, main, parse
from sage_fast.config.fields import settings_of
from sage_fast.config.loader import dump, load
from sage_fast.config.places import PLACES, is_moved, split_family
from sage_fast.config.schema import MODEL_NAMES, PROMPT_SETS, Config, RewardEntry
from sage_fast.data.prompts import SETS, read_prompts
from sage_fast.models.find import find_spec
from sage_fast.models.registry import CHECKPOINTS
from sage_fast.rewards import load_reward
from sage_fast.util.captions import PromptKey
from sage_fast.util.errors import UserError
from sage_fast.util.paths import TypedFile, TypedPath, expanded
from sage_fast.util.plugins import import_plugin, split_place

VALUES = {
    "tracking.project",
    "model.lora_targets",
    "data.negative_prompt",
    "reward.prefix",
    "reward.device",
}
"""Settings whose text names nothing on this machine."""
NAMES = [*MODEL_NAMES, "random:testbed", "random:hunyuanvideo15-480p", "owner/name"]
"""Models that are no folders."""
REWARD = "def score(videos, prompts):\n    return {{'{0}': videos.mean((1, 2, 3, 4))}}\n"


# -- the schema ------------------------------------------------------------------------------------


def test_every_text_says_what_it_names() -> None:
    """A new setting of text is marked with `names`, or is said here to be no path."""
    texts = {
        name
        for name, setting in settings_of(Config).items()
        if setting.is_text and not setting.choices
    }
    named = {name for name, setting in settings_of(Config).items() if setting.names is not None}
    assert texts - named == VALUES
    choices = {name for name, setting in settings_of(Config).items() if setting.takes_plugin}
    assert named - texts - choices == {"callbacks", "reward.args", "reward.several"}
    assert {settings_of(Config)[name].names for name in named} == {*PLACES}


def test_the_shipped_names_are_one_list() -> None:
    assert {*MODEL_NAMES} == {*CHECKPOINTS}
    assert {*PROMPT_SETS} == {*SETS}


# -- ~ and variables -------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder, and another one as current folder, which stays empty."""
    for name in ("home", "here"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("EMPTY", "")
    monkeypatch.delenv("UNSET", raising=False)
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "home"


@pytest.mark.parametrize(
    ("typed", "whole"),
    [
        ("~", "{home}"),
        ("~/a b", "{home}/a b"),
        ("$RUNS/x", "{runs}/x"),
        ("${RUNS}/x", "{runs}/x"),
        ("a/$HOME", "a/{home}"),
        ("plain", "plain"),
        ("price$.txt", "price$.txt"),
        ("a~b", "a~b"),
        ("./~a", "./~a"),
    ],
)
def test_paths_are_expanded(typed: str, whole: str, home: Path) -> None:
    assert expanded(typed) == whole.format(home=home, runs=home.parent / "runs")


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("$UNSET/x", "the environment variable UNSET is not set"),
        ("${UNSET}/x", "the environment variable UNSET is not set"),
        ("$EMPTY/x", "the environment variable EMPTY is empty"),
        ("${A:-b}", "expected .{NAME}"),
        ("./~", "would name a file or folder '~'"),
        ("a\0b", "no path holds the character"),
        ("a/~/b", "would name a file or folder '~'"),
        ("~nobody-of-this-name/x", "there is no user 'nobody-of-this-name'"),
    ],
)
def test_paths_that_cannot_be_expanded(typed: str, message: str, home: Path) -> None:
    with pytest.raises(UserError, match=message):
        expanded(typed)


@pytest.mark.parametrize("name", ["a$UNSET", "a$RUNS", "a${UNSET}", "~", "a ~/~b"])
def test_the_settings_of_a_run_are_read_again_whatever_its_folders_are_called(
    name: str, home: Path
) -> None:
    """A run's record holds whole paths, and so does what a shell completes."""
    folder = home / name
    (folder / "cache").mkdir(parents=True)
    (folder / "prompts.txt").write_text("a small red ball\n")
    (folder / "mine.py").write_text("class Mine: pass\n")
    (folder / "c.yaml").write_text(
        "data: {prompts: prompts.txt, embedding_cache: cache}\nreward: {name: 'mine:Mine'}\n"
    )
    first = load(folder / "c.yaml")
    assert first.data.prompts == str(folder / "prompts.txt")
    assert first.reward.name == f"{folder}/mine:Mine"
    record = home / "record.yaml"
    record.write_text(dump(first))
    assert load(record) == first
    assert expanded(str(folder)) == str(folder)


EXAMPLES: dict[str, tuple[Any, Any]] = {
    "output": ("{0}/x", "{1}/x"),
    "file": ("{0}/x", "{1}/x"),
    "prompts": ("{0}/x", "{1}/x"),
    "model": ("{0}/x", "{1}/x"),
    "plugin": ("{0}/my:Mine", "{1}/my:Mine"),
    "reward": ("{0}/my:Mine", "{1}/my:Mine"),
    "arguments": ({"a": ["~/x"]}, {"a": ["{home}/x"]}),
    "rewards": (
        [{"name": "{0}/my:Mine", "weights": {"a": 1}}],
        [{"name": "{1}/my:Mine", "weights": {"a": 1}}],
    ),
    "callbacks": (
        ["{0}/my:Mine", {"name": "{0}/my:Other", "args": {"file": "~/x"}}],
        ["{1}/my:Mine", {"name": "{1}/my:Other", "args": {"file": "{home}/x"}}],
    ),
}
"""Kind of place -> a value, and the value it stands for."""


def filled(value: Any, *places: str, home: Path) -> Any:
    """Put places into all texts of a value."""
    if isinstance(value, dict):
        return {key: filled(item, *places, home=home) for key, item in value.items()}
    if isinstance(value, list):
        return [filled(item, *places, home=home) for item in value]
    return value.format(*places, home=home) if isinstance(value, str) else value


PLACED = {
    name: setting.names
    for name, setting in settings_of(Config).items()
    if setting.names is not None
}


@pytest.mark.parametrize("name", PLACED)
@pytest.mark.parametrize("sign", ["~", "$HOME", "${HOME}"])
def test_every_place_of_a_setting_is_expanded(name: str, sign: str, home: Path) -> None:
    """In a file and on the command line."""
    given, expected = EXAMPLES[PLACED[name]]
    given, expected = filled(given, sign, home=home), filled(expected, "", str(home), home=home)
    file = home / "c.yaml"
    section, _, field = name.rpartition(".")
    settings: dict[str, Any] = {section: {field: given}} if section else {field: given}
    file.write_text(yaml.safe_dump(settings))
    found = [load(file), load(None, {name: given if isinstance(given, str) else str(given)})]
    for config in found:
        value = getattr(getattr(config, section) if section else config, field)
        assert value == expected
    assert os.listdir() == []


def test_secrets_of_arguments_stay(home: Path) -> None:
    args = {"token": "${UNSET}", "price": "$UNSET"}
    (home / "c.yaml").write_text(
        "reward: {name: vlm, args: {token: '${UNSET}', price: '$UNSET'}}\n"
    )
    assert load(home / "c.yaml").reward.args == args


def test_an_unset_variable_is_one_line_that_names_the_setting(home: Path) -> None:
    (home / "c.yaml").write_text("data: {prompts: $UNSET/x}\n")
    with pytest.raises(
        UserError,
        match=r"c.yaml: data.prompts = '\$UNSET/x': the environment variable UNSET is not",
    ):
        load(home / "c.yaml")
    with pytest.raises(
        UserError, match=r"^output = '\$UNSET/x': the environment variable UNSET is not set"
    ):
        load(None, {"output": "$UNSET/x"})


PATHS = ("CONFIG", "FILE", "FOLDER", "RUN", "SOURCE", "OTHER")
"""What an option or argument that holds a path is called in the help."""


def actions(command: str) -> list[argparse.Action]:
    parser = _parser([command])
    subparsers = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return [action for action in subparsers.choices[command]._actions if action.nargs != 0]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_path_of_an_option_is_expanded(command: str, home: Path) -> None:
    """An option that holds a path has one of two types; sources have labels and are read by
    `labelled`."""
    for action in actions(command):
        holds_path = action.type in (TypedFile, TypedPath)
        is_called_so = action.metavar in PATHS or action.dest in ("folder", "json")
        assert holds_path or not is_called_so or action.nargs == "+", action
    words = [command]
    for action in actions(command):
        if action.option_strings:
            if action.type in (TypedFile, TypedPath):
                words += [f"{action.option_strings[0]}=~/x"]
        elif action.type in (TypedFile, TypedPath) or not action.choices:
            words += ["~/x"]
    options, _ = parse(words)
    for action in actions(command):
        if action.type in (TypedFile, TypedPath):
            value = getattr(options, action.dest)
            assert [str(each) for each in (value if isinstance(value, list) else [value])] == [
                f"{home}/x"
            ]


def test_sources_are_expanded(home: Path) -> None:
    from sage_fast.commands.sources import labelled

    assert labelled(["~/a", "second=~/b", "$RUNS/c"]) == {
        "a": f"{home}/a",
        "second": f"{home}/b",
        "c": f"{home.parent}/runs/c",
    }


@pytest.mark.parametrize(
    "words",
    [
        ["init", "$UNSET/x"],
        ["train", "$UNSET/c.yaml"],
        ["sample", "c.yaml", "--prompt", "a", "--folder=$UNSET/x"],
        ["compare", "first=$UNSET/x"],
    ],
)
def test_an_option_with_an_unset_variable(
    words: list[str], home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert "the environment variable UNSET is not set" in capsys.readouterr().err
    assert os.listdir() == []


def test_no_folder_is_called_after_home(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "~/mine"]) == 0
    assert (home / "mine" / "config.yaml").is_file()
    assert main(["init", "./~"]) == 2
    assert os.listdir() == []


# -- relative to the file that names it ------------------------------------------------------------


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Folders A and B that hold files of the same names; A is the current one."""
    for name in ("A", "B"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "prompts.txt").write_text(f"a prompt of {name}\n")
        (folder / "scorer").mkdir()
        (folder / "weights").mkdir()
        (folder / f"places_rewards_{tmp_path.name[-1]}.py").write_text(REWARD.format(name.lower()))
        (folder / "config.yaml").write_text(
            "model: {path: weights, weights: weights}\n"
            "data: {prompts: prompts.txt, eval_prompts: ./prompts.txt, embedding_cache: cache}\n"
            f"reward:\n  name: places_rewards_{tmp_path.name[-1]}:score\n"
            "  args: {path: scorer, other: [scorer, none], number: 3}\n"
            f"eval: {{judge: 'places_rewards_{tmp_path.name[-1]}:score'}}\n"
            "output: runs/x\n"
        )
    monkeypatch.chdir(tmp_path / "A")
    return tmp_path / "A", tmp_path / "B"


def test_a_file_means_its_own_folder(folders: tuple[Path, Path]) -> None:
    _, b = folders
    module = f"places_rewards_{b.parent.name[-1]}:score"
    for file in (Path("../B/config.yaml"), b / "config.yaml"):
        config = load(file)
        assert (
            read_prompts(config.data.prompts)[0].text
            == read_prompts(config.data.eval_prompts)[0].text
        )
        assert read_prompts(config.data.prompts)[0].text == "a prompt of B"
        assert config.data.embedding_cache == f"{b}/cache"
        assert config.model.path == config.model.weights == f"{b}/weights"
        assert config.reward.name == config.eval.judge == f"{b}/{module}"
        scorer = f"{b}/scorer"
        assert config.reward.args == {"path": scorer, "other": [scorer, "none"], "number": 3}
        assert config.output == "runs/x"


def test_an_option_means_the_current_folder(folders: tuple[Path, Path]) -> None:
    a, b = folders
    module = f"places_rewards_{b.parent.name[-1]}:score"
    given = {
        "data.prompts": "prompts.txt",
        "reward.name": module,
        "reward.args.path": "scorer",
        "model.path": "weights",
    }
    config = load(b / "config.yaml", given)
    assert config.data.prompts == f"{a}/prompts.txt"
    assert config.data.eval_prompts == f"{b}/prompts.txt"
    assert config.reward.name == f"{a}/{module}"
    assert config.reward.args["path"] == f"{a}/scorer"
    assert config.model.path == f"{a}/weights"


def test_each_layer_means_its_own_folder(folders: tuple[Path, Path]) -> None:
    a, b = folders
    (a / "top.yaml").write_text("base: ../B/config.yaml\ndata: {prompts: prompts.txt}\n")
    config = load("top.yaml")
    assert config.data.prompts == f"{a}/prompts.txt"
    assert Path(config.data.eval_prompts).samefile(b / "prompts.txt")


def test_a_written_configuration_means_the_same_from_anywhere(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load("../B/config.yaml")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(dump(config))
    monkeypatch.chdir(tmp_path)
    assert load(tmp_path / "run" / "config.yaml") == config


def test_a_word_in_the_config_of_a_run_is_no_folder_of_the_run(tmp_path: Path) -> None:
    """A resume reads `eval` beside the folder `eval` of the run."""
    (tmp_path / "eval").mkdir()
    file = tmp_path / "config.yaml"
    file.write_text("reward: {args: {mode: eval}}", encoding="utf-8")
    assert load(file).reward.args == {"mode": str(tmp_path / "eval")}
    (tmp_path / "run.json").write_text("{}", encoding="utf-8")
    assert load(file).reward.args == {"mode": "eval"}


def test_an_argument_that_only_the_current_folder_has_is_not_taken(
    folders: tuple[Path, Path],
) -> None:
    a, b = folders
    (a / "only" / "here").mkdir(parents=True)
    (a / "words.txt").write_text("red\n")
    (a / "red").mkdir()
    for text in ("only/here", "words.txt"):
        (b / "c.yaml").write_text(f"reward: {{args: {{path: {text}}}}}\n")
        with pytest.raises(
            UserError, match=f"reward.args = '{text}': is in the current folder and not in {b}"
        ):
            load("../B/c.yaml")
        assert load(None, {"reward.args.path": text}).reward.args == {"path": f"{a}/{text}"}
    (b / "c.yaml").write_text(
        "reward: {args: {colour: red, hub: owner/name, long: " + "x" * 5000 + "}}\n"
    )
    args = load("../B/c.yaml").reward.args
    assert args == {"colour": "red", "hub": "owner/name", "long": "x" * 5000}, "no paths"


def test_what_has_moved_keeps_its_name(tmp_path: Path) -> None:
    """A resume may say where the files of a run are now: docs/how-to/stop-and-resume.md."""
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
    (tmp_path / "new" / "heldout.txt").write_text("a\n")
    (tmp_path / "new" / "mine.py").write_text("")
    for name in ("heldout.txt", "mine:Mine"):
        old, new = f"{tmp_path}/old/{name}", f"{tmp_path}/new/{name}"
        assert is_moved(old, new)
        assert is_moved({"a": [old], "b": 1}, {"a": [new], "b": 1})
        assert not is_moved({"a": [old], "b": 1}, {"a": [new], "b": 2})
        assert not is_moved(old, f"{tmp_path}/new/other.txt")
        assert not is_moved(new, old)
    (tmp_path / "old" / "heldout.txt").write_text("a\n")
    assert not is_moved(f"{tmp_path}/old/heldout.txt", f"{tmp_path}/new/heldout.txt"), (
        "both are there"
    )
    assert not is_moved("testbed", "testbed-i2v")


@pytest.mark.parametrize("name", NAMES)
def test_names_that_are_no_paths_stay(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "testbed").mkdir()  # ./testbed is this one
    (tmp_path / "c.yaml").write_text(f"model: {{path: '{name}'}}\n")
    assert load(tmp_path / "c.yaml").model.path == name
    monkeypatch.chdir(tmp_path)
    assert load(None, {"model.path": "./testbed"}).model.path == f"{tmp_path}/testbed"


def test_a_hub_id_is_no_folder_of_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file in B means the hub, and A has a folder of that name: which one is meant is asked, not
    guessed."""
    for folder in ("A/owner/name", "B"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "B" / "c.yaml").write_text("model: {path: owner/name}\n")
    monkeypatch.chdir(tmp_path / "A")
    with pytest.raises(
        UserError, match="a hub id, and a folder of that name is in the current folder"
    ):
        find_spec(load("../B/c.yaml").model.path)
    assert load(None, {"model.path": "owner/name"}).model.path == f"{tmp_path}/A/owner/name"


def test_a_model_family_and_its_checkpoint(folders: tuple[Path, Path]) -> None:
    _, b = folders
    (b / "my_places_family.py").write_text("class Mine: ...\n")
    (b / "c.yaml").write_text("model: {path: 'my_places_family:Mine:weights'}\n")
    path = load(b / "c.yaml").model.path
    assert path == f"{b}/my_places_family:Mine:{b}/weights"
    assert split_family(path) == (f"{b}/my_places_family:Mine", f"{b}/weights")


# -- code ------------------------------------------------------------------------------------------


@pytest.fixture
def module(tmp_path: Path) -> Callable[..., Path]:
    """Write a module into a folder, and forget it after the test."""
    known = set(sys.modules)

    def write(folder: str, name: str, text: str) -> Path:
        file = tmp_path / folder / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file.parent

    yield write  # type: ignore[misc]
    for name in set(sys.modules) - known:
        if "places_" in name:
            del sys.modules[name]


@pytest.mark.parametrize(
    ("place", "parts"),
    [
        ("my:Mine", ("", "my", "Mine")),
        ("a.b:C.d", ("", "a.b", "C.d")),
        ("/x/my:Mine", ("/x", "my", "Mine")),
        ("../a b/my.own:Mine", ("../a b", "my.own", "Mine")),
        ("/my:Mine", ("/", "my", "Mine")),
    ],
)
def test_places_of_code(place: str, parts: tuple[str, str, str]) -> None:
    assert split_place(place) == parts


@pytest.mark.parametrize("place", ["my", "my:", ":Mine", "my mine:X", "/x/:Mine", "my:X/y"])
def test_places_of_code_with_another_form(place: str) -> None:
    with pytest.raises(UserError, match=r"^reward.name: expected 'package.module:name'"):
        split_place(place, "reward.name")


def test_the_module_of_the_folder_is_imported(
    module: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the current folder, and what stands before on Python's path, hold of its name; with
    its neighbours."""
    module("A", "places_mine", "X = 'A'\n")
    module("A", "places_help", "Y = 'A'\n")
    b = module("B", "places_mine",
        "import places_help\nX = 'B' + places_help.Y\ndef late():\n    import places_late\n"
               "    return places_late.Z\n")  # fmt: skip
    module("B", "places_help", "Y = 'B'\n")
    module("A", "places_late", "Z = 'A'\n")
    module("B", "places_late", "Z = 'B'\n")
    monkeypatch.chdir(b.parent / "A")
    monkeypatch.syspath_prepend(str(b.parent / "A"))
    assert import_plugin(f"{b}/places_mine:X", "reward.name") == "BB"
    assert import_plugin(f"{b}/places_mine:late", "reward.name")() == "B"


def test_a_package_of_the_folder(module: Callable[..., Path]) -> None:
    folder = module("B/places_pack", "__init__", "").parent
    module("B/places_pack", "inner", "from .other import X\n")
    module("B/places_pack", "other", "X = 3\n")
    assert import_plugin(f"{folder}/places_pack.inner:X", "reward.name") == 3
    module("B/places_spaced", "inner", "X = 4\n")  # without __init__.py
    assert import_plugin(f"{folder}/places_spaced.inner:X", "reward.name") == 4


def test_two_modules_of_one_name_are_refused(module: Callable[..., Path]) -> None:
    a, b = module("A", "places_same", "X = 1\n"), module("B", "places_same", "X = 2\n")
    assert import_plugin(f"{a}/places_same:X", "reward.name") == 1
    assert import_plugin(f"{a}/places_same:X", "reward.name") == 1
    with pytest.raises(
        UserError,
        match=r"Python imports 'places_same' from .*A/places_same.py, not from .*B; rename",
    ):
        import_plugin(f"{b}/places_same:X", "eval.judge")


def test_two_neighbours_of_one_name_are_refused(module: Callable[..., Path]) -> None:
    a, b = (
        module("A", "places_one", "import places_aid\n"),
        module("B", "places_two", "import places_aid\n"),
    )
    module("A", "places_aid", "X = 1\n")
    module("B", "places_aid", "X = 2\n")
    import_plugin(f"{a}/places_one:places_aid", "reward.name")
    with pytest.raises(
        UserError, match=r"Python imports 'places_aid' from .*A/places_aid.py, not from .*B; rename"
    ):
        import_plugin(f"{b}/places_two:places_aid", "eval.judge")


def test_a_module_that_only_the_current_folder_has_is_not_taken(
    module: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    a = module("A", "places_alone", "X = 1\n")
    (a.parent / "B").mkdir()
    (a.parent / "B" / "c.yaml").write_text("reward: {name: 'places_alone:X'}\n")
    monkeypatch.chdir(a)
    with pytest.raises(
        UserError, match=r"reward.name = 'places_alone:X': no module .* the current folder has one"
    ):
        load("../B/c.yaml")
    assert load(None, {"reward.name": "places_alone:X"}).reward.name == f"{a}/places_alone:X"


def test_a_worker_imports_the_same_file(
    module: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from sage_fast.config.schema import RewardConfig
    from sage_fast.rewards import CompositeReward

    module("A", "places_worker", REWARD.format("a"))
    b = module("B", "places_worker", REWARD.format("b"))
    monkeypatch.chdir(b.parent / "A")
    config = RewardConfig(name=f"{b}/places_worker:score", weights={"b": 1.0}, workers=1)
    assert load_reward(RewardEntry(name=config.name))(torch.zeros(1, 5, 3, 8, 8), ["a"]).keys() == {
        "b"
    }
    scores = CompositeReward.of(config)(torch.ones(1, 5, 3, 8, 8), [PromptKey("a")])
    assert scores.rewards.tolist() == [1.0]


def test_a_run_from_another_folder(folders: tuple[Path, Path]) -> None:
    """As a command: prompts and rewards of B, though A, where it starts, has files of the same
    names."""
    a, b = folders
    (b / "c.yaml").write_text(
        "data: {prompts: prompts.txt, eval_prompts: prompts.txt}\nmodel: {path: 'random:testbed', "
        "dtype: float32}\n"
        f"reward: {{name: 'places_rewards_{b.parent.name[-1]}:score', weights: {{b: 1}}}}\n"
        "sampling: {num_frames: 9, height: 32, width: 32}\n"
    )
    for where, file in ((a, "../B/c.yaml"), (b.parent, "B/c.yaml")):
        words = [sys.executable, "-m", "sage_fast", "train", file, "--dry-run"]
        done = subprocess.run(
            words, cwd=where, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": ""}
        )
        assert done.returncode == 0, done.stderr
        assert f"{b}/prompts.txt: 1 prompt" in done.stdout
        assert f"reward {b}/places_rewards_{b.parent.name[-1]}:score: 1 b" in done.stdout
