"""A tiny HunyuanVideo 1.5 that a laptop core can train: its classes, its pre-training and its weights."""

from pathlib import Path

BASE = Path(__file__).parent / "base"
"""Folder of the pre-trained weights that ship with the package; `model.path = testbed` loads them."""
