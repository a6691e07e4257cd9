"""The JSON of the documents: both ways, small, readable, and refused with the field's name."""

import dataclasses
import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frun.errors import WireError
from frun.protocol import wire
from frun.protocol.records import (
    Failure,
    HostRecord,
    HostReport,
    JobSpec,
    Phase,
    RankTable,
    Slot,
    WorkerReport,
    WorkerState,
)
from tests.protocol import build

# Lone surrogates are what undecodable bytes in paths and logs become in Python.
texts = st.text(st.characters(exclude_categories=()), max_size=20)
numbers = st.integers(min_value=-(2**40), max_value=2**40)
failures = st.builds(
    Failure,
    rank=numbers,
    local_rank=numbers,
    host=texts,
    exit_code=numbers,
    pid=numbers,
    message=texts,
    traceback=texts,
    log=texts,
    recorded=st.booleans(),
    order=numbers,
)
slots = st.builds(
    Slot,
    host=texts,
    address=texts,
    port=numbers,
    first_rank=numbers,
    nproc=numbers,
    incarnations=st.lists(numbers, max_size=3).map(tuple),
)
workers = st.builds(
    WorkerReport,
    local_rank=numbers,
    incarnation=numbers,
    state=st.sampled_from(WorkerState),
    pid=numbers,
    failure=st.none() | failures,
)
hosts = st.builds(
    HostRecord,
    host=texts,
    name=texts,
    address=texts,
    port=numbers,
    nproc=numbers,
    node_rank=st.none() | numbers,
    pid=numbers,
    version=texts,
    keeps_store=st.booleans(),
)
reports = st.builds(
    HostReport,
    host=texts,
    generation=numbers,
    prepared=st.booleans(),
    master_port=numbers,
    workers=st.lists(workers, max_size=3).map(tuple),
)
tables = st.builds(
    RankTable,
    generation=numbers,
    phase=st.sampled_from(Phase),
    reason=texts,
    restarts=numbers,
    slots=st.lists(slots, max_size=3).map(tuple),
    master_addr=texts,
    master_port=numbers,
    failure=st.none() | failures,
    dropped=st.lists(texts, max_size=2).map(tuple),
)
specs = st.builds(
    JobSpec,
    job_id=texts,
    uid=texts,
    min_hosts=numbers,
    max_hosts=numbers,
    max_restarts=numbers,
    entry=texts,
    version=texts,
    lease=numbers,
)
DECODERS: dict[type, Callable[[bytes], Any]] = {
    HostRecord: wire.decode_host,
    HostReport: wire.decode_report,
    RankTable: wire.decode_table,
    JobSpec: wire.decode_spec,
}


@settings(max_examples=300, deadline=None)
@given(st.one_of(hosts, reports, tables, specs))
def test_round_trip(record: Any) -> None:
    """Whatever can be said is read back as it was said."""
    assert DECODERS[type(record)](wire.encode(record)) == record


def test_plain_json_without_defaults() -> None:
    """A document is JSON that people can read, with its schema, without fields at their default."""
    document = json.loads(wire.encode(build.host("a")))
    assert document == {
        "schema": 1,
        "host": "a",
        "name": "a",
        "address": "10.0.0.a",
        "port": 4000,
        "nproc": 2,
    }


def test_unknown_fields_are_ignored() -> None:
    """A field that a later frun adds, in the document or inside it, does no harm."""
    table = build.table(Phase.RUN)
    document = json.loads(wire.encode(table))
    document["colour"] = {"red": 1}
    document["slots"][0]["colour"] = "red"
    assert wire.decode_table(json.dumps(document).encode()) == table


