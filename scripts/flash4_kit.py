"""Compile FlashAttention 4 for Hopper on a machine without a GPU, as a wheel for one without
network.

    python -m scripts.flash4_kit WHEELS     # with flash-attn-4 installed: write the wheel into the
                                            # folder WHEELS
    python -m scripts.flash4_kit --check    # with that wheel installed: run it, up to the launch if
                                            # there is no GPU

flash-attn-4 compiles its kernels at their first call, by a compiler of 260 MB. Under FakeTensorMode
it compiles them without a GPU: four objects of 198 KB, for any length, batch and number of heads.
The wheel holds them as shared libraries, NVIDIA's run-time library, and scripts/flash4_loader.py in
the place of `flash_attn.cute`. Beside PyTorch 2.10 or newer it needs apache-tvm-ffi alone. NVIDIA's
library has its own licence: the wheel is for your machines.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import ctypes
import functools
import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

VERSION = "4.0.0b36"
TARGET = {
    "FLASH_ATTENTION_ARCH": "sm_90",
    "CUTE_DSL_ARCH": "sm_90a",
    "FLASH_ATTENTION_NUM_SMS": "132",
}
KERNELS = ("fwd", "bwd_pre", "bwd", "bwd_post")
SHAPE = (1, 32_960, 16, 128)
"""(B, S, H, D) of HunyuanVideo 1.5 at 480p, 81 frames, 200 text tokens."""
KEYS = 512
"""Keys of Wan's attention to a text, which has other lengths than the queries."""
SHORTEST = 129  # shorter sequences have kernels of their own
LOADER = Path(__file__).with_name("flash4_loader.py")


