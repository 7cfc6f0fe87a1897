"""One typed tree of settings: a run is described by a `Config`.

Every default, choice, bound and help text is written here and nowhere else.
sage_fast/config/loader.py reads the tree from YAML files and the command line. A section validates
itself on construction.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from sage_fast.config.engines import ADAPTERS, BYTES
from sage_fast.config.fields import (
    NAMES,
    PLACE_FORM,
    Section,
    is_finite,
    names,
    settings_of,
    within,
)
from sage_fast.config.secrets import bare_address
from sage_fast.util.errors import UserError, nearest

Sampler = Literal["sage", "flow", "dance", "cps", "dance-precise", "precise", "ode"]
ODE_SAMPLERS = ("ode",)
"""Samplers without noise."""
Reduction = Literal["mean", "unscaled"]
Surrogate = Literal["clip", "kl_mask", "log_prob", "nft", "awm"]
Ratio = Literal["plain", "centred", "normalised"]
AdvantageStd = Literal["group", "batch"]
KLStrategyName = Literal["none", "fixed", "stepwise", "moving", "dual"]
VelocityTerm = Literal["rollout", "closed_form"]
Feedback = Literal["none", "paper"]
DType = Literal["float32", "bfloat16"]
Tuning = Literal["lora", "full"]
Checkpointing = Literal["none", "attention", "full", "auto"]
StreamBlocks = Literal["auto", "all"]
AttentionBackend = Literal["auto", "sdpa", "cudnn", "flash", "flash3", "flash4", "xformers"]
Optimizer = Literal["adamw", "muon"]
LearningRateSchedule = Literal["constant", "cosine", "linear"]
EngineName = Literal["plain", "zero1", "zero2", "zero3"]
OnFailure = Literal["drop", "stop"]


MOST_SAMPLES = 2**20
"""Maximum number of samples per iteration, each of which is planned."""
MOST_PIXELS = 2**34
"""Maximum number of pixels of a video, all frames together."""
RANDOM = "random:"
"""Prefix of `model.path` for a model with random weights."""
OBJECT = "object:"
"""Prefix of `reward.name` for a reward that a program gave as an object, which no name can import.
"""
MODEL_NAMES = ("testbed", "testbed-i2v")
"""Checkpoints that come with the package, by what `model.path` calls them."""
PROMPT_SETS = ("testbed:train", "testbed:heldout")
"""Prompts that come with the package, by what `data.prompts` calls them."""

_DEVICE = re.compile(r"cpu|cuda(:\d+)?")


@dataclasses.dataclass(kw_only=True)
class ModelConfig(Section):
    """The policy and which of its weights are trained."""

    path: str = names("model", "testbed")
    """`testbed`, `testbed-i2v`, a local folder in diffusers format, or a hub id such as
    hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v. `random:hunyuanvideo15-480p`, the
    same with `-4-blocks`, and `random:testbed` have random weights, for measuring the time and
    memory of an iteration without a checkpoint. Prefix any of these with `package.module:Name:` to
    use a model family of your own."""
    dtype: DType = "bfloat16"
    """Storage type of frozen weights and activations. Latents are always float32."""
    tuning: Tuning = "lora"
    """What to train: a LoRA adapter or all weights."""
    weights: str | None = names("file", None)
    """Trained weights to start from, as a run saves them: a LoRA (rank and alpha then come from the
    file) or a transformer folder. Or a LoRA of another program: docs/how-to/export.md."""
    lora_rank: int = within(64, least=1)
    """Rank of the LoRA adapter."""
    lora_alpha: int = within(128, least=1)
    """The adapter's output is scaled by alpha / rank."""
    lora_targets: str | None = None
    """Regular expression over full module names. Layers that match get an adapter. If not given,
    those that the model chooses: of its blocks, the linear layers of attention and feed-forward."""
    attention: AttentionBackend = "auto"
    """Attention kernel. `flash`, `flash3` and `flash4` are flash-attn 2, 3 and 4. `auto` picks the
    fastest one installed, measured at the size of the run."""
    gradient_checkpointing: Checkpointing = "auto"
    """What the backward recomputes. `full`: every transformer block, at the least memory and the
    cost of one more forward. `attention`: the blocks except for attention, whose output is kept.
    `none`: nothing. `auto`: as little as fits into free memory, by block."""
    stream_blocks: int | StreamBlocks = within("auto", least=0)
    """Blocks whose frozen weights stay in page-locked host memory and pass through the GPU, one
    block ahead of the computation; results are the same to the bit. `auto`: as many as the plan
    finds fastest, since their room saves recomputation; none unless that saves a tenth of the time
    or nothing else fits. For an adapter, with every engine but zero3 (docs/how-to/one-gpu.md)."""
    sequence_parallel: int = within(1, least=1)
    """GPUs that share one sample, for videos too long for one GPU. Each holds a part of the tokens
    and, for attention, a part of the heads. Must divide the number of the transformer's heads and
    the number of ranks."""

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            re.compile(self.lora_targets or "")
        except re.error as error:
            raise UserError(
                f"model.lora_targets = {self.lora_targets!r}: not a regular expression: {error}"
            ) from error

    @property
    def trains_adapter(self) -> bool:
        """Whether an adapter is trained, over frozen weights."""
        return ADAPTERS[self.tuning]

    @property
    def streams(self) -> bool:
        """Whether blocks are streamed whatever the memory."""
        return self.stream_blocks not in ("auto", 0)

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of frozen weights and activations."""
        return BYTES[self.dtype]


@dataclasses.dataclass(kw_only=True)
class DataConfig(Section):
    """The prompts."""

    prompts: str = names("prompts", "testbed:train")
    """Training prompts: a UTF-8 text file with one prompt per line, a .jsonl file
    (docs/how-to/prompts.md), or `testbed:train`, `testbed:heldout`."""
    eval_prompts: str = names("prompts", "testbed:heldout")
    """Held-out prompts, in the same formats."""
    negative_prompt: str | None = None
    """What guidance steers away from, for every prompt without a `negative_prompt` of its own in a
    .jsonl file. If not given, the empty prompt. Without guidance it has no effect."""
    embedding_cache: str | None = names("file", None)
    """Folder of prompt embeddings, filled by `sage-fast embed` and shared between runs. If not
    given, `embeddings` in the run folder."""


@dataclasses.dataclass(kw_only=True)
class SamplingConfig(Section):
    """How rollouts are sampled."""

    sampler: Sampler | str = names("plugin", "sage")
    """Rule of a denoising step (docs/explanation/samplers.md). `ode` adds no noise and can
    only be trained with a surrogate that re-noises the final samples, such as nft. Or
    `package.module:name` of your own (docs/how-to/extend.md)."""
    eta: float = within(0.5, least=0, most=10)
    """Noise level of the sampler. 0 is the ODE; `cps` is defined up to 1."""
    steps: int = within(20, least=1, most=1000)
    """Denoising steps per rollout."""
    shift: float = within(5.0, above=0, most=100)
    """Shift of the noise schedule towards sigma = 1. 1 is no shift; 5 is the default of 480p."""
    guidance_scale: float = within(1.0, least=1)
    """Classifier-free guidance scale, the same in rollout and training. 1 turns guidance off."""
    num_frames: int = within(81, least=1, every=4)
    """Frames per video."""
    height: int = within(480, least=16, every=16)
    """Video height in pixels."""
    width: int = within(832, least=16, every=16)
    """Video width in pixels."""
    sde_window: int = within(0, least=0)
    """Length of a random contiguous window of SDE steps; the ODE is used outside it. 0: all steps
    are SDE steps. A length that divides sampling.steps trains each step equally often; with another
    the end steps are in fewer windows. Surrogates that re-noise the final samples, such as nft,
    train all steps whatever the window."""
    window_per_prompt: bool = False
    """Draw the window anew for each prompt, instead of one for all prompts of an iteration."""
    averaged_weights: bool = False
    """Roll out, and score the old policy, with the average of the weights, as DiffusionNFT does.
    Needs train.ema_decay above 0, which sets how slowly the average follows. The ratio then differs
    from 1 in the first update already."""
    shared_initial_noise: bool = False
    """Give all samples of a group the same initial latents. The steps before its window then run
    once per rank for all of its samples."""
    batch_size: int = within(4, least=1)
    """Samples denoised together."""
    cuda_graphs: bool = True
    """Replay denoising steps from CUDA graphs, where they fit in memory.

    Results are bit-identical.
    """
    offload_trajectories: bool = False
    """Keep the trained steps in pinned host memory instead of GPU memory."""

    @property
    def passes(self) -> int:
        """Forwards of a denoising step: 2 with guidance."""
        return 1 if self.guidance_scale == 1 else 2

    def __post_init__(self) -> None:
        super().__post_init__()
        most = (
            f"expected at most {MOST_PIXELS:,} pixels in num_frames x height x width, such as 81 x "
            "480 x 832"
        )
        self.require(self.num_frames * self.height * self.width <= MOST_PIXELS, "num_frames", most)
        all_steps = f"expected 0 (all steps) to sampling.steps; the nearest is {self.steps}"
        self.require(self.sde_window <= self.steps, "sde_window", all_steps)
        no_window = "there is no window with sampling.sde_window = 0; the nearest choice is false"
        self.require(
            self.sde_window > 0 or not self.window_per_prompt, "window_per_prompt", no_window
        )


@dataclasses.dataclass(kw_only=True)
class RewardEntry(Section):
    """One reward: what to call, where it runs, and how its parts are weighted."""

    SECTION: ClassVar[str] = ""

    name: str = names("reward", "testbed")
    """A shipped reward (`testbed`), one that an installed package offers, `package.module:name` of
    a class or a callable (videos [B, F, 3, H, W] in [0, 1], prompts) -> dict of [B], or
    http://host:port of `sage-fast serve-reward`. A module beside the settings file is found
    first."""
    args: dict[str, Any] = dataclasses.field(default_factory=dict, metadata={NAMES: "arguments"})
    """Keyword arguments of the reward class: '{path: weights/scorer, fps: 2}'. `${NAME}` in one
    stands for the environment variable NAME: give secrets so."""
    weights: dict[str, float] = dataclasses.field(
        default_factory=lambda: {"vq": 1.0, "mq": 1.0, "ta": 1.0}
    )
    """Weights of the composite reward R = sum of weight x part. The paper's setting A is 1, 1, 1
    and B is 0.5, 0.5, 1. Weights given on the command line replace those of the file, which replace
    the default: '{red: 1}', or --reward.weights.red 1."""
    prefix: str | None = None
    """Prefix for the names of its parts, such as clip_, for two rewards with a part of the same
    name. `weights` use the names without it."""
    device: str | None = None
    """Device of the reward, if not the rank's own: cpu, cuda:7, or a comma-separated list that the
    ranks and their workers take in turn. Passed to a class that takes `device`; the videos are
    already there."""
    workers: int = within(0, least=0)
    """Processes per rank that score in parallel with the rollout. A hang or a crash in one ends
    neither the run nor the call. 0: score in the run's own process, on its main thread, between two
    rollouts. For a reward on a server, an address or `vlm`: maximum number of concurrent calls, at
    least 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        bare = bare_address(self.name)  # the name itself may hold a secret
        if self.is_address and bare != self.name:
            name = "reward.name" if isinstance(self, RewardConfig) else "name"
            raise UserError(
                f"{name} = {bare!r}: expected this address alone, without a user or a query"
            )
        self.require(
            all(map(is_finite, self.weights.values())), "weights", "expected finite weights"
        )
        self.require(
            _is_plain(self.args), "args", "expected numbers, text, lists and mappings with names"
        )
        listed = (
            "expected cpu, cuda or cuda:N, or several of them with commas, such as cuda:6,cuda:7"
        )
        self.require(all(map(_DEVICE.fullmatch, self.devices)), "device", listed)

    @property
    def devices(self) -> list[str]:
        """Devices listed in `device`; empty if it is not given."""
        return [] if self.device is None else [device.strip() for device in self.device.split(",")]

    @property
    def is_address(self) -> bool:
        """Whether the name is the address of a server of rewards."""
        return self.name.startswith(("http://", "https://"))

    @property
    def is_object(self) -> bool:
        """Whether the reward is an object of the program that trained, which no name can import."""
        return self.name.startswith(OBJECT)

    @property
    def needed(self) -> set[str]:
        """Parts with a nonzero weight, by the reward's own names."""
        return {part for part, weight in self.weights.items() if weight != 0}

    @property
    def named_weights(self) -> dict[str, float]:
        """Weights of its parts, keyed by their names in the metrics."""
        return {self.named(part): weight for part, weight in self.weights.items()}

    def named(self, part: str) -> str:
        """Return the name of the part in the metrics."""
        return f"{self.prefix or ''}{part}"


