"""What a person at the terminal reads: each thing once, in words that fit."""

from frun.agent.narrator import Narrator
from frun.protocol.policy import Decision, Seen
from frun.protocol.records import Phase, RankTable, Slot


def table(generation: int, phase: Phase, reason: str, hosts: int = 0) -> RankTable:
    """A rank table of hosts with one worker each."""
    slots = tuple(
        Slot(host=f"h{n}", address="10.0.0.1", port=1, first_rank=n, nproc=1) for n in range(hosts)
    )
    return RankTable(generation=generation, phase=phase, reason=reason, slots=slots)


def waits(reason: str) -> Decision:
    """A leader's decision to wait in the gather phase."""
    return Decision(table=None, seen=Seen(phase=Phase.GATHER), reason=reason)


def test_nothing_is_said_twice() -> None:
    """Waiting is told once, by the table or by the leader, and progress of it as it comes."""
    said: list[str] = []
    narrator = Narrator(several_hosts=True, write=said.append)
    narrator.table(table(1, Phase.GATHER, "waiting for hosts"))
    narrator.decision(waits("waiting for hosts: 1 of 2"))
    narrator.decision(waits("waiting for hosts: 1 of 2"))
    narrator.table(table(1, Phase.RECOVER, "all 2 hosts are here", 2))
    narrator.table(table(1, Phase.RUN, "2 hosts, 2 ranks", 2))
    narrator.table(table(2, Phase.GATHER, "lost host h1 (rank 1)", 2))
    narrator.decision(waits("lost host h1 (rank 1)"))
    assert said == [
        "frun: generation 1: waiting for hosts",
        "frun: waiting for hosts: 1 of 2",
        "frun: generation 1: all 2 hosts are here",
        "frun: generation 1 runs: 2 hosts, 2 ranks",
        "frun: generation 2: lost host h1 (rank 1); waiting for hosts",
    ]


def test_one_host_alone_is_quiet() -> None:
    """As under torchrun, as long as nothing goes wrong."""
    said: list[str] = []
    narrator = Narrator(several_hosts=False, write=said.append)
    for phase in (Phase.GATHER, Phase.RECOVER, Phase.RUN, Phase.DONE):
        narrator.table(table(1, phase, "all is well", 1))
    narrator.decision(waits("waiting for hosts: 0 of 1"))
    assert said == []
