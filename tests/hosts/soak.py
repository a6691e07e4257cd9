"""Lets a job of four hosts and a spare train through noise, in which nothing may be taken for a fault.

    python -m tests.hosts.soak [--minutes 30] [--seed 1] [--only WORDS] [-- FLAGS OF FRUN]

Rounds of all kinds of `noise`, shuffled. A false alarm is whatever nobody caused: a fault noticed, an
incident, a new generation and thereby each spare that takes over. At the end every state must be, to the bit,
that of an undisturbed run, and the account of the job must add up. Ends with 1 otherwise.

Needs root, `ip` and `nft`; `cc` for the steps of the clock, which agents and workers see and etcd does not.
"""

import argparse
import os
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.hosts import noise
from tests.hosts.job import FORM_S, News
from tests.hosts.network import missing
from tests.hosts.noise import NOISES, Noise, Scene, title
from tests.hosts.scenarios import HOSTS, Stage, spare_is_registered, stage
from tests.hosts.scenarios_recovery import accounted, exact
from tests.hosts.wallclock import WallClock

FLAGS = ("--nnodes=4", "--nproc-per-node=1", "--replace-timeout=60")
ALARMS = ("fault_noticed", "incident_closed")
OTHERS = ("store_lost", "lease_lost", "host_left")
"""Told, and no alarm: etcd did not answer, or ended a lease too early, and nothing was done about it."""
KEPT = 200
_START_S = 15.0


@dataclass(slots=True, kw_only=True)
class Tally:
    """What the agents said that nobody caused."""

    scene: Scene
    alarms: list[tuple[str, str]] = field(default_factory=list)
    """During which noise, and what."""
    counts: Counter[str] = field(default_factory=Counter)
    """Of each kind of noise."""
    others: Counter[str] = field(default_factory=Counter)
    _seen: int = 0
    _generation: int = 1
    _incidents: int = 0

    def look(self, during: str) -> list[str]:
        """Return what is new. An incident is expected for each worker that was killed."""
        events = sorted(
            (event for agent in self.scene.job.agents for event in agent.events()),
            key=lambda event: float(event["monotonic_s"]),
        )
        fresh, self._seen = events[self._seen :], len(events)
        found = [text for event in fresh if (text := self._alarm(event))]
        self.alarms += [(during, text) for text in found]
        return found

    def _alarm(self, event: dict[str, Any]) -> str:
        name = event["event"]
        if name in OTHERS:
            self.others[name] += 1
        if name == "phase_seen" and event["generation"] > self._generation:
            self._generation = event["generation"]
            if self._generation - 1 > self.scene.killed:
                return f"generation {self._generation}: {event['reason']}"
        if name == "incident_closed" and "SIGKILL" in event["cause"]:
            self._incidents += 1
            return "" if self._incidents <= self.scene.killed else f"{name}: {event['cause']}"
        if name not in ALARMS:
            return ""
        told = ("source", "rank", "reason", "peer", "cause")
        return f"{name} " + ", ".join(f"{key} {event[key]}" for key in told if key in event)


def soak(ready: Stage, minutes: float, seed: int, only: str, flags: Sequence[str]) -> int:
    """Print a line for each noise and a closing table; return the exit status."""
    job = ready.job(*FLAGS, *flags)
    job.train = Path(__file__).with_name("noisy_train.py")
    noises = [each for each in NOISES if only in title(each)]
    told: list[News] = []
    with job:
        clock = WallClock(job.folder)
        if not clock.environment:
            noises = [each for each in noises if each is not noise.clock_steps]
            _say("no C compiler here: the clock is left alone")
        (job.folder / "slow-2").write_text(f"0 {_START_S}")
        for name in HOSTS[:4]:
            job.start(ready.network[name], **clock.environment)
        job.world(size=4, within_s=FORM_S + _START_S)
        job.start(ready.network[HOSTS[4]], **clock.environment)
        spare_is_registered(ready, job, 5)
        scene = Scene(stage=ready, job=job, clock=clock, draw=random.Random(seed))
        tally = Tally(scene=scene)
        began = time.monotonic()
        _report(tally, "slow first step", f"rank 2 takes {_START_S:g} s for the first step", began)
        while time.monotonic() - began < 60 * minutes:
            for each in scene.draw.sample(noises, len(noises)):
                _make(tally, each, began)
                told += job.shelve(KEPT)
        _report(tally, "quiet", "nothing", began)
        job.finish(within_s=90.0)
        _report(tally, "end", "the job ends", began)
        with job._changed:
            job.news[:0] = told
        accounted(job, *["process"] * scene.killed)
        exact(job, 4)
        steps = max(news.step for news in job.news)
    _say(f"\n{steps} steps, every state as in an undisturbed run")
    return _close(tally, time.monotonic() - began)


def _make(tally: Tally, each: Noise, began: float) -> None:
    scene = tally.scene
    at, step = time.monotonic(), scene.step()
    each(scene)
    scene.reach(scene.step() + 10)
    what = f"{'; '.join(scene.did)} ({time.monotonic() - at:.0f} s, {scene.step() - step} steps)"
    scene.did.clear()
    tally.counts[title(each)] += 1
    _report(tally, title(each), what, began)


def _report(tally: Tally, during: str, what: str, began: float) -> None:
    found = tally.look(during)
    minutes, seconds = divmod(int(time.monotonic() - began), 60)
    load = os.getloadavg()[0]
    _say(f"{minutes:02}:{seconds:02} load {load:4.1f}  {what}: {len(found) or 'no'} false alarms")
    for text in found:
        _say(f"    FALSE ALARM {text}")


def _close(tally: Tally, took_s: float) -> int:
    _say(f"\n{'noise':<20}{'times':>7}{'false alarms':>15}")
    during = Counter(name for name, _ in tally.alarms)
    for name in dict.fromkeys([*tally.counts, *during]):
        _say(f"{name:<20}{tally.counts[name] or 1:>7}{during[name]:>15}")
    others = ", ".join(f"{name} {count}" for name, count in tally.others.items()) or "none"
    _say(f"{took_s / 60:.1f} minutes, {tally.scene.killed} workers killed on purpose")
    _say(f"told, and no alarm: {others}")
    _say(f"{len(tally.alarms)} false alarms")
    return int(bool(tally.alarms))


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> int:
    """Make the hosts and the noise; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--only", default="", metavar="WORDS", help="noises with this in their name"
    )
    parser.add_argument("flags", nargs="*", help="more flags of frun, after --")
    options = parser.parse_args()
    if why := missing() or (
        "" if shutil.which("nft") else "nft is missing: apt-get install nftables"
    ):
        _say(why)
        return 2
    with stage() as ready:
        return soak(ready, options.minutes, options.seed, options.only, options.flags)


if __name__ == "__main__":
    sys.exit(main())
