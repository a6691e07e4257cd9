"""REPORTS.md, several agents: etcd that is missing, goes away, loses its data, freezes; leases; clients."""

import signal
import time
from collections.abc import Iterator

import psutil
import pytest

from tests.e2e import cluster
from tests.e2e.cluster import ACT_S, LEASE_S, Job
from tests.e2e.harness import ROOT, Site
from tests.fakes.etcd_server import EtcdServer, etcd_server, etcdctl, free_ports


@pytest.fixture
def etcd() -> Iterator[EtcdServer]:
    """One member per test, since most tests here harm it."""
    with etcd_server() as server:
        yield server


def test_r90_the_first_job_on_a_new_etcd(site: Site, etcd: EtcdServer) -> None:
    """Two agents at the same instant on an empty etcd; the same once more after its data were lost."""
    for number in range(2):
        job = Job(site, etcd, job_id="first", flags=("--nnodes=2",))
        pair = job.starts(2)
        job.world(pair)
        job.finish(pair)
        if number == 0:
            with cluster.wiped(etcd):
                pass


@pytest.mark.parametrize("how", ["keys", "all"])
def test_r90_data_lost_during_a_job(site: Site, etcd: EtcdServer, how: str) -> None:
    """Workers run on, membership and table are written anew, and a later failure is handled as ever."""
    job = Job(site, etcd, job_id="wiped", flags=("--nnodes=2", "--max-restarts=1"))
    pair = job.starts(2)
    world = job.world(pair)
    hosts = job.hosts()
    if how == "keys":
        etcdctl(etcd, "del", "--prefix", "/frun/")
    else:
        with cluster.wiped(etcd):
            pass
    job.until(lambda: job.hosts() == hosts and "ranktable" in job.stored(), ACT_S, "written anew")
    assert job.world(pair) == world
    psutil.Process(world[1].pid).kill()
    again = job.world(pair, after=world)
    assert {up.count for up in again} == {1}
    job.finish(pair)
    job.left_nothing()


def test_r91_the_old_name_of_the_backend(site: Site, etcd: EtcdServer) -> None:
    """`etcd-v2` meets `etcd` on a server with the v3 interface, and says how it was taken."""
    job = Job(site, etcd, job_id="r91", flags=("--nnodes=2",))
    pair = [job.start(), job.start("--rdzv-backend=etcd-v2", env={"LOGLEVEL": "INFO"})]
    job.world(pair)
    assert "etcd-v2 is taken as etcd" in job.finish(pair)[1]


def test_r92_a_broken_client_shows_only_when_etcd_is_asked_for(site: Site) -> None:
    """Help, version and a wrong flag are answered as ever; a launch ends with one line that names it."""
    for package in ("etcd3aio", "grpc", "google"):
        site.script(
            f"broken/{package}/__init__.py", 'raise TypeError("descriptors of an old protobuf")'
        )
    env = {"PYTHONPATH": f"{site.cwd}/broken:{ROOT}"}
    script = site.script("x.py", "")
    for flags, code in ((("--help",), 0), (("--version",), 0), (("--nnodes=no", script), 2)):
        done = site.run(*flags, env=env)
        assert done.code == code
        assert "descriptors" not in done.err
    done = site.run("--start-method=spawn", script, env=env)
    assert done.code == 1
    assert done.err.count("\n") == 1
    assert "descriptors of an old protobuf" in done.err


def test_r93_no_etcd_at_the_start(site: Site) -> None:
    """A bounded wait that costs no processor time, then one line; an etcd that comes late is used."""
    client, peer = free_ports(2)
    server = EtcdServer("a", client_port=client, peers=[("a", peer)])
    try:
        job = Job(site, server, job_id="r93", flags=("--rdzv-conf=join_timeout=4",))
        agent = job.start()
        said = agent.ends(1)
        assert f"no etcd answers at 127.0.0.1:{client} (connection refused)" in said
        assert said.count("\n") == 1

        job.flags = ()
        late = job.start(env={"LOGLEVEL": "INFO"})
        late.running.expect("zygote was ready", stream="err")
        before = cluster.cpu_s(late.running.pid)
        time.sleep(2.0)
        assert cluster.cpu_s(late.running.pid) - before < 1.0
        server.start()
        job.world([late])
        job.finish([late])
    finally:
        server.stop()


