"""Registers, spills, access widths and special functions of the compiled Triton kernels; needs no
GPU.

Another Triton than the installed one, such as a GPU machine's, compiles them if its folder comes
first in PYTHONPATH (`pip install --no-deps --target FOLDER triton==3.6.0`).

rows = compile_report()
print(format_table(rows))
print(format_summary(rows))
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from sage_fast.util.text import counted

log = logging.getLogger(__name__)

SHARED_BYTES = {
    80: 163 * 1024,  # A100
    86: 99 * 1024,  # RTX 30, A10, RTX A6000
    89: 99 * 1024,  # RTX 40, L40S, RTX 6000 Ada
    90: 227 * 1024,  # H100, H200
    100: 227 * 1024,  # B200
    120: 99 * 1024,  # RTX 50
}
"""Compute capability times 10 -> shared memory that a program may have."""
ARCHITECTURES = (*SHARED_BYTES,)
WIDTH = 2048
NORM_SIZES = f"d {WIDTH}, 16 heads of 128"
"""Sizes of HunyuanVideo 1.5's transformer."""
WIDER = 3072
"""Width of Wan 2.2 TI2V's."""
HEADS_TOGETHER = (12, 24, 40)
"""Heads of 128 that published transformers of 1.3, 5 and 14 B parameters normalise together."""
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
        heads: heads of 128 of RMSNorm and rotation.
        all_heads: whether all heads of a token are normalised together.
        width: of the rows of LayerNorm and of the gated residual.
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
    heads: int = 16
    all_heads: bool = False
    width: int = WIDTH

    def __str__(self) -> str:
        if self.outputs:
            parts = ["1 output" if self.outputs == 1 else f"{self.outputs} outputs"]
            if self.one_step:
                parts.append("one step")
        elif self.is_adapter:
            parts = [self.x, "d 8192", f"rank {self.rank}", *self._named("gelu", "gated")]
        elif "silu" in self.kernel:
            parts = [self.x, "128 channels last"]
        elif self.is_norm:
            parts = self._of_a_norm()
        else:
            parts = self._of_a_transition()
        return ", ".join(parts)

    @property
    def is_adapter(self) -> bool:
        return "adapter" in self.kernel

    @property
    def is_norm(self) -> bool:
        """Whether the kernel goes over rows of the transformer's width."""
        return "norm" in self.kernel or "gated" in self.kernel

    def _named(self, *flags: str) -> list[str]:
        """Those of the flags that are set, in words."""
        words = {"gelu": "GELU"}
        return [words.get(flag, flag) for flag in flags if getattr(self, flag)]

    def _of_a_norm(self) -> list[str]:
        parts = [self.x, NORM_SIZES if self.width == WIDTH else f"d {self.width}"]
        if self.all_heads:
            parts = [self.x, f"{self.heads} heads of 128 together"]
        if self.weights:
            parts.append(f"{self.weights} weights")
        if self.part:
            parts.append("keys")
        parts += self._named("sums", "residual", "gated")
        if self.pad:
            parts.append(f"padding {self.pad}")
        return parts

    def _of_a_transition(self) -> list[str]:
        parts = [f"{self.x} x", f"{self.v} v"]
        parts += self._named("guidance", "anchor", "old", "beta")
        if self.one_step:
            parts.append("one step")
        if not self.aligned:
            parts.append("unaligned")
        if self.numel != "i32":
            parts.append(f"{self.numel} numel")
        return parts


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

_TYPES_OF_A_NORM: tuple[dict[str, Any], ...] = (
    {"x": "bf16"},
    {"x": "fp32"},
    {"x": "bf16", "weights": "fp32"},
)
"""Element types of the tokens and, if all weights are trained, of the norms' weights."""

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
        Specialisation(kernel="_norm_rotate_fwd_kernel", heads=heads, all_heads=True, **types)
        for heads in HEADS_TOGETHER
        for types in _TYPES_OF_A_NORM
    ),
    *(
        Specialisation(
            kernel="_norm_rotate_bwd_kernel",
            heads=heads,
            all_heads=True,
            part=part,
            **types,
            sums="weights" in types,
        )
        for heads in HEADS_TOGETHER
        for types in _TYPES_OF_A_NORM
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
    *(
        Specialisation(kernel=f"_{name}_fwd_kernel", x="bf16", width=WIDER)
        for name in ("norm_modulate", "gated_norm", "gated_sum")
    ),
    *(
        Specialisation(
            kernel="_norm_modulate_bwd_kernel",
            x="bf16",
            sums=sums,
            residual=True,
            gated=gated,
            width=WIDER,
        )
        for sums in (False, True)
        for gated in (False, True)
    ),
    *(
        Specialisation(kernel="_gated_sum_bwd_kernel", x="bf16", sums=sums, width=WIDER)
        for sums in (False, True)
    ),
    Specialisation(kernel="_reduce_kernel", outputs=1, one_step=True),
    Specialisation(kernel="_reduce_kernel", outputs=5, one_step=True),
    Specialisation(kernel="_reduce_kernel", outputs=5),
)
"""The compilations that matter; every other one differs from one of these only in an element type.
"""


