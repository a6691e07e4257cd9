"""Which rendezvous a command line means, and the keys of --rdzv-conf (R15, R18, R50, R75, R91)."""

import pytest

from frun.config import Backend
from frun.errors import UsageError
from tests.cli.tools import FakeMachine, configure

E = ("--rdzv-endpoint", "e:1")
ID = ("--job-id", "j")


@pytest.mark.parametrize(
    ("tokens", "backend", "endpoints"),
    [
        ((), "standalone", ""),
        (("--standalone",), "standalone", ""),
        (("--standalone", *E, "--rdzv-backend=c10d"), "standalone", ""),
        (("--node-rank=0",), "standalone", ""),
        (("--master-addr=m",), "standalone", ""),
        (("--master-port=0",), "standalone", ""),
        (("--rdzv-backend=static",), "standalone", ""),
        (("--rdzv-backend=etcd",), "standalone", ""),
        (("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"), "standalone", ""),
        (("--rdzv-endpoint=localhost:0",), "standalone", ""),
        (("--rdzv-backend=static", "--rdzv-endpoint=localhost:0"), "standalone", ""),
        (E, "etcd", "e:1"),
        ((*E, "--rdzv-backend=etcd-v2"), "etcd", "e:1"),
        (("--rdzv-endpoint=a,b:2,[::1]:3",), "etcd", "a:2379 b:2 [::1]:3"),
        (("--rdzv-endpoint=::1",), "etcd", "[::1]:2379"),
        (("--rdzv-endpoint=http://a:5",), "etcd", "a:5"),
        (("--nnodes=2", *E, *ID), "etcd", "e:1"),
        (("--rdzv-backend=c10d",), "c10d", "localhost:29400"),
        (("--rdzv-backend=c10d", "--nnodes=1:4", "--rdzv-endpoint=h"), "c10d", "h:29400"),
        (("--rdzv-backend=c10d", "--rdzv-endpoint=fe80::1%eth0"), "c10d", "[fe80::1%eth0]:29400"),
        (("--nnodes=2",), "static", "127.0.0.1:29500"),
        (("--nnodes=2", "--master-addr=m"), "static", "m:29500"),
        (("--nnodes=2", "--master-addr=[::1]", "--master-port=5"), "static", "[::1]:5"),
        (("--master-port=5",), "static", "127.0.0.1:5"),
        (("--nnodes=2", "--node-rank=1", *E), "static", "e:1"),
        ((*E, "--master-port=7"), "static", "e:1"),
        (("--rdzv-backend=static", "--rdzv-endpoint=h"), "static", "h:29500"),
    ],
)
def test_the_choice(tokens: tuple[str, ...], backend: str, endpoints: str) -> None:
    """One row per rule of docs/torchrun.md."""
    found = configure(*tokens).rendezvous
    assert found.backend == Backend(backend)
    assert " ".join(map(str, found.endpoints)) == endpoints


def test_variables_choose_as_flags_do() -> None:
    """R15: a job that an operator describes by variables alone."""
    env = {
        "PET_NNODES": "2",
        "PET_RDZV_BACKEND": "etcd",
        "PET_RDZV_ENDPOINT": "a,b",
        "PET_RDZV_ID": "x y/z",
        "PET_RDZV_CONF": "join_timeout=60",
        "PET_NPROC_PER_NODE": "3",
        "PET_STANDALONE": "",
    }
    found = configure(env=env)
    assert found.rendezvous.backend is Backend.ETCD
    assert found.rendezvous.join_timeout_s == 60
    assert (found.job.job_id, found.workers.nproc) == ("x y/z", 3)
    assert configure(env=dict.fromkeys(env, "")) == configure()


