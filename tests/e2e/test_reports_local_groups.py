"""REPORTS.md, one machine: ports, stores and groups that scripts make for themselves; counts of workers."""

import contextlib
import os
import re
import socket
import subprocess
from collections.abc import Iterator

import pytest

from tests.e2e.harness import Site

REDUCE = """
    import os, pathlib, signal, sys
    import torch, torch.distributed as dist
    rank = int(os.environ["RANK"])
    state = pathlib.Path("checkpoint")
    dist.init_process_group("gloo")
    first = torch.tensor([int(state.read_text()) if state.exists() else 0])
    dist.broadcast(first, 0)
    deaths = [tuple(map(int, word.split("@"))) for word in sys.argv[2:]]
    for step in range(int(first), int(sys.argv[1])):
        mark = pathlib.Path(f"died-{rank}-{step}")
        if (rank, step) in deaths and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        ones = torch.ones(1)
        dist.all_reduce(ones)
        assert ones.item() == dist.get_world_size()
        if rank == 0:
            fresh = state.with_suffix(".new")
            fresh.write_text(str(step + 1))
            fresh.rename(state)
    print("end", rank, os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
    dist.destroy_process_group()
"""


@contextlib.contextmanager
def listening(*ports: int) -> Iterator[None]:
    """Hold these ports, as far as they are free."""
    with contextlib.ExitStack() as stack:
        for port in ports:
            taken = stack.enter_context(socket.socket())
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                taken.bind(("0.0.0.0", port))
                taken.listen()
        yield


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_r83_s02_exactly_one_restart_per_crash(site: Site) -> None:
    """Four ranks, three SIGKILLs in one run, gloo, resume from a checkpoint; rank 0 dies as well."""
    script = site.script("reduce.py", REDUCE)
    done = site.run(
        "--standalone", "--nproc-per-node=4", "--max-restarts=3", script, "12", "1@4", "0@7", "3@9",
        limit_s=100,
    )  # fmt: skip
    assert done.code == 0, done.err
    assert done.lines() == [f"end {rank} 3" for rank in range(4)]


def test_r83_executed_workers_as_well(site: Site) -> None:
    """The same with plain processes, which meet in a TCPStore at MASTER_ADDR:MASTER_PORT."""
    script = site.script("reduce.py", REDUCE)
    done = site.run(
        "--start-method=spawn", "--nproc-per-node=2", "--max-restarts=1", script, "6", "1@3",
        limit_s=100,
    )  # fmt: skip
    assert done.code == 0, done.err
    assert done.lines() == ["end 0 1", "end 1 1"]


def test_r52_ports_are_held_until_they_are_used(site: Site) -> None:
    """Restarts beside a process that opens and closes listening ports all the time: none is lost."""
    script = site.script(
        "bind.py",
        """
        import os, sys
        from datetime import timedelta
        from torch.distributed import TCPStore
        store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), 2, False,
                         timeout=timedelta(seconds=20))
        count = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        assert store.add("n", 1) <= 2, "a store of an earlier attempt"
        store.set("seen" + os.environ["RANK"], "1")
        store.wait(["seen0", "seen1"])
        print("met", count, flush=True)
        sys.exit(0 if count == 4 else 3)
        """,
    )
    site.script(
        "noise.py",
        """
        import socket, threading
        print("noise", flush=True)
        while True:
            with socket.socket() as s:
                s.bind(("127.0.0.1", 0)); s.listen()
                threading.Event().wait(0.001)
        """,
    )
    noise = site.start("noise.py", program=("python3",))
    noise.expect("noise")
    done = site.run("--nproc-per-node=2", "--max-restarts=4", script)
    noise.close()
    assert done.code == 0, done.err
    assert len(done.said(r"met 4")) == 2
    assert "3" not in re.findall(r"exit status (\d+)", "".join(done.said("met 9")))


def test_r53_many_jobs_on_one_machine(site: Site) -> None:
    """With 29500 and 29400 taken: standalone twice, plain twice, all succeed; equal ports are told apart."""
    script = site.script("x.py", 'import os; print("port", os.environ["MASTER_PORT"], flush=True)')
    with listening(29500, 29400):
        jobs = [
            site.start("--start-method=spawn", "--nproc-per-node=2", *flags, script)
            for flags in (("--standalone",), ("--standalone",), (), ())
        ]
        ended = [job.wait() for job in jobs]
    assert [done.code for done in ended] == [0] * 4, [done.err for done in ended]


