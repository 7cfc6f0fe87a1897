"""Choose the attention backend of a run: the one asked for, or the fastest that is right."""

from __future__ import annotations

from collections.abc import Sequence

from sage_fast.config.schema import SamplingConfig
from sage_fast.models.attention.backends import ATTENTION
from sage_fast.models.attention.trial import Trial, Use, fastest, measure_attention, try_uses
from sage_fast.models.model import Model
from sage_fast.models.spec import Spec
from sage_fast.util.errors import UserError
from sage_fast.util.ranks import all_gather_object, sequence_size


def choose_attention(
    model: Model, asked: str, sampling: SamplingConfig, needs_agreement: bool = True
) -> None:
    """Use the attention backend `asked`, or for "auto" the fastest correct one at the size of this
    run. Collective.

    Args:
        needs_agreement: whether "auto" skips a backend whose output under `no_grad`, as in a
            rollout, is not that with gradients to the bit. One that is asked for by name is used
            with a note.

    Raises:
        UserError: on any rank, the requested backend does not run, or gives wrong results.
    """
    uses = uses_of(model.spec, sampling)
    if not uses:
        if asked not in ("auto", model.attention):
            raise UserError(
                f"model.attention = {asked!r}: {model.spec.title} calls a kernel of its own; the "
                "nearest is 'auto'"
            )
        return
    if asked == "auto":
        asked = _fastest(model, uses, needs_agreement)
    elif not ATTENTION[asked].is_reference:
        _check(model, asked, uses, needs_agreement)
    model.attention = asked
    model.policy.attention = ATTENTION[asked]


def uses_of(spec: Spec, sampling: SamplingConfig) -> list[Use]:
    """Return the attentions that a kernel has to serve on a rank; none if the model calls its
    own."""
    sample_shape = spec.attention_shape(sampling)
    if sample_shape is None:
        return []
    tokens, heads, width = sample_shape
    ranks, batch = sequence_size(), sampling.batch_size
    uses = [Use(shape=(batch, tokens, heads // ranks, width))]
    if spec.text_keys is not None:
        # of a rank's own tokens, with all heads
        shape = (batch, -(-tokens // ranks), heads, width)
        uses.append(Use(shape=shape, keys=spec.text_keys))
    return uses


def _fastest(model: Model, uses: Sequence[Use], needs_agreement: bool) -> str:
    """Return the fastest backend that is right on every rank; note the others."""
    measured = measure_attention(uses, model.policy.device, model.policy.dtype)
    trials: list[dict[str, Trial]] = all_gather_object(measured)
    problems = {}
    for rank in trials:
        for name, trial in rank.items():
            problem = trial.why_skipped(needs_agreement)
            if problem:
                problems[name] = problem
    model.notes += [
        f"attention {name!r} is skipped: {problem}" for name, problem in problems.items()
    ]

    # The times of rank 0, so that all ranks choose alike.
    right = {name: trial for name, trial in trials[0].items() if name not in problems}
    if problems and not right:
        raise UserError(
            "model.attention = 'auto': no backend is right here; " + "; ".join(model.notes)
        )
    model.attention_milliseconds = {name: trial.milliseconds for name, trial in right.items()}
    return fastest(right)


def _check(model: Model, asked: str, uses: Sequence[Use], needs_agreement: bool) -> None:
    """Try the backend `asked` on every rank; note where rollouts and training would differ.

    Raises:
        UserError: it does not run, or gives wrong results.
    """
    trial = try_uses(ATTENTION[asked], uses, model.policy.device, model.policy.dtype)
    trials: list[Trial] = all_gather_object(trial)
    for trial in trials:
        if trial.problem:
            raise UserError(
                f"model.attention = {asked!r}: {trial.problem}; the nearest choice is 'auto'"
            )
    for trial in trials:
        problem = trial.why_skipped(needs_agreement)
        if problem:
            model.notes.append(
                f"model.attention = {asked!r}: {problem}; train.parity_gate tells whether it "
                "matters"
            )
            return
