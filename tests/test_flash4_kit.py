"""FlashAttention 4's kit: its loader between our operator and the compiled kernels, and its wheel.

The kernels need the package's compiler to be made and a GPU to run. Here a stand-in records what
reaches them.
"""

import hashlib
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import zipfile
from base64 import urlsafe_b64decode
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from scripts.flash4_kit import KERNELS, LOADER, check, like_the_model, write_wheel

FACTS = {"arch": "sm_90", "backward_tile": 80, "shortest": 129}
PARAMETERS = {"fwd": 18, "bwd_pre": 14, "bwd": 22, "bwd_post": 7}
"""As the compiled kernels of flash-attn-4 4.0.0b36 name them in their error for a wrong number."""


@pytest.fixture
def calls() -> dict[str, tuple[Any, ...]]:
    return {}


@pytest.fixture
def kit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: dict[str, tuple[Any, ...]]
) -> ModuleType:
    """The loader as it lies in the wheel, over kernels that record their arguments."""

    def load_module(file: str) -> SimpleNamespace:
        def launch(*arguments: Any) -> None:
            calls[Path(file).stem] = arguments

        return SimpleNamespace(func=launch)

    monkeypatch.setitem(sys.modules, "tvm_ffi", SimpleNamespace(load_module=load_module))  # type: ignore[arg-type]
    monkeypatch.setattr("ctypes.CDLL", lambda *_, **__: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    (tmp_path / "kit.json").write_text(json.dumps(FACTS))
    shutil.copy(LOADER, tmp_path / "__init__.py")
    spec = importlib.util.spec_from_file_location("kit", tmp_path / "__init__.py")
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    assert spec.loader is not None
    spec.loader.exec_module(module)
    return module


def test_every_kernel_gets_its_arguments(
    kit: ModuleType, calls: dict[str, tuple[Any, ...]]
) -> None:
    query, key, value = like_the_model((2, 130, 4, 128))
    out, lse = kit.flash_attn_func(query, key, value, return_lse=True)
    gradients = kit._flash_attn_bwd(query, key, value, out, torch.zeros_like(out), lse)
    assert {name: len(calls[name]) for name in KERNELS} == PARAMETERS
    assert (out.shape, lse.shape, lse.dtype) == (query.shape, (2, 4, 130), torch.float32)
    assert [t.shape for t in gradients] == [query.shape] * 3
    assert calls["bwd_post"][0].shape == (2, 4, 160 * 128)  # whole tiles of 80 rows
    strides = [t.stride() for t in calls["fwd"][:3]]
    assert strides[2][1] == 3 * strides[0][1] == 3 * 4 * 128  # the values are not copied
    assert calls["bwd"][0].data_ptr() == query.data_ptr()


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda t: t.half(), id="dtype"),
        pytest.param(lambda t: t[..., :64], id="width"),
        pytest.param(lambda t: t[:, :128], id="short"),
    ],
)
def test_other_cases_are_refused(kit: ModuleType, change: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(
        RuntimeError, match=r"kit is for bfloat16 \[B, S, H, 128\] with S of 129 or more, got"
    ):
        kit.flash_attn_func(*map(change, like_the_model((1, 130, 2, 128))))


def test_keys_may_have_a_length_of_their_own(
    kit: ModuleType, calls: dict[str, tuple[Any, ...]]
) -> None:
    """As in Wan's attention to a text."""
    query = torch.empty(1, 300, 2, 128, dtype=torch.bfloat16)
    key, value = (torch.empty(1, 200, 2, 128, dtype=torch.bfloat16) for _ in range(2))
    out, lse = kit.flash_attn_func(query, key, value, return_lse=True)
    gradients = kit._flash_attn_bwd(query, key, value, out, torch.zeros_like(out), lse)
    assert (out.shape, lse.shape) == (query.shape, (1, 2, 300))
    assert [t.shape for t in gradients] == [query.shape, key.shape, value.shape]
    assert calls["bwd_post"][0].shape == (1, 2, 320 * 128)  # whole tiles of 80 rows


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        pytest.param("k", (1, 130, 1, 128), "[1, 130, 2, 128], as q", id="heads of k"),
        pytest.param("k", (2, 130, 2, 128), "[1, 130, 2, 128], as q", id="batch of k"),
        pytest.param("v", (1, 131, 2, 128), "[1, 130, 2, 128] as k", id="length of v"),
        pytest.param("v", (1, 130, 1, 128), "[1, 130, 2, 128] as k", id="heads of v"),
        pytest.param("v", (2, 130, 2, 128), "[1, 130, 2, 128] as k", id="batch of v"),
    ],
)
def test_keys_and_values_of_another_shape_are_named(
    kit: ModuleType,
    calls: dict[str, tuple[Any, ...]],
    name: str,
    shape: tuple[int, int, int, int],
    expected: str,
) -> None:
    """The kernels would read past their ends."""
    given = dict(zip("qkv", like_the_model((1, 130, 2, 128))))
    out, lse = kit.flash_attn_func(*given.values())
    calls.clear()
    given[name] = like_the_model(shape)[0]
    message = f"{name} has shape {[*shape]}; expected {expected}"
    for call in (
        lambda: kit.flash_attn_func(*given.values()),
        lambda: kit._flash_attn_bwd(*given.values(), out, out, lse),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
            call()
    assert not calls


@pytest.mark.parametrize("missing", ["tvm_ffi", "flash_attn", "libcuda"])
def test_what_a_check_misses_is_named(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kit's loader imports apache-tvm-ffi, which its wheel does not hold."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    monkeypatch.delitem(sys.modules, "flash_attn.cute", raising=False)
    monkeypatch.setitem(sys.modules, "tvm_ffi", None)  # type: ignore[arg-type]
    if missing == "flash_attn":
        monkeypatch.setitem(sys.modules, "flash_attn", None)  # type: ignore[arg-type]
        assert check() == (
            "FlashAttention 4's kit is not installed: no flash_attn_4-*.whl among the wheels. "
            "Skipped"
        )
        return
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    (tmp_path / "flash_attn" / "__init__.py").touch()
    lines = (
        "import tvm_ffi"
        if missing == "tvm_ffi"
        else 'raise ImportError("libcuda.so.1: cannot open")'
    )
    (tmp_path / "flash_attn" / "cute" / "__init__.py").write_text(lines)
    said = (
        "apache-tvm-ffi is not installed"
        if missing == "tvm_ffi"
        else "cannot be imported: libcuda.so.1: cannot open"
    )
    with pytest.raises(SystemExit, match=f"FlashAttention 4's kit.*{said}"):
        check()


def test_another_gpu_and_a_deterministic_backward_are_refused(
    kit: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    query, key, value = like_the_model((1, 130, 2, 128))
    out, lse = kit.flash_attn_func(query, key, value)
    with pytest.raises(RuntimeError, match="no deterministic backward"):
        kit._flash_attn_bwd(query, key, value, out, out, lse, deterministic=True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    with pytest.raises(RuntimeError, match=r"is for sm_90, and this GPU is \(10, 0\)"):
        kit.flash_attn_func(query, key, value)


def test_the_wheel_is_whole(tmp_path: Path) -> None:
    (tmp_path / "empty.c").write_text("int unused;\n")
    subprocess.run(
        ["cc", "-c", "-fPIC", "-o", tmp_path / "empty.o", tmp_path / "empty.c"], check=True
    )
    objects = dict.fromkeys(KERNELS, tmp_path / "empty.o")
    wheel = write_wheel(tmp_path, objects, FACTS, runtime=tmp_path / "empty.o")
    with zipfile.ZipFile(wheel) as packed:
        names = set(packed.namelist())
        assert {f"flash_attn/cute/{name}.so" for name in KERNELS} <= names
        (record,) = (name for name in names if name.endswith("RECORD"))
        rows = [row.split(",") for row in packed.read(record).decode().splitlines()]
        assert {row[0] for row in rows} == names
        for name, digest, size in rows[:-1]:
            content = packed.read(name)
            assert (len(content), hashlib.sha256(content).digest()) == (
                int(size), urlsafe_b64decode(digest.removeprefix("sha256=") + "="),
            )  # fmt: skip
    assert wheel.name == "flash_attn_4-4.0.0b36+sm90-py3-none-linux_x86_64.whl"