def _broken(change: Callable[[dict[str, Any]], Any]) -> bytes:
    document = json.loads(
        wire.encode(build.table(Phase.RUN, cause=build.failure("a"), dropped=["z"]))
    )
    change(document)
    return json.dumps(document).encode()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        pytest.param(lambda d: d.pop("phase"), "RankTable.phase is missing", id="missing"),
        pytest.param(
            lambda d: d["slots"][1].pop("nproc"), "Slot.nproc is missing", id="missing-inside"
        ),
        pytest.param(
            lambda d: d.update(generation="2"), "RankTable.generation must be int", id="text"
        ),
        pytest.param(
            lambda d: d.update(generation=True), "RankTable.generation must be int", id="bool"
        ),
        pytest.param(
            lambda d: d.update(restarts=1.5), "RankTable.restarts must be int", id="fraction"
        ),
        pytest.param(
            lambda d: d.update(restarts=None), "RankTable.restarts must be int", id="null"
        ),
        pytest.param(lambda d: d.update(reason=7), "RankTable.reason must be str", id="number"),
        pytest.param(
            lambda d: d.update(phase="runs"),
            "RankTable.phase is 'runs', not one of gather, recover",
            id="unknown-phase",
        ),
        pytest.param(
            lambda d: d.update(phase=["run"]), "RankTable.phase is \\['run'\\]", id="phase-list"
        ),
        pytest.param(lambda d: d.update(slots={}), "RankTable.slots must be a list", id="object"),
        pytest.param(
            lambda d: d.update(slots=["a"]), "RankTable.slots must be an object", id="text-slot"
        ),
        pytest.param(
            lambda d: d["slots"][0].update(incarnations=["1"]),
            "Slot.incarnations must be int",
            id="text-in-list",
        ),
        pytest.param(
            lambda d: d.update(failure=3), "RankTable.failure must be an object", id="failure"
        ),
        pytest.param(
            lambda d: d["failure"].update(recorded=1), "Failure.recorded must be bool", id="one"
        ),
        pytest.param(
            lambda d: d.update(schema=2),
            "schema 2, this frun reads 1: use one version",
            id="schema",
        ),
        pytest.param(lambda d: d.pop("schema"), "schema None", id="no-schema"),
    ],
)
def test_refusal_names_the_field(change: Callable[[dict[str, Any]], Any], text: str) -> None:
    """What does not fit is refused by a text that names the field."""
    with pytest.raises(WireError, match=text):
        wire.decode_table(_broken(change))


@pytest.mark.parametrize("data", [b"", b"{", b"\xff\xfe", b"[]", b"null", b"7", b'"a"'])
@pytest.mark.parametrize("record", list(DECODERS))
def test_not_a_document(record: type, data: bytes) -> None:
    """Bytes that are no JSON object are refused by the document's name."""
    with pytest.raises(WireError, match=record.__name__):
        DECODERS[record](data)


def test_every_required_field_is_asked_for() -> None:
    """Leaving out any field without a default is refused by that field's name."""
    for record in (build.host("a"), build.report("a", "r"), build.table(Phase.RUN)):
        for field in dataclasses.fields(record):
            if field.default is not dataclasses.MISSING or not field.init:
                continue
            document = json.loads(wire.encode(record))
            del document[field.name]
            with pytest.raises(
                WireError, match=rf"{type(record).__name__}\.{field.name} is missing"
            ):
                DECODERS[type(record)](json.dumps(document).encode())


def test_a_large_world_stays_small(record_property: Callable[[str, object], None]) -> None:
    """2,048 hosts of 8 workers need less than 256 KB (etcd takes 1.5 MB), and are read quickly."""
    big = RankTable(
        generation=7,
        phase=Phase.RUN,
        reason="2048 hosts, 16384 ranks; rank 17 on node0002-a1b2c3 failed (SIGKILL): restart 1 of 3",
        restarts=1,
        slots=tuple(
            Slot(
                host=f"node{index:04}-{index * 2654435761 % 2**24:06x}",
                address=f"10.{index // 256}.{index % 256}.17",
                port=40000 + index,
                first_rank=index * 8,
                nproc=8,
                incarnations=(7,) * 8,
            )
            for index in range(2048)
        ),
        master_addr="10.0.0.17",
        master_port=40000,
    )
    data = wire.encode(big)
    assert len(data) < 256 * 1024, len(data)
    wire.decode_table(data)
    begun = time.perf_counter()
    assert wire.decode_table(data) == big
    record_property("decode_ms", round(1000 * (time.perf_counter() - begun), 1))
    record_property("bytes", len(data))
