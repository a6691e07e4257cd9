"""Owns what one `frun run` was asked to do: one frozen tree, complete and already checked.

Nothing here reads flags, variables or files (`resolve` does) and nothing has a default that
another place could contradict: every field is always set.
"""

from dataclasses import dataclass
from enum import IntFlag, StrEnum

from frun.endpoints import Endpoint


class Backend(StrEnum):
    """Where the hosts of a job meet. Already decided; nothing is left to guess."""

    ETCD = "etcd"
    """An etcd cluster that runs anyway, at `endpoints`."""
    STANDALONE = "standalone"
    """This host alone: frun starts a private etcd on loopback."""
    C10D = "c10d"
    """torchrun's flags: the host named by the one endpoint starts the etcd there."""
    STATIC = "static"
    """As C10D, at master_addr:master_port, and `node_rank` 0 may host it."""


class EntryMode(StrEnum):
    """What the first positional argument is."""

    SCRIPT = "script"
    """A Python file, run as `python FILE`."""
    MODULE = "module"
    """`-m`: a module, run as `python -m NAME`."""
    PROGRAM = "program"
    """`--no-python`: a program that is executed itself."""
    RUN_PATH = "run_path"
    """`--run-path`: a Python file given to `runpy.run_path` in a forked child."""


class StartMethod(StrEnum):
    """How a worker process comes to life."""

    FORK = "fork"
    """Forked from the zygote, which has imported torch once."""
    SPAWN = "spawn"
    """A fresh program: nothing of frun is inside."""


