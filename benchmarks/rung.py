"""One size of `sage-fast bench rollout`: its inputs and its contenders."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from diffusers import HunyuanVideo15Transformer3DModel
from sage_fast.benchmarks.stock import (
    MERGED,
    STOCK,
    StockDecoder,
    StockPolicy,
    load_kernel,
    merged_copy,
)
from torch import Tensor

from sage_fast.algorithm.flops import training_flops
from sage_fast.algorithm.transitions import sigma_schedule, transition_table
from sage_fast.config.schema import DType, ModelConfig
from sage_fast.models.attention.backends import ATTENTION, usable
from sage_fast.models.attention.trial import Use, fastest, measure_attention
from sage_fast.models.checkpointing import (
    MODES,
    CheckpointPlan,
    fastest_that_fits,
    set_checkpointing,
)
from sage_fast.models.cost import Activations
from sage_fast.models.hunyuan15.conditioning import TextEmbedding
from sage_fast.models.hunyuan15.decode import VideoDecoder
from sage_fast.models.hunyuan15.policy import HunyuanVideo15Policy
from sage_fast.models.hunyuan15.spec import (
    HunyuanVideo15,
    attention_flops,
    block_end_flops,
    decode_flops,
    forward_flops,
)
from sage_fast.models.random_weights import random_module
from sage_fast.models.spec import Spec
from sage_fast.models.trainable import make_trainable
from sage_fast.parallel.fit import MEMORY_SHARE
from sage_fast.rollout.graphs import StepGraphs
from sage_fast.rollout.loop import initial_latents, rollout
from sage_fast.rollout.recorder import CudaRecorder
from sage_fast.rollout.step import denoise
from sage_fast.testbed.tiny_model import LATENT_SHAPE, Testbed
from sage_fast.util.captions import PromptKey
from sage_fast.util.environment import free_bytes
from sage_fast.util.errors import in_one_line

ATTENTIONS = {"eager cudnn": "cudnn", "eager flash4": "flash4"}
"""Path -> attention of our forward, where that is not the fastest, which `eager` takes."""
OURS = ("eager", *ATTENTIONS)
FORWARDS = (*STOCK, *MERGED, *OURS)
TRAINED = {
    "train full": "full",
    "train attention": "attention",
    "train auto": "auto",
    "train none": "none",
}
"""Part that times a trained step -> its `model.gradient_checkpointing`. diffusers' checkpointing
recomputes every block or none."""
HOST = "host"
"""Part that times the host in a forward of an eighth of the video tokens: what bounds eight GPUs
that share a sample (`model.sequence_parallel: 8`). One process has no ranks to exchange with, so
the exchanges are left out; the text is whole."""
GROUPS = {"train": tuple(TRAINED)}
"""Name that `--part` accepts -> its parts."""
PARTS = {
    "forward": FORWARDS,
    "step": (*FORWARDS, "graphed"),
    "rollout": (*FORWARDS, "graphed"),
    "train full": (*STOCK, *OURS),
    "train attention": OURS,
    "train auto": OURS,
    "train none": (*STOCK, *OURS),
    "decode": ("contiguous", "channels last", "stock"),
    HOST: ("eager",),
}
"""part -> the paths that it can take. The first two paths of decode are ours, named by memory
layout. The stock one comes last: it cannot tile at 480p, and may fail in a way after which nothing
runs."""
PATHS = tuple(dict.fromkeys(path for paths in PARTS.values() for path in paths))


@dataclasses.dataclass(frozen=True)
class Size:
    """Latents `[batch, C, *space]`, the number of text tokens, and a rollout's steps and guidance
    (1: one pass)."""

    batch: int
    space: tuple[int, int, int]
    text_tokens: int = HunyuanVideo15.text_tokens
    testbed: bool = False
    steps: int = 10
    guidance: float = 1.0

    @property
    def passes(self) -> int:
        """Forwards of a step."""
        return 1 + (self.guidance != 1)


def checkpointing_of(part: str) -> str:
    """Return the `model.gradient_checkpointing` that a part runs with."""
    return TRAINED.get(part, MODES[0])


SIZES = {
    "tiny": Size(2, (2, 2, 3), 3, testbed=True),
    "testbed batch 1": Size(1, LATENT_SHAPE[1:], 7, testbed=True),
    "testbed batch 32": Size(32, LATENT_SHAPE[1:], 7, testbed=True),
    "5x16x16": Size(1, (5, 16, 16)),
    "9x30x52": Size(1, (9, 30, 52)),
    "480p 81 frames": Size(1, (21, 30, 52)),
    "480p 121 frames": Size(1, (31, 30, 52), steps=50, guidance=6.0),
}
"""The last one is that of HunyuanVideo 1.5's own defaults, which others time: a video is its
`rollout` and `decode`."""
GPU_SIZES = ("5x16x16", "9x30x52", "480p 81 frames")
CPU_SIZES = ("testbed batch 1", "testbed batch 32")
GATE_SPACE = (3, 8, 8)
"""Largest latents (T, H, W) that the decoders' gate compares: a layout that is correct there is
correct everywhere."""


def spec_of(testbed: bool) -> HunyuanVideo15:
    """Return the spec of a rung's model."""
    return Testbed() if testbed else HunyuanVideo15()


