# PYTHON_ARGCOMPLETE_OK
"""The `sage-fast` command line. `COMMANDS` holds every command; heavy imports wait until a command needs them."""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import logging
import math
import os
import select
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sage_fast import __version__
from sage_fast.util.errors import RunError, Stopped, UserError, nearest, reason
from sage_fast.util.files import make_folder_of, writing
from sage_fast.util.profiling import ranges, tools_of_environment

log = logging.getLogger("sage_fast.cli")

if TYPE_CHECKING:
    from sage_fast.config.schema import Config

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
PIPE_CLOSED = 141
"""Exit status when the reader of stdout has gone away, as in `sage-fast train --help | head`."""

Options = argparse.Namespace
Overrides = dict[str, str]
Action = Callable[[Options, Overrides], int]


class Command(NamedTuple):
    """A command of `sage-fast`.

    Attributes:
        help: one line that starts with a verb.
        arguments: names and keywords for each `add_argument` call.
        run: function that runs the command and returns the exit status.
        settings: also accept every setting as an option; `run` gets the given ones as overrides.
    """

    help: str
    arguments: Sequence[tuple[tuple[str, ...], dict[str, Any]]]
    run: Action
    settings: bool


COMMANDS: dict[str, Command] = {}
"""Commands by name, in the order the help lists them."""


def command(name: str, help: str, *arguments: Any, settings: bool = False) -> Callable[[Action], Action]:
    """Register the decorated function in `COMMANDS`."""

    def register(run: Action) -> Action:
        COMMANDS[name] = Command(help, arguments, run, settings)
        return run

    return register


