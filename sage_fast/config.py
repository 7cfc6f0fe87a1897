"""One typed tree of settings: YAML files, command-line overrides, clear errors.

A run is described by a `Config`; every default stands here and nowhere else. `load` reads a YAML file, applies
overrides such as `{"sampling.eta": "0.7"}` and validates the result once, before any model is built. The resolved
tree is written into the run folder with `dump`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from sage_fast.errors import UserError, nearest

Sampler = Literal["sage", "flow", "dance", "cps", "exact", "ode"]
Reduction = Literal["mean", "sum", "unscaled"]
Surrogate = Literal["clip", "log_prob"]
KLStrategyName = Literal["none", "fixed", "stepwise", "moving", "dual"]
VelocityTerm = Literal["rollout", "closed_form"]
Feedback = Literal["paper", "ppo", "off"]
DType = Literal["float32", "bfloat16"]
Tuning = Literal["lora", "full"]
AttentionBackend = Literal["auto", "sdpa", "cudnn", "flash", "flash3", "xformers"]
OnFailure = Literal["stop", "drop"]


@dataclasses.dataclass(kw_only=True)
class ModelConfig:
    path: str = "testbed"
    """`testbed`, a local folder in diffusers format, or a hub id such as
    hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v."""
    dtype: DType = "bfloat16"
    """Storage type of the frozen weights and of activations; latents are float32 always."""
    tuning: Tuning = "lora"
    """`lora` or `full`."""
    weights: str | None = None
    """Trained weights to start from, as a run leaves them: LoRA in diffusers format (its rank and alpha
    then come from the file), or a transformer folder."""
    lora_rank: int = 64
    lora_alpha: int = 128
    lora_targets: str = (
        r"transformer_blocks\.\d+\.(attn\.(to_[qkv]|to_out\.0|add_[qkv]_proj|to_add_out)|ff\.net\.(0\.proj|2))"
    )
    """Regular expression over module names."""
    attention: AttentionBackend = "auto"
    """`sdpa`, `cudnn`, `flash` (flash-attn 2), `flash3`, `xformers`, or `auto`: the fastest that is there, measured."""
    gradient_checkpointing: bool = True
    """Recompute each transformer block in the backward pass."""


@dataclasses.dataclass(kw_only=True)
class DataConfig:
    prompts: str = "testbed:train"
    """UTF-8 text file, one prompt a line; or `testbed:train`, `testbed:heldout`."""
    eval_prompts: str = "testbed:heldout"
    """Held-out prompts, same format."""
    embedding_cache: str | None = None
    """Folder of prompt embeddings, shared between runs; by default `embeddings` in the run folder."""


@dataclasses.dataclass(kw_only=True)
class SamplingConfig:
    sampler: Sampler = "sage"
    eta: float = 1.0
    """Noise level of the sampler; 0 is the ODE."""
    steps: int = 20
    shift: float = 5.0
    guidance_scale: float = 1.0
    """Classifier-free guidance, in rollout and training alike; 1 turns it off."""
    num_frames: int = 81
    """4k + 1."""
    height: int = 480
    width: int = 832
    sde_window: int = 0
    """Length of the random contiguous window of SDE steps, ODE outside, the same for a group; 0: all steps."""
    shared_initial_noise: bool = False
    """Give all samples of a group the same initial latents."""
    batch_size: int = 4
    """Samples that are denoised together."""
    cuda_graphs: bool = True
    """Replay denoising steps from CUDA graphs where they are small enough to gain; the same bits."""
    offload_trajectories: bool = False
    """Hold the trained steps in pinned host memory instead of the GPU's."""


