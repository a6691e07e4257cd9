"""A zygote with torch: workers start in milliseconds and compute what a fresh process computes."""

import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.zygotes import Rig, environment, plain, with_rig

TRAIN = """\
import json, sys
had = "torch" in sys.modules
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
seeds = [torch.initial_seed(), torch.rand(1).item()]
torch.manual_seed(5)
store = dist.HashStore()
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 4))
ddp = DDP(model)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    optimizer.zero_grad()
    ddp(torch.randn(2048, 512)).square().mean().backward()
    optimizer.step()
digest = float(sum(p.double().sum() for p in model.parameters()))
dist.destroy_process_group()
print(json.dumps({"had": had, "seeds": seeds, "threads": torch.get_num_threads(), "same": [
    torch.rand(3).tolist(), digest, torch.get_num_interop_threads(), str(torch.get_default_dtype()),
    torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled()]}))
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a folder with the script."""
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "first.py").write_text("import time\nprint(time.monotonic())\n")
    monkeypatch.chdir(tmp_path)


def test_a_forked_worker_trains_as_a_fresh_process() -> None:
    """Results are those of plain python; thread counts follow the environment; seeds are not shared."""

    async def story(rig: Rig) -> None:
        assert await rig.zygote.ready(60.0) == ""
        one = rig.env | {"OMP_NUM_THREADS": "1"}
        ours = [
            json.loads((await rig.run(["train.py"], env=env)).out) for env in (one, one, rig.env)
        ]
        theirs = json.loads(plain(["train.py"], one).out)
        assert [run["had"] for run in (*ours, theirs)] == [True, True, True, False]
        assert ours[0]["same"] == ours[1]["same"] == theirs["same"]
        assert [run["threads"] for run in (*ours, theirs)] == [1, 1, 2, 1]
        seeds = [tuple(run["seeds"]) for run in (*ours, theirs)]
        assert len(set(seeds)) == len({first for first, _ in seeds}) == 4

    with_rig(story, warm=True, env=environment(OMP_NUM_THREADS="2"))


def test_the_warm_zygote_can_be_forked_safely(
    record_property: Callable[[str, object], None],
) -> None:
    """It runs no thread that computes and holds no device; its workers are there at once."""

    async def story(rig: Rig) -> None:
        assert await rig.zygote.ready(60.0) == ""
        took = []
        for _ in range(7):
            started = time.monotonic()
            took.append(float((await rig.run(["first.py"])).out) - started)
        record_property("spawn_to_first_line_s", statistics.median(took))
        assert statistics.median(took) < 1.0  # far from an import of torch, on a busy machine too
        fds = f"/proc/{rig.zygote.pid}/fd"
        await rig.idle()
        held = [os.readlink(f"{fds}/{fd}") for fd in os.listdir(fds)]
        assert not [name for name in held if name.startswith("/dev/") and "null" not in name]

    with_rig(story, warm=True)