@dataclasses.dataclass(kw_only=True)
class RewardConfig(RewardEntry):
    """The reward that training maximises."""

    several: list[dict[str, Any]] = dataclasses.field(
        default_factory=list, metadata={NAMES: "rewards"}
    )
    """Several rewards in place of `name`: a list of mappings, each with a name and weights and,
    where needed, args, prefix, device and workers."""
    on_failure: OnFailure = "drop"
    """What to do with a sample whose reward still fails after the retries. `drop`: drop it from its
    group and count it as `reward/dropped`. `stop`: stop the run."""
    retries: int = within(1, least=0, most=100)
    """Further calls for a video after one that raised, hung in a worker process, or returned a
    value that is not finite. Each scores one video, or the whole group where a reward compares."""
    max_dropped: float = within(0.2, least=0, most=1)
    """Largest fraction of dropped samples in an iteration or an evaluation. Above it the run stops
    with a checkpoint."""
    timeout_seconds: float = within(300.0, least=0)
    """Time limit for one call of a reward in worker processes or on a server, which scores up to
    sampling.batch_size videos or a group that is compared, and for starting a worker. A worker that
    exceeds it is killed and restarted. After twice this time, the videos of a batch that still have
    no score are dropped. The other ranks wait meanwhile: keep it at or below a tenth of
    `timeout_minutes`. 0: no limit. A call in the run's own process (workers: 0) has none: nothing
    can end it but the end of the run."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.several:
            for field in dataclasses.fields(RewardEntry):
                unset = getattr(self, field.name) == getattr(RewardEntry(), field.name)
                self.require(unset, field.name, "reward.several takes its place; move it there")
        nonzero = "expected finite weights, at least one of them not zero, such as vq 1, mq 1, ta 1"
        self.require(
            any(self.part_weights.values()), "several" if self.several else "weights", nonzero
        )

    @property
    def entries(self) -> list[RewardEntry]:
        """The rewards: this one, or the entries of `several`.

        Raises:
            UserError: an entry has an unknown key or a wrong value.
        """
        if not self.several:
            return [self]
        return [_entry(values, number) for number, values in enumerate(self.several)]

    @property
    def keyed_entries(self) -> dict[str, RewardEntry]:
        """The setting that holds the name of a reward -> the reward."""
        if not self.several:
            return {"reward.name": self}
        return {f"reward.several[{i}].name": entry for i, entry in enumerate(self.entries)}

    @property
    def part_weights(self) -> dict[str, float]:
        """Weights of the composite over all rewards, keyed by the part's name in the metrics.

        Raises:
            UserError: two rewards weigh a part of the same name.
        """
        weights: dict[str, float] = {}
        for entry in self.entries:
            for name, weight in entry.named_weights.items():
                if name in weights:
                    raise UserError(
                        f"reward.several: two rewards have a part {name!r}; give one a prefix"
                    )
                weights[name] = weight
        return weights


def _entry(values: Mapping[str, Any], number: int) -> RewardEntry:
    """Return the reward with this number in `reward.several`.

    Raises:
        UserError: an unknown or missing key, or a wrong value.
    """
    key = f"reward.several[{number}]"
    fields = [field.name for field in dataclasses.fields(RewardEntry)]
    for name in values:
        if name not in fields:
            raise UserError(f"{key}: unknown key {name!r}; {nearest(name, fields)}")
    for name in ("name", "weights"):
        if name not in values:
            raise UserError(
                f"{key}: {name!r} is missing, such as {{name: testbed, weights: {{vq: 1}}}}"
            )
    try:
        return RewardEntry(**values)
    except UserError as error:
        raise UserError(f"{key}.{error}") from error


def _is_plain(value: object) -> bool:
    """Return whether a value reaches another process unchanged."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


