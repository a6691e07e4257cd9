"""Process groups of real processes meet in the group store, however a script asks for them."""

import contextlib
import gc
import inspect
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from frun.agent.masterport import MasterPort
from frun.worker.groupstore import GenerationEnded
from frun.worker.inject import Rendezvous, install
from frun.worker.tcpstore import serve
from tests.worker.groupstore_hosts import LIMIT_S, Hosts

WORLD = 4
LIMIT = timedelta(seconds=LIMIT_S)
Story = Callable[[Rendezvous], None]


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Hosts]:
    """Two hosts in generation 1."""
    hosts = Hosts(tmp_path, 2)
    hosts.begin(1)
    yield hosts
    hosts.close()


class Ranks:
    """Workers forked as the zygote does it: torch is imported, then frun's change installed."""

    def __init__(
        self, hosts: Hosts, story: Story, world: int = WORLD, master_port: int = 1
    ) -> None:
        """Start a process per rank, half of them on each host."""
        self.pids: list[int] = []
        for rank in range(world):
            pid = os.fork()
            if pid == 0:
                self._child(hosts, story, rank, world, master_port)
            self.pids.append(pid)

    def _child(self, hosts: Hosts, story: Story, rank: int, world: int, port: int) -> None:
        status = 1
        try:
            signal.alarm(int(LIMIT_S * 2))
            os.environ.update(
                FRUN_STORE=hosts.paths[rank * len(hosts.paths) // world],
                FRUN_GENERATION="1",
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
                RANK=str(rank),
                WORLD_SIZE=str(world),
                TORCHELASTIC_USE_AGENT_STORE="True",
                GLOO_SOCKET_IFNAME="lo",
            )
            rendezvous = install(os.environ)
            assert rendezvous is not None
            story(rendezvous)
            status = 0
        except BaseException:  # noqa: BLE001 - reported by the status of the process
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)

    def join(self) -> list[int]:
        """Return the exit statuses; a rank that hangs is ended by its alarm."""
        return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in self.pids]


def rank() -> int:
    """Return this process's rank as its agent gave it."""
    return int(os.environ["RANK"])


def total(group: Any = None) -> float:
    """Return the sum of ones over a group, which is its size if it works."""
    one = torch.ones(1)
    dist.all_reduce(one, group=group)
    return float(one)


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def test_groups_again_and_again_in_one_generation(two: Hosts) -> None:
    """Default and sub-groups work, and do so again after destroy: no key is met twice."""

    def story(rendezvous: Rendezvous) -> None:
        for _ in range(4):
            dist.init_process_group("gloo", timeout=LIMIT)
            gc.collect()  # nobody but `rendezvous` keeps the Python half of the store
            assert total() == WORLD
            for ranks in ([0, 3], [1, 2]):
                group = dist.new_group(ranks)
                if rank() in ranks:
                    assert total(group) == 2
            dist.barrier()
            dist.destroy_process_group()
        assert len(rendezvous.stores) == 4

    assert Ranks(two, story).join() == [0] * WORLD


def test_groups_over_generations_in_one_process(two: Hosts) -> None:
    """A survivor's processes set the new generation and meet in its store, even before it began."""

    def story(rendezvous: Rendezvous) -> None:
        for generation in (1, 2, 3):
            rendezvous.generation = generation
            dist.init_process_group("gloo", timeout=LIMIT)
            assert total() == WORLD
            dist.destroy_process_group()

    ranks = Ranks(two, story)
    for generation in (2, 3):
        two.until_parked(2)
        two.begin(generation)
    assert ranks.join() == [0] * WORLD


def test_a_generation_change_frees_who_waits_for_its_peers(two: Hosts) -> None:
    """A rank alone in init_process_group gets an error at once when the generation ends."""

    def story(rendezvous: Rendezvous) -> None:
        with contextlib.suppress(GenerationEnded):
            dist.init_process_group("gloo", timeout=timedelta(minutes=30))
            raise AssertionError("nobody else came")

    ranks = Ranks(two, lambda r: story(r) if rank() == 0 else None)
    two.until_waiting(0, 1)
    two.begin(2)
    assert ranks.join() == [0] * WORLD


def test_a_script_may_make_its_own_worlds(two: Hosts) -> None:
    """WORLD_SIZE and RANK are read at each call, from the environment or as arguments."""

    def story(rendezvous: Rendezvous) -> None:
        if rank() < 2:
            os.environ["WORLD_SIZE"] = "2"
            dist.init_process_group("gloo", timeout=LIMIT)
            assert total() == 2
            dist.destroy_process_group()
        dist.init_process_group("gloo", "env://", timeout=LIMIT, rank=3 - rank(), world_size=WORLD)
        assert dist.get_rank() == 3 - rank()
        assert total() == WORLD
        dist.destroy_process_group()

    assert Ranks(two, story).join() == [0] * WORLD


