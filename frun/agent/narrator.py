"""Tells the person at the terminal what happens to the job, in few lines on stderr, each said once.

A run in which nothing goes wrong on one host says nothing, as under torchrun.
"""

from collections.abc import Callable

from frun.protocol.incidents import IncidentRecord
from frun.protocol.policy import Decision
from frun.protocol.records import Phase, RankTable


class Narrator:
    """One agent's voice."""

    def __init__(self, *, several_hosts: bool, write: Callable[[str], None]) -> None:
        """`write` takes one line without its end. With one host, waiting is not worth a line."""
        self._several_hosts = several_hosts
        self._write = write
        self._said = ""
        self._reason = ""

    def table(self, table: RankTable) -> None:
        """Say what a new rank table means."""
        generation = table.generation
        self._reason = table.reason
        match table.phase:
            case Phase.GATHER:
                if self._several_hosts:
                    waits = "" if table.reason.startswith("waiting") else "; waiting for hosts"
                    self._say(f"generation {generation}: {table.reason}{waits}")
            case Phase.RECOVER:
                if generation > 1 or self._several_hosts:
                    self._say(f"generation {generation}: {table.reason}")
            case Phase.RUN:
                if generation > 1 or self._several_hosts:
                    hosts = counted(len(table.slots), "host")
                    world = counted(table.world_size, "rank")
                    self._say(f"generation {generation} runs: {hosts}, {world}")
            case Phase.DONE | Phase.FAILED:
                pass  # the launcher has the last word

    def decision(self, decision: Decision) -> None:
        """Say what the leader waits for, when this host leads."""
        waits = decision.table is None and decision.seen.phase is Phase.GATHER
        if waits and self._several_hosts and decision.reason != self._reason:
            self._say(decision.reason)

    def incident(self, record: IncidentRecord) -> None:
        """Say how long a recovery took, when this host leads and workers told of their steps."""
        if record.first_step_s > 0:
            self._say(
                f"generation {record.generation}: recovered in {record.total_s:.2f} s at step"
                f" {record.resumed_at_step}, {counted(record.steps_lost, 'step')} lost"
            )

    def _say(self, text: str) -> None:
        if text != self._said:
            self._said = text
            self._write(f"frun: {text}")


def counted(number: int, noun: str) -> str:
    """Return `1 host`, `2 hosts`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
