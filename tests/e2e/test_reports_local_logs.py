"""REPORTS.md, one machine: what reaches the console and the files, and what becomes of log folders."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.e2e.harness import FRUN, Site

SAY = """
    import os, sys
    print("out", os.environ["RANK"], flush=True)
    print("err", os.environ["RANK"], file=sys.stderr, flush=True)
"""


def texts(logs: Path, pattern: str) -> dict[str, str]:
    """Return the contents of the log files that match, by their path below the job's folder."""
    found = sorted(logs.glob(f"*/{pattern}"))
    return {"/".join(path.parts[len(logs.parts) + 1 :]): path.read_text() for path in found}


def test_r39_the_template_of_a_line_can_name_the_host(site: Site) -> None:
    """Known names are replaced, an unknown one stays as it is, and nothing crashes."""
    script = site.script("say.py", SAY)
    name = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
    flags = ("--start-method=spawn", "--tee=3", "--role=train", "--local-addr=127.0.0.1", script)
    done = site.run(*flags, env={name: "<${role_name}|${rank}|${local_rank}|${host}|${moon}|$>"})
    assert done.code == 0, done.err
    assert done.out == "<train|0|0|127.0.0.1|${moon}|$>out 0\n"
    plain = site.run(*flags)
    assert plain.out == "[train0]:out 0\n"
    site.keeps = (r"frun_.*",)


def test_r42_odd_bytes_reach_the_file_and_stop_nothing(site: Site) -> None:
    """Bad UTF-8, NUL, a lone return, a 5 MB line and half a line, with LANG=C."""
    script = site.script(
        "odd.py",
        r"""
        import sys
        w = sys.stdout.buffer
        w.write(b"a\xe9\xff\n"); w.write(b"nul\0\n"); w.write(b"10%\r20%\r\n")
        w.write(b"x" * 5_000_000 + b"\n"); w.write(b"half")
        w.flush()
        for i in range(100):
            print("good", i, flush=True)
        """,
    )
    logs = site.cwd / "logs"
    done = site.run(
        "--start-method=spawn", "--tee=1", "--log-dir", str(logs), script, env={"LANG": "C"}
    )
    assert done.code == 0, done.err
    data = next(logs.glob("*/attempt_0/0/stdout.log")).read_bytes()
    expected = b"a\xe9\xff\nnul\0\n10%\r20%\r\n" + b"x" * 5_000_000 + b"\nhalf"
    assert data == expected + b"".join(b"good %d\n" % i for i in range(100))
    assert done.said(r"good (\d+)") == [str(i) for i in range(100)]
    assert "Traceback" not in done.err


def test_r43_s15_folders_are_made_kept_and_removed_as_owned(site: Site) -> None:
    """Foreign files stay, nested folders are made, and a start without output leaves no folder."""
    script = site.script("say.py", SAY)
    base = site.cwd / "a" / "b"
    base.mkdir(parents=True)
    (base / "mine").write_text("precious")
    flags = ("--start-method=spawn", "--redirects=3")
    assert site.run(*flags, "--log-dir=a/b", script).code == 0
    assert site.run(*flags, "--log-dir=a/b", script).code == 0
    assert site.run(*flags, "--log-dir=a/b/c/d", script).code == 0
    assert (base / "mine").read_text() == "precious"
    assert len(list(base.glob("*/attempt_0/0/stdout.log"))) == 2
    assert len(list(base.glob("c/d/*/attempt_0/0/stderr.log"))) == 1
    quiet = site.run("--start-method=spawn", script)
    assert quiet.code == 0
    assert not [name for name in os.listdir(site.temp) if name.startswith("frun")]


def test_r43_refusals_are_one_line(site: Site) -> None:
    """A regular file, and a folder that can't be made."""
    script = site.script("say.py", SAY)
    (site.cwd / "file").write_text("")
    for folder in ("file", "/proc/nowhere/logs"):
        done = site.run("--start-method=spawn", "--log-dir", folder, script)
        assert done.code in (1, 2)
        assert folder in done.err
        assert done.err.count("\n") == 1
    off = site.run("--start-method=spawn", "--redirects=3", "--log-dir=/dev/null", script)
    assert (off.code, off.out) == (0, "out 0\n")


