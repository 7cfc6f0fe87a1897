"""Seconds that GPUs take to send data to each other, by arithmetic over assumed links."""

from __future__ import annotations

import dataclasses

from sage_fast.parallel import NODE

IN_NODE, PORT = 300e9, 40e9
"""Bytes per second that a GPU sends within a node, and through its port to other nodes. Assumptions, not measurements:
two thirds of NVLink 4's 450 GB/s, and four fifths of 400 Gbit/s."""
START, HOP_IN_NODE, HOP_BETWEEN = 8.4e-6, 3.4e-6, 14e-6
"""Seconds of an empty collective, and of each hop of its ring: what NCCL itself assumes when it chooses a ring."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ring:
    """GPUs that gather or reduce together.

    Attributes:
        ranks: number of GPUs.
        per_node: how many of a node's GPUs take part.
    """

    ranks: int
    per_node: int = NODE

    def sent(self, size: float) -> float:
        """Return the bytes that a GPU sends in an all-gather or a reduce-scatter of `size` bytes."""
        return size * (self.ranks - 1) / self.ranks

    def seconds(self, size: float, count: float = 1) -> float:
        """Return the seconds of `count` all-gathers or reduce-scatters of `size` bytes together.

        An all-reduce is one of each. NCCL's rings leave a node through the ports of all GPUs that take part, so a port
        carries only its share of the bytes that a GPU passes on within the node.
        """
        local = min(self.per_node, self.ranks)
        between = -(-self.ranks // local) - 1
        hops = (self.ranks - 1 - between) * HOP_IN_NODE + between * HOP_BETWEEN
        slowest = max(self.sent(size) / IN_NODE, self.sent(size) / local / PORT if between else 0.0)
        return count * (START + hops) + slowest
