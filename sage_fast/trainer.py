"""SAGE-GRPO: rollout -> reward -> advantage -> update (paper, Figure 2 and Appendix A.6)."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sage_fast.algorithm.flops import forwards
from sage_fast.algorithm.iteration_samples import Sample, best_and_worst, deal, draw_samples
from sage_fast.algorithm.objective import (
    KLController,
    Loss,
    balanced_rewards,
    gradient_norms,
    group_advantages,
    sage_loss,
    spares_anchor,
    stores_rollout_velocities,
    strategy_of,
    surrogate_of,
)
from sage_fast.algorithm.schedule import (
    Transition,
    configured_table,
    iteration_table,
    position_steps,
    scouting_table,
    trained_steps,
    update_schedule,
)
from sage_fast.algorithm.transitions import TransitionTable
from sage_fast.config.schema import Config
from sage_fast.models.model import Model
from sage_fast.models.policy import State
from sage_fast.models.protocol import Condition, Conditions, Key
from sage_fast.ops import Row
from sage_fast.parallel import make_engine
from sage_fast.rewards.interface import Scorer
from sage_fast.rollout.batch import Batch
from sage_fast.rollout.graphs import step_graphs
from sage_fast.rollout.loop import initial_latents, rollout
from sage_fast.rollout.parity import check_parity
from sage_fast.rollout.replay import Replay
from sage_fast.rollout.scoring import VideoScorer
from sage_fast.rollout.trajectories import Trajectories, on_device
from sage_fast.util.console import Progress
from sage_fast.util.errors import NonFiniteError, UserError
from sage_fast.util.metrics import (
    Metrics,
    Stopwatch,
    record_agreement,
    record_losses,
    record_rewards,
    record_scouting,
    slowest_and_fastest,
)
from sage_fast.util.ranks import all_gather_object, data_rank, data_size, data_sum, together, world_size


class Trainer:
    """Owns the policy, its anchor and the optimizer; `iteration` is the algorithm.

    Args:
        config: validated settings.
        model: policy and decoder.
        reward: composite reward.
        prompts: training prompts.
        embeddings: key -> condition, for every training prompt, including the negative and the empty one.

    Attributes:
        pause: called between the steps of a rollout, on each rank independently; may raise `Stopped`.
        before_update: called before each optimizer step on all ranks; may raise `Stopped`, then on all of them.
        forwards: forwards of the latest iteration, as `work.forwards` counts them.
        mid_iteration: whether this iteration has begun to change the state, so that it must not be checkpointed.
    """

    def __init__(
        self,
        config: Config,
        model: Model,
        reward: Scorer,
        prompts: Sequence[str],
        embeddings: Mapping[Any, Condition],
    ) -> None:
        self.config = config
        self.model = model
        self.policy = model.policy
        self.reward = reward
        self.prompts = prompts
        self.embeddings = embeddings
        self.device = self.policy.device
        self.engine = make_engine(self.policy, config.train)
        self.replay = Replay(self.policy, config, embeddings)
        self.process = surrogate_of(config.objective).process
        self.kl = KLController(config.kl)
        self.anchor = self.policy.snapshot() if strategy_of(config.kl).anchor is not None else None
        self.anchor_is_current = True
        self.anchor_step = 0
        self.latent_shape = model.latent_shape(config.sampling)
        self.full_table = configured_table(config)
        reduction = config.objective.log_prob
        scored = self.process.table(self.full_table)
        self.equalizer = scored.equalizer(reduction).to(self.device, torch.float32)
        self.log_ratio_bias = scored.log_ratio_bias(reduction).to(self.device, torch.float32)
        self.pause: Callable[[], object] = lambda: None
        self.before_update: Callable[[], object] = lambda: None
        self.forwards: dict[str, int] = {}
        self.mid_iteration = False
        self._first_step = 0  # optimizer step at which this process started; not 0 after a resume
        self.graphs = step_graphs(self.policy) if config.sampling.cuda_graphs else None

    # -- one iteration ------------------------------------------------------------------------------------------------

    def iteration(self, index: int) -> dict[str, object]:
        """Run one round of the algorithm; return its metrics.

        Raises:
            RewardError: a reward failed, and `reward.on_failure = stop` or more than `reward.max_dropped` samples
                failed.
            NonFiniteError: a loss or gradient is not finite.
            ParityError: in the first iteration of a process, the ratio cannot be told from rounding.
        """
        watch = Stopwatch(self.device)
        table = iteration_table(self.full_table, self.config, index)
        steps = trained_steps(table, self.config, index)
        coefs, scored = (
            transitions.coefficients(math.prod(self.latent_shape), self.config.objective.log_prob).to(self.device)
            for transitions in (table, self.process.table(table))
        )

        metrics = Metrics()
        samples, scouts = draw_samples(self.config, self.prompts, index), self.config.sampling.scout_candidates > 0
        if scouts:
            with self._rollout_weights():
                samples, scouted = self._scout(samples, metrics, watch)
        mine = self._deal(samples)
        keys = [samples[i].key for i in mine]
        scorer = VideoScorer(self.model.decoder, self.reward, watch, in_step=self.policy.in_step)
        with self._rollout_weights(), together():
            with watch("rollout"):
                conditioning = self._conditions(keys, table)
            trajectories = self._rollout([samples[i] for i in mine], table, coefs, steps, conditioning, scorer, watch)
            scorer.finish()
        with watch.waiting():
            scores = scorer.gather(mine)

        rewards = scores.rewards.view(self.config.train.prompts_per_iteration, self.config.train.group_size)
        valid = rewards.isfinite()
        objective = self.config.objective
        std, weights = objective.advantage_std, self.config.reward.part_weights
        compared = balanced_rewards(scores.parts, weights, valid, std=std) if objective.balanced_rewards else rewards
        advantages, equal = group_advantages(compared, valid, std=std, clamp=objective.advantage_clamp)
        record_rewards(metrics, rewards, scores.parts, advantages, valid, equal, scores.retried)
        if scouts:
            record_agreement(metrics, scouted.view_as(rewards), rewards)

        kept = valid & (valid.sum(1) > 1)[:, None] & ~(equal[:, None] & objective.drop_equal_groups)
        batch = Batch(
            process=self.process,
            table=table,
            coefs=scored,
            trajectories=trajectories,
            conditioning=conditioning,
            keys=keys,
            advantages=advantages.flatten()[mine].float().to(self.device),
            anchor_velocities={},
        )
        anchored = position_steps(self.config, steps, index)
        gated = self.config.train.parity_gate and self.process.scores_rollout
        with watch("anchor"):
            with self._rollout_weights():
                self.process.score_old(self.replay, batch)
            batch.anchor_velocities = self._anchor_velocities(batch, anchored)
        if gated and self.engine.steps == self._first_step:
            with self._rollout_weights():
                found = check_parity(self.replay, batch, steps, self.log_ratio_bias, self.equalizer)
            for name, value in found.items():
                metrics.set(name, value)
        updates = update_schedule(self.config, index, samples, steps, kept.flatten().tolist())
        self.forwards = forwards(
            self.config,
            samples=len(samples),
            steps=len(table),
            trained=len(steps),
            transitions=sum(map(len, updates)),
            anchored=0 if self.anchor is None or self.anchor_is_free else len(anchored),
        )
        own = {number: i for i, number in enumerate(mine)}
        shares = [[(own[sample], step) for sample, step in update if sample in own] for update in updates]
        with watch("train"), Progress("train", sum(map(len, shares)), "transition") as bar:
            for update, share in zip(updates, shares):
                self._update(batch, share, len(update), metrics, watch, bar)
        self._refresh_anchor()

        row: dict[str, object] = {"iteration": index, "optimizer_step": self.engine.steps}
        row |= metrics.reduce()
        row["kl/lambda"] = self.kl.value
        row["learning_rate"] = self.engine.learning_rate
        row["velocity_grad_norm"] = metrics.by_step(len(table))
        seconds = watch.seconds()
        if world_size() > 1:
            row["time/ranks"] = slowest_and_fastest(all_gather_object(seconds))
        return row | seconds | watch.peaks()

    # -- rollout ------------------------------------------------------------------------------------------------------

    def _rollout_weights(self) -> contextlib.AbstractContextManager[None]:
        """Run with the weights of the rollout policy: the present ones, or their average."""
        averaged = self.config.sampling.averaged_weights
        return self.engine.averaged_weights() if averaged else contextlib.nullcontext()

    @property
    def anchor_is_free(self) -> bool:
        """Whether the anchor takes no forward in the next iteration."""
        return self.anchor_is_current and spares_anchor(self.config)

    def _tokens(self, key: Key) -> int:
        """Token count of one forward of a sample (both passes with guidance)."""
        return sum(self.model.spec.tokens(self.latent_shape) + length for length in self.replay.lengths[key])

    def _deal(self, samples: Sequence[Sample]) -> list[int]:
        """Return the numbers of this rank's samples."""
        tokens = [self._tokens(sample.key) for sample in samples]
        return deal(tokens, data_size(), self.config.sampling.batch_size)[data_rank()]

    def _conditions(self, keys: Sequence[Key], table: TransitionTable) -> Conditions:
        """Compute the conditions of `keys` at every noise level of `table`."""
        needed = {*keys, *(self.embeddings[key].negative for key in keys)}
        embeddings = {key: self.embeddings[key].to(self.device, self.policy.dtype) for key in needed}
        return self.policy.conditioning_table(table.sigmas[:-1], embeddings)

    def _scout(self, candidates: Sequence[Sample], metrics: Metrics, watch: Stopwatch) -> tuple[list[Sample], Tensor]:
        """Score cheap ODE rollouts of N candidates; return the chosen ones and their scouted rewards, float32 `[M]`.

        The result is the same on all ranks. Nothing but the choice of samples follows from it.
        """
        table, mine = scouting_table(self.config), self._deal(candidates)
        own = [candidates[i] for i in mine]
        scorer = VideoScorer(self.model.decoder, self.reward, watch, in_step=self.policy.in_step)
        with watch("scout"):
            coefs = table.coefficients(math.prod(self.latent_shape)).to(self.device)
            conditioning = self._conditions([sample.key for sample in own], table)
        with together():
            self._rollout(own, table, coefs, (), conditioning, scorer, watch, "scout")
            scorer.finish()
        with watch.waiting():
            rewards = scorer.gather(mine).rewards
        record_scouting(metrics, rewards)
        size = self.config.sampling.scout_candidates
        chosen = [
            start + i
            for start in range(0, len(candidates), size)
            for i in best_and_worst(rewards[start : start + size].tolist(), self.config.train.group_size)
        ]
        return [candidates[i] for i in chosen], rewards[chosen]

    def _rollout(
        self,
        samples: Sequence[Sample],
        table: TransitionTable,
        coefs: Tensor,
        steps: Sequence[int],
        conditioning: Conditions,
        scorer: VideoScorer,
        watch: Stopwatch,
        phase: str = "rollout",
    ) -> Trajectories:
        """Generate this rank's samples; on a GPU, decoding one batch overlaps the rollout of the next.

        Only `steps` are stored: nothing while scouting.
        """
        prompts, keys = [sample.prompt for sample in samples], [sample.key for sample in samples]
        seeds = torch.tensor([sample.seed for sample in samples])
        latent_seeds = torch.tensor([sample.latent_seed for sample in samples])
        serves_anchor = self.anchor is not None and self.anchor_is_free and self.process.scores_rollout
        keeps_velocities = serves_anchor or stores_rollout_velocities(self.config)
        trajectories = Trajectories(
            len(samples),
            self.latent_shape,
            self.process.successors(steps, len(table)),
            self.device,
            velocities=self.replay.velocity_dtype if keeps_velocities else None,
            offload=self.config.sampling.offload_trajectories,
        )
        runs = self.replay.runs(keys, self.config.sampling.batch_size)
        with Progress(phase, len(runs) * len(table), pause=self.pause) as bar:
            for rows, real in self.policy.states.lockstep(runs, runs[-1]):
                with watch(phase):
                    latents = rollout(
                        self.policy,
                        table,
                        coefs,
                        conditioning,
                        keys[rows],
                        seeds[rows],
                        initial_latents(latent_seeds[rows], self.latent_shape, self.device),
                        record=functools.partial(self.process.record, trajectories, rows),
                        on_step=bar.update,
                        graphs=self.graphs,
                    )
                    self.process.finish(trajectories, rows, latents, seeds[rows].to(self.device), table.sigmas)
                if real:
                    scorer.submit(latents, prompts[rows])
        return trajectories

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
        transitions = sorted(mine, key=lambda transition: self.replay.lengths[batch.keys[transition[0]]])
        runs = self.replay.runs([batch.keys[i] for i, _ in transitions], self.config.train.batch_size)
        # The stand-in must be a trained transition: others may not be finite.
        stand_in = transitions[:1] or [(0, min(batch.trajectories.steps))]
        for micro, real in self.policy.states.lockstep([transitions[rows] for rows in runs], stand_in):
            loss, policy, kl = self._loss(batch, micro, metrics if real else Metrics())
            self.engine.backward(real * loss.total.sum(), total)
            if not real:
                continue
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
                norm, update = self.engine.step()
        except NonFiniteError:
            self.mid_iteration = was  # the weights are unchanged
            raise
        metrics.add("grad_norm", torch.tensor([norm]))
        metrics.add("update/relative", update.relative[None])
        self.anchor_is_current = False
        kl_norm, policy_norm = self.kl.value * math.sqrt(kl_square), math.sqrt(policy_square)
        share = kl_norm / max(kl_norm + policy_norm, 1e-30)
        metrics.add("kl/gradient_share", torch.tensor([share]))
        self.kl.update(share if self.kl.row.holds_share else observed)

    def _loss(self, batch: Batch, micro: Sequence[Transition], metrics: Metrics) -> tuple[Loss, Tensor, Tensor]:
        """Return the loss, and the gradient norms of its two parts on the velocity (the KL's without lambda)."""
        samples, steps = (on_device(indices, self.device) for indices in zip(*micro))
        log_prob, kl_anchor, kl_old = self.replay.score(batch, micro)
        scores = (log_prob, batch.position_weight(micro) * kl_anchor, kl_old)
        old = batch.log_prob_old(micro, log_prob)
        config, at = self.config, Row(*batch.coefs[steps].unbind(1))
        loss = sage_loss(
            *scores,
            log_prob_old=old,
            advantage=batch.advantages[samples],
            equalizer=self.equalizer[steps],
            bias=self.log_ratio_bias[steps],
            kl_weight=self.kl.value,
            objective=config.objective,
            kl=config.kl,
            at=at,
        )
        numel = math.prod(self.latent_shape)
        policy, kl = gradient_norms(loss, scores[0], old, at, numel, objective=config.objective, kl=config.kl)
        metrics.add_by_step([t for _, t in micro], policy)  # what the equalizer levels (Eq. 38)
        return loss, policy, kl

    def _anchor_velocities(self, batch: Batch, steps: Sequence[int]) -> dict[int, Tensor]:
        """Return step -> the anchor's velocities `[N, ...]`.

        One forward each; none while `anchor_is_free`.
        """
        if self.anchor is None:
            return {}
        if self.anchor_is_free:
            return batch.trajectories.velocities
        return self.replay.anchor_velocities(batch, steps, self.anchor)

    def _refresh_anchor(self) -> None:
        """Move the anchor to the present policy every `anchor_interval` optimizer steps, between iterations."""
        moving = strategy_of(self.config.kl).anchor == "moving"
        if moving and self.engine.steps - self.anchor_step >= self.config.kl.anchor_interval:
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
