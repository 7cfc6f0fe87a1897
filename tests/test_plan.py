"""Every formula of the plan against a count that PyTorch makes."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLHunyuanVideo15, HunyuanVideo15Transformer3DModel
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from sage_fast.algorithm.flops import training_flops
from sage_fast.algorithm.objective import KL_STRATEGIES
from sage_fast.config.loader import build, load
from sage_fast.config.schema import ModelConfig
from sage_fast.config.shipped import PLANS, shipped_names
from sage_fast.models.attention.backends import ATTENTION
from sage_fast.models.checkpointing import MODES
from sage_fast.models.find import find_spec
from sage_fast.models.hunyuan15.forward import TextToVideoForward
from sage_fast.models.hunyuan15.spec import (
    HunyuanVideo15,
    attention_flops,
    decode_flops,
    forward_flops,
)
from sage_fast.models.hunyuan15.vae import decode_frames
from sage_fast.models.trainable import make_trainable
from sage_fast.run.checkpoint import save_checkpoint
from sage_fast.tools.dry_run import dry_run
from sage_fast.tools.phases import PART_OF_PLAN
from sage_fast.tools.plan import (
    MEASURED_FLOPS,
    MOST_CPU_SECONDS,
    Plan,
    changes_that_fit,
    checkpoint_bytes,
    iteration_flops,
    plan,
    plan_of_run,
    reward_sizes,
    run_flops,
    seconds_on_a_gpu,
    seconds_on_cpu,
)
from sage_fast.tools.plan_text import format_plan, verdict
from sage_fast.util.captions import PromptKey
from sage_fast.util.cards import COPY_RATE
from scripts import one_gpu
from scripts.shipped_plans import plans_of
from tests.tiny import settings, tiny_model, tiny_spec, tiny_trainer

EMPTY = PromptKey("")

ROOT = Path(__file__).parent.parent
SIZE = {
    "model.path": "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v",
    "sampling.num_frames": 81,
    "sampling.height": 480,
    "sampling.width": 832,
}
PUBLISHED = build(SIZE | {"kl.strategy": "dual", "model.gradient_checkpointing": "full"})


def forward(
    transformer: torch.nn.Module, space: tuple[int, int, int], text: int, image: int
) -> torch.Tensor:
    config = transformer.config
    with torch.device("cpu"):
        return transformer(
            torch.randn(1, config.in_channels, *space), torch.full((1,), 500.0),
            torch.randn(1, text, config.text_embed_dim), torch.ones(1, text, dtype=torch.int64),
            encoder_hidden_states_2=torch.zeros(1, 0, config.text_embed_2_dim),
            encoder_attention_mask_2=torch.zeros(1, 0, dtype=torch.int64),
            image_embeds=torch.ones(1, image, config.image_embed_dim), return_dict=False,
        )[0]  # fmt: skip


@pytest.mark.parametrize(
    ("space", "text", "image"), [((5, 6, 7), 9, 0), ((2, 16, 16), 40, 0), ((2, 8, 8), 9, 90)]
)
def test_forward_flops(space: tuple[int, int, int], text: int, image: int) -> None:
    transformer = HunyuanVideo15Transformer3DModel(
        num_attention_heads=8, attention_head_dim=32, num_layers=3, num_refiner_layers=1,
        rope_axes_dim=(8, 12, 12),
        text_embed_dim=48, text_embed_2_dim=8, image_embed_dim=160,
    )  # fmt: skip
    counter = FlopCounterMode(display=False)
    # the CPU's fused attention is not counted
    with (
        sdpa_kernel(SDPBackend.MATH),
        counter,
        torch.no_grad(),
    ):
        forward(transformer, space, text, image)
    tokens = space[0] * space[1] * space[2]
    assert forward_flops(transformer.config, tokens, text, image) == pytest.approx(
        counter.get_total_flops(), rel=0.02
    )


def test_published_model() -> None:
    """8.3 B parameters, 32,760 tokens, 6.6e14 FLOPs a forward, 73 % of it attention; 2.64e15 to
    train a sample-step."""
    result = plan(PUBLISHED)
    assert result.parameters == pytest.approx(8.3e9, rel=0.01)
    assert result.latent_shape == (32, 21, 30, 52)
    assert result.tokens == 32_760
    assert result.flops["forward"] == pytest.approx(6.6e14, rel=0.01)
    published = {
        "num_attention_heads": 16,
        "attention_head_dim": 128,
        "num_layers": 54,
        "num_refiner_layers": 2,
    }
    assert attention_flops(published, 32_760, 200) / result.flops["forward"] == pytest.approx(
        0.73, abs=0.005
    )
    assert result.flops["training"] / result.forwards["training"] == pytest.approx(
        2.64e15, rel=0.005
    )
    assert result.flops["decode"] / result.samples / result.flops["forward"] == pytest.approx(
        1.2, abs=0.05
    )
    assert result.memory["autoencoder"] == 2 * 1_260_634_115
    text = format_plan(result)
    assert "8,326,608,160" in text
    assert "32,760" in text
    assert "836 ms" in text
    assert max(map(len, text.splitlines())) <= 80


def test_auto_costs_what_the_mode_costs_that_the_run_would_choose() -> None:
    """The fastest that fits: on 80 GB a LoRA keeps what attention gave, and all of some blocks; on
    40 GB nothing, with all weights on the card."""

    def planned(mode: str, gpu_memory: float) -> Plan:
        given = {
            "model.gradient_checkpointing": mode,
            "model.stream_blocks": 0,
            "sampling.cuda_graphs": False,
        }
        return plan(build(SIZE | given), gpu_memory=gpu_memory)

    for gpu_memory, mode in ((400e9, "none"), (30e9, "full")):
        auto, chosen = planned("auto", gpu_memory), planned(mode, gpu_memory)
        assert auto.flops == chosen.flops
        assert sum(auto.memory.values()) == sum(chosen.memory.values())
        assert (
            auto.memory[f"activations, auto chooses {mode}"]
            == chosen.memory[f"activations, checkpointing {mode}"]
        )
    auto, slower = planned("auto", 80e9), planned("attention", 80e9)
    faster = planned("none", 400e9)  # which would not fit, so that more than it would leave
    (name,) = (part for part in auto.memory if part.startswith("activations"))
    found = re.fullmatch(r"activations, auto chooses attention in (\d+) of 54 blocks", name)
    assert found is not None
    share = int(found[1]) / 54
    for of_plan, key in (
        (lambda p: p.flops, "training"),
        (lambda p: {"all": sum(p.memory.values())}, "all"),
    ):
        mean = share * of_plan(slower)[key] + (1 - share) * of_plan(faster)[key]
        assert of_plan(auto)[key] == pytest.approx(mean, rel=1e-9)
    assert 0.9 * 80e9 < sum(auto.memory.values()) < 0.95 * 80e9 < sum(faster.memory.values())
    assert " of the 74.51 GiB of a card of 80 GB" in format_plan(planned("auto", 80e9))
    assert " of the 22.35 GiB of a card of 24 GB" in format_plan(planned("auto", 24e9))


def test_graphs_take_their_memory_before_activations() -> None:
    """It costs the recomputation of two blocks at most, at 480p; without room for a graph there is
    none."""

    def planned(gpu_memory: float, **overrides: str) -> Plan:
        config = load(
            Path(__file__).parent.parent / "configs" / "hunyuanvideo15-480p.yaml", overrides
        )
        return plan(config, ranks=8, gpu_memory=gpu_memory)

    graphed, without = planned(80e9), planned(80e9, **{"sampling.cuda_graphs": "false"})
    assert 1 < graphed.flops["training"] / without.flops["training"] < 1.005
    assert graphed.memory["CUDA graphs"] == pytest.approx(2.84 * 2**30, rel=0.01)
    for result in (without, planned(34e9)):
        assert "CUDA graphs" not in result.memory


@pytest.mark.parametrize("tuning", ["lora", "full"])
def test_the_size_of_a_checkpoint(tuning: str, tmp_path: Path) -> None:
    """Whatever the engine; the names of tensors and optimizer states are a few kilobytes."""
    given = {
        "model__tuning": tuning,
        "model__lora_rank": 64,
        "train__ema_decay": 0.9,
        "kl__strategy": "fixed",
    }
    trainer = tiny_trainer(settings(**given))
    for index in range(2):  # a LoRA's A is first updated in the second
        trainer.iteration(index)
    save_checkpoint(tmp_path, 2, trainer.engine, trainer.state_dict(), trainer.anchor)
    files = [file for file in tmp_path.rglob("*") if file.suffix in (".safetensors", ".pt")]
    config = settings(**given, train__engine="zero3")
    policy = tiny_model(settings(**given)).policy
    expected = checkpoint_bytes(
        config.model, config.train, KL_STRATEGIES[config.kl.strategy], policy
    )
    assert sum(file.stat().st_size for file in files) == pytest.approx(expected, rel=0.02)


def test_start_and_checkpoints_of_all_weights() -> None:
    """8.33 B in bfloat16 files; a checkpoint has trained weights, anchor, Muon's state, and weights
    for export."""
    config = load(Path(__file__).parent.parent / "configs" / "hunyuanvideo15-480p-full.yaml")
    result = plan(config, ranks=8)
    assert result.loaded == 2 * 8_326_608_160 + result.memory["autoencoder"]
    unsharded = dataclasses.replace(config, train=dataclasses.replace(config.train, engine="plain"))
    state = plan(unsharded, ranks=8).memory["optimizer state"]
    assert 4 * result.trainable < state < 4.1 * result.trainable
    assert result.checkpoint == 8 * result.trainable + state + 4 * 8_326_608_160
    text = format_plan(result)
    assert re.search(r"host memory of a node while it loads +17.86 GiB", text)
    assert re.search(r"each rank writes +124.2\d GiB\n", text)


def test_the_second_time_is_at_the_rates_of_a_measured_iteration() -> None:
    """Rollout and anchor of the same settings take its seconds, the anchor at every step as it was
    measured; what `auto` recomputes depends on the free memory."""
    iteration = json.loads(
        (ROOT / "benchmarks" / "results" / "2026-11-27-h200-iteration.json").read_text()
    )
    phases = iteration["phases"]
    rates = {part: phases[phase]["flops_per_second"] for phase, part in PART_OF_PLAN.items()}
    assert rates == pytest.approx(MEASURED_FLOPS, rel=2e-3)
    settings = iteration["settings"] | {"kl.anchor_fraction": "1"}
    text = format_plan(plan(load(ROOT / iteration["source"], settings)))
    for part in ("rollout", "anchor"):
        found = re.search(rf"^  {part} .* (\S+) s$", text, re.MULTILINE)
        assert found is not None
        assert float(found[1]) == pytest.approx(phases[part]["seconds"], rel=0.01)


def test_a_plan_without_a_gpu_is_at_the_rates_of_measured_cores() -> None:
    """Each part of the demo's iteration takes the seconds that it was measured to take."""
    measured = ROOT / "benchmarks" / "results" / "2026-11-29-cpu-2-cores-iteration.json"
    iteration = json.loads(measured.read_text())
    demo = load(ROOT / iteration["source"])
    planned = plan(demo, find_spec(demo.model.path))
    for phase, part in PART_OF_PLAN.items():
        seconds = seconds_on_cpu({part: iteration_flops(planned)[part]})
        assert seconds == pytest.approx(iteration["phases"][phase]["eager"], rel=2e-3), part
    assert not torch.cuda.is_available()
    text = dry_run(demo, 1, 80e9, may_be_cpu=True)
    assert "GPU of" not in text
    assert "H200" not in text
    assert re.search(r"^  all of the run +\S+ +\S+ (s|min)$", text, re.M)
    assert "CUDA graphs" not in text


