"""Cost of an iteration, counted where it happens, and the throughput in the rows of a run."""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sage_fast.algorithm.flops import flops, training_flops
from sage_fast.cli import main
from sage_fast.config.loader import dump
from sage_fast.models.checkpointing import CheckpointPlan
from sage_fast.models.cost import Cost
from sage_fast.run import facts
from sage_fast.run.facts import throughput
from sage_fast.tools.harness import full_rate
from sage_fast.tools.plan import plan
from sage_fast.util.environment import peak_flops
from sage_fast.util.files import read_metrics
from tests.tiny import settings, tiny_trainer


class OneFlatGroup:
    """Rewards all videos of the first prompt equally, so that its group teaches nothing."""

    def __call__(self, videos: Tensor, prompts: list[str]) -> dict[str, Tensor]:
        flat = torch.tensor([prompt == min(prompts) for prompt in prompts])
        brightness = videos.mean((1, 2, 3, 4)).where(~flat, torch.ones(()))
        return {"vq": brightness, "mq": brightness, "ta": brightness}


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param({"kl__strategy": "dual", "train__optimizer_steps": 2}, id="anchor"),
        pytest.param(
            {"kl__strategy": "dual", "sampling__guidance_scale": 3.0},
            id="guidance",
            marks=pytest.mark.soak,
        ),
        pytest.param(
            {"kl__strategy": "moving", "kl__anchor_interval": 1},
            id="anchor-always-current",
            marks=pytest.mark.soak,
        ),
        pytest.param({"kl__strategy": "none", "train__timestep_fraction": 0.6}, id="no-anchor"),
        pytest.param({"objective__surrogate": "nft", "kl__strategy": "moving"}, id="nft"),
        pytest.param(
            {"sampling__shared_initial_noise": True, "sampling__sde_window": 2}, id="shared-steps"
        ),
        pytest.param(
            {"objective__surrogate": "awm", "kl__strategy": "none", "train__optimizer_steps": 2},
            id="matching",
            marks=pytest.mark.soak,
        ),
        pytest.param(
            {"sampling__averaged_weights": True, "train__ema_decay": 0.9, "kl__strategy": "moving"},
            id="averaged",
        ),
    ],
)
def test_the_forwards_are_those_that_were_made(overrides: dict[str, Any]) -> None:
    """Only the first iteration can use the rollout's velocities as the anchor's."""
    trainer = tiny_trainer(settings(train__parity_gate=False, **overrides), OneFlatGroup())
    made: Counter[str] = Counter()
    velocity = trainer.policy.velocity

    def counted(x: Tensor, inputs: Any) -> Tensor:
        made["training" if torch.is_grad_enabled() else "other"] += len(x)
        return velocity(x, inputs)

    trainer.policy.velocity = counted  # type: ignore[method-assign]
    for index in range(2):
        made.clear()
        trainer.iteration(index)
        counts = trainer.forwards
        assert made == {
            "training": counts["training"],
            "other": sum(counts.values()) - counts["training"],
        }
        # the flat group is left out
        assert counts["training"] < plan(trainer.config).forwards["training"]


def test_flops_of_a_model_and_of_its_kernels() -> None:
    """A forward costs 10, attention 6 of it.

    Checkpointing adds recomputation, which None does not count.
    """
    cost = Cost(
        forward=10.0,
        attention=6.0,
        decode=1.0,
        decoder_weights=1,
        activations={},
        step=1.0,
        context=1.0,
    )
    lora = {
        mode: training_flops(10.0, 6.0, checkpointing=mode, trains_adapter=True)
        for mode in (None, "none", "attention", "full")
    }
    assert lora == {None: 8 + 18, "none": 8 + 21, "attention": 12 + 21, "full": 12 + 27}
    assert training_flops(10.0, 6.0, checkpointing=None, trains_adapter=False) == 3 * 10
    ends = {
        (mode, frozen): training_flops(
            10.0, 6.0, checkpointing=mode, trains_adapter=frozen, block_ends=1.0
        )
        for mode, frozen in ((None, True), ("none", True), ("full", True), ("full", False))
    }
    assert ends == {
        (None, True): 26,
        ("none", True): 29,
        ("full", True): 38,
        ("full", False): 16 + 27,
    }
    counts = {"rollout": 5, "training": 3, "anchor": 2}
    found = flops(cost, counts, 4, checkpointing=None, trains_adapter=True)
    assert found == {"rollout": 50, "training": 78, "anchor": 20, "decode": 4}


