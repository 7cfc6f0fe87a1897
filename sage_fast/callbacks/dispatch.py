"""Call the callbacks of a run, at its hooks: in their order, with their errors named."""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sage_fast.callbacks.interface import Callback, Histogram
from sage_fast.util.console import wrapped
from sage_fast.util.errors import RunError, UserError, in_one_line
from sage_fast.util.ranks import check_agreement, fail_together

if TYPE_CHECKING:
    from sage_fast.run.train import Run

log = logging.getLogger(__name__)


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
        UserError: one is no callback, two have the same name, or the ranks have different ones.
    """

    def __init__(self, users: Sequence[Callback], built_in: Sequence[Callback]) -> None:
        for number, callback in enumerate(users):
            _check_callback(callback, f"callbacks[{number}]")
        self.users = list(users)
        self.built_in = list(built_in)
        self._check_names()

    def _check_names(self) -> None:
        names = [callback.name for callback in self.all]
        for place, name in enumerate(names):
            if not isinstance(name, str) or not name:
                raise UserError(f"{_label(self.all[place])}: name = {name!r}: expected a text")
            if name in names[:place]:
                raise UserError(
                    f"callbacks: two are named {name!r}; give one of them another `name`"
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

    def end_iteration(self, run: Run, row: dict[str, Any]) -> None:
        """Call `on_iteration_end`; columns that callbacks add become plain numbers. Collective.

        Raises:
            CallbackError: as `call`; or a callback changes a column of the run's, or adds one that
                `metrics.jsonl` cannot hold. `row` is then without it.
        """
        of_the_run = dict(row)
        concerned = [
            callback for callback in self.users if _overrides(callback, "on_iteration_end")
        ]
        if concerned:
            with fail_together():
                for callback in concerned:
                    try:
                        _call(callback, "on_iteration_end", run, row)
                    finally:
                        problem = _make_plain(row, of_the_run)
                    if problem:
                        raise CallbackError(f"{_label(callback)}, on_iteration_end: {problem}")
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
                indices = set(_call(callback, "videos_wanted", run, rollouts))
                if unknown := indices.difference(range(len(rollouts))):
                    raise CallbackError(
                        f"{_label(callback)}, videos_wanted: {min(unknown)!r}: expected indices "
                        f"from 0 to {len(rollouts) - 1}"
                    )
                wanted |= indices
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
        """Return name -> state of the callbacks that have one. Collective.

        Raises:
            CallbackError: as `call`; or a state is not plain JSON.
        """
        concerned = [callback for callback in self.all if _overrides(callback, "state_dict")]
        found: dict[str, Any] = {}
        if not concerned:
            return found
        with fail_together():
            for callback in concerned:
                state = _call(callback, "state_dict")
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
        concerned = [callback for callback in self.all if _overrides(callback, "state_dict")]
        with fail_together():
            for callback in concerned:
                if callback.name in saved:
                    _call(callback, "load_state_dict", saved[callback.name])
        new = [callback.name for callback in concerned if callback.name not in saved]
        gone = sorted(saved.keys() - {callback.name for callback in self.all})
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
        return getattr(callback, hook)(*arguments)
    except (Exception, SystemExit) as error:
        log.debug("".join(traceback.format_exception(error)))  # into the rank's log file
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise CallbackError(
            f"{_label(callback)}, {hook}: {in_one_line(error)} ({frame.filename}:{frame.lineno})"
        ) from error


# -- columns that callbacks add --------------------------------------------------------------------


def _make_plain(row: dict[str, Any], of_the_run: Mapping[str, Any]) -> str | None:
    """Turn the columns that a callback has added into plain numbers; return what is wrong, if
    anything is.

    A column that is wrong is taken out of the row, and one of the run's put back.
    """
    problem = None
    for name, value in of_the_run.items():
        if name not in row or row[name] is not value:
            row[name] = value
            problem = f"{name!r} is a column of the run's: expected another name"

    for name in [name for name in row if name not in of_the_run]:
        value = row[name]
        if not isinstance(name, str):
            del row[name]
            problem = f"{name!r}: expected a text as the name of a column"
            continue
        if isinstance(value, Histogram):
            continue
        # a tensor or an array, also of one number
        plain = value.tolist() if hasattr(value, "tolist") else value
        if _is_numbers(plain):
            row[name] = plain
        else:
            del row[name]
            problem = (
                f"column {name!r} = {value!r:.60}: expected a number, a list of numbers or a "
                "Histogram"
            )
    return problem


def _is_numbers(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_numbers(item) for item in value)
    if isinstance(value, float):
        return True
    return value is None or (isinstance(value, int) and abs(value) < 2**53)
