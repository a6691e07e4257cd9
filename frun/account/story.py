"""Gathers from the entries of all hosts what happened to the job as a whole, generation by generation.

A phase ends with the last host or rank that leaves it: that is when the job goes on.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from frun.account.journal import Entry, Journal, microseconds

INCIDENT = (
    "id", "generation", "cause", "kind", "ranks", "hosts", "action", "detect_s", "pause_s",
    "respawn_s", "rebuild_s", "agree_s", "copy_s", "first_step_s", "total_s", "copied_bytes",
    "steps_lost", "resumed_at_step",
)  # fmt: skip
"""Fields that the account of an incident always has."""
UNKNOWN: Mapping[str, Any] = {
    **dict.fromkeys(INCIDENT, 0), "cause": "", "kind": "", "action": "", "ranks": [], "hosts": [],
}  # fmt: skip
"""Of an incident of which nothing is known."""
_FINAL = ("done", "failed")


@dataclass(slots=True, kw_only=True)
class Generation:
    """When the job was where in one generation. Microseconds on the common clock; None: never seen."""

    number: int
    fault_us: int
    """When what made it necessary happened; of the first: when the job began."""
    table_us: int
    """The first sight of its table."""
    reason: str
    """Why it was made, in that table's words."""
    gathers: list[tuple[int, int]] = field(default_factory=list)
    """From and to when hosts were waited for."""
    members: set[str] = field(default_factory=set)
    """Hosts that saw it run and had a place in it."""
    run_us: int | None = None
    started_us: int | None = None
    met_us: int | None = None
    """All ranks had made their groups and agreed on the step."""
    restored_us: int | None = None
    first_us: int | None = None
    """Every rank had completed its first step."""
    resumed_at: int | None = None
    steps: list[tuple[int, int]] = field(default_factory=list)
    """(time, completed updates), in the order of time."""
    high: int = 0
    """The most updates that had ever been completed before this generation."""


ONLY_TOLD = ("numbers", "replicas", "straggler")
"""Sources of what is told to people, and ends nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """Something was noticed before anything had ended of itself."""

    at_us: int
    source: str
    rank: int
    reason: str
    generation: int | None
    """The one that answered it, or the last one if the job ended for it; None: nothing came of it."""

    @property
    def for_nothing(self) -> bool:
        """Whether something should have come of it, and nothing did."""
        return self.generation is None and self.source not in ONLY_TOLD


@dataclass(frozen=True, slots=True, kw_only=True)
class Drill:
    """A fault that was injected."""

    at_us: int
    fault: str
    rank: int
    """The worker that was hit; -1: the host itself."""
    host: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """The job as a whole."""

    began_us: int
    ended_us: int
    over: bool
    """The job's end was seen, so nothing follows."""
    final: tuple[int, str] | None
    """When a final table was seen, and its phase."""
    why: str
    """The reason that the final table gives; empty while there is none."""
    fault_us: int | None
    """What ended the job, if a failure did and was seen."""
    stopped_us: int | None
    """When the last workers were told to stop, or the last of them ended."""
    generations: tuple[Generation, ...]
    told: bool
    """Workers said when they had their state and how far they were."""
    incidents: tuple[Mapping[str, Any], ...]
    noticed: tuple["Notice", ...]
    drills: tuple["Drill", ...]
    checkpoints: tuple[tuple[int, int], ...]
    """From and to when any rank was in a declared checkpoint."""


