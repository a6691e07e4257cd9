"""Owns which rendezvous a command line means, and the keys of `--rdzv-conf`.

Nothing is looked up or connected to: whether an endpoint is this machine is found out later.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from frun.config import Backend, Note, RendezvousConfig
from frun.endpoints import (
    C10D_PORT,
    ETCD_PORT,
    STATIC_PORT,
    Endpoint,
    parse_endpoint,
    parse_endpoints,
    parse_host,
)
from frun.errors import UsageError
from frun.values import Given, choice, integer, nearest, seconds, switch

BACKENDS = ("etcd", "etcd-v2", "c10d", "static")
LEASE_TTL_S = 3
REQUEST_TIMEOUT_S = 1.0
JOIN_TIMEOUT_S = 600.0
STATIC_JOIN_TIMEOUT_S = 900.0

_COMMON = frozenset(
    {
        "timeout",
        "join_timeout",
        "last_call_timeout",
        "close_timeout",
        "heartbeat_timeout",
        "keep_alive_interval",
        "keep_alive_max_attempt",
        "read_timeout",
    }
)
_TLS_KEYS = {
    "ssl_cert": "cert",
    "cert": "cert",
    "ssl_cert_key": "key",
    "key": "key",
    "ca_cert": "ca",
    "cacert": "ca",
}
KEYS: Mapping[Backend, frozenset[str]] = {
    Backend.ETCD: _COMMON | {"protocol", "etcd_prefix"} | frozenset(_TLS_KEYS),
    Backend.C10D: _COMMON | {"store_type", "is_host"},
    Backend.STATIC: _COMMON | {"rank", "is_host"},
    Backend.STANDALONE: _COMMON | {"store_type", "is_host", "rank"},
}
_FLAG_OF_KEY = {
    "min_nodes": "--nnodes",
    "max_nodes": "--nnodes",
    "run_id": "--rdzv-id",
    "endpoint": "--rdzv-endpoint",
    "backend": "--rdzv-backend",
    "local_addr": "--local-addr",
}

Get = Callable[[str], Given | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Backend and endpoints, with what is worth saying about the choice."""

    backend: Backend
    endpoints: tuple[Endpoint, ...] = ()
    notes: tuple[Note, ...] = ()


def resolve_rendezvous(
    get: Get,
    *,
    max_hosts: int,
    conf: Iterable[Given],
    user: str | None,
    password: str | None,
) -> tuple[RendezvousConfig, tuple[Note, ...]]:
    """Return the checked rendezvous settings and the notes about them.

    Raises:
        UsageError: a value is wrong, unknown, or does not fit another one.
    """
    meeting = _with_known_ports(choose_meeting(get, max_hosts=max_hosts), max_hosts)
    settings = read_conf(conf, meeting.backend)
    tls = _tls_files(get, settings)
    lease_ttl_s = _lease_ttl(settings)
    notes = list(meeting.notes)
    if meeting.backend is not Backend.ETCD:
        if any(tls) or user is not None:
            notes.append(Note(text=f"etcd's TLS files and user are not used by {meeting.backend}"))
        tls, user, password = (None, None, None), None, None
    master_addr, master_port = _host(get("master_addr")), _master_port(get("master_port"))
    if meeting.backend is not Backend.STATIC and (master_addr or master_port):
        notes.append(Note(text=f"--master-addr and --master-port: not used by {meeting.backend}"))
        master_addr = master_port = None
    return RendezvousConfig(
        backend=meeting.backend,
        endpoints=_with_protocol(meeting.endpoints, settings),
        tls_ca=tls[0],
        tls_cert=tls[1],
        tls_key=tls[2],
        user=user,
        password=password,
        join_timeout_s=_join_timeout(settings, meeting.backend),
        last_call_timeout_s=_seconds(settings, "last_call_timeout", 30.0, zero=True),
        close_timeout_s=_seconds(settings, "close_timeout", 30.0),
        lease_ttl_s=lease_ttl_s,
        request_timeout_s=min(
            _seconds(settings, "heartbeat_timeout", REQUEST_TIMEOUT_S), lease_ttl_s / 3
        ),
        read_timeout_s=_seconds(settings, "read_timeout", 60.0),
        is_host=switch(settings["is_host"]) if "is_host" in settings else None,
        node_rank=_node_rank(get("node_rank"), meeting.backend, max_hosts),
        master_addr=master_addr,
        master_port=master_port or None,
        local_addr=_host(get("local_addr")),
    ), tuple(notes)


