"""SAGE-GRPO: rollout -> reward -> advantage -> update (paper, Figure 2 and Appendix A.6)."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sage_fast.algorithm.advantages import (
    EPS,
    SMALL_STD,
    balanced_rewards,
    group_advantages,
    small_groups,
)
from sage_fast.algorithm.iteration_plan import (
    IterationPlan,
    Sample,
    Transition,
    plan_iteration,
)
from sage_fast.algorithm.kl_weight import KLController
from sage_fast.algorithm.metrics import Observer
from sage_fast.algorithm.objective import (
    GradientNorms,
    Loss,
    StepConstants,
    gradient_norms,
    gradient_share,
    sage_loss,
)
from sage_fast.algorithm.resolved import ResolvedConfig
from sage_fast.data.prompt_order import PromptOrder
from sage_fast.models.interface import Condition
from sage_fast.models.model import Model
from sage_fast.models.policy import State
from sage_fast.parallel import make_engine
from sage_fast.parallel.optimizers import learning_rate
from sage_fast.rewards.interface import Scorer, Scores
from sage_fast.rollout.batch import Batch
from sage_fast.rollout.graphs import StepGraphs
from sage_fast.rollout.groups import compare_groups, gather_groups, grouped
from sage_fast.rollout.idle import IdleForwards
from sage_fast.rollout.parity import check_parity
from sage_fast.rollout.replay import Replay
from sage_fast.rollout.samples import SampleRollouts
from sage_fast.rollout.scoring import VideoScorer, gather_checked
from sage_fast.rollout.trajectories import NoisedSamples, Trajectories, on_device
from sage_fast.util.captions import PromptKey
from sage_fast.util.console import Progress, wrapped
from sage_fast.util.errors import NonFiniteError, UserError
from sage_fast.util.profiling import annotate
from sage_fast.util.ranks import data_rank, data_size, data_sum, fail_together
from sage_fast.util.seeding import derive_seed

log = logging.getLogger(__name__)


class TrainerHooks:
    """What a trainer calls while it works. Each method does nothing; a run overrides them.

    All but `pause` are called on all ranks at the same point.
    """

    def pause(self) -> None:
        """Called between the steps of a rollout, on each rank alone; may raise `Stopped`."""

    def videos_wanted(self, samples: Sequence[Sample]) -> Collection[int]:
        """Return the indices of this rank's samples whose videos `after_rollout` needs."""
        return ()

    def after_rollout(self, iteration: int, batch: Batch, scores: Scores) -> None:
        """Called once the samples are scored and `batch` holds their advantages.

        Args:
            batch: this rank's samples, with the videos that are wanted.
            scores: of all ranks.
        """

    def before_update(self, number: int) -> None:
        """Called before the optimizer step with this index in the iteration; may raise `Stopped`,
        then on all ranks."""

    def after_update(self, number: int) -> None:
        """Called after an optimizer step."""


