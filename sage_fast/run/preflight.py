"""What keeps a run from starting and can be told in a moment: checked by `train` and by its dry
run.

Imports nothing heavy: PyTorch takes many seconds to load.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from sage_fast.config.fields import is_hub_id
from sage_fast.config.places import split_family
from sage_fast.config.reward_names import reward_import_path
from sage_fast.config.schema import MODEL_NAMES, RANDOM, DataConfig, ModelConfig, RewardEntry
from sage_fast.data.prompts import configured_prompts
from sage_fast.run_folder import RunFolder
from sage_fast.util.errors import UserError
from sage_fast.util.files import PARTIAL, why_no_file
from sage_fast.util.plugins import check_place


def check_named(model: ModelConfig, data: DataConfig, rewards: Mapping[str, RewardEntry]) -> None:
    """Check what the settings name, on any machine that has it.

    Args:
        rewards: setting that holds the name of a reward -> the reward.

    Raises:
        UserError: a prompt file that cannot be read, or a model, weights or a reward that is not
            there.
    """
    configured_prompts(data)
    for key, entry in rewards.items():
        if not entry.is_address:
            check_place(
                reward_import_path(entry.name, f"{key} = {entry.name!r}"), f"{key} = {entry.name!r}"
            )
    _check_model(model.path)
    weights = model.weights
    if weights is not None and not os.path.exists(weights):
        raise UserError(
            f"model.weights = {weights!r}: {why_no_file(weights)}; expected a LoRA or a folder of "
            "weights"
        )


def _check_model(path: str) -> None:
    """Check the part of `model.path` that needs no model class; `find_spec` checks the rest."""
    family, checkpoint = split_family(path)
    if family is not None:
        check_place(family, f"model.path = {path!r}")
    known = checkpoint in MODEL_NAMES or checkpoint.startswith(RANDOM) or is_hub_id(checkpoint)
    if os.path.isabs(checkpoint) and not known and not os.path.exists(checkpoint):
        near = Path(checkpoint).name
        hint = (
            f"; {near!r} comes with the package: --model.path {near}" if near in MODEL_NAMES else ""
        )
        raise UserError(
            f"model.path = {path!r}: no such folder; expected a local folder in diffusers format, "
            "a hub id, or one of "
            f"{', '.join(MODEL_NAMES)}{hint}"
        )


def check_new(output: str) -> None:
    """Check without touching it that a run can begin in the output folder.

    Raises:
        UserError: it cannot be, is a file or a link to nothing, or holds a run or other files.
    """
    run = RunFolder(output)
    path = Path(output)
    try:
        is_there = path.is_symlink() or path.exists()
    except OSError as error:  # a name that no file system takes
        raise UserError(
            f"output = {output!r}: cannot be made: {error.strerror}; choose another folder with "
            "--output; nothing was changed"
        ) from error
    if is_there and not path.is_dir():  # in this order: another rank may just make it
        found = "a file" if path.exists() else "a link to nothing"
        raise UserError(f"output = {output!r}: {found}; expected a new or empty folder")
    if not path.is_dir():
        return

    left_by_a_start = {run.lock_file.name, run.hangs.name}  # of a run that did not begin
    for file in path.iterdir():
        if file.name in left_by_a_start or file.suffix == PARTIAL:
            continue
        found = "other files: it must be new or empty"
        if run.exists:
            found = "a run: continue it with --resume"
        raise UserError(
            f"output = {output!r} already holds {found}, or choose another folder with --output; "
            "nothing was changed"
        )
