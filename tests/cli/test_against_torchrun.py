"""torchrun's own parser beside frun's, over a table of command lines."""

import json
import subprocess
import sys

import pytest

from frun.config import LaunchConfig
from tests.cli.tools import configure

TABLE = [
    ["s.py"],
    ["s.py", "x", "", "--", "-5", "a b"],
    ["--", "s.py", "--", "--x"],
    ["--standalone", "--nproc-per-node=4", "s.py", "--nproc_per_node", "9"],
    ["--stand", "--redir", "3", "s.py", "--redirects", "9"],
    ["--nnodes=2:4", "--nproc_per_node", "8", "--rdzv_id=7", "--rdzv-backend=c10d",
     "--rdzv-endpoint=h:1", "s.py"],
    ["--nnodes", "2", "--node_rank", "1", "--master_addr", "m", "--master_port", "1234", "s.py"],
    ["--max-restarts=3", "--monitor_interval", "5", "--role", "r", "s.py"],
    ["-m", "pkg.mod", "-m"],
    ["--module", "pkg.mod", "--flag"],
    ["--no-python", "prog", "-x"],
    ["-r", "3", "-t", "0:1,1:2", "--nproc-per-node", "2", "s.py"],
    ["-r3", "-t1", "s.py"],
    ["-r=1", "s.py"],
    ["--log_dir", "/l", "--local-ranks-filter", "0,1", "s.py"],
    ["--duplicate-stdout-filters", "a,,b,c", "--duplicate_stderr_filters=x", "s.py"],
    ["--local_addr", "1.2.3.4", "--signals-to-handle", "SIGTERM,SIGUSR1", "s.py"],
    ["--shutdown_timeout", "7", "--virtual-local-rank", "s.py"],
    ["--role", "a", "--role=b", "s.py"],
    ["-mr3", "pkg.mod"],
    ["-", "x"],
]  # fmt: skip
REFUSED = [
    [],
    ["--standalone"],
    ["--no", "s.py"],
    ["--bogus", "s.py"],
    ["--role", "--nnodes", "s.py"],
    ["--role", "--", "s.py"],
    ["--role"],
    ["--max-restarts", "x", "s.py"],
    ["--start-method=thread", "s.py"],
    ["--standalone=1", "s.py"],
    ["--numa-binding=moon", "s.py"],
]
ENVIRONMENTS = [
    {"PET_NNODES": "2:3", "PET_NPROC_PER_NODE": "5", "PET_MASTER_ADDR": "m"},
    {"PET_MAX_RESTARTS": "4", "PET_ROLE": "r", "PET_LOG_DIR": "/l", "PET_MODULE": "1"},
    {"PET_SHUTDOWN_TIMEOUT": "3", "PET_TEE": "3", "PET_REDIRECTS": "0:1"},
    {"PET_DUPLICATE_STDOUT_FILTERS": "a,,b,c", "PET_LOCAL_RANKS_FILTER": "0"},
    {"PET_SIGNALS_TO_HANDLE": "SIGUSR1", "PET_VIRTUAL_LOCAL_RANK": "1"},
]

ASK = """
import contextlib, io, json, os, sys
from torch.distributed.elastic.multiprocessing.api import Std, to_map
from torch.distributed.run import config_from_args, get_args_parser

def read(tokens):
    args = get_args_parser().parse_args(tokens)
    config, cmd, cmd_args = config_from_args(args)
    logs = config.logs_specs
    return {
        "script": args.training_script, "args": args.training_script_args,
        "hosts": [config.min_nodes, config.max_nodes], "nproc": config.nproc_per_node,
        "id": args.rdzv_id, "role": config.role, "restarts": config.max_restarts,
        "interval": config.monitor_interval, "module": args.module, "program": args.no_python,
        "log_dir": args.log_dir, "shown": sorted(logs._local_ranks_filter or ()),
        "redirects": [int(v) for v in to_map(logs._redirects, config.nproc_per_node).values()],
        "tee": [int(v) for v in to_map(logs._tee, config.nproc_per_node).values()],
        "out": config.duplicate_stdout_filters or [], "err": config.duplicate_stderr_filters or [],
        "addr": args.master_addr, "port": args.master_port, "local": config.local_addr,
        "rank": args.node_rank, "signals": config.signals_to_handle,
        "grace": config.shutdown_timeout, "virtual": config.virtual_local_rank,
    }

def answer(tokens, env):
    os.environ.update(env)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            return read(tokens)
    except SystemExit as leaving:
        return leaving.code
    finally:
        for name in env:
            del os.environ[name]

asked = json.load(sys.stdin)
print(json.dumps([answer(tokens, env) for tokens, env in asked]))
"""


@pytest.fixture(scope="module")
def answers() -> dict[str, object]:
    """What torchrun makes of every command line, asked in one process."""
    asked: list[tuple[list[str], dict[str, str]]] = [(each, {}) for each in TABLE + REFUSED]
    asked += [(["s.py"], env) for env in ENVIRONMENTS]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ASK],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    said = json.loads(done.stdout.splitlines()[-1])
    return {json.dumps(each): answer for each, answer in zip(asked, said, strict=True)}


def view(config: LaunchConfig) -> dict[str, object]:
    """The same fields in the same words."""
    meeting, workers, logs = config.rendezvous, config.workers, config.logs
    return {
        "script": workers.entry,
        "args": list(workers.args),
        "hosts": [config.job.min_hosts, config.job.max_hosts],
        "nproc": workers.nproc,
        "id": config.job.job_id or "none",
        "role": workers.role,
        "restarts": config.job.max_restarts,
        "interval": config.job.monitor_interval_s,
        "module": workers.mode == "module",
        "program": workers.mode == "program",
        "log_dir": logs.log_dir,
        "shown": sorted(logs.local_ranks_filter or ()),
        "redirects": [int(bits) for bits in logs.redirects],
        "tee": [int(bits) for bits in logs.tee],
        "out": list(logs.stdout_filters),
        "err": list(logs.stderr_filters),
        "addr": meeting.master_addr or "127.0.0.1",
        "port": meeting.master_port,
        "local": meeting.local_addr,
        "rank": meeting.node_rank or 0,
        "signals": ",".join(workers.signals),
        "grace": workers.shutdown_timeout_s,
        "virtual": workers.virtual_local_rank,
    }


@pytest.mark.parametrize("tokens", TABLE, ids=" ".join)
def test_a_command_line_means_the_same(tokens: list[str], answers: dict[str, object]) -> None:
    """Every field that both have is equal."""
    assert view(configure(*tokens, whole=True)) == answers[json.dumps((tokens, {}))]


@pytest.mark.parametrize("env", ENVIRONMENTS, ids=" ".join)
def test_variables_mean_the_same(env: dict[str, str], answers: dict[str, object]) -> None:
    """The same for PET_ variables."""
    assert view(configure(env=env)) == answers[json.dumps((["s.py"], env))]


@pytest.mark.parametrize("tokens", REFUSED, ids=" ".join)
def test_what_torchrun_refuses_is_refused(tokens: list[str], answers: dict[str, object]) -> None:
    """With the same exit code, 2."""
    assert answers[json.dumps((tokens, {}))] == 2
    done = subprocess.run(
        [sys.executable, "-m", "frun", *tokens], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
