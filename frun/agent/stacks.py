"""Tells what was done on this host when ranks stood still: an event, and a file with their stacks.

Owns the grouping of equal stacks and the text. Who hangs was decided by the leader.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping

from frun.agent.logs import LogPump
from frun.agent.pulse import Pulse
from frun.events import Event, FaultNoticed, StacksWritten
from frun.protocol.records import Incident

KINDS = ("hang", "link")
"""Kinds of incidents before which all ranks stood still."""
_NAME = "stacks.txt"
_SILENT = "(no answer: its threads do not get Python's lock)\n"


def noticed(
    incident: Incident, pids: Mapping[int, int], pulse: Pulse, *, first: bool
) -> FaultNoticed | None:
    """Return the event of the host of those at fault; where nobody is it is told by the `first` host.

    `pids` are those of the ranks here.
    """
    own = pids.keys() & set(incident.ranks)
    if not own and (incident.ranks or not first):
        return None
    return FaultNoticed(
        source="hang",
        rank=min(own) if own else -1,
        reason=incident.cause,
        since_s=max((pulse.still_s(pids[rank]) for rank in own or pids), default=0.0),
    )


class StackFiles:
    """Writes what was done on this host into the folder of the generation in which it was done."""

    def __init__(self, pulse: Pulse, logs: LogPump, emit: Callable[[Event, int], None]) -> None:
        """`pulse` was told, or saw, what workers do."""
        self._pulse = pulse
        self._logs = logs
        self._emit = emit
        self._tasks: set[asyncio.Task[None]] = set()

    def hung(
        self, incident: Incident, pids: Mapping[int, int], generation: int, *, first: bool
    ) -> float | None:
        """Tell of all ranks here; return for how long it had been so if this host is the one to say."""
        event = noticed(incident, pids, self._pulse, first=first)
        if event is not None:
            self._emit(event, generation)
        found = self._pulse.explained(pids)
        self._begin(incident.cause, incident.ranks, found, generation)
        return None if event is None else event.since_s

    def silent(self, rank: int, pid: int, reason: str, generation: int) -> None:
        """Tell of a worker that was given up, if anybody looked into it from outside."""
        if found := self._pulse.spied(pid):
            self._begin(reason, [rank], {rank: found}, generation)

    def _begin(
        self, reason: str, guilty: Collection[int], found: Mapping[int, str], generation: int
    ) -> None:
        task = asyncio.create_task(self._write(report(reason, found, guilty), found, generation))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _write(self, text: str, ranks: Collection[int], generation: int) -> None:
        path = await asyncio.to_thread(self._logs.note, generation, _NAME, text)
        self._emit(StacksWritten(path=path, ranks=tuple(sorted(ranks))), generation)


def report(reason: str, stacks: Mapping[int, str], guilty: Collection[int]) -> str:
    """Return the text of a report: who is at fault first, then the smallest groups of equal stacks."""
    groups: dict[str, list[int]] = {}
    for rank in sorted(stacks):
        groups.setdefault(stacks[rank] or _SILENT, []).append(rank)
    order = sorted(
        groups.items(), key=lambda item: (not set(item[1]) & set(guilty), len(item[1]), item[1])
    )
    parts = [f"{reason}\n"]
    for text, ranks in order:
        named = "rank" if len(ranks) == 1 else f"{len(ranks)} ranks:"
        parts.append(f"=== {named} {', '.join(map(str, ranks))}\n\n{text}")
    return "\n".join(parts)
