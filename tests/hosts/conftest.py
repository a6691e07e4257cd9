"""One network with one etcd for all tests of this folder; whole again after each."""

from collections.abc import Iterator

import pytest

from tests.hosts.network import missing
from tests.hosts.scenarios import Stage, stage


@pytest.fixture(scope="package")
def _network() -> Iterator[Stage]:
    why = missing()
    if why:
        pytest.skip(f"NOT TESTED, {why}")
    with stage() as ready:
        yield ready


@pytest.fixture
def hosts(_network: Stage) -> Iterator[Stage]:
    """Return healthy hosts and a healthy etcd."""
    _network.repair()
    yield _network
    _network.repair()
