"""What an etcd has done, as it counts itself."""

import re
import urllib.request
from dataclasses import dataclass

_LINE = re.compile(r"^(\w+)(?:\{([^}]*)\})? (\S+)$", re.MULTILINE)
_SERVICE = re.compile(r'grpc_service="etcdserverpb\.(\w+)"')


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Counts since etcd started, or between two looks."""

    messages: int = 0
    """gRPC messages received and sent, those of leases left out."""
    lease_messages: int = 0
    writes: int = 0
    """Keys put or deleted: those that a lease took along too."""
    received_bytes: int = 0
    sent_bytes: int = 0

    def __sub__(self, earlier: "Load") -> "Load":
        """Return what was added since an earlier look."""
        return Load(
            messages=self.messages - earlier.messages,
            lease_messages=self.lease_messages - earlier.lease_messages,
            writes=self.writes - earlier.writes,
            received_bytes=self.received_bytes - earlier.received_bytes,
            sent_bytes=self.sent_bytes - earlier.sent_bytes,
        )


def load(endpoint: str) -> Load:
    """Ask an etcd for its counts."""
    with urllib.request.urlopen(f"http://{endpoint}/metrics") as answer:
        text = answer.read().decode()
    messages = leases = writes = received = sent = 0
    for name, labels, value in _LINE.findall(text):
        count = float(value)
        if name in ("grpc_server_msg_received_total", "grpc_server_msg_sent_total"):
            service = _SERVICE.search(labels or "")
            if service is not None and service[1] == "Lease":
                leases += round(count)
            else:
                messages += round(count)
        elif name in ("etcd_mvcc_put_total", "etcd_mvcc_delete_total"):
            writes += round(count)
        elif name == "etcd_network_client_grpc_received_bytes_total":
            received += round(count)
        elif name == "etcd_network_client_grpc_sent_bytes_total":
            sent += round(count)
    return Load(
        messages=messages,
        lease_messages=leases,
        writes=writes,
        received_bytes=received,
        sent_bytes=sent,
    )
