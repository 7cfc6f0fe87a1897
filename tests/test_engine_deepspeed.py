"""ZeRO trains as one process does, on any number of ranks; each engine resumes the others'
checkpoints."""

import importlib.util
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import yaml
from safetensors.torch import load_file

from sage_fast import cli
from sage_fast.config.loader import build, load
from sage_fast.config.rank_checks import check_choices
from sage_fast.eval.evaluation import evaluate
from sage_fast.loading import load_setup, resolve
from sage_fast.parallel.deepspeed_config import check_deepspeed_settings, deepspeed_settings
from sage_fast.rewards import CompositeReward
from sage_fast.run import train as train_module
from sage_fast.run.checkpoint import TrainingState, save_checkpoint, save_training_state
from sage_fast.run_folder import read_scores
from sage_fast.tools.plan import Plan, plan, reward_sizes
from sage_fast.tools.plan_text import format_plan
from sage_fast.trainer import Trainer
from sage_fast.util.errors import RewardError, UserError
from sage_fast.util.files import read_json, read_metrics
from sage_fast.util.process_group import initialize
from sage_fast.util.ranks import shutdown
from tests import zero_runs
from tests.ranks import command_on_ranks, run_ranks, screens
from tests.tiny import (
    FEW_STEPS,
    arguments,
    embedding,
    settings,
    tiny_model,
    tiny_trainer,
)
from tests.zero_runs import SETTINGS, NamedReward, resume

REPOSITORY = Path(__file__).parent.parent
needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="DeepSpeed is not installed: pip install 'sage-fast[deepspeed]'",
)


