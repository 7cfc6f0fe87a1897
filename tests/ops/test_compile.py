"""What the compiler makes of the kernels, on machines without a GPU: no spills, 16-byte accesses, every variant builds.

The suite runs with TRITON_INTERPRET set, which turns kernels into Python functions, so they are compiled in one
process of their own without it.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

from sage_fast.measure.compile_report import ARCHITECTURES, SPECIALISATIONS, Row, format_table

PROGRAM = """
import dataclasses, json
from sage_fast.measure.compile_report import SPECIALISATIONS, Specialisation, compile_report

names = ("_transition_step_fwd_kernel", "_transition_score_fwd_kernel", "_transition_score_bwd_kernel")
odd = [
    Specialisation(kernel=name, guidance=True, anchor=True, old=True, numel=numel)
    for name in names
    for numel in ("1", "i64")
]
rows = compile_report() + compile_report(odd, [90])
print(json.dumps([dataclasses.asdict(row) for row in rows]))
"""


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    import json

    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    result = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return [Row(**row) for row in json.loads(result.stdout.splitlines()[-1])]


def test_every_specialisation_compiles_for_every_architecture(rows):
    assert len(rows) == len(SPECIALISATIONS) * len(ARCHITECTURES) + 6
    assert {row.arch for row in rows} == {80, 90, 100}


def test_nothing_spills(rows):
    spilled = [row for row in rows if row.spilled_bytes]
    assert not spilled, "\n" + format_table(spilled)


def test_aligned_samples_move_16_bytes_a_thread(rows):
    streaming = [
        row
        for row in rows
        if "transition" in row.kernel and "unaligned" not in row.specialisation and "1 numel" not in row.specialisation
    ]
    narrow = [row for row in streaming if row.load_bytes < 16]
    # dv has the 16-bit type of v: next to fp32 latents a thread owns 4 elements of it, 8 bytes.
    narrow += [
        row
        for row in streaming
        if row.store_bytes
        < {
            "_transition_step_fwd_kernel": 16,
            "_transition_score_fwd_kernel": 4,
            "_transition_score_bwd_kernel": 16 if "bf16 x" in row.specialisation else 8,
        }[row.kernel]
    ]
    assert not narrow, "\n" + format_table(narrow)


def test_aligned_samples_use_shared_memory_for_the_final_sum_alone(rows):
    """A change of layout between load, noise and store would go through shared memory: one float a warp is the sum."""
    moved = [row for row in rows if row.shared_bytes > 16 and "norm" not in row.kernel]
    moved = [row for row in moved if "unaligned" not in row.specialisation]
    moved = [row for row in moved if "1 numel" not in row.specialisation]
    assert not moved, "\n" + format_table(moved)


def test_registers_leave_room_for_a_third_of_the_threads(rows):
    """80 registers or fewer: 768 of 2048 threads a multiprocessor, 48 bytes or more in flight in each."""
    crowded = [row for row in rows if row.registers > 80 and "unaligned" not in row.specialisation]
    assert not crowded, "\n" + format_table(crowded)


def test_normalisations_move_16_bytes_a_thread(rows):
    narrow = [row for row in rows if "norm" in row.kernel and min(row.load_bytes, row.store_bytes) < 16]
    assert not narrow, "\n" + format_table(narrow)
    assert any("norm_rotate_bwd" in row.kernel for row in rows)