def gather(
    journals: Sequence[Journal],
    *,
    until_us: int | None = None,
    incidents: Iterable[Mapping[str, Any]] = (),
) -> Story:
    """Return the story of journals that are aligned already; `until_us` is now, for a live job.

    `incidents` are those that etcd knows, since the leader's log may be out of reach.
    """
    entries = sorted(
        (entry for journal in journals for entry in journal.entries), key=lambda each: each.at_us
    )
    began_us = entries[0].at_us
    ended_us = max(entries[-1].at_us, until_us if until_us is not None else entries[-1].at_us)
    closed = _incidents(entries, incidents)
    tables = [entry for entry in entries if entry.name == "phase_seen" and entry.generation > 0]
    generations = _generations(tables, began_us, ended_us)
    _fill(generations, entries)
    failures = [
        entry.at_us
        for entry in entries
        if entry.name == "worker_exited" and entry.text("state") == "failed"
    ]
    unfit = [
        (entry.host, entry.at_us)
        for entry in entries
        if entry.name == "health_changed" and entry.fields.get("lasting") and entry.fields["holds"]
    ]
    _find_faults(generations, failures, unfit, closed)
    last = next((entry for entry in tables if entry.text("phase") in _FINAL), None)
    final = None if last is None else (last.at_us, last.text("phase"))
    return Story(
        began_us=began_us,
        ended_us=ended_us,
        over=final is not None or all(any(journal.all("job_ended")) for journal in journals),
        final=final,
        why=last.text("reason") if last is not None else "",
        fault_us=_last_fault(generations, failures, final),
        stopped_us=_stopped(generations, entries),
        generations=tuple(generations),
        told=any(entry.name == "worker_restored" for entry in entries),
        incidents=tuple(closed[number] for number in sorted(closed)),
        noticed=tuple(_notices(entries, generations, final)),
        drills=tuple(_drills(entries)),
        checkpoints=_merged(
            (entry.at_us - microseconds(entry.number("took_s")), entry.at_us)
            for entry in entries
            if entry.name == "worker_phase_ended" and entry.text("phase") == "checkpoint"
        ),
    )


