"""What an installation promises: names, imports, optional parts."""

import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent


def python(code: str, path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=path,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)} | environment,
    )  # fmt: skip


def test_our_kernels_do_not_shadow_the_package_of_that_name(tmp_path: Path) -> None:
    """`import kernels` in the repository root finds an installed package; diffusers and our own
    kernels import too."""
    installed = tmp_path / "kernels"
    installed.mkdir()
    (installed / "__init__.py").write_text("WHO = 'the installed one'\n")
    code = (
        f"import sys; sys.path.append({str(tmp_path)!r})\n"
        "import kernels; print(kernels.WHO)\n"
        "import diffusers\n"
        "from diffusers import HunyuanVideo15Transformer3DModel\n"
        "import sage_fast.kernels.transition_step as ours; print(ours.__name__)\n"
    )
    done = python(code, REPOSITORY)
    assert done.stdout.splitlines() == ["the installed one", "sage_fast.kernels.transition_step"], (
        done.stderr[-2000:]
    )


def test_only_three_folders_beside_the_package_are_part_of_it(tmp_path: Path) -> None:
    """A module of the tests that is imported twice, under two names, would have two of each of its
    classes."""
    code = (
        "import importlib\nfrom importlib.resources import files\n"
        "import sage_fast.benchmarks, sage_fast.kernels\n"
        "print(sage_fast.kernels.__name__, sage_fast.benchmarks.__name__)\n"
        "print((files('sage_fast.configs') / 'demo.yaml').is_file())\n"
        "for name in ('tests', 'studies', 'scripts', 'docs'):\n"
        "    try: importlib.import_module(f'sage_fast.{name}')\n"
        "    except ModuleNotFoundError as error: print(error)\n"
    )
    done = python(code, tmp_path)
    assert done.stdout.splitlines() == [
        "sage_fast.kernels sage_fast.benchmarks",
        "True",
        *(
            f"No module named 'sage_fast.{name}'"
            for name in ("tests", "studies", "scripts", "docs")
        ),
    ], done.stderr[-2000:]


