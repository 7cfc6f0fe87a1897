"""The attention backends of this machine, and the errors for those that it lacks."""

import fcntl
import functools
import importlib.util
import json
import math
import os
import re
import signal
import sys
import tempfile
import threading
import time
import warnings
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sage_fast import cli
from sage_fast import loading as setup
from sage_fast.algorithm.objective import SURROGATES
from sage_fast.loading import load_setup, resolve
from sage_fast.models.attention.backends import (
    ATTENTION,
    Attention,
    AttentionRow,
    check_attention,
    usable,
)
from sage_fast.models.attention.choose import choose_attention
from sage_fast.models.attention.flash4 import _package
from sage_fast.models.attention.trial import (
    LARGEST_ERROR,
    Use,
    measure_attention,
    try_attention,
    try_uses,
)
from sage_fast.models.checkpointing import CheckpointPlan, set_checkpointing
from sage_fast.tools import selftest
from sage_fast.util.errors import UserError
from tests.pretend_cuda import PretendCuda, cudnn_attention
from tests.test_forward import PROMPTS
from tests.test_forward import inputs as model_inputs
from tests.tiny import settings, tiny_model

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float32
pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []


def exact(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = torch.einsum("bqhd,bkhd->bhqk", query.double(), key.double()) / query.shape[-1] ** 0.5
    return torch.einsum("bhqk,bkhd->bqhd", F.softmax(scores, dim=-1), value.double())


@pytest.mark.parametrize("backend", usable(DEVICE, DTYPE))
def test_backends_compute_attention(backend: str) -> None:
    """Compare values and gradients, at a length and width that kernels compiled for the model take
    too."""
    shape = (2, 177, 4, 128)
    inputs = [torch.randn(shape, device=DEVICE, dtype=DTYPE, requires_grad=True) for _ in range(3)]
    upstream = torch.randn(shape, device=DEVICE, dtype=DTYPE)
    out, expected = ATTENTION[backend](*inputs), exact(*inputs)
    assert out.shape == shape
    tolerance = 1e-5 if torch.float32 == DTYPE else 2e-2
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    for mine, reference in zip(
        torch.autograd.grad(out, inputs, upstream),
        torch.autograd.grad(expected, inputs, upstream.double()),
    ):
        assert (mine - reference).norm() <= tolerance * reference.norm()


def test_what_is_missing_is_an_error_that_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_attention("auto", torch.device("cpu"), torch.float32)
    check_attention("sdpa", torch.device("cpu"), torch.float32)
    with pytest.raises(
        ValueError,
        match="'flash' needs a CUDA device, and this is the cpu; expected one of auto, sdpa",
    ):
        check_attention("flash", torch.device("cpu"), torch.bfloat16)
    # A GPU machine without the packages gives these errors; nothing below touches a GPU.
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    gpu = torch.device("cuda")
    with pytest.raises(
        ValueError, match=r"'flash' is not installed: pip install 'sage-fast\[flash-attn\]'"
    ):
        check_attention("flash", gpu, torch.bfloat16)
    with pytest.raises(
        ValueError, match=r"'xformers' is not installed: pip install 'sage-fast\[xformers\]'"
    ):
        check_attention("xformers", gpu, torch.bfloat16)
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: ModuleSpec(name, None, origin=name)
    )
    with pytest.raises(ValueError, match=r"'flash' needs model.dtype = bfloat16"):
        check_attention("flash", gpu, torch.float32)
    with pytest.raises(
        ValueError,
        match=r"'flash3' runs on Hopper \(sm_90\), and NVIDIA A100 is sm_80, where 'flash'",
    ):
        check_attention("flash3", gpu, torch.bfloat16)
    assert "flash" in usable(gpu, torch.bfloat16)
    assert "flash3" not in usable(gpu, torch.bfloat16)


