"""What a worker finds in its environment and arguments, beside torchrun's own."""

import json
import os
import string
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frun.agent.environment import (
    visible_device,
    worker_args,
    worker_environment,
    zygote_environment,
)
from frun.config import LaunchConfig
from frun.errors import LaunchError
from frun.protocol.records import Phase, RankTable, Slot
from tests.cli.tools import configure

SHOW = "import json, os; print(json.dumps(dict(os.environ)), flush=True)"
ELSEWHERE = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE")


def table(*nprocs: int, address: str = "10.0.0.1", restarts: int = 0) -> RankTable:
    """A running world with these numbers of workers per host."""
    slots = tuple(
        Slot(host=f"h{i}", address="", port=0, first_rank=sum(nprocs[:i]), nproc=nproc)
        for i, nproc in enumerate(nprocs)
    )
    return RankTable(
        generation=4,
        phase=Phase.RUN,
        reason="",
        restarts=restarts,
        slots=slots,
        master_addr=address,
        master_port=1234,
    )


def of(
    base: Mapping[str, str],
    config: LaunchConfig,
    local_rank: int = 0,
    store_path: str | None = None,
    address: str = "10.0.0.1",
) -> dict[str, str]:
    """One worker's environment on the second of three hosts."""
    return worker_environment(
        base,
        config,
        table(2, 3, 1, address=address, restarts=2),
        group_rank=1,
        local_rank=local_rank,
        job_id="j",
        error_file="/e.json",
        store_path=store_path,
    )


def test_every_variable_of_torchrun() -> None:
    """The whole contract, on a host in the middle."""
    config = configure("--nproc-per-node=3", "--max-restarts=5", "--role=r")
    assert of({"HOME": "/h", "RANK": "99"}, config, local_rank=2) == {
        "HOME": "/h",
        "RANK": "4",
        "LOCAL_RANK": "2",
        "GROUP_RANK": "1",
        "ROLE_RANK": "4",
        "ROLE_NAME": "r",
        "LOCAL_WORLD_SIZE": "3",
        "WORLD_SIZE": "6",
        "GROUP_WORLD_SIZE": "3",
        "ROLE_WORLD_SIZE": "6",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "1234",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "5",
        "TORCHELASTIC_RUN_ID": "j",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": "/e.json",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "OMP_NUM_THREADS": "1",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
    }


def test_the_users_own_values_are_kept() -> None:
    """What torchrun only sets when it is missing stays."""
    base = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3", "OMP_NUM_THREADS": "", "PET_ROLE": "x"}
    found = of(base, configure("--nproc-per-node=2", env=base))
    assert {name: found[name] for name in base} == base
    base = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    assert of(base, configure(env=base))["TORCHELASTIC_USE_AGENT_STORE"] == "False"


def test_an_address_has_no_brackets() -> None:
    """R50: torch wants the bare literal."""
    assert of({}, configure(), address="[::1]")["MASTER_ADDR"] == "::1"


def test_the_store_is_for_forked_workers_only() -> None:
    """A fresh program gets nothing of frun's, not even that of a frun around it."""
    outer = {"FRUN_STORE": "/outer", "FRUN_GENERATION": "9"}
    inside = of(outer, configure(), store_path="/s")
    assert (inside["FRUN_STORE"], inside["FRUN_GENERATION"]) == ("/s", "4")
    for tokens in (("--start-method=spawn",), ("--no-python",)):
        assert not outer.keys() & of(outer, configure(*tokens), store_path="/s").keys()
    assert not outer.keys() & of(outer, configure()).keys()


def test_no_worker_learns_the_password_of_etcd() -> None:
    """The secret stays in the agent."""
    base = {"FRUN_ETCD_USER": "u", "FRUN_ETCD_PASSWORD": "p"}
    config = configure("--rdzv-endpoint=a", env=base)
    assert "FRUN_ETCD_PASSWORD" not in of(base, config)
    assert "FRUN_ETCD_PASSWORD" not in zygote_environment(base, config)


def test_the_zygote_knows_no_rank() -> None:
    """A frun inside another frun's worker does not hand down the outer ranks."""
    config = configure("--nproc-per-node=2")
    outer = of({"HOME": "/h"}, config, store_path="/s")
    inner = zygote_environment(outer, config)
    assert set(inner) == {
        "HOME",
        "OMP_NUM_THREADS",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "TORCHELASTIC_SIGNALS_TO_HANDLE",
    }


