"""Parts of weights: how weights lie over the ranks, and the files in which the ranks write their
parts.

A part is a contiguous slice of a flattened weight. Ranks that hold the same parts give an even
share each, a few of them. Each writes its slices into a file of its own, so that a large state is
written by many ranks at once. Files of a small state, such as a LoRA that hundreds of ranks shard,
would be tiny: then a rank writes those of several neighbours, which send them to it. So a state has
at most `MAX_WRITERS` files, or files of `MIN_FILE_BYTES`.

<folder>/<kind>-00003-of-00008.safetensors  the third of eight files; weight -> 1-D slice;
                                            `parts` in its metadata has, for each weight, the
                                            slice's first index and the size of the whole weight
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sage_fast.models.policy import Policy
from sage_fast.util.errors import UserError
from sage_fast.util.files import save_tensors
from sage_fast.util.ranks import (
    all_gather_object,
    broadcast_object,
    exchange,
    fail_together,
    rank,
)

Span = tuple[int, int]
"""First index and end of a slice of a flattened weight."""

MAX_WRITERS = 16
"""Largest number of files of a kind that are smaller than `MIN_FILE_BYTES`.

Rank 0 reads the header of each.
"""
MIN_FILE_BYTES = 2**26
"""Size of a file from which on more of them are written faster."""
EXCHANGE_BYTES = 2**28
"""Whole weights that cross in one call: a call for each would wait for the network a thousand
times."""


class ShardLayout:
    """How the trainable weights of a policy lie over the ranks. Building one is collective.

    Attributes:
        spans: weight -> the part that this rank holds.
        shapes: weight -> shape of the whole weight.
        parts_by_rank: rank -> weight -> the part that it holds.
        slices: rank -> weight -> the slice that it gives to a file; those of all ranks are the
            whole weight.
        groups: the ranks whose slices lie in one file, for each file; the first of them writes it.
            The slices of all other ranks are empty.
    """

    def __init__(self, policy: Policy) -> None:
        states = policy.states
        weights = policy.parameters()
        self.spans: dict[str, Span] = {}
        for name, p in weights.items():
            start = states.start(p)
            self.spans[name] = (start, start + states.part(p).numel())
        self.shapes = {name: states.shape(p) for name, p in weights.items()}
        self.parts_by_rank: list[Mapping[str, Span]] = all_gather_object(self.spans)
        givers = _choose_givers(self.parts_by_rank)
        self.slices: list[dict[str, Span]] = []
        for of_rank in self.parts_by_rank:
            nothing = {name: (first, first) for name, (first, _) in of_rank.items()}
            self.slices.append(nothing)
        for name in self.spans:
            holders: dict[Span, list[int]] = {}
            for giver in givers:
                span = self.parts_by_rank[giver][name]
                holders.setdefault(span, []).append(giver)
            for (first, end), ranks in holders.items():
                size = -(-(end - first) // len(ranks))
                for i, holder in enumerate(ranks):
                    begin = min(first + i * size, end)
                    self.slices[holder][name] = (begin, min(begin + size, end))

        elements = sum(shape.numel() for shape in self.shapes.values())
        most_files = max(MAX_WRITERS, elements * torch.float32.itemsize // MIN_FILE_BYTES)
        in_a_file = -(-len(givers) // most_files)
        self.groups = [
            givers[start : start + in_a_file] for start in range(0, len(givers), in_a_file)
        ]

    def own_slice(self, name: str, part: Tensor) -> Tensor:
        """Return what this rank gives to a file of its part of a weight."""
        start, _ = self.spans[name]
        first, end = self.slices[rank()][name]
        return part.detach().flatten()[first - start : end - start]

    def gather(self, states: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
        """Return the slices of this rank's file of each kind: kind -> weight -> slice. Collective.

        Without neighbours that share a file, nothing is sent.

        Args:
            states: kind -> weight -> this rank's part. Weights may be missing on all ranks, and
                empty parts on some.
        """
        writers = list(range(len(self.slices)))  # rank -> the one that writes its slices
        for group in self.groups:
            for member in group:
                writers[member] = group[0]
        sends = any(len(group) > 1 for group in self.groups)

        found: dict[str, dict[str, Tensor]] = {}
        for kind, names in self._weights_of_kinds(states).items():
            own = {}
            for name in names:
                first, end = self.slices[rank()][name]
                if first < end:
                    own[name] = self.own_slice(name, states[kind][name])
            if sends:
                joined = self._send(own, dict.fromkeys(names, writers))
                own = {name: slice_of_file.cpu() for name, slice_of_file in joined.items()}
            found[kind] = own
        return found

    def _weights_of_kinds(self, states: Mapping[str, Mapping[str, Tensor]]) -> dict[str, list[str]]:
        """Return kind -> the weights that any rank has of it, alike on all ranks. Collective."""
        own = {kind: bytes(name in state for name in self.shapes) for kind, state in states.items()}
        by_rank: list[dict[str, bytes]] = all_gather_object(own)
        found: dict[str, list[str]] = {}
        for kind in sorted({kind for of_rank in by_rank for kind in of_rank}):
            # ranks differ little, so that few combinations are left to look through
            combinations = {of_rank[kind] for of_rank in by_rank if kind in of_rank}
            found[kind] = [
                name for i, name in enumerate(self.shapes) if any(has[i] for has in combinations)
            ]
        return found

    def write(self, folder: Path, kind: str, slices: Mapping[str, Tensor]) -> list[Path]:
        """Write this rank's file of one kind, from `gather`; return it, if the rank writes one."""
        writers = [group[0] for group in self.groups]
        if rank() not in writers:
            return []
        number = writers.index(rank()) + 1
        file = folder / f"{kind}-{number:05d}-of-{len(writers):05d}.safetensors"
        parts = {}  # weight -> first index of the slice, and size of the weight
        for name in slices:
            # the first rank of a group may have nothing of the weight
            spans = [self.slices[member][name] for member in self.groups[number - 1]]
            begin = min(first for first, end in spans if first < end)
            parts[name] = (begin, self.shapes[name].numel())
        save_tensors(file, slices, {"parts": json.dumps(parts)})
        return [file]

    def whole(self, state: Mapping[str, Tensor], owners: Mapping[str, int]) -> dict[str, Tensor]:
        """Return the whole weights that this rank owns, in host memory. Collective.

        Each rank sends its slice of a weight to the owner, unless the owner holds the weight whole.

        Args:
            state: this rank's parts.
            owners: weight -> the rank that gets it.
        """
        found = {}
        split = []
        for name, owner in owners.items():
            if self.parts_by_rank[owner][name] != (0, self.shapes[name].numel()):
                split.append(name)
            elif owner == rank():
                found[name] = state[name].detach().view(self.shapes[name]).cpu()
        for names in self._batches(split):
            own = {}
            for name in names:
                first, end = self.slices[rank()][name]
                if first < end:
                    own[name] = self.own_slice(name, state[name])
            destinations = {name: [owners[name]] * len(self.slices) for name in names}
            for name, whole in self._send(own, destinations).items():
                found[name] = whole.view(self.shapes[name]).cpu()
        return found

    def _batches(self, names: Iterable[str]) -> Iterator[list[str]]:
        """Yield the weights in order, as many at a time as may cross in one call."""
        batch: list[str] = []
        size = 0
        for name in names:
            added = self.shapes[name].numel() * torch.float32.itemsize
            if batch and size + added > EXCHANGE_BYTES:
                yield batch
                batch = []
                size = 0
            batch.append(name)
            size += added
        if batch:
            yield batch

    def _send(
        self, own: Mapping[str, Tensor], destinations: Mapping[str, Sequence[int]]
    ) -> dict[str, Tensor]:
        """Send slices of weights to other ranks in one call; return weight -> what has come here of
        it, joined. Collective.

        Args:
            own: weight -> this rank's slice, if it is not empty.
            destinations: weight -> rank -> where its slice goes. The slices that go to one rank
                adjoin.
        """
        sent: list[list[Tensor]] = [[] for _ in self.slices]
        for name in destinations:
            if name in own:
                sent[destinations[name][rank()]].append(own[name])
        coming: list[tuple[int, str, Span]] = []  # rank, weight and slice
        for source, slices in enumerate(self.slices):
            for name, of_rank in destinations.items():
                first, end = slices[name]
                if of_rank[source] == rank() and first < end:
                    coming.append((source, name, (first, end)))

        given = [sum(piece.numel() for piece in pieces) for pieces in sent]
        taken = [0 for _ in sent]
        for source, _, (first, end) in coming:
            taken[source] += end - first
        flat = [piece for pieces in sent for piece in pieces]
        received = exchange(torch.cat(flat) if flat else torch.empty(0), given, taken)

        pieces: dict[str, list[tuple[Span, Tensor]]] = {}
        sizes = [end - first for _, _, (first, end) in coming]
        for (_, name, span), piece in zip(coming, received.split(sizes)):
            pieces.setdefault(name, []).append((span, piece))
        joined = {}
        for name, of_weight in pieces.items():
            of_weight.sort(key=lambda pair: pair[0])
            spans = [span for span, _ in of_weight]
            assert all(end == first for (_, end), (first, _) in itertools.pairwise(spans)), name
            joined[name] = torch.cat([piece for _, piece in of_weight])
        return joined


