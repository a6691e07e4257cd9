"""REPORTS.md, one machine: signals, grace periods, and what is left of a job that was ended."""

import json
import os
import re
import signal
import sys
import time

import pytest

from frun import procfs
from tests.e2e.harness import Running, Site, wait_gone

HOLD = """
    import os, signal, subprocess, sys, time
    def mark(name):
        def hook(*rest):
            print(name, os.environ["RANK"], flush=True)
        return hook
    for word in sys.argv[1:]:
        if word.startswith("hook="):
            signal.signal(getattr(signal, word[5:]), mark(word[5:]))
        if word.startswith("ignore="):
            signal.signal(getattr(signal, word[7:]), signal.SIG_IGN)
    if "child" in sys.argv or "setsid" in sys.argv:
        sleeper = subprocess.Popen(["sleep", "600"], start_new_session="setsid" in sys.argv)
        print("child", sleeper.pid, flush=True)
    if "save" in sys.argv:
        def save(*rest):
            time.sleep(1.5)
            open("saved", "w").close()
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
    print("worker", os.getpid(), os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        time.sleep(deadline - time.monotonic())
"""


def hold(
    site: Site, *words: str, flags: tuple[str, ...] = (), prefix: tuple[str, ...] = ()
) -> Running:
    """Start a job of workers that wait."""
    script = site.script("hold.py", HOLD)
    return site.start("--start-method", "spawn", *flags, script, *words, prefix=prefix)


def pids(job: Running, count: int = 1, word: str = "worker") -> list[int]:
    """Wait for `count` lines of workers and return their pids."""
    return [int(found) for found in job.expect(rf"{word} (\d+)", count)]


def test_r20_listed_signals_reach_each_worker_once(site: Site) -> None:
    """SIGUSR1 in the list is passed on and ends the job as any stop; workers had their say."""
    job = hold(site, "hook=SIGUSR1", flags=("--nproc-per-node=2", "--signals-to-handle=SIGUSR1,SIGTERM",
                                            "--shutdown-timeout=1"))  # fmt: skip
    pids(job, 2)
    job.send(signal.SIGUSR1)
    assert sorted(job.expect(r"SIGUSR1 \d", 2)) == ["SIGUSR1 0", "SIGUSR1 1"]
    done = job.wait()
    assert done.code == 1
    assert len(done.said("SIGUSR1")) == 2
    assert "SIGUSR1" in done.err


def test_r20_an_unlisted_signal_leaves_no_orphans(site: Site) -> None:
    """It ends the agent as it ends any program, and the workers go with it."""
    job = hold(site, flags=("--nproc-per-node=2",))
    workers = pids(job, 2)
    job.send(signal.SIGUSR1)
    assert job.wait().code == -signal.SIGUSR1
    assert wait_gone(workers, 20) == []
    site.allow_remains_of_a_kill()


@pytest.mark.parametrize("name", ["SIGNONSENSE", "SIGKILL", "SIGTERM,,SIGINT,SIGWHAT"])
def test_r20_a_signal_that_cannot_be_handled_is_refused_by_name(site: Site, name: str) -> None:
    """At the start, in one line."""
    done = site.run("--signals-to-handle", name, site.script("x.py", ""))
    assert done.code == 2
    assert done.err.count("\n") == 1
    assert name.rsplit(",", maxsplit=1)[-1] in done.err


@pytest.mark.parametrize(
    ("grace", "saved", "limit_s"), [(20, True, 6.0), (1, False, 4.0), (0, False, 2.0)]
)
def test_r21_workers_have_the_grace_that_was_asked_for(
    site: Site, grace: int, saved: bool, limit_s: float
) -> None:
    """A worker that needs 1.5 s to save gets them, or is killed when the time is over."""
    job = hold(site, "save", flags=(f"--shutdown-timeout={grace}",))
    pids(job)
    sent = time.monotonic()
    job.send(signal.SIGTERM)
    done = job.wait()
    assert done.code == 1
    assert (site.cwd / "saved").exists() == saved
    assert time.monotonic() - sent < limit_s


def test_r21_s09_a_second_signal_never_lengthens_the_wait(site: Site) -> None:
    """Three seconds stay three seconds."""
    job = hold(site, "ignore=SIGTERM", flags=("--shutdown-timeout=3",))
    pids(job)
    sent = time.monotonic()
    job.send(signal.SIGTERM)
    job.expect(r"", stream="err")
    while time.monotonic() < sent + 2:
        assert job.process.poll() is None
        time.sleep(0.1)
    job.send(signal.SIGTERM)
    assert job.wait(30).code == 1
    assert time.monotonic() - sent > 2.5


