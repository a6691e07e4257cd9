"""Reads the stacks of a worker that says nothing, from outside, with py-spy where that is installed.

Owns the calls of the program. A process that holds Python's lock in C can't tell its stacks itself.
"""

import asyncio
import subprocess

LIMIT_S = 3.0
"""Longest time that one look may take."""


class Spy:
    """What was seen of silent workers, by pid. Use it on the agent's event loop only."""

    def __init__(self, program: str | None) -> None:
        """`program` is the path of py-spy; None: there is none, and nothing is ever seen."""
        self._program = program
        self._texts: dict[int, str] = {}
        self._looking: dict[int, asyncio.Task[None]] = {}

    def look(self, pid: int, within_s: float) -> None:
        """Begin to read the stacks of a process, the frames of C as well if that is done in time.

        Those need the process to stand still, which must be over `within_s` seconds from now.
        """
        if self._program is not None and pid not in self._looking:
            self._looking[pid] = asyncio.create_task(self._look(pid, within_s))

    def text(self, pid: int) -> str:
        """Return what was seen of a process so far."""
        return self._texts.get(pid, "")

    def forget(self, pid: int) -> None:
        """Drop what was seen: the process speaks again, or is gone."""
        self._texts.pop(pid, None)
        task = self._looking.pop(pid, None)
        if task is not None:
            task.cancel()

    async def _look(self, pid: int, within_s: float) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + min(within_s, LIMIT_S)
        for how in ("--nonblocking", "--native"):
            found = await asyncio.to_thread(self._dump, pid, how, until - loop.time())
            if found:
                self._texts[pid] = found

    def _dump(self, pid: int, how: str, limit_s: float) -> str:
        """Return what py-spy prints; nothing if it can't or is too slow."""
        if self._program is None or limit_s <= 0:
            return ""
        try:
            done = subprocess.run(
                [self._program, "dump", how, "--pid", str(pid)],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=limit_s,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return ""
        return done.stdout.decode(errors="replace") if done.returncode == 0 else ""
