"""Whether a worker that says nothing is frozen, from what its agent hears of it and sees from outside. Pure.

A worker's side thread beats. It falls silent when the process is stopped, but also while something else
holds Python's lock: a garbage collection, the pickling of a large object, or a call that never comes back.
So silence alone proves nothing; what the kernel says of the process decides how long it is borne.
"""

from dataclasses import dataclass

TURN_S = 0.25
"""How often an agent looks at the silence of its workers."""
_STOPPED, _TRACED, _RUNNABLE = "T", "t", "R"
_IDLE = 0.05
"""A process that uses a smaller share of the time than this does nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long silence is borne. Seconds."""

    silent_s: float
    """Of a process that does nothing; 0 turns the whole rule off."""
    busy_s: float
    """Of one that computes: it may collect garbage, pickle or import."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """What the kernel says of a silent process."""

    states: str
    """The letter of each of its threads."""
    used_s: float
    """CPU time since its last beat."""


def silence(before_s: float, elapsed_s: float) -> float:
    """Return the silence so far, after one more turn of the agent.

    A turn that came late is the agent's own lag, frozen or starved: it counts as two at most, so that an
    agent needs several turns of its own to find a worker silent, between which it hears what was sent.
    """
    return before_s + min(elapsed_s, 2 * TURN_S)


def frozen(silent_s: float, activity: Activity, limits: Limits, *, stepped: bool) -> str:
    """Return why a silent worker has to be given up, or an empty text: it is not (yet) frozen.

    `stepped`: it completed a step. Before that libraries are loaded and kernels made, during which a
    process may be silent and wait for a disk for minutes.
    """
    if not limits.silent_s or silent_s < limits.silent_s or _TRACED in activity.states:
        return ""
    said = f"no beat for {silent_s:.1f} s"
    if activity.states and set(activity.states) == {_STOPPED}:
        return f"{said}, stopped by a signal"
    if not stepped:
        return ""
    computes = activity.used_s > _IDLE * silent_s or _RUNNABLE in activity.states
    if not computes:
        return said
    if silent_s >= limits.busy_s:
        return f"{said} although it computes: something holds Python's lock"
    return ""