def _choose_givers(parts_by_rank: Sequence[Mapping[str, Span]]) -> list[int]:
    """Return the ranks that give slices to the files, so that every part is given.

    Of ranks that hold the same they are spread evenly, so that they are on different nodes.
    """
    alike: dict[tuple[tuple[str, Span], ...], list[int]] = {}
    for holder, of_rank in enumerate(parts_by_rank):
        alike.setdefault(tuple(sorted(of_rank.items())), []).append(holder)

    most = max(1, MAX_WRITERS // len(alike))
    givers: list[int] = []
    for ranks in alike.values():
        count = min(most, len(ranks))
        givers += [ranks[number * len(ranks) // count] for number in range(count)]
    return sorted(givers)


class SavedParts:
    """The files of parts in a folder, written by any number of ranks. Building and reading are
    collective.

    Only rank 0 lists the folder and reads the headers. Each rank opens the files that hold what it
    needs, and reads no more of them.

    Args:
        files: names of the files; by default all in the folder.

    Attributes:
        kinds: kind -> weight -> its slices in order, as (first index, end, name of the file).

    Raises:
        UserError: a file is missing, is not one of its kind's, or leaves a gap or an overlap.
    """

    def __init__(self, folder: Path, files: Collection[str] | None = None) -> None:
        self.folder = folder
        with fail_together():
            kinds = (
                _slices_in(folder, files or [file.name for file in folder.iterdir()])
                if rank() == 0
                else {}
            )
        self.kinds: dict[str, dict[str, list[tuple[int, int, str]]]] = broadcast_object(kinds, 0)

    def read(
        self, kind: str, parts: Mapping[str, Tensor], layout: ShardLayout
    ) -> dict[str, Tensor]:
        """Read this rank's parts of weights, as float32 tensors with the shapes and devices of
        `parts`.

        Raises:
            UserError: the files do not hold these weights, or in another size.
        """
        slices = self.kinds.get(kind, {})
        for name in parts:
            size = layout.shapes[name].numel()
            found = slices[name][-1][1] if name in slices else 0
            if found != size:
                raise UserError(
                    f"{self.folder}: {kind} has {found:,} elements of {name}; expected {size:,}"
                )
        read = {name: torch.empty(part.shape, device=part.device) for name, part in parts.items()}
        with fail_together(), contextlib.ExitStack() as stack:
            opened = functools.cache(
                lambda file: stack.enter_context(safe_open(self.folder / file, "pt"))
            )
            for name, part in read.items():
                start, stop = layout.spans[name]
                for first, end, file in slices[name]:
                    low, high = max(first, start), min(end, stop)
                    if low < high:
                        piece = opened(file).get_slice(name)[low - first : high - first]
                        if not piece.is_floating_point() or not piece.isfinite().all():
                            raise UserError(f"{file}: {name} holds what is no finite number")
                        part.view(-1)[low - start : high - start] = piece
        return read


def _slices_in(
    folder: Path, names: Iterable[str]
) -> dict[str, dict[str, list[tuple[int, int, str]]]]:
    """Return `SavedParts.kinds` of the files of a folder with these names.

    Raises:
        UserError: as of `SavedParts`.
    """
    numbered: dict[str, list[tuple[int, str]]] = {}
    for name in sorted(names):
        if match := re.fullmatch(r"(.+)-\d{5}-of-(\d{5})\.safetensors", name):
            numbered.setdefault(match[1], []).append((int(match[2]), name))
    kinds: dict[str, dict[str, list[tuple[int, int, str]]]] = {}
    for kind, files in numbered.items():
        count, given = files[0][0], [name for _, name in files]
        expected = [
            f"{kind}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)
        ]
        if odd := sorted(set(expected) ^ set(given)):
            fault = (
                "is missing" if odd[0] in expected else f"is not one of the {count} files of {kind}"
            )
            raise UserError(f"{folder / odd[0]} {fault}")
        slices, sizes = kinds.setdefault(kind, {}), dict[str, int]()
        for name in given:
            for weight, (first, end, size) in _read_header(folder / name).items():
                slices.setdefault(weight, []).append((first, end, name))
                sizes[weight] = size
        for weight, found in slices.items():
            found.sort()
            if [0, *(end for _, end, _ in found)] != [
                *(first for first, _, _ in found),
                size := sizes[weight],
            ]:
                listed = ", ".join(f"{first:,} to {end:,} in {name}" for first, end, name in found)
                raise UserError(
                    f"{folder}: {weight}: expected elements 0 to {size:,}, each once; got {listed}"
                )
    return kinds


def _read_header(file: Path) -> dict[str, tuple[int, int, int]]:
    """Return weight -> first index and end of the slice in a file, and size of the weight."""
    try:
        with safe_open(file, "pt") as opened:
            places = json.loads((opened.metadata() or {})["parts"])
            sizes = {name: opened.get_slice(name).get_shape()[0] for name in opened.keys()}  # noqa: SIM118 no mapping
        return {
            name: (int(first), int(first) + sizes[name], int(size))
            for name, (first, size) in places.items()
        }
    except (
        SafetensorError,
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        OverflowError,
        RuntimeError,
    ) as error:
        raise UserError(f"{file}: not a file of parts of weights: {error}") from error
