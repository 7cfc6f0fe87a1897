"""A training run from its settings to its final weights.

`Run.iterate` is the loop. What happens besides training is done by callbacks
(sage_fast/callbacks): metrics, evaluations, checkpoints, the page, and what users add.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sage_fast.algorithm.resolved import ResolvedConfig
from sage_fast.algorithm.trainable import check_same_settings, check_trainable
from sage_fast.callbacks.built_in import built_in
from sage_fast.callbacks.dispatch import CallbackError, Callbacks
from sage_fast.callbacks.evaluations import Evaluations, check_pairs, read_evaluation
from sage_fast.callbacks.interface import Callback
from sage_fast.callbacks.load import load_callbacks
from sage_fast.callbacks.trackers import check_trackers
from sage_fast.callbacks.writer import MetricsWriter
from sage_fast.config.loader import dump, leaves, replaced
from sage_fast.config.rank_checks import check_engine
from sage_fast.config.schema import Config
from sage_fast.loading import load_setup, with_reward_objects
from sage_fast.models.policy import State
from sage_fast.parallel.stored_rollouts import check_trajectories
from sage_fast.run import claim, read_metrics
from sage_fast.run.checkpoint import load_checkpoint, save_checkpoint, save_final_weights
from sage_fast.run.facts import describe, throughput
from sage_fast.run.fail_fast import fail_fast
from sage_fast.run.hang_dump import HangDump
from sage_fast.run.hooks import RunHooks
from sage_fast.run.messages import config_warnings, method_of
from sage_fast.run.stop import Stop
from sage_fast.run_folder import RunFolder, check_weights, iteration_of
from sage_fast.trainer import Trainer
from sage_fast.util.console import leave_logs, log_to, wrapped
from sage_fast.util.errors import RankError, Stopped, UserError
from sage_fast.util.files import writing
from sage_fast.util.ranks import (
    all_gather_object,
    barrier,
    fails_alone,
    rank,
    shutdown,
    world_size,
)
from sage_fast.util.text import counted
from sage_fast.util.videos import check_encoder

log = logging.getLogger(__name__)


def train(
    config: Config,
    *,
    callbacks: Sequence[Callback] = (),
    reward_funcs: object = None,
    resume: bool = False,
) -> Run:
    """Train as the settings say, and write a run folder. Collective.

    Args:
        config: the settings; the run is in the folder `output`.
        callbacks: called after those of the setting `callbacks`, and before the run's own.
        reward_funcs: replace the rewards of the settings: a function (videos, prompts) -> `[B]`, or
            part -> `[B]`; an object or class with such a method `score`; or a list of them.
        resume: continue the run in the folder, from its newest checkpoint; begin it if there is
            none yet.

    Returns:
        The run, complete: `run.folder`, `run.metrics`.

    Raises:
        UserError: a setting does not fit, or the folder cannot be used; nothing was changed.
        Stopped: after a signal. Like most errors it leaves a checkpoint for `resume`.
    """
    if not isinstance(config, Config):
        raise UserError(f"config = {config!r:.60}: expected settings, of sf.load or sf.build")
    given = _listed(callbacks)
    config = replaced(config, {})  # a list or a mapping in it may have changed since its check
    with fail_fast(config.timeout_minutes, Path(config.output)) as dump, writing(config.output):
        return _train(config, given, reward_funcs, dump, resume=resume)


def _train(
    config: Config,
    callbacks: Sequence[Callback],
    reward_funcs: object,
    dump: HangDump | None,
    *,
    resume: bool,
) -> Run:
    """Train as `train` does, on ranks that have joined."""
    reward_objects: dict[str, Any] = {}
    if reward_funcs is not None:
        config, reward_objects = with_reward_objects(config, reward_funcs)
    if resume and not RunFolder(config.output).can_continue():
        # alike on all ranks: none writes there before all have checked their settings
        resume = False
        log.info(f"no run in {config.output} yet: it begins")
    check_same_settings(config, resume=resume)
    resolved = check_trainable(config)
    log.info(wrapped(method_of(resolved.objective, config.sampling)))
    check_here(config, resume=resume)
    evaluations = Evaluations()
    users = [*load_callbacks(config), *callbacks]
    called = Callbacks(users, built_in(config, evaluations))

    folder = Path(config.output)
    watchdog = contextlib.nullcontext() if dump is None else dump.for_watchdog()
    with (
        Stop(config.train.grace_seconds) as signals,
        claim.locked(folder) as own_claim,
        watchdog,
    ):
        run = Run(
            resolved, signals, own_claim, called, resume=resume, reward_objects=reward_objects
        )
        try:
            run.iterate()
            run.claim.check()
            save_final_weights(run.folder, run.iteration, run.trainer.engine)
            evaluations.evaluate(run, "after")
            run.complete = True
            called.call("on_run_end", run)
        except BaseException as error:
            called.report(run, error)
            raise
        finally:
            if run.writer is not None:
                run.writer.close()
            run.setup.close()
        barrier()  # wait for rank 0 to write the page
        shutdown()
    leave_logs()  # what the process does next is not the run's
    return run


def _listed(callbacks: Any) -> list[Callback]:
    """Return the callbacks given to `train` as a list; None stands for none.

    Raises:
        UserError: they are not several.
    """
    if callbacks is None:
        return []
    if isinstance(callbacks, Callback):
        raise UserError(f"callbacks = {callbacks!r}: expected a list, such as [{callbacks.name}()]")
    if not isinstance(callbacks, Iterable):
        raise UserError(f"callbacks = {callbacks!r:.60}: expected a list of callbacks")
    return list(callbacks)


def check_here(config: Config, *, resume: bool) -> None:
    """Check that a run can start on this machine: its packages, its output folder, and the weights
    it starts from.

    Raises:
        UserError: it cannot.
    """
    check_engine(config.train)
    check_trackers(config.tracking.trackers)
    claim.check_output(config, resume=resume)
    if not resume:
        check_weights(config.model.weights)


class Run:
    """A run and its folder: loaded or resumed, then iterated until it is complete or stopped.

    Args:
        resolved: settings, checked against the output folder.
        signals: end the run.
        own_claim: to the output folder, which is locked.
        callbacks: what is called besides the algorithm.
        resume: continue the run in the folder.
        reward_objects: as for `load_setup`.

    Attributes:
        config: the settings.
        folder: the run folder.
        iteration: complete iterations.
        complete: whether the run has come to its end, with its final weights and their evaluation.
        trainer: the algorithm, with the policy.
        setup: prompts, rewards and model.
        callbacks: as given.
        claim: to the folder; `lost` once another run has taken it over.
        signals: as given.
        writer: metrics and trackers; None on ranks other than 0.
        newest_row: row of the newest complete iteration, with the columns of the user's callbacks;
            empty if this process has completed none.
        checkpoint_wanted: whether a callback has asked for a checkpoint after this iteration.
        start_weights: weights at the start of the run if they are still to be evaluated and are no
            longer the present ones.
    """

    def __init__(
        self,
        resolved: ResolvedConfig,
        signals: Stop,
        own_claim: claim.Claim,
        callbacks: Callbacks,
        *,
        resume: bool,
        reward_objects: Mapping[str, Any],
    ) -> None:
        self.config = resolved.config
        self.folder = Path(self.config.output)
        self.iteration = 0
        self.complete = False
        self.callbacks = callbacks
        self.claim = own_claim
        self.signals = signals
        self.writer: MetricsWriter | None = None
        self.start_weights: State | None = None
        self._checkpointed: int | None = None  # iteration of the newest checkpoint
        self.newest_row: dict[str, Any] = {}
        self.checkpoint_wanted = False
        self._within_iteration = False
        self._is_saving = False
        self._stop_reason: str | None = None

        check_encoder()
        run = RunFolder(self.folder)
        attention = self.config.model.attention
        if resume and attention == "auto":  # a new measurement could change the bits
            attention = run.facts.get("attention", attention)
        self.setup = load_setup(resolved, attention=attention, reward_objects=reward_objects)
        trajectories = check_trajectories(resolved, self.setup.model)
        lacks_before = resume and not check_pairs(self.setup, self.folder)

        if not resume:
            claim.claim_output(own_claim, self.folder, dump(self.config))
        own_log = run.log_file(rank())
        if world_size() > 1:
            log_to(own_log)
        self.setup.encode(run.embeddings)
        self.trainer = Trainer(
            resolved,
            self.setup.model,
            self.setup.reward,
            self.setup.prompts,
            self.setup.embeddings,
            graphs=self.setup.graphs,
            hooks=RunHooks(self),
        )
        if lacks_before:
            self.start_weights = self.trainer.policy.snapshot()
        if resume:
            unfinished = run.facts
            self._resume()
            self._stop_reason = self._unfinished_stop(unfinished)
        if world_size() == 1:  # a refused resume has left the folder as it was
            log_to(own_log)

        facts = describe(
            self.trainer, self.setup.contents, self.folder, self.iteration, self._checkpointed
        )
        if resume and self.is_main:
            claim.forget_beyond(RunFolder(self.folder), self.iteration)
        self._say_how_it_starts(resolved, trajectories, resume=resume)
        if self.is_main:
            self.writer = MetricsWriter(
                self.config.tracking,
                leaves(dataclasses.asdict(self.config)),
                self.folder,
                facts["run_id"],
                self.iteration,
                continued=run.facts.get("trackers", []) if resume else [],
            )
        signals.training = True

    # -- for callbacks and users -------------------------------------------------------------------

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes files."""
        return rank() == 0

    @property
    def metrics(self) -> Any:
        """The metrics of the iterations so far as columns; see `read_metrics`."""
        return read_metrics(self.folder)

    def stop(self, reason: str) -> None:
        """End the run after the present iteration, on all ranks: with a checkpoint, the final
        weights and their evaluation. Not collective: one rank is enough.

        Args:
            reason: for the screen and `run.json`.
        """
        if self._stop_reason is None:
            self._stop_reason = str(reason)

    def checkpoint(self) -> None:
        """Save a checkpoint: at once between two iterations, else after the present one, with all
        columns of its row. Collective.

        Within `on_checkpoint` it does nothing: the checkpoint is there.
        """
        if self._is_saving:
            return
        if self._within_iteration:
            self.checkpoint_wanted = True
        else:
            self.save()

    def save(self, states: dict[str, Any] | None = None) -> None:
        """Save the state between two iterations. Collective.

        Args:
            states: of the callbacks; by default the present ones.
        """
        self._is_saving = True
        try:
            with self.signals.saving():
                self._save(states)
        finally:
            self._is_saving = False

    def _save(self, states: dict[str, Any] | None) -> None:
        self.checkpoint_wanted = False
        self.claim.check()
        if self.writer is not None:
            # a resume needs the rows of all iterations: also of one at whose end an error came
            if self.newest_row:
                self.writer.write(self.newest_row)
            self.writer.sync()
        if states is None:
            states = self.callbacks.states()
        counters = self.trainer.state_dict() | {"callbacks": states}
        engine, anchor = self.trainer.engine, self.trainer.anchor
        save_checkpoint(self.folder, self.iteration, engine, counters, anchor)
        if self.is_main:
            claim.record_checkpoint(RunFolder(self.folder), self.iteration)
        self._checkpointed = self.iteration
        saved = RunFolder(self.folder).checkpoint(self.iteration)
        self.callbacks.call("on_checkpoint", self, saved)

    # -- the loop ----------------------------------------------------------------------------------

    def iterate(self) -> None:
        """Run the iterations that are left, and save the last. Collective.

        An exception that all ranks share leaves a checkpoint of the last complete iteration.
        """
        trainer = self.trainer
        last: _Completed | None = None
        stopped: str | None = None  # why a callback has ended the run
        try:
            self.callbacks.call("on_run_start", self)
            for index in range(self.iteration, self.config.train.iterations):
                stopped = self._agreed_stop()
                if stopped is not None:
                    break
                self.signals.boundary(trainer.device)
                last = _Completed(self)
                self._within_iteration = True
                self.callbacks.call("on_iteration_start", self, index)

                row = trainer.iteration(index)

                # the iteration is complete, even if something below fails
                self.iteration = index + 1
                trainer.mid_iteration = False
                row |= throughput(trainer, row)
                self.newest_row = dict(row)
                self.claim.check()
                self.callbacks.add_columns(self, self.newest_row)
                self._within_iteration = False
                self.callbacks.end_iteration(self, row)

            if self._checkpointed != self.iteration:
                self.save()
            if stopped is not None and self.is_main:
                claim.record_stop(RunFolder(self.folder), stopped)
            self.signals.boundary(trainer.device)
        except BaseException as error:
            if not fails_alone() and not self.claim.lost:
                self._save_last_complete(last, error)
            raise

    def _agreed_stop(self) -> str | None:
        """Return the reason if a callback of any rank has called `stop`. Collective."""
        reasons = [reason for reason in all_gather_object(self._stop_reason) if reason is not None]
        if not reasons:
            return None
        log.info(wrapped(f"ends after {counted(self.iteration, 'iteration')}: {reasons[0]}"))
        return reasons[0]

    def _save_last_complete(self, last: _Completed | None, error: BaseException) -> None:
        """Save the last complete iteration of a run that ends early, by `error`."""
        if self.trainer.mid_iteration and (last is None or not last.restore(self.trainer)):
            self._say_what_is_lost()
            return
        done = counted(self.iteration, "iteration")
        states = None
        if last is not None and last.iteration == self.iteration:
            states = last.states  # the iteration after it has begun: callbacks are ahead
        try:
            self._checkpoint_in_spite_of_callbacks(states, last)
        except (OSError, RankError) as second:
            log.info(f"stopped after {done}, and no checkpoint could be written: {second}")
            if isinstance(error, Stopped):  # its exit status would claim that nothing is lost
                raise
        else:
            first = "" if isinstance(error, Stopped) else "fix the cause, then "
            log.info(f"stopped after {done}; {first}continue with --resume")

    def _checkpoint_in_spite_of_callbacks(
        self, states: dict[str, Any] | None, last: _Completed | None
    ) -> None:
        """Save a checkpoint. Where a callback cannot give its state any more, or fails once more,
        its last state is saved, with a note."""
        if states is None:
            try:
                states = self.callbacks.states()
            except (CallbackError, RankError) as error:
                states = {} if last is None else last.states
                log.warning(wrapped(f"note: {error}; the states before this iteration are saved"))
        try:
            self.save(states)
        except (CallbackError, RankError) as error:
            if self._checkpointed != self.iteration:
                raise
            log.warning(wrapped(f"note: {error}"))  # of `on_checkpoint`

    def _say_what_is_lost(self) -> None:
        kept = RunFolder(self.folder).checkpoints()
        start = "from the beginning"
        if kept:
            start = f"from the checkpoint of {counted(iteration_of(kept[-1]), 'iteration')}"
        log.info(
            f"stopped within iteration {self.iteration + 1}, whose updates are lost; continue with "
            f"--resume, {start}"
        )

    # -- the start ---------------------------------------------------------------------------------

    def _resume(self) -> None:
        """Restore the newest intact checkpoint, if there is one, and put the new settings into the
        folder."""
        counters = self.trainer.state_dict()
        found = load_checkpoint(self.folder, self.trainer.engine, counters)
        if found is not None:
            self.iteration, saved, anchor = found
            self._checkpointed = self.iteration
            self.trainer.load_state_dict(saved, anchor)
            self.callbacks.load_states(saved["callbacks"])

        run = RunFolder(self.folder)
        claim.check_checkpoints(run)  # again: loading takes minutes
        claim.check_metrics(run, self.iteration)
        newest = run.facts.get("checkpoint")
        if newest is not None and newest > self.iteration:
            log.info(
                wrapped(
                    f"note: the checkpoint of {counted(newest, 'iteration')}, the newest that the "
                    f"run has written, cannot be used: iterations {self.iteration + 1} to {newest} "
                    "are done again"
                )
            )
        if self.is_main:  # only after every check of the new settings
            self.claim.take()
            claim.remove_partials(self.folder)
        claim.replace_settings(self.config, self.iteration)

    def _unfinished_stop(self, facts: Mapping[str, Any]) -> str | None:
        """Return why a callback had ended the run, if a signal or an error came before its final
        weights were evaluated. Collective.

        A scheduler that starts the run again then gets the end that was asked for. To go on, resume
        the run once it has come to its end.
        """
        after = read_evaluation(self.folder, "after")
        has_ended = after is not None and after["iteration"] == self.iteration
        reason = facts.get("stopped")
        if reason is None or has_ended or facts.get("checkpoint") != self.iteration:
            return None
        log.info(
            wrapped(
                "note: a callback has ended this run, and its final weights are not evaluated yet: "
                "this follows now; resume it once more to go on"
            )
        )
        return str(reason)

    def _say_how_it_starts(
        self, resolved: ResolvedConfig, trajectories: str, *, resume: bool
    ) -> None:
        log.info(trajectories)
        for warning in config_warnings(resolved, self.setup.model.spec.distillation):
            log.warning(wrapped(f"warning: {warning}"))
        if resume and self.iteration:
            log.info(f"resumed after {counted(self.iteration, 'iteration')}")
        elif resume:
            log.info("no checkpoint: starting at iteration 1")


class _Completed:
    """The state at the end of an iteration, for rolling back an unfinished next one.

    With one update per iteration the weights are not copied, unless a callback of the user's
    follows the update: nothing else is likely to fail after it.

    Attributes:
        iteration: complete iterations.
        states: of the callbacks.
    """

    def __init__(self, run: Run) -> None:
        trainer = run.trainer
        self.iteration = run.iteration
        self.states = run.callbacks.states()
        self._counters = trainer.state_dict()
        self._anchor = trainer.anchor  # an anchor is replaced, never changed in place
        may_fail_after_an_update = (
            trainer.config.train.optimizer_steps > 1 or run.callbacks.follow_updates()
        )
        self._snapshotted = may_fail_after_an_update and trainer.engine.remember()

    def restore(self, trainer: Trainer) -> bool:
        """Roll back; return False if the weights were not copied."""
        if not self._snapshotted:
            return False
        trainer.engine.rewind()
        trainer.load_state_dict(self._counters, self._anchor)
        trainer.mid_iteration = False
        return True