def test_throughput_of_an_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = tiny_trainer(settings(kl__strategy="none"))
    trainer.iteration(0)
    row = {"time/total": 2.0}
    monkeypatch.setattr(facts, "world_size", lambda: 4)
    assert throughput(trainer, row) == {"throughput/samples_per_gpu_hour": 6 * 3600 / (2.0 * 4)}
    monkeypatch.setattr(facts, "peak_flops", lambda device, dtype: 1e9)
    cost = trainer.model.spec.cost(trainer.config)
    # a frozen base: 2 forwards of the linear layers, 3 of attention
    training = cost.forward * 2 + cost.attention
    expected = (6 * 5 * cost.forward + 6 * 5 * training + 6 * cost.decode) / (2.0 * 4 * 1e9)
    trainer.model.checkpointing = CheckpointPlan("full")
    found = throughput(trainer, row)
    assert found["throughput/mfu"] == pytest.approx(expected, rel=1e-12)
    # recomputed; attention's backward is 2.5 forwards
    more = cost.forward - cost.block_ends + 0.5 * cost.attention
    assert found["throughput/hfu"] == pytest.approx(
        expected + 6 * 5 * more / (2.0 * 4 * 1e9), rel=1e-12
    )


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H20", 148),
        ("NVIDIA B200", 2250),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA L40S", 362),
        ("NVIDIA L40", 181),
        ("NVIDIA L4", 121),
        ("NVIDIA A40", 149.7),
        ("NVIDIA A10", 125),
        ("NVIDIA A10G", 70),
        ("NVIDIA A10-8Q", None),
        ("NVIDIA RTX A6000", 154.8),
        ("NVIDIA RTX 6000 Ada Generation", 364.2),
        ("Quadro RTX 6000", None),
        ("NVIDIA GeForce RTX 3090", 71),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA GeForce RTX 4080", 97.5),
        ("NVIDIA GeForce RTX 4080 SUPER", None),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 5080", 112.6),
        ("NVIDIA GeForce RTX 5090", 209.5),
        ("NVIDIA GeForce RTX 5090 D", None),
        ("pretend CUDA", None),
    ],
)
def test_the_peak_is_that_of_the_data_sheet_or_unknown(
    name: str, teraflops: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    device: Any = SimpleNamespace(type="cuda")
    assert peak_flops(device, torch.bfloat16) == (None if teraflops is None else 1e12 * teraflops)
    assert peak_flops(device, torch.float32) is None
    assert peak_flops(torch.device("cpu"), torch.bfloat16) is None


def test_every_row_of_a_run_has_its_throughput(tmp_path: Path) -> None:
    """The peak of a CPU is unknown, so the share of it is absent, not guessed."""
    config = settings(output=str(tmp_path / "run"), sampling__steps=2, train__iterations=2,
        eval__steps=1,
                      eval__num_prompts=1, tracking__trackers=[])  # fmt: skip
    (tmp_path / "tiny.yaml").write_text(dump(config))
    assert main(["train", str(tmp_path / "tiny.yaml"), "--quiet"]) == 0
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert len(rows) == 2
    for row in rows:
        assert row["throughput/samples_per_gpu_hour"] == pytest.approx(
            6 * 3600 / row["time/total"], rel=1e-12
        )
        assert not {"throughput/mfu", "throughput/hfu"} & row.keys()


def test_shares_are_of_the_data_sheet_where_there_is_one() -> None:
    """In bfloat16; a slice of a card and a CPU are compared with what was measured on them."""
    card = {"device": "NVIDIA H200", "dtype": "bfloat16"}
    assert full_rate(card, 757e12) == (989e12, "shares are of the data sheet's 989 TFLOP/s")
    for other in (
        card | {"dtype": "float32"},
        card | {"device": "NVIDIA H200 MIG 1g.18gb"},
        {"device": "AMD EPYC", "dtype": "bfloat16"},
    ):
        rate, words = full_rate(other, 2e12)
        assert rate == 2e12
        assert words == "shares are of that matrix product's 2 TFLOP/s"