@dataclasses.dataclass(kw_only=True)
class ObjectiveConfig(Section):
    """The policy term of the loss."""

    surrogate: Surrogate | str = names("plugin", "clip")
    """`clip`: clipped ratio. `kl_mask`: the ratio, masked by the KL to the rollout policy instead
    of clipped. `log_prob`: the plain log-prob of Eq. 43, without a ratio. The others re-noise the
    final samples and so train with any sampler, including `ode`. `nft`: DiffusionNFT, with the
    weighting of its published code. `awm`: advantage-weighted matching. Or `package.module:name`
    of your own (docs/how-to/extend.md)."""
    nft_beta: float = within(1.0, above=0)
    """Beta of `nft`.

    The distance of the optimum from the rollout policy is proportional to 1 / beta.
    """
    kl_limit: float = within(1e-5, above=0)
    """`kl_mask` masks a transition that moves away from the rollout policy when its KL to it is
    above this. Per element with objective.log_prob = mean. Takes effect from the second update of
    an iteration on, with sampling.averaged_weights from the first."""
    ratio: Ratio = "plain"
    """The ratio that is clipped. `plain`: exp(log-ratio). `centred`: the KL to the rollout policy
    is added to the log-ratio, which makes its mean zero. `normalised`: the centred log-ratio times
    S_t, so that the clip acts alike at every step."""
    clip_range: float = within(1e-4, above=0)
    """The ratio of a transition is clipped to [1 - clip_range, 1 + clip_range]."""
    log_prob: Reduction = "mean"
    """Reduction of the log-prob over the elements of a sample. `unscaled` is -mean((x_next -
    mu)^2). No effect on the policy term of `nft`; it scales the KL."""
    equalizer: bool = True
    """Apply the temporal gradient equalizer S_t (Eq. 9).

    No effect on `nft`, which weighs the noise levels itself.
    """
    balanced_rewards: bool = False
    """Normalise each part of the reward over its group before the weighted sum. With
    `advantage_std` = batch this is GDPO, up to one factor for all samples where groups are equal:
    they do not count in the deviation. Needs at least two parts with a weight."""
    advantage_std: AdvantageStd = "group"
    """Standard deviation that divides the advantages. `group`: that of the sample's own group (Eq.
    10). `batch`: that of all samples of unequal groups about their group means, which gives a
    nearly equal group little weight."""
    advantage_clamp: float = within(5.0, above=0)
    """Largest |advantage|, in units of the standard deviation that `advantage_std` names."""
    drop_equal_groups: bool = True
    """Leave groups whose rewards are all equal out of the update."""


