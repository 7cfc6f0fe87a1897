"""How a process was started: the variables of torchrun, and the launchers that set others.

A group of ranks is described by torchrun's variables: WORLD_SIZE, RANK, LOCAL_RANK,
LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT. `accelerate launch`, `deepspeed` and `python -m
torch.distributed.launch` set them too. This module imports nothing heavy: a wrong start is told
before PyTorch is loaded.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import reprlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from sage_fast.util.errors import UserError

log = logging.getLogger(__name__)

GROUP = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that describe a group of ranks."""

OTHER_NAMES = {"LOCAL_WORLD_SIZE": "LOCAL_SIZE"}
"""A variable of `GROUP` -> its name under the `deepspeed` launcher."""


class Launcher(NamedTuple):
    """A program that starts several processes, without torchrun's variables.

    Attributes:
        name: the command.
        size, rank, local_rank: variables with the number of processes, and with the number of this
            one among all and among those of its node; `size` is "" if the launcher does not say.
        local_size: variable with the number of processes of a node; "" if there is none that is a
            plain number.
    """

    name: str
    size: str
    rank: str
    local_rank: str
    local_size: str = ""


LAUNCHERS = (
    # SLURM_NTASKS counts the tasks of the job, and is also set in the shell of `salloc` and in a
    # batch script.
    Launcher("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID"),
    Launcher(
        "mpirun",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    Launcher(
        "mpirun",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    Launcher(
        "jsrun",
        "JSM_NAMESPACE_SIZE",
        "JSM_NAMESPACE_RANK",
        "JSM_NAMESPACE_LOCAL_RANK",
        "JSM_NAMESPACE_LOCAL_SIZE",
    ),
    Launcher("mpiexec", "PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    Launcher("mpiexec", "", "PMIX_RANK", "PMIX_LOCAL_RANK"),
)
"""Launchers whose processes would each train alone. The first one that matches is named."""


def launched(name: str, default: int) -> int:
    """Return a number that the launcher gives in the environment, such as WORLD_SIZE; `default`
    without a launcher.

    Raises:
        UserError: it is no whole number, or no rank is left.
    """
    other_name = OTHER_NAMES.get(name, "")
    text = os.environ.get(name) or os.environ.get(other_name) or str(default)
    least = min(default, 1)
    if not re.fullmatch(r"[0-9]{1,6}", text) or int(text) < least:
        expected = (
            f"expected a whole number from {least}, as torchrun sets it; without a launcher, unset "
            "it"
        )
        raise UserError(f"{name} = {reprlib.repr(text)} in the environment: {expected}")
    return int(text)


def check_launch() -> None:
    """Check that this process is alone, or one rank of a group that is described whole.

    Raises:
        UserError: another launcher started several processes that know nothing of each other; or a
            variable of the group is missing or wrong.
    """
    size = launched("WORLD_SIZE", 1)
    own = launched("RANK", 0)
    if not os.environ.get("WORLD_SIZE"):
        for launcher in LAUNCHERS:
            _check_alone(launcher)
        if own > 0:
            raise UserError(
                f"RANK = {own} in the environment, but no WORLD_SIZE: expected both, as torchrun "
                "sets them (`torchrun --nproc-per-node GPUS -m sage_fast ...`); for a process "
                "alone, `unset RANK`"
            )
        return

    if own >= size:
        expected = f"expected less than WORLD_SIZE = {size}; without a launcher, unset both"
        raise UserError(f"RANK = {own} in the environment: {expected}")
    if size > 1:
        for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
            if not os.environ.get(name):
                raise UserError(
                    f"WORLD_SIZE = {size} in the environment, but no {name}: expected what "
                    "torchrun sets (`torchrun --nproc-per-node GPUS -m sage_fast ...`); for a "
                    "process alone, `unset WORLD_SIZE`"
                )


def _check_alone(launcher: Launcher) -> None:
    """Raise a UserError if `launcher` started this process as one of several."""
    size = _number(launcher.size)
    rank = _number(launcher.rank)
    if size <= 1 and rank == 0:
        return

    count = f"{size} processes" if size > 1 else "several processes"
    per_node = _number(launcher.local_size) or "GPUS"
    torchrun = f"torchrun --nproc-per-node {per_node} -m sage_fast ..."
    variables = (
        f"RANK=${launcher.rank} LOCAL_RANK=${launcher.local_rank} "
        f"WORLD_SIZE=${launcher.size or 'COUNT'}"
    )
    raise UserError(
        f"{launcher.name} started {count}, and each would train alone: WORLD_SIZE is not set. Type "
        f"`{torchrun}` once a node; or set in each process {variables} MASTER_ADDR=HOST "
        "MASTER_PORT=29500; or WORLD_SIZE=1, if each is a run of its own"
    )


def note_idle_tasks() -> None:
    """Note that a Slurm job has several tasks, of which this process, started without srun, is
    none."""
    tasks = _number("SLURM_NTASKS")
    if (
        tasks > 1
        and not os.environ.get("SLURM_STEP_NUM_TASKS")
        and not os.environ.get("WORLD_SIZE")
    ):
        log.info(
            f"note: one process, although the Slurm job has {tasks} tasks: srun or torchrun starts "
            "several"
        )


def note_lone_copies() -> None:
    """Note that srun has started several processes, each of which has been told, by a variable or
    by a torchrun of its own, to be a run of its own."""
    tasks = _number("SLURM_STEP_NUM_TASKS")
    if tasks <= 1 or not os.environ.get("WORLD_SIZE"):
        return

    if os.environ.get("TORCHELASTIC_RUN_ID"):
        if _number("GROUP_WORLD_SIZE") == 1:
            log.info(
                f"note: srun started {tasks} torchruns, and this one is alone with its "
                f"{launched('WORLD_SIZE', 1)} rank(s). For one run of all, type `srun torchrun "
                f"--nnodes {tasks} --nproc-per-node GPUS --rdzv-backend c10d --rdzv-endpoint "
                "HOST:29500 -m sage_fast ...`"
            )
    elif launched("WORLD_SIZE", 1) == 1:
        log.info(
            f"note: srun started {tasks} processes, and with WORLD_SIZE = 1 each is a run of its "
            f"own. For one run of all, type `unset WORLD_SIZE`, and `torchrun --nproc-per-node "
            "GPUS -m sage_fast ...` once a node"
        )


def _number(name: str) -> int:
    """Return the number in a variable of a launcher; 0 if it is missing or holds something else."""
    text = os.environ.get(name, "")
    return int(text) if re.fullmatch(r"[0-9]{1,9}", text) else 0


def leave_group() -> None:
    """Drop the variables of a group: a command that is one process must not follow what a shell was
    left with."""
    for name in GROUP:
        os.environ.pop(name, None)


@contextlib.contextmanager
def without_group() -> Iterator[None]:
    """Hide the variables of a group from a library in the block, which would join whatever is left
    of one."""
    hidden = {name: os.environ[name] for name in GROUP if name in os.environ}
    leave_group()
    try:
        yield
    finally:
        os.environ.update(hidden)


def speaks() -> bool:
    """Return whether this process is the one of its group that prints."""
    alone = os.environ.get("WORLD_SIZE", "1") in ("", "1")
    return alone or os.environ.get("RANK", "0") in ("", "0")


def without_local_rank(words: Iterable[str]) -> list[str]:
    """Take `--local_rank=N`, which some launchers put before the arguments, out of a command line.

    It becomes LOCAL_RANK, unless the launcher has set that as well.
    """
    own = []
    for word in words:
        option, _, value = word.partition("=")
        if option in ("--local_rank", "--local-rank") and value:
            os.environ.setdefault("LOCAL_RANK", value)
        else:
            own.append(word)
    return own
