"""LoRA with one float32 accumulation: values, gradients, what bfloat16 lets through, and what it
costs."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from sage_fast.config.schema import ModelConfig
from sage_fast.models.lora.linear import FeedForward, FusedLinear, project_streams
from sage_fast.models.trainable import make_trainable
from sage_fast.testbed.tiny_model import Testbed
from studies.paper.adapter import responses
from tests.pretend_cuda import PretendCuda
from tests.test_forward import PROMPTS, Operators, inputs
from tests.tiny import perturb, settings, tiny_model, tiny_trainer


def layers(
    up: float,
    dtype: torch.dtype,
    outs: tuple[int, ...] = (24, 17, 24),
    rank: int = 4,
    **options: Any,
) -> Any:
    """Linear layers of 33 inputs, an adapter on all but the second; up-projections of size `up`."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Linear(33, out, bias=i != 2) for i, out in enumerate(outs))
    ).requires_grad_(False)
    config = LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules=["0", "2"][: len(outs)], **options
    )
    inject_adapter_in_model(config, model)
    for name, p in model.named_parameters():
        if "lora_" not in name:
            p.data = p.data.to(dtype)
        elif "lora_B" in name:
            nn.init.normal_(p, std=up)
    return model


def projected(model: nn.Sequential, x: Tensor) -> tuple[FusedLinear, tuple[Tensor, ...]]:
    projection = FusedLinear(model, *model._modules)
    projection.refresh(x.dtype)
    return projection, split(model, projection(F.pad(x, (0, projection.pad))))


def split(model: nn.Sequential, y: Tensor) -> tuple[Tensor, ...]:
    return y.split([layer.out_features for layer in model], dim=-1)


