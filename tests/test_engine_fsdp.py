"""`zero3` (FSDP2) trains as one plain process does, and gathers a block at a time in the
activations' dtype."""

import itertools
import json
import math
import os
from collections import defaultdict
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.utils import _to_kwargs
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.scaling import count_gathers
from sage_fast.config.loader import load
from sage_fast.config.rank_checks import check_choices
from sage_fast.models.hunyuan15.policy import HunyuanVideo15Policy, freeze_dead_ends
from sage_fast.parallel import Engine, fsdp, make_engine, ranks_that_shard
from sage_fast.parallel.gradients import average_gradients
from sage_fast.run.checkpoint import TrainingState, save_training_state
from sage_fast.tools.plan import plan
from sage_fast.tools.plan_text import format_plan
from sage_fast.util.errors import NonFiniteError, UserError
from sage_fast.util.process_group import initialize
from sage_fast.util.ranks import rank, shutdown
from tests import zero_runs
from tests.ranks import run_ranks, screens
from tests.tiny import CPU, embedding, settings, tiny_model
from tests.zero_runs import mixed_trainer

RANKS = 4
REPOSITORY = Path(__file__).parents[1]
CASES: dict[str, dict[str, Any]] = {
    "full muon": {
        "model__tuning": "full",
        "model__gradient_checkpointing": "attention",
        "train__optimizer": "muon",
    },
    "full bfloat16": {"model__tuning": "full", "model__dtype": "bfloat16"},
    "lora adamw": {"model__gradient_checkpointing": "full"},
}
TOLERANCES = {"full muon": 2**-8, "full bfloat16": 2**-5, "lora adamw": 2e-5}
"""Of an update, relative to its size: Muon orthogonalises in bfloat16."""
WORDS = "a small red ball moves left quickly"


def engine(case: str, name: str, **others: Any) -> Engine:
    given = {
        "train__learning_rate": 1e-2,
        "train__weight_decay": 0.5,
        "train__eps": 1e-8,
        "train__ema_decay": 0.5,
    }
    given |= {"sampling__guidance_scale": 2.0, "train__engine": name} | CASES[case]
    given |= others
    config = settings(**given)
    policy = tiny_model(config, getattr(torch, config.model.dtype)).policy
    if config.model.tuning == "full":
        policy.transformer.float()
    freeze_dead_ends(policy.transformer)
    return make_engine(policy, config.train)


