"""What each mode of checkpointing computes again and keeps, and which one `auto` takes."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from sage_fast.algorithm.resolved import ResolvedConfig
from sage_fast.config.loader import load
from sage_fast.models.attention.backends import ATTENTION, AttentionRow, is_attention
from sage_fast.models.checkpointing import (
    MODES,
    CheckpointPlan,
    fastest_that_fits,
    is_checkpointed,
    set_checkpointing,
)
from sage_fast.models.decoder import Decoder
from sage_fast.models.find import find_spec
from sage_fast.models.model import Model
from sage_fast.models.streaming import block_sizes, stream_sizes
from sage_fast.models.trainable import meta_policy
from sage_fast.parallel import fit
from sage_fast.testbed.tiny_model import Testbed
from sage_fast.tools.plan import plan
from sage_fast.util.errors import UserError
from tests.test_forward import PROMPTS, inputs
from tests.tiny import settings, tiny_model


class Attentions(TorchDispatchMode):
    """Forwards and backwards of attention, and the bytes that the forwards gave."""

    def __init__(self) -> None:
        super().__init__()
        self.forwards = self.backwards = self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if is_attention(func):
            self.forwards += 1
            self.bytes += sum(t.nbytes for t in tree_leaves(out) if isinstance(t, Tensor))
        elif "scaled_dot_product" in str(func):
            self.backwards += 1
        return out


@pytest.mark.parametrize(("mode", "again"), [("none", 0), ("attention", 0), ("full", 1)])
def test_attention_runs_once(mode: str, again: int) -> None:
    model = tiny_model(settings())
    model.set_checkpointing(CheckpointPlan(mode))
    x, sigma, text = inputs(PROMPTS)
    conditioning = model.policy.condition(sigma, text)
    layers = len(model.policy.forward.blocks)
    with Attentions() as forward:
        v = model.policy.velocity(x, conditioning)
    with Attentions() as backward:
        torch.autograd.backward(v, torch.randn_like(v))
    assert (forward.forwards, backward.forwards) == (layers, again * layers)
    assert backward.backwards == layers
    joint = 80 + conditioning.context.shape[1]
    per_token = 4 * (16 + 1) * 4  # 4 heads: the values, and a log-sum-exp
    assert forward.bytes == len(PROMPTS) * layers * joint * per_token


@pytest.mark.parametrize("tuning", ["lora", "full"])
@pytest.mark.parametrize("mode", MODES)
def test_queries_and_keys_are_rotated_once_more(mode: str, tuning: str) -> None:
    """By the recomputation of a block, or else by the backward of its attention."""
    model = tiny_model(settings(model__tuning=tuning))
    model.set_checkpointing(CheckpointPlan(mode))
    x, sigma, text = inputs(PROMPTS)
    v = model.policy.velocity(x, model.policy.condition(sigma, text))
    assert not is_checkpointed()
    with Matmuls() as backward:
        v.sum().backward()
    assert not is_checkpointed()
    blocks = len(model.policy.forward.blocks)
    assert backward.operators.count("sage_fast::norm_rotate") == blocks


def test_a_checkpoint_of_the_user_around_a_block_gives_the_same_gradients() -> None:
    """Set by diffusers' switch, past ours: it keeps more, and is right."""
    x, sigma, text = inputs(PROMPTS)
    upstream, found = torch.randn(x.shape), []
    for switched in (False, True):
        model = tiny_model(settings())
        if switched:
            model.policy.transformer.enable_gradient_checkpointing()
        v = model.policy.velocity(x, model.policy.condition(sigma, text))
        v.backward(upstream)
        found.append([p.grad for p in model.policy.parameters().values() if p.grad is not None])
    assert len(found[0]) == len(found[1]) > 30
    assert all(map(torch.equal, *found))


