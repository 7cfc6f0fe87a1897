"""Registers, spills, access widths and special functions of the compiled Triton kernels; needs no
GPU.

Another Triton than the installed one, such as a GPU machine's, compiles them if its folder comes
first in PYTHONPATH (`pip install --no-deps --target FOLDER triton==3.6.0`).

rows = compile_report()
print(format_table(rows))
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

ARCHITECTURES = (80, 90, 100)
NORM_SIZES = "d 2048, 16 heads of 128"
"""Sizes of the published transformer."""
TOKENS = 32_960
"""Video and text tokens of a 480p video of 81 frames."""
RANKS = (16, 32, 64, 128, 256)
"""Of adapters: each rank up to the kernels' largest is padded to one of these.

Above it PyTorch does the work.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Specialisation:
    """One compilation of one kernel.

    Attributes:
        kernel: name of the kernel.
        x, v: Triton element types of the latents and of the velocities.
        guidance, anchor, old, beta: which optional inputs are present.
        aligned: whether numel is a multiple of 16, as it is for every latent with 16 or 32
            channels.
        numel: `i32`, `i64` (samples of 2^31 elements or more) or `1` (Triton turns an argument of 1
            into a constant).
        one_step: whether the batch is at one step, as in a rollout; otherwise each sample has its
            own.
        outputs: number of results of the second reduction stage: 1 for the step, 5 for the score.
        weights: Triton element type of the RMSNorms' weights, if it is not `x`.
        part: 0 for the queries, 1 for the keys, in the backward of RMSNorm and rotation.
        sums: whether a normalisation's backward also sums the gradients of its scale and shift, or
            of its weights.
        residual, gated: whether the LayerNorm's backward adds the residual's gradient, and computes
            a gate's.
        gelu: whether rows beside an adapter's product go through GELU.
        rank: rows of an adapter's A.
        pad: columns on the right of each row of a normalisation's result and its gradient.
    """

    kernel: str
    x: str = "fp32"
    v: str = "bf16"
    guidance: bool = False
    anchor: bool = False
    old: bool = False
    beta: bool = False
    aligned: bool = True
    numel: str = "i32"
    one_step: bool = False
    outputs: int = 0
    weights: str | None = None
    part: int = 0
    sums: bool = False
    residual: bool = False
    gated: bool = False
    gelu: bool = False
    rank: int = 64
    pad: int = 0

    def __str__(self) -> str:
        if self.outputs:
            return f"{self.outputs} output{'s' * (self.outputs > 1)}" + ", one step" * self.one_step
        if "adapter" in self.kernel:
            return (
                f"{self.x}, d 8192, rank {self.rank}"
                + ", GELU" * self.gelu
                + ", gated" * self.gated
            )
        if "silu" in self.kernel:
            return f"{self.x}, 128 channels last"
        if "norm" in self.kernel or "gated" in self.kernel:
            return (
                f"{self.x}, {NORM_SIZES}"
                + (f", {self.weights} weights" if self.weights else "")
                + ", keys" * self.part
                + "".join(
                    f", {name}" for name in ("sums", "residual", "gated") if getattr(self, name)
                )
                + f", padding {self.pad}" * (self.pad > 0)
            )
        parts = [f"{self.x} x", f"{self.v} v"]
        parts += [name for name in ("guidance", "anchor", "old", "beta") if getattr(self, name)]
        parts += ["one step"] * self.one_step + ["unaligned"] * (not self.aligned)
        parts += [f"{self.numel} numel"] * (self.numel != "i32")
        return ", ".join(parts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledKernel:
    """Resources of one compilation.

    Attributes:
        kernel, specialisation: what was compiled.
        arch: compute capability times 10.
        registers: 32-bit registers per thread.
        spilled_bytes: stack per thread; all of it is spills, since these kernels have no local
            arrays and no calls.
        shared_bytes: shared memory per program.
        loads, stores: bytes per thread of each global load and store instruction, widest first.
        special: special-function instructions (exponential, reciprocal, root) for each element
            stored, and
        asynchronous: copies to shared memory that no register waits for, of the kernel's loops, or
            of all of it if it has none. A kernel that stores sums alone has no `special`.
    """

    kernel: str
    specialisation: str
    arch: int
    registers: int
    spilled_bytes: int
    shared_bytes: int
    loads: list[int]
    stores: list[int]
    special: float | None
    asynchronous: int


_STEP, _FWD, _BWD = (
    "_transition_step_fwd_kernel",
    "_transition_score_fwd_kernel",
    "_transition_score_bwd_kernel",
)
_SCORE_INPUTS: tuple[dict[str, Any], ...] = (
    {},
    {"anchor": True},
    {"old": True},
    {"anchor": True, "old": True},
    {"x": "bf16", "anchor": True, "old": True},
    {"anchor": True, "old": True, "aligned": False},
    {"x": "bf16", "anchor": True, "old": True, "aligned": False},
    {"guidance": True},
    {"guidance": True, "anchor": True},
    {"guidance": True, "anchor": True, "old": True},
    {"guidance": True, "anchor": True, "old": True, "aligned": False},
)

SPECIALISATIONS: tuple[Specialisation, ...] = (
    *(
        Specialisation(kernel=_STEP, one_step=True, x=x, guidance=guidance, aligned=aligned)
        for guidance, aligned in ((False, True), (True, True), (True, False))
        for x in ("fp32", "bf16")
    ),
    Specialisation(kernel=_FWD, one_step=True),
    *(
        Specialisation(kernel=kernel, **inputs)
        for kernel in (_FWD, _BWD)
        for inputs in _SCORE_INPUTS
    ),
    *(Specialisation(kernel=_FWD, **inputs, beta=True) for inputs in _SCORE_INPUTS),
    *(
        Specialisation(kernel=f"_{name}_fwd_kernel", x=x)
        for name in ("norm_modulate", "norm_rotate", "norm_silu", "gated_norm", "gated_sum")
        for x in ("bf16", "fp32")
    ),
    *(
        Specialisation(
            kernel="_norm_modulate_bwd_kernel", x=x, sums=sums, residual=residual, gated=gated
        )
        for x, sums in (("bf16", False), ("bf16", True), ("fp32", False))
        for residual, gated in ((False, False), (True, False), (True, True))
    ),
    *(
        Specialisation(kernel="_gated_sum_bwd_kernel", x="bf16", sums=sums)
        for sums in (False, True)
    ),
    *(
        Specialisation(kernel="_norm_rotate_bwd_kernel", x=x, part=part)
        for x in ("bf16", "fp32")
        for part in (0, 1)
    ),
    # All weights: they are float32, and autocast makes the activations bfloat16.
    Specialisation(kernel="_norm_rotate_fwd_kernel", x="bf16", weights="fp32"),
    *(
        Specialisation(
            kernel="_norm_rotate_bwd_kernel", x="bf16", weights="fp32", part=part, sums=True
        )
        for part in (0, 1)
    ),
    *(
        Specialisation(kernel="_adapter_rows_fwd_kernel", x=x, gelu=gelu, gated=gated, rank=rank)
        for x in ("bf16", "fp32")
        for gelu, gated in ((False, False), (True, False), (False, True))
        for rank in RANKS
    ),
    *(
        Specialisation(kernel="_adapter_rows_bwd_kernel", x=x, rank=rank)
        for x in ("bf16", "fp32")
        for rank in RANKS
    ),
    Specialisation(kernel="_reduce_kernel", outputs=1, one_step=True),
    Specialisation(kernel="_reduce_kernel", outputs=5, one_step=True),
    Specialisation(kernel="_reduce_kernel", outputs=5),
)
"""The compilations that matter; every other one differs from one of these only in an element type.
"""


def _compile(s: Specialisation, arch: int) -> Any:
    import triton
    from sage_fast.kernels import (
        adapter_rows,
        common,
        gated_norm,
        gated_sum,
        norm_modulate,
        norm_rotate,
        norm_silu,
        transition_score,
        transition_step,
    )
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if triton.knobs.runtime.interpret:
        raise RuntimeError(
            "TRITON_INTERPRET is set: the kernels are interpreted here; compile in a process "
            "without it"
        )
    modules = (
        common,
        adapter_rows,
        gated_sum,
        norm_modulate,
        gated_norm,
        norm_rotate,
        norm_silu,
        transition_step,
        transition_score,
    )
    kernel = next(getattr(module, s.kernel) for module in modules if hasattr(module, s.kernel))
    norm, adapter = "norm" in s.kernel or "gated" in s.kernel, "adapter" in s.kernel
    _, rows = common.rows_of_programs(TOKENS, 1, sums=s.sums)
    flags = {
        "HAS_GUIDANCE": s.guidance,
        "HAS_ANCHOR": s.anchor,
        "HAS_OLD": s.old,
        "HAS_BETA": s.beta,
        "STEP_STRIDE": int(not s.one_step),
        "ALIGNED": s.aligned and s.numel != "1",
        "TILES": 2,  # a 480p latent
        "BLOCK": common.BLOCK,
        "VEC": 4 if "fp32" in (s.x, s.v) else 8,
        "OUTPUTS": s.outputs,
        "PARTIALS": common.MAX_PROGRAMS,
        "WIDTH": 128 if "rotate" in s.kernel else 2048,
        "HEADS": 16,
        "MODULATION": s.sums,
        "WEIGHTS": s.sums,
        "ROWS": rows,
        "TOKENS": rows,
        "RESIDUAL": s.residual,
        "GATED": s.gated,
        "PART": s.part,
        "PIXELS": norm_silu.TILE // 128,
        "CHANNELS": 128,
    }
    wide = "norm" in s.kernel and ("bwd" in s.kernel or "gated" in s.kernel)
    options = common.WIDE_OPTIONS if wide else common.LAUNCH_OPTIONS
    if adapter:
        use = (
            "backward"
            if "bwd" in s.kernel
            else "gelu"
            if s.gelu
            else "gated"
            if s.gated
            else "plain"
        )
        options = adapter_rows.options(4 if s.x == "fp32" else 2, s.rank, use, arch)
        flags = {name: options.pop(name) for name in ("ROWS", "BLOCK")}
        flags |= {"GELU": s.gelu, "GATED": s.gated, "RANK": adapter_rows.rank_block(s.rank)}
    flagged = [parameter.name for parameter in kernel.params if parameter.is_constexpr]
    if unknown := [name for name in flagged if name not in flags]:
        raise RuntimeError(f"{s.kernel}: {', '.join(unknown)} is no flag that the report knows")
    absent = ["v_uncond_ptr", "guidance", "dv_uncond_ptr"] * (not s.guidance)
    absent += (
        ["v_anchor_ptr"] * (not s.anchor) + ["v_old_ptr"] * (not s.old) + ["beta"] * (not s.beta)
    )
    absent += ["kl_anchor_ptr", "kl_old_ptr", "error_plus_ptr", "error_minus_ptr"] * (
        s.outputs != 5
    )
    if s.kernel == "_gated_sum_bwd_kernel" and not s.sums:
        absent += ["y_ptr"]
    if "RESIDUAL" in flagged:
        absent += ["residual_ptr"] * (not s.residual) + ["gate_ptr", "dy_ptr"] * (not s.gated)
        absent += ["y_ptr"] * (not (s.gated and s.sums))
    constants: dict[str, Any] = {name: flags[name] for name in flagged} | dict.fromkeys(absent)
    if "_adapter_rows_fwd" in s.kernel:  # A lies in rows, s B of the backward in columns
        constants |= {"rank_stride" if s.gated else "column_stride": 1} | dict.fromkeys(
            ["gate_ptr"] * (not s.gated)
        )
    if "silu" in s.kernel:
        constants |= dict.fromkeys(("gamma_stride", "x_channel_stride", "out_channel_stride"), 1)
    if s.numel == "1":
        constants |= dict.fromkeys(("numel", "programs", "steps"), 1)
    constants = {name: constants[name] for name in kernel.arg_names if name in constants}

    def kind(name: str) -> str:
        if name in constants:
            return "constexpr"
        if not name.endswith("_ptr"):
            floats = ("eps", "beta", "guidance", "scale", "inverse_numel", "two_over_numel")
            return s.numel if name == "numel" else "fp32" if name in floats else "i32"
        if name in ("step_ptr", "seed_ptr"):
            return "*i64"
        if (norm or adapter) and name not in (
            "rotary_ptr",
            "partial_ptr",
            "d_down_ptr",
            "d_up_ptr",
        ):
            return f"*{s.weights if s.weights and name.startswith(('video_', 'text_')) else s.x}"
        if name in ("x_ptr", "x_next_ptr"):
            return f"*{s.x}"
        stored = ("v_anchor_ptr", "v_old_ptr")  # in float32 if they are guided
        velocities = (
            "v_ptr",
            "v_uncond_ptr",
            "dv_ptr",
            "dv_uncond_ptr",
            *stored * (not s.guidance),
        )
        return f"*{s.v}" if name in velocities else "*fp32"

    # Pointers, and the normalisations' sizes, are multiples of 16, which Triton detects.
    sizes = ("_stride", "width", "rank", "channels") if norm or adapter else ()
    divisible = ("_ptr", *sizes, *(("numel",) if s.aligned else ()))
    uneven = ["inverse_numel", "two_over_numel", *["out_width", "grad_width"] * (s.pad % 16 > 0)]
    # rows of A end in padding columns
    uneven += ["rank", "rank_stride", "column_stride"] * (s.rank % 16 > 0)
    signature = {name: kind(name) for name in kernel.arg_names}
    attributes = {
        (i,): [["tt.divisibility", 16]]
        for i, (name, type_name) in enumerate(signature.items())
        if name.endswith(divisible) and name not in uneven and (norm or type_name != "constexpr")
    }
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def _inspect(tool: str, option: str, cubin: bytes) -> str:
    """Return what `cuobjdump` or `nvdisasm`, as Triton ships them, says of the binary."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [getattr(knobs.nvidia, tool).path, option, file.name]
        return subprocess.run(
            command, check=True, capture_output=True, text=True, encoding="utf-8"
        ).stdout


def _resource_usage(cubin: bytes) -> dict[str, int]:
    """Read REG, STACK, SHARED, ... from the binary."""
    output = _inspect("cuobjdump", "--dump-resource-usage", cubin)
    return {name: int(value) for name, value in re.findall(r"\b([A-Z]+):(\d+)", output)}


def _repeated(code: str) -> list[str]:
    """Return the operations, such as `STG.E.128`, of the loops in a disassembly, or all of them if
    it has none.

    A loop reaches from a label to a later branch back to it.
    """
    operations: list[str] = []
    labels: dict[str, int] = {}
    inside: set[int] = set()
    for label, operation, operands in re.findall(
        r"^(\.L\w+):|/\*\w{4,}\*/ +(?:@\S+ +)?([A-Z][\w.]*)(.*)", code, re.M
    ):
        if label:
            labels[label] = len(operations)
            continue
        target = re.search(r"\.L\w+", operands) if operation.startswith("BRA") else None
        if target and labels.get(target[0], len(operations)) < len(operations):
            inside.update(range(labels[target[0]], len(operations) + 1))
        operations.append(operation)
    return [operations[i] for i in sorted(inside)] or operations


def _special(operations: Sequence[str], itemsize: int) -> float | None:
    """Return the special-function instructions for each element of `itemsize` bytes that the
    operations store."""
    stored = [operation.split(".") for operation in operations if operation.startswith("STG")]
    widths = {"U8": 1, "U16": 2, "64": 8, "128": 16, "256": 32}
    elements = (
        sum(next((widths[part] for part in parts if part in widths), 4) for parts in stored)
        / itemsize
    )
    return (
        sum(operation.startswith("MUFU") for operation in operations) / elements
        if elements
        else None
    )


def _widths(ptx: str, access: str) -> list[int]:
    found = re.findall(rf"\b{access}\.global(?:\.\w+)*?(?:\.v(\d))?\.[busf](\d+)\b", ptx)
    return sorted((int(count or 1) * int(bits) // 8 for count, bits in found), reverse=True)


def compile_report(
    specialisations: Iterable[Specialisation] = SPECIALISATIONS,
    architectures: Sequence[int] = ARCHITECTURES,
) -> list[CompiledKernel]:
    """Compile the kernels for each architecture; Triton caches them on disk.

    Raises:
        ModuleNotFoundError: Triton is not installed.
        RuntimeError: this process interprets the kernels (TRITON_INTERPRET).
    """
    rows = []
    for specialisation, arch in itertools.product(specialisations, architectures):
        compiled = _compile(specialisation, arch)
        usage = _resource_usage(compiled.asm["cubin"])
        operations = _repeated(_inspect("nvdisasm", "-c", compiled.asm["cubin"]))
        result = specialisation.v if "score_bwd" in specialisation.kernel else specialisation.x
        rows.append(
            CompiledKernel(
                kernel=specialisation.kernel,
                specialisation=str(specialisation),
                arch=arch,
                registers=usage["REG"],
                spilled_bytes=usage["STACK"],
                shared_bytes=compiled.metadata.shared,
                loads=_widths(compiled.asm["ptx"], "ld"),
                stores=_widths(compiled.asm["ptx"], "st"),
                special=_special(operations, 4 if result == "fp32" else 2),
                asynchronous=sum(operation.startswith("LDGSTS") for operation in operations),
            )
        )
    return rows


def _cells(row: CompiledKernel) -> tuple[str, ...]:
    """Return the cells of a row, with accesses as `3 x 16, 2 x 4`."""
    accesses = (
        ", ".join(f"{count} x {width}" for width, count in Counter(widths).items())
        for widths in (row.loads, row.stores)
    )
    special = "" if row.special is None else f"{row.special:.3g}"
    numbers = (row.registers, row.spilled_bytes, row.shared_bytes, special, row.asynchronous)
    return row.kernel, row.specialisation, f"sm_{row.arch}", *map(str, numbers), *accesses


def format_table(rows: Sequence[CompiledKernel]) -> str:
    """Format the rows as a Markdown table."""
    resources = (
        "registers",
        "spilled B",
        "shared B",
        "special/element",
        "asynchronous loads",
        "loads B",
        "stores B",
    )
    header = ("kernel", "specialisation", "arch", *resources)
    cells = [header, *(_cells(row) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)) + " |"
        for row in cells
    ]
    return "\n".join(
        [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]
    )