def _incidents(
    entries: Iterable[Entry], stored: Iterable[Mapping[str, Any]]
) -> dict[int, Mapping[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for entry in entries:
        if entry.name == "incident_closed":
            found[entry.generation] = {"generation": entry.generation, **entry.fields}
        elif entry.name == "incident_renamed" and entry.generation in found:
            found[entry.generation] |= _named(entry.fields)
    for record in stored:
        number = int(record["generation"])
        # What the logs say of it, but the class: etcd knows what was learned last.
        found[number] = {**record, **found.get(number, {}), **_named(record)}
    return {number: {**UNKNOWN, **record} for number, record in found.items()}


def _named(record: Mapping[str, Any]) -> dict[str, Any]:
    return {name: record[name] for name in ("fault_class", "evidence") if name in record}


def _generations(tables: Sequence[Entry], began_us: int, ended_us: int) -> list[Generation]:
    made: dict[int, Generation] = {}
    waits_since: int | None = None
    for entry in tables:
        number, phase = entry.generation, entry.text("phase")
        latest = max(made, default=0)
        if number < latest:
            continue  # a host that saw an old table late
        if phase != "gather" and waits_since is not None:
            made[latest].gathers.append((waits_since, entry.at_us))
            waits_since = None
        if phase in _FINAL:
            continue
        if number > latest:
            made[number] = Generation(
                number=number,
                fault_us=entry.at_us,
                table_us=entry.at_us,
                reason=entry.text("reason"),
            )
        if phase == "gather" and waits_since is None:
            waits_since = entry.at_us
        is_member = entry.fields.get("group_rank") is not None
        if phase == "run" and is_member and entry.host not in made[number].members:
            made[number].run_us = entry.at_us
            made[number].members.add(entry.host)
    if waits_since is not None:
        made[max(made)].gathers.append((waits_since, ended_us))
    generations = [made[number] for number in sorted(made)]
    if generations:
        generations[0].fault_us = min(generations[0].fault_us, began_us)
    return generations


def _fill(generations: Sequence[Generation], entries: Sequence[Entry]) -> None:
    """Note when the last rank left each phase, and the steps that were told."""
    known = {each.number: each for each in generations}
    before: dict[int, int] = {}
    for entry in entries:
        number, step = entry.generation, int(entry.number("step"))
        generation = known.get(number)
        if generation is None:
            continue
        match entry.name:
            case "generation_started":
                generation.started_us = entry.at_us
            case "worker_restored":
                generation.restored_us = entry.at_us
                met_us = entry.at_us - microseconds(entry.number("copy_s"))
                generation.met_us = max(generation.met_us or met_us, met_us)
                generation.resumed_at = step
                before[number] = max(before.get(number, 0), step + int(entry.number("steps_lost")))
            case "first_step_completed":
                generation.first_us = entry.at_us
                generation.steps.append((entry.at_us, step))
            case "steps_completed":
                generation.steps.append((entry.at_us, step))
            case "worker_paused" | "worker_out":
                # Told in the new generation, true of the old one.
                before[number] = max(before.get(number, 0), step)
    high = 0
    for generation in generations:
        generation.high = high = max(high, before.get(generation.number, 0))
        high = max([high, *(step for _, step in generation.steps)])


def _find_faults(
    generations: Sequence[Generation],
    failures: Sequence[int],
    unfit: Sequence[tuple[str, int]],
    closed: Mapping[int, Mapping[str, Any]],
) -> None:
    for before, generation in pairwise(generations):
        record = closed.get(generation.number)
        if record is not None and record["kind"] == "device":
            # Who measured how long that took is not in the new world.
            hosts, until_us = record["hosts"], generation.table_us
            told = [us for host, us in unfit if host in hosts and us <= until_us]
            fault_us = max(told, default=until_us)
        elif record is not None:
            fault_us = generation.table_us - microseconds(float(record["detect_s"]))
        else:
            fault_us = _first_failure(failures, before.run_us, generation.table_us)
        generation.fault_us = min(max(fault_us, before.table_us), generation.table_us)


def _first_failure(failures: Sequence[int], since_us: int | None, table_us: int) -> int:
    """Return when the first worker that failed in this time ended; the table's time if none did."""
    if since_us is None:
        return table_us
    index = bisect_left(failures, since_us)
    return min(failures[index], table_us) if index < len(failures) else table_us


def _last_fault(
    generations: Sequence[Generation], failures: Sequence[int], final: tuple[int, str] | None
) -> int | None:
    if final is None or final[1] != "failed" or not generations:
        return None
    last = generations[-1]
    return _first_failure(failures, last.run_us or last.table_us, final[0])


def _stopped(generations: Sequence[Generation], entries: Sequence[Entry]) -> int | None:
    """Return when nothing trained any more: the workers were told to stop, or the last one ended."""
    since_us = generations[-1].run_us if generations else None
    if since_us is None:
        return None
    members = generations[-1].members
    late = [entry for entry in entries if entry.at_us >= since_us and entry.host in members]
    told = [e.at_us for e in late if e.name in ("workers_stopping", "signal_received")]
    if told:
        return told[0]
    ended = [e.at_us for e in late if e.name == "worker_exited"]
    alive = sum(_LIVES.get(entry.name, 0) for entry in entries)
    return ended[-1] if ended and alive <= 0 else None


_MOMENT_US = 5_000
"""What is done for a fault begins some moments after it is told, and its times are rounded."""
_LIVES = {"worker_started": 1, "worker_exited": -1}


def _notices(
    entries: Iterable[Entry], generations: Sequence[Generation], final: tuple[int, str] | None
) -> Iterator[Notice]:
    """Yield what was noticed, each with the generation whose fault it was."""
    tables = [generation.table_us for generation in generations]
    for entry in entries:
        if entry.name != "fault_noticed":
            continue
        index = bisect_left(tables, entry.at_us)
        answer = None
        if index < len(generations):
            # A fault that began before it was noticed, and was answered after that.
            if generations[index].fault_us <= entry.at_us + _MOMENT_US:
                answer = generations[index].number
        elif final is not None and final[1] == "failed":
            answer = generations[-1].number if generations else None
        yield Notice(
            at_us=entry.at_us,
            source=entry.text("source"),
            rank=int(entry.number("rank")),
            reason=entry.text("reason"),
            generation=answer,
        )


def _drills(entries: Iterable[Entry]) -> Iterator[Drill]:
    for entry in entries:
        if entry.name == "fault_injected":
            yield Drill(
                at_us=entry.at_us,
                fault=entry.text("fault"),
                rank=int(entry.number("rank")),
                host=entry.host,
            )


def _merged(spans: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return the same times without overlaps, in order."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return tuple(merged)