def test_other_addresses_work_as_without_a_launcher(two: Hosts, tmp_path: Path) -> None:
    """tcp:// and env:// elsewhere are hosted by rank 0; files and own servers work too."""
    ports = [free_port() for _ in range(3)]

    def story(rendezvous: Rendezvous) -> None:
        me: dict[str, Any] = {"rank": rank(), "world_size": 2, "timeout": LIMIT}
        dist.init_process_group("gloo", f"tcp://127.0.0.1:{ports[0]}", **me)
        assert total() == 2
        dist.destroy_process_group()
        dist.init_process_group("gloo", f"file://{tmp_path}/meet", **me)
        assert total() == 2
        dist.destroy_process_group()
        own = TCPStore("127.0.0.1", ports[1], 2, rank() == 0, LIMIT)
        assert own.add("n", 1) in (1, 2)
        os.environ["MASTER_PORT"] = str(ports[2])
        dist.init_process_group("gloo", timeout=LIMIT)
        assert total() == 2
        dist.destroy_process_group()
        assert os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True"
        assert rendezvous.stores == []

    assert Ranks(two, story, world=2).join() == [0, 0]


def test_the_agents_address_meets_in_the_agents_tcpstore(two: Hosts) -> None:
    """tcp://MASTER_ADDR:MASTER_PORT, also by another name, uses the store that the agent holds."""

    async def fork_server(sock: socket.socket) -> int:
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(BaseException):
                serve([sock.fileno()], [])
            os._exit(1)
        servers.append(pid)
        return pid

    async def hold() -> MasterPort:
        return MasterPort("127.0.0.1", fork_server)

    def story(rendezvous: Rendezvous) -> None:
        for host in ("127.0.0.1", "localhost"):
            store = f"tcp://{host}:{os.environ['MASTER_PORT']}"
            world, _, _ = next(
                dist.rendezvous(store, rank(), WORLD, timeout=LIMIT)  # type: ignore[attr-defined]
            )
            world.add(f"{host}/come", 1)
            if rank() == 0:
                world.set(host, "here")
            assert world.get(host) == b"here"
        dist.init_process_group("gloo", store, rank=rank(), world_size=WORLD, timeout=LIMIT)
        assert total() == WORLD
        dist.destroy_process_group()

    servers: list[int] = []
    master: MasterPort = two.wait(hold())
    ranks = Ranks(two, story, master_port=master.port)
    try:
        assert ranks.join() == [0] * WORLD
    finally:
        two.wait(master.close())
    assert len(servers) == 1
    assert os.waitstatus_to_exitcode(os.waitpid(servers[0], 0)[1]) == -signal.SIGKILL


def test_a_missing_variable_is_named(two: Hosts) -> None:
    """Without RANK the error is the one that torch gives, by type and by name."""

    def story(rendezvous: Rendezvous) -> None:
        del os.environ["RANK"]
        try:
            dist.init_process_group("gloo", timeout=LIMIT)
        except ValueError as error:
            assert "environment variable RANK expected" in str(error)  # noqa: PT017
        else:
            raise AssertionError("init_process_group did not need RANK")

    assert Ranks(two, story, world=1).join() == [0]


COLD = """
import sys
from frun.worker.inject import install
env = {"FRUN_STORE": "/nowhere", "FRUN_GENERATION": "7", "MASTER_ADDR": "::1", "MASTER_PORT": "5"}
rendezvous = install(env)
assert "torch" not in sys.modules
import inspect
import torch.distributed as dist
module = sys.modules["torch.distributed.rendezvous"]
handler = module._rendezvous_handlers["env"]
assert handler.__module__ == "frun.worker.inject", handler
assert "class _AfterImport" not in inspect.getsource(module)
assert module.__loader__ is module.__spec__.loader
assert all("frun" not in type(finder).__module__ for finder in sys.meta_path)
try:
    dist.init_process_group("gloo", rank=0, world_size=1)
except dist.DistNetworkError as error:
    assert "/nowhere" in str(error), error
print("good")
"""


def test_torch_is_changed_when_it_gets_imported() -> None:
    """In a process without torch, `install` imports nothing and works once torch is imported."""
    done = subprocess.run(
        [sys.executable, "-c", COLD], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.returncode) == ("good\n", 0), done.stderr


def test_without_a_store_nothing_is_changed() -> None:
    """`install` does nothing where no agent's store is named, as in a plainly run script."""
    before = dict(inspect.getmembers(sys.modules["torch.distributed.rendezvous"]))
    assert install({}) is None
    assert dict(inspect.getmembers(sys.modules["torch.distributed.rendezvous"])) == before
