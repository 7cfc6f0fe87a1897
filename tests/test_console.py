"""What a user sees: a bar on a terminal, plain lines in a log, nothing when quiet."""

import logging
import os
import pty
import select
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from sage_fast.util import console
from sage_fast.util.console import quiet
from sage_fast.util.errors import printable

SLOW = (
    "import logging, types\nfrom sage_fast.util import console\n"
    "console.SECONDS_BETWEEN_LINES, console.LONG, seconds = 5, 20, [0]\n"
    "console.time = types.SimpleNamespace(monotonic=lambda: seconds[-1])\n"
    "console.log_to_screen()\nfor i in console.progress(range(12), 'sample', 12, 'step'): "
    "seconds.append(4 * i + 4)\n"
    "logging.getLogger('sage_fast.run').info('done')\n"
)


def test_a_log_holds_lines_that_become_rarer_and_no_carriage_return() -> None:
    done = subprocess.run([sys.executable, "-c", SLOW], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert lines[-1] == "done"
    steps = [2, 4, 6, 11]  # of 4 s each: a line every 5 s up to 20 s, then one every 20 s
    assert lines[:-1] == [f"sample: {step} of 12 steps" for step in steps]
    assert "\r" not in done.stdout + done.stderr


def test_a_terminal_shows_a_bar() -> None:
    leader, follower = pty.openpty()
    termios.tcsetwinsize(follower, (24, 80))
    done = subprocess.run(
        [sys.executable, "-c", SLOW], stdout=subprocess.PIPE, stderr=follower, check=True
    )
    assert select.select([leader], [], [], 10)[0]
    shown = os.read(leader, 65536).decode()
    os.close(follower)
    os.close(leader)
    assert done.stdout.decode().splitlines() == ["done"]
    assert "sample:" in shown
    assert "\r" in shown


def speak() -> None:
    assert list(console.progress(range(3), "sample", 3, "step")) == [0, 1, 2]
    LOG.info("noted")
    LOG.warning("warned")


ALL = "sample: 1 of 3 steps\nsample: 2 of 3 steps\nnoted\nwarned\n"
LOG = logging.getLogger("sage_fast.run.example")


def test_what_is_shown(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank prints, unless quiet; errors are always shown.

    Logging by a library repeats no line.
    """
    monkeypatch.setattr(console, "SECONDS_BETWEEN_LINES", 0.0)
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.StreamHandler()])
    console.log_to_screen()
    console.log_to_screen()
    speak()
    assert capfd.readouterr() == (ALL, "")
    with quiet():
        speak()
        LOG.error("wrong")
    assert capfd.readouterr() == ("wrong\n", "")
    speak()
    assert capfd.readouterr() == (ALL, "")
    console.log_to_screen(quiet=True)
    with quiet():
        speak()
    speak()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    console.log_to_screen()
    speak()
    assert capfd.readouterr() == ("", "")


def test_a_script_sees_warnings_and_what_it_asks_for(
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Importing the package prints nothing and adds no handler."""
    monkeypatch.setattr(console, "SECONDS_BETWEEN_LINES", 0.0)
    code = (
        "import logging, sage_fast.util.console as c; assert not c.PACKAGE.handlers and not "
        "c.shows()\n"
    )
    code += "log = logging.getLogger('sage_fast.x'); log.info('noted'); log.warning('warned')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "warned\n")
    caplog.set_level(logging.INFO)
    speak()
    # the script's own handlers get messages, but no progress
    assert caplog.messages == ["noted", "warned"]
    assert capfd.readouterr().out == ""


def test_a_notebook_shows_a_bar(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A notebook's stderr is no terminal; tqdm.auto picks the class that draws there."""
    updates: list[int] = []

    class Bar:
        def __init__(self, **options: object) -> None:
            updates.append(0)

        def update(self, count: int) -> None:
            updates.append(count)

        def close(self) -> None:
            updates.append(-1)

    monkeypatch.setattr(console, "IN_NOTEBOOK", True)
    monkeypatch.setattr(console, "tqdm", Bar)
    list(console.progress(range(2), "sample", 2))
    assert updates == []
    console.log_to_screen()
    list(console.progress(range(2), "sample", 2))
    list(console.progress([], "sample", 0))
    assert updates == [0, 1, 1, -1]
    assert capfd.readouterr() == ("", "")


def test_what_a_message_quotes_steers_no_terminal(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Not the screen, and not that of someone who reads the log."""
    console.log_to_screen()
    console.log_to(tmp_path / "log")
    LOG.info("a \x1b]0;title\x07 and a \u202e\nof \x9b2J")
    assert capfd.readouterr().out == "a \\x1b]0;title\\x07 and a \\u202e\nof \\x9b2J\n"
    assert (
        (tmp_path / "log").read_text().endswith("a \\x1b]0;title\\x07 and a \\u202e\nof \\x9b2J\n")
    )


LOGGED = """
import logging, os, sys
from pathlib import Path
from typing import Any
from sage_fast.util.console import quiet
from sage_fast.util import console
console.log_to(Path(sys.argv[1]))
log = logging.getLogger("sage_fast.run")
log.info("hidden before")
console.log_to_screen()
log.info("said")
with quiet():
    log.info("said quietly")
list(console.progress(range(3), "sample", 3, "step"))
print("printed", flush=True)
log.debug("told the log")
if sys.argv[2] == "abort":
    os.abort()
raise ValueError("what ended it")
"""


@pytest.mark.parametrize("end", ["error", "abort"])
def test_a_log_beside_the_screen_tells_what_ended_the_process(end: str, tmp_path: Path) -> None:
    log, code = tmp_path / "logs" / "rank-003.log", tmp_path / "code.py"
    code.write_text(LOGGED)
    leader, follower = pty.openpty()  # a terminal, where a bar is drawn
    termios.tcsetwinsize(follower, (24, 80))
    command = [sys.executable, str(code), str(log), end]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=follower, text=True)
    assert done.returncode != 0
    assert done.stdout.splitlines() == ["said", "printed"]
    screen = os.read(leader, 65536).decode()
    os.close(follower)
    os.close(leader)
    assert "sample:" in screen
    text = log.read_text()
    assert "\r" not in text
    assert "sample:" not in text
    assert [line.split(" ", 2)[2] for line in text.splitlines()[1:5]] == [
        "hidden before",
        "said",
        "said quietly",
        "told the log",
    ]
    assert (
        "ValueError: what ended it" in screen
        if end == "error"
        else "Fatal Python error: Aborted" in text
    )
    subprocess.run(command, capture_output=True)
    assert log.read_text().startswith(text)  # the output of the earlier process is kept


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\x1b[31mred", "a\\x1b[31mred"),
        ("two\nlines", "two\nlines"),
        ("红色的圆\u3000向左", "红色的圆\u3000向左"),  # an ideographic space
        ("👩\u200d🚀 at\u00a0dawn", "👩\u200d🚀 at\u00a0dawn"),
        ("\u202eright to left", "\\u202eright to left"),
        ("next\u2028line", "next\\u2028line"),
    ],
)
def test_what_a_terminal_obeys_is_escaped_and_scripts_are_not(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_an_error_that_cannot_be_shown_keeps_its_status() -> None:
    """Stderr on a full disk."""
    code = "import sys; from sage_fast.cli import main; sys.exit(main(['tarin']))"
    with open("/dev/full", "w") as full:
        assert subprocess.run([sys.executable, "-c", code], stderr=full).returncode == 2


@pytest.mark.parametrize("stderr", [subprocess.PIPE, None], ids=["stderr elsewhere", "both"])
def test_messages_that_cannot_be_printed_end_nothing(stderr: int | None) -> None:
    code = (
        "import logging, sys\nfrom sage_fast.util import console\n"
        "console.log_to_screen()\nfor _ in range(3): "
        "logging.getLogger('sage_fast.run').info('said')\n"
    )
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=full, stderr=stderr or full, text=True
        )
    assert done.returncode == 0
    assert done.stderr in (
        None,
        "note: nothing more is printed: stdout cannot be written (No space left on device)\n",
    )


def test_a_log_that_cannot_be_opened_is_one_note(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "logs").touch()
    console.log_to_screen()
    console.log_to(tmp_path / "logs" / "rank-000.log")
    LOG.info("said")
    assert (
        capfd.readouterr().out == f"note: no log is written: '{tmp_path}/logs': File exists\nsaid\n"
    )


def test_an_error_of_a_message_keeps_its_traceback(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Only what the disk does is one note; a wrong message is a bug."""
    console.log_to(tmp_path / "log")
    console.PACKAGE.handlers[-1].handle(
        logging.makeLogRecord({"msg": "%d", "args": ("no number",)})
    )
    assert "TypeError: %d format" in capfd.readouterr().err
