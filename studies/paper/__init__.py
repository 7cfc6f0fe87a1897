"""A finished study on the testbed: claims of the SAGE-GRPO paper, and questions beyond it.

`make reproduce` or `python -m studies.paper all` runs it; docs/results/paper.md has the results.
"""