def test_r53_an_equal_master_port_is_one_clear_message(site: Site) -> None:
    """The second job names the port, and the first one is not disturbed."""
    port = free_port()
    wait = site.script(
        "wait.py",
        """
        import os, time
        print("started", flush=True)
        while not os.path.exists("go"):
            time.sleep(0.05)
        """,
    )
    flags = ("--start-method=spawn", f"--master-port={port}")
    first = site.start(*flags, wait)
    first.expect("started")
    second = site.run(*flags, wait)
    (site.cwd / "go").touch()
    assert first.wait().code == 0
    assert second.code != 0
    assert str(port) in second.err
    assert "Traceback" not in second.err


def test_r56_r57_stores_and_groups_of_the_scripts_own(site: Site) -> None:
    """Own tcp:// address, own TCPStore, MASTER_ADDR:MASTER_PORT by hand, a file store, env:// at the end."""
    script = site.script(
        "own.py",
        """
        import os, sys
        from datetime import timedelta
        import torch, torch.distributed as dist
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        limit = timedelta(seconds=30)
        def check(word, **how):
            dist.init_process_group("gloo", timeout=limit, **how)
            ones = torch.ones(1)
            dist.all_reduce(ones)
            print(word, rank, int(ones.item()), flush=True)
            dist.destroy_process_group()
        here = dict(rank=rank, world_size=size)
        check("tcp", init_method="tcp://127.0.0.1:" + sys.argv[1], **here)
        own = dist.TCPStore("127.0.0.1", int(sys.argv[2]), size, rank == 0, timeout=limit)
        own.set(f"k{rank}", "v")
        own.wait([f"k{n}" for n in range(size)])
        master = "tcp://" + os.environ["MASTER_ADDR"] + ":" + os.environ["MASTER_PORT"]
        check("master", init_method=master, **here)
        check("file", init_method="file://" + os.path.abspath("meet"), **here)
        check("env")
        """,
    )
    done = site.run(
        "--nproc-per-node=2", script, str(free_port()), str(free_port()),
        limit_s=100,
    )  # fmt: skip
    assert done.code == 0, done.err
    words = ("env", "file", "master", "tcp")
    assert done.lines() == [f"{word} {rank} 2" for word in words for rank in range(2)]


def test_r57_a_fixed_port_equal_to_master_port(site: Site) -> None:
    """Script and launcher both want to host: it works, since the launcher's store is the one."""
    port = free_port()
    script = site.script(
        "fixed.py",
        """
        import os, sys
        from datetime import timedelta
        import torch.distributed as dist
        dist.init_process_group("gloo", init_method="tcp://127.0.0.1:" + sys.argv[1],
            rank=int(os.environ["RANK"]), world_size=2, timeout=timedelta(seconds=20))
        dist.barrier()
        print("met", flush=True)
        dist.destroy_process_group()
        """,
    )
    done = site.run("--nproc-per-node=2", f"--master-port={port}", script, str(port))
    assert done.code == 0, done.err
    assert len(done.said("met")) == 2


COUNT = 'import os; print("n", os.environ["WORLD_SIZE"], os.environ.get("CUDA_VISIBLE_DEVICES"))'


def test_r09_affinity_and_quota_bound_the_count(site: Site) -> None:
    """`auto` and `cpu` under taskset mean the cores allowed."""
    script = site.script("n.py", COUNT)
    for kind in ("auto", "cpu"):
        done = site.run(
            "--start-method=spawn", "--nproc-per-node", kind, script, prefix=("taskset", "-c", "0")
        )  # fmt: skip
        assert (done.code, done.out) == (0, "n 1 None\n")


def test_r11_an_explicit_number_wins(site: Site) -> None:
    """More workers than cores, and one worker with two devices."""
    script = site.script("n.py", COUNT)
    four = site.run("--start-method=spawn", "--nproc-per-node=4", script)
    assert four.lines() == ["n 4 None"] * 4
    one = site.run(
        "--start-method=spawn", "--nproc-per-node=1", script, env={"CUDA_VISIBLE_DEVICES": "0,1"}
    )
    assert one.lines() == ["n 1 0,1"]


