"""Serves this agent's state and history to Prometheus, from its events.

One HTTP server in a thread of its own: whoever reads slowly, or never, holds nothing of the job up. What is
counted by the leader alone (incidents and their phases) is zero on the other agents, so sums over all agents
of a job are right.
"""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, start_http_server

from frun.errors import LaunchError
from frun.events import (
    Event,
    FirstStepCompleted,
    GenerationStarted,
    HealthChanged,
    IncidentClosed,
    LeaderElected,
    LeaseLost,
    PhaseSeen,
    StepsCompleted,
    StoreBack,
    StoreLost,
    TableDecided,
    WorkerExited,
    WorkerRestored,
    WorkerStarted,
)

PHASES = ("gather", "recover", "run", "done", "failed")
RECOVERY = ("detect", "pause", "respawn", "rebuild", "agree", "copy", "first_step", "total")
_BOUNDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)


class Metrics:
    """An event sink whose figures Prometheus reads."""

    def __init__(self, *, job: str, host: str, version: str, entry: str) -> None:
        """Everything starts at zero; nobody is served before `serve`."""
        self.registry = CollectorRegistry()
        self._stop: Callable[[], None] = lambda: None
        self._running: set[int] = set()
        self._told = False
        """Workers tell of their first steps."""

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"frun_{name}", text, labels, registry=self.registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"frun_{name}", text, labels, registry=self.registry)

        Info("frun", "The job and this agent.", registry=self.registry).info(
            {"job_id": job, "host": host, "version": version, "entry": entry}
        )
        self._generation = gauge("generation", "Number of the formed world.")
        self._phase = gauge(
            "phase", "1 for the phase of the rank table as this host sees it.", "phase"
        )
        for phase in PHASES:
            self._phase.labels(phase).set(0)
        self._world = gauge("world_size", "Ranks in the table.")
        self._training = gauge(
            "training",
            "1 while this host's workers train: since their first step of the generation, or since they"
            " started where no step is told. Its average over a time is the effective training time.",
        )
        self._step = gauge("step", "Completed steps, as the first worker of this host told last.")
        self._leader = gauge("leader", "1 since this host became leader.")
        self._restarts = gauge("restarts", "Restarts of all workers so far (leader).")
        self._workers = gauge("workers", "Worker processes that run here.")
        self._store = gauge("store_reachable", "1 while etcd answers.")
        self._store.set(1)
        self._health = gauge(
            "health_findings", "Things that are wrong with this host or its devices.", "severity"
        )
        for severity in ("warning", "fault"):
            self._health.labels(severity).set(0)
        self._exits = counter("worker_exits", "Ends of workers here.", "state")
        for state in ("succeeded", "failed", "stopped"):
            self._exits.labels(state)
        self._outages = counter("store_outages", "Times that etcd stopped answering.")
        self._leases = counter(
            "leases_lost", "Times that this host's lease ended although it lives."
        )
        self._incidents = counter(
            "incidents", "Faults that were recovered from (leader).", "kind", "action"
        )
        self._lost = counter("steps_lost", "Completed steps that had to be done again (leader).")
        self._copied = counter("copied_bytes", "State that newcomers received (leader).")
        self._recovery = Histogram(
            "frun_recovery_seconds",
            "Time of each phase of each recovery (leader).",
            ("phase",),
            buckets=_BOUNDS,
            registry=self.registry,
        )

    def serve(self, port: int, address: str = "0.0.0.0") -> int:
        """Answer Prometheus at this port (0: any free one); return it. Raises LaunchError."""
        try:
            server, thread = start_http_server(port, address, registry=self.registry)
        except OSError as error:
            raise LaunchError(
                f"--metrics-port {port} can not be served ({error.strerror}): each agent of a machine"
                " needs one of its own"
            ) from error

        def stop() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        self._stop = stop
        return int(server.server_port)

    def emit(self, event: Event, *, generation: int) -> None:
        """Take the event into the figures; see `EventSink`."""
        match event:
            case PhaseSeen(phase=phase, world_size=world_size):
                self._see(phase, world_size, generation)
            case GenerationStarted() if not self._told:
                self._training.set(1)
            case WorkerRestored():
                self._told = True
            case FirstStepCompleted(step=step) | StepsCompleted(step=step):
                self._training.set(1)
                self._step.set(step)
            case TableDecided(restarts=restarts):
                self._restarts.set(restarts)
            case LeaderElected():
                self._leader.set(1)
            case WorkerStarted() | WorkerExited():
                self._see_worker(event)
            case HealthChanged(severity=severity, holds=holds):
                self._health.labels(severity).inc(1 if holds else -1)
            case StoreLost() | StoreBack() | LeaseLost():
                self._see_store(event)
            case IncidentClosed():
                self._count(event)
            case _:
                pass

    def close(self, timeout_s: float) -> None:
        """Serve no more; see `EventSink`."""
        self._stop()

    def _see(self, phase: str, world_size: int, generation: int) -> None:
        self._generation.set(generation)
        self._world.set(world_size)
        for name in PHASES:
            self._phase.labels(name).set(name == phase)
        if phase != "run":
            self._training.set(0)

    def _see_worker(self, event: WorkerStarted | WorkerExited) -> None:
        if isinstance(event, WorkerStarted):
            self._running.add(event.pid)
        else:
            self._running.discard(event.pid)
            self._exits.labels(event.state).inc()
            self._training.set(0)
        self._workers.set(len(self._running))

    def _see_store(self, event: StoreLost | StoreBack | LeaseLost) -> None:
        match event:
            case StoreLost():
                self._store.set(0)
                self._outages.inc()
            case StoreBack():
                self._store.set(1)
            case LeaseLost():
                self._leases.inc()

    def _count(self, incident: IncidentClosed) -> None:
        self._incidents.labels(incident.kind, incident.action).inc()
        self._lost.inc(incident.steps_lost)
        self._copied.inc(incident.copied_bytes)
        for phase in RECOVERY:
            self._recovery.labels(phase).observe(getattr(incident, f"{phase}_s"))
