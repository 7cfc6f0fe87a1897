"""What a resume takes over: one table of every setting, and one of everything that a checkpoint
holds.

`check_kept` asks the table of settings, docs/how-to/stop-and-resume.md prints both (`python -m
scripts.reference`), and tests/test_resume_table.py walks every setting and every checkpoint through
them.

Imports nothing heavy.
"""

from __future__ import annotations

import dataclasses
from operator import attrgetter
from typing import Any, Literal

from sage_fast.config.fields import settings_of
from sage_fast.config.places import is_moved
from sage_fast.config.reward_names import CLIENTS
from sage_fast.config.schema import Config, RewardEntry
from sage_fast.run_folder import RunFolder
from sage_fast.util.errors import UserError

Kind = Literal["kept", "held", "converted", "free"]
KINDS: dict[Kind, str] = {
    "kept": "refused if it differs",
    "held": "refused unless the checkpoint holds what it needs",
    "converted": "changes, and what was counted so far is converted",
    "free": "changes from the next iteration on",
}
"""What a resume does with a setting that has another value than before."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """What a resume does with some settings.

    Attributes:
        kind: row of `KINDS`.
        why: for `converted` what becomes of it, for the others the reason.
        settings: their names.
    """

    kind: Kind
    why: str
    settings: tuple[str, ...]


def _section(name: str, *others: str) -> tuple[str, ...]:
    """Return the settings of a section, without `others`, which have rules of their own."""
    prefix = f"{name}."
    return tuple(
        found for found in settings_of(Config) if found.startswith(prefix) and found not in others
    )


RULES = (
    Rule(
        kind="kept",
        why="the weights would not fit, or would be those of another policy",
        settings=(
            "model.path",
            "model.dtype",
            "model.tuning",
            "model.weights",
            "model.lora_rank",
            "model.lora_alpha",
            "model.lora_targets",
        ),
    ),
    Rule(
        kind="kept",
        why="all random numbers follow from it: prompts of an epoch would be repeated or left out",
        settings=("seed",),
    ),
    Rule(
        kind="kept",
        why="the evaluations before and after training would not be paired",
        settings=(
            "data.eval_prompts",
            "data.negative_prompt",
            "sampling.num_frames",
            "sampling.height",
            "sampling.width",
            "sampling.shift",
            "sampling.guidance_scale",
            "eval.steps",
            "eval.guidance_scale",
            "eval.num_prompts",
            "eval.seeds_per_prompt",
            "eval.judge",
        ),
    ),
    Rule(
        kind="kept",
        why="the rewards of the run would not be comparable. The address of a server may change",
        settings=("reward.name", "reward.args", "reward.prefix"),
    ),
    Rule(
        kind="kept",
        why="as for one reward: `name`, `args` and `prefix` of each are kept, the rest is free",
        settings=("reward.several",),
    ),
    Rule(
        kind="kept",
        why="a tracker would show the rest of the run as a second one",
        settings=("tracking.project",),
    ),
    Rule(
        kind="held",
        why="the optimizer's moments are those of one optimizer",
        settings=("train.optimizer",),
    ),
    Rule(
        kind="held",
        why="an average that was off cannot be switched on. Switched off, it is lost",
        settings=("train.ema_decay",),
    ),
    Rule(
        kind="held",
        why=(
            "a moving anchor continues one that the checkpoint holds. `fixed` returns to the "
            "weights at the start"
        ),
        settings=("kl.strategy",),
    ),
    Rule(
        kind="converted",
        why="no less than are done; the decay of the learning rate ends with the new last one",
        settings=("train.iterations",),
    ),
    Rule(
        kind="converted",
        why="an epoch goes on behind the last prompt that was taken",
        settings=("train.prompts_per_iteration",),
    ),
    Rule(
        kind="converted",
        why="other prompts, also in the same file, begin a new epoch",
        settings=("data.prompts",),
    ),
    Rule(
        kind="converted",
        why="the decay of the learning rate counts iterations, and ends with the run; "
        "`warmup_steps`, `kl.warmup_steps` and `kl.anchor_interval` go on counting the updates "
        "that were made",
        settings=("train.optimizer_steps",),
    ),
    Rule(
        kind="converted",
        why="the learning rate is that of a run which began with them, at the same iteration; "
        "a warm-up that is over begins again only if it is now longer than the updates made",
        settings=("train.warmup_steps", "train.schedule"),
    ),
    Rule(
        kind="converted",
        why="`auto` is the kernel that the run has measured; another rounds differently",
        settings=("model.attention",),
    ),
    Rule(
        kind="converted",
        why=(
            "a tracker goes on with its run; one that cannot is left out, with a note. A new one "
            "begins here"
        ),
        settings=("tracking.trackers",),
    ),
    Rule(
        kind="converted",
        why="the run is where its folder is now",
        settings=("output",),
    ),
    Rule(
        kind="converted",
        why=(
            "a callback goes on from its state, which the checkpoint holds by its name; one "
            "without begins anew, with a note"
        ),
        settings=("callbacks",),
    ),
    Rule(
        kind="free",
        why="a rollout is of its own iteration",
        settings=(
            "sampling.sampler",
            "sampling.eta",
            "sampling.steps",
            "sampling.sde_window",
            "sampling.window_per_prompt",
            "sampling.averaged_weights",
            "sampling.shared_initial_noise",
            "train.group_size",
            "train.timestep_fraction",
        ),
    ),
    Rule(
        kind="free",
        why="a term of the loss holds nothing between iterations",
        settings=_section("objective"),
    ),
    Rule(
        kind="free",
        why="lambda keeps its value and its count of updates, and moves from there by the new rule",
        settings=_section("kl", "kl.strategy"),
    ),
    Rule(
        kind="free",
        why="the optimizer's moments stay, and are used by the new rule",
        settings=("train.learning_rate", "train.weight_decay", "train.eps", "train.max_grad_norm"),
    ),
    Rule(
        kind="free",
        why="files are the same for every engine and any number of ranks",
        settings=(
            "train.engine",
            "train.hybrid_shard",
            "train.offload_shards",
            "train.deepspeed_config",
            "model.sequence_parallel",
        ),
    ),
    Rule(
        kind="free",
        why="it decides memory and speed; results differ by rounding at most",
        settings=(
            "model.gradient_checkpointing",
            "model.stream_blocks",
            "sampling.batch_size",
            "sampling.cuda_graphs",
            "sampling.offload_trajectories",
            "train.batch_size",
            "data.embedding_cache",
        ),
    ),
    Rule(
        kind="free",
        why=(
            "pages and the best checkpoint compare all evaluations under the present weights of "
            "the parts"
        ),
        settings=("reward.weights",),
    ),
    Rule(
        kind="free",
        why="it decides where a reward runs and what its failures do, not what it scores",
        settings=(
            "reward.device",
            "reward.workers",
            "reward.on_failure",
            "reward.retries",
            "reward.max_dropped",
            "reward.timeout_seconds",
        ),
    ),
    Rule(
        kind="free",
        why="it decides what is checked, evaluated, shown and saved, and when",
        settings=(
            "timeout_minutes",
            "train.checkpoint_interval",
            "train.keep_checkpoints",
            "train.keep_best",
            "train.grace_seconds",
            "train.parity_gate",
            "eval.interval",
            "eval.num_videos",
            "tracking.training_videos",
            "tracking.training_videos_interval",
            *_section("profile"),
        ),
    ),
)
"""Every setting is in one of them."""

CHECKPOINT = {
    "trainable": "restored: the trained weights, whole or this rank's part of them",
    "optimizer-exp_avg": (
        "restored: AdamW's first moment; the settings of the optimizer are the present ones"
    ),
    "optimizer-exp_avg_sq": "restored: AdamW's second moment",
    "optimizer-momentum_buffer": "restored: Muon's momentum",
    "ema": "restored; left out, and so lost, where `train.ema_decay` is now 0",
    "anchor": (
        "restored; left out where `kl.strategy` now has none or is `fixed`, whose anchor is the "
        "start"
    ),
    "optimizer": "must be `train.optimizer`",
    "steps": "restored: updates of each weight, for the bias correction of AdamW",
    "parts": "must be what is there",
    "iteration": "the iteration to continue with",
    "optimizer_steps": (
        "restored: updates made, which warm-ups, the average and the anchor's interval count"
    ),
    "kl": (
        "restored: lambda, its updates and its history, as far as `kl.feedback` observes the same"
    ),
    "anchor_step": "restored; 0 where the anchor is the start",
    "anchor_is_current": "restored",
    "callbacks": (
        "restored: the state of each callback by its name; a note where one has none, or is gone"
    ),
    "prompts": "converted where `train.prompts_per_iteration` or the prompts differ",
    "rounding": (
        "restored: the KL that rounding makes; measured again where `sampling.steps` differ"
    ),
}
"""What a checkpoint holds, by the name of a file in `training/` or of an entry of state.json and
optimizer.json -> what a resume does with it. No random state: every seed follows from `seed`, the
iteration and the sample."""


def rule_of(name: str) -> Rule:
    """Return what a resume does with a setting."""
    (found,) = [rule for rule in RULES if name in rule.settings]
    return found


def check_kept(config: Config) -> None:
    """Check that no setting that a run keeps has changed.

    Raises:
        UserError: the run in `config.output` began with another value of one of them.
    """
    begun = RunFolder(config.output).settings()
    for name in settings_of(Config):
        if rule_of(name).kind != "kept":
            continue
        before = _compared(begun, name)
        now = _compared(config, name)
        if before != now and not is_moved(before, now):
            old = attrgetter(name)(begun)
            new = attrgetter(name)(config)
            raise UserError(
                f"{name} = {new!r}: the run in {config.output!r} began with {old!r} and keeps it; "
                f"continue without --{name}, or begin another run with another --output and no "
                "--resume; nothing was changed"
            )


def _compared(config: Config, name: str) -> Any:
    """Return the part of a setting that must not change; for rewards, all that their parts depend
    on."""
    if name == "reward.several":
        return (
            [_scored_by(entry) for entry in config.reward.entries] if config.reward.several else []
        )
    if name == "eval.judge":
        return (
            None if config.eval.judge is None else _scored_by(RewardEntry(name=config.eval.judge))
        )
    if name.startswith("reward."):
        return _scored_by(config.reward)[name.removeprefix("reward.")]
    return attrgetter(name)(config)


def _scored_by(entry: RewardEntry) -> dict[str, Any]:
    """Return all that a reward's parts depend on.

    Where it runs does not matter; a server may change its address.
    """
    name, args = ("a server", {}) if entry.is_address else (entry.name, entry.args)
    args = {key: value for key, value in args.items() if key != "url" or entry.name not in CLIENTS}
    return {"name": name, "args": args, "prefix": entry.prefix}
