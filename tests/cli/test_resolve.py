"""Values of every flag, from flags, variables and defaults (S11, R11, R14, R18, R20)."""

import pytest

from frun.config import EntryMode, StartMethod, Std
from frun.errors import UsageError
from tests.cli.tools import FakeMachine, configure


def test_defaults() -> None:
    """What no flag at all means."""
    config = configure()
    assert (config.job.min_hosts, config.job.max_hosts, config.job.max_restarts) == (1, 1, 0)
    assert (config.job.spares, config.job.monitor_interval_s) == (None, 0.1)
    assert config.job.replace_timeout_s == config.rendezvous.join_timeout_s == 600
    assert config.job.state_dir == "/home/me/.local/state/frun"
    assert config.workers.signals == ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
    assert (config.workers.shutdown_timeout_s, config.workers.role) == (30, "default")
    assert (config.workers.mode, config.workers.start_method) == ("script", "fork")
    assert config.workers.python == "/venv/bin/python"
    assert config.logs.redirects == config.logs.tee == (Std.NONE,)
    assert (config.logs.log_dir, config.logs.local_ranks_filter) == (None, None)
    assert config.workers.agent_store
    assert config.workers.omp_num_threads is None


@pytest.mark.parametrize(
    ("tokens", "replace"),
    [
        (("--nnodes=1:2", "--rdzv-backend=c10d"), 3),
        (("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-conf=join_timeout=7"), 7),
        (("--nnodes=2", "--replace-timeout=0"), 0),
        (("--nnodes=1:2", "--replace-timeout=2.5"), 2.5),
    ],
)
def test_how_long_a_place_is_kept(tokens: tuple[str, ...], replace: float) -> None:
    """An elastic world shrinks soon; a fixed one has nothing else to wait for."""
    assert configure(*tokens).job.replace_timeout_s == replace


def test_how_long_a_survivor_may_take() -> None:
    """Half a minute, or as the flag says; never no time at all."""
    assert configure().workers.pause_timeout_s == 30
    assert configure("--pause-timeout=2.5").workers.pause_timeout_s == 2.5
    with pytest.raises(UsageError):
        configure("--pause-timeout=0")


def test_how_long_a_worker_may_be_silent() -> None:
    """Two seconds, or as the flag says; 0 is for ever. The same for one that stands still."""
    assert configure().workers.beat_timeout_s == configure().workers.hang_timeout_s == 2
    assert configure("--beat-timeout=0").workers.beat_timeout_s == 0
    assert configure("--hang-timeout=30").workers.hang_timeout_s == 30
    assert configure().workers.compare_every == 0
    assert configure("--compare-replicas=100").workers.compare_every == 100


def test_what_becomes_of_odd_gradients() -> None:
    """Nobody looks at them unless the flag says so."""
    for flags in ((), ("--check-gradients=none",)):
        assert configure(*flags).workers.check_gradients is None
    assert configure("--check-gradients=stop").workers.check_gradients == "stop"
    with pytest.raises(UsageError, match="stopp"):
        configure("--check-gradients=stopp")


def test_which_checks_look_at_devices() -> None:
    """All but files, none, or a list; what could be a slip is refused."""
    assert configure().workers.device_checks is None
    assert configure("--device-checks=all").workers.device_checks is None
    assert configure("--device-checks=none").workers.device_checks == ()
    names = configure("--device-checks=host, file:/run/facts").workers.device_checks
    assert names == ("host", "file:/run/facts")
    for text in ("host,none", "host,", "file:"):
        with pytest.raises(UsageError, match="--device-checks"):
            configure(f"--device-checks={text}")


VALUES = [
    ("nnodes", "2:4", lambda c: (c.job.min_hosts, c.job.max_hosts), (2, 4)),
    ("nproc_per_node", "7", lambda c: c.workers.nproc, 7),
    ("nproc_per_node", "gpu", lambda c: c.workers.nproc, 6),
    ("max_restarts", "3", lambda c: c.job.max_restarts, 3),
    ("monitor_interval", "2", lambda c: c.job.monitor_interval_s, 2),
    ("event_log_handler", "console", lambda c: c.job.event_log_handler, "console"),
    ("role", "trainer", lambda c: c.workers.role, "trainer"),
    ("start_method", "spawn", lambda c: c.workers.start_method, "spawn"),
    ("start_method", "forkserver", lambda c: c.workers.start_method, "fork"),
    ("log_dir", "/x", lambda c: c.logs.log_dir, "/x"),
    ("redirects", "3", lambda c: c.logs.redirects, (Std.ALL,)),
    ("tee", "0:1", lambda c: c.logs.tee, (Std.OUT,)),
    ("local_ranks_filter", "0,2", lambda c: c.logs.local_ranks_filter, frozenset({0, 2})),
    ("duplicate_stdout_filters", "a,,b,c", lambda c: c.logs.stdout_filters, ("a,b", "c")),
    ("duplicate_stderr_filters", " e", lambda c: c.logs.stderr_filters, (" e",)),
    ("node_rank", "4", lambda c: c.rendezvous.node_rank, 4),
    ("master_addr", "[::1]", lambda c: c.rendezvous.master_addr, "::1"),
    ("master_port", "5", lambda c: c.rendezvous.master_port, 5),
    ("local_addr", "::1", lambda c: c.rendezvous.local_addr, "::1"),
    ("signals_to_handle", "SIGTERM, SIGUSR1", lambda c: c.workers.signals, ("SIGTERM", "SIGUSR1")),
    ("shutdown_timeout", "0", lambda c: c.workers.shutdown_timeout_s, 0),
    ("spares", "1", lambda c: c.job.spares, 1),
    ("preload", "a.b,c", lambda c: c.workers.preload, ("a.b", "c")),
    ("state_dir", "/s", lambda c: c.job.state_dir, "/s"),
    ("metrics_port", "9100", lambda c: c.job.metrics_port, 9100),
    ("virtual_local_rank", "1", lambda c: c.workers.virtual_local_rank, True),
    ("module", "yes", lambda c: c.workers.mode, EntryMode.MODULE),
    ("no_python", "TRUE", lambda c: c.workers.mode, EntryMode.PROGRAM),
    ("run_path", "1", lambda c: c.workers.mode, EntryMode.RUN_PATH),
    ("run_path", "0", lambda c: c.workers.mode, EntryMode.SCRIPT),
]
OWN = ("spares", "preload", "state_dir", "metrics_port")
EXTRA = {"node_rank": ("--rdzv-backend=c10d", "--nnodes=5")}


