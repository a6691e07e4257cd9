"""What a worker is started with: its environment, and what the zygote has to know.

Pure composition of what the job, this host and the rank table say. Starting it is others' business.
"""

from frun.agent import addresses, environment
from frun.agent.logs import WorkerStreams
from frun.agent.worker import Worker, WorkerSettings
from frun.agent.zygote import WorkerLaunch
from frun.config import EntryMode, StartMethod
from frun.protocol.records import RankTable


def environment_of(
    settings: WorkerSettings, table: RankTable, group_rank: int, local_rank: int, *, error_file: str
) -> dict[str, str]:
    """Return the whole environment of one worker of the table's generation."""
    return environment.worker_environment(
        settings.base_environment,
        settings.config,
        table,
        group_rank=group_rank,
        local_rank=local_rank,
        job_id=settings.job_id,
        error_file=error_file,
        store_path=settings.store_path,
        channel_path=settings.channel_path,
        interface=addresses.interface_of(table.slots[group_rank].address),
    )


def launch_of(
    settings: WorkerSettings,
    worker: Worker,
    table: RankTable,
    group_rank: int,
    streams: WorkerStreams,
) -> WorkerLaunch:
    """Return how the process of a worker is to be made. Raises LaunchError."""
    workers, local_rank = settings.config.workers, worker.report.local_rank
    return WorkerLaunch(
        mode=workers.mode,
        entry=workers.entry,
        args=environment.worker_args(workers.args, local_rank),
        python=workers.python,
        env=environment_of(settings, table, group_rank, local_rank, error_file=streams.error_file),
        # One reader only: with several workers the first to read would take all of a pipe (S13).
        stdin="inherit" if local_rank == 0 else "null",
        stdout_fd=streams.stdout_fd,
        stderr_fd=streams.stderr_fd,
        exec_=workers.start_method is StartMethod.SPAWN or workers.mode is EntryMode.PROGRAM,
        prefix=settings.prefixes[local_rank] if settings.prefixes else (),
    )