@pytest.mark.parametrize("installed", [True, False])
@pytest.mark.parametrize(
    ("name", "capability", "refused"),
    [
        ("NVIDIA A100-SXM4-80GB", (8, 0), ["flash3", "flash4"]),
        ("NVIDIA GeForce RTX 3090", (8, 6), ["flash3", "flash4"]),
        ("NVIDIA GeForce RTX 4090", (8, 9), ["flash3", "flash4"]),
        ("NVIDIA H200", (9, 0), []),
        ("NVIDIA B200", (10, 0), ["flash3"]),
        ("NVIDIA GeForce RTX 5090", (12, 0), ["flash3", "flash4"]),
    ],
)
def test_a_kernel_of_other_cards_is_refused_with_the_nearest(
    name: str,
    capability: tuple[int, int],
    refused: list[str],
    installed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether it is installed or not: an installation would not help."""
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(
        "sage_fast.models.attention.backends._is_installed", lambda package: installed
    )
    choices = usable(gpu, torch.bfloat16)
    assert "cudnn" in choices
    assert ("flash" in choices) == installed
    assert not {*refused} & {*choices}
    if installed:
        assert {"flash3", "flash4"} - {*refused} <= {*choices}
    sm = "sm_{}{}".format(*capability)
    for backend in refused:
        nearest = "'flash4'" if capability == (10, 0) else "'flash'"
        expected = rf"'{backend}' runs on Hopper .*, and {name} is {sm}, where {nearest} .*nearest"
        with pytest.raises(UserError, match=expected):
            check_attention(backend, gpu, torch.bfloat16)


@pytest.mark.parametrize(
    ("cuda", "allowed"),
    [
        ("12.8", False),
        ("12.9", True),
        ("12.10", True),
        ("13.0", True),
        ("9.2", False),
        (None, False),
    ],
)
def test_cudnn_is_used_where_pytorch_uses_it(
    cuda: str | None, allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch turns it off below CUDA 12.9."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100")
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    gpu = torch.device("cuda")
    assert ("cudnn" in usable(gpu, torch.bfloat16)) == allowed
    assert "cudnn" not in usable(gpu, torch.float32)
    if allowed:
        check_attention("cudnn", gpu, torch.bfloat16)
    else:
        with pytest.raises(
            UserError,
            match=rf"'cudnn' needs a PyTorch for CUDA 12.9 or newer, .* this is for {cuda}; ",
        ):
            check_attention("cudnn", gpu, torch.bfloat16)


class Flash4:
    """The interface of flash-attn-4, by PyTorch, counting its calls."""

    def __init__(self) -> None:
        self.forwards = self.backwards = 0

    def flash_attn_func(
        self, q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool
    ) -> tuple[Tensor, Tensor]:
        assert (return_lse, torch.is_grad_enabled()) == (True, False)
        self.forwards += 1
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
        out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)
        return out.contiguous(), scores.logsumexp(-1).float()

    def _flash_attn_bwd(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        gradient: Tensor,
        lse: Tensor,
        *,
        deterministic: bool,
    ) -> tuple[Tensor, ...]:
        self.deterministic = deterministic
        self.backwards += 1
        scale = q.shape[-1] ** -0.5
        p = torch.exp(scale * torch.einsum("bqhd,bkhd->bhqk", q, k) - lse[..., None])
        of_p = torch.einsum("bqhd,bkhd->bhqk", gradient, v)
        ds = scale * p * (of_p - (gradient * out).sum(-1).transpose(1, 2)[..., None])
        of_q, of_k = torch.einsum("bhqk,bkhd->bqhd", ds, k), torch.einsum("bhqk,bqhd->bkhd", ds, q)
        of_v = torch.einsum("bhqk,bqhd->bkhd", p, gradient)
        return of_q.contiguous(), of_k.contiguous(), of_v.contiguous()


@pytest.fixture
def flash4(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Flash4:
    package = Flash4()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("sage_fast.models.attention.flash4._called", set())
    monkeypatch.setattr(
        "sage_fast.models.attention.flash4._package", functools.cache(_package.__wrapped__)
    )
    monkeypatch.delenv("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", raising=False)
    monkeypatch.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", "")  # restored at the end
    monkeypatch.delenv("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR")
    for name in ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface"):
        module = ModuleType(name)
        vars(module).update(
            flash_attn_func=package.flash_attn_func, _flash_attn_bwd=package._flash_attn_bwd
        )
        monkeypatch.setitem(sys.modules, name, module)
    return package


def test_flash4_is_an_operator_with_a_backward(flash4: Flash4) -> None:
    """The package itself needs a GPU: this is its interface.

    Values and gradients as of every backend.
    """
    inputs = [torch.randn(2, 77, 4, 64, requires_grad=True) for _ in range(3)]
    upstream = torch.randn(2, 4, 77, 64).transpose(1, 2)
    out, expected = ATTENTION["flash4"](*inputs), exact(*inputs)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    for mine, reference in zip(
        torch.autograd.grad(out, inputs, upstream),
        torch.autograd.grad(expected, inputs, upstream.double()),
    ):
        torch.testing.assert_close(mine, reference, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        assert torch.equal(ATTENTION["flash4"](*inputs), out)
    torch.library.opcheck(torch.ops.sage_fast_flash4.attention.default, inputs)


def test_flash4_compiles_once_for_all_processes(flash4: Flash4, tmp_path: Path) -> None:
    """The first call of a kernel waits for the lock of the cache, which the package is told before
    its import."""
    inputs = [torch.randn(1, 5, 2, 8, requires_grad=True) for _ in range(3)]
    cache = tmp_path / "sage-fast" / "flash-attn-4"
    cache.mkdir(parents=True)
    with (cache / "lock").open("w") as compiling:
        fcntl.flock(compiling, fcntl.LOCK_EX)
        thread = threading.Thread(target=lambda: ATTENTION["flash4"](*inputs), daemon=True)
        thread.start()
        thread.join(0.5)
        assert thread.is_alive()
        assert flash4.forwards == 0
    thread.join(600)
    assert flash4.forwards == 1
    assert os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] == "1"
    assert os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"] == str(cache)
    with (cache / "lock").open("w") as compiling:
        fcntl.flock(compiling, fcntl.LOCK_EX)
        ATTENTION["flash4"](*inputs)  # compiled by now: it does not wait


def test_a_process_forked_while_flash4_compiles_does_not_keep_the_lock(
    flash4: Flash4, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the lock's file open as well. What lay in that file stays."""
    lock = tmp_path / "sage-fast" / "flash-attn-4" / "lock"
    lock.parent.mkdir(parents=True)
    lock.write_text("of the user")
    children = []

    def forward(*inputs: Tensor, return_lse: bool) -> tuple[Tensor, Tensor]:
        children.append(os.fork())
        if children[-1] == 0:
            time.sleep(60)
            os._exit(0)
        return flash4.flash_attn_func(*inputs, return_lse=return_lse)

    monkeypatch.setattr(sys.modules["flash_attn.cute"], "flash_attn_func", forward)
    ATTENTION["flash4"](*(torch.randn(1, 5, 2, 8) for _ in range(3)))
    try:
        with lock.open() as compiling:
            fcntl.flock(compiling, fcntl.LOCK_EX | fcntl.LOCK_NB)
            assert compiling.read() == "of the user"
    finally:
        os.kill(children[0], signal.SIGKILL)
        os.waitpid(children[0], 0)


@pytest.mark.parametrize(
    "lack", ["the user's folder", "the given folder", "a home", "locks", "any folder", "the cache"]
)
def test_flash4_runs_without_a_folder_to_compile_into(
    flash4: Flash4,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    lack: str,
) -> None:
    """It takes a temporary one.

    Without any, or without locks, each process compiles for itself and waits for none.
    """
    inputs = [torch.randn(1, 5, 2, 8, requires_grad=True) for _ in range(3)]
    (tmp_path / "file").touch()
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    cache = tmp_path / "temporary" / f"sage-fast-flash-attn-4-{os.getuid()}"
    if lack == "a home":
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(
            Path, "home", mock.Mock(side_effect=RuntimeError("Could not determine home directory."))
        )
    elif lack == "locks":
        monkeypatch.setattr(fcntl, "flock", mock.Mock(side_effect=OSError("No locks available")))
        cache = tmp_path / "sage-fast" / "flash-attn-4"
    elif lack == "the cache":
        monkeypatch.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "0")
        monkeypatch.setattr(fcntl, "flock", mock.Mock(side_effect=AssertionError("it waits")))
    elif lack == "the given folder":
        monkeypatch.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(tmp_path / "file" / "given"))
        cache = tmp_path / "sage-fast" / "flash-attn-4"
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
        if lack == "any folder":
            cache.touch()
    ATTENTION["flash4"](*inputs).sum().backward()
    assert (flash4.forwards, flash4.backwards) == (1, 1)
    on = lack not in ("the cache", "any folder")
    assert os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] == str(int(on))
    assert os.environ.get("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR") == (str(cache) if on else None)
    notes = [
        f"FLASH_ATTENTION_CUTE_DSL_CACHE_DIR: cannot write {tmp_path}/file/given; FlashAttention 4 "
        f"uses {cache}"
    ]
    assert caplog.messages == notes * (lack == "the given folder")


