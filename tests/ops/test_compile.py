"""What the compiler makes of the kernels, on machines without a GPU: no spills, 16-byte accesses,
every variant builds.

The suite runs with TRITON_INTERPRET set, which turns kernels into Python functions, so they are
compiled in one process of their own without it.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from sage_fast.benchmarks.compile_report import (
    ARCHITECTURES,
    HEADS_TOGETHER,
    RANKS,
    SHARED_BYTES,
    SPECIALISATIONS,
    WIDER,
    CompiledKernel,
    Specialisation,
    format_table,
    misfits,
)
from sage_fast.kernels.adapter_rows import MAX_RANK, adapter_rows_backward, options, rank_block
from sage_fast.kernels.common import _reduce_kernel

from sage_fast.algorithm.resolved import ResolvedConfig
from sage_fast.models.load import load_model
from sage_fast.rewards import CompositeReward
from sage_fast.testbed.world import train_prompts
from sage_fast.trainer import Trainer
from tests.tiny import CPU, BrightnessReward, embeddings, keys_of, settings

SHIPPED: tuple[int, ...] = ARCHITECTURES if "SAGE_FAST_SOAK" in os.environ else (90,)
"""Architectures that all specialisations are compiled for. Another takes a minute, which `make
soak` has: elsewhere it gets the largest of each kernel."""
OTHERS = tuple(arch for arch in ARCHITECTURES if arch not in SHIPPED)

PROGRAM = """
import dataclasses, json, sys
from sage_fast.benchmarks.compile_report import SPECIALISATIONS, Specialisation, compile_report
from sage_fast.models.lora.linear import padding_for

names = (
    "_transition_step_fwd_kernel", "_transition_score_fwd_kernel", "_transition_score_bwd_kernel"
)
odd = [
    Specialisation(
        kernel=name, guidance=True, anchor=True, old=True, beta="fwd" in name, numel=numel
    )
    for name in names
    for numel in ("1", "i64")
]
of_rank_8 = [
    Specialisation(kernel=kernel, x="bf16", residual="bwd" in kernel, gated=gated, pad=pad)
    for kernel, gated in (
        ("_norm_modulate_fwd_kernel", False),
        ("_gated_norm_fwd_kernel", False),
        ("_norm_modulate_bwd_kernel", False),
        ("_norm_modulate_bwd_kernel", True),
    )
    for pad in (8, 24, padding_for(8, 2))
]
odd_ranks = [
    Specialisation(kernel="_adapter_rows_fwd_kernel", x=x, gelu=True, rank=rank)
    for x, rank in (("bf16", 100), ("bf16", 200), ("fp32", 250))
]
of_rank_64 = [s for s in SPECIALISATIONS if "adapter" in s.kernel and (s.x, s.rank) == ("bf16", 64)]
last_of_each = {(s.kernel, s.heads): s for s in SPECIALISATIONS}
largest = [s for s in SPECIALISATIONS if "adapter" in s.kernel and s.rank == 256]
largest += [s for s in last_of_each.values() if "adapter" not in s.kernel]
architectures, others = map(json.loads, sys.argv[1:])
rows = {
    "shipped": compile_report(architectures=architectures) + compile_report(odd, [90]),
    "largest": compile_report(largest + of_rank_64, others),
    "odd ranks": compile_report(odd_ranks, architectures),
    "rank 8": compile_report(of_rank_8, [90]),
}
print(json.dumps(
    {name: [dataclasses.asdict(row) for row in found] for name, found in rows.items()}
))
"""


FORGETFUL = """
import sys
from pathlib import Path
from sage_fast.benchmarks.compile_report import Specialisation, compile_report
from sage_fast.kernels import norm_modulate, transition_step

modules = {"transition_step": transition_step, "norm_modulate": norm_modulate}
module, kernel = modules[sys.argv[1]], sys.argv[2]
source = Path(module.__file__).read_text()
assert source.count(": tl.constexpr,\\n):") > 0
changed = Path(sys.argv[3]) / "changed.py"
changed.write_text(
    source.replace(": tl.constexpr,\\n):", ": tl.constexpr,\\n    NEW: tl.constexpr,\\n):")
)
exec(compile(changed.read_text(), changed, "exec"), vars(module))
compile_report([Specialisation(kernel=kernel)], [90])
"""


COMPENSATED = """
import re
from sage_fast.benchmarks import compile_report as report

