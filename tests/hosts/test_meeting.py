"""How hosts find each other: with no infrastructure, over IPv6 alone, by names nobody else knows."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts.job import FORM_S, Job
from tests.hosts.network import Network
from tests.hosts.scenarios import Stage

pytestmark = pytest.mark.hosts


def test_torchruns_command_lines_need_no_infrastructure(hosts: Stage) -> None:
    """c10d and static: the host that the endpoint names keeps the etcd; it may start last."""
    net = hosts.network
    first = net["h1"].address, net["h3"].address
    c10d = ("--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint={first[0]}:29400")
    static = ("--nnodes=2", f"--master-addr={first[1]}", "--master-port=29500")
    with (
        Job(folder=hosts.folder / "c10d", flags=(*c10d, "--rdzv-id=c")) as one,
        Job(folder=hosts.folder / "static", flags=static) as other,
    ):
        one.start(net["h2"])
        one.start(net["h1"])
        other.start(net["h3"], "--node-rank=0")
        other.start(net["h4"], "--node-rank=1")
        met = one.world(size=2, within_s=FORM_S)
        assert met.hosts == {0: "h1", 1: "h2"}
        assert met.master == first[0]
        given = other.world(size=2, within_s=FORM_S)
        assert given.hosts == {0: "h3", 1: "h4"}
        assert given.master == first[1]
        one.finish()
        other.finish()


def test_names_that_mean_nothing_to_others(hosts: Stage) -> None:
    """Own names known to oneself only or leading to loopback, and no name server that answers (R46)."""
    with hosts.job("--nnodes=2") as job:
        for name in ("h1", "h2"):
            own = hosts.network[name]
            unhelpful = "127.0.0.1 localhost\n127.0.0.1 h1\n" if name == "h1" else ""
            job.start(own, etc_hosts=unhelpful)
        world = job.world(size=2, within_s=FORM_S)
        assert {news.name for news in world.ranks.values()} == {"h1", "h2"}
        assert world.master == hosts.network[world.hosts[0]].address
        job.finish()


def test_a_second_address(hosts: Stage) -> None:
    """MASTER_ADDR is the --local-addr; the endpoint may be any own address; a foreign one is told (R48)."""
    net = hosts.network
    with (
        hosts.job("--nnodes=2") as job,
        Job(
            folder=hosts.folder / "alias",
            flags=("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=alias:29400"),
        ) as alias,
        hosts.job("--nnodes=1") as foreign,
    ):
        for name in ("h1", "h2"):
            job.start(net[name], f"--local-addr={net[name].second}")
        names = f"{net['h3'].second} alias\n"
        for name in ("h3", "h4"):
            alias.start(net[name], "--rdzv-id=a", etc_hosts=names)
        foreign.start(net["h5"], f"--local-addr={net['h1'].address}")
        world = job.world(size=2, within_s=FORM_S)
        assert world.master == net[world.hosts[0]].second
        aliased = alias.world(size=2, within_s=FORM_S)
        assert aliased.hosts == {0: "h3", 1: "h4"}
        wrong = foreign.agent("h5")
        assert wrong.wait(30) != 0
        assert f"--local-addr {net['h1'].address}" in wrong.said
        assert "is not an address of this machine" in wrong.said
        foreign.leaves_nothing(wrong)
        job.finish()
        alias.finish()


@pytest.fixture
def ipv6(hosts: Stage) -> Iterator[tuple[Network, Path]]:
    """Return two hosts without any IPv4."""
    with (
        tempfile.TemporaryDirectory(prefix=f"frunt{os.getpid()}-") as folder,
        Network(("s1", "s2"), ipv6=True) as network,
    ):
        yield network, Path(folder)


def test_ipv6_alone(ipv6: tuple[Network, Path]) -> None:
    """Two hosts that have nothing but IPv6 meet at a bare address and train."""
    network, folder = ipv6
    at = f"--rdzv-endpoint=[{network['s1'].address}]:29400"
    with Job(folder=folder / "job", flags=("--nnodes=2", "--rdzv-backend=c10d", at)) as job:
        for name in ("s1", "s2"):
            job.start(network[name], "--rdzv-id=six")
        world = job.world(size=2, within_s=FORM_S)
        assert world.master == network["s1"].address
        job.advances(world)
        job.finish()
