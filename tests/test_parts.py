"""Checkpoints and weights that every rank writes: who writes what, any number of readers, and files
that do not fit."""

import contextlib
import errno
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from sage_fast.models.hunyuan15.policy import freeze_dead_ends
from sage_fast.models.load import _load
from sage_fast.models.lora.adapter import LORA_FILE
from sage_fast.parallel import Engine, make_engine
from sage_fast.run import shards as parts
from sage_fast.run.checkpoint import load_checkpoint, save_checkpoint, save_training_state
from sage_fast.run.shards import SavedParts, ShardLayout
from sage_fast.run_folder import RunFolder, iteration_of
from sage_fast.testbed import BASE as TESTBED
from sage_fast.testbed.tiny_model import Testbed, TestbedTransformer
from sage_fast.util.errors import RankError, UserError
from sage_fast.util.process_group import initialize
from sage_fast.util.ranks import rank, shutdown
from tests.ranks import run_ranks, screens
from tests.test_engine_deepspeed import needs_deepspeed
from tests.tiny import settings, tiny_model
from tests.zero_runs import muon_step

WEIGHTS = {"matrix": torch.randn(5, 7), "vector": torch.randn(4), "scalar": torch.randn(())}
Spans = Sequence[Mapping[str, tuple[int, int]]]
HELD: dict[str, Spans] = {
    "whole on one rank": [{"matrix": (0, 35), "vector": (0, 4), "scalar": (0, 1)}],
    "whole on three ranks": [{"matrix": (0, 35), "vector": (0, 4), "scalar": (0, 1)}] * 3,
    "rows of a buffer": [
        {"matrix": (0, 20), "vector": (0, 0), "scalar": (0, 0)},
        {"matrix": (20, 35), "vector": (0, 3), "scalar": (1, 1)},
        {"matrix": (35, 35), "vector": (3, 4), "scalar": (0, 1)},
    ],
    "two nodes of two shards": [
        {"matrix": (0, 21), "vector": (0, 2), "scalar": (0, 1)},
        {"matrix": (21, 35), "vector": (2, 4), "scalar": (1, 1)},
    ]
    * 2,
}


class Held:
    """A policy, and the storage of its snapshots, that has these parts of `WEIGHTS`; a weight is
    its name."""

    def __init__(self, spans: Mapping[str, tuple[int, int]]) -> None:
        self.spans, self.states = spans, self

    def parameters(self) -> dict[str, Any]:
        return {name: name for name in self.spans}

    def start(self, name: str) -> int:
        return self.spans[name][0]

    def part(self, name: str) -> Tensor:
        return WEIGHTS[name].flatten()[slice(*self.spans[name])]

    def shape(self, name: str) -> torch.Size:
        return WEIGHTS[name].shape

    def parts(self) -> dict[str, Tensor]:
        return {name: self.part(name) for name in self.spans}


def layouts(held: Spans) -> Iterator[tuple[ShardLayout, dict[str, Tensor]]]:
    """Become each of the ranks that hold these spans; yield its layout and its parts."""
    for number, spans in enumerate(held):
        stand_ins = {
            "rank": lambda number=number: number,
            "all_gather_object": lambda own: list(held),
        }
        with mock.patch.multiple(parts, **stand_ins):
            policy = Held(spans)
            yield ShardLayout(policy), policy.parts()


def write(folder: Path, kind: str, layout: ShardLayout, own: Mapping[str, Tensor]) -> list[Path]:
    """Write the slices of a rank that shares its file with no other."""
    slices = {name: layout.own_slice(name, part) for name, part in own.items()}
    return layout.write(folder, kind, {name: t for name, t in slices.items() if t.numel()})


