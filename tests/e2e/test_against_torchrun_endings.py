"""Logs, exit codes, error files, restarts and signals under torchrun and under frun, side by side."""

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import FRUN, TORCHRUN, Done, Site

SAY = """
    import os, sys
    rank = os.environ["RANK"]
    for i in range(3):
        print("out", rank, i, "warn" if i == 1 else "x,y" if i == 2 else "", flush=True)
        print("err", rank, i, "warn" if i == 0 else "", file=sys.stderr, flush=True)
"""
BOTH = {"torchrun": TORCHRUN, "frun": FRUN}


def tree(base: Path) -> dict[str, list[str]]:
    """Return the log files below a job's folder with their lines, sorted."""
    files = [path for path in base.rglob("*") if path.is_file() and path.name != "events.jsonl"]
    return {
        "/".join(path.relative_to(base).parts[1:]): sorted(path.read_text().splitlines())
        for path in files
        if path.stat().st_size
    }


def console(text: str) -> list[str]:
    """Return the lines of workers, sorted."""
    return sorted(line for line in text.splitlines() if re.search(r"(out|err) \d \d", line))


@pytest.mark.parametrize(
    ("flags", "template"),
    [
        (
            ("--nproc-per-node=3", "--tee=0:3,1:1", "--redirects=1:2,2:3", "--local-ranks-filter=0,1",
             "--duplicate-stdout-filters=warn,x,,y", "--duplicate_stderr_filters=warn",
             "--role=trainer", "--rdzv-id=job 7"),
            None,
        ),
        (("--nproc-per-node=2", "-r", "1", "-t", "2"), "<${role_name} ${rank} ${local_rank}>"),
        (("--nproc-per-node=2", "--local_ranks_filter=1"), None),
    ],
    ids=["maps and filters", "template", "filter alone"],
)  # fmt: skip
def test_logs_and_console_are_the_same(
    site: Site, flags: tuple[str, ...], template: str | None
) -> None:
    """Files by name and content, and the lines of workers on both streams of the console."""
    script = site.script("say.py", SAY)
    seen = {}
    for name, program in BOTH.items():
        own = ("--start-method=spawn",) if program == FRUN else ()
        done = site.run(
            *own, *flags, f"--log-dir={name}", script, program=program,
            env={"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": template},
        )  # fmt: skip
        assert done.code == 0, done.err
        seen[name] = (tree(site.cwd / name), console(done.out), console(done.err))
    assert seen["frun"] == seen["torchrun"]
    assert seen["frun"][1] or seen["frun"][2]


def test_a_recorded_failure_leaves_the_same_files(site: Site) -> None:
    """Exit code 1, the worker's error file in its place, the cause in the agent's error file."""
    script = site.script(
        "raises.py",
        """
        import os, time
        from torch.distributed.elastic.multiprocessing.errors import record
        @record
        def main():
            if os.environ["RANK"] == "0":
                time.sleep(600)
            raise ValueError("deliberate")
        main()
        """,
    )
    seen: dict[str, Any] = {}
    for name, program in BOTH.items():
        error_file = site.cwd / f"{name}.json"
        done = site.run(
            "--nproc-per-node=2", f"--log-dir={name}", "--max-restarts=1", script, program=program,
            env={"TORCHELASTIC_ERROR_FILE": str(error_file)},
        )  # fmt: skip
        message = json.loads(error_file.read_text())["message"]
        extra = message.pop("extraInfo")
        lines = [line for line in extra["py_callstack"].splitlines() if script in line]
        seen[name] = (done.code, message, lines, set(extra), set(tree(site.cwd / name)))
        assert "ValueError: deliberate" in done.err
    assert seen["frun"] == seen["torchrun"]


@pytest.mark.parametrize("how", ["7", "SIGSEGV"])
def test_exit_codes_are_the_same(site: Site, how: str) -> None:
    """1 for any failure, whatever the worker's own status was."""
    script = site.script(
        "end.py",
        """
        import os, signal, sys
        if sys.argv[1].startswith("SIG"):
            os.kill(os.getpid(), getattr(signal, sys.argv[1]))
        sys.exit(int(sys.argv[1]))
        """,
    )
    flags = ("--start-method=spawn", script, how)
    theirs, ours = (site.run(*flags, program=program).code for program in (TORCHRUN, FRUN))
    assert ours == theirs


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1])
def test_signals_are_passed_on_alike(site: Site, signum: int) -> None:
    """Each worker gets the signal once, stopped workers are waited for, and the exit code is 1."""
    script = site.script(
        "hook.py",
        """
        import os, signal, sys, threading
        got = threading.Event()
        def hook(signum, frame):
            print("got", signum, os.environ["RANK"], flush=True)
            got.set()
        for name in ("SIGTERM", "SIGINT", "SIGUSR1"):
            signal.signal(getattr(signal, name), hook)
        print("up", flush=True)
        while not got.wait(0.05):
            pass
        print("saved", os.environ["RANK"], flush=True)
        sys.exit(3)
        """,
    )
    seen: dict[str, tuple[int, list[str]]] = {}
    for name, program in BOTH.items():
        job = site.start(
            "--nproc-per-node=2", "--signals-to-handle=SIGTERM,SIGINT,SIGUSR1",
            "--start-method=spawn", script, program=program,
        )  # fmt: skip
        job.expect("up", 2)
        job.send(signum)
        done = job.wait()
        seen[name] = (done.code, done.lines())
    assert seen["frun"] == seen["torchrun"]
    assert f"got {int(signum)} 0" in seen["frun"][1]


def refused(site: Site, *flags: str) -> tuple[Done, Done]:
    """Run with these flags under both; neither may start a worker."""
    script = site.script("never.py", 'open("started", "w").close()')
    theirs, ours = (site.run(*flags, script, program=program) for program in (TORCHRUN, FRUN))
    assert not (site.cwd / "started").exists()
    assert "Traceback" not in ours.err
    return theirs, ours


def test_numa_binding_without_cuda_fails_in_both(site: Site) -> None:
    """Exit code 1, before anything starts; frun says it in one line."""
    theirs, ours = refused(site, "--numa-binding=node", "--start-method=spawn")
    assert (theirs.code, ours.code) == (1, 1)
    assert ours.err.count("\n") == 1


def test_logs_specs_by_an_unknown_name_fails_in_both(site: Site) -> None:
    """frun knows `default` only, and says so at the start."""
    theirs, ours = refused(site, "--logs-specs=moon")
    assert theirs.code != 0
    assert ours.code == 2
    assert "moon" in ours.err


def test_events_on_the_console_have_the_same_names(site: Site) -> None:
    """Source and name of each event, and the fields that torchrun writes; but no ASSIGN_WORKER_RANKS."""
    script = site.script("x.py", "")
    seen = {}
    for name, program in BOTH.items():
        done = site.run(
            "--event-log-handler=console", "--start-method=spawn", script, program=program
        )  # fmt: skip
        assert done.code == 0
        lines = re.findall(r'\{"name".*\}', done.err)
        events = [json.loads(line) for line in lines if "ASSIGN_WORKER_RANKS" not in line]
        seen[name] = {(e["source"], e["name"], *sorted(e["metadata"])) for e in events}
    assert seen["torchrun"]
    assert {each[:2] for each in seen["torchrun"]} <= {each[:2] for each in seen["frun"]}
    assert seen["torchrun"] <= seen["frun"]
