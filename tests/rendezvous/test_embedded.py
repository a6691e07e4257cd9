"""The embedded etcd starts at once, comes back when it dies, and leaves nothing, however it ends."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from frun.errors import LaunchError
from frun.rendezvous.embedded import EmbeddedEtcd, PortInUse, find_etcd
from frun.rendezvous.etcd import EtcdStore
from frun.rendezvous.mirror import Mirror
from frun.rendezvous.store import Put

_LIMIT_S = 40.0


def _family() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


@pytest.fixture(autouse=True)
def _nothing_left(tmp_path: Path) -> Iterator[None]:
    """Each test ends without a new child and without a folder in its place."""
    before = {child.pid for child in _family()}
    yield
    assert {child.pid for child in _family()} <= before
    assert list(tmp_path.glob("frun-etcd-*")) == []


async def _put(etcd: EmbeddedEtcd) -> None:
    store = EtcdStore([etcd.endpoint])
    await store.connect(_LIMIT_S)
    await store.commit([], [Put(key="/frun/a", value=b"1")])
    await store.close()


def test_it_serves_and_goes(tmp_path: Path) -> None:
    """It serves on a free loopback port soon after start; stop removes it, twice is fine."""

    async def main() -> None:
        etcd = EmbeddedEtcd(parent_folder=str(tmp_path))
        with pytest.raises(LaunchError, match="not started"):
            assert etcd.endpoint
        begun = time.monotonic()
        await etcd.start()
        await _put(etcd)
        assert time.monotonic() - begun < _LIMIT_S
        assert etcd.endpoint.startswith("127.0.0.1:")
        assert etcd.folder is not None
        assert Path(etcd.folder).parent == tmp_path
        assert Path(etcd.folder).stat().st_mode & 0o077 == 0
        await etcd.stop()
        await etcd.stop()
        assert etcd.folder is None

    asyncio.run(main())


@pytest.mark.parametrize(
    ("listen", "endpoint"),
    [("[::1]:0", "[::1]:"), ("0.0.0.0:0", "127.0.0.1:"), ("localhost:0", "127.0.0.1:")],
)
def test_where_it_listens(tmp_path: Path, listen: str, endpoint: str) -> None:
    """IPv6, all interfaces and localhost work; the endpoint is one that this machine reaches."""

    async def main() -> None:
        etcd = EmbeddedEtcd(listen, parent_folder=str(tmp_path))
        await etcd.start()
        assert etcd.endpoint.startswith(endpoint)
        await _put(etcd)
        await etcd.stop()

    asyncio.run(main())


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    """A fixed port that another program has is told apart from all other failures."""

    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            etcd = EmbeddedEtcd(f"127.0.0.1:{port}", parent_folder=str(tmp_path))
            with pytest.raises(PortInUse, match=f"127.0.0.1:{port} is in use"):
                await etcd.start()
            await etcd.stop()

    asyncio.run(main())


def test_two_race_for_one_port(tmp_path: Path) -> None:
    """Of two that start at one address at the same time exactly one gets it."""

    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        pair = [EmbeddedEtcd(f"127.0.0.1:{port}", parent_folder=str(tmp_path)) for _ in "ab"]
        results = await asyncio.gather(*(one.start() for one in pair), return_exceptions=True)
        assert sorted(type(one).__name__ for one in results) == ["NoneType", "PortInUse"]
        await asyncio.gather(*(one.stop() for one in pair))

    asyncio.run(main())


def test_another_that_serves_at_the_port_is_not_taken_for_the_own(tmp_path: Path) -> None:
    """However long the own one takes to find the port in use."""
    slow = _script(tmp_path, f'sleep 1; exec {find_etcd()} "$@"\n')

    async def main() -> None:
        first = EmbeddedEtcd(parent_folder=str(tmp_path))
        await first.start()
        late = EmbeddedEtcd(first.endpoint, program=slow, parent_folder=str(tmp_path))
        with pytest.raises(PortInUse):
            await late.start()
        await first.stop()

    asyncio.run(main())


def test_many_at_once(tmp_path: Path) -> None:
    """Several with free ports start side by side without meeting."""

    async def main() -> None:
        several = [EmbeddedEtcd(parent_folder=str(tmp_path)) for _ in range(4)]
        await asyncio.gather(*(one.start() for one in several))
        assert len({one.endpoint for one in several}) == 4
        await asyncio.gather(*(one.stop() for one in several))

    asyncio.run(main())


def _script(folder: Path, body: str) -> str:
    path = folder / "etcd"
    path.write_text("#!/bin/sh\n" + body)
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("echo cannot find my disk >&2; exit 3", r"exit status 3\): cannot find my disk"),
        ("kill -9 $$", "signal 9"),
        ("exec sleep 60", "did not serve within 0.5 s: no word in its log"),
    ],
)
def test_an_etcd_that_does_not_start(tmp_path: Path, body: str, text: str) -> None:
    """Its last words are in the error, and nothing is left."""

    async def main() -> None:
        etcd = EmbeddedEtcd(program=_script(tmp_path, body), parent_folder=str(tmp_path))
        with pytest.raises(LaunchError, match=text):
            await etcd.start(timeout_s=0.5)

    asyncio.run(main())


def test_an_etcd_that_does_not_know_a_flag(tmp_path: Path) -> None:
    """An older etcd that refuses the flag that only speeds things up is started without it."""
    body = f"""case "$*" in *unsafe*) echo flag provided but not defined: -unsafe-no-fsync >&2