@dataclasses.dataclass(kw_only=True)
class KLConfig(Section):
    """The KL penalty, which keeps the policy near its starting weights, near its recent self, or
    both."""

    strategy: KLStrategyName | str = names("plugin", "dual")
    """Terms of the KL. `fixed`: anchor = weights at the start of the run, `model.weights` included.
    `moving`: an anchor that is refreshed. `stepwise`: the rollout policy. `dual`: moving and
    stepwise. Or `package.module:name` of your own (docs/how-to/extend.md)."""
    velocity_term: VelocityTerm = "closed_form"
    """Form of the KL to the rollout policy. `rollout`: logp_old - logp (Eq. 15). `closed_form`: the
    same KL without sampling noise; with one update per iteration it is exactly 0 and costs
    nothing."""
    beta_pos: float = within(1.0, least=0)
    """Weight of the KL to the anchor."""
    beta_vel: float = within(0.1, least=0)
    """Weight of the KL to the rollout policy."""
    anchor_fraction: float = within(1.0, above=0, most=1)
    """Fraction of the trained transitions at which the KL to the anchor is computed, each with a
    weight of 1 / fraction, so that its mean stays; drawn anew for each iteration. Saves the other
    transitions' forwards of the anchor. In the iteration after its refresh, where the anchor needs
    none, all are used."""
    anchor_interval: int = within(10, least=1)
    """Optimizer steps between refreshes of the moving anchor."""
    lambda_min: float = within(1e-7, least=0)
    """Weight of the whole KL at the start, and its lower bound afterwards. At most
    kl.lambda_max."""
    lambda_max: float = within(1e-5, least=0)
    """Weight of the whole KL after the warm-up, and its upper bound with feedback `paper`. 0 turns
    the KL off. At the paper's 1e-5 the KL does nothing."""
    warmup_steps: int = within(100, least=0)
    """K of Eq. 41: optimizer steps over which lambda rises linearly from kl.lambda_min to
    kl.lambda_max."""
    feedback: Feedback | str = names("plugin", "none")
    """How lambda changes after the warm-up. `none`: stay at kl.lambda_max. `paper`: Eq. 42 as
    printed, between kl.lambda_min and kl.lambda_max. Or `package.module:name` of your own
    (docs/how-to/extend.md)."""
    target: float = within(1e-4, above=0)
    """Target KL of `paper`, per element."""
    history: int = within(10, least=1)
    """H of Eq. 42: optimizer steps over which `paper` averages the KL."""

    def __post_init__(self) -> None:
        left = "expected one of none, paper: no share of the gradient is held any more"
        nearest_choice = "the nearest choice is none, which stays at kl.lambda_max"
        self.require(self.feedback != "share", "feedback", f"{left}; {nearest_choice}")
        super().__post_init__()
        nearest_valid = f"kl.lambda_max; the nearest is {self.lambda_max}"
        self.require(
            self.lambda_min <= self.lambda_max, "lambda_min", f"expected at most {nearest_valid}"
        )


