"""Owns what a worker finds in its environment and arguments: torchrun's contract, pure.

Starting the process, and deciding the world it is told about, are left to others.
"""

import re
from collections.abc import Mapping, Sequence

from frun.config import LaunchConfig, StartMethod
from frun.errors import LaunchError
from frun.protocol.channel import WORKER_VARIABLES
from frun.protocol.records import RankTable

_SECRETS = frozenset({"FRUN_ETCD_PASSWORD"})
_RANKS = frozenset(
    {
        "RANK",
        "LOCAL_RANK",
        "GROUP_RANK",
        "ROLE_RANK",
        "ROLE_NAME",
        "LOCAL_WORLD_SIZE",
        "WORLD_SIZE",
        "GROUP_WORLD_SIZE",
        "ROLE_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_RESTART_COUNT",
        "TORCHELASTIC_MAX_RESTARTS",
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_USE_AGENT_STORE",
        "TORCHELASTIC_ERROR_FILE",
    }
)
RANK_VARIABLES = tuple(sorted(_RANKS - {"TORCHELASTIC_ERROR_FILE"}))
"""What changes for a worker that goes on in a new generation; its files stay where they are."""
_LOCAL_RANK = re.compile(r"(?<!\$)\$(?:\{local_rank\}|local_rank(?![A-Za-z0-9_]))")


def worker_environment(
    base: Mapping[str, str],
    config: LaunchConfig,
    table: RankTable,
    *,
    group_rank: int,
    local_rank: int,
    job_id: str,
    error_file: str,
    store_path: str | None = None,
    channel_path: str | None = None,
    interface: str = "",
) -> dict[str, str]:
    """Return the whole environment of one worker of `table`'s generation.

    `base` is the agent's environment. `error_file` is absolute, or empty when no files are kept.
    `store_path` is the unix socket of this host's part of the group store, `channel_path` that of the
    worker channel; workers that are executed anew get neither, whatever is passed.
    `interface` is the one that this host's published address is on, empty if unknown: with several
    hosts gloo is told to use it unless the user chose one. gloo on its own looks up the machine's name
    and falls back to loopback, where no other host finds it (R46, S17).

    Raises:
        LaunchError: CUDA_VISIBLE_DEVICES names too few devices for a virtual local rank.
    """
    workers, slot = config.workers, table.slots[group_rank]
    rank = slot.first_rank + local_rank
    environment = zygote_environment(base, config) | {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "GROUP_RANK": str(group_rank),
        "ROLE_RANK": str(rank),
        "ROLE_NAME": workers.role,
        "LOCAL_WORLD_SIZE": str(slot.nproc),
        "WORLD_SIZE": str(table.world_size),
        "GROUP_WORLD_SIZE": str(len(table.slots)),
        "ROLE_WORLD_SIZE": str(table.world_size),
        "MASTER_ADDR": table.master_addr.removeprefix("[").removesuffix("]"),
        "MASTER_PORT": str(table.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(table.restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(config.job.max_restarts),
        "TORCHELASTIC_RUN_ID": job_id,
        "TORCHELASTIC_USE_AGENT_STORE": str(workers.agent_store),
        "TORCHELASTIC_ERROR_FILE": error_file,
    }
    if interface and len(table.slots) > 1:
        environment.setdefault("GLOO_SOCKET_IFNAME", interface)
    if workers.virtual_local_rank:
        environment["LOCAL_RANK"] = "0"
        environment["CUDA_VISIBLE_DEVICES"] = visible_device(base, local_rank)
    if store_path is not None and workers.start_method is StartMethod.FORK:
        environment["FRUN_STORE"] = store_path
        environment["FRUN_GENERATION"] = str(table.generation)
        if channel_path is not None:
            environment["FRUN_CHANNEL"] = channel_path
            if config.job.allow_drills:
                environment["FRUN_DRILLS"] = "1"
            if workers.compare_every:
                environment["FRUN_COMPARE_REPLICAS"] = str(workers.compare_every)
            if workers.check_gradients is not None:
                environment["FRUN_CHECK_GRADIENTS"] = workers.check_gradients
    return environment


def zygote_environment(base: Mapping[str, str], config: LaunchConfig) -> dict[str, str]:
    """Return what every worker of this host has in common: no rank, no address, no secret.

    torch reads some variables while it is imported (OMP_NUM_THREADS), so the zygote needs them.
    """
    left_out = _RANKS | _SECRETS | WORKER_VARIABLES
    environment = {name: value for name, value in base.items() if name not in left_out}
    if config.workers.omp_num_threads is not None:
        environment.setdefault("OMP_NUM_THREADS", config.workers.omp_num_threads)
    environment.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    environment["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(config.workers.signals)
    return environment


def visible_device(base: Mapping[str, str], local_rank: int) -> str:
    """Return the one device of CUDA_VISIBLE_DEVICES that is this local rank's own.

    Raises:
        LaunchError: the list is shorter than that.
    """
    devices = base.get("CUDA_VISIBLE_DEVICES")
    if devices is None:
        return str(local_rank)
    names = devices.split(",")
    if local_rank >= len(names):
        raise LaunchError(
            f"local rank {local_rank} has no device in CUDA_VISIBLE_DEVICES={devices!r}: "
            "give more devices or a smaller --nproc-per-node"
        )
    return names[local_rank].strip()


def worker_args(args: Sequence[str], local_rank: int) -> tuple[str, ...]:
    """Put the local rank where `$local_rank` or `${local_rank}` stands; nothing else changes.

    A macro behind another `$` is not one, so `$$` can stand anywhere and stays as it is.
    """
    return tuple(_LOCAL_RANK.sub(str(local_rank), arg) for arg in args)
