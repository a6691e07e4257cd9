"""A forked worker finds what `python -u script args` finds at its first line and later."""

import os
import py_compile
import shutil
from pathlib import Path

import pytest

from tests.zygotes import environment, forked, plain

SHOW = """\
start = dict(globals())
import os, sys, json, signal, re
names = {k: re.sub("0x[0-9a-f]+", "0x", repr(v)) for k, v in start.items() if k != "__builtins__"}
names["__builtins__"] = type(__builtins__).__name__
loader = type(start["__loader__"]).__name__
names["__loader__"] = [loader, getattr(__loader__, "name", ""), getattr(__loader__, "path", "")]
print(json.dumps({
    "names": dict(sorted(names.items())),
    "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "flags": repr(sys.flags),
    "executable": sys.executable, "prefix": sys.prefix, "env": dict(os.environ),
    "is_main": sys.modules["__main__"].__dict__ is globals(), "warn": sys.warnoptions,
    "std": [[s.encoding, s.errors, s.line_buffering, s.write_through, s.name]
            for s in (sys.stdin, sys.stdout, sys.stderr)],
    "leads": os.getsid(0) == os.getpgid(0) == os.getpid(), "cwd": os.getcwd(),
    "signals": {s: repr(signal.getsignal(s)).split(" at ")[0] for s in signal.valid_signals()},
    "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])), "comm": open("/proc/self/comm").read(),
    "cenv": os.popen("env -0 | tr '\\\\0' '\\\\n' | sort").read(),
}, indent=1))
"""
ODD = [
    "--r=16",
    "--help",
    "-h",
    "--nnodes",
    "9",
    "-5",
    "-1e-3",
    "",
    "a b",
    "--",
    "--x",
    "@f",
    "\udcff",
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a working folder with scripts and packages that show what they find."""
    work = tmp_path / "work"
    (work / "sub" / "pkg").mkdir(parents=True)
    (work / "sub" / "pkg" / "__init__.py").touch()
    for name in ("s.py", "sub/s.py", "sub/noext", "sub/pkg/mod.py", "sub/pkg/__main__.py"):
        (work / name).write_text(SHOW)
    odd = work / "with space \u00e9\u4e2d"
    odd.mkdir()
    (odd / "s.py").write_text("import neighbour\n" + SHOW)
    (odd / "neighbour.py").touch()
    (work / "link.py").symlink_to("sub/s.py")
    (work / "far.py").symlink_to(work / "sub" / "s.py")
    (work / "again.py").symlink_to("link.py")
    (work / "linked").symlink_to("sub")
    monkeypatch.chdir(work)
    return work


COMMANDS = [
    ["s.py", *ODD],
    ["./s.py"],
    [".//sub/../s.py"],
    ["././s.py"],
    ["sub/s.py", "-m", "x"],
    ["sub/noext"],
    ["link.py"],
    ["far.py"],
    ["again.py"],
    ["linked/s.py"],
    ["with space \u00e9\u4e2d/s.py"],
    ["sub/pkg", "one"],
    ["sub/pkg/"],
    ["-m", "sub.pkg.mod", *ODD],
    ["-m", "sub.pkg", "x"],
    ["-m", "s"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.usefixtures("folder")
def test_a_worker_finds_what_plain_python_finds(command: list[str]) -> None:
    """Names in __main__, arguments, path, streams, signals and environment are the same."""
    assert forked(command) == plain(command)


def test_an_absolute_path_is_run_from_anywhere(folder: Path) -> None:
    """The working folder is not on the path of a script elsewhere."""
    command = [str(folder / "sub" / "s.py")]
    os.chdir(folder / "linked")
    assert forked(command) == plain(command)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("command", [["s.py"], ["-m", "sub.pkg"], ["sub/pkg"]], ids=" ".join)
def test_variables_of_the_interpreter_count(command: list[str]) -> None:
    """PYTHONPATH and PYTHONSAFEPATH in the environment act as they do without a launcher."""
    for more in (
        {"PYTHONPATH": "sub:/nowhere", "PYTHONIOENCODING": "latin-1"},
        {"PYTHONSAFEPATH": "1", "PYTHONPATH": "."},
    ):
        env = environment(**more)
        assert forked(command, env=env) == plain(command, env)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    "command",
    [
        ["missing.py"],
        ["/nowhere/missing.py"],
        ["-m", "missing"],
        ["-m", "sub.missing"],
        ["-m", "sub"],
        ["sub"],
        ["/dev/null"],
    ],
    ids=" ".join,
)
def test_what_can_not_be_run_is_told_in_pythons_words(command: list[str]) -> None:
    """A missing script or module ends with python's own text and status."""
    assert forked(command) == plain(command)


def test_compiled_and_zipped_scripts_run(folder: Path) -> None:
    """A .pyc file and a zip file with a __main__.py are scripts too."""
    py_compile.compile("s.py", cfile="s.pyc")
    shutil.make_archive("app", "zip", folder / "sub" / "pkg", "__main__.py")
    for command in (["s.pyc"], ["app.zip", "x"]):
        assert forked(command) == plain(command)


def test_source_encodings_are_honoured(folder: Path) -> None:
    """The coding line and the byte order mark of a script are read as python reads them."""
    (folder / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\nprint(ascii('\xe9'))\n")
    (folder / "bom.py").write_bytes(b"\xef\xbb\xbfprint(ascii('\xc3\xa9'))\n")
    (folder / "bad.py").write_bytes(b"print('\xe9')\n")
    (folder / "future.py").write_text(
        "from __future__ import annotations\ndef f(x: y): pass\nprint(f.__annotations__)\n"
    )
    (folder / "plain.py").write_text("def f(x: 'y'): pass\nprint(f.__annotations__, __doc__)\n")
    for name in ("latin.py", "bom.py", "bad.py", "future.py", "plain.py"):
        assert forked([name]) == plain([name])