class Matmuls(TorchDispatchMode):
    """Shapes (rows, inner, columns) of the matmuls, those within attention apart."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, int, int]] = []
        self.operators: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.mm.out):
            a, b = args[-2:]
            self.shapes.append((*a.shape, b.shape[1]))
        self.operators.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", ["attention", "full"])
@pytest.mark.parametrize("trains_gates", [False, True])
def test_recomputation_skips_what_nothing_reads(mode: str, trains_gates: bool) -> None:
    """Neither `gated_sum` nor, with frozen gates, the second layer of a feed-forward runs again.

    Same gradients.
    """
    x, sigma, text = inputs(PROMPTS)
    upstream, found = torch.randn(x.shape), []
    for chosen in ("none", mode):
        targets = rf"{Testbed.lora_targets}|transformer_blocks.*ff_context\.net\.(0\.proj|2)"
        model = tiny_model(settings(model__lora_rank=3, model__lora_targets=targets))
        if trains_gates:
            for block in model.policy.transformer.transformer_blocks:
                block.norm1.requires_grad_(True)
                block.norm1_context.requires_grad_(True)
        model.set_checkpointing(CheckpointPlan(chosen))
        v = model.policy.velocity(x, model.policy.condition(sigma, text))
        with Matmuls() as backward:
            v.backward(upstream)
        found.append([p.grad for p in model.policy.parameters().values() if p.grad is not None])
        second = [shape for shape in backward.shapes if shape[1:] == (4 * 64 + 3, 64)]
        sums = backward.operators.count("sage_fast::gated_sum")
        # the last block has no text at its end
        again = 2 * 3 - 1 if chosen != "none" and trains_gates else 0
        assert (len(second), sums) == (again, 0)
        # of the video: a product of the backward has its shape
        first = backward.shapes.count((2 * 80, 64 + 3, 4 * 64))
        assert first == 3 * (1 if chosen == "none" else 2)
    assert len(found[0]) == len(found[1]) > 30
    assert all(map(torch.equal, *found))


def scale_by_hook(module: nn.Module, weight: nn.Parameter) -> None:
    module.register_forward_hook(
        lambda module, given, out: (
            (out[0] * weight, *out[1:]) if isinstance(out, tuple) else out * weight
        )
    )


def scale_by_global_hook(block: nn.Module, weight: nn.Parameter) -> RemovableHandle:
    return register_module_forward_hook(
        lambda module, given, out: (out[0] * weight, *out[1:]) if module is block else None
    )


def scale_in_forward(module: nn.Module, weight: nn.Parameter) -> None:
    """As accelerate attaches its hooks."""
    forward = module.forward
    module.forward = lambda *given: (
        lambda out: (out[0] * weight, *out[1:]) if isinstance(out, tuple) else out * weight
    )(forward(*given))


class Scaled(nn.Module):
    """A block in a module of the user."""

    def __init__(self, block: nn.Module, weight: nn.Parameter) -> None:
        super().__init__()
        self.block, self.weight = block, weight

    def forward(self, *given: Any) -> tuple[Tensor, Tensor]:
        video, text = self.block(*given)
        return video * self.weight, text


def by_class(module: nn.Module, weight: nn.Parameter) -> None:
    """As libraries that give a module a subclass."""
    kind = type(module)

    def forward(self: Any, *given: Any) -> Any:
        out = kind.forward(self, *given)
        return (out[0] * weight, *out[1:]) if isinstance(out, tuple) else out * weight

    module.__class__ = type("Scaled", (kind,), {"forward": forward})


def scaled_forward(forward: Any, weight: nn.Parameter) -> Any:
    """For a class that is patched, so that every block is scaled."""

    def scaled(self: Any, *given: Any) -> Any:
        out = forward(self, *given)
        return (out[0] * weight, *out[1:]) if isinstance(out, tuple) else out * weight

    return scaled


class Delegating(nn.Module):
    """A wrapper that has its module's attributes, as those of peft and torch.compile."""

    def __init__(self, module: nn.Module, weight: nn.Parameter) -> None:
        super().__init__()
        self.module, self.weight = module, weight

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def forward(self, *given: Any) -> Any:
        out = self.module(*given)
        return (out[0] * self.weight, *out[1:]) if isinstance(out, tuple) else out * self.weight


def without_a_module(block: nn.Module, weight: nn.Parameter) -> None:
    """A hook of a function that was made by `exec`."""
    made: dict[str, Any] = {"w": weight}
    exec("def hook(module, given, out): return (out[0] * w, *out[1:])", made)
    made["hook"].__module__ = None
    block.register_forward_hook(made["hook"])