class Trainer:
    """Owns the policy, its anchor and the optimizer; `iteration` is the algorithm.

    Args:
        resolved: settings of the run.
        model: policy and decoder.
        reward: composite reward.
        prompts: keys of the training prompts.
        embeddings: key -> condition, for every training prompt, including the negative and the
            empty one.
        graphs: CUDA graphs to replay rollout steps from.
        hooks: what to call while training.

    Attributes:
        config: the settings.
        objective: the loss.
        prompt_order: how far the run is in its prompts.
        anchor: weights of the anchor; None if the KL strategy has none.
        anchor_is_current: whether the anchor's weights are the present ones.
        constants: of the scored transitions, float32 `[T]` on the device.
        rounding: KL that rounding makes between velocities of equal weights, float32 `[T]` on the
            device: measured by the parity gate, and before that the KL of velocities that differ by
            a unit of the policy's dtype.
        forwards: part -> forwards in the latest iteration, as `IterationPlan.forwards` returns
            them.
        observer: what the latest iteration recorded.
        mid_iteration: whether this iteration has begun to change the state, so that it must not be
            checkpointed.
    """

    def __init__(
        self,
        resolved: ResolvedConfig,
        model: Model,
        reward: Scorer,
        prompts: Sequence[PromptKey],
        embeddings: Mapping[Any, Condition],
        *,
        graphs: StepGraphs | None = None,
        hooks: TrainerHooks | None = None,
    ) -> None:
        config = resolved.config
        objective = resolved.objective
        self.resolved = resolved
        self.config = config
        self.objective = objective
        self.model = model
        self.policy = model.policy
        self.reward = reward
        self.prompts = prompts
        self.prompt_order = PromptOrder(prompts, config.train.prompts_per_iteration)
        self.embeddings = embeddings
        self.hooks = TrainerHooks() if hooks is None else hooks
        self.device = self.policy.device

        # EMA warm-up is for exported averages only; a rollout policy needs a constant decay.
        self.engine = make_engine(
            self.policy, config.train, ema_warms_up=not config.sampling.averaged_weights
        )
        self.replay = Replay(self.policy, objective, config.sampling.batch_size, embeddings)
        self.graphs = graphs

        self.kl = KLController(config.kl)
        self.anchor = self.policy.snapshot() if objective.strategy.anchor is not None else None
        self.anchor_is_current = True
        self.anchor_step = 0

        self.latent_shape = model.spec.latent_shape(config.sampling)
        reduction = config.objective.log_prob
        scored = resolved.scored(resolved.table)
        self.constants = StepConstants(
            equalizer=scored.equalizer(reduction).to(self.device, torch.float32),
            bias=scored.log_ratio_bias(reduction).to(self.device, torch.float32),
            coefs=scored.coefficients(reduction).to(self.device),
        )
        self.rounding = self.constants.row.m * torch.finfo(self.policy.dtype).eps ** 2
        self._rounding_is_measured = False

        self.forwards: dict[str, int] = {}
        self.mid_iteration = False
        self._noted_small_groups = False
        self._first_step = 0  # optimizer step at which this process started; not 0 after a resume
        self.observer = Observer(self.device)

    # -- one iteration -----------------------------------------------------------------------------

    def iteration(self, index: int) -> dict[str, object]:
        """Run one round of the algorithm; return its metrics.

        Raises:
            RewardError: a reward failed, and `reward.on_failure = stop` or more than
                `reward.max_dropped` samples failed.
            NonFiniteError: a loss or gradient is not finite.
            ParityError: in the first iteration of a process, the ratio cannot be told from
                rounding.
        """
        self.observer = Observer(self.device)
        plan = self.plan(index)
        batch, scores = self.rollout(plan)
        batch.advantages, kept = self.advantages(batch, scores)
        self.hooks.after_rollout(index, batch, scores)

        updates, anchored = plan.updates(kept), plan.anchored(kept)
        batch.anchor_velocities = self.anchor_velocities(batch, batch.own(anchored))

        self.forwards = plan.forwards(kept)
        local = sum(len(batch.own(update)) for update in updates)
        with self.observer.watch("train"), Progress("train", local, "transition") as bar:
            for number, update in enumerate(updates):
                planned = index * self.config.train.optimizer_steps + number
                self.engine.learning_rate = learning_rate(
                    self.config.train, self.engine.steps, planned
                )
                # an update without transitions, the same on all ranks, makes no optimizer step
                if update:
                    self.hooks.before_update(number)
                self.update(batch, update, bar)
                if update:
                    self.hooks.after_update(number)
        self.refresh_anchor()
        state = {
            "iteration": index,
            "optimizer_step": self.engine.steps,
            "kl/lambda": self.kl.value,
        }
        state["learning_rate"] = self.engine.learning_rate
        return self.observer.row(state, self.config.sampling.steps)

    def plan(self, index: int) -> IterationPlan:
        """Plan an iteration: its samples, transitions and updates."""
        return plan_iteration(
            self.resolved,
            self.prompts,
            self._tokens,
            index,
            ranks=data_size(),
            anchor_is_free=self.reuses_velocities,
            prompt_offset=self.prompt_order.offset,
        )

    def _tokens(self, prompt: PromptKey) -> int:
        """Token count of one forward (both CFG passes)."""
        video = self.model.spec.tokens(self.latent_shape)
        return sum(video + text for text in self.replay.lengths[prompt])

    # -- rollout -----------------------------------------------------------------------------------

    def rollout(self, plan: IterationPlan) -> tuple[Batch, Scores]:
        """Generate and score the samples; return this rank's, with what training needs, and all
        scores."""
        watch, collective = self.observer.watch, self.policy.collective_forwards
        local_samples = [plan.samples[number] for number in plan.shares[data_rank()]]
        rows = {sample: row for row, sample in enumerate(local_samples)}
        scorer = VideoScorer(
            self.model.decoder,
            self.reward,
            watch,
            collective=collective,
            fps=self.model.spec.fps,
            wanted=self.hooks.videos_wanted(local_samples),
        )
        averaged = self.config.sampling.averaged_weights
        with self.engine.averaged_weights() if averaged else contextlib.nullcontext():
            with fail_together(collective):
                with watch("rollout"):
                    batch = self._batch(plan)
                    rollouts = SampleRollouts(
                        self.policy,
                        plan,
                        batch,
                        self.replay.lengths,
                        self.graphs,
                        watch,
                        batch_size=self.config.sampling.batch_size,
                        log_prob=self.config.objective.log_prob,
                    )
                with Progress("rollout", rollouts.steps, pause=self.hooks.pause) as bar:
                    for finished, latents in rollouts.finished(bar):
                        samples = list(finished)
                        # The seed follows from the samples, not from the rank: a resume draws the
                        # same numbers.
                        drawn = derive_seed(samples[0].seed, "reward")
                        prompts = [sample.prompt for sample in samples]
                        scorer.submit(latents, prompts, drawn, rows=[rows[s] for s in samples])
                local = scorer.finish()
            batch.videos = scorer.videos
            compared = None
            if self.reward.compares_group:
                compared = self._compare(plan, scorer)
            with watch.waiting():
                scores = gather_checked(self.reward, batch.numbers, local, compared)
            if self.objective.scores_noised:
                with watch("anchor"):
                    self.replay.score_noised(batch)
            gated = self.config.train.parity_gate and self.objective.surrogate.scores_rollout
            if gated and self.engine.steps == self._first_step:
                found = check_parity(
                    self.replay,
                    batch,
                    self.constants,
                    self.config.train,
                    self.config.seed,
                    measures_kl=not self._rounding_is_measured,
                )
                if not self._rounding_is_measured:
                    self.rounding = torch.maximum(
                        self.rounding, found.kl.to(self.device, torch.float32)
                    )
                    self._rounding_is_measured = True
                for name, value in found.metrics.items():
                    self.observer.metrics.set(name, value)
        return batch, scores

    def _compare(self, plan: IterationPlan, scorer: VideoScorer) -> tuple[list[int], Scores]:
        """Bring the videos of each group to one rank, and score this rank's groups by the rewards
        that compare; return the numbers of their samples, and their scores. Collective."""
        samples = plan.samples
        groups = grouped(
            [sample.group for sample in samples],
            [sample.prompt for sample in samples],
            [sample.seed for sample in samples],
        )
        numbers = plan.shares[data_rank()]
        held = {numbers[row]: scorer.held.pop(row) for row in list(scorer.held)}
        watch = self.observer.watch
        with watch.waiting():
            own = gather_groups(groups, held)
        with fail_together(), watch("reward"):
            return compare_groups(self.reward, own, held)

    def _batch(self, plan: IterationPlan) -> Batch:
        """Prepare this rank's samples: their conditions, and room for the trajectories."""
        objective, numbers = self.objective, plan.shares[data_rank()]
        own = [plan.samples[number] for number in numbers]
        scores_rollout = objective.surrogate.scores_rollout
        serves_anchor = self.anchor is not None and self.reuses_velocities and scores_rollout
        keeps_velocities = serves_anchor or objective.stores_velocities
        trajectories = (Trajectories if scores_rollout else NoisedSamples)(
            self.latent_shape,
            plan.transitions(numbers),
            plan.rollouts.steps,
            self.device,
            velocities=self.replay.velocity_dtype if keeps_velocities else None,
            offload=self.config.sampling.offload_trajectories,
        )
        shared_key = self.prompts[0]  # which every rank has, whatever its samples
        keys = {shared_key, *(sample.prompt for sample in own)}
        needed = keys | {self.embeddings[key].negative for key in keys}
        embeddings = {
            key: self.embeddings[key].to(self.device, self.policy.dtype) for key in needed
        }
        conditioning = self.policy.conditioning_table(self.resolved.table.sigmas[:-1], embeddings)
        return Batch(
            numbers=numbers,
            samples=own,
            coefs=self.constants.coefs,
            conditioning=conditioning,
            idle=IdleForwards(self.policy, conditioning, shared_key, self.latent_shape),
            trajectories=trajectories,
            advantages=torch.zeros(len(own), device=self.device),
            anchor_velocities={},
            anchor_weight=plan.anchor_weight,
        )

    # -- advantages --------------------------------------------------------------------------------

    def advantages(self, batch: Batch, scores: Scores) -> tuple[Tensor, list[bool]]:
        """Compare the samples of each group; return the advantages of `batch`, `[N]`, and whether
        each is trained."""
        objective, weights = self.config.objective, self.config.reward.part_weights
        rewards = scores.rewards.view(
            self.config.train.prompts_per_iteration, self.config.train.group_size
        )
        valid = rewards.isfinite()
        basis = (
            balanced_rewards(scores.parts, weights, valid)
            if objective.balanced_rewards
            else rewards
        )
        advantages, equal = group_advantages(
            basis,
            valid,
            std=objective.advantage_std,
            clamp=objective.advantage_clamp,
            dtype=scores.rewards.dtype,
        )
        if objective.advantage_std == "group":
            self._note_small_groups(small_groups(basis, valid, equal))
        self.observer.record_rewards(scores, advantages, valid, equal)
        kept = valid & (valid.sum(1) > 1)[:, None] & ~(equal[:, None] & objective.drop_equal_groups)
        return advantages.flatten()[batch.numbers].float().to(self.device), kept.flatten().tolist()

    def _note_small_groups(self, count: int) -> None:
        """Say once that the epsilon of Eq. 10 shrinks advantages: the update is smaller than the
        settings say."""
        if not count or self._noted_small_groups:
            return
        self._noted_small_groups = True
        log.warning(
            wrapped(
                f"warning: the rewards of {count} groups have a standard deviation below "
                f"{SMALL_STD:g}, beside the {EPS:g} that Eq. 10 adds to it, so their advantages "
                "shrink; scale reward.weights up, or set objective.advantage_std = batch, which "
                "gives such groups little weight on purpose"
            )
        )

    # -- update ------------------------------------------------------------------------------------

    def update(self, batch: Batch, update: Sequence[Transition], bar: Progress) -> None:
        """Make one optimizer step on the transitions `update` of all ranks' samples, accumulated
        over micro-batches."""
        if not update:
            self.observer.metrics.count("update/skipped", 1)
            return
        total, sums = len(update), torch.zeros(5, device=self.device)
        own = sorted(
            batch.own(update),
            key=lambda transition: self.replay.lengths[batch.samples[transition[0]].prompt],
        )

        def idle() -> None:
            self.engine.backward(batch.idle.loss(), total)

        micros = self.replay.micro_batches(batch, own, self.config.train.batch_size)
        for micro in self.policy.states.pad_to_largest(micros, idle, backward=True):
            with annotate("forward"):
                loss, norms = self._loss(batch, micro)
            with annotate("backward"):
                self.engine.backward(loss.total.sum(), total)
            self.observer.record_losses(loss, norms.policy, [t for _, t in micro])
            values = (
                loss.total.detach(),
                loss.kl,
                norms.policy.square(),
                norms.anchor,
                norms.velocity,
            )
            sums += torch.stack([value.sum() for value in values])
            bar.update(len(micro))
        with self.observer.watch.waiting():
            value, observed, *squares = (data_sum(sums) / total).tolist()
        if not math.isfinite(value):
            raise NonFiniteError(
                f"the loss is {value} at optimizer step {self.engine.steps}; nothing was updated"
            )
        was, self.mid_iteration = self.mid_iteration, True
        try:
            with self.observer.watch("optimizer"):
                norm = self.engine.step()
        except NonFiniteError:
            self.mid_iteration = was  # the weights are unchanged
            raise
        self.anchor_is_current = False
        self.observer.metrics.add("grad_norm", torch.tensor([norm]))
        self.observer.metrics.add(
            "kl/gradient_share", torch.tensor([gradient_share(self.kl.value, *squares)])
        )
        self.kl.update(observed)

    def _loss(self, batch: Batch, micro: Sequence[Transition]) -> tuple[Loss, GradientNorms]:
        """Return the loss, and the gradients of its terms on the velocity."""
        scores = self.replay.score(batch, micro)
        places = on_device([t for _, t in micro], self.device)
        steps = self.constants.at(places)
        loss = sage_loss(self.objective, scores, steps, self.kl.value)
        numel, rounding = math.prod(self.latent_shape), self.rounding[places]
        return loss, gradient_norms(self.objective, loss, scores, steps.row, numel, rounding)

    # -- anchor ------------------------------------------------------------------------------------

    @property
    def reuses_velocities(self) -> bool:
        """Whether the rollout's velocities can stand in for the anchor's in the next iteration."""
        return self.anchor_is_current and self.objective.reuses_velocities

    def anchor_velocities(
        self, batch: Batch, transitions: Sequence[Transition]
    ) -> dict[Transition, Tensor]:
        """Return transition -> the anchor's velocity: one forward each; none while
        `reuses_velocities`."""
        with self.observer.watch("anchor"):
            if self.anchor is None:
                return {}
            if self.reuses_velocities:
                return batch.trajectories.velocities
            return self.replay.anchor_velocities(batch, transitions, self.anchor)

    def refresh_anchor(self) -> None:
        """Move the anchor to the present policy every `anchor_interval` optimizer steps, between
        iterations."""
        elapsed = self.engine.steps - self.anchor_step
        if self.objective.strategy.moves and elapsed >= self.config.kl.anchor_interval:
            self.anchor = self.policy.snapshot()
            self.anchor_is_current = True
            self.anchor_step = self.engine.steps

    # -- checkpoints -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, object]:
        """Return the JSON counters that a resume needs in addition to the engine's state and
        `anchor`."""
        return {
            "kl": self.kl.state_dict(),
            "anchor_step": self.anchor_step,
            "anchor_is_current": self.anchor_is_current,
            "prompts": self.prompt_order.state_dict(),
            "rounding": self.rounding.tolist() if self._rounding_is_measured else [],
        }

    def load_state_dict(self, state: dict, anchor: State | None) -> None:
        """Restore `state_dict` and `anchor`; restore the engine first.

        A `fixed` anchor is the weights at the start of the run, as this trainer was built with. It
        stays if there is no saved anchor, or if that one has moved since the start.

        Args:
            state: `state_dict`, in a checkpoint with the `iteration` to continue with.
            anchor: as it was saved.

        Raises:
            UserError: `kl.strategy` has become one whose anchor moves.
        """
        anchor_moves = self.objective.strategy.moves
        if anchor_moves and anchor is None:
            raise UserError(
                f"kl.strategy = {self.config.kl.strategy!r} needs an anchor, and the checkpoint "
                "holds none; resume with the strategy that the run had, or start another run with "
                "--model.weights"
            )
        self._first_step = self.engine.steps
        self.kl.load_state_dict(state["kl"])
        self.prompt_order.load_state_dict(state["prompts"], state.get("iteration", 0))
        # else the steps have changed, and it is measured again
        if len(state["rounding"]) == len(self.rounding):
            self.rounding = torch.tensor(state["rounding"], device=self.device)
            self._rounding_is_measured = True

        saved_is_start = anchor is not None and state["anchor_step"] == 0
        if anchor_moves or saved_is_start:
            self.anchor_step = state["anchor_step"]
            self.anchor_is_current = state["anchor_is_current"]
            self.anchor = anchor if self.anchor is not None else None
        else:
            self.anchor_step = 0
            self.anchor_is_current = self.engine.steps == 0
