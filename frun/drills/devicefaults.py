"""Faults of devices: facts that are made up, in a file in which a check finds them."""

import asyncio
import contextlib
import json
import os

from frun.agent.health import HealthWatch
from frun.devices import text
from frun.protocol.classes import FaultClass
from frun.protocol.faults import Command
from frun.protocol.health import Fact, Severity

_SEEN_S = 30.0
"""Longest wait for a check to see a fact that does not last."""


def fact_of(command: Command, local_rank: int) -> Fact:
    """Return the fact that a command is for; each command's is another one."""
    warning = bool(command.fault.argument)
    return Fact(
        name=f"drill-{command.id}",
        severity=Severity.WARNING if warning else Severity.FAULT,
        fault_class=FaultClass.DEVICE,
        reason=f"drill {command.id}",
        device=local_rank,
        lasting=command.fault.duration_s > 0,
    )


class Facts:
    """The file. It holds what is told at present."""

    def __init__(self, health: HealthWatch) -> None:
        """`health` knows the file, and what a check has seen of it. Nothing is written yet."""
        self._health = health
        self._told: list[Fact] = []

    @property
    def are_read(self) -> bool:
        """True when a check looks at the file."""
        return bool(self._health.drill_file)

    async def wait_until_new(self, fact: Fact, local_rank: int) -> None:
        """Wait until a fault would not be held to be the same as the one before it."""
        if fact.severity is Severity.FAULT:
            await asyncio.sleep(self._health.calm_in_s(local_rank))

    async def tell(self, fact: Fact, duration_s: float) -> None:
        """Let a fact stand in the file for so long; 0: until a check has seen it."""
        self._told.append(fact)
        self._write()
        try:
            if duration_s:
                await asyncio.sleep(duration_s)
            else:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_SEEN_S):
                        await self._health.saw(fact.name)
        finally:
            self._told.remove(fact)
            self._write()

    def _write(self) -> None:
        # In one step, so that nobody reads half of it. The folder is gone when the agent ends.
        path = self._health.drill_file
        with contextlib.suppress(FileNotFoundError):
            with open(f"{path}.new", "w", encoding="utf-8") as file:
                json.dump([text.written(fact) for fact in self._told], file)
            os.replace(f"{path}.new", path)