def random_transformer(
    testbed: bool, device: torch.device, dtype: torch.dtype
) -> HunyuanVideo15Transformer3DModel:
    """Return the transformer with random weights, allocated on the device, and a nonzero LoRA
    adapter."""
    config = ModelConfig(lora_rank=16 if testbed else 64, lora_alpha=16)
    return random_network(spec_of(testbed), config, device, dtype)


def random_network(
    spec: Spec, config: ModelConfig, device: torch.device, dtype: torch.dtype
) -> Any:
    """Return the main network of a family with random weights, allocated on the device, and an
    adapter of which nothing is 0."""
    network = random_module(spec, spec.main_network(), dtype, device)
    make_trainable(spec, network, config)
    generator = torch.Generator(device=device).manual_seed(0)
    with torch.no_grad():
        for name, p in network.named_parameters():
            if ".lora_B." in name:
                p.normal_(std=0.02, generator=generator)
    return network


def with_own_adapter(transformer: Any, dtype: torch.dtype) -> Any:
    """Return a transformer with the same frozen weights and an adapter of its own in `dtype`, for
    stock.

    Its best case: PEFT computes a float32 adapter in float32, and autocast normalises in float32.
    """
    own = copy.deepcopy(
        transformer, {id(p): p for p in transformer.parameters() if not p.requires_grad}
    )
    for p in own.parameters():
        if p.requires_grad:
            p.data = p.data.to(dtype)
    return own


def random_decoders(
    testbed: bool, device: torch.device, dtype: torch.dtype
) -> dict[str, VideoDecoder]:
    """Return path of `decode` -> decoder, all with the same random weights; each has its own copy
    (layouts differ)."""
    vae = random_module(spec_of(testbed), "vae", dtype, device).requires_grad_(False)
    contiguous, channels_last = (
        VideoDecoder(copy.deepcopy(vae), channels_last=last) for last in (False, True)
    )
    channels_last.plans = contiguous.plans  # the same portions, however much memory is free by then
    stock = StockDecoder(vae, batches=testbed)
    return {"stock": stock, "contiguous": contiguous, "channels last": channels_last}