@pytest.mark.parametrize(
    ("tokens", "parts"),
    [
        (("--standalone", "--nnodes=2"), ["--standalone", "2"]),
        (("--standalone", "--nnodes=1:2"), ["--standalone"]),
        (("--nnodes=2", *E), ["--job-id"]),
        (("--nnodes=1:2", "--rdzv-backend=etcd", *E), ["--job-id"]),
        (("--nnodes=2", "--rdzv-backend=etcd", *ID), ["--rdzv-endpoint"]),
        (("--rdzv-backend=zeus",), ["--rdzv-backend", "zeus", "etcd, etcd-v2, c10d, static"]),
        (("--rdzv-backend=c10d", "--rdzv-endpoint=h:0", "--nnodes=2"), ["h:0", "port"]),
        (("--rdzv-backend=c10d", "--rdzv-endpoint=h:1,i:2"), ["h:1,i:2"]),
        (("--nnodes=2", "--master-port=0"), ["127.0.0.1:0", "port"]),
        (("--nnodes=2", *ID, "--rdzv-endpoint=a:1,b:0"), ["b:0", "port"]),
        (("--nnodes=2", "--node-rank=2", "--master-addr=m"), ["--node-rank", "'2'"]),
        (("--node-rank=-1", "--nnodes=2"), ["--node-rank", "'-1'"]),
        (("--job-id=", *E), ["--rdzv-id", "empty"]),
        (("--etcd-cert=c", *E), ["--etcd-cert", "--etcd-key"]),
        ((*E, "--rdzv-conf", "key=k"), ["--etcd-key", "--etcd-cert"]),
    ],
)
def test_what_does_not_fit_is_refused(tokens: tuple[str, ...], parts: list[str]) -> None:
    """The refusal names the flags and what to type."""
    with pytest.raises(UsageError) as caught:
        configure(*tokens)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("tokens", "job_id"),
    [
        ((), None),
        (E, None),
        (("--standalone", *ID), "j"),
        (("--rdzv-backend=c10d",), "none"),
        (("--nnodes=2",), "none"),
        (("--nnodes=2", *E, "--rdzv-id", "-x"[1:]), "x"),
        (("--rdzv-id=-x",), "-x"),
        (("--rdzv-id=a/b 'c' \u00fc" + "x" * 300,), "a/b 'c' \u00fc" + "x" * 300),
        (("--job-id=a", "--rdzv_id=b"), "b"),
    ],
)
def test_job_ids(tokens: tuple[str, ...], job_id: str | None) -> None:
    """Any text is an id; jobs that could meet strangers by chance have none by default."""
    assert configure(*tokens).job.job_id == job_id


def test_a_hosts_place_is_kept_for_every_backend() -> None:
    """R65: --node-rank is honoured on etcd too, also above the number of hosts (a spare)."""
    tokens = ("--nnodes=2", "--rdzv-backend=etcd", *E, *ID, "--node-rank=5")
    assert configure(*tokens).rendezvous.node_rank == 5
    assert configure().rendezvous.node_rank is None


def test_settings_are_merged_over_flags_and_layers() -> None:
    """R75: given twice both count; a flag's key beats the variable's."""
    found = configure(
        *E,
        "--rdzv-conf=join_timeout=5, last_call_timeout = 0",
        "--rdzv-conf=close_timeout=7",
        env={"PET_RDZV_CONF": "join_timeout=1,read_timeout=2.5"},
    ).rendezvous
    assert (found.join_timeout_s, found.last_call_timeout_s) == (5, 0)
    assert (found.close_timeout_s, found.read_timeout_s) == (7, 2.5)


@pytest.mark.parametrize(
    ("conf", "ttl", "bound"),
    [
        ("", 3, 1),
        ("keep_alive_interval=1", 3, 1),
        ("keep_alive_interval=5,keep_alive_max_attempt=3", 15, 1),
        ("keep_alive_max_attempt=2", 10, 1),
        ("keep_alive_interval=0.5,keep_alive_max_attempt=1", 1, 1 / 3),
        ("heartbeat_timeout=60", 3, 1),
        ("heartbeat_timeout=0.5", 3, 0.5),
    ],
)
def test_a_lease_follows_the_keep_alive_keys(conf: str, ttl: int, bound: float) -> None:
    """torchrun's interval times attempts is the time of silence; a request is a third at most."""
    found = configure(*E, "--rdzv-conf", conf).rendezvous
    assert (found.lease_ttl_s, found.request_timeout_s) == (ttl, bound)


