"""Settings that must stand before any test module is imported."""

import os

import pytest
import torch

# Without a GPU the Triton kernels run in Triton's interpreter. Triton decides when it is first imported, which
# diffusers or torch.compile may do in any test module, so it cannot be decided in tests/ops.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
