"""The benchmark runs end to end at a tiny size, refuses to time wrong results, and says which rows
it lacks."""

import dataclasses
import functools
import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers.models import attention_dispatch
from diffusers.models.transformers import transformer_hunyuan_video15
from sage_fast.benchmarks import compile_report, limits, timing
from sage_fast.benchmarks import operators as bench
from sage_fast.benchmarks import rollout as rollout_bench
from sage_fast.benchmarks import rung as rung_module
from sage_fast.benchmarks import stock as stock_module
from sage_fast.benchmarks.rung import PARTS, Rung, random_decoders, random_transformer
from sage_fast.benchmarks.rung import SIZES as RUNGS
from sage_fast.benchmarks.stock import FLASH3, FLASH4, MERGED, STOCK, StockPolicy, load_kernel
from sage_fast.benchmarks.timing import fresh_compilation
from torch import Tensor
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sage_fast.cli import main
from sage_fast.config.loader import dump
from sage_fast.config.schema import ModelConfig
from sage_fast.models.attention.backends import ATTENTION, REFERENCE
from sage_fast.models.checkpointing import MODES
from sage_fast.models.cost import Activations
from sage_fast.models.hunyuan15.conditioning import TextEmbedding
from sage_fast.models.hunyuan15.policy import HunyuanVideo15Policy
from sage_fast.models.lora.linear import FusedLinear
from sage_fast.ops._dispatch import REFERENCES
from sage_fast.tools.operators import OPERATORS
from tests.pretend_cuda import PretendCuda
from tests.tiny import settings
from tests.waits import wait_until

CPU = torch.device("cpu")
STEP_OF_CASE = 5


@pytest.fixture
def dynamo_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use torch.compile without Inductor, which takes seconds per graph; the same graphs are
    compiled as often."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))


@pytest.fixture
def inductor_in_soak(request: pytest.FixtureRequest) -> None:
    """Use Inductor in `make soak` alone: in `make test-all`, test_rollout_benchmark does."""
    if "SAGE_FAST_SOAK" not in os.environ:
        request.getfixturevalue("dynamo_only")


@pytest.mark.usefixtures("inductor_in_soak")
def test_bench_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--size", "tiny", "--size", "tiny tokens", "--size", "tiny pixels"]
    json_file = tmp_path / "json" / "b.json"
    assert main(["bench", *sizes, "--repetitions", "2", "--json", str(json_file)]) == 0
    out = capsys.readouterr().out
    assert all(operator in out for operator in OPERATORS)
    result = json.loads(json_file.read_text())
    assert f"fused = {result['environment']['operators']}" in out, (
        "the reference must not pass for a fused operator"
    )
    for row, share in zip(result["rows"], itertools.chain((0.5, 1.5), itertools.repeat(0.5))):
        row["seconds"]["copy"]["p50"] = share * row["seconds"]["fused"]["p50"]
    assert "Above 100% a copy is no limit" in bench.format_result(result)
    result["rows"][1]["seconds"]["copy"]["p50"] = 0.0
    assert "Above 100% a copy is no limit" not in bench.format_result(result)
    result = json.loads(json_file.read_text())
    assert {"commit", "date", "device", "threads", "operators", "torch"} <= result[
        "environment"
    ].keys()
    assert [row["operator"] for row in result["rows"]] == [*OPERATORS]
    for row in result["rows"]:
        assert set(row["seconds"]) == {"fused", "eager", "compiled", "copy"}
        assert all(
            times["p20"] <= times["p50"] <= times["p80"] for times in row["seconds"].values()
        )
        fused = row["seconds"]["fused"]
        assert f"{1e3 * fused['p20']:.3f} to {1e3 * fused['p80']:.3f}" in out


def test_compile_writes_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = compile_report.CompiledKernel(
        kernel="k", specialisation="s", arch=90, registers=8, spilled_bytes=0, shared_bytes=0,
        loads=[16], stores=[4],
        special=2.0, asynchronous=8,
    )  # fmt: skip
    monkeypatch.setattr(compile_report, "compile_report", lambda: [row])
    assert main(["bench", "--compile", "--json", str(tmp_path / "c.json")]) == 0
    assert json.loads((tmp_path / "c.json").read_text()) == {"rows": [dataclasses.asdict(row)]}
    assert "sm_90: 1 compilation, at most 8 registers and 0 of 227 KiB" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arch", "spilled", "shared", "fits"),
    [
        (90, 0, 100 * 1024, True),
        (86, 0, 99 * 1024, True),
        (86, 0, 99 * 1024 + 16, False),
        (120, 0, 100 * 1024, False),
        (90, 8, 0, False),
    ],
)
def test_the_summary_names_kernels_that_do_not_fit(
    arch: int, spilled: int, shared: int, fits: bool
) -> None:
    row = compile_report.CompiledKernel(
        kernel="k", specialisation="s", arch=arch, registers=8, spilled_bytes=spilled,
        shared_bytes=shared, loads=[16], stores=[4], special=2.0, asynchronous=8,
    )  # fmt: skip
    summary = compile_report.format_summary([row])
    assert ("every kernel fits" in summary) == fits
    assert ("| k " in summary) != fits


