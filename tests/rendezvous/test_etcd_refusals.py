"""Everything that can be wrong between frun and etcd names its own reason, within seconds."""

import asyncio
import os
import re
import resource
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from frun.errors import FrunError, LeaseLost, StoreRefused, StoreUnavailable, UsageError
from frun.rendezvous.etcd import EtcdStore, Tls
from frun.rendezvous.store import Put
from tests.fakes.certificates import Authority, Pair
from tests.fakes.etcd_server import EtcdServer, ServerTls, etcd_server, etcdctl, free_ports

_CONNECT_S = 20.0


async def _try(store: EtcdStore, timeout_s: float = _CONNECT_S) -> None:
    try:
        await store.connect(timeout_s)
        await store.commit([], [Put(key="/frun/probe", value=b"")])
    finally:
        await store.close()


def _connect(endpoint: str, tls: Tls | None = None, timeout_s: float = _CONNECT_S) -> None:
    """Connect and write once, within bounds."""

    async def main() -> None:
        await _try(EtcdStore([endpoint], tls=tls), timeout_s)

    begun = time.monotonic()
    try:
        asyncio.run(main())
    finally:
        assert time.monotonic() - begun < timeout_s + 20


def _refusal(endpoint: str, tls: Tls | None = None, timeout_s: float = _CONNECT_S) -> str:
    with pytest.raises(FrunError) as caught:
        _connect(endpoint, tls, timeout_s)
    assert isinstance(caught.value, StoreRefused), caught.value
    text = str(caught.value)
    assert "\n" not in text
    return text


@dataclass(frozen=True, slots=True)
class Files:
    """Certificates of the table."""

    ours: Authority
    foreign: Authority
    client: Pair
    folder: Path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Make them once."""
    folder = tmp_path_factory.mktemp("tls")
    ours, foreign = Authority(folder, "ours"), Authority(folder, "foreign")
    return Files(ours, foreign, ours.issue("client"), folder)


@contextmanager
def _tls_server(pair: Pair, client_ca: str | None = None) -> Iterator[EtcdServer]:
    with etcd_server(tls=ServerTls(cert=pair.cert, key=pair.key, client_ca=client_ca)) as server:
        yield server


@pytest.fixture(scope="module")
def tls_etcd(files: Files) -> Iterator[EtcdServer]:
    """Run an etcd with TLS that asks for no client certificate."""
    with _tls_server(files.ours.issue("server")) as server:
        yield server


def test_the_right_authority_works(tls_etcd: EtcdServer, files: Files) -> None:
    """With the authority of the server's certificate everything works at once."""
    _connect(tls_etcd.endpoint, Tls(ca=files.ours.cert))


def test_no_authority(tls_etcd: EtcdServer) -> None:
    """Without --etcd-ca a private authority is unknown: the line says what to give."""
    assert "give --etcd-ca" in _refusal(tls_etcd.endpoint, Tls())


def test_wrong_authority(tls_etcd: EtcdServer, files: Files) -> None:
    """With another authority the line names its file."""
    text = _refusal(tls_etcd.endpoint, Tls(ca=files.foreign.cert))
    assert f"not by the authority in {files.foreign.cert}" in text


def test_plain_client_at_a_tls_port(tls_etcd: EtcdServer) -> None:
    """Without any TLS option a TLS port is named as such."""
    assert "it speaks TLS: give --etcd-ca" in _refusal(tls_etcd.endpoint)


def test_tls_client_at_a_plain_port(shared_etcd: EtcdServer, files: Files) -> None:
    """With TLS options a plain port is named as such."""
    text = _refusal(shared_etcd.endpoint, Tls(ca=files.ours.cert))
    assert "it does not speak TLS: drop --etcd-ca" in text


def test_name_mismatch(files: Files) -> None:
    """A certificate for another address is refused, and the address is shown."""
    with _tls_server(files.ours.issue("elsewhere", address="10.1.2.3")) as server:
        text = _refusal(server.endpoint, Tls(ca=files.ours.cert))
    assert "its certificate does not name 127.0.0.1" in text


def test_expired(files: Files) -> None:
    """An expired certificate is called expired."""
    with _tls_server(files.ours.issue("old", expired=True)) as server:
        assert "has expired" in _refusal(server.endpoint, Tls(ca=files.ours.cert))


def test_client_certificates(files: Files) -> None:
    """A server that asks for a certificate gets the right one, none, and a foreign one."""
    with _tls_server(files.ours.issue("strict"), client_ca=files.ours.cert) as server:
        right = Tls(ca=files.ours.cert, cert=files.client.cert, key=files.client.key)
        _connect(server.endpoint, right)
        none = _refusal(server.endpoint, Tls(ca=files.ours.cert))
        assert "give --etcd-cert and --etcd-key" in none
        pair = files.foreign.issue("intruder")
        foreign = _refusal(server.endpoint, Tls(ca=files.ours.cert, cert=pair.cert, key=pair.key))
        assert f"it refuses the client certificate {pair.cert}" in foreign


def test_files_that_can_not_be_used(files: Files) -> None:
    """Missing, half given, foreign and broken files are usage errors that name flag and path."""
    gone = str(files.folder / "gone.pem")
    junk = files.folder / "junk.pem"
    junk.write_text("no pem")
    ours, client = files.ours.cert, files.client
    other = files.ours.issue("other")
    table = [
        (Tls(ca=gone), f"--etcd-ca: cannot read {gone}: No such file"),
        (Tls(ca=ours, cert=gone, key=client.key), f"--etcd-cert: cannot read {gone}"),
        (Tls(ca=ours, cert=client.cert, key=gone), f"--etcd-key: cannot read {gone}"),
        (Tls(ca=ours, cert=client.cert), "must be given together"),
        (Tls(ca=str(junk)), f"--etcd-ca: {junk} holds no PEM certificate"),
        (Tls(ca=ours, cert=client.cert, key=other.key), "are not a PEM certificate and its"),
    ]
    for tls, text in table:
        with pytest.raises(UsageError, match=re.escape(text)):
            asyncio.run(_try(EtcdStore(["127.0.0.1:1"], tls=tls)))


