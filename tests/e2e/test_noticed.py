"""What ends nothing, and is told: a rank that is slower than its peers, and a gradient that is no number."""

import json
import re
import signal
import threading
import time
from collections.abc import Mapping
from typing import Any

import pytest

from tests import event_log
from tests.e2e.harness import Site
from tests.e2e.test_drills import TRAIN

pytestmark = pytest.mark.timeout(300)
LIMIT_S = 120.0


def findings(site: Site) -> list[Mapping[str, Any]]:
    """Return what `frun status` says is wrong."""
    found = json.loads(site.run("status", "--json").out)["findings"]
    assert isinstance(found, list)
    return found


def test_a_slow_rank_and_a_gradient_that_is_no_number(site: Site) -> None:
    """The slow one is named and no other; the gradient is noticed by all ranks in the very step."""
    script, logs = site.script("train.py", TRAIN), site.cwd / "logs"
    job = site.start(
        "--allow-drills",
        "--nproc-per-node=3",
        "--check-gradients=report",
        f"--log-dir={logs}",
        script,
    )
    job.expect("trains", 3)
    assert findings(site) == []
    assert site.run("inject-fault", "slow:0.05", "--rank=2", "--yes").code == 0
    done = site.run("inject-fault", "nan", "--rank=1", "--yes")
    assert done.code == 0, done.err
    (step,) = re.findall(r"nan in rank 1, which was at step (\d+)", done.out)
    deadline = time.monotonic() + LIMIT_S
    found = findings(site)
    while "straggler" not in [each["source"] for each in found]:
        assert time.monotonic() < deadline, found
        threading.Event().wait(0.2)
        found = findings(site)
    # The figures may have been right for long by then: only one gradient was spoilt.
    assert {each["rank"] for each in found if each["source"] == "straggler"} == {2}
    job.send(signal.SIGTERM)
    job.wait()
    noticed = event_log.events(logs, "fault_noticed")
    odd = f"gradient norm of step {step} is not a number"
    assert [each["reason"] for each in noticed if each["source"] == "numbers"] == [odd] * 3
    assert [each["rank"] for each in noticed if each["source"] == "straggler"] == [2]
    assert len(noticed) == 4