@pytest.mark.parametrize("restarts", [0, 1])
def test_r22_the_grace_holds_after_a_failure_too(site: Site, restarts: int) -> None:
    """One worker fails, the other ignores SIGTERM: each stop takes what --shutdown-timeout says."""
    script = site.script(
        "part.py",
        """
        import os, signal, sys, time
        if os.environ["RANK"] == "0":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            open("deaf" + os.environ["TORCHELASTIC_RESTART_COUNT"], "w").close()
            time.sleep(600)
        while not os.path.exists("deaf" + os.environ["TORCHELASTIC_RESTART_COUNT"]):
            time.sleep(0.02)
        sys.exit(7)
        """,
    )
    done = site.run(
        "--start-method=spawn", "--nproc-per-node=2", "--shutdown-timeout=1",
        f"--max-restarts={restarts}", script,
    )  # fmt: skip
    assert done.code == 1
    assert f"{restarts} of {restarts}" in done.err


@pytest.mark.parametrize("how", ["child", "setsid"])
def test_r23_s08_children_of_a_dead_worker_are_gone_before_the_next_starts(
    site: Site, how: str
) -> None:
    """Also one that made its own session, whose parent was killed alone."""
    job = hold(site, how, flags=("--max-restarts=1", "--shutdown-timeout=2"))
    worker, child = pids(job)[0], pids(job, word="child")[0]
    os.kill(worker, signal.SIGKILL)
    second = pids(job, 2)[1]
    assert wait_gone([child], 0.0) == []
    assert second != worker
    job.send(signal.SIGTERM)
    assert job.wait().code == 1


def test_r23_a_shell_and_a_pool_leave_nothing(site: Site) -> None:
    """A wrapper that does not exec around a script with a multiprocessing pool, killed in the middle."""
    site.script("wrap.sh", '#!/bin/sh\n"$@"\nexit $?\n')
    (site.cwd / "wrap.sh").chmod(0o755)
    script = site.script(
        "pool.py",
        """
        import multiprocessing, os, time
        def nap(n):
            print("pool", os.getpid(), flush=True)
            time.sleep(600)
        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(2) as pool:
                print("worker", os.getppid(), flush=True)
                pool.map(nap, range(2), 1)
        """,
    )
    job = site.start("--no-python", "--shutdown-timeout=1", "./wrap.sh", sys.executable, script)
    shell, pool = pids(job)[0], pids(job, 2, "pool")
    os.kill(shell, signal.SIGKILL)
    assert job.wait().code == 1
    assert wait_gone(pool, 20) == []


def test_r26_nohup_keeps_the_job_alive(site: Site) -> None:
    """A signal that was ignored at the start stays ignored by agent and workers."""
    job = hold(site, flags=("--nproc-per-node=2",), prefix=("nohup",))
    workers = pids(job, 2)
    for pid in (job.pid, *workers):
        os.kill(pid, signal.SIGHUP)
    job.send(signal.SIGTERM)
    done = job.wait()
    assert done.code == 1
    assert "SIGTERM" in done.err
    assert "SIGHUP" not in done.err


def test_r26_a_trap_of_the_shell_and_a_blocked_mask(site: Site) -> None:
    """SIGINT ignored by the parent is ignored; SIGTERM blocked by it still ends the job; SIGHUP too."""
    shell = ("sh", "-c", 'trap "" INT; exec "$@"', "sh")
    job = hold(site, prefix=shell)
    pids(job)
    job.send(signal.SIGINT)
    job.send(signal.SIGHUP)
    done = job.wait()
    assert done.code == 1
    assert "SIGHUP" in done.err
    block = "import os, signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]); "
    job = hold(site, prefix=(sys.executable, "-c", block + "os.execvp(sys.argv[1], sys.argv[1:])"))
    worker = pids(job)[0]
    job.send(signal.SIGTERM)
    assert job.wait(30).code == 1
    assert wait_gone([worker], 20) == []


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("where", ["gathering", "unreachable"])
def test_r27_r36_a_signal_before_the_job_began(site: Site, where: str, signum: int) -> None:
    """Ends at once, in a few lines without a traceback."""
    flags = {
        "gathering": ("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:23971"),
        "unreachable": ("--rdzv-endpoint=127.0.0.1:9", "--job-id=x"),
    }[where]
    script = site.script("x.py", "")
    job = site.start(*flags, "--nnodes=2", "--start-method=spawn", script, env={"LOGLEVEL": "INFO"})
    job.expect({"gathering": "leads", "unreachable": "zygote was ready"}[where], stream="err")
    job.send(signum)
    done = job.wait(30)
    assert done.code == 1
    assert signal.Signals(signum).name in done.err
    assert "Traceback" not in done.err