@dataclasses.dataclass(kw_only=True)
class RewardConfig:
    name: str = "testbed"
    """`testbed`, or `package.module:name` of a callable (videos [B, F, 3, H, W] in [0, 1], prompts) -> dict of [B]."""
    weights: dict[str, float] = dataclasses.field(default_factory=lambda: {"vq": 1.0, "mq": 1.0, "ta": 1.0})
    """Composite reward R = sum of weight x part; the paper's setting A is 1, 1, 1 and B is 0.5, 0.5, 1."""
    on_failure: OnFailure = "stop"
    """`stop`, or `drop`: leave a sample with a non-finite reward out, counted as `reward/dropped`."""


@dataclasses.dataclass(kw_only=True)
class ObjectiveConfig:
    surrogate: Surrogate = "clip"
    """`clip`: clipped ratio; `log_prob`: the plain log-prob of Eq. 43."""
    clip_range: float = 1e-4
    log_prob: Reduction = "mean"
    """Reduction of the log-prob over a sample: `mean`, `sum` or `unscaled`."""
    equalizer: bool = True
    """Temporal gradient equalizer S_t (Eq. 9)."""
    advantage_clamp: float = 5.0
    drop_equal_groups: bool = True
    """Leave groups whose rewards are all equal out of the update."""


@dataclasses.dataclass(kw_only=True)
class KLConfig:
    strategy: KLStrategyName = "dual"
    """`none`, `fixed` (anchor = base model), `stepwise`, `moving`, `dual`."""
    velocity_term: VelocityTerm = "rollout"
    """`rollout`: logp_old - logp (Eq. 15); `closed_form`: the same KL without sampling noise."""
    beta_pos: float = 1.0
    beta_vel: float = 0.1
    anchor_interval: int = 10
    """Optimizer steps between two refreshes of the moving anchor."""
    lambda_min: float = 1e-7
    lambda_max: float = 1e-5
    warmup_steps: int = 100
    """K of Eq. 41, in optimizer steps."""
    feedback: Feedback = "paper"
    """After the warm-up: `paper` (Eq. 42 as printed), `ppo` (the usual direction), `off`."""
    target: float = 1e-4
    """KL that the feedback steers towards, per element."""
    history: int = 10
    """H of Eq. 42."""


@dataclasses.dataclass(kw_only=True)
class TrainConfig:
    iterations: int = 100
    prompts_per_iteration: int = 2
    """Groups per iteration, over all ranks."""
    group_size: int = 4
    optimizer_steps: int = 1
    """Updates per iteration; the rollouts are split evenly among them."""
    batch_size: int = 1
    """Transitions per forward; gradients accumulate up to the optimizer step."""
    timestep_fraction: float = 1.0
    """Share of the stochastic steps that is trained."""
    timestep_permutation: bool = True
    """Train the steps in random order (a random subset where the fraction is below 1)."""
    learning_rate: float = 1e-5
    weight_decay: float = 1e-4
    max_grad_norm: float = 1.0
    ema_decay: float = 0.0
    """Exponential moving average of the trained weights; 0 turns it off."""
    checkpoint_interval: int = 50
    """Iterations between checkpoints."""
    parity_gate: bool = True
    """Replay the first rollouts and stop if their log-probs differ by more than a tenth of the clip range."""


@dataclasses.dataclass(kw_only=True)
class EvalConfig:
    interval: int = 0
    """Iterations between evaluations; 0: before and after the run alone."""
    steps: int = 40
    """ODE steps."""
    num_prompts: int = 16
    seeds_per_prompt: int = 1
    num_videos: int = 6
    """Videos that are kept for the report."""


@dataclasses.dataclass(kw_only=True)
class TrackingConfig:
    trackers: list[str] = dataclasses.field(default_factory=lambda: ["tensorboard"])
    """Trackers beside `metrics.jsonl`, by accelerate's names: `tensorboard`, `wandb`, `trackio`, `mlflow`, ..."""
    project: str = "sage-fast"
    """Project of the run in trackers that have projects."""