def test_a_large_model_is_planned_for_gpus_on_a_machine_without_one() -> None:
    assert seconds_on_cpu(run_flops(plan(build(SIZE)))) > MOST_CPU_SECONDS


@pytest.mark.parametrize("name", shipped_names())
def test_the_costs_of_a_shipped_configuration_are_those_of_its_plan(name: str) -> None:
    written = json.loads(PLANS.read_text())
    assert list(written) == shipped_names()
    assert written[name] == plans_of(name), "run python -m scripts.shipped_plans"


def test_the_run_holds_its_evaluations() -> None:
    """As often and of as many videos as the run evaluates, at the guidance of evaluations, on the
    busiest GPU."""
    given = {"train.iterations": 200, "eval.interval": 50, "eval.num_prompts": 10,
        "eval.seeds_per_prompt": 2,
             "eval.steps": 30, "eval.guidance_scale": 6.0}  # fmt: skip
    result = plan(build(SIZE | given), ranks=8)
    evaluations, forward = result.evaluations, result.flops["forward"]
    assert (evaluations.count, evaluations.videos) == (5, 20)  # before, 50, 100, 150, after
    decode = result.flops["decode"] / result.samples
    assert evaluations.flops == pytest.approx(20 * (30 * 2 * forward + decode))
    assert evaluations.busiest == 3 / 20
    assert plan(build(SIZE | given | {"eval.interval": 0})).evaluations.count == 2
    assert plan(build(SIZE | given | {"eval.interval": 199})).evaluations.count == 3
    seconds = (
        200
        * sum(f * result.busiest[part] for part, f in result.flops.items() if part != "forward")
        / 789e12
    )
    seconds += 5 * evaluations.busiest * evaluations.flops / 789e12
    text = format_plan(result)
    assert "the run: 200 iterations, 5 evaluations of 20 videos" in text
    found = re.search(r"all of the run +\S+ +(\S+) h .*\n +GPU-hours +(\S+) ", text)
    assert found is not None
    assert [float(number) for number in found.groups()] == pytest.approx(
        [seconds / 3600, 8 * seconds / 3600], rel=0.005
    )


