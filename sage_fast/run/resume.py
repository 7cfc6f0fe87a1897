"""What a resumed run keeps of its settings. Imports nothing heavy."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from sage_fast.config.places import is_moved
from sage_fast.config.reward_names import CLIENTS
from sage_fast.config.schema import Config, RewardEntry
from sage_fast.run.folder import RunFolder
from sage_fast.util.errors import UserError

KEPT = (
    "seed",
    *(f"model.{name}" for name in ("path", "dtype", "tuning", "weights", "lora_rank", "lora_alpha", "lora_targets")),
    "data.eval_prompts",
    *(f"sampling.{name}" for name in ("num_frames", "height", "width", "shift", "guidance_scale")),
    *(f"reward.{name}" for name in ("several", "name", "args", "prefix")),
    *(f"eval.{name}" for name in ("steps", "guidance_scale", "num_prompts", "seeds_per_prompt", "judge")),
)
"""Settings that a resume must not change. Otherwise the checkpoint belongs to another policy, or the evaluations before
and after training are not paired."""


def check_kept(config: Config) -> None:
    """Check that no setting in `KEPT` has changed.

    Raises:
        UserError: the run in `config.output` began with another value of one of them.
    """
    begun = RunFolder(config.output).settings()
    for name in KEPT:
        before, now = _kept(begun, name), _kept(config, name)
        if before != now and not is_moved(before, now):
            old, new = map(attrgetter(name), (begun, config))
            raise UserError(
                f"{name} = {new!r}: the run in {config.output!r} began with {old!r} and keeps it; continue without "
                f"--{name}, or begin another run with another --output and no --resume; nothing was changed"
            )


def _kept(config: Config, name: str) -> Any:
    """Return the part of a setting that must not change; for rewards, all that their parts depend on."""
    if name == "reward.several":
        return [_scored_by(entry) for entry in config.reward.entries] if config.reward.several else []
    if name == "eval.judge":
        return None if config.eval.judge is None else _scored_by(RewardEntry(name=config.eval.judge))
    if name.startswith("reward."):
        return _scored_by(config.reward)[name.removeprefix("reward.")]
    return attrgetter(name)(config)


def _scored_by(entry: RewardEntry) -> dict[str, Any]:
    """Return all that a reward's parts depend on. Where it runs does not matter; a server may change its address."""
    name, args = ("a server", {}) if entry.is_address else (entry.name, entry.args)
    args = {key: value for key, value in args.items() if key != "url" or entry.name not in CLIENTS}
    return {"name": name, "args": args, "prefix": entry.prefix}