def on_ranks(ranks: int, folder: Path) -> dict[str, Any]:
    """Run `tests/zero_runs.py` and read its results."""
    assert run_ranks(zero_runs.main, ranks, folder) == [0] * ranks, screens(folder, ranks)
    return json.loads((folder / f"on-{ranks}.json").read_text())


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Train in one plain process, resume its checkpoints on two ranks, and those of the two on one
    rank."""
    folder = tmp_path_factory.mktemp("runs")
    expected = {}
    for tuning in ("lora", "full"):
        trainer = tiny_trainer(settings(**SETTINGS, model__tuning=tuning), NamedReward())
        for index in range(3):
            expected[tuning, index] = trainer.iteration(index)
            parts = trainer.engine, trainer.state_dict(), trainer.anchor
            save_checkpoint(folder / f"{tuning}-{index + 1}", index + 1, *parts)
    return {"folder": folder, "expected": expected, 2: on_ranks(2, folder), 1: on_ranks(1, folder)}


CASES = [(2, "full zero2 0"), (2, "full zero3 2"), (1, "full zero3 2"), (1, "lora zero1 1")]
"""Ranks, and tuning, engine and first iteration: those after 0 go on from a checkpoint of the plain
engine, or (full zero3 on one rank) of two ranks with another stage. In iteration 2 the first of two
ranks has nothing to train."""
METRICS = ("reward/mean", "reward/std", "advantage/abs_mean", "grad_norm", "kl/lambda", "kl/anchor",
           "ratio/mean", "learning_rate")  # fmt: skip
IDS = [f"{name} on {ranks}" for ranks, name in CASES]


def last_checkpoint(run: Path) -> Path:
    return max((run / "checkpoints").iterdir())


def joined(checkpoint: Path, kind: str) -> dict[str, torch.Tensor]:
    """Flattened weights, from the slices of all ranks."""
    slices: dict[str, list[torch.Tensor]] = {}
    for file in sorted((checkpoint / "training").glob(f"{kind}-0*")):
        for name, found in load_file(file).items():
            slices.setdefault(name, []).append(found)
    return {name: torch.cat(found) for name, found in slices.items()}


@pytest.mark.soak
@needs_deepspeed
@pytest.mark.parametrize(("ranks", "case"), CASES, ids=IDS)
def test_metrics_are_those_of_one_plain_process(
    ranks: int, case: str, runs: dict[str, Any]
) -> None:
    """Compare rewards, advantages, the norm before clipping, lambda, the anchor's KL and the size
    of the update."""
    tuning, _, first = case.split()
    for number, row in enumerate(runs[ranks]["rows"][case]):
        expected = runs["expected"][tuning, int(first) + number]
        for key in METRICS:
            assert row[key] == pytest.approx(expected[key], rel=1e-3, abs=1e-10), (key, number)


@pytest.mark.soak
@needs_deepspeed
@pytest.mark.parametrize(("ranks", "case"), CASES, ids=IDS)
def test_checkpoints_are_those_of_one_plain_process(
    ranks: int, case: str, runs: dict[str, Any]
) -> None:
    """Compare whole weights by name, relative to how far they moved; the plain engine loads them
    and the moments.

    Single weights may differ more: where a gradient is nearly zero, Adam divides one rounding error
    by another.
    """
    tuning, engine, _ = case.split()
    ours = last_checkpoint(runs["folder"] / f"{tuning}-{engine}-on-{ranks}")
    theirs = last_checkpoint(runs["folder"] / f"{tuning}-{int(ours.name[-6:])}")
    start = tiny_model(settings(**SETTINGS, model__tuning=tuning)).policy.snapshot()
    for file in ("trainable", "ema", "anchor"):
        a, b = joined(ours, file), joined(theirs, file)
        assert a.keys() == b.keys()
        off, way = (
            sum(float((b[n] - other[n].flatten()).square().sum()) for n in b) ** 0.5
            for other in (a, start)
        )
        assert off <= 0.03 * way, (file, off, way)
    for key in ("exp_avg", "exp_avg_sq"):
        a, b = joined(ours, f"optimizer-{key}"), joined(theirs, f"optimizer-{key}")
        assert a.keys() == b.keys()
        off, size = (
            sum(float((a[n] - factor * b[n]).square().sum()) for n in a) ** 0.5 for factor in (1, 0)
        )
        assert off <= 1e-3 * size, (key, off, size)
    steps, expected = (
        read_json(folder / "training" / "optimizer.json") for folder in (ours, theirs)
    )
    assert steps == expected
    resume(
        plain := tiny_trainer(settings(**SETTINGS, model__tuning=tuning), NamedReward()),
        ours.parent.parent,
    )
    assert plain.engine.steps == 2 * int(ours.name[-6:])
    assert (ours / "transformer" / "config.json").is_file() or (
        ours / "pytorch_lora_weights.safetensors"
    ).is_file()


@pytest.mark.soak
@needs_deepspeed
@pytest.mark.parametrize("engine", ["zero1", "zero2"])
def test_the_plan_is_within_5_percent_of_the_memory_at_the_peak(
    engine: str, tmp_path: Path
) -> None:
    """Count every tensor that is alive on the first rank in a backward in bfloat16."""
    assert run_ranks(zero_runs.memory, 2, tmp_path, "attention", engine) == [0, 0], screens(
        tmp_path
    )
    found = json.loads((tmp_path / "memory.json").read_text())
    assert found["measured"] == pytest.approx(sum(found["planned"].values()), rel=0.05), found


@pytest.mark.soak
@needs_deepspeed
def test_the_testbed_trains_with_zero_and_goes_on_with_other_stages_and_ranks(
    tmp_path: Path,
) -> None:
    """Train with ZeRO-2, then ZeRO-3 on one rank and on two; rows match one plain process."""
    stages = [(1, "zero2", 2), (2, "zero3", 1), (3, "zero3", 2)]
    base = ["train", str(REPOSITORY / "configs" / "recipes" / "paper.yaml"), "--quiet", *FEW_STEPS]
    base += arguments(train__prompts_per_iteration=2, train__group_size=2,
        train__schedule="constant",
                      eval__num_prompts=2, eval__seeds_per_prompt=1,
                      tracking__trackers="[]")  # fmt: skip
    assert (
        cli.main(
            [*base, "--output", str(tmp_path / "plain"), "--train.iterations", str(len(stages))]
        )
        == 0
    )
    for iterations, engine, ranks in stages:
        options = ["--output", str(tmp_path / "zero"), *["--resume"] * (iterations > 1)]
        options += arguments(train__iterations=iterations, train__engine=engine)
        assert "FutureWarning" not in command_on_ranks(
            [*base, *options], tmp_path, ranks, DS_ACCELERATOR="cpu"
        )
    ours, theirs = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("zero", "plain"))
    assert len(ours) == len(theirs) == len(stages)
    for row, expected in zip(ours, theirs):
        for key in METRICS:
            assert row[key] == pytest.approx(expected[key], rel=1e-3, abs=1e-6), (
                key,
                row["iteration"],
            )
    scores = [read_scores(tmp_path / name / "eval" / "after.json") for name in ("zero", "plain")]
    assert scores[0]["reward"] == pytest.approx(scores[1]["reward"], abs=1e-3)


@pytest.mark.soak
@needs_deepspeed
def test_muon_on_two_ranks_updates_as_one_plain_process(tmp_path: Path) -> None:
    """ZeRO-1 and 2, and a LoRA: make two updates, then let each engine resume from the other's
    file.

    From the same weights, updates differ by the rounding of bfloat16, in which Muon orthogonalises.
    The second update starts from weights that differ by this, and rank-one gradients amplify the
    difference.
    """
    expected = {}
    for tuning in ("full", "lora"):
        engine = zero_runs.muon_engine(f"{tuning} plain")
        weights = [
            engine.policy.snapshot(),
            *(zero_runs.muon_step(engine, number, [0, 1]) for number in range(2)),
        ]
        (folder := tmp_path / f"{tuning} plain").mkdir()
        save_training_state(folder, engine)
        expected[tuning] = [*weights, zero_runs.muon_step(engine, 2, [0, 1])]
    assert run_ranks(zero_runs.muon, 2, tmp_path) == [0, 0], screens(tmp_path)
    for name in zero_runs.MUON:
        tuning, _ = name.split()
        first, second, third, on_from_plain = torch.load(tmp_path / name / "steps.pt")
        engine = zero_runs.muon_engine(f"{tuning} plain")
        TrainingState(tmp_path / name, engine, 2).restore(engine)
        resumed = zero_runs.muon_step(engine, 2, [0, 1])
        start, plain_first, plain_second, plain_third = expected[tuning]
        for found, before, after, tolerance in (
            (first, start, plain_first, 2**-8),
            (second, plain_first, plain_second, 0.05),
            (on_from_plain, plain_second, plain_third, 2**-8),
            (resumed, second, third, 2**-8),
        ):
            off, way = (
                sum(float((after[n] - other[n]).square().sum()) for n in after) ** 0.5
                for other in (found, before)
            )
            assert off <= tolerance * way, (name, tolerance, off, way)


PUBLISHED = {
    "model.path": "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v",
    "sampling.num_frames": 81, "sampling.height": 480, "sampling.width": 832,
    "model.gradient_checkpointing": "attention",
}  # fmt: skip


def test_the_page_shows_what_the_plan_says() -> None:
    page = (REPOSITORY / "docs" / "how-to" / "many-gpus.md").read_text()
    for name, ranks in (("", 1), ("-full", 8)):
        config = load(REPOSITORY / "configs" / f"hunyuanvideo15-480p{name}.yaml")
        text = format_plan(plan(config, ranks=ranks, rewards=reward_sizes(config.named_rewards)))
        assert text[text.index("memory on each") : text.index("  Not counted:")].rstrip() in page


def test_lora_fits_on_one_card_of_80_gb_and_full_tuning_on_eight() -> None:
    """The arithmetic is that of docs/how-to/many-gpus.md, with room for the text encoders."""
    lora = plan(build(PUBLISHED | {"train.ema_decay": 0.99}))
    assert sum(lora.memory.values()) < 60e9
    full = PUBLISHED | {
        "model.tuning": "full",
        "train.ema_decay": 0.99,
        "train.prompts_per_iteration": 8,
    }
    assert sum(plan(build(full), ranks=8).memory.values()) > 160e9
    sharded = plan(build(full | {"train.engine": "zero3"}), ranks=8)
    assert sum(sharded.memory.values()) < 60e9
    n = sharded.trainable
    # of each weight outside the blocks, and 1/8 inside
    whole = (sharded.memory["gradients"] / 4 - n / 8) * 8 / 7
    inside = n - whole
    assert inside > 0.97 * n
    for part, size in (("optimizer state", 8), ("trained weights", 4), ("anchor and averages", 8)):
        assert sharded.memory[part] == pytest.approx(size * (inside / 8 + whole), rel=1e-3), part
    assert "engine zero3" in format_plan(sharded)
    assert max(map(len, format_plan(sharded).splitlines())) <= 80


def test_the_authors_run_fits_their_64_gpus_of_80_gb() -> None:
    """Muon's momentum is sharded with the weights, within a node or over all; unsharded, the run
    fits on no GPU."""

    def planned(ranks: int, engine: str = "zero3", hybrid_shard: str = "true") -> Plan:
        given = {"train.engine": engine, "train.hybrid_shard": hybrid_shard}
        return plan(load(REPOSITORY / "configs" / "official-480p.yaml", given), ranks=ranks)

    state, hybrid, over_all = "optimizer state", planned(64), planned(64, hybrid_shard="false")
    assert sum(hybrid.memory.values()) < 80e9
    assert sum(over_all.memory.values()) < 45e9
    assert sum(planned(64, engine="zero2").memory.values()) < 80e9, "as shipped"
    assert hybrid.memory[state] == planned(8).memory[state]
    # the rest is whole on each rank
    sharded = (hybrid.memory[state] - over_all.memory[state]) / (1 / 8 - 1 / 64)
    assert sharded == pytest.approx(4 * hybrid.trainable, rel=0.05)
    assert sum(planned(64, engine="plain").memory.values()) > 141e9


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"train__engine": "zero4"}, "zero4"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_said(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        settings(**overrides)


def test_deepspeed_that_is_not_there_is_said_before_a_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("sage_fast.config.rank_checks.importlib.util.find_spec", lambda name: None)
    config = settings(train__engine="zero2", output=str(tmp_path / "run"))
    monkeypatch.setattr(
        train_module, "load_setup", lambda *args, **kwargs: pytest.fail("the model was loaded")
    )
    with pytest.raises(
        UserError, match=r"'zero2' needs deepspeed.*pip install 'sage-fast\[deepspeed\]'.*is plain"
    ):
        train_module.train(config)


def test_gradients_are_reduced_beside_the_backward_where_they_are_sharded() -> None:
    """ZeRO-1 has nothing to overlap before the last backward."""
    for engine, overlaps in (("zero1", False), ("zero2", True)):
        zero = deepspeed_settings(settings(train__engine=engine).train, 999)["zero_optimization"]
        assert (zero["overlap_comm"], zero["allgather_bucket_size"]) == (overlaps, 1000)


OVERRIDES = {
    "zero_optimization": {"reduce_bucket_size": 4322, "overlap_comm": True},
    "wall_clock_breakdown": True,
}


@needs_deepspeed
@pytest.mark.parametrize("form", ["mapping", "json", "yaml"])
def test_a_configuration_of_deepspeed_is_merged_over_ours(form: str, tmp_path: Path) -> None:
    """From a mapping, or a file beside the settings."""
    (tmp_path / "ds.json").write_text(json.dumps(OVERRIDES, indent=2))
    (tmp_path / "ds.yaml").write_text(yaml.safe_dump(OVERRIDES))
    given = OVERRIDES if form == "mapping" else f"ds.{form}"
    train = {"engine": "zero1", "deepspeed_config": given}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({"train": train}))
    config = load(tmp_path / "mine.yaml", {})
    check_choices(config.sampling, config.objective, config.train, config.reward.part_weights)
    check_deepspeed_settings(config.train)
    found = deepspeed_settings(config.train, 1000)
    ours = deepspeed_settings(settings(train__engine="zero1").train, 1000)
    assert found["zero_optimization"] == ours["zero_optimization"] | OVERRIDES["zero_optimization"]
    assert found["wall_clock_breakdown"] is True
    assert found["gradient_clipping"] == ours["gradient_clipping"]


@needs_deepspeed
@pytest.mark.parametrize(
    ("engine", "given", "message"),
    [
        ("zero1", {"train_batch_size": 8}, "train_batch_size follows from the settings; set train"),
        ("zero2", {"bf16": {"enabled": False}}, "bf16 follows from the settings; set model.dtype"),
        ("zero2", {"optimizer": {"type": "Adam"}}, "optimizer follows from .* train.optimizer"),
        ("zero2", {"gradient_clipping": 2}, "set train.max_grad_norm"),
        ("zero2", {"zero_optimization": {"stage": 3}}, "zero_optimization.stage .* train.engine"),
        ("zero2", {"zero_optimization": {"offload_optimizer": {}}}, "offload_shards = true"),
        ("zero2", {"zero_optimization": {"reduce_buket_size": 2}}, "'reduce_bucket_size'"),
        ("zero2", {"zero_optimization": {"reduce_bucket_size": "many"}}, "DeepSpeed refuses it"),
        ("zero2", {"zero_optimization": 3}, "zero_optimization = 3: expected a mapping"),
        ("zero3", {"wall_clock_breakdown": True}, "zero3 does not run DeepSpeed; expected zero1"),
        ("zero1", "missing.json", "no such file"),
        ("zero1", "list.json", "holds list; expected a mapping"),
        ("zero1", "broken.json", "cannot be read as JSON or YAML"),
    ],
)  # fmt: skip
def test_what_a_configuration_of_deepspeed_may_not_say_is_refused_by_name(
    engine: str, given: Any, message: str, tmp_path: Path
) -> None:
    (tmp_path / "list.json").write_text("[1, 2]")
    (tmp_path / "broken.json").write_text('{"a": ')
    if isinstance(given, str):
        given = str(tmp_path / given)
    config = settings(train__engine=engine, train__deepspeed_config=given)
    weights = config.reward.part_weights

    def check() -> None:
        check_choices(config.sampling, config.objective, config.train, weights)
        check_deepspeed_settings(config.train)

    with pytest.raises(UserError, match=message) as refused:
        check()
    assert str(refused.value).startswith("train.deepspeed_config = ")
    assert "\n" not in str(refused.value)


@needs_deepspeed
def test_a_run_records_the_contents_of_its_configuration_of_deepspeed(tmp_path: Path) -> None:
    """A resume says when the file has changed, whatever its name."""
    file = tmp_path / "ds.json"
    found = []
    for size in (4322, 4322, 9000):
        file.write_text(json.dumps({"zero_optimization": {"reduce_bucket_size": size}}))
        given = {
            "train.engine": "zero2",
            "train.deepspeed_config": str(file),
            "output": str(tmp_path),
        }
        config = load(REPOSITORY / "configs" / "recipes" / "paper.yaml", given)
        found.append(load_setup(resolve(config)).contents["train.deepspeed_config"])
    first, again, changed = found
    assert first == again
    assert first.startswith("settings (")
    assert changed != first


def own_configuration(folder: Path) -> None:
    """Train an iteration of ZeRO-2 with and without a configuration of DeepSpeed's."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    initialize()
    norms = []
    for given in (None, {"zero_optimization": {"reduce_bucket_size": 4322}}):
        config = settings(train__engine="zero2", train__deepspeed_config=given)
        trainer = tiny_trainer(config)
        norms.append(trainer.iteration(0)["grad_norm"])
    engine = cast(Any, trainer.engine)
    assert engine.deepspeed.zero_reduce_bucket_size() == 4322
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    shutdown()