@pytest.mark.parametrize(
    ("given", "nproc", "seen", "warned"),
    [
        (None, 2, "1", True),
        ("3", 2, "3", False),
        (None, 1, None, False),
        ("", 2, "", False),
    ],
)
def test_r14_threads(
    site: Site, given: str | None, nproc: int, seen: str | None, warned: bool
) -> None:
    """Unset and several workers: 1 and one warning; the user's value is kept; one worker: untouched."""
    script = site.script("n.py", 'import os; print("threads", os.environ.get("OMP_NUM_THREADS"))')
    done = site.run(
        "--start-method=spawn", f"--nproc-per-node={nproc}", script, env={"OMP_NUM_THREADS": given}
    )  # fmt: skip
    assert done.lines() == [f"threads {seen}"] * nproc
    assert ("OMP_NUM_THREADS" in done.err) == warned


def test_r15_variables_alone_start_a_job(site: Site) -> None:
    """Two agents without any flag meet; an empty variable counts as not set."""
    script = site.script(
        "x.py", 'import os; print(*(os.environ[n] for n in ("RANK", "WORLD_SIZE", "GROUP_RANK")))'
    )
    env: dict[str, str | None] = {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "1",
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ENDPOINT": f"127.0.0.1:{free_port()}",
        "PET_RDZV_ID": "x15",
        "PET_RDZV_CONF": "join_timeout=60",
        "PET_START_METHOD": "spawn",
        "PET_STANDALONE": "",
        "PET_MODULE": "",
        "PET_LOG_DIR": "",
        "PET_MAX_RESTARTS": "",
    }
    jobs = [site.start(script, env=env) for _ in range(2)]
    ended = [job.wait() for job in jobs]
    assert [done.code for done in ended] == [0, 0], [done.err for done in ended]
    assert sorted("".join(done.out for done in ended).splitlines()) == ["0 2 0", "1 2 1"]


def test_s10_s11_values_are_checked_at_the_start(site: Site) -> None:
    """Unknown settings, parameter names, odd switches and methods: one line that names them, exit 2."""
    script = site.script("x.py", "")
    cases: list[tuple[tuple[str, ...], dict[str, str | None], str]] = [
        (("--rdzv-conf=joint_timeout=5",), {}, "joint_timeout"),
        (("--rdzv-conf=min_nodes=1",), {}, "--nnodes"),
        ((), {"PET_START_METHOD": "nonsense"}, "nonsense"),
        ((), {"PET_STANDALONE": "moon"}, "PET_STANDALONE"),
        (("--nproc-per-node=0",), {}, "--nproc-per-node"),
        (("--monitor-interval=0",), {}, "--monitor-interval"),
        (("--nnodes=2:1",), {}, "2:1"),
    ]
    for flags, env, named in cases:
        done = site.run(*flags, script, env=env)
        assert (done.code, done.err.count("\n")) == (2, 1), done.err
        assert named in done.err


def test_a_long_temporary_folder_is_no_obstacle(site: Site) -> None:
    """The sockets of a job are made where their names fit, however deep TMPDIR is."""
    deep = site.cwd / ("d" * 60) / ("e" * 60)
    deep.mkdir(parents=True)
    script = site.script("x.py", 'print("ran")')
    done = site.run(script, env={"TMPDIR": str(deep)})
    assert done.code == 0, done.err
    assert done.out == "ran\n"
    assert not [name for name in os.listdir(deep) if name.startswith("frun")]


def test_no_listening_socket_is_left(site: Site) -> None:
    """All that a job listened on is gone with it."""
    release = site.cwd / "release"
    waiting = site.script(
        "w.py",
        f"import os, time\nprint('here')\nwhile not os.path.exists({str(release)!r}): time.sleep(0.01)",
    )
    job = site.start("--start-method=spawn", waiting)
    job.expect("here")
    assert _listening(site)
    release.touch()
    assert job.wait().code == 0
    assert not _listening(site)


def _listening(site: Site) -> frozenset[str]:
    """Return the listening sockets that processes of this site hold."""
    done = subprocess.run(["ss", "-Hltnp"], capture_output=True, text=True, timeout=20)
    ours = tuple(f"pid={pid}," for pid in site.processes())
    return frozenset(line for line in done.stdout.splitlines() if any(pid in line for pid in ours))
