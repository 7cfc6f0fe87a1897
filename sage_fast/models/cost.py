"""Compute and memory that a model takes, counted on the meta device: no memory, no weights.

A family writes no formulas. Its own policy runs there, as it is trained, with few blocks: every
count is linear in the number of blocks from the second one on, so that two runs give that of all.
tests/test_cost.py compares the counts with tensors that are alive on a CPU.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from sage_fast.config.engines import ENGINES
from sage_fast.config.schema import Config, ModelConfig
from sage_fast.models.attention.backends import ATTENTION, is_attention
from sage_fast.models.attention.sequence import SequenceParallel
from sage_fast.models.checkpointing import MODES, set_checkpointing
from sage_fast.models.interface import ConditionTable, Inputs
from sage_fast.models.policy import Policy
from sage_fast.models.trainable import make_trainable
from sage_fast.util.errors import UserError, first_line
from sage_fast.util.live_bytes import LiveBytes

if TYPE_CHECKING:
    from sage_fast.models.spec import Spec

FEW_BLOCKS = 2
"""Number of blocks from which on counts are linear in it. A first block differs from the others: no
block before it waits for gradients."""

MATMULS = (F.linear, F.conv1d, F.conv2d, F.conv3d)
"""Functions that read a module's weight, which autocast runs in 16 bits."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """Compute and memory cost of one sample.

    Attributes:
        forward: FLOPs of one forward of the network, with `Spec.prompt_tokens` tokens of a prompt.
        attention: FLOPs of attention within `forward`.
        block_ends: FLOPs within `forward` of the blocks' last matmuls, which recomputation skips
            with a frozen base.
        decode: FLOPs of decoding the video.
        decoder_weights: number of elements of the autoencoder.
        activations: checkpointing mode -> bytes per rank of a micro-batch's activations and their
            gradients.
        step: bytes that a CUDA graph of a denoising step keeps for `sampling.batch_size` samples:
            its activations, which need no gradients, and the conditions that do not depend on the
            prompt.
        context: bytes that a graph of a further text length adds: a prompt's own conditions at
            every step.
    """

    forward: float
    attention: float
    decode: float
    decoder_weights: int
    activations: Mapping[str, float]
    step: float
    context: float
    block_ends: float = 0.0

    def graphs_within(self, room: float, most: float) -> float:
        """Return the bytes that CUDA graphs keep of `room`: up to `most`, and 0 if not even one
        fits."""
        return min(room, most) if room >= self.step + self.context else 0.0


def counted_cost(spec: Spec, config: Config) -> Cost:
    """Count the cost of one sample.

    Raises:
        UserError: the model reads values of tensors, which the meta device does not have.
    """
    case = _Case.of(spec, None, spec.latent_shape(config.sampling))
    forward, attention = _forward_flops(case)
    return Cost(
        forward=forward,
        attention=attention,
        decode=_decode_flops(case),
        decoder_weights=sum(p.numel() for p in spec.vae.parameters()),
        **counted_memory(spec, config),
    )


def counted_memory(spec: Spec, config: Config) -> dict[str, Any]:
    """Count the bytes of `Cost`: `activations`, `step` and `context`.

    Raises:
        UserError: as of `counted_cost`.
    """
    sampling = config.sampling
    latent = spec.latent_shape(sampling)
    case = _Case.of(spec, config.model, latent, sampling.guidance_scale)
    rollout = sampling.batch_size, sampling.steps
    return {
        "activations": Activations(
            spec,
            config.model,
            latent,
            batch_size=config.train.batch_size,
            guidance=sampling.guidance_scale,
            further=_float32_gradient(spec, config),
        ),
        "step": _step_bytes(case, *rollout, _casts(config)),
        "context": _context_bytes(case, *rollout),
    }


class Activations(Mapping[str, float]):
    """`Cost.activations`. A mode is counted when it is asked for: most runs need one of them.

    Args:
        spec: the model.
        model: its settings.
        latent: (C, T, H, W) of a sample.
        batch_size: transitions of a micro-batch.
        guidance: scale of the guidance.
        further: bytes that each mode takes beside those that are counted.
    """

    def __init__(
        self,
        spec: Spec,
        model: ModelConfig,
        latent: tuple[int, int, int, int],
        *,
        batch_size: int = 1,
        guidance: float = 1.0,
        further: float = 0.0,
    ) -> None:
        self._case = _Case.of(spec, model, latent, guidance)
        self._batch_size = batch_size
        self._sharing = model.sequence_parallel
        self._further = further

    def __getitem__(self, mode: str) -> float:
        if mode not in MODES:
            raise KeyError(mode)
        counted = _activation_bytes(self._case, self._batch_size, self._sharing, mode)
        return counted + self._further

    def __iter__(self) -> Iterator[str]:
        return iter(MODES)

    def __len__(self) -> int:
        return len(MODES)


def _float32_gradient(spec: Spec, config: Config) -> float:
    """Return the bytes of the gradient in the queries that an attention kernel sums in float32,
    within itself."""
    shape = spec.attention_shape(config.sampling)
    row = ATTENTION.get(config.model.attention)
    if shape is None or row is None or not row.sums_dq_in_float32:
        return 0.0
    tokens, heads, width = shape
    own_tokens = -(-tokens // config.model.sequence_parallel)
    return 4.0 * config.train.batch_size * own_tokens * heads * width


def _casts(config: Config) -> bool:
    """Whether autocast copies trained weights to 16 bits for each forward."""
    model = config.model
    stored = ENGINES[config.train.engine].stored_bytes(model.element_bytes)
    return not model.trains_adapter and stored > model.element_bytes


# -- the counts ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Case:
    """What a count depends on; equal cases have equal counts.

    Attributes:
        spec: the model; in comparisons, `identity` stands for it.
        model: the settings of what is trained; None counts the network without an adapter, in
            float32.
        latent: (C, T, H, W) of a sample.
        guidance: scale of the guidance.
    """

    spec: Spec = dataclasses.field(compare=False)
    identity: tuple[object, ...]
    model: tuple[tuple[str, Any], ...] | None
    latent: tuple[int, int, int, int]
    guidance: float

    @classmethod
    def of(
        cls,
        spec: Spec,
        model: ModelConfig | None,
        latent: tuple[int, int, int, int],
        guidance: float = 1.0,
    ) -> _Case:
        trained = None
        if model is not None:
            # What these say changes no count, or is an argument of its own.
            model = dataclasses.replace(
                model,
                weights=None,
                attention="auto",
                gradient_checkpointing="auto",
                stream_blocks="auto",
                sequence_parallel=1,
            )
            trained = tuple(vars(model).items())
        configs = json.dumps(spec.configs, default=str, sort_keys=True)
        return cls(
            spec=spec,
            identity=(type(spec), spec.path, configs, spec.prompt_tokens),
            model=trained,
            latent=latent,
            guidance=guidance,
        )


@functools.lru_cache(maxsize=64)
def _forward_flops(case: _Case) -> tuple[float, float]:
    """Return the FLOPs of one forward of one sample, and those of attention within it."""

    def count(policy: Policy) -> tuple[float, float]:
        with _on_meta(case), torch.no_grad():
            x, inputs = _inputs(policy, case, batch=1)
            with FlopCounterMode(display=False) as counter:
                policy.velocity(x, inputs)
        by_operator = counter.get_flop_counts()["Global"]
        attention = sum(work for name, work in by_operator.items() if is_attention(str(name)))
        return float(counter.get_total_flops()), float(attention)

    policies = _few_blocks(case)
    forward = _of_all_blocks(policies, lambda policy: count(policy)[0])
    attention = _of_all_blocks(policies, lambda policy: count(policy)[1])
    return forward, attention


@functools.lru_cache(maxsize=64)
def _decode_flops(case: _Case) -> float:
    """Return the FLOPs of decoding one video."""
    vae = case.spec.meta("vae").requires_grad_(False).eval()
    with _on_meta(case), torch.no_grad(), FlopCounterMode(display=False) as counter:
        case.spec.decoder(vae)(torch.empty(1, *case.latent))
    return float(counter.get_total_flops())


@functools.lru_cache(maxsize=256)
def _activation_bytes(case: _Case, batch: int, sharing: int, mode: str) -> float:
    """Return the peak bytes of a micro-batch's activations and their gradients on a rank.

    Args:
        batch: transitions of the micro-batch.
        sharing: ranks that share a sample. The policy runs as one of them, on its own tokens.
        mode: one of `MODES`.
    """

    def count(policy: Policy) -> float:
        policy.sequence = _LoneRank(sharing) if sharing > 1 else None
        for network in policy.networks.values():
            set_checkpointing(network, mode)
        for p in policy.parameters().values():
            p.grad = torch.empty_like(p)  # as in every micro-batch but the first
        with _on_meta(case), torch.enable_grad(), policy.at_guidance(case.guidance):
            x = torch.empty(batch, *case.latent)
            steps = torch.zeros(batch, dtype=torch.int64)
            with _LiveOnMeta(), torch.no_grad():
                table, keys = _conditions(policy, case, batch, steps=1)
                policy.velocity(x, table.at(keys, steps))  # makes what stays, such as rotary tables
            with _LiveOnMeta() as live:
                v = policy.guided_velocity(x, table.at(keys, steps))
                _backward(v.float().square().mean())
        return float(live.peak)

    return _of_all_blocks(_few_blocks(case), count)


@functools.lru_cache(maxsize=256)
def _step_bytes(case: _Case, batch: int, steps: int, casts: bool) -> float:
    """Return the peak bytes of a denoising step, with the conditions that all prompts share.

    Args:
        batch: samples of the rollout batch, which have one prompt.
        steps: steps of the schedule.
        casts: whether autocast keeps copies in 16 bits of the weights that matmuls read, as it does
            within a graph.
    """

    def count(policy: Policy) -> float:
        policy.sequence = None
        with _on_meta(case) as functions, torch.no_grad(), policy.at_guidance(case.guidance):
            x = torch.empty(batch, *case.latent)
            step = torch.zeros(1, dtype=torch.int64)
            with _LiveOnMeta():
                table, keys = _conditions(policy, case, 1, steps)
                conditions = table.of(keys * batch)
                functions.weights.clear()
                policy.velocity(x, conditions.at(step))  # makes what stays, such as rotary tables
            with _LiveOnMeta() as live:
                velocities = policy.velocities(x, conditions.at(step))
            del velocities
        copies = 2 * sum(p.numel() for p in functions.weights.values()) if casts else 0
        shared = _bytes(conditions) - _own_bytes(policy, case, batch, steps)
        return float(live.peak + shared + copies)

    return _of_all_blocks(_few_blocks(case), count)


@functools.lru_cache(maxsize=256)
def _context_bytes(case: _Case, batch: int, steps: int) -> float:
    """Return the bytes of a prompt's own conditions at every step."""
    return _of_all_blocks(
        _few_blocks(case), lambda policy: float(_own_bytes(policy, case, batch, steps))
    )


