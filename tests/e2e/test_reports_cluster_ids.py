"""REPORTS.md, several agents: job ids, and running a job of the same id again."""

import json
from collections.abc import Iterator

import pytest

from frun.protocol.keys import Keys
from tests.e2e.cluster import ACT_S, LEASE_S, Job
from tests.e2e.harness import Site
from tests.fakes.etcd_server import EtcdServer, etcd_server, etcdctl, free_ports


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdServer]:
    """One member for all tests here, each of which uses ids of its own."""
    with etcd_server() as server:
        yield server


def test_r18_jobs_without_an_id_never_meet(site: Site, etcd: EtcdServer) -> None:
    """Two of one host each at the same time on one etcd: each is a world of its own; then one more."""
    job = Job(site, etcd, job_id="")
    both = job.starts(2)
    ids = {job.world([agent])[0].said["TORCHELASTIC_RUN_ID"] for agent in both}
    assert len(ids) == 2
    job.finish(both)
    later = job.start()
    later.ends(0)
    assert later.workers[0].said["TORCHELASTIC_RUN_ID"] not in ids


def test_r18_several_hosts_need_an_id(site: Site, etcd: EtcdServer) -> None:
    """A job that others may join is refused without one, with what to type."""
    job = Job(site, etcd, job_id="", flags=("--nnodes=1:2",))
    assert "--job-id NAME" in job.start().ends(2)


ODD = ["a b", "a/b", "'\"", "Ünï-日本", "n" * 300, "..", "-x", "%2F", "a\\b", "a\nb"]


def test_r19_any_text_is_an_id(site: Site, etcd: EtcdServer) -> None:
    """All of these jobs run at the same time, each sees its own id, and their keys go when they end."""
    jobs = [Job(site, etcd, job_id=job_id) for job_id in ODD]
    agents = [job.start() for job in jobs]
    for job, agent in zip(jobs, agents, strict=True):
        (up,) = job.world([agent], limit_s=2 * ACT_S)
        assert up.said["TORCHELASTIC_RUN_ID"] == job.job_id
        assert len(job.hosts()) == 1
    for job, agent in zip(jobs, agents, strict=True):
        job.finish([agent])
        job.left_nothing()


def test_r19_no_id_reaches_the_keys_of_another(site: Site, etcd: EtcdServer) -> None:
    """Ids that are the beginning of others live side by side; the end of one does not touch them."""
    jobs = [Job(site, etcd, job_id=name) for name in ("a", "ab", "a/b", "a/hosts")]
    agents = [job.start() for job in jobs]
    worlds = [job.world([agent]) for job, agent in zip(jobs, agents, strict=True)]
    jobs[0].finish([agents[0]])
    for job, agent, world in list(zip(jobs, agents, worlds, strict=True))[1:]:
        assert len(job.hosts()) == 1
        assert job.world([agent]) == world
        job.finish([agent])


def test_r19_an_id_can_be_used_again(site: Site, etcd: EtcdServer) -> None:
    """At once after a success and after a failure; after all agents were killed when their leases end."""
    job = Job(site, etcd, job_id="again", flags=("--nnodes=2",))
    pair = job.starts(2)
    job.world(pair)
    job.finish(pair)
    job.renew()

    pair = job.starts(2)
    job.world(pair)
    job.tell(1, 7)
    for agent in pair:
        assert "exit status 7" in agent.ends(1)

    pair = job.starts(2)
    job.world(pair)
    job.kill(pair)

    pair = job.starts(2)
    job.world(pair, limit_s=LEASE_S + ACT_S)
    job.finish(pair)
    job.left_nothing()


def test_r19_one_after_the_other_at_one_c10d_endpoint(site: Site) -> None:
    """Two agents of one machine, in a loop of three jobs: they meet each time, whoever keeps the etcd."""
    script = site.script("say.py", 'import os; print("ran", os.environ["WORLD_SIZE"])')
    loop = ("sh", "-c", 'for i in 1 2 3; do "$@" || exit $?; done', "sh")
    port = free_ports(1)[0]
    at = ("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=loop")
    pair = [
        site.start(*at, "--nnodes=2", "--start-method=spawn", script, prefix=loop) for _ in range(2)
    ]
    for each in pair:
        done = each.wait(3 * ACT_S)
        assert (done.code, done.lines()) == (0, ["ran 2"] * 3), done.err
        assert "WARNING" not in done.err


@pytest.mark.parametrize("status", [0, 7])
def test_r19_again_while_the_last_host_is_leaving(
    site: Site, etcd: EtcdServer, status: int
) -> None:
    """The next agent is not taken for a spare of the ended job: it waits, then its workers run."""
    job = Job(site, etcd, job_id=f"ending-{status}")
    first = job.start()
    job.world([first])
    lease = etcdctl(etcd, "lease", "grant", "60").split()[1]
    (record,) = job.stored("hosts/").values()
    slow = json.dumps({**record["value"], "host": "slow"})
    etcdctl(etcd, "put", f"--lease={lease}", f"{Keys(job.job_id).hosts}slow", slow)
    job.tell(0, status)
    over = "failed" if status else "done"
    job.until(lambda: job.stored()["ranktable"]["value"]["phase"] == over, ACT_S, "it is over")

    later = job.start(env={"LOGLEVEL": "INFO"})
    later.running.expect("has ended, and host .* has not left it yet", stream="err")
    assert later.workers == []
    etcdctl(etcd, "lease", "revoke", lease)
    first.ends(1 if status else 0)
    job.world([later])
    job.finish([later])
    job.left_nothing()


def test_r19_a_live_clash(site: Site, etcd: EtcdServer) -> None:
    """Another job under a live id is refused with both values; the same one again is a spare of it."""
    job = Job(site, etcd, job_id="clash", flags=("--nnodes=1",))
    first = job.start()
    world = job.world([first])
    stranger = job.start("--max-restarts=5").ends(2)
    assert "'clash' is live" in stranger
    assert "--max-restarts is 5 here and 0 in the job" in stranger
    assert stranger.count("\n") == 1
    spare = job.start()
    job.until(lambda: len(job.hosts()) == 2, ACT_S, "the spare is registered")
    assert job.world([first]) == world
    assert "not needed" in job.finish([first, spare])[1]