@dataclasses.dataclass(kw_only=True)
class TrainConfig(Section):
    """Iterations, updates and the optimizer."""

    iterations: int = within(100, least=1)
    """Rounds of rollout, reward and update."""
    prompts_per_iteration: int = within(2, least=1)
    """Groups per iteration, over all ranks."""
    group_size: int = within(4, least=2, most=2**20)
    """Samples per prompt. Their rewards are compared; one alone would have no advantage."""
    optimizer_steps: int = within(1, least=1)
    """Updates per iteration. Each trains every sample, on its own share of the trained steps."""
    batch_size: int = within(1, least=1)
    """Transitions per forward. Gradients accumulate up to the optimizer step."""
    timestep_fraction: float = within(1.0, above=0, most=1)
    """Fraction of the stochastic steps that is trained, drawn anew for each iteration. Each sample
    trains them in a random order of its own."""
    engine: EngineName = "plain"
    """What is sharded over the ranks. `plain`: nothing. With DeepSpeed, `zero1`: the optimizer
    state; `zero2`: the gradients too. With PyTorch's FSDP2, `zero3`: the weights too.
    docs/how-to/many-gpus.md says which to use when."""
    hybrid_shard: bool = True
    """With `zero3` on several nodes, shard over the ranks of a node, so that only gradients cross
    nodes, once an update. Each node holds all shards: without it, they are spread over all
    ranks."""
    offload_shards: bool = False
    """With `zero3`, keep each rank's shards of weights, gradients, optimizer state, anchor and
    average in host memory. A block is copied to the GPU for its forward and its backward, and the
    update runs on the CPU: slower, for a model that fits no other way."""
    deepspeed_config: str | dict[str, Any] | None = names("file", None)  # a field
    """With `zero1` and `zero2`: a JSON or YAML file, or a mapping, in DeepSpeed's own words, such
    as {zero_optimization: {reduce_bucket_size: 50000000}}. It is merged over the configuration that
    follows from the settings, whose keys it may not change."""
    optimizer: Optimizer = "adamw"
    """`muon`: Muon for the matrices of the transformer blocks, or for the factors of their
    adapters, and AdamW for the rest."""
    learning_rate: float = within(1e-5, above=0)
    """Learning rate after the warm-up. Muon's updates are scaled to the size of AdamW's, so that
    one value serves both."""
    warmup_steps: int = within(0, least=0)
    """Optimizer steps over which the learning rate rises linearly. Step k of K uses k / K of it."""
    schedule: LearningRateSchedule = "constant"
    """Learning rate after the warm-up: `constant`, or a `cosine` or `linear` decay to 0 at the end
    of the run, after iterations x optimizer_steps steps. A run extended with --resume follows the
    curve of its new length."""
    weight_decay: float = within(1e-4, least=0)
    """Decoupled weight decay: each step shrinks a weight by learning rate x weight_decay, unless
    its gradient is exactly zero, as that of a LoRA's A is in the first step."""
    eps: float | None = within(None, above=0)
    """Added to the root of AdamW's second moment. Unset, 1e-15 for an adapter, whose gradients may
    be as small as 2e-9 per element; 1e-10 for all weights, so that weights whose gradients are
    rounding do not move."""
    max_grad_norm: float = within(1.0, above=0)
    """Maximum gradient norm over all weights; larger gradients are scaled down to it."""
    ema_decay: float = within(0.0, least=0, below=1)
    """Decay of the exponential moving average of the trained weights, which is evaluated and saved;
    0 turns it off. Update t uses at most (1 + t) / (10 + t), so that the average forgets the start;
    with sampling.averaged_weights, where the average also rolls out, the decay is the same from the
    first update on."""
    checkpoint_interval: int = within(50, least=1)
    """Iterations between checkpoints."""
    keep_checkpoints: int = within(2, least=1)
    """Number of latest checkpoints to keep. A damaged one is skipped for the one before."""
    keep_best: bool = True
    """Also save a checkpoint whenever an evaluation finds a higher held-out reward than the saved
    ones have, and keep the best. Parts of a reward that compares the videos of a prompt do not
    count."""
    grace_seconds: float = within(25.0, above=0)
    """Time from SIGTERM or Ctrl-C to the end of the process. An iteration that does not end within
    half of it is abandoned, and redone after --resume. Slurm, Kubernetes and torchrun kill after 30
    seconds by default."""
    parity_gate: bool = True
    """Replay the first rollouts and stop if their log-probs differ by more than a tenth of the clip
    range. With several updates per iteration, also measure what rounding adds to the ratio after
    the first one: warn above a tenth, stop above a third. With `kl_mask` it is what rounding adds
    to the KL, compared with objective.kl_limit."""

    def __post_init__(self) -> None:
        super().__post_init__()
        most = (
            f"{MOST_SAMPLES:,} samples an iteration; the nearest is "
            f"{MOST_SAMPLES // self.group_size}"
        )
        self.require(
            self.samples <= MOST_SAMPLES, "prompts_per_iteration", f"expected at most {most}"
        )

    @property
    def samples(self) -> int:
        """Number of samples per iteration, over all ranks."""
        return self.prompts_per_iteration * self.group_size


