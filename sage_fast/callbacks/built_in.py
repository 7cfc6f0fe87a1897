"""The callbacks that every run has."""

from __future__ import annotations

from sage_fast.callbacks.checkpoints import Checkpoints
from sage_fast.callbacks.evaluations import Evaluations
from sage_fast.callbacks.interface import Callback
from sage_fast.callbacks.metrics import Metrics
from sage_fast.callbacks.notes import Notes
from sage_fast.callbacks.page import Page
from sage_fast.config.schema import Config


def built_in(config: Config, evaluations: Evaluations) -> list[Callback]:
    """Return what a run does besides training, in the order in which it is done.

    It follows the user's callbacks, so that their columns are in the row which is written. The row
    comes first, because a checkpoint needs the rows of its iterations. Then the evaluation, which
    the page shows, and the checkpoint last.
    """
    return [Metrics(), Notes(), evaluations, Page(), Checkpoints()]
