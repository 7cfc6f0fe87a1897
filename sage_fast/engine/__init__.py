"""Optimisation, data parallelism and checkpoints."""
