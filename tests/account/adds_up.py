"""Whatever a job went through, its account leaves out no microsecond: asserted at the end of real jobs."""

from pathlib import Path

from frun.account.journal import Journal, read_journal
from frun.account.summary import account, document


def adds_up(folder: Path) -> int:
    """Assert it of every run whose event logs lie below a folder; return how many there were."""
    runs: dict[tuple[str, str], list[Journal]] = {}
    for path in sorted(folder.rglob("*.jsonl")):
        journal = read_journal(path.read_text(errors="replace").splitlines(), str(path))
        if journal is not None:
            runs.setdefault((journal.job, journal.run), []).append(journal)
    for (job, run), journals in runs.items():
        printed = document(account(journals))
        what = f"job {job!r}, run {run!r} in {folder}"
        wall_us = _microseconds(printed["wall_s"])
        assert sum(map(_microseconds, printed["buckets_s"].values())) == wall_us, what
        at_us = 0
        for segment in printed["segments"]:
            assert _microseconds(segment["start_s"]) == at_us, f"{what}: {segment}"
            at_us = _microseconds(segment["end_s"])
        assert at_us == wall_us, what
    return len(runs)


def _microseconds(seconds: float) -> int:
    whole = round(seconds * 1_000_000)
    assert whole / 1_000_000 == seconds, f"{seconds!r} has more than six decimals"
    return whole
