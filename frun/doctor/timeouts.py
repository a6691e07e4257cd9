"""All waits of a job in their order, and which of them contradict each other. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass

from frun.agent.bounds import policy_of
from frun.config import LaunchConfig
from frun.doctor.findings import Finding, failure, ok
from frun.errors import UsageError

LOST_PEER_S = 60.0
"""How long a worker's exception that speaks of a lost peer waits for the news (`worker.resumable`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """One time-out as it will be in force."""

    seconds: float
    name: str
    """The flag or setting that says it; of what follows from others, what it is."""
    bounds: str


def waits(config: LaunchConfig) -> list[Wait]:
    """Return the job's time-outs, the shortest first."""
    job, rendezvous, workers = config.job, config.rendezvous, config.workers
    found = [
        (rendezvous.lease_ttl_s / 4, "lease refresh", "how often a host shows that it lives"),
        (rendezvous.request_timeout_s, "heartbeat_timeout", "one request to etcd"),
        (workers.beat_timeout_s, "--beat-timeout", "a frozen worker goes unnoticed"),
        (rendezvous.lease_ttl_s, "lease", "a dead host goes unnoticed"),
        (job.replace_timeout_s, "--replace-timeout", "a lost host's place is kept"),
        (workers.pause_timeout_s, "--pause-timeout", "a survivor's way out of its step"),
        (workers.shutdown_timeout_s, "--shutdown-timeout", "a stop of workers"),
        (
            policy_of(config).prepare_timeout_s,
            "getting ready (--shutdown-timeout + 20)",
            "a member's way into a generation",
        ),
        (rendezvous.last_call_timeout_s, "last_call_timeout", "more hosts than MIN are waited for"),
        (rendezvous.read_timeout_s, "read_timeout", "etcd is waited for when a decision is due"),
        (rendezvous.close_timeout_s, "close_timeout", "the last host waits for the others"),
        (rendezvous.join_timeout_s, "join_timeout", "MIN hosts are waited for"),
    ]
    if workers.kernel_limit_s is not None:
        found.append((workers.kernel_limit_s, "kernel limit", "a worker is in one system call"))
    made = [Wait(seconds=float(s), name=name, bounds=bounds) for s, name, bounds in found]
    return sorted((wait for wait in made if wait.seconds > 0), key=lambda wait: wait.seconds)


def contradictions(config: LaunchConfig) -> list[Finding]:
    """Return a failure for each pair of time-outs of which one makes the other pointless."""
    found = [failure("time-outs", text) for text in (*_fatal(config), *_broken(config))]
    return found or [ok("time-outs", "none contradicts another")]


def refuse(config: LaunchConfig) -> None:
    """Raise UsageError if a time-out would end the job in the very case that it is there for.

    What only may hurt does not keep a job from running: that is what `contradictions` are shown for.
    """
    for text in _fatal(config):
        raise UsageError(text)


def _fatal(config: LaunchConfig) -> Iterator[str]:
    """Yield what can't be meant: whatever happens, the second time-out is never reached."""
    pause_s, prepare_s = config.workers.pause_timeout_s, policy_of(config).prepare_timeout_s
    if not pause_s < prepare_s:
        yield (
            f"--pause-timeout ({pause_s:g} s) must be less than --shutdown-timeout + 20 s"
            f" ({prepare_s:g} s): the job would give up a host before its stuck worker is replaced"
        )


def _broken(config: LaunchConfig) -> Iterator[str]:
    rendezvous, workers = config.rendezvous, config.workers
    lease_s, pause_s = rendezvous.lease_ttl_s, workers.pause_timeout_s
    if not rendezvous.request_timeout_s < lease_s:
        yield (
            f"heartbeat_timeout ({rendezvous.request_timeout_s:g} s) must be less than the lease"
            f" ({lease_s} s): one slow answer would cost the lease"
        )
    if not 0 <= workers.beat_timeout_s < pause_s:
        yield (
            f"--beat-timeout ({workers.beat_timeout_s:g} s) must be less than --pause-timeout"
            f" ({pause_s:g} s): a frozen worker would be replaced for being slow first"
        )
    if not lease_s < LOST_PEER_S:
        yield (
            f"the lease ({lease_s} s) must be less than {LOST_PEER_S:g} s: a worker that lost its peer"
            " waits that long for the news, then it fails itself"
        )
    if not rendezvous.read_timeout_s > lease_s:
        yield (
            f"read_timeout ({rendezvous.read_timeout_s:g} s) must be more than the lease ({lease_s} s):"
            " a host would leave before a new leader may decide"
        )
    if not rendezvous.close_timeout_s >= lease_s:
        yield (
            f"close_timeout ({rendezvous.close_timeout_s:g} s) must not be less than the lease"
            f" ({lease_s} s): the last host could leave before a dead one's record is gone"
        )
    if not rendezvous.join_timeout_s > lease_s:
        yield (
            f"join_timeout ({rendezvous.join_timeout_s:g} s) must be more than the lease ({lease_s} s):"
            " a host that is started again must outlive its own old record"
        )
