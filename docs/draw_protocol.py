"""Draws the phases of a job in protocol.md from what `decide` does, so that the picture can't age apart.

    python docs/draw_protocol.py            writes the diagram into docs/protocol.md
    python docs/draw_protocol.py --check    exits with 1 if the one there is old

Every phase is shown to `decide` with every mix of the facts below; the arrows are the steps it then takes.
An arrow without a text here is an error: say what it means.
"""

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

from frun.protocol.decide import decide
from frun.protocol.policy import Policy, Seen
from frun.protocol.records import (
    Failure,
    HostRecord,
    HostReport,
    Phase,
    RankTable,
    Slot,
    View,
    WorkerReport,
    WorkerState,
)

Edge = tuple[Phase | None, Phase, bool]
"""From, to, and whether the generation grows."""

TEXTS: dict[Edge, str] = {
    (None, Phase.GATHER, False): "the first leader begins the job",
    (
        Phase.GATHER,
        Phase.GATHER,
        False,
    ): "one of several vacant places is taken, or one more is lost",
    (
        Phase.GATHER,
        Phase.RECOVER,
        False,
    ): "every place is taken, or MIN hosts are there and the wait is over",
    (Phase.GATHER, Phase.FAILED, False): "too few hosts came in time",
    (Phase.RECOVER, Phase.RUN, False): "every member is prepared",
    (Phase.RECOVER, Phase.RECOVER, True): "a member or a paused process was lost, and is replaced",
    (Phase.RECOVER, Phase.GATHER, True): "a member was lost, and nobody is there to replace it",
    (
        Phase.RECOVER,
        Phase.FAILED,
        False,
    ): "a member is not prepared in time, or no recovery is left",
    (Phase.RUN, Phase.DONE, False): "every worker ended with 0",
    (
        Phase.RUN,
        Phase.RECOVER,
        True,
    ): "a worker failed or hangs, a spare replaces a lost host, or a host joins",
    (
        Phase.RUN,
        Phase.GATHER,
        True,
    ): "a host was lost or dropped, and nobody is there to replace it",
    (
        Phase.RUN,
        Phase.FAILED,
        False,
    ): "the restarts are used up, or the world can not be whole again",
}
_BEGIN, _END = "<!-- phases: drawn by docs/draw_protocol.py -->\n", "<!-- end of phases -->\n"
_NOW, _LONG_AGO = 10_000.0, 0.0
_HOSTS = "ab"


def edges() -> set[Edge]:
    """Return every step that `decide` takes from any phase and any facts."""
    found: set[Edge] = set()
    for table, view, policy, since in _situations():
        phase = None if table is None else table.phase
        generation = 1 if table is None else table.generation
        written = decide(view, Seen(generation=generation, phase=phase, since=since), policy, _NOW)
        if written.table is not None:
            grows = written.table.generation > generation
            found.add((phase, written.table.phase, grows))
    return found


def mermaid() -> str:
    """Return the diagram. Raises KeyError for an arrow that has no text."""
    lines = ["```mermaid", "stateDiagram-v2"]
    order = {phase: index for index, phase in enumerate([None, *Phase])}
    for edge in sorted(edges(), key=lambda e: (order[e[0]], order[e[1]], e[2])):
        start, end, grows = edge
        more = " (next generation)" if grows else ""
        lines.append(f"    {start.value if start else '[*]'} --> {end.value}: {TEXTS[edge]}{more}")
    lines += [f"    {phase.value} --> [*]" for phase in Phase if phase.is_final]
    return "\n".join([*lines, "```", ""])


def drawn(text: str) -> str:
    """Return the document with the diagram in its place."""
    before, _, rest = text.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return f"{before}{_BEGIN}{mermaid()}{_END}{after}"


def main(arguments: list[str]) -> int:
    """Draw, or check."""
    path = Path(__file__).with_name("protocol.md")
    old = path.read_text(encoding="utf-8")
    new = drawn(old)
    if "--check" in arguments:
        return int(old != new)
    path.write_text(new, encoding="utf-8")
    return 0


def _situations() -> Iterator[tuple[RankTable | None, View, Policy, float]]:
    yield None, View(), _policy(2, 2), _NOW
    for phase, places, present, states, prepared, policy, since in itertools.product(
        Phase,
        ("", "ab", "a-", "--"),
        ("", "a", "ab", "ac", "abc"),
        itertools.product(
            (WorkerState.RUNNING, WorkerState.SUCCEEDED, WorkerState.FAILED), repeat=2
        ),
        (False, True),
        (_policy(2, 2), _policy(2, 2, restarts=1), _policy(1, 3)),
        (_NOW, _LONG_AGO),
    ):
        whole = places and "-" not in places
        if phase in (Phase.RECOVER, Phase.RUN, Phase.DONE) and not whole:
            continue
        table = RankTable(generation=1, phase=phase, reason="drawn", slots=tuple(_slots(places)))
        reports = dict(zip(_HOSTS, map(_report, _HOSTS, states, [prepared] * 2), strict=True))
        hosts = {name: _host(name) for name in present}
        joined = {name: index for index, name in enumerate(present)}
        yield table, View(hosts=hosts, joined=joined, reports=reports, table=table), policy, since


def _policy(low: int, high: int, restarts: int = 0) -> Policy:
    return Policy(min_hosts=low, max_hosts=high, max_restarts=restarts, join_settle_s=0.0)


def _slots(places: str) -> Iterator[Slot]:
    for rank, place in enumerate(places):
        name = "" if place == "-" else place
        yield Slot(host=name, address=name, port=1, first_rank=rank, nproc=1, incarnations=(1,))


def _host(name: str) -> HostRecord:
    return HostRecord(host=name, name=name, address=name, port=1, nproc=1)


def _report(name: str, state: WorkerState, prepared: bool) -> HostReport:
    failure = Failure(rank=0, local_rank=0, host=name, exit_code=3)
    worker = WorkerReport(
        local_rank=0,
        incarnation=1,
        state=state,
        failure=failure if state is WorkerState.FAILED else None,
    )
    return HostReport(host=name, generation=1, prepared=prepared, workers=(worker,))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
