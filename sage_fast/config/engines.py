"""Capabilities of each choice of engine, optimizer, tuning and dtype.

The rest of the code asks a row what it can do, and never compares its name. Imports nothing heavy:
what runs is named by a string, `module:name`.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineRow:
    """A row of `train.engine`.

    Attributes:
        build: the class, called with (policy, settings of training, ema_warms_up).
        shards: what each rank holds a share of: `state` (the optimizer's), `gradients`, `weights`.
        package: what has to be installed, or None.
    """

    build: str
    shards: tuple[str, ...] = ()
    package: str | None = None

    @property
    def stage(self) -> int:
        """ZeRO stage; 0 shards nothing."""
        return len(self.shards)

    @property
    def keeps_master(self) -> bool:
        """Whether forwards read copies of float32 weights, stored in the dtype of the activations
        on every rank."""
        return bool(self.shards) and not self.gathers

    def stored_bytes(self, element_bytes: int) -> int:
        """Return the bytes of a trained weight as forwards read it, for activations of
        `element_bytes`."""
        return element_bytes if self.keeps_master else 4

    @property
    def is_deepspeed(self) -> bool:
        """Whether DeepSpeed runs it, and reads `train.deepspeed_config`."""
        return self.package == "deepspeed"

    @property
    def gathers(self) -> bool:
        """Whether weights are gathered for a forward, and released after it."""
        return "weights" in self.shards


def _zero(*shards: str) -> EngineRow:
    return EngineRow(build="sage_fast.parallel.zero:ZeroEngine", shards=shards, package="deepspeed")


ENGINES = {
    "plain": EngineRow(build="sage_fast.parallel.plain:PlainEngine"),
    "zero1": _zero("state"),
    "zero2": _zero("state", "gradients"),
    "zero3": EngineRow(
        build="sage_fast.parallel.fsdp:FsdpEngine", shards=("state", "gradients", "weights")
    ),
}


OPTIMIZERS = {"adamw": False, "muon": True}
"""Choice of `train.optimizer` -> whether Muon updates the matrices of the blocks; AdamW updates all
else."""

RENOISES = {"clip": False, "kl_mask": False, "log_prob": False, "nft": True, "awm": True}
"""Choice of `objective.surrogate` -> whether it re-noises the final samples, and so scores no step
of the rollout."""

ADAPTERS = {"lora": True, "full": False}
"""Choice of `model.tuning` -> whether an adapter is trained, and the weights under it are frozen.
"""

BYTES = {"float32": 4, "bfloat16": 2}
"""Choice of `model.dtype` -> bytes of an element."""