@pytest.mark.parametrize(
    ("devices", "expected"),
    [(None, ["0", "1"]), ("4,7", ["4", "7"]), ("GPU-a, GPU-b", ["GPU-a", "GPU-b"])],
)
def test_a_virtual_local_rank(devices: str | None, expected: list[str]) -> None:
    """LOCAL_RANK is 0 and the one visible device is the worker's own."""
    base = {} if devices is None else {"CUDA_VISIBLE_DEVICES": devices}
    config = configure("--virtual-local-rank", "--nproc-per-node=2", env=base)
    found = [of(base, config, local_rank) for local_rank in (0, 1)]
    assert [each["LOCAL_RANK"] for each in found] == ["0", "0"]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in found] == expected
    assert [each["RANK"] for each in found] == ["2", "3"]


def test_a_rank_without_a_device_is_refused() -> None:
    """The list of devices is too short."""
    with pytest.raises(LaunchError, match="local rank 1"):
        visible_device({"CUDA_VISIBLE_DEVICES": "4"}, 1)


@pytest.mark.parametrize(
    ("arg", "expected"),
    [
        ("${local_rank}", "3"),
        ("--r=$local_rank.log", "--r=3.log"),
        ("a${local_rank}b$local_rank", "a3b3"),
        ("$local_ranks", "$local_ranks"),
        ("$local_rank_", "$local_rank_"),
        ("${local_rank", "${local_rank"),
        ("$LOCAL_RANK", "$LOCAL_RANK"),
        ("pa$$word", "pa$$word"),
        ("$$local_rank", "$$local_rank"),
        ("$", "$"),
    ],
)
def test_the_local_rank_in_arguments(arg: str, expected: str) -> None:
    """S06: the two macros are replaced, and no byte beside them."""
    assert worker_args([arg], 3) == (expected,)


@given(st.lists(st.text(alphabet=st.sampled_from("$ {}local_rankX9\n\u00e9")), max_size=5))
def test_arguments_differ_from_torchruns_in_doubled_dollars_only(args: list[str]) -> None:
    """Without `$$` the result is that of torchrun's template; anything without the name is kept."""
    found = worker_args(args, 7)
    for arg, made in zip(args, found, strict=True):
        if "$$" not in arg:
            assert made == string.Template(arg).safe_substitute(local_rank="7")
        if "local_rank" not in arg:
            assert made == arg


def test_beside_torchrun_itself(tmp_path: Path) -> None:
    """torchrun runs a script that prints its environment; ours is the same, name by name."""
    script = tmp_path / "show.py"
    script.write_text(SHOW)
    flags = ("--nproc-per-node=2", "--max-restarts=3", "--role=r", "--local-addr=127.0.0.1")
    base = {**os.environ, "PET_SHUTDOWN_TIMEOUT": "9"}
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *flags, str(script)],
        env=base,
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    config = configure(*flags, env=base)
    theirs = {each["RANK"]: each for each in map(json.loads, done.stdout.splitlines())}
    for local_rank in (0, 1):
        ours = worker_environment(
            base,
            config,
            table(2),
            group_rank=0,
            local_rank=local_rank,
            job_id="j",
            error_file="/e.json",
        )
        seen = theirs[str(local_rank)]
        assert set(ours) - {"LC_CTYPE"} == set(seen) - {"LC_CTYPE"}
        assert {k: v for k, v in ours.items() if k not in ELSEWHERE} == {
            k: v for k, v in seen.items() if k in ours and k not in ELSEWHERE
        }


def test_gloo_uses_the_interface_of_the_published_address() -> None:
    """Only between hosts, and never against the user's own choice: gloo alone would take loopback."""
    config = configure("--nproc-per-node=3")

    def gloo(world: RankTable, **base: str) -> str | None:
        return worker_environment(
            base,
            config,
            world,
            group_rank=0,
            local_rank=0,
            job_id="j",
            error_file="",
            interface="eth7",
        ).get("GLOO_SOCKET_IFNAME")

    assert gloo(table(3, 3)) == "eth7"
    assert gloo(table(3, 3), GLOO_SOCKET_IFNAME="ib0") == "ib0"
    assert gloo(table(3)) is None
