"""REPORTS.md, one machine: exit statuses, who is blamed, error files, how restarts are counted."""

import json
import os
import re
import signal
import sys

import pytest

from frun import procfs
from tests.e2e.harness import Done, Site

FAIL = """
    import os, signal, sys, time
    how, rank = sys.argv[1], sys.argv[2]
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    print("start", os.environ["RANK"], attempt, flush=True)
    open(f"started {os.environ['RANK']} {attempt}", "w").close()
    if len(sys.argv) > 3 and attempt == sys.argv[3]:
        sys.exit(0)
    if os.environ["RANK"] != rank:
        time.sleep(600)
    while not os.path.exists(f"started {1 - int(rank)} {attempt}"):
        time.sleep(0.01)  # else it is stopped before it has begun
    if how.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, how))
    sys.exit(int(how))
"""


def fail(site: Site, how: str, *, flags: tuple[str, ...] = (), heals_at: str = "") -> Done:
    """Run a job of two whose rank 1 fails in this way, until attempt `heals_at`."""
    script = site.script("fail.py", FAIL)
    more = (heals_at,) if heals_at else ()
    return site.run(
        "--start-method=spawn", "--nproc-per-node=2", *flags, script, how, "1", *more
    )  # fmt: skip


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("7", "exit status 7"),
        ("255", "exit status 255"),
        ("SIGSEGV", "SIGSEGV"),
        ("SIGABRT", "SIGABRT"),
        ("SIGKILL", "SIGKILL"),
    ],
)
def test_r33_a_failure_is_never_0_and_its_status_is_named(site: Site, how: str, said: str) -> None:
    """frun's own status is 1 each time; the worker's real one is in the last lines, with its rank."""
    done = fail(site, how)
    assert done.code == 1
    assert said in done.err
    assert "rank 1" in done.err
    assert "Traceback" not in done.err


def test_r33_a_mended_run_ends_with_0(site: Site) -> None:
    """Success after one restart is success."""
    done = fail(site, "7", flags=("--max-restarts=1",), heals_at="1")
    assert done.code == 0
    assert len(done.said(r"start \d 1")) == 2


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_r86_n_restarts_mean_n_plus_1_starts(site: Site, limit: int) -> None:
    """The number each worker sees counts up, and the last words show used and allowed."""
    done = fail(site, "7", flags=(f"--max-restarts={limit}",))
    assert done.code == 1
    counts = [int(found) for found in done.said(r"start 1 (\d+)")]
    assert counts == list(range(limit + 1))
    assert f"{limit} of {limit}" in done.err


def test_r85_all_new_workers_see_the_same_count(site: Site) -> None:
    """Every worker of an attempt has the same TORCHELASTIC_RESTART_COUNT."""
    done = fail(site, "SIGKILL", flags=("--max-restarts=2",))
    for attempt in range(3):
        assert sorted(done.said(rf"start (\d) {attempt}")) == ["0", "1"]


def test_r35_the_worker_that_died_is_blamed_not_its_victim(site: Site) -> None:
    """Rank 1 dies silently, rank 0 records the error of its collective: rank 1 is the cause."""
    script = site.script(
        "reduce.py",
        """
        import os, signal
        import torch, torch.distributed as dist
        from torch.distributed.elastic.multiprocessing.errors import record
        @record
        def main():
            dist.init_process_group("gloo")
            for step in range(200):
                if step == 3 and dist.get_rank() == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                dist.all_reduce(torch.ones(1))
        main()
        """,
    )
    for _ in range(2):
        done = site.run("--nproc-per-node=2", script)
        assert done.code == 1
        first = next(line for line in done.err.splitlines() if "failed:" in line)
        assert "rank 1" in first
        assert "SIGKILL" in first


def test_r41_the_failing_worker_is_told_though_filtered(site: Site) -> None:
    """Console of rank 0 only, files of all three complete, and the summary of rank 2."""
    script = site.script(
        "say.py",
        """
        import os, sys, time
        print("hello from", os.environ["RANK"], flush=True)
        print("error of", os.environ["RANK"], file=sys.stderr, flush=True)
        if os.environ["RANK"] == "2":
            while not os.path.exists("go1") or not os.path.exists("go0"):
                time.sleep(0.02)
            sys.exit(7)
        open("go" + os.environ["RANK"], "w").close()
        time.sleep(600)
        """,
    )
    for stream in ("--redirects", "--tee", ""):
        logs = site.cwd / f"logs{stream}"
        flags = [stream, "3", "--log-dir", str(logs)] if stream else []
        done = site.run(
            "--start-method=spawn", "--nproc-per-node=3", "--local-ranks-filter=0,9", *flags, script
        )  # fmt: skip
        assert done.code == 1
        assert done.said(r"hello from \d") == ([] if stream == "--redirects" else ["hello from 0"])
        assert "exit status 7" in done.err
        assert "rank 2" in done.err
        if stream:
            texts = [path.read_text() for path in sorted(logs.glob("*/attempt_0/*/stdout.log"))]
            assert texts == [f"hello from {rank}\n" for rank in range(3)]
        for name in ("go0", "go1"):
            (site.cwd / name).unlink()


