"""Prompt files, and the order in which a run visits them."""

from __future__ import annotations

from pathlib import Path

from sage_fast.errors import UserError
from sage_fast.seeding import permutation


def read_prompts(source: str) -> list[str]:
    """Prompts of a UTF-8 text file, one a line (blank lines are skipped), or of `testbed:train`, `testbed:heldout`.

    Raises:
        UserError: file missing, not UTF-8, or without a prompt.
    """
    if source.startswith("testbed:"):
        from sage_fast.testbed.world import heldout_prompts, train_prompts

        sets = {"testbed:train": train_prompts, "testbed:heldout": heldout_prompts}
        if source not in sets:
            raise UserError(f"prompts {source!r}: expected {' or '.join(sets)}, or a text file")
        return sets[source]()
    path = Path(source)
    try:
        found = path.is_file()
    except OSError:  # no possible name
        found = False
    if not found:
        raise UserError(f"prompt file {source!r}: no such file; expected UTF-8 text with one prompt a line")
    try:
        lines = path.read_bytes().decode("utf-8-sig").split("\n")  # splitlines() also splits at U+2028, form feeds, ...
    except UnicodeDecodeError as error:
        raise UserError(f"prompt file {source!r} is not UTF-8 (byte {error.start}); save it as UTF-8 text") from error
    prompts = [line.strip() for line in lines if line.strip()]
    if not prompts:
        raise UserError(f"prompt file {source!r} is empty; expected at least one prompt, one a line")
    return prompts


def prompts_of_iteration(prompts: int, per_iteration: int, iteration: int, seed: int) -> list[int]:
    """Indices of the prompts of one iteration: a new shuffle every epoch, a pure function of its arguments."""
    chosen = []
    for position in range(iteration * per_iteration, (iteration + 1) * per_iteration):
        epoch, offset = divmod(position, prompts)
        chosen.append(permutation(prompts, seed, "prompts", epoch)[offset])
    return chosen