def test_the_root_has_an_argument_for_fsdp2_to_move_to_the_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As PyTorch 2.11 moves it before a root's forward; on a CPU it does not look."""
    monkeypatch.setattr(fsdp, "fully_shard", lambda module, **_: module)
    monkeypatch.setattr(
        nn.Module, "set_modules_to_forward_prefetch", lambda *_: None, raising=False
    )
    roots: list[nn.Module] = []

    def before(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        if isinstance(module, fsdp._Root):
            assert _to_kwargs(arguments, {}, CPU, False)[0][0] == arguments
            roots.append(module)

    with register_module_forward_pre_hook(before):
        fsdp._shard(tiny_model(settings()).policy, cast(DeviceMesh, None))
    assert len(roots) == 1


def loss(policy: HunyuanVideo15Policy, seed: int, *, frozen: bool) -> Tensor:
    """A loss of one transition with guidance; of the blocks' weights alone if the conditions are
    frozen."""
    text, negative = ([embedding(words)] for words in (WORDS, ""))
    with torch.set_grad_enabled(not frozen):
        inputs = policy.condition(torch.tensor([0.4]), text, negative)
    x = torch.randn(1, 32, 5, 4, 4, generator=torch.Generator().manual_seed(seed))
    return policy.guided_velocity(x, inputs).square().mean()


def update(engine: Engine, number: int, ranks: list[int]) -> float:
    """Update by the mean of six losses, with this process computing those of `ranks`: one of rank
    0, two of rank 1."""
    frozen, policy = number == 1, engine.policy
    seeds = [10 * number + 2 * place + i for place in ranks for i in range(1 + place % 2)]

    def idle() -> None:
        engine.backward(0 * loss(policy, 0, frozen=frozen), 6)

    for seed in policy.states.pad_to_largest(seeds, idle):
        engine.backward(loss(policy, seed, frozen=frozen), 6)
    return engine.step()


def whole(engine: Engine) -> dict[str, Tensor]:
    return {
        name: engine.policy.states.whole(p).clone()
        for name, p in engine.policy.parameters().items()
    }


def updates(folder: Path) -> None:
    """On two nodes of two ranks: updates of each case, what raises and what rewinds; then the next
    from two files."""
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    initialize()
    for case in CASES:
        made = engine(case, "zero3")
        policy, steps, norms = made.policy, [], []
        for number in range(2):
            norms.append(update(made, number, [rank()]))
            steps.append(policy.snapshot())
        assert made.remember()
        before = policy.snapshot()
        with policy.using({name: part + 1 for name, part in before.items()}):
            for name, p in itertools.islice(policy.parameters().items(), 20, 40):
                part, start = policy.states.whole(p).flatten(), policy.states.start(p)
                assert torch.equal(part[start : start + len(before[name])], before[name] + 1), name
        made.backward(loss(policy, 0, frozen=False) * (math.nan if rank() == 3 else 1), RANKS)
        with pytest.raises(NonFiniteError, match="optimizer step 2; the weights were not updated"):
            made.step()
        assert all(torch.equal(part, before[name]) for name, part in policy.parts().items())
        update(made, 2, [rank()])
        steps.append(policy.snapshot())
        made.rewind()
        assert all(torch.equal(part, before[name]) for name, part in policy.parts().items())
        (folder / case).mkdir(exist_ok=True)
        save_training_state(folder / case, made)
        TrainingState(folder / f"{case} plain", made, 2).restore(made)
        update(made, 2, [rank()])
        starts = {name: policy.states.start(p) for name, p in policy.parameters().items()}
        torch.save((starts, [*steps, policy.snapshot()], norms), folder / f"{case}-{rank()}.pt")
    shutdown()


def joined(
    folder: Path, case: str, like: dict[str, Tensor]
) -> tuple[list[dict[str, Tensor]], list[float]]:
    """Whole weights after each update, from the parts of the first node, which are those of the
    second; and norms."""
    ranks = [torch.load(folder / f"{case}-{number}.pt") for number in range(RANKS)]
    found: list[dict[str, Tensor]] = []
    for step in range(len(ranks[0][1])):
        found.append({name: torch.full_like(weight, math.nan) for name, weight in like.items()})
        for number, (starts, steps, _) in enumerate(ranks):
            for name, part in steps[step].items():
                place = found[-1][name].view(-1)[starts[name] : starts[name] + len(part)]
                assert number < 2 or torch.equal(place, part), name
                place.copy_(part)
    return found, ranks[0][2]


def test_updates_are_those_of_one_plain_process(tmp_path: Path) -> None:
    """Compare whole weights, relative to how far they moved, on two nodes of two ranks with uneven
    micro-batches.

    LoRA and all weights, AdamW and Muon, guidance, every mode of checkpointing, weights without a
    gradient, and the next update after each engine has loaded the other's checkpoint.
    """
    expected = {}
    for case in CASES:
        plain = engine(case, "plain")
        start, steps, norms = whole(plain), [], []
        for number in range(2):
            norms.append(update(plain, number, [*range(RANKS)]))
            steps.append(whole(plain))
        (tmp_path / f"{case} plain").mkdir()
        save_training_state(tmp_path / f"{case} plain", plain)
        update(plain, 2, [*range(RANKS)])
        expected[case] = [start, *steps, whole(plain)], norms
    assert run_ranks(updates, RANKS, tmp_path) == [0] * RANKS, screens(tmp_path, RANKS)
    for case, tolerance in TOLERANCES.items():
        (start, first, second, third), norms = expected[case]
        (mine, before, after, from_plain), found_norms = joined(tmp_path, case, start)
        assert found_norms == pytest.approx(norms, rel=tolerance), case
        resumed = engine(case, "plain")
        TrainingState(tmp_path / case, resumed, 2).restore(resumed)
        update(resumed, 2, [*range(RANKS)])
        for found, old, new in (
            (mine, start, first),
            (from_plain, second, third),
            (whole(resumed), before, after),
        ):
            off, way = (
                sum(float((new[n] - other[n]).square().sum()) for n in new) ** 0.5
                for other in (found, old)
            )
            assert off <= tolerance * way, (case, off, way)


@pytest.mark.parametrize(
    ("node", "ranks", "given", "expected"),
    [("2", 4, {}, 2), ("2", 4, {"train__hybrid_shard": False}, 4), ("4", 4, {}, 4), ("1", 4, {}, 4),
     ("3", 8, {}, 8),
     (None, 64, {}, 8), ("2", 4, {"train__engine": "zero2"}, 4)],
)  # fmt: skip
def test_ranks_of_a_node_share_a_copy(
    node: str | None,
    ranks: int,
    given: dict[str, Any],
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Unless a node has one rank, or nodes have different numbers of them; a plan's nodes have
    8."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if node is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", node)
    assert ranks_that_shard(settings(**{"train__engine": "zero3"} | given).train, ranks) == expected


def in_host_memory(folder: Path) -> None:
    """Update with and without `train.offload_shards`, on two nodes of two ranks."""
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    initialize()
    for case in ("full bfloat16", "lora adamw"):
        found = []
        for offload in (False, True):
            made = engine(case, "zero3", train__offload_shards=offload)
            unit = cast(Any, made.policy.sharded_units()[0][0])
            policy_of_unit = unit._get_fsdp_state()._fsdp_param_group.offload_policy
            assert isinstance(policy_of_unit, CPUOffloadPolicy) == offload
            norms = [update(made, number, [rank()]) for number in range(3)]
            with made.averaged_weights():
                average = whole(made)
            found.append((norms, {**whole(made), **{f"ema {n}": t for n, t in average.items()}}))
        (norms, weights), (norms_offloaded, offloaded) = found
        assert norms == norms_offloaded, case
        assert all(torch.equal(offloaded[name], weights[name]) for name in weights), case
    shutdown()


def test_shards_in_host_memory_train_to_the_bit_as_on_the_device(tmp_path: Path) -> None:
    assert run_ranks(in_host_memory, RANKS, tmp_path) == [0] * RANKS, screens(tmp_path)


@pytest.mark.parametrize("in_host_memory", [False, True])
def test_shards_on_their_way_to_the_gpu_are_not_overwritten(
    in_host_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy from pinned memory reads it when the GPU gets there, which the host does not wait
    for."""
    waits: list[torch.device] = []
    monkeypatch.setattr(fsdp, "synchronize", waits.append)
    states = fsdp.ShardedStates(CPU, in_host_memory=in_host_memory)
    weight = torch.zeros(2)
    states.write({"a": weight}, {"a": torch.ones(2)})
    assert waits == ([CPU] if in_host_memory else [])
    assert torch.equal(weight, torch.ones(2))


def test_the_plan_counts_shards_in_host_memory_apart() -> None:
    config = REPOSITORY / "configs" / "hunyuanvideo15-480p-full.yaml"
    given = {"train.engine": "zero3", "train.optimizer": "adamw"}
    on_gpu = plan(load(config, given), ranks=8)
    offloaded = plan(load(config, given | {"train.offload_shards": "true"}), ranks=8)
    parts = ("frozen weights", "trained weights", "gradients", "optimizer state")
    moved = [
        on_gpu.memory[part] - offloaded.memory[part] for part in (*parts, "anchor and averages")
    ]
    assert min(moved) >= 0
    assert offloaded.in_host_memory == pytest.approx(sum(moved))
    assert offloaded.in_host_memory > 10 * 2**30
    assert on_gpu.in_host_memory == 0
    assert offloaded.memory["block in flight"] == on_gpu.memory["block in flight"]
    assert "host memory of each rank, for shards" in format_plan(offloaded)
    assert "for shards" not in format_plan(on_gpu)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "offload_shards = True: train.engine = plain shards no weights; expected zero3"),
        ({"train__engine": "zero2"}, "train.engine = zero2 shards no weights"),
        ({"train__engine": "zero3", "train__optimizer": "muon"}, "muon gathers whole matrices"),
    ],
)
def test_what_cannot_keep_shards_in_host_memory_is_said(
    given: dict[str, Any], message: str
) -> None:
    config = settings(train__offload_shards=True, **given)
    with pytest.raises(UserError, match=message):
        check_choices(config.sampling, config.objective, config.train, config.reward.part_weights)


class Collectives(TorchDispatchMode):
    """Collectives by name: dtype and elements of what each gathers or reduces."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, list[tuple[str, int]]] = defaultdict(list)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            whole = args[1] if "reduce_scatter" in func.__name__ else args[0]
            whole = whole[0] if isinstance(whole, list) else whole
            self.found[func.__name__.split(".")[0].strip("_")].append(
                (str(whole.dtype), whole.numel())
            )
        return func(*args, **(kwargs or {}))


def collectives(folder: Path, mode: str) -> None:
    """Write what each part of an iteration gathers and reduces."""
    initialize()
    trainer = mixed_trainer(
        settings(
            model__tuning="full",
            model__dtype="bfloat16",
            model__gradient_checkpointing=mode,
            train__engine="zero3",
        )
    )
    policy, text = trainer.policy, [embedding(WORDS)]
    x, sigma, found = torch.randn(1, 32, 5, 4, 4), torch.tensor([0.4]), {}
    with torch.no_grad():
        with Collectives() as of_anchor:
            table = policy.condition(sigma, text)
            policy.velocity(x, table)
        with Collectives() as of_rollout:
            policy.velocity(x, table)
    with Collectives() as of_training:
        trainer.engine.backward(
            policy.velocity(x, policy.condition(sigma, text)).float().square().mean(), 2
        )
    with Collectives() as of_swap, policy.using(policy.snapshot()):
        pass
    parts = {"anchor": of_anchor, "rollout": of_rollout, "training": of_training, "swap": of_swap}
    if rank() == 0:
        found = {part: counted.found for part, counted in parts.items()}
        (folder / "collectives.json").write_text(json.dumps(found))
    shutdown()


@pytest.mark.parametrize("mode", [pytest.param("none", marks=pytest.mark.soak), "attention"])
def test_one_gather_a_block_in_bfloat16(mode: str, tmp_path: Path) -> None:
    """As scaling.md counts; a recomputation gathers nothing, gradients are reduced in float32, a
    swap sends nothing."""
    assert run_ranks(collectives, 2, tmp_path, mode) == [0, 0], screens(tmp_path)
    found = json.loads((tmp_path / "collectives.json").read_text())
    assert found.pop("swap") == {}
    policy = tiny_model(settings(model__tuning="full")).policy
    counted = count_gathers(policy)
    for part, (count, elements) in counted.items():
        gathers = found[part].pop("allgather_base")
        if part == "training":
            # The first backward after a forward without gradients prefetches one unit more, as if
            # that came before.
            assert len(gathers) == count + 1
            gathers.pop()
            reduced = found[part].pop("reduce_scatter_base")
            assert len(reduced) == counted["anchor"][0]
            assert {dtype for dtype, _ in reduced} == {"torch.float32"}
        assert len(gathers) == count
        assert {dtype for dtype, _ in gathers} == {"torch.bfloat16"}
        assert sum(size for _, size in gathers) == pytest.approx(elements, rel=0.01), part
        assert found[part] == {}


def reductions(folder: Path) -> None:
    """Count what a step of two nodes of two ranks reduces, and average shards that some lack."""
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    initialize()
    for offload in (False, True):
        made = engine("lora adamw", "zero3", train__offload_shards=offload)
        made.backward(loss(made.policy, rank(), frozen=False), RANKS)
        with Collectives() as of_step:
            made.step()
        weights = len(made.parameters)
        (folder / f"reductions-{offload}-{rank()}.json").write_text(
            json.dumps([weights, of_step.found])
        )

    group = cast(Any, made).replicate_group
    node = rank() // 2
    shards = [torch.zeros(size) for size in (5, 3, 0, 2)]
    # the second is without a gradient on the first node, the fourth on both
    shards[0].grad = torch.arange(5.0) * (1 + 2 * node)
    shards[1].grad = torch.ones(3) if node == 1 else None
    shards[2].grad = torch.zeros(0)
    average_gradients(shards, CPU, group)
    assert shards[3].grad is None
    found = [shard.grad.tolist() for shard in shards[:3] if shard.grad is not None]
    assert found == [[0, 2, 4, 6, 8], [0.5, 0.5, 0.5], []]
    shutdown()


def test_shards_cross_the_nodes_in_one_call(tmp_path: Path) -> None:
    """Of a step with thousands of weights, each would be a call that waits for the network."""
    assert run_ranks(reductions, RANKS, tmp_path) == [0] * RANKS, screens(tmp_path, RANKS)
    for file in tmp_path.glob("reductions-*.json"):
        weights, found = json.loads(file.read_text())
        sums = [size for dtype, size in found["allreduce"] if dtype == "torch.float32"]
        flags = [size for dtype, size in found["allreduce"] if dtype == "torch.int32"]
        assert found.keys() == {"allreduce"}
        # the gradients of the shards, and the square of their norm
        assert len(sums) == 2, sums
        assert sums[1] == 1
        # which shards have a gradient on a node, and for which it is not zero
        assert len(flags) == 2
        assert flags[0] == weights


@pytest.mark.soak
@pytest.mark.parametrize(("mode", "most"), [("none", 0.07), ("attention", 0.05)])
def test_the_plan_is_close_to_the_memory_at_the_peak(
    mode: str, most: float, tmp_path: Path
) -> None:
    """Count every tensor that is alive on the first rank in a backward in bfloat16.

    With `none` a block's gradients come when activations have begun to go; the plan adds them up.
    """
    assert run_ranks(zero_runs.memory, 2, tmp_path, mode) == [0, 0], screens(tmp_path)
    found = json.loads((tmp_path / "memory.json").read_text())
    assert found["measured"] == pytest.approx(sum(found["planned"].values()), rel=most), found
