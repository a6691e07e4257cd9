"""A forked worker ends as plain python does: status, signals, traceback, clean-up."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.zygotes import Outcome, forked, plain

ENDINGS = {
    "nothing": "pass",
    "zero": "import sys; sys.exit(0)",
    "none": "import sys; sys.exit(None)",
    "seven": "import sys; sys.exit(7)",
    "255": "import sys; sys.exit(255)",
    "256": "import sys; sys.exit(256)",
    "negative": "import sys; sys.exit(-3)",
    "text": "import sys; sys.exit('what went wrong')",
    "object": "import sys; sys.exit([1, 2])",
    "system exit without sys": "raise SystemExit(5)",
    "os._exit": "import os; os._exit(9)",
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "segmentation fault": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
    "terminated": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "hung up": "import os, signal; os.kill(os.getpid(), signal.SIGHUP)",
    "abort": "import os; os.abort()",
    "keyboard interrupt": "import os, signal\nprint('before')\n"
    "os.kill(os.getpid(), signal.SIGINT)\nwhile 1: pass",
    "raised keyboard interrupt": "raise KeyboardInterrupt",
    "exception": "def f(x):\n    return 1 / x\nprint('out')\nf(0)",
    "chained": "try:\n    {}['a']\nexcept KeyError as e:\n    raise ValueError('b') from e",
    "group": "raise ExceptionGroup('all', [ValueError(1), TypeError(2)])",
    "syntax error": "x = 1\nprint('never'\n",
    "import error": "import nothing_of_this_name",
    "recursion": "def f(): f()\ntry:\n    f()\nexcept RecursionError as e:\n    print(e)",
    "in exec": "exec(compile('1/0', 'inner', 'exec'))",
    "own hook": "import sys, traceback\n"
    "def hook(*a):\n    print('hook', a[:2], sys.excepthook is hook)\n    traceback.print_exception(*a)\n"
    "    traceback.print_tb(sys.last_traceback)\n"
    "sys.excepthook = hook\n1/0",
    "broken hook": "import sys\ndef hook(*a):\n    [][0]\nsys.excepthook = hook\n1/0",
    "hook exits": "import sys\nsys.excepthook = lambda *a: sys.exit(4)\n1/0",
    "no hook": "import sys\ndel sys.excepthook\n1/0",
    "atexit": "import atexit\n@atexit.register\ndef f(): print('at exit')\nprint('x', end='')\n1/0",
    "thread": "import threading, time\ne = threading.Event()\n"
    "threading.Thread(target=lambda: (threading.main_thread().join(), print('thread done'))).start()\n"
    "print('main done')",
    "thread fails": "import threading\nt = threading.Thread(target=lambda: 1 / 0, name='t')\n"
    "t.start(); t.join()",
    "destructor": "class A:\n    def __del__(self): print('deleted', __name__)\n"
    "a = A()\nb = [a]; b.append(b)",
    "unflushed": "import sys, os\nf = os.fdopen(1, 'w', 9999, closefd=False); f.write('kept\\n')",
    "stack": "import sys\nwarn = sys._getframe()\nprint(warn.f_code.co_name, warn.f_lineno)",
    "unraisable": "class A:\n    def __del__(self): 1/0\nA()\nprint('on')",
    "warning": "import warnings\nwarnings.warn('careful')",
    "ignored pipe": "import signal, os\nr, w = os.pipe(); os.close(r)\nos.write(w, b'x')",
}


def both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> tuple[Outcome, Outcome]:
    """Run a script in a fork and in plain python."""
    (tmp_path / "s.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    return forked(["s.py"]), plain(["s.py"])


def _without_addresses(outcome: Outcome) -> Outcome:
    return replace(outcome, err=re.sub("0x[0-9a-f]+", "0x", outcome.err))


@pytest.mark.parametrize("name", ENDINGS)
def test_an_end_is_pythons_own(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Output, traceback and status agree to the letter."""
    ours, theirs = both(tmp_path, monkeypatch, ENDINGS[name] + "\n")
    assert _without_addresses(ours) == _without_addresses(theirs)


@pytest.mark.parametrize("name", ["exception", "keyboard interrupt", "seven", "syntax error"])
def test_a_module_ends_as_with_dash_m(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With -m, too, the traceback shows no frame of frun."""
    (tmp_path / "s.py").write_text(ENDINGS[name] + "\n")
    monkeypatch.chdir(tmp_path)
    assert forked(["-m", "s"]) == plain(["-m", "s"])