@pytest.mark.parametrize("writers", HELD)
def test_any_ranks_read_what_any_ranks_wrote(writers: str, tmp_path: Path) -> None:
    held = HELD[writers]
    for layout, own in layouts(held):
        write(tmp_path, "trainable", layout, own)
    sizes = [
        sum(t.numel() for t in load_file(file).values()) for file in sorted(tmp_path.iterdir())
    ]
    assert sum(sizes) == 40, "every element once"
    if "rows" not in writers:
        assert max(sizes) <= -(-40 // len(held)) + len(WEIGHTS)
    for readers in HELD.values():
        for layout, own in layouts(readers):
            with mock.patch.multiple(parts, rank=lambda: 0):  # which lists the folder
                read = SavedParts(tmp_path).read("trainable", own, layout)
            assert all(torch.equal(part, own[name]) for name, part in read.items())


def eighths(name: str) -> list[tuple[int, int]]:
    size = WEIGHTS[name].numel()
    bounds = [number * size // 8 for number in range(9)]
    return list(itertools.pairwise(bounds))


WHOLE = HELD["whole on one rank"]
NODE_OF_SHARDS = [{name: eighths(name)[number] for name in WEIGHTS} for number in range(8)]
MANY: dict[str, tuple[Spans, int]] = {
    "16 ranks": ([*WHOLE] * 16, 16),
    "17 ranks": ([*WHOLE] * 17, 16),
    "512 ranks": ([*WHOLE] * 512, 16),
    "64 nodes of 8 shards": (NODE_OF_SHARDS * 64, 16),
}
SHARD_EACH: Spans = [{"matrix": (n, n + 1), "vector": (0, 4), "scalar": (0, 1)} for n in range(35)]
"""As many shards as ranks."""


@pytest.mark.parametrize("case", MANY)
def test_of_many_ranks_that_hold_the_same_a_few_write(case: str, tmp_path: Path) -> None:
    held, files = MANY[case]
    writers = []
    for number, (layout, own) in enumerate(layouts(held)):
        if write(tmp_path, "trainable", layout, own):
            writers.append(number)
    assert len(writers) == files
    assert layout.groups == [[number] for number in writers]
    assert len(list(tmp_path.iterdir())) == files
    if case == "512 ranks":
        assert {b - a for a, b in itertools.pairwise(writers)} == {32}, "on nodes of their own"
    for readers in (WHOLE, held[:8] if "nodes" in case else HELD["rows of a buffer"]):
        for layout, own in layouts(readers):
            with mock.patch.multiple(parts, rank=lambda: 0):
                read = SavedParts(tmp_path).read("trainable", own, layout)
            assert all(torch.equal(part, own[name]) for name, part in read.items())


def test_ranks_share_a_file_if_theirs_would_be_small() -> None:
    """A file of three of 35 ranks, until each has enough for its own."""
    layout, _ = next(layouts(SHARD_EACH))
    assert [len(group) for group in layout.groups] == [*[3] * 11, 2]
    assert [*itertools.chain(*layout.groups)] == [*range(35)]
    with mock.patch.object(parts, "MIN_FILE_BYTES", 4 * 40 // 35):
        layout, _ = next(layouts(SHARD_EACH))
    assert layout.groups == [[number] for number in range(35)]
    with mock.patch.object(parts, "MIN_FILE_BYTES", 4 * 40 // 20):
        layout, _ = next(layouts(SHARD_EACH))
    assert [len(group) for group in layout.groups] == [*[2] * 17, 1]


def test_a_checkpoint_with_a_file_of_every_rank_is_read(tmp_path: Path) -> None:
    with mock.patch.object(parts, "MAX_WRITERS", 1000):
        for layout, own in layouts([*WHOLE] * 40):
            write(tmp_path, "trainable", layout, own)
    assert len(list(tmp_path.iterdir())) == 40
    for layout, own in layouts([*WHOLE] * 2):
        with mock.patch.multiple(parts, rank=lambda: 0):
            read = SavedParts(tmp_path).read("trainable", own, layout)
        assert all(torch.equal(part, own[name]) for name, part in read.items())


def rewrite(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    with safe_open(file, "pt") as opened:
        places = json.loads(opened.metadata()["parts"])
    change(places)
    save_file(load_file(file), file, {"parts": json.dumps(places)})


FILES = [f"ema-0000{number}-of-00002.safetensors" for number in (1, 2)]
FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda folder: (folder / FILES[1]).unlink(), f"{FILES[1]} is missing"),
    "extra": (
        lambda folder: os.link(folder / FILES[0], folder / "ema-00001-of-00003.safetensors"),
        "ema-00001-of-00003.safetensors is not one of the 2 files of ema",
    ),
    "overlap": (
        lambda folder: rewrite(
            folder / FILES[1], lambda places: places["vector"].__setitem__(0, 1)
        ),
        f"vector: expected elements 0 to 4, each once; got 0 to 2 in {FILES[0]}, 1 to 3 in "
        f"{FILES[1]}",
    ),
    "gap": (
        lambda folder: rewrite(
            folder / FILES[1], lambda places: places["vector"].__setitem__(0, 3)
        ),
        f"vector: expected elements 0 to 4, each once; got 0 to 2 in {FILES[0]}, 3 to 5 in "
        f"{FILES[1]}",
    ),
    "an end": (
        lambda folder: rewrite(
            folder / FILES[1], lambda places: places["vector"].__setitem__(1, 6)
        ),
        f"vector: expected elements 0 to 6, each once; got 0 to 2 in {FILES[0]}, 2 to 4 in "
        f"{FILES[1]}",
    ),
    "other file": (
        lambda folder: save_file({"vector": torch.zeros(2)}, folder / FILES[0]),
        f"{FILES[0]}: not a file of parts of weights",
    ),
    "torn": (
        lambda folder: os.truncate(folder / FILES[0], 30),
        f"{FILES[0]}: not a file of parts of weights",
    ),
    "of another model": (
        lambda folder: [
            rewrite(folder / FILES[0], lambda places: places.update(vector=[0, 2])),
            rewrite(folder / FILES[1], lambda places: places.pop("vector")),
        ],
        "ema has 2 elements of vector; expected 4",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_files_that_do_not_fit_are_named(fault: str, tmp_path: Path) -> None:
    held = HELD["two nodes of two shards"][:2]
    for layout, own in layouts(held):
        write(tmp_path, "ema", layout, own)
    damage, message = FAULTS[fault]
    damage(tmp_path)
    ((layout, own),) = layouts(HELD["whole on one rank"])
    with pytest.raises(UserError) as error:
        SavedParts(tmp_path).read("ema", own, layout)
    assert message in str(error.value)


# -- loading ---------------------------------------------------------------------------------------


class Casts(TorchDispatchMode):
    """Bytes of casts in host memory: those of each, and the most that were alive together."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[StorageWeakRef, int]] = []
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and out.device.type == "cpu":
            self.made.append((StorageWeakRef(out.untyped_storage()), out.nbytes))
            self.peak = max(
                self.peak, sum(size for storage, size in self.made if not storage.expired())
            )
        return out


def test_a_model_reaches_its_device_one_tensor_at_a_time() -> None:
    """The device is a stand-in without memory: what is left in the host's is what a rank takes
    there."""
    with Casts() as casts:
        network = _load(
            Testbed(),
            "model.path",
            str(TESTBED),
            "transformer",
            torch.float64,
            torch.device("meta"),
        )
    sizes = [size for _, size in casts.made]
    assert sum(sizes) == sum(p.nbytes for p in network.parameters())
    assert casts.peak <= 2 * max(sizes)


# -- engines on two ranks --------------------------------------------------------------------------


def engine_of(name: str) -> Engine:
    """An engine with averaged weights; full tuning with Muon has two optimizers."""
    tuning, engine = name.split()
    given = {"train__optimizer": "muon" if tuning == "full" else "adamw", "train__ema_decay": 0.5}
    config = settings(model__tuning=tuning, train__engine=engine, **given)
    policy = tiny_model(config).policy
    if tuning == "full":
        freeze_dead_ends(policy.transformer)
    return make_engine(policy, config.train, ema_warms_up=False)


def state_of(engine: Engine) -> dict[str, Tensor]:
    """Trained weights and averages, joined by the policy."""
    policy = engine.policy
    found = {
        f"trainable {name}": policy.states.whole(p).clone()
        for name, p in policy.parameters().items()
    }
    with engine.averaged_weights():
        found |= {
            f"ema {name}": policy.states.whole(p).clone() for name, p in policy.parameters().items()
        }
    return found


TENSOR_COLLECTIVES = ("all_reduce", "broadcast", "all_gather", "all_gather_into_tensor",
    "reduce_scatter_tensor",
                      "all_to_all_single")  # fmt: skip


def on_two_ranks(folder: Path, names: Sequence[str]) -> None:
    """Train and save with each engine; resume each from the checkpoint of the engine before."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    initialize()
    before: Path | None = None
    for name in names:
        engine, run = engine_of(name), folder / name
        if before is not None and before.name.split()[0] == name.split()[0]:
            assert load_checkpoint(before, engine) is not None
            expected = torch.load(before / "state.pt")
            assert all(
                torch.equal(value, expected[key]) for key, value in state_of(engine).items()
            ), name
        muon_step(engine, 0, [rank()])
        with mock.patch.multiple(dist, **dict.fromkeys(TENSOR_COLLECTIVES, None)):
            (run / "parts").mkdir(parents=True, exist_ok=True)
            save_training_state(run / "parts", engine)
        save_checkpoint(run, 1, engine, {}, engine.policy.snapshot())
        state = state_of(engine)
        if rank() == 0:
            torch.save(state, run / "state.pt")
        dist.barrier()
        before = run
    full_disk(folder, engine)
    shutdown()


def with_one_writer(folder: Path) -> None:
    """Save a LoRA that both ranks hold, by one of them alone, and resume from it."""
    initialize()
    engine = engine_of("lora plain")
    muon_step(engine, 0, [rank()])
    with mock.patch.object(parts, "MAX_WRITERS", 1):
        save_checkpoint(folder / "run", 1, engine, {}, engine.policy.snapshot())
    expected = state_of(engine)
    resumed = engine_of("lora plain")
    assert load_checkpoint(folder / "run", resumed) is not None
    found = state_of(resumed)
    assert all(torch.equal(value, expected[name]) for name, value in found.items())
    if rank() == 0:
        torch.save(expected, folder / "state.pt")
    shutdown()


def test_a_rank_that_writes_nothing_resumes(tmp_path: Path) -> None:
    assert run_ranks(with_one_writer, 2, tmp_path) == [0, 0], screens(tmp_path)
    (checkpoint,) = RunFolder(tmp_path / "run").checkpoints()
    files = sorted(file.name for file in (checkpoint / "training").glob("*.safetensors"))
    kinds = ["anchor", "ema", "optimizer-exp_avg", "optimizer-exp_avg_sq", "trainable"]
    assert files == [f"{kind}-00001-of-00001.safetensors" for kind in kinds]

    alone = engine_of("lora plain")
    assert load_checkpoint(tmp_path / "run", alone) is not None
    expected = torch.load(tmp_path / "state.pt")
    assert all(torch.equal(value, expected[name]) for name, value in state_of(alone).items())


SHARDING_RANKS = 4
SHARED_FILES = {
    "lora zero1": 2,
    "lora zero2": 2,
    "lora zero3": 2,
    "full zero3": 2,
    "lora hybrid": 1,
}
"""Engine -> files of each kind, of four ranks, if three files are too many."""


def with_shared_files(folder: Path, small: bool) -> None:
    """Save what the ranks shard, and resume from it; count the calls that join whole weights."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    initialize()
    patches = {"MAX_WRITERS": 3} if small else {"MAX_WRITERS": 3, "MIN_FILE_BYTES": 64}
    for name in SHARED_FILES:
        hybrid = name.endswith("hybrid")
        os.environ["LOCAL_WORLD_SIZE"] = "2" if hybrid else str(SHARDING_RANKS)
        if hybrid:
            patches |= {"MAX_WRITERS": 1}
        engine_name = "lora zero3" if hybrid else name
        run = folder / name
        engine = engine_of(engine_name)
        muon_step(engine, 0, [rank()])
        with (
            mock.patch.multiple(parts, **patches),
            mock.patch.object(parts, "exchange", side_effect=parts.exchange) as calls,
        ):
            save_checkpoint(run, 1, engine, {}, engine.policy.snapshot())
        # a call for each kind of a shared file, and one for the weights of rank 0 or of all ranks
        kinds = len(files_by_kind(run)) if small else 0
        assert calls.call_count == kinds + 1, name
        expected = state_of(engine)
        resumed = engine_of(engine_name)
        assert load_checkpoint(run, resumed) is not None
        found = state_of(resumed)
        assert all(torch.equal(value, expected[key]) for key, value in found.items()), name
        if rank() == 0:
            torch.save(expected, run / "state.pt")
    shutdown()


def files_by_kind(run: Path) -> dict[str, list[str]]:
    (checkpoint,) = RunFolder(run).checkpoints()
    found: dict[str, list[str]] = {}
    for file in sorted((checkpoint / "training").glob("*.safetensors")):
        kind, number = file.stem.split("-000", 1)
        found.setdefault(kind, []).append(number)
    return found


@needs_deepspeed
@pytest.mark.parametrize("small", [True, False], ids=["small", "large"])
def test_a_few_ranks_write_what_many_shard(small: bool, tmp_path: Path) -> None:
    """Unless the files are large; one process goes on from either."""
    ranks = SHARDING_RANKS
    assert run_ranks(with_shared_files, ranks, tmp_path, small) == [0] * ranks, screens(
        tmp_path, ranks
    )
    for name, shared in SHARED_FILES.items():
        hybrid = name.endswith("hybrid")
        shards = 2 if hybrid else ranks
        count = shared if small else shards
        found = files_by_kind(tmp_path / name)
        assert {"trainable", "ema", "anchor"} < found.keys()
        for kind, numbers in found.items():
            expected = [f"{number:02d}-of-{count:05d}" for number in range(1, count + 1)]
            assert numbers == expected, (name, kind)

        alone = engine_of(f"{name.split()[0]} plain")
        assert load_checkpoint(tmp_path / name, alone) is not None
        states = torch.load(tmp_path / name / "state.pt")
        for key, value in state_of(alone).items():
            assert torch.equal(value, states[key]), (name, key)


def full_disk(folder: Path, engine: Engine) -> None:
    """The disk of one rank is full: both ranks say so, and the checkpoint before stays."""
    save_checkpoint(folder / "disk", 1, engine, {}, None)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "here")
    for number, place, name in ((1, parts, "save_tensors"), (0, Path, "mkdir")):
        failing = (
            mock.patch.object(place, name, side_effect=full)
            if rank() == number
            else contextlib.nullcontext()
        )
        with failing, pytest.raises((OSError, RankError), match="No space left on device"):
            save_checkpoint(folder / "disk", 2, engine, {}, None)
    dist.barrier()
    assert [
        iteration_of(checkpoint) for checkpoint in RunFolder(folder / "disk").checkpoints()
    ] == [1]
    assert load_checkpoint(folder / "disk", engine) is not None


NAMES = ["lora plain", "full plain", "full zero2", "full zero3"]


@needs_deepspeed
@pytest.mark.fault(
    "the disk of one of two ranks is full", "both end, and the checkpoint before stays"
)
def test_every_rank_writes_its_part_and_one_rank_goes_on(tmp_path: Path) -> None:
    assert run_ranks(on_two_ranks, 2, tmp_path, NAMES) == [0, 0], screens(tmp_path)
    for name in NAMES:
        (checkpoint,) = RunFolder(tmp_path / name).checkpoints()
        sizes = [
            file.stat().st_size for file in sorted((checkpoint / "training").glob("trainable-*"))
        ]
        assert max(sizes) < 0.7 * sum(sizes), "about a half each"
        expected = torch.load(tmp_path / name / "state.pt")
        engine = engine_of(f"{name.split()[0]} plain")
        found = load_checkpoint(tmp_path / name, engine)
        assert found is not None
        assert found[2] is not None
        assert {
            key: value
            for key, value in state_of(engine).items()
            if not torch.equal(value, expected[key])
        } == {}
        for key, value in found[2].items():
            assert torch.equal(value, expected[f"trainable {key}"]), "the anchor"
        averages = {
            key.removeprefix("ema "): value
            for key, value in expected.items()
            if key.startswith("ema ")
        }
        if name.startswith("lora"):
            saved = load_file(checkpoint / LORA_FILE)
            exported = {
                key.replace(".weight", ".default.weight"): value for key, value in saved.items()
            }
        else:
            shards = sorted((checkpoint / "transformer").glob("*.safetensors"))
            assert [file.name for file in shards] == [
                f"diffusion_pytorch_model-0000{number}-of-00002.safetensors" for number in (1, 2)
            ]
            assert max(file.stat().st_size for file in shards) < 0.6 * sum(
                file.stat().st_size for file in shards
            )
            loaded, info = TestbedTransformer.from_pretrained(
                checkpoint, subfolder="transformer", output_loading_info=True
            )
            assert not info["missing_keys"]
            assert not info["unexpected_keys"]
            exported = loaded.state_dict()
        assert exported.keys() >= averages.keys()
        assert {
            key for key, value in averages.items() if not torch.equal(value, exported[key])
        } == set()
