"""One typed tree of settings: a run is described by a `Config`.

Every default, choice, bound and meaning is written here and nowhere else. sage_fast/config/load.py reads the tree from
YAML files and the command line. A section checks itself when it is made.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from sage_fast.config.fields import Section, is_finite, require, within
from sage_fast.errors import UserError, nearest

Sampler = Literal["sage", "flow", "dance", "cps", "exact", "ode"]
Reduction = Literal["mean", "sum", "unscaled"]
Surrogate = Literal["clip", "log_prob", "nft"]
Ratio = Literal["plain", "centred", "normalised"]
AdvantageStd = Literal["group", "batch"]
KLStrategyName = Literal["none", "fixed", "stepwise", "moving", "dual"]
VelocityTerm = Literal["rollout", "closed_form"]
Feedback = Literal["paper", "ppo", "share", "none"]
DType = Literal["float32", "bfloat16"]
Tuning = Literal["lora", "full"]
Checkpointing = Literal["none", "attention", "full", "auto"]
AttentionBackend = Literal["auto", "sdpa", "cudnn", "flash", "flash3", "xformers"]
Optimizer = Literal["adamw", "muon", "adamw8bit"]
Schedule = Literal["constant", "cosine", "linear"]
EngineName = Literal["plain", "zero1", "zero2", "zero3"]
Offload = Literal["none", "optimizer", "all"]
OnFailure = Literal["drop", "stop"]

RANDOM = "random:"
"""What `model.path` begins with for a model with random weights."""

_DEVICE = re.compile(r"cpu|cuda(:\d+)?")


@dataclasses.dataclass(kw_only=True)
class ModelConfig(Section):
    """The policy, and which of its weights are trained."""

    path: str = "testbed"
    """`testbed`, a local folder in diffusers format, or a hub id such as
    hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v. `random:hunyuanvideo15-480p` and `random:testbed` have
    random weights, to time and to weigh an iteration without a checkpoint."""
    dtype: DType = "bfloat16"
    """Storage type of the frozen weights and of activations; latents are float32 always."""
    tuning: Tuning = "lora"
    """What is trained: a LoRA adapter, or all weights."""
    weights: str | None = None
    """Trained weights to start from, as a run leaves them: LoRA in diffusers format (its rank and alpha
    then come from the file), or a transformer folder."""
    lora_rank: int = within(64, least=1)
    """Rank of the LoRA adapter."""
    lora_alpha: int = within(128, least=1)
    """The adapter's output is scaled by alpha / rank."""
    lora_targets: str = (
        r"transformer_blocks\.\d+\.(attn\.(to_[qkv]|to_out\.0|add_[qkv]_proj|to_add_out)|ff\.net\.(0\.proj|2))"
    )
    """Regular expression over whole module names: the layers that get an adapter."""
    attention: AttentionBackend = "auto"
    """Kernel of the attention: `flash` is flash-attn 2, `flash3` is flash-attn 3, and `auto` the fastest that is
    installed, measured at the size of the run."""
    gradient_checkpointing: Checkpointing = "auto"
    """What the backward computes again. `full`: every transformer block, which takes the least memory and one more
    forward; `attention`: the blocks without their attention, whose output is kept; `none`: nothing; `auto`: the fastest
    that fits into the memory that is free."""
    sequence_parallel: int = within(1, least=1)
    """GPUs that share one sample, for videos that are long for one: each has a part of the tokens, and for attention a
    part of the heads. Divides the transformer's heads (16) and the number of ranks."""

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            re.compile(self.lora_targets)
        except re.error as error:
            raise UserError(f"model.lora_targets = {self.lora_targets!r}: not a regular expression: {error}") from error


@dataclasses.dataclass(kw_only=True)
class DataConfig(Section):
    """The prompts."""

    prompts: str = "testbed:train"
    """UTF-8 text with one prompt a line, .jsonl or .csv (docs/prompts.md); or `testbed:train`, `testbed:heldout`."""
    eval_prompts: str = "testbed:heldout"
    """Held-out prompts, same formats."""
    embedding_cache: str | None = None
    """Folder of prompt embeddings, shared between runs, which `sage-fast embed` fills; by default `embeddings` in the
    run folder."""