@pytest.mark.parametrize("shape", [(2, 5, 33), (7, 33), (0, 33)], ids=str)
@pytest.mark.parametrize("up", [1e-6, 1e-4, 1e-2, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_values_and_gradients(dtype: torch.dtype, up: float, shape: tuple[int, ...]) -> None:
    """To rounding of what is stored and of the two factors; strided, odd and empty inputs."""
    model = layers(up, dtype)
    exact = copy.deepcopy(model).float()
    x = torch.randn(*shape[:-1], 66)[..., ::2].to(dtype).requires_grad_()
    ideal = x.detach().float().requires_grad_()
    _, ys = projected(model, x)
    expected = [layer(ideal) for layer in exact]
    upstream = [torch.randn_like(y) for y in expected]
    unit = torch.finfo(dtype).eps
    for y, e in zip(ys, expected):
        torch.testing.assert_close(y.float(), e, rtol=2 * unit, atol=2 * unit * (1 + up))
    sum((y * g.to(dtype)).sum() for y, g in zip(ys, upstream)).backward()  # type: ignore[union-attr]
    sum((e * g.to(dtype).float()).sum() for e, g in zip(expected, upstream)).backward()  # type: ignore[union-attr]
    assert x.grad is not None
    assert ideal.grad is not None
    torch.testing.assert_close(x.grad.float(), ideal.grad, rtol=4 * unit, atol=8 * unit * (1 + up))
    for (name, p), q in zip(model.named_parameters(), exact.parameters()):
        if "lora_" in name:
            assert p.grad is not None
            assert q.grad is not None
            size = float(q.grad.abs().max()) if q.grad.numel() else 0.0
            torch.testing.assert_close(
                p.grad, q.grad, rtol=4 * unit, atol=4 * unit * size + 1e-30, msg=name
            )


@pytest.mark.parametrize(
    ("dtype", "rank", "pad"),
    [
        (torch.bfloat16, 4, 64),
        (torch.bfloat16, 33, 128),
        (torch.float16, 32, 64),
        (torch.float32, 4, 8),
    ],
    ids=str,
)
def test_rows_of_16_bits_stay_whole_vectors(dtype: torch.dtype, rank: int, pad: int) -> None:
    """Two adapters; what is left of the padding is zeros, whatever stood there, and has no
    gradient."""
    model = layers(0.1, dtype, rank=rank)
    projection = FusedLinear(model, *model._modules)
    projection.refresh(dtype)
    assert projection.pad == pad
    x = torch.full((5, 33 + pad), torch.nan, dtype=dtype)
    x[:, :33].normal_()
    y = projection(x.requires_grad_())
    assert y.isfinite().all()
    assert not x[:, 33 + 2 * rank :].any()
    (dx,) = torch.autograd.grad(y, x, torch.randn_like(y))
    assert dx.isfinite().all()
    assert not dx[:, 33 + 2 * rank :].any()


def test_adapter_gradients_on_a_gpu_are_never_rounded_to_bfloat16() -> None:
    """CUDA's matmul writes its float32 sums; the CPU rounds them, as it has no such operator."""

    def gradients(device: str) -> list[Tensor]:
        model = layers(0.1, torch.bfloat16).to(device)
        _, ys = projected(model, x.to(device))
        torch.autograd.backward(ys, [upstream[:, : y.shape[1]].to(device) for y in ys])
        return [p.grad.cpu() for p in model.parameters() if p.grad is not None]

    x, upstream = (torch.randn(50, 33, dtype=torch.bfloat16) for _ in range(2))
    on_cpu = gradients("cpu")
    with PretendCuda():
        on_gpu = gradients("cuda")
    for mine, rounded in zip(on_gpu, on_cpu, strict=True):
        assert mine.dtype == torch.float32
        assert not torch.equal(mine, mine.bfloat16().float())
        torch.testing.assert_close(mine, rounded, rtol=0.01, atol=0.01 * float(mine.abs().max()))


@pytest.mark.soak
def test_a_small_adapter_is_heard_in_bfloat16() -> None:
    """The share of the float32 response of the velocity; an adapter added to a rounded value gave
    0.3 at 1e-4."""
    share, error = responses([1e-4], "ours", seeds=18)[1e-4]
    assert abs(share - 1) < 3 * error < 0.4
    dead, error = responses([1e-4], "peft", seeds=18)[1e-4]
    assert dead + 3 * error < 0.7  # the test can see a dead zone


def test_the_weight_is_a_view_and_the_layer_keeps_its_own_forward() -> None:
    model = layers(0.1, torch.float32)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    x = torch.randn(3, 33)
    expected = [layer(x) for layer in model]
    projection, _ = projected(model, x)
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(torch.equal(layer(x), e) for layer, e in zip(model, expected))
    storages = {
        p.untyped_storage().data_ptr()
        for p in model.parameters()
        if p.shape[-1] == 33 and not p.requires_grad
    }
    assert storages == {projection._buffer.untyped_storage().data_ptr()}  # no second copy


def test_it_follows_the_layers() -> None:
    model, x = layers(0.1, torch.float32), torch.randn(3, 33)
    projection = FusedLinear(model, *model._modules)

    def check() -> None:
        projection.refresh(torch.float32)
        for y, layer in zip(split(model, projection(F.pad(x, (0, projection.pad)))), model):
            torch.testing.assert_close(y, layer(x))

    check()
    for p in model.parameters():
        if p.requires_grad:
            # as bitsandbytes and DeepSpeed write: no version is counted
            p.data.copy_(torch.randn_like(p))
            torch.autograd.graph.increment_version(p)
    check()
    model[0].base_layer.bias.data.add_(1)
    torch.autograd.graph.increment_version(model[0].base_layer.bias)
    model[1].bias.add_(1)
    check()
    model.load_state_dict({name: torch.randn_like(t) for name, t in model.state_dict().items()})
    check()
    model[0].scaling["default"] = 0.5
    check()
    model.double().float()  # new storage for every weight
    check()
    model[0].enable_adapters(False)
    check()
    assert projection.pad == 0
    model[0].enable_adapters(True)
    check()
    assert projection.pad == 8
    model[0].merge()
    check()
    assert projection.pad == 0


def test_an_adapter_that_comes_later_is_heard() -> None:
    policy = tiny_model(settings(model__tuning="full")).policy
    x, sigma, text = inputs(PROMPTS)

    @torch.no_grad()
    def velocity() -> Tensor:
        return policy.velocity(x, policy.condition(sigma, text))

    without = velocity()
    make_trainable(Testbed(), policy.transformer, ModelConfig(lora_rank=2, lora_alpha=2))
    torch.testing.assert_close(velocity(), without)
    for p in policy.parameters().values():
        p.data = torch.randn_like(p)
    assert not torch.allclose(velocity(), without)


def test_an_optimizer_that_writes_behind_autograd_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """bitsandbytes' kernels take raw pointers."""
    trainer = tiny_trainer(settings(kl__strategy="none"))
    policy, engine = trainer.policy, trainer.engine
    x, sigma, text = inputs(PROMPTS)
    with torch.no_grad():
        before = policy.velocity(x, policy.condition(sigma, text))

    def step() -> None:
        for p in engine.parameters:
            p.data.add_(0.1)

    monkeypatch.setattr(engine.optimizers[0], "step", step)
    for p in engine.parameters:
        p.grad = torch.zeros_like(p)
    engine.step()
    with torch.no_grad():
        assert not torch.allclose(policy.velocity(x, policy.condition(sigma, text)), before)


@pytest.mark.filterwarnings("ignore:`lora_bias=True`")  # our layers have no bias
@pytest.mark.parametrize(
    "options", [{"lora_dropout": 0.5}, {"use_dora": True}, {"lora_bias": True}], ids=str
)
def test_other_adapters_run_as_peft_runs_them(options: dict[str, Any]) -> None:
    model = layers(0.1, torch.float32, **options).eval()
    x = torch.randn(3, 33)
    projection, ys = projected(model, x)
    assert projection.pad == 0
    assert all(torch.equal(y, layer(x)) for y, layer in zip(ys, model))


def test_trained_layers_keep_their_own_gradient() -> None:
    model = layers(0.1, torch.float32)
    model[1].requires_grad_(True)
    projection, ys = projected(model, torch.randn(3, 33))
    assert projection.pad == 0
    ys[1].sum().backward()
    assert model[1].weight.grad is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_trained_layers_of_the_same_rows_are_one_matmul(dtype: torch.dtype) -> None:
    """Values and gradients of their own forwards, under autocast too; a layer of another class is
    left to them."""
    model = nn.Sequential(*(nn.Linear(33, out) for out in (24, 17, 24)))
    projection = FusedLinear(model, *model._modules)
    x = torch.randn(2, 5, 33, dtype=dtype, requires_grad=True)
    wanted = [x, *model.parameters()]

    def results() -> tuple[list[Tensor], int]:
        with (
            torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16),
            Operators() as operators,
        ):
            y = projection(x)
        return [y, *torch.autograd.grad(y, wanted, upstream)], operators.counts["addmm"]

    upstream = torch.randn(2, 5, 65, dtype=dtype)
    joined, matmuls = results()
    model[1].__class__ = type("Other", (nn.Linear,), {})
    own, as_many = results()
    assert (matmuls, as_many) == (1, 3)
    unit = torch.finfo(dtype).eps
    for mine, theirs in zip(joined, own, strict=True):
        assert mine.dtype == theirs.dtype
        torch.testing.assert_close(
            mine, theirs, rtol=4 * unit, atol=4 * unit * float(theirs.abs().max())
        )


def test_full_tuning_has_no_room() -> None:
    policy = tiny_model(settings(model__tuning="full")).policy
    policy.forward.refresh()
    assert not any(projection.pad for projection in policy.forward.fused_linears)


def test_states_are_swapped_between_two_forwards() -> None:
    trainer = tiny_trainer(settings())
    policy = trainer.policy
    x, sigma, text = inputs(PROMPTS)

    @torch.no_grad()
    def velocity() -> Tensor:
        return policy.velocity(x, policy.condition(sigma, text))

    start, first = policy.snapshot(), velocity()
    perturb(trainer)
    moved = velocity()
    assert not torch.equal(first, moved)
    with policy.using(start):
        assert torch.equal(velocity(), first)
    assert torch.equal(velocity(), moved)


@pytest.mark.parametrize("adapted", ["both", "up", "down", "none", "trained"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_feed_forward(dtype: torch.dtype, adapted: str) -> None:
    """Against the layers' own forwards in float64, values and gradients; adapters on each layer, or
    all trained."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(33, 70), nn.Linear(70, 33)).requires_grad_(adapted == "trained")
    targets = {"both": ["0", "1"], "up": ["0"], "down": ["1"]}.get(adapted)
    if targets:
        inject_adapter_in_model(LoraConfig(r=4, lora_alpha=8, target_modules=targets), model)
    for name, p in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(p, std=0.1)
        else:
            p.data = p.data.to(dtype)
    exact = copy.deepcopy(model).double()
    x = torch.randn(2, 5, 33).to(dtype).requires_grad_()
    ideal = x.detach().double().requires_grad_()
    up, down = (FusedLinear(model, name) for name in ("0", "1"))
    for projection in (up, down):
        projection.refresh(dtype)
    stream, gate = (torch.randn(*size).to(dtype).requires_grad_() for size in ((2, 5, 33), (2, 33)))
    exact_stream, exact_gate = (t.detach().double().requires_grad_() for t in (stream, gate))
    y = FeedForward(up, down)(F.pad(x, (0, up.pad)), stream, gate)
    frozen = FeedForward(up, down)(F.pad(x, (0, up.pad)), stream, gate.detach())
    assert torch.equal(frozen, y)
    expected = exact_stream + exact_gate[:, None] * exact[1](
        F.gelu(exact[0](ideal), approximate="tanh")
    )
    upstream = torch.randn(2, 5, 33).to(dtype)
    trained, same = ([p for p in m.parameters() if p.requires_grad] for m in (model, exact))
    gradients = torch.autograd.grad(y, [gate, stream, x, *trained], upstream)
    for mine, theirs in zip(
        torch.autograd.grad(frozen, [stream, x, *trained], upstream), gradients[1:], strict=True
    ):
        assert torch.equal(mine, theirs)
    unit = torch.finfo(
        torch.float32 if dtype == torch.float64 and "lora_" in str(model) else dtype
    ).eps
    for mine, theirs in zip(
        [y, *gradients],
        [
            expected,
            *torch.autograd.grad(
                expected, [exact_gate, exact_stream, ideal, *same], upstream.double()
            ),
        ],
        strict=True,
    ):
        torch.testing.assert_close(
            mine.double(), theirs, rtol=8 * unit, atol=8 * unit * float(theirs.abs().max())
        )


@pytest.mark.parametrize("shape", [(2, 5, 33), (0, 4, 33)], ids=str)
def test_rows_without_padding(shape: tuple[int, ...]) -> None:
    """Parts of longer samples, as attention's output is: the values and gradients of padded
    rows."""
    model = layers(0.1, torch.float32)
    projection = FusedLinear(model, *model._modules)
    projection.refresh(torch.float32)
    x = torch.randn(shape[0], shape[1] + 3, 33)[:, : shape[1]].requires_grad_()
    ys = projection.unpadded(x), projection(F.pad(x, (0, projection.pad)))
    upstream = torch.randn_like(ys[0])
    wanted = [x, *(p for p in model.parameters() if p.requires_grad)]
    for mine, theirs in zip(
        *([y, *torch.autograd.grad(y, wanted, upstream)] for y in ys), strict=True
    ):
        assert torch.equal(mine, theirs)


STREAMS = {
    "adapters": (True, True),
    "adapters of one stream": (True, False),
    "trained": (False, False),
}
"""Whether the layer of each stream has an adapter. Without, it is trained."""


class Copies(TorchDispatchMode):
    """Counts what joins or copies rows."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket in (torch.ops.aten.cat, torch.ops.aten.copy_)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("read", ["both", "the first", "the second of two"])
@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
def test_streams_of_one_tensor(kind: str, batch: int, read: str, frozen: bool) -> None:
    """The values and gradients of layers after `split`.

    Values are equal to the bit, and so are gradients where dy s B is no matmul of its own. That of
    one sample is not copied. `the first` is the last block, where nothing reads the text; `the
    second of two` is a result that no loss depends on.
    """
    torch.manual_seed(7)
    counts = [9, 4]
    projections = []
    wanted: list[Tensor] = []
    for has_adapter in STREAMS[kind]:
        model = layers(0.1, torch.float32, outs=(24,))
        if not has_adapter:
            model = nn.Sequential(nn.Linear(33, 24))
        projection = FusedLinear(model, "0")
        projection.refresh(torch.float32)
        assert bool(projection.pad) == has_adapter
        if frozen and not has_adapter:
            model.requires_grad_(False)
        projections.append(projection)
        wanted += [p for p in model.parameters() if p.requires_grad]
    given: list[FusedLinear | None] = [*projections]
    if read == "the first":
        given[1] = None
    leaf = torch.randn(batch, sum(counts), 33, requires_grad=True)
    x = leaf * 1

    actual = project_streams(x, counts, given)
    parts = x.split(counts, dim=1)
    expected = [None if p is None else p.unpadded(part) for p, part in zip(given, parts)]
    for mine, theirs in zip(actual, expected, strict=True):
        assert (mine is None) == (theirs is None)
        assert mine is None or torch.equal(mine, theirs)

    has_product = all(p.pad for p in given if p is not None)
    is_read = [read != "the second of two", read != "the first"]
    upstream = [torch.randn(batch, count, 24) for count in counts]

    def gradients(outputs: Any) -> tuple[list[Tensor | None], int]:
        pairs = [(y, g) for y, g, needed in zip(outputs, upstream, is_read) if needed]
        ys, gs = zip(*pairs)
        with Copies() as copies:
            found = torch.autograd.grad(ys, [x, *wanted], gs, retain_graph=True, allow_unused=True)
        return [*found], copies.count

    (found, copies), (theirs, copies_of_split) = gradients(actual), gradients(expected)
    for mine, other in zip(found, theirs, strict=True):
        if other is None:
            assert mine is None
        elif has_product:
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
        else:
            assert torch.equal(mine, other)
    assert found[0] is not None
    assert found[0].is_contiguous()
    assert copies_of_split > 0
    if kind != "adapters of one stream" and batch == 1:
        assert copies == 0
    again, _ = gradients(actual)
    assert torch.equal(again[0], found[0])  # type: ignore[arg-type]
    assert again[0].data_ptr() != found[0].data_ptr()  # type: ignore[union-attr]


def test_the_backward_keeps_rows_without_padding_themselves() -> None:
    """They, the weights and a product as narrow as the adapters; no copy of the rows."""
    model = layers(0.1, torch.float32)
    projection = FusedLinear(model, *model._modules)
    projection.refresh(torch.float32)
    whole = torch.randn(2, 8, 33, requires_grad=True)
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        projection.unpadded(whole[:, :5])
    storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in kept}
    for known in (whole, projection._buffer):
        del storages[known.untyped_storage().data_ptr()]
    (product,) = storages.values()
    assert product.untyped_storage().nbytes() == 2 * 5 * projection.pad * 4
