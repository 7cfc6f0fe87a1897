"""Every collective has a reason why all ranks make it equally often, whatever each of them holds.

A rank that makes one collective more than another waits for it until `timeout_minutes`. The table
below lists every function that makes one; a new one belongs there, with its reason, and
tests/test_idle_ranks.py tries what a rank may lack.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "sage_fast"
RANKS = PACKAGE / "util" / "ranks.py"
OF_TORCH = {
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "full_tensor",
    "init_device_mesh",
    "monitored_barrier",
    "new_group",
    "new_subgroups",
    "reduce_scatter_tensor",
}
"""Names of collectives in `torch.distributed`."""
OF_STATES = {"pad_to_largest", "padding"}
"""Methods of a policy's states that are collective."""

ALWAYS = "at a fixed place of the work, which all ranks reach"
SETTINGS = "settings, prompts and the plan decide, which all ranks share"
AGREED = "a value decides that all ranks have reduced, gathered or received"
LAYOUT = "the names and sizes of the whole weights decide, which all ranks know"
PADDED = "ranks with fewer forwards make dummy ones"

REASONS = {
    "algorithm/metrics.py Observer.row": ALWAYS,
    "algorithm/trainable.py check_same_settings": ALWAYS,
    "callbacks/training_videos.py TrainingVideos.on_rollout_end": SETTINGS,
    "commands/eval.py evaluate": ALWAYS,
    "commands/sample.py _sample": ALWAYS,
    "callbacks/checkpoints.py Checkpoints.on_evaluation_end": SETTINGS,
    "callbacks/dispatch.py Callbacks._call_users": SETTINGS,
    "callbacks/dispatch.py Callbacks._check_names": ALWAYS,
    "callbacks/dispatch.py Callbacks.add_columns": SETTINGS,
    "callbacks/dispatch.py Callbacks.load_states": AGREED,
    "callbacks/dispatch.py Callbacks.states": SETTINGS,
    "callbacks/dispatch.py Callbacks.videos_wanted": SETTINGS,
    "callbacks/evaluations.py Evaluations.evaluate": AGREED,
    "callbacks/evaluations.py read_evaluation": ALWAYS,
    "data/embeddings.py cache_key": SETTINGS,
    "data/embeddings.py encode_cached": AGREED,  # the ranks gather which prompts each has
    "data/prompt_checks.py check_captions": ALWAYS,
    "eval/evaluation.py score_videos": ALWAYS,
    "eval/evaluation.py video_chunks": PADDED,
    "loading.py load_setup": SETTINGS,
    "models/attention/choose.py _check": SETTINGS,
    "models/attention/choose.py _fastest": SETTINGS,
    # ranks of a group have the same samples
    "models/attention/sequence.py SequenceParallel.whole": PADDED,
    "models/attention/sequence.py _all_to_all": PADDED,
    "models/policy.py UnshardedStates.pad_to_largest": PADDED,
    "parallel/fit.py choose_checkpointing": ALWAYS,
    "parallel/fit.py choose_placement": SETTINGS,
    "parallel/fsdp.py FsdpEngine._gradient_norm": ALWAYS,
    "parallel/fsdp.py FsdpEngine._prepare": ALWAYS,
    "parallel/fsdp.py ShardedStates.padding": PADDED,
    "parallel/fsdp.py ShardedStates.whole": LAYOUT,
    "parallel/fsdp.py _meshes": AGREED,
    "parallel/gradients.py average_gradients": AGREED,
    "parallel/gradients.py forget_zero_gradients": AGREED,  # after the averaging
    "parallel/muon.py PartitionedMuon._round": AGREED,  # after the zero gradients are gone
    "parallel/plain.py PlainEngine.remember": AGREED,
    "parallel/zero.py ZeroEngine._update": ALWAYS,
    "parallel/zero.py _MasterStates.join": LAYOUT,
    "parallel/zero.py _MasterStates.padding": PADDED,
    "parallel/zero.py _MasterStates.write": ALWAYS,
    "rewards/composite.py load_rewards": ALWAYS,
    "rollout/groups.py _layouts": AGREED,  # whether a reward compares, at the start
    "rollout/groups.py _send": AGREED,  # the ranks gather which videos each has
    "rollout/parity.py check_parity": PADDED,
    "rollout/parity.py moments_after_an_update": PADDED,
    "rollout/replay.py Replay._work": PADDED,
    "rollout/samples.py SampleRollouts.finished": PADDED,
    "rollout/scoring.py VideoScorer.__init__": ALWAYS,
    "rollout/scoring.py VideoScorer.finish": ALWAYS,
    "rollout/scoring.py gather_scores": ALWAYS,
    "loading.py Setup._check_same_prompts": ALWAYS,
    "run/checkpoint.py TrainingState.__init__": AGREED,
    "run/checkpoint.py _fault": AGREED,
    "run/checkpoint.py load_checkpoint": AGREED,
    "run/checkpoint.py load_checkpoint.read": AGREED,
    "run/checkpoint.py save_checkpoint": AGREED,
    "run/checkpoint.py save_final_weights": ALWAYS,
    "run/checkpoint.py save_training_state": ALWAYS,
    "run/checkpoint.py write_manifest": ALWAYS,
    "run/claim.py Claim.check": ALWAYS,
    "run/claim.py claim_output": ALWAYS,
    "run/claim.py locked": ALWAYS,
    "run/claim.py probe_run_folder": ALWAYS,
    "run/claim.py replace_settings": ALWAYS,
    "run/shards.py ShardLayout.__init__": ALWAYS,
    "run/shards.py ShardLayout._send": LAYOUT,
    "run/shards.py ShardLayout._weights_of_kinds": ALWAYS,
    "run/shards.py SavedParts.__init__": ALWAYS,
    "run/shards.py SavedParts.read": AGREED,
    "run/stop.py Stop._agree": ALWAYS,
    "run/train.py Run._agreed_stop": ALWAYS,
    "run/train.py _train": ALWAYS,
    "run/weights.py save_weights": LAYOUT,
    "tools/node_check.py _rates": ALWAYS,
    "tools/phases.py profile_iteration": ALWAYS,
    "trainer.py Trainer._compare": AGREED,  # whether a reward compares, at the start
    "trainer.py Trainer.rollout": ALWAYS,
    "trainer.py Trainer.update": PADDED,
    "util/meters.py Metrics._over_ranks": ALWAYS,
}
"""File and function -> why all ranks make its collectives equally often."""


