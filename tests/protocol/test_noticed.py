"""What is wrong with ranks now."""

from dataclasses import replace

from frun.protocol.hangs import Place, Standing
from frun.protocol.noticed import Notice, noticed
from frun.protocol.records import HostReport, Slot, WorkerReport, WorkerState
from frun.protocol.stragglers import Work


def test_each_thing_that_is_wrong_is_told() -> None:
    """Of workers that run, with rank and host; a rank can have several."""
    slots = [
        Slot(host=host, address="10.0.0.1", port=1, first_rank=first, nproc=2)
        for first, host in ((0, "a"), (2, "b"), (4, ""))
    ]
    right = WorkerReport(
        local_rank=0, incarnation=1, state=WorkerState.RUNNING, work=Work(own_s=0.01)
    )
    stands = Standing(place=Place.LOADER, step=7, where="data.py:3 in read")
    a = (
        replace(right, standing=stands),
        replace(right, local_rank=1, odd="loss of step 5 is infinite", work=Work(own_s=0.05)),
    )
    b = (right, replace(right, local_rank=1, diverged=True))
    reports = {
        host: HostReport(host=host, generation=1, workers=workers)
        for host, workers in (("a", a), ("b", b), ("spare", ()))
    }
    assert noticed(slots, reports) == [
        Notice(
            source="hang",
            rank=0,
            host="a",
            text="rank 0 stands still in the loader of step 7, at data.py:3 in read",
        ),
        Notice(source="numbers", rank=1, host="a", text="rank 1: loss of step 5 is infinite"),
        Notice(
            source="straggler",
            rank=1,
            host="a",
            text="rank 1 takes 50 ms for its own part of a step, 5.0 times the median of 10 ms",
        ),
        Notice(
            source="replicas",
            rank=3,
            host="b",
            text="rank 3 holds other parameters than most of its replicas",
        ),
    ]
    ended = replace(reports["a"], workers=tuple(replace(w, state=WorkerState.FAILED) for w in a))
    assert [one.rank for one in noticed(slots, {**reports, "a": ended})] == [3]
