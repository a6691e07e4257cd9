"""Owns turning what was given (flags > environment > file > default) into one checked tree.

It reads nothing itself: the environment is a mapping, and this machine answers through `Machine`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from frun import values
from frun.cli_options import BY_NAME
from frun.config import (
    Backend,
    EntryMode,
    JobConfig,
    LaunchConfig,
    LogConfig,
    Note,
    RendezvousConfig,
    StartMethod,
    Std,
    WorkerConfig,
)
from frun.errors import UsageError
from frun.resolve_rendezvous import resolve_rendezvous
from frun.values import Given

SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
SHUTDOWN_TIMEOUT_S = 30.0
PAUSE_TIMEOUT_S = 30.0
PAUSE_AFTER_STOP_S = 15.0
"""A survivor is replaced well before its host is given up, 20 s after a stop must have ended."""
BEAT_TIMEOUT_S = 2.0
HANG_TIMEOUT_S = 2.0
SHRINK_AFTER_S = 3.0
MAY_BE_EMPTY = frozenset(
    {
        "rdzv_endpoint",
        "rdzv_conf",
        "local_addr",
        "log_dir",
        "local_ranks_filter",
        "duplicate_stdout_filters",
        "duplicate_stderr_filters",
        "preload",
        "etcd_ca",
        "etcd_cert",
        "etcd_key",
        "etcd_password_file",
    }
)
"""An empty text is `not given` here, as scripts write `--log-dir "$DIR"`; torchrun allows it too."""
EVENT_HANDLERS = ("null", "console", "dynamic_rendezvous")
NUMA_BINDINGS = ("node", "socket", "exclusive", "core-complex")


class Machine(Protocol):
    """What resolving may ask of this machine."""

    @property
    def python(self) -> str:
        """Path of the running interpreter, links not followed."""
        ...

    @property
    def home(self) -> str:
        """Home folder of the user."""
        ...

    def count(self, kind: Given, python: str) -> int:
        """Return the number of workers that `auto`, `cpu`, `gpu` or another kind means here.

        Raises:
            UsageError: this machine has none, or the kind is unknown.
        """
        ...

    def read_password(self, path: Given) -> str:
        """Return the first line of a password file.

        Raises:
            UsageError: it can not be read, or is empty.
        """
        ...


@dataclass(frozen=True, slots=True)
class Sources:
    """What was given, by layer; the first layer that has a value wins."""

    flags: Mapping[str, Sequence[str]]
    """Per option name, the texts in the order typed; a switch is `1`."""
    env: Mapping[str, str]
    file: Mapping[str, Given]

    def layers(self, name: str) -> Iterator[Given]:
        """Yield everything that was given for an option, the strongest last."""
        option = BY_NAME[name]
        if name in self.file:
            yield self.file[name]
        if option.env and self.env.get(option.env):
            yield Given(text=self.env[option.env], source=option.env)
        for text in self.flags.get(name, ()):
            yield Given(text=text, source=option.flag)

    def get(self, name: str) -> Given | None:
        """Return the value that counts; None when there is none.

        Raises:
            UsageError: it is empty, and empty means nothing for this option.
        """
        given = tuple(self.layers(name))
        if not given:
            return None
        if given[-1].text:
            return given[-1]
        if name in MAY_BE_EMPTY:
            return None
        raise given[-1].refuse("is empty, give a value or leave it out")

    def variable(self, name: str) -> Given | None:
        """Return a variable that is no flag's own; an empty one is not set."""
        text = self.env.get(name)
        return Given(text=text, source=name) if text else None

    def on(self, name: str) -> bool:
        """Return whether a switch is on."""
        found = self.get(name)
        return found is not None and values.switch(found)

    def text(self, name: str, default: str) -> str:
        """Return a text or its default."""
        found = self.get(name)
        return default if found is None else found.text


def resolve(
    flags: Mapping[str, Sequence[str]],
    env: Mapping[str, str],
    file: Mapping[str, Given],
    *,
    entry: str,
    args: Sequence[str],
    machine: Machine,
) -> LaunchConfig:
    """Return the whole configuration of one `frun run`.

    Raises:
        UsageError: a value is wrong, unknown, or does not fit another one; the text names it.
    """
    sources = Sources(flags, env, file)
    nnodes = sources.get("nnodes")
    hosts = (1, 1) if nnodes is None else values.host_range(nnodes)
    user, password = _credentials(sources, machine)
    rendezvous, notes = resolve_rendezvous(
        sources.get,
        max_hosts=hosts[1],
        conf=tuple(sources.layers("rdzv_conf")),
        user=user,
        password=password,
    )
    workers = _workers(sources, entry, tuple(args), machine)
    return LaunchConfig(
        job=_job(sources, hosts, rendezvous, machine),
        rendezvous=rendezvous,
        workers=workers,
        logs=_logs(sources, workers.nproc),
        notes=(*notes, *_worker_notes(sources, workers)),
    )


