"""Our forward against the stock one: the same numbers and gradients, without synchronisations and without masks.

tests/test_policy.py compares it with the padded stock forward of a whole checkpoint, mixed prompts and glyphs included.
"""

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sage_fast.policy.hunyuan import HunyuanVideo15Policy
from sage_fast.policy.text import TextBatch, collate
from tests.tiny import embeddings, perturb, settings, tiny_model, tiny_trainer

PROMPTS = ["a red circle moves left quickly", "a blue square moves up slowly"]
SYNCHRONISING = {"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "_unique2"}


class Operators(TorchDispatchMode):
    """Counts aten operators, and the elements of the largest boolean tensor made."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.largest_mask = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.counts[func.overloadpacket.__name__] += 1
        if isinstance(out, Tensor) and out.dtype == torch.bool:
            self.largest_mask = max(self.largest_mask, out.numel())
        return out


def stock_velocity(transformer: Any, x: Tensor, sigma: Tensor, text: TextBatch) -> Tensor:
    def mask(tokens: Tensor, given: Tensor | None) -> Tensor:
        return torch.ones(tokens.shape[:2], dtype=torch.int64) if given is None else given

    config = transformer.config
    condition = x.new_zeros(len(x), config.in_channels - x.shape[1], *x.shape[2:])
    return transformer(
        torch.cat([x, condition], 1), 1000 * sigma, text.text, mask(text.text, text.text_mask),
        encoder_hidden_states_2=text.glyphs, encoder_attention_mask_2=mask(text.glyphs, text.glyphs_mask),
        image_embeds=x.new_zeros(len(x), 0, config.image_embed_dim), return_dict=False,
    )[0]  # fmt: skip


@pytest.fixture
def pair() -> tuple[Any, HunyuanVideo15Policy]:
    """A stock transformer, and a policy around a copy of it; LoRA weights that are not zero."""
    trainer = tiny_trainer(settings())
    perturb(trainer)
    ours = trainer.policy
    stock = copy.deepcopy(ours.transformer)
    for block in stock.transformer_blocks:
        del block.forward  # ours; the class has its own
    return stock, ours


def inputs(prompts: list[str]) -> tuple[Tensor, Tensor, TextBatch]:
    texts = embeddings(prompts)
    x = torch.randn(len(prompts), 16, 5, 4, 4)
    text = collate([texts[prompt] for prompt in prompts], torch.device("cpu"), torch.float32)
    return x, torch.rand(len(prompts)), text


@pytest.mark.parametrize("prompts", [PROMPTS, [PROMPTS[0], ""]], ids=["one length", "mixed lengths"])
def test_values_and_gradients(pair: tuple[Any, HunyuanVideo15Policy], prompts: list[str]) -> None:
    stock, ours = pair
    x, sigma, text = inputs(prompts)
    upstream = torch.randn_like(x)
    expected, actual = stock_velocity(stock, x, sigma, text), ours.velocity(x, ours.condition(sigma, text))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    theirs = [p for p in stock.parameters() if p.requires_grad]
    gradients = zip(
        ours.parameters(),
        torch.autograd.grad(actual, list(ours.parameters().values()), upstream),
        torch.autograd.grad(expected, theirs, upstream),
    )
    for name, mine, reference in gradients:
        assert (mine - reference).norm() <= 1e-4 * reference.norm() + 1e-6, name


def test_the_stock_forward_of_our_transformer_still_works(pair: tuple[Any, HunyuanVideo15Policy]) -> None:
    stock, ours = pair
    x, sigma, text = inputs(PROMPTS)
    expected = stock_velocity(stock, x, sigma, text)
    torch.testing.assert_close(stock_velocity(ours.transformer, x, sigma, text), expected, rtol=1e-5, atol=1e-5)


def test_no_synchronisation_and_no_mask(pair: tuple[Any, HunyuanVideo15Policy]) -> None:
    stock, ours = pair
    x, sigma, text = inputs(PROMPTS)
    with torch.no_grad():
        ours.velocity(x, ours.condition(sigma, text))  # the rotary table is made once
        with Operators() as mine:
            ours.velocity(x, ours.condition(sigma, text))
        with Operators() as theirs:
            stock_velocity(stock, x, sigma, text)
    assert not SYNCHRONISING & mine.counts.keys()
    assert mine.largest_mask == 0
    assert "arange" not in mine.counts or mine.counts["arange"] <= 2  # the sinusoids of the two timestep embeddings
    assert SYNCHRONISING & theirs.counts.keys()  # what the stock forward does, so that this test can fail
    assert theirs.largest_mask >= 2 * (80 + 7) ** 2


def test_captures_as_one_graph() -> None:
    policy = tiny_model(settings()).policy
    x, sigma, text = inputs(PROMPTS)
    with torch.no_grad():
        expected = policy.velocity(x, policy.condition(sigma, text))
        captured = torch.compile(policy.forward, backend="eager", fullgraph=True)
        actual = captured(x, policy.condition(sigma, text))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
