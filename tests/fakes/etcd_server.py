"""Real etcd members for tests: any number of them, with TLS if wanted, killed, frozen and restarted."""

import http.client
import os
import shutil
import signal
import socket
import ssl
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from frun.rendezvous.embedded import find_etcd

_READY_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTls:
    """PEM files of a member; with `client_ca` it asks clients for a certificate."""

    cert: str
    key: str
    client_ca: str | None = None


class EtcdServer:
    """One member, in a folder of its own, which `stop` removes."""

    def __init__(
        self,
        name: str,
        *,
        client_port: int,
        peers: Sequence[tuple[str, int]],
        tls: ServerTls | None = None,
        host: str = "127.0.0.1",
        extra: Sequence[str] = (),
    ) -> None:
        self.folder = tempfile.mkdtemp(prefix="test-etcd-")
        self.endpoint = f"[{host}]:{client_port}" if ":" in host else f"{host}:{client_port}"
        scheme = "http" if tls is None else "https"
        url = f"{scheme}://{self.endpoint}"
        peer = f"http://127.0.0.1:{dict(peers)[name]}"
        self._command = [
            find_etcd(),
            f"--name={name}",
            f"--data-dir={self.folder}/data",
            f"--listen-client-urls={url}",
            f"--advertise-client-urls={url}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            "--initial-cluster=" + ",".join(f"{n}=http://127.0.0.1:{p}" for n, p in peers),
            "--heartbeat-interval=50",
            "--election-timeout=500",
            *extra,
        ]
        if tls is not None:
            self._command += [f"--cert-file={tls.cert}", f"--key-file={tls.key}"]
            if tls.client_ca is not None:
                self._command += ["--client-cert-auth", f"--trusted-ca-file={tls.client_ca}"]
        self._tls = tls
        self._host, self._port = host, client_port
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start or start again; does not wait."""
        with Path(self.folder, "log").open("ab") as log:
            self._process = subprocess.Popen(self._command, stderr=log, stdout=log)

    def wait_ready(self) -> Self:
        """Wait until the member serves."""
        nap = threading.Event()
        for _ in range(int(_READY_S / 0.01)):
            assert self._process is not None
            assert self._process.poll() is None, Path(self.folder, "log").read_text()[-2000:]
            if self._healthy():
                return self
            nap.wait(0.01)
        raise AssertionError(Path(self.folder, "log").read_text()[-2000:])

    def _healthy(self) -> bool:
        connection: http.client.HTTPConnection
        if self._tls is None:
            connection = http.client.HTTPConnection(self._host, self._port, timeout=2)
        elif self._tls.client_ca is not None:
            # Without a client certificate no request gets through: a connection has to do.
            try:
                socket.create_connection((self._host, self._port), timeout=2).close()
            except OSError:
                return False
            return True
        else:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
            connection = http.client.HTTPSConnection(
                self._host, self._port, timeout=2, context=context
            )
        try:
            connection.request("GET", "/health")
            return b'"true"' in connection.getresponse().read()
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal: SIGSTOP freezes, SIGCONT thaws."""
        assert self._process is not None
        self._process.send_signal(number)
        if number == signal.SIGSTOP:
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)

    def kill(self) -> None:
        """SIGKILL, and wait; the data stays for another `start`."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """End it and remove its folder."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def etcd_server(
    *, tls: ServerTls | None = None, host: str = "127.0.0.1", extra: Sequence[str] = ()
) -> Iterator[EtcdServer]:
    """Run one member."""
    client, peer = free_ports(2)
    server = EtcdServer(
        "a", client_port=client, peers=[("a", peer)], tls=tls, host=host, extra=extra
    )
    try:
        server.start()
        yield server.wait_ready()
    finally:
        server.stop()


@contextmanager
def etcd_cluster(size: int = 3) -> Iterator[list[EtcdServer]]:
    """Run several members of one cluster."""
    ports = free_ports(2 * size)
    names = [chr(ord("a") + number) for number in range(size)]
    peers = list(zip(names, ports[size:], strict=True))
    servers = [
        EtcdServer(name, client_port=port, peers=peers)
        for name, port in zip(names, ports[:size], strict=True)
    ]
    try:
        for server in servers:
            server.start()
        for server in servers:
            server.wait_ready()
        yield servers
    finally:
        for server in servers:
            server.stop()


def free_ports(count: int) -> list[int]:
    """Return ports that were free a moment ago."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def etcdctl(server: EtcdServer, *arguments: str) -> str:
    """Run etcdctl against a plain member; return what it prints."""
    program = Path(find_etcd()).with_name("etcdctl")
    return subprocess.run(
        [str(program), f"--endpoints={server.endpoint}", *arguments],
        env={**os.environ, "ETCDCTL_API": "3"},
        check=True,
        capture_output=True,
        text=True,
    ).stdout
