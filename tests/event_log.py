"""Reads the event logs of a job that may still be running."""

import json
from pathlib import Path
from typing import Any

from frun.agent.logfolder import EVENTS_FILE


def events(logs: Path, name: str = "") -> list[dict[str, Any]]:
    """Return what all agents below a folder wrote down so far, of one name if that is given.

    In the order of each agent's own file. A line that is just being written is left out.
    """
    lines = [
        line
        for path in logs.rglob(EVENTS_FILE)
        for line in path.read_text(encoding="utf-8").split("\n")[:-1]
    ]
    return [event for event in map(json.loads, lines) if not name or event["event"] == name]
