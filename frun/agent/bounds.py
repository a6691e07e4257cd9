"""What an agent and its leader wait for at most, from the configuration."""

from frun.agent.parts import Bounds
from frun.config import LaunchConfig
from frun.protocol.policy import Policy

_PREPARE_S = 20.0
"""Longest preparation of a generation, besides stopping the workers of the last one."""


def policy_of(config: LaunchConfig) -> Policy:
    """Return what the leader decides by."""
    job, rendezvous = config.job, config.rendezvous
    return Policy(
        min_hosts=job.min_hosts,
        max_hosts=job.max_hosts,
        max_restarts=job.max_restarts,
        join_timeout_s=rendezvous.join_timeout_s,
        last_call_s=rendezvous.last_call_timeout_s,
        replace_timeout_s=job.replace_timeout_s,
        max_recoveries=job.max_recoveries,
        lease_ttl_s=rendezvous.lease_ttl_s,
        hang_s=config.workers.hang_timeout_s,
        prepare_timeout_s=config.workers.shutdown_timeout_s + _PREPARE_S,
    )


def bounds_of(config: LaunchConfig) -> Bounds:
    """Return how long this host waits for what."""
    rendezvous = config.rendezvous
    return Bounds(
        shutdown_s=config.workers.shutdown_timeout_s,
        store_s=rendezvous.read_timeout_s,
        farewell_s=rendezvous.close_timeout_s,
    )