class Std(IntFlag):
    """Which streams of a worker; torchrun's numbers."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """One line about how a value was understood."""

    text: str
    warning: bool = False
    """Shown without LOGLEVEL=INFO."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobConfig:
    """The job as a whole: who takes part, how often it may fail."""

    job_id: str | None
    """Shared by all hosts of the job; any text but empty. None: the launcher makes a random one."""
    min_hosts: int
    """The world is never smaller than this many hosts; at least 1."""
    max_hosts: int
    """Nor larger; further hosts wait as spares. At least `min_hosts`."""
    max_restarts: int
    """Failures of workers that the whole job may pay for with a restart of all; 0 or more."""
    spares: int | None
    """Hosts that may wait beyond `max_hosts`; None: any number."""
    max_recoveries: int | None
    """Generations in which processes of resumable scripts may go on; None: any number."""
    replace_timeout_s: float
    """Seconds a lost host's place is kept vacant before the world may shrink or the job ends."""
    monitor_interval_s: float
    """Seconds; torchrun's poll period. frun sees exits as events, so it only bounds reporting."""
    state_dir: str
    """Folder of this machine's registry of live jobs."""
    allow_drills: bool
    """Whether faults may be injected on purpose."""
    metrics_port: int | None
    """TCP port at which this agent serves metrics to Prometheus; None: it does not."""
    event_log_handler: str
    """torchrun's name of the event handler: `null`, `console` or `dynamic_rendezvous`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RendezvousConfig:
    """How the hosts find each other."""

    backend: Backend
    endpoints: tuple[Endpoint, ...]
    """ETCD: one or more. C10D, STATIC: exactly one. STANDALONE: none."""
    tls_ca: str | None
    """Path of the certificate authority for etcd; None: the system's, or no TLS at all."""
    tls_cert: str | None
    """Path of this client's certificate; set exactly when `tls_key` is."""
    tls_key: str | None
    """Path of this client's private key."""
    user: str | None
    """etcd user; set exactly when `password` is."""
    password: str | None
    """etcd password; from the environment or a file, never from the command line."""
    join_timeout_s: float
    """Seconds to wait for `min_hosts`; the job ends when they pass."""
    last_call_timeout_s: float
    """Seconds to wait for more hosts once `min_hosts` are here."""
    close_timeout_s: float
    """Seconds that closing at the end may take."""
    lease_ttl_s: int
    """Seconds of silence after which a host is lost. etcd counts leases in whole seconds."""
    request_timeout_s: float
    """Seconds one etcd request may take before it is tried again."""
    read_timeout_s: float
    """Seconds a blocking wait on a store may take (torchrun's `read_timeout`)."""
    is_host: bool | None
    """C10D, STATIC: this host does or does not start the etcd; None: find out."""
    node_rank: int | None
    """Place in the order of hosts that the user asked for; None: not given."""
    master_addr: str | None
    """STATIC: as typed, without brackets. None: not given, or no use for it."""
    master_port: int | None
    """STATIC: as typed. None: any free port will do."""
    local_addr: str | None
    """Address or name this host publishes for itself, without brackets; None: find out."""

    @property
    def tls(self) -> bool:
        """True when etcd is spoken to over TLS."""
        files = self.tls_ca is not None or self.tls_cert is not None
        return files or any(endpoint.tls for endpoint in self.endpoints)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """The worker processes of this host."""

    nproc: int
    """Workers on this host; at least 1."""
    mode: EntryMode
    entry: str
    """Script, module or program as typed."""
    args: tuple[str, ...]
    """Its arguments as typed; the local rank is put in by `environment.worker_args`."""
    python: str
    """Interpreter of the workers, unresolved so that a virtual environment stays itself."""
    start_method: StartMethod
    """Already agrees with the rest: PROGRAM, a foreign interpreter and numa_binding are SPAWN."""
    preload: tuple[str, ...]
    """Modules that the zygote imports besides torch."""
    role: str
    """torchrun's role name; in ROLE_NAME and in front of log lines."""
    signals: tuple[str, ...]
    """Names of the signals that the agent passes on to workers before it stops."""
    shutdown_timeout_s: float
    """Seconds between the soft signal and SIGKILL, in every stop."""
    pause_timeout_s: float
    """Seconds a survivor has to leave its step and its groups; then it is killed and replaced."""
    beat_timeout_s: float
    """Seconds a worker may be silent and do nothing; then it is killed and replaced. 0: for ever."""
    hang_timeout_s: float
    """Least seconds after which a rank that stands still while others wait for it is replaced. 0: never."""
    compare_every: int
    """Steps between two comparisons of what replicas hold; 0: there are none."""
    check_gradients: str | None
    """What becomes of an odd norm of the gradients: `report` or `stop`; None: nobody looks."""
    device_checks: tuple[str, ...] | None
    """Names of the checks of this host's devices, and `file:PATH`; None: all that there are."""
    fault_patterns: str | None
    """Path of a user's table of lines that are evidence of a class of fault; None: frun's own alone."""
    virtual_local_rank: bool
    """LOCAL_RANK is 0 everywhere and CUDA_VISIBLE_DEVICES names one device."""
    numa_binding: str | None
    """`node`, `socket`, `exclusive`, `core-complex`; None: workers are not bound."""
    omp_num_threads: str | None
    """OMP_NUM_THREADS given to workers when the environment has none; None: nothing is added."""
    file_timer: bool
    """TORCHELASTIC_ENABLE_FILE_TIMER=1: workers may set themselves limits through a named pipe."""
    timer_file: str | None
    """Path of that pipe as typed; None: one is made up."""
    kernel_limit_s: float | None
    """Seconds a worker may be in the kernel without a break (state D); None: for ever."""
    agent_store: bool
    """TORCHELASTIC_USE_AGENT_STORE; False with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """Where the workers' output goes."""

    log_dir: str | None
    """Base folder as typed; None: a fresh one. The null device: no files at all."""
    redirects: tuple[Std, ...]
    """Per local rank: streams that go to a file instead of the console."""
    tee: tuple[Std, ...]
    """Per local rank: streams that go to a file and to the console."""
    local_ranks_filter: frozenset[int] | None
    """Local ranks that may write to the console; None: all. Files are not affected."""
    stdout_filters: tuple[str, ...]
    """Tee'd stdout lines with any of these go to filtered_stdout.log as well."""
    stderr_filters: tuple[str, ...]
    """The same for stderr."""
    prefix_template: str | None
    """Template of the prefix of tee'd lines (`${role_name}`, `${rank}`, `${local_rank}`)."""
    error_file: str | None
    """TORCHELASTIC_ERROR_FILE of the agent itself: the root cause is copied there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchConfig:
    """Everything `frun run` was asked for."""

    job: JobConfig
    rendezvous: RendezvousConfig
    workers: WorkerConfig
    logs: LogConfig
    notes: tuple[Note, ...] = ()
    """What was chosen where the user may have expected something else; logged once, at the start."""
