"""The settings of the rewards: the section `reward` of `sage_fast.config`, where they are imported from."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from sage_fast.errors import UserError, nearest
from sage_fast.section import Section, is_finite, require, within

OnFailure = Literal["drop", "stop"]

_DEVICE = re.compile(r"cpu|cuda(:\d+)?")


@dataclasses.dataclass(kw_only=True)
class RewardEntry(Section):
    """One reward: what is called, where it runs, and how its parts count."""

    SECTION: ClassVar[str] = ""

    name: str = "testbed"
    """A reward that is shipped (`testbed`) or that an installed package offers, `package.module:name` of a class or a
    callable (videos [B, F, 3, H, W] in [0, 1], prompts) -> dict of [B], or http://host:port of `sage-fast
    serve-reward`; modules in the current folder are found."""
    args: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What the class is made with, by keyword: '{path: weights/scorer, fps: 2}'."""
    weights: dict[str, float] = dataclasses.field(default_factory=lambda: {"vq": 1.0, "mq": 1.0, "ta": 1.0})
    """Composite reward R = sum of weight x part; the paper's setting A is 1, 1, 1 and B is 0.5, 0.5, 1. Weights that
    are given replace those of the file, which replace the default: '{red: 1}', or --reward.weights.red 1."""
    normalisation: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    """Part -> [mean, std]: (part - mean) / std is weighted and logged in its place, and the value that the reward gave
    beside it as <part>_raw. Fixed numbers, so that scores of two runs can be compared: '{vq: [3.68, 2.25]}'."""
    prefix: str | None = None
    """Put before the names of its parts, such as clip_, for two rewards with a part of the same name; weights and
    normalisation name the parts as the reward returns them."""
    device: str | None = None
    """Where it runs, if not on the rank's own device: cpu, cuda:7, or several with commas, which the ranks and their
    workers take in turn. Given to a class that takes `device`; the videos are there already."""
    workers: int = within(0, least=0)
    """Processes of its own, on each rank, that score beside the rollout; a hang or a crash in one ends neither the run
    nor the call. 0: within the run's own process, between two rollouts. Of an address: requests at a time, at least
    1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            all(map(is_finite, self.weights.values())),
            self._key("weights"),
            self.weights,
            "expected finite weights",
        )
        for part, values in self.normalisation.items():
            require(
                len(values) == 2 and all(map(is_finite, values)) and values[1] > 0,
                self._key(f"normalisation.{part}"),
                values,
                "expected [mean, std], two finite numbers of which the second is above 0, such as [3.68, 2.25]",
            )
        require(
            _is_plain(self.args), self._key("args"), self.args, "expected numbers, text, lists and mappings with names"
        )
        if self.device is not None:
            for device in self.devices:
                require(
                    _DEVICE.fullmatch(device) is not None,
                    self._key("device"),
                    self.device,
                    "expected cpu, cuda or cuda:N, or several of them with commas, such as cuda:6,cuda:7",
                )

    def _key(self, field: str) -> str:
        return f"reward.{field}" if isinstance(self, RewardConfig) else field

    @property
    def devices(self) -> list[str]:
        """Each of `device`; none if it is not given."""
        return [] if self.device is None else [device.strip() for device in self.device.split(",")]

    @property
    def is_address(self) -> bool:
        """Whether the reward is behind HTTP."""
        return self.name.startswith(("http://", "https://"))

    @property
    def needed(self) -> set[str]:
        """The parts that count, by the reward's own names."""
        return {part for part, weight in self.weights.items() if weight != 0}

    def named(self, part: str) -> str:
        """The part as the run logs it."""
        return f"{self.prefix or ''}{part}"


@dataclasses.dataclass(kw_only=True)
class RewardConfig(RewardEntry):
    """What training maximises."""

    several: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """Several rewards together, in place of `name`: a list of mappings, each with a name and weights, and with args,
    normalisation, prefix, device and workers if it needs them."""
    on_failure: OnFailure = "drop"
    """A sample whose reward still fails after the retries is dropped from its group and counted as `reward/dropped`, or
    stops the run."""
    retries: int = within(1, least=0, most=100)
    """Further calls after one that raised, hung in a process of its own, or gave a value that is not finite."""
    max_dropped: float = within(0.2, least=0, most=1)
    """Largest share of dropped samples in an iteration or an evaluation; above it the run stops, with a checkpoint."""
    timeout_seconds: float = within(300.0, least=0)
    """Longest wait for one call of a reward, or of `eval.judge`, which scores up to sampling.batch_size videos, and for
    the start of its process. A process of its own is then ended and started again; a call within the run's process
    cannot be ended, and the run stops. After twice this, the videos of a batch that have no score are dropped. The
    other ranks wait meanwhile: keep it at most a tenth of `timeout_minutes`. 0: no limit."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.several:
            for field in dataclasses.fields(RewardEntry):
                value, own = getattr(self, field.name), getattr(RewardEntry(), field.name)
                require(
                    value == own, f"reward.{field.name}", value, "reward.several stands in its place; move it there"
                )
        weights = self.part_weights
        require(
            any(weight != 0 for weight in weights.values()),
            "reward.several" if self.several else "reward.weights",
            self.several or self.weights,
            "expected finite weights, at least one of them not zero, such as vq 1, mq 1, ta 1",
        )

    @property
    def entries(self) -> list[RewardEntry]:
        """The rewards: this one, or those of `several`.

        Raises:
            UserError: an entry has an unknown key or a wrong value.
        """
        return [_entry(values, place) for place, values in enumerate(self.several)] if self.several else [self]

    @property
    def part_weights(self) -> dict[str, float]:
        """Part, by its name in the metrics -> its weight in the composite, of all rewards.

        Raises:
            UserError: two rewards weigh a part of the same name.
        """
        weights: dict[str, float] = {}
        for entry in self.entries:
            for part, weight in entry.weights.items():
                if entry.named(part) in weights:
                    raise UserError(
                        f"reward.several: two rewards have a part {entry.named(part)!r}; give one of them a prefix"
                    )
                weights[entry.named(part)] = weight
        return weights


def _entry(values: Mapping[str, Any], place: int) -> RewardEntry:
    fields, key = [field.name for field in dataclasses.fields(RewardEntry)], f"reward.several[{place}]"
    for name in values:
        if name not in fields:
            raise UserError(f"{key}: unknown key {name!r}; {nearest(name, fields)}")
    for name in ("name", "weights"):
        if name not in values:
            raise UserError(f"{key}: {name!r} is missing, such as {{name: testbed, weights: {{vq: 1}}}}")
    try:
        return RewardEntry(**values)
    except UserError as error:
        raise UserError(f"{key}.{error}") from error


def _is_plain(value: object) -> bool:
    """Whether it reaches another process as it is."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)