@pytest.mark.parametrize(
    ("backend", "conf", "parts"),
    [
        ("etcd", "joint_timeout=5", ["'joint_timeout'", "join_timeout"]),
        ("etcd", "join_timeout=abc", ["--rdzv-conf join_timeout", "'abc'"]),
        ("etcd", "join_timeout=0", ["join_timeout", "'0'"]),
        ("etcd", "join_timeout=inf", ["join_timeout"]),
        ("etcd", "keep_alive_max_attempt=1.5", ["keep_alive_max_attempt", "1.5"]),
        ("etcd", "=", ["key=value"]),
        ("etcd", "a", ["key=value"]),
        ("etcd", "join_timeout=", ["key=value"]),
        ("etcd", "min_nodes=2", ["min_nodes", "--nnodes"]),
        ("etcd", "is_host=1", ["is_host", "c10d"]),
        ("etcd", "protocol=gopher", ["protocol", "gopher"]),
        ("c10d", "cacert=x", ["cacert", "etcd"]),
        ("c10d", "store_type=file", ["store_type", "file"]),
        ("c10d", "is_host=maybe", ["is_host", "maybe"]),
    ],
)
def test_bad_settings_are_named(backend: str, conf: str, parts: list[str]) -> None:
    """S10: unknown keys and bad values are refused at the start, with the nearest known key."""
    with pytest.raises(UsageError) as caught:
        configure(f"--rdzv-backend={backend}", *E, "--rdzv-conf", conf)
    for part in ("--rdzv-conf", *parts):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("tokens", "join"),
    [
        (("--nnodes=2",), 900),
        (("--nnodes=2", "--rdzv-conf=timeout=5"), 5),
        ((*E, "--rdzv-conf=timeout=5"), 5),
        ((*E, "--rdzv-conf=timeout=5,join_timeout=6"), 6),
        (("--rdzv-backend=c10d", "--rdzv-conf=timeout=5"), 600),
    ],
)
def test_join_time(tokens: tuple[str, ...], join: float) -> None:
    """`timeout` counts where torchrun reads it."""
    assert configure(*tokens).rendezvous.join_timeout_s == join


def test_tls_and_password() -> None:
    """Files by flag or by torchrun's keys; the password never from the command line."""
    machine = FakeMachine(passwords={"/secret": "s$$1"})
    found = configure(
        "--rdzv-endpoint=a,b",
        "--rdzv-conf=ca_cert=old,cert=c,ssl_cert_key=k,protocol=https",
        "--etcd-ca=new",
        "--etcd-password-file=/secret",
        env={"FRUN_ETCD_USER": "u", "FRUN_ETCD_PASSWORD": "other"},
        machine=machine,
    ).rendezvous
    assert (found.tls_ca, found.tls_cert, found.tls_key) == ("new", "c", "k")
    assert (found.user, found.password) == ("u", "s$$1")
    assert found.tls
    assert all(endpoint.tls for endpoint in found.endpoints)


@pytest.mark.parametrize("half", ["FRUN_ETCD_USER", "FRUN_ETCD_PASSWORD"])
def test_half_a_login_is_refused(half: str) -> None:
    """A user without a password, or the other way round, is a mistake."""
    with pytest.raises(UsageError, match="etcd"):
        configure(*E, env={half: "x"})


def test_a_clusters_login_does_not_disturb_a_job_without_it() -> None:
    """Variables set once for a cluster are noted and left out where no cluster is used."""
    env = {"FRUN_ETCD_USER": "u", "FRUN_ETCD_PASSWORD": "p", "FRUN_ETCD_CA": "/ca"}
    found = configure("--standalone", env=env)
    assert (found.rendezvous.user, found.rendezvous.tls_ca) == (None, None)
    assert any("not used by standalone" in note.text for note in found.notes)


def test_the_masters_address_is_for_static_only() -> None:
    """As in torchrun: an operator's MASTER_PORT can not collide with the meeting's own port."""
    env = {"PET_MASTER_ADDR": "m", "PET_MASTER_PORT": "29500"}
    found = configure("--rdzv-backend=c10d", "--rdzv-endpoint=m:29500", env=env)
    assert (found.rendezvous.master_addr, found.rendezvous.master_port) == (None, None)
    assert any("--master-port" in note.text for note in found.notes)
    found = configure("--nnodes=2", env=env)
    assert (found.rendezvous.master_addr, found.rendezvous.master_port) == ("m", 29500)