def test_what_the_run_costs_at_a_price() -> None:
    found = re.search(
        r"GPU-hours +(\S+) +(\S+)\n +at 2.5 an hour +(\S+) +(\S+)$",
        format_plan(plan(build(SIZE)), 2.5),
        re.M,
    )
    assert found is not None
    hours, prices = (
        [float(text.replace(",", "")) for text in found.groups()[i : i + 2]] for i in (0, 2)
    )
    assert prices == pytest.approx([2.5 * hour for hour in hours], rel=0.01)


def test_the_time_of_rewards_that_a_run_has_measured_enters_its_plan(tmp_path: Path) -> None:
    """Of a run in the output folder: the median over its iterations, added to the times of the
    iteration and run."""
    config = settings(output=str(tmp_path / "run"), train__iterations=100)
    before = dry_run(config, 2, 80e9)
    assert "Rewards and communication are not counted." in " ".join(before.split())
    (tmp_path / "run").mkdir()
    rows = [{"iteration": i, "time/reward": seconds} for i, seconds in enumerate((50.0, 9.0, 7.0))]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    after = dry_run(config, 2, 80e9)
    assert re.search(r"^  rewards, by metrics.jsonl +9 s +9 s$", after, re.M)
    assert re.search(r"^  together +\d+ +\S+ +9 s +9 s$", after, re.M)
    assert re.search(r"^  all of the run +\S+ +15 min +15 min\n  GPU-hours +0.5 +0.5$", after, re.M)
    assert "Communication is not counted." in " ".join(after.split())


