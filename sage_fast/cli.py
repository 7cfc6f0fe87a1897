# PYTHON_ARGCOMPLETE_OK
"""The `sage-fast` command. Nothing heavy is imported before a command needs it: `--help` answers at once."""

from __future__ import annotations

import argparse
import functools
import os
import select
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sage_fast import __version__, judging
from sage_fast.errors import RunError, Stopped, UserError, reason
from sage_fast.files import make_folder_of, writing
from sage_fast.profiling import ranges, tools_of_environment
from sage_fast.reproduce import command as reproducing

if TYPE_CHECKING:
    from sage_fast.config import Config

EPILOG = """examples:
  sage-fast train configs/demo.yaml --output runs/demo
  sage-fast train configs/hunyuanvideo15-480p.yaml --dry-run --gpus 8
  torchrun --nproc-per-node 8 -m sage_fast train configs/hunyuanvideo15-480p.yaml
  sage-fast train runs/demo --resume
  sage-fast sample runs/demo --prompt "a red circle moves left quickly"

Any setting of the YAML file can be given on the command line, such as
--sampling.eta 0.7 --train.iterations 10; `sage-fast train --help` lists them.
Completion in bash and zsh: eval "$(register-python-argcomplete sage-fast)"
"""
WITH_SETTINGS = ("train", "embed", "grid", "sample", "eval", "serve-reward", "profile")
PIPE_CLOSED = 141
"""Exit status of a command whose reader went away, as in `sage-fast train --help | head`."""