def test_r29_a_frozen_worker_is_killed(site: Site) -> None:
    """SIGSTOP does not save it from the end of the grace period."""
    job = hold(site, flags=("--shutdown-timeout=1",))
    os.kill(pids(job)[0], signal.SIGSTOP)
    job.send(signal.SIGTERM)
    assert job.wait(30).code == 1


def test_r30_only_own_processes_are_touched(site: Site) -> None:
    """A stranger of the same name, and a frun inside a worker of another, both live their lives."""
    outer = site.script(
        "outer.py",
        """
        import os, subprocess, sys
        print("inner says", subprocess.run([sys.executable, "-m", "frun", "--start-method=spawn",
              "inner.py"], capture_output=True, text=True).stdout, flush=True)
        """,
    )
    site.script(
        "inner.py", 'import os; print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"])'
    )
    stranger = hold(site)
    worker = pids(stranger)[0]
    done = site.run("--start-method=spawn", "--nproc-per-node=2", outer)
    assert done.code == 0, done.err
    assert done.said("inner says rank 0 of 1") == ["inner says rank 0 of 1"] * 2
    assert wait_gone([worker], 0.0) == [worker]
    stranger.send(signal.SIGTERM)
    stranger.wait()


def test_r30_as_pid_1_of_a_container(site: Site) -> None:
    """Zombies are reaped and SIGTERM works there."""
    if os.geteuid() != 0:
        pytest.skip("needs root for a pid namespace")
    script = site.script(
        "orphan.py",
        """
        import os, subprocess, time
        subprocess.Popen(["sh", "-c", "sleep 0.1 & exit 0"]).wait()
        print("me", os.getppid(), flush=True)
        time.sleep(600)
        """,
    )
    job = site.start(
        "--start-method=spawn", "--shutdown-timeout=2", script,
        prefix=("unshare", "-p", "-f", "--mount-proc", "--kill-child"),
    )  # fmt: skip
    job.expect(r"me \d+")
    agents = [p.pid for p in procfs.table().values() if p.parent == job.pid]
    os.kill(agents[0], signal.SIGTERM)
    done = job.wait(30)
    assert done.code == 1
    assert "SIGTERM" in done.err


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_r32_nothing_outlives_a_killed_agent(site: Site, method: str) -> None:
    """SIGKILL to the agent: deaf and frozen workers, children and etcd go with it."""
    script = site.script("hold.py", HOLD)
    flags = ("--start-method", method, "--nproc-per-node=2", "--master-port=29731", script)
    job = site.start(*flags, "ignore=SIGTERM", "setsid")
    workers = pids(job, 2)
    os.kill(workers[1], signal.SIGSTOP)
    job.process.kill()
    job.wait()
    left = site.left_processes()
    assert left == []
    again = site.start(*flags)
    pids(again, 2)
    again.send(signal.SIGTERM)
    again.wait()
    site.allow_remains_of_a_kill()


def test_r36_a_stop_says_what_happened_in_three_lines(site: Site) -> None:
    """Ctrl-C in training, then again: no traceback, and the agent's error file has the facts."""
    script = site.script("hold.py", HOLD)
    error_file = site.cwd / "agent.json"
    job = site.start(
        "--start-method=spawn", "--shutdown-timeout=2", script, "ignore=SIGINT",
        env={"TORCHELASTIC_ERROR_FILE": str(error_file)},
    )  # fmt: skip
    pids(job)
    job.send(signal.SIGINT)
    job.send(signal.SIGINT)
    done = job.wait(30)
    assert done.code == 1
    assert "Traceback" not in done.err
    assert "SIGINT" in done.err
    assert re.sub(r"frun: WARNING.*\n", "", done.err).count("\n") <= 3
    assert "SIGINT" in json.loads(error_file.read_text())["message"]["message"]
