"""The same script under torchrun and under frun: what every worker finds is compared, rank by rank.

What differs on purpose is normalised here and listed in docs/torchrun.md: random ids, free ports, the
address of a machine alone, folders of logs.
"""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import FRUN, TORCHRUN, Site
from tests.e2e.test_reports_local_groups import free_port

PROBE = """
    import json, os, pathlib, signal, sys
    def links(fd):
        return os.readlink(f"/proc/self/fd/{fd}")
    found = {
        "argv": sys.argv,
        "path0": sys.path[0],
        "path": sys.path[1:],
        "name": __name__,
        "file": globals().get("__file__"),
        "spec": None if __spec__ is None else __spec__.name,
        "package": __package__,
        "main": sys.modules["__main__"].__dict__ is globals(),
        "cwd": os.getcwd(),
        "executable": sys.executable,
        "env": dict(os.environ),
        "leads": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
        "tty": sys.stdin.isatty(),
        "flags": repr(sys.flags).replace("unbuffered=0", "unbuffered=1"),
        "written at once": sys.stdout.write_through or sys.stdout.line_buffering,
        "signals": {name: str(signal.getsignal(getattr(signal, name)))
                    for name in ("SIGTERM", "SIGHUP", "SIGCHLD", "SIGUSR1", "SIGPIPE", "SIGQUIT")},
        "mask": sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))),
        "frames": sys._getframe().f_code.co_name,
    }
    folder = pathlib.Path(os.environ["PROBE"])
    (folder / (os.environ["RANK"] + ".new")).write_text(json.dumps(found))
    (folder / (os.environ["RANK"] + ".new")).rename(folder / (os.environ["RANK"] + ".json"))
"""
IGNORED = frozenset(
    {
        "PROBE",  # names the folder of the answers
        "KMP_DUPLICATE_LIB_OK",  # set by torch when torchrun imports it
        "KMP_INIT_AT_FORK",
        "TORCHINDUCTOR_CACHE_DIR",
        "TRITON_CACHE_DIR",
        "LC_CTYPE",
        "PYTHON_EXEC",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One command line for both."""

    flags: tuple[str, ...] = ()
    entry: tuple[str, ...] = ("probe.py",)
    env: dict[str, str | None] = field(default_factory=dict)
    methods: tuple[str, ...] = ("",)
    """frun is run once with each; empty: without the flag."""
    alone: bool = True
    """Nothing names an id, a port or an address: those differ."""
    workers: int = 1
    folder: str = "."
    """Where the launcher is started, below the site's."""


LONG = [
    "--x=1",
    "-5",
    "",
    "a b",
    "--",
    "--help",
    "--nnodes=9",
    "${local_rank}",
    "$local_rank",
    "$HOME",
]
VARIABLES: dict[str, str | None] = {
    "PET_NNODES": "1:1",
    "PET_NPROC_PER_NODE": "2",
    "PET_RDZV_BACKEND": "c10d",
    "PET_RDZV_ENDPOINT": "localhost:0",
    "PET_RDZV_ID": "by variable",
    "PET_RDZV_CONF": "join_timeout=60,read_timeout=50",
    "PET_MAX_RESTARTS": "4",
    "PET_MONITOR_INTERVAL": "0.05",
    "PET_ROLE": "actor",
    "PET_LOG_DIR": "logs",
    "PET_REDIRECTS": "3",
    "PET_TEE": "0",
    "PET_EVENT_LOG_HANDLER": "null",
    "PET_LOCAL_RANKS_FILTER": "0",
    "PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT",
    "PET_SHUTDOWN_TIMEOUT": "5",
    "PET_LOCAL_ADDR": "127.0.0.1",
    "PET_START_METHOD": "spawn",
    "PET_VIRTUAL_LOCAL_RANK": "1",
    "PET_STANDALONE": "0",
    "PET_DUPLICATE_STDOUT_FILTERS": "a,,b",
    "CUDA_VISIBLE_DEVICES": "4,7",
}
CASES = {
    "plain": Case(entry=("./probe.py", *LONG), methods=("", "spawn")),
    "standalone": Case(
        flags=("--standalone", "--nproc_per_node", "2", "--nnodes=1"),
        env={"OMP_NUM_THREADS": None},
        workers=2,
    ),
    "many flags": Case(
        flags=(
            "--nproc-per-node=2",
            "--nnodes=1:1",
            "--role=trainer",
            "--max_restarts=2",
            "--monitor-interval=0.2",
            "--signals_to_handle=SIGTERM,SIGUSR1",
            "--shutdown-timeout=3",
            "--rdzv_id=job 1",
            "--rdzv-backend=c10d",
            "--rdzv_endpoint=localhost:0",
            "--rdzv-conf=join_timeout=60",
            "--local-addr=127.0.0.1",
            "--log_dir=logs",
            "--redirects=0:3",
            "--tee=1:1",
            "--local_ranks_filter=0,1",
            "--duplicate-stdout-filters=a,,b",
            "--duplicate_stderr_filters=c",
            "--event-log-handler=null",
            "--logs-specs=default",
        ),
        alone=False,
        workers=2,
    ),
    "variables": Case(env=VARIABLES, alone=False, workers=2),
    "static": Case(
        flags=(
            "--nproc-per-node=2",
            "--master_addr=127.0.0.1",
            "--master-port=PORT",
            "--node-rank=0",
        ),
        alone=False,
        workers=2,
    ),
    "module": Case(flags=("-m",), entry=("pkg.probe", "-m", "x"), methods=("", "spawn")),
    "package and other folder": Case(
        entry=("../pkg/probe.py",), folder="elsew\u00e9re of mine", env={"PYTHONPATH": None}
    ),
    "run path": Case(flags=("--run-path",), entry=("pkg/probe.py", "x", "--y")),
    "program": Case(
        flags=("--no-python", "--nproc-per-node=2", "--virtual-local-rank"),
        entry=("env", "-u", "NOTHING", "PYTHON", "probe.py", "x"),
        env={"CUDA_VISIBLE_DEVICES": "4,7", "OMP_NUM_THREADS": "3"},
        workers=2,
    ),
    "no shared store, no files": Case(
        flags=("--log-dir=/dev/null",), env={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    ),
}


def normal(found: dict[str, Any], *, alone: bool, run_path: bool) -> dict[str, Any]:
    """Return what a worker found without what differs between any two launches."""
    env = {name: value for name, value in found["env"].items() if name not in IGNORED}
    error_file = env["TORCHELASTIC_ERROR_FILE"]
    env["TORCHELASTIC_ERROR_FILE"] = "/".join(Path(error_file).parts[-3:])
    if alone:
        assert env["TORCHELASTIC_RUN_ID"]
        env["TORCHELASTIC_RUN_ID"] = "<id>"
        env["MASTER_ADDR"] = "<address>"
    assert re.fullmatch(r"\d+", env["MASTER_PORT"])
    if env["MASTER_PORT"] != found["env"].get("PORT"):
        env["MASTER_PORT"] = "<port>"
    kept = {**found, "env": env}
    if run_path:
        # torchrun runs it in a child of multiprocessing, which leaves its own traces, and gives `__file__`
        # as typed; frun treats it like any script.
        names = ("leads", "signals", "flags", "written at once", "path", "path0", "spec", "main")
        for name in (*names, "file", "package"):
            kept.pop(name)
    return kept


def found_under(
    site: Site, case: Case, program: tuple[str, ...], port: int, method: str = ""
) -> list[dict[str, Any]]:
    """Run the case; return what each rank found."""
    answers = site.cwd / f"{program[-1]} {method}"
    answers.mkdir()
    folder = site.cwd / case.folder
    folder.mkdir(exist_ok=True)
    python = program[0]
    entry = [python if word == "PYTHON" else word for word in case.entry]
    flags = [flag.replace("PORT", str(port)) for flag in case.flags]
    own = (f"--start-method={method}",) if method else ()
    env = {"PORT": str(port), **case.env, "PROBE": str(answers)}
    if case.env.get("PYTHONPATH", "") is None:
        # A launcher that is not on the path of its own: only torchrun is installed here.
        env["PYTHONPATH"] = None if program == TORCHRUN else str(Path(__file__).parents[2])
    done = site.run(*own, *flags, *entry, env=env, program=program, cwd=folder)
    assert done.code == 0, done.err
    assert len(list(answers.iterdir())) == case.workers
    texts = [(answers / f"{rank}.json").read_text() for rank in range(case.workers)]
    return [
        normal(json.loads(text), alone=case.alone, run_path="--run-path" in case.flags)
        for text in texts
    ]


@pytest.mark.parametrize("label", CASES)
def test_a_worker_finds_the_same(site: Site, label: str) -> None:
    """Arguments, import path, `__main__`, environment, session, signals: equal for each rank."""
    case = CASES[label]
    site.script("probe.py", PROBE)
    site.script("pkg/probe.py", PROBE)
    site.script("pkg/__init__.py", "")
    port = free_port()
    theirs = found_under(site, case, TORCHRUN, port)
    if case.env.get("PYTHONPATH", "") is None:
        _drop_path(theirs)
    for method in case.methods:
        ours = found_under(site, case, FRUN, port, method)
        if case.env.get("PYTHONPATH", "") is None:
            _drop_path(ours)
        for rank, (their, our) in enumerate(zip(theirs, ours, strict=True)):
            assert our["env"] == their["env"], f"environment of rank {rank} {method}"
            assert our == their, f"rank {rank} {method}"


def _drop_path(found: list[dict[str, Any]]) -> None:
    for one in found:
        one.pop("path")
        one["env"].pop("PYTHONPATH", None)
