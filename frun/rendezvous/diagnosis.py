"""Why an etcd endpoint gives no answer: one plain connection that looks, and one line that says it.

gRPC reports every failure as "failed to connect". `diagnose` connects once with sockets and `ssl`
and asks for `/version`; it never raises, and changes nothing.
"""

import asyncio
import contextlib
import json
import os
import socket
import ssl
from dataclasses import dataclass
from enum import Enum, auto

from frun.endpoints import Endpoint
from frun.rendezvous.tls import Tls, tls_context

_LIMIT_S = 2.0


class Kind(Enum):
    """What the look at an endpoint showed."""

    ANSWERS = auto()
    """An etcd with the v3 API is there; the cause is elsewhere (no quorum, overload)."""
    SILENT = auto()
    """Nothing is there, or it does not answer now: it may come."""
    FOREIGN = auto()
    """Something else is there, as far as plain HTTP shows (a gRPC proxy may look so too)."""
    NO_TLS = auto()
    """The two sides do not agree on TLS, and will not until a person acts."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The finding at one endpoint and its reason in one clause."""

    kind: Kind
    text: str

    version: str = ""
    """What an etcd that answers calls itself."""

    @property
    def stays(self) -> bool:
        """Whether waiting is in vain."""
        return self.kind in {Kind.FOREIGN, Kind.NO_TLS}


async def diagnose(endpoint: Endpoint, tls: Tls | None) -> Diagnosis:
    """Look at one endpoint, about two seconds at most."""
    try:
        async with asyncio.timeout(_LIMIT_S):
            return await (_look_plain(endpoint) if tls is None else _look_tls(endpoint, tls))
    except TimeoutError:
        return Diagnosis(Kind.SILENT, f"no answer within {_LIMIT_S:g} s")
    except socket.gaierror as error:
        return Diagnosis(Kind.SILENT, f"cannot resolve the name: {error.strerror}")
    except OSError as error:
        return Diagnosis(Kind.SILENT, _words(error))


async def _look_plain(endpoint: Endpoint) -> Diagnosis:
    answer = await _ask(endpoint, None)
    if b"HTTP request to an HTTPS server" in answer or await _speaks_tls(endpoint, answer):
        return Diagnosis(Kind.NO_TLS, "it speaks TLS: give --etcd-ca, or name a plain endpoint")
    return _read_version(answer)


async def _look_tls(endpoint: Endpoint, tls: Tls) -> Diagnosis:
    try:
        return _read_version(await _ask(endpoint, tls_context(tls)))
    except ssl.SSLCertVerificationError as error:
        return Diagnosis(Kind.NO_TLS, _verify_words(endpoint, tls, error))
    except ssl.SSLError as error:
        reason = (error.reason or str(error)).upper()
    except ConnectionError:
        # A plain etcd hangs up on a TLS greeting; so does one that has just died.
        reason = "CLOSED"
    # TLS 1.3 says "certificate required", older ones and older Go say something less exact.
    missing = ("CERTIFICATE_REQUIRED", "BAD_CERTIFICATE", "HANDSHAKE_FAILURE")
    if tls.cert is None and any(one in reason for one in missing):
        return Diagnosis(
            Kind.NO_TLS, "it asks for a client certificate: give --etcd-cert and --etcd-key"
        )
    if "ALERT" in reason and tls.cert is not None:
        return Diagnosis(
            Kind.NO_TLS, f"it refuses the client certificate {tls.cert} ({reason.lower()})"
        )
    if (await _ask(endpoint, None)).startswith(b"HTTP/"):
        return Diagnosis(
            Kind.NO_TLS, "it does not speak TLS: drop --etcd-ca, or name a TLS endpoint"
        )
    kind = Kind.SILENT if reason == "CLOSED" else Kind.NO_TLS
    return Diagnosis(kind, f"the TLS handshake failed ({reason.lower()})")


async def _ask(endpoint: Endpoint, context: ssl.SSLContext | None) -> bytes:
    """Ask for /version; return what comes until the peer hangs up, at most 64 KiB."""
    reader, writer = await asyncio.open_connection(
        endpoint.host,
        endpoint.port,
        ssl=context,
        server_hostname=endpoint.host if context is not None else None,
    )
    try:
        writer.write(
            f"GET /version HTTP/1.1\r\nHost: {endpoint}\r\nConnection: close\r\n\r\n".encode()
        )
        answer = b""
        while len(answer) < 65536 and (part := await reader.read(65536)):
            answer += part
        return answer
    except ConnectionResetError:
        return b""
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def _speaks_tls(endpoint: Endpoint, answer: bytes) -> bool:
    """A TLS server drops or alerts a plain request; greet it properly to be sure."""
    if answer.startswith(b"HTTP/"):
        return False
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        await _ask(endpoint, context)
    except ssl.SSLError as error:
        return "ALERT" in (error.reason or "").upper()
    except OSError:
        return False
    return True


def _read_version(answer: bytes) -> Diagnosis:
    head, _, body = answer.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/"):
        if not answer:
            return Diagnosis(Kind.SILENT, "it hangs up without an answer")
        return Diagnosis(Kind.FOREIGN, f"it is not etcd: it answers {answer[:20]!r}")
    try:
        version = str(json.loads(body[body.find(b"{") : body.rfind(b"}") + 1])["etcdserver"])
        major = int(version.split(".", maxsplit=1)[0])
    except (ValueError, KeyError, TypeError):
        return Diagnosis(Kind.FOREIGN, "it is a web server, not etcd")
    if major < 3:
        return Diagnosis(
            Kind.FOREIGN, f"it is etcd {version}, which has no v3 API: use 3.4 or later"
        )
    return Diagnosis(
        Kind.ANSWERS,
        f"etcd {version} is there but serves no request: has it lost its quorum?",
        version,
    )


def _verify_words(endpoint: Endpoint, tls: Tls, error: ssl.SSLCertVerificationError) -> str:
    message = error.verify_message or str(error)
    lower = message.lower()
    if "hostname mismatch" in lower or "ip address mismatch" in lower:
        return f"its certificate does not name {endpoint.host}: use a name that it has, or renew it"
    if "expired" in lower:
        return "its certificate has expired"
    if "issuer" in lower or "self-signed" in lower or "self signed" in lower:
        if tls.ca is None:
            return f"its certificate is by no authority this machine trusts: give --etcd-ca ({message})"
        return f"its certificate is not by the authority in {tls.ca} ({message})"
    return f"its certificate does not verify: {message}"


def _words(error: OSError) -> str:
    """The system's words for an error, without Python's decoration."""
    if error.errno is not None and error.errno > 0:
        return os.strerror(error.errno).lower()
    return str(error).lower() or type(error).__name__
