#!/usr/bin/env bash
# Verify and measure everything that needs a GPU, on a bare machine without network (docs/how-to/first-gpu.md).
#
#   scripts/gpu.sh [--unknown] [--call N] [--tiny] [--seconds N] [--gpus N] [--print] WHEELS OUT [PART...]
#
# The parts are in scripts/gpu/parts.py. What starts here needs the standard library of PYTHON alone.
set -u

export CALLED_FROM=$PWD # to which WHEELS and OUT are relative
cd "$(dirname "$(realpath "${BASH_SOURCE[0]}")")/.." || exit 2
exec "${PYTHON:-python3}" -m scripts.gpu "$@"