exit 2;; esac
exec {find_etcd()} "$@"
"""

    async def main() -> None:
        etcd = EmbeddedEtcd(program=_script(tmp_path, body), parent_folder=str(tmp_path))
        await etcd.start()
        await _put(etcd)
        await etcd.stop()

    asyncio.run(main())


def test_bad_addresses_and_a_missing_program(tmp_path: Path) -> None:
    """What can not be listened at, started or written to is one line each."""
    for listen in ("somewhere:1", "127.0.0.1", "127.0.0.1:x", "127.0.0.1:70000"):
        with pytest.raises(LaunchError, match="can not listen at"):
            EmbeddedEtcd(listen)

    async def start(etcd: EmbeddedEtcd) -> None:
        await etcd.start()

    # 192.0.2.0/24 is for documentation: no machine has it.
    with pytest.raises(LaunchError, match="Cannot assign"):
        asyncio.run(start(EmbeddedEtcd("192.0.2.1:0")))
    with pytest.raises(LaunchError, match="cannot assign"):
        asyncio.run(start(EmbeddedEtcd("192.0.2.1:2379")))
    with pytest.raises(LaunchError, match="cannot start /no/etcd: No such file"):
        asyncio.run(start(EmbeddedEtcd(program="/no/etcd")))
    (tmp_path / "file").touch()
    with pytest.raises(LaunchError, match="cannot make its folder"):
        asyncio.run(start(EmbeddedEtcd(parent_folder=str(tmp_path / "file" / "below"))))


def test_the_program_is_found(tmp_path: Path) -> None:
    """PATH comes first, but a Python script there loses to the package's program."""
    program = tmp_path / "etcd"
    program.write_bytes(b"\x7fELF")
    program.chmod(0o755)
    assert find_etcd(str(tmp_path)) == str(program)
    _script(tmp_path, "")
    assert find_etcd(str(tmp_path)) != str(program)
    assert Path(find_etcd(str(tmp_path / "nowhere"))).name == "etcd"


def _named(name: str) -> psutil.Process:
    found = [child for child in _family() if child.name() == name]
    return max(found, key=lambda child: child.create_time())


@pytest.mark.parametrize("victim", ["etcd", "guard"])
def test_it_comes_back_with_its_data(tmp_path: Path, victim: str) -> None:
    """When etcd or its guard is killed, etcd is there again, same address, same data."""

    async def main() -> None:
        etcd = EmbeddedEtcd(parent_folder=str(tmp_path))
        await etcd.start()
        endpoint = etcd.endpoint
        store = EtcdStore([endpoint])
        await _put(etcd)
        async with asyncio.timeout(_LIMIT_S), Mirror(store, "/frun/") as mirror:
            while not mirror.items:
                await mirror.wait_changed(mirror.version, _LIMIT_S)
            process = _named("etcd")
            (process if victim == "etcd" else process.parent() or process).kill()
            while etcd.restarts < 1 or not mirror.connected:
                await mirror.wait_changed(mirror.version, 0.1)
            await _put(etcd)
            assert etcd.endpoint == endpoint
            assert list((await store.read("/frun/")).items) == ["/frun/a"]
        await store.close()
        await etcd.stop()

    asyncio.run(main())


_AGENT = """
import asyncio, sys
from frun.rendezvous.embedded import EmbeddedEtcd

async def main():
    etcd = EmbeddedEtcd(parent_folder=sys.argv[1])
    await etcd.start()
    print(etcd.endpoint, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_it_goes_when_its_agent_is_killed(tmp_path: Path, number: signal.Signals) -> None:
    """Within a second of the agent's death, by whatever signal, process and folder are gone."""
    agent = subprocess.Popen(
        [sys.executable, "-c", _AGENT, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    with agent:
        assert agent.stdout is not None
        assert agent.stdout.readline().startswith("127.0.0.1:")
        children = psutil.Process(agent.pid).children(recursive=True)
        assert sorted(child.name() for child in children)[0] == "etcd"
        assert len(list(tmp_path.glob("frun-etcd-*"))) == 1
        agent.send_signal(number)
        agent.wait(_LIMIT_S)
    nap, begun = threading.Event(), time.monotonic()
    while any(_runs(child) for child in children) or list(tmp_path.glob("frun-etcd-*")):
        assert time.monotonic() - begun < _LIMIT_S
        nap.wait(0.005)


def _runs(process: psutil.Process) -> bool:
    """Orphans that ended may wait for the machine's init to reap them."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_signal_to_its_group_does_not_end_it_first(tmp_path: Path) -> None:
    """Ctrl-C and SIGTERM at the guard are left to the agent to decide about."""

    async def main() -> None:
        etcd = EmbeddedEtcd(parent_folder=str(tmp_path))
        await etcd.start()
        guard = _named("etcd").parent()
        assert guard is not None
        assert os.getsid(guard.pid) == guard.pid
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            guard.send_signal(number)
        await _put(etcd)
        assert etcd.restarts == 0
        await etcd.stop()

    asyncio.run(main())


def test_cancelling_the_start_leaves_nothing(tmp_path: Path) -> None:
    """A start that is given up (Ctrl-C while it waits) removes what it began."""
    program = _script(tmp_path, "exec sleep 60")

    async def main() -> None:
        etcd = EmbeddedEtcd(program=program, parent_folder=str(tmp_path))
        start = asyncio.ensure_future(etcd.start())
        await _until(lambda: any(child.name() == "sleep" for child in _family()))
        start.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await start
        assert start.cancelled()

    asyncio.run(main())


async def _until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(_LIMIT_S):
        while not holds():
            await asyncio.sleep(0.01)
