"""Settings that must stand before any test module is imported."""

import atexit
import gc
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path

import pytest
from filelock import FileLock

from sage_fast.util import console
from tests import faults, tiers

if "PYTEST_XDIST_WORKER" in os.environ:  # the workers share the cores, so each has one thread
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

# Without a GPU the Triton kernels run in Triton's interpreter. Triton decides when it is first
# imported, which diffusers or torch.compile may do in any test module, so it cannot be decided in
# tests/ops.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (
    False  # as every process of ours starts
)
gc.disable()  # while test modules are imported: a fifth faster


# A shell ignores these two for what it starts in the background, and its children inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGQUIT) is signal.SIG_IGN:
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)


def _end_quietly() -> None:
    """Drop what is printed as the interpreter ends: 26 lines of Triton's bindings about leaks,
    below the failures."""
    if "triton" in sys.modules:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


atexit.register(_end_quietly)

# nohup and a shell's & leave signals ignored, which tests send and which a run then leaves ignored.
for number, handler in (
    (signal.SIGHUP, signal.SIG_DFL),
    (signal.SIGINT, signal.default_int_handler),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Hide the GPU from a test that is not marked `gpu`, and leave charts out of pages unless it is
    marked `charts`.

    Its fixtures see the same, and the processes that it starts have no GPU. Charts take longer than
    a tiny run.
    """
    with pytest.MonkeyPatch.context() as patch:
        page = sys.modules.get("sage_fast.report.page")  # not imported for tests of other things
        if page is not None and item.get_closest_marker("charts") is None:
            patch.setattr(page, "_charts", lambda data: [])
        if item.get_closest_marker("gpu") is None:
            patch.setattr(torch.cuda, "is_available", lambda: False)
            patch.setenv("CUDA_VISIBLE_DEVICES", "")
        return (yield)


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Kernels of PyTorch that give the same bits each time, where it has them: attention's backward
    adds by atomics otherwise."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


LONGEST = ("survive", "gpu_script", "engine_deepspeed", "ranks", "sequence", "distributed",
    "new_user", "resume",
           "operators", "bench", "cli", "fuzz")  # fmt: skip
"""Files that take longest, which a run of several workers begins with: else one core is idle while
the other ends the last."""


def pytest_configure() -> None:
    tiers.check_names()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if tiers.is_left_out(collection_path, config.option.markexpr) else None


@pytest.hookimpl(tryfirst=True)  # before pytest selects by markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        tiers.mark(item)
    places = {f"test_{name}.py": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(LONGEST)))


def pytest_collection_finish() -> None:
    """What was imported stays: the collector never looks at it again."""
    gc.freeze()
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """`gpu` skips a test where there is none, `gpu(2)` where there are fewer than two."""
    if item.get_closest_marker("soak") and "SAGE_FAST_SOAK" not in os.environ:
        pytest.skip("make soak runs it")
    marker = item.get_closest_marker("gpu")
    count = 1 if marker is None or not marker.args else marker.args[0]
    if marker is not None and torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs" if count > 1 else "needs a GPU")


_TRIED: Counter[str] = Counter()
"""Faults that were done in tests that passed."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call" and report.passed:
        for mark in item.iter_markers("fault"):
            what, _, *stated = mark.args
            times = stated[0] if stated else getattr(item.function, "times", 1)
            _TRIED[what] += times
    return report


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """`pytest -m fault` writes their table if all of them were done and every test passed."""
    wanted = session.config.option.markexpr == "fault" and exitstatus == 0
    if wanted and all(what in _TRIED for what, *_ in faults.marked()):
        faults.write(_TRIED)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _nobodys_rewards() -> Iterator[None]:
    """A command that runs in this process may import modules of a test's folder, which are not the
    next test's."""
    path = list(sys.path)
    yield
    sys.path[:] = path
    temporary = f"{tempfile.gettempdir()}/pytest-of-"
    # itself in such a folder where a test runs the tests of a copy
    checkout = str(Path(__file__).parents[1])
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        if file.startswith(temporary) and not file.startswith(checkout):
            del sys.modules[name]


@pytest.fixture(autouse=True)
def _unshown() -> Iterator[None]:
    """A command that runs in this process shows messages; the next test begins as a script does,
    without them."""
    yield
    console.PACKAGE.handlers.clear()
    console.PACKAGE.setLevel(logging.NOTSET)
    console.PACKAGE.propagate = True


@pytest.fixture
def study_in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the runs of a study in this process, one after the other."""
    from studies import runs

    def here(
        jobs: Iterable[tuple[str, list[str]]], ended: Callable[[str, int], object], workers: int
    ) -> None:
        for name, command in jobs:
            ended(name, runs.main(command[command.index("studies.runs") + 1 :]))

    monkeypatch.setattr(runs, "run_many", here)


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of all workers, for what is built once."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def wheel(shared: Path) -> Path:
    """The wheel of this checkout; it reuses the object files in build/objects, but never an old
    build/lib."""
    with FileLock(shared / "wheel.lock"):
        found = next((shared / "wheel").glob("sage_fast-*.whl"), None)
        return found or _build_wheel(shared / "wheel")


def _build_wheel(folder: Path) -> Path:
    folder.mkdir()
    (folder / "distutils.cfg").write_text(f"[build]\nbuild_lib={folder / 'lib'}\n")
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", ".", "--no-deps",
         "--no-build-isolation",
         "--wheel-dir", folder],
        cwd=Path(__file__).parent.parent,
        env=os.environ | {"DIST_EXTRA_CONFIG": str(folder / "distutils.cfg")},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return next(folder.glob("sage_fast-*.whl"))


@pytest.fixture(scope="session")
def site(shared: Path) -> Path:
    """The site, as `make docs` builds it, without a word but of its progress."""
    with FileLock(shared / "site.lock"):
        if not (shared / "site").is_dir():
            _build_site(shared / "unchecked").rename(shared / "site")
    return shared / "site"


def _build_site(folder: Path) -> Path:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=Path(__file__).parent.parent, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True, text=True,
    )  # fmt: skip
    lines = (done.stdout + done.stderr).splitlines()
    assert done.returncode == 0, lines
    assert all(line.startswith("INFO") for line in lines), lines
    assert "documentation built" in lines[-1].lower()
    return folder
