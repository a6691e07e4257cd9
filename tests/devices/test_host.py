"""What the kernel says of a host, and what is made of it."""

from pathlib import Path

import pytest

from frun.devices.host import Host
from tests.devices.build import HandClock, around

CALM = "some avg10=0.00 avg60=0.00 avg300=0.00 total=0\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"
STALLED = CALM.replace("full avg10=0.00", "full avg10=12.34")
ROOMY = "MemTotal:       8000000 kB\nMemFree:          10000 kB\nMemAvailable:    4000000 kB\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root file system with what is read of it."""
    for name, text in {
        "proc/pressure/memory": CALM,
        "proc/meminfo": ROOMY,
        "proc/self/cgroup": "5:devices:/\n0::/job\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def names(host: Host) -> list[str]:
    """Poll; nothing of a host is more than a warning."""
    facts = list(host.poll())
    assert all(fact.severity.value == "warning" and fact.device is None for fact in facts)
    return [fact.name for fact in facts]


def test_memory(root: Path) -> None:
    """Time that is lost for want of memory, of the own control group if that tells; and what is left."""
    host = Host(around(), root)
    assert names(host) == []
    (root / "proc/pressure/memory").write_text(STALLED)
    assert names(host) == ["memory"]
    (root / "sys/fs/cgroup/job").mkdir(parents=True)
    (root / "sys/fs/cgroup/job/memory.pressure").write_text(CALM)
    host = Host(around(), root)
    assert names(host) == []
    (root / "proc/meminfo").write_text(ROOMY.replace("4000000", "100000"))
    assert names(host) == ["memory-left"]


def test_a_kernel_that_says_little(tmp_path: Path) -> None:
    """Without pressure and control groups there is less to say, and no error."""
    assert names(Host(around(), tmp_path)) == []


def test_the_disk_of_the_logs(root: Path) -> None:
    """A folder that can't be looked at; a full one takes a file system."""
    host = Host(around(log_folder=str(root / "none")), root)
    assert names(host) == ["disk"]


def test_a_clock_that_is_set(root: Path) -> None:
    """Told in the poll after it, whichever way; time that passes is nothing."""
    clock = HandClock()
    host = Host(around(clock=clock), root)
    assert names(host) == []
    clock.now += 100
    assert names(host) == []
    for step in (60, -60):
        clock.offset += step
        (fact,) = host.poll()
        assert (fact.name, fact.reason) == ("clock", f"the clock was set by {step:+.1f} s")
        assert names(host) == []
