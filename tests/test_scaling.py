"""docs/explanation/scaling.md says what benchmarks/scaling.py computes, which is what the plan and
PyTorch count."""

import inspect
import re

import pytest
from diffusers import HunyuanVideo15Transformer3DModel

from benchmarks import scaling
from benchmarks.scaling import ARCHITECTURE, Work
from sage_fast.tools.plan import plan
from tests.tiny import settings

PAGE = scaling.PAGE.read_text(encoding="utf-8")


def test_the_tables_of_the_page_are_those_of_the_formulas() -> None:
    assert re.findall(r"<!-- table: (\w+) -->", PAGE) == ["sizes"]
    assert scaling.written(PAGE) == PAGE, "run python -m benchmarks.scaling"


def test_the_formulas_are_the_plans() -> None:
    """Compare the published model at 480p: tokens, FLOPs of every part, weights and activations."""
    defaults = inspect.signature(HunyuanVideo15Transformer3DModel.__init__).parameters
    assert {name: defaults[name].default for name in ARCHITECTURE} == ARCHITECTURE
    config = settings(
        model__path="hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v",
        model__dtype="bfloat16", model__lora_rank=64, model__gradient_checkpointing="attention",
        model__sequence_parallel=8, sampling__num_frames=81, sampling__height=480,
        sampling__width=832,
        sampling__steps=20, train__prompts_per_iteration=8, train__group_size=4,
        train__batch_size=1,
    )  # fmt: skip
    planned, work = plan(config, ranks=8), Work()
    assert (planned.tokens, planned.latent_shape) == (work.tokens, work.latents)
    assert planned.flops["forward"] == work.forward
    assert planned.flops["decode"] == work.samples * work.decode
    parts = sum(planned.flops[part] for part in ("rollout", "training", "anchor"))
    assert parts == pytest.approx(work.samples * work.of_a_sample)
    assert f"| {planned.memory['activations, checkpointing attention'] / 2**30:.1f} GiB |" in PAGE