@dataclasses.dataclass(kw_only=True)
class EvalConfig(Section):
    """Scores and videos of held-out prompts, sampled by the ODE with fixed seeds."""

    interval: int = within(0, least=0)
    """Iterations between evaluations; 0: only before and after the run."""
    steps: int = within(40, least=1, most=1000)
    """Euler steps of the ODE, as in diffusers' pipeline."""
    guidance_scale: float | None = within(None, least=1)
    """Classifier-free guidance scale of evaluations and of `sage-fast sample`. If not given, that
    of training, sampling.guidance_scale."""
    num_prompts: int = within(16, least=1)
    """Number of held-out prompts to use, from the start of the file."""
    seeds_per_prompt: int = within(1, least=1)
    """Videos per prompt. At least 2 with a reward that compares them."""
    num_videos: int = within(6, least=1)
    """Videos shown in the report: largest gains, medians and largest losses."""
    judge: str | None = names("reward", None)
    """Another reward, named as in `reward.name`, that is never trained on. A rising reward with a
    falling judge is reward hacking. `testbed-judge` is the testbed's."""


@dataclasses.dataclass(kw_only=True)
class TrackingConfig(Section):
    """Trackers that show the metrics of a run, in addition to its folder."""

    trackers: list[str] = dataclasses.field(default_factory=lambda: ["tensorboard"])
    """Trackers in addition to `metrics.jsonl`, by accelerate's names: `tensorboard`, `wandb`,
    `mlflow`, ..."""
    project: str = "sage-fast"
    """Project name of the run, in trackers that have projects."""
    training_videos: int = within(4, least=0)
    """Samples to show of every `tracking.training_videos_interval`-th iteration, with prompt,
    rewards and advantage: the highest and the lowest advantage of its first groups. They are in
    the run folder, on its page and in the trackers. A rank keeps the videos of its samples of
    these groups in host memory until the rewards are known. 0: none."""
    training_videos_interval: int = within(10, least=1)
    """Iterations from one that is shown to the next."""


