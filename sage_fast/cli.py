# PYTHON_ARGCOMPLETE_OK
"""The `sage-fast` command line.

`COMMANDS` holds every command; a command's module is imported when it is asked for.
"""

from __future__ import annotations

import argparse
import atexit
import functools
import importlib
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from sage_fast import __version__
from sage_fast.util.errors import (
    HUNG_THREAD,
    RunError,
    Stopped,
    UserError,
    drop_output,
    nearest,
    print_error,
    reason,
)
from sage_fast.util.launchers import (
    check_launch,
    leave_group,
    note_idle_tasks,
    note_lone_copies,
    without_local_rank,
)
from sage_fast.util.paths import expand_options
from sage_fast.util.profiling import ranges, tools_of_environment
from sage_fast.util.text import escape_on_screen, restart_in_utf8

EPILOG = """examples:
  sage-fast train configs/demo.yaml --output runs/demo
  sage-fast train configs/hunyuanvideo15-480p.yaml --dry-run --gpus 8
  torchrun --nproc-per-node 8 -m sage_fast train configs/hunyuanvideo15-480p.yaml
  sage-fast train runs/demo --resume
  sage-fast sample runs/demo --prompt "a small red ball moves left quickly"

Completion in bash and zsh: eval "$(register-python-argcomplete sage-fast)"
Any setting of the YAML file can be given on the command line, such as
--sampling.eta 0.7 --train.iterations 10; `sage-fast train --help` lists them.
docs/... in a help text or a message is a page in the source of sage-fast, not in its wheel."""
THREAD_GRACE = 20.0
"""Seconds that threads of plug-ins have to end after the command."""
PIPE_CLOSED = 141
"""Exit status when the reader of stdout has gone away, as in `sage-fast train --help | head`."""


class Command(NamedTuple):
    """A command of `sage-fast`.

    Attributes:
        help: one line that starts with a verb.
        settings: the command's positional arguments in its usage line, if every setting is an
            option of it too. `run` gets the given ones as `overrides`, dotted key -> value as
            typed.
        ranks: whether its processes may be ranks that work together. Any other command is one
            process, whatever a shell's environment holds of a launcher.
        module: has `add_arguments(add_argument)` and `run(options, overrides)`, which returns the
            exit status; None is 0. Importing it takes no time: `run` imports what is heavy. By
            default the one in `commands` of its name.
    """

    help: str
    settings: str = ""
    module: str = ""
    ranks: bool = False


COMMANDS = {
    "init": Command("write a configuration, a reward and prompts to start from into a folder"),
    "train": Command(
        "train a policy; leaves a run folder with weights, metrics, videos and a report",
        "CONFIG",
        ranks=True,
    ),
    "embed": Command(
        "encode all prompts into data.embedding_cache, as training would do at its start",
        "CONFIG",
        ranks=True,
    ),
    "sample": Command("generate videos with the ODE sampler", "CONFIG", ranks=True),
    "eval": Command(
        "score runs, checkpoints or videos on the held-out prompts",
        "SOURCE [SOURCE ...]",
        ranks=True,
    ),
    "compare": Command("compare runs, finished or not, on one page"),
    "serve-reward": Command("score videos for other runs, over HTTP", "CONFIG", "commands.serve"),
    "report": Command("write the report.html of a run, finished or still running"),
    "export": Command("write the weights of a run for other programs, with a model card"),
    "bench": Command(
        "time operators, rollouts or iterations against stock code", module="benchmarks.command"
    ),
    "profile": Command("time an iteration, or measure its signal", "CONFIG", ranks=True),
    "doctor": Command("check what is installed, whether it works and gives the right numbers"),
}
"""Commands by name, in the order the help lists them."""

COMMAND_HINTS = {
    "resume": "use `sage-fast train RUN --resume`",
    "grid": "use `python -m studies.grid`",
    "push": "use `sage-fast export RUN FOLDER`, then `hf upload`",
    "configs": "use `sage-fast init --list`",
    "list": "use `sage-fast init --list`",
    "plan": "use `sage-fast train CONFIG --dry-run`",
}
"""Words that may be taken for commands -> what there is instead."""


def load(name: str) -> Any:
    """Import the module of a command."""
    return importlib.import_module(f"sage_fast.{COMMANDS[name].module or f'commands.{name}'}")


