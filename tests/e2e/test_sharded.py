"""Jobs in which each rank holds a part of the state: a part is copied from a replica of that part only."""

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.harness import ROOT, Done, Site

SCRIPT = str(ROOT / "tests" / "e2e" / "sharded_train.py")
Fault = list[int | str]


def train(site: Site, kind: str, faults: list[Fault], *options: str) -> Done:
    """Run the script on four ranks."""
    preload = "--preload=torch.distributed.fsdp"  # once, not in each worker
    return site.run("--nproc-per-node=4", preload, *options, SCRIPT, kind, json.dumps(faults))


def learnt(done: Done) -> dict[str, str]:
    """Return per rank the digest of its part after the last step."""
    assert done.code == 0, done.err[-3000:]
    return dict(re.findall(r"learnt (\d) 16 (\w+)", done.out))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, str]]:
    """Return what a run learns to which nothing happens."""

    @functools.cache
    def run(kind: str) -> dict[str, str]:
        with Site(tmp_path_factory.mktemp("undisturbed")) as made:
            return learnt(train(made, kind, []))

    return run


@pytest.mark.parametrize("kind", ["hsdp", "own"])
def test_parts_come_from_their_replicas(
    kind: str, site: Site, undisturbed: Callable[[str], dict[str, str]]
) -> None:
    """Every part is bitwise that of a run without faults, and only the dead are new processes."""
    faults: list[Fault] = [
        [1, 1, 2, "forward"],
        [0, 2, 4, "gate"],
        [3, 3, 6, "update"],
        [2, 4, 9, "after"],
        [1, 5, 11, "gate"],
        [0, 6, 12, "update"],
    ]
    done = train(site, kind, faults)
    wanted = undisturbed(kind)
    assert learnt(done) == wanted
    assert wanted["0"] == wanted["2"]
    assert wanted["1"] == wanted["3"]
    assert wanted["0"] != wanted["1"]
    assert [len({pid for r, pid in re.findall(r"entered (\d) (\d+)", done.out) if r == rank})
            for rank in "0123"] == [3, 3, 2, 2]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "dead"), [("fsdp", [1]), ("hsdp", [0, 2])], ids=["no replicas", "both replicas die"]
)
def test_a_part_that_is_lost_means_beginning_again(
    kind: str, dead: list[int], site: Site, undisturbed: Callable[[str], dict[str, str]]
) -> None:
    """No other part is taken for it: all workers are started again, and the part is named."""
    faults: list[Fault] = [[rank, 1, 5, "gate"] for rank in dead]
    done = train(site, kind, faults, "--max-restarts=1")
    assert "no replica 'parts=" in done.err
    assert "restart 1 of 1" in done.err
    assert learnt(done) == undisturbed(kind)


def test_parts_that_nobody_told_of_are_no_replicas(site: Site) -> None:
    """Tensors of the same shapes with other values: no part is copied to a rank that needs another one."""
    done = train(site, "untold", [[3, 1, 5, "gate"]])
    assert done.code == 1
    assert "restore: ranks 0 and 1 hold different values" in done.err
    assert "session.shard" in done.err


def test_what_cannot_be_told_apart_is_refused(site: Site, tmp_path: Path) -> None:
    """An optimizer that holds a part in torch's older way: one line, before anything is trained."""
    script = site.script(
        "zero.py",
        """
        import torch, torch.distributed as dist, frun
        from torch.distributed.optim import ZeroRedundancyOptimizer
        @frun.resumable
        def train(session):
            dist.init_process_group("gloo")
            model = torch.nn.Linear(2, 2)
            session.restore(model=model, optimizer=ZeroRedundancyOptimizer(
                model.parameters(), optimizer_class=torch.optim.SGD, lr=0.1))
        train()
        """,
    )
    done = site.run("--nproc-per-node=2", script)
    assert done.code == 1
    assert "session.restore can not take optimizer (ZeroRedundancyOptimizer)" in done.err
