"""A finished study in the world of shapes: claims of the SAGE-GRPO paper, and questions beyond it.

`make reproduce` or `python -m studies.paper all` runs it; docs/results/paper.md has the results.
"""
