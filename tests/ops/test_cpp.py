"""What the C++ operators alone owe; test_operators.py holds them to float64."""

import pytest
import torch

from sage_fast.ops import implementation, transition_step
from sage_fast.ops.philox import philox_normal
from sage_fast.tools.operators import inputs

pytestmark = pytest.mark.skipif(
    implementation(torch.device("cpu")) != "C++", reason="the C++ extension is not built (or SAGE_FAST_OPS=reference)"
)


def test_same_noise_as_the_reference() -> None:
    """With a = b = 0 and c = 1 the step returns its noise."""
    coefs = torch.tensor([[0.0, 0.0, 1.0, 0.0, 0.0, 0.0]] * 4)
    seed = torch.tensor([0, 2**63 - 1, -5, 123456789])
    step = torch.tensor([0, 1, 2, 3])
    zeros = torch.zeros(4, 40_003)
    noise, _ = transition_step(zeros, zeros, coefs, step, seed)
    torch.testing.assert_close(noise, philox_normal(seed, step, (40_003,)), rtol=1e-5, atol=2e-6)


def test_step_outside_the_table() -> None:
    x, v, _, _, coefs, _, seed = inputs("transition_step", (1, 10), torch.float32)
    with pytest.raises(RuntimeError, match="step 10 is outside the table of 10 rows"):
        transition_step(x, v, coefs, torch.tensor(10), seed)