def test_a_card_that_is_too_small_is_told() -> None:
    small = verdict(plan(build(SIZE), gpu_memory=8e9))
    assert small.startswith("This does not fit 1 GPU of 8 GB: ")
    assert " of 7.45 GiB. Try " in small
    assert "--train.engine zero3" in small
    assert verdict(plan(build(SIZE))).startswith("This fits 1 GPU of 80 GB: ")


@pytest.mark.parametrize(
    ("name", "gigabytes", "least_streamed"),
    [
        ("hunyuanvideo15-480p", 24, 40),
        ("hunyuanvideo15-24gb", 24, 20),
        ("hunyuanvideo15-24gb", 16, 1),
        ("hunyuanvideo15-24gb", 48, 0),
    ],
)
def test_small_cards_fit_by_streaming(name: str, gigabytes: int, least_streamed: int) -> None:
    """With VideoAlign in the run's process, which takes 4.1 GiB."""
    config = load(ROOT / "configs" / f"{name}.yaml")
    spec = find_spec(config.model.path)
    planned = plan_of_run(config, spec, ranks=1, gpu_memory=1e9 * gigabytes)
    assert planned.fits
    assert planned.streamed >= least_streamed
    of_blocks = 0.28 * 2**30 * planned.streamed
    assert of_blocks <= planned.in_host_memory <= of_blocks * 1.1 + 7 * 2**30 * bool(planned.parked)
    text = verdict(planned)
    assert text.startswith(f"This fits 1 GPU of {gigabytes} GB: ")
    assert "An iteration is estimated at " in text
    assert ("of 54 blocks are streamed." in text) == (planned.streamed > 0)
    assert ("Parked (on the card only while used): autoencoder" in text) == bool(planned.parked)


