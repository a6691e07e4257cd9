"""Owns how a command finds the job that is meant, and reaches its etcd.

What is then read and shown is the command's own. Heavy imports wait until they are needed: the answer
should be there in a blink.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click

from frun import registry
from frun.endpoints import ETCD_PORT, parse_endpoints
from frun.errors import UsageError

if TYPE_CHECKING:
    from frun.rendezvous.etcd import EtcdStore

F = TypeVar("F", bound=Callable[..., Any])

CONNECT_S = 3.0
"""Longest wait for an etcd that should answer at once."""
_NAME_ONE = "name one: {usage} JOB, or --rdzv-endpoint HOST:PORT --job-id JOB for another machine"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Which job, and how to reach its etcd."""

    job_id: str | None
    """None: the only one that this etcd has."""
    endpoints: tuple[str, ...]
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    tls: bool = False
    user: str | None = None
    password: str | None = None


def _never_typed(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Refuse on the command line what everybody on the machine could read there."""
    if ctx.get_parameter_source(str(param.name)) is click.core.ParameterSource.COMMANDLINE:
        raise UsageError(
            "a password on the command line is seen by all: set FRUN_ETCD_PASSWORD, or use"
            " --etcd-password-file"
        )
    return value


_PARAMETERS = (
    click.argument("job", required=False),
    click.option("--job-id", "--job_id", "--rdzv-id", "--rdzv_id", "job_id", help="Same as JOB."),
    click.option(
        "--rdzv-endpoint",
        "--rdzv_endpoint",
        "endpoint",
        metavar="HOST[:PORT],...",
        envvar="PET_RDZV_ENDPOINT",
        show_envvar=True,
        help="etcd of the job, for a job that is not on this machine.",
    ),
    click.option("--etcd-ca", metavar="FILE", envvar="FRUN_ETCD_CA", help="Certificate authority."),
    click.option(
        "--etcd-cert", metavar="FILE", envvar="FRUN_ETCD_CERT", help="Client certificate."
    ),
    click.option("--etcd-key", metavar="FILE", envvar="FRUN_ETCD_KEY", help="Its private key."),
    click.option("--etcd-user", metavar="NAME", envvar="FRUN_ETCD_USER", help="User of etcd."),
    click.option(
        "--etcd-password-file",
        metavar="FILE",
        envvar="FRUN_ETCD_PASSWORD_FILE",
        help="File with the password; or set FRUN_ETCD_PASSWORD.",
    ),
    click.option(
        "--etcd-password",
        envvar="FRUN_ETCD_PASSWORD",
        hidden=True,
        callback=_never_typed,
    ),
    click.option("--state-dir", metavar="DIR", envvar="FRUN_STATE_DIR", help="Registry of jobs."),
    click.option("state_home", "--state-home", envvar="XDG_STATE_HOME", hidden=True),
)


def job_parameters(function: F) -> F:
    """Give a click command what names a job and its etcd; `target_of` reads it."""
    for parameter in reversed(_PARAMETERS):
        function = parameter(function)
    return function


def target_of(ctx: click.Context, given: Mapping[str, str | None], usage: str) -> Target:
    """Return the job that a command's parameters mean. Raises UsageError, saying how to name one.

    `usage` is the command as it is typed in front of JOB.
    """
    job, job_id, endpoint = given["job"], given["job_id"], given["endpoint"]
    if job is not None and job_id is not None and job != job_id:
        raise UsageError(f"JOB {job!r} and --job-id {job_id!r} differ: give one of them")
    typed = ctx.get_parameter_source("endpoint") is click.core.ParameterSource.COMMANDLINE
    jobs = [] if typed else registry.live_jobs(state_dir_of(given))
    return find_target(job if job is not None else job_id, endpoint, given, jobs, usage)


def find_target(
    job_id: str | None,
    endpoint: str | None,
    etcd: Mapping[str, str | None],
    jobs: Sequence[registry.JobEntry],
    usage: str = "frun status",
) -> Target:
    """Return the job that is meant: one of this machine's, else the one at the endpoint.

    Raises UsageError that says how to name one when it is not clear.
    """
    name_one = _NAME_ONE.format(usage=usage)
    password = _password(etcd)
    matching = [entry for entry in jobs if job_id in (None, entry.job_id)]
    choices = {(entry.job_id, entry.endpoints): entry for entry in matching}
    if len({job for job, _ in choices}) > 1:
        names = ", ".join(sorted({job for job, _ in choices}))
        raise UsageError(f"several jobs run on this machine ({names}): {name_one}")
    if len(choices) > 1:
        places = " or ".join(sorted(",".join(endpoints) for _, endpoints in choices))
        raise UsageError(
            f"job {matching[0].job_id!r} runs more than once on this machine: add"
            f" --rdzv-endpoint {places}"
        )
    if matching:
        entry = matching[0]
        return Target(
            job_id=entry.job_id,
            endpoints=entry.endpoints,
            tls_ca=etcd["etcd_ca"] or entry.tls_ca,
            tls_cert=etcd["etcd_cert"] or entry.tls_cert,
            tls_key=etcd["etcd_key"] or entry.tls_key,
            user=etcd["etcd_user"] or entry.user,
            password=password,
        )
    if endpoint is None:
        known = ", ".join(sorted({entry.job_id for entry in jobs}))
        what = f"no job {job_id!r} on this machine" if job_id else "no job runs on this machine"
        raise UsageError(f"{what}{f' (there is: {known})' if known else ''}: {name_one}")
    parsed = parse_endpoints(endpoint, default_port=ETCD_PORT, name="--rdzv-endpoint")
    return Target(
        job_id=job_id,
        endpoints=tuple(str(one) for one in parsed),
        tls_ca=etcd["etcd_ca"],
        tls_cert=etcd["etcd_cert"],
        tls_key=etcd["etcd_key"],
        tls=any(one.tls for one in parsed),
        user=etcd["etcd_user"],
        password=password,
    )


def state_dir_of(given: Mapping[str, str | None]) -> str:
    """Return the folder of this machine's registry that a command's parameters mean."""
    home = given["state_home"] or os.path.expanduser("~/.local/state")
    return given["state_dir"] or os.path.join(home, "frun")


def _password(etcd: Mapping[str, str | None]) -> str | None:
    path = etcd["etcd_password_file"]
    if path is None:
        return etcd["etcd_password"]
    try:
        with open(path, encoding="utf-8") as file:
            return file.readline().rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--etcd-password-file {path} can not be read: {error}") from error


def open_store(target: Target) -> "EtcdStore":
    """Return a client that is not connected yet."""
    from frun.rendezvous.etcd import EtcdStore
    from frun.rendezvous.tls import Tls

    tls = None
    if target.tls or target.tls_ca or target.tls_cert:
        tls = Tls(ca=target.tls_ca, cert=target.tls_cert, key=target.tls_key)
    return EtcdStore(target.endpoints, tls=tls, user=target.user, password=target.password)


async def read_job(store: "EtcdStore", target: Target) -> tuple[str, dict[str, Any]]:
    """Return the job's id and status. Raises UsageError when it isn't there, or not clear."""
    from frun.protocol.keys import ROOT, Keys
    from frun.status import job_ids, status_document

    prefix = ROOT if target.job_id is None else Keys(target.job_id).prefix
    snapshot = await store.read(prefix)
    items = {key: kv.value for key, kv in snapshot.items.items()}
    where = f"etcd at {store.endpoint}"
    job_id = target.job_id
    if job_id is None:
        found = job_ids(items)
        if len(found) != 1:
            names = ", ".join(found[:20])
            what = f"has several jobs ({names})" if found else "has no job"
            raise UsageError(f"{where} {what}: name one with --job-id")
        job_id = found[0]
    document = status_document(job_id, items)
    if document is None:
        raise UsageError(f"{where} has no job {job_id!r}: it ended, or has another id")
    return job_id, document
