"""The table of lines that are evidence: the built-in one, a user's, and what is refused."""

from pathlib import Path

import pytest

from frun.errors import UsageError
from frun.fault_patterns import load
from frun.protocol.classes import FaultClass
from frun.protocol.classify import of_failure
from frun.protocol.records import Failure

EXAMPLE = Path(__file__).parents[2] / "configs" / "faults" / "site.yaml"
LINES = {
    "RuntimeError: CUDA error: uncorrectable ECC error encountered": FaultClass.DEVICE,
    "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.": FaultClass.DEVICE,
    "RuntimeError: UCE ERROR": FaultClass.DEVICE,
    "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB": FaultClass.USER,
    "RuntimeError: CUDA error: device-side assert triggered": FaultClass.USER,
    "OSError: [Errno 28] No space left on device: '/ckpt/7'": FaultClass.STORAGE,
    "OSError: [Errno 116] Stale file handle": FaultClass.STORAGE,
    "OSError: [Errno 5] Input/output error": FaultClass.STORAGE,
    "OSError: [Errno 12] Cannot allocate memory": FaultClass.HOST,
    "RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed.": FaultClass.HOST,
    "OSError: [Errno 24] Too many open files": FaultClass.HOST,
    "ncclRemoteError: A call failed possibly due to a network error": FaultClass.NETWORK,
    "RuntimeError: [gloo/tcp/pair.cc:538] Connection closed by peer [10.0.0.2]:1": FaultClass.NETWORK,
    "OSError: [Errno 113] No route to host": FaultClass.NETWORK,
    "KeyError: 'labels'": FaultClass.USER,
    "ValueError: Expected more than 1 value per channel when training": FaultClass.USER,
}


def failure(line: str) -> Failure:
    return Failure(rank=0, local_rank=0, host="a", pid=7, exit_code=1, message=line, recorded=True)


@pytest.mark.parametrize("line", LINES)
def test_lines_as_libraries_write_them(line: str) -> None:
    """Each has its class by the built-in table."""
    assert of_failure(failure(line), load(None)).fault_class is LINES[line]


def test_a_users_table_comes_first() -> None:
    """The shipped example adds lines, and takes one from the built-in table."""
    rules = load(str(EXAMPLE))
    assert len(rules) > len(load(None))
    lustre = failure("LustreError: 11-0: ost7 -107")
    assert of_failure(lustre, rules).fault_class is FaultClass.STORAGE
    assert of_failure(lustre, load(None)).fault_class is FaultClass.USER
    assert of_failure(failure("OSError: Broken pipe"), rules).fault_class is FaultClass.USER


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{class: user}", "must be a list"),
        ("- {class: user}", "entry 1 must have the keys class and pattern"),
        ("- {class: hots, pattern: a}", "no such class: 'hots', did you mean 'host'?"),
        ("- {class: user, pattern: 3}", "the pattern must be a text"),
        ("- {class: [user], pattern: a}", "no such class: ['user']"),
        ("- {class: user, pattern: '('}", "'(' is no regular expression"),
        ("- [", "this is not YAML"),
        (None, "can not be read: No such file"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str | None, problem: str) -> None:
    """With the file and the entry, before the job begins."""
    path = tmp_path / "own.yaml"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError) as caught:
        load(str(path))
    assert problem in str(caught.value)
    assert str(caught.value).startswith(f"--fault-patterns: {path}")


def test_an_empty_table_adds_nothing(tmp_path: Path) -> None:
    """A file of comments."""
    path = tmp_path / "own.yaml"
    path.write_text("# later\n", encoding="utf-8")
    assert load(str(path)) == load(None)
