"""Draw where the GPU seconds of one SAGE-GRPO sample go, from files alone: `python -m
scripts.gpu_seconds` writes docs/images/gpu-seconds.svg.

A sample has 480p, 81 frames and 20 steps: 20 forwards of the rollout, 20 of the anchor, 20 trained
steps and a decode. Nothing is assumed that no file in benchmarks/results holds. So diffusers has no
classes of kernels, since no profile of it is on disk, and no decode; rewards and the optimizer are
left out for all.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from matplotlib.figure import Figure

from sage_fast.report.charts import COLORS, GREY
from scripts import measured
from studies.drawn import picture

FILE = Path(__file__).parent.parent / "docs" / "images" / "gpu-seconds.svg"
STEPS = 20
FORWARDS = 2
"""Forwards without gradients at each step: of the rollout and of the anchor."""

NOT_SPLIT = "not split: no profile on disk"
ATTENTION = "attention"
MATMULS = "matmuls"
OPERATORS = "our operators"
REST = "other kernels, and no kernel"
DECODE = "decode"
CLASSES = {
    ATTENTION: COLORS[0],
    MATMULS: COLORS[1],
    OPERATORS: COLORS[2],
    REST: COLORS[3],
    DECODE: COLORS[4],
    NOT_SPLIT: GREY,
}


def of_diffusers() -> dict[str, float]:
    """Return class -> seconds of compiled diffusers without a mask, by cuDNN's attention, which
    recomputes everything. Its decode is not on disk."""
    forward, step = (measured.seconds(part, "tuned compiled") for part in ("forward", "train"))
    return {NOT_SPLIT: STEPS * (FORWARDS * forward + step)}


def of_ours() -> dict[str, float]:
    """Return class -> seconds of ours, from the kernel table and the phases of the profiled
    iteration: FlashAttention 4, recomputation by `auto`."""
    phases = measured.result(measured.ITERATION)["phases"]
    each = STEPS / (measured.SAMPLES * measured.STEPS)
    steps = each * sum(phases[name]["seconds"] for name in ("rollout", "anchor", "train"))
    # The autoencoder's attention, convolutions and `norm_silu` are within the decode.
    named = {
        ATTENTION: measured.kernels("kernel_cutlass_kernel_flash")[1],
        MATMULS: measured.kernels("nvjet")[1],
        OPERATORS: measured.kernels("_")[1] - measured.kernels("_norm_silu")[1],
    }
    found = {name: each * seconds for name, seconds in named.items()}
    found[REST] = steps - sum(found.values())
    found[DECODE] = phases["decode"]["seconds"] / measured.SAMPLES
    return found


def of_the_floor() -> dict[str, float]:
    """Return class -> seconds of the model's FLOPs alone, without a recomputation, at the rates
    that the card held for three seconds: FlashAttention 4's, and a matmul's for all else."""
    flops: dict[str, float] = {}
    rates: dict[str, float] = {}
    for way in ("forward", "backward"):
        row = measured.limit(
            measured.ATTENTION, "attention", backend="flash4", data="normal", direction=way
        )
        rates[way] = row["flops_per_second"]
        flops[way] = measured.BLOCKS * row["flops_per_second"] * row["seconds"] / row["calls"]
    matmul = measured.limit(measured.CEILING, "ceiling", data="normal")["flops_per_second"]

    forward, step = (
        measured.row(measured.ROLLOUT, size=measured.SIZE, part=part)["model_flops"]
        for part in ("forward", "train")
    )
    linear = forward - flops["forward"]
    # model FLOPs count a backward of attention as two forwards
    linear_backward = step - forward - 2 * flops["forward"]
    attention = (FORWARDS + 1) * flops["forward"] / rates["forward"]
    attention += flops["backward"] / rates["backward"]
    matmuls = ((FORWARDS + 1) * linear + linear_backward) / matmul
    decode = measured.result(measured.ITERATION)["phases"]["decode"]["flops"] / measured.SAMPLES
    return {ATTENTION: STEPS * attention, MATMULS: STEPS * matmuls, DECODE: decode / matmul}


def bars() -> dict[str, Mapping[str, float]]:
    """Return the bars of the figure, the uppermost first."""
    return {
        "diffusers, compiled, cuDNN,\nfull recomputation, no decode": of_diffusers(),
        "ours, FlashAttention 4,\nrecomputation by auto": of_ours(),
        "floor: FLOPs at the rates\nthat the card held for 3 s": of_the_floor(),
    }


def words() -> str:
    """Return what docs/results/gpu.md says of the figure."""
    diffusers, ours, floor = bars().values()
    total, least = sum(ours.values()), sum(floor.values())
    split = ", ".join(f"{name} {ours[name]:.1f} s" for name in (ATTENTION, MATMULS, OPERATORS))
    lowest = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in floor.items())
    return (
        f"ours {total:.0f} s ({split}, {REST} {ours[REST]:.1f} s, {DECODE} {ours[DECODE]:.1f} s); "
        f"the floor {least:.0f} s ({lowest}), {100 * least / total:.0f} % of ours; "
        f"compiled diffusers {sum(diffusers.values()):.0f} s without a decode"
    )


def draw(figure: Figure) -> None:
    axes = figure.subplots()
    for height, seconds in enumerate(bars().values()):
        start = 0.0
        for name, value in seconds.items():
            axes.barh(-height, value, left=start, color=CLASSES[name], height=0.6)
            start += value
        axes.text(start + 1, -height, f"{start:.0f} s", va="center")
    used = {name for seconds in bars().values() for name in seconds}
    handles = [
        axes.barh(0, 0, color=color, label=name) for name, color in CLASSES.items() if name in used
    ]
    axes.set_yticks([-height for height in range(len(bars()))], [*bars()])
    axes.set_xlim(0, 180)
    axes.set_xlabel("GPU seconds of one sample: 480p, 81 frames, 20 steps, one H200")
    axes.grid(visible=False, axis="y")
    figure.legend(handles=handles, loc="outside upper center", ncols=3, frameon=False)


def drawn() -> bytes:
    """Return the figure as SVG."""
    return picture(draw, (7.5, 3.4), "svg", "gpu-seconds")


if __name__ == "__main__":
    FILE.write_bytes(drawn())
    print(words())