def test_s04_a_broken_error_file_does_not_stop_the_agent(site: Site) -> None:
    """Empty, cut short or without a message: the restarts go on and the exit status is told."""
    script = site.script(
        "bad.py",
        """
        import os, sys
        count = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        texts = ["", '{"message": {"mess', "{}", "[]", '{"message": null}']
        open(os.environ["TORCHELASTIC_ERROR_FILE"], "w").write(texts[count])
        sys.exit(9)
        """,
    )
    done = site.run("--start-method=spawn", "--max-restarts=4", script)
    assert done.code == 1
    assert "exit status 9" in done.err
    assert "4 of 4" in done.err


def test_s05_a_relative_log_dir_and_a_script_that_changes_folder(site: Site) -> None:
    """The recorder finds its file, and the error that is shown is the script's."""
    (site.cwd / "elsewhere").mkdir()
    script = site.script(
        "moves.py",
        """
        import os
        from torch.distributed.elastic.multiprocessing.errors import record
        @record
        def main():
            os.chdir("elsewhere")
            raise RuntimeError("deliberate")
        main()
        """,
    )
    target = site.cwd / "agent.json"
    done = site.run("--log-dir=logs", script, env={"TORCHELASTIC_ERROR_FILE": str(target)})
    assert done.code == 1
    assert "RuntimeError: deliberate" in done.err
    assert "FileNotFoundError" not in done.err
    assert len(list(site.cwd.glob("logs/*/attempt_0/0/error.json"))) == 1
    message = json.loads(target.read_text())["message"]
    assert message["message"] == "RuntimeError: deliberate"
    assert message["errorCode"] == 1


def test_r102_r104_restarts_leak_nothing(site: Site) -> None:
    """After 40 restarts as many threads and descriptors as after 5; workers hold no socket."""
    script = site.script(
        "short.py",
        """
        import os, sys
        links = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if
                 os.path.exists(f"/proc/self/fd/{fd}") or os.path.islink(f"/proc/self/fd/{fd}")]
        count = os.environ["TORCHELASTIC_RESTART_COUNT"]
        print("start", count, sum(link.startswith("socket") for link in links), flush=True)
        if count in ("5", "40"):
            sys.stdin.readline()
        sys.exit(3 if count != "40" else 0)
        """,
    )
    read, write = os.pipe()
    with open(read, "rb") as stdin, open(write, "wb", buffering=0) as feed:
        job = site.start("--start-method=spawn", "--max-restarts=100", script, stdin=stdin)
        seen = []
        for count in (5, 40):
            job.expect(rf"start {count} 0\n")
            threads = len(os.listdir(f"/proc/{job.pid}/task"))
            seen.append((threads, len(os.listdir(f"/proc/{job.pid}/fd"))))
            feed.write(b"go\n")
        assert job.wait().code == 0
    (threads_5, fds_5), (threads_40, fds_40) = seen
    assert abs(threads_40 - threads_5) <= 2
    assert abs(fds_40 - fds_5) <= 3


def test_r102_forked_loaders_hold_nothing_of_frun(site: Site) -> None:
    """Workers forked from the zygote fork loaders while the group store's connection is open."""
    script = site.script(
        "loads.py",
        """
        import os, sys
        import torch, torch.distributed as dist
        from torch.utils.data import DataLoader, TensorDataset
        dist.init_process_group("gloo")
        data = TensorDataset(torch.arange(64.0))
        total = 0.0
        for epoch in range(2):
            for (batch,) in DataLoader(data, batch_size=8, num_workers=2):
                total += batch.sum().item()
                dist.all_reduce(batch)
        print("total", total, flush=True)
        dist.destroy_process_group()
        """,
    )
    done = site.run("--nproc-per-node=2", script, limit_s=90)
    assert done.code == 0, done.err
    assert done.said(r"total 4032.0") == ["total 4032.0"] * 2


def test_a_killed_zygote_counts_as_a_failure_and_is_replaced(site: Site) -> None:
    """The workers die with it; with restarts left the job goes on from a new one."""
    script = site.script(
        "wait.py",
        """
        import os, sys, time
        print("start", os.environ["TORCHELASTIC_RESTART_COUNT"], os.getppid(), flush=True)
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            time.sleep(600)
        """,
    )
    job = site.start("--start-method=spawn", "--max-restarts=1", script)
    zygote = int(re.findall(r"\d+$", job.expect(r"start 0 \d+")[0])[0])
    assert procfs.table()[zygote].parent == job.pid
    os.kill(zygote, signal.SIGKILL)
    done = job.wait()
    assert done.code == 0, done.err
    assert len(done.said("start 1")) == 1


def test_r17_no_restarts_without_the_flag_and_peers_are_not_left_waiting(site: Site) -> None:
    """With the defaults a failure ends the whole job at once, and the last line says so."""
    done = fail(site, "7", flags=("--master-port=29732",))
    assert done.code == 1
    assert done.wall_s < 45
    assert "0 of 0" in done.err


def test_a_worker_that_cannot_be_started_is_one_line(site: Site) -> None:
    """A program that does not exist: the reason is named, exit 1, no traceback."""
    done = site.run("--no-python", "./nowhere")
    assert done.code == 1
    assert "./nowhere" in done.err
    assert "No such file" in done.err
    assert "Traceback" not in done.err
    wrong = site.run(site.script("x.py", ""), env={"PYTHON_EXEC": "/no/python"})
    assert wrong.code == 1
    assert "/no/python" in wrong.err
    assert sys.executable not in wrong.err