@needs_deepspeed
def test_deepspeed_runs_with_the_merged_configuration(tmp_path: Path) -> None:
    assert run_ranks(own_configuration, 2, tmp_path) == [0, 0], screens(tmp_path)


@pytest.mark.parametrize("where", ["iteration", "evaluation"])
def test_a_reward_that_fails_on_one_rank_of_zero3_ends_no_rollout_of_the_others(
    where: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Otherwise they would wait for this rank's share of the weights until `timeout_minutes` is
    over."""

    class Down:
        def __call__(self, videos: torch.Tensor, prompts: Sequence[str]) -> dict[str, torch.Tensor]:
            # A reward that gives no answer in time, and one that fails.
            raise (RewardError if where == "evaluation" else OSError)("scoring server went away")

    monkeypatch.setattr("sage_fast.models.policy.world_size", lambda: 2)
    overrides = {"sampling.batch_size": "1", "sampling.steps": "2", "eval.steps": "2",
        "eval.num_prompts": "3",
                 "train.prompts_per_iteration": "1", "train.group_size": "3",
                 "train.optimizer_steps": "1",
                 "eval.seeds_per_prompt": "1", "reward.on_failure": "stop"}  # fmt: skip
    setup = load_setup(resolve(load(REPOSITORY / "configs" / "recipes" / "paper.yaml", overrides)))
    setup.encode(tmp_path)
    setup.reward = CompositeReward(Down(), setup.config.reward)
    trainer = Trainer(setup.resolved, setup.model, setup.reward, setup.prompts, setup.embeddings)
    monkeypatch.setattr(trainer.policy.states, "gathers", True)
    forwards, velocity = [], trainer.policy.velocity
    monkeypatch.setattr(trainer.policy, "velocity", lambda *a: forwards.append(1) or velocity(*a))
    with pytest.raises(RewardError, match="scoring server went away"):
        trainer.iteration(0) if where == "iteration" else evaluate(setup, iteration=0)
    assert len(forwards) == 3 * 2


def test_text_that_is_not_there_gives_its_embedder_a_gradient_of_zero() -> None:
    """With it, ranks with glyphs in their prompts and ranks without reduce the same weights."""
    model = tiny_model(settings(model__tuning="full"))
    forward, text = model.policy.forward, [embedding("")]
    plain = forward.context(torch.tensor([400.0]), text)
    context = forward.context(torch.tensor([400.0]), text, every=True)
    assert torch.equal(context, plain)
    context.sum().backward()
    for p in model.policy.transformer.context_embedder_2.parameters():
        assert p.grad is not None
        assert not p.grad.any()
