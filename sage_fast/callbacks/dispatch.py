"""Call the callbacks of a run, at its hooks: in their order, with their errors named."""

from __future__ import annotations

import json
import logging
import operator
import traceback
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sage_fast.callbacks.columns import make_plain
from sage_fast.callbacks.interface import Callback
from sage_fast.config.secrets import names_for_values
from sage_fast.util.console import logs_restored, wrapped
from sage_fast.util.errors import RunError, UserError, in_one_line, nearest
from sage_fast.util.ranks import check_agreement, fail_together

if TYPE_CHECKING:
    from sage_fast.run.train import Run

log = logging.getLogger(__name__)


HOOKS = tuple(name for name in vars(Callback) if name.startswith("on_"))
"""Every method of a callback that begins with `on_`."""
HOOKS_ELSEWHERE = {
    # Transformers and TRL
    "on_init_end": "on_run_start",
    "on_train_begin": "on_run_start",
    "on_train_end": "on_run_end",
    "on_step_begin": "on_update_start",
    "on_step_end": "on_update_end",
    "on_pre_optimizer_step": "on_update_start",
    "on_optimizer_step": "on_update_end",
    "on_log": "on_iteration_end",
    "on_evaluate": "on_evaluation_end",
    "on_save": "on_checkpoint",
    # Lightning
    "on_fit_start": "on_run_start",
    "on_fit_end": "on_run_end",
    "on_train_start": "on_run_start",
    "on_train_batch_start": "on_iteration_start",
    "on_train_batch_end": "on_iteration_end",
    "on_before_optimizer_step": "on_update_start",
    "on_validation_start": "on_evaluation_start",
    "on_validation_end": "on_evaluation_end",
    "on_save_checkpoint": "on_checkpoint",
}
"""Hook of another library's -> ours at that point, where the likeness of names would mislead."""


class CallbackError(RunError):
    """An error in a hook of a user's callback, raised on the rank where it happened; the other
    ranks raise `RankError`."""

    on_all_ranks = True