def test_r43_a_full_disk_does_not_stop_training(site: Site) -> None:
    """The worker goes on and ends 0; one warning says what is lost."""
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a small tmpfs")
    small = site.cwd / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "none", str(small)], check=True)
    try:
        script = site.script(
            "much.py", 'for i in range(3000): print("x" * 300)\nprint("end", flush=True)\n'
        )
        done = site.run("--start-method=spawn", "--redirects=1", "--log-dir", str(small), script)
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)
    assert done.code == 0, done.err
    assert "No space left" in done.err


def test_s03_a_restart_keeps_the_logs_before_it(site: Site) -> None:
    """Each attempt has its own folder."""
    script = site.script(
        "twice.py",
        """
        import os, sys
        count = os.environ["TORCHELASTIC_RESTART_COUNT"]
        print("attempt", count, flush=True)
        sys.exit(1 if count == "0" else 0)
        """,
    )
    logs = site.cwd / "logs"
    done = site.run(
        "--start-method=spawn", "--max-restarts=1", "-r=3", "--log-dir", str(logs), script
    )
    assert done.code == 0, done.err
    assert texts(logs, "attempt_*/0/stdout.log") == {
        "attempt_0/0/stdout.log": "attempt 0\n",
        "attempt_1/0/stdout.log": "attempt 1\n",
    }


@pytest.mark.parametrize("job_id", ["a/b/../c", "x" * 300, "..", "-x y'\"\u00e4", ".hidden"])
def test_s07_any_text_is_a_job_id(site: Site, job_id: str) -> None:
    """It never leaves the log folder, and the worker sees it as typed."""
    script = site.script("id.py", 'import os; print(os.environ["TORCHELASTIC_RUN_ID"])')
    logs = site.cwd / "logs"
    done = site.run(
        "--start-method=spawn", f"--rdzv-id={job_id}", "-t=1", "--log-dir", str(logs), script
    )
    assert done.code == 0, done.err
    assert done.out == f"[default0]:{job_id}\n"
    assert len(list(logs.glob("*/attempt_0/0/stdout.log"))) == 1


def test_s12_events_have_times_and_a_wrong_handler_is_refused(site: Site) -> None:
    """Real seconds, one JSON object a line; the name is checked before anything starts."""
    script = site.script("x.py", "")
    done = site.run("--start-method=spawn", "--event-log-handler=console", script)
    assert done.code == 0
    events = [json.loads(line) for line in done.err.splitlines() if line.startswith("{")]
    assert events
    assert all(event["timestamp"] > 1_600_000_000 for event in events)
    wrong = site.run("--event-log-handler=moon", script)
    assert wrong.code == 2
    assert "moon" in wrong.err
    assert wrong.err.count("\n") == 1


def test_s14_a_closed_console_stops_only_the_copying(site: Site) -> None:
    """The reader goes away after one line: the files are complete and the job ends well."""
    script = site.script(
        "many.py", 'for i in range(20000): print("line", i)\nopen("done", "w").close()\n'
    )
    logs = site.cwd / "logs"
    read, write = os.pipe()
    job = subprocess.Popen(
        [*FRUN, "--start-method=spawn", "--tee=1", "--log-dir", str(logs), script],
        cwd=site.cwd, env=site.environment(), stdout=write, stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(write)
    os.read(read, 10)
    os.close(read)
    _, err = job.communicate(timeout=60)
    assert job.returncode == 0, err
    assert (site.cwd / "done").exists()
    data = next(logs.glob("*/attempt_0/0/stdout.log")).read_text()
    assert data.splitlines() == [f"line {i}" for i in range(20000)]
    assert b"Traceback" not in err
