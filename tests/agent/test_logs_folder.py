"""The log folder: its names, its refusals, and what is left of it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from frun.agent.logfolder import LogFolder, is_worthless, make_log_folder, remove, safe_name
from frun.errors import UsageError


@pytest.mark.parametrize(
    "job_id", ["a/b", "..", ".", "-x", "x" * 300, "\u00e9" * 300, "", "a b\n\0"]
)
def test_any_job_id_makes_a_folder(tmp_path: Path, job_id: str) -> None:
    """A job id with slashes, dots or 300 characters still makes one folder, inside (S07, R19)."""
    folder = make_log_folder(str(tmp_path), job_id)
    assert Path(folder.path).parent == tmp_path
    assert os.listdir(tmp_path) == [os.path.basename(folder.path)]


def test_plain_ids_stay_readable() -> None:
    """An ordinary id is the beginning of the folder's name, spaces included."""
    assert safe_name("my job-7.b") == "my job-7.b"
    assert safe_name("../../etc") == "_._.._etc"


def test_relative_folder_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths for workers are absolute, so a script may change its folder (S05)."""
    monkeypatch.chdir(tmp_path)
    folder = make_log_folder("logs/deep", "job")
    assert folder.error_file(3, 1).startswith(f"{tmp_path}/logs/deep/job_")
    assert folder.error_file(3, 1).endswith("/attempt_2/1/error.json")


def test_two_agents_share_a_log_dir(tmp_path: Path) -> None:
    """Agents with one --log-dir get folders of their own, and foreign files stay."""
    (tmp_path / "mine.txt").write_text("keep")
    first, second = (make_log_folder(str(tmp_path), "job") for _ in range(2))
    assert first.path != second.path
    assert (tmp_path / "mine.txt").read_text() == "keep"


def test_regular_file_is_refused_in_one_line(tmp_path: Path) -> None:
    """--log-dir on a regular file is a usage error that names it."""
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(UsageError, match=r"^--log-dir \S+/file is a file: [^\n]+$"):
        make_log_folder(str(file), "job")
    with pytest.raises(UsageError, match=r"^--log-dir \S+ can not be used \(Not a directory\)"):
        make_log_folder(str(file / "below"), "job")


def test_read_only_folder_is_refused_in_one_line(tmp_path: Path) -> None:
    """A folder that this user may not write to is a usage error that names it."""
    tmp_path.chmod(0o555)
    code = (
        "import os, sys\nfrom frun.agent.logfolder import make_log_folder\n"
        "from frun.errors import UsageError\n"
        "if os.geteuid() == 0: os.setuid(65534)\n"
        "try: make_log_folder(sys.argv[1], 'job')\nexcept UsageError as e: print(e)"
    )
    parents = [tmp_path, *tmp_path.parents]
    if any(not parent.stat().st_mode & 0o001 for parent in parents) and os.geteuid() == 0:
        target = "/proc/1"  # pytest's folders are closed to others: any folder of root's will do
    else:
        target = str(tmp_path)
    done = subprocess.run([sys.executable, "-c", code, target], capture_output=True, text=True)
    assert done.stdout.startswith(f"--log-dir {target} can not be used ("), done.stderr
    assert done.stdout.count("\n") == 1


def test_no_flag_makes_a_temporary_folder_that_goes_if_empty(tmp_path: Path) -> None:
    """Without --log-dir nothing is left behind unless it holds something (S15)."""
    folder = make_log_folder(None, "job", temp_dir=str(tmp_path))
    os.makedirs(folder.worker(1, 0))
    Path(folder.worker(1, 0), "stdout.log").touch()
    Path(folder.events_file).write_text("{}\n")
    assert not is_worthless(folder, keep_events=True)
    assert is_worthless(folder, keep_events=False)
    remove(folder)
    assert os.listdir(tmp_path) == []


def test_a_folder_with_an_error_file_or_of_the_user_stays(tmp_path: Path) -> None:
    """Error files are wanted; a folder that the user named is never removed."""
    folder = make_log_folder(None, "job", temp_dir=str(tmp_path / "."))
    os.makedirs(folder.worker(1, 0))
    Path(folder.error_file(1, 0)).write_text("{}")
    assert not is_worthless(folder, keep_events=False)
    named = make_log_folder(str(tmp_path / "named"), "job")
    assert not is_worthless(named, keep_events=False)
    assert os.path.isdir(named.path)


def test_null_device_means_no_paths() -> None:
    """--log-dir /dev/null: every path is empty text."""
    folder = make_log_folder(os.devnull, "job")
    assert folder == LogFolder(path="")
    assert folder.error_file(1, 0) == folder.attempt(1) == folder.events_file == ""
