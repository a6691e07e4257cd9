"""The laws under anything that can happen in any order, with hosts and a leader made of pure functions."""

from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from frun.protocol.policy import Policy
from frun.protocol.records import Phase
from tests.protocol.build import POLICY, failure, victim
from tests.protocol.job import Job

NAMES = [f"h{index}" for index in range(6)]
names = st.sampled_from(NAMES)
policies = st.builds(
    lambda low, more, restarts, recoveries, breaker: replace(
        POLICY,
        min_hosts=low,
        max_hosts=low + more,
        max_restarts=restarts,
        replace_timeout_s=20.0,
        max_recoveries=recoveries,
        breaker=breaker,
    ),
    st.integers(1, 3),
    st.integers(0, 2),
    st.integers(0, 2),
    st.sampled_from([None, 1]),
    st.sampled_from([2, 5]),
)


class JobMachine(RuleBasedStateMachine):
    """Hosts come, go, freeze and fail; leaders change; everybody acts when hypothesis says so."""

    def __init__(self) -> None:
        super().__init__()
        self.job = Job(POLICY)

    @initialize(
        policy=policies,
        resumable=st.booleans(),
        first=st.integers(0, 4),
        formed=st.sampled_from([True, True, False]),
    )
    def begin(self, policy: Policy, first: int, *, resumable: bool, formed: bool) -> None:
        """Start a job with some hosts, mostly one that runs already."""
        self.job = Job(policy, resumable=resumable)
        for name in NAMES[: policy.max_hosts + first % 2 if formed else first]:
            self.job.join(name)
        if formed:
            self.job.settle()
            assert self.job.table is not None
            assert self.job.table.phase is Phase.RUN

    @rule(name=names, nproc=st.integers(1, 2))
    def join(self, name: str, nproc: int) -> None:
        """An agent comes that was not there."""
        if name not in self.job.hosts and name not in self.job.exits:
            self.job.join(name, nproc=nproc)

    @rule(name=names)
    def vanish(self, name: str) -> None:
        """A host dies; ids are never used again, so another name stands for its successor."""
        if name in self.job.hosts:
            self.job.vanish(name)
            self.job.exits[name] = -9

    @rule(name=names)
    def freeze_or_thaw(self, name: str) -> None:
        """A host stops long enough to lose its lease, or goes on."""
        member = self.job.hosts.get(name)
        if member is not None and member.frozen:
            self.job.thaw(name)
        elif member is not None:
            self.job.freeze(name)

    @rule(name=names, kind=st.sampled_from(["kill", "kill", "victim", "unclear", "user"]))
    def fail(self, name: str, kind: str) -> None:
        """A worker fails, as a cause, as a victim, or without a word."""
        causes = {
            "kill": failure(name, exit_code=-9),
            "victim": victim(name),
            "unclear": failure(name, exit_code=1),
            "user": failure(name, exit_code=1, message="ValueError: nan", recorded=True),
        }
        self.job.fail(name, causes[kind])

    @rule(name=names)
    def succeed(self, name: str) -> None:
        """A worker ends with 0."""
        self.job.succeed(name)

    @rule(name=names)
    def progress(self, name: str) -> None:
        """A host's workers complete a step."""
        self.job.progress(name)

    @rule()
    def change_leader(self) -> None:
        """The leader is replaced."""
        self.job.change_leader()

    @rule(seconds=st.sampled_from([0.2, 1.0, 3.0, 30.0, 700.0]))
    def wait(self, seconds: float) -> None:
        """Time passes."""
        self.job.now += seconds

    @rule(name=names)
    def host_turn(self, name: str) -> None:
        """One host acts."""
        self.job.host_turn(name)

    @rule()
    def leader_turn(self) -> None:
        """The leader acts."""
        self.job.leader_turn()

    @rule()
    def settle(self) -> None:
        """Everybody acts until there is nothing left to do."""
        self.job.settle()

    @precondition(lambda self: self.job.table is not None)
    @rule(data=st.data())
    def host_runs_ahead(self, data: Any) -> None:
        """Some hosts act several times while the leader sleeps."""
        for name in data.draw(st.lists(names, max_size=4)):
            self.job.host_turn(name)

    def teardown(self) -> None:
        """Whatever happened: when hosts answer and time passes, the job ends, and everybody leaves."""
        job = self.job
        for name, member in list(job.hosts.items()):
            if member.frozen:
                job.thaw(name)
        phase = job.finish()
        assert phase in (Phase.DONE, Phase.FAILED)
        job.settle()
        assert not job.hosts, "a host stays after the end"
        table = job.table
        assert table is not None
        for slot in table.slots:
            if slot.host:
                assert job.exits[slot.host] in (0 if phase is Phase.DONE else table.exit_code, -9)
        for name in table.dropped:
            assert job.exits[name] in (1, -9)


JobMachine.TestCase.settings = settings(
    max_examples=100,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestJob = JobMachine.TestCase
