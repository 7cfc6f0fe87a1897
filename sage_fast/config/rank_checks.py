"""Checks over several sections of the settings, made before PyTorch is imported."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

from sage_fast.config.deepspeed import deepspeed_overrides
from sage_fast.config.engines import ENGINES, OPTIMIZERS, RENOISES
from sage_fast.config.schema import (
    ODE_SAMPLERS,
    ModelConfig,
    ObjectiveConfig,
    SamplingConfig,
    TrainConfig,
)
from sage_fast.util.errors import UserError
from sage_fast.util.plugins import check_place
from sage_fast.util.text import counted


def check_choices(
    sampling: SamplingConfig,
    objective: ObjectiveConfig,
    train: TrainConfig,
    part_weights: Mapping[str, float],
) -> None:
    """Check that the choices of the sections fit each other, as far as names and numbers tell.

    Args:
        part_weights: part of the reward -> its weight.

    Raises:
        UserError: no noise to train on, averaged weights without an average, one part to balance,
            or a setting of another engine.
    """
    is_deterministic = sampling.sampler in ODE_SAMPLERS or sampling.eta == 0
    # another one is asked by its row, later
    if is_deterministic and not RENOISES.get(objective.surrogate, True):
        raise no_gradient(sampling)
    sampling.require(
        train.ema_decay > 0 or not sampling.averaged_weights,
        "averaged_weights",
        f"there is no average with train.ema_decay = {train.ema_decay:g}; expected a decay above "
        "0, such as 0.9; the nearest choice is false",
    )
    _check_engine_settings(train)
    weighted = [part for part, weight in part_weights.items() if weight]
    objective.require(
        len(weighted) > 1 or not objective.balanced_rewards,
        "balanced_rewards",
        f"the reward has one part with a weight, {weighted[0]}, so nothing to balance; the nearest "
        "choice is false",
    )


def check_streaming(model: ModelConfig, train: TrainConfig) -> None:
    """Check that streamed blocks have frozen weights, whole on every rank.

    Raises:
        UserError: they are trained, or an engine gathers them.
    """
    if not model.streams:
        return
    model.require(
        model.trains_adapter,
        "stream_blocks",
        f"only frozen weights are streamed, and model.tuning = {model.tuning} trains those of the "
        "blocks; the nearest choice is auto, or model.tuning = lora",
    )
    model.require(
        not ENGINES[train.engine].gathers,
        "stream_blocks",
        f"train.engine = {train.engine} gathers the weights of a block from all ranks; the nearest "
        "choice is auto, or train.engine = plain, zero1 or zero2",
    )


def check_plugins(plugins: Mapping[str, str]) -> None:
    """Check that the modules of the user's own choices are there, without importing them.

    Args:
        plugins: setting -> `package.module:name`, as `Config.plugins`.

    Raises:
        UserError: one is not.
    """
    for key, place in plugins.items():
        check_place(place, f"{key} = {place!r}")


def _check_engine_settings(train: TrainConfig) -> None:
    """Check the settings of single engines: `offload_shards` and `deepspeed_config`."""
    row = ENGINES[train.engine]
    train.require(
        row.gathers or not train.offload_shards,
        "offload_shards",
        f"train.engine = {train.engine} shards no weights; expected zero3; the nearest choice is "
        "false",
    )
    train.require(
        not (OPTIMIZERS[train.optimizer] and train.offload_shards),
        "offload_shards",
        f"train.optimizer = {train.optimizer} gathers whole matrices on the GPU; expected adamw; "
        "the nearest choice is false",
    )
    train.require(
        row.is_deepspeed or train.deepspeed_config is None,
        "deepspeed_config",
        f"train.engine = {train.engine} does not run DeepSpeed; expected zero1 or zero2; the "
        "nearest choice is null",
    )
    deepspeed_overrides(train)


def no_gradient(sampling: SamplingConfig) -> UserError:
    """Return the error of settings whose rollouts have no stochastic step to train."""
    forward = " or ".join(name for name, renoises in RENOISES.items() if renoises)
    return UserError(
        f"{sampler_in_words(sampling)} has no stochastic step to train, so there is no policy "
        "gradient; expected one that adds noise, with eta above 0, or objective.surrogate = "
        f"{forward}"
    )


def sampler_in_words(sampling: SamplingConfig) -> str:
    """Return the sampler and its numbers, for messages."""
    steps = counted(sampling.steps, "step")
    return f"sampler {sampling.sampler!r} with eta {sampling.eta:g} and {steps}"


def check_engine(config: TrainConfig) -> None:
    """Check that the library of the engine is installed.

    Raises:
        UserError: it is not.
    """
    package = ENGINES[config.engine].package
    if package is not None and importlib.util.find_spec(package) is None:
        raise UserError(
            f"train.engine = {config.engine!r} needs {package}, which is not installed: pip "
            f"install 'sage-fast[{package}]'; the nearest choice without it is plain"
        )


def check_ranks(train: TrainConfig, size: int, ranks: int) -> None:
    """Check that an iteration has a sample for every rank, or for every group of
    `model.sequence_parallel` ranks.

    Args:
        train: section `train`.
        size: `model.sequence_parallel`.
        ranks: number of ranks of the run.

    Raises:
        UserError: it has too few, or as `check_sequence_parallel`.
    """
    groups = check_sequence_parallel(size, ranks)
    samples = train.samples
    if samples < groups:
        sizes = [n for n in (2, 4, 8) if ranks % n == 0 and ranks // n <= samples]
        sharing = f", or model.sequence_parallel = {sizes[0]}" if sizes else ""
        raise UserError(
            f"train.prompts_per_iteration = {train.prompts_per_iteration} and train.group_size = "
            f"{train.group_size}: {samples} samples an iteration for {groups} ranks; expected at "
            f"least one each. The nearest is {samples} ranks, or train.prompts_per_iteration = "
            f"{-(-groups // train.group_size)}{sharing}"
        )


def check_sequence_parallel(size: int, ranks: int) -> int:
    """Return the number of sequence groups; each acts as one data-parallel rank.

    Args:
        size: `model.sequence_parallel`.
        ranks: number of ranks of the run.

    Raises:
        UserError: `size` does not divide the ranks.
    """
    if ranks % size:
        more = (
            f"torchrun --nproc-per-node {size} ..."
            if ranks == 1
            else f"{-(-ranks // size) * size} ranks"
        )
        raise UserError(
            f"model.sequence_parallel = {size}: expected a divisor of the number of ranks, which "
            f"is {ranks}; the nearest is {_largest_divisor(ranks, size)}, or start {more}"
        )
    return ranks // size


def check_heads(size: int, heads: int) -> None:
    """Check that a group of `size` ranks can share the heads evenly.

    Raises:
        UserError: it cannot.
    """
    if heads % size:
        raise UserError(
            f"model.sequence_parallel = {size}: expected a divisor of the transformer's {heads} "
            "attention heads, which the GPUs of a sample share; the nearest is "
            f"{_largest_divisor(heads, size)}"
        )


def _largest_divisor(number: int, most: int) -> int:
    return max(d for d in range(1, min(number, most) + 1) if number % d == 0)
