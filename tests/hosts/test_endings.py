"""When one host has finished and another has not yet, or never will (R38, R80)."""

import pytest

from tests.hosts.job import FORM_S, NOTICE_S, Job
from tests.hosts.scenarios import ALONE, LIGHT, Stage

pytestmark = pytest.mark.hosts


def test_a_finished_host_learns_what_becomes_of_the_others(hosts: Stage) -> None:
    """It waits while they live and ends with 0; with 1 soon after they fail, or after they are lost."""
    flags = ("--nnodes=2", "--replace-timeout=60", *LIGHT)
    with (
        hosts.job(*flags, script=ALONE) as lives,
        hosts.job(*flags, script=ALONE) as fails,
        hosts.job(*flags, script=ALONE) as dies,
    ):
        jobs = {lives: ("h1", "h2"), fails: ("h3", "h4"), dies: ("h5", "h6")}
        for job, names in jobs.items():
            for name in names:
                job.start(hosts.network[name])
        for job, (first, second) in jobs.items():
            world = job.world(size=2, within_s=FORM_S)
            assert world.hosts == {0: first, 1: second}
            (job.folder / "end-0").touch()
            finishes(job, first, world.pids[0])
        (fails.folder / "fail-1").touch()
        assert fails.agent("h3").wait(30) == 1
        assert fails.agent("h4").wait(30) == 1
        assert "exit status 7" in fails.agent("h3").said

        dies.agent("h6").host.kill()
        assert dies.agent("h5").wait(NOTICE_S + 20) == 1
        assert "lost host h6-" in dies.agent("h5").said

        assert lives.agent("h1").process.poll() is None
        (lives.folder / "end-1").touch()
        lives.all_end()


def finishes(job: Job, name: str, pid: int) -> None:
    """Wait until this worker of a host is gone."""
    job.wait_for(lambda: pid not in job.agent(name).host.pids(), 5, f"{name} finishes")