def like_the_model(
    shape: tuple[int, int, int, int], **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values as a block has them: the values are the last third of a joint
    projection."""
    tokens, heads, width = shape[1:]
    query, key = (torch.empty(shape, dtype=torch.bfloat16, **options) for _ in range(2))
    row = 3 * heads * width
    value = torch.empty_strided(
        shape, (tokens * row, row, width, 1), dtype=torch.bfloat16, **options
    )
    return query, key, value


def compile_objects(cache: Path) -> tuple[dict[str, Path], dict[str, Any]]:
    """Compile into `cache`; return kernel -> object file, and the facts that the loader needs."""
    os.environ |= TARGET
    os.environ |= {
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",
        "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": str(cache),
    }
    from flash_attn.cute import interface

    with FakeTensorMode():
        query, key, value = like_the_model(SHAPE, device="cuda")
        out, log_sum_exp, *_ = interface._flash_attn_fwd(query, key, value, return_lse=True)
        interface._flash_attn_bwd(query, key, value, out, torch.empty_like(out), log_sum_exp)
    objects = {}
    for name in KERNELS:
        (objects[name],) = cache.glob(f"*/{name}/*.o")
    ((*_, tile),) = (compiled[:4] for compiled in interface._bwd_preprocess.compile_cache.cache)
    return objects, {
        "arch": TARGET["FLASH_ATTENTION_ARCH"],
        "backward_tile": tile,
        "shortest": SHORTEST,
    }


def write_wheel(
    folder: Path, objects: dict[str, Path], facts: dict[str, Any], runtime: Path
) -> Path:
    """Link the objects, and pack them with the loader; return the wheel."""
    files: dict[str, bytes] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name, file in objects.items():
            linked = Path(scratch) / f"{name}.so"
            subprocess.run(
                [os.environ.get("CC", "cc"), "-shared", "-o", str(linked), str(file)], check=True
            )
            files[f"flash_attn/cute/{name}.so"] = linked.read_bytes()
    files["flash_attn/cute/libcute_dsl_runtime.so"] = runtime.read_bytes()
    files["flash_attn/cute/kit.json"] = json.dumps(facts).encode()
    files["flash_attn/cute/__init__.py"] = LOADER.read_bytes()
    files["flash_attn/cute/interface.py"] = (
        b"from flash_attn.cute import _flash_attn_bwd, flash_attn_func\n"
    )
    version, tag = f"{VERSION}+{facts['arch'].replace('_', '')}", "py3-none-linux_x86_64"
    stem = f"flash_attn_4-{version}"
    files[f"{stem}.dist-info/METADATA"] = (
        f"Metadata-Version: 2.1\nName: flash-attn-4\nVersion: {version}\nRequires-Dist: "
        "apache-tvm-ffi\n"
    ).encode()
    files[f"{stem}.dist-info/WHEEL"] = (
        f"Wheel-Version: 1.0\nGenerator: scripts.flash4_kit\nRoot-Is-Purelib: false\nTag: {tag}\n"
    ).encode()
    rows = [f"{name},sha256={_digest(content)},{len(content)}" for name, content in files.items()]
    files[f"{stem}.dist-info/RECORD"] = "\n".join(
        [*rows, f"{stem}.dist-info/RECORD,,", ""]
    ).encode()
    wheel = folder / f"{stem}-{tag}.whl"
    # pip reads LZMA, by which NVIDIA's library is 13 MB and not 18.
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_LZMA) as packed:
        for name, content in files.items():
            packed.writestr(name, content)
    return wheel


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


def build(folder: Path) -> str:
    """Write the wheel; return the line to print."""
    found = importlib.metadata.version("flash-attn-4")
    if found != VERSION:
        raise SystemExit(
            f"flash-attn-4 {found} is installed; the loader's arguments are those of {VERSION}"
        )
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as cache:
        objects, facts = compile_objects(Path(cache))
        from cutlass.cute.runtime import find_runtime_libraries

        (runtime,) = (
            Path(file)
            for file in find_runtime_libraries(enable_tvm_ffi=False)
            if Path(file).name == "libcute_dsl_runtime.so"
        )
        wheel = write_wheel(folder, objects, facts, runtime)
    return f"{wheel}: {wheel.stat().st_size / 2**20:.1f} MiB, {facts}"


# -- the check -------------------------------------------------------------------------------------


def check() -> str:
    """Try the installed kit; return the line to print."""
    try:
        import flash_attn.cute as kit

        facts = kit.facts()
    except (ImportError, AttributeError) as error:
        if isinstance(error, ImportError) and not (error.name or "").startswith("flash_attn"):
            lacks = (
                "apache-tvm-ffi is not installed"
                if error.name == "tvm_ffi"
                else f"it cannot be imported: {error}"
            )
            sys.exit(f"FlashAttention 4's kit is here, and {lacks}")
        return (
            "FlashAttention 4's kit is not installed: no flash_attn_4-*.whl among the wheels. "
            "Skipped"
        )
    if torch.cuda.is_available():
        from sage_fast.models.attention.backends import ATTENTION
        from sage_fast.models.attention.trial import try_attention

        where = (SHAPE, torch.device("cuda"), torch.bfloat16)
        trial = try_attention(ATTENTION["flash4"], *where)
        of_a_text = try_attention(ATTENTION["flash4"], *where, KEYS)
        problem = trial.problem or of_a_text.problem
        if problem:
            sys.exit(f"FlashAttention 4's kit: {problem}")
        took = f"forward and backward {trial.milliseconds:.1f} ms, error {trial.error:.1e}"
        return f"FlashAttention 4's kit at {SHAPE}: {took}"
    for name, launch in _launches(kit).items():
        try:
            launch()
        except (
            RuntimeError
        ) as error:  # anything but a launch that finds no driver is an argument that does not fit
            if "Cuda" in str(error):
                continue
            raise
        sys.exit(f"FlashAttention 4's kit: {name} ran without a GPU")
    return (
        f"no GPU: FlashAttention 4's kernels for {facts['arch']} load and take their arguments; "
        "none was launched"
    )


def _launches(kit: Any) -> dict[str, Callable[[], Any]]:
    """Return kernel -> its call with tensors that claim to be on a GPU, in memory that is not
    there. There are more keys than queries."""
    shape = (1, SHORTEST, 2, SHAPE[3])
    shape_of_keys = (1, KEYS, 2, SHAPE[3])
    query = _on_gpu(like_the_model(shape, device="meta")[0])
    _, key, value = (_on_gpu(t) for t in like_the_model(shape_of_keys, device="meta"))
    out, dout, dq = (
        _on_gpu(torch.empty(shape, dtype=torch.bfloat16, device="meta")) for _ in range(3)
    )
    dk, dv = (
        _on_gpu(torch.empty(shape_of_keys, dtype=torch.bfloat16, device="meta")) for _ in range(2)
    )
    rows = -(-SHORTEST // kit.facts()["backward_tile"]) * kit.facts()["backward_tile"]
    single = functools.partial(torch.empty, dtype=torch.float32, device="meta")
    lse, dpsum, lse_log2 = (_on_gpu(single(1, 2, count)) for count in (SHORTEST, rows, rows))
    dq_sum = _on_gpu(single(1, 2, rows * SHAPE[3]))
    return {
        "fwd": lambda: kit.launch_forward(query, key, value, out, lse, 1.0),
        "bwd_pre": lambda: kit.launch_preprocess(out, dout, lse, dpsum, lse_log2, dq_sum),
        "bwd": lambda: kit.launch_backward(
            query, key, value, dout, lse_log2, dpsum, dq_sum, dk, dv, 1.0
        ),
        "bwd_post": lambda: kit.launch_postprocess(dq_sum, dq, 1.0),
    }


class _Array(ctypes.Structure):
    """DLManagedTensor of the DLPack protocol."""

    _fields_ = [
        ("data", ctypes.c_void_p), ("device", ctypes.c_int32), ("index", ctypes.c_int32), ("ndim",
         ctypes.c_int32),
        ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("offset", ctypes.c_uint64), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p),
    ]  # fmt: skip


class _Claim:
    """A tensor on the meta device that claims, by DLPack, to be on the first GPU."""

    cuda = 2

    def __init__(self, tensor: Tensor) -> None:
        count = ctypes.c_int64 * tensor.ndim
        code, bits = {torch.bfloat16: (4, 16), torch.float32: (2, 32)}[tensor.dtype]
        address = 1 << 32  # aligned, and never read: there is no driver
        self.sizes = count(*tensor.shape), count(*tensor.stride())
        self.array = _Array(
            address, self.cuda, 0, tensor.ndim, code, bits, 1, *self.sizes, 0, None, None
        )

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.cuda, 0

    def __dlpack__(self, **_: Any) -> Any:
        capsule = ctypes.pythonapi.PyCapsule_New
        capsule.restype = ctypes.py_object
        capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return capsule(ctypes.addressof(self.array), b"dltensor", None)


_claims: list[_Claim] = []  # their memory outlives every use


def _on_gpu(tensor: Tensor) -> Any:
    import tvm_ffi

    _claims.append(_Claim(tensor))
    return tvm_ffi.from_dlpack(_claims[-1])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, metavar="WHEELS")
    parser.add_argument("--check", action="store_true")
    chosen = parser.parse_args()
    if chosen.check == (chosen.folder is not None):
        parser.error("expected WHEELS or --check")
    with contextlib.suppress(BrokenPipeError):
        print(check() if chosen.check else build(chosen.folder))