def _parser(show_settings: Collection[str] = ()) -> argparse.ArgumentParser:
    """
    Args:
        show_settings: commands whose options include every setting, for help and completion.
    """
    parser = argparse.ArgumentParser(
        prog="sage-fast",
        description="Align HunyuanVideo 1.5 with reward models by SAGE-GRPO.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"sage-fast {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text, allow_abbrev=False, formatter_class=_Help)
        if name in WITH_SETTINGS:
            command.usage = f"sage-fast {name} CONFIG [OPTION ...] [--SETTING VALUE ...]"
            command.epilog = "Settings, such as --sampling.eta 0.7, are listed by `sage-fast train --help`."
        if name in show_settings:
            from sage_fast.settings import add_settings

            command.epilog = "A setting is given as --key.path VALUE or --key.path=VALUE, the value as in YAML."
            add_settings(command)
        return command

    init = add("init", "write a configuration, a reward and prompts into a folder, to start from")
    init.add_argument("folder", metavar="FOLDER", help="new, or without files of those names")
    init.add_argument(
        "--config", metavar="NAME", default="demo",
        help="demo (default), hunyuanvideo15-480p (a LoRA on 8 GPUs), paper-480p or official-480p (the authors' code)",
    )  # fmt: skip

    train = add("train", "train a policy; leaves a run folder with weights, metrics, videos and a report")
    train.add_argument("config", metavar="CONFIG", help="YAML file; with --resume also a run folder")
    train.add_argument("--dry-run", action="store_true", help="print sizes, FLOPs and memory, then stop")
    train.add_argument("--gpus", type=int, metavar="N", help="with --dry-run: plan for N GPUs")
    train.add_argument(
        "--resume", action="store_true", help="continue the run in the output folder, with its own settings"
    )
    train.add_argument("--quiet", action="store_true", help="print nothing but errors")

    embed = add("embed", "encode all prompts into data.embedding_cache, so that training loads no text encoder")
    embed.add_argument("config", metavar="CONFIG", help="YAML file")
    embed.add_argument("--prompts", metavar="FILE", help="instead of data.prompts and data.eval_prompts")
    embed.add_argument("--quiet", action="store_true", help="print nothing but errors")

    sample = add("sample", "make videos with the ODE")
    sample.add_argument("config", metavar="CONFIG", help="YAML file, or a run folder (its weights are used)")
    sample.add_argument("--prompt", action="append", default=[], help="may be given several times")
    sample.add_argument("--prompts", metavar="FILE", help="UTF-8 text with one prompt a line, .jsonl or .csv")
    sample.add_argument("--folder", default="samples", help="where the MP4 files go (default: samples)")
    sample.add_argument("--quiet", action="store_true", help="no progress bar")

    judging.add_parsers(add)
    reproducing.add_parsers(add)

    serve = add("serve-reward", "score videos for other runs, over HTTP")
    serve.add_argument("config", metavar="CONFIG", help="YAML file; its rewards are served")
    serve.add_argument("--host", default="127.0.0.1", help="address to listen at (default: 127.0.0.1)")
    serve.add_argument("--port", type=int, default=8000, help="0: a free one (default: 8000)")

    report = add("report", "write report.html of a run, again or while it is running")
    report.add_argument("run", metavar="RUN", help="run folder")

    bench = add("bench", "time the operators, the rollout or whole iterations against what stock code does")
    bench.add_argument("what", nargs="?", choices=("operators", "rollout", "iteration"), default="operators")
    bench.add_argument("--config", metavar="FILE", help="YAML file, for `bench iteration`")
    bench.add_argument("--json", metavar="FILE", help="write every number there, after every row")
    bench.add_argument("--size", action="append", help="a size such as '480p batch 4' (several times for several)")
    bench.add_argument("--part", action="append", help="of `bench rollout`: forward, step, rollout, train, decode")
    bench.add_argument("--path", action="append", help="of `bench rollout` or `iteration`: stock, eager, compiled, ...")
    bench.add_argument("--budget", type=float, metavar="SECONDS", help="`bench rollout`: skip rows that do not fit")
    bench.add_argument("--repetitions", type=int, default=15)
    bench.add_argument("--compile", action="store_true", help="compile every Triton kernel instead; needs no GPU")

    from sage_fast.run.grid import add_options

    add_options(add("grid", "train a grid of settings, here or as a Slurm array job; can be stopped and goes on"))

    profile = add("profile", "time one iteration by phase and by kernel; prints the nsys and ncu commands for it")
    profile.add_argument("config", metavar="CONFIG", help="YAML file, or a run folder (its weights are used)")
    profile.add_argument("--folder", default="profile", help="where profile.json and the trace go (default: profile)")
    profile.add_argument("--warmup", type=int, default=1, help="iterations before the measured one (default: 1)")
    profile.add_argument("--window-only", action="store_true", help="only NVTX ranges, to run under nsys or ncu")

    doctor = add("doctor", "check what is installed, whether it works and agrees, and how fast it is here")
    doctor.add_argument("--json", metavar="FILE", help="write every row there")

    actions = add("testbed", "the moving-shapes world").add_subparsers(dest="action", required=True, metavar="ACTION")
    pretrain = actions.add_parser("pretrain", help="make the base model that is shipped", allow_abbrev=False)
    pretrain.add_argument("folder", metavar="FOLDER", help="where transformer/, vae/ and judge/ go")
    pretrain.add_argument("--seed", type=int, default=0)
    pretrain.add_argument("--quiet", action="store_true", help="no progress bar")
    return parser


class _Help(argparse.HelpFormatter):
    """Names on a line of their own, since those of settings are long."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=8)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status: 2 for a mistake of the user, 1 for a run that failed.

    Errors that are raised on purpose, and those of the operating system, are shown in one line; any other is a mistake
    of the program or of a plug-in, and keeps its traceback.
    """
    try:
        try:
            status = _run(list(sys.argv[1:] if arguments is None else arguments))
        except SystemExit:  # argparse has printed the help
            sys.stdout.flush()
            raise
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at the interpreter's end
        return PIPE_CLOSED


def _run(arguments: list[str]) -> int:
    if "_ARGCOMPLETE" in os.environ:
        import argcomplete

        argcomplete.autocomplete(_parser(WITH_SETTINGS), always_complete_options=False)
    help_asked = not {"-h", "--help"}.isdisjoint(arguments)
    options, rest = _parser(["train"] if help_asked else ()).parse_known_args(arguments)
    try:
        overrides = _overrides(options.command, rest)
        with ranges(*tools_of_environment()):
            return _COMMANDS[options.command](options, overrides)
    except (UserError, RunError) as error:
        print(f"sage-fast {options.command}: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    except OSError as error:
        if isinstance(error, BrokenPipeError) and _output_is_closed():
            raise
        print(f"sage-fast {options.command}: {reason(error)}", file=sys.stderr)
        return 1
    except Stopped as stopped:
        return stopped.status
    except KeyboardInterrupt:
        return 130


def _output_is_closed() -> bool:
    """Whether the reader of standard output went away, and not that of another pipe."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _overrides(command: str, rest: list[str]) -> dict[str, str]:
    if not rest:
        return {}
    from sage_fast.settings import overrides_of

    overrides = overrides_of(rest)
    if command not in WITH_SETTINGS:
        raise UserError(f"unknown option --{next(iter(overrides))}")
    return overrides


def _tell(options: argparse.Namespace, *lines: str) -> None:
    """Print lines at once, on the first rank, unless --quiet."""
    if not getattr(options, "quiet", False) and os.environ.get("RANK", "0") == "0":
        print(*(f"{line}\n" for line in lines), sep="", end="", flush=True)


def _tell_loading(options: argparse.Namespace) -> None:
    """Say why nothing happens for the seconds that the next imports take."""
    _tell(options, f"sage-fast {options.command}: loading PyTorch and diffusers")


def _train(options: argparse.Namespace, overrides: dict[str, str]) -> int:
    from sage_fast.run.resume import resumed_settings
    from sage_fast.settings import load

    notes: list[str] = []
    if options.resume:
        config, notes = resumed_settings(options.config, overrides)
    else:
        config = load(options.config, overrides)
    _check_gpus(options)
    _tell_loading(options)
    if options.dry_run:
        from sage_fast.measure.plan import dry_run

        print(dry_run(config, options.gpus or int(os.environ.get("WORLD_SIZE", "1"))))
        return 0
    from sage_fast.run.folder import is_restart
    from sage_fast.run.train import train

    restarted = not options.resume and is_restart(config)
    if restarted:
        config, notes = resumed_settings(options.config, overrides)
        _tell(options, f"restarted by torchrun: goes on with the run in {config.output}")
    _tell(options, *notes)
    with writing(config.output):
        train(config, resume=options.resume or restarted, quiet=options.quiet)
    return 0


def _check_gpus(options: argparse.Namespace) -> None:
    if options.gpus is None:
        return
    if options.gpus < 1:
        raise UserError(f"--gpus {options.gpus}: expected at least 1")
    if not options.dry_run:
        raise UserError(
            f"--gpus {options.gpus} goes with --dry-run; to train on {options.gpus} GPUs: "
            f"torchrun --nproc-per-node {options.gpus} -m sage_fast train {options.config}"
        )


def _load(options: argparse.Namespace, overrides: dict[str, str]) -> tuple[Config, int]:
    """Settings of a YAML file or run folder, and the iteration of its weights; tells which, and that loading begins."""
    from sage_fast.run.weights import load_run

    config, iteration = load_run(options.config, overrides, lambda line: _tell(options, line))
    if iteration is not None:
        _tell(options, f"weights of iteration {iteration}: {config.model.weights}")
    _tell_loading(options)
    return config, iteration or 0


def _sample(options: argparse.Namespace, overrides: dict[str, str]) -> int:
    if not options.prompt and not options.prompts:
        raise UserError("give at least one --prompt, or --prompts FILE")
    config, _ = _load(options, overrides)
    from sage_fast.data.prompts import Prompt, read_prompts

    prompts = [Prompt(text=text) for text in options.prompt]
    prompts += read_prompts(options.prompts, config.sampling) if options.prompts else []
    from sage_fast.run.sample import sample

    tell = functools.partial(_tell, options)
    for path in sample(config, prompts, Path(options.folder), quiet=options.quiet, tell=tell):
        print(path)
    return 0


def _grid(options: argparse.Namespace, overrides: dict[str, str]) -> int:
    from sage_fast.run.grid import grid

    return grid(options, overrides)


def _embed(options: argparse.Namespace, overrides: dict[str, str]) -> int:
    config, _ = _load(options, overrides)
    from sage_fast.run.embed import embed_prompts

    _tell(options, embed_prompts(config, options.prompts, quiet=options.quiet))
    return 0


def _serve_reward(options: argparse.Namespace, overrides: dict[str, str]) -> int:
    from sage_fast.run.serve import serve_reward

    return serve_reward(options.config, overrides, options.host, options.port)


def _report(options: argparse.Namespace, overrides: dict[str, str]) -> int:
    _tell(options, f"sage-fast report: reading {options.run}")
    from sage_fast.report.page import write_report

    print(write_report(Path(options.run)))
    return 0


def _bench(options: argparse.Namespace, overrides: dict[str, str]) -> int:
    _tell_loading(options)
    make_folder_of(options.json)
    from sage_fast.measure.command import bench

    return bench(options)


def _profile(options: argparse.Namespace, overrides: dict[str, str]) -> int:
    if options.warmup < 0:
        raise UserError(f"--warmup {options.warmup}: expected 0 or more")
    config, _ = _load(options, overrides)
    from sage_fast.measure.profile import format_profile, profile_iteration

    result = profile_iteration(
        config,
        options.config,
        overrides,
        folder=Path(options.folder),
        warmup=options.warmup,
        window_only=options.window_only,
    )
    print(format_profile(result))
    return 0


def _doctor(options: argparse.Namespace, overrides: dict[str, str]) -> int:
    _tell_loading(options)
    make_folder_of(options.json)
    from sage_fast.measure.doctor import doctor

    return doctor(options.json)


def _testbed(options: argparse.Namespace, overrides: dict[str, str]) -> int:
    _tell_loading(options)
    from sage_fast.models.testbed.pretrain import pretrain

    pretrain(Path(options.folder), seed=options.seed, quiet=options.quiet)
    return 0


def _init(options: argparse.Namespace, overrides: dict[str, str]) -> int:
    from sage_fast.run.init import init

    print(init(Path(options.folder), options.config))
    return 0


_COMMANDS: dict[str, Callable[[argparse.Namespace, dict[str, str]], int]] = {
    "init": _init,
    "train": _train,
    "grid": _grid,
    "embed": _embed,
    "sample": _sample,
    "serve-reward": _serve_reward,
    "report": _report,
    "bench": _bench,
    "profile": _profile,
    "doctor": _doctor,
    "testbed": _testbed,
    **{name: functools.partial(command, _tell) for name, command in (judging.COMMANDS | reproducing.COMMANDS).items()},
}

if __name__ == "__main__":
    sys.exit(main())
