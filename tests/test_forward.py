"""Our forward against the stock one: the same numbers and gradients, without synchronisations and
without masks.

tests/test_policy.py compares it with the padded stock forward on a whole checkpoint, with mixed
prompts and glyphs.
"""

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from sage_fast.benchmarks.stock import StockPolicy
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sage_fast.algorithm.transitions import sigma_schedule, transition_table
from sage_fast.models.hunyuan15.conditioning import TextEmbedding
from sage_fast.models.hunyuan15.policy import HunyuanVideo15Policy
from sage_fast.rollout.step import denoise
from sage_fast.util.captions import PromptKey
from tests.tiny import embeddings, keys_of, perturb, settings, tiny_model, tiny_trainer

PROMPTS = keys_of(["a small red ball moves left quickly", "a big blue ball moves up slowly"])
SYNCHRONISING = {
    "_local_scalar_dense",
    "nonzero",
    "is_nonzero",
    "equal",
    "masked_select",
    "_unique2",
}


class Operators(TorchDispatchMode):
    """Counts aten operators, and the elements of the largest boolean tensor."""

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


def stock_velocity(transformer: Any, x: Tensor, sigma: Tensor, text: list[TextEmbedding]) -> Tensor:
    policy = StockPolicy(transformer, dtype=x.dtype)
    return policy.velocity(x, policy.condition(sigma, text))


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> tuple[Any, HunyuanVideo15Policy]:
    """A stock transformer, and a policy around a copy of it; the trained weights differ from their
    initial values."""
    trainer = tiny_trainer(settings(model__tuning=getattr(request, "param", "lora")))
    perturb(trainer)
    ours = trainer.policy
    return copy.deepcopy(ours.transformer), ours


def test_a_policy_leaves_the_transformer_as_it_was(pair: tuple[Any, HunyuanVideo15Policy]) -> None:
    """The policy patches no method and adds no hook; our blocks are modules, so that users can hook
    them."""
    _, ours = pair
    transformer = ours.transformer
    assert not any("forward" in vars(module) for module in transformer.modules())
    assert not any(
        module._forward_pre_hooks or module._forward_hooks for module in transformer.modules()
    )
    called = []
    for layer, block in enumerate(ours.forward.blocks):
        block.register_forward_hook(lambda *_, layer=layer: called.append(layer))
    x, sigma, text = inputs(PROMPTS)
    ours.velocity(x, ours.condition(sigma, text))
    assert called == list(range(len(transformer.transformer_blocks)))


def inputs(prompts: list[PromptKey]) -> tuple[Tensor, Tensor, list[TextEmbedding]]:
    texts = embeddings(prompts)
    x = torch.randn(len(prompts), 32, 5, 4, 4)
    return x, torch.rand(len(prompts)), [texts[prompt] for prompt in prompts]


@pytest.mark.parametrize("pair", ["lora", "full"], indirect=True)
@pytest.mark.parametrize("prompts", [PROMPTS, keys_of([""])], ids=["two prompts", "an empty one"])
def test_values_and_gradients(
    pair: tuple[Any, HunyuanVideo15Policy], prompts: list[PromptKey]
) -> None:
    stock, ours = pair
    x, sigma, text = inputs(prompts)
    upstream = torch.randn_like(x)
    expected, actual = (
        stock_velocity(stock, x, sigma, text),
        ours.velocity(x, ours.condition(sigma, text)),
    )
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    parameters = ours.parameters()
    mine, reference = (
        torch.autograd.grad(out, list(wanted), upstream, allow_unused=True)
        for out, wanted in (
            (actual, parameters.values()),
            (expected, [p for p in stock.parameters() if p.requires_grad]),
        )
    )
    for (name, p), *gradients in zip(parameters.items(), mine, reference, strict=True):
        # no prompt here has glyphs
        gradient, exact = (torch.zeros_like(p) if g is None else g for g in gradients)
        assert (gradient - exact).norm() <= 1e-4 * exact.norm() + 1e-6, name
    assert sum(g is not None for g in mine) > 20


def test_the_stock_forward_of_our_transformer_still_works(
    pair: tuple[Any, HunyuanVideo15Policy],
) -> None:
    stock, ours = pair
    x, sigma, text = inputs(PROMPTS)
    expected = stock_velocity(stock, x, sigma, text)
    torch.testing.assert_close(
        stock_velocity(ours.transformer, x, sigma, text), expected, rtol=1e-5, atol=1e-5
    )