class Callbacks:
    """The callbacks of a run: the user's in their order, then its own.

    An error in a hook of the user's is shared by all ranks, so that they can save a checkpoint
    together. A hook that makes collective calls of its own must not fail between them on one rank
    alone.

    Args:
        users: those of the setting `callbacks`, then those given to `train`.
        built_in: the run's own.

    Raises:
        UserError: one is no callback or has a method `on_...` that is no hook, two have the same
            name, or the ranks have different ones.
    """

    def __init__(self, users: Sequence[Callback], built_in: Sequence[Callback]) -> None:
        for number, callback in enumerate(users):
            _check_callback(callback, f"callbacks[{number}]")
        self.users = list(users)
        self.built_in = list(built_in)
        self._check_names()

    def _check_names(self) -> None:
        names = [callback.name for callback in self.users]
        of_the_run = {type(callback) for callback in self.built_in}
        for place, name in enumerate(names):
            callback = self.users[place]
            if not isinstance(name, str) or not name:
                raise UserError(f"{_label(callback)}: name = {name!r}: expected a text")
            if name in names[:place]:
                raise UserError(
                    f"callbacks: two are named {name!r}; give one of them another `name`"
                )
            if type(callback) in of_the_run:
                raise UserError(
                    f"{_label(callback)}: the settings of the run have one already; leave one of "
                    "the two out"
                )
        # else a collective call of one rank would wait for the others
        check_agreement({"callbacks": names}, ": give every rank the same callbacks")

    @property
    def all(self) -> list[Callback]:
        """The callbacks in the order in which they are called."""
        return [*self.users, *self.built_in]

    def follow_updates(self) -> bool:
        """Whether a callback of the user's is called after an optimizer step."""
        return any(_overrides(callback, "on_update_end") for callback in self.users)

    # -- hooks -------------------------------------------------------------------------------------

    def call(self, hook: str, run: Run, *arguments: Any) -> None:
        """Call a hook of every callback. Collective.

        Raises:
            CallbackError: in a callback of the user's, on this rank.
            RankError: in a callback of the user's, on another rank.
        """
        self._call_users(hook, run, *arguments)
        for callback in self.built_in:
            getattr(callback, hook)(run, *arguments)

    def _call_users(self, hook: str, *arguments: Any) -> None:
        concerned = [callback for callback in self.users if _overrides(callback, hook)]
        if not concerned:
            return
        with fail_together():
            for callback in concerned:
                _call(callback, hook, *arguments)

    def add_columns(self, run: Run, row: dict[str, Any]) -> None:
        """Call `on_iteration_end` of the user's callbacks; the columns that they add become plain
        numbers. Collective.

        Raises:
            CallbackError: as `call`; or a callback changes a column of the run's, or adds one that
                `metrics.jsonl` cannot hold. `row` is then without it.
        """
        of_the_run = dict(row)
        concerned = [
            callback for callback in self.users if _overrides(callback, "on_iteration_end")
        ]
        if not concerned:
            return
        with fail_together():
            for callback in concerned:
                try:
                    _call(callback, "on_iteration_end", run, row)
                finally:
                    problem = make_plain(row, of_the_run)
                if problem:
                    raise CallbackError(f"{_label(callback)}, on_iteration_end: {problem}")

    def end_iteration(self, run: Run, row: dict[str, Any]) -> None:
        """Call `on_iteration_end` of the run's own callbacks. Collective.

        Args:
            row: without the columns of the user's callbacks, whose names may be any.
        """
        for callback in self.built_in:
            callback.on_iteration_end(run, row)

    def videos_wanted(self, run: Run, rollouts: Sequence[tuple[int, int]]) -> set[int]:
        """Return the indices of this rank's samples that any callback wants. Collective."""
        concerned = [callback for callback in self.all if _overrides(callback, "videos_wanted")]
        wanted: set[int] = set()
        if not concerned:
            return wanted
        with fail_together():
            for callback in concerned:
                indices = _call(callback, "videos_wanted", run, rollouts)
                wanted |= _checked_indices(callback, indices, len(rollouts))
        return wanted

    def report(self, run: Run, error: BaseException) -> None:
        """Call `on_exception`. Not collective; an error in it is a note: the run's own comes
        first."""
        for callback in self.all:
            try:
                _call(callback, "on_exception", run, error)
            except CallbackError as second:
                log.warning(wrapped(f"note: {second}"))

    # -- states ------------------------------------------------------------------------------------

    def states(self) -> dict[str, Any]:
        """Return name -> state of the user's callbacks that have one. Collective.

        Raises:
            CallbackError: as `call`; or a state is not plain JSON.
        """
        concerned = [callback for callback in self.users if _overrides(callback, "state_dict")]
        found: dict[str, Any] = {}
        if not concerned:
            return found
        with fail_together():
            for callback in concerned:
                state = _call(callback, "state_dict")
                key = _key_that_is_no_text(state)
                if key is not None:  # JSON would make a text of it, without a word
                    raise CallbackError(
                        f"{_label(callback)}, state_dict: key {key[0]!r}: expected a text, which "
                        "JSON keeps as it is"
                    )
                try:
                    # a copy: the callback goes on changing its own
                    found[callback.name] = json.loads(json.dumps(state))
                except (TypeError, ValueError, RecursionError) as error:
                    raise CallbackError(
                        f"{_label(callback)}, state_dict: expected plain JSON: {error}"
                    ) from error
        return found

    def load_states(self, saved: Mapping[str, Any]) -> None:
        """Restore the states that a checkpoint holds. Collective.

        A callback without one starts anew, and the state of one that is gone is lost, both with a
        note.
        """
        concerned = [callback for callback in self.users if _overrides(callback, "state_dict")]
        with fail_together():
            for callback in concerned:
                if callback.name in saved:
                    _call(callback, "load_state_dict", saved[callback.name])
        new = [callback.name for callback in concerned if callback.name not in saved]
        gone = sorted(saved.keys() - {callback.name for callback in self.users})
        if new:
            log.info(
                wrapped(f"note: callbacks without a state in the checkpoint: {', '.join(new)}")
            )
        if gone:
            log.info(wrapped(f"note: the state of these callbacks is lost: {', '.join(gone)}"))