def _compile(s: Specialisation, arch: int) -> Any:
    """Compile one specialisation as its launcher would, for an architecture such as 90."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if triton.knobs.runtime.interpret:
        raise RuntimeError(
            "TRITON_INTERPRET is set: the kernels are interpreted here; compile in a process "
            "without it"
        )

    kernel = _kernel(s.kernel)
    flags, options = _flags_and_options(s, arch)
    flagged = [parameter.name for parameter in kernel.params if parameter.is_constexpr]
    unknown = [name for name in flagged if name not in flags]
    if unknown:
        raise RuntimeError(f"{s.kernel}: {', '.join(unknown)} is no flag that the report knows")

    constants: dict[str, Any] = {name: flags[name] for name in flagged}
    constants |= dict.fromkeys(_absent(s, "RESIDUAL" in flagged))
    constants |= dict.fromkeys(_ones(s), 1)
    constants = {name: constants[name] for name in kernel.arg_names if name in constants}

    signature = {
        name: "constexpr" if name in constants else _type(s, name) for name in kernel.arg_names
    }
    attributes = _divisible(s, signature)
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def _kernel(name: str) -> Any:
    """The kernel of that name, whichever module has it."""
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
    return next(getattr(module, name) for module in modules if hasattr(module, name))


def _flags_and_options(s: Specialisation, arch: int) -> tuple[dict[str, Any], dict[str, int]]:
    """Values of every `constexpr` flag that the kernel may have, and Triton's launch options."""
    from sage_fast.kernels import adapter_rows, common, norm_rotate, norm_silu

    if s.is_adapter:
        itemsize = 4 if s.x == "fp32" else 2
        options = adapter_rows.options(itemsize, s.rank, _use_of_adapter(s), arch)
        flags = {name: options.pop(name) for name in ("ROWS", "BLOCK")}
        flags |= {"GELU": s.gelu, "GATED": s.gated, "RANK": adapter_rows.rank_block(s.rank)}
        return flags, options

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
        "WIDTH": common.power_of_2(s.width),
        "MODULATION": s.sums,
        "WEIGHTS": s.sums,
        # those that normalise all heads together have no text in this attention
        "TEXT": not s.all_heads,
        "ROWS": rows,
        "RESIDUAL": s.residual,
        "GATED": s.gated,
        "PART": s.part,
        "PIXELS": norm_silu.TILE // 128,
        "CHANNELS": 128,
    }
    if "rotate" in s.kernel:
        heads, options = norm_rotate.flags_and_options(
            s.heads, 128, all_heads=s.all_heads, backward="bwd" in s.kernel
        )
        _, tokens = common.rows_of_programs(TOKENS, 1, sums=s.sums, warps=options["num_warps"])
        return flags | heads | {"TOKENS": tokens}, options
    wide = "norm" in s.kernel and ("bwd" in s.kernel or "gated" in s.kernel)
    return flags, common.WIDE_OPTIONS if wide else common.LAUNCH_OPTIONS


def _use_of_adapter(s: Specialisation) -> str:
    """What the launcher of `adapter_rows` calls this use of its kernels."""
    if "bwd" in s.kernel:
        return "backward"
    if s.gelu:
        return "gelu"
    return "gated" if s.gated else "plain"


def _absent(s: Specialisation, may_have_residual: bool) -> list[str]:
    """Arguments that are None."""
    absent = []
    if not s.guidance:
        absent += ["v_uncond_ptr", "guidance", "dv_uncond_ptr"]
    if not s.anchor:
        absent += ["v_anchor_ptr"]
    if not s.old:
        absent += ["v_old_ptr"]
    if not s.beta:
        absent += ["beta"]
    if s.outputs != 5:
        absent += ["kl_anchor_ptr", "kl_old_ptr", "error_plus_ptr", "error_minus_ptr"]

    if s.kernel == "_gated_sum_bwd_kernel" and not s.sums:
        absent += ["y_ptr"]
    if "_adapter_rows_fwd" in s.kernel and not s.gated:
        absent += ["gate_ptr"]
    if may_have_residual:
        if not s.residual:
            absent += ["residual_ptr"]
        if not s.gated:
            absent += ["gate_ptr", "dy_ptr"]
        if not (s.gated and s.sums):
            absent += ["y_ptr"]
    return absent


def _ones(s: Specialisation) -> list[str]:
    """Arguments that are 1, of which Triton makes constants."""
    ones = []
    if "_adapter_rows_fwd" in s.kernel:
        # A lies in rows, the B of the backward in columns
        ones += ["rank_stride" if s.gated else "column_stride"]
    if "silu" in s.kernel:
        ones += ["gamma_stride", "x_channel_stride", "out_channel_stride"]
    if s.numel == "1":
        ones += ["numel", "programs", "steps"]
    return ones


