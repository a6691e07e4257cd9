"""The rhythm of a worker's beats."""

import threading

from frun.protocol.channel import Beat
from frun.worker.beats import BEAT_S, STILL_BEAT_S, Beats, pause_s

LIMIT_S = 60.0


def beat(number: int, *, last: bool) -> Beat:
    """Return a beat that can be told from others."""
    return Beat(
        generation=1, step=number, completed=0, fresh=False, recent_s=0.0, own_s=0.0, team="", delay_s=0.0,
        place="script", where="", still_s=0.0, cpu_s=0.0, last=last,
    )  # fmt: skip


def test_who_stands_still_beats_more_often() -> None:
    """Moving on costs two beats a second; standing still is told in time for its bound."""
    assert pause_s(0.0) == pause_s(0.9) == BEAT_S
    assert pause_s(1.0) == pause_s(1000.0) == STILL_BEAT_S < BEAT_S


def test_the_last_beat_says_so() -> None:
    """None follows that does not say it, and to end twice is to end once."""
    sent: list[Beat] = []
    some = threading.Event()

    def send(made: Beat) -> None:
        sent.append(made)
        if len(sent) == 2:
            some.set()

    beats = Beats(send, lambda: beat(len(sent), last=beats.over))
    beats.begin()
    assert some.wait(LIMIT_S)
    beats.end()
    beats.end()
    beats._thread.join(LIMIT_S)
    assert not beats._thread.is_alive()
    said = [each.last for each in sent]
    assert said == sorted(said)
    assert said[-1]