@pytest.mark.soak
def test_bench_runs_the_triton_kernels_in_the_interpreter() -> None:
    """Run the gate and the timing of the GPU path end to end, without a GPU."""
    done = subprocess.run(
        [sys.executable, "-m", "sage_fast", "bench", "--size", "tiny", "--repetitions", "1"],
        env=os.environ | {"TRITON_INTERPRET": "1", "SAGE_FAST_OPS": "triton"},
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Triton interpreter" in done.stdout


def tiny(operator: str, device: torch.device = CPU) -> bench.Case:
    return bench.case_of(operator, next(iter(bench.sizes_of(operator).values())), device)


@pytest.mark.parametrize("operator", OPERATORS)
def test_wrong_results_are_not_timed(operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither those of the operator, nor of its backward, where it is timed."""
    backward = {f"{operator}_backward"} if OPERATORS[operator].trained else set()
    for wrong in {operator} | backward:

        def other(*arguments: Any, right: Callable[..., Any] = REFERENCES[wrong]) -> Any:
            out = right(*arguments)
            changed = arguments[-1] if out is None else tree_leaves(out)[0]
            changed.data[(-1,) * changed.ndim] += 0.5
            return out

        monkeypatch.setitem(REFERENCES, wrong, other)
        with pytest.raises(AssertionError, match=rf"^{operator}: {wrong}\.0: error"):
            bench.measure(operator, next(iter(bench.sizes_of(operator).values())), CPU, 1)
        monkeypatch.undo()


def test_the_code_of_the_field_that_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = bench.eager_log_prob
    monkeypatch.setattr(bench, "eager_log_prob", lambda *arguments: right(*arguments) + 0.01)
    with pytest.raises(AssertionError):
        bench.measure("transition_score", bench.SIZES["tiny"], CPU, 1)


def test_unknown_size(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--size", "480p batch 40"]) == 2
    assert "did you mean '480p batch 4'" in capsys.readouterr().err


class OneDevice(TorchDispatchMode):
    """Checks what a capture requires: no operator sees two devices, and nothing is copied from one
    to another."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        devices = {
            leaf.device
            for leaf in tree_leaves((args, kwargs, out))
            if isinstance(leaf, torch.Tensor)
        }
        assert len(devices) <= 1, f"{func} on {sorted(map(str, devices))}"
        return out


@pytest.mark.parametrize("operator", OPERATORS)
def test_nothing_is_copied_to_the_device_while_a_contender_runs(operator: str) -> None:
    """The meta device stands in for a GPU, since it too differs from the host's."""
    case = tiny(operator, torch.device("meta"))
    for name, (contender, own) in bench.contenders(operator, case, compiled=False).items():
        with OneDevice():
            outs = tree_leaves(contender(*own))
        # `norm_silu` writes to its last argument
        outs = [own[-1] if out is None else out for out in outs]
        assert outs, name
        assert all(out.dtype != torch.float64 for out in outs), f"{name} computes in float64"


@pytest.mark.usefixtures("inductor_in_soak")
@pytest.mark.parametrize("operator", OPERATORS)
def test_each_contender_reads_inputs_of_its_own(
    operator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rotations: list[list[bench.Case]] = []
    timer = bench._timer
    monkeypatch.setattr(
        bench, "_timer", lambda *arguments: rotations.append(arguments[2]) or timer(*arguments)
    )
    bench.measure(operator, next(iter(bench.sizes_of(operator).values())), CPU, 1)
    addresses = [case[0].data_ptr() for rotation in rotations for case in rotation]
    assert len(rotations) == 4
    assert len(set(addresses)) == len(addresses)


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_rotation_is_larger_than_the_cache(operator: str) -> None:
    for name, size in bench.sizes_of(operator).items():
        if name not in ("tiny", "tiny tokens", "tiny pixels", "testbed batch 32"):
            rotation = bench.rotation(bench.case_of(operator, size, torch.device("meta")))
            tensors = [value for case in rotation for value in case if isinstance(value, Tensor)]
            assert (
                sum(tensor.nbytes for tensor in tensors) >= bench.ROTATION_BYTES >= 2 * 126 * 2**20
            )


def test_on_a_gpu_one_launch_times_the_whole_rotation() -> None:
    """With one launch per case, the launch would take longer than a kernel of microseconds."""
    with PretendCuda() as device:
        cases = [tiny("transition_step", torch.device("cuda")) for _ in range(5)]
        made: list[weakref.ref[Tensor]] = []
        alive: list[int] = []

        def count(*case: Any) -> Tensor:
            alive.append(sum(out() is not None for out in made))
            case[STEP_OF_CASE].add_(1)
            out = case[0] + 1
            made.append(weakref.ref(out))
            return out

        timer = bench._timer(torch.device("cuda"), count, cases)
        # otherwise each would reuse the last one's memory, in the cache
        assert alive[-5:] == [0, 1, 2, 3, 4]
        steps = [int(case[STEP_OF_CASE]) for case in cases]
        assert timer() == pytest.approx(1e-3 / 5)  # a millisecond lies between any two events
        assert [int(case[STEP_OF_CASE]) for case in cases] == [step + 1 for step in steps]
        assert device.captures == 1


@pytest.mark.usefixtures("dynamo_only")
def test_a_compiled_operator_never_falls_back_to_eager() -> None:
    """Each size gets all of Dynamo's cache; if that is too small, an error is raised."""
    with torch._dynamo.config.patch(recompile_limit=1):
        for shape in ((2, 4, 3, 6, 5), (3, 4, 3, 6, 5)):
            bench.measure("transition_step", shape, CPU, 1)
        with fresh_compilation():
            case = bench.case_of("transition_step", (2, 4, 3, 6, 5), CPU)
            compiled, _ = bench.contenders("transition_step", case, compiled=True)["compiled"]
            with pytest.raises(FailOnRecompileLimitHit):
                compiled(*bench.case_of("transition_step", (2, 4, 3, 7, 5), CPU))


@pytest.mark.soak
@pytest.mark.usefixtures("dynamo_only")
def test_compiled_blocks_never_fall_back_to_eager() -> None:
    """Each part has a cache for both attentions: without gradients, of the first block with them,
    and of the others."""
    paths = ["stock compiled", "tuned compiled"]
    compiled: dict[str, Any] = {"names": ["tiny", "testbed batch 1"], "rounds": 1, "paths": paths}
    with torch._dynamo.config.patch(recompile_limit=6):
        result = rollout_bench.run(**compiled)
    parts = ["forward", "step", "rollout", "train full", "train none"]
    assert [row["part"] for row in result["rows"]] == parts * 2
    assert all({*compiled["paths"]} == set(row["seconds"]) for row in result["rows"])
    with torch._dynamo.config.patch(recompile_limit=1):
        result = rollout_bench.run(**compiled | {"names": ["tiny"]})
    failed = [row["failed"] for row in result["rows"]]
    assert all(row["tuned compiled"].startswith("FailOnRecompileLimitHit") for row in failed)


@pytest.mark.usefixtures("dynamo_only")
def test_contenders_share_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock paths and ours take turns without joining the weights again, which would copy all of
    them."""
    joined: list[FusedLinear] = []
    join = FusedLinear._join
    monkeypatch.setattr(
        FusedLinear, "_join", lambda self, *a: joined.append(self) or join(self, *a)
    )
    rung = Rung(random_transformer(True, CPU, torch.float32), RUNGS["tiny"])
    first = len(joined)
    assert 0 < first == len(set(map(id, joined)))
    assert rung.check("forward") == {}
    for part in ("forward", "train full"):
        rollout_bench.measure(rung.contenders(part), CPU, 2)
    assert len(joined) == first


class MatmulDtypes(TorchDispatchMode):
    """Collects the dtypes that matrix products return."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm):
            self.found.add(out.dtype)
        return out


def test_stock_computes_its_adapter_in_the_dtype_of_the_model() -> None:
    """PEFT would compute a float32 adapter in float32, which no trainer does and which takes a GPU
    longer."""
    transformer = random_transformer(True, CPU, torch.bfloat16)
    rung = Rung(transformer, RUNGS["tiny"])
    for part in ("forward", "train none"):
        for path, run in rung.contenders(part, ["stock", "tuned"]).items():
            with MatmulDtypes() as matmuls:
                run()
            assert matmuls.found == {torch.bfloat16}, (part, path)
    assert {p.dtype for p in transformer.parameters() if p.requires_grad} == {torch.float32}
    frozen = zip(transformer.parameters(), rung.stock.parameters())
    assert all(ours is stock for ours, stock in frozen if not ours.requires_grad)
    # A trainer's stock keeps float32 weights, and autocasts.
    policy = StockPolicy(transformer, dtype=torch.bfloat16)
    with MatmulDtypes() as matmuls:
        policy.guided_velocity(rung.x, rung.schedule(policy).at(rung.step)).float().sum().backward()
    assert matmuls.found == {torch.bfloat16}


def test_weights_keep_their_layout_once_stock_can_be_compiled() -> None:
    """Compiled code asserts the strides of its weights."""
    rung = Rung(random_transformer(True, CPU, torch.bfloat16), RUNGS["tiny"])
    before = [(p.data_ptr(), p.stride()) for p in rung.stock.parameters()]
    assert rung.check("forward", ["stock", "tuned", "eager"]) == {}
    assert [(p.data_ptr(), p.stride()) for p in rung.stock.parameters()] == before


@pytest.mark.usefixtures("dynamo_only")
def test_results_are_written_after_every_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "operators.json"
    measure = bench.measure

    def stopped_in_the_second_row(operator: str, *arguments: Any) -> Any:
        if operator == "transition_score":
            assert len(json.loads(file.read_text())["rows"]) == 1
            raise KeyboardInterrupt
        return measure(operator, *arguments)

    monkeypatch.setattr(bench, "measure", stopped_in_the_second_row)
    assert main(["bench", "--size", "tiny", "--repetitions", "1", "--json", str(file)]) == 130
    assert [row["operator"] for row in json.loads(file.read_text())["rows"]] == ["transition_step"]
    assert [path.name for path in tmp_path.iterdir()] == ["operators.json"]


@pytest.mark.parametrize("operator", OPERATORS)
def test_copy_moves_the_bytes_of_the_operator(operator: str) -> None:
    """As counted by hand, and copied: the transitions' per element of the latents, the others' in
    tensors of x."""
    case = tiny(operator)
    copied, own = bench.contenders(operator, case, compiled=False)["copy"]
    moved = {
        "transition_step": 10,
        "transition_score": 26,
        "gated_norm": 36,
        "norm_modulate": 20,
        "norm_rotate": 16,
    }
    moved |= {"adapter_rows": 8, "gated_sum": 20, "norm_silu": 8}
    assert (
        2 * copied(*own).nbytes
        == bench.bytes_moved(operator, case)
        == moved[operator] * case[0].numel()
    )


def test_rollout_benchmark(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Run every path at a tiny size, gate included; `make soak` compiles blocks too."""
    file, compiles = tmp_path / "rollout.json", "SAGE_FAST_SOAK" in os.environ
    parts = [*PARTS] if compiles else ["forward", "decode"]
    chosen = [f"--part={part}" for part in parts]
    if not compiles:
        chosen += [
            f"--path={path}" for path in ("stock", "eager", "tuned", "contiguous", "channels last")
        ]
    assert (
        main(
            [
                "bench",
                "rollout",
                "--size",
                "tiny",
                "--repetitions",
                "1",
                "--json",
                str(file),
                *chosen,
            ]
        )
        == 0
    )
    out = capsys.readouterr().out
    rows = json.loads(file.read_text())["rows"]
    assert [row["part"] for row in rows] == parts
    for row in rows:
        paths = {"stock", "tuned", "eager", "contiguous", "channels last"} & {*PARTS[row["part"]]}
        if compiles:
            paths |= {"tuned compiled", *MERGED} & {*PARTS[row["part"]]}
        assert paths <= set(row["seconds"])
        assert all(seconds > 0 for seconds in row["seconds"].values())
        assert 0 < row["model_flops"] <= row["flops"]
        assert row["part"] in out
    assert "stock: diffusers as it comes, with\nmasked attention" in out


@pytest.mark.usefixtures("dynamo_only")
def test_tiny_has_a_trained_step_of_each_mode_and_the_baselines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`bench rollout --tiny`: on a CPU PyTorch's attention stands in for diffusers' kernels."""
    file = tmp_path / "rollout.json"
    flash = ["tuned flash4 compiled", "stock flash3 compiled"]
    paths = ["stock", "eager", *flash, *(f"{path} merged" for path in flash)]
    command = ["bench", "rollout", "--tiny", "--part", "forward", "--part", "train"]
    assert main([*command, "--json", str(file), *(f"--path={path}" for path in paths)]) == 0
    result = json.loads(file.read_text())
    rows = {row["part"]: row for row in result["rows"]}
    assert {part: {*row["seconds"]} for part, row in rows.items()} == {
        "forward": {*paths},
        "train full": {"stock", "eager", *flash},
        "train attention": {"eager"},
        "train auto": {"eager"},
        "train none": {"stock", "eager", *flash},
    }
    full, attention, auto, none = (
        rows[f"train {mode}"] for mode in ("full", "attention", "auto", "none")
    )
    assert full["flops"] > attention["flops"] > none["flops"] > none["model_flops"]
    assert full["recomputed"] == "full"
    assert auto["recomputed"] in MODES
    out = capsys.readouterr().out
    assert "recomputed by train auto at tiny: " in out
    assert "PyTorch's attention stands in for the kernels of stock flash3 compiled, tuned" in out


def test_auto_recomputes_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """In as many blocks as the free memory asks for; FLOPs are between those of two modes."""
    rung = Rung(random_transformer(True, CPU, torch.float32), RUNGS["testbed batch 1"])
    assert str(rung.checkpointing("train auto")) == "none"
    rung.plans.clear()
    blocks = len(rung.transformer.transformer_blocks)
    model = ModelConfig(dtype="float32", lora_rank=16)
    needed = Activations(rung_module.spec_of(True), model, rung.shape)
    some, least = needed["none"], needed["attention"]
    free = int((some + least) / 2 / rung_module.MEMORY_SHARE)
    monkeypatch.setattr(rung_module, "free_bytes", lambda device: free)
    chosen = rung.checkpointing("train auto")
    assert (chosen.mode, chosen.blocks) == ("attention", blocks)
    assert 0 < chosen.count < blocks
    flops = [rung.flops(f"train {mode}") for mode in ("none", "auto", "attention")]
    assert flops == sorted(set(flops))
    gradients = [
        rung.contenders(f"train {mode}", ["eager"])["eager"]() for mode in ("auto", "none")
    ]
    for found, expected in zip(*gradients, strict=True):
        assert torch.equal(found, expected)


def test_a_kernel_that_cannot_be_had_is_named_and_the_others_are_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its row says why, and the exit status is 0: nothing is wrong with what is measured."""
    for kernel in (FLASH3, FLASH4):
        if not importlib.util.find_spec("kernels"):
            with pytest.raises(RuntimeError, match="kernels"):
                load_kernel(kernel)
    monkeypatch.setattr(rung_module, "load_kernel", refuse)
    found = Rung._unavailable(torch.device("cuda"))
    assert {path for path in found if "flash" in path} == {
        path for path in (*STOCK, *MERGED) if "flash" in path
    }
    assert set(found.values()) == {"RuntimeError: no network"}
    monkeypatch.setattr(Rung, "_unavailable", staticmethod(lambda device: found))
    file = tmp_path / "rollout.json"
    paths = ["stock", "tuned flash4 compiled", "tuned flash4 compiled merged"]
    command = ["bench", "rollout", "--tiny", "--part", "forward", "--json", str(file)]
    assert main([*command, *(f"--path={path}" for path in paths)]) == 0
    (row,) = json.loads(file.read_text())["rows"]
    assert [*row["seconds"]] == ["stock"]
    assert row["unavailable"] == dict.fromkeys(paths[1:], "RuntimeError: no network")
    assert re.search(
        r"forward +tuned flash4 compiled merged +RuntimeError: no network", capsys.readouterr().out
    )


def refuse(name: str) -> None:
    raise RuntimeError("no network")


@pytest.mark.parametrize("path", ["local flash4 compiled", "local flash4 compiled merged"])
def test_diffusers_calls_the_attention_kernel_that_is_installed(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through its registry, once a block. On a CPU PyTorch's attention stands in."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    calls = []

    def counted(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        calls.append(query.shape)
        return ATTENTION[REFERENCE].attend(query, key, value)

    row = dataclasses.replace(ATTENTION[REFERENCE], attend=counted)
    monkeypatch.setattr(stock_module, "ATTENTION", {REFERENCE: row})
    rung = Rung(random_transformer(True, CPU, torch.float32), RUNGS["tiny"])
    assert rung.check("forward", [path]) == {}
    assert len(calls) == len(rung.transformer.transformer_blocks)
    assert path in rung.stand_ins


def test_merged_weights_are_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Merging leaves the weights of all other paths alone, and its rows have the same result."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    rung = Rung(random_transformer(True, CPU, torch.float32), RUNGS["tiny"])
    before = [p.clone() for p in rung.transformer.parameters()]
    assert rung.check("forward", ["stock", "eager", *MERGED]) == {}
    assert {rung._policy(path).transformer for path in MERGED} == {rung.merged}
    assert all(map(torch.equal, before, rung.transformer.parameters()))


def test_wrong_velocities_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    size = RUNGS["tiny"]
    rung = Rung(random_transformer(True, CPU, torch.float32), size)
    assert rung.check("forward", ["stock", "eager", "graphed"]) == {}
    monkeypatch.setattr(rung.ours.forward, "blocks", rung.ours.forward.blocks[:-1])
    problems = rung.check("forward", ["stock", "graphed"])
    assert problems.keys() == {"eager", "graphed"}  # a graph replays what runs eagerly
    assert problems["graphed"].startswith("wrong: off by")


def test_padding_changes_the_stock_time_alone() -> None:
    """Masked padding to the published pipeline's 1985 text tokens does not change the velocity."""
    size = dataclasses.replace(RUNGS["tiny"], testbed=False)  # so that the padded path takes part
    rung = Rung(random_transformer(True, CPU, torch.float32), size)
    assert "stock padded" in rung.contenders("forward")
    assert rung.check("forward", ["stock", "stock padded"]) == {}


@torch.no_grad()
def test_the_tuned_stock_drops_a_mask_only_where_it_hides_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompts of two lengths are padded and masked; those of one length never see the mask."""
    transformer = random_transformer(True, CPU, torch.float32)
    stock, tuned = (
        StockPolicy(transformer, dtype=torch.float32, **STOCK[name]) for name in ("stock", "tuned")
    )
    masked: list[bool] = []
    attend = attention_dispatch.dispatch_attention_fn

    def watched(*arguments: Any, attn_mask: Any = None, **options: Any) -> Any:
        masked.append(attn_mask is not None)
        return attend(*arguments, attn_mask=attn_mask, **options)

    monkeypatch.setattr(transformer_hunyuan_video15, "dispatch_attention_fn", watched)
    monkeypatch.setattr(stock_module, "dispatch_attention_fn", watched)
    width, glyphs = (
        transformer.config.text_embed_dim,
        torch.zeros(0, transformer.config.text_embed_2_dim),
    )
    embeddings = {
        length: TextEmbedding(text=torch.randn(length, width), glyphs=glyphs) for length in (3, 5)
    }
    x, step = (
        torch.randn(2, transformer.config.out_channels, 2, 2, 3),
        torch.zeros(1, dtype=torch.int64),
    )
    blocks = len(transformer.transformer_blocks)
    for keys, hidden in (((5, 5), False), ((3, 5), True)):
        found = []
        for policy in (stock, tuned):
            masked.clear()
            found.append(
                policy.velocity(
                    x, policy.conditioning_table(torch.ones(1), embeddings).at(keys, step)
                )
            )
            assert masked == [hidden or policy is stock] * blocks
        torch.testing.assert_close(*found)


def test_the_arithmetic_of_a_video_that_others_time(capsys: pytest.CaptureFixture[str]) -> None:
    """121 frames at 480p, 50 steps with guidance: 100 forwards of `54 (24 d^2 n + 4 n^2 d)`
    FLOPs."""
    assert (
        main(["bench", "rollout", "--size", "480p 121 frames", "--part", "rollout", "--dry-run"])
        == 0
    )
    n, d = 31 * 30 * 52 + 200, 2048
    flops = 100 * 54 * (24 * d**2 * n + 4 * n**2 * d)
    words = capsys.readouterr().out.splitlines()[2].split()
    assert words[:5] == ["480p", "121", "frames", "rollout", f"{n:,}"]
    assert words[5] == "100"
    assert float(words[6]) == float(words[7]) == pytest.approx(flops, rel=0.02)
    assert float(words[8]) == pytest.approx(flops / 789e12, rel=0.02)


def test_a_long_rollout_is_timed_once_after_the_warm_up_of_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(
        RUNGS, "tiny", dataclasses.replace(RUNGS["tiny"], steps=rollout_bench.LONG, guidance=6.0)
    )
    made: list[int] = []
    velocity = HunyuanVideo15Policy.velocity
    monkeypatch.setattr(
        HunyuanVideo15Policy, "velocity", lambda self, *a: made.append(1) or velocity(self, *a)
    )
    (row,) = rollout_bench.run(["tiny"], 7, parts=["rollout"], paths=["eager"])["rows"]
    assert (row["rounds"], row["failed"]) == (1, {})
    # two passes: gate, warm-ups, rollout
    assert len(made) == 2 * (1 + rollout_bench.WARM_UPS + rollout_bench.LONG)


def test_limits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(limits.SECONDS, "cpu", 0.01)
    file = tmp_path / "limits.json"
    assert (
        main(["bench", "limits", "--size", "tiny", "--repetitions", "1", "--json", str(file)]) == 0
    )
    found = json.loads(file.read_text())["limits"]
    assert [row["data"] for row in found["ceiling"]] == ["normal", "zeros"]
    rows = [(row["backend"], row["direction"], row["data"]) for row in found["attention"]]
    assert rows == [
        ("sdpa", way, data) for data in ("normal", "zeros") for way in ("forward", "backward")
    ]
    assert all(row["flops_per_second"] > 0 for row in found["attention"])
    kinds = {row["kind"]: row for row in found["adapter_rows"]}
    assert [*kinds] == ["plain", "GELU", "gate", "backward of GELU"]
    assert kinds["GELU"]["bytes"] == 4 * 24 * (32 + 32 + limits.RANK)
    out = capsys.readouterr().out
    assert all(
        word in out for word in ("back to back", "attention 1 x 64 x 2 x 32", "GELU", "cuBLAS")
    )


def test_clock_and_power_are_those_of_nvidia_smi(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line that says N/A, and one that is cut off, are left out."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text(
        "#!/bin/sh\necho '$0 $@' > \"$0.args\"\nprintf '1980, 700.5\\n[N/A], 3\\n1500, "
        '690.0\\n17\'\n: > "$0.done"\n'
    )
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="abc")
    )
    with limits._watched(torch.device("cuda")) as samples:
        wait_until(Path(f"{smi}.done").exists)
    assert samples == [(1980.0, 700.5), (1500.0, 690.0)]
    with limits._watched(CPU) as samples:
        pass
    assert samples == []


def test_the_host_in_a_forward_of_an_eighth_of_the_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = set()
    velocities = HunyuanVideo15Policy.velocities

    def recorded(policy: Any, x: Tensor, *rest: Any) -> Any:
        shapes.add(tuple(x.shape))
        return velocities(policy, x, *rest)

    monkeypatch.setattr(HunyuanVideo15Policy, "velocities", recorded)
    file = tmp_path / "host.json"
    assert main(["bench", "rollout", "--tiny", "--part", "host", "--json", str(file)]) == 0
    (row,) = json.loads(file.read_text())["rows"]
    assert row["part"] == "host"
    assert row["seconds"].keys() == {"eager"}
    assert (2, 32, 1, 1, 2) in shapes  # of 12 video tokens
    out = capsys.readouterr().out
    assert "host: the CPU's time of a forward of an eighth of the video tokens" in out
    assert "without the\nexchanges" in out


def test_the_timer_of_the_host_does_not_wait_for_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[str] = []
    monkeypatch.setattr(timing, "synchronize", lambda device: events.append("wait"))

    def now() -> float:
        events.append("clock")
        return float(len(events))

    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=now))
    timing.launch_timer(lambda: events.append("call"), CPU)()
    assert events == ["wait", "clock", "call", "clock", "wait"]


def test_parts_paths_and_a_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The chosen parts run in order if measured times predict that they fit the budget; the others
    are named."""
    file = tmp_path / "rollout.json"
    command = ["bench", "rollout", "--size", "tiny", "--json", str(file), "--repetitions", "1"]
    chosen = [
        *command,
        "--part",
        "decode",
        "--part",
        "forward",
        "--path",
        "eager",
        "--path",
        "contiguous",
    ]
    assert main(chosen) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [(row["part"], list(row["seconds"])) for row in rows] == [
        ("decode", ["contiguous"]),
        ("forward", ["eager"]),
    ]

    left = iter(
        [60.0, 60.0, 1.0, 60.0, 60.0]
    )  # before and in the first row, before the second, before and in the third
    monkeypatch.setattr(rollout_bench, "_left", lambda end: next(left))
    timed = {"seconds": {"eager": 2.0}, "peak_bytes": {}, "rounds": 1, "failed": {}}
    monkeypatch.setattr(rollout_bench, "measure", lambda *arguments: timed)
    parts = ["--part", "forward", "--part", "rollout", "--part", "step", "--path", "eager"]
    assert main([*command, *parts, "--budget", "60"]) == 0
    result = json.loads(file.read_text())
    assert [row["part"] for row in result["rows"]] == ["forward", "step"]
    (skipped,) = result["not_run"]
    assert (skipped["size"], skipped["part"]) == ("tiny", "rollout")
    # two warm-ups and one round of ten steps
    assert skipped["expected_seconds"] == pytest.approx(3 * 10 * 2.0)
    assert "not run: tiny, rollout: about 60 s, and 1 s of 60 s are left" in capsys.readouterr().out


def test_a_path_that_fails_is_named_and_the_others_are_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A path may fail in the gate or after it; if stock fails, the others are compared with each
    other."""
    velocity = HunyuanVideo15Policy.velocity

    def broken(self: HunyuanVideo15Policy, x: Tensor, conditioning: Any) -> Tensor:
        if torch.is_grad_enabled():
            raise RuntimeError("no such kernel")
        return velocity(self, x, conditioning)

    monkeypatch.setattr(HunyuanVideo15Policy, "velocity", broken)
    file = tmp_path / "rollout.json"
    command = ["bench", "rollout", "--size", "tiny", "--repetitions", "1", "--json", str(file)]
    of_them = ["--path", "stock", "--path", "eager"]
    assert main([*command, *of_them, "--part", "forward", "--part", "train none"]) == 1
    forward, train = json.loads(file.read_text())["rows"]
    assert (list(forward["seconds"]), list(train["seconds"])) == (["stock", "eager"], ["stock"])
    assert train["failed"] == {"eager": "RuntimeError: no such kernel"}
    assert "eager                         RuntimeError: no such kernel" in capsys.readouterr().out

    monkeypatch.setattr(StockPolicy, "velocity", lambda self, *a: 1 / 0)
    assert (
        main([*command, *of_them, "--part", "forward", "--part", "decode", "--path", "contiguous"])
        == 1
    )
    forward, decode = json.loads(file.read_text())["rows"]
    assert (list(forward["seconds"]), forward["failed"]) == (
        ["eager"],
        {"stock": "ZeroDivisionError: division by zero"},
    )
    assert set(decode["seconds"]) == {"stock", "contiguous"}

    calls: list[int] = []

    def at_last(self: HunyuanVideo15Policy, *arguments: Any) -> Tensor:
        calls.append(1)
        if len(calls) == 4:  # after the gate and both warm-ups
            raise RuntimeError("an illegal memory access")
        return velocity(self, *arguments)

    monkeypatch.setattr(HunyuanVideo15Policy, "velocity", at_last)
    assert main([*command, "--part", "forward", "--path", "eager"]) == 1
    (row,) = json.loads(file.read_text())["rows"]
    assert (row["rounds"], list(row["seconds"])) == (1, ["eager"])
    assert (
        row["failed"]["interleaved"]
        == "only the second warm-up is timed: RuntimeError: an illegal memory access"
    )


def test_paths_that_are_not_here_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("here are graphs")
    assert main(["bench", "rollout", "--size", "tiny", "--part", "step", "--path", "graphed"]) == 0
    assert "not run: tiny, step: no graphed here" in capsys.readouterr().out


def test_estimate_by_hand() -> None:
    def row(size: str, part: str, flops: float, wall: float, **seconds: float) -> dict[str, Any]:
        return {
            "size": size,
            "part": part,
            "flops": flops,
            "rounds": 3,
            "wall_seconds": wall,
            "seconds": seconds,
        }

    rows = [
        row("a", "forward", 10, 9.0, stock=1.0, eager=0.5),
        row("a", "train", 30, 10.0, stock=1.2),
    ]
    assert rollout_bench.estimate([], "a", "step", 20, ["stock"], 3) == 0
    # (2 + 3) calls of 1.5 s took 7.5 of 9 s, and 5 calls of 1.2 s took 6 of 10 s: at most 4 s of
    # overhead
    assert rollout_bench.estimate(rows, "b", "forward", 20, ["stock", "eager"], 3) == pytest.approx(
        3 * 2 * 1.5 + 4
    )
    assert rollout_bench.estimate(rows, "a", "step", 60, ["stock"], 4) == pytest.approx(
        4 * 2 * 1.2 + 4
    )
    assert rollout_bench.estimate(
        rows, "b", "decode", 60, ["stock", "contiguous"], 3
    ) == pytest.approx(3 * 4 * 1.2 + 4)


def test_rounds_fit_into_the_time_that_is_left_and_lack_of_memory_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(now=0.0)

    def half_a_second(function: Callable[[], Any], device: torch.device) -> Callable[[], float]:
        def call() -> float:
            function()
            clock.now += 0.5
            return 0.5

        return call

    def too_large() -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(rollout_bench, "host_timer", half_a_second)
    monkeypatch.setattr(rollout_bench, "time", SimpleNamespace(monotonic=lambda: clock.now))

    def broken() -> None:
        raise ValueError("no kernel\nof that size")

    contenders = {"one": int, "large": too_large, "broken": broken, "two": int}

    def measure(rounds: int, left: float) -> dict[str, Any]:
        return rollout_bench.measure(contenders, CPU, rounds, left=left, timer_kind=half_a_second)

    measured = measure(100, 10)
    assert measured["seconds"] == {"one": 0.5, "two": 0.5}
    assert measured["failed"] == {"large": "out of memory", "broken": "ValueError: no kernel"}
    assert measured["rounds"] == 8  # one second each, after two seconds of warm-up
    assert measure(5, 10)["rounds"] == 5
    assert measure(5, 1)["rounds"] == 1


def test_decoders_have_their_layouts_and_wrong_videos_are_not_timed() -> None:
    decoders = random_decoders(True, CPU, torch.float32)
    layouts = {"contiguous": torch.contiguous_format, "channels last": torch.channels_last_3d}
    for name, layout in layouts.items():
        weights = [
            p for p in decoders[name].vae.decoder.parameters() if p.ndim == 5 and p.shape[2] > 1
        ]
        assert all(p.is_contiguous(memory_format=layout) for p in weights)
    rung = Rung(random_transformer(True, CPU, torch.float32), RUNGS["testbed batch 1"], decoders)
    assert list(rung.contenders("decode")) == list(PARTS["decode"])
    assert rung.check("decode") == {}
    with torch.no_grad():
        decoders["channels last"].vae.decoder.conv_out.conv.weight.mul_(1.1)
    problems = rung.check("decode")
    assert problems.keys() == {"channels last"}
    assert problems["channels last"].startswith("wrong: off by")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--part", "forward"], "--part goes with `bench rollout` or `bench limits`"),
        (["--compile", "--size", "nonsense"], "goes with --json alone, not with --size"),
        (["--compile", "rollout"], "goes with --json alone, not with `bench rollout`"),
        (["--dry-run"], "--dry-run goes with `bench rollout`"),
        (["rollout", "--config", "a.yaml"], "--config goes with `bench iteration`"),
        (["limits", "--part", "adapters"], "did you mean 'adapter_rows'"),
        (["--budget", "9"], "--budget goes with `bench rollout`"),
        (["rollout", "--budget", "0"], "--budget 0: expected seconds above 0"),
        (["rollout", "--part", "froward"], "did you mean 'forward'"),
        (["rollout", "--path", "tunde"], "did you mean 'tuned'"),
        (
            ["rollout", "--part", "decode", "--path", "eager"],
            "its paths are contiguous, channels last, stock",
        ),
        (
            ["iteration", "--config", "configs/recipes/paper.yaml", "--path", "graphed"],
            "expected one of stock, stock",
        ),
    ],
)
def test_messages(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_iteration_benchmark(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "tiny.yaml"
    config.write_text(dump(settings(reward__name="testbed")))
    file = tmp_path / "iteration.json"
    assert (
        main(
            [
                "bench",
                "iteration",
                "--config",
                str(config),
                "--repetitions",
                "1",
                "--json",
                str(file),
            ]
        )
        == 0
    )
    assert "decode" in capsys.readouterr().out
    result = json.loads(file.read_text())
    phases = result["phases"]
    assert result["rounds"] == 1
    assert {"rollout", "decode", "anchor", "train", "total"} <= phases.keys()
    assert set(phases["total"]) == {"stock", "eager"}
    ours = [
        "bench",
        "iteration",
        "--config",
        str(config),
        "--repetitions",
        "1",
        "--path",
        "eager",
        "--json",
        str(file),
    ]
    assert main(ours) == 0
    assert set(json.loads(file.read_text())["phases"]["total"]) == {"eager"}
    assert main(["bench", "iteration"]) == 2
    assert "needs --config FILE" in capsys.readouterr().err
