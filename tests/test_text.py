"""A screen, a log, a locale or a file name that cannot hold a letter never ends a command."""

import errno
import json
import locale
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sage_fast.cli import COMMANDS
from sage_fast.util.files import write_atomic
from sage_fast.util.text import counted, in_file_name
from sage_fast.util.videos import save_video
from tests.tiny import FEW_STEPS, arguments

REPOSITORY = Path(__file__).parent.parent
PAPER = REPOSITORY / "configs" / "recipes" / "paper.yaml"
NARROW: dict[str, dict[str, str]] = {
    "an ASCII screen": {"PYTHONIOENCODING": "ascii"},
    "a strict Latin-1 screen": {"PYTHONIOENCODING": "latin-1:strict"},
    "a locale that is not installed": {"LC_ALL": "en_US"},
    "the C locale": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    "the C locale, ASCII screen": {
        "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0",
        "PYTHONIOENCODING": "ascii:strict",
    },
}  # fmt: skip
"""What cannot show a letter -> its environment."""
narrow = pytest.mark.parametrize("variables", NARROW.values(), ids=NARROW.keys())


def test_a_count_agrees_with_its_noun() -> None:
    found = [counted(number, "iteration") for number in (0, 1, 2, 1000)]
    assert found == ["0 iterations", "1 iteration", "2 iterations", "1,000 iterations"]


def python(code: str, *words: str | Path, **variables: str) -> "subprocess.CompletedProcess[bytes]":
    own = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("LC_", "LANG", "PYTHON"))
    }
    own |= {
        "PYTHONPATH": str(REPOSITORY),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    } | variables
    return subprocess.run(
        [sys.executable, "-c", code, *map(os.fspath, words)], env=own, capture_output=True
    )


HELP = """
import sys
from sage_fast.cli import COMMANDS, main
statuses = []
for words in (["--help"], *([name, "--help"] for name in COMMANDS)):
    try:
        main(words)
    except SystemExit as ended:
        statuses.append(ended.code)
sys.exit(any(statuses) or len(statuses) != 1 + len(COMMANDS))
"""


@narrow
def test_the_help_of_every_command_is_shown(variables: dict[str, str]) -> None:
    done = python(HELP, **variables)
    assert done.returncode == 0, done.stderr
    assert all(f"sage-fast {name}".encode() in done.stdout for name in COMMANDS)


SPEAK = """
import logging, sys
from pathlib import Path
from sage_fast import cli
from sage_fast.util import console

class Command:
    add_arguments = staticmethod(lambda add: None)

    @staticmethod
    def run(options, overrides):
        console.log_to(Path(sys.argv[1]))
        logging.getLogger("sage_fast.x").info("note: \\u5706")
        print("printed: \\u5706")
        raise cli.UserError("wrong: \\u5706")

cli.load = lambda name: Command
cli.parse = lambda words: (__import__("argparse").Namespace(command="doctor"), {})
sys.exit(cli.main())
"""


@narrow
def test_the_screen_shows_escapes_and_the_log_the_letters(
    variables: dict[str, str], tmp_path: Path
) -> None:
    """Messages, output and the line of an error."""
    done = python(SPEAK, tmp_path / "log", **variables)
    assert done.returncode == 2, done.stderr
    escaped = rb"\u5706"
    if variables == NARROW["a locale that is not installed"]:  # Python takes UTF-8 for the screen
        escaped = "\u5706".encode()
    assert done.stdout.splitlines() == [b"note: " + escaped, b"printed: " + escaped]
    assert done.stderr.splitlines()[-1].endswith(b"wrong: " + escaped)
    assert "note: \u5706" in (tmp_path / "log").read_text(encoding="utf-8")


RESTARTED = """
import json, os, sys
from sage_fast.util.text import restart_in_utf8
before = os.environ.get("BEFORE", str(os.getpid()))
os.environ["BEFORE"] = before
restart_in_utf8()
facts = [sys.getfilesystemencoding(), sys.argv[1], sys.argv[2], before == str(os.getpid())]
print(json.dumps(facts))
open(sys.argv[1], "w").close()
"""


@narrow
def test_arguments_and_file_names_are_utf_8_whatever_the_locale(
    variables: dict[str, str], tmp_path: Path
) -> None:
    """The process keeps its id, and what is no UTF-8 stays as it is."""
    done = python(RESTARTED, tmp_path / "\u5706", os.fsdecode(b"caf\xe9"), **variables)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [
        "utf-8",
        str(tmp_path / "\u5706"),
        os.fsdecode(b"caf\xe9"),
        True,
    ]
    assert (tmp_path / "\u5706").exists()


