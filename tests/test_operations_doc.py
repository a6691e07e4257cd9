"""docs/operations.md names what the code has."""

import inspect
import re
from dataclasses import fields
from pathlib import Path

from frun import events
from frun.protocol.incidents import IncidentRecord

TEXT = (Path(__file__).parents[1] / "docs" / "operations.md").read_text(encoding="utf-8")


def row(kind: type[events.Event]) -> str:
    """Return the line that the table of events has for this one."""
    more = ", ".join(f"`{field.name}`" for field in fields(kind))
    return f"| `{events.event_name(kind)}` | {inspect.getdoc(kind)} | {more} |"


def test_the_table_of_events_is_the_set_of_events() -> None:
    """Each event has one row, with its meaning and all its fields; there are no others."""
    table = TEXT.split("| event | when | more fields |\n| --- | --- | --- |\n")[1].split("\n\n")[0]
    assert table.split("\n") == [row(kind) for kind in events.KINDS]


def test_the_set_of_events_is_closed() -> None:
    """What the module defines is what it lists."""
    defined = {
        kind.__name__
        for kind in vars(events).values()
        if inspect.isclass(kind) and issubclass(kind, events.Event) and kind is not events.Event
    }
    assert defined == {kind.__name__ for kind in events.KINDS}


def test_every_event_is_emitted_by_something() -> None:
    """An event that nobody makes would be a promise that nobody keeps."""
    package = Path(events.__file__).parent
    sources = [path for path in package.rglob("*.py") if path.name != "events.py"]
    text = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    assert [k.__name__ for k in events.KINDS if not re.search(rf"\b{k.__name__}\(", text)] == []


def test_every_field_of_an_incident_is_named() -> None:
    """What `frun status --json` says of an incident is all described."""
    for field in fields(IncidentRecord):
        assert f"`{field.name}`" in TEXT