def argument(*names: str, **options: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return the names and keywords of one `add_argument` call."""
    return names, options


# -- the parser and the exit status -----------------------------------------------------------------------------------


def _parser(show_settings: Collection[str] = ()) -> argparse.ArgumentParser:
    """Build the parser of all commands.

    Args:
        show_settings: commands whose settings become options too, for help and completion.
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
    for name, (text, arguments, _, settings) in COMMANDS.items():
        subparser = commands.add_parser(
            name, help=text, description=text, allow_abbrev=False,
            formatter_class=functools.partial(argparse.HelpFormatter, max_help_position=8),  # settings have long names
        )  # fmt: skip
        if settings:
            first = arguments[0][1]
            several = f" [{first['metavar']} ...]" if first.get("nargs") == "+" else ""
            subparser.usage = f"sage-fast {name} {first['metavar']}{several} [OPTION ...] [--SETTING VALUE ...]"
            subparser.epilog = "Settings, such as --sampling.eta 0.7, are listed by `sage-fast train --help`."
        if settings and name in show_settings:
            from sage_fast.config.command_line import add_settings

            subparser.epilog = "Give a setting as --key.path VALUE or --key.path=VALUE, with the value as in YAML."
            add_settings(subparser)
        for names, keywords in arguments:
            subparser.add_argument(*names, **keywords)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status: 2 for a user error, 1 for a failed run."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    return guarded(" ".join(["sage-fast", *words[:1]]), lambda: _run(words))


def guarded(name: str, command: Callable[[], int]) -> int:
    """Run a command and return its exit status.

    `UserError`, `RunError` and `OSError` are printed as one line after `name`. Any other exception is a bug, here or in
    a plug-in, and keeps its traceback.
    """
    try:
        try:
            return command()
        finally:
            sys.stdout.flush()
    except (UserError, RunError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    except OSError as error:
        if isinstance(error, BrokenPipeError) and _output_is_closed():
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at the interpreter's end
            return PIPE_CLOSED
        print(f"{name}: {reason(error)}", file=sys.stderr)
        return 1
    except Stopped as stopped:
        return stopped.status
    except KeyboardInterrupt:
        return 130


def _run(arguments: list[str]) -> int:
    if "_ARGCOMPLETE" in os.environ:
        import argcomplete

        argcomplete.autocomplete(_parser(COMMANDS), always_complete_options=False)
    if arguments and not arguments[0].startswith("-") and arguments[0] not in COMMANDS:
        raise UserError(f"no such command; {nearest(arguments[0], COMMANDS)}")
    help_asked = not {"-h", "--help"}.isdisjoint(arguments)
    options, rest = _parser(["train"] if help_asked else ()).parse_known_args(arguments)
    overrides = _overrides(options.command, rest)
    from sage_fast.util.console import log_to_screen

    log_to_screen(quiet=getattr(options, "quiet", False))
    with ranges(*tools_of_environment()):
        return COMMANDS[options.command].run(options, overrides)


def _output_is_closed() -> bool:
    """Return whether the reader of stdout has gone away, rather than that of another pipe."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _overrides(command: str, rest: list[str]) -> Overrides:
    if not rest:
        return {}
    from sage_fast.config.command_line import overrides_of

    overrides = overrides_of(rest)
    if not COMMANDS[command].settings:
        raise UserError(f"unknown option --{next(iter(overrides))}")
    return overrides


@contextlib.contextmanager
def _loading(options: Options) -> Iterator[None]:
    """Announce the imports of the block, which take seconds; without the garbage collector they take a fifth less."""
    log.info(f"sage-fast {options.command}: loading PyTorch and diffusers")
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _load(options: Options, overrides: Overrides) -> tuple[Config, int]:
    """Return the settings of a YAML file or run folder and the iteration of its weights; announce both."""
    from sage_fast.commands.sources import load_run

    config, iteration = load_run(options.config, overrides)
    if iteration is not None:
        log.info(f"weights of iteration {iteration}: {config.model.weights}")
    with _loading(options):
        import sage_fast.models.load  # noqa: F401  # most of what the commands import
    return config, iteration or 0


# -- the commands -----------------------------------------------------------------------------------------------------


@command(
    "init", "write a configuration, a reward and prompts to start from into a folder",
    argument("folder", metavar="FOLDER", nargs="?", help="new folder, or one without files of those names"),
    argument("--config", metavar="NAME", default="demo", help="a configuration of --list (default: demo)"),
    argument("--list", action="store_true", help="print the configurations: what each trains, on what evidence"),
)  # fmt: skip
def _init(options: Options, overrides: Overrides) -> int:
    from sage_fast.commands.init import init, list_configurations

    if options.list == (options.folder is not None):
        raise UserError("expected either FOLDER, as in sage-fast init FOLDER [--config NAME], or --list")
    print(list_configurations() if options.list else init(Path(options.folder), options.config))
    return 0


@command(
    "train", "train a policy; leaves a run folder with weights, metrics, videos and a report",
    argument("config", metavar="CONFIG", help="YAML file; with --resume also a run folder"),
    argument("--dry-run", action="store_true", help="print sizes, FLOPs and memory, then stop"),
    argument("--gpus", type=int, metavar="N", help="with --dry-run: plan for N GPUs"),
    argument("--gpu-memory", type=float, metavar="GB", help="with --dry-run: memory of a GPU (default: 80)"),
    argument("--resume", action="store_true", help="continue the run in the output folder, with its own settings"),
    argument("--quiet", action="store_true", help="print nothing but errors"),
    settings=True,
)  # fmt: skip
def _train(options: Options, overrides: Overrides) -> int:
    from sage_fast.config.load import load
    from sage_fast.run.preflight import check_output, preflight
    from sage_fast.run.resume import launcher, resumed_settings

    notes: list[str] = []
    if options.resume:
        config, notes = resumed_settings(options.config, overrides)
    else:
        config = load(options.config, overrides)
    _check_gpus(options)
    ranks = options.gpus or int(os.environ.get("WORLD_SIZE", "1"))
    preflight(config, ranks)
    if not options.dry_run and launcher() is None:  # torchrun may be restarting the run that is there
        check_output(config, resume=options.resume)
    if options.dry_run:
        with _loading(options):
            from sage_fast.tools.plan import dry_run

        print(dry_run(config, ranks, 1e9 * (options.gpu_memory or 80)))
        return 0
    with _loading(options):
        from sage_fast.algorithm.objective import Objective
        from sage_fast.report.finish import report_run
        from sage_fast.run.fail_fast import fail_fast
        from sage_fast.run.folder import is_restart
        from sage_fast.run.method import method_of
        from sage_fast.run.train import train
        from sage_fast.util.console import wrapped

    restarted = not options.resume and is_restart(Path(config.output), config.timeout_minutes)
    if restarted:
        config, notes = resumed_settings(options.config, overrides)
        log.info(f"restarted by torchrun: resuming the run in {config.output}")
    log.info(wrapped(method_of(Objective.of(config), config.sampling)))
    for note in notes:
        log.info(note)
    with fail_fast(config.timeout_minutes), writing(config.output):
        train(config, resume=options.resume or restarted, report=report_run)
    return 0


def _check_gpus(options: Options) -> None:
    if options.gpu_memory is not None:
        if not 0 < options.gpu_memory < math.inf:
            raise UserError(f"--gpu-memory {options.gpu_memory:g}: expected GB above 0, such as 80")
        if not options.dry_run:
            raise UserError("--gpu-memory goes with --dry-run; a run takes what its GPUs have")
    if options.gpus is None:
        return
    if options.gpus < 1:
        raise UserError(f"--gpus {options.gpus}: expected at least 1")
    if not options.dry_run:
        raise UserError(
            f"--gpus {options.gpus} goes with --dry-run; to train on {options.gpus} GPUs: "
            f"torchrun --nproc-per-node {options.gpus} -m sage_fast train {options.config}"
        )


@command(
    "embed", "encode all prompts into data.embedding_cache, so that training loads no text encoder",
    argument("config", metavar="CONFIG", help="YAML file"),
    argument("--prompts", metavar="FILE", help="encode these instead of data.prompts and data.eval_prompts"),
    argument("--quiet", action="store_true", help="print nothing but errors"),
    settings=True,
)  # fmt: skip
def _embed(options: Options, overrides: Overrides) -> int:
    config, _ = _load(options, overrides)
    from sage_fast.commands.embed import embed_prompts

    log.info(embed_prompts(config, options.prompts))
    return 0


@command(
    "sample", "generate videos with the ODE sampler",
    argument("config", metavar="CONFIG", help="YAML file, or a run folder (its weights are used)"),
    argument("--prompt", action="append", default=[], help="may be given several times"),
    argument("--prompts", metavar="FILE", help="UTF-8 text with one prompt a line, or .jsonl"),
    argument("--folder", default="samples", help="where the MP4 files go (default: samples)"),
    argument("--quiet", action="store_true", help="no progress bar"),
    settings=True,
)  # fmt: skip
def _sample(options: Options, overrides: Overrides) -> int:
    if not options.prompt and not options.prompts:
        raise UserError("give at least one --prompt, or --prompts FILE")
    config, _ = _load(options, overrides)
    from sage_fast.data.prompts import Prompt, read_prompts

    prompts = [Prompt(text=text) for text in options.prompt]
    prompts += read_prompts(options.prompts) if options.prompts else []
    from sage_fast.commands.sample import sample

    for path in sample(config, prompts, Path(options.folder)):
        print(path)
    return 0


@command(
    "eval", "score runs, checkpoints or videos on the held-out prompts, with intervals",
    argument(
        "source", metavar="SOURCE", nargs="+",
        help="YAML file, run folder, checkpoint, folder with videos.csv, or base; LABEL=SOURCE names it",
    ),
    argument(
        "--scorer", action="append", default=[], metavar="NAME", help="an extra reward; may be given several times"
    ),
    argument("--folder", help="new or empty folder for the videos, the table, and a page with both"),
    argument("--json", metavar="FILE", help="write every score to FILE"),
    argument("--quiet", action="store_true", help="no progress bar"),
    settings=True,
)  # fmt: skip
def _eval(options: Options, overrides: Overrides) -> int:
    from sage_fast.commands.sources import notes_on, read_sources, settings_for

    make_folder_of(options.json)
    sources = read_sources(options.source, overrides)
    config = settings_for(sources, overrides)
    for note in notes_on(sources, config):
        log.info(note)
    with _loading(options):
        from sage_fast.commands.eval import run_eval
        from sage_fast.run.fail_fast import fail_fast

    with fail_fast(config.timeout_minutes):
        run_eval(
            sources,
            config,
            scorers=options.scorer,
            folder=None if options.folder is None else Path(options.folder),
            json=None if options.json is None else Path(options.json),
        )
    return 0


@command(
    "compare", "compare runs, finished or not, on one page",
    argument("run", metavar="RUN", nargs="+", help="run folder, or folder with videos.csv; LABEL=RUN names it"),
    argument("--folder", default="comparison", help="where the page goes (default: comparison)"),
    argument("--videos", type=int, metavar="N", default=6, help="rows of videos on the page (default: 6)"),
)  # fmt: skip
def _compare(options: Options, overrides: Overrides) -> int:
    from sage_fast.commands.sources import labelled

    if options.videos < 1:
        raise UserError(f"--videos {options.videos}: expected at least 1")
    sources = {label: Path(source) for label, source in labelled(options.run).items()}
    log.info(f"sage-fast compare: reading {', '.join(sources)}")
    from sage_fast.report.compare import write_compare

    print(write_compare(sources, Path(options.folder), options.videos))
    return 0


@command(
    "serve-reward", "score videos for other runs, over HTTP",
    argument("config", metavar="CONFIG", help="YAML file; its rewards are served"),
    argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)"),
    argument("--port", type=int, default=8000, help="0 picks a free port (default: 8000)"),
    argument("--largest", type=int, metavar="MIB", default=1024, help="largest request in MiB (default: 1024)"),
    settings=True,
)  # fmt: skip
def _serve(options: Options, overrides: Overrides) -> int:
    from sage_fast.commands.serve import serve_reward

    return serve_reward(options.config, overrides, options.host, options.port, options.largest)


@command(
    "report", "write the report.html of a run, finished or still running",
    argument("run", metavar="RUN", help="run folder"),
)  # fmt: skip
def _report(options: Options, overrides: Overrides) -> int:
    log.info(f"sage-fast report: reading {options.run}")
    from sage_fast.report.page import write_report

    print(write_report(Path(options.run)))
    return 0


@command(
    "export", "write the weights of a run for diffusers, peft, ComfyUI and the original code, with a model card",
    argument("run", metavar="RUN", help="run folder, whose newest weights are used, or a checkpoint in one"),
    argument("folder", metavar="FOLDER", help="new or empty folder"),
    argument("--base", metavar="HUB_ID", help="the base model on the hub, where model.path is a local folder"),
)  # fmt: skip
def _export(options: Options, overrides: Overrides) -> int:
    with _loading(options):
        from sage_fast.commands.export import export

    print(*export(Path(options.run), Path(options.folder), options.base), sep="\n")
    return 0


@command(
    "bench", "time the operators, the rollout or whole iterations against stock code",
    argument("what", nargs="?", choices=("operators", "rollout", "iteration"), default="operators"),
    argument("--config", metavar="FILE", help="YAML file, for `bench iteration`"),
    argument("--json", metavar="FILE", help="write every number to FILE, again after every row"),
    argument("--size", action="append", help="a size such as '480p batch 4'; may be given several times"),
    argument("--part", action="append", help="for `bench rollout`: forward, step, rollout, train or decode"),
    argument("--path", action="append", help="for `bench rollout` or `iteration`: stock, eager, compiled, ..."),
    argument("--budget", type=float, metavar="SECONDS", help="for `bench rollout`: skip rows that do not fit"),
    argument("--repetitions", type=int, default=15),
    argument("--compile", action="store_true", help="compile every Triton kernel instead; needs no GPU"),
)  # fmt: skip
def _bench(options: Options, overrides: Overrides) -> int:
    make_folder_of(options.json)
    with _loading(options):
        from sage_fast.benchmarks.command import bench

    return bench(options)


@command(
    "profile", "time one iteration by phase and by kernel; print the nsys and ncu commands for it",
    argument("config", metavar="CONFIG", help="YAML file, or a run folder (its weights are used)"),
    argument("--folder", default="profile", help="where profile.json and the trace go (default: profile)"),
    argument("--warmup", type=int, default=1, help="iterations before the measured one (default: 1)"),
    argument("--window-only", action="store_true", help="emit only NVTX ranges, to run under nsys or ncu"),
    settings=True,
)  # fmt: skip
def _profile(options: Options, overrides: Overrides) -> int:
    if options.warmup < 0:
        raise UserError(f"--warmup {options.warmup}: expected 0 or more")
    config, _ = _load(options, overrides)
    from sage_fast.tools.profile import format_profile, profile_iteration

    folder, window_only = Path(options.folder), options.window_only
    result = profile_iteration(
        config, options.config, overrides, folder=folder, warmup=options.warmup, window_only=window_only
    )
    print(format_profile(result))
    return 0


@command(
    "doctor", "check what is installed, whether it works and gives the right numbers, and how fast it is",
    argument("--json", metavar="FILE", help="write every row to FILE"),
)  # fmt: skip
def _doctor(options: Options, overrides: Overrides) -> int:
    make_folder_of(options.json)
    with _loading(options):
        from sage_fast.tools.doctor import doctor

    return doctor(options.json)


if __name__ == "__main__":
    sys.exit(main())
