"""Pickling of what __main__ defines, and every way of multiprocessing, work in a forked worker."""

from pathlib import Path

import pytest

from tests.zygotes import forked, plain

SCRIPT = """\
import multiprocessing as mp, pickle, sys, dataclasses

@dataclasses.dataclass
class Box:
    value: int

def work(box, queue):
    queue.put((box.value + 1, __name__, mp.current_process().name))

def double(x):
    return 2 * x

if __name__ == "__main__":
    assert pickle.loads(pickle.dumps(Box(1))) == Box(1)
    print(Box.__module__, mp.current_process().name, mp.parent_process())
    how = mp.get_context(sys.argv[1])
    queue = how.Queue()
    process = how.Process(target=work, args=(Box(1), queue))
    process.start()
    print(queue.get(timeout=20))
    process.join(20)
    print(process.exitcode)
    with how.Pool(2) as pool:
        print(pool.map(double, range(5)))
    with how.Manager() as manager:
        print(list(manager.list([1, 2])))
"""


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
@pytest.mark.parametrize("command", [["s.py"], ["-m", "s"]], ids=" ".join)
def test_multiprocessing_works(
    method: str, command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes, pools and managers of each kind run code of the script."""
    (tmp_path / "s.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    ours = forked([*command, method])
    assert ours == plain([*command, method])
    assert ours.returncode == 0


def test_secrets_and_random_numbers_are_not_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two workers draw differently where two fresh processes do."""
    (tmp_path / "s.py").write_text(
        "import multiprocessing as mp, random, uuid, numpy, os, tempfile\n"
        "print(bytes(mp.current_process().authkey), random.random(), numpy.random.rand(), "
        "uuid.uuid4(), os.urandom(4), sep='\\n')\n"
    )
    monkeypatch.chdir(tmp_path)
    preload = {"preload": ["multiprocessing", "random", "numpy"]}
    first, second = forked(["s.py"], **preload), forked(["s.py"], **preload)
    assert first.returncode == second.returncode == 0
    assert not set(first.out.splitlines()) & set(second.out.splitlines())
