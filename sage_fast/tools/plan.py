"""What an iteration will cost, before it is run: `sage-fast train CONFIG --dry-run`.

The real architecture is built on the meta device (no memory, no weights); the rest are formulas, those of the model in
its `Spec`, each checked by tests/test_plan.py against a count made by PyTorch. FLOPs are two per multiply-add.
"""

from __future__ import annotations

import dataclasses
import math
import textwrap

from sage_fast.algorithm.objective import stores_rollout_velocities, strategy_of, surrogate_of
from sage_fast.algorithm.schedule import (
    check_trainable,
    configured_table,
    iteration_table,
    position_steps,
    share_of,
    trained_steps,
)
from sage_fast.config.schema import Config
from sage_fast.models.load import find_spec, meta_policy
from sage_fast.models.protocol import Spec
from sage_fast.models.registry import default_family
from sage_fast.models.sharing import check_heads
from sage_fast.parallel.memory import held_bytes
from sage_fast.rollout.trajectories import trajectory_bytes
from sage_fast.tools.harness import H200_BF16_FLOPS
from sage_fast.util.environment import format_bytes


def training_flops(forward: float, attention: float, *, checkpointing: str, frozen_base: bool) -> float:
    """Forward, its recomputation with checkpointing, and a backward.

        linear x (1 + [recomputed] + (1 if frozen_base else 2))  +  attention x (1 + [recomputed] + 2.5)

    Checkpointing `full` recomputes both, `attention` the linear layers, `none` neither.

    A linear layer's backward is one product for the gradient in its input and, unless the base is frozen (LoRA), one
    for that in its weight. Attention's is five products against two, since fused kernels recompute the scores. The
    adapter's own products are not counted: about r / d of the linear part.
    """
    linear = forward - attention
    again = checkpointing != "none", checkpointing == "full"
    return linear * (1 + again[0] + (1 if frozen_base else 2)) + attention * (1 + again[1] + 2.5)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The numbers that `format_plan` prints.

    Attributes:
        parameters: of the model without its adapter.
        trainable: of them, or of the adapter.
        latent_shape: (C, T, H, W).
        tokens: of one video.
        text_tokens: assumed of a prompt.
        ranks: GPUs the iteration is spread over.
        samples: of an iteration, all ranks together.
        trained_steps: transitions trained of each sample.
        forwards: part -> forwards of one sample in an iteration, all ranks together; guidance counts twice. None of the
            decode.
        flops: part -> FLOPs in an iteration, all ranks together; `forward` is one forward of one sample.
        memory: part -> bytes on each GPU while it trains.
        other_memory: what is not held at that time, or in host memory, or would be with another setting of
            checkpointing.
        engine: `train.engine`.
    """

    parameters: int
    trainable: int
    latent_shape: tuple[int, int, int, int]
    tokens: int
    text_tokens: int
    ranks: int
    samples: int
    trained_steps: int
    forwards: dict[str, int]
    flops: dict[str, float]
    memory: dict[str, float]
    other_memory: dict[str, float]
    engine: str


def plan(config: Config, spec: Spec | None = None, *, ranks: int = 1) -> Plan:
    """Sizes, FLOPs and memory of one iteration.

    Args:
        config: validated settings.
        spec: of the model; by default the published sizes of the first family that ships.
        ranks: GPUs; samples are spread over them (`model.sequence_parallel` of them share theirs), and of weights and
            optimizer what `train.engine` shares out.
    """
    spec = spec or default_family()()
    s, train, sharing = config.sampling, config.train, config.model.sequence_parallel
    check_heads(sharing, spec.heads)
    policy, cost, latent = meta_policy(spec, config.model), spec.cost(config), spec.latent_shape(s)
    trainable = sum(p.numel() for p in policy.parameters().values())
    base = sum(p.numel() for name, p in policy.named_parameters() if ".lora_" not in name)

    samples = train.prompts_per_iteration * train.group_size
    steps = trained_steps(iteration_table(configured_table(config), config, 0), config, 0)
    trained, anchored = len(steps), len(position_steps(config, steps, 0))
    passes = 2 if s.guidance_scale != 1 else 1
    process = surrogate_of(config.objective).process
    scored = trained * (not process.scores_rollout and stores_rollout_velocities(config))

    forwards = {
        "rollout": samples * s.steps * passes,
        "training": samples * trained * passes,
        "anchor": samples * (anchored * (strategy_of(config.kl).anchor is not None) + scored) * passes,
    }
    asked = config.model.gradient_checkpointing
    mode = "full" if asked == "auto" else asked  # what is free is known where it is run
    per_training = training_flops(
        cost.forward, cost.attention, checkpointing=mode, frozen_base=config.model.tuning == "lora"
    )
    flops = {
        "forward": cost.forward,
        "rollout": forwards["rollout"] * cost.forward,
        "training": forwards["training"] * per_training,
        "anchor": forwards["anchor"] * cost.forward,
        "decode": samples * cost.decode,
    }

    width = 2 if config.model.dtype == "bfloat16" else 4
    mine = len(share_of(samples, ranks // sharing, 0))
    states, velocities = trajectory_bytes(config, math.prod(latent), mine)
    held = held_bytes(config, policy, ranks, mode)
    memory = {
        **held.weights,
        **held.training,
        "autoencoder": float(width * cost.decoder_weights),
    }
    trajectories = {"trajectories (fp32 latents)": float(states), "stored velocities": float(velocities)}
    if s.offload_trajectories:
        host = {f"{part}, pinned host memory": size for part, size in trajectories.items()}
    else:
        memory, host = memory | trajectories, {}
    host |= {f"{part}, host memory": size for part, size in held.host.items()}
    activations = dict(cost.activations)
    memory[f"activations, checkpointing {asked}{', as full' if asked == 'auto' else ''}"] = activations.pop(mode)
    chunk = min(s.batch_size, mine)  # scored before the next one is decoded
    videos = {"decoded videos (during decode and reward)": 12.0 * chunk * s.num_frames * s.height * s.width}
    other = {f"activations, checkpointing {name}": size for name, size in activations.items()} | videos | host
    return Plan(
        parameters=base,
        trainable=trainable,
        latent_shape=latent,
        tokens=spec.tokens(latent),
        text_tokens=spec.text_tokens,
        ranks=ranks,
        samples=samples,
        trained_steps=trained,
        forwards=forwards,
        flops=flops,
        memory=memory,
        other_memory=other,
        engine=config.train.engine,
    )


def format_plan(plan: Plan) -> str:
    """The plan for a terminal."""

    def line(label: str, *cells: str) -> str:
        return f"  {label:<41}{''.join(f'{cell:>12}' for cell in cells)}"

    def work(label: str, count: int, flops: float) -> str:
        # Of the GPU that has the most samples.
        share = 1 if label == "one forward of one sample" else len(share_of(plan.samples, plan.ranks, 0)) / plan.samples
        return line(label, f"{count:,}" if count else "", f"{flops:.3g}", _duration(flops * share))

    parts = {part: flops for part, flops in plan.flops.items() if part != "forward"}
    gpus = f"{plan.ranks} GPU{'s' * (plan.ranks > 1)}"
    lines = [
        "model",
        line("parameters", _count(plan.parameters)),
        line("trained parameters", _count(plan.trainable)),
        line("latents C x T x H x W", " x ".join(map(str, plan.latent_shape))),
        line("tokens of a video", f"{plan.tokens:,}"),
        "",
        f"one iteration on {gpus}: {plan.samples:,} samples, {plan.trained_steps} trained steps of each",
        line("", "forwards", "FLOPs", "at least"),
        work("one forward of one sample", 0, plan.flops["forward"]),
        *(work(part, plan.forwards.get(part, 0), flops) for part, flops in parts.items()),
        work("together", sum(plan.forwards.values()), sum(parts.values())),
        textwrap.fill(
            f"The time is a lower bound: every FLOP at {H200_BF16_FLOPS / 1e12:.0f} TFLOP/s (bf16, measured on an "
            f"H200), with {plan.text_tokens} text tokens a prompt. Training holds the backward, and the recomputation "
            "with checkpointing. The anchor is free in the iteration after its refresh. Not counted: rewards.",
            80,
            initial_indent="  ",
            subsequent_indent="  ",
        ),
        "",
        f"memory on each of {gpus} while it trains, engine {plan.engine}",
        *(line(part, format_bytes(count)) for part, count in plan.memory.items()),
        line("together", format_bytes(sum(plan.memory.values()))),
        "  Not counted: text encoders, rewards, fragmentation.",
        "",
        "for comparison",
        *(line(part, format_bytes(count)) for part, count in plan.other_memory.items()),
    ]
    return "\n".join(text.rstrip() for text in lines)


def _count(count: int) -> str:
    """A count with its short form, such as `8.33 B = 8,326,608,160`."""
    unit, scale = ("B", 1e9) if count >= 1e9 else ("M", 1e6) if count >= 1e6 else ("k", 1e3)
    return f"{count / scale:.3g} {unit} = {count:,}"


def _duration(flops: float) -> str:
    """Time of `flops` at the measured ceiling."""
    seconds = flops / H200_BF16_FLOPS
    for unit, scale in (("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= 2 * scale or unit == "us":
            return f"{seconds / scale:.3g} {unit}"
    raise AssertionError


def dry_run(config: Config, ranks: int) -> str:
    """The plan of a run on so many ranks, in words.

    Raises:
        UserError: the settings make it impossible, or `model.path` is no checkpoint.
    """
    spec = find_spec(config.model.path)
    check_trainable(config, ranks)
    return format_plan(plan(config, spec, ranks=ranks))
