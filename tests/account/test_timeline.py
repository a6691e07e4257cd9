"""Every second of a job is in exactly one bucket."""

from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frun.account.journal import Journal
from frun.account.page import notes
from frun.account.summary import account, document
from frun.account.timeline import Bucket
from frun.account.words import TITLES
from tests.account.build import (
    END,
    FAULT,
    START,
    Said,
    closed,
    died,
    first,
    journal,
    restored,
    seen,
    steps,
)

TRAINED = (restored(107.0, 1), first(108.0, 1, 1))


def spent(*said: Said) -> dict[str, float]:
    """Return the seconds of the buckets that are not empty."""
    made = account([journal("a", *said)])
    return {bucket.value: us / 1_000_000 for bucket, us in made.buckets.items() if us}


def test_a_job_with_one_fault() -> None:
    """Each phase has the time between its own two events, and the detection begins with the fault."""
    recovered = (
        restored(123.0, 2, step=12, copy_s=0.5, agree_s=0.25, rebuild_s=0.75),
        first(124.0, 2, 13),
        closed(124.1, 2, 0.5),
    )
    assert spent(*START, *TRAINED, *FAULT, *recovered, *END) == {
        "start_up": 5.0,
        "waiting": 2.0,
        "first_step": 1.0 + 1.0,
        "productive": 12.0 + 16.0,
        "detection": 0.5,
        "pause": 0.5,
        "respawn": 0.5,
        "rebuild": 1.0,
        "copy": 0.5,
        "idle": 1.0,
    }


def test_steps_that_were_lost_are_repeated_until_they_are_done_again() -> None:
    """All restart at step 0 with 12 done: until 12 are done again nothing new comes of it."""
    again = (restored(123.0, 2, step=0, steps_lost=12), first(124.0, 2, 1), steps(126.0, 2, 6))
    found = spent(*START, *TRAINED, *FAULT, *again, steps(130.0, 2, 14), *END)
    # 6 at 126, 14 at 130: 12 at 129.
    assert (found["repeated"], found["productive"]) == (5.0, 12.0 + 11.0)
    made = account([journal("a", *START, *TRAINED, *FAULT, *again, *END)])
    assert made.steps_lost == 12
    assert made.steps == 30


def test_a_fault_in_a_recovery() -> None:
    """The phase that the second fault cut has the time up to it; the rest is the second one's."""
    second: tuple[Said, ...] = (
        restored(122.0, 2, step=12, copy_s=0.25),
        died(122.5, 2),
        seen(122.75, 3, "recover", "again"),
        seen(123.0, 3, "run", "again"),
        (123.5, "generation_started", 3, {}),
        restored(124.0, 3, step=12),
        first(125.0, 3, 13),
    )
    end: list[Said] = [(at, name, 3, fields) for at, name, _, fields in END]
    found = spent(*START, *TRAINED, *FAULT, *second, *end)
    assert found["detection"] == 0.5 + 0.25
    assert found["first_step"] == 1.0 + 0.5 + 1.0
    assert found["respawn"] == 0.5 + 0.5
    made = account([journal("a", *START, *TRAINED, *FAULT, *second, closed(125.1, 3, 0.25), *end)])
    assert [
        (fault.record["generation"], fault.record["closed"], fault.record["cause"])
        for fault in made.faults
    ] == [(2, False, "rank 0 failed"), (3, True, "it died")]


def test_a_lost_host_was_lost_before_anybody_saw_it() -> None:
    """A host's detection is its lease, which the incident tells; waiting for another is a bucket."""
    lost: tuple[Said, ...] = (
        seen(120.5, 2, "gather", "host b lost its lease"),
        seen(126.5, 2, "recover", "a spare came"),
        seen(127.0, 2, "run", "a spare came"),
        (127.5, "generation_started", 2, {}),
        restored(128.0, 2, step=12),
        first(129.0, 2, 13),
        closed(129.1, 2, 3.0, "host"),
    )
    found = spent(*START, *TRAINED, *lost, *END)
    assert (found["detection"], found["waiting"]) == (3.0, 2.0 + 6.0)