@dataclasses.dataclass(kw_only=True)
class SamplingConfig(Section):
    """How the rollouts are sampled."""

    sampler: Sampler = "sage"
    """Rule of a denoising step; `ode` adds no noise, and only objective.surrogate = nft trains with it. docs/math.md
    has the formulas."""
    eta: float = within(1.0, least=0, most=10)
    """Noise level of the sampler; 0 is the ODE, and `cps` is defined up to 1."""
    steps: int = within(20, least=1, most=1000)
    """Denoising steps of a rollout."""
    shift: float = within(5.0, above=0, most=100)
    """Shift of the noise schedule towards sigma = 1; 1 means no shift, 5 is the default of 480p."""
    guidance_scale: float = within(1.0, least=1)
    """Classifier-free guidance, in rollout and training alike; 1 turns it off."""
    num_frames: int = within(81, least=1, every=4)
    """Frames of a video."""
    height: int = within(480, least=16, every=16)
    """Pixels."""
    width: int = within(832, least=16, every=16)
    """Pixels."""
    sde_window: int = within(0, least=0)
    """Length of the random contiguous window of SDE steps, ODE outside, the same for a group; 0: all steps."""
    shared_initial_noise: bool = False
    """Give all samples of a group the same initial latents."""
    batch_size: int = within(4, least=1)
    """Samples that are denoised together."""
    cuda_graphs: bool = True
    """Replay denoising steps from CUDA graphs if they are small enough to gain; the same bits."""
    offload_trajectories: bool = False
    """Hold the trained steps in pinned host memory instead of the GPU's."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.sampler != "cps" or self.eta <= 1, "sampling.eta", self.eta, "cps is defined up to 1; the nearest is 1"
        )
        require(
            self.sde_window <= self.steps,
            "sampling.sde_window",
            self.sde_window,
            f"expected 0 (all steps) to sampling.steps; the nearest is {self.steps}",
        )


@dataclasses.dataclass(kw_only=True)
class RewardEntry(Section):
    """One reward: what is called, where it runs, and how its parts count."""

    SECTION: ClassVar[str] = ""

    name: str = "testbed"
    """A reward that is shipped (`testbed`) or that an installed package offers, `package.module:name` of a class or a
    callable (videos [B, F, 3, H, W] in [0, 1], prompts) -> dict of [B], or http://host:port of `sage-fast
    serve-reward`; modules in the current folder are found."""
    args: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What the class is made with, by keyword: '{path: weights/scorer, fps: 2}'."""
    weights: dict[str, float] = dataclasses.field(default_factory=lambda: {"vq": 1.0, "mq": 1.0, "ta": 1.0})
    """Composite reward R = sum of weight x part; the paper's setting A is 1, 1, 1 and B is 0.5, 0.5, 1. Weights that
    are given replace those of the file, which replace the default: '{red: 1}', or --reward.weights.red 1."""
    normalisation: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    """Part -> [mean, std]: (part - mean) / std is weighted and logged in its place, and the value that the reward gave
    beside it as <part>_raw. Fixed numbers, so that scores of two runs can be compared: '{vq: [3.68, 2.25]}'."""
    prefix: str | None = None
    """Put before the names of its parts, such as clip_, for two rewards with a part of the same name; weights and
    normalisation name the parts as the reward returns them."""
    device: str | None = None
    """Where it runs, if not on the rank's own device: cpu, cuda:7, or several with commas, which the ranks and their
    workers take in turn. Given to a class that takes `device`; the videos are there already."""
    workers: int = within(0, least=0)
    """Processes on each rank that score beside the rollout; a hang or a crash in one ends neither the run nor the call.
    0: within the run's own process, between two rollouts. For an HTTP reward: maximum number of concurrent requests,
    at least 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            all(map(is_finite, self.weights.values())),
            self._key("weights"),
            self.weights,
            "expected finite weights",
        )
        for part, values in self.normalisation.items():
            require(
                len(values) == 2 and all(map(is_finite, values)) and values[1] > 0,
                self._key(f"normalisation.{part}"),
                values,
                "expected [mean, std], two finite numbers of which the second is above 0, such as [3.68, 2.25]",
            )
        require(
            _is_plain(self.args), self._key("args"), self.args, "expected numbers, text, lists and mappings with names"
        )
        if self.device is not None:
            for device in self.devices:
                require(
                    _DEVICE.fullmatch(device) is not None,
                    self._key("device"),
                    self.device,
                    "expected cpu, cuda or cuda:N, or several of them with commas, such as cuda:6,cuda:7",
                )

    def _key(self, field: str) -> str:
        return f"reward.{field}" if isinstance(self, RewardConfig) else field

    @property
    def devices(self) -> list[str]:
        """Each of `device`; none if it is not given."""
        return [] if self.device is None else [device.strip() for device in self.device.split(",")]

    @property
    def is_address(self) -> bool:
        """Whether the reward is behind HTTP."""
        return self.name.startswith(("http://", "https://"))

    @property
    def needed(self) -> set[str]:
        """The parts that count, by the reward's own names."""
        return {part for part, weight in self.weights.items() if weight != 0}

    def named(self, part: str) -> str:
        """The part as the run logs it."""
        return f"{self.prefix or ''}{part}"


@dataclasses.dataclass(kw_only=True)
class RewardConfig(RewardEntry):
    """What training maximises."""

    several: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """Several rewards together, in place of `name`: a list of mappings, each with a name and weights, and with args,
    normalisation, prefix, device and workers if it needs them."""
    on_failure: OnFailure = "drop"
    """A sample whose reward still fails after the retries is dropped from its group and counted as `reward/dropped`, or
    stops the run."""
    retries: int = within(1, least=0, most=100)
    """Further calls after one that raised, hung in a process of its own, or gave a value that is not finite."""
    max_dropped: float = within(0.2, least=0, most=1)
    """Largest share of dropped samples in an iteration or an evaluation; above it the run stops, with a checkpoint."""
    timeout_seconds: float = within(300.0, least=0)
    """Longest wait for one call of a reward, or of `eval.judge`, which scores up to sampling.batch_size videos, and for
    the start of its process. A process of its own is then ended and started again; a call within the run's process
    cannot be ended, and the run stops. After twice this, the videos of a batch that have no score are dropped. The
    other ranks wait meanwhile: keep it at most a tenth of `timeout_minutes`. 0: no limit."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.several:
            for field in dataclasses.fields(RewardEntry):
                value, own = getattr(self, field.name), getattr(RewardEntry(), field.name)
                require(
                    value == own, f"reward.{field.name}", value, "reward.several stands in its place; move it there"
                )
        weights = self.part_weights
        require(
            any(weight != 0 for weight in weights.values()),
            "reward.several" if self.several else "reward.weights",
            self.several or self.weights,
            "expected finite weights, at least one of them not zero, such as vq 1, mq 1, ta 1",
        )

    @property
    def entries(self) -> list[RewardEntry]:
        """The rewards: this one, or those of `several`.

        Raises:
            UserError: an entry has an unknown key or a wrong value.
        """
        return [_entry(values, place) for place, values in enumerate(self.several)] if self.several else [self]

    @property
    def part_weights(self) -> dict[str, float]:
        """Part, by its name in the metrics -> its weight in the composite, of all rewards.

        Raises:
            UserError: two rewards weigh a part of the same name.
        """
        weights: dict[str, float] = {}
        for entry in self.entries:
            for part, weight in entry.weights.items():
                if entry.named(part) in weights:
                    raise UserError(
                        f"reward.several: two rewards have a part {entry.named(part)!r}; give one of them a prefix"
                    )
                weights[entry.named(part)] = weight
        return weights


def _entry(values: Mapping[str, Any], place: int) -> RewardEntry:
    fields, key = [field.name for field in dataclasses.fields(RewardEntry)], f"reward.several[{place}]"
    for name in values:
        if name not in fields:
            raise UserError(f"{key}: unknown key {name!r}; {nearest(name, fields)}")
    for name in ("name", "weights"):
        if name not in values:
            raise UserError(f"{key}: {name!r} is missing, such as {{name: testbed, weights: {{vq: 1}}}}")
    try:
        return RewardEntry(**values)
    except UserError as error:
        raise UserError(f"{key}.{error}") from error


def _is_plain(value: object) -> bool:
    """Whether a value reaches another process unchanged."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


@dataclasses.dataclass(kw_only=True)
class ObjectiveConfig(Section):
    """The policy's part of the loss."""

    surrogate: Surrogate = "clip"
    """`clip`: clipped ratio; `log_prob`: the plain log-prob of Eq. 43, which uses no ratio; `nft`: DiffusionNFT, which
    noises the final samples again and so trains with any sampler, `ode` too."""
    nft_beta: float = within(1.0, above=0)
    """Beta of `nft`: the smaller, the further from the rollout policy its optimum lies, by 1 / beta."""
    ratio: Ratio = "plain"
    """The ratio that is clipped. `plain`: exp(log-ratio); `centred`: the KL to the rollout policy is added to the
    log-ratio, whose mean is then zero; `normalised`: that times S_t, so that the clip acts alike at every step."""
    clip_range: float = within(1e-4, above=0)
    """The ratio of a transition is clipped to 1 - clip_range to 1 + clip_range."""
    log_prob: Reduction = "mean"
    """Reduction of the log-prob over the elements of a sample; `unscaled` is -mean((x_next - mu)^2)."""
    equalizer: bool = True
    """Temporal gradient equalizer S_t (Eq. 9)."""
    advantage_std: AdvantageStd = "group"
    """Standard deviation that an advantage is in units of: `group`, that of its own group (Eq. 10), or `batch`, that of
    the iteration's samples about the means of their groups: a group that is nearly equal then weighs little."""
    advantage_clamp: float = within(5.0, above=0)
    """Largest |advantage|, in those standard deviations."""
    drop_equal_groups: bool = True
    """Skip groups whose rewards are all equal in the update."""


@dataclasses.dataclass(kw_only=True)
class KLConfig(Section):
    """What holds the policy near the weights of its start, near itself, or both."""

    strategy: KLStrategyName = "dual"
    """Terms of the KL: `fixed` (anchor = weights at the start of the run, `model.weights` included), `moving` (an
    anchor that is refreshed), `stepwise` (the rollout policy), `dual` (moving and stepwise)."""
    velocity_term: VelocityTerm = "rollout"
    """`rollout`: logp_old - logp (Eq. 15); `closed_form`: the same KL without sampling noise."""
    beta_pos: float = within(1.0, least=0)
    """Weight of the KL to the anchor."""
    position_fraction: float = within(1.0, above=0, most=1)
    """Share of the trained steps, drawn anew each iteration, that the KL to the anchor is taken on; weighted by its
    inverse, so that the mean is that of all steps. The anchor's forward runs for these alone."""
    beta_vel: float = within(0.1, least=0)
    """Weight of the KL to the rollout policy."""
    anchor_interval: int = within(10, least=1)
    """Optimizer steps between two refreshes of the moving anchor."""
    lambda_min: float = within(1e-7, least=0)
    """Weight of the whole KL at the start, and its smallest later; at most kl.lambda_max."""
    lambda_max: float = within(1e-5, least=0)
    """Weight of the whole KL after the warm-up, and its largest with feedback `paper`."""
    lambda_limit: float = within(1e3, least=0)
    """Largest weight of the whole KL with feedback `ppo` or `share`; at least kl.lambda_max."""
    warmup_steps: int = within(100, least=0)
    """K of Eq. 41, in optimizer steps; feedback `share` has no warm-up."""
    feedback: Feedback = "paper"
    """How lambda moves after the warm-up: `paper` (Eq. 42 as printed), `ppo` (the usual direction), `share` (holds the
    KL's share of the gradient), `none` (stays at kl.lambda_max)."""
    target: float = within(1e-4, above=0)
    """KL that `paper` and `ppo` steer by, per element."""
    target_share: float = within(0.02, above=0, below=1)
    """Share of the KL in the gradient on the velocity, `kl/gradient_share`, that `share` holds; the velocity term
    counts only in closed form."""
    history: int = within(10, least=1)
    """H of Eq. 42: optimizer steps over which the feedback averages what it observes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.lambda_min <= self.lambda_max,
            "kl.lambda_min",
            self.lambda_min,
            f"expected at most kl.lambda_max; the nearest is {self.lambda_max}",
        )
        require(
            self.lambda_max <= self.lambda_limit,
            "kl.lambda_limit",
            self.lambda_limit,
            f"expected at least kl.lambda_max; the nearest is {self.lambda_max}",
        )
        require(
            self.lambda_min > 0 or self.feedback not in ("ppo", "share"),
            "kl.lambda_min",
            self.lambda_min,
            f"feedback {self.feedback!r} multiplies lambda; expected above 0, such as 1e-07",
        )
        require(
            self.feedback != "share" or self.strategy != "stepwise" or self.velocity_term == "closed_form",
            "kl.feedback",
            self.feedback,
            "strategy 'stepwise' has a gradient to hold only with kl.velocity_term = closed_form",
        )


@dataclasses.dataclass(kw_only=True)
class TrainConfig(Section):
    """Iterations, updates and the optimizer."""

    iterations: int = within(100, least=1)
    """Rounds of rollout, reward and update."""
    prompts_per_iteration: int = within(2, least=1)
    """Groups per iteration, over all ranks."""
    group_size: int = within(4, least=2)
    """Samples of one prompt, whose rewards are compared: one alone would have no advantage."""
    optimizer_steps: int = within(1, least=1)
    """Updates per iteration; each trains every sample, at its own share of the trained steps."""
    batch_size: int = within(1, least=1)
    """Transitions per forward; gradients accumulate up to the optimizer step."""
    timestep_fraction: float = within(1.0, above=0, most=1)
    """Share of the stochastic steps that is trained."""
    timestep_permutation: bool = True
    """Train the steps in random order (a random subset if the fraction is below 1)."""
    engine: EngineName = "plain"
    """What the ranks share out: `plain` nothing; by DeepSpeed, `zero1` the optimizer's state, `zero2` the gradients
    too, `zero3` the weights too. docs/engines.md says when."""
    offload: Offload = "none"
    """What ZeRO keeps and updates in host memory: `optimizer` (its state), or with `zero3` `all` (the weights too)."""
    deepspeed_config: str | None = None
    """JSON file that is laid over DeepSpeed's configuration, which follows from the other settings."""
    optimizer: Optimizer = "adamw"
    """`muon`: Muon for the matrices of the transformer blocks and AdamW for the rest, with model.tuning = full;
    `adamw8bit`: AdamW with its moments in 8 bits, by bitsandbytes."""
    learning_rate: float = within(1e-5, above=0)
    """After the warm-up; Muon's updates are scaled to the size of AdamW's, so that one value serves both."""
    warmup_steps: int = within(0, least=0)
    """Optimizer steps over which the learning rate rises linearly; step k of K uses k / K of it."""
    schedule: Schedule = "constant"
    """Learning rate after the warm-up: `constant`, or a `cosine` or `linear` fall to 0 at the end of the run, after
    iterations x optimizer_steps steps. A run that --resume extends goes on along the curve of its new length."""
    weight_decay: float = within(1e-4, least=0)
    """Decoupled: a weight shrinks by learning rate x weight_decay each step."""
    eps: float = within(1e-15, above=0)
    """Added to the root of AdamW's second moment. Gradients of a mean log-prob are about 2e-9 an element, whose updates
    the usual 1e-8 would shrink to a sixth."""
    max_grad_norm: float = within(1.0, above=0)
    """Gradients are scaled down to this norm over all weights."""
    ema_decay: float = within(0.0, least=0, below=1)
    """Exponential moving average of the trained weights; 0 turns it off."""
    checkpoint_interval: int = within(50, least=1)
    """Iterations between checkpoints."""
    keep_checkpoints: int = within(2, least=1)
    """The last so many checkpoints are kept: a damaged one is skipped for the one before."""
    keep_best: bool = True
    """Keep the checkpoint with the highest held-out reward too; every evaluation within the run then makes one."""
    grace_seconds: float = within(25.0, above=0)
    """From SIGTERM or Ctrl-C to the end of the process. An iteration that does not end within half of it is given up,
    and done again after --resume. Slurm, Kubernetes and torchrun kill after 30 by default."""
    parity_gate: bool = True
    """Replay the first rollouts and stop if their log-probs differ by more than a tenth of the clip range; with several
    updates an iteration, measure what rounding adds to the ratio after the first, warn above a tenth and stop above a
    third."""

    def __post_init__(self) -> None:
        super().__post_init__()
        sharded, needs = self.engine != "plain", "needs train.engine = zero1, zero2 or zero3"
        for holds, key, expected in (
            (
                not sharded or self.optimizer == "adamw",
                "optimizer",
                f"train.engine = {self.engine} updates rows of joined weights, which only adamw can; the nearest "
                "choice is adamw, or train.engine = plain",
            ),
            (
                self.offload != "all" or self.engine == "zero3",
                "offload",
                f"needs train.engine = zero3; the nearest choice is {'optimizer' if sharded else 'none'}",
            ),
            (self.offload == "none" or sharded, "offload", f"{needs}; the nearest choice is none"),
            (self.deepspeed_config is None or sharded, "deepspeed_config", f"{needs}, the nearest of which is zero1"),
        ):
            require(holds, f"train.{key}", getattr(self, key), expected)


@dataclasses.dataclass(kw_only=True)
class EvalConfig(Section):
    """Scores and videos of held-out prompts, sampled by the ODE with fixed seeds."""

    interval: int = within(0, least=0)
    """Iterations between evaluations; 0: only before and after the run."""
    steps: int = within(40, least=1, most=1000)
    """ODE steps."""
    num_prompts: int = within(16, least=1)
    """The first so many of the held-out prompts."""
    seeds_per_prompt: int = within(1, least=1)
    """Videos of each prompt."""
    num_videos: int = within(6, least=1)
    """Videos that are shown in the report: largest gains, medians and largest losses."""
    judge: str | None = None
    """Another reward, named as in `reward.name`, that is never trained on: a rising reward with a falling judge is
    reward hacking. `testbed-judge` is the testbed's."""


@dataclasses.dataclass(kw_only=True)
class TrackingConfig(Section):
    """Where the numbers of a run are shown, beside its folder."""

    trackers: list[str] = dataclasses.field(default_factory=lambda: ["tensorboard"])
    """Trackers beside `metrics.jsonl`, by accelerate's names: `tensorboard`, `wandb`, `trackio`, `mlflow`, ..."""
    project: str = "sage-fast"
    """Project of the run in trackers that have projects."""


@dataclasses.dataclass(kw_only=True)
class Config(Section):
    """The run as a whole."""

    output: str = "runs/sage"
    """Run folder; must not hold another run."""
    seed: int = within(0, least=0, below=2**63)
    """All random numbers of a run follow from it."""
    timeout_minutes: float = within(60.0, above=0)
    """Longest wait of a rank for the others, as while one of them downloads, scores or evaluates; then the run ends."""
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    sampling: SamplingConfig = dataclasses.field(default_factory=SamplingConfig)
    reward: RewardConfig = dataclasses.field(default_factory=RewardConfig)
    objective: ObjectiveConfig = dataclasses.field(default_factory=ObjectiveConfig)
    kl: KLConfig = dataclasses.field(default_factory=KLConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    eval: EvalConfig = dataclasses.field(default_factory=EvalConfig)
    tracking: TrackingConfig = dataclasses.field(default_factory=TrackingConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.train.optimizer != "muon" or self.model.tuning == "full",
            "train.optimizer",
            self.train.optimizer,
            "needs model.tuning = full, since it orthogonalises whole weight matrices; the nearest choice is adamw",
        )
        require(
            self.train.optimizer != "adamw8bit" or self.train.eps >= 1e-10,
            "train.eps",
            self.train.eps,
            "adamw8bit rounds second moments far below the largest of their block to 0, and eps alone bounds those "
            "updates; expected at least 1e-10, the nearest",
        )