@dataclasses.dataclass(kw_only=True)
class ProfileConfig(Section):
    """Profiles of iterations while a run trains, written to `profiles/` in the run folder."""

    iterations: list[int] = dataclasses.field(default_factory=list)
    """Iterations to profile, as the screen counts them, from 1. The first one of a process compiles
    and warms up. Each rank writes a trace, and rank 0 the rates of its operations. A profiled
    iteration is slower."""
    memory: bool = False
    """Also record allocations: in the trace and, on a GPU, as a memory snapshot."""

    def __post_init__(self) -> None:
        super().__post_init__()
        expected = "expected iterations as the screen counts them, from 1, such as [2, 3]"
        self.require(all(number >= 1 for number in self.iterations), "iterations", expected)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CallbackEntry:
    """A callback of the user's.

    Attributes:
        name: `package.module:name` of a class, or of an object.
        args: keyword arguments of the class.
    """

    name: str
    args: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def _callback(value: Any, place: int) -> CallbackEntry:
    """Return the callback that an entry of `callbacks` names.

    Raises:
        UserError: the entry has another form.
    """
    key = f"callbacks[{place}]"
    if isinstance(value, str):
        entry = CallbackEntry(name=value)
    elif isinstance(value, Mapping):
        known = [field.name for field in dataclasses.fields(CallbackEntry)]
        for name in value:
            if name not in known:
                raise UserError(f"{key}: unknown key {name!r}; {nearest(str(name), known)}")
        if "name" not in value:
            raise UserError(f"{key}: 'name' is missing, such as my_callbacks:MyCallback")
        entry = CallbackEntry(**value)
    else:
        raise UserError(
            f"{key} = {value!r}: expected 'package.module:name', such as my_callbacks:MyCallback, "
            "or {name: my_callbacks:MyCallback, args: {...}}"
        )
    if not isinstance(entry.name, str) or not PLACE_FORM.fullmatch(entry.name):
        raise UserError(
            f"{key} = {entry.name!r}: expected 'package.module:name', such as "
            "my_callbacks:MyCallback"
        )
    if not isinstance(entry.args, Mapping) or not all(isinstance(name, str) for name in entry.args):
        raise UserError(
            f"{key}.args = {entry.args!r}: expected a mapping of names to values, such as "
            "{least: 0.5}"
        )
    return entry


