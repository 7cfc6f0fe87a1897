"""TFLOP/s and GB/s of a profile's operations, from the shapes of their calls."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sage_fast.benchmarks.passes import Traffic
from torch import Tensor
from torch.autograd import DeviceType
from torch.utils._pytree import tree_leaves

from sage_fast.algorithm.rates import format_rates, rate_table
from sage_fast.models.attention.backends import ATTENTION, REFERENCE
from sage_fast.tools.operators import OPERATORS, inputs


def profiled(function: Any) -> dict[str, dict[str, Any]]:
    """Rows of the table, by name, of a call on the CPU."""
    with torch.profiler.profile(record_shapes=True) as profiler:
        function()
    return {row["name"]: row for row in rate_table(profiler.events(), on_gpu=False)}


def call(
    name: str,
    *shapes: list[int],
    micros: float = 0.0,
    parent: Any = None,
    dtype: str = "c10::BFloat16",
) -> SimpleNamespace:
    """An event as the profiler has it of a call that launched kernels."""
    return SimpleNamespace(
        name=name,
        input_shapes=list(shapes),
        input_dtypes=[dtype] * len(shapes),
        concrete_inputs=[None] * len(shapes),
        device_type=DeviceType.CPU,
        device_time_total=micros,
        cpu_time_total=1e6,
        cpu_parent=parent,
    )


def test_matmuls_by_hand() -> None:
    a, b, bias = torch.zeros(300, 400), torch.zeros(400, 500), torch.zeros(500)
    down = torch.zeros(400, 8)
    batch = torch.zeros(2, 300, 400), torch.zeros(2, 400, 256)
    linear = torch.nn.Linear(400, 500)
    x = torch.zeros(3, 100, 400)

    def run() -> None:
        torch.mm(a, b)
        torch.addmm(bias, a, b)
        torch.bmm(*batch)
        with torch.no_grad():
            linear(x)
        torch.mm(a, down)
        torch.mm(a, down, out=torch.empty(300, 8))

    rows = profiled(run)
    wide, narrow = rows["matmuls"], rows["matmuls, a side below 256"]
    assert list(rows) == [wide["name"], narrow["name"]]
    assert (wide["calls"], narrow["calls"]) == (4, 2)
    assert wide["flops"] == 2 * (3 * 300 * 400 * 500 + 2 * 300 * 400 * 256)
    assert wide["bytes"] is None
    assert narrow["flops"] == 2 * 2 * 300 * 400 * 8
    assert narrow["bytes"] == 2 * 4 * (300 * 400 + 400 * 8 + 300 * 8)
    assert wide["seconds"] > 0


def test_attention_by_hand() -> None:
    """Forward 4 B H S^2 D and 2.5 times as much backward; matmuls within a kernel are not counted
    again."""
    query = torch.randn(2, 50, 3, 16, requires_grad=True)
    rows = profiled(lambda: ATTENTION[REFERENCE](query, query, query).sum().backward())
    forward, backward = rows["attention forward"], rows["attention backward"]
    assert list(rows) == [forward["name"], backward["name"]]
    assert forward["flops"] == 4 * 2 * 3 * 50 * 50 * 16
    assert backward["flops"] == 2.5 * forward["flops"]
    assert (forward["calls"], backward["calls"]) == (1, 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (name, shape)
        for name, row in OPERATORS.items()
        for shape in (row.example, *row.more_examples)
    ],
)
def test_bytes_of_our_operators_are_those_of_their_tensors(
    name: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """The benchmark counts the bytes of the tensors themselves, where an operator is called."""
    row = OPERATORS[name]
    arguments = inputs(name, shape, dtype)
    leaves = [arguments[index].requires_grad_() for index in row.trained]

    def run() -> None:
        outputs = tree_leaves(row.function(*arguments))
        trained = [out for out in outputs if isinstance(out, Tensor) and out.requires_grad]
        if trained:
            upstream = [torch.ones_like(out) for out in trained]
            torch.autograd.grad(trained, leaves, upstream, allow_unused=True)

    found = {key: value for key, value in profiled(run).items() if key.startswith(name)}
    with Traffic() as traffic:
        run()
    expected = {key: count for key, count in traffic.bytes.items() if key.startswith(name)}
    assert len(expected) == (2 if leaves else 1)
    assert {key: value["bytes"] for key, value in found.items()} == expected
    assert all(value["flops"] is None and value["seconds"] > 0 for value in found.values())


def test_on_a_gpu_the_time_is_that_of_kernels() -> None:
    """Of calls that contain others of the table, the outer one counts. Kernels themselves, ranges
    and operators without a formula are left out."""
    shape = [1, 16, 1000, 128]  # PyTorch's order: heads, then tokens
    cudnn = call("aten::_scaled_dot_product_cudnn_attention", shape, shape, shape, micros=8e3)
    inner = call("aten::_cudnn_attention_forward", shape, shape, shape, micros=8e3, parent=cudnn)
    product = call("aten::bmm", [16, 1000, 128], [16, 128, 1000], micros=8e3, parent=inner)
    linear = call("aten::linear", [1000, 2048], [2048, 2048], micros=2e3)
    matmul = call("aten::addmm", [2048], [1000, 2048], [2048, 2048], micros=2e3, parent=linear)
    kernel = call("nvjet_tst", micros=2e3)
    kernel.device_type = DeviceType.CUDA
    others = [call("aten::cat", [1000, 2048], micros=1e3), call("attention", micros=8e3)]
    rows = rate_table([cudnn, inner, product, linear, matmul, kernel, *others], on_gpu=True)
    flops = 4.0 * 16 * 1000 * 1000 * 128
    assert rows == [
        {
            "name": "attention forward", "calls": 1, "seconds": 8e-3, "flops": flops, "bytes": None,
        },
        {
            "name": "matmuls", "calls": 1, "seconds": 2e-3, "flops": 2.0 * 1000 * 2048 * 2048,
            "bytes": None,
        },
    ]  # fmt: skip
    assert format_rates(rows, on_gpu=True) == [
        "GPU seconds      calls    TFLOP/s       GB/s  operation, by the shapes of its calls",
        "     0.0080          1      1.024             attention forward",
        "     0.0020          1      4.194             matmuls",
    ]


@pytest.mark.parametrize(
    ("name", "order", "row"),
    [
        ("flash_attn::_flash_attn_forward", "qkk", "attention forward"),
        ("flash_attn::_flash_attn_backward", "qqkkq", "attention backward"),
        ("flash_attn_3::bwd", "qqkkq", "attention backward"),
        ("sage_fast_flash4::attention", "qkk", "attention forward"),
        ("sage_fast_flash4::attention_backward", "qkkqq", "attention backward"),
        ("aten::_scaled_dot_product_cudnn_attention_backward", "qqkkq", "attention backward"),
    ],
)
def test_attention_to_another_sequence(name: str, order: str, row: str) -> None:
    """By each kernel's order of arguments and layout: q has 1000 tokens, k 77."""
    heads_first = "scaled_dot_product" in name
    lengths = {"q": 1000, "k": 77}
    shapes = []
    for kind in order:
        tokens = lengths[kind]
        shapes.append([2, 16, tokens, 128] if heads_first else [2, tokens, 16, 128])
    (found,) = rate_table([call(name, *shapes, [2, 16, 1000])], on_gpu=True)
    assert found["name"] == row
    share = 2.5 if "backward" in row else 1.0
    assert found["flops"] == share * 4 * 2 * 16 * 1000 * 77 * 128


def test_a_call_that_took_no_time_has_no_rate() -> None:
    rows = rate_table([call("aten::mm", [300, 300], [300, 300])], on_gpu=True)
    assert (
        format_rates(rows, on_gpu=True)[1]
        == "     0.0000          1                        matmuls"
    )
