"""A tiny HunyuanVideo 1.5 that a laptop core can train: its classes, its pre-training and its weights."""