def test_the_fewest_changes_that_fit_are_named() -> None:
    config = load(ROOT / "configs" / "hunyuanvideo15-480p.yaml", {"model.stream_blocks": "0"})
    spec = find_spec(config.model.path)
    changes = changes_that_fit(config, spec, 24e9)
    assert changes == {"model.stream_blocks": "auto"}
    planned = plan_of_run(config, spec, ranks=1, gpu_memory=24e9)
    assert not planned.fits
    assert verdict(planned, changes).endswith("It fits with --model.stream_blocks auto.")
    assert changes_that_fit(config, spec, 16e9) == {
        "model.stream_blocks": "auto",
        "sampling.offload_trajectories": True,
    }
    assert changes_that_fit(config, spec, 4e9) is None
    assert "All that takes less memory is not enough" in verdict(planned, {})


def test_the_page_of_one_gpu_is_planned() -> None:
    page = (ROOT / "docs" / "how-to" / "one-gpu.md").read_text(encoding="utf-8")
    assert one_gpu.written() == page, "run python -m scripts.one_gpu"


def test_copies_of_blocks_hide_unless_they_take_longer() -> None:
    """On a card with little to compute the iteration takes as long as the copies."""
    config = build(SIZE | {"model.stream_blocks": "all"})
    streamed = plan(config, gpu_memory=24e9)
    assert streamed.streamed == streamed.blocks == 54
    work = iteration_flops(streamed)
    least, estimated = seconds_on_a_gpu(work, streamed.copies, streamed.card)
    alone = seconds_on_a_gpu(work, {}, streamed.card)
    assert (least, estimated) == alone
    slow = {part: 1000 * size for part, size in streamed.copies.items()}
    copied = sum(slow.values()) / COPY_RATE
    decode = work["decode"] / streamed.card.flops
    assert seconds_on_a_gpu(work, slow, streamed.card)[0] == pytest.approx(copied + decode)


def test_what_is_already_set_is_no_remedy() -> None:
    everything = {"model.gradient_checkpointing": "full", "train.batch_size": 1}
    everything |= {"model.tuning": "lora", "train.engine": "zero3", "train.offload_shards": True}
    none = plan(build(SIZE | everything), ranks=2)
    assert none.remedies == ["fewer frames or a smaller size"]
    plain = plan(
        build(SIZE | everything | {"train.engine": "plain", "train.offload_shards": False})
    )
    named = " ".join(plain.remedies)
    assert "--train.offload_shards true" in named
    assert "gradient_checkpointing" not in named


def test_a_sample_shared_by_two_gpus_takes_half_the_time_of_each() -> None:
    """4 samples on 8 GPUs, two for each sample."""
    shared = {"train.prompts_per_iteration": 1, "train.group_size": 4, "model.sequence_parallel": 2}
    for ranks in (8, 16):
        assert set(plan(build(SIZE | shared), ranks=ranks).busiest.values()) == {1 / 8}


def test_long_times_are_in_days_without_an_exponent() -> None:
    text = format_plan(plan(build(SIZE | {"train.iterations": 3000})))
    found = re.search(
        r"all of the run +\S+ +([\d.]+) days +([\d.]+) days\n +GPU-hours +([\d,]+) +([\d,]+)$",
        text,
        re.M,
    )
    assert found is not None
    days, hours = float(found[1]), float(found[3].replace(",", ""))
    assert days > 10
    assert hours == pytest.approx(24 * days, rel=0.01)


def test_rewards_take_memory_on_their_ranks() -> None:
    """Those that say how much; `auto` leaves room for them. Others are named as not counted."""
    given = SIZE | {"model.gradient_checkpointing": "auto"}
    scored = build(
        given
        | {"reward.name": "videoalign", "reward.args": {"path": "x"}, "eval.judge": "pickscore"}
    )
    sizes = reward_sizes(scored.named_rewards)
    assert sizes == {"reward videoalign": 2 * 2_208_561_664, "reward pickscore": 4 * 986_109_441}
    result = plan(scored, rewards=sizes)
    assert sizes.items() <= result.memory.items()
    recomputed = [
        plan(scored, gpu_memory=80e9, rewards=given).flops["training"] for given in ({}, sizes)
    ]
    assert recomputed[0] < recomputed[1], "fewer blocks keep their activations"
    assert "Not counted: fragmentation." in format_plan(result)
    elsewhere = [{"reward.name": "http://host:8000"}, {"reward.name": "videoalign",
        "reward.args": {"path": "x"},
                 "reward.device": "cuda:7"}]  # fmt: skip
    assert [
        sum(reward_sizes(build(SIZE | other).named_rewards).values()) for other in elsewhere
    ] == [0, 0]
    workers = build(SIZE | {"reward.name": "pickscore", "reward.workers": 2})
    assert sum(reward_sizes(workers.named_rewards).values()) == 2 * 4 * 986_109_441
    unknown = build(SIZE | {"reward.name": "tests.tiny:BrightnessReward"})
    text = " ".join(format_plan(plan(unknown, rewards=reward_sizes(unknown.named_rewards))).split())
    assert f"Not counted: reward {unknown.reward.name}, fragmentation." in text


