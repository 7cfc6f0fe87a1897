"""The `sage-fast` command. Nothing heavy is imported before a command needs it: `--help` answers at once."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from sage_fast import __version__
from sage_fast.errors import RunError, UserError
from sage_fast.profiling import ranges, tools_of_environment

EPILOG = """examples:
  sage-fast train configs/demo.yaml --output runs/demo
  sage-fast train configs/hunyuanvideo15-480p.yaml --dry-run
  torchrun --nproc-per-node 8 -m sage_fast train configs/hunyuanvideo15-480p.yaml --output runs/hv15
  sage-fast train runs/demo/config.yaml --resume
  sage-fast sample runs/demo --prompt "a red circle moves left quickly" --folder out

Any setting of the YAML file can be given on the command line: --sampling.eta 0.7 --train.iterations 10
"""


def _parser() -> argparse.ArgumentParser:
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
        return commands.add_parser(name, help=text, description=text, allow_abbrev=False)

    init = add("init", "write a configuration, a reward and prompts into a folder, to start from")
    init.add_argument("folder", metavar="FOLDER", help="new, or without files of those names")
    init.add_argument("--config", metavar="NAME", default="demo", help="demo (default) or hunyuanvideo15-480p")

    train = add("train", "train a policy; leaves a run folder with weights, metrics, videos and a report")
    train.add_argument("config", metavar="CONFIG", help="YAML file")
    train.add_argument("--dry-run", action="store_true", help="print sizes, FLOPs and memory, then stop")
    train.add_argument("--resume", action="store_true", help="continue the run in the output folder")
    train.add_argument("--quiet", action="store_true", help="print nothing but errors")

    sample = add("sample", "make videos with the ODE")
    sample.add_argument("config", metavar="CONFIG", help="YAML file, or a run folder (its weights are used)")
    sample.add_argument("--prompt", action="append", default=[], help="may be given several times")
    sample.add_argument("--prompts", metavar="FILE", help="UTF-8 text, one prompt a line")
    sample.add_argument("--folder", default="samples", help="where the MP4 files go (default: samples)")
    sample.add_argument("--quiet", action="store_true", help="no progress bar")

    evaluate = add("eval", "score a policy on the held-out prompts")
    evaluate.add_argument("config", metavar="CONFIG", help="YAML file, or a run folder (its weights are used)")
    evaluate.add_argument("--json", metavar="FILE", help="write every score there")
    evaluate.add_argument("--quiet", action="store_true", help="no progress bar")

    report = add("report", "write report.html of a run, again or while it is running")
    report.add_argument("run", metavar="RUN", help="run folder")

    bench = add("bench", "time the operators, the rollout or whole iterations against what stock code does")
    bench.add_argument("part", nargs="?", choices=("operators", "rollout", "iteration"), default="operators")
    bench.add_argument("--config", metavar="FILE", help="YAML file, for `bench iteration`")
    bench.add_argument("--json", metavar="FILE", help="write every number there")
    bench.add_argument("--size", action="append", help="a size such as '480p batch 4' (several times for several)")
    bench.add_argument("--repetitions", type=int, default=15)
    bench.add_argument("--compile", action="store_true", help="compile every Triton kernel instead; needs no GPU")

    profile = add("profile", "time one iteration by phase and by kernel; prints the nsys and ncu commands for it")
    profile.add_argument("config", metavar="CONFIG", help="YAML file, or a run folder (its weights are used)")
    profile.add_argument("--folder", default="profile", help="where profile.json and the trace go (default: profile)")
    profile.add_argument("--warmup", type=int, default=1, help="iterations before the measured one (default: 1)")
    profile.add_argument("--window-only", action="store_true", help="NVTX ranges alone, to run under nsys or ncu")

    testbed = add("testbed", "the moving-shapes world")
    actions = testbed.add_subparsers(dest="action", required=True, metavar="ACTION")
    pretrain = actions.add_parser(
        "pretrain", help="make the base model that ships with the package", allow_abbrev=False
    )
    pretrain.add_argument("folder", metavar="FOLDER", help="where transformer/ and vae/ go")
    pretrain.add_argument("--seed", type=int, default=0)
    pretrain.add_argument("--quiet", action="store_true", help="no progress bar")
    return parser


def _overrides(arguments: Sequence[str]) -> dict[str, str]:
    """`--key.path value` or `--key.path=value` pairs."""
    settings: dict[str, str] = {}
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("--"):
            raise UserError(f"unexpected argument {argument!r}; settings are given as --key.path value")
        key, separator, value = argument[2:].partition("=")
        if not separator:
            if not rest:
                raise UserError(f"{argument} needs a value")
            value = rest.pop(0)
        settings[key] = value
    return settings


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status (2 for a mistake of the user, 1 for a run that failed)."""
    options, rest = _parser().parse_known_args(arguments)
    try:
        overrides = _overrides(rest)
        if overrides and options.command not in ("train", "sample", "eval", "profile"):
            raise UserError(f"unknown option --{next(iter(overrides))}")
        with ranges(*tools_of_environment()):
            return _COMMANDS[options.command](options, overrides)
    except (UserError, RunError) as error:
        print(f"sage-fast {options.command}: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    except KeyboardInterrupt:
        return 130


def _train(options: argparse.Namespace, overrides: dict[str, str]) -> int:
    from sage_fast.config import load

    config = load(options.config, overrides)
    if options.dry_run:
        from sage_fast.measure.plan import format_plan, plan
        from sage_fast.policy.load import check_path, transformer_config

        check_path(config.model.path)
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        print(format_plan(plan(config, transformer_config(config.model.path), ranks=ranks)))
        return 0
    from sage_fast.run.train import train

    train(config, resume=options.resume, quiet=options.quiet)
    return 0


def _of_run(path: str, overrides: dict[str, str]) -> tuple[str, dict[str, str]]:
    """A run folder stands for its config with its weights."""
    run = Path(path)
    if not run.is_dir():
        return path, overrides
    if not (run / "config.yaml").is_file():
        raise UserError(f"{path!r} is no run folder: config.yaml is missing")
    weights = run / "weights"
    if not weights.is_dir():
        found = sorted((run / "checkpoints").glob("iteration-??????"))
        if not found:
            raise UserError(f"run {path!r} has neither weights nor a checkpoint yet")
        weights = found[-1]
    return str(run / "config.yaml"), {"model.weights": str(weights)} | overrides


def _sample(options: argparse.Namespace, overrides: dict[str, str]) -> int:
    from sage_fast.config import load
    from sage_fast.data.prompts import read_prompts

    config = load(*_of_run(options.config, overrides))
    prompts = options.prompt + (read_prompts(options.prompts) if options.prompts else [])
    if not prompts:
        raise UserError("give at least one --prompt, or --prompts FILE")
    from sage_fast.run.evaluation import generate
    from sage_fast.run.folder import save_videos
    from sage_fast.run.setup import load_setup
    from sage_fast.seeding import sample_seeds

    folder = Path(options.folder)
    setup = load_setup(config, prompts)
    setup.encode(folder / "embeddings", quiet=options.quiet)
    seeds = sample_seeds(config.seed, 0, 0, range(len(prompts)), "sample-command")
    videos = generate(config, setup.model, prompts, setup.embeddings, seeds, quiet=options.quiet)
    for path in save_videos(videos, prompts, folder, setup.model.fps):
        print(path)
    return 0


def _eval(options: argparse.Namespace, overrides: dict[str, str]) -> int:
    import json
    import tempfile

    from sage_fast.config import load

    config = load(*_of_run(options.config, overrides))
    from sage_fast.report.comparison import format_scores
    from sage_fast.run.evaluation import evaluate
    from sage_fast.run.setup import load_setup

    setup = load_setup(config)
    with tempfile.TemporaryDirectory() as scratch:
        setup.encode(Path(scratch), quiet=options.quiet)
    result = evaluate(
        config,
        setup.model,
        setup.reward,
        setup.eval_prompts,
        setup.embeddings,
        iteration=0,
        quiet=options.quiet,
    )
    print(format_scores(result.to_json()))
    if options.json:
        Path(options.json).write_text(json.dumps(result.to_json()), encoding="utf-8")
    return 0


def _report(options: argparse.Namespace, overrides: dict[str, str]) -> int:
    from sage_fast.report.page import write_report

    print(write_report(Path(options.run)))
    return 0


def _bench(options: argparse.Namespace, overrides: dict[str, str]) -> int:
    if options.compile:
        from sage_fast.measure.compile_report import compile_report, format_table

        print(format_table(compile_report()))
        return 0
    from sage_fast.measure.harness import write_json

    if options.repetitions < 1:
        raise UserError(f"--repetitions {options.repetitions}: expected at least 1")
    if (options.part == "iteration") != bool(options.config):
        raise UserError("`bench iteration` and --config FILE go together")
    if options.part == "iteration":
        from sage_fast.config import load
        from sage_fast.measure import rollout as rollout_bench

        result = rollout_bench.iterations(load(options.config), options.repetitions)
        print(rollout_bench.format_iterations(result))
    elif options.part == "rollout":
        from sage_fast.measure import rollout as rollout_bench

        result = rollout_bench.run(_known(options.size, rollout_bench.SIZES), options.repetitions)
        print(rollout_bench.format_rollout(result))
    else:
        from sage_fast.measure import operators as bench

        result = bench.run(_known(options.size, bench.SIZES), options.repetitions)
        print(bench.format_result(result))
    if options.json:
        write_json(result, Path(options.json))
    return 0


def _known(names: list[str] | None, sizes: Mapping[str, object]) -> list[str] | None:
    from sage_fast.errors import nearest

    for name in names or []:
        if name not in sizes:
            raise UserError(f"--size {name!r}: {nearest(name, sizes)}")
    return names


def _profile(options: argparse.Namespace, overrides: dict[str, str]) -> int:
    from sage_fast.config import load

    if options.warmup < 0:
        raise UserError(f"--warmup {options.warmup}: expected 0 or more")
    config = load(*_of_run(options.config, overrides))
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


def _testbed(options: argparse.Namespace, overrides: dict[str, str]) -> int:
    from sage_fast.testbed.pretrain import pretrain

    pretrain(Path(options.folder), seed=options.seed, quiet=options.quiet)
    return 0


def _init(options: argparse.Namespace, overrides: dict[str, str]) -> int:
    from sage_fast.run.init import init

    print(init(Path(options.folder), options.config))
    return 0


_COMMANDS = {
    "init": _init,
    "train": _train,
    "sample": _sample,
    "eval": _eval,
    "report": _report,
    "bench": _bench,
    "profile": _profile,
    "testbed": _testbed,
}

if __name__ == "__main__":
    sys.exit(main())
