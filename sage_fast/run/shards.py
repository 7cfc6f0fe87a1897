"""Parts of weights: how weights lie over the ranks, and the files in which every rank writes its
own part.

A part is a contiguous slice of a flattened weight. Of the ranks that hold the same parts a few
write, an even share each: at most `MAX_WRITERS` in all, unless more ranks hold what no other does.

<folder>/<kind>-00003-of-00008.safetensors  written by the third writer; weight -> 1-D slice;
                                            `parts` in its metadata has, for each weight, the
                                            slice's first index and the size of the whole weight
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
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
"""Largest number of ranks that write what all ranks hold.

More files would be small, and rank 0 reads the header of each.
"""


class ShardLayout:
    """How the trainable weights of a policy lie over the ranks. Building one is collective.

    Attributes:
        spans: weight -> the part that this rank holds.
        shapes: weight -> shape of the whole weight.
        parts_by_rank: rank -> weight -> the part that it holds.
        writers: the ranks that write, in order.
        written: rank -> weight -> the slice that it writes, which is empty unless it is a writer;
            the slices of all ranks are the whole weight.
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
        self.writers = _choose_writers(self.parts_by_rank)
        self.written: list[dict[str, Span]] = []
        for of_rank in self.parts_by_rank:
            nothing = {name: (first, first) for name, (first, _) in of_rank.items()}
            self.written.append(nothing)
        for name in self.spans:
            holders: dict[Span, list[int]] = {}
            for writer in self.writers:
                span = self.parts_by_rank[writer][name]
                holders.setdefault(span, []).append(writer)
            for (first, end), ranks in holders.items():
                size = -(-(end - first) // len(ranks))
                for i, holder in enumerate(ranks):
                    begin = min(first + i * size, end)
                    self.written[holder][name] = (begin, min(begin + size, end))

    def own_slice(self, name: str, part: Tensor) -> Tensor:
        """Return what this rank writes of its part of a weight."""
        start, _ = self.spans[name]
        first, end = self.written[rank()][name]
        return part.detach().flatten()[first - start : end - start]

    def write(self, folder: Path, kind: str, state: Mapping[str, Tensor]) -> list[Path]:
        """Write this rank's slices of `state`, which has the part of some weights; return its file,
        if it is a writer."""
        if rank() not in self.writers:
            return []
        number = self.writers.index(rank()) + 1
        file = folder / f"{kind}-{number:05d}-of-{len(self.writers):05d}.safetensors"
        slices = {}
        parts = {}  # weight -> first index of the slice, and size of the weight
        for name, part in state.items():
            piece = self.own_slice(name, part)
            if piece.numel():
                slices[name] = piece
                parts[name] = (self.written[rank()][name][0], self.shapes[name].numel())
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
        for name, owner in owners.items():
            whole = state[name].detach()
            if self.parts_by_rank[owner][name] != (0, self.shapes[name].numel()):
                spans = [of_rank[name] for of_rank in self.written]
                sizes = [end - first for first, end in spans]
                sent = [0 for _ in sizes]
                sent[owner] = sizes[rank()]
                received = sizes if rank() == owner else [0 for _ in sizes]
                pieces = exchange(self.own_slice(name, whole), sent, received).split(received)
                whole = torch.cat(
                    [piece for _, piece in sorted(zip(spans, pieces), key=lambda pair: pair[0])]
                )
            if owner == rank():
                found[name] = whole.view(self.shapes[name]).cpu()
        return found


def _choose_writers(parts_by_rank: Sequence[Mapping[str, Span]]) -> list[int]:
    """Return the ranks that write, so that every part has a writer.

    Of ranks that hold the same they are spread evenly, so that they are on different nodes.
    """
    alike: dict[tuple[tuple[str, Span], ...], list[int]] = {}
    for holder, of_rank in enumerate(parts_by_rank):
        alike.setdefault(tuple(sorted(of_rank.items())), []).append(holder)

    most = max(1, MAX_WRITERS // len(alike))
    writers: list[int] = []
    for ranks in alike.values():
        count = min(most, len(ranks))
        writers += [ranks[number * len(ranks) // count] for number in range(count)]
    return sorted(writers)


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
