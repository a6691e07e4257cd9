"""The program as a person meets it: one line and an exit code, never a traceback."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from frun import __version__
from frun.cli import main


def leave(*argv: str) -> int | str | None:
    """Run the program in this process and return what it exits with."""
    with pytest.raises(SystemExit) as caught:
        main(argv)
    return caught.value.code


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a script, and an environment without anybody's settings."""
    for name in list(os.environ):
        if name.startswith(("PET_", "FRUN_")) or name in ("LOGLEVEL", "PYTHON_EXEC"):
            monkeypatch.delenv(name)
    (tmp_path / "s.py").write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        ((), "no script given"),
        (("run",), "no script given"),
        (("",), "no script given"),
        (("--standalone",), "no script given"),
        (("--nnodes", "2:1", "s.py"), "--nnodes: '2:1'"),
        (("--no", "s.py"), "ambiguous"),
        (("--bogus", "s.py"), "--bogus"),
        (("missing.py",), "'missing.py'"),
        (("--config", "missing.yaml", "s.py"), "missing.yaml"),
        (("--etcd-password-file", "missing", "--rdzv-endpoint", "a", "s.py"), "missing"),
        (("--no-python", "-m", "s.py"), "--module"),
        (("--rdzv-conf", "joint_timeout=5", "s.py"), "joint_timeout"),
        (("--pause-timeout", "50", "s.py"), "--pause-timeout (50 s) must be less than"),
    ],
)
@pytest.mark.usefixtures("here")
def test_bad_input_is_one_line_and_exit_code_2(
    argv: tuple[str, ...], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is wrong stands in one line on stderr that begins with the program's name."""
    assert leave(*argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("frun: error: ")
    assert err.count("\n") == 1
    assert part in err


@pytest.mark.usefixtures("here")
def test_a_bad_log_level_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """LOGLEVEL is checked as everything else."""
    monkeypatch.setenv("LOGLEVEL", "LOUD")
    assert leave("s.py") == 2
    assert "LOGLEVEL: 'LOUD'" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [("--help",), ("-h",), ("run", "--help"), ("--standalone", "-h")])
def test_help_fits_a_screen_per_section(
    argv: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """Sections of at most 24 lines of 100 columns, with every flag once."""
    assert leave(*argv) == 0
    text = capsys.readouterr().out
    assert all(len(block.splitlines()) <= 24 for block in text.split("\n\n"))
    assert all(len(line) <= 100 for line in text.splitlines())
    assert text.count("--rdzv-endpoint ") == 1


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """`frun --version` says which frun."""
    assert leave("--version") == 0
    assert capsys.readouterr().out == f"frun {__version__}\n"


def test_the_module_is_the_same_program_and_imports_nothing_heavy(here: Path) -> None:
    """`python -m frun` refuses in the same words, and neither torch nor grpc is loaded for it."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "frun", "--nnodes", "x", "s.py"],
        cwd=here,
        env={"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=60,
    )
    lines = done.stderr.splitlines()
    loaded = {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")}
    said = [line for line in lines if not line.startswith("import time:")]
    assert done.returncode == 2
    assert said == ["frun: error: --nnodes: 'x' is not N or MIN:MAX, for example 4 or 2:4"]
    assert "click" in loaded
    assert not loaded & {"torch", "grpc", "yaml", "asyncio", "rich", "etcd3aio"}