def choose_meeting(get: Get, *, max_hosts: int) -> Meeting:
    """Decide where the hosts meet, by the rules of docs/torchrun.md."""
    backend, endpoint = get("rdzv_backend"), get("rdzv_endpoint")
    standalone = get("standalone")
    if standalone is not None and switch(standalone):
        return _standalone(standalone, backend, endpoint, max_hosts)
    if backend is not None:
        name = choice(backend, BACKENDS)
        return _named(name, get, endpoint, max_hosts)
    of_static = [each for each in ("node_rank", "master_addr", "master_port") if get(each)]
    if endpoint is not None and not of_static:
        return Meeting(
            backend=Backend.ETCD,
            endpoints=parse_endpoints(endpoint.text, default_port=ETCD_PORT, name=endpoint.source),
            notes=(Note(text=f"meeting on the etcd at {endpoint.text} ({endpoint.source})"),),
        )
    return _static(get, endpoint, max_hosts)


def _standalone(
    standalone: Given, backend: Given | None, endpoint: Given | None, max_hosts: int
) -> Meeting:
    if max_hosts > 1:
        raise UsageError(
            f"{standalone.source} is for one host, but --nnodes allows {max_hosts}: "
            "leave one of them out, or name an etcd with --rdzv-endpoint"
        )
    ignored = [given.source for given in (backend, endpoint) if given is not None]
    note = Note(text=f"{' and '.join(ignored)} ignored: {standalone.source} is given")
    return Meeting(backend=Backend.STANDALONE, notes=(note,) if ignored else ())


def _named(name: str, get: Get, endpoint: Given | None, max_hosts: int) -> Meeting:
    if name == "static":
        return _static(get, endpoint, max_hosts)
    if name == "c10d":
        return _c10d(endpoint)
    note = Note(text="--rdzv-backend etcd-v2 is taken as etcd: frun speaks the v3 interface only")
    notes = (note,) if name == "etcd-v2" else ()
    if endpoint is None:
        if max_hosts == 1:
            return Meeting(backend=Backend.STANDALONE, notes=notes)
        raise UsageError(
            "--rdzv-backend etcd needs --rdzv-endpoint HOST:PORT[,HOST:PORT...] to find the cluster"
        )
    found = parse_endpoints(endpoint.text, default_port=ETCD_PORT, name=endpoint.source)
    return Meeting(backend=Backend.ETCD, endpoints=found, notes=notes)


def _c10d(endpoint: Given | None) -> Meeting:
    if endpoint is None:
        found = Endpoint(host="localhost", port=C10D_PORT)
    else:
        found = parse_endpoint(endpoint.text, default_port=C10D_PORT, name=endpoint.source)
    return Meeting(backend=Backend.C10D, endpoints=(found,))


def _static(get: Get, endpoint: Given | None, max_hosts: int) -> Meeting:
    port = get("master_port")
    if endpoint is not None:
        found = parse_endpoint(endpoint.text, default_port=STATIC_PORT, name=endpoint.source)
        return Meeting(backend=Backend.STATIC, endpoints=(found,))
    number = _master_port(port)
    if max_hosts == 1 and number is None:
        return Meeting(backend=Backend.STANDALONE)
    host = _host(get("master_addr")) or "127.0.0.1"
    return Meeting(
        backend=Backend.STATIC,
        endpoints=(Endpoint(host=host, port=STATIC_PORT if number is None else number),),
    )


def _with_known_ports(meeting: Meeting, max_hosts: int) -> Meeting:
    """Read port 0 as `this host alone, any port`, as people type it for torchrun."""
    unknown = [endpoint for endpoint in meeting.endpoints if endpoint.port == 0]
    if not unknown:
        return meeting
    if max_hosts > 1 or len(meeting.endpoints) > 1:
        raise UsageError(
            f"--rdzv-endpoint: '{unknown[0]}' has port 0, which the other hosts can not know: "
            "give the port that all of them use"
        )
    return Meeting(backend=Backend.STANDALONE, notes=meeting.notes)