def test_a_script_that_tells_nothing_is_productive_from_its_start() -> None:
    """Without a resumable function nobody knows more than that the workers run."""
    found = spent(*START, *FAULT, *END)
    assert found["productive"] == 15.0 + 18.5
    assert "first_step" not in found
    made = account([journal("a", *START, *FAULT, *END)])
    assert document(made)["steps_told"] is False


def test_checkpoints_are_taken_out_of_training() -> None:
    """A declared checkpoint is not productive, however many ranks are in it at the same time."""
    saved: list[Said] = [
        (115.0, "worker_phase_ended", 1, {"rank": 0, "phase": "checkpoint", "took_s": 2.0}),
        (115.5, "worker_phase_ended", 1, {"rank": 1, "phase": "checkpoint", "took_s": 1.0}),
        (117.0, "worker_phase_ended", 1, {"rank": 1, "phase": "eval", "took_s": 1.0}),
    ]
    found = spent(*START, *TRAINED, *saved, *FAULT, *END)
    assert found["checkpoint"] == 2.5


def test_a_job_that_fails_is_idle_only_after_its_end_was_decided() -> None:
    """From the last fault to the final table is detection, what follows idle."""
    end: tuple[Said, ...] = (
        died(130.0, 1),
        seen(130.5, 1, "failed", "no restart left"),
        (131.0, "workers_stopping", 1, {}),
        (133.0, "job_ended", 1, {"exit_code": 1}),
    )
    found = spent(*START, *TRAINED, *end)
    assert (found["productive"], found["detection"], found["idle"]) == (22.0, 0.5, 2.5)


def test_a_host_that_is_not_fit_is_a_fault_since_its_check_said_so() -> None:
    """It is not in the new world to say how long that took; the notice of its worker is no false alarm."""
    lost = {"check": "gpu", "name": "lost", "lasting": True, "holds": True}
    notice = {"source": "device", "rank": 0, "reason": "it is gone", "since_s": 0.0}
    said = (
        *START,
        (110.0, "health_changed", 0, {**lost, "lasting": False}),
        (119.5, "health_changed", 0, lost),
        (119.6, "fault_noticed", 1, notice),
        *FAULT,
        closed(123.0, 2, 0.0, kind="device"),
        *END,
    )
    in_place = (*START, (119.9999, "fault_noticed", 1, notice), *FAULT, closed(123.0, 2, 0.5), *END)
    assert [each.generation for each in account([journal("a", *in_place)]).story.noticed] == [2]
    story = account([journal("a", *said)]).story
    assert (story.generations[1].fault_us - story.began_us) / 1e6 == pytest.approx(19.5)
    assert [each.generation for each in story.noticed] == [2]


def test_what_was_noticed_is_told_from_what_came_of_it() -> None:
    """A notice that a recovery answers is its fault's; one that nothing follows may be a false alarm."""
    notice: dict[str, Any] = {"source": "beat", "rank": 0, "reason": "frozen", "since_s": 2.0}
    said: tuple[Said, ...] = (
        *START,
        *TRAINED,
        (110.0, "fault_noticed", 1, {**notice, "reason": "slow"}),
        (119.5, "fault_noticed", 1, notice),
        *FAULT,
        restored(123.0, 2, step=12),
        first(124.0, 2, 13),
        closed(124.1, 2, 2.5),
        *END,
    )
    made = account([journal("a", *said)])
    assert made.buckets[Bucket.DETECTION] == 2_500_000
    printed = document(made)
    assert [each["generation"] for each in printed["noticed"]] == [None, 2]
    assert printed["noticed_for_nothing"] == 1
    assert "nothing came of it, perhaps false alarms: slow." in notes(made)[0]


