"""A finished study: claims of the SAGE-GRPO paper, and questions beyond it, decided on the testbed.

`make reproduce` or `python -m studies.paper all` runs it; docs/results.md holds what was found.
"""