def read_conf(conf: Iterable[Given], backend: Backend) -> dict[str, Given]:
    """Return the settings of all `--rdzv-conf` texts by key; a later one wins.

    Raises:
        UsageError: not `key=value`, or a key that this backend does not know.
    """
    settings: dict[str, Given] = {}
    for given in conf:
        if not given.text.strip():
            continue
        for part in given.text.split(","):
            key, equals, value = (piece.strip() for piece in part.partition("="))
            if not key or not equals or not value:
                raise given.refuse(f"has {part!r}, which is not key=value")
            if key not in KEYS[backend]:
                raise given.refuse(f"has unknown key {key!r}{_advice(key, backend)}")
            settings[key] = Given(text=value, source=f"{given.source} {key}")
    _check_store_type(settings)
    return settings


def _advice(key: str, backend: Backend) -> str:
    if key in _FLAG_OF_KEY:
        return f", use {_FLAG_OF_KEY[key]}"
    for other, keys in KEYS.items():
        if key in keys:
            return f" for backend {backend} (it belongs to {other})"
    return nearest(key, KEYS[backend]) or f", known are {', '.join(sorted(KEYS[backend]))}"


def _seconds(
    settings: Mapping[str, Given], key: str, default: float, *, zero: bool = False
) -> float:
    return seconds(settings[key], zero=zero) if key in settings else default


def _join_timeout(settings: Mapping[str, Given], backend: Backend) -> float:
    default = STATIC_JOIN_TIMEOUT_S if backend is Backend.STATIC else JOIN_TIMEOUT_S
    if backend in (Backend.STATIC, Backend.ETCD):
        default = _seconds(settings, "timeout", default)
    return _seconds(settings, "join_timeout", default)


def _lease_ttl(settings: Mapping[str, Given]) -> int:
    if not settings.keys() & {"keep_alive_interval", "keep_alive_max_attempt"}:
        return LEASE_TTL_S
    attempts = settings.get("keep_alive_max_attempt")
    count = integer(attempts, low=1, high=1000) if attempts is not None else 3
    return max(1, math.ceil(_seconds(settings, "keep_alive_interval", 5.0) * count))


def _check_store_type(settings: Mapping[str, Given]) -> None:
    kind = settings.get("store_type")
    if kind is not None and kind.text.lower() != "tcp":
        raise kind.refuse("is not a store that frun has, use tcp or leave the key out")


def _with_protocol(
    endpoints: tuple[Endpoint, ...], settings: Mapping[str, Given]
) -> tuple[Endpoint, ...]:
    protocol = settings.get("protocol")
    if protocol is None or choice(protocol, ("http", "https")) == "http":
        return endpoints
    return tuple(replace(endpoint, tls=True) for endpoint in endpoints)


def _tls_files(
    get: Get, settings: Mapping[str, Given]
) -> tuple[str | None, str | None, str | None]:
    found: dict[str, str] = {}
    for key, kind in _TLS_KEYS.items():
        if key in settings:
            found.setdefault(kind, settings[key].text)
    for kind in ("ca", "cert", "key"):
        given = get(f"etcd_{kind}")
        if given is not None:
            found[kind] = given.text
    if ("cert" in found) != ("key" in found):
        have, lack = ("cert", "key") if "cert" in found else ("key", "cert")
        raise UsageError(f"--etcd-{have} is given without --etcd-{lack}: give both or neither")
    return found.get("ca"), found.get("cert"), found.get("key")


def _host(given: Given | None) -> str | None:
    return None if given is None else parse_host(given.text, name=given.source)


def _master_port(given: Given | None) -> int | None:
    return None if given is None else integer(given, low=0, high=65535)


def _node_rank(given: Given | None, backend: Backend, max_hosts: int) -> int | None:
    if given is None:
        return None
    rank = integer(given, low=0)
    if backend is Backend.STATIC and rank >= max_hosts:
        raise given.refuse(f"is not below the number of hosts ({max_hosts}): ranks start at 0")
    return rank
