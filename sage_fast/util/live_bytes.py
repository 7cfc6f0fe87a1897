"""Count the memory that tensors take while a function runs, on any device, including meta."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """Within the block, counts the bytes of the storages that operators make and that are alive.

    What an operator allocates within itself is not seen, and what was there before does not count.

    Attributes:
        peak: the most bytes at a time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = self.run(func, args, kwargs)
        made = [leaf for leaf in _flat(out) if not self._is_live(leaf)]
        if made:
            # A result may be a view of an argument, or the argument itself.
            before = {_address(leaf) for leaf in _flat((args, tuple(kwargs.values())))}
            for leaf in made:
                if _address(leaf) not in before:
                    storage = leaf.untyped_storage()
                    self._live[_address(leaf)] = StorageWeakRef(storage), storage.nbytes()
        self._live = {
            address: entry for address, entry in self._live.items() if not entry[0].expired()
        }
        self.peak = max(self.peak, sum(size for _, size in self._live.values()))
        return out

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator."""
        return func(*args, **kwargs)

    def _is_live(self, tensor: Tensor) -> bool:
        entry = self._live.get(_address(tensor))
        return entry is not None and not entry[0].expired()


def _flat(values: Any) -> Iterator[Tensor]:
    """Yield the tensors among an operator's arguments or results."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, tuple | list):
        for value in values:
            yield from _flat(value)


def _address(tensor: Tensor) -> int:
    """Return the address of the storage itself: that of its data is 0 on the meta device."""
    address: int = tensor.untyped_storage()._cdata
    return address
