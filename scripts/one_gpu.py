"""Write the table of docs/how-to/one-gpu.md, by the plan: `python -m scripts.one_gpu` does it;
tests/test_plan.py fails while it differs."""

from sage_fast.config.loader import load
from sage_fast.config.schema import Config
from sage_fast.config.shipped import FOLDER
from sage_fast.models.find import find_spec
from sage_fast.models.spec import Spec
from sage_fast.tools.plan import iteration_flops, plan_of_run, seconds_on_a_gpu
from sage_fast.tools.plan_text import duration
from sage_fast.util.cards import CARDS
from scripts.reference import FOLDER as REFERENCE
from scripts.reference import page_with

PAGE = "../how-to/one-gpu.md"
BEGIN = "<!-- table: written by python -m scripts.one_gpu -->"
END = "<!-- end of table -->"
CONFIGURATION = "hunyuanvideo15-24gb"
FRAMES = (17, 33, 81)
GIB = 2**30
HEAD = (
    "card, GB",
    "frames",
    "memory taken",
    "streamed blocks",
    "host memory",
    "checkpointing",
    "parked",
    "an iteration",
)


def row(config: Config, spec: Spec, gigabytes: int, frames: int) -> list[str]:
    """Return the cells of a card and a length."""
    changed = config.replace({"sampling.num_frames": frames})
    planned = plan_of_run(changed, spec, ranks=1, gpu_memory=1e9 * gigabytes)
    start = [f"{gigabytes} ({planned.card.model})", str(frames)]
    if not planned.fits:
        return [*start, f"{planned.together / GIB:.1f} GiB: too much", *["-"] * (len(HEAD) - 3)]
    times = seconds_on_a_gpu(iteration_flops(planned), planned.copies, planned.card)
    return [
        *start,
        f"{planned.together / GIB:.1f} GiB",
        f"{planned.streamed} of {planned.blocks}" if planned.streamed else "none",
        f"{planned.in_host_memory / GIB:.1f} GiB" if planned.in_host_memory else "-",
        str(planned.checkpointing),
        ", ".join(planned.parked) or "-",
        " to ".join(map(duration, times)),
    ]


def table() -> str:
    """Return the table in Markdown."""
    config = load(FOLDER / f"{CONFIGURATION}.yaml")
    spec = find_spec(config.model.path)
    lines = [f"| {' | '.join(HEAD)} |", f"|{'---|' * len(HEAD)}"]
    for card in CARDS:
        for frames in FRAMES:
            lines.append(f"| {' | '.join(row(config, spec, card.gigabytes, frames))} |")
    return "\n".join(lines) + "\n"


def written() -> str:
    """Return the page with the table of today."""
    return page_with(PAGE, BEGIN, table(), END)


if __name__ == "__main__":
    (REFERENCE / PAGE).write_text(written(), encoding="utf-8")