@pytest.mark.parametrize(
    ("drills", "cause", "known_by", "false"),
    [
        ([], "beat", "notice", 0),
        ([], "", "end", 0),
        ([(119.0, 0)], "beat", "drill", 0),
        ([(119.0, 3)], "beat", "notice", 1),
        ([(110.0, 0)], "", "drill", 0),
        ([(125.0, 0)], "beat", "notice", 1),
    ],
)
def test_an_alarm_that_no_drill_explains_is_false(
    drills: list[tuple[float, int]], cause: str, known_by: str, false: int
) -> None:
    """Where faults are injected one that was only noticed should be one of them; else nobody knows."""
    notice = {"source": cause, "rank": 0, "reason": "frozen", "since_s": 2.0}
    said: tuple[Said, ...] = (
        *START,
        *TRAINED,
        *((at_s, "fault_injected", 1, {"fault": "stop", "rank": rank}) for at_s, rank in drills),
        *(((119.5, "fault_noticed", 1, notice),) if cause else ()),
        *FAULT,
        restored(123.0, 2, step=12),
        first(124.0, 2, 13),
        closed(124.1, 2, 2.5),
        *END,
    )
    made = account([journal("b", *said)])
    printed = document(made)
    (incident,) = printed["incidents"]
    assert (incident["known_by"], printed["false_alarms"]["count"]) == (known_by, false)
    assert incident["drill"] == ("stop" if known_by == "drill" else None)
    assert ("no drill explains" in " ".join(notes(made))) is bool(false)


def test_what_was_learned_of_a_fault_later_counts() -> None:
    """From the events of whoever leads then, or from etcd where that log is out of reach."""
    loss = {"fault_class": "host", "evidence": "its lease in etcd ended"}
    at_s, name, generation, fields = closed(124.1, 2, 2.5, kind="host")
    said = (*START, *TRAINED, *FAULT, restored(123.0, 2, step=12), first(124.0, 2, 13))
    first_word = (*said, (at_s, name, generation, fields | loss))
    known = {"fault_class": "network", "evidence": "it is back"}
    later = (130.0, "incident_renamed", 2, {"id": 2, **known})
    for made in (
        account([journal("b", *first_word, later)]),
        account([journal("b", *first_word), journal("a", *START, later)]),
        account([journal("b", *first_word)], incidents=[{"generation": 2, **fields, **known}]),
    ):
        (fault,) = made.faults
        assert {word: fault.record[word] for word in known} == known
    (fault,) = account([journal("b", *first_word)]).faults
    assert {word: fault.record[word] for word in loss} == loss


def test_a_live_job_is_accounted_for_up_to_now() -> None:
    """Between the last event and now it goes on with what it did."""
    made = account([journal("a", *START, *TRAINED)], now_us={"a": 118_000_000})
    assert made.wall_us == 18_000_000
    assert made.buckets[Bucket.PRODUCTIVE] == 10_000_000
    assert not made.story.over


def test_a_spare_that_is_told_to_leave_ends_nothing() -> None:
    """Only members' ends are the end of training."""
    spare = journal(
        "s",
        (110.0, "job_started", 0, {}),
        (111.0, "phase_seen", 1, {"phase": "run", "reason": "all are here", "group_rank": None}),
        (112.0, "signal_received", 1, {}),
        (113.0, "job_ended", 1, {"exit_code": 1}),
    )
    member = journal("a", *START, *TRAINED, *[(t, n, 1, f) for t, n, _, f in END])
    made = account([spare, member])
    assert made.buckets[Bucket.PRODUCTIVE] == 32_000_000


def test_the_document_adds_up_in_decimal() -> None:
    """What `--json` prints are the same whole microseconds."""
    odd = [(at + 0.123457, name, generation, fields) for at, name, generation, fields in TRAINED]
    printed = document(account([journal("a", *START, *odd, *FAULT, *END)]))
    total = sum(Decimal(repr(value)) for value in printed["buckets_s"].values())
    assert total == Decimal(repr(printed["wall_s"]))
    assert set(printed["buckets_s"]) == {bucket.value for bucket in Bucket} == set(TITLES)