def _parser(commands: Collection[str], *, list_settings: bool = False) -> argparse.ArgumentParser:
    """Build the parser.

    Args:
        commands: commands that get their arguments; the others have a name and a help text.
        list_settings: settings become options too, for help and completion.
    """
    parser = argparse.ArgumentParser(
        prog="sage-fast",
        description=(
            "Align video generators with reward models by SAGE-GRPO: HunyuanVideo 1.5, Wan."
        ),
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"sage-fast {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        subparser = subparsers.add_parser(
            name, help=command.help, description=command.help, allow_abbrev=False,
            # settings have long names
            formatter_class=functools.partial(argparse.HelpFormatter, max_help_position=8),
        )  # fmt: skip
        if name not in commands:
            continue
        if command.settings:
            subparser.usage = (
                f"sage-fast {name} {command.settings} [OPTION ...] [--SETTING VALUE ...]"
            )
            subparser.epilog = (
                "Settings, such as --sampling.eta 0.7, are listed by `sage-fast train --help`."
            )
        if command.settings and list_settings:
            from sage_fast.config.command_line import add_settings

            subparser.epilog = (
                "Give a setting as --key.path VALUE or --key.path=VALUE, with the value as in "
                "YAML. docs/... is a page in the source of sage-fast, not in its wheel."
            )
            add_settings(subparser)
        load(name).add_arguments(subparser.add_argument)
    return parser


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, dict[str, str]]:
    """Parse a command line; return its options and, for a command that takes settings, the given
    ones.

    Raises:
        UserError: no such command, or an unknown option.
    """
    if arguments and not arguments[0].startswith("-") and arguments[0] not in COMMANDS:
        hint = COMMAND_HINTS.get(arguments[0]) or nearest(arguments[0], COMMANDS)
        raise UserError(f"no such command; {hint}")
    named = [word for word in arguments if word in COMMANDS][:1]
    help_asked = not {"-h", "--help"}.isdisjoint(arguments)
    from sage_fast.config.command_line import split_settings
    from sage_fast.config.loader import instead_of, similar

    takes_settings = any(COMMANDS[name].settings for name in named)
    words, overrides = split_settings(arguments) if takes_settings else (list(arguments), {})
    options, rest = _parser(
        named, list_settings=help_asked and named == ["train"]
    ).parse_known_args(words)
    if rest:
        word = rest[0].partition("=")[0]
        close = []
        hint = f"see sage-fast {options.command} --help"
        if takes_settings and word.startswith("--"):
            name = word.removeprefix("--")
            close = similar(name)
            hint = instead_of(name) or hint
        if close:
            hint = f"did you mean --{' or --'.join(close)}?"
        kind = "option" if word.startswith("-") else "argument"
        raise UserError(f"unknown {kind} {word}; {hint}")
    expand_options(options)
    return options, overrides


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status: 2 for a user error, 1 for a failed run."""
    # None if closed, as by `>&-`: files would take their descriptors
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115

    is_own_process = arguments is None
    if arguments is None:
        restart_in_utf8()
        arguments = sys.argv[1:]
    words = without_local_rank(arguments)
    command = " ".join(["sage-fast", *words[:1]])

    status = 1  # of an exception that keeps its traceback
    try:
        status = guarded(command, lambda: _run(words))
        return status
    finally:
        if is_own_process:
            # comes each second: the status is to be the command's
            signal.signal(signal.SIGXCPU, signal.SIG_IGN)
            threading.Thread(target=_end, args=(status,), daemon=True).start()
        if status != 1 and any(thread.name == HUNG_THREAD for thread in threading.enumerate()):
            # the package that hangs may have an exit hook, as wandb has, which would hang too
            os._exit(status)


def _end(status: int) -> None:
    """End the process if threads that Python waits for, such as a reward's, still run after
    `THREAD_GRACE`."""
    threading.Event().wait(THREAD_GRACE)
    names = []
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.main_thread():
            names.append(thread.name)
    if names:
        print_error(f"note: threads that still run end with the process: {', '.join(names)}")
        atexit._run_exitfuncs()
        os._exit(status)


def guarded(name: str, command: Callable[[], int]) -> int:
    """Run a command and return its exit status.

    `UserError`, `RunError` and `OSError` are printed as one line after `name`. Any other exception
    is a bug, here or in a plug-in, and keeps its traceback.
    """
    escape_on_screen()
    try:
        try:
            return command()
        finally:
            sys.stdout.flush()
    except (UserError, RunError) as error:
        print_error(f"{name}: {error}")
        return 2 if isinstance(error, UserError) else 1
    except OSError as error:
        if isinstance(error, BrokenPipeError) and _output_is_closed():
            drop_output(sys.stdout.fileno())  # for the flush at the interpreter's end
            return PIPE_CLOSED
        print_error(f"{name}: {reason(error)}")
        return 1
    except Stopped as stopped:
        return stopped.status
    except KeyboardInterrupt:
        return 130


def _run(arguments: list[str]) -> int:
    if "_ARGCOMPLETE" in os.environ:
        import argcomplete

        argcomplete.autocomplete(
            _parser(COMMANDS, list_settings=True), always_complete_options=False
        )
    options, overrides = parse(arguments)
    from sage_fast.util.console import leave_logs, log_to_screen

    leave_logs()
    together = COMMANDS[options.command].ranks
    if not together:
        leave_group()
    log_to_screen(quiet=getattr(options, "quiet", False))
    if together and not getattr(options, "dry_run", False):
        check_launch()
        note_idle_tasks()
        note_lone_copies()
    with ranges(*tools_of_environment()):
        return load(options.command).run(options, overrides) or 0


def _output_is_closed() -> bool:
    """Return whether the reader of stdout has gone away, rather than that of another pipe."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


if __name__ == "__main__":
    sys.exit(main())
