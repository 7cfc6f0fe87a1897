"""Evaluations: held-out scores, their intervals and paired differences, scored videos, and signs of
reward hacking."""
