"""A resumable function under real frun: whatever dies, the run ends like one that nothing happened to."""

import functools
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.harness import ROOT, TORCHRUN, Done, Site

SCRIPT = str(ROOT / "tests" / "e2e" / "resumable_train.py")
STEPS = 14
Fault = list[int | str]
Learnt = dict[str, tuple[str, ...]]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """Give a corner of the machine that must be clean afterwards."""
    with Site(tmp_path) as made:
        made.keeps = ("pymp-.*",)  # of a killed rank's loader processes, as under any launcher
        yield made


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, str], Learnt]:
    """Return what a run learns to which nothing happens, per size and variant, run once."""

    @functools.cache
    def run(nproc: int, variants: str) -> Learnt:
        with Site(tmp_path_factory.mktemp("undisturbed")) as made:
            made.keeps = ("pymp-.*",)
            return learnt(train(made, nproc, variants, []))

    return run


def train(site: Site, nproc: int, variants: str, faults: list[Fault], *options: str) -> Done:
    """Run the script under frun."""
    return site.run(
        "--standalone",
        "--nproc-per-node",
        str(nproc),
        *options,
        SCRIPT,
        str(STEPS),
        variants,
        json.dumps(faults),
    )


def learnt(done: Done) -> Learnt:
    """Return per rank what it has learnt."""
    assert done.code == 0, done.err[-3000:]
    found = re.findall(r"learnt (\d+) (\d+) (\d+) (\w+)", done.out)
    return {rank: tuple(rest) for rank, *rest in found}


def pids(done: Done) -> dict[str, list[str]]:
    """Return per rank the processes that entered, in order."""
    found: dict[str, list[str]] = {}
    for rank, pid in re.findall(r"entered (\d+) (\d+)", done.out):
        if pid not in found.setdefault(rank, []):
            found[rank].append(pid)
    return found


PLACES: dict[str, list[Fault]] = {
    "loading": [[1, 1, -1, "import"]],
    "groups and state": [[1, 1, 0, "entry"], [0, 2, 0, "entry"], [1, 3, 0, "met"]],
    "the first step": [[1, 1, 0, "restored"], [0, 2, 0, "forward"]],
    "every place of a step": [  # two steps apart: the other may have completed the one of the fault
        [1, 1, 2, "loader"],
        [0, 2, 3, "forward"],
        [1, 3, 5, "backward"],
        [0, 4, 6, "gate"],
        [1, 5, 8, "update"],
        [0, 6, 10, "after"],
        [1, 7, STEPS - 1, "after"],
    ],
    "the newcomer": [
        [1, 1, 4, "gate"],
        [1, 2, 0, "copy"],
        [1, 3, 6, "after"],
        [1, 4, 0, "entry"],
        [1, 5, 8, "forward"],
        [0, 6, 9, "forward"],
    ],
}
EARLY = {"import", "entry", "met", "copy", "restored"}
"""Places at which a process has not said yet that it entered."""


@pytest.mark.parametrize("places", PLACES)
def test_one_of_two_dies(
    places: str, site: Site, undisturbed: Callable[[int, str], Learnt]
) -> None:
    """The other's process lives on and both end bitwise equal, wherever one dies, again and again."""
    faults = PLACES[places]
    done = train(site, 2, "sgd", faults)
    assert learnt(done) == undisturbed(2, "sgd")
    late = [str(rank) for rank, _, _, place in faults if place not in EARLY]
    assert {rank: len(found) for rank, found in pids(done).items()} == {
        rank: 1 + late.count(rank) for rank in "01"
    }


@pytest.mark.parametrize(
    "variants",
    [
        "adamw,unseeded,shuffle,atomic,wrapped",
        "sgd,workers,shuffle",
        "sgd,epochs,unseeded,several",
        "adamw,scaler,compiled",
    ],
)
def test_variants(variants: str, site: Site, undisturbed: Callable[[int, str], Learnt]) -> None:
    """Whatever the script uses, three faults in three ranks leave no trace in the result."""
    faults: list[Fault] = [[1, 1, 3, "forward"], [0, 2, 6, "gate"], [2, 3, 9, "after"]]
    done = train(site, 3, variants, faults)
    assert learnt(done) == undisturbed(3, variants)


def test_two_at_once(site: Site, undisturbed: Callable[[int, str], Learnt]) -> None:
    """Two of three die in the same step; the third one has all that is needed."""
    done = train(site, 3, "sgd", [[0, 1, 5, "forward"], [2, 1, 5, "forward"]])
    assert learnt(done) == undisturbed(3, "sgd")
    assert len(pids(done)["1"]) == 1


def test_users_errors_stay_theirs(site: Site) -> None:
    """An exception on one rank ends the job with that exception, without endless recoveries."""
    done = train(site, 2, "sgd,raises", [])
    assert done.code == 1
    assert "ValueError: a picture is upside down" in done.err
    assert "rank 1" in done.err


def test_same_file_elsewhere(site: Site, undisturbed: Callable[[int, str], Learnt]) -> None:
    """torchrun trains the same file to the same bits."""
    done = site.run(
        "--standalone", "--nproc-per-node", "2", SCRIPT, str(STEPS), "sgd", "[]", program=TORCHRUN
    )
    assert learnt(done) == undisturbed(2, "sgd")


def test_one_call_in_a_process(site: Site) -> None:
    """A newcomer could not know that the first of two functions is over."""
    script = site.script(
        "two.py",
        """
        import frun

        @frun.resumable
        def nothing(session):
            return session.rank

        assert nothing() == 0
        nothing()
        """,
    )
    done = site.run("--standalone", script)
    assert done.code == 1
    assert "nothing is the second call of a resumable function" in done.err


def test_plain_python(site: Site) -> None:
    """A single process without a launcher trains too."""
    script = site.script(
        "alone.py",
        """
        import torch
        import frun

        @frun.resumable
        def train(session, steps):
            model = torch.nn.Linear(2, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            assert session.restore(model=model, optimizer=optimizer) == 0
            for batch in session.batches([torch.ones(2)] * 3, steps=steps):
                optimizer.zero_grad()
                model(batch).sum().backward()
                optimizer.step()
            print("steps", session.step, session.generation, session.is_newcomer)

        train(5)
        """,
    )
    done = site.run(script, program=(sys.executable,))
    assert done.lines() == ["steps 5 0 True"], done.err
