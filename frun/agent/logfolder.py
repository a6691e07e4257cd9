"""Owns the folders of one job's logs on this host: names, creation, removal when nothing is in them.

What is written into them belongs to `logs` and `events`. Nothing that exists is ever emptied, deleted
or written over, and every path handed out is absolute: workers may change their folder.
"""

import contextlib
import logging
import os
import shutil
import tempfile
from dataclasses import dataclass

from frun.errors import UsageError

logger = logging.getLogger(__name__)

EVENTS_FILE = "events.jsonl"
_MAX_ID_BYTES = 100  # a name may have 255; the random part and every file system must fit


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFolder:
    """`<log dir>/<job id>_<random>`: one agent's own, also when agents share a log dir."""

    path: str
    """Absolute; empty when files are off (`--log-dir` is the null device)."""
    temporary: str = ""
    """The folder in the system's temporary folder that frun made for it; empty if the user chose."""

    @property
    def on(self) -> bool:
        """True when files are written at all."""
        return bool(self.path)

    @property
    def events_file(self) -> str:
        """Path of the event log, or empty."""
        return os.path.join(self.path, EVENTS_FILE) if self.path else ""

    def attempt(self, generation: int) -> str:
        """Folder of one generation (the first is `attempt_0`, as in torchrun), or empty."""
        return os.path.join(self.path, f"attempt_{generation - 1}") if self.path else ""

    def worker(self, generation: int, local_rank: int) -> str:
        """Folder of one worker of one generation, or empty."""
        return os.path.join(self.attempt(generation), str(local_rank)) if self.path else ""

    def error_file(self, generation: int, local_rank: int) -> str:
        """Path for TORCHELASTIC_ERROR_FILE of one worker; empty when files are off."""
        return os.path.join(self.worker(generation, local_rank), "error.json") if self.path else ""


def make_log_folder(log_dir: str | None, job_id: str, *, temp_dir: str | None = None) -> LogFolder:
    """Create this agent's log folder and return it.

    `log_dir` None means a fresh folder under `temp_dir` (None: the system's). Raises UsageError, one
    line, when `log_dir` is a regular file or can not be written to.
    """
    if log_dir is not None and _is_null_device(log_dir):
        return LogFolder(path="")
    if log_dir:
        base = os.path.abspath(log_dir)
        if os.path.exists(base) and not os.path.isdir(base):
            raise UsageError(f"--log-dir {log_dir} is a file: name a folder, or leave it out")
        try:
            os.makedirs(base, exist_ok=True)
            path = tempfile.mkdtemp(prefix=f"{safe_name(job_id)}_", dir=base)
        except OSError as error:
            raise UsageError(
                f"--log-dir {log_dir} can not be used ({error.strerror}): name a folder that this"
                " user can write to"
            ) from error
        return LogFolder(path=path)
    try:
        temporary = os.path.abspath(tempfile.mkdtemp(prefix="frun_", dir=temp_dir))
        path = tempfile.mkdtemp(prefix=f"{safe_name(job_id)}_", dir=temporary)
    except OSError as error:
        raise UsageError(
            f"no temporary folder for logs ({error.strerror}): name a folder with --log-dir,"
            f" or turn files off with --log-dir {os.devnull}"
        ) from error
    return LogFolder(path=path, temporary=temporary)


def is_worthless(folder: LogFolder, *, keep_events: bool) -> bool:
    """Return True for a temporary log folder that holds nothing a user would want.

    A file with anything in it is wanted, the event log only with `keep_events` (the job did not end
    well). A folder that the user named always is.
    """
    if not folder.temporary:
        return False
    for parent, _, names in os.walk(folder.temporary):
        for name in names:
            path = os.path.join(parent, name)
            if path == folder.events_file and not keep_events:
                continue
            with contextlib.suppress(OSError):
                if os.lstat(path).st_size > 0:
                    return False
    return True


def remove(folder: LogFolder) -> None:
    """Remove a temporary log folder. One that the user named is never touched."""
    if folder.temporary:
        shutil.rmtree(folder.temporary, ignore_errors=True)


def safe_name(job_id: str) -> str:
    """Return the job id as one harmless part of a path: no slash, no leading dot, bounded length."""
    kept = "".join(char if char.isalnum() or char in "._- " else "_" for char in job_id)
    kept = kept.encode("utf-8", "replace")[:_MAX_ID_BYTES].decode("utf-8", "ignore")
    return "_" + kept[1:] if kept[:1] in (".", "-") else kept


def _is_null_device(path: str) -> bool:
    return os.path.realpath(path) == os.path.realpath(os.devnull)