@pytest.mark.parametrize(("name", "text", "read", "value"), VALUES)
def test_a_flag_and_its_variable_mean_the_same(name, text, read, value) -> None:  # type: ignore[no-untyped-def]
    """Each value by variable and, switches apart, by flag; the flag wins."""
    variable = ("FRUN_" if name in OWN else "PET_") + name.upper()
    extra = EXTRA.get(name, ("--nnodes=5",) if name != "nnodes" else ())
    extra = (*extra, "--job-id=j")
    assert read(configure(*extra, env={variable: text})) == value
    if text not in ("1", "0", "yes", "TRUE") or name == "spares":
        assert read(configure(*extra, f"--{name}", text)) == value
        assert read(configure(*extra, f"--{name}", text, env={variable: "nonsense"})) == value


@pytest.mark.parametrize(
    ("env", "parts"),
    [
        ({"PET_START_METHOD": "nonsense"}, ["PET_START_METHOD", "nonsense", "forkserver"]),
        ({"PET_STANDALONE": "maybe"}, ["PET_STANDALONE", "maybe", "true"]),
        ({"PET_NNODES": "1:2:3"}, ["PET_NNODES", "1:2:3", "MIN:MAX"]),
        ({"PET_NNODES": "0"}, ["PET_NNODES", "'0'"]),
        ({"PET_MAX_RESTARTS": "3.5"}, ["PET_MAX_RESTARTS", "3.5"]),
        ({"PET_NPROC_PER_NODE": "0"}, ["PET_NPROC_PER_NODE", "'0'"]),
        ({"PET_NPROC_PER_NODE": "-3"}, ["PET_NPROC_PER_NODE"]),
        ({"PET_NPROC_PER_NODE": "zpu"}, ["PET_NPROC_PER_NODE", "zpu"]),
        ({"PET_MONITOR_INTERVAL": "0"}, ["PET_MONITOR_INTERVAL"]),
        ({"PET_MONITOR_INTERVAL": "nan"}, ["PET_MONITOR_INTERVAL"]),
        ({"PET_EVENT_LOG_HANDLER": "consol"}, ["PET_EVENT_LOG_HANDLER", "'console'"]),
        ({"PET_REDIRECTS": "4"}, ["PET_REDIRECTS", "'4'"]),
        ({"PET_TEE": "a:1"}, ["PET_TEE", "a:1"]),
        ({"PET_LOCAL_RANKS_FILTER": "0,x"}, ["PET_LOCAL_RANKS_FILTER"]),
        (
            {"PET_SIGNALS_TO_HANDLE": "SIGUSR"},
            ["PET_SIGNALS_TO_HANDLE", "'SIGUSR'", "did you mean"],
        ),
        ({"PET_SIGNALS_TO_HANDLE": "SIGKILL"}, ["SIGKILL"]),
        ({"PET_SHUTDOWN_TIMEOUT": "-1"}, ["PET_SHUTDOWN_TIMEOUT"]),
        ({"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "x"}, ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]),
        ({"PET_MASTER_PORT": "70000"}, ["PET_MASTER_PORT", "65535"]),
        ({"PET_LOCAL_ADDR": "a b"}, ["PET_LOCAL_ADDR", "a b"]),
        ({"PET_MODULE": "1", "PET_NO_PYTHON": "1"}, ["--module", "--no-python"]),
        ({"FRUN_SPARES": "-1"}, ["FRUN_SPARES"]),
        ({"FRUN_PRELOAD": "a,b-c"}, ["FRUN_PRELOAD", "b-c"]),
        ({"FRUN_ETCD_PASSWORD_FILE": "/no"}, ["FRUN_ETCD_PASSWORD_FILE", "/no"]),
        (
            {"PET_VIRTUAL_LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "4", "PET_NPROC_PER_NODE": "2"},
            ["--virtual-local-rank", "'4'", "2"],
        ),
    ],
)
def test_a_bad_variable_is_named(env: dict[str, str], parts: list[str]) -> None:
    """S11: variables go through the same checks as flags, and the refusal says which one it was."""
    with pytest.raises(UsageError) as caught:
        configure(env=env)
    for part in parts:
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["nnodes", "nproc-per-node", "max-restarts", "role", "rdzv-id"])
def test_an_empty_flag_is_refused_where_it_means_nothing(name: str) -> None:
    """`--max-restarts ""` is an unset shell variable, not a wish."""
    with pytest.raises(UsageError, match=f"--{name}.*empty"):
        configure(f"--{name}=")


def test_an_empty_flag_is_not_given_where_torchrun_says_so() -> None:
    """Folders, filters, endpoint and settings may be empty texts."""
    names = ("log-dir", "rdzv-endpoint", "rdzv-conf", "local-ranks-filter", "local-addr")
    found, plain = configure(*(f"--{name}=" for name in names)), configure()
    assert (found.job, found.logs, found.rendezvous) == (plain.job, plain.logs, plain.rendezvous)


def test_an_explicit_number_is_never_replaced() -> None:
    """R11: devices are not even counted."""
    config = configure("--nproc-per-node=1", env={"CUDA_VISIBLE_DEVICES": "0,1"})
    assert config.workers.nproc == 1


@pytest.mark.parametrize(
    ("nproc", "env", "added"),
    [
        ("2", {}, "1"),
        ("2", {"OMP_NUM_THREADS": "3"}, None),
        ("2", {"OMP_NUM_THREADS": ""}, None),
        ("1", {}, None),
    ],
)
def test_threads(nproc: str, env: dict[str, str], added: str | None) -> None:
    """R14: one thread and one warning for several workers, else nothing."""
    config = configure("--nproc-per-node", nproc, env=env)
    assert config.workers.omp_num_threads == added
    warnings = [note for note in config.notes if note.warning]
    assert len(warnings) == (0 if added is None else 1)


@pytest.mark.parametrize(
    ("tokens", "env", "mode", "method"),
    [
        ((), {}, "script", "fork"),
        (("-m",), {}, "module", "fork"),
        (("--start-method=fork",), {}, "script", "fork"),
        (("--start-method=spawn",), {}, "script", "spawn"),
        (("--no-python",), {}, "program", "spawn"),
        (("--no-python", "--start-method=fork"), {}, "program", "spawn"),
        (("--run-path",), {}, "run_path", "fork"),
        (("--run-path", "--no-python", "-m", "--start-method=spawn"), {}, "run_path", "fork"),
        ((), {"PYTHON_EXEC": "/other/python"}, "script", "spawn"),
        ((), {"PYTHON_EXEC": "/venv/bin/python"}, "script", "fork"),
    ],
)
def test_entry_and_start_method_agree(
    tokens: tuple[str, ...], env: dict[str, str], mode: str, method: str
) -> None:
    """Only a Python file or module of our own interpreter can be forked from the zygote."""
    workers = configure(*tokens, env=env).workers
    assert (workers.mode, workers.start_method) == (EntryMode(mode), StartMethod(method))
    assert workers.python == env.get("PYTHON_EXEC", FakeMachine().python)


def test_what_has_no_flag() -> None:
    """Variables of torchrun that no flag stands for."""
    config = configure(
        env={
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5",
            "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[${rank}]",
            "TORCHELASTIC_ERROR_FILE": "/e.json",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "XDG_STATE_HOME": "/xdg",
        }
    )
    assert config.workers.shutdown_timeout_s == 5
    assert (config.logs.prefix_template, config.logs.error_file) == ("[${rank}]", "/e.json")
    assert not config.workers.agent_store
    assert config.job.state_dir == "/xdg/frun"


def test_stream_maps() -> None:
    """Two-digit local ranks are ranks; ranks that this host has not are for other hosts."""
    config = configure("--nproc-per-node=12", "-r", "10:3,1:2,99:1", "-t", "1")
    assert config.logs.redirects[10] == Std.ALL
    assert config.logs.redirects[1] == Std.ERR
    assert sum(map(int, config.logs.redirects)) == 5
    assert config.logs.tee == (Std.OUT,) * 12


def test_bound_workers_are_executed() -> None:
    """numactl starts a program: a bound worker is never forked, whatever it is."""
    config = configure("--numa-binding=core-complex", "--start-method=fork", "--run-path")
    assert config.workers.numa_binding == "core-complex"
    assert config.workers.start_method is StartMethod.SPAWN
    assert any("numactl" in note.text for note in config.notes)


def test_no_class_for_logs_but_the_default() -> None:
    """A class of somebody else would bring torch into the agent: refused before anything starts."""
    configure("--logs-specs=default")
    with pytest.raises(UsageError, match="--logs-specs: 'x' is not default"):
        configure("--logs-specs=x")
