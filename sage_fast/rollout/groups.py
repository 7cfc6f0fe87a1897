"""Rewards that compare the videos of a group: bring each group to one rank, and score it there.

The samples of a group may lie on several ranks. Only videos that are not on the rank which scores
their group are sent, as uint8.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sage_fast.algorithm.iteration_plan import assign_groups
from sage_fast.rewards.interface import Pending, Scorer, Scores, join_scores
from sage_fast.util.captions import PromptKey
from sage_fast.util.errors import UserError
from sage_fast.util.ranks import all_gather_object, exchange, rank, world_size
from sage_fast.util.seeding import derive_seed


class Group(NamedTuple):
    """The videos of one prompt, which are compared.

    Attributes:
        numbers: their numbers among those of all ranks, at least two.
        prompt: key of the prompt.
        seed: of the random numbers that a reward draws.
    """

    numbers: Sequence[int]
    prompt: PromptKey
    seed: int


class HeldVideo(NamedTuple):
    """A video that this rank keeps until its group is scored.

    Attributes:
        frames: uint8 `[F, 3, H, W]` on the CPU.
        fps: frames per second; None: not known.
    """

    frames: Tensor
    fps: float | None


class Layout(NamedTuple):
    """What all ranks know of a video.

    Attributes:
        rank: the rank that holds it; the first one, if several do.
        shape: (F, 3, H, W).
        fps: frames per second; None: not known.
    """

    rank: int
    shape: tuple[int, ...]
    fps: float | None


def grouped(
    keys: Sequence[Hashable], prompts: Sequence[PromptKey], seeds: Sequence[int]
) -> list[Group]:
    """Return the groups of an iteration or an evaluation: the videos with the same key.

    Args:
        keys: of all videos, by their numbers; `prompts` and `seeds` likewise.
    """
    numbers: dict[Hashable, list[int]] = {}
    for number, key in enumerate(keys):
        numbers.setdefault(key, []).append(number)
    groups = []
    for of_group in numbers.values():
        first = of_group[0]
        groups.append(Group(of_group, prompts[first], derive_seed(seeds[first], "comparison")))
    return groups


def gather_groups(groups: Sequence[Group], held: dict[int, HeldVideo]) -> list[Group]:
    """Bring the videos of each group to one rank; return the groups of this rank. Collective.

    Args:
        groups: all groups, the same on every rank.
        held: number -> video, of those that are on this rank; afterwards those of its groups. What
            is sent leaves it.

    Raises:
        UserError: on all ranks, if the videos of a group differ in shape or rate.
    """
    layouts = _layouts(held)
    for group in groups:
        _check_alike(group, layouts)
    holders = [[layouts[number].rank for number in group.numbers] for group in groups]
    own = []
    for group, target in zip(groups, assign_groups(holders)):
        _send(group, target, layouts, held)
        if target == rank():
            own.append(group)
    return own


def compare_groups(
    reward: Scorer, groups: Sequence[Group], held: dict[int, HeldVideo]
) -> tuple[list[int], Scores]:
    """Score this rank's groups by the rewards that compare their videos, which leave `held`.

    Returns:
        The numbers of the videos, and their scores.

    Raises:
        RewardError: a reward failed, and `reward.on_failure = stop`.
    """
    numbers: list[int] = []
    pending: list[Pending] = []
    for group in groups:
        videos = [held.pop(number) for number in group.numbers]
        frames = torch.stack([video.frames for video in videos])
        pending.append(reward.compare(frames, group.prompt, videos[0].fps, group.seed))
        numbers += group.numbers
    return numbers, join_scores([scores.result() for scores in pending])


def _layouts(held: Mapping[int, HeldVideo]) -> dict[int, Layout]:
    """Return number -> layout of the videos of all ranks. Collective."""
    local = {
        number: Layout(rank(), tuple(video.frames.shape), video.fps)
        for number, video in held.items()
    }
    found: dict[int, Layout] = {}
    for of_rank in all_gather_object(local):
        found = of_rank | found
    return found


def _check_alike(group: Group, layouts: Mapping[int, Layout]) -> None:
    """Check that the videos of a group can be one tensor.

    Raises:
        UserError: they cannot.
    """
    kinds = {(layouts[number].shape, layouts[number].fps) for number in group.numbers}
    if len(kinds) > 1:
        shown = " and ".join(sorted(f"{list(shape)} at {fps} fps" for shape, fps in kinds)[:2])
        raise UserError(
            f"the videos of {str(group.prompt)!r} are {shown}; expected one shape and one rate, "
            "since a reward compares them"
        )


def _send(
    group: Group, target: int, layouts: Mapping[int, Layout], held: dict[int, HeldVideo]
) -> None:
    """Move the videos of a group to the rank `target`, from one `held` to the other.

    Collective, unless they all lie there.
    """
    sent = [number for number in group.numbers if layouts[number].rank != target]
    if not sent:
        return
    _, shape, fps = layouts[sent[0]]
    size = torch.Size(shape).numel()
    given = [0 for _ in range(world_size())]
    taken = [0 for _ in range(world_size())]
    outgoing = [torch.empty(0, dtype=torch.uint8)]
    for number in sent:
        holder = layouts[number].rank
        if holder == rank():
            given[target] += size
            outgoing.append(held.pop(number).frames.flatten())
        if target == rank():
            taken[holder] += size

    received = exchange(torch.cat(outgoing), given, taken).cpu()
    if target == rank():
        in_order = sorted(sent, key=lambda number: layouts[number].rank)  # stable
        for number, frames in zip(in_order, received.view(-1, *shape), strict=True):
            held[number] = HeldVideo(frames, fps)