def _credentials(sources: Sources, machine: Machine) -> tuple[str | None, str | None]:
    path = sources.get("etcd_password_file")
    user = sources.variable("FRUN_ETCD_USER")
    secret = sources.variable("FRUN_ETCD_PASSWORD")
    password = machine.read_password(path) if path else secret.text if secret else None
    if (user is None) != (password is None):
        have, lack = (
            ("a user (FRUN_ETCD_USER)", "FRUN_ETCD_PASSWORD or --etcd-password-file")
            if user
            else ("a password", "FRUN_ETCD_USER")
        )
        raise UsageError(f"etcd: {have} is given without the other half, set {lack}")
    return (user.text if user else None), password


def _job(
    sources: Sources, hosts: tuple[int, int], rendezvous: RendezvousConfig, machine: Machine
) -> JobConfig:
    low, high = hosts
    restarts, spares = sources.get("max_restarts"), sources.get("spares")
    recoveries = sources.get("max_recoveries")
    replace, interval = sources.get("replace_timeout"), sources.get("monitor_interval")
    handler, metrics = sources.get("event_log_handler"), sources.get("metrics_port")
    waits_s = SHRINK_AFTER_S if low < high else rendezvous.join_timeout_s
    state = sources.variable("XDG_STATE_HOME")
    state_home = state.text if state else f"{machine.home}/.local/state"
    return JobConfig(
        job_id=_job_id(sources, rendezvous.backend, high),
        min_hosts=low,
        max_hosts=high,
        max_restarts=0 if restarts is None else values.integer(restarts, low=0),
        spares=None if spares is None else values.integer(spares, low=0),
        max_recoveries=None if recoveries is None else values.integer(recoveries, low=0),
        replace_timeout_s=waits_s if replace is None else values.seconds(replace, zero=True),
        monitor_interval_s=0.1 if interval is None else values.seconds(interval, zero=False),
        state_dir=sources.text("state_dir", f"{state_home}/frun"),
        allow_drills=sources.on("allow_drills"),
        metrics_port=None if metrics is None else values.integer(metrics, low=1, high=65535),
        event_log_handler="null" if handler is None else values.choice(handler, EVENT_HANDLERS),
    )


def _job_id(sources: Sources, backend: Backend, max_hosts: int) -> str | None:
    given = sources.get("rdzv_id")
    if given is not None:
        return given.text
    if backend is Backend.ETCD and max_hosts > 1:
        raise UsageError(
            "a job of several hosts on etcd needs an id that all its hosts share: add --job-id NAME"
        )
    return "none" if backend in (Backend.C10D, Backend.STATIC) else None