# -- whatever happens --------------------------------------------------------------------------------------

FIELDS: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "phase_seen": st.fixed_dictionaries(
        {
            "phase": st.sampled_from(["gather", "recover", "run", "done", "failed"]),
            "reason": st.sampled_from(["x", "y"]),
            "group_rank": st.sampled_from([0, 1, None]),
        }
    ),
    "worker_restored": st.fixed_dictionaries(
        {
            "rank": st.integers(0, 3),
            "step": st.integers(0, 50),
            "steps_lost": st.integers(0, 9),
            "rebuild_s": st.floats(0, 5),
            "agree_s": st.floats(0, 5),
            "copy_s": st.floats(0, 5),
        }
    ),
    "worker_exited": st.fixed_dictionaries(
        {"rank": st.integers(0, 3), "state": st.sampled_from(["failed", "succeeded", "stopped"])}
    ),
    "incident_closed": st.fixed_dictionaries({"detect_s": st.floats(0, 9)}),
    "worker_phase_ended": st.fixed_dictionaries(
        {
            "rank": st.integers(0, 3),
            "phase": st.sampled_from(["checkpoint", "eval"]),
            "took_s": st.floats(0, 9),
        }
    ),
}
STEPPED = ("first_step_completed", "steps_completed", "worker_paused", "worker_out")
PLAIN = (
    "job_started", "generation_started", "worker_started", "workers_stopping", "signal_received",
    "job_ended", "of_a_later_version",
)  # fmt: skip
SAID = st.one_of(
    *(
        st.tuples(st.floats(0, 100), st.just(name), st.integers(0, 5), fields)
        for name, fields in FIELDS.items()
    ),
    st.tuples(
        st.floats(0, 100),
        st.sampled_from(STEPPED),
        st.integers(0, 5),
        st.fixed_dictionaries({"rank": st.integers(0, 3), "step": st.integers(0, 60)}),
    ),
    st.tuples(
        st.floats(0, 100),
        st.sampled_from(PLAIN),
        st.integers(0, 5),
        st.fixed_dictionaries({"rank": st.integers(0, 3)}),
    ),
)
JOURNALS = st.lists(st.lists(SAID, min_size=1, max_size=40), min_size=1, max_size=3)


def journals_of(said: list[list[Said]]) -> list[Journal]:
    """Return one journal per list."""
    return [journal(f"h{index}", *each) for index, each in enumerate(said)]


@settings(max_examples=300, deadline=None)
@given(said=JOURNALS)
def test_whatever_is_logged_every_microsecond_is_in_one_bucket(said: list[list[Said]]) -> None:
    """The pieces follow one another from the first entry to the last, and add up exactly."""
    made = account(journals_of(said))
    at_us = made.story.began_us
    for piece in made.segments:
        assert (piece.start_us, piece.end_us > piece.start_us) == (at_us, True)
        at_us = piece.end_us
    assert at_us == made.story.ended_us
    assert sum(made.buckets.values()) == made.wall_us
    assert 0 <= made.ettr <= 1
    assert all(0 <= ratio <= 1 for _, ratio in made.sliding(window_us=7_000_000, points=9))


@settings(max_examples=100, deadline=None)
@given(said=JOURNALS, window_s=st.integers(1, 200))
def test_windows_that_lie_side_by_side_hold_all_productive_time(
    said: list[list[Said]], window_s: int
) -> None:
    """The sliding ratio of a window that is the whole life is the cumulative one."""
    made = account(journals_of(said))
    points = made.sliding(window_us=made.wall_us + window_s, points=4)
    if points:
        assert points[-1] == (made.wall_us, made.ettr)


@pytest.mark.parametrize("bucket", Bucket)
def test_every_bucket_has_a_word(bucket: Bucket) -> None:
    """Reports name them all."""
    assert TITLES[bucket]
