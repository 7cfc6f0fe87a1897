"""Recompute every sentence about speed on README.md and docs/results/gpu.md from the files named
beside it: `python -m scripts.claims`.

A claim is the words that a page must contain, written from the numbers of its files. `problems`
also finds a number with a unit of speed that no claim covers. tests/test_claims.py runs both.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterator

from sage_fast.tools.harness import full_rate
from scripts import gpu_seconds
from scripts.measured import (
    ATTENTION,
    BLOCKS,
    CEILING,
    DEMO,
    FULL,
    ITERATION,
    NFT,
    OPERATORS,
    PICTURE,
    PLANNED_BURST,
    REPOSITORY,
    ROLLOUT,
    SAMPLES,
    SIZE,
    SMALL,
    STEPS,
    TILES,
    TOKENS,
    UNIT,
    VIDEO,
    WIDTH,
    ZERO3,
    copy_rate,
    kernels,
    limit,
    result,
    row,
    seconds,
    trained_step,
)

README = "README.md"
GPU = "docs/results/gpu.md"
COMPARISON = "docs/results/comparison.md"
ENGINE = "docs/explanation/rollout-engine.md"

SPEED = re.compile(r"\d[\d.,]* (?:s|ms|us|%|times|TFLOP/s|GB/s|TB/s)(?![\w/])|\d[\d.]*x(?!\d)")
"""A number with a unit of speed."""
TABLE = re.compile(r"<!-- table: .*?<!-- end -->", re.S)
"""A table that scripts/gpu_page.py writes from its file."""


@dataclasses.dataclass(frozen=True)
class Claim:
    """Words on a page and the files that they follow from.

    Attributes:
        page: path in the repository.
        files: names in benchmarks/results. The section of the words names each.
        words: a sentence, or a part of one, or a row of a table.
    """

    page: str
    files: tuple[str, ...]
    words: str


def share_of_copy(passes: float, calls: int, beginning: str) -> str:
    """Return how fast kernels of the iteration are beside a copy.

    Args:
        passes: reads and writes of a block's video tokens in one block, as benchmarks/passes.py
            counted them at the file's commit.
        calls: blocks that they ran in.
        beginning: of the kernel's name.
    """
    _, took = kernels(beginning)
    return f"{100 * passes * UNIT * calls / took / copy_rate():.0f} %"


def rate(part: str, path: str) -> float:
    """Return FLOP/s of a path at 480p, 81 frames, recomputation included."""
    return row(ROLLOUT, size=SIZE, part=part)["flops"] / seconds(part, path)


def sheet(name: str) -> float:
    """Return the FLOP/s of a file's card by its data sheet."""
    full, line = full_rate(result(name)["environment"], 0.0)
    assert "data sheet" in line
    return full


def of_sheet(flops_per_second: float, name: str = ROLLOUT) -> str:
    return f"{100 * flops_per_second / sheet(name):.0f}"


def best_tiles() -> list[float]:
    """Return, for each use of `adapter_rows`, the share of a copy that its fastest tile reaches."""
    shares = []
    for use in result(TILES)["limits"]["adapter_rows"]:
        tiles = [took for name, took in use["seconds"].items() if name not in ("copy", "PyTorch")]
        shares.append(100 * use["seconds"]["copy"] / min(tiles))
    return shares


def commit(name: str) -> str:
    """Return the first seven digits of the commit that a file was measured at."""
    return result(name)["environment"]["commit"][:7]


# -- README ----------------------------------------------------------------------------------------

COLUMNS = ("eager", "eager cudnn", "tuned compiled", "stock")
"""Paths of README's table of one video."""


def ratios() -> str:
    """Return the three comparisons with compiled diffusers."""
    forward, step = (seconds(part, "tuned compiled") for part in ("forward", "train"))
    equal = [forward / seconds("forward", "eager cudnn"), step / seconds("train", "eager cudnn")]
    ours = [forward / seconds("forward", "eager"), step / seconds("train", "eager")]
    return (
        f"with cuDNN's attention on both sides {equal[0]:.2f} in the forward and {equal[1]:.2f} in "
        f"the trained step; with FlashAttention 4 on our side {ours[0]:.2f} and {ours[1]:.2f}; "
        f"training as shipped, with `auto`, {step / trained_step():.2f}: "
        f"{trained_step():.2f} s against {step:.2f} s"
    )


