import pytest
import torch

from sage_fast.measure.operators import SIZES, Case, check

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(params=["480p batch 1", "480p batch 4"])
def case(request: pytest.FixtureRequest) -> Case:
    """Inputs at a production size, checked before anything is timed."""
    made = Case.make(SIZES[request.param], DEVICE)
    check(made)
    return made
