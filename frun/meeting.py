"""Owns where the hosts of a job meet: starts the embedded etcd where it belongs, and connects.

Part of the composition of one agent. What is said there is for `rendezvous` and `agent`.
"""

import contextlib
import logging
from dataclasses import dataclass

from frun.agent import addresses, masterport
from frun.agent.masterport import Service, SharedPort
from frun.config import Backend, RendezvousConfig
from frun.errors import LaunchError
from frun.rendezvous.embedded import EmbeddedEtcd, PortInUse
from frun.rendezvous.etcd import EtcdStore
from frun.rendezvous.tls import Tls

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
_CONNECT_S = 30.0
"""Longest wait for an etcd that should be running already."""
_START_S = 20.0
"""Longest start of the embedded etcd."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where etcd is, and what this host runs for it."""

    store: EtcdStore
    endpoints: tuple[str, ...]
    keeps_store: bool
    """The embedded etcd runs here."""
    shared: SharedPort | None = None
    """The port that etcd shares with torch's TCPStore; None but with static."""


async def meet(
    config: RendezvousConfig, stack: contextlib.AsyncExitStack, *, single_host: bool
) -> Meeting:
    """Start the embedded etcd if this host is the one to, and connect; `stack` takes it all down.

    Raises:
        StoreUnavailable: nothing answers in time; StoreRefused if waiting is in vain.
        LaunchError: the embedded etcd can not be started.
        UsageError: an address or a file for TLS can not be used.
    """
    return await _Host(config, stack, single_host=single_host).meet()


async def own_address(config: RendezvousConfig, meeting: Meeting) -> str:
    """Return the address that this host publishes: given, or the one etcd is reached from.

    Raises:
        LaunchError: --local-addr is not this machine's.
    """
    if config.local_addr is not None:
        return await addresses.check_local_addr(config.local_addr)
    if meeting.keeps_store and config.backend is not Backend.STANDALONE:
        named = await addresses.names_this_machine(config.endpoints[0].host)
        if named is not None:
            return named
    return await meeting.store.local_address()


class _Host:
    """This host on its way to the meeting."""

    def __init__(
        self, config: RendezvousConfig, stack: contextlib.AsyncExitStack, *, single_host: bool
    ) -> None:
        self._config = config
        self._single_host = single_host
        self._stack = stack

    async def meet(self) -> Meeting:
        config = self._config
        if config.backend is Backend.ETCD:
            endpoints = tuple(str(endpoint) for endpoint in config.endpoints)
            wait_s = min(_CONNECT_S, config.join_timeout_s)
            return await self._connect(endpoints, wait_s, keeps_store=False)
        if config.backend is Backend.STANDALONE:
            own = await self._start_etcd(LOOPBACK, 0)
            return await self._connect((own.endpoint,), _START_S, keeps_store=True)
        endpoint = config.endpoints[0]
        here = await self._hosts_the_endpoint()
        if here is not None:
            try:
                return await self._host(here, endpoint.port)
            except (PortInUse, masterport.PortInUse) as busy:
                if self._is_first:
                    raise LaunchError(
                        f"{endpoint} is in use, perhaps by another job: give this one another"
                        " --master-port (or --rdzv-endpoint), or none"
                    ) from busy
                logger.info("%s; taking it for this job's etcd", busy)
        return await self._connect((str(endpoint),), config.join_timeout_s, keeps_store=False)

    @property
    def _is_first(self) -> bool:
        """True if no other host of this job can be the one that listens at a static endpoint."""
        static = self._config.backend is Backend.STATIC
        return static and (self._single_host or self._config.node_rank == 0)

    async def _hosts_the_endpoint(self) -> str | None:
        """Return the address to listen on if the embedded etcd belongs here, else None."""
        config = self._config
        address = await addresses.names_this_machine(config.endpoints[0].host)
        if config.is_host is not None:
            return (address or "0.0.0.0") if config.is_host else None
        if config.backend is Backend.STATIC and (config.node_rank or 0) != 0:
            return None
        return address

    async def _host(self, address: str, port: int) -> Meeting:
        """Run the etcd of this job at `address:port`; with static, share that port with TCPStore."""
        if self._config.backend is not Backend.STATIC:
            own = await self._start_etcd(address, port)
            return await self._connect((own.endpoint,), _START_S, keeps_store=True)
        shared = SharedPort(address, port)
        self._stack.push_async_callback(shared.close)
        own = await self._start_etcd(LOOPBACK, 0)
        shared.lead_to(Service.ETCD, int(own.endpoint.rpartition(":")[2]))
        meeting = await self._connect((own.endpoint,), _START_S, keeps_store=True)
        return Meeting(
            store=meeting.store, endpoints=meeting.endpoints, keeps_store=True, shared=shared
        )

    async def _start_etcd(self, address: str, port: int) -> EmbeddedEtcd:
        own = EmbeddedEtcd(f"[{address}]:{port}" if ":" in address else f"{address}:{port}")
        self._stack.push_async_callback(own.stop)
        await own.start(_START_S)
        return own

    async def _connect(
        self, endpoints: tuple[str, ...], wait_s: float, *, keeps_store: bool
    ) -> Meeting:
        config = self._config
        tls = None
        if config.tls:
            tls = Tls(ca=config.tls_ca, cert=config.tls_cert, key=config.tls_key)
        store = EtcdStore(
            endpoints,
            tls=tls,
            user=config.user,
            password=config.password,
            request_timeout_s=config.request_timeout_s,
        )
        self._stack.push_async_callback(store.close)
        await store.connect(wait_s)
        return Meeting(store=store, endpoints=endpoints, keeps_store=keeps_store)
