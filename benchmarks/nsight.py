"""What scripts/gpu.sh profiles with Nsight Compute: a transition, and a forward of two blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sage_fast.config.schema import SamplingConfig
from sage_fast.models.attention.backends import ATTENTION
from sage_fast.models.attention.trial import fastest, measure_attention
from sage_fast.models.find import find_spec
from sage_fast.models.interface import Condition
from sage_fast.models.policy import Policy
from sage_fast.models.random_weights import random_module
from sage_fast.models.registry import default_family
from sage_fast.models.spec import Spec
from sage_fast.tools.harness import usual_dtype
from sage_fast.tools.operators import OPERATORS, inputs
from sage_fast.util.captions import Caption, PromptKey

PROMPT = "a small red ball moves left quickly"
TESTBED = "random:testbed"


def large_inputs(operator: str, device: torch.device) -> list[Any]:
    """Make the arguments of an operator in the usual dtype, so large that only memory should limit
    a copy."""
    gpu = device.type == "cuda"
    batch = (96 if gpu else 2) if operator.startswith("transition") else (4 if gpu else 1)
    shape = (batch, *OPERATORS[operator].production[1:])
    return inputs(operator, shape, usual_dtype(device), device, optional=False)


def shallow(path: str) -> Spec:
    """Return the spec of a random model with two blocks in each network."""
    spec = find_spec(path)
    layouts = {part: {**spec.meta(part).config, "num_layers": 2} for part in spec.networks}
    return type(spec)(path, layouts)


def random_policy(spec: Spec, device: torch.device) -> Policy:
    """Make a policy with random weights in the usual dtype."""
    dtype = usual_dtype(device)
    networks = {
        part: random_module(spec, part, dtype, device).requires_grad_(False)
        for part in spec.networks
    }
    return spec.policy(networks, dtype=dtype, guidance_scale=1.0)


def conditions(spec: Spec, policy: Policy) -> dict[PromptKey, Condition]:
    """Return key -> condition, for `PROMPT` and the empty one."""
    condition = spec.load_encoder(policy.dtype, policy.device, SamplingConfig())(Caption(PROMPT))
    return {PromptKey(""): condition, PromptKey(PROMPT): condition}


def transformer_forward(device: torch.device) -> tuple[Callable[[], Tensor], int]:
    """Return a forward of two blocks and its tokens: of the default model at 480p on a GPU, the
    testbed's on a CPU."""
    if device.type == "cuda":
        spec, sampling = (
            shallow(default_family().randoms[0]),
            SamplingConfig(num_frames=17, batch_size=1),
        )
    else:
        spec, sampling = shallow(TESTBED), SamplingConfig(num_frames=17, height=32, width=32)
    policy, count = random_policy(spec, device), sampling.batch_size
    known = conditions(spec, policy)
    key = PromptKey(PROMPT)
    x = torch.randn(count, *spec.latent_shape(sampling), device=device)
    tokens = spec.tokens(x.shape[1:]) + known[key].tokens
    if (shape := spec.attention_shape(sampling)) is not None:
        policy.attention = ATTENTION[
            fastest(measure_attention((count, tokens, *shape[1:]), device, policy.dtype))
        ]
    with torch.no_grad():
        table = policy.conditioning_table(torch.tensor([0.7]), known)
        inputs = table.of([key] * count).at(torch.zeros(1, dtype=torch.int64, device=device))
    return torch.no_grad()(lambda: policy.velocity(x, inputs)), count * tokens