@pytest.mark.parametrize("tuning", ["lora", "full"])
def test_disk_of_a_run(tuning: str) -> None:
    """The checkpoints that are kept, the best and the next one while it is written, and the final
    weights."""
    given = SIZE | {"model.tuning": tuning, "train.keep_checkpoints": 3}
    result, lean = plan(build(given)), plan(build(given | {"train.keep_best": False}))
    weights = 4.0 * (result.trainable if tuning == "lora" else result.parameters)
    assert sum(result.disk.values()) == 5 * result.checkpoint + weights
    assert sum(lean.disk.values()) == 4 * result.checkpoint + weights
    assert result.checkpoint / result.trainable == pytest.approx(20, abs=0.1)


def test_samples_are_spread_over_ranks_and_weights_are_not() -> None:
    one, two = plan(PUBLISHED), plan(PUBLISHED, ranks=2)
    assert two.flops == one.flops
    for part in ("trajectories (fp32 latents)", "stored velocities"):
        assert two.memory[part] == one.memory[part] / 2
    assert (
        two.memory["frozen weights"]
        == one.memory["frozen weights"]
        == pytest.approx(2 * one.parameters, rel=1e-3)
    )


def test_the_time_is_that_of_the_rank_with_the_most_samples() -> None:
    """8 samples: on 6 ranks some have two, so that it takes as long as on 4."""
    times = {ranks: re.findall(r"together +[\d,]+ +\S+ +(.+?)  ", format_plan(plan(PUBLISHED,
        ranks=ranks)))
             for ranks in (4, 6, 8)}  # fmt: skip
    assert len(times[4]) == 1
    assert times[6] == times[4] != times[8]


def test_trained_parameters_are_those_of_peft() -> None:
    config = settings()
    policy = tiny_model(config).policy
    result = plan(config, tiny_spec(policy))
    assert result.trainable == sum(p.numel() for p in policy.parameters().values())
    assert result.parameters == sum(
        p.numel() for n, p in policy.transformer.named_parameters() if ".lora_" not in n
    )
    full = settings(model__tuning="full")
    assert plan(full, tiny_spec(policy)).trainable > 0.8 * result.parameters


