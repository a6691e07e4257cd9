"""REPORTS.md: machines without names or a network, proxies between frun and etcd, and how requests grow."""

import os
import re
import subprocess
import urllib.request
from collections.abc import Iterator

import pytest

from tests.e2e.cluster import ACT_S, Job
from tests.e2e.harness import Site
from tests.fakes.etcd_server import EtcdServer, etcd_server

REDUCE = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
for step in range(5):
    one = torch.ones(1)
    dist.all_reduce(one)
print("sum", int(one))
dist.destroy_process_group()
"""
NAMELESS = 'hostname no-such-name && {} exec "$@"'


@pytest.fixture
def etcd() -> Iterator[EtcdServer]:
    """One member per test, whose counters begin at 0."""
    with etcd_server() as server:
        yield server


def unshare(*spaces: str, before: str = "") -> tuple[str, ...]:
    """Return what puts a command into new namespaces, with a host name that nobody knows."""
    if os.geteuid() != 0:
        pytest.skip("NOT TESTED, needs root for namespaces")
    prefix = ("unshare", *spaces, "sh", "-c", NAMELESS.format(before), "sh")
    if subprocess.run([*prefix, "true"], capture_output=True).returncode != 0:
        pytest.skip("NOT TESTED, no namespaces here")
    return prefix


@pytest.mark.parametrize("spaces", [("-u",), ("-u", "-n")])
def test_r49_a_machine_without_a_name_or_a_network(site: Site, spaces: tuple[str, ...]) -> None:
    """Alone with a host name that does not resolve, and with no interface but `lo`: gloo trains."""
    prefix = unshare(*spaces, before="ip link set lo up &&")
    script = site.script("reduce.py", REDUCE)
    done = site.run("--standalone", "--nproc-per-node=2", script, prefix=prefix, limit_s=60)
    assert (done.code, done.lines()) == (0, ["sum 2", "sum 2"]), done.err


def test_r49_loopback_down_is_one_line(site: Site) -> None:
    """Nothing can work then; the line says what is missing."""
    prefix = unshare("-u", "-n")
    script = site.script("x.py", "")
    done = site.run("--standalone", "--start-method=spawn", script, prefix=prefix)
    assert done.code != 0
    assert done.err.count("\n") == 1, done.err
    assert "no way to 127.0.0.1" in done.err
    assert "ip link set lo up" in done.err


@pytest.mark.parametrize("upper", [False, True])
def test_r55_a_web_proxy_does_not_stand_in_the_way(
    site: Site, etcd: EtcdServer, upper: bool
) -> None:
    """Neither for an address nor for a name as endpoint; the workers' own variables are untouched."""
    names = [f"{kind}_proxy" for kind in ("http", "https", "all", "grpc")]
    if upper:
        names = [name.upper() for name in names]
    env: dict[str, str | None] = dict.fromkeys(names, "http://127.0.0.1:9")
    job = Job(site, etcd, job_id=f"r55-{upper}", flags=("--nnodes=2",))
    port = etcd.endpoint.rpartition(":")[2]
    pair = [
        job.start(env=env, names=names, at=f"{host}:{port}") for host in ("127.0.0.1", "localhost")
    ]
    for up in job.world(pair):
        assert {name: up.said[name] for name in names} == env
    job.finish(pair)


def requests(etcd: EtcdServer) -> int:
    """Return how many requests an etcd has been sent so far, and changes it sent to watches."""
    with urllib.request.urlopen(f"http://{etcd.endpoint}/metrics") as answer:
        text = answer.read().decode()
    counts = re.findall(
        r"^grpc_server_msg_(?:received|sent)_total\{.*\} (\S+)$", text, re.MULTILINE
    )
    return round(sum(map(float, counts)))


def test_r88_requests_grow_in_line_with_the_agents(site: Site) -> None:
    """Four times the agents cost about four times the messages: to form, and to end."""
    cost = {}
    for count in (3, 12):
        with etcd_server() as etcd:
            job = Job(site, etcd, job_id=f"r88-{count}", flags=(f"--nnodes={count}",))
            agents = job.starts(count)
            job.world(agents, limit_s=4 * ACT_S)
            job.finish(agents)
            cost[count] = requests(etcd)
    assert cost[12] < 4 * 1.5 * cost[3], cost
