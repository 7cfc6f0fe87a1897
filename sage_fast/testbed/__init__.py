"""A tiny HunyuanVideo 1.5 that a laptop core can train: its classes, its pre-training and its
weights."""

from pathlib import Path

BASE = Path(__file__).parent / "base"
"""Folder of the pre-trained weights that ship with the package; `model.path = testbed` loads them.
"""
BASE_I2V = BASE.with_name("base_i2v")
"""That of the image-to-video testbed, `testbed-i2v`.

It has no autoencoder of its own: `BASE` has it.
"""
