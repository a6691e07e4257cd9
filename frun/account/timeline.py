"""Cuts the whole time of a job into pieces of which each is one thing: the account of every second.

All times are whole microseconds, and the pieces follow one another without a gap, so that whatever is added
up adds up exactly.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from frun.account.story import Generation, Story


class Bucket(StrEnum):
    """What the job as a whole did: what the rank or host did that it waited for."""

    PRODUCTIVE = "productive"
    """All ranks trained steps that had not been completed before. The step that a fault cuts counts up to
    the fault."""
    REPEATED = "repeated"
    """All ranks trained steps that had been completed before and were lost."""
    DETECTION = "detection"
    """From the fault to the sight of the rank table that answers it."""
    PAUSE = "pause"
    """Survivors left their groups, what had to was stopped, the next store was made ready."""
    RESPAWN = "respawn"
    """Newcomers were started."""
    REBUILD = "rebuild"
    """Process groups were made, and all ranks agreed on the step."""
    COPY = "copy"
    """Newcomers got their state."""
    FIRST_STEP = "first_step"
    """From the restored state to the first completed step: what was cut is done again, and whatever comes
    only once in a process (compilation, connections) is in it."""
    WAITING = "waiting"
    """Hosts were missing."""
    CHECKPOINT = "checkpoint"
    """A rank was in a declared checkpoint."""
    START_UP = "start_up"
    """From the start of the first agent until all ranks have their state, less what was waited for hosts."""
    IDLE = "idle"
    """Nothing trained and nothing was being recovered: the end of the job."""


RECOVERY = (
    Bucket.DETECTION,
    Bucket.PAUSE,
    Bucket.RESPAWN,
    Bucket.REBUILD,
    Bucket.COPY,
    Bucket.FIRST_STEP,
)
"""What the paper's table calls detection and restart, in the order in which they come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One piece of the job's time."""

    start_us: int
    end_us: int
    bucket: Bucket
    generation: int


def segments(story: Story) -> tuple[Segment, ...]:
    """Return the pieces in order; the first begins with the job, the last ends with it, none is empty."""
    pieces = list(_pieces(story))
    return tuple(_joined(_with_checkpoints(pieces, story.checkpoints)))


def _pieces(story: Story) -> Iterator[Segment]:
    generations = story.generations
    if not generations:
        yield from _run_of(story.began_us, story.ended_us, Bucket.START_UP, 0)
        return
    over_us = story.ended_us
    if story.final is not None:
        over_us = min(over_us, story.final[0])
    trained_until = min(x for x in (story.fault_us, story.stopped_us, over_us) if x is not None)
    at_us = story.began_us
    for index, generation in enumerate(generations):
        is_last = index + 1 == len(generations)
        end_us = trained_until if is_last else generations[index + 1].fault_us
        end_us = max(at_us, end_us)
        for piece in _generation(generation, at_us, end_us, first=index == 0, told=story.told):
            yield piece
            at_us = piece.end_us
    last = generations[-1].number
    if story.fault_us is not None:
        fault_us = min(max(at_us, story.fault_us), max(at_us, over_us))
        yield from _run_of(at_us, fault_us, Bucket.IDLE, last)
        yield from _run_of(fault_us, over_us, Bucket.DETECTION, last)
        at_us = max(fault_us, over_us)
    yield from _run_of(at_us, story.ended_us, Bucket.IDLE, last)


def _generation(
    generation: Generation, start_us: int, end_us: int, *, first: bool, told: bool
) -> Iterator[Segment]:
    """Yield the pieces of one generation, from its fault to that of the next one."""
    if first:
        bounds = [(generation.restored_us if told else generation.started_us, Bucket.START_UP)]
    else:
        bounds = [
            (generation.table_us, Bucket.DETECTION),
            (generation.run_us, Bucket.PAUSE),
            (generation.started_us, Bucket.RESPAWN),
        ]
        if told:
            bounds += [(generation.met_us, Bucket.REBUILD), (generation.restored_us, Bucket.COPY)]
    if told:
        bounds.append((generation.first_us, Bucket.FIRST_STEP))
    reached = max((i for i, (bound_us, _) in enumerate(bounds) if bound_us is not None), default=-1)
    at_us = start_us
    for index, (bound_us, bucket) in enumerate(bounds):
        if bound_us is None:
            # Never reached: the job was in this phase when the next fault came. Or it was reached, since a
            # later one was, and who could tell is out of reach: the time counts to the next phase.
            until_us = at_us if index < reached else end_us
        else:
            until_us = min(max(bound_us, at_us), end_us)
        plain = list(_run_of(at_us, until_us, bucket, generation.number))
        yield from _overlaid(plain, generation.gathers, Bucket.WAITING)
        at_us = until_us
    caught_up_us = min(max(_caught_up(generation, end_us), at_us), end_us)
    yield from _run_of(at_us, caught_up_us, Bucket.REPEATED, generation.number)
    yield from _run_of(caught_up_us, end_us, Bucket.PRODUCTIVE, generation.number)


def _caught_up(generation: Generation, end_us: int) -> int:
    """Return when the steps that had been done before were done again; between two reports in proportion."""
    if generation.resumed_at is None or generation.resumed_at >= generation.high:
        return 0
    before = None
    for at_us, step in generation.steps:
        if step >= generation.high:
            if before is None or step <= before[1]:
                return at_us
            then_us, from_step = before
            return then_us + (at_us - then_us) * (generation.high - from_step) // (step - from_step)
        before = (at_us, step)
    return end_us


def _run_of(start_us: int, end_us: int, bucket: Bucket, generation: int) -> Iterator[Segment]:
    if start_us < end_us:
        yield Segment(start_us=start_us, end_us=end_us, bucket=bucket, generation=generation)


def _with_checkpoints(
    pieces: Sequence[Segment], spans: Sequence[tuple[int, int]]
) -> Iterator[Segment]:
    for piece in pieces:
        if piece.bucket in (Bucket.PRODUCTIVE, Bucket.REPEATED):
            yield from _overlaid([piece], spans, Bucket.CHECKPOINT)
        else:
            yield piece


def _overlaid(
    pieces: Iterable[Segment], spans: Sequence[tuple[int, int]], bucket: Bucket
) -> Iterator[Segment]:
    """Yield the pieces with `bucket` wherever they overlap a span. Spans are in order and apart."""
    ends = [end_us for _, end_us in spans]
    for piece in pieces:
        at_us = piece.start_us
        for start_us, end_us in spans[bisect_right(ends, at_us) :]:
            if start_us >= piece.end_us:
                break
            from_us, to_us = max(start_us, at_us), min(end_us, piece.end_us)
            yield from _run_of(at_us, from_us, piece.bucket, piece.generation)
            yield from _run_of(from_us, to_us, bucket, piece.generation)
            at_us = to_us
        yield from _run_of(at_us, piece.end_us, piece.bucket, piece.generation)


def _joined(pieces: Iterable[Segment]) -> Iterator[Segment]:
    """Yield neighbours of one kind as one piece."""
    last: Segment | None = None
    for piece in pieces:
        if last is not None and (last.bucket, last.generation) == (piece.bucket, piece.generation):
            last = replace(last, end_us=piece.end_us)
            continue
        if last is not None:
            yield last
        last = piece
    if last is not None:
        yield last