@pytest.mark.parametrize("options", [["-E"], ["-I"], ["-X", "utf8=0"]])
def test_a_restart_that_cannot_help_is_not_tried_for_ever(options: list[str]) -> None:
    own = os.environ | NARROW["the C locale"]
    code = (
        f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); from sage_fast.cli import main; "
        "sys.exit(main())"
    )
    done = subprocess.run(
        [sys.executable, *options, "-c", code, "no-command"],
        env=own,
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == 2, done.stderr
    assert b"no such command" in done.stderr


# -- names and contents of files -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "letters", "ascii_only"),
    [
        ("A small red Ball, left.", "a-small-red-ball-left", "a-small-red-ball-left"),
        ("Zo\u00eb\u2019s caf\u00e9", "zo\u00eb-s-caf\u00e9", "zoes-cafe"),
        ("\u7ea2\u8272\u7684\u5706 b", "\u7ea2\u8272\u7684\u5706-b", "b"),
        ("\u7ea2\u8272", "\u7ea2\u8272", ""),
        ("../a\\b\x00c", "a-b-c", "a-b-c"),
        ("x" * 80, "x" * 60, "x" * 60),
        ("\U00020000" * 60, "\U00020000" * 30, ""),
        ("a \udce9 b", "a-b", "a-b"),
    ],
)
def test_letters_of_a_prompt_in_the_name_of_a_file(
    prompt: str, letters: str, ascii_only: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for encoding, expected in (
        ("UTF-8", letters),
        ("ANSI_X3.4-1968", ascii_only),
        ("ISO-8859-1", ascii_only),
    ):
        monkeypatch.setattr(locale, "getencoding", lambda encoding=encoding: encoding)
        name = in_file_name(prompt)
        assert name == expected
        assert len(name.encode()) <= 120


def test_a_path_that_is_no_utf_8_is_written_as_escapes(tmp_path: Path) -> None:
    write_atomic(tmp_path / "page.html", f"a run in {os.fsdecode(b'caf' + bytes([0xE9]))}, \u5706")
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == "a run in caf\\udce9, \u5706"


def test_a_signal_to_every_process_of_a_job_spoils_no_video(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler signals ffmpeg too, which would end with half of a video."""
    import imageio_ffmpeg

    program = tmp_path / "ffmpeg"
    kills = "".join(
        f"kill -{name} $$\n" for name in ("INT", "QUIT", "TERM", "HUP", "USR1", "USR2", "XCPU")
    )
    program.write_text(f'#!/bin/sh\n{kills}exec {imageio_ffmpeg.get_ffmpeg_exe()} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setattr(imageio_ffmpeg, "get_ffmpeg_exe", lambda: str(program))
    assert save_video(torch.rand(3, 3, 16, 16), "a", tmp_path, 0, 8).stat().st_size > 0


# -- commands --------------------------------------------------------------------------------------

WALK = """
import json, sys
from sage_fast.util.text import restart_in_utf8
restart_in_utf8()
from sage_fast.cli import main
statuses = {words[0]: main(words) for words in json.loads(sys.argv[1])}
print(json.dumps(statuses), file=sys.stderr)
"""


@pytest.mark.soak
@narrow
def test_a_run_and_what_is_made_of_it(variables: dict[str, str], tmp_path: Path) -> None:
    """Train, sample, report, compare and export, with letters in paths and labels."""
    run, folder = tmp_path / "\u5706-caf\u00e9", tmp_path / "\u00fc"
    few = arguments(
        train__iterations=1, train__prompts_per_iteration=1, train__group_size=2,
        eval__num_prompts=1,
        eval__seeds_per_prompt=1, eval__judge="null", train__optimizer_steps=1,
    )  # fmt: skip
    commands = [
        ["train", str(PAPER), "--output", str(run), *FEW_STEPS, *few],
        [
            "sample",
            str(run),
            "--prompt",
            "a small red ball moves left quickly",
            "--folder",
            str(folder),
        ],
        ["report", str(run)],
        ["compare", f"\u5706={run}", f"\u00fc={run}", "--folder", str(folder / "page")],
        ["export", str(run), str(folder / "weights")],
    ]
    done = python(WALK, json.dumps(commands), **variables)
    assert done.returncode == 0, done.stderr[-3000:]
    statuses = json.loads(done.stderr.splitlines()[-1])
    assert statuses == dict.fromkeys(statuses, 0), (done.stdout[-2000:], done.stderr[-3000:])
    assert len(list(folder.glob("00-*.mp4"))) == 1
    assert (run / "report.html").is_file()


# -- a pipe whose reader has ended -----------------------------------------------------------------

PIPED = """
import logging, sys
from pathlib import Path
from sage_fast.cli import guarded
from sage_fast.util import console
def command():
    if sys.argv[1]:
        console.log_to(Path(sys.argv[1]))
    console.log_to_screen()
    for _ in range(3):
        logging.getLogger("sage_fast.x").info("an iteration")
    return 0
sys.exit(guarded("x", command))
"""


@pytest.mark.fault(
    "the reader of a run's output is killed, as `tee` in a pipe (SIGPIPE)",
    "the run goes on; its own log has every line",
)
def test_a_run_whose_pipe_has_no_reader_goes_on(tmp_path: Path) -> None:
    """It has a log file. Another command ends, as in `sage-fast report | head`."""
    for log, status in ((str(tmp_path / "log"), 0), ("", 141)):
        reader, writer = os.pipe()
        os.close(reader)
        done = subprocess.run(
            [sys.executable, "-c", PIPED, log],
            stdout=writer,
            stderr=subprocess.PIPE,
            cwd=REPOSITORY,
        )
        os.close(writer)
        assert done.returncode == status, (os.strerror(errno.EPIPE), done.stderr)
    assert (tmp_path / "log").read_text().count("an iteration") == 3
