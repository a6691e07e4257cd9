"""Finds the event logs of a job: those of agents that this machine remembers, and what lies beside them.

Reads files and decides nothing about them; `account` does.
"""

import os
from collections.abc import Iterable, Iterator, Sequence

from frun.account.journal import Journal, read_journal
from frun.agent.logfolder import EVENTS_FILE, safe_name
from frun.errors import UsageError
from frun.registry import JobEntry


def of_agents(entries: Iterable[JobEntry]) -> list[Journal]:
    """Return the journals of these agents, and of others of their jobs that log to the same folders."""
    paths: dict[str, None] = {}
    for entry in entries:
        if entry.events_file:
            paths[entry.events_file] = None
        if entry.log_folder:
            paths[os.path.join(entry.log_folder, EVENTS_FILE)] = None
            base = os.path.dirname(entry.log_folder)
            paths |= dict.fromkeys(_in_base(base, entry.job_id))
    return _read_all(paths)


def in_folders(folders: Sequence[str], job_id: str | None) -> list[Journal]:
    """Return the journals below these folders, each a log dir or one agent's own. Raises UsageError."""
    paths: dict[str, None] = {}
    for folder in folders:
        if not os.path.isdir(folder):
            raise UsageError(f"--log-dir {folder} is no folder")
        own = os.path.join(folder, EVENTS_FILE)
        paths |= dict.fromkeys([own] if os.path.isfile(own) else _in_base(folder, job_id))
    found = _read_all(paths)
    return [journal for journal in found if job_id in (None, journal.job)]


def latest_run(journals: Sequence[Journal]) -> list[Journal]:
    """Return the journals of the run that began last; agents that never got into a run are left out.

    If there are only such, all of the job of the latest one.
    """
    runs: dict[tuple[str, str], list[Journal]] = {}
    for journal in journals:
        runs.setdefault((journal.job, journal.run), []).append(journal)
    formed = {key: found for key, found in runs.items() if key[1]} or runs
    if not formed:
        return []
    return max(formed.values(), key=lambda run: min(each.began_wall_us for each in run))


def _in_base(base: str, job_id: str | None) -> Iterator[str]:
    start = "" if job_id is None else f"{safe_name(job_id)}_"
    try:
        names = sorted(os.listdir(base))
    except OSError:
        return
    for name in names:
        path = os.path.join(base, name, EVENTS_FILE)
        if name.startswith(start) and os.path.isfile(path):
            yield path


def _read_all(paths: Iterable[str]) -> list[Journal]:
    """Return one journal per agent: the longest, where one agent's log is found twice."""
    found: dict[tuple[str, str, str], Journal] = {}
    for path in paths:
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                journal = read_journal(file, path)
        except OSError:
            continue
        if journal is None:
            continue
        key = (journal.job, journal.run, journal.host)
        if key not in found or len(journal.entries) > len(found[key].entries):
            found[key] = journal
    return list(found.values())