def test_the_folder_given_to_flash4_may_be_in_the_home(
    flash4: Flash4, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", "~/kernels")
    ATTENTION["flash4"](*(torch.randn(1, 5, 2, 8) for _ in range(3)))
    assert os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"] == str(tmp_path / "kernels")
    assert (tmp_path / "kernels" / "lock").exists()


@pytest.mark.parametrize("folder", ["of another", "open to others", "a link to one open to others"])
def test_flash4_loads_no_code_of_another_user(
    flash4: Flash4, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    """Anyone may make a folder of that name among temporary ones, or write into one that is
    open."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    own = os.getuid()
    cache = tmp_path / f"sage-fast-flash-attn-4-{own}"
    if folder == "of another":
        monkeypatch.setattr(os, "getuid", lambda: own + 1)
    elif folder == "open to others":
        cache.mkdir()
        cache.chmod(0o770)
    else:
        (tmp_path / "open").mkdir()
        (tmp_path / "open").chmod(0o777)
        cache.symlink_to(tmp_path / "open")
    ATTENTION["flash4"](*(torch.randn(1, 5, 2, 8) for _ in range(3)))
    assert os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] == "0"


def test_an_error_of_flash4_itself_is_not_hidden(
    flash4: Flash4, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the lock's own OSError is; a kernel that failed compiles again under the lock."""
    inputs = [torch.randn(1, 5, 2, 8) for _ in range(3)]
    monkeypatch.setattr(
        sys.modules["flash_attn.cute"],
        "flash_attn_func",
        mock.Mock(side_effect=OSError("disk full")),
    )
    with pytest.raises(OSError, match="disk full"):
        ATTENTION["flash4"](*inputs)


def test_flash4_is_deterministic_where_pytorch_is_to_be(flash4: Flash4) -> None:
    """With `warn_only` it warns instead, as PyTorch's own flash attention does: the kit has no such
    backward."""
    inputs = [torch.randn(1, 5, 2, 8, requires_grad=True) for _ in range(3)]
    for mode, asked, warns in ((0, False, False), (1, False, True), (2, True, False)):
        torch.set_deterministic_debug_mode(mode)
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                ATTENTION["flash4"](*inputs).sum().backward()
        finally:
            torch.set_deterministic_debug_mode(0)
        assert flash4.deterministic is asked
        assert any("FlashAttention 4" in str(warning.message) for warning in caught) is warns


@pytest.mark.parametrize(("mode", "again"), [("attention", 0), ("full", 1)])
def test_checkpointing_keeps_what_flash4_gave(flash4: Flash4, mode: str, again: int) -> None:
    model = tiny_model(settings())
    model.policy.attention = ATTENTION["flash4"]
    model.set_checkpointing(CheckpointPlan(mode))
    x, sigma, text = model_inputs(PROMPTS[:1])
    v = model.policy.velocity(x, model.policy.condition(sigma, text))
    v.backward(torch.randn_like(v))
    layers = len(model.policy.block_list())
    assert (flash4.forwards, flash4.backwards) == (layers * (1 + again), layers)


def test_a_package_inside_another_is_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """flash-attn-4 lies in the folder of flash-attn 2, and alone it leaves that folder a bare
    namespace."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])  # either may be installed
    for name in [name for name in sys.modules if name.split(".")[0] == "flash_attn"]:
        monkeypatch.delitem(sys.modules, name)
    names = {"flash", "flash4"}
    assert not names & set(usable(torch.device("cuda"), torch.bfloat16))
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    assert names & set(usable(torch.device("cuda"), torch.bfloat16)) == {"flash4"}
    (tmp_path / "flash_attn" / "__init__.py").write_text("")
    assert names & set(usable(torch.device("cuda"), torch.bfloat16)) == names


def test_a_kernel_that_cannot_read_a_text_is_not_used() -> None:
    """A model whose video attends to its text apart tries a kernel for both."""

    def of_one_length(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if query.shape != key.shape:
            raise ValueError("keys of another length")
        return ATTENTION["sdpa"](query, key, value)

    shape = (1, 24, 2, 16)
    alone = try_uses(of_one_length, [Use(shape=shape)], DEVICE, torch.float32)
    both = [Use(shape=shape), Use(shape=shape, keys=9)]
    assert alone.problem == ""
    assert "keys of another length" in try_uses(of_one_length, both, DEVICE, torch.float32).problem
    assert try_uses(ATTENTION["sdpa"], both, DEVICE, torch.float32).milliseconds > 0


def test_auto_measures_where_there_is_a_choice() -> None:
    uses = [Use(shape=(1, 64, 2, 64)), Use(shape=(1, 64, 2, 64), keys=9)]
    measured = measure_attention(uses, DEVICE, DTYPE)
    names = usable(DEVICE, DTYPE)
    assert list(measured) == (names if len(names) > 1 else [])
    assert all(trial.problem or trial.milliseconds > 0 for trial in measured.values())


def forgetful(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Leave out the keys of the last tile if it is not full."""
    whole = key.shape[1] // 64 * 64
    return ATTENTION["sdpa"](query, key[:, :whole], value[:, :whole])


class HalfGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 0.5


def wrong_gradient(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return ATTENTION["sdpa"](query, HalfGradient.apply(key), value)


def one_head(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Correct in the first head only."""
    out = ATTENTION["sdpa"](query, key, value)
    return torch.cat([out[:, :, :1], out[:, :, :-1]], dim=2)


def not_finite(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return ATTENTION["sdpa"](query, key, value) * torch.nan


def another_plan(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Correct, but rounded differently without gradients: cuDNN and xformers choose another kernel
    there."""
    out = ATTENTION["sdpa"](query, key, value)
    return out if query.requires_grad else out * (1 + 2 * torch.finfo(out.dtype).eps)


def broken(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    raise ImportError("flash_attn_2_cuda.so: undefined symbol: _ZN3c10\nmore lines")


WRONG = {
    "forgetful": (
        forgetful,
        r"it is wrong: relative error against SDPA in float32 of values \S+, dq",
    ),
    "wrong gradient": (
        wrong_gradient,
        r"it is wrong: relative error against SDPA in float32 of dk 5.0e-01, expected",
    ),
    "one head": (one_head, "it is wrong: .* values"),
    "not finite": (not_finite, "it is wrong: .* values inf"),
    "broken": (
        broken,
        "it does not run: ImportError: flash_attn_2_cuda.so: undefined symbol: _ZN3c10$",
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_or_broken_is_found_out(name: str, dtype: torch.dtype) -> None:
    attention, problem = WRONG[name]
    trial = try_attention(attention, (2, 1000, 2, 32), DEVICE, dtype)
    assert re.search(problem, trial.problem)
    assert math.isnan(trial.milliseconds)


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [(name, kind) for kind in (torch.float32, torch.bfloat16) for name in usable(DEVICE, kind)],
)
@pytest.mark.parametrize(
    ("shape", "keys"), [((2, 1000, 2, 128), None), ((2, 333, 4, 128), None), ((2, 333, 4, 128), 40)]
)
def test_a_right_backend_passes_with_room(
    shape: tuple[int, ...], keys: int | None, backend: str, dtype: torch.dtype
) -> None:
    """Correct backends stay below half of the error limit, and their rollouts round as training
    does."""
    trial = try_attention(ATTENTION[backend], shape, DEVICE, dtype, keys)
    assert trial.problem == ""
    assert trial.agrees
    assert trial.error < LARGEST_ERROR[dtype] / 2
    assert trial.milliseconds > 0


def test_a_backend_that_reads_no_text_is_found_out() -> None:
    """One that expects as many keys as queries, as self-attention has."""

    def of_one_length(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if key.shape != query.shape:
            raise ValueError("k has another shape")
        return ATTENTION["sdpa"](query, key, value)

    shape = (2, 100, 2, 32)
    assert try_attention(of_one_length, shape, DEVICE, torch.float32).problem == ""
    trial = try_attention(of_one_length, shape, DEVICE, torch.float32, keys=40)
    assert trial.problem == "it does not run: ValueError: k has another shape"


def with_candidates(monkeypatch: pytest.MonkeyPatch, **candidates: Attention) -> None:
    """Replace the backends that `auto` tries."""
    for name, attention in candidates.items():
        backend = AttentionRow(attend=attention, operators=(), cuda=False, half=False)
        monkeypatch.setitem(ATTENTION, name, backend)


def test_auto_drops_what_is_wrong_or_broken_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """One backend has a wrong gradient, the other does not run."""
    with_candidates(monkeypatch, sdpa=ATTENTION["sdpa"], flash=wrong_gradient, xformers=broken)
    config = settings(model__dtype="float32")
    model = tiny_model(config)
    choose_attention(model, "auto", config.sampling)
    assert model.attention == "sdpa"
    assert list(model.attention_milliseconds) == ["sdpa"]
    flash, xformers = model.notes
    assert flash.startswith("attention 'flash' is skipped: it is wrong: relative error")
    assert xformers.startswith("attention 'xformers' is skipped: it does not run: ImportError")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rollouts_that_round_otherwise_are_found_out(dtype: torch.dtype) -> None:
    trial = try_attention(another_plan, (2, 100, 2, 32), DEVICE, dtype)
    assert not trial.agrees
    assert trial.problem == trial.why_skipped(needs_agreement=False) == ""
    assert trial.why_skipped(needs_agreement=True).startswith(
        "its output under no_grad is not that with gradients"
    )
    assert trial.milliseconds > 0
    assert trial.error < LARGEST_ERROR[dtype] / 2


def test_auto_skips_a_backend_whose_rollouts_round_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It could fail the gate on log-probs. A user who names it gets it, with a note."""
    with_candidates(monkeypatch, cudnn=another_plan, sdpa=ATTENTION["sdpa"])
    config = settings(model__dtype="float32")
    model = tiny_model(config)
    choose_attention(model, "auto", config.sampling)
    assert model.attention == "sdpa"
    assert list(model.attention_milliseconds) == ["sdpa"]
    (note,) = model.notes
    assert note.startswith(
        "attention 'cudnn' is skipped: its output under no_grad is not that with gradients"
    )
    model = tiny_model(config)
    choose_attention(model, "cudnn", config.sampling)
    assert model.attention == "cudnn"
    (note,) = model.notes
    assert note.startswith(
        "model.attention = 'cudnn': its output under no_grad is not that with gradients"
    )


def test_without_a_limit_on_the_ratio_no_backend_is_skipped_for_its_rounding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_candidates(monkeypatch, cudnn=another_plan, sdpa=ATTENTION["sdpa"])
    config = settings(objective__surrogate="nft", sampling__sampler="ode")
    model = load_setup(resolve(config), rewards=False).model
    assert model.attention_milliseconds.keys() == {"sdpa", "cudnn"}
    choose_attention(model, "cudnn", config.sampling, needs_agreement=False)
    assert model.attention == "cudnn"
    assert not [note for note in model.notes if "no_grad" in note]


def test_doctor_says_which_backend_rounds_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    with_candidates(monkeypatch, cudnn=another_plan)
    found = {check.name: check for check in selftest.attention(torch.device("cpu"), 1e12)}
    assert found["attention cudnn"].verdict == "ok"
    assert found["attention cudnn"].found.endswith(
        "model.attention = auto skips it for clip and kl_mask"
    )
    assert "no_grad" not in found["attention sdpa"].found


@pytest.mark.parametrize("surrogate", SURROGATES)
def test_a_limit_on_rollout_steps_needs_agreement(
    surrogate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Asked(Exception):
        pass

    def load_model(*_: Any, needs_agreement: bool, **others: Any) -> Any:
        raise Asked(needs_agreement)

    monkeypatch.setattr(setup, "load_model", load_model)
    sampler = "sage" if SURROGATES[surrogate].scores_rollout else "ode"
    with pytest.raises(Asked) as asked:
        load_setup(
            resolve(settings(objective__surrogate=surrogate, sampling__sampler=sampler)),
            rewards=False,
        )
    assert asked.value.args == (surrogate in ("clip", "kl_mask"),)


def test_a_backend_asked_for_by_name_must_be_right_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with_candidates(monkeypatch, sdpa=ATTENTION["sdpa"], flash=broken)
    config = settings(model__dtype="float32")
    with pytest.raises(
        UserError, match=r"model.attention = 'flash': it does not run: ImportError.*'auto'"
    ):
        choose_attention(tiny_model(config), "flash", config.sampling)
    with_candidates(monkeypatch, sdpa=wrong_gradient, flash=broken)
    with pytest.raises(
        UserError, match=r"no backend is right here; .*'sdpa' is skipped.*'flash' is skipped"
    ):
        choose_attention(tiny_model(config), "auto", config.sampling)


def cudnn_inputs() -> list[Tensor]:
    """`[B, S, H, D]` with a strided value, as in the blocks."""
    query, key = (torch.randn(2, 7, 3, 8, requires_grad=True) for _ in range(2))
    return [query, key, torch.randn(2, 7, 3, 3, 8).requires_grad_()[:, :, 2]]


def test_cudnn_runs_one_plan_in_rollouts_and_training() -> None:
    """Its operator reads transposed views without a copy and keeps its statistics, so `auto` finds
    no difference."""
    inputs = cudnn_inputs()
    upstream = torch.randn(2, 7, 3, 8)
    with cudnn_attention() as calls:
        out = ATTENTION["cudnn"](*inputs)
        with torch.no_grad():
            assert torch.equal(ATTENTION["cudnn"](*inputs), out)
        gradients = torch.autograd.grad(out, inputs, upstream)
        assert try_attention(
            ATTENTION["cudnn"], (2, 7, 3, 8), torch.device("cpu"), torch.float32
        ).agrees
    assert all(statistics for _, statistics in calls)
    for tensors, _ in calls[:2]:
        for given, passed in zip(inputs, tensors):
            assert passed.data_ptr() == given.data_ptr()
            assert passed.stride() == given.transpose(1, 2).stride()
    assert out.is_contiguous()
    expected = exact(*inputs)
    references = expected, *torch.autograd.grad(expected, inputs, upstream.double())
    for mine, reference in zip((out, *gradients), references, strict=True):
        torch.testing.assert_close(mine, reference.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", ["attention", "full"])
def test_cudnn_is_checkpointed(mode: str) -> None:
    """Mode `attention` keeps its output."""
    inputs = cudnn_inputs()
    upstream = torch.randn(2, 7, 3, 8)
    block = SimpleNamespace(
        enable_gradient_checkpointing=lambda function: setattr(block, "checkpoint", function)
    )
    set_checkpointing(block, mode)

    def attend(*tensors: Tensor) -> Tensor:
        return ATTENTION["cudnn"](*(tensor.sin() for tensor in tensors))

    module = nn.Module()
    module.forward = attend
    with cudnn_attention() as calls:
        expected = torch.autograd.grad(attend(*inputs), inputs, upstream)
        calls.clear()
        out = block.checkpoint(module, *inputs)
        assert len(calls) == 1
        kept = torch.autograd.grad(out, inputs, upstream)
        assert len(calls) == {"attention": 1, "full": 2}[mode]
    for reference, gradient in zip(expected, kept, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sdpa_is_not_cudnn_by_another_name(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In half precision torch would try cuDNN first, so `sdpa` disables it there."""
    seen: list[bool] = []

    def record(query: Tensor, *others: Tensor) -> Tensor:
        seen.append(torch.backends.cuda.cudnn_sdp_enabled())
        assert torch.backends.cuda.flash_sdp_enabled()
        assert torch.backends.cuda.math_sdp_enabled()
        return query

    monkeypatch.setattr(F, "scaled_dot_product_attention", record)
    with PretendCuda():
        inputs = [torch.randn(2, 7, 3, 8, device="cuda", dtype=dtype) for _ in range(3)]
        ATTENTION["sdpa"](*inputs)
    assert seen == [dtype == torch.float32]


def test_the_choice_is_asked_for_by_name_and_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    command = [
        "train",
        "configs/recipes/paper.yaml",
        "--output",
        str(run),
        "--train.iterations",
        "1",
        "--eval.num_prompts",
        "1",
    ]
    command += [
        "--train.prompts_per_iteration",
        "1",
        "--train.group_size",
        "2",
        "--eval.seeds_per_prompt",
        "1",
    ]
    assert cli.main([*command, "--model.attention", "flsh"]) == 2
    assert "did you mean 'flash'?" in capsys.readouterr().err
    if DEVICE.type == "cpu":
        assert cli.main([*command, "--model.attention", "xformers"]) == 2
        assert "model.attention = 'xformers' needs a CUDA device" in capsys.readouterr().err
    assert not run.exists()
    assert cli.main([*command, "--model.attention", "sdpa"]) == 0
    assert "attention: sdpa" in capsys.readouterr().out
    assert json.loads((run / "run.json").read_text())["attention"] == "sdpa"