def eighth(tokens: int) -> int:
    """Return the tokens of one of eight ranks that share a sample."""
    return -(-tokens // 8)


def part_flops(config: Any, size: Size, part: str, chosen: CheckpointPlan | None) -> float:
    """Return the FLOPs of a part but `decode` with the unpadded prompt, by the plan's formulas.

    Args:
        config: that of the transformer.
        size: a row of `SIZES`.
        part: a key of `PARTS`.
        chosen: what the backward recomputes; None: model FLOPs, without a recomputation.
    """
    tokens = math.prod(size.space)
    if part == HOST:
        tokens = eighth(tokens)
    passes = size.batch * size.passes
    forward = passes * forward_flops(config, tokens, size.text_tokens)
    if part in TRAINED:
        attention = passes * attention_flops(config, tokens, size.text_tokens)
        ends = passes * block_end_flops(config, tokens)

        def of_mode(mode: str | None) -> float:
            return training_flops(
                forward, attention, checkpointing=mode, trains_adapter=True, block_ends=ends
            )

        if chosen is None:
            return of_mode(None)
        return chosen.mean({mode: of_mode(mode) for mode in MODES})
    return forward * (size.steps if part == "rollout" else 1)


class Rung:
    """A size, its inputs, and the contenders as functions without arguments.

    Args:
        transformer: shared by all contenders.
        size: size of the inputs.
        decoders: path -> decoder, from `random_decoders`; needed only for the part `decode`.
    """

    def __init__(
        self,
        transformer: HunyuanVideo15Transformer3DModel,
        size: Size,
        decoders: Mapping[str, VideoDecoder] | None = None,
    ) -> None:
        device, dtype = next(transformer.parameters()).device, next(transformer.parameters()).dtype
        config = transformer.config
        self.transformer = transformer
        self.stock = with_own_adapter(transformer, dtype)
        self.plans: dict[str, CheckpointPlan] = {}
        self.merged: HunyuanVideo15Transformer3DModel | None = None
        options: dict[str, Any] = {"dtype": dtype, "guidance_scale": size.guidance}
        self.ours = HunyuanVideo15Policy(transformer, **options)
        # changes the strides of the weights, for which code is compiled later
        self.ours.forward.refresh()
        # The paths of our forward share one policy. Two policies over one transformer would take
        # the weights from each other, and lay out those of all blocks again, at every turn.
        self.unavailable = self._unavailable(device)
        self.policies: dict[str, HunyuanVideo15Policy] = {
            path: StockPolicy(self.stock, **how, **options)
            for path, how in STOCK.items()
            if path not in self.unavailable
        }
        self.policies |= dict.fromkeys(OURS, self.ours)
        self.options = options
        self.size = size
        self.device = device
        generator = torch.Generator().manual_seed(0)
        texts = torch.randn(2, size.text_tokens, config.text_embed_dim, generator=generator)
        prompt, negative = (
            TextEmbedding(text=t, glyphs=torch.zeros(0, config.text_embed_2_dim)) for t in texts
        )
        self.embeddings = {PromptKey("prompt"): prompt, prompt.negative: negative}
        self.prompts = [PromptKey("prompt")] * size.batch
        self.shape = (config.out_channels, *size.space)
        self.table = transition_table(sigma_schedule(size.steps, 5.0), "sage", 0.5)
        self.coefs = self.table.coefficients().to(device)
        self.seeds = torch.arange(size.batch, device=device)
        self.x = initial_latents(self.seeds, self.shape, device)
        self.step = torch.full((1,), size.steps // 2, device=device)
        tokens = math.prod(size.space) + size.text_tokens
        heads = (config.num_attention_heads, config.attention_head_dim)
        self.usable = usable(device, dtype)
        use = Use(shape=(size.batch, tokens, *heads))
        self.attention = fastest(measure_attention([use], device, dtype))
        self.graphs = (
            StepGraphs(self.ours, CudaRecorder(), 2**40) if device.type == "cuda" else None
        )
        self.decoders = decoders or {}

    @staticmethod
    def _unavailable(device: torch.device) -> dict[str, str]:
        """Return path -> why diffusers has no such attention kernel here. On a CPU all can run,
        with PyTorch's attention."""
        if device.type != "cuda":
            return {}
        kernels = {path: how["kernel"] for path, how in STOCK.items() if "kernel" in how}
        problems = {}
        for name in dict.fromkeys(kernels.values()):
            try:
                load_kernel(name)
            # from diffusers, from `kernels` or from the network: the other paths can still run
            except Exception as error:
                problems[name] = in_one_line(error)
        found = {path: problems[name] for path, name in kernels.items() if name in problems}
        found |= {path: found[base] for path, base in MERGED.items() if base in found}
        return found

    @property
    def stand_ins(self) -> list[str]:
        """Return the paths whose attention kernel needs a GPU, for which PyTorch's stands in."""
        if self.device.type == "cuda":
            return []
        named = [path for path, how in STOCK.items() if "kernel" in how]
        return [*named, *(path for path, base in MERGED.items() if base in named)]

    def _policy(self, path: str) -> HunyuanVideo15Policy:
        """Return the policy of a path. Merged weights are copies, made for the first such path."""
        if path not in self.policies:
            if self.merged is None:
                self.merged = merged_copy(self.stock)
            how = STOCK[MERGED[path]]
            self.policies[path] = StockPolicy(self.merged, **how, **self.options)
        return self.policies[path]

    def checkpointing(self, part: str) -> CheckpointPlan:
        """Return what a part's backward recomputes. `auto` is the least that fits into the memory
        that is free when it is first asked for."""
        if part not in self.plans:
            self.plans[part] = self._checkpointing(checkpointing_of(part))
        return self.plans[part]

    def _checkpointing(self, mode: str) -> CheckpointPlan:
        blocks = len(self.transformer.transformer_blocks)
        if mode in MODES:
            return CheckpointPlan(mode, blocks, blocks)
        ranks = [p.shape[0] for name, p in self.transformer.named_parameters() if "lora_A" in name]
        dtype: DType = "float32" if self.ours.dtype == torch.float32 else "bfloat16"
        needed = Activations(
            spec_of(self.size.testbed),
            ModelConfig(dtype=dtype, lora_rank=max(ranks)),
            self.shape,
            batch_size=self.size.batch,
            guidance=self.size.guidance,
        )
        return fastest_that_fits(needed, MEMORY_SHARE * free_bytes(self.device), blocks)

    def schedule(self, policy: HunyuanVideo15Policy) -> Any:
        return policy.conditioning_table(self.table.sigmas[:-1], self.embeddings).of(self.prompts)

    def flops(self, part: str, *, model: bool = False) -> float:
        """Return the FLOPs of a part with the unpadded prompt, by the plan's formulas.

        Args:
            model: without what a backward recomputes.
        """
        if part == "decode":
            return self.size.batch * decode_flops(
                spec_of(self.size.testbed).vae.decoder, self.shape
            )
        chosen = None if model else self.checkpointing(part)
        return part_flops(self.transformer.config, self.size, part, chosen)

    # -- the gate ----------------------------------------------------------------------------------

    @torch.no_grad()
    def check(self, gate: str, paths: Collection[str] = PATHS) -> dict[str, str]:
        """Compare results with stock; return path -> problem, for the paths that differ or fail.

        If stock itself fails, that is one of the problems, and the first path that runs becomes the
        reference.

        Args:
            gate: `decode` compares videos; `forward` compares velocities, and serves all other
                parts.
            paths: paths to compare.
        """
        run = self._video if gate == "decode" else self._velocity
        limit = 1e-4 if self.x.dtype == self.ours.dtype else 0.05
        graphed = gate != "decode" and "graphed" in paths  # it replays the eager path
        present = self._present(PARTS[gate], {*paths, "eager"} if graphed else paths)
        problems = {}
        expected = None
        for path in dict.fromkeys(["stock", *present]):
            try:
                found = run(path).float()
            # from a compiler, a kernel or lack of memory: the other paths can still run
            except Exception as error:
                problems[path] = in_one_line(error)
                continue
            expected = found if expected is None else expected
            off = float((found - expected).norm() / expected.norm())
            if not off <= limit:
                problems[path] = f"wrong: off by {off:.1e}, expected at most {limit:.0e}"
        if graphed and "eager" in problems:
            problems["graphed"] = problems["eager"]
        return problems

    def _velocity(self, path: str) -> Tensor:
        policy = self._policy(path)
        self._set_attention(path)
        return policy.guided_velocity(self.x, self.schedule(policy).at(self.step))

    def _video(self, path: str) -> Tensor:
        return self.decoders[path](
            self.x[:, :, : GATE_SPACE[0], : GATE_SPACE[1], : GATE_SPACE[2]].contiguous()
        )

    def _present(self, possible: Collection[str], paths: Collection[str]) -> list[str]:
        """Return the paths of a part, `possible`, that are requested and can run here."""
        # pads by 1985 tokens: meaningful at real sizes only
        absent = {"stock padded"} if self.size.testbed else set()
        absent |= self.unavailable.keys()
        if self.device.type != "cuda":
            absent |= {"stock cudnn", "stock cudnn compiled"}
        absent |= {
            path
            for path, name in ATTENTIONS.items()
            if name not in {*self.usable} - {self.attention}
        }
        return [path for path in possible if path in paths and path not in absent]

    # -- contenders --------------------------------------------------------------------------------

    def _set_attention(self, path: str) -> None:
        self.ours.attention = ATTENTION[ATTENTIONS.get(path, self.attention)]

    def contenders(self, part: str, paths: Collection[str] = PATHS) -> dict[str, Callable[[], Any]]:
        """Return path -> a function that runs a part once; `train` is a forward and a backward.

        Paths that cannot run here are left out: graphs need CUDA and memory.
        """
        present = self._present(PARTS[part], paths)
        chosen = self.checkpointing(part)
        others = chosen.faster if chosen.count < chosen.blocks else None
        for transformer in (self.transformer, self.stock):
            first = transformer.transformer_blocks[: chosen.count]
            set_checkpointing(transformer, chosen.mode, others=others, first=first)
        if part == "decode":
            return {path: self._decode(self.decoders[path]) for path in present}
        made = {path: self._function(part, path) for path in present if path != "graphed"}
        if "graphed" in present and self.graphs is not None:
            made |= self._graphed(part, self.graphs)
        return made

    def _decode(self, decoder: VideoDecoder) -> Callable[[], Tensor]:
        return lambda: decoder(self.x)

    def _function(self, part: str, path: str) -> Callable[[], Any]:
        policy = self._policy(path)
        schedule = self.schedule(policy)

        @torch.no_grad()
        def forward() -> Any:
            return policy.velocities(self.x, schedule.at(self.step))

        @torch.no_grad()
        def step() -> Any:
            return denoise(
                policy, self.coefs, schedule.at(self.step), self.seeds, self.x, self.step
            )

        tokens = eighth(math.prod(self.size.space))
        part_of_x = self.x.flatten(2)[:, :, None, None, :tokens].contiguous()

        @torch.no_grad()
        def share() -> Any:
            return policy.velocities(part_of_x, schedule.at(self.step))

        def whole() -> Any:
            return self._rollout(policy)

        def train() -> Any:
            v = policy.guided_velocity(self.x, schedule.at(self.step))
            return torch.autograd.grad(
                v.float().square().mean(), list(policy.parameters().values())
            )

        functions = {"forward": forward, "step": step, "rollout": whole, HOST: share}
        function = functions.get(part, train)

        def run() -> Any:
            self._set_attention(path)
            return function()

        return run

    def _graphed(self, part: str, graphs: StepGraphs) -> dict[str, Callable[[], Any]]:
        schedule = self.schedule(self.ours)
        self._set_attention("graphed")
        with torch.no_grad():
            for _ in range(2):  # a shape is recorded the second time it appears
                graph = graphs.prepare(self.coefs, schedule, self.seeds, self.x)
        if graph is None:
            return {}
        if part == "step":
            return {"graphed": lambda: graph.step(self.x, self.step)}
        return {"graphed": lambda: self._rollout(self.ours, graphs)}

    def _rollout(self, policy: HunyuanVideo15Policy, graphs: StepGraphs | None = None) -> Tensor:
        conditioning = policy.conditioning_table(self.table.sigmas[:-1], self.embeddings)
        return rollout(
            policy,
            self.table,
            self.coefs,
            conditioning,
            self.prompts,
            self.seeds,
            self.x,
            graphs=graphs,
        )
