"""A script whose folder hides something that is already imported runs in a fresh interpreter."""

import logging
from pathlib import Path

import pytest

from tests.zygotes import environment, forked, plain

SHOW = "import sys, colorsys\nprint(getattr(colorsys, 'mine', None), 'frun' in sys.modules)\n"
PRELOAD = {"preload": ["colorsys"]}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working folder, with a script."""
    (tmp_path / "s.py").write_text(SHOW)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("command", [["s.py"], ["-m", "s"]], ids=" ".join)
def test_nothing_hidden_is_forked(command: list[str]) -> None:
    """The preloaded module is used."""
    assert forked(command, **PRELOAD).out == "None True\n"


@pytest.mark.parametrize("name", ["colorsys.py", "colorsys/__init__.py"])
@pytest.mark.parametrize("command", [["s.py"], ["-m", "s"]], ids=" ".join)
def test_a_hiding_module_is_found_by_the_script(
    name: str, command: list[str], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The script imports its own module as under plain python, and the log says why it is slower."""
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("mine = 'mine'\n")
    with caplog.at_level(logging.WARNING):
        ours = forked(command, **PRELOAD)
    assert ours == plain(command)
    assert ours.out == "mine False\n"
    assert str(folder / name) in caplog.text


def test_what_hides_nothing_does_not_matter(folder: Path) -> None:
    """A folder without __init__, data of that name and modules of a bare interpreter hide nothing."""
    (folder / "colorsys").mkdir()
    (folder / "colorsys" / "data.py").touch()
    (folder / "colorsys.txt").touch()
    (folder / "os.py").touch()
    assert forked(["s.py"], **PRELOAD).out == "None True\n"


def test_a_preloaded_module_of_the_script_itself_hides_nothing(folder: Path) -> None:
    """A module that was preloaded from the script's own folder is the same file."""
    (folder / "model.py").write_text("import sys\nprint('imported', flush=True)\n")
    (folder / "s.py").write_text("import model, sys\nprint('frun' in sys.modules)\n")
    env = environment(PYTHONPATH=str(folder))
    assert forked(["s.py"], preload=["model"], env=env).out == "True\n"
