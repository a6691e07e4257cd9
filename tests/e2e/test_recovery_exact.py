"""Recovered runs are bitwise those that nothing happened to; `benchmarks.exactness` in short."""

from typing import Any

import pytest

from benchmarks.exactness import difference
from tests.e2e.exact import Training
from tests.e2e.harness import Site

STEPS = 16
SGD = {"steps": STEPS, "optimizer": "sgd", "batchnorm": True, "dropout": True, "accumulate": 2}
ADAMW = {"steps": STEPS, "optimizer": "adamw", "dropout": True, "loop": "plain"}
LBFGS = {"steps": STEPS, "optimizer": "lbfgs", "batchnorm": True, "loop": "plain"}
UPDATE = {"steps": STEPS, "optimizer": "adamw", "batchnorm": True, "update": True}
CATCHING = {"steps": STEPS, "optimizer": "sgd", "batchnorm": True, "catching": True}
OUTSIDE = {"steps": STEPS, "optimizer": "adamw", "outside": True}
UNSEEDED = {"steps": STEPS, "optimizer": "sgd", "dropout": True, "loop": "unseeded", "workers": 1}

CASES = [
    pytest.param(
        3,
        SGD,
        """
        rank 0: SIGKILL in loading
        rank 1: SIGKILL at step 0 in before-first-step
        rank 2: SIGKILL at step 3 in backward
        rank 0: SIGSEGV at step 5 in loader
        then any rank: SIGKILL in donor
        rank 1: SIGKILL at step 9 in update
        then rank 1: SIGKILL in newcomer
        ranks 0, 2: SIGKILL at step 12 in gate
        rank 2: exit 3 at step 16 in end
        """,
        (),
        id="sgd",
    ),
    pytest.param(
        2,
        ADAMW,
        """
        all ranks: SIGKILL at step 2 in forward
        rank 1: SIGKILL at step 4 in after-update
        rank 0: SIGKILL at step 6 in update
        then rank 0: SIGKILL in meeting
        rank 1: SIGKILL at step 9 in scheduler
        then any rank: SIGKILL in donor
        """,
        (0, 5),
        id="adamw-restarts",
    ),
    pytest.param(
        3,
        LBFGS,
        """
        rank 2: SIGKILL at step 2 in update
        rank 0: SIGKILL at step 5 in backward
        then rank 1: SIGKILL in groups
        rank 1: SIGKILL at step 9 in gate
        then rank 1: SIGKILL in loading
        """,
        (),
        id="lbfgs",
    ),
    pytest.param(
        2,
        UPDATE,
        """
        rank 0: SIGKILL at step 2 in scheduler
        rank 1: SIGKILL at step 5 in update
        zygote: SIGKILL at step 8 in gate
        rank 0: SIGKILL at step 11 in after-update
        """,
        (2,),
        id="update-zygote",
    ),
    pytest.param(
        3,
        CATCHING,
        """
        rank 1: SIGKILL at step 3 in backward
        rank 0: SIGKILL at step 6 in forward
        rank 2: SIGKILL at step 9 in gate
        """,
        (),
        id="catching",
    ),
    pytest.param(
        3,
        OUTSIDE,
        """
        rank 1: SIGKILL in loading
        rank 0: SIGKILL at step 3 in backward
        then rank 0: SIGKILL in groups
        rank 2: SIGKILL at step 9 in update
        """,
        (),
        id="outside",
    ),
    pytest.param(
        2,
        UNSEEDED,
        """
        rank 1: SIGKILL at step 3 in backward
        rank 0: SIGKILL at step 9 in after-update
        """,
        (),
        id="unseeded-loader-processes",
    ),
]


@pytest.mark.parametrize(("ranks", "config", "faults", "restarts"), CASES)
def test_faults_leave_no_trace(
    site: Site, ranks: int, config: dict[str, Any], faults: str, restarts: tuple[int, ...]
) -> None:
    """Every loss and the final state are bitwise equal; who did not die keeps its process."""
    site.keeps = ("pymp-.*",)  # of loading processes whose parent was killed
    training = Training(site, ranks, config)
    reference = training.run()
    run = training.run(faults, "--max-restarts=9")
    training.must_be_equal(run, reference, faults, restarts)


def test_the_same_script_under_torchrun(site: Site) -> None:
    """Without a fault frun changes nothing: torchrun's losses and final state are the same."""
    training = Training(site, 2, SGD)
    run, theirs = training.run(), training.elsewhere("torchrun")
    assert (run.code, theirs.code) == (0, 0), theirs.stderr
    assert difference(theirs, run) == ""


def test_the_same_script_under_plain_python(site: Site) -> None:
    """As a world of one it trains without any launcher, and the same numbers come out."""
    training = Training(site, 1, {**SGD, "loop": "unseeded"})
    theirs, run = training.elsewhere("python"), training.run()
    assert (run.code, theirs.code) == (0, 0), theirs.stderr
    assert difference(theirs, run) == ""