rows = [
    s for s in report.SPECIALISATIONS
    if "adapter_rows_fwd" in s.kernel and s.x == "fp32" and s.rank == 64
]
kernels = [s for s in rows if not s.gelu]
for ptx in (report._compile(s, arch).asm["ptx"] for s in kernels for arch in report.ARCHITECTURES):
    found = {name: re.findall(rf"\\b{name}\\.rn\\.f32(x2)?\\b", ptx) for name in ("add", "sub")}
    print(*(sum(1 + bool(pair) for pair in pairs) for pairs in found.values()))
"""


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def compiled() -> dict[str, list[CompiledKernel]]:
    result = run(PROGRAM, json.dumps(SHIPPED), json.dumps(OTHERS))
    assert result.returncode == 0, result.stderr
    return {
        name: [CompiledKernel(**row) for row in rows]
        for name, rows in json.loads(result.stdout.splitlines()[-1]).items()
    }


@pytest.fixture(scope="module")
def rows(compiled) -> list[CompiledKernel]:
    return compiled["shipped"]


def test_every_specialisation_compiles_for_every_architecture(rows):
    assert len(rows) == len(SPECIALISATIONS) * len(SHIPPED) + 6
    assert {row.arch for row in rows} == {*SHIPPED}


def test_every_kernel_compiles_for_every_architecture(compiled):
    """A100, RTX 30, RTX 40, H100, B200 and RTX 50."""
    assert ARCHITECTURES == (80, 86, 89, 90, 100, 120)
    found = {(row.kernel, row.arch) for rows in compiled.values() for row in rows}
    kernels = {specialisation.kernel for specialisation in SPECIALISATIONS}
    assert found == {*itertools.product(kernels, ARCHITECTURES)}


@pytest.mark.parametrize("operator", ["transition_step", "norm_modulate"])
def test_a_flag_that_the_report_does_not_know_is_an_error(operator: str, tmp_path: Path) -> None:
    """It would be compiled as an argument at run time, and the row would be of another kernel."""
    result = run(FORGETFUL, operator, f"_{operator}_fwd_kernel", str(tmp_path))
    assert result.returncode == 1
    assert f"_{operator}_fwd_kernel: NEW" in result.stderr.splitlines()[-1]


def test_the_compiler_keeps_the_compensation_of_a_float32_sum() -> None:
    """An addition and three subtractions for each of a thread's 4 sums of 16 products, each rounded
    on its own."""
    result = run(COMPENSATED)
    assert result.stdout.splitlines() == ["4 12"] * 2 * len(ARCHITECTURES), (
        result.stdout + result.stderr
    )


def test_nothing_spills_and_everything_fits_in_shared_memory(compiled):
    """Adapters of every rank that the kernels take: a padded rank is a power of two."""
    assert {*map(rank_block, range(MAX_RANK + 1))} == {*RANKS}
    assert len(compiled["odd ranks"]) == 3 * len(SHIPPED)
    assert {SHARED_BYTES[arch] for arch in (86, 89, 120)} == {99 * 1024}
    unfit = misfits(itertools.chain.from_iterable(compiled.values()))
    assert not unfit, "\n" + format_table(unfit)


def test_aligned_samples_move_16_bytes_a_thread(rows):
    streaming = [
        row
        for row in rows
        if "transition" in row.kernel
        and "unaligned" not in row.specialisation
        and "1 numel" not in row.specialisation
    ]
    narrow = [row for row in streaming if row.loads[0] < 16]
    # dv has the 16-bit type of v: next to fp32 latents a thread owns 4 elements of it, 8 bytes.
    narrow += [
        row
        for row in streaming
        if row.stores[0]
        < {
            "_transition_step_fwd_kernel": 16,
            "_transition_score_fwd_kernel": 4,
            "_transition_score_bwd_kernel": 16 if "bf16 x" in row.specialisation else 8,
        }[row.kernel]
    ]
    assert not narrow, "\n" + format_table(narrow)


def test_rows_of_an_adapter_are_loaded_ahead(rows):
    """In 16 bits no load waits in registers, but for a gated row's: the others are copies into
    shared memory."""
    adapters = [row for row in rows if "adapter" in row.kernel and "bf16" in row.specialisation]
    assert len(adapters) == 4 * len(RANKS) * len(SHIPPED)
    waiting = [
        row
        for row in adapters
        if {*row.loads, *row.stores} != {16} and "rank 16" not in row.specialisation
    ]
    waiting += [row for row in adapters if row.loads and "gated" not in row.specialisation]
    assert not waiting, "\n" + format_table(waiting)


def test_gelu_is_evaluated_once_an_element(rows):
    """An exponential and a reciprocal, forward and backward, however many layouts need it."""
    adapters = [row for row in rows if "adapter" in row.kernel and "bf16" in row.specialisation]
    assert len(adapters) == 4 * len(RANKS) * len(SHIPPED)
    for row in adapters:
        once = 2 if "GELU" in row.specialisation or "bwd" in row.kernel else 0
        assert row.special == once, "\n" + format_table([row])
        assert row.asynchronous >= (2 if "gated" in row.specialisation else 4), "\n" + format_table(
            [row]
        )


def test_aligned_samples_use_shared_memory_for_the_final_sum_alone(rows):
    """A change of layout between load, noise and store would go through shared memory: one float a
    warp is the sum."""
    moved = [row for row in rows if row.shared_bytes > 16 and "transition" in row.kernel]
    moved = [row for row in moved if "unaligned" not in row.specialisation]
    moved = [row for row in moved if "1 numel" not in row.specialisation]
    assert not moved, "\n" + format_table(moved)


def test_registers_leave_room_for_a_third_of_the_threads(rows):
    """80 registers or fewer: 768 of 2048 threads a multiprocessor, 48 bytes or more in flight in
    each.

    The kernels of an adapter's rows hold sums of 32 or 64 x 64, and load ahead into shared memory.
    A row of Wan 2.2 TI2V has twice the values a thread: it fits, and leaves less room.
    """
    crowded = [row for row in rows if row.registers > 80 and "unaligned" not in row.specialisation]
    crowded = [row for row in crowded if "adapter" not in row.kernel]
    crowded = [row for row in crowded if f"d {WIDER}" not in row.specialisation]
    assert not crowded, "\n" + format_table(crowded)


def test_normalisations_move_16_bytes_a_thread(rows):
    """All that LayerNorm reads and writes; rotation reads a table and weights beside, the decoder's
    norm weights."""
    norms = [row for row in rows if "norm" in row.kernel]
    narrow = [row for row in norms if min(row.loads[0], row.stores[0]) < 16]
    layer_norms = [row for row in norms if "rotate" not in row.kernel and "silu" not in row.kernel]
    narrow += [row for row in layer_norms if {*row.loads, *row.stores} != {16}]
    assert not narrow, "\n" + format_table(narrow)
    assert any("norm_rotate_bwd" in row.kernel for row in rows)


def test_rotation_reads_its_table_in_pairs(rows):
    """Cosines and sines lie side by side; loaded apart, they would be 16 loads of 4 bytes a
    thread."""
    found = [row for row in rows if "rotate" in row.kernel]
    apart = [row for row in found if sum(width < 16 for width in row.loads) > 6]
    assert found
    assert not apart, "\n" + format_table(apart)


def test_an_adapter_of_rank_8_costs_no_vector(compiled):
    """With the padding that it gets.

    Rows padded for just one or three, 2056 and 2072 wide, are moved in pieces.
    """
    rows = compiled["rank 8"]
    assert len(rows) == 4 * 3
    padded = [row for row in rows if row.specialisation.endswith("padding 64")]
    assert len(padded) == 4
    narrow = [row for row in padded if {*row.loads, *row.stores} != {16}]
    assert not narrow, "\n" + format_table(narrow)
    for row in rows:
        if row not in padded:
            assert min(row.loads[-1], row.stores[-1]) == 2, "\n" + format_table([row])


# -- the rows are those of a run -------------------------------------------------------------------


class Launches(TorchDispatchMode):
    """Record the kernels that Triton's launchers would start; the operators that are installed
    compute the results."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.found: set[Specialisation] = set()

        def launch(kernel: Any, *args: Any, **flags: Any) -> None:
            self.found.add(
                specialisation(kernel.fn.__name__, dict(zip(kernel.arg_names, args)) | flags)
            )

        monkeypatch.setattr(type(_reduce_kernel), "run", launch)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "sage_fast":
            name = func.name().removeprefix("sage_fast::")
            module = importlib.import_module(f"sage_fast.kernels.{name.removesuffix('_backward')}")
            getattr(module, name)(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def specialisation(kernel: str, given: Mapping[str, Any]) -> Specialisation:
    """Return the row of a launch with these arguments; sizes are those of the report."""
    types = {torch.float32: "fp32", torch.bfloat16: "bf16"}
    x, v, weights = (
        next((types[given[name].dtype] for name in names if name in given), default)
        for names, default in (
            (("x_ptr", "joint_ptr", "grad_ptr"), "fp32"),
            (("v_ptr",), "bf16"),
            (("video_weight_ptr", "video_query_ptr"), None),
        )
    )
    present = {
        name: isinstance(given.get(f"{name}_ptr"), Tensor)
        for name in ("v_uncond", "v_anchor", "v_old")
    }
    all_heads = given.get("ALL_HEADS", False)
    return Specialisation(
        kernel=kernel, x=x, v=v, all_heads=all_heads,
        heads=HEADS_TOGETHER[-1] if all_heads else 16,
        guidance=present["v_uncond"], anchor=present["v_anchor"], old=present["v_old"],
        beta=given.get("HAS_BETA", False), one_step=given.get("STEP_STRIDE") == 0,
        outputs=given.get("OUTPUTS", 0),
        weights=None if weights == x else weights, part=given.get("PART", 0),
        sums=given.get("MODULATION", given.get("WEIGHTS", False)), residual=given.get("RESIDUAL",
            False),
        gated=given.get("GATED", False), gelu=given.get("GELU", False), rank=given.get("RANK", 64),
    )  # fmt: skip


@pytest.mark.parametrize("x", ["bf16", "fp32"])
@pytest.mark.parametrize("ranks", [(200, 200), (256, 16), (16, 256), (129, 40), (0, 1)], ids=str)
def test_the_backward_of_any_two_adapters_is_listed(
    x: str, ranks: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With whole vectors of 16 values in the rows of both."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(
        type(_reduce_kernel),
        "run",
        lambda kernel, *args, **flags: given.update(zip(kernel.arg_names, args), **flags),
    )
    rows = torch.zeros(3, 32, dtype={"bf16": torch.bfloat16, "fp32": torch.float32}[x])
    inner, up = (torch.zeros(3, max(rank, 16), dtype=rows.dtype)[:, :rank] for rank in ranks)
    sums = adapter_rows_backward(rows.clone(), inner, rows, up)
    assert [list(part.shape) for part in sums] == [[ranks[0], 32], [32, ranks[1]]]
    assert all(part.is_contiguous() for part in sums)
    assert not [
        name for name, value in given.items() if name.endswith(("rank", "stride")) and value % 16
    ]
    listed = Specialisation(kernel="_adapter_rows_bwd_kernel", x=x, rank=given["RANK"])
    assert listed in SPECIALISATIONS
    assert listed.rank >= max(ranks)
    tile = options(rows.itemsize, listed.rank, "backward")
    assert {name: given[name] for name in tile} == tile


NFT = {"objective__surrogate": "nft", "kl__strategy": "none", "sampling__sampler": "ode",
       "sampling__averaged_weights": True, "train__ema_decay": 0.7}  # fmt: skip


@pytest.mark.parametrize(
    ("tuning", "method"),
    [("full", {}), ("full", NFT), ("lora", {}), ("lora", {"sampling__guidance_scale": 6.0})],
    ids=["full", "full, nft", "lora", "lora, guidance"],
)
def test_what_an_iteration_launches_is_listed(
    tuning: str, method: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(
        model__tuning=tuning, model__dtype="bfloat16", sampling__num_frames=5, sampling__steps=2,
        train__prompts_per_iteration=1, train__group_size=2, train__parity_gate=False, **method,
    )  # fmt: skip
    model = load_model(config.model, config.sampling, CPU, seed=0)
    prompts, reward = keys_of(train_prompts()), CompositeReward(BrightnessReward(), config.reward)
    trainer = Trainer(
        ResolvedConfig(config), model, reward, prompts, embeddings(prompts, torch.bfloat16)
    )
    with Launches(monkeypatch) as launches:
        assert trainer.iteration(0)["grad_norm"] > 0
    assert {"_norm_rotate_bwd_kernel", "_norm_modulate_bwd_kernel"} <= {
        launch.kernel for launch in launches.found
    }
    unlisted = launches.found - {*SPECIALISATIONS}
    assert not unlisted, "\n".join(f"{launch.kernel}: {launch}" for launch in unlisted)