@contextmanager
def _answering(reply: bytes) -> Iterator[str]:
    """Serve the same bytes to every connection."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.settimeout(2)
            with _ignoring_peers_that_left():
                self.request.recv(65536)
                self.request.sendall(reply)

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = False
        block_on_close = True

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def _ignoring_peers_that_left() -> Iterator[None]:
    """Ignore a peer that has gone."""
    try:
        yield
    except OSError:
        return


def test_what_is_not_etcd_v3_is_named() -> None:
    """An etcd with the old API only, a web server and another service are each named as such."""
    head = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"
    with _answering(head + b'{"etcdserver":"2.3.8","etcdcluster":"2.3.0"}') as endpoint:
        assert "etcd 2.3.8, which has no v3 API" in _refusal(endpoint)
    with _answering(head + b"<html>") as endpoint:
        assert "a web server, not etcd" in _refusal(endpoint)
    with _answering(b"SSH-2.0-OpenSSH\r\n") as endpoint:
        assert "not etcd: it answers b'SSH-2.0" in _refusal(endpoint)


def test_nobody_there_costs_one_clear_line_and_no_cpu() -> None:
    """With no server the error names endpoint, reason and fix; waiting costs next to no CPU."""
    endpoint = f"127.0.0.1:{free_ports(1)[0]}"
    before = resource.getrusage(resource.RUSAGE_SELF)
    with pytest.raises(StoreUnavailable) as caught:
        _connect(endpoint, timeout_s=3.0)
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert str(caught.value) == (
        f"no etcd answers at {endpoint} (connection refused): "
        "start it, or name another with --rdzv-endpoint"
    )
    assert not isinstance(caught.value, StoreRefused)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.5


def test_a_silent_peer_is_bounded() -> None:
    """Something that accepts and says nothing ends the wait in time too."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(StoreUnavailable, match="no answer within 2 s"):
            _connect(endpoint, timeout_s=2.0)


def test_a_name_that_does_not_resolve() -> None:
    """A name without an address is called that."""
    with pytest.raises(StoreUnavailable, match="cannot resolve the name"):
        _connect("no-such-host.invalid:2379", timeout_s=2.0)


def test_one_good_endpoint_is_enough(shared_etcd: EtcdServer) -> None:
    """Dead and foreign endpoints beside a good one cost little and are no error."""
    dead = f"127.0.0.1:{free_ports(1)[0]}"

    async def main() -> None:
        store = EtcdStore([dead, shared_etcd.endpoint])
        await _try(store)
        assert store.endpoint == shared_etcd.endpoint

    asyncio.run(main())


def test_a_web_proxy_is_not_used(shared_etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Proxy variables of any spelling do not stand between frun and etcd."""
    for name in ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for host in ("127.0.0.1", "localhost"):
        _connect(f"{host}:{shared_etcd.endpoint.rpartition(':')[2]}")


def test_password(shared_etcd: EtcdServer) -> None:
    """With authentication on: right, wrong and no password, missing permission, a token that ends."""
    with etcd_server(extra=["--auth-token-ttl=1"]) as server:
        for command in (
            "user add root:top",
            "user grant-role root root",
            "user add lea:pw",
            "role add frun",
            "role grant-permission frun --prefix=true readwrite /frun/",
            "user grant-role lea frun",
            "user add guest:pw",
            "auth enable",
        ):
            etcdctl(server, *command.split())

        async def main() -> None:
            store = EtcdStore([server.endpoint], user="lea", password="pw")
            await store.connect(_CONNECT_S)
            lease = await store.grant(60)
            for _ in range(2):
                await store.commit([], [Put(key="/frun/a", value=b"", lease=lease)])
                watch = store.watch("/frun/", (await store.read("/frun/")).revision - 1)
                assert (await anext(watch)).changes[0].key == "/frun/a"
                await watch.aclose()
                await asyncio.sleep(2.5)  # longer than the token lives: time is what is tested
            await store.refresh(lease)
            await store.revoke(lease)
            with pytest.raises(StoreRefused, match="user 'lea' has no permission"):
                await store.read("/other/")
            watch = store.watch("/other/", 0)
            with pytest.raises(StoreRefused):
                await anext(watch)
            with pytest.raises(LeaseLost):
                await store.refresh(lease)
            await store.close()
            for user, password, text in (
                ("lea", "wrong", "wrong user or password (user 'lea')"),
                ("nobody", "pw", "wrong user or password (user 'nobody')"),
                ("guest", "pw", "user 'guest' has no permission"),
                (None, None, "asks for a user and a password"),
            ):
                with pytest.raises(StoreRefused, match=re.escape(text)):
                    await _try(EtcdStore([server.endpoint], user=user, password=password))

        asyncio.run(main())

    async def without_authentication() -> None:
        await _try(EtcdStore([shared_etcd.endpoint], user="lea", password="pw"))

    asyncio.run(without_authentication())


def test_a_broken_client_installation_is_one_line(tmp_path: Path) -> None:
    """An etcd client that does not import is a launch error that names the cure."""
    broken = tmp_path / "etcd3aio"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise TypeError('descriptors can not be created')")
    program = (
        "from frun.errors import LaunchError\n"
        "try:\n    import frun.rendezvous.etcd\n"
        "except LaunchError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "does not load (descriptors can not be created): reinstall it" in done.stdout