@pytest.mark.parametrize("mode", ["attention", "full"])
@pytest.mark.parametrize(
    "where",
    ["hook", "hook of every module", "inner hook", "forward", "inner forward", "wrapper",
     "delegating wrapper",
     "inner wrapper", "class", "inner class", "patched class", "patched inner class",
     "hook without a module"],
)  # fmt: skip
def test_what_reads_the_end_of_a_block_gets_it_in_a_recomputation(
    mode: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trained factor saves the block's result for its own gradient."""
    x, sigma, text = inputs(PROMPTS)
    upstream, found = torch.randn(x.shape), []
    for chosen in ("none", mode):
        model, weight = tiny_model(settings()), nn.Parameter(torch.tensor(1.5))
        model.set_checkpointing(CheckpointPlan(chosen))
        blocks = model.policy.forward.blocks
        block, handle = blocks[1], None
        if where == "hook of every module":
            handle = scale_by_global_hook(block, weight)
        elif where == "wrapper":
            blocks[1] = Scaled(block, weight)
        elif where == "delegating wrapper":
            blocks[1] = Delegating(block, weight)
        elif where == "inner wrapper":
            block.video_ff = Delegating(block.video_ff, weight)
        elif where == "hook without a module":
            without_a_module(block, weight)
        elif where in ("class", "inner class"):
            by_class(block.video_ff if "inner" in where else block, weight)
        elif "patched" in where:
            kind = type(block.video_ff if "inner" in where else block)
            monkeypatch.setattr(kind, "forward", scaled_forward(kind.omits_last_matmul, weight))
        else:
            scale = scale_by_hook if "hook" in where else scale_in_forward
            scale(block.video_ff if "inner" in where else block, weight)
        try:
            v = model.policy.velocity(x, model.policy.condition(sigma, text))
            v.backward(upstream)
        finally:
            if handle is not None:
                handle.remove()
        found.append(
            [
                weight.grad,
                *(p.grad for p in model.policy.parameters().values() if p.grad is not None),
            ]
        )
    assert len(found[0]) == len(found[1]) > 30
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("mode", ["attention", "full"])
def test_a_hook_that_comes_after_the_forward_reads_the_recomputed_result(mode: str) -> None:
    """As the next forward gives it."""
    x, sigma, text = inputs(PROMPTS)
    model, seen = tiny_model(settings()), list[Tensor]()
    model.set_checkpointing(CheckpointPlan(mode))
    layer = model.policy.forward.blocks[1].video_ff
    v = model.policy.velocity(x, model.policy.condition(sigma, text))
    layer.register_forward_hook(lambda module, given, out: seen.append(out.detach()))
    v.backward(torch.randn_like(v))
    model.policy.velocity(x, model.policy.condition(sigma, text))
    assert torch.equal(*seen)


@pytest.mark.parametrize("mode", ["attention", "full"])
def test_a_graph_that_is_kept_has_a_second_backward(mode: str) -> None:
    """As with PyTorch's own checkpointing: each backward recomputes again."""
    transformer = tiny_model(settings()).policy.networks["transformer"]
    set_checkpointing(transformer, mode)
    block, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(2, 4, requires_grad=True)
    y = transformer._gradient_checkpointing_func(block, x).sum()
    first, second = torch.autograd.grad(y, x, retain_graph=True), torch.autograd.grad(y, x)
    assert torch.equal(first[0], second[0])


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("mode", ["attention", "full"])
def test_blocks_may_differ_in_mode(mode: str, count: int) -> None:
    """The first ones recompute more. The gradients are those without checkpointing, to the bit."""
    x, sigma, text = inputs(PROMPTS)
    upstream, found = torch.randn(x.shape), []
    for chosen in (CheckpointPlan("none"), CheckpointPlan(mode, count, 3)):
        model = tiny_model(settings(model__tuning="full"))
        assert len(model.policy.block_list()) == 3
        model.set_checkpointing(chosen)
        forward, again = Blocks(model), Blocks(model)
        with forward:
            v = model.policy.velocity(x, model.policy.condition(sigma, text))
        with again:
            v.backward(upstream)
        found.append([p.grad for p in model.policy.parameters().values() if p.grad is not None])
    assert forward.ran == [0, 1, 2]
    # `full` in some: `attention` in the others
    recomputed = range(count) if mode == "attention" else range(3)
    assert again.ran == list(reversed(recomputed))
    assert len(found[0]) > 50
    assert all(map(torch.equal, *found))


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("mode", ["attention", "full"])
def test_recomputation_gives_the_same_gradients_on_a_gpu(mode: str) -> None:
    x, sigma, text = inputs(PROMPTS)
    x, sigma = x.cuda(), sigma.cuda()
    upstream, found = torch.randn_like(x), []
    for chosen in (CheckpointPlan("none"), CheckpointPlan(mode, 2, 3)):
        model = tiny_model(settings(), torch.bfloat16)
        model.policy.transformer.cuda()
        model.set_checkpointing(chosen)
        v = model.policy.velocity(x, model.policy.condition(sigma, text))
        v.backward(upstream.to(v.dtype))
        found.append([p.grad for p in model.policy.parameters().values() if p.grad is not None])
    assert len(found[0]) > 50
    assert all(map(torch.equal, *found))


def test_each_of_several_networks_recomputes_its_share() -> None:
    """A forward may run one of them alone, as experts of noise levels do: its activations have to
    fit too."""
    x, sigma, text = inputs(PROMPTS)
    models = [tiny_model(settings()) for _ in range(2)]
    first, second = (model.policy for model in models)
    first.networks["second"] = second.transformer
    assert len(first.block_list()) == 6
    models[0].set_checkpointing(CheckpointPlan("attention", 3, 6))
    for model in models:
        again = Blocks(model)
        v = model.policy.velocity(x, model.policy.condition(sigma, text))
        with again:
            v.backward(torch.randn_like(v))
        assert again.ran == [1, 0]  # of three


class Blocks:
    """Which blocks run within the context."""

    def __init__(self, model: Model) -> None:
        self.blocks, self.ran = model.policy.forward.blocks, list[int]()

    def __enter__(self) -> None:
        self.hooks = [
            block.register_forward_pre_hook(lambda *_, number=number: self.ran.append(number))
            for number, block in enumerate(self.blocks)
        ]

    def __exit__(self, *_: object) -> None:
        for hook in self.hooks:
            hook.remove()


@pytest.mark.parametrize(
    ("room", "mode", "count", "text"),
    [
        (100, "none", 10, "none"),
        (99, "attention", 1, "attention in 1 of 10 blocks"),
        (31, "attention", 9, "attention in 9 of 10 blocks"),
        (20, "attention", 10, "attention"),
        (19, "full", 1, "full in 1 of 10 blocks"),
        (10, "full", 10, "full"),
        (9, "full", 10, "full"),
    ],
)
def test_as_few_blocks_recompute_as_memory_needs(
    room: int, mode: str, count: int, text: str
) -> None:
    needed = {"none": 100.0, "attention": 20.0, "full": 10.0}
    chosen = fastest_that_fits(needed, room, 10)
    assert (chosen, str(chosen)) == (CheckpointPlan(mode, count, 10), text)
    assert chosen.mean(needed) <= max(room, 10)
    assert (
        chosen.count == 1 or CheckpointPlan(mode, count - 1, 10).mean(needed) > room or count == 10
    )


@pytest.mark.parametrize(
    "name",
    [
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_efficient_attention",
        "flash_attn::_flash_attn_forward",
        "flash_attn_3::fwd",
        "xformers_flash::flash_fwd",
        "xformers_flash3::flash_fwd",
    ],
)
def test_the_kernels_of_every_backend_are_known(name: str) -> None:
    assert is_attention(name)
    assert not is_attention(name.replace("forward", "backward").replace("fwd", "bwd") + "_backward")


@pytest.mark.parametrize(
    "operator", ["sageattention::qk_int8", "aiter::fmha_fwd", "aten::flex_attention"]
)
def test_a_backend_names_its_operators(operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mode `attention` would compute it again otherwise, and the plan would count other memory."""
    assert not is_attention(operator)
    monkeypatch.setitem(
        ATTENTION, "mine", AttentionRow(attend=ATTENTION["sdpa"], operators=(operator,))
    )
    assert is_attention(operator)


def test_auto_takes_the_fastest_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings(
        model__gradient_checkpointing="auto",
        kl__strategy="none",
        sampling__offload_trajectories=True,
    )
    model = tiny_model(settings())
    needed = model.spec.cost(config).activations
    needs = [needed[mode] for mode in MODES]
    assert needs == sorted(needs, reverse=True)
    trained = sum(p.numel() for p in model.policy.parameters().values())
    coming = (4 + 8) * trained  # gradients, and the two moments of AdamW
    coming += adapter_copies(model)
    for mode, need in zip(MODES, needs):
        slower = MODES[min(MODES.index(mode) + 1, 2)]
        for spare, expected in (
            (1, CheckpointPlan(mode, 3, 3)),
            (-1, CheckpointPlan(slower, 1 if slower != mode else 3, 3)),
        ):
            free = (need + coming + spare) / fit.MEMORY_SHARE
            monkeypatch.setattr(fit, "free_bytes", lambda device, free=free: free)
            assert fit.choose_checkpointing(ResolvedConfig(config), model) == (expected, 0)
    asked = settings(model__gradient_checkpointing="attention")
    assert fit.choose_checkpointing(ResolvedConfig(asked), model)[0] == CheckpointPlan("attention")


def adapter_copies(model: Model) -> int:
    """Bytes of the adapters' copies in the buffers of fused linears, in float32."""
    return stream_sizes(block_sizes(model.policy, 4), 0).copies


def test_auto_leaves_room_for_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which are recorded on a GPU, in what is left; without them `auto` recomputes less."""
    model = tiny_model(settings())
    config = settings(
        model__gradient_checkpointing="auto",
        kl__strategy="none",
        sampling__offload_trajectories=True,
    )
    cost, trained = (
        model.spec.cost(config),
        sum(p.numel() for p in model.policy.parameters().values()),
    )
    graphs = fit.graph_bytes(cost, ResolvedConfig(config))
    taken = 12 * trained + adapter_copies(model)
    free = (cost.activations["none"] + graphs + taken - 1) / fit.MEMORY_SHARE
    monkeypatch.setattr(fit, "free_bytes", lambda device: free)
    model.policy.states.device = torch.device("cuda")
    chosen, left = fit.choose_checkpointing(ResolvedConfig(config), model)
    assert chosen == CheckpointPlan("attention", 1, 3)
    assert left >= graphs
    config = config.replace({"sampling.cuda_graphs": False})
    assert fit.choose_checkpointing(ResolvedConfig(config), model) == (
        CheckpointPlan("none", 3, 3),
        0,
    )


def test_auto_sets_nothing_aside_for_graphs_that_do_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step of a large batch takes more than all recomputation frees. In the plan too."""
    config = settings(
        model__gradient_checkpointing="auto", kl__strategy="none",
        sampling__offload_trajectories=True,
        sampling__batch_size=1000,
    )  # fmt: skip
    model = tiny_model(settings())
    cost, trained = (
        model.spec.cost(config),
        sum(p.numel() for p in model.policy.parameters().values()),
    )
    assert cost.step > cost.activations["none"] - cost.activations["full"]
    taken = 12 * trained + adapter_copies(model)
    free = (cost.activations["none"] + taken + 1) / fit.MEMORY_SHARE
    monkeypatch.setattr(fit, "free_bytes", lambda device: free)
    model.policy.states.device = torch.device("cuda")
    chosen, left = fit.choose_checkpointing(ResolvedConfig(config), model)
    assert chosen == CheckpointPlan("none", 3, 3)
    assert left < cost.step
    weights = sum(p.nbytes for _, p in model.policy.named_parameters()) + 4.0 * cost.decoder_weights
    memory = plan(config, model.spec, gpu_memory=free + weights).memory
    assert "activations, auto chooses none" in memory
    assert "CUDA graphs" not in memory


@pytest.mark.parametrize(
    ("name", "ranks", "gigabytes"), [("-full", 8, 80), ("-full", 64, 52), ("", 1, 80)]
)
def test_a_run_takes_the_mode_of_its_plan(
    name: str, ranks: int, gigabytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also before ZeRO-3 shards, when each GPU holds all weights of the published model."""
    config = load(Path(__file__).parent.parent / "configs" / f"hunyuanvideo15-480p{name}.yaml")
    spec = find_spec(config.model.path)
    policy = meta_policy(spec, config.model)
    model = Model(spec=spec, policy=policy, decoder=cast(Decoder, None))
    if config.model.trains_adapter:  # as loaded
        for _, p in policy.named_parameters():
            p.data = p.data if p.requires_grad else p.data.bfloat16()
    loaded = (
        sum(p.nbytes for _, p in policy.named_parameters()) + 2 * spec.cost(config).decoder_weights
    )
    monkeypatch.setattr(fit, "free_bytes", lambda device: int(1e9 * gigabytes - loaded))
    monkeypatch.setattr(fit, "world_size", lambda: ranks)
    policy.states.device = torch.device("cuda")
    mode, left = fit.choose_checkpointing(ResolvedConfig(config), model)
    memory, cost = (
        plan(config, spec, ranks=ranks, gpu_memory=1e9 * gigabytes).memory,
        spec.cost(config),
    )
    assert f"activations, auto chooses {mode}" in memory
    assert ("CUDA graphs" in memory) == (left >= cost.step + cost.context)


@pytest.mark.parametrize("value", [True, False])
def test_the_switch_of_before_is_told_its_new_name(value: bool) -> None:
    expected = "full" if value else "none"
    with pytest.raises(UserError, match=f"model.gradient_checkpointing = {value}.*{expected}"):
        settings(model__gradient_checkpointing=value)
