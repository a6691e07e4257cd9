"""The decorator that makes a function live through the death of other workers.

Owns the way out of the function and into it again. When to leave is the runtime's, what is kept meanwhile
the session's.
"""

import functools
import traceback
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from frun.errors import UsageError
from frun.protocol import blame
from frun.protocol.records import Failure
from frun.worker import runtime as of_process
from frun.worker.paused import Paused
from frun.worker.runtime import LOST_PEER_S, Runtime
from frun.worker.session import Session

NEWS_S = 0.5
"""How long an exception waits for the news that it is not the script's fault, if it names no lost peer."""

P = ParamSpec("P")
T = TypeVar("T")


def resumable(function: Callable[Concatenate[Session, P], T]) -> Callable[P, T]:
    """Let a training function survive the death of other workers.

    The function gets a `frun.Session` as its first argument. When another worker dies, this one's process
    stays: the function is left by an exception, its process groups go, and it is called again with the same
    arguments once the world is whole. `session.restore` then puts its objects in the state of the last
    completed step. It returns on all workers when all of them have returned from it.

    One call in a process, in the main thread; everything that trains goes into it. Make the default
    process group in it, or before it: then frun makes the group again. `except Exception` around a step
    does no harm, since frun's own part of the next step raises `Paused`, which is none; a bare `except`
    holds recovery up until frun kills the worker, after half a minute.
    """
    runtime = next((each for each in of_process.started if each.is_here), None)
    if runtime is not None:
        runtime.begin()
        runtime.groups.meet_again = functools.partial(_meet_again, runtime)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if runtime is None:
            return function(Session(None), *args, **kwargs)
        if runtime.calls:
            raise UsageError(
                f"{function.__name__} is the second call of a resumable function in this process: "
                "a worker that is started anew would not know that the first one is over; call one"
            )
        runtime.calls.append(function.__name__)
        session = Session(runtime)
        try:
            return _run(runtime, session, functools.partial(function, session, *args, **kwargs))
        finally:
            runtime.end()

    return call


def _run(runtime: Runtime, session: Session, function: Callable[[], T]) -> T:
    """Enter the function until it ends in a generation that is not over."""
    made_before = runtime.groups.has_default
    runtime.groups.meet_again = lambda error: False
    entered = False
    while True:
        if not runtime.is_paused:
            ended = _enter(runtime, session, function, remake=made_before and entered)
            if ended is not None:
                return ended[0]
        entered = True
        session.leave()
        runtime.leave(some_stay=session.holds_groups)
        runtime.wait_for_resume()


def _enter(
    runtime: Runtime, session: Session, function: Callable[[], T], *, remake: bool
) -> tuple[T] | None:
    """Call the function; return its value in a tuple, or None if its generation is over."""
    try:
        if remake:
            runtime.groups.remake()
        session.enter()
        value = function()
        if session.has_met:
            runtime.meet_at_end()
    except BaseException as error:
        if not _is_pause(runtime, error):
            raise
        _forget(error)
        return None
    return (value,)


def _meet_again(runtime: Runtime, error: BaseException) -> bool:
    """Come into the next generation from outside of the function; False if it is not that.

    There a script can only wait for others to make the default group: nobody enters it again.
    """
    if not _is_pause(runtime, error):
        return False
    _forget(error)
    runtime.leave()
    runtime.wait_for_resume()
    return True


def _is_pause(runtime: Runtime, error: BaseException) -> bool:
    """Tell whether an exception comes from the end of the generation; may wait for the news of it."""
    if runtime.is_paused or isinstance(error, Paused):
        return True
    if not isinstance(error, Exception):
        return False
    return runtime.wait_for_pause(LOST_PEER_S if _names_lost_peer(error) else NEWS_S)


def _names_lost_peer(error: Exception) -> bool:
    text = "".join(traceback.format_exception_only(type(error), error))
    failure = Failure(rank=0, local_rank=0, host="", exit_code=1, message=text, recorded=True)
    return not blame.is_clear(failure)


def _forget(error: BaseException) -> None:
    """Drop everything that an exception and its frames refer to, process groups above all."""
    pending: list[BaseException | None] = [error]
    seen: set[int] = set()
    while pending:
        each = pending.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        pending += [each.__cause__, each.__context__]
        traceback.clear_frames(each.__traceback__)
        each.__traceback__ = each.__cause__ = each.__context__ = None
