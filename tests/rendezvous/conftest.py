"""Fixtures of the store tests: one real etcd for all that do not stop it."""

from collections.abc import Iterator

import pytest

from tests.fakes.etcd_server import EtcdServer, etcd_server


@pytest.fixture(scope="session")
def shared_etcd() -> Iterator[EtcdServer]:
    """Run one etcd for the session; tests use prefixes of their own."""
    with etcd_server() as server:
        yield server
