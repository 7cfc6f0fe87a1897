"""Write configs/plans.json: memory and times of every shipped configuration, for `sage-fast init
--list`.

`python -m scripts.shipped_plans` does it, by the plan (`sage_fast/tools/plan.py`);
tests/test_plan.py fails while the file differs.
"""

import json
from typing import Any

from sage_fast.config.loader import load
from sage_fast.config.schema import Config
from sage_fast.config.shipped import FOLDER, PLANS, shipped_names
from sage_fast.models.find import find_spec
from sage_fast.models.spec import Spec
from sage_fast.tools.plan import (
    MOST_CPU_SECONDS,
    iteration_flops,
    plan_of_run,
    run_copies,
    run_flops,
    seconds_on_a_gpu,
    seconds_on_cpu,
)

GPUS = {
    "hunyuanvideo15-24gb": (1,),
    "hunyuanvideo15-480p": (1, 8),
    "hunyuanvideo15-480p-full": (8, 64),
    "official-480p": (64,),
    "wan21-1.3b": (1,),
    "wan22-ti2v-5b": (1, 8),
}
"""Configuration -> numbers of GPUs that its plans are for."""
DEFAULT_GPUS = (8,)
GIGABYTES = {"hunyuanvideo15-24gb": 24, "wan21-1.3b": 24}
"""Configuration -> memory of the GPUs that its plans are for."""
DEFAULT_GIGABYTES = 80
GIB = 2**30
DIGITS = 4


def plans_of(name: str) -> list[dict[str, Any]]:
    """Return the plans of a shipped configuration."""
    config = load(FOLDER / f"{name}.yaml")
    spec = find_spec(config.model.path)
    gigabytes = GIGABYTES.get(name, DEFAULT_GIGABYTES)
    planned = plan_of_run(config, spec, ranks=1, gpu_memory=1e9 * gigabytes)
    run_seconds = seconds_on_cpu(run_flops(planned))
    if run_seconds <= MOST_CPU_SECONDS:
        of_cpu = {part: size for part, size in planned.memory.items() if part != "CUDA graphs"}
        cpu = {
            "iterations": planned.iterations,
            "memory_gib": rounded(sum(of_cpu.values()) / GIB),
            "iteration_seconds": rounded(seconds_on_cpu(iteration_flops(planned))),
            "run_minutes": rounded(run_seconds / 60),
        }
        return [cpu]
    return [gpu_plan(config, spec, count, gigabytes) for count in GPUS.get(name, DEFAULT_GPUS)]


def gpu_plan(config: Config, spec: Spec, count: int, gigabytes: int) -> dict[str, Any]:
    """Return the plan of a run on `count` GPUs of `gigabytes`."""
    planned = plan_of_run(config, spec, ranks=count, gpu_memory=1e9 * gigabytes)
    # In no memory, `auto` recomputes as much as it can.
    least = plan_of_run(config, spec, ranks=count, gpu_memory=1.0)
    iteration = seconds_on_a_gpu(iteration_flops(planned), planned.copies, planned.card)
    whole_run = seconds_on_a_gpu(run_flops(planned), run_copies(planned), planned.card)
    return {
        "gpus": count,
        "gpu_gigabytes": gigabytes,
        "iterations": planned.iterations,
        "memory_gib": rounded(sum(planned.memory.values()) / GIB),
        "least_memory_gib": rounded(sum(least.memory.values()) / GIB),
        "iteration_minutes": [rounded(seconds / 60) for seconds in iteration],
        "gpu_hours": [rounded(count * seconds / 3600) for seconds in whole_run],
    }


def rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


if __name__ == "__main__":
    plans = {name: plans_of(name) for name in shipped_names()}
    PLANS.write_text(json.dumps(plans, indent=1) + "\n", encoding="utf-8")
