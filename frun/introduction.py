"""What an agent says of itself and its job when it begins: to etcd, to the machine, to the event sinks."""

import hashlib
import os
import secrets

from frun import registry
from frun.config import LaunchConfig
from frun.errors import UsageError
from frun.event_sinks import EventSink, FanOut, JsonlSink, Origin, TorchEvents
from frun.events import HostRegistered, JobStarted
from frun.protocol.records import HostRecord, JobSpec
from frun.registry import JobEntry
from frun.version import __version__


def job_spec(config: LaunchConfig, job_id: str) -> JobSpec:
    """Return what all hosts of the job must agree on; a founder's has the job's secret."""
    job = config.job
    return JobSpec(
        job_id=job_id,
        uid=secrets.token_hex(16),
        min_hosts=job.min_hosts,
        max_hosts=job.max_hosts,
        max_restarts=job.max_restarts,
        entry=config.workers.entry,
        version=__version__,
        drills=job.allow_drills,
    )


def job_entry(
    config: LaunchConfig,
    job_id: str,
    host: str,
    endpoints: tuple[str, ...],
    log_folder: str,
    now: float,
) -> JobEntry:
    """Return this process's entry in the machine's registry."""
    rendezvous = config.rendezvous
    pid = os.getpid()
    return JobEntry(
        job_id=job_id,
        endpoints=endpoints,
        tls_ca=rendezvous.tls_ca,
        tls_cert=rendezvous.tls_cert,
        tls_key=rendezvous.tls_key,
        user=rendezvous.user,
        host=host,
        pid=pid,
        pid_started=registry.process_started(pid) or 0,
        place=registry.current_place(),
        started_at=now,
        log_folder=log_folder,
    )


def registered(record: HostRecord, spec: JobSpec, lease_ttl_s: float) -> HostRegistered:
    """Return the event; its run tells jobs of one id apart, but not the secret that it is made from."""
    return HostRegistered(
        run=hashlib.sha256(spec.uid.encode()).hexdigest()[:12],
        name=record.name,
        address=record.address,
        nproc=record.nproc,
        lease_ttl_s=lease_ttl_s,
    )


def started(config: LaunchConfig) -> JobStarted:
    """Return the first event of an agent."""
    return JobStarted(
        entry=config.workers.entry,
        version=__version__,
        nproc=config.workers.nproc,
        backend=config.rendezvous.backend.value,
    )


def sinks(config: LaunchConfig, origin: Origin, events_file: str) -> FanOut:
    """Return what takes the agent's events; `events_file` is empty if none is to be written.

    Raises UsageError or LaunchError when metrics are asked for and can not be served.
    """
    found: list[EventSink] = []
    if events_file:
        found.append(JsonlSink(events_file, origin))
    if config.job.event_log_handler == "console":
        found.append(
            TorchEvents(
                fd=2,
                origin=origin,
                role=config.workers.role,
                backend=config.rendezvous.backend.value,
                entry=config.workers.entry,
            )
        )
    if config.job.metrics_port is not None:
        found.append(_metrics(config.job.metrics_port, config.workers.entry, origin))
    return FanOut(found)


def _metrics(port: int, entry: str, origin: Origin) -> EventSink:
    try:
        from frun.agent.metrics import Metrics
    except ModuleNotFoundError as error:
        raise UsageError(
            "--metrics-port needs prometheus-client: pip install 'frun[metrics]'"
        ) from error
    metrics = Metrics(job=origin.job, host=origin.host, version=__version__, entry=entry)
    metrics.serve(port)
    return metrics
