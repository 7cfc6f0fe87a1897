"""`python -m scripts.gpu`: the command line of scripts/gpu.sh."""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from scripts.gpu.install import REPOSITORY, is_installed, python_of
from scripts.gpu.parts import INSTALL, Call, Part, in_calls, parts_for
from scripts.gpu.run import OK, StatusFile, run_parts
from scripts.result_age import RESULTS, measured_on_a_gpu

WITHOUT_LIMIT = 100_000.0


def fail(message: str) -> None:
    """End with a message and the status of a wrong command line."""
    print(f"scripts/gpu.sh: {message}", file=sys.stderr)
    raise SystemExit(2)


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        fail(message)


def whole(text: str) -> int:
    if not re.fullmatch(r"[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"'{text}': expected a whole number above 0")
    return int(text)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="scripts/gpu.sh",
        description="Verify and measure everything that needs a GPU (docs/how-to/first-gpu.md).",
        epilog="PYTHON (python3) has torch. GPU_VENV is where the virtual environment is made. "
        "COMMIT names the commit of a copy without .git.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "wheels",
        metavar="WHEELS",
        type=Path,
        help="folder with wheels of the packages that this machine lacks; may be empty",
    )
    add(
        "out",
        metavar="OUT",
        type=Path,
        help="folder for logs, JSON and the table; later calls add to it",
    )
    add("parts", metavar="PART", nargs="*", help="number or name; all by default")
    add(
        "--unknown",
        action="store_true",
        help="leave out parts with a result of this code in benchmarks/results, and those that "
        "ended well in an earlier call with the same OUT",
    )
    add(
        "--call",
        type=whole,
        metavar="N",
        help="of the parts, those of the Nth call of at most 10 minutes",
    )
    add("--tiny", action="store_true", help="sizes that a CPU can handle, for a rehearsal")
    add(
        "--seconds",
        type=whole,
        metavar="N",
        help="end after N seconds: parts that do not fit are shortened or skipped",
    )
    add(
        "--gpus",
        type=whole,
        default=1,
        metavar="N",
        help="the parts for N GPUs of one machine, instead of those for one",
    )
    add("--print", action="store_true", help="show the commands and run nothing")
    return parser.parse_intermixed_args(arguments)


def chosen_parts(asked: Sequence[str], known: dict[str, Part]) -> list[Part]:
    """Return the parts of these numbers and names; all if none is asked for."""
    names = list(known)
    chosen = []
    for word in asked:
        name = word
        if re.fullmatch(r"[1-9]\d*", word) and int(word) <= len(names):
            name = names[int(word) - 1]
        if name not in known:
            fail(f"part '{word}': expected a number to {len(names)} or one of {' '.join(names)}")
        chosen.append(known[name])
    return chosen or list(known.values())


def unknown_parts(parts: Sequence[Part], out: Path) -> list[Part]:
    """Return the parts without a result of this code, in benchmarks/results or of an earlier call
    into `out`."""
    ended = StatusFile(out).latest()
    done = {name for name, verdict in ended.items() if verdict.status == OK}
    if not RESULTS.is_dir() or not (REPOSITORY / ".git").exists():
        print("no history or no results here: every part is unknown", file=sys.stderr)
    return [part for part in parts if part.name not in done and not measured_on_a_gpu(part.name)]


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    caller = Path(os.environ.get("CALLED_FROM", ""))
    wheels, out = (caller / path for path in (options.wheels, options.out))
    if not wheels.is_dir():
        fail(f"WHEELS '{options.wheels}': no such folder; give an empty one if nothing is missing")
    commit = os.environ.get("COMMIT", "")
    if not re.fullmatch(r"([0-9a-f]{7,40})?", commit):
        fail(f"COMMIT '{commit}': expected a hash, as git rev-parse HEAD prints it")

    environment = Path(os.environ.get("GPU_VENV") or Path(tempfile.gettempdir(), "sage-fast-gpu"))
    known = parts_for(options.gpus)
    call = Call(
        python=python_of(environment),
        out=out.resolve(),
        wheels=wheels.resolve(),
        scratch=environment / "parts",
        tiny=options.tiny,
        gpus=options.gpus,
    )
    parts = chosen_parts(options.parts, known)
    if options.unknown:
        parts = unknown_parts(parts, call.out)
    if options.call is not None:
        calls = in_calls(parts)
        if options.call > len(calls):
            fail(f"--call {options.call}: these parts take {len(calls)} calls")
        parts = calls[options.call - 1]

    if options.print:
        for part in parts:
            print("\t".join([part.name, *part.command(call)]))
        return 0

    if not (REPOSITORY / ".git").exists() and not commit:
        print("no .git and no COMMIT: the results will not name their commit", file=sys.stderr)
    if INSTALL not in parts and not is_installed(environment):
        parts = [INSTALL, *parts]
    _claim(call)
    seconds = options.seconds or WITHOUT_LIMIT
    return run_parts(call, parts, list(known.values()), seconds)


def _claim(call: Call) -> None:
    """Make OUT, for one kind of sizes: what is predicted is not for those of a rehearsal."""
    call.out.mkdir(parents=True, exist_ok=True)
    sizes = "tiny" if call.tiny else "full"
    file = call.out / "sizes"
    if not file.exists():
        file.write_text(f"{sizes}\n", encoding="utf-8")
    held = file.read_text(encoding="utf-8").strip()
    if held != sizes:
        fail(f"OUT '{call.out}' holds {held} sizes, this call has {sizes} ones")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
