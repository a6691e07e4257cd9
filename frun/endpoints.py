"""Owns the spelling of addresses: `host`, `host:port`, IPv6 bare or in brackets, URLs for etcd.

Names are not looked up here; whether an address is this machine's own is for others to find out.
"""

import ipaddress
import re
from dataclasses import dataclass

from frun.errors import UsageError

ETCD_PORT = 2379
C10D_PORT = 29400
STATIC_PORT = 29500

_HOST = re.compile(r"[A-Za-z0-9_.-]+")
_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<rest>[^/]*)/?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A host and a port as a person typed them."""

    host: str
    """Name, IPv4 or IPv6 literal (with its zone if given); never in brackets."""
    port: int
    """TCP port; 0 asks for any free port where that makes sense."""
    tls: bool = False
    """An `https://` URL was typed."""

    def __str__(self) -> str:
        """Spell it `host:port`, an IPv6 literal in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_endpoint(text: str, *, default_port: int, name: str, urls: bool = False) -> Endpoint:
    """Read one endpoint; `name` is the flag or variable it came from.

    An IPv6 address without brackets is taken whole: it has no port then.

    Raises:
        UsageError: not an endpoint; the text names the flag, the value and the right spelling.
    """
    rest, tls = text.strip(), False
    if (url := _URL.fullmatch(rest)) is not None:
        if not urls:
            raise UsageError(f"{name}: {text!r} is a URL, give host:port instead")
        if url["scheme"].lower() not in ("http", "https"):
            raise UsageError(f"{name}: {text!r} has scheme {url['scheme']!r}, use http or https")
        rest, tls = url["rest"], url["scheme"].lower() == "https"
    host, port_text = _split(rest)
    if not _is_host(host):
        raise UsageError(f"{name}: {text!r} is not host, host:port, [ipv6] or [ipv6]:port")
    if port_text is None:
        return Endpoint(host=host, port=default_port, tls=tls)
    if not re.fullmatch(r"[0-9]{1,5}", port_text) or int(port_text) > 65535:
        raise UsageError(f"{name}: {text!r} has port {port_text!r}, a port is 0 to 65535")
    return Endpoint(host=host, port=int(port_text), tls=tls)


def parse_endpoints(text: str, *, default_port: int, name: str) -> tuple[Endpoint, ...]:
    """Read a comma list of etcd endpoints, URLs allowed; all plain or all TLS. Repetitions go.

    Raises:
        UsageError: one of them is not an endpoint, or plain and TLS are mixed.
    """
    parts = [part for part in text.split(",") if part.strip()]
    found = tuple(
        dict.fromkeys(
            parse_endpoint(part, default_port=default_port, name=name, urls=True) for part in parts
        )
    )
    if not found:
        raise UsageError(f"{name}: {text!r} names no endpoint, give host:port")
    if len({endpoint.tls for endpoint in found}) > 1:
        raise UsageError(f"{name}: {text!r} mixes http and https, use one for all endpoints")
    return found


def parse_host(text: str, *, name: str) -> str:
    """Read a host without a port; brackets around an IPv6 literal are taken off.

    Raises:
        UsageError: it is not a host name or an address.
    """
    host = text.strip().removeprefix("[").removesuffix("]")
    if not _is_host(host):
        raise UsageError(f"{name}: {text!r} is not a host name or an address")
    return host


def _is_host(text: str) -> bool:
    if _HOST.fullmatch(text):
        return True
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def _split(text: str) -> tuple[str, str | None]:
    if text.startswith("["):
        host, bracket, tail = text[1:].partition("]")
        if bracket and ":" in host and (not tail or tail.startswith(":")):
            return host, tail[1:] if tail else None
        return "", None
    if text.count(":") == 1:
        host, _, port = text.partition(":")
        return host, port
    return text, None