def readme() -> Iterator[Claim]:
    def claim(words: str, *files: str) -> Claim:
        return Claim(README, files, words)

    spent = result(PICTURE)["seconds"]
    installing = sum(value for name, value in spent.items() if name.startswith("install"))
    running = sum(spent.values()) - installing
    words = (
        f"installing took {installing} s and the run {running} s, {spent['training']} s of "
        "them its training"
    )
    yield claim(words, PICTURE)
    minutes = {2: "two minutes of training"}[round(spent["training"] / 60)]
    yield claim(f"after {minutes} on two CPU cores")

    forward = [f"{seconds('forward', path):.2f} s" for path in COLUMNS]
    full = [f"{seconds('train', path):.2f} s" for path in COLUMNS]
    yield claim(f"| forward | **{forward[0]}** | " + " | ".join(forward[1:]) + " |", ROLLOUT)
    yield claim(f"| trained step, `full` | {full[0]} | " + " | ".join(full[1:]) + " |", ROLLOUT)
    auto = f"| trained step, `auto`, the default | **{trained_step():.2f} s** | - | - | - |"
    yield claim(auto, ITERATION)
    yield claim(ratios(), ROLLOUT, ITERATION)

    for operator, what in (
        ("transition_step", "a denoising step and its log-probability"),
        ("transition_score", "log-probability and KL of a stored step"),
    ):
        timed = row(OPERATORS, operator=operator, size="720p batch 4")["seconds"]
        fused, compiled, eager = (
            f"{1e6 * timed[path]['p50']:.0f} us" for path in ("fused", "compiled", "eager")
        )
        yield claim(f"| `{operator}`: {what} | **{fused}** | {compiled} | {eager} |", OPERATORS)

    whole, decode = video()
    yield claim(f"| {whole + decode:.0f} s | [vLLM-Omni](", VIDEO)
    yield claim(f"| of this, its decoding | {decode:.1f} s | - |", VIDEO)
    total = result(ITERATION)["phases"]["total"]
    mfu, hfu = (
        of_sheet(total[key] / total["seconds"], ITERATION) for key in ("model_flops", "flops")
    )
    reached = f"{total['flops'] / total['seconds'] / 1e12:.0f} TFLOP/s: {mfu} %, {hfu} %"
    yield claim(reached, ITERATION)
    yield claim(f"the data sheet's {sheet(ITERATION) / 1e12:.0f} TFLOP/s", ITERATION)
    timed = result(DEMO)
    phases = timed["phases"]["total"]
    yield claim(
        f"| an iteration of the demo | {phases['eager']:.2f} s | {phases['stock']:.2f} s, "
        f"diffusers as it comes | two CPU cores, medians of {timed['rounds']}",
        DEMO,
    )
    for name in (ROLLOUT, ITERATION, OPERATORS, DEMO):
        yield claim(commit(name), name)


def video() -> tuple[float, float]:
    """Return the seconds of 50 steps of a video of 121 frames, and of its decoding."""
    steps = row(VIDEO, part="rollout", rounds=1)["seconds"]["eager"]
    return steps, row(VIDEO, part="decode", rounds=1)["seconds"]["channels last"]


# -- gpu.md ----------------------------------------------------------------------------------------


