"""Workers come from the zygote: forked or executed, each with its own streams, none with more."""

import asyncio
import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from frun import procfs
from frun.agent.zygote import EntryMode
from frun.errors import LaunchError
from tests.zygotes import Rig, environment, forked, plain, running, with_rig

FDS = """\
import os, json, sys
kind = lambda fd: os.readlink(f"/proc/self/fd/{fd}").split(":")[0]
seen = {}
for fd in os.listdir("/proc/self/fd"):
    try:
        seen[int(fd)] = kind(fd)
    except OSError:
        pass
print(json.dumps(seen))
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a folder of the test."""
    (tmp_path / "fds.py").write_text(FDS)
    (tmp_path / "frun.txt").touch()
    (tmp_path / "where.py").write_text(
        "import sys, os\nprint('frun' in sys.modules, sys.executable, sys.prefix, sys.argv)\n"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("exec_", [False, True])
def test_a_worker_holds_three_descriptors(exec_: bool) -> None:
    """Of the agent, the zygote and other workers nothing is open in a worker, nor in its children."""
    Path("both.py").write_text(
        FDS + "import subprocess\nsubprocess.run([sys.executable, 'fds.py'], close_fds=False)\n"
    )

    async def story(rig: Rig) -> None:
        outcomes = await asyncio.gather(
            *(rig.run(["both.py"], stdin="null", exec_=exec_) for _ in range(4))
        )
        for outcome in outcomes:
            mine, childs = map(json.loads, outcome.out.splitlines())
            assert list(mine) == list(childs) == ["0", "1", "2"]
            assert mine["0"] == "/dev/null"

    with_rig(story)


def test_thirty_workers_leave_nothing() -> None:
    """Neither agent nor zygote keeps a descriptor, a zombie or a record of a worker that ended."""

    async def story(rig: Rig) -> None:
        def held() -> list[object]:
            pids = (os.getpid(), rig.zygote.pid)
            below = procfs.descendants(rig.zygote.pid, procfs.table())
            return [*(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids), below]

        await rig.run(["where.py"])
        await rig.idle()
        before = held()
        for _ in range(10):
            await asyncio.gather(*(rig.run(["where.py"]) for _ in range(3)))
        await rig.idle()
        assert held() == before
        assert len(rig.exits) == 31

    with_rig(story)


def test_an_executed_worker_has_nothing_of_frun_inside() -> None:
    """exec_ is a fresh interpreter with the same arguments."""

    async def story(rig: Rig) -> None:
        for command in (["where.py", "", "a b"], ["-m", "where", "--x"]):
            fresh = await rig.run(command, exec_=True)
            assert fresh == plain(command)
            assert fresh.out.startswith("False ")
            assert (await rig.run(command)).out.startswith("True ")

    with_rig(story)


def test_a_prefix_and_a_program_are_executed() -> None:
    """A command in front of the worker runs it; a program is found on the worker's own PATH."""
    program = Path("tool")
    program.write_text('#!/bin/sh\necho "tool $1 $RANK"\ntrap - PIPE\nexit 6\n')
    program.chmod(0o755)

    async def story(rig: Rig) -> None:
        nice = await rig.run(["where.py"], prefix=("nice", "-n", "3"))
        assert nice == plain(["where.py"])
        env = rig.env | {"PATH": f"{Path.cwd()}:/usr/bin:/bin", "RANK": "3"}
        tool = await rig.run(["tool", "a b"], mode=EntryMode.PROGRAM, env=env)
        assert (tool.out, tool.returncode) == ("tool a b 3\n", 6)

    with_rig(story)


def test_a_program_that_can_not_run_is_told() -> None:
    """The reason is the kernel's, the name is the user's; no worker is reported."""
    Path("plain-file").touch()
    Path("no-format").touch()
    Path("no-format").chmod(stat.S_IRWXU)

    async def story(rig: Rig) -> None:
        for entry, reason in (
            ("./plain-file", "Permission denied"),
            ("./missing", "No such file or directory"),
            ("missing", "No such file or directory"),
            ("./no-format", "Exec format error"),
        ):
            with pytest.raises(LaunchError, match=f"can't run '{entry}': {reason}"):
                await rig.spawn([entry], mode=EntryMode.PROGRAM)
        await rig.run(["where.py"])
        assert len(rig.exits) == 1

    with_rig(story)


def test_another_interpreter_is_executed(folder: Path) -> None:
    """PYTHON_EXEC names one that the zygote is not; it is used as it was given, unresolved."""
    link = folder / "my python"
    link.symlink_to(sys.executable)

    async def story(rig: Rig) -> None:
        outcome = await rig.run(["where.py"], python=str(link))
        assert outcome.out.startswith(f"False {link} ")
        assert (await rig.run(["where.py"])).out.startswith(f"True {sys.executable} {sys.prefix}")

    with_rig(story)


def test_the_environment_is_exactly_the_given_one() -> None:
    """Variables of the zygote that a worker was not given are not there, large values are."""
    Path("env.py").write_text("import os, json\nprint(json.dumps(dict(os.environ)))\n")

    async def story(rig: Rig) -> None:
        env = environment(BIG="x" * 100_000, RANK="1", BYTES="\udcff", EMPTY="", TZ="UTC+3")
        for exec_ in (False, True):
            outcome = await rig.run(["env.py"], env=env, exec_=exec_)
            assert json.loads(outcome.out) == env

    with_rig(story, env=environment(ONLY_ZYGOTE="1"))


def test_variables_of_the_injected_module_are_not_left() -> None:
    """The script does not see how frun reaches its store."""
    Path("env.py").write_text(
        "import os\nprint([n for n in os.environ if n.startswith('FRUN_')])\n"
    )

    async def story(rig: Rig) -> None:
        more = {"FRUN_STORE": "/nowhere/s", "FRUN_GENERATION": "3", "FRUN_OTHER": "1"}
        for exec_ in (False, True):
            outcome = await rig.run(["env.py"], env=rig.env | more, exec_=exec_)
            assert outcome.out == "['FRUN_OTHER']\n"
            assert outcome.returncode == 0

    with_rig(story)


@pytest.mark.parametrize("signum", [signal.SIGHUP, signal.SIGINT, signal.SIGTERM])
def test_a_signal_ignored_at_the_start_stays_ignored(signum: signal.Signals) -> None:
    """As under nohup: the worker ignores it too, forked or executed."""
    Path("ask.py").write_text(
        f"import signal\nprint(signal.getsignal({int(signum)}) is signal.SIG_IGN)\n"
    )
    before = signal.signal(signum, signal.SIG_IGN)
    try:

        async def story(rig: Rig) -> None:
            for exec_ in (False, True):
                assert (await rig.run(["ask.py"], exec_=exec_)).out == "True\n"

        with_rig(story)
    finally:
        signal.signal(signum, before)
    assert forked(["ask.py"]).out == "False\n"


def test_ps_shows_the_workers_command() -> None:
    """The command line of a forked worker reads as if it had been executed."""
    Path("wait.py").write_text("import signal\nprint(flush=True)\nsignal.pause()\n")

    async def story(rig: Rig) -> None:
        pid, _ = await rig.hear(["wait.py", "--lr", "0.1", "a b"])
        shown = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0")
        assert shown.decode() == f"{sys.executable} -u wait.py --lr 0.1 a b"
        comm = Path(f"/proc/{pid}/comm").read_text()
        assert comm == Path(sys.executable).name + "\n"
        assert b"wait.py" not in Path(f"/proc/{rig.zygote.pid}/cmdline").read_bytes()

    with_rig(story)


def test_nothing_of_the_working_folder_hides_a_module(folder: Path) -> None:
    """The zygote imports nothing from the folder that frun was started in."""
    for name in ("json", "frun", "socket", "torch", "warmup", "zygote", "random"):
        (folder / f"{name}.py").write_text(f"raise SystemExit('{name} of the user')\n")
    inner = folder / "inner"
    inner.mkdir()
    (inner / "s.py").write_text("import json\nprint(json.__file__)\n")
    assert forked(["inner/s.py"]).out == f"{json.__file__}\n"


def test_a_module_that_fails_is_told_and_workers_are_executed() -> None:
    """Whatever a preloaded module does, the zygote is there, and says why it does not fork."""
    Path("bad.py").write_text("import sys\nsys.exit('go away')\n")

    async def story(rig: Rig) -> None:
        assert "can't import bad: SystemExit: go away" in await rig.zygote.ready(20.0)
        assert (await rig.run(["where.py"])) == plain(["where.py"], rig.env)

    with_rig(story, preload=["bad"], env=environment(PYTHONPATH="."))


def test_an_interpreter_that_is_none_is_told() -> None:
    """A wrong path, and a program that is not python, end start or ready with the reason."""

    async def story() -> None:
        from frun.agent.zygote import Zygote

        for python, reason in (("/nowhere/python", "No such file"), ("/bin/false", "status 1")):
            deaths: list[str] = []
            zygote = Zygote(
                python=python, env={}, on_exit=lambda pid, code: None, on_death=deaths.append
            )
            with pytest.raises(LaunchError, match=reason):
                await asyncio.gather(zygote.start(), zygote.ready(20.0))
            await zygote.close()

    asyncio.run(story())


def test_a_helper_runs_a_function_with_descriptors() -> None:
    """A forked helper gets what it was given, is reported like a worker, and can be stopped."""

    async def story(rig: Rig) -> None:
        read, write = os.pipe()
        with os.fdopen(read, "rb") as file:
            pid = await rig.zygote.call("tests.agent.helpers:greet", [write], "frun", 3)
            os.close(write)
            assert await asyncio.to_thread(file.read) == b"frun 3"
        assert await rig.ended(pid) == 0
        broken = await rig.zygote.call("tests.agent.helpers:missing", [])
        assert await rig.ended(broken) == 1
        long = await rig.zygote.call("tests.agent.helpers:wait", [])
        assert await rig.zygote.stop([long], signal.SIGTERM, 20.0) == ()
        assert await rig.ended(long) == -signal.SIGTERM

    root = str(Path(__file__).parents[2])
    with_rig(story, env=environment(PYTHONPATH=root))


def test_a_closed_zygote_refuses() -> None:
    """After close, and before start, a request is an error and not a wait."""

    async def story() -> None:
        async with running() as rig:
            await rig.run(["where.py"])
        with pytest.raises(LaunchError, match="not running"):
            await rig.spawn(["where.py"])
        assert await rig.zygote.stop([1], signal.SIGTERM, 5.0) == ()

    asyncio.run(story())


def test_a_worker_that_nobody_waits_for_is_ended() -> None:
    """A cancelled spawn leaves no worker behind."""
    Path("wait.py").write_text("import signal\nsignal.pause()\n")

    async def story(rig: Rig) -> None:
        await rig.zygote.ready(20.0)
        spawning = asyncio.create_task(rig.spawn(["wait.py"]))
        await asyncio.sleep(0)  # now it has been asked for
        spawning.cancel()
        with pytest.raises(asyncio.CancelledError):
            await spawning
        async with asyncio.timeout(10.0):
            while not rig.exits:
                rig.news.clear()
                await rig.news.wait()
        assert list(rig.exits.values()) == [-signal.SIGKILL]

    with_rig(story)


def test_close_does_not_wait_for_the_imports() -> None:
    """A zygote that is still importing is ended at once."""
    Path("slow.py").write_text("import time\ntime.sleep(60)\n")

    async def story() -> None:
        async with running(preload=["slow"], env=environment(PYTHONPATH=".")) as rig:
            with pytest.raises(LaunchError, match=r"not ready within 0\.01 s"):
                await rig.zygote.ready(0.01)
            async with asyncio.timeout(1.0):
                await rig.zygote.close()
            assert rig.deaths == []

    asyncio.run(story())


def test_closed_standard_streams_do_not_matter(folder: Path) -> None:
    """frun started without stdin and stdout starts workers all the same."""
    (folder / "agent.py").write_text(
        "import asyncio\nfrom tests.zygotes import running\n"
        "async def main():\n"
        "    async with running() as rig:\n"
        "        for exec_ in (False, True):\n"
        "            outcome = await rig.run(['where.py', 'x'], exec_=exec_)\n"
        "            assert outcome.returncode == 0 and 'where.py' in outcome.out, outcome\n"
        "asyncio.run(main())\n"
    )
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        ["sh", "-c", f'exec "{sys.executable}" agent.py <&- >&-'],
        env=environment(PYTHONPATH=root),
        stderr=subprocess.PIPE,
        timeout=30,
    )
    assert (done.returncode, done.stderr) == (0, b"")


def test_run_path_runs_a_script_as_such() -> None:
    """--run-path gives the script what running it as a script gives."""

    async def story(rig: Rig) -> None:
        outcome = await rig.run(["where.py", "--x"], mode=EntryMode.RUN_PATH)
        assert outcome == await rig.run(["where.py", "--x"])

    with_rig(story)