def _type(s: Specialisation, name: str) -> str:
    """Triton's type of an argument that is no constant."""
    if not name.endswith("_ptr"):
        return _type_of_number(s, name)
    if name in ("step_ptr", "seed_ptr"):
        return "*i64"
    if s.is_norm or s.is_adapter:
        return _type_in_rows(s, name)
    if name in ("x_ptr", "x_next_ptr"):
        return f"*{s.x}"

    velocities = ["v_ptr", "v_uncond_ptr", "dv_ptr", "dv_uncond_ptr"]
    if not s.guidance:  # guided velocities are stored in float32
        velocities += ["v_anchor_ptr", "v_old_ptr"]
    return f"*{s.v}" if name in velocities else "*fp32"


def _type_of_number(s: Specialisation, name: str) -> str:
    if name == "numel":
        return s.numel
    floats = ("eps", "beta", "guidance", "scale", "inverse_numel", "two_over_numel")
    return "fp32" if name in floats else "i32"


def _type_in_rows(s: Specialisation, name: str) -> str:
    """Type of a pointer of the kernels that go over rows of tokens."""
    if name in ("rotary_ptr", "partial_ptr", "d_down_ptr", "d_up_ptr"):
        return "*fp32"
    if s.weights and name.startswith(("video_", "text_")):
        return f"*{s.weights}"
    return f"*{s.x}"


def _divisible(
    s: Specialisation, signature: dict[str, str]
) -> dict[tuple[int], list[list[str | int]]]:
    """Position of each argument that is a multiple of 16 -> Triton's word for it.

    Pointers, and the normalisations' sizes, are multiples of 16, which Triton detects at a launch.
    """
    endings = ["_ptr"]
    if s.is_norm or s.is_adapter:
        endings += ["_stride", "width", "rank", "channels"]
    if s.aligned:
        endings += ["numel"]

    uneven = ["inverse_numel", "two_over_numel"]
    if s.pad % 16:
        uneven += ["out_width", "grad_width"]
    if s.rank % 16:  # rows of A end in padding columns
        uneven += ["rank", "rank_stride", "column_stride"]

    found: dict[tuple[int], list[list[str | int]]] = {}
    for i, (name, kind) in enumerate(signature.items()):
        even = name.endswith(tuple(endings)) and name not in uneven
        if even and (s.is_norm or kind != "constexpr"):
            found[i,] = [["tt.divisibility", 16]]
    return found


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
    stored_bytes = sum(
        next((widths[part] for part in parts if part in widths), 4) for parts in stored
    )
    if not stored_bytes:
        return None
    special = sum(operation.startswith("MUFU") for operation in operations)
    return special / (stored_bytes / itemsize)


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
    names = ", ".join(f"sm_{arch}" for arch in architectures)
    for kernel, group in itertools.groupby(specialisations, lambda each: each.kernel):
        variants = list(group)
        count = counted(len(variants), "specialisation")
        log.info(f"compiling {kernel}: {count} for {names}")  # each takes seconds
        for specialisation, arch in itertools.product(variants, architectures):
            rows.append(_compiled(specialisation, arch))
    return rows


def _compiled(specialisation: Specialisation, arch: int) -> CompiledKernel:
    """Compile a kernel for an architecture, and read what it takes of the machine."""
    compiled = _compile(specialisation, arch)
    usage = _resource_usage(compiled.asm["cubin"])
    operations = _repeated(_inspect("nvdisasm", "-c", compiled.asm["cubin"]))
    result = specialisation.v if "score_bwd" in specialisation.kernel else specialisation.x
    return CompiledKernel(
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


def misfits(rows: Iterable[CompiledKernel]) -> list[CompiledKernel]:
    """Return the rows that spill registers or need more shared memory than a program has."""
    return [row for row in rows if row.spilled_bytes or row.shared_bytes > SHARED_BYTES[row.arch]]


def format_summary(rows: Sequence[CompiledKernel]) -> str:
    """Say for each architecture whether its kernels fit, and list those that do not."""
    lines = []
    for arch in sorted({row.arch for row in rows}):
        kernels = [row for row in rows if row.arch == arch]
        registers = max(row.registers for row in kernels)
        shared = max(row.shared_bytes for row in kernels)
        lines.append(
            f"sm_{arch}: {counted(len(kernels), 'compilation')}, at most {registers} registers and "
            f"{shared / 1024:.0f} of {SHARED_BYTES[arch] // 1024} KiB of shared memory"
        )
    unfit = misfits(rows)
    if not unfit:
        return "\n".join([*lines, "Nothing spills, and every kernel fits."])
    return "\n".join([*lines, "These spill or do not fit:", format_table(unfit)])


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
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])
