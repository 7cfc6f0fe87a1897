"""Streamed blocks: their results are those of blocks that stay, to the bit; copies and computation
are in an order that a GPU must keep; what does not fit is refused before anything is loaded."""

import contextlib
import copy
import itertools
import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from sage_fast.algorithm.resolved import ResolvedConfig
from sage_fast.algorithm.trainable import check_trainable
from sage_fast.cli import main
from sage_fast.config.loader import load
from sage_fast.models.attention.backends import ATTENTION, REFERENCE
from sage_fast.models.checkpointing import CheckpointPlan
from sage_fast.models.find import find_spec
from sage_fast.models.hunyuan15.policy import HunyuanVideo15Policy, freeze_dead_ends
from sage_fast.models.load import load_model
from sage_fast.models.model import Model
from sage_fast.models.streaming import SLOTS, BlockStream, block_sizes, spread, stream_sizes
from sage_fast.models.trainable import make_trainable, meta_policy
from sage_fast.parallel import fit
from sage_fast.run_folder import RunFolder
from sage_fast.testbed.tiny_model import Testbed, TestbedTransformer
from sage_fast.util.cards import planned_rates
from sage_fast.util.errors import UserError
from sage_fast.util.files import read_metrics
from sage_fast.util.profiling import annotate, ranges
from tests.pretend_cuda import CUDA, PretendCuda
from tests.test_cli import PAPER, SMALL
from tests.test_forward import PROMPTS, inputs
from tests.tiny import settings, tiny_model

CPU = torch.device("cpu")
BLOCKS = 5
MODES = [
    CheckpointPlan("none"),
    CheckpointPlan("attention"),
    CheckpointPlan("full"),
    CheckpointPlan("full", 2, BLOCKS),
    CheckpointPlan("attention", 3, BLOCKS),
]


def model_of(
    device: torch.device, count: int, mode: CheckpointPlan, guidance: float = 1.0, **given: Any
) -> Model:
    """A model of five blocks, with an adapter of which nothing is 0; `count` blocks are
    streamed."""
    config = settings(sampling__guidance_scale=guidance, **given)
    torch.manual_seed(1)
    transformer = TestbedTransformer(num_layers=BLOCKS).eval()
    make_trainable(Testbed(), transformer, config.model)
    with torch.no_grad():
        for name, p in transformer.named_parameters():
            if ".lora_B." in name:
                p.normal_(std=0.1)
    transformer = torch.nn.Module.to(transformer, CPU if count else device)
    policy = HunyuanVideo15Policy(transformer, dtype=torch.float32, guidance_scale=guidance)
    if count:
        policy.stream = BlockStream(policy, count, device)
    policy.attention = ATTENTION[REFERENCE]
    model = tiny_model(config, device=device)
    model.policy = policy
    model.set_checkpointing(mode)
    return model


