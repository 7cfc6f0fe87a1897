"""sage-fast: SAGE-GRPO alignment of HunyuanVideo 1.5 with reward models."""

__version__ = "0.1.0"
