"""SAGE-GRPO: rollout -> reward -> advantage -> update (paper, Figure 2 and Appendix A.6)."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sage_fast.algorithm.advantages import balanced_rewards, group_advantages
from sage_fast.algorithm.flops import forwards
from sage_fast.algorithm.iteration_samples import Rollouts, Sample, assign_to_ranks, draw_samples
from sage_fast.algorithm.kl_weight import KLController
from sage_fast.algorithm.metrics import record_losses, record_rewards
from sage_fast.algorithm.objective import Loss, Objective, Replayed, StepConstants, gradient_norms, sage_loss
from sage_fast.algorithm.schedule import (
    Transition,
    configured_table,
    iteration_tables,
    scored_table,
    trained_steps,
    transitions_of,
    update_schedule,
)
from sage_fast.algorithm.transitions import TransitionTable
from sage_fast.config.schema import Config
from sage_fast.models.interface import Condition
from sage_fast.models.model import Model
from sage_fast.models.policy import State
from sage_fast.parallel import make_engine
from sage_fast.rewards.interface import Scorer, Scores
from sage_fast.rollout.batch import Batch
from sage_fast.rollout.graphs import StepGraphs
from sage_fast.rollout.loop import rollout_runs
from sage_fast.rollout.parity import check_parity
from sage_fast.rollout.replay import Replay
from sage_fast.rollout.samples import GroupSteps, SampleRollouts
from sage_fast.rollout.scoring import VideoScorer
from sage_fast.rollout.trajectories import NoisedSamples, Trajectories, on_device
from sage_fast.util.console import Progress
from sage_fast.util.errors import NonFiniteError, UserError
from sage_fast.util.metrics import Metrics, Stopwatch, slowest_and_fastest
from sage_fast.util.profiling import annotate
from sage_fast.util.ranks import all_gather_object, data_rank, data_size, data_sum, fail_together, world_size


class Trainer:
    """Owns the policy, its anchor and the optimizer; `iteration` is the algorithm.

    Args:
        config: validated settings.
        model: policy and decoder.
        reward: composite reward.
        prompts: training prompts.
        embeddings: key -> condition, for every training prompt, including the negative and the empty one.
        graphs: CUDA graphs to replay rollout steps from.
        pause: called between the steps of a rollout, on each rank independently; may raise `Stopped`.
        before_update: called before each optimizer step on all ranks; may raise `Stopped`, then on all of them.

    Attributes:
        objective: the loss, resolved from the settings.
        anchor: weights of the anchor; None if the KL strategy has none.
        anchor_is_current: whether the anchor's weights are the present ones.
        full_table: all transitions of the configured sampler, T steps.
        constants: of the scored transitions, float32 `[T]` on the device.
        forwards: part -> forwards in the latest iteration, as `algorithm.flops.forwards` returns them.
        mid_iteration: whether this iteration has begun to change the state, so that it must not be checkpointed.
    """

    def __init__(
        self,
        config: Config,
        model: Model,
        reward: Scorer,
        prompts: Sequence[str],
        embeddings: Mapping[Any, Condition],
        *,
        graphs: StepGraphs | None = None,
        pause: Callable[[], object] = lambda: None,
        before_update: Callable[[], object] = lambda: None,
    ) -> None:
        self.config = config
        self.model = model
        self.policy = model.policy
        self.reward = reward
        self.prompts = prompts
        self.embeddings = embeddings
        self.device = self.policy.device
        # A rollout policy follows the weights at one pace; an average for export alone has to forget the start.
        self.engine = make_engine(self.policy, config.train, ema_warms_up=not config.sampling.averaged_weights)
        self.objective = objective = Objective.of(config)
        self.replay = Replay(self.policy, objective, config.sampling.batch_size, embeddings)
        self.kl = KLController(config.kl)
        self.anchor = self.policy.snapshot() if objective.strategy.anchor is not None else None
        self.anchor_is_current = True
        self.anchor_step = 0
        self.latent_shape = model.latent_shape(config.sampling)
        self.full_table = configured_table(config.sampling)
        reduction = config.objective.log_prob
        scored = scored_table(self.full_table, objective.surrogate)
        self.constants = StepConstants(
            equalizer=scored.equalizer(reduction).to(self.device, torch.float32),
            bias=scored.log_ratio_bias(reduction).to(self.device, torch.float32),
            coefs=self._coefficients(scored),
        )
        self.pause, self.before_update = pause, before_update
        self.forwards: dict[str, int] = {}
        self.mid_iteration = False
        self._first_step = 0  # optimizer step at which this process started; not 0 after a resume
        self.graphs = graphs

    # -- one iteration ------------------------------------------------------------------------------------------------

    def iteration(self, index: int) -> dict[str, object]:
        """Run one round of the algorithm; return its metrics.

        Raises:
            RewardError: a reward failed, and `reward.on_failure = stop` or more than `reward.max_dropped` samples
                failed.
            NonFiniteError: a loss or gradient is not finite.
            ParityError: in the first iteration of a process, the ratio cannot be told from rounding.
        """
        watch, metrics = Stopwatch(self.device), Metrics()
        train, sampling, seed = self.config.train, self.config.sampling, self.config.seed
        tables = iteration_tables(self.full_table, sampling, train.prompts_per_iteration, seed=seed, iteration=index)
        steps = [trained_steps(table, self.objective.surrogate, train, seed=seed, iteration=index) for table in tables]
        samples = draw_samples(train, self.prompts, shared=sampling.shared_initial_noise, seed=seed, iteration=index)
        anchor_is_free = self.anchor is None or self.reuses_velocities
        anchored = [] if anchor_is_free else transitions_of(samples, steps)
        with self.engine.averaged_weights() if sampling.averaged_weights else contextlib.nullcontext():
            batch, scores = self._rollout(samples, tables, steps, watch)
            if self.objective.scores_noised:
                with watch("anchor"):
                    self.replay.score_noised(batch)
            gated = train.parity_gate and self.objective.surrogate.scores_rollout
            if gated and self.engine.steps == self._first_step:
                for name, value in check_parity(self.replay, batch, self.constants, train, seed).items():
                    metrics.set(name, value)

        advantages, kept = self._advantages(scores, metrics)
        batch.advantages = advantages.flatten()[batch.numbers].float().to(self.device)
        with watch("anchor"):
            batch.anchor_velocities = self._anchor_velocities(batch, batch.own(anchored))

        updates = update_schedule(train, samples, steps, kept.flatten().tolist(), seed=seed, iteration=index)
        self.forwards = forwards(
            self.objective,
            passes=sampling.passes,
            rollout=batch.rollout_steps,
            stored=len(transitions_of(samples, steps)),
            trained=sum(map(len, updates)),
            anchored=len(anchored),
        )
        shares = [batch.own(update) for update in updates]
        with watch("train"), Progress("train", sum(map(len, shares)), "transition") as bar:
            for update, share in zip(updates, shares):
                self._update(batch, share, len(update), metrics, watch, bar)
        self._refresh_anchor()

        row: dict[str, object] = {"iteration": index, "optimizer_step": self.engine.steps}
        row |= metrics.reduce()
        row["kl/lambda"] = self.kl.value
        row["learning_rate"] = self.engine.learning_rate
        row["velocity_grad_norm"] = metrics.by_step(sampling.steps)
        seconds = watch.seconds()
        if world_size() > 1:
            row["time/ranks"] = slowest_and_fastest(all_gather_object(seconds))
        return row | seconds | watch.peaks()

    # -- rollout ------------------------------------------------------------------------------------------------------

    def _rollout(
        self,
        samples: Sequence[Sample],
        tables: Sequence[TransitionTable],
        steps: Sequence[Sequence[int]],
        watch: Stopwatch,
    ) -> tuple[Batch, Scores]:
        """Generate and score `samples`; return this rank's, with the `steps` of each group stored, and all scores.

        With shared initial noise, the steps before a group's window run once for the group's samples on this rank. On a
        GPU, decoding one batch overlaps the rollout of the next.
        """
        scorer = VideoScorer(self.model.decoder, self.reward, watch, collective=self.policy.collective_forwards)
        with fail_together(self.policy.collective_forwards):
            with watch("rollout"):
                coefs = {table: self._coefficients(table) for table in set(tables)}
                groups = [GroupSteps(table, coefs[table]) for table in tables]
                rollouts = Rollouts.of(tables, self.config.train.group_size, self.config.sampling.shared_initial_noise)
                shares = self._assigned(samples, rollouts)
                batch = self._batch(samples, shares[data_rank()], tables[0].sigmas, steps)
                batch.rollout_steps = sum(map(rollouts.count, shares))

            alike = [(self.replay.lengths[sample.prompt], tables[sample.group]) for sample in batch.samples]
            own_groups = [sample.group for sample in batch.samples]
            runs = rollout_runs(alike, own_groups, rollouts, self.config.sampling.batch_size)
            denoised = SampleRollouts(self.policy, batch, groups, self.graphs, watch)
            with Progress("rollout", sum(len(steps) for _, steps in runs), pause=self.pause) as bar:
                for finished, latents in denoised.finished(runs, bar):
                    scorer.submit(latents, [sample.prompt for sample in finished])
            scorer.finish()
        with watch.waiting():
            return batch, scorer.gather(batch.numbers)

    def _batch(
        self, samples: Sequence[Sample], numbers: Sequence[int], sigmas: Tensor, steps: Sequence[Sequence[int]]
    ) -> Batch:
        """Prepare this rank's samples, those of `numbers`: their conditions, and room for the trajectories."""
        objective, own = self.objective, [samples[number] for number in numbers]
        scores_rollout = objective.surrogate.scores_rollout
        serves_anchor = self.anchor is not None and self.reuses_velocities and scores_rollout
        keeps_velocities = serves_anchor or objective.stores_velocities
        trajectories = (Trajectories if scores_rollout else NoisedSamples)(
            self.latent_shape,
            transitions_of(own, steps),
            len(sigmas) - 1,
            self.device,
            velocities=self.replay.velocity_dtype if keeps_velocities else None,
            offload=self.config.sampling.offload_trajectories,
        )
        needed = {key for sample in own for key in (sample.prompt, self.embeddings[sample.prompt].negative)}
        embeddings = {key: self.embeddings[key].to(self.device, self.policy.dtype) for key in needed}
        return Batch(
            numbers=numbers,
            samples=own,
            coefs=self.constants.coefs,
            conditioning=self.policy.conditioning_table(sigmas[:-1], embeddings),
            trajectories=trajectories,
            advantages=torch.zeros(len(own), device=self.device),
            anchor_velocities={},
        )

    def _assigned(self, samples: Sequence[Sample], rollouts: Rollouts) -> list[list[int]]:
        """Return the indices of the samples assigned to each rank, balanced by token count (both CFG passes)."""
        video, texts = self.model.spec.tokens(self.latent_shape), self.replay.lengths
        tokens = [sum(video + text for text in texts[sample.prompt]) for sample in samples]
        return assign_to_ranks(tokens, data_size(), self.config.sampling.batch_size, rollouts)

    def _coefficients(self, table: TransitionTable) -> Tensor:
        return table.coefficients(self.config.objective.log_prob).to(self.device)

    # -- advantages ---------------------------------------------------------------------------------------------------

    def _advantages(self, scores: Scores, metrics: Metrics) -> tuple[Tensor, Tensor]:
        """Compare the samples of each group; return advantages and whether each sample is trained, both `[P, G]`."""
        objective, weights = self.config.objective, self.config.reward.part_weights
        rewards = scores.rewards.view(self.config.train.prompts_per_iteration, self.config.train.group_size)
        valid = rewards.isfinite()
        compared = balanced_rewards(scores.parts, weights, valid) if objective.balanced_rewards else rewards
        advantages, equal = group_advantages(
            compared, valid, std=objective.advantage_std, clamp=objective.advantage_clamp
        )
        record_rewards(metrics, rewards, scores.parts, advantages, valid, equal, scores.retried)
        kept = valid & (valid.sum(1) > 1)[:, None] & ~(equal[:, None] & objective.drop_equal_groups)
        return advantages, kept

    # -- update -------------------------------------------------------------------------------------------------------

    def _update(
        self, batch: Batch, mine: Sequence[Transition], total: int, metrics: Metrics, watch: Stopwatch, bar: Progress
    ) -> None:
        """Make one optimizer step on `total` transitions, `mine` on this rank, accumulated over micro-batches."""
        self.before_update()
        if total == 0:
            metrics.count("update/skipped", 1)
            return
        losses, sums = [], torch.zeros(4, device=self.device)
        transitions = sorted(mine, key=lambda transition: self.replay.lengths[batch.samples[transition[0]].prompt])
        runs = self.replay.runs([batch.samples[i].prompt for i, _ in transitions], self.config.train.batch_size)

        def idle() -> None:  # on a trained transition: other stored latents may be uninitialised
            stand_in = transitions[:1] or batch.trajectories.trained[:1]
            self.engine.backward(0 * self._loss(batch, stand_in)[0].total.sum(), total)

        micros = [transitions[rows] for rows in runs]
        for micro in self.policy.states.pad_to_largest(micros, idle, backward=True):
            with annotate("forward"):
                loss, policy, kl = self._loss(batch, micro)
            with annotate("backward"):
                self.engine.backward(loss.total.sum(), total)
            metrics.add_by_step([t for _, t in micro], policy)  # what the equalizer levels (Eq. 38)
            losses.append(dataclasses.replace(loss, total=loss.total.detach(), policy=loss.policy.detach()))
            values = (loss.total.detach(), loss.kl, policy.square(), kl.square())
            sums += torch.stack([value.sum() for value in values])
            bar.update(len(micro))
        record_losses(metrics, losses)
        with watch.waiting():
            value, observed, policy_square, kl_square = (data_sum(sums) / total).tolist()
        if not math.isfinite(value):
            raise NonFiniteError(f"the loss is {value} at optimizer step {self.engine.steps}; nothing was updated")
        was, self.mid_iteration = self.mid_iteration, True
        try:
            with watch("optimizer"):
                norm = self.engine.step()
        except NonFiniteError:
            self.mid_iteration = was  # the weights are unchanged
            raise
        metrics.add("grad_norm", torch.tensor([norm]))
        self.anchor_is_current = False
        kl_norm, policy_norm = self.kl.value * math.sqrt(kl_square), math.sqrt(policy_square)
        share = kl_norm / max(kl_norm + policy_norm, 1e-30)
        metrics.add("kl/gradient_share", torch.tensor([share]))
        self.kl.update(share if self.kl.row.holds_share else observed)

    def _loss(self, batch: Batch, micro: Sequence[Transition]) -> tuple[Loss, Tensor, Tensor]:
        """Return the loss, and the gradient norms of its two parts on the velocity (the KL's without lambda)."""
        samples, steps = (on_device(indices, self.device) for indices in zip(*micro))
        log_prob, kl_anchor, kl_old, *mean_errors = self.replay.score(batch, micro)
        replayed = Replayed(
            log_prob=log_prob,
            log_prob_old=batch.trajectories.log_prob_old(micro, log_prob),
            kl_anchor=kl_anchor,
            kl_old=kl_old,
            advantage=batch.advantages[samples],
            mean_errors=mean_errors,
        )
        own = self.constants.at(steps)
        loss = sage_loss(self.objective, replayed, own, self.kl.value)
        return loss, *gradient_norms(self.objective, loss, replayed, own.row, math.prod(self.latent_shape))

    # -- anchor -------------------------------------------------------------------------------------------------------

    @property
    def reuses_velocities(self) -> bool:
        """Whether the rollout's velocities can stand in for the anchor's in the next iteration."""
        return self.anchor_is_current and self.objective.reuses_velocities

    def _anchor_velocities(self, batch: Batch, transitions: Sequence[Transition]) -> dict[Transition, Tensor]:
        """Return transition -> the anchor's velocity: one forward each; none while `reuses_velocities`."""
        if self.anchor is None:
            return {}
        if self.reuses_velocities:
            return batch.trajectories.velocities
        return self.replay.anchor_velocities(batch, transitions, self.anchor)

    def _refresh_anchor(self) -> None:
        """Move the anchor to the present policy every `anchor_interval` optimizer steps, between iterations."""
        elapsed = self.engine.steps - self.anchor_step
        if self.objective.strategy.moves and elapsed >= self.config.kl.anchor_interval:
            self.anchor = self.policy.snapshot()
            self.anchor_is_current = True
            self.anchor_step = self.engine.steps

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, object]:
        """Return the JSON counters that a resume needs in addition to the engine's state and `anchor`."""
        return {
            "kl": self.kl.state_dict(),
            "anchor_step": self.anchor_step,
            "anchor_is_current": self.anchor_is_current,
        }

    def load_state_dict(self, state: dict, anchor: State | None) -> None:
        """Restore `state_dict` and `anchor`; restore the engine first.

        Raises:
            UserError: `kl.strategy` has become one with an anchor.
        """
        if self.anchor is not None and anchor is None:
            raise UserError(
                f"kl.strategy = {self.config.kl.strategy!r} needs an anchor, and the checkpoint holds none; resume "
                "with the strategy that the run had, or start another run with --model.weights"
            )
        self._first_step = self.engine.steps
        self.kl.load_state_dict(state["kl"])
        self.anchor_step = state["anchor_step"]
        self.anchor_is_current = state["anchor_is_current"]
        self.anchor = anchor if self.anchor is not None else None
