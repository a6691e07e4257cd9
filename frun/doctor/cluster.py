"""The cluster: whether names resolve, which address this host will have, what etcd answers and how fast."""

import asyncio
import ipaddress
import statistics
from collections.abc import AsyncIterator

from frun.agent import addresses
from frun.clock import Clock
from frun.config import Backend, RendezvousConfig
from frun.doctor.findings import Finding, failure, note, ok, warning
from frun.endpoints import Endpoint
from frun.errors import FrunError, StoreUnavailable
from frun.rendezvous.diagnosis import Kind, diagnose
from frun.rendezvous.embedded import find_etcd
from frun.rendezvous.etcd import EtcdStore
from frun.rendezvous.tls import Tls

_READS = 20
_CONNECT_S = 5.0
_SLOW_S = 0.1
"""A read of a healthy etcd in one data centre takes a millisecond or a few."""


async def check(
    config: RendezvousConfig, clock: Clock, *, several_hosts: bool
) -> AsyncIterator[Finding]:
    """Yield what is found, each as soon as it is. Writes nothing but a lease that it takes back."""
    if config.local_addr is not None:
        try:
            address = await addresses.check_local_addr(config.local_addr)
        except FrunError as error:
            yield failure("address", str(error))
        else:
            yield _address(address, several_hosts=several_hosts)
    if config.backend is Backend.STANDALONE:
        yield _own_etcd()
        return
    here = False
    for endpoint in config.endpoints:
        finding, is_here = await _name(endpoint, several_hosts=several_hosts)
        here = here or is_here
        yield finding
    if config.backend is Backend.ETCD:
        async for finding in _etcd(config, clock, several_hosts=several_hosts):
            yield finding
        return
    endpoint = config.endpoints[0]
    if here:
        yield _own_etcd()
        yield note(
            "etcd", f"this host is {endpoint.host}: it will keep the job's etcd, and leave last"
        )
    else:
        yield await _endpoint_of_another(endpoint)


async def hosts_endpoint(config: RendezvousConfig) -> bool:
    """Return True if this host is the one that an endpoint of torchrun's flags names."""
    if config.backend not in (Backend.C10D, Backend.STATIC):
        return False
    return await addresses.names_this_machine(config.endpoints[0].host) is not None


async def _name(endpoint: Endpoint, *, several_hosts: bool) -> tuple[Finding, bool]:
    found = await addresses.look_up(endpoint.host)
    if not found:
        text = (
            f"{endpoint.host} does not resolve here: use a name that all hosts know, or an address"
        )
        return failure("name", text), False
    here = await addresses.names_this_machine(endpoint.host) is not None
    text = f"{endpoint.host} is {', '.join(found)}" + (", this host" if here else "")
    if several_hosts and all(_is_loopback(address) for address in found):
        return warning("name", f"{text}: any other host would take itself for it"), here
    return ok("name", text), here


async def _etcd(
    config: RendezvousConfig, clock: Clock, *, several_hosts: bool
) -> AsyncIterator[Finding]:
    tls = None
    if config.tls:
        tls = Tls(ca=config.tls_ca, cert=config.tls_cert, key=config.tls_key)
    silent = []
    for endpoint in config.endpoints:
        found = await diagnose(endpoint, tls)
        if found.kind is Kind.ANSWERS:
            yield _version(endpoint, found.version)
        else:
            silent.append(warning("etcd", f"{endpoint}: {found.text}"))
    for finding in silent:
        yield finding
    try:
        store = EtcdStore(
            [str(endpoint) for endpoint in config.endpoints],
            tls=tls,
            user=config.user,
            password=config.password,
            request_timeout_s=config.request_timeout_s,
        )
    except FrunError as error:
        yield failure("etcd", str(error))
        return
    try:
        await store.connect(_CONNECT_S)
        yield await _latency(store, config, clock)
        yield await lease(store, config)
        if config.local_addr is None:
            yield _address(await store.local_address(), several_hosts=several_hosts)
    except StoreUnavailable as error:
        yield failure("etcd", str(error))
    finally:
        await store.close()


def _version(endpoint: Endpoint, version: str) -> Finding:
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    text = f"{endpoint} is etcd {version}"
    return ok("etcd", text) if numbers >= (3, 4) else failure("etcd", f"{text}: use 3.4 or later")


async def _latency(store: EtcdStore, config: RendezvousConfig, clock: Clock) -> Finding:
    times = []
    for _ in range(_READS):
        began = clock.monotonic()
        await store.read("/frun/doctor/")
        times.append(clock.monotonic() - began)
    median, worst = statistics.median(times), max(times)
    text = f"reads take {median * 1000:.1f} ms, the longest of {_READS} {worst * 1000:.1f} ms"
    if worst > config.lease_ttl_s / 4:
        return failure("latency", f"{text}: too long for a lease of {config.lease_ttl_s} s")
    return (
        warning("latency", f"{text}: decisions will be slow")
        if median > _SLOW_S
        else ok("latency", text)
    )


async def lease(store: EtcdStore, config: RendezvousConfig) -> Finding:
    """Return whether etcd grants leases as short as the job's. Raises StoreUnavailable."""
    granted = await store.granted_ttl(config.lease_ttl_s)
    if granted > config.lease_ttl_s:
        return warning(
            "lease",
            f"etcd grants {granted} s where {config.lease_ttl_s} s are asked for (its election timeout"
            " is long): so long a dead host goes unnoticed",
        )
    return ok("lease", f"{granted} s, as asked for")


async def _endpoint_of_another(endpoint: Endpoint) -> Finding:
    try:
        async with asyncio.timeout(_CONNECT_S):
            _, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
    except OSError as error:  # TimeoutError too
        return note(
            "etcd",
            f"{endpoint} takes no connection yet ({error or 'no answer'}): it will once frun runs there",
        )
    address = str(writer.get_extra_info("sockname")[0])
    writer.close()
    interface = addresses.interface_of(address)
    return ok("etcd", f"{endpoint} takes connections; from {address} ({interface})")


def _own_etcd() -> Finding:
    try:
        return ok("etcd", f"will be started here: {find_etcd()}")
    except FrunError as error:
        return failure("etcd", str(error))


def _address(address: str, *, several_hosts: bool) -> Finding:
    interface = addresses.interface_of(address)
    text = f"this host will be {address} ({interface or 'no interface has it'})"
    if several_hosts and _is_loopback(address):
        return failure(
            "address",
            f"{text}, where no other host reaches it: give --local-addr, or another endpoint",
        )
    return ok("address", text)


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
