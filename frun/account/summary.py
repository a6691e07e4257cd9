"""The account of a job: what its time was spent on, how much of it was productive, what its faults cost.

`Account` is exact; `document` is what `frun report --json` prints of it.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from frun.account import clocks
from frun.account.alarms import Alarms, KnownBy, alarms, drill_of, known_by
from frun.account.journal import Journal, microseconds
from frun.account.story import UNKNOWN, Story, gather
from frun.account.timeline import RECOVERY, Bucket, Segment, segments

SCHEMA = 1
WINDOW_US = microseconds(3600)
POINTS = 240
"""How many times the effective training time ratio of the last hour is told over the job's life."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One incident with its share of the job's time."""

    record: Mapping[str, Any]
    """As the leader closed it, and whether it did (`closed`); a fault within a recovery is not closed."""
    at_us: int
    """Since the job began."""
    spent_us: Mapping[Bucket, int]
    """The job's time from the fault to the first completed step, by phase."""
    known_by: KnownBy
    """What tells that it was a fault."""
    drill: str | None
    """The fault that was injected."""

    @property
    def total_us(self) -> int:
        """All of that time."""
        return sum(self.spent_us.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """All of a job's time, in pieces that leave nothing out."""

    job: str
    run: str
    journals: tuple[Journal, ...]
    """On one clock."""
    story: Story
    segments: tuple[Segment, ...]
    faults: tuple[Fault, ...]
    missing: tuple[str, ...] = ()
    """Hosts that took part and whose logs were not found."""

    @property
    def wall_us(self) -> int:
        """From the start of the first agent to the end of the last one, or to now."""
        return self.story.ended_us - self.story.began_us

    @property
    def buckets(self) -> dict[Bucket, int]:
        """Microseconds of each bucket; they add up to `wall_us`."""
        sums = dict.fromkeys(Bucket, 0)
        for segment in self.segments:
            sums[segment.bucket] += segment.end_us - segment.start_us
        return sums

    @property
    def ettr(self) -> float:
        """Effective training time ratio: productive time by wall time."""
        return _ratio(self.buckets[Bucket.PRODUCTIVE], self.wall_us)

    @property
    def alarms(self) -> Alarms:
        """Which alarms were false."""
        return alarms(self.story, (fault.known_by for fault in self.faults))

    @property
    def steps(self) -> int:
        """The most completed updates that any worker told of."""
        last = self.story.generations[-1:]
        told = [step for generation in last for _, step in generation.steps]
        return max([*(generation.high for generation in last), *told], default=0)

    @property
    def steps_lost(self) -> int:
        """Completed updates that were done again, over all generations."""
        return sum(
            max(0, generation.high - generation.resumed_at)
            for generation in self.story.generations
            if generation.resumed_at is not None
        )

    def sliding(self, window_us: int = WINDOW_US, points: int = POINTS) -> list[tuple[int, float]]:
        """Return (microseconds since the begin, ETTR of the window that ends there), evenly spread.

        Before a whole window has passed, of all the time so far.
        """
        began_us, wall_us = self.story.began_us, self.wall_us
        times = sorted({wall_us * index // points for index in range(1, points + 1)} - {0})
        productive = _Productive(self.segments)
        found = []
        for at_us in times:
            from_us = max(0, at_us - window_us)
            amount = productive.between(began_us + from_us, began_us + at_us)
            found.append((at_us, _ratio(amount, at_us - from_us)))
        return found


class _Productive:
    """Productive time between two moments, from sums that are made once."""

    def __init__(self, pieces: Sequence[Segment]) -> None:
        self._pieces = [piece for piece in pieces if piece.bucket is Bucket.PRODUCTIVE]
        self._starts = [piece.start_us for piece in self._pieces]
        self._sums = [0]
        for piece in self._pieces:
            self._sums.append(self._sums[-1] + piece.end_us - piece.start_us)

    def between(self, from_us: int, to_us: int) -> int:
        return self._until(to_us) - self._until(from_us)

    def _until(self, at_us: int) -> int:
        index = bisect_right(self._starts, at_us)
        if index == 0:
            return 0
        last = self._pieces[index - 1]
        return self._sums[index - 1] + min(at_us, last.end_us) - last.start_us


def account(
    journals: Sequence[Journal],
    *,
    now_us: Mapping[str, int] | None = None,
    incidents: Iterable[Mapping[str, Any]] = (),
    hosts: Iterable[str] = (),
) -> Account:
    """Return the account of one run; there must be a journal.

    `now_us` is the present on the clocks of hosts that live, `incidents` and `hosts` what etcd knows.
    """
    placed = clocks.aligned(journals)
    until = [
        now_us[journal.host] + moved.entries[0].at_us - journal.entries[0].at_us
        for journal, moved in zip(journals, placed, strict=True)
        if now_us is not None and journal.host in now_us
    ]
    story = gather(placed, until_us=max(until, default=None), incidents=incidents)
    pieces = segments(story)
    found = {journal.host for journal in journals}
    taking_part = {
        entry.text("peer") for journal in journals for entry in journal.all("host_joined")
    }
    return Account(
        job=journals[0].job,
        run=next((journal.run for journal in journals if journal.run), ""),
        journals=placed,
        story=story,
        segments=pieces,
        faults=tuple(_faults(story, pieces)),
        missing=tuple(sorted((taking_part | set(hosts)) - found)),
    )


def _faults(story: Story, pieces: Sequence[Segment]) -> Iterable[Fault]:
    spent: dict[int, dict[Bucket, int]] = {}
    for piece in pieces:
        if piece.bucket in RECOVERY or piece.bucket is Bucket.WAITING:
            sums = spent.setdefault(piece.generation, {})
            sums[piece.bucket] = sums.get(piece.bucket, 0) + piece.end_us - piece.start_us
    closed = {int(record["generation"]): record for record in story.incidents}
    for generation in story.generations[1:]:
        number = generation.number
        record = closed.get(number)
        if record is None:
            # The next fault came before all were in it, or the leader that closed it is out of reach.
            record = {**UNKNOWN, "id": number, "generation": number, "cause": generation.reason}
        drill = drill_of(story, number, record)
        yield Fault(
            known_by=known_by(story, number, record),
            drill=None if drill is None else drill.fault,
            record={**record, "closed": number in closed},
            at_us=generation.fault_us - story.began_us,
            spent_us=spent.get(number, {}),
        )


def document(account: Account) -> dict[str, Any]:
    """Return what `frun report --json` prints. Seconds have six decimals, and add up in decimal."""
    story = account.story
    sliding = account.sliding()
    notices = story.noticed
    whole = [point for point in sliding if point[0] >= WINDOW_US]
    lowest = min(whole, key=lambda point: point[1], default=None)
    return {
        "schema": SCHEMA,
        "job_id": account.job,
        "run": account.run,
        "over": story.over,
        "outcome": story.final[1] if story.final is not None else None,
        "reason": story.why,
        "began_wall_s": min(journal.began_wall_us for journal in account.journals) / 1_000_000,
        "wall_s": seconds(account.wall_us),
        "buckets_s": {bucket.value: seconds(us) for bucket, us in account.buckets.items()},
        "ettr": round(account.ettr, 6),
        "ettr_last_hour": round(sliding[-1][1], 6) if sliding else 0.0,
        "ettr_lowest_hour": None
        if lowest is None
        else {"at_s": seconds(lowest[0]), "ettr": round(lowest[1], 6)},
        "ettr_hour": [[seconds(at_us), round(ratio, 6)] for at_us, ratio in sliding],
        "steps_told": story.told,
        "steps": account.steps,
        "steps_lost": account.steps_lost,
        "generations": story.generations[-1].number if story.generations else 0,
        "incidents": [
            {
                **fault.record,
                "at_s": seconds(fault.at_us),
                "spent_s": {b.value: seconds(us) for b, us in fault.spent_us.items()},
                "spent_total_s": seconds(fault.total_us),
                "known_by": fault.known_by.value,
                "drill": fault.drill,
            }
            for fault in account.faults
        ],
        "noticed": [
            {
                "at_s": seconds(notice.at_us - story.began_us),
                "source": notice.source,
                "rank": notice.rank,
                "reason": notice.reason,
                "generation": notice.generation,
            }
            for notice in notices
        ],
        "noticed_for_nothing": account.alarms.nothing_came,
        "false_alarms": {"count": account.alarms.count, "how": account.alarms.how},
        "hosts": [_host(account, journal) for journal in account.journals],
        "hosts_without_log": list(account.missing),
        "segments": [
            {
                "start_s": seconds(piece.start_us - story.began_us),
                "end_s": seconds(piece.end_us - story.began_us),
                "bucket": piece.bucket.value,
                "generation": piece.generation,
            }
            for piece in account.segments
        ],
    }


def _host(account: Account, journal: Journal) -> dict[str, Any]:
    ended = next(iter(journal.all("job_ended")), None)
    return {
        "host": journal.host,
        "log": journal.source,
        "from_s": seconds(journal.entries[0].at_us - account.story.began_us),
        "until_s": seconds(journal.entries[-1].at_us - account.story.began_us),
        "exit_code": None if ended is None else int(ended.number("exit_code")),
        "broken_lines": journal.broken,
    }


def seconds(amount_us: int) -> float:
    """Return whole microseconds as seconds: exact to the sixth decimal."""
    return amount_us / 1_000_000


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole > 0 else 0.0
