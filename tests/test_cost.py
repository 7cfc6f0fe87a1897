"""The counts on the meta device against tensors that are alive on the CPU."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from sage_fast.algorithm.transitions import sigma_schedule, transition_table
from sage_fast.config.loader import build
from sage_fast.config.schema import ModelConfig
from sage_fast.models.attention.sequence import SequenceParallel
from sage_fast.models.checkpointing import MODES, set_checkpointing
from sage_fast.models.cost import Activations, counted_cost, counted_memory
from sage_fast.models.hunyuan15.policy import HunyuanVideo15Policy
from sage_fast.models.hunyuan15.spec import HunyuanVideo15
from sage_fast.models.policy import Policy
from sage_fast.models.spec import Spec
from sage_fast.models.streaming import BlockStream
from sage_fast.models.trainable import make_trainable
from sage_fast.rollout.step import denoise
from sage_fast.testbed.tiny_model import Testbed, TestbedTransformer
from sage_fast.util.errors import UserError
from sage_fast.util.live_bytes import LiveBytes
from sage_fast.util.process_group import initialize
from sage_fast.util.ranks import join_sequence_group, rank, sequence_group, shutdown
from tests.ranks import run_ranks, screens
from tests.tiny import CPU, settings

LATENT = (32, 4, 16, 16)


class Small(HunyuanVideo15):
    """Five narrow blocks."""

    text_tokens = 24
    image_tokens = 40


def small(**config: Any) -> Small:
    transformer = {
        "num_attention_heads": 4, "attention_head_dim": 32, "num_layers": 5,
        "num_refiner_layers": 1, "text_embed_dim": 32, "text_embed_2_dim": 8, "image_embed_dim": 8,
        "rope_axes_dim": (16, 8, 8), "task_type": "t2v",
    }  # fmt: skip
    return Small("small", {"transformer": transformer | config})


def on_cpu(spec: Spec, model: ModelConfig) -> Policy:
    """The policy with real tensors, as it is trained, in the dtype of the activations."""
    networks = {}
    for part, cls in spec.networks.items():
        network = cls(**spec.known_fields(part))
        nn.Module.to(network, getattr(torch, model.dtype))
        make_trainable(spec, network.eval(), model)
        networks[part] = network
    return spec.policy(networks, dtype=getattr(torch, model.dtype), guidance_scale=1.0)


def live_activations(
    spec: Spec, policy: Policy, mode: str, latent: tuple[int, ...], batch: int, guidance: float
) -> int:
    """The most bytes that are alive from a forward to the end of its backward."""
    for network in policy.networks.values():
        set_checkpointing(network, mode)
    for p in policy.parameters().values():
        p.grad = torch.zeros_like(p)  # as in every micro-batch but the first
    condition = dataclasses.replace(spec.assumed_condition(), negative=None)
    keys, steps = list(range(batch)), torch.zeros(batch, dtype=torch.int64)
    with policy.at_guidance(guidance):
        table = policy.conditioning_table(
            torch.tensor([0.5]), dict.fromkeys([None, *keys], condition)
        )
        x = torch.randn(batch, *latent)
        with torch.no_grad():
            policy.velocity(x, table.at(keys, steps))  # makes rotary tables
        with LiveBytes() as live:
            v = policy.guided_velocity(x, table.at(keys, steps))
            v.float().square().mean().backward()
    return live.peak


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("given", "batch", "guidance", "streamed"),
    [
        ({"lora_rank": 24}, 1, 1.0, 0),
        ({"lora_rank": 24}, 2, 3.0, 0),
        ({"lora_rank": 24}, 1, 1.0, 3),
        pytest.param({"lora_rank": 16, "dtype": "float32"}, 1, 1.0, 0, marks=pytest.mark.soak),
        pytest.param({"lora_rank": 16, "dtype": "float32"}, 1, 1.0, 2, marks=pytest.mark.soak),
        ({"tuning": "full"}, 2, 1.0, 0),
        ({"tuning": "full"}, 1, 3.0, 0),
        pytest.param({"tuning": "full", "dtype": "float32"}, 1, 1.0, 0, marks=pytest.mark.soak),
    ],
)
def test_activations(
    given: dict[str, Any], batch: int, guidance: float, streamed: int, mode: str
) -> None:
    """Of streamed weights nothing is alive beside host memory and the slots."""
    spec, model = small(), ModelConfig(**given)
    counted = Activations(spec, model, LATENT, batch_size=batch, guidance=guidance)[mode]
    policy = on_cpu(spec, model)
    if streamed:
        policy.stream = BlockStream(policy, streamed, CPU)
    live = live_activations(spec, policy, mode, LATENT, batch, guidance)
    assert counted == pytest.approx(live, rel=0.005)


@pytest.mark.parametrize("mode", MODES)
def test_images_are_among_the_tokens(mode: str) -> None:
    spec, model = small(task_type="i2v"), ModelConfig(lora_rank=8)
    counted = Activations(spec, model, LATENT)[mode]
    live = live_activations(spec, on_cpu(spec, model), mode, LATENT, 1, 1.0)
    assert counted == pytest.approx(live, rel=0.005)
    assert counted > 1.01 * Activations(small(), model, LATENT)[mode]


@pytest.mark.parametrize(
    ("given", "casts"),
    [
        ({"lora_rank": 24}, False),
        ({"lora_rank": 16, "dtype": "float32"}, False),
        ({"tuning": "full"}, True),
        ({"tuning": "full"}, False),
    ],
    ids=["lora", "lora in float32", "full in float32", "full in bfloat16"],
)
@pytest.mark.parametrize(
    ("guidance", "task"),
    [(1.0, "t2v"), pytest.param(3.0, "t2v", marks=pytest.mark.soak), (3.0, "i2v")],
    ids=["plain", "guided", "image"],
)
@torch.no_grad()
def test_a_graph_keeps_the_peak_of_a_step_and_its_conditions(
    given: dict[str, Any], casts: bool, guidance: float, task: str
) -> None:
    """What a pool reuses within a capture is what the allocator reuses within a step."""
    batch, steps = 2, 3
    spec, model = small(task_type=task), ModelConfig(**given)
    config = dataclasses.replace(
        build(
            {"sampling.num_frames": 13, "sampling.height": 256, "sampling.width": 256,
             "sampling.steps": steps, "sampling.batch_size": batch,
             "sampling.guidance_scale": guidance, "train.engine": "plain" if casts else "zero2"}
        ),
        model=model,
    )  # fmt: skip
    assert spec.latent_shape(config.sampling) == LATENT
    counted = counted_memory(spec, config)

    policy = on_cpu(spec, model)
    if casts:
        for network in policy.networks.values():
            nn.Module.to(network, torch.float32)
    condition = dataclasses.replace(spec.assumed_condition(), negative="negative")
    table = transition_table(sigma_schedule(steps, 3.0), "sage", 0.7)
    with policy.at_guidance(guidance):
        conditions = policy.conditioning_table(
            table.sigmas[:-1], dict.fromkeys(["prompt", "negative"], condition)
        ).of(["prompt"] * batch)
        x, step = torch.randn(batch, *LATENT), torch.zeros(1, dtype=torch.int64)
        coefs, seeds = table.coefficients(), torch.zeros(batch, dtype=torch.int64)
        denoise(policy, coefs, conditions.at(step), seeds, x, step)  # makes the rotary table
        with LiveBytes() as live:
            denoise(policy, coefs, conditions.at(step), seeds, x, step)
    kept = sum(leaf.nbytes for leaf in tree_leaves(conditions) if isinstance(leaf, Tensor))
    # The last weights are cast after the peak.
    near = 0.025 if casts else 0.01
    assert counted["step"] + counted["context"] == pytest.approx(live.peak + kept, rel=near)

    # A prompt's own: its text at every step, and its image.
    own = conditions.context.nbytes
    if conditions.images is not None:
        own += conditions.images.tokens.nbytes + conditions.images.frame.nbytes
    picture = 32 * (16 * 16 - 1) * 2  # the frame is assumed to have one position
    assert counted["context"] == pytest.approx(own, abs=2 * picture if task == "i2v" else 0)


def shared_activations(folder: Path) -> None:
    """What is alive on a rank of two that share a sample."""
    initialize()
    join_sequence_group(2)
    spec, model, live = small(), ModelConfig(lora_rank=8), {}
    for mode in MODES:
        policy = on_cpu(spec, model)
        policy.sequence = SequenceParallel(sequence_group(), CPU)
        live[mode] = live_activations(spec, policy, mode, LATENT, 1, 1.0)
    (folder / f"{rank()}.json").write_text(json.dumps(live))
    shutdown()


def test_a_rank_that_shares_samples_is_counted_alone(tmp_path: Path) -> None:
    """With the queries, keys and values that it has received beside those that it sent."""
    assert run_ranks(shared_activations, 2, tmp_path) == [0, 0], screens(tmp_path)
    live = json.loads((tmp_path / "0.json").read_text())
    shared = Activations(small(), ModelConfig(lora_rank=8, sequence_parallel=2), LATENT)
    alone = Activations(small(), ModelConfig(lora_rank=8), LATENT)
    for mode in MODES:
        assert shared[mode] == pytest.approx(live[mode], rel=0.02), mode
        assert shared[mode] < 0.8 * alone[mode]


@torch.no_grad()
def test_the_counts_of_operators_are_those_of_a_forward_and_a_decode() -> None:
    """Without the conditions, which a rollout computes once a schedule."""
    config = settings()
    spec = Testbed("tiny")
    cost, formulas = counted_cost(spec, config), spec.cost(config)

    network = TestbedTransformer().requires_grad_(False)
    policy = HunyuanVideo15Policy(network, dtype=torch.float32)
    table = policy.conditioning_table(torch.tensor([0.5]), {"prompt": spec.assumed_condition()})
    inputs = table.of(["prompt"]).at(torch.zeros(1, dtype=torch.int64))
    x = torch.randn(1, *spec.latent_shape(config.sampling))
    # the CPU's fused attention is not counted
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        policy.velocity(x, inputs)
    assert cost.forward == counter.get_total_flops()

    # The refiner's attention, among the tokens of the prompt, is one of the conditions.
    assert cost.attention == formulas.attention - 4 * 64 * spec.text_tokens**2
    assert cost.decoder_weights == formulas.decoder_weights
    assert cost.decode == pytest.approx(formulas.decode, rel=1e-6)
    assert dict(cost.activations) == dict(formulas.activations)
    assert (cost.step, cost.context) == (formulas.step, formulas.context)


def test_the_number_of_blocks_is_extrapolated_exactly() -> None:
    model = ModelConfig(lora_rank=8)
    for mode in MODES:
        counts = [Activations(small(num_layers=n), model, LATENT)[mode] for n in (2, 3, 9)]
        assert counts[2] == pytest.approx(counts[0] + 7 * (counts[1] - counts[0]), rel=1e-9)
        live = live_activations(
            small(num_layers=9), on_cpu(small(num_layers=9), model), mode, LATENT, 1, 1.0
        )
        assert counts[2] == pytest.approx(live, rel=0.005)


class Reading(Testbed):
    """A family whose policy asks for the value of a tensor."""

    def policy(self, networks: Any, **given: Any) -> HunyuanVideo15Policy:
        class Asking(HunyuanVideo15Policy):
            def velocity(self, x: Tensor, inputs: Any) -> Tensor:
                return super().velocity(x, inputs) * x.max().item()

        return Asking(networks["transformer"], **given)


def test_a_policy_that_reads_values_is_told_what_is_expected() -> None:
    with pytest.raises(UserError, match=r"cost of the testbed cannot be counted.*Spec\.cost"):
        counted_cost(Reading("mine"), settings())
