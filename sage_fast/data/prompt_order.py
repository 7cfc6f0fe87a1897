"""How far a run is in its training prompts. Imports nothing heavy."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from sage_fast.util.captions import PromptKey


class PromptOrder:
    """The prompts that a run has taken: iterations take them one after another, in a new shuffle
    every epoch.

    Between two resumes every iteration takes `per_iteration` of them. A resume with another number
    goes on behind the last prompt that was taken, so an epoch still has every prompt once. Other
    prompts than before begin a new epoch.

    Args:
        prompts: keys of the training prompts, in the order of their file.
        per_iteration: prompts an iteration takes.
    """

    def __init__(self, prompts: Sequence[PromptKey], per_iteration: int) -> None:
        self.count = len(prompts)
        written = "\0".join(str(prompt) for prompt in prompts)
        self.digest = hashlib.sha256(written.encode()).hexdigest()[:16]
        self.per_iteration = per_iteration
        self.since = 0
        """Iteration since which `per_iteration` are taken."""
        self.taken = 0
        """Prompts taken before it."""

    @property
    def offset(self) -> int:
        """Prompts taken beyond `per_iteration` for each earlier iteration, as
        `prompts_of_iteration` takes it."""
        return self.taken - self.since * self.per_iteration

    def state_dict(self) -> dict[str, Any]:
        return {
            "digest": self.digest,
            "per_iteration": self.per_iteration,
            "since": self.since,
            "taken": self.taken,
        }

    def load_state_dict(self, state: dict[str, Any], iteration: int) -> None:
        """Restore `state_dict`, and convert it to the present prompts and their number an
        iteration.

        Args:
            iteration: the iteration to continue with.
        """
        other_prompts = state["digest"] != self.digest
        if not other_prompts and state["per_iteration"] == self.per_iteration:
            self.since = state["since"]
            self.taken = state["taken"]
            return

        taken = state["taken"] + (iteration - state["since"]) * state["per_iteration"]
        if other_prompts:
            epochs = -(-taken // self.count)
            taken = epochs * self.count
        self.since = iteration
        self.taken = taken
