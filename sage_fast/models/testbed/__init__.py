"""A tiny HunyuanVideo 1.5 that a laptop core can train: its classes, its pre-training and its weights."""

from pathlib import Path

BASE = Path(__file__).parent / "base"
"""The pre-trained weights that ship with the package: what `model.path = testbed` is."""