def test_no_synchronisation_and_no_mask(pair: tuple[Any, HunyuanVideo15Policy]) -> None:
    """Check a whole denoising step: transformer and transition."""
    stock, ours = pair
    x, sigma, text = inputs(PROMPTS)
    table = transition_table(sigma_schedule(4, 3.0), "sage", 0.5)
    coefs, seeds, step = table.coefficients(), torch.arange(2), torch.tensor([1])
    with torch.no_grad():
        conditions = ours.conditioning_table(table.sigmas[:-1], embeddings(PROMPTS)).of(PROMPTS)
        denoise(ours, coefs, conditions.at(step), seeds, x, step)  # makes the rotary table
        with Operators() as mine:
            denoise(ours, coefs, conditions.at(step), seeds, x, step)
        with Operators() as theirs:
            stock_velocity(stock, x, sigma, text)
    assert mine.counts["transition_step"] == 1
    assert not SYNCHRONISING & mine.counts.keys()
    assert mine.largest_mask == 0
    assert "arange" not in mine.counts  # a step does not compute what the rollout knows beforehand
    assert "silu" not in mine.counts
    # what the stock forward does, so that this test can fail
    assert SYNCHRONISING & theirs.counts.keys()
    assert theirs.largest_mask >= 2 * (80 + 7) ** 2


@pytest.mark.parametrize(
    "prompts", [PROMPTS[:1] * 3, [*PROMPTS, PROMPTS[0]]], ids=["one prompt", "two prompts"]
)
@pytest.mark.parametrize("guidance", [1.0, 4.0])
def test_tabulated_conditioning_is_that_of_the_step(
    prompts: list[PromptKey], guidance: float
) -> None:
    """Rollouts ask for one step of all samples, training for a step of each."""
    policy = tiny_model(settings(sampling__guidance_scale=guidance)).policy
    sigmas = torch.tensor([0.95, 0.6, 0.2])
    texts = embeddings(prompts)
    conditions = policy.conditioning_table(sigmas, texts).of(prompts)
    x = torch.randn(3, 32, 5, 4, 4)
    text, negative = (
        [texts[p] for p in wanted] for wanted in (prompts, keys_of([""] * len(prompts)))
    )
    for steps in ([1], [2, 0, 1]):
        fresh = policy.condition(sigmas[steps].expand(3), text, negative if guidance != 1 else None)
        tabulated = conditions.at(torch.tensor(steps))
        assert (tabulated.negative is None) == (guidance == 1)
        with torch.no_grad():
            expected, actual = policy.velocities(x, fresh), policy.velocities(x, tabulated)
        for mine, theirs in zip(actual, expected):
            if theirs is not None:
                torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_what_is_trained_decides_what_may_be_tabulated() -> None:
    assert tiny_model(settings()).policy.forward.conditioning_is_frozen
    assert not tiny_trainer(settings(model__tuning="full")).policy.forward.conditioning_is_frozen
    targets = r"transformer_blocks\.\d+\.norm1\.linear"
    assert not tiny_model(
        settings(model__lora_targets=targets)
    ).policy.forward.conditioning_is_frozen


def test_a_lora_on_adaln_is_trained() -> None:
    """Rollouts read a table made with the current weights; updates compute AdaLN again."""
    config = settings(
        model__lora_targets=r"transformer_blocks\.\d+\.norm1\.linear", train__optimizer_steps=2
    )
    row = tiny_trainer(config).iteration(0)
    assert row["grad_norm"] > 0
    assert row["log_prob/parity"] < 1e-4


@pytest.mark.parametrize("change", ["disable", "merge", "dropout"])
def test_adapters_that_are_not_plain_run_as_peft_runs_them(
    pair: tuple[Any, HunyuanVideo15Policy], change: str
) -> None:
    stock, ours = pair
    x, sigma, text = inputs(PROMPTS)
    for transformer in (stock, ours.transformer):
        if change == "disable":
            transformer.disable_adapters()
        if change == "merge":
            transformer.fuse_lora()
        if change == "dropout":
            for module in transformer.modules():
                if hasattr(module, "lora_dropout"):
                    module.lora_dropout["default"] = torch.nn.Dropout(0.5).eval()
    with torch.no_grad():
        expected = stock_velocity(stock, x, sigma, text)
        actual = ours.velocity(x, ours.condition(sigma, text))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
