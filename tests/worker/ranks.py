"""Real ranks for tests: forked processes in a gloo group, each with an answer or an exception."""

import multiprocessing
import os
import pickle
import signal
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

LIMIT_S = 180.0
GROUP_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Raised:
    """What a rank's function raised."""

    kind: str
    text: str
    trace: str


def run_ranks(world: int, work: Callable[[int], Any], *, limit_s: float = LIMIT_S) -> list[Any]:
    """Return what `work(rank)` returned on each rank, a Raised, or None for a rank that was killed."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ends: list[Connection] = []
        processes = []
        for rank in range(world):
            mine, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_rank, args=(rank, world, folder, work, theirs))
            process.start()
            theirs.close()
            ends.append(mine)
            processes.append(process)
        try:
            return [
                _answer(end, process.sentinel, limit_s)
                for end, process in zip(ends, processes, strict=True)
            ]
        finally:
            for process, end in zip(processes, ends, strict=True):
                if process.is_alive():
                    process.kill()
                process.join()
                process.close()
                end.close()


def _answer(end: Connection, sentinel: int, limit_s: float) -> Any:
    if not wait([end, sentinel], limit_s):
        return TimeoutError(f"no answer within {limit_s} s")
    try:
        return pickle.loads(end.recv_bytes()) if end.poll() else None
    except EOFError:
        return None


def _rank(rank: int, world: int, folder: str, work: Callable[[int], Any], end: Connection) -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(int(LIMIT_S))
    torch.set_num_threads(1)
    store = FileStore(str(Path(folder, "store")), world)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=GROUP_S)
    )
    try:
        answer = work(rank)
    except Exception as error:  # noqa: BLE001 - told to the test
        answer = Raised(kind=type(error).__name__, text=str(error), trace=traceback.format_exc())
    end.send_bytes(pickle.dumps(answer))
    end.close()
    os._exit(0)
