"""The parts of scripts/gpu.sh: what each tells, its command, its time limit, the results that it
leaves, and what was expected of them.

The expectations were written before the measurement, from earlier files and from arithmetic: they
are no results.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from scripts.gpu import values
from scripts.gpu.values import Found

Settings = Mapping[str, str | int]
"""Dotted key -> value."""

CALL_SECONDS = 540
"""Most seconds that the parts of a call may take, of the 10 minutes of a machine that is lent."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """What the commands of a call depend on.

    Attributes:
        python: of the environment that `install` makes.
        out: folder for results.
        wheels: folder with wheels of the packages that this machine lacks.
        scratch: folder for what is not kept, such as run folders.
        tiny: whether to take sizes that a CPU can handle.
        gpus: number of GPUs.
    """

    python: str
    out: Path
    wheels: Path
    scratch: Path
    tiny: bool = False
    gpus: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """A quantity in a part's first result, and what was expected of it.

    Attributes:
        quantity: what it is, with its unit.
        expected: a number, or a bound such as "below 5" or "exactly 0".
        value: gives the number; raises KeyError, StopIteration or ValueError if the result lacks
            it.
    """

    quantity: str
    expected: str
    value: Callable[[Found], float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """A part of scripts/gpu.sh.

    Attributes:
        name: as the command line takes it. A result that is kept in benchmarks/results is named
            DATE-CARD-NAME.json.
        tells: what to look for in its results.
        seconds: time limit.
        command: gives its words.
        leaves: its results within OUT, the JSON first.
        predictions: what was expected.
    """

    name: str
    tells: str
    seconds: int
    command: Callable[[Call], list[str]]
    leaves: tuple[str, ...]
    predictions: tuple[Prediction, ...] = ()


# -- commands --------------------------------------------------------------------------------------


def sage(call: Call, *words: str) -> list[str]:
    """Return a command of sage-fast."""
    return [call.python, "-m", "sage_fast", *words]


def program(call: Call, name: str, *words: str) -> list[str]:
    """Return the command of a program in this folder."""
    return [call.python, "-m", f"scripts.gpu.{name}", *words]


def json_of(call: Call, name: str) -> list[str]:
    return ["--json", str(call.out / f"{name}.json")]


def each(option: str, *names: str) -> list[str]:
    """Return an option that is given once for each name."""
    return [word for name in names for word in (option, name)]


def bench_rollout(call: Call, name: str, size: str, *options: str) -> list[str]:
    sizes = ["--tiny"] if call.tiny else ["--size", size, "--repetitions", "3"]
    return sage(call, "bench", "rollout", *sizes, *options, *json_of(call, name))


def bench_limits(call: Call, name: str) -> list[str]:
    size = ["--size", "tiny", "--repetitions", "1"] if call.tiny else []
    command = sage(call, "bench", "limits", "--part", name.replace("-", "_"), *size)
    command += json_of(call, name)
    if call.tiny and name == "adapter-rows":
        # on a CPU the kernel runs by Triton's interpreter
        return ["env", "TRITON_INTERPRET=1", "SAGE_FAST_OPS=triton", *command]
    return command


def kernel_tests(call: Call, name: str, *words: str) -> list[str]:
    return program(call, "kernel_tests", *json_of(call, name), *words)


ONE_CASE_A_KERNEL = (
    "tests/ops/test_operators.py",
    "-k",
    "triton-odd-bfloat16] or triton-odd-float32-bfloat16]",
)
"""Values and gradients of each operator at an odd size. The transitions have float32 latents."""


def changed_tests(call: Call) -> list[str]:
    if call.tiny:
        return kernel_tests(call, "tests", "tests/ops/test_operators.py", "-k", "fake")
    files = ("ops/test_operators", "ops/test_norms", "test_graphs", "test_checkpointing",
        "test_streaming")  # fmt: skip
    paths = [f"tests/{file}.py" for file in files]
    return kernel_tests(call, "tests", "-n", "8", "-m", "gpu", *paths)


def under(tool: str) -> Callable[[Call], list[str]]:
    """Return the command that runs one case a kernel under a tool."""
    return lambda call: kernel_tests(call, tool, "--under", tool, *ONE_CASE_A_KERNEL)


def made_up(call: Call) -> list[str]:
    """Return settings of runs whose prompts and rewards are made up: neither is measured.

    The log-prob gate, which could stop a run that is timed, is checked by `testbed`.
    """
    settings = {
        "train.group_size": "2",
        "train.parity_gate": "false",
        "data.prompts": "testbed:train",
        "data.eval_prompts": "testbed:heldout",
        "reward.name": "sage_fast.configs.my_rewards:MyReward",
        "reward.args": "{}",
        "reward.weights": "{color: 1, steady: 1}",
        "objective.drop_equal_groups": "false",
        "data.embedding_cache": str(call.scratch / "embeddings"),
    }
    return given(settings)


def given(settings: Settings) -> list[str]:
    """Return settings as words of a command line."""
    return [word for key, value in settings.items() for word in (f"--{key}", str(value))]


FEW_STEPS: Settings = {"sampling.steps": 3, "train.optimizer_steps": 1}
"""A run that a CPU can handle."""
FOUR_BLOCKS: Settings = {
    "model.path": "random:hunyuanvideo15-480p-4-blocks",
    "sampling.num_frames": 33,
    "sampling.steps": 4,
}
"""All weights with their states, on one card."""
SHORT_EVALUATION: Settings = {"eval.num_prompts": 1, "eval.steps": 2, "eval.seeds_per_prompt": 1}


def profiled(call: Call, name: str, config: str, settings: Settings) -> list[str]:
    """Return the command that profiles an iteration of one prompt, and lists what each range of it
    holds."""
    options = [*given(settings), *given({"train.prompts_per_iteration": 1}), *made_up(call)]
    return program(call, "profiled", "--folder", str(call.out / name), config, *options)


def iteration(call: Call) -> list[str]:
    if call.tiny:
        return profiled(call, "iteration", "configs/recipes/paper.yaml", FEW_STEPS)
    settings: dict[str, str | int] = {
        "model.path": "random:hunyuanvideo15-480p",
        "sampling.steps": 3,
    }
    return profiled(call, "iteration", "configs/hunyuanvideo15-480p.yaml", settings)


def full(call: Call) -> list[str]:
    if call.tiny:
        small: Settings = {"model.dtype": "bfloat16", **FEW_STEPS}
        return profiled(call, "full", "configs/recipes/paper_full.yaml", small)
    settings: Settings = {"train.engine": "plain", **FOUR_BLOCKS}
    return profiled(call, "full", "configs/hunyuanvideo15-480p-full.yaml", settings)


def nft(call: Call) -> list[str]:
    if call.tiny:
        small: Settings = {"model.dtype": "bfloat16", "train.engine": "plain", **FEW_STEPS}
        return profiled(call, "nft", "configs/recipes/nft_full.yaml", small)
    settings: Settings = {"train.engine": "plain", **FOUR_BLOCKS}
    return profiled(call, "nft", "configs/hunyuanvideo15-480p-nft.yaml", settings)


def runs(call: Call, name: str, config: str, *words: str) -> list[str]:
    """Return the command that trains the testbed, and keeps the metrics of each run."""
    folder = str(call.scratch / name)
    return program(call, "runs", *json_of(call, name), "--folder", folder, config, *words)


def engines(call: Call) -> list[str]:
    # one update per iteration: later ones amplify what rounding changed in the first
    settings: dict[str, str | int] = {"train.iterations": 2, "train.optimizer_steps": 1}
    settings |= SHORT_EVALUATION
    if call.tiny:
        small = {"sampling.steps": 3, "train.prompts_per_iteration": 1, "train.group_size": 2}
        settings |= small
    compared = each("--engine", "plain", "zero2", "zero3")
    return runs(call, "engines", "configs/recipes/paper_full.yaml", *compared, *given(settings))


def testbed(call: Call) -> list[str]:
    """Return the command of a run in bfloat16.

    Another batch size would round differently, so the log-prob gate needs the same one in rollout
    and training. With more updates per iteration it would warn.
    """
    settings: dict[str, str | int] = {
        "train.iterations": 3,
        "eval.num_prompts": 8,
        "model.dtype": "bfloat16",
        "train.optimizer_steps": 1,
        "sampling.batch_size": 1,
        "train.batch_size": 1,
    }
    if call.tiny:
        settings |= SHORT_EVALUATION
        settings |= {"train.iterations": 1, "train.prompts_per_iteration": 1}
        settings |= {"sampling.steps": 3, "train.group_size": 2}
    return runs(call, "testbed", "configs/recipes/paper.yaml", *given(settings))


def operators(call: Call) -> list[str]:
    sizes = ["720p batch 4", "large", "480p batch 4", "480p batch 1", "8192 tokens", "480p frame"]
    options = []
    if call.tiny:
        sizes = ["tiny", "tiny tokens", "tiny pixels"]
        options = ["--repetitions", "1"]
    return sage(call, "bench", *each("--size", *sizes), *options, *json_of(call, "operators"))


LOCAL = "local flash4 compiled"
"""Path of `bench rollout`: compiled diffusers by the attention kernel that our forward takes."""


def rollout_480p(call: Call) -> list[str]:
    order = ("train full", "train auto", "forward", "train attention", "train none")
    parts = each("--part", *order)
    paths = each("--path", "eager", LOCAL, f"{LOCAL} merged")
    budget = [] if call.tiny else ["--budget", "250"]
    return bench_rollout(call, "rollout-480p", "480p 81 frames", *budget, *parts, *paths)


def sequence_host(call: Call) -> list[str]:
    return bench_rollout(
        call, "sequence-host", "480p 81 frames", "--part", "host", "--path", "eager"
    )


def decode_480p(call: Call) -> list[str]:
    # Without the stock decode: its tensors have more than 2^31 elements here, and it may end in an
    # error after which nothing runs.
    options = ["--part", "decode", *each("--path", "contiguous", "channels last")]
    return bench_rollout(call, "decode-480p", "480p 81 frames", *options)


def measured(name: str) -> Callable[[Call], list[str]]:
    """Return the command of a program that knows its own sizes."""

    def command(call: Call) -> list[str]:
        size = ["--tiny"] if call.tiny else []
        return program(call, name.replace("-", "_"), *json_of(call, name), *size)

    return command


def flash4_package(call: Call) -> list[str]:
    wheels = ["--wheels", str(call.wheels / "flash4-package")]
    folder = ["--folder", str(call.scratch / "flash4-package")]
    return [*measured("flash4-package")(call), *wheels, *folder]


def install(call: Call) -> list[str]:
    """Return the command that makes the environment. It runs in the Python that has torch."""
    environment = Path(call.python).parent.parent
    return [sys.executable, "-m", "scripts.gpu.install", str(environment), str(call.wheels)]


# -- one GPU ---------------------------------------------------------------------------------------

INSTALL = Part(
    name="install",
    tells="torch sees a GPU",
    seconds=70,
    command=install,
    leaves=("install.log",),
)

NO_FAILURE = (
    Prediction(quantity="tests that fail", expected="exactly 0", value=values.tests("failed")),
    Prediction(quantity="tests that pass", expected="above 0", value=values.tests("passed")),
)
PEAK = Prediction(
    quantity="peak of training / the plan's",
    expected="1.15 or below",
    value=lambda found: found["peak_bytes"]["train"] / found["planned_bytes"],
)
TRAINED_STEPS = (
    ("trained step, `full`, s", "4.39", "train full", "eager"),
    ("the same by compiled diffusers, s", "4.77", "train full", LOCAL),
    ("trained step, `attention`, s", "3.65", "train attention", "eager"),
    ("trained step, `auto`, s", "3.45", "train auto", "eager"),
    ("trained step, `none`, s", "3.40", "train none", "eager"),
    ("forward, ours, s", "1.07", "forward", "eager"),
    ("forward, compiled diffusers, s", "1.17", "forward", LOCAL),
    ("the same with a merged LoRA, s", "1.10", "forward", f"{LOCAL} merged"),
)

ASSUMED_TFLOPS = 0.62 * 989
"""What Wan's matrix products and attention are taken to reach, in TFLOP/s: 62 % of an H200's data
sheet."""
WAN_TFLOP = {"forward": 517.0, "train": 1970.2}
"""TFLOP of a forward and of a trained step with checkpointing `full`, by `Spec.cost`: Wan 2.2
TI2V-5B, 704 x 1280, 121 frames."""


def wan_predictions() -> tuple[Prediction, ...]:
    """Return what is expected of Wan: its FLOPs at the assumed speed, and no more known."""
    found = []
    for part, name in (("forward", "forward"), ("train", "trained step, `full`")):
        seconds = Prediction(
            quantity=f"{name}, ours, s",
            expected=f"{WAN_TFLOP[part] / ASSUMED_TFLOPS:.2f}",
            value=values.wan(part, "ours"),
        )
        ratio = Prediction(
            quantity=f"{name}, compiled diffusers / ours",
            expected="above 1",
            value=values.wan_ratio(part),
        )
        found += [seconds, ratio]
    peak = Prediction(
        quantity="peak of its trained step / the plan's",
        expected="1.15 or below",
        value=values.wan_peak,
    )
    return (*found, peak)


PARTS = (
    INSTALL,
    Part(
        name="rollout-480p",
        tells="a trained step by each mode and a forward, beside compiled diffusers with the same "
        "attention kernel, and with its LoRA merged",
        seconds=260,
        command=rollout_480p,
        leaves=("rollout-480p.json",),
        predictions=(
            *(
                Prediction(quantity=quantity, expected=expected, value=values.rollout(part, path))
                for quantity, expected, part, path in TRAINED_STEPS
            ),
            Prediction(
                quantity="peak of `none`, GiB",
                expected="104",
                value=values.rollout_peak("train none", "eager"),
            ),
        ),
    ),
    Part(
        name="eager-step",
        tells="5x16x16: the eager step before and after a CUDA graph is captured, and the trace of "
        "one of each",
        seconds=30,
        command=measured("eager-step"),
        leaves=("eager-step.json", "eager-step-before.json.gz", "eager-step-after.json.gz"),
        predictions=(
            Prediction(
                quantity="eager step after - before a capture, ms",
                expected="60",
                value=values.eager_step_growth,
            ),
            Prediction(
                quantity="step by a graph / eager step before",
                expected="below 1",
                value=values.graphed_share,
            ),
        ),
    ),
    Part(
        name="streamed",
        tells="`hunyuanvideo15-24gb.yaml` within 22.3 GiB: a rollout step and a trained step, "
        "streamed and resident, with the same bits",
        seconds=90,
        command=measured("streamed"),
        leaves=("streamed.json",),
        predictions=(
            Prediction(
                quantity="results whose bits differ",
                expected="exactly 0",
                value=lambda found: len(found["streamed"]["different"]),
            ),
            Prediction(
                quantity="rollout step, streamed / resident",
                expected="1.1 or below",
                value=values.streamed("rollout"),
            ),
            Prediction(
                quantity="trained step, streamed / resident",
                expected="1.1 or below",
                value=values.streamed("train"),
            ),
        ),
    ),
    Part(
        name="tests",
        tells="operators, norms, graphs, checkpointing and streamed blocks on the card",
        seconds=60,
        command=changed_tests,
        leaves=("tests.json", "tests.log"),
        predictions=NO_FAILURE,
    ),
    Part(
        name="sequence-host",
        tells="the host's time until a forward of an eighth of the video tokens is launched, which "
        "bounds eight GPUs that share a video",
        seconds=30,
        command=sequence_host,
        leaves=("sequence-host.json",),
        predictions=(
            Prediction(
                quantity="host's time of a forward, ms",
                expected="110 to 170",
                value=lambda found: 1e3 * values.rollout("host", "eager")(found),
            ),
        ),
    ),
    Part(
        name="flash4-package",
        tells="flash-attn-4 itself: its first call, that of a second process, its bits beside the "
        "carried kernels', `doctor`",
        seconds=110,
        command=flash4_package,
        leaves=("flash4-package.json",),
        predictions=(
            Prediction(
                quantity="first call of the package, s",
                expected="30 to 60",
                value=lambda found: found["flash4"]["first"]["seconds"],
            ),
            Prediction(
                quantity="first call of a second process, s",
                expected="below 5",
                value=lambda found: found["flash4"]["second"]["seconds"],
            ),
            Prediction(
                quantity="results unlike the carried kernels'",
                expected="exactly 0",
                value=lambda found: len(found["flash4"]["different"]),
            ),
        ),
    ),
    Part(
        name="wan",
        tells="Wan 2.2 TI2V-5B with random weights, 704 x 1280, 121 frames: a forward and a "
        "trained step, ours and compiled diffusers' with the same attention kernel",
        seconds=100,
        command=measured("wan"),
        leaves=("wan.json",),
        predictions=wan_predictions(),
    ),
    Part(
        name="iteration",
        tells="as shipped, 2 samples, 3 steps: MFU by phase, peak memory within 15 % of the plan, "
        "kernels in every range",
        seconds=130,
        command=iteration,
        leaves=("iteration/profile.json", "iteration/ranges.json", "iteration/rank-000.json.gz"),
        predictions=(
            Prediction(quantity="MFU, %", expected="55", value=values.share("mfu")),
            Prediction(quantity="HFU, %", expected="60", value=values.share("hfu")),
            Prediction(
                quantity="trained step, s",
                expected="3.45",
                # six in two samples of three steps
                value=lambda found: found["phases"]["train"]["seconds"] / 6,
            ),
            PEAK,
            Prediction(
                quantity="kernels in the range `backward`",
                expected="above 0",
                value=lambda found: found["ranges"]["backward"]["kernels"],
            ),
        ),
    ),
    Part(
        name="doctor",
        tells="no row is `wrong`; `slow`: the GPU is shared or throttled",
        seconds=90,
        command=lambda call: sage(call, "doctor", *json_of(call, "doctor")),
        leaves=("doctor.json", "doctor.log"),
        predictions=(
            Prediction(
                quantity="checks that are wrong",
                expected="exactly 0",
                value=lambda found: sum(row["verdict"] == "wrong" for row in found["checks"]),
            ),
        ),
    ),
    Part(
        name="consan",
        tells="one case a kernel under Triton's sanitizer, where integer overflow is an error too",
        seconds=60,
        command=under("consan"),
        leaves=("consan.json", "consan.log"),
        predictions=NO_FAILURE,
    ),
    Part(
        name="memcheck",
        tells="one case a kernel under `compute-sanitizer`: 0 errors",
        seconds=90,
        command=under("memcheck"),
        leaves=("memcheck.json", "memcheck.log"),
        predictions=NO_FAILURE,
    ),
    Part(
        name="racecheck",
        tells="the same for races in shared memory: 0 hazards",
        seconds=90,
        command=under("racecheck"),
        leaves=("racecheck.json", "racecheck.log"),
        predictions=NO_FAILURE,
    ),
    Part(
        name="operators",
        tells="90 % of a copy at 720p or larger",
        seconds=180,
        command=operators,
        leaves=("operators.json",),
        predictions=(
            Prediction(
                quantity="slowest transition at 720p, % of a copy",
                expected="90 or more",
                value=values.slowest_transition,
            ),
        ),
    ),
    Part(
        name="adapter-rows",
        tells="the tile to ship; a copy and cuBLAS beside it",
        seconds=50,
        command=lambda call: bench_limits(call, "adapter-rows"),
        leaves=("adapter-rows.json",),
        predictions=(
            Prediction(
                quantity="adapter_rows with GELU, % of a copy",
                expected="60 or more",
                value=values.adapter_rows("GELU"),
            ),
            Prediction(
                quantity="its backward, % of a copy",
                expected="60 or more",
                value=values.adapter_rows("backward of GELU"),
            ),
        ),
    ),
    Part(
        name="decode-480p",
        tells="ours alone: stock has tensors of more than 2^31 elements",
        seconds=90,
        command=decode_480p,
        leaves=("decode-480p.json",),
        predictions=(
            Prediction(
                quantity="decode of a video, s",
                expected="below 2.1",
                value=values.rollout("decode", "channels last"),
            ),
        ),
    ),
    Part(
        name="ceiling",
        tells="a matrix product, burst and 3 s, data and zeros, clock and power",
        seconds=30,
        command=lambda call: bench_limits(call, "ceiling"),
        leaves=("ceiling.json",),
        predictions=(
            Prediction(
                quantity="matrix product for 3 s, TFLOP/s",
                expected="673",
                value=values.ceiling("normal"),
            ),
        ),
    ),
    Part(
        name="full",
        tells="`hunyuanvideo15-480p-full.yaml`, 33 frames, 4 blocks: peak memory against the plan",
        seconds=100,
        command=full,
        leaves=("full/profile.json", "full/ranges.json", "full/rank-000.json.gz"),
        predictions=(PEAK,),
    ),
    Part(
        name="nft",
        tells="the same of the challenger",
        seconds=80,
        command=nft,
        leaves=("nft/profile.json", "nft/ranges.json", "nft/rank-000.json.gz"),
        predictions=(PEAK,),
    ),
    Part(
        name="engines",
        tells="ZeRO-2 and ZeRO-3 on one rank within 1 % of the plain engine, else it fails",
        seconds=130,
        command=engines,
        leaves=("engines.json",),
        predictions=(
            Prediction(
                quantity="largest difference from plain, %",
                expected="1 or below",
                value=lambda found: 100 * found["largest_difference"],
            ),
        ),
    ),
    Part(
        name="testbed",
        tells="the testbed in bfloat16: rewards near those of the CPU, no message from the "
        "log-prob gate",
        seconds=100,
        command=testbed,
        leaves=("testbed.json", "testbed.log"),
        predictions=(
            Prediction(
                quantity="iterations",
                expected="3 or more",
                value=lambda found: len(found["metrics"]["plain"]),
            ),
        ),
    ),
    Part(
        name="attention",
        tells="every backend at 32,960 tokens, forward and backward apart, 3 s",
        seconds=110,
        command=lambda call: bench_limits(call, "attention"),
        leaves=("attention.json",),
        predictions=(
            Prediction(
                quantity="FlashAttention 4 forward, TFLOP/s",
                expected="654",
                value=values.attention("flash4", "forward"),
            ),
            Prediction(
                quantity="FlashAttention 4 backward, TFLOP/s",
                expected="609",
                value=values.attention("flash4", "backward"),
            ),
        ),
    ),
)
"""The parts for one GPU; those that a card should be asked first come first. Expected times are
those of an H100 or H200 at 480p, 81 frames, batch 1, unless a row or a part names another size."""


# -- several GPUs ----------------------------------------------------------------------------------


def collectives(call: Call) -> list[str]:
    words = launched(call, call.gpus)
    return [*words, "-m", "scripts.gpu.collectives", *json_of(call, "collectives")]


def launched(call: Call, gpus: int) -> list[str]:
    """Return the words that start a program on GPUs of this machine."""
    ranks = ["--nnodes", "1", "--nproc-per-node", str(gpus), "--master-port", "29511"]
    return [call.python, "-m", "torch.distributed.run", *ranks]


LORA = "configs/hunyuanvideo15-480p.yaml"
ALL_WEIGHTS = "configs/hunyuanvideo15-480p-full.yaml"
TINY_OF = {LORA: "configs/recipes/paper.yaml", ALL_WEIGHTS: "configs/recipes/paper_full.yaml"}


def several(
    kind: str, name: str, config: str, settings: Settings | None = None, *, alone: bool = False
) -> Callable[[Call], list[str]]:
    """Return the command of a short run on all GPUs, two samples each.

    Args:
        kind: what is done with the run, of scripts/gpu/several.py.
        name: of the part.
        config: a configuration.
        settings: of the run; `{gpus}` in a value stands for their number.
        alone: whether the run is on one of the GPUs, with its share of the samples.
    """

    def command(call: Call) -> list[str]:
        gpus = 1 if alone else call.gpus
        chosen = TINY_OF[config] if call.tiny else config
        run: dict[str, str | int] = {"sampling.steps": 2}
        if not call.tiny:
            run = {
                "model.path": "random:hunyuanvideo15-480p",
                "sampling.num_frames": 33,
                "sampling.steps": 4,
            }
        run |= {"train.iterations": 2, "train.optimizer_steps": 1, "train.checkpoint_interval": 1}
        run |= SHORT_EVALUATION
        run["train.prompts_per_iteration"] = gpus
        for key, value in (settings or {}).items():
            run[key] = str(value).format(gpus=call.gpus)
        where = ["--gpus", str(gpus), "--folder", str(call.scratch / name), *json_of(call, name)]
        return program(call, "several", kind, *where, chosen, *made_up(call), *given(run))

    return command


def on_several(name: str, seconds: int, tells: str, command: Callable[[Call], list[str]]) -> Part:
    return Part(name=name, tells=tells, seconds=seconds, command=command, leaves=(f"{name}.json",))


ZERO3: Settings = {"train.engine": "zero3"}
PARTS_OF_SEVERAL = (
    INSTALL,
    on_several(
        "collectives",
        100,
        "the LoRA's all-reduce in one buffer and in 1,300; a block's all-gather",
        collectives,
    ),
    on_several(
        "lora-alone",
        200,
        "two samples on one GPU",
        several("train", "lora-alone", LORA, alone=True),
    ),
    on_several(
        "lora", 260, "two samples a GPU: the same `time/total`", several("train", "lora", LORA)
    ),
    on_several("zero3", 300, "all weights, ZeRO-3", several("train", "zero3", ALL_WEIGHTS, ZERO3)),
    on_several(
        "zero3-no-prefetch",
        300,
        "the same without prefetch: what prefetch hides",
        several("no-prefetch", "zero3-no-prefetch", ALL_WEIGHTS, ZERO3),
    ),
    on_several(
        "zero2",
        300,
        "all weights, ZeRO-2: the fastest engine",
        several("train", "zero2", ALL_WEIGHTS, {"train.engine": "zero2"}),
    ),
    on_several(
        "sequence",
        300,
        "one video over all GPUs",
        several("train", "sequence", LORA, {"model.sequence_parallel": "{gpus}"}),
    ),
    on_several(
        "resume",
        400,
        "a run goes on from its checkpoint",
        several("resume", "resume", ALL_WEIGHTS, ZERO3),
    ),
    on_several(
        "killed",
        400,
        "a run goes on after a killed rank",
        several("killed", "killed", ALL_WEIGHTS, ZERO3),
    ),
    on_several(
        "hybrid",
        300,
        "two groups of half the GPUs, as two nodes: `hybrid_shard`",
        several("hybrid", "hybrid", ALL_WEIGHTS, {**ZERO3, "train.hybrid_shard": "true"}),
    ),
)
"""The parts for several GPUs of one machine."""


def parts_for(gpus: int) -> dict[str, Part]:
    """Return name -> part, for a number of GPUs."""
    return {part.name: part for part in (PARTS if gpus == 1 else PARTS_OF_SEVERAL)}


def in_calls(parts: list[Part], seconds: int = CALL_SECONDS) -> list[list[Part]]:
    """Split parts, in their order, into calls whose limits sum to at most `seconds`."""
    calls: list[list[Part]] = []
    for part in parts:
        if not calls or sum(p.seconds for p in calls[-1]) + part.seconds > seconds:
            calls.append([])
        calls[-1].append(part)
    return calls


def result_of(part: Part, out: Path) -> Found | None:
    """Return the content of a part's results in `out`, joined; None if there is none."""
    joined: dict[str, Any] = {}
    for name in part.leaves:
        file = out / name
        if name.endswith(".json") and file.is_file():
            joined |= json.loads(file.read_text(encoding="utf-8"))
    return joined or None