def test_the_wheel_holds_what_runs_need_and_nothing_else(wheel: Path) -> None:
    """It has every tracked file of the package, its configurations and kernels, the compiled
    operators, and no test.

    Of the benchmarks it has what `sage-fast bench` and `profile` import.
    """
    tracked = subprocess.run(
        ["git", "ls-files", "sage_fast", "kernels", "configs", "benchmarks/*.py"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    in_checkout = re.compile(r"benchmarks/(bench_\w+|conftest|\w*passes|scaling|training_ops)\.py")
    shipped = [name for name in tracked if not in_checkout.fullmatch(name)]
    expected = {name if name.startswith("sage_fast/") else f"sage_fast/{name}" for name in shipped}
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in names if ".dist-info/" not in name} == expected | {
        "sage_fast/_C.abi3.so"
    }
    assert {
        "sage_fast/py.typed",
        "sage_fast/configs/demo.yaml",
        "sage_fast/kernels/transition_step.py",
    } <= names


def installed_environment(wheel: Path, folder: Path) -> Path:
    """The Python of a new environment with nothing but the wheel, which finds its dependencies
    where this process has them."""
    venv.create(folder, symlinks=True)
    own = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    # A folder that a .pth file names is searched, but its own .pth files, which lead to this
    # checkout, are not read.
    dependencies = [path for path in sys.path if Path(path).name.endswith("-packages")]
    (own / "dependencies.pth").write_text("\n".join(dependencies) + "\n")
    python = folder / "bin" / "python"
    install = ["install", "--no-deps", "--no-index", "--no-compile", "--quiet", wheel]
    subprocess.run([sys.executable, "-m", "pip", "--python", python, *install], check=True)
    return python


def test_the_example_of_the_api_runs_from_the_installed_wheel(wheel: Path, tmp_path: Path) -> None:
    """In another folder, as docs/reference/python.md begins."""
    page = (REPOSITORY / "docs" / "reference" / "python.md").read_text(encoding="utf-8")
    example = page.partition("```python\n")[2].partition("```")[0]
    assert "sf.train(" in example
    assert "sf.sample(" in example
    (tmp_path / "example.py").write_text(
        "import sage_fast, sys\n"
        "assert 'torch' not in sys.modules\n"
        "print(sage_fast.__file__)\n" + example,
        encoding="utf-8",
    )
    python = installed_environment(wheel, tmp_path / "environment")
    done = subprocess.run(
        [python, "example.py"],
        cwd=tmp_path,
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    first, *_, last = done.stdout.splitlines()
    assert Path(first).is_relative_to(tmp_path / "environment")
    assert last == "[PosixPath('samples/00-a-small-red-ball-moves-left-quickly.mp4')]"
    assert (tmp_path / "runs" / "api" / "report.html").is_file()


def test_the_wheel_installs_on_every_later_python(wheel: Path) -> None:
    """The tag says Python's stable ABI, and the extension keeps to it: it uses no symbol of
    Python."""
    assert re.fullmatch(r"sage_fast-[\d.]+-cp311-abi3-linux_\w+", wheel.stem)
    with zipfile.ZipFile(wheel) as files:
        (metadata,) = (
            files.read(name).decode() for name in files.namelist() if name.endswith("WHEEL")
        )
        extension = files.read("sage_fast/_C.abi3.so")
    assert "Tag: cp311-abi3-linux_" in metadata
    assert b"transition_step" in extension
    assert not re.search(rb"\0_?Py[A-Z_]\w+\0", extension)


def test_without_the_extension_the_reference_serves_and_says_so(tmp_path: Path) -> None:
    """Use a copy of the package without its compiled part."""
    import shutil

    shutil.copytree(
        REPOSITORY / "sage_fast",
        tmp_path / "sage_fast",
        ignore=shutil.ignore_patterns("*.so", "base"),
    )
    code = (
        "import torch\nfrom sage_fast.ops import implementation, transition_step\n"
        "print(implementation(torch.device('cpu')))\n"
        "x = torch.zeros(2, 5); c = torch.ones(3, 6); s = torch.tensor(1)\n"
        "print(transition_step(x, x, c, s, torch.arange(2))[0].shape)\n"
    )
    done = python(code, tmp_path, PYTHONPATH=str(tmp_path))
    assert done.stdout.splitlines() == ["PyTorch reference", "torch.Size([2, 5])"], done.stderr[
        -2000:
    ]
    assert done.stderr.count("C++ operators are not built") == 1


SERVED = """
import torch
from sage_fast.ops import implementation, transition_step
print(implementation(torch.device('cpu')))
x = torch.zeros(2, 5); c = torch.ones(3, 6); s = torch.tensor(1)
print(transition_step(x, x, c, s, torch.arange(2))[0].shape)
"""


def damaged(folder: Path, kind: str) -> None:
    """Put a build that cannot be loaded into `folder`."""
    file, source = folder / "_C.abi3.so", folder / "other.cpp"
    if kind == "of another machine":
        file.write_bytes(b"\x7fELF\x01\x01\x01" + bytes(60))  # 32 bits
    elif kind == "empty":
        file.touch()
    elif kind == "a link to nothing":
        file.symlink_to(folder / "moved.so")
    elif kind == "cut short":
        whole = next((REPOSITORY / "sage_fast").glob("_C.*so")).read_bytes()
        file.write_bytes(whole[: len(whole) // 50])
    else:  # of another torch: a symbol that this one has not
        source.write_text(
            "void a_symbol_of_another_torch(); static struct A { A() { "
            "a_symbol_of_another_torch(); } } a;"
        )
        subprocess.run(
            ["c++", "-shared", "-fPIC", "-Wl,-z,now", str(source), "-o", str(file)], check=True
        )


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("of another machine", "ELF"),
        ("empty", "file too short"),
        ("a link to nothing", "No such file"),
        ("cut short", "file cut short, .* of .* bytes"),
        ("of another torch", "undefined symbol: .*another_torch"),
    ],
)
def test_an_extension_that_cannot_be_loaded_costs_speed_and_one_line(
    kind: str, reason: str, tmp_path: Path
) -> None:
    import shutil

    shutil.copytree(
        REPOSITORY / "sage_fast",
        tmp_path / "sage_fast",
        ignore=shutil.ignore_patterns("*.so", "base"),
    )
    damaged(tmp_path / "sage_fast", kind)
    done = python(SERVED, tmp_path, PYTHONPATH=str(tmp_path))
    assert done.stdout.splitlines() == ["PyTorch reference", "torch.Size([2, 5])"], done.stderr[
        -2000:
    ]
    (line,) = done.stderr.splitlines()
    assert re.match(
        f"the C\\+\\+ operators cannot be loaded \\(.*{reason}.*\\); the CPU runs the slower", line
    ), line


def test_of_two_builds_the_one_that_can_be_loaded_serves(tmp_path: Path) -> None:
    """Two machines share a disk; the newer build is of the other."""
    import shutil

    shutil.copytree(
        REPOSITORY / "sage_fast", tmp_path / "sage_fast", ignore=shutil.ignore_patterns("base")
    )
    other = tmp_path / "sage_fast" / "_C.other.so"
    other.write_bytes(b"\x7fELF\x01\x01\x01" + bytes(60))
    done = python(SERVED, tmp_path, PYTHONPATH=str(tmp_path))
    assert done.stdout.splitlines() == ["C++", "torch.Size([2, 5])"], done.stderr[-2000:]
    assert done.stderr == ""


@pytest.mark.parametrize("setting", ["reference", ""])
def test_the_reference_can_be_forced(setting: str, tmp_path: Path) -> None:
    code = (
        "import torch; from sage_fast.ops import implementation; "
        "print(implementation(torch.device('cpu')))"
    )
    done = python(code, tmp_path, SAGE_FAST_OPS=setting)
    assert done.stdout.strip() == ("PyTorch reference" if setting else "C++")


@pytest.mark.soak
def test_fused_operators_train_as_the_reference(tmp_path: Path) -> None:
    """Train three iterations with the C++ operators and with the reference."""
    code = (
        "import json, torch; torch.set_num_threads(1)\n"
        "from tests.tiny import settings, tiny_trainer\n"
        "trainer = tiny_trainer(settings(train__optimizer_steps=2))\n"
        "print(json.dumps([trainer.iteration(i) for i in range(3)]))\n"
    )
    import json

    fused, reference = (
        json.loads(python(code, REPOSITORY, SAGE_FAST_OPS=setting).stdout.splitlines()[-1])
        for setting in ("", "reference")
    )
    for ours, theirs in zip(fused, reference):
        assert ours["reward/mean"] == pytest.approx(theirs["reward/mean"], rel=1e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=2e-2)
        assert ours["kl/lambda"] == theirs["kl/lambda"]