@dataclasses.dataclass(kw_only=True)
class Config(Section):
    """The run as a whole."""

    output: str = names("output", "runs/sage")
    """Run folder; must not hold another run.

    A relative one is in the folder where the command starts.
    """
    seed: int = within(0, least=0, below=2**63)
    """Seed from which all random numbers of a run follow."""
    timeout_minutes: float = within(60.0, above=0)
    """Longest time a rank waits for the others, for example while one of them downloads, scores or
    evaluates. Then the run ends."""
    callbacks: list[Any] = dataclasses.field(default_factory=list, metadata={NAMES: "callbacks"})
    """Callbacks of your own (docs/how-to/callbacks.md), in the order in which they are called: each
    `package.module:name`, or with arguments `{name: package.module:name, args: {...}}`. A module
    beside the settings file is found first."""
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    sampling: SamplingConfig = dataclasses.field(default_factory=SamplingConfig)
    reward: RewardConfig = dataclasses.field(default_factory=RewardConfig)
    objective: ObjectiveConfig = dataclasses.field(default_factory=ObjectiveConfig)
    kl: KLConfig = dataclasses.field(default_factory=KLConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    eval: EvalConfig = dataclasses.field(default_factory=EvalConfig)
    tracking: TrackingConfig = dataclasses.field(default_factory=TrackingConfig)
    profile: ProfileConfig = dataclasses.field(default_factory=ProfileConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        last = max(self.profile.iterations, default=0)
        expected = f"expected at most train.iterations = {self.train.iterations}"
        self.profile.require(last <= self.train.iterations, "iterations", expected)
        for place, value in enumerate(self.callbacks):
            _callback(value, place)

    def replace(self, settings: Mapping[str, Any]) -> Config:
        """Return a copy with some settings changed and the whole checked again.

        Args:
            settings: dotted key -> value, such as `{"train.iterations": 5}`, or nested mappings. A
                mapping such as `reward.weights` is replaced whole; the keys `reward.name` and
                `reward.several` replace each other.

        Raises:
            UserError: an unknown key or an invalid value.
        """
        from sage_fast.config.loader import replaced  # which imports this module

        return replaced(self, settings)

    @property
    def plugins(self) -> dict[str, str]:
        """Setting -> `package.module:name`, of the choices and callbacks that are the user's
        own."""
        found = {key: entry.name for key, entry in self.keyed_callbacks.items()}
        for name, setting in settings_of(Config).items():
            if setting.takes_plugin:
                section, _, field = name.partition(".")
                value = getattr(getattr(self, section), field)
                if value not in setting.choices:
                    found[name] = value
        return found

    @property
    def keyed_callbacks(self) -> dict[str, CallbackEntry]:
        """Setting -> the callback that it names."""
        entries = [_callback(value, place) for place, value in enumerate(self.callbacks)]
        return {f"callbacks[{place}]": entry for place, entry in enumerate(entries)}

    @property
    def named_rewards(self) -> dict[str, RewardEntry]:
        """Setting that holds the name of a reward -> the reward, with `eval.judge`."""
        found = dict(self.reward.keyed_entries)
        if self.eval.judge is not None:
            found["eval.judge"] = RewardEntry(name=self.eval.judge, weights={})
        return found

    @property
    def eval_guidance_scale(self) -> float:
        """Guidance scale of evaluations."""
        if self.eval.guidance_scale is None:
            return self.sampling.guidance_scale
        return self.eval.guidance_scale
