"""What is to know before a run of its rewards that compare the videos of a group."""

from __future__ import annotations

from collections.abc import Sequence

from sage_fast.config.reward_names import CLIENTS
from sage_fast.config.schema import Config, RewardConfig
from sage_fast.rewards.interface import compares_group
from sage_fast.rewards.load import find_reward, load_reward
from sage_fast.util.errors import UserError


def comparing_keys(config: RewardConfig) -> list[str]:
    """Return the settings that name a reward whose class or function says that it compares.

    An address is not asked, and what an instance says is known once it is created.
    """
    return [
        key
        for key, entry in config.keyed_entries.items()
        if not entry.is_address and compares_group(find_reward(entry, key)[0])
    ]


def check_comparing(config: Config, keys: Sequence[str]) -> None:
    """Check that an evaluation has videos to compare.

    Args:
        keys: settings that name a reward which compares.

    Raises:
        UserError: it has not.
    """
    count = config.eval.seeds_per_prompt
    if keys and count < 2:
        name = config.reward.keyed_entries[keys[0]].name
        raise UserError(
            f"eval.seeds_per_prompt = {count}: expected at least 2, since {keys[0]} = {name!r} "
            "compares the videos of a prompt, in evaluations too"
        )


def notes_on_comparing(config: Config, keys: Sequence[str]) -> list[str]:
    """Return what rewards that compare cost in calls, and what their held-out scores do not tell.

    Args:
        keys: settings that name a reward which compares.
    """
    notes = []
    for key in keys:
        entry = config.reward.keyed_entries[key]
        if entry.name in CLIENTS:  # creating it opens no connection
            calls = load_reward(entry, key).calls_of_group(config.train.group_size)
            of_iteration = calls * config.train.prompts_per_iteration
            notes.append(
                f"reward {entry.name!r} asks its server {calls:,} times for a group, "
                f"{of_iteration:,} times an iteration"
            )
    relative = _note_on_progress(config, keys)
    if relative is not None:
        notes.append(relative)
    return notes


def _note_on_progress(config: Config, keys: Sequence[str]) -> str | None:
    """Return what tells progress where a part with a weight does not; None if each does."""
    entries = config.reward.keyed_entries
    relative = [entries[key].name for key in keys if entries[key].needed]
    if not relative:
        return None
    start = (
        f"reward {relative[0]!r} compares the videos of a prompt, so its held-out scores do not "
        "rise when all videos become better"
    )
    if any(entry.needed for key, entry in entries.items() if key not in keys):
        return f"{start}; train.keep_best goes by the parts of the other rewards"
    if config.eval.judge is not None:
        return f"{start}; eval.judge tells progress, and train.keep_best has no effect"
    return (
        f"{start}; set eval.judge, or add a reward that scores each video alone, to see progress; "
        "train.keep_best has no effect"
    )
