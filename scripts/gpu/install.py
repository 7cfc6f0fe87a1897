"""Make the environment of the parts: a virtual environment that sees the machine's packages, with
the wheels and this checkout. Nothing is installed into the machine's own Python."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
WHERE = "import os, sage_fast; print(os.path.realpath(sage_fast.__file__))"
PURELIB = "import sysconfig; print(sysconfig.get_path('purelib'))"
SEEN = """\
import diffusers, sage_fast, sage_fast.kernels, torch
print("torch", torch.__version__, "sees", torch.cuda.device_count(), "GPUs")
"""


def python_of(environment: Path) -> str:
    """Return the Python of a virtual environment."""
    return str(environment / "bin" / "python")


def is_installed(environment: Path) -> bool:
    """Whether an environment has this checkout installed, from this path."""
    try:
        found = subprocess.run(
            [python_of(environment), "-c", WHERE],
            cwd="/",
            capture_output=True,
            text=True,
            encoding="utf-8",
        )
    except OSError:
        return False
    package = REPOSITORY / "sage_fast" / "__init__.py"
    return found.returncode == 0 and found.stdout.splitlines()[-1:] == [os.path.realpath(package)]


def install(environment: Path, wheels: Path) -> None:
    """Make the environment, with the Python that runs this.

    Raises:
        subprocess.CalledProcessError: a step failed.
    """
    python = python_of(environment)
    _run(sys.executable, "-m", "venv", "--without-pip", "--clear", str(environment))

    # `--system-site-packages` would miss them where this Python is in an environment itself
    folders = [path for path in sys.path if path.endswith("-packages")]
    own = subprocess.check_output([python, "-c", PURELIB], text=True, encoding="utf-8").strip()
    Path(own, "of-the-machine.pth").write_text("\n".join(folders) + "\n", encoding="utf-8")

    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--no-index", "--no-deps"]
    found = [str(wheel) for wheel in sorted(wheels.glob("*.whl"))]
    if found:
        _run(*pip, *found)
    _run(*pip, "--no-build-isolation", "--editable", str(REPOSITORY))

    kit = subprocess.run([python, "-m", "scripts.flash4_kit", "--check"], cwd=REPOSITORY)
    if kit.returncode:
        print("the parts go on without FlashAttention 4", flush=True)
    if not is_installed(environment):
        sys.exit(f"{environment} does not import sage_fast from {REPOSITORY}")
    _run(python, "-c", SEEN)


def _run(*command: str) -> None:
    subprocess.run(command, cwd=REPOSITORY, check=True)


if __name__ == "__main__":
    try:
        install(Path(sys.argv[1]), Path(sys.argv[2]))
    except subprocess.CalledProcessError as error:
        sys.exit(f"exit status {error.returncode}: {' '.join(error.cmd)}")
