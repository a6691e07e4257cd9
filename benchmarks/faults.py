"""Faults that a training script does to itself, named by place: `rank 2: SIGKILL at step 7 in backward`.

Owns the words of a plan and that each fault happens once, however often its place is passed. Where the
places are is the script's, what must follow from a fault is `exactness`'s. Imports nothing heavy.
"""

import os
import re
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

PLACES = (
    "loading",
    "loading-first",
    "groups",
    "meeting",
    "subgroup",
    "agree",
    "donor",
    "newcomer",
    "before-first-step",
    "loader",
    "forward",
    "backward",
    "gate",
    "update",
    "after-update",
    "scheduler",
    "end",
)
_WAIT_S = 60.0
_LINE = re.compile(
    r"(?P<then>then )?(?P<who>any rank|all ranks|zygote|ranks? [\d, ]+): "
    r"(?P<how>SIG[A-Z]+|exit \d+|error|loop)(?: at step (?P<step>\d+))? in (?P<place>[\w-]+)"
    r"(?P<always>, always)?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault. `str` is its line in a plan, `parse` the way back."""

    place: str
    step: int | None = None
    """Completed updates when it happens; None: whenever the place is passed."""
    who: str = "any rank"
    """`any rank` that comes first, `all ranks`, `rank 1`, `ranks 1, 2` or `zygote`."""
    how: str = "SIGKILL"
    """A signal, `exit 3`, `error` (a ValueError as a script's own mistake would be), or `loop` for ever."""
    then: bool = False
    """Only after the one before it in the plan has happened."""
    always: bool = False
    """Each time that the place is passed, and not only once."""

    def __str__(self) -> str:
        then = "then " if self.then else ""
        step = "" if self.step is None else f" at step {self.step}"
        always = ", always" if self.always else ""
        return f"{then}{self.who}: {self.how}{step} in {self.place}{always}"

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that are named; empty for all, any and the zygote."""
        return tuple(int(word) for word in re.findall(r"\d+", self.who))

    def is_for(self, rank: int) -> bool:
        """Tell whether this rank does it when it comes to the place."""
        return rank in self.ranks or self.who in ("any rank", "all ranks", "zygote")


def parse(text: str) -> list[Fault]:
    """Return the faults of a plan, one a line. Raises ValueError naming a line that is none."""
    faults = []
    for line in filter(None, map(str.strip, text.splitlines())):
        found = _LINE.fullmatch(line)
        if found is None or found["place"] not in PLACES:
            raise ValueError(
                f"fault {line!r} is not like 'rank 2: SIGKILL at step 7 in backward';"
                f" places: {', '.join(PLACES)}"
            )
        step = None if found["step"] is None else int(found["step"])
        faults.append(
            Fault(
                place=found["place"],
                step=step,
                who=found["who"],
                how=found["how"],
                then=found["then"] is not None,
                always=found["always"] is not None,
            )
        )
    return faults


def plan_text(faults: Iterable[Fault]) -> str:
    """Return the plan that `parse` reads."""
    return "\n".join(map(str, faults))


class Saboteur:
    """Does the faults of a plan, each once in all processes that share the folder."""

    def __init__(self, faults: Sequence[Fault], folder: Path, rank: int, world_size: int) -> None:
        """Leave this process's pid in the folder, for the rank that kills several at once."""
        self.step = 0
        """To be kept up by the script."""
        self._faults = list(enumerate(faults))
        self._folder = folder
        self._rank = rank
        self._world_size = world_size
        if faults:
            (folder / f"new.{rank}").write_text(str(os.getpid()), encoding="ascii")
            os.replace(folder / f"new.{rank}", folder / f"pid.{rank}")

    def at(self, place: str) -> None:
        """Do the fault that belongs here, if there is one."""
        for number, fault in self._faults:
            if fault.place != place or not fault.is_for(self._rank):
                continue
            if fault.step not in (None, self.step) or not self._is_due(number, fault):
                continue
            once = 0 if fault.always else os.O_EXCL
            try:
                marker = os.open(self._folder / f"fault.{number}", os.O_CREAT | once | os.O_WRONLY)
            except FileExistsError:
                continue
            killed = [os.getpid(), *self._others(fault)]
            os.write(marker, f"{self._rank} {' '.join(map(str, killed))}\n".encode())
            os.close(marker)
            self._do(fault)

    def stand_aside(self, place: str) -> None:
        """Wait at a place where another rank is to die, so that nobody is past it when it does.

        To be called by first processes only: those that come after the restart go on.
        """
        if any(fault.place == place for _, fault in self._faults):
            time.sleep(_WAIT_S)

    def wait_for_others(self, place: str, name: str) -> None:
        """Before a fault here wait until another rank has left this file."""
        for number, fault in self._faults:
            due = fault.place == place and fault.is_for(self._rank) and self._is_due(number, fault)
            if not due or (self._folder / f"fault.{number}").exists():
                continue
            deadline = time.monotonic() + _WAIT_S
            while time.monotonic() < deadline:
                if any(self._folder.glob(f"{name}.*")):
                    break
                time.sleep(0.005)

    def _is_due(self, number: int, fault: Fault) -> bool:
        return not fault.then or (self._folder / f"fault.{number - 1}").exists()

    def _others(self, fault: Fault) -> list[int]:
        """Return the processes that die with this one."""
        ranks = range(self._world_size) if fault.who == "all ranks" else fault.ranks
        files = [self._folder / f"pid.{rank}" for rank in ranks if rank != self._rank]
        return [int(path.read_text(encoding="ascii")) for path in files]

    def _do(self, fault: Fault) -> None:
        if fault.how == "error":
            raise ValueError(f"a mistake of the script: {fault}")
        while fault.how == "loop":
            pass
        if fault.how.startswith("exit"):
            os._exit(int(fault.how.split()[1]))
        number = signal.Signals[fault.how]
        if fault.who == "zygote":
            os.kill(os.getppid(), number)
        for pid in self._others(fault):
            os.kill(pid, number)
        os.kill(os.getpid(), number)
        time.sleep(_WAIT_S)  # a signal to a whole process is not always taken before kill returns
