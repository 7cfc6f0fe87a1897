"""The names that settings can take, and the wording of the error when one is not among them. Imports nothing heavy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

SAMPLERS = ("sage", "flow", "dance", "cps", "exact", "ode")
REDUCTIONS = ("mean", "sum", "unscaled")
SURROGATES = ("clip", "log_prob")
KL_STRATEGIES = ("none", "fixed", "stepwise", "moving", "dual")
VELOCITY_TERMS = ("rollout", "closed_form")
FEEDBACKS = ("paper", "ppo", "off")
DTYPES = ("float32", "bfloat16")
TUNINGS = ("lora", "full")
ATTENTION_BACKENDS = ("auto", "sdpa", "cudnn", "flash", "flash3", "xformers")
ON_FAILURE = ("stop", "drop")


def nearest(value: str, choices: Iterable[str]) -> str:
    """`expected one of a, b, c; did you mean 'b'?`, the question only where something is close."""
    choices = list(choices)
    close = difflib.get_close_matches(str(value), choices, n=1)
    question = f"; did you mean {close[0]!r}?" if close else ""
    return f"expected one of {', '.join(choices)}{question}"