def page_of_gpus() -> Iterator[Claim]:
    def claim(words: str, *files: str) -> Claim:
        return Claim(GPU, files, words)

    def planned(factor: float) -> str:
        return f"{PLANNED_BURST / factor / 1e12:.0f}"

    assert sheet(ITERATION) == sheet(FULL)
    full = f"the {sheet(ITERATION) / 1e12:.0f} TFLOP/s that the data sheets of both cards give"
    yield claim(full, ITERATION, FULL)
    yield claim(f"shares of a burst of {PLANNED_BURST / 1e12:.0f} TFLOP/s before the cards ran")

    flash, cudnn = rate("forward", "eager"), rate("forward", "eager cudnn")
    yield claim(
        f"at least {planned(1.31)} TFLOP/s with FlashAttention 4, {planned(1.39)} TFLOP/s with "
        f"cuDNN's | {flash / 1e12:.0f} TFLOP/s; cuDNN **missed**: {cudnn / 1e12:.0f} TFLOP/s "
        f"({of_sheet(flash)} %, {of_sheet(cudnn)} %)",
        ROLLOUT,
    )
    flash, cudnn = rate("train", "eager"), rate("train", "eager cudnn")
    yield claim(
        f"at least {planned(1.38)} TFLOP/s, {planned(1.47)} TFLOP/s | {flash / 1e12:.0f} TFLOP/s, "
        f"{cudnn / 1e12:.0f} TFLOP/s ({of_sheet(flash)} %, {of_sheet(cudnn)} %)",
        ROLLOUT,
    )
    yield claim(ratios(), ROLLOUT, ITERATION)

    tiles = best_tiles()
    yield claim(
        f"| `adapter_rows` at 60 % of a copy | H200: {min(tiles):.0f} to {max(tiles):.0f} %", TILES
    )
    rows = [r for r in result(OPERATORS)["rows"] if r["size"] in ("720p batch 4", "large")]
    shares = [100 * r["seconds"]["copy"]["p50"] / r["seconds"]["fused"]["p50"] for r in rows]
    yield claim(
        "other operators at 90 % of a copy from 720p, batch 4 | H100: `transition_step`, "
        f"`transition_score` {min(shares):.0f} to {max(shares):.0f} %",
        OPERATORS,
    )
    yield claim(in_an_iteration(), ITERATION, TILES)

    timed = row(SMALL, part="step")["seconds"]
    alone = row(SMALL, part="forward")["seconds"]["eager"]
    unexplained = 1e3 * (timed["eager"] - alone)
    yield claim(
        "at least 1.5 times as fast as our eager one at 5x16x16 | "
        f"H200: {timed['eager'] / timed['graphed']:.1f} times; {alone / timed['graphed']:.1f} "
        f"times without the {unexplained:.0f} ms of the eager step that are unexplained",
        SMALL,
    )
    yield claim(f"took {longer()} longer for a step than for a forward", SMALL)
    yield claim(
        f"so of the graph's gain of {timed['eager'] / timed['graphed']:.1f} times a part may be "
        f"theirs: a graph's step is {alone / timed['graphed']:.1f} times as fast as the eager "
        "forward alone",
        SMALL,
    )

    total = result(ITERATION)["phases"]["total"]
    mfu, hfu = (
        of_sheet(total[key] / total["seconds"], ITERATION) for key in ("model_flops", "flops")
    )
    wanted = [100 * share * PLANNED_BURST / sheet(ITERATION) for share in (0.56, 0.63)]
    yield claim(
        f"above {wanted[0]:.0f} %, {wanted[1]:.0f} % | H200: {mfu} %, {hfu} %, one profiled "
        f"iteration of {SAMPLES} samples and {STEPS} steps",
        ITERATION,
    )
    peaks = {name: result(name) for name in (ITERATION, FULL, NFT, ZERO3)}
    of_plan = {
        name: 100 * found["peak_bytes"]["train"] / found["planned_bytes"]
        for name, found in peaks.items()
    }
    lora = of_plan.pop(ITERATION)
    yield claim(
        f"within 15 % of the plan | {lora:.0f} % (H200, LoRA), {min(of_plan.values()):.0f} to "
        f"{max(of_plan.values()):.0f} % (H100, all weights)",
        *peaks,
    )

    normal, zeros = (limit(CEILING, "ceiling", data=data) for data in ("normal", "zeros"))
    burst = result(CEILING)["limits"]["burst_flops_per_second"]
    yield claim(
        f"In a burst a matmul reaches {burst / 1e12:.0f} TFLOP/s, {of_sheet(burst, CEILING)} % of "
        f"the data sheet; for three seconds on end the card's power limits it to "
        f"{normal['flops_per_second'] / 1e12:.0f} TFLOP/s, "
        f"{of_sheet(normal['flops_per_second'], CEILING)} %. Zeros need less power: "
        f"{zeros['flops_per_second'] / 1e12:.0f} TFLOP/s",
        CEILING,
    )

    whole, decode = video()
    yield claim(
        f"{whole:.0f} s and {decode:.1f} s for the decoding, {whole + decode:.0f} s together", VIDEO
    )
    _, every = kernels("")
    named = {
        "attention": kernels("kernel_cutlass_kernel_flash", "fmha")[1],
        "matmuls": kernels("nvjet")[1],
        "convolutions": kernels("sm90_xmma_fprop")[1],
        "our operators": kernels("_")[1],
    }
    found = {name: f"{100 * took / every:.0f} %" for name, took in named.items()}
    yield claim(
        f"attention has {found['attention']} of the GPU's time, matmuls {found['matmuls']}, "
        f"convolutions {found['convolutions']}, our operators {found['our operators']}",
        ITERATION,
    )
    yield claim(f"a trained step, {trained_step():.2f} s", ITERATION)
    yield claim(gpu_seconds.words(), ROLLOUT, ITERATION, ATTENTION, CEILING)


# -- rollout-engine.md -----------------------------------------------------------------------------