def test_r93_etcd_gone_during_a_job(site: Site, etcd: EtcdServer) -> None:
    """For 8 s: little processor time, one line, no file left open, workers untouched, then as before."""
    job = Job(site, etcd, job_id="r93", flags=("--nnodes=2", "--max-restarts=1"))
    pair = job.starts(2)
    world = job.world(pair)
    pids = [agent.running.pid for agent in pair]
    opened = [cluster.descriptors(pid) for pid in pids]
    lines = [agent.running.err.count("\n") for agent in pair]
    etcd.kill()
    before = [cluster.cpu_s(pid) for pid in pids]
    time.sleep(8.0)
    for pid, cpu, files in zip(pids, before, opened, strict=True):
        assert cluster.cpu_s(pid) - cpu < 3.0
        assert cluster.descriptors(pid) <= files + 4
    etcd.start()
    etcd.wait_ready()
    for agent in pair:
        agent.running.expect("etcd answers again", stream="err")
    assert job.world(pair) == world
    for agent, count in zip(pair, lines, strict=True):
        assert agent.running.err.count("\n") - count <= 6, agent.running.err
    psutil.Process(world[0].pid).kill()
    job.world(pair, after=world)
    job.finish(pair)


def test_r95_a_host_that_died_while_etcd_was_away(site: Site, etcd: EtcdServer) -> None:
    """Nobody saw it go, yet it is replaced when etcd is back."""
    flags = ("--nnodes=2", "--replace-timeout=60")
    job = Job(site, etcd, job_id="r95", flags=flags)
    pair = job.starts(2)
    world = job.world(pair)
    spare = job.start()
    job.until(lambda: len(job.hosts()) == 3, ACT_S, "the spare is registered")
    etcd.kill()
    lost = world[1].agent
    job.kill([lost])
    etcd.start()
    etcd.wait_ready()
    both = [world[0].agent, spare]
    job.world(both, after=world, limit_s=2 * LEASE_S + ACT_S)
    job.finish(both)


def test_r96_a_lease_revoked_by_hand(site: Site, etcd: EtcdServer) -> None:
    """The key outlives many lease times; after a revoke the host is back within a period, and trains on."""
    job = Job(site, etcd, job_id="r96", flags=("--nnodes=2", "--rdzv-conf=keep_alive_interval=0.5"))
    pair = job.starts(2)
    world = job.world(pair)
    hosts = job.hosts()
    watched = time.monotonic()
    while time.monotonic() < watched + 5 * 2.0:
        assert job.hosts() == hosts
    for host in hosts:
        lease = job.stored()[f"hosts/{host}"]["lease"]
        etcdctl(etcd, "lease", "revoke", f"{lease:x}")
        job.until(lambda: job.hosts() == hosts, 2 * LEASE_S, "it is registered again")
        assert job.stored()[f"hosts/{host}"]["lease"] != lease
    again = job.world(pair)
    assert [up.agent for up in again] == [up.agent for up in world]
    job.finish(pair)
    job.left_nothing()


def test_r99_etcd_frozen_while_a_worker_is_killed(site: Site, etcd: EtcdServer) -> None:
    """The silence is noticed in bounded time; after the thaw one restart, one world, nobody twice."""
    job = Job(site, etcd, job_id="r99", flags=("--nnodes=2", "--max-restarts=1"))
    pair = job.starts(2)
    world = job.world(pair)
    etcd.signal(signal.SIGSTOP)
    try:
        psutil.Process(world[1].pid).kill()
        for agent in pair:
            agent.running.expect("etcd does not answer", stream="err")
        time.sleep(LEASE_S + 2.0)
    finally:
        etcd.signal(signal.SIGCONT)
    again = job.world(pair, after=world)
    assert {up.count for up in again} == {1}
    job.finish(pair)
    for agent in pair:
        assert len(agent.workers) == 2
    job.left_nothing()


BLOCKED = """
import datetime, os, time
import torch.distributed as dist
print("began", os.getpid())
store = dist.TCPStore(
    os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False,
    timeout=datetime.timedelta(seconds=5),
)
try:
    store.get("never")
except dist.DistStoreError:
    print("waited")
"""


def test_s16_a_worker_that_waits_in_a_store_silences_nobody(site: Site, etcd: EtcdServer) -> None:
    """A blocking call that is longer than a lease: the hosts stay registered and no second group forms."""
    job = Job(site, etcd, job_id="s16", flags=("--nnodes=2",))
    script = site.script("blocked.py", BLOCKED)
    flags = (
        "--nnodes=2",
        "--rdzv-backend=etcd",
        f"--rdzv-endpoint={etcd.endpoint}",
        "--rdzv-id=s16",
    )
    pair = [site.start(*flags, script) for _ in range(2)]
    for each in pair:
        each.expect(r"began \d+")
    hosts = job.hosts()
    assert len(hosts) == 2
    while (stored := job.hosts()) == hosts and all("waited" not in each.out for each in pair):
        time.sleep(0.1)
    assert stored == hosts or any("waited" in each.out for each in pair)
    for each in pair:
        done = each.wait()
        assert done.code == 0, done.err
        assert len(done.said("began")) == 1