def called(node: ast.AST) -> str:
    """Name of the function or method of a call; empty if it has none."""
    function = node.func if isinstance(node, ast.Call) else None
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def own_collectives() -> set[str]:
    """Functions of util/ranks.py that make a collective, themselves or through another one."""
    functions = [
        node for node in ast.parse(RANKS.read_text()).body if isinstance(node, ast.FunctionDef)
    ]
    found: set[str] = set()
    while True:
        calls = {
            function.name: {called(node) for node in ast.walk(function)} for function in functions
        }
        larger = {name for name, names in calls.items() if names & (OF_TORCH | found)}
        if larger == found:
            return found
        found = larger


def collectives(node: ast.AST, names: set[str], where: str = "") -> Iterator[str]:
    """Yield the qualified name of the function around each collective."""
    for child in ast.iter_child_nodes(node):
        inner = where
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            inner = f"{where}.{child.name}".removeprefix(".")
        if called(child) in names:
            yield inner
        yield from collectives(child, names, inner)


def test_every_collective_has_a_reason() -> None:
    names = own_collectives() | OF_TORCH | OF_STATES
    assert {"all_reduce", "data_sum", "exchange", "fail_together"} <= names
    files = [file for file in PACKAGE.rglob("*.py") if file != RANKS]
    found = {
        f"{file.relative_to(PACKAGE).as_posix()} {function}"
        for file in files
        for function in collectives(ast.parse(file.read_text()), names)
    }
    new, gone = found - REASONS.keys(), REASONS.keys() - found
    assert not new, f"why do all ranks make them equally often? {sorted(new)}"
    assert not gone


def test_dummy_forwards_are_made_in_one_place() -> None:
    """A loop that pads by itself would need work of the rank's own to repeat, which it may not
    have."""
    callers = [
        file.name
        for file in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if called(node) == "padding"
    ]
    assert callers == ["policy.py"]
