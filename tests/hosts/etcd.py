"""A real etcd of three members, one host each, that tests can hurt."""

import base64
import http.client
import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from frun.rendezvous.embedded import find_etcd
from tests.hosts.network import Host, until

PORT = 2379


class EtcdCluster:
    """Members are numbered as their hosts."""

    def __init__(self, hosts: list[Host], folder: Path) -> None:
        self.hosts = hosts
        self._folder = folder
        self._members: list[subprocess.Popen[bytes] | None] = [None] * len(hosts)

    @property
    def endpoints(self) -> str:
        """What agents are told."""
        return ",".join(f"{host.address}:{PORT}" for host in self.hosts)

    def __enter__(self) -> "EtcdCluster":
        """Start all, and wait until each serves."""
        for number in range(len(self.hosts)):
            self.start(number)
        for number in range(len(self.hosts)):
            self.wait_healthy(number)
        return self

    def __exit__(self, *_: object) -> None:
        """End all."""
        for host in self.hosts:
            host.kill(silently=False)

    def start(self, number: int) -> None:
        """Start a member, anew or again with what it had stored."""
        host = self.hosts[number]
        peers = ",".join(f"m{i}=http://{h.address}:2380" for i, h in enumerate(self.hosts))
        self._members[number] = host.run(
            [
                find_etcd(),
                f"--name=m{number}",
                f"--data-dir={self._folder}/m{number}",
                f"--listen-client-urls=http://{host.address}:{PORT}",
                f"--advertise-client-urls=http://{host.address}:{PORT}",
                f"--listen-peer-urls=http://{host.address}:2380",
                f"--initial-advertise-peer-urls=http://{host.address}:2380",
                f"--initial-cluster={peers}",
                "--heartbeat-interval=50",
                "--election-timeout=500",
            ],
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
            output=self._folder / f"m{number}.log",
        )

    def kill(self, number: int) -> None:
        """SIGKILL a member."""
        self.hosts[number].kill(silently=False)

    def freeze(self, number: int) -> None:
        """SIGSTOP a member."""
        self.hosts[number].freeze()

    def thaw(self, number: int) -> None:
        """Let it go on."""
        self.hosts[number].thaw()

    def wait_healthy(self, number: int) -> None:
        """Wait until this member serves and knows a leader."""
        until(
            lambda: self._healthy(number),
            within_s=20,
            what=lambda: (self._folder / f"m{number}.log").read_text()[-2000:],
        )

    def members_by_role(self) -> tuple[int, list[int]]:
        """Return the number of etcd's own leader, and those of the followers."""
        for number in range(len(self.hosts)):
            status = self._post(number, "/v3/maintenance/status", {})
            if status is not None and status["leader"] == status["header"]["member_id"]:
                return number, [n for n in range(len(self.hosts)) if n != number]
        raise AssertionError("no member of etcd leads")

    def get(self, key: str) -> str | None:
        """Return what a key holds, asked at whichever member answers."""
        asked = {"key": base64.b64encode(key.encode()).decode()}
        for number in range(len(self.hosts)):
            answer = self._post(number, "/v3/kv/range", asked)
            if answer is not None:
                kvs = answer.get("kvs", [])
                return base64.b64decode(kvs[0]["value"]).decode() if kvs else None
        raise AssertionError("no member of etcd answers")

    def keys(self, prefix: str) -> list[str]:
        """Return the keys under a prefix."""
        end = prefix[:-1] + chr(ord(prefix[-1]) + 1)
        asked = {
            "key": base64.b64encode(prefix.encode()).decode(),
            "range_end": base64.b64encode(end.encode()).decode(),
            "keys_only": True,
        }
        for number in range(len(self.hosts)):
            answer = self._post(number, "/v3/kv/range", asked)
            if answer is not None:
                return [base64.b64decode(kv["key"]).decode() for kv in answer.get("kvs", [])]
        raise AssertionError("no member of etcd answers")

    def _healthy(self, number: int) -> bool:
        answer = self._ask(number, "GET", "/health", None)
        return answer is not None and answer.get("health") in ("true", True)

    def _post(self, number: int, path: str, body: Mapping[str, object]) -> dict[str, Any] | None:
        return self._ask(number, "POST", path, json.dumps(body))

    def _ask(self, number: int, method: str, path: str, body: str | None) -> dict[str, Any] | None:
        host = self.hosts[number]
        connection = http.client.HTTPConnection(host.address, PORT)
        try:
            connection.sock = host.connect(host.address, PORT, 1.0)
            connection.request(method, path, body)
            answer: dict[str, Any] = json.loads(connection.getresponse().read())
        except (OSError, ValueError, http.client.HTTPException):
            return None
        finally:
            connection.close()
        return answer
