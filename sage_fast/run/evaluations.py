"""The evaluations of a run folder, as sets of scored videos."""

from __future__ import annotations

from sage_fast.eval.videoset import VideoSet, from_evaluation
from sage_fast.run.folder import RunFolder
from sage_fast.util.videos import numbered


def from_run(folder: RunFolder) -> dict[str, VideoSet]:
    """Return name -> videos of each evaluation that is not damaged, in the order of iterations.

    All composites are under the weights of the last one, since a resume may have changed the weights.
    """
    found, _ = folder.evaluations
    weights = [*found.values()][-1]["weights"] if found else None
    sets = {}
    for name, scores in found.items():
        label = f"iteration {scores['iteration']}" if name.startswith("iteration") else name
        sets[name] = from_evaluation(label, scores, numbered(folder.videos(name)), weights)
    return sets
