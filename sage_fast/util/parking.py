"""Networks that are on the device only while they are used: the autoencoder and rewards, where
training leaves no room for them."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

_AWAY: weakref.WeakKeyDictionary[nn.Module, set[int]] = weakref.WeakKeyDictionary()
"""Parked network -> addresses in host memory of what left the device; several rewards may share a
network."""


class Parked:
    """Networks that are on the device only within `on_device`, and in host memory otherwise.

    What was in other memory stays there.

    Args:
        networks: they leave the device now.
        device: the device.
    """

    def __init__(self, networks: Sequence[nn.Module], device: torch.device) -> None:
        self.networks = networks
        self.device = device
        self._leave()

    @contextlib.contextmanager
    def on_device(self) -> Iterator[None]:
        """Have the networks on the device within the block."""
        try:
            for network in self.networks:
                _return([network], self.device, _AWAY[network])
            yield
        finally:
            self._leave()

    def _leave(self) -> None:
        for network in self.networks:
            moved = _AWAY.setdefault(network, set())
            moved |= _leave([network], self.device)


@contextlib.contextmanager
def off_device(networks: Sequence[nn.Module], device: torch.device) -> Iterator[None]:
    """Have what networks hold on the device in host memory within the block; what was there before
    stays."""
    moved = _leave(networks, device)
    try:
        yield
    finally:
        _return(networks, device, moved)


def _leave(networks: Sequence[nn.Module], device: torch.device) -> set[int]:
    """Move what is on the device to host memory; return its addresses there."""
    moved: set[int] = set()

    def leave(tensor: Tensor) -> Tensor:
        if tensor.device != device:
            return tensor
        left = tensor.to("cpu")
        moved.add(left.data_ptr())
        return left

    for network in networks:
        network._apply(leave)
    return moved


def _return(networks: Sequence[nn.Module], device: torch.device, moved: set[int]) -> None:
    """Move what left the device back to it, and forget it."""
    returned: set[int] = set()

    def come_back(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in moved:
            return tensor
        back = tensor.to(device)
        returned.add(tensor.data_ptr())
        return back

    try:
        for network in networks:
            network._apply(come_back)
    finally:
        moved -= returned  # all of it, unless the device is full


def bytes_on(networks: Sequence[nn.Module], device: torch.device) -> int:
    """Return the bytes of networks that are on the device."""
    total = 0
    for network in networks:
        for tensor in [*network.parameters(), *network.buffers()]:
            if tensor.device == device:
                total += tensor.nbytes
    return total