def two_iterations(model: Model, device: torch.device) -> list[Tensor]:
    """Velocities of rollouts and of training, and gradients; the adapter changes in between."""
    policy = model.policy
    x, sigma, text = inputs(PROMPTS)
    x, sigma = x.to(device), sigma.to(device)
    negatives = text if policy.uses_guidance else None
    found = []
    for _ in range(2):
        with torch.no_grad():
            conditions = policy.condition(sigma, text, negatives)
            found += [policy.guided_velocity(x, conditions), policy.guided_velocity(-x, conditions)]
        v = policy.guided_velocity(x, policy.condition(sigma, text, negatives))
        v.backward(torch.linspace(-1, 1, v.numel()).view(v.shape).to(device, v.dtype))
        found.append(v.detach())
        with torch.no_grad():
            for p in policy.parameters().values():
                found.append(p.grad)
                p.sub_(0.1 * p.grad)
                p.grad = None
    return [tensor.cpu() for tensor in found]


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("count", [1, 2, BLOCKS])
def test_streamed_is_resident_to_the_bit(mode: CheckpointPlan, count: int) -> None:
    expected = two_iterations(model_of(CPU, 0, mode), CPU)
    model = model_of(CPU, count, mode)
    stream = model.policy.stream
    assert stream is not None
    assert_equal(two_iterations(model, CPU), expected)
    assert stream.copied_bytes > 2 * stream.host_bytes


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_streamed_is_resident_to_the_bit_on_a_gpu(mode: CheckpointPlan) -> None:
    gpu = torch.device("cuda")
    expected = two_iterations(model_of(gpu, 0, mode), gpu)
    assert_equal(two_iterations(model_of(gpu, BLOCKS, mode), gpu), expected)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_the_backward_may_run_in_another_thread(
    mode: CheckpointPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA's backward does, except within a range that a profiler sees: what is recomputed and
    fetched there knows nothing of the forward's thread."""
    expected = two_iterations(model_of(CPU, 2, mode), CPU)
    backward = Tensor.backward
    threads = set()

    def in_a_thread(*arguments: Any) -> None:
        thread = threading.Thread(target=backward, args=arguments)
        thread.start()
        thread.join()
        threads.add(thread.ident)

    monkeypatch.setattr(Tensor, "backward", in_a_thread)
    assert_equal(two_iterations(model_of(CPU, 2, mode), CPU), expected)
    assert threads
    assert threading.get_ident() not in threads


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_ranges_change_nothing(mode: CheckpointPlan) -> None:
    """The backward then opens those of its blocks."""
    given = {"guidance": 3.0}
    expected = two_iterations(model_of(CPU, 2, mode, **given), CPU)
    with ranges("torch"), annotate("backward"):
        found = two_iterations(model_of(CPU, 2, mode, **given), CPU)
    assert_equal(found, expected)


@pytest.mark.parametrize("given", [{"guidance": 3.0}, {"model__lora_targets": ".*to_q"}], ids=str)
def test_streamed_is_resident_with_guidance_and_with_few_adapters(given: dict[str, Any]) -> None:
    """Layers without an adapter run by themselves, and their matrices are streamed one by one."""
    for mode in MODES:
        expected = two_iterations(model_of(CPU, 0, mode, **given), CPU)
        assert_equal(two_iterations(model_of(CPU, BLOCKS, mode, **given), CPU), expected)


def test_streamed_is_resident_with_an_adapter_on_adaln() -> None:
    """Whose layers then run with gradients, in each micro-batch."""
    given = {"model__lora_targets": r".*(to_q|norm1\.linear)"}
    expected = two_iterations(model_of(CPU, 0, MODES[0], **given), CPU)
    assert_equal(two_iterations(model_of(CPU, BLOCKS, MODES[0], **given), CPU), expected)


def test_only_slots_are_on_the_device() -> None:
    """Every frozen matrix of a streamed block is in host memory; its adapters, norms and biases are
    on the device, and the plan counts both."""
    with PretendCuda():
        policy = model_of(CUDA, 2, MODES[0]).policy
        chosen = spread(2, BLOCKS)
        leaving = 0
        for name, p in policy.transformer.named_parameters():
            parts = name.split(".")
            in_block = parts[0] == "transformer_blocks" and int(parts[1]) in chosen
            leaves = in_block and p.ndim == 2 and ".lora_" not in name
            assert p.device == (CPU if leaves else CUDA), name
            leaving += p.nbytes * leaves
        stream = policy.stream
        assert stream is not None
        sizes = stream_sizes(block_sizes(policy, 4), 2)
        assert sizes.leaving == leaving
        assert sizes.host == stream.host_bytes
        assert sizes == stream.sizes
        assert sizes.slots == sum(slot.bytes.nbytes for slot in stream.slots)
        assert len(stream.slots) == SLOTS


def test_deepspeed_is_given_no_weights_in_host_memory() -> None:
    """It broadcasts all that it is given, by NCCL."""
    zero = pytest.importorskip("sage_fast.parallel.zero")
    with PretendCuda():
        policy = model_of(CUDA, BLOCKS, MODES[0]).policy
        found = {*zero._Modules(policy).parameters()}
        assert {p.device for p in found} == {CUDA}
        assert found == {p for _, p in policy.named_parameters() if p.device == CUDA}
        assert found.issuperset(policy.parameters().values())


def test_the_device_of_a_policy_is_where_it_runs() -> None:
    """Also of a family whose first weight is streamed."""
    with PretendCuda():
        policy = model_of(CUDA, 1, MODES[0]).policy
        network = torch.nn.ModuleDict({"blocks": policy.block_list()[BLOCKS // 2]})
        policy.networks = {"transformer": network}
        assert next(policy.named_parameters())[1].device == CPU
        assert policy.device == CUDA


def test_the_plan_counts_on_meta_what_is_in_host_memory() -> None:
    """In 16 bits, whose padding is another one; the meta device has float32."""
    config = settings(model__dtype="bfloat16", model__lora_rank=8)
    model = load_model(config.model, config.sampling, CPU, seed=0, streamed=2)
    stream = model.policy.stream
    assert stream is not None
    policy = meta_policy(find_spec(config.model.path), config.model)
    planned = stream_sizes(block_sizes(policy, 2), 2)
    assert planned.host == stream.host_bytes
    copies = 0
    for linear in model.policy.forward.fused_linears:
        if linear.pad:
            copies += linear._buffer.nbytes - sum(weight.nbytes for weight in linear.weights)
    assert stream_sizes(block_sizes(policy, 2), 0).copies == copies


def test_streamed_blocks_are_far_from_each_other() -> None:
    for blocks in range(1, 12):
        for count in range(1, blocks + 1):
            chosen = spread(count, blocks)
            assert len({*chosen}) == count
            assert all(0 <= index < blocks for index in chosen)
            gaps = {b - a for a, b in itertools.pairwise(chosen)}
            assert not gaps or max(gaps) - min(gaps) <= 1


# -- order on a device -----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("count", [1, 2, BLOCKS])
def test_a_device_can_only_keep_the_order(mode: CheckpointPlan, count: int) -> None:
    expected = two_iterations(model_of(CPU, 0, mode), CPU)
    with PretendCuda() as device:
        model = model_of(CUDA, count, mode)
        device.events.clear()
        assert_equal(two_iterations(model, CUDA), expected)
        copies = [event for event in device.events if event.place.startswith("streaming.py")]
    assert copies
    in_steps = [event for event in copies if event.kind != "wait"]
    assert {event.kind for event in in_steps} == {"asynchronous copy to device"}


@contextlib.contextmanager
def without(monkeypatch: pytest.MonkeyPatch, name: str) -> Iterator[None]:
    """Let waits of this kind do nothing."""
    with monkeypatch.context() as patched:
        patched.setattr(f"tests.pretend_cuda.Stream.{name}", lambda *_: None)
        yield


@pytest.mark.parametrize(
    ("wait", "message"),
    [
        ("wait_event", "memory is read while another stream perhaps still writes it"),
        ("wait_stream", "memory is written while another stream perhaps still"),
        ("synchronize", "memory is written while another stream perhaps still reads it"),
    ],
)
@pytest.mark.parametrize("mode", [MODES[0], MODES[2]], ids=str)
def test_a_missing_wait_is_seen(
    wait: str, message: str, mode: CheckpointPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    with PretendCuda():
        model = model_of(CUDA, 3, mode)
        with without(monkeypatch, wait), pytest.raises(RuntimeError, match=message):
            two_iterations(model, CUDA)


def test_the_next_block_is_on_its_way() -> None:
    """A forward, a forward with gradients and its backward find each block where they look for it,
    but for the first one."""
    model = model_of(CPU, BLOCKS, MODES[0])
    stream = model.policy.stream
    assert stream is not None
    late = []

    def bring(unit: Any, keep: Any = None, bring: Any = stream._bring) -> Any:
        if keep is None and all(slot.unit is not unit for slot in stream.slots):
            late.append(unit.index)
        return bring(unit, keep)

    stream._bring = bring  # type: ignore[method-assign]
    x, sigma, text = inputs(PROMPTS)
    with torch.no_grad():
        conditions = model.policy.condition(sigma, text)
    late.clear()
    with torch.no_grad():
        for _ in range(3):
            model.policy.velocity(x, conditions)
    assert late == [0]
    model.policy.velocity(x, conditions).sum().backward()
    assert late == [0]


# -- runs ------------------------------------------------------------------------------------------


def run_and_resume(folder: Path, first: str, then: str) -> None:
    """Train two iterations, and a third one in a resume, with these streamed blocks."""
    words = ["train", str(PAPER), "--output", str(folder), "--quiet", *SMALL]
    assert main([*words, "--train.iterations", "2", "--model.stream_blocks", first]) == 0
    options = ["--train.iterations", "3", "--model.stream_blocks", then]
    assert main(["train", str(folder), "--resume", "--quiet", *options]) == 0


def numbers(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run, without times and memory."""
    found = []
    for row in read_metrics(folder / "metrics.jsonl"):
        found.append(
            {
                key: value
                for key, value in row.items()
                if not key.startswith(("time/", "memory/", "throughput/"))
            }
        )
    return found


@pytest.fixture(scope="module")
def resident(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resident") / "run"
    run_and_resume(folder, "0", "0")
    return folder


@pytest.mark.parametrize(("first", "then"), [("all", "all"), ("all", "0"), ("0", "2")])
def test_a_run_and_its_resume_are_those_without_streaming(
    first: str, then: str, resident: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    run_and_resume(folder, first, then)
    assert numbers(folder) == numbers(resident)
    weights = sorted(resident.rglob("pytorch_lora_weights.safetensors"))
    assert weights
    for file in weights:
        expected, found = load_file(file), load_file(folder / file.relative_to(resident))
        assert found.keys() == expected.keys()
        assert_equal([*found.values()], [expected[name] for name in found])


def test_facts_say_what_is_streamed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", str(PAPER), "--output", str(tmp_path / "run"), *SMALL]
    assert main([*words, "--train.iterations", "1", "--model.stream_blocks", "2"]) == 0
    assert "streamed blocks: 2 of 3, " in capsys.readouterr().out
    assert RunFolder(tmp_path / "run").facts["streamed_blocks"] == 2


# -- what cannot be --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"model.stream_blocks": "all", "model.tuning": "full"},
            "stream_blocks = 'all': only frozen weights are streamed, and model.tuning = full",
        ),
        (
            {"model.stream_blocks": 3, "train.engine": "zero3"},
            "model.stream_blocks = 3: train.engine = zero3 gathers the weights of a block",
        ),
    ],
)
def test_trained_and_gathered_weights_are_not_streamed(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_trainable(load(PAPER, given))


@pytest.mark.parametrize("value", ["some", -1, 1.5, True])
def test_a_value_that_is_no_number_of_blocks(value: object) -> None:
    with pytest.raises(UserError, match=r"model.stream_blocks = .*expected "):
        load(PAPER, {"model.stream_blocks": value})


def test_adapters_keep_their_layout() -> None:
    """Else the slots would go on with the adapter of before."""
    expected = two_iterations(model_of(CPU, 0, MODES[0]), CPU)
    model = model_of(CPU, 2, MODES[0])
    policy = model.policy
    policy.refresh()
    policy.transformer.disable_adapters()
    with pytest.raises(UserError, match="adapters of streamed blocks are neither disabled, "):
        policy.refresh()
    # all of them are trained again, also what no forward reads
    policy.transformer.enable_adapters()
    freeze_dead_ends(policy.transformer)
    with pytest.raises(UserError, match="and their policy is not copied"):
        copy.deepcopy(policy).refresh()
    assert_equal(two_iterations(model, CPU), expected)


def test_more_blocks_than_there_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sage_fast.loading.load_model", lambda *_, **__: pytest.fail("loaded"))
    words = ["train", str(PAPER), "--output", str(tmp_path / "run"), "--model.stream_blocks", "4"]
    for given in ([*words, "--dry-run"], words):
        assert main(given) == 2
        said = capsys.readouterr().err
        assert "model.stream_blocks = 4: expected at most 3, the blocks of the model" in said
    assert not (tmp_path / "run").exists()


def test_too_little_host_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sage_fast.loading.load_model", lambda *_, **__: pytest.fail("loaded"))
    monkeypatch.setattr(fit, "free_bytes", lambda device: 10**6)
    words = ["train", str(PAPER), "--output", str(tmp_path / "run"), "--model.stream_blocks"]
    assert main([*words, "all"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "model.stream_blocks = 'all': 3 streamed blocks take " in said
    assert "of page-locked host memory, and 976.56 KiB are free; the nearest is " in said
    assert not (tmp_path / "run").exists()


# -- what auto chooses -----------------------------------------------------------------------------


def fit_on(gibibytes: float, host_memory: float = math.inf, **given: Any) -> fit.Fit:
    """How the shipped LoRA at 480p fits on a card, without reward and autoencoder."""
    config = load(PAPER.parent.parent / "hunyuanvideo15-480p.yaml", given)
    spec = find_spec(config.model.path)
    policy = meta_policy(spec, config.model)
    memory = gibibytes * 2**30
    fitting = fit.Fitting(ResolvedConfig(config), spec, policy, ranks=1)
    return fitting.best(memory, planned_rates(memory), host_memory=host_memory)


def test_auto_streams_where_it_saves_a_tenth_of_the_time() -> None:
    """At 36 GiB all weights fit beside everything recomputed, which is slower; at 60 GiB little is
    recomputed anyway."""
    assert fit_on(16).streamed == 54
    assert fit_on(36, **{"model.stream_blocks": 0}).fits
    assert fit_on(36).streamed > 0
    assert fit_on(60).streamed == 0


def test_auto_takes_no_host_memory_that_is_not_there() -> None:
    """Unless nothing else fits: then the run says what it lacks."""
    block = 16 * 2**30 / 54
    few = fit_on(36, host_memory=10 * block)
    assert few.fits
    assert few.sizes.host <= 10 * block
    assert fit_on(16, host_memory=block).sizes.host > block