def page_of_the_engine() -> Iterator[Claim]:
    """Yield what was measured beside what benchmarks/passes.py predicts."""
    linear, attended = 24.0 * WIDTH**2 * TOKENS, 4.0 * TOKENS**2 * WIDTH
    limits = (linear + attended, 3 * linear + 4.5 * attended)
    page = (REPOSITORY / ENGINE).read_text(encoding="utf-8")
    predicted = re.findall(
        r"^\| of the limit, attention at [\d/]+ TFLOP/s: .*? \| ([\d.]+) \| ([\d.]+) \|", page, re.M
    )
    named = (("cuDNN's attention", "eager cudnn"), ("FlashAttention 4", "eager"))
    for (name, path), shares in zip(named, predicted, strict=True):
        times = [
            BLOCKS * flops / PLANNED_BURST * float(share)
            for flops, share in zip(limits, shares, strict=True)
        ]
        words = (
            f"| {name} | {times[0]:.2f} s, {times[1]:.2f} s | {seconds('forward', path):.2f} s, "
            f"{seconds('train', path):.2f} s |"
        )
        yield Claim(ENGINE, (ROLLOUT,), words)
    for phase, timed in result(DEMO)["phases"].items():
        stock, ours = timed["stock"], timed["eager"]
        words = f"| {phase} | {1e3 * stock:.0f} ms | {1e3 * ours:.0f} ms | {stock / ours:.2f}x |"
        yield Claim(ENGINE, (DEMO,), words)


def comparison() -> Iterator[Claim]:
    yield Claim(COMPARISON, (VIDEO,), f"ours took {sum(video()):.0f} s, without text encoding")


def longer() -> str:
    """Return how much longer than a forward a step took, on the paths that have both."""
    forward, step = (row(SMALL, part=part)["seconds"] for part in ("forward", "step"))
    more = sorted(1e3 * (step[path] - forward[path]) for path in forward)
    return f"{more[0]:.0f} to {more[-1]:.0f} ms"


def in_an_iteration() -> str:
    """Return how fast operators were beside a copy, by the iteration's own kernel table."""
    trained = SAMPLES * STEPS * BLOCKS
    forwards, _ = kernels("_norm_rotate_fwd")
    norms = [
        share_of_copy(4.1, forwards, "_norm_rotate_fwd"),
        share_of_copy(2.1, forwards, "_norm_modulate_fwd"),
        share_of_copy(4.1, forwards, "_gated_norm_fwd"),
    ]
    # the backward of `gated_norm` has the kernel of `norm_modulate`'s: 5.1 and 4.1 passes
    norm_backward = share_of_copy(5.1 + 4.1, trained, "_norm_modulate_bwd")
    adapter_backward = share_of_copy(12.1, trained, "_adapter_rows_bwd")
    cat = share_of_copy(2.0, trained, "void at::native::(anonymous namespace)::CatArrayBatchedCopy")
    return (
        f"`norm_rotate` {norms[0]}, `norm_modulate` {norms[1]}, `gated_norm` {norms[2]}; the "
        f"norms' backward {norm_backward}, `adapter_rows`' backward {adapter_backward}, `cat` in "
        f"attention's backward {cat}"
    )


# -- all of it -------------------------------------------------------------------------------------


def claims() -> list[Claim]:
    """Return every claim, in the order of the pages."""
    return [*readme(), *page_of_gpus(), *page_of_the_engine(), *comparison()]


def flat(text: str) -> str:
    """Return text with one space where it has any white space."""
    return " ".join(text.split())


def text_about_speed(page: str) -> str:
    """Return what a page says about speed: README's section, and gpu.md without written tables."""
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    if page == README:
        text = text.split("\n## Speed\n")[1].split("\n## ")[0]
    return flat(TABLE.sub("", text))


def section_with(page: str, words: str) -> str:
    """Return the section of a page that has these words; empty if none has."""
    sections = re.split(r"^## ", (REPOSITORY / page).read_text(encoding="utf-8"), flags=re.M)
    return next((section for section in sections if words in flat(section)), "")


def problems() -> list[str]:
    """Return what the pages say otherwise than the files, and numbers without a claim."""
    found = []
    for claim in claims():
        section = section_with(claim.page, claim.words)
        if not section:
            found.append(f"{claim.page} does not say: {claim.words}")
            continue
        found += [
            f"{claim.page}: name {name} beside: {claim.words}"
            for name in claim.files
            if name not in section
        ]
    for page in (README, GPU):
        left = text_about_speed(page)
        for claim in claims():
            if claim.page == page:
                left = left.replace(claim.words, "\n")
        for words in OF_OTHERS:
            left = left.replace(words, "\n")
        found += [
            f"{page}: no file gives: ...{left[max(0, m.start() - 60) : m.end() + 20]}..."
            for m in SPEED.finditer(left)
        ]
    return found


OF_OTHERS = ("publishes 259 s",)
"""Numbers that others published, with a link to where."""


if __name__ == "__main__":
    for claim in claims():
        print(f"{claim.page}: {claim.words}\n    {', '.join(claim.files)}")
    wrong = problems()
    print("\n".join(wrong) or "the pages say what the files say")
    sys.exit(bool(wrong))
