"""JSON of the protocol's documents, both ways. Refuses what does not fit, naming the field.

Documents are plain JSON so that `etcdctl get` shows them. Each carries a schema number; fields are only
ever added, so unknown fields are ignored, and a field that equals its default is left out (a rank table
of thousands of hosts stays small).
"""

import dataclasses
import json
import types
import typing
from collections.abc import Callable
from enum import Enum
from functools import cache, lru_cache
from typing import Any, TypeVar

from frun.errors import WireError
from frun.protocol.changes import TableChange
from frun.protocol.faults import Command
from frun.protocol.incidents import IncidentRecord
from frun.protocol.records import SCHEMA, HostRecord, HostReport, JobSpec, RankTable

T = TypeVar("T")
Reader = Callable[[Any, str], Any]
Writer = Callable[[Any], dict[str, Any]]


def encode(record: Any) -> bytes:
    """Return the JSON of a record, with the schema number, without fields at their default."""
    document = {"schema": SCHEMA, **_writer_of(typing.cast("Any", type(record)))(record)}
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False)
    # What Python makes of undecodable bytes in a path or a log has no UTF-8, but an escape in JSON.
    return text.encode(errors="backslashreplace")


def decode_host(data: bytes) -> HostRecord:
    """Read a host's record. Raises WireError naming the field that does not fit."""
    return _decode(HostRecord, data)


def decode_report(data: bytes) -> HostReport:
    """Read a host's report. Raises WireError naming the field that does not fit."""
    return _decode(HostReport, data)


@lru_cache(maxsize=2)
def decode_table(data: bytes) -> RankTable:
    """Read a rank table. Raises WireError naming the field that does not fit.

    The latest ones are kept: a leader meets each twice, in its agent's and in its controller's mirror, and
    one of thousands of slots takes milliseconds.
    """
    return _decode(RankTable, data)


@lru_cache(maxsize=2)
def decode_change(data: bytes) -> TableChange:
    """Read how a rank table changed. Raises WireError naming the field that does not fit."""
    return _decode(TableChange, data)


def decode_spec(data: bytes) -> JobSpec:
    """Read a job's specification. Raises WireError naming the field that does not fit."""
    return _decode(JobSpec, data)


def decode_incident(data: bytes) -> IncidentRecord:
    """Read a closed incident. Raises WireError naming the field that does not fit."""
    return _decode(IncidentRecord, data)


def decode_command(data: bytes) -> Command:
    """Read a command. Raises WireError naming the field that does not fit."""
    return _decode(Command, data)


@cache
def _writer_of(cls: type) -> Writer:
    """Build the writer of one class once: a rank table has thousands of slots."""
    hints = typing.get_type_hints(cls)
    fields = [
        (f.name, f.default, _converter_of(hints[f.name]))
        for f in dataclasses.fields(typing.cast("Any", cls))
        if f.init
    ]

    def write(record: Any) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for name, default, convert in fields:
            value = getattr(record, name)
            if value is not default and value != default:
                out[name] = value if convert is None else convert(value)
        return out

    return write


def _converter_of(hint: Any) -> Callable[[Any], Any] | None:
    """Return what makes a field's value JSON; None if it is so already."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return _converter_of(next(arg for arg in inner if arg is not type(None)))
    if dataclasses.is_dataclass(hint):
        return _writer_of(typing.cast("type", hint))
    if origin is tuple and dataclasses.is_dataclass(inner[0]):
        write = _writer_of(typing.cast("type", inner[0]))
        return lambda items: [write(item) for item in items]
    return None


def _decode(cls: type[T], data: bytes) -> T:
    name = cls.__name__
    try:
        document = json.loads(data)
    except ValueError as error:
        raise WireError(f"{name} is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise WireError(f"{name} is not a JSON object but {type(document).__name__}")
    schema = document.get("schema")
    if schema != SCHEMA:
        raise WireError(
            f"{name} has schema {schema!r}, this frun reads {SCHEMA}: use one version on all hosts"
        )
    return typing.cast("T", _reader_of(typing.cast("Any", cls))(document, name))


@cache
def _reader_of(hint: Any) -> Reader:
    """Build the reader of one type once; reading a table of thousands of slots then is cheap."""
    if dataclasses.is_dataclass(hint):
        return _record_reader(typing.cast("type", hint))
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        inner = next(arg for arg in typing.get_args(hint) if arg is not type(None))
        read_inner = _reader_of(inner)
        return lambda value, where: None if value is None else read_inner(value, where)
    if origin is tuple:
        read_item = _reader_of(typing.get_args(hint)[0])

        def read_tuple(value: Any, where: str) -> Any:
            if not isinstance(value, list):
                raise WireError(f"{where} must be a list, not {value!r}")
            return tuple([read_item(item, where) for item in value])

        return read_tuple
    if isinstance(hint, type) and issubclass(hint, Enum):
        members = {member.value: member for member in hint}

        def read_member(value: Any, where: str) -> Any:
            member = members.get(value) if isinstance(value, str) else None
            if member is None:
                raise WireError(f"{where} is {value!r}, not one of {', '.join(members)}")
            return member

        return read_member

    def read_scalar(value: Any, where: str) -> Any:
        # bool is an int in Python; a field that wants one must not take the other.
        if type(value) is not hint:
            raise WireError(f"{where} must be {hint.__name__}, not {value!r}")
        return value

    return read_scalar


def _record_reader(cls: type) -> Reader:
    hints = typing.get_type_hints(cls)
    fields = [f for f in dataclasses.fields(cls) if f.init]
    readers = {
        f.name: (hints[f.name], _reader_of(hints[f.name]), f"{cls.__name__}.{f.name}")
        for f in fields
    }
    required = [
        f.name
        for f in fields
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]

    def read_record(value: Any, where: str) -> Any:
        if not isinstance(value, dict):
            raise WireError(f"{where} must be an object, not {value!r}")
        known = {}
        for name, item in value.items():
            if name in readers:
                hint, read, place = readers[name]
                # A scalar that fits is taken without a call: a new leader reads thousands of workers.
                known[name] = item if type(item) is hint else read(item, place)
        for name in required:
            if name not in known:
                raise WireError(f"{cls.__name__}.{name} is missing")
        return cls(**known)

    return read_record