@dataclasses.dataclass(kw_only=True)
class Config:
    output: str = "runs/sage"
    """Run folder; must not hold another run."""
    seed: int = 0
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    sampling: SamplingConfig = dataclasses.field(default_factory=SamplingConfig)
    reward: RewardConfig = dataclasses.field(default_factory=RewardConfig)
    objective: ObjectiveConfig = dataclasses.field(default_factory=ObjectiveConfig)
    kl: KLConfig = dataclasses.field(default_factory=KLConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    eval: EvalConfig = dataclasses.field(default_factory=EvalConfig)
    tracking: TrackingConfig = dataclasses.field(default_factory=TrackingConfig)


def load(path: str | Path, overrides: Mapping[str, str] | None = None) -> Config:
    """Read a YAML file, apply `overrides` (dotted key -> YAML scalar) and validate.

    Raises:
        UserError: file missing or not YAML, unknown key (names the nearest one), wrong type, invalid value.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"config {path}: no such file")
    try:
        loaded = OmegaConf.load(path)
    except (UnicodeDecodeError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise UserError(f"config {path}: not valid YAML: {error}") from error
    if not isinstance(loaded, DictConfig):
        raise UserError(f"config {path}: expected a mapping of settings")
    settings = dict(_leaves(OmegaConf.to_container(loaded)))
    for key, value in (overrides or {}).items():
        settings[key] = OmegaConf.create({"value": yaml.safe_load(value)}).value
    return build(settings)


def build(settings: Mapping[str, Any]) -> Config:
    """A validated `Config` from dotted keys."""
    tree = OmegaConf.structured(Config)
    known = [key for key, _ in _leaves(OmegaConf.to_container(tree))]
    if any(key.startswith("reward.weights.") for key in settings):
        OmegaConf.update(tree, "reward.weights", {}, merge=False)  # named weights replace the default three
    for key, value in settings.items():
        if key not in known and not key.startswith("reward.weights."):
            raise UserError(f"unknown setting {key!r}; {_nearest_key(key, known)}")
        try:
            OmegaConf.update(tree, key, value)
        except OmegaConfBaseException as error:
            raise UserError(f"{key} = {value!r}: {str(error).splitlines()[0]}") from error
    config = OmegaConf.to_object(tree)
    assert isinstance(config, Config)
    validate(config)
    return config


def dump(config: Config) -> str:
    """The resolved tree as YAML."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def _leaves(tree: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if isinstance(tree, dict) and tree:
        return [leaf for key, value in tree.items() for leaf in _leaves(value, f"{prefix}{key}.")]
    return [(prefix[:-1], tree)]


def _nearest_key(key: str, known: list[str]) -> str:
    """Nearest by the whole path, else by the last name (so that `--eta` finds `sampling.eta`)."""
    same_name = [k for k in known if k.rsplit(".", 1)[-1] == key.rsplit(".", 1)[-1]]
    if same_name:
        return f"did you mean {same_name[0]!r}?"
    import difflib

    return f"did you mean {difflib.get_close_matches(key, known, n=1, cutoff=0.0)[0]!r}?"


def _require(condition: bool, name: str, value: object, expected: str) -> None:
    if not condition:
        raise UserError(f"{name} = {value!r}: {expected}")


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UserError(f"{name} = {value!r}: {nearest(value, choices)}")


def _multiple(name: str, value: int, base: int, offset: int = 0) -> None:
    below = max((value - offset) // base, 1 if offset == 0 else 0) * base + offset
    if value < max(offset, 1) or (value - offset) % base:
        kind = f"a multiple of {base}" if offset == 0 else f"{base}k + {offset}"
        valid = str(below) if below > value else f"{below} and {below + base}"
        raise UserError(f"{name} = {value}: expected {kind}; the nearest valid values are {valid}")


def validate(config: Config) -> None:
    """Everything that can be known to be wrong before a model is built.

    Raises:
        UserError: names the setting, its value, what was expected and the nearest valid choice.
    """
    model, s, objective, kl, train = config.model, config.sampling, config.objective, config.kl, config.train
    _one_of("model.dtype", model.dtype, get_args(DType))
    _one_of("model.attention", model.attention, get_args(AttentionBackend))
    _one_of("model.tuning", model.tuning, get_args(Tuning))
    _one_of("sampling.sampler", s.sampler, get_args(Sampler))
    _require(math.isfinite(s.eta) and s.eta >= 0, "sampling.eta", s.eta, "expected at least 0; the nearest is 0")
    _require(s.sampler != "cps" or s.eta <= 1, "sampling.eta", s.eta, "cps is defined up to 1; the nearest is 1")
    _require(s.steps >= 1, "sampling.steps", s.steps, "expected at least 1; the nearest is 1")
    _require(s.shift > 0, "sampling.shift", s.shift, "expected above 0; 1 means no shift, 5 is the 480p default")
    _require(s.guidance_scale >= 1, "sampling.guidance_scale", s.guidance_scale, "expected at least 1 (1 = off)")
    _multiple("sampling.num_frames", s.num_frames, 4, 1)
    _multiple("sampling.height", s.height, 16)
    _multiple("sampling.width", s.width, 16)
    _require(0 <= s.sde_window <= s.steps, "sampling.sde_window", s.sde_window, f"expected 0 (all steps) to {s.steps}")
    _one_of("objective.surrogate", objective.surrogate, get_args(Surrogate))
    _one_of("objective.log_prob", objective.log_prob, get_args(Reduction))
    _require(objective.clip_range > 0, "objective.clip_range", objective.clip_range, "expected above 0, such as 1e-4")
    _require(objective.advantage_clamp > 0, "objective.advantage_clamp", objective.advantage_clamp, "expected above 0")
    _one_of("kl.strategy", kl.strategy, get_args(KLStrategyName))
    _one_of("kl.velocity_term", kl.velocity_term, get_args(VelocityTerm))
    _one_of("kl.feedback", kl.feedback, get_args(Feedback))
    _require(
        0 <= kl.lambda_min <= kl.lambda_max, "kl.lambda_min", kl.lambda_min, f"expected 0 to lambda_max {kl.lambda_max}"
    )
    for name, value in (
        ("sampling.batch_size", s.batch_size),
        ("kl.anchor_interval", kl.anchor_interval),
        ("kl.history", kl.history),
        ("train.iterations", train.iterations),
        ("train.prompts_per_iteration", train.prompts_per_iteration),
        ("train.optimizer_steps", train.optimizer_steps),
        ("train.batch_size", train.batch_size),
        ("train.checkpoint_interval", train.checkpoint_interval),
        ("model.lora_rank", model.lora_rank),
        ("eval.steps", config.eval.steps),
        ("eval.num_prompts", config.eval.num_prompts),
        ("eval.num_videos", config.eval.num_videos),
        ("eval.seeds_per_prompt", config.eval.seeds_per_prompt),
    ):
        _require(value >= 1, name, value, "expected at least 1; the nearest is 1")
    _require(
        train.group_size >= 2,
        "train.group_size",
        train.group_size,
        "a group of 1 has no advantage (its reward equals its mean); the nearest is 2",
    )
    _require(0 < train.timestep_fraction <= 1, "train.timestep_fraction", train.timestep_fraction, "expected (0, 1]")
    _require(train.learning_rate > 0, "train.learning_rate", train.learning_rate, "expected above 0, such as 1e-5")
    _require(train.max_grad_norm > 0, "train.max_grad_norm", train.max_grad_norm, "expected above 0, such as 1.0")
    _require(0 <= train.ema_decay < 1, "train.ema_decay", train.ema_decay, "expected 0 (off) to below 1")
    weights = config.reward.weights
    _one_of("reward.on_failure", config.reward.on_failure, get_args(OnFailure))
    _require(
        any(w != 0 for w in weights.values()) and all(map(math.isfinite, weights.values())),
        "reward.weights",
        weights,
        "expected finite weights, at least one of them not zero, such as vq 1, mq 1, ta 1",
    )
