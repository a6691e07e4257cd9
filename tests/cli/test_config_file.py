"""`--config FILE`: the same words as the flags, read by the same rules, refused by place."""

from pathlib import Path

import pytest

from frun.config_file import load
from frun.errors import UsageError
from tests.cli.tools import configure

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_each_preset_loads(path: Path) -> None:
    """Every file in configs/ is a complete job but for the script and the job's name."""
    config = configure("--job-id=j", file=load(str(path)))
    assert config.workers.nproc in (6, 8)
    assert config.job.max_restarts > 0


def test_there_are_presets() -> None:
    """The test above tests something."""
    assert CONFIGS


def write(folder: Path, text: str) -> str:
    """Write a file and return its path."""
    path = folder / "job.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_values_are_read_as_flags_are(tmp_path: Path) -> None:
    """YAML's own guesses are not made: `1:2` is a range and `null` is a handler's name."""
    path = write(
        tmp_path,
        "nnodes: 1:2\n"
        "nproc_per_node: 3\n"
        "event-log-handler: null\n"
        "job-id: no\n"
        "rdzv-backend: c10d\n"
        "rdzv-conf: {join_timeout: 5, is_host: yes}\n"
        "tee: {0: 3, 2: 1}\n"
        "local-ranks-filter: [0, 2]\n"
        "duplicate-stdout-filters: ['a,b', c]\n"
        "signals-to-handle: [SIGTERM]\n"
        "virtual-local-rank: true\n",
    )
    config = configure(file=load(path))
    assert (config.job.min_hosts, config.job.max_hosts, config.job.job_id) == (1, 2, "no")
    assert (config.rendezvous.join_timeout_s, config.rendezvous.is_host) == (5, True)
    assert tuple(map(int, config.logs.tee)) == (3, 0, 1)
    assert config.logs.local_ranks_filter == frozenset({0, 2})
    assert config.logs.stdout_filters == ("a,b", "c")
    assert config.workers.signals == ("SIGTERM",)
    assert config.workers.virtual_local_rank


def test_flags_beat_variables_beat_the_file(tmp_path: Path) -> None:
    """One value per layer, the strongest counts."""
    file = load(write(tmp_path, "max-restarts: 1\nrole: a\nnproc-per-node: 4\n"))
    env = {"PET_MAX_RESTARTS": "2", "PET_ROLE": "b"}
    config = configure("--max-restarts=3", env=env, file=file)
    assert (config.job.max_restarts, config.workers.role, config.workers.nproc) == (3, "b", 4)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("max-restart: 3\n", [":1:", "'max-restart'", "'max-restarts'"]),
        ("\nrole: a\nmax-restarts: x\n", [":3: max-restarts", "'x'"]),
        ("nnodes: 1\nnnodes: 2\n", [":2: nnodes", ":1: nnodes", "twice"]),
        ("rdzv_id: a\njob-id: b\n", ["twice"]),
        ("role: [a, b]\n", [":1: role", "a list"]),
        ("rdzv-conf: [a=1]\n", ["rdzv-conf", "a list", "mapping"]),
        ("standalone: {a: 1}\n", ["standalone", "true or false"]),
        ("standalone: on\n", ["standalone", "'on'"]),
        ("preload: [[a]]\n", ["preload", "a list inside"]),
        ("role:\n", ["role", "no value"]),
        ("- a\n", ["a list"]),
        ("just text\n", ["flag: value"]),
        ("a: [\n", ["not YAML"]),
        ("config: other.yaml\n", ["'config'"]),
        ("etcd-password: x\n", ["--etcd-password-file"]),
        ("rdzv-conf: {joint_timeout: 5}\n", [":1: rdzv-conf", "joint_timeout", "join_timeout"]),
        ("standalone: true\nnnodes: 2\n", [":1: standalone", "--nnodes"]),
        ("? [a]\n: b\n", [":1:"]),
    ],
)
def test_a_bad_file_is_refused_by_place(tmp_path: Path, text: str, parts: list[str]) -> None:
    """The refusal names file, line, key and value."""
    path = write(tmp_path, text)
    with pytest.raises(UsageError) as caught:
        configure(file=load(path))
    for part in (path, *parts):
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_empty_file_is_no_value(tmp_path: Path) -> None:
    """Comments only: fine."""
    assert load(write(tmp_path, "# nothing\n")) == {}


def test_a_file_that_can_not_be_read_is_named(tmp_path: Path) -> None:
    """Missing, a folder, not text."""
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for path in (tmp_path / "missing", tmp_path, tmp_path / "bytes"):
        with pytest.raises(UsageError, match=f"--config: {path}"):
            load(str(path))
