"""Ranks that are forked, paused, killed and joined again by a test, as the agent does it."""

import contextlib
import faulthandler
import json
import os
import select
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch._dynamo  # as the zygote has it: torch imports it late, and then keeps the frames it came from
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from frun.worker.groups import Groups
from frun.worker.tcpstore import serve

LIMIT_S = 40.0
GROUP_TIMEOUT = timedelta(minutes=30)
"""Of torch's groups: nothing in a test may depend on it."""


def descriptors() -> int:
    """Return how many file descriptors this process has."""
    return len(os.listdir("/proc/self/fd"))


def threads() -> int:
    """Return how many threads this process has, those of C++ too."""
    return len(os.listdir("/proc/self/task"))


@contextlib.contextmanager
def store_server() -> Iterator[int]:
    """Serve a TCPStore from a process of its own, so that this one can be forked safely."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(BaseException):
                serve([listener.fileno()], [])
            os._exit(1)
        port = int(listener.getsockname()[1])
    try:
        yield port
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


class Member:
    """A rank's own side: its groups and its connection to the test."""

    def __init__(self, rank: int, world: int, generation: int, control: socket.socket) -> None:
        """Start the side thread that obeys `pause`."""
        self.rank = rank
        self.world = world
        self.generation = generation
        self.scope = ""
        self.groups = Groups()
        self.groups.install()
        self.paused = threading.Event()
        self.unblock_s = 0.0
        self.unblocked = 0
        self._control = control
        self._file = control.makefile("r")
        threading.Thread(target=self._obey, daemon=True).start()

    def _obey(self) -> None:
        for line in self._file:
            if line == "go\n":
                self.go()
                continue
            self.generation = int(line)
            done = self.groups.unblock()
            self.unblock_s, self.unblocked = done.took_s, done.count
            self.paused.set()
        os._exit(9)

    def go(self) -> None:
        """Nothing to do on `go`; a story may replace it."""

    def say(self, **facts: Any) -> None:
        """Tell the test something."""
        self._control.sendall((json.dumps(facts) + "\n").encode())

    def init(self, port: int, **kwargs: Any) -> None:
        """Make the default group over the test's plain TCPStore."""
        store = TCPStore("127.0.0.1", port, is_master=False, timeout=GROUP_TIMEOUT)
        dist.init_process_group(
            "gloo",
            store=PrefixStore(f"{self.scope}g{self.generation}", store),
            rank=self.rank,
            world_size=self.world,
            timeout=GROUP_TIMEOUT,
            **kwargs,
        )

    def until_paused(self) -> None:
        """Return when the side thread has had the pause, and forget it."""
        if not self.paused.wait(LIMIT_S):
            raise TimeoutError("no pause came")
        self.paused.clear()


Story = Callable[[Member], None]


class Ranks:
    """The test's side: a process per rank."""

    def __init__(self, story: Story, world: int) -> None:
        """Fork all ranks into generation 1."""
        self.story = story
        self.world = world
        self.pids: dict[int, int] = {}
        self._controls: dict[int, socket.socket] = {}
        self._files: dict[int, Any] = {}
        for rank in range(world):
            self.start(rank, 1)

    def start(self, rank: int, generation: int) -> None:
        """Fork one rank."""
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            ours.close()
            for control in self._controls.values():
                control.close()
            _child(self.story, rank, self.world, generation, theirs)
        theirs.close()
        if rank in self._controls:
            self._files[rank].close()
            self._controls[rank].close()
        ours.settimeout(LIMIT_S)
        self._controls[rank] = ours
        self._files[rank] = ours.makefile("r")
        self.pids[rank] = pid

    def kill(self, rank: int) -> None:
        """SIGKILL a rank and reap it."""
        os.kill(self.pids[rank], signal.SIGKILL)
        os.waitpid(self.pids[rank], 0)

    def freeze(self, rank: int) -> int:
        """SIGSTOP a rank, wait until it stands still, and return its pid."""
        os.kill(self.pids[rank], signal.SIGSTOP)
        os.waitpid(self.pids[rank], os.WUNTRACED)
        return self.pids[rank]

    def tell(self, generation: int | str, *ranks: int) -> None:
        """Pause ranks for a new generation."""
        for rank in ranks:
            self._controls[rank].sendall(f"{generation}\n".encode())

    def hear(self, rank: int) -> dict[str, Any]:
        """Return the next thing that a rank says."""
        try:
            line = self._files[rank].readline()
        except TimeoutError:
            self._explain()
            raise
        assert line, f"rank {rank} ended"
        facts: dict[str, Any] = json.loads(line)
        return facts

    def _explain(self) -> None:
        """Let every rank write its stacks to stderr."""
        for pid in self.pids.values():
            os.kill(pid, signal.SIGUSR1)
            until_blocked(pid)

    def close(self) -> None:
        """End every rank that is left."""
        for pid in self.pids.values():
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        for rank, control in self._controls.items():
            self._files[rank].close()
            control.close()


def _child(story: Story, rank: int, world: int, generation: int, control: socket.socket) -> None:
    status = 1
    try:
        signal.alarm(int(LIMIT_S * 4))
        faulthandler.register(signal.SIGUSR1, 2)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.set_num_threads(1)
        story(Member(rank, world, generation, control))
        status = 0
    except BaseException:  # noqa: BLE001 - reported by the status of the process
        traceback.print_exc()
    finally:
        os._exit(status)


def until_blocked(pid: int, threads_before: int = 0) -> None:
    """Return when no thread of a process runs: it waits in something."""
    poll = select.poll()
    deadline = time.monotonic() + LIMIT_S
    quiet = 0
    while quiet < 3:
        assert time.monotonic() < deadline, f"process {pid} never waits"
        poll.poll(5)
        states = set()
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{task}/stat") as file:
                states.add(file.read().rpartition(")")[2].split()[0])
        quiet = quiet + 1 if "R" not in states else 0
