"""`frun status` as a program, against a real etcd."""

import asyncio
import json
import os
import pty
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from frun.protocol import wire
from frun.protocol.keys import Keys
from frun.protocol.records import Phase, RankTable
from frun.registry import JobEntry, current_place, process_started, register
from frun.rendezvous.embedded import EmbeddedEtcd
from frun.rendezvous.etcd import EtcdStore
from frun.rendezvous.store import Put

Story = Callable[[EtcdStore], Awaitable[None]]


def with_etcd(story: Story) -> None:
    """Run a story against an etcd of its own."""

    async def run() -> None:
        etcd = EmbeddedEtcd()
        await etcd.start()
        store = EtcdStore([etcd.endpoint])
        try:
            await store.connect(10.0)
            async with asyncio.timeout(60):
                await story(store)
        finally:
            await store.close()
            await etcd.stop()

    asyncio.run(run())


async def put_table(store: EtcdStore, job_id: str, phase: Phase, reason: str) -> None:
    table = RankTable(generation=1, phase=phase, reason=reason)
    await store.commit([], [Put(key=Keys(job_id).ranktable, value=wire.encode(table))])


async def frun(*args: str, **env: str) -> tuple[int, str, str]:
    """Run `frun status`; return exit code, stdout, stderr."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PET_", "FRUN_"))}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "frun", "status", *args),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**kept, **env},
    )
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


def test_by_endpoint_and_id_from_anywhere(tmp_path: Path) -> None:
    """Endpoint and id are enough; without an id the only job of that etcd is shown."""

    async def story(store: EtcdStore) -> None:
        await put_table(store, "a/b", Phase.RUN, "all are here")
        where = ("--rdzv-endpoint", store.endpoint, "--state-dir", str(tmp_path))
        code, out, err = await frun(*where, "--job-id", "a/b", "--json")
        assert (code, err) == (0, "")
        assert json.loads(out)["reason"] == "all are here"
        code, out, _ = await frun(*where)
        assert code == 0
        assert "all are here" in out
        assert "\x1b" not in out
        await put_table(store, "c", Phase.RUN, "x")
        code, _, err = await frun(*where)
        assert (code, err.count("\n")) == (2, 1)
        assert "several jobs (a/b, c): name one with --job-id" in err
        code, _, err = await frun(*where, "nope")
        assert (code, err.count("\n")) == (2, 1)
        assert "has no job 'nope'" in err

    with_etcd(story)


def test_the_job_known_on_this_machine(tmp_path: Path) -> None:
    """Without arguments the registry names the job, even if the environment has an endpoint."""

    async def story(store: EtcdStore) -> None:
        await put_table(store, "mine", Phase.RUN, "found")
        register(
            str(tmp_path),
            JobEntry(
                job_id="mine",
                endpoints=(store.endpoint,),
                pid=os.getpid(),
                pid_started=process_started(os.getpid()) or 0,
                place=current_place(),
                started_at=1.0,
            ),
        )
        for args in ((), ("mine",)):
            code, out, err = await frun(
                *args, "--json", FRUN_STATE_DIR=str(tmp_path), PET_RDZV_ENDPOINT="nowhere:1"
            )
            assert (code, err) == (0, "")
            assert json.loads(out)["reason"] == "found"

    with_etcd(story)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "no job runs on this machine: name one"),
        (("a", "--job-id", "b"), "JOB 'a' and --job-id 'b' differ"),
        (("--etcd-password", "secret"), "a password on the command line"),
        (("--interval", "-1"), "-1"),
        (("--rdzv-endpoint", "a:b:c", "x"), "--rdzv-endpoint"),
    ],
)
def test_usage_errors_are_one_line(tmp_path: Path, args: tuple[str, ...], message: str) -> None:
    """What can't be done is one line, exit 2, and never repeats a secret."""
    code, out, err = asyncio.run(frun(*args, "--state-dir", str(tmp_path)))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err
    assert "secret" not in err


def test_etcd_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    """A dead endpoint ends with 1 and one line that names it, within seconds."""
    code, _, err = asyncio.run(frun("--rdzv-endpoint", "127.0.0.1:9", "x"))
    assert (code, err.count("\n")) == (1, 1)
    assert "127.0.0.1:9" in err


@pytest.mark.parametrize("how", ["--json", "--once"])
def test_a_reader_that_leaves_early_is_no_error(how: str) -> None:
    """`frun status | head -1` ends with 0 and without a traceback."""

    async def story(store: EtcdStore) -> None:
        await put_table(store, "j", Phase.RUN, "everybody-runs")
        read, write = os.pipe()
        os.close(read)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "frun", "status", "--rdzv-endpoint", store.endpoint, how),
            stdout=write,
            stderr=asyncio.subprocess.PIPE,
        )
        os.close(write)
        _, err = await process.communicate()
        assert (process.returncode, err) == (0, b"")

    with_etcd(story)


def test_live_table_follows_changes_and_ends_with_the_job() -> None:
    """On a terminal the table is redrawn on each change, without polling, until the job ends."""

    async def story(store: EtcdStore) -> None:
        await put_table(store, "j", Phase.GATHER, "waiting-for-hosts")
        screen, process = await on_terminal("--rdzv-endpoint", store.endpoint, "j")
        await screen.until("waiting-for-hosts")
        await put_table(store, "j", Phase.RUN, "everybody-runs")
        await screen.until("everybody-runs")
        await put_table(store, "j", Phase.DONE, "all-ended")
        await screen.until("all-ended")
        assert await process.wait() == 0
        screen.close()

    with_etcd(story)


def test_interrupt_leaves_the_live_table() -> None:
    """Ctrl-C is the usual way out: exit 0 and no traceback."""

    async def story(store: EtcdStore) -> None:
        await put_table(store, "j", Phase.RUN, "everybody-runs")
        screen, process = await on_terminal("--rdzv-endpoint", store.endpoint, "j")
        await screen.until("everybody-runs")
        process.send_signal(signal.SIGINT)
        assert await process.wait() == 0
        assert "Traceback" not in screen.text
        screen.close()

    with_etcd(story)


class Screen:
    """What a program wrote to its terminal."""

    def __init__(self, fd: int) -> None:
        self.text = ""
        self._fd = fd
        self._news = asyncio.Event()
        asyncio.get_running_loop().add_reader(fd, self._read)

    def _read(self) -> None:
        try:
            data = os.read(self._fd, 65536)
        except OSError:  # the program has closed its end
            data = b""
        if not data:
            asyncio.get_running_loop().remove_reader(self._fd)
        self.text += data.decode("utf-8", "replace")
        self._news.set()

    async def until(self, text: str) -> None:
        async with asyncio.timeout(20):
            while text not in self.text:
                self._news.clear()
                await self._news.wait()

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._fd)
        os.close(self._fd)


async def on_terminal(*args: str) -> tuple[Screen, asyncio.subprocess.Process]:
    master, slave = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "frun", "status", *args),
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
    )
    os.close(slave)
    return Screen(master), process