def _check_callback(callback: object, place: str) -> None:
    if isinstance(callback, type) and issubclass(callback, Callback):
        raise UserError(f"{place} is a class: expected an object, such as {callback.__name__}()")
    if not isinstance(callback, Callback):
        raise UserError(f"{place} = {callback!r}: expected an object of a subclass of sf.Callback")
    check_hooks(callback, _label(callback))


def check_hooks(callback: Callback | type[Callback], where: str) -> None:
    """Check that every method `on_...` of a callback, or of a class of them, is a hook: a misspelt
    one would never be called.

    Args:
        where: names the callback, for messages.

    Raises:
        UserError: one is not.
    """
    owner = callback if isinstance(callback, type) else type(callback)
    for name in dir(callback):
        if not name.startswith("on_") or name in HOOKS:
            continue
        # not read from the object: a property would run
        value = vars(callback).get(name, getattr(owner, name, None))
        if callable(value):
            hint = nearest(HOOKS_ELSEWHERE.get(name, name), HOOKS)
            raise UserError(
                f"{where}: {name} is no hook, and would never be called (a method of your own must "
                f"not begin with on_); {hint}"
            )


def _label(callback: Callback) -> str:
    kind = type(callback)
    return f"callback {kind.__module__}:{kind.__qualname__}"


def _overrides(callback: Callback, hook: str) -> bool:
    """Whether a callback does something at a hook, by its class or by itself."""
    return hook in vars(callback) or getattr(type(callback), hook) is not getattr(Callback, hook)


def _call(callback: Callback, hook: str, *arguments: Any) -> Any:
    """Call a hook; name the callback in its error.

    Signals pass, and so does Ctrl-C.
    """
    try:
        with logs_restored():  # `evaluate` and others end the log of a run, which goes on here
            return getattr(callback, hook)(*arguments)
    except (Exception, SystemExit) as error:
        # into the rank's log file
        log.debug(names_for_values("".join(traceback.format_exception(error))))
        frame = traceback.extract_tb(error.__traceback__)[-1]
        told = names_for_values(in_one_line(error))
        raise CallbackError(
            f"{_label(callback)}, {hook}: {told} ({frame.filename}:{frame.lineno})"
        ) from error


def _checked_indices(callback: Callback, indices: Any, count: int) -> set[int]:
    """Return the indices of samples that `videos_wanted` has returned.

    Raises:
        CallbackError: they are not a list of numbers below `count`.
    """
    expected = f"expected a list of indices from 0 to {count - 1}"
    if hasattr(indices, "tolist"):  # a tensor or an array
        indices = indices.tolist()
    if not isinstance(indices, Iterable) or isinstance(indices, str):
        raise CallbackError(f"{_label(callback)}, videos_wanted: {indices!r:.60}: {expected}")

    checked: set[int] = set()
    for index in indices:
        try:
            number = operator.index(index)
        except TypeError:
            number = -1
        if not 0 <= number < count:
            raise CallbackError(f"{_label(callback)}, videos_wanted: {index!r:.60}: {expected}")
        checked.add(number)
    return checked


def _key_that_is_no_text(state: Any) -> tuple[Any] | None:
    """Return the first key of a state that is no text, as a tuple of it alone; None if there is
    none."""
    waiting = [state]
    seen: set[int] = set()
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, dict):
            for key in value:
                if not isinstance(key, str):
                    return (key,)
            waiting += value.values()
        elif isinstance(value, list | tuple):
            waiting += value
    return None