def layers(count: int, heads: int = 4, width: int = 16) -> HunyuanVideo15Transformer3DModel:
    return HunyuanVideo15Transformer3DModel(
        num_attention_heads=heads, attention_head_dim=width, num_layers=count, num_refiner_layers=1,
        text_embed_dim=32,
        rope_axes_dim=(width // 2, width // 4, width // 4), text_embed_2_dim=8, image_embed_dim=8,
    )  # fmt: skip


BLOCK = {"num_attention_heads": 4, "attention_head_dim": 64, "num_layers": 1,
    "num_refiner_layers": 0, "mlp_ratio": 4.0,
         "patch_size": 1, "patch_size_t": 1, "in_channels": 0, "out_channels": 0,
         "text_embed_dim": 0}  # fmt: skip
"""One block and nothing around it."""


def block_and_inputs(tuning: str, dtype: torch.dtype) -> tuple[torch.nn.Module, list]:
    """A block of 256 values a token, as it is trained, and its inputs: 120 video and 40 text
    tokens."""
    transformer = layers(2, heads=4, width=64)
    if tuning == "lora":
        transformer.transformer_blocks.to(dtype)
        make_trainable(HunyuanVideo15(), transformer, ModelConfig(lora_rank=1, lora_alpha=1))
    streams = [torch.randn(1, count, 256, dtype=dtype, requires_grad=True) for count in (120, 40)]
    modulation = torch.randn(1, 2, 6, 256, dtype=dtype)
    inputs = [*streams, modulation, torch.randn(120, 32, 2), ATTENTION["sdpa"], False]
    forward = TextToVideoForward(transformer, dtype)
    forward.refresh()
    return forward.blocks[0], inputs


@pytest.mark.parametrize("tuning", ["lora", "full"])
def test_training_flops(tuning: str) -> None:
    """Without fused attention PyTorch counts 2, not 2.5, for its backward: the formula is higher by
    just that half."""
    block, inputs = block_and_inputs(tuning, torch.float32)
    counter = FlopCounterMode(display=False)
    with sdpa_kernel(SDPBackend.MATH), counter:
        video, text = block(*inputs)
        (video.sum() + text.sum()).backward()
    attention = attention_flops(BLOCK, 120, 40)
    formula = training_flops(
        forward_flops(BLOCK, 120, 40),
        attention,
        checkpointing="none",
        trains_adapter=tuning == "lora",
    )
    # The rows that the video's queries, keys and values leave for the text are multiplied too: 0.6
    # % of them at 480p.
    spare = 40 * 6 * 256**2 * (2 if tuning == "lora" else 3)
    assert formula - 0.5 * attention == pytest.approx(counter.get_total_flops() - spare, rel=0.02)


def test_the_page_has_the_time_of_each_way_to_guide() -> None:
    """docs/how-to/choose-settings.md: a bound for an iteration on 8 GPUs."""
    repository = Path(__file__).parent.parent
    page = (repository / "docs" / "how-to" / "choose-settings.md").read_text()
    times = re.findall(r"^\| \d.* \| \d \| (\S+ min) \|$", page, re.M)
    found = []
    for name, scale in (("", 1), ("", 6), ("-distilled", 1)):
        given = {"sampling.guidance_scale": str(scale)}
        text = format_plan(
            plan(load(repository / "configs" / f"hunyuanvideo15-480p{name}.yaml", given), ranks=8)
        )
        found += re.findall(r"^  together  .* (\S+ min)  +\S+ min$", text, re.M)
    assert [f"{float(time.split()[0]):.1f} min" for time in found] == times


def test_guidance_keeps_two_passes_and_runs_one_backward_at_a_time() -> None:
    """What a recomputed block keeps is its input."""
    sizes = []
    for scale in (1.0, 6.0):
        config = build(SIZE | {"train.batch_size": 1, "sampling.guidance_scale": scale})
        sizes.append(HunyuanVideo15().cost(config).activations["full"])
    inputs = 54 * (32_760 + 200) * 2048 * 2
    assert sizes[1] - sizes[0] == pytest.approx(inputs, rel=0.03)


@pytest.mark.parametrize(("frames", "height"), [(1, 6), (5, 4)])
def test_decode_flops(frames: int, height: int) -> None:
    vae = AutoencoderKLHunyuanVideo15(
        latent_channels=32, block_out_channels=(8, 16, 16, 32, 64), layers_per_block=1,
        spatial_compression_ratio=16,
        temporal_compression_ratio=4,
    ).requires_grad_(False)  # fmt: skip
    latents = torch.randn(1, 32, frames, height, 5)
    counter = FlopCounterMode(display=False)
    with sdpa_kernel(SDPBackend.MATH), counter:
        for piece in decode_frames(vae.decoder, latents, frames):
            del piece
    assert decode_flops(vae.to("meta").decoder, tuple(latents.shape[1:])) == pytest.approx(
        counter.get_total_flops(), rel=1e-6
    )


def test_counts_of_an_iteration() -> None:
    config = settings(sampling__guidance_scale=3.0, train__timestep_fraction=0.5, sampling__steps=8)
    result = plan(config, tiny_model(config).spec)
    assert result.samples == 6
    assert result.forwards == {"rollout": 6 * 8 * 2, "training": 6 * 4 * 2, "anchor": 6 * 4 * 2}
    # 4 steps with gaps: 2 states each
    assert result.memory["trajectories (fp32 latents)"] == 4 * 1536 * 6 * 8
    assert result.memory["stored velocities"] == 4 * 1536 * 6 * 4
    # its KL needs those of the rollout too
    config = config.replace({"objective.ratio": "centred", "train.optimizer_steps": 2})
    result = plan(config, tiny_model(config).spec)
    assert result.memory["stored velocities"] == 2 * 4 * 1536 * 6 * 4


def test_flash4_sums_a_gradient_in_float32() -> None:
    """270 MB for a sample at 480p, 81 frames."""
    configs = [
        build(SIZE | {"model.attention": name, "train.batch_size": 1})
        for name in ("sdpa", "flash4")
    ]
    plain, flash4 = (HunyuanVideo15().cost(config).activations for config in configs)
    assert [flash4[mode] - plain[mode] for mode in MODES] == [4 * (32_760 + 200) * 2048] * 3