def _own_bytes(policy: Policy, case: _Case, batch: int, steps: int) -> int:
    """Return the bytes of a prompt's own conditions: those that another prompt's have not.

    Those of the unconditional pass are not among them, since all prompts have these.
    """
    with _on_meta(case), torch.no_grad(), policy.at_guidance(1.0):
        table, (one, other) = _conditions(policy, case, 2, steps)
        conditions = table.of([one] * batch)
        shared = {_storage(leaf) for leaf in _tensors(table.of([other] * batch))}
        return sum(leaf.nbytes for leaf in _tensors(conditions) if _storage(leaf) not in shared)


def _bytes(conditions: Any) -> int:
    return sum(leaf.nbytes for leaf in _tensors(conditions))


def _tensors(conditions: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(conditions) if isinstance(leaf, Tensor)]


def _storage(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


# -- a policy on the meta device -------------------------------------------------------------------


@functools.lru_cache(maxsize=8)
def _few_blocks(case: _Case) -> list[tuple[int, Policy]]:
    """Return policies with few blocks, each with its factor: the sum of factor x count is the count
    of all blocks.

    One policy has `FEW_BLOCKS` in each network, and the others one block more in one of them.
    """
    spec = case.spec
    networks = {part: spec.meta(part) for part in spec.networks}
    blocks = spec.policy(networks, dtype=torch.float32, guidance_scale=1.0).blocks
    missing = {}
    for part, network in networks.items():
        missing[part] = max(len(getattr(network, blocks)) - FEW_BLOCKS, 0)
        del getattr(network, blocks)[FEW_BLOCKS + 1 :]

    def cut(longer: str | None) -> Policy:
        few = copy.deepcopy(networks)
        for part, network in few.items():
            if part != longer:
                del getattr(network, blocks)[FEW_BLOCKS:]
        return _as_trained(case, few)

    policies = [(1 - sum(missing.values()), cut(None))]
    policies += [(count, cut(part)) for part, count in missing.items() if count]
    return policies


def _as_trained(case: _Case, networks: Mapping[str, Any]) -> Policy:
    """Return the policy over networks on the meta device, in the dtypes in which forwards read
    weights."""
    if case.model is None:
        for network in networks.values():
            network.requires_grad_(False).eval()
        return case.spec.policy(networks, dtype=torch.float32, guidance_scale=1.0)
    model = ModelConfig(**dict(case.model))
    dtype = getattr(torch, model.dtype)
    with torch.device("meta"):
        for network in networks.values():
            nn.Module.to(network, dtype)
            make_trainable(case.spec, network.eval(), model)
        policy = case.spec.policy(networks, dtype=dtype, guidance_scale=1.0)
    with policy._autocast():
        is_cast = torch.is_autocast_enabled("cpu")
    if is_cast:  # the copies are the engine's memory (parallel/engine_memory.py)
        for network in networks.values():
            nn.Module.to(network, dtype)
    return policy


def _of_all_blocks(
    policies: Iterable[tuple[int, Policy]], count: Callable[[Policy], float]
) -> float:
    return sum(factor * count(policy) for factor, policy in policies if factor)


def _conditions(
    policy: Policy, case: _Case, prompts: int, steps: int
) -> tuple[ConditionTable, list[int]]:
    """Return the conditions of some prompts at the steps of a schedule, and the prompts' keys."""
    condition = dataclasses.replace(case.spec.assumed_condition(), negative=prompts)
    embeddings = dict.fromkeys(range(prompts + 1), condition)
    return policy.conditioning_table(torch.empty(steps), embeddings), list(range(prompts))


def _inputs(policy: Policy, case: _Case, batch: int) -> tuple[Tensor, Inputs]:
    """Return latents and conditions of a batch at one step."""
    table, keys = _conditions(policy, case, batch, steps=1)
    return torch.empty(batch, *case.latent), table.of(keys).at(torch.zeros(1, dtype=torch.int64))


def _backward(loss: Tensor) -> None:
    """Run the backward of a loss within the present modes.

    `Tensor.backward` would leave the modes of functions for it, where a recomputation calls
    attention again.
    """
    _engine_run_backward(
        (loss,), (torch.ones_like(loss),), False, False, (),
        allow_unreachable=True, accumulate_grad=True,
    )  # fmt: skip


@contextlib.contextmanager
def _on_meta(case: _Case) -> Iterator[_Functions]:
    """Make tensors on the meta device, and run what it cannot.

    Raises:
        UserError: the model does what the device cannot do.
    """
    try:
        with torch.device("meta"), _Functions() as functions:
            yield functions
    except UserError:
        raise
    except Exception as error:  # whatever the code of a family raises
        raise UserError(
            f"model.path = {case.spec.path!r}: the cost of {case.spec.title} cannot be counted on "
            f"the meta device, where tensors have no values: {first_line(error)}; expected a "
            "policy that reads none, as within a CUDA graph; the nearest is a Spec.cost of its own"
        ) from error


class _Functions(TorchFunctionMode):
    """On the meta device, attention and RMSNorm are those of a GPU, and ranks exchange nothing.

    Attributes:
        weights: address -> weight that a matmul has read.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weights: dict[int, nn.Parameter] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return _attention(*args, **(kwargs or {}))
        if func is F.rms_norm:
            return _FusedRmsNorm.apply(*args, **(kwargs or {}))
        if func is dist.all_to_all_single:
            return None
        if func in MATMULS:
            self.weights |= {id(p): p for p in args if isinstance(p, nn.Parameter) and p.ndim > 1}
        return func(*args, **(kwargs or {}))


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
    """Return attention's output as a fused kernel makes and saves it, whatever the mask.

    PyTorch's own choice for the meta device has a matrix of all pairs of tokens.
    """
    if query.ndim == 3:
        return _attention(*(t[None] for t in (query, key, value)))[0]
    if query.shape[-1] != value.shape[-1]:
        operator = torch.ops.aten._scaled_dot_product_efficient_attention
        return operator(query, key, value, None, True)[0]
    return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value)[0]


class _FusedRmsNorm(torch.autograd.Function):
    """`F.rms_norm` as a GPU's kernel allocates and saves; without one PyTorch takes eight steps."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        normalized_shape: Sequence[int],
        weight: Tensor | None = None,
        eps: float | None = None,
    ) -> Tensor:
        rows = x.shape[: x.ndim - len(normalized_shape)]
        ctx.save_for_backward(x, weight, x.new_empty(rows, dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, _ = ctx.saved_tensors
        needs_weight = weight is not None and ctx.needs_input_grad[2]
        return torch.empty_like(x), None, torch.empty_like(weight) if needs_weight else None, None


class _Group:
    """As many ranks as share a sample."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size


class _LoneRank(SequenceParallel):
    """The first of some ranks that share samples, without the others.

    Args:
        size: number of the ranks.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.rank = 0
        self._group = cast(Any, _Group(size))

    def whole(self, part: Tensor, count: int) -> Tensor:
        return torch.cat([part] * self.size, dim=1)[:, :count]


class _LiveOnMeta(LiveBytes):
    """Live bytes on the meta device, where most of the time goes into finding shapes: an operator
    that has had such arguments before gets results like those."""

    known: ClassVar[dict[Any, tuple[Any, list[Any]] | None]] = {}
    """(operator, its arguments) -> class and shapes of its results; None if it has to run."""

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        key = (func, _shape(args), _shape(tuple(kwargs.items())))
        if key not in self.known:
            out = func(*args, **kwargs)
            self.known[key] = self._repeatable(func, args, kwargs, out)
            return out
        repeatable = self.known[key]
        if repeatable is None:
            return func(*args, **kwargs)
        container, shapes = repeatable
        made = [
            torch.empty_strided(size, stride, dtype=dtype, device="meta")
            for size, stride, dtype, _ in shapes
        ]
        return made[0] if container is None else container(made)

    @staticmethod
    def _repeatable(func: Any, args: Any, kwargs: Any, out: Any) -> Any:
        """Return the shapes of the results; None if these are more than new tensors."""
        results = out if isinstance(out, tuple | list) else [out]
        schema = func._schema
        changes = schema.is_mutable or any(result.alias_info for result in schema.returns)
        arguments = {_storage(leaf) for leaf in _tensors((args, kwargs))}
        is_new = all(
            isinstance(result, Tensor) and result.is_meta and _storage(result) not in arguments
            for result in results
        )
        if changes or not is_new:
            return None
        return (None if out is results[0] else type(out)), [_shape(result) for result in results]


def _shape(argument: Any) -> Any:
    """Return what of an argument tells the shapes of results."""
    if isinstance(argument, Tensor):
        return argument.shape, argument.stride(), argument.dtype, argument.device
    if isinstance(argument, tuple | list):
        return tuple(map(_shape, argument))
    return argument
