"""Networks that are on the device only while they are used: the autoencoder and rewards, where
training leaves no room for them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn


@contextlib.contextmanager
def on_device(networks: Sequence[nn.Module], device: torch.device) -> Iterator[None]:
    """Have networks on the device within the block, and in host memory after it."""
    try:
        for network in networks:
            network.to(device)
        yield
    finally:
        for network in networks:
            network.to("cpu")


@contextlib.contextmanager
def off_device(networks: Sequence[nn.Module], device: torch.device) -> Iterator[None]:
    """Have what networks hold on the device in host memory within the block; what was there before
    stays."""
    moved: set[int] = set()

    def leave(tensor: Tensor) -> Tensor:
        if tensor.device != device:
            return tensor
        left = tensor.to("cpu")
        moved.add(left.data_ptr())
        return left

    for network in networks:
        network._apply(leave)
    try:
        yield
    finally:
        for network in networks:
            network._apply(lambda t: t.to(device) if t.data_ptr() in moved else t)


def bytes_on(networks: Sequence[nn.Module], device: torch.device) -> int:
    """Return the bytes of networks that are on the device."""
    total = 0
    for network in networks:
        for tensor in [*network.parameters(), *network.buffers()]:
            if tensor.device == device:
                total += tensor.nbytes
    return total
