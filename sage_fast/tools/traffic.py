"""What a GPU sends to the others in an iteration: gathers of weights, and reductions of gradients.

With n trained elements, s of all weights' elements in the units that are sharded over S ranks, C = R / S copies of
them, and b bytes a gathered value:

              gathers                                          reductions
    plain     -                                                all-reduce 4 n over R, an update
    zero1     b n over R, an update                            reduce-scatter 4 n over R, an update
    zero2     b n over R, an update                            reduce-scatter 4 n over R, a micro-batch
    zero3     b s over S, a forward, and again a backward      reduce-scatter 4 n over S, a forward of training;
                                                               all-reduce 4 n / S over C, an update

A rollout gathers no AdaLN. With zero3 the gradients outside the units count as those of the units.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from sage_fast.config.engines import ENGINES
from sage_fast.config.schema import TrainConfig
from sage_fast.models.policy import Policy
from sage_fast.parallel import engine_settings, ranks_that_shard
from sage_fast.tools.links import Ring


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traffic:
    """All collectives of one kind, such as all-gathers of weights, that a GPU takes part in during an iteration.

    Attributes:
        count: number of collectives.
        sent: bytes that a GPU sends.
        seconds: their time, if nothing else is done meanwhile.
    """

    count: float
    sent: float
    seconds: float

    @classmethod
    def of(cls, ring: Ring, size: float, count: float) -> Traffic:
        """Traffic of `count` all-gathers or reduce-scatters of `size` bytes together."""
        return cls(count=count, sent=ring.sent(size), seconds=ring.seconds(size, count))

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            count=self.count + other.count, sent=self.sent + other.sent, seconds=self.seconds + other.seconds
        )


def traffic(
    train: TrainConfig, policy: Policy, forwards: Mapping[str, float], *, ranks: int, passes: int, width: int
) -> dict[str, Traffic]:
    """Return kind -> collectives of an iteration.

    Args:
        train: section `train`.
        policy: with whole weights, on any device (including meta).
        forwards: part -> forwards of micro-batches on the GPU with the most, by passes.
        ranks: of the run.
        passes: forwards of a micro-batch, 2 with guidance.
        width: bytes of a value of the activations.
    """
    row, updates = ENGINES[train.engine], train.optimizer_steps
    n = sum(p.numel() for p in policy.parameters().values())
    gradients = 4.0 * n
    if not row.shards:
        return {"reductions of gradients": Traffic.of(Ring(ranks=ranks), 2 * updates * gradients, 2 * updates)}
    if not row.gathers:
        times = forwards["training"] / passes if "gradients" in row.shards else updates
        buckets = math.ceil(n / engine_settings(train, n)["zero_optimization"]["reduce_bucket_size"])
        return {
            "reductions of gradients": Traffic.of(Ring(ranks=ranks), times * gradients, times * buckets),
            "gathers of updated weights": Traffic.of(Ring(ranks=ranks), updates * width * n, updates),
        }
    shards = ranks_that_shard(train, ranks)
    within, copies = Ring(ranks=shards), Ring(ranks=ranks // shards, per_node=1)
    runs = [[sum(p.numel() for p in unit.parameters()) for unit in run] for run in policy.sharded_units()]
    blocks, every = runs[-1], [size for run in runs for size in run]
    gathered = [(forwards["rollout"], blocks), (forwards["anchor"], every), (2 * forwards["training"], every)]
    of_weights = Traffic.of(
        within, sum(n * width * sum(units) for n, units in gathered), sum(n * len(units) for n, units in gathered)
    )
    trained = forwards["training"]
    of_gradients = Traffic.of(within, trained * gradients, trained * len(every))
    if copies.ranks > 1:
        of_gradients += Traffic.of(copies, 2 * updates * gradients / shards, 2 * updates)
    return {"gathers of weights": of_weights, "reductions of gradients": of_gradients}