def _workers(sources: Sources, entry: str, args: tuple[str, ...], machine: Machine) -> WorkerConfig:
    mode = _mode(sources)
    python = sources.variable("PYTHON_EXEC")
    interpreter = python.text if python else machine.python
    nproc = _nproc(sources, machine, interpreter)
    signals, stop = sources.get("signals_to_handle"), sources.get("shutdown_timeout")
    preload, numa = sources.get("preload"), sources.get("numa_binding")
    pause, beat = sources.get("pause_timeout"), sources.get("beat_timeout")
    hang, compare = sources.get("hang_timeout"), sources.get("compare_replicas")
    if stop is None:
        stop = sources.variable("TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
    stop_s = float(values.integer(stop, low=0)) if stop else SHUTDOWN_TIMEOUT_S
    pause_s = min(PAUSE_TIMEOUT_S, stop_s + PAUSE_AFTER_STOP_S)
    virtual = sources.on("virtual_local_rank")
    devices = sources.env.get("CUDA_VISIBLE_DEVICES")
    if virtual and devices is not None and len(devices.split(",")) < nproc:
        raise UsageError(
            f"--virtual-local-rank: CUDA_VISIBLE_DEVICES={devices!r} has fewer devices than "
            f"the {nproc} workers of --nproc-per-node"
        )
    return WorkerConfig(
        nproc=nproc,
        mode=mode,
        entry=entry,
        args=args,
        python=interpreter,
        start_method=_start_method(sources, mode, interpreter, machine.python, bound=bool(numa)),
        preload=values.modules(preload) if preload else (),
        role=sources.text("role", "default"),
        signals=values.signal_names(signals) if signals else SIGNALS,
        shutdown_timeout_s=stop_s,
        pause_timeout_s=pause_s if pause is None else values.seconds(pause, zero=False),
        beat_timeout_s=BEAT_TIMEOUT_S if beat is None else values.seconds(beat, zero=True),
        hang_timeout_s=HANG_TIMEOUT_S if hang is None else values.seconds(hang, zero=True),
        compare_every=0 if compare is None else values.integer(compare, low=0),
        check_gradients=_check_gradients(sources),
        device_checks=_device_checks(sources),
        fault_patterns=sources.text("fault_patterns", "") or None,
        virtual_local_rank=virtual,
        numa_binding=values.choice(numa, NUMA_BINDINGS) if numa else None,
        omp_num_threads="1" if nproc > 1 and "OMP_NUM_THREADS" not in sources.env else None,
        file_timer=sources.env.get("TORCHELASTIC_ENABLE_FILE_TIMER") == "1",
        timer_file=sources.env.get("TORCHELASTIC_TIMER_FILE") or None,
        kernel_limit_s=_kernel_limit(sources),
        agent_store=sources.env.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") != "1",
    )


def _check_gradients(sources: Sources) -> str | None:
    given = sources.get("check_gradients")
    found = None if given is None else values.choice(given, ("none", "report", "stop"))
    return None if found == "none" else found


def _device_checks(sources: Sources) -> tuple[str, ...] | None:
    given = sources.get("device_checks")
    if given is None or given.text.strip() == "all":
        return None
    names = tuple(name.strip() for name in given.text.split(","))
    if names == ("none",):
        return ()
    if "" in names or {"none", "all", "file:"}.intersection(names):
        raise given.refuse("must be all, none, or names of checks with commas between them")
    return names


def _kernel_limit(sources: Sources) -> float | None:
    given = sources.variable("TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT")
    if given is None or given.text.strip().startswith("-"):
        return None
    return values.seconds(given, zero=True) or None


def _mode(sources: Sources) -> EntryMode:
    module, program = sources.on("module"), sources.on("no_python")
    if sources.on("run_path"):
        return EntryMode.RUN_PATH
    if module and program:
        raise UsageError("--module and --no-python exclude each other: a module needs Python")
    if program:
        return EntryMode.PROGRAM
    return EntryMode.MODULE if module else EntryMode.SCRIPT


def _start_method(
    sources: Sources, mode: EntryMode, python: str, own_python: str, *, bound: bool
) -> StartMethod:
    given = sources.get("start_method")
    method = values.choice(given, ("spawn", "fork", "forkserver")) if given else "fork"
    if bound:
        return StartMethod.SPAWN
    if mode is EntryMode.RUN_PATH:
        return StartMethod.FORK
    if mode is EntryMode.PROGRAM or python != own_python or method == "spawn":
        return StartMethod.SPAWN
    return StartMethod.FORK


def _nproc(sources: Sources, machine: Machine, python: str) -> int:
    given = sources.get("nproc_per_node")
    if given is None:
        return 1
    text = given.text.strip()
    if not text[:1].isalpha():
        return values.integer(given, low=1)
    return machine.count(given, python)


def _logs(sources: Sources, nproc: int) -> LogConfig:
    redirects, tee = sources.get("redirects"), sources.get("tee")
    shown = sources.get("local_ranks_filter")
    out, err = sources.get("duplicate_stdout_filters"), sources.get("duplicate_stderr_filters")
    specs, prefix = sources.get("logs_specs"), "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
    if specs is not None and specs.text != "default":
        raise specs.refuse(
            "is not default: a class of that name would bring torch into the agent, leave it out"
        )
    nothing = (Std.NONE,) * nproc
    return LogConfig(
        log_dir=sources.text("log_dir", "") or None,
        redirects=values.streams(redirects, nproc) if redirects else nothing,
        tee=values.streams(tee, nproc) if tee else nothing,
        local_ranks_filter=values.local_ranks(shown) if shown else None,
        stdout_filters=values.filter_list(out) if out else (),
        stderr_filters=values.filter_list(err) if err else (),
        prefix_template=sources.env.get(prefix) or None,
        error_file=sources.env.get("TORCHELASTIC_ERROR_FILE") or None,
    )


def _worker_notes(sources: Sources, workers: WorkerConfig) -> Iterator[Note]:
    yield Note(text=f"workers run with {workers.python}")
    if workers.omp_num_threads is not None:
        yield Note(
            text=f"OMP_NUM_THREADS is not set: each of the {workers.nproc} workers gets "
            f"{workers.omp_num_threads}, set it to tune your application",
            warning=True,
        )
    method = sources.get("start_method")
    if workers.numa_binding is not None:
        yield Note(text="the workers are executed by numactl, not forked: --numa-binding is given")
    elif method and method.text != "spawn" and workers.start_method is StartMethod.SPAWN:
        yield Note(
            text=f"{method.source}: {method.text!r} has no effect, "
            "the workers are another program than the zygote"
        )
    if workers.mode is EntryMode.RUN_PATH:
        for name in ("module", "no_python"):
            if sources.on(name):
                yield Note(text=f"{BY_NAME[name].flag} has no effect: --run-path is given")
