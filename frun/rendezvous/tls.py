"""Owns the files for TLS to etcd: their paths, their contents, the trust made of them.

File reading only; `etcd_calls` connects with them and `diagnosis` explains failures.
"""

import ssl
from dataclasses import dataclass
from pathlib import Path

from frun.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """Paths of PEM files. Without `ca` the machine's own trusted authorities count."""

    ca: str | None = None
    cert: str | None = None
    key: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsMaterial:
    """The files' contents, read once so that a request never waits for a disk."""

    ca: bytes
    cert: bytes | None
    key: bytes | None


def read_tls(tls: Tls) -> TlsMaterial:
    """Read the files and prove that certificate and key fit.

    Raises `UsageError` naming the flag and the path of the file that is missing, unreadable or no
    PEM, or of the certificate and key that do not belong together.
    """
    if (tls.cert is None) != (tls.key is None):
        raise UsageError("--etcd-cert and --etcd-key must be given together")
    ca = _read("--etcd-ca", tls.ca) if tls.ca is not None else _machine_authorities()
    cert = _read("--etcd-cert", tls.cert) if tls.cert is not None else None
    key = _read("--etcd-key", tls.key) if tls.key is not None else None
    tls_context(tls)
    return TlsMaterial(ca=ca, cert=cert, key=key)


def tls_context(tls: Tls) -> ssl.SSLContext:
    """Return the same trust as an `ssl` context. Raises `UsageError` as `read_tls` does."""
    context = ssl.create_default_context()
    if tls.ca is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            context.load_verify_locations(cafile=tls.ca)
        except ssl.SSLError as error:
            raise UsageError(f"--etcd-ca: {tls.ca} holds no PEM certificate") from error
    if tls.cert is not None and tls.key is not None:
        try:
            context.load_cert_chain(tls.cert, tls.key, password=lambda: b"")
        except ssl.SSLError as error:
            raise UsageError(
                f"--etcd-cert {tls.cert} and --etcd-key {tls.key} are not a PEM certificate and "
                f"its unencrypted key ({error.reason or error})"
            ) from error
    return context


def _read(flag: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"{flag}: cannot read {path}: {error.strerror}") from error


def _machine_authorities() -> bytes:
    """gRPC brings a list of its own; the machine's is what its owner configured."""
    found = ssl.create_default_context().get_ca_certs(binary_form=True)
    return "".join(ssl.DER_cert_to_PEM_cert(der) for der in found).encode()
