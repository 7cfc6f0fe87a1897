"""A merged LoRA is no substitute for one beside the weights: in bfloat16 a young adapter is rounded
away."""

import torch
import torch.nn.functional as F
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn

from sage_fast.models.lora.linear import FusedLinear

INPUTS, OUTPUTS, RANK = 2048, 256, 16
LEARNING_RATE = 1e-4
"""Adam's first update changes every entry of B, which begins at 0, by this much."""


def young_adapter() -> nn.Sequential:
    """A bfloat16 layer with the adapter that one update of Adam leaves."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(INPUTS, OUTPUTS, bias=False)).requires_grad_(False)
    weight = model[0].weight
    size = torch.empty_like(weight).uniform_(0.02, 0.04)
    weight.data = (size * torch.randn_like(weight).sign()).bfloat16()

    inject_adapter_in_model(LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=["0"]), model)
    up = model[0].lora_B["default"].weight
    up.data = LEARNING_RATE * torch.randn_like(up).sign()
    return model


def half_units(weight: Tensor) -> Tensor:
    """Half of the distance from each bfloat16 to the next larger one."""
    exponent = torch.floor(torch.log2(weight.abs().double()))
    return 2.0 ** (exponent - 8)


def response(found: Tensor, base: Tensor, wanted: Tensor) -> float:
    """How much of the wanted change is in `found`: 1 for all of it."""
    change = found.double() - base.double()
    return float((change * wanted).sum() / wanted.square().sum())


@torch.no_grad()
def test_a_young_adapter_is_rounded_away_by_merging_and_not_by_the_fused_linear() -> None:
    model = young_adapter()
    layer = model[0]
    weight = layer.get_base_layer().weight.clone()
    delta = layer.get_delta_weight("default").double()
    assert delta.abs().gt(0).double().mean() > 0.99
    assert (delta.abs() < half_units(weight)).all()

    x = torch.randn(512, INPUTS).bfloat16()
    base = F.linear(x, weight)
    wanted = x.double() @ delta.T

    fused = FusedLinear(model, "0")
    fused.refresh(torch.bfloat16)
    beside = fused(F.pad(x, (0, fused.pad)))
    assert abs(response(beside, base, wanted) - 1) < 0.1

    merged = young_adapter()
    merged[0].merge()
    assert torch.equal(merged[0].get_base_layer().weight, weight)
    assert response(merged(x), base, wanted) == 0
