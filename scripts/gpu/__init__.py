"""Verify and measure everything that needs a GPU, on a bare machine without network: what
scripts/gpu.sh runs (docs/how-to/first-gpu.md).

`parts` is the table of what can be run, `run` runs it, `install` makes the environment for it. They
need the standard library alone. The other modules are programs of parts; they run after the
installation.
"""
