"""Graphics cards by the size of their memory, and how fast they are assumed or measured to be."""

from __future__ import annotations

import dataclasses
import time

import torch

from sage_fast.util.environment import data_sheet_flops, peak_flops, synchronize

COPY_RATE = 20e9
"""Bytes a second from page-locked host memory to a GPU that a plan assumes: two thirds of what PCIe
4.0 has with 16 lanes."""
USED_SHARE = 0.6
"""Share of a card's data-sheet rate that a run is assumed to reach: one H200 reached 0.54 to 0.62
with 480p videos of 81 frames (`2026-11-27-h200-iteration.json` in benchmarks/results)."""
SAMPLE_BYTES = 2**26
"""Bytes of the copy that is measured."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Card:
    """A graphics card.

    Attributes:
        name: as its vendor names it, after an article.
        gigabytes: of its memory, as it is sold.
    """

    name: str
    gigabytes: int

    @property
    def model(self) -> str:
        """The name without the article."""
        return self.name.partition(" ")[2]

    @property
    def flops(self) -> float:
        """Dense bfloat16 peak with float32 sums, by its data sheet."""
        peak = data_sheet_flops(self.model)
        assert peak is not None, f"{self.model} is not in PEAK_TFLOPS"
        return peak


MEASURED_CARD = Card(name="an H200", gigabytes=141)
CARDS = (
    Card(name="an RTX 4080", gigabytes=16),
    Card(name="an RTX 4090", gigabytes=24),
    Card(name="an RTX 5090", gigabytes=32),
    Card(name="an L40S", gigabytes=48),
    Card(name="an H100", gigabytes=80),
    MEASURED_CARD,
)
"""For each usual size of memory, the card that a plan assumes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rates:
    """How fast a device is.

    Attributes:
        flops: FLOP a second that a run reaches.
        copies: bytes a second from page-locked host memory.
    """

    flops: float
    copies: float = COPY_RATE


def card_of(memory: float) -> Card:
    """Return the card whose memory is nearest to `memory` bytes."""
    return min(CARDS, key=lambda card: abs(1e9 * card.gigabytes - memory))


def planned_rates(memory: float) -> Rates:
    """Return the rates of a card with `memory` bytes, which is not here."""
    return Rates(flops=USED_SHARE * card_of(memory).flops)


def rates_of(device: torch.device) -> Rates:
    """Return the rates of this device: by the data sheet of its card or of the nearest one; copies
    are measured."""
    if device.type != "cuda":
        return Rates(flops=1e11)  # nothing is chosen by it
    peak = peak_flops(device, torch.bfloat16)
    if peak is None:
        peak = card_of(torch.cuda.get_device_properties(device).total_memory).flops
    return Rates(flops=USED_SHARE * peak, copies=_measured_copies(device))


def _measured_copies(device: torch.device) -> float:
    """Return the bytes a second of a copy from page-locked host memory."""
    source = torch.empty(SAMPLE_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(SAMPLE_BYTES, dtype=torch.uint8, device=device)
    seconds = []
    for _ in range(3):
        synchronize(device)
        start = time.perf_counter()
        target.copy_(source, non_blocking=True)
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return SAMPLE_BYTES / min(seconds)
