"""One bounded request to an etcd cluster: channels, failover between members, tokens.

Each endpoint has a channel of its own and the one that answered last is asked first, so a dead
member costs one failed attempt and then nothing. What is asked, and what an answer means, is
`etcd`'s part.

Importing this module imports gRPC (about 0.1 s) and raises `LaunchError` when the etcd client's
installation is broken: import it only when etcd is asked for.
"""

import asyncio
import importlib
import ipaddress
import logging
import random
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, assert_never

from frun.endpoints import Endpoint
from frun.errors import LaunchError, LeaseLost, StoreRefused, StoreUnavailable
from frun.rendezvous.tls import TlsMaterial

try:
    import grpc  # type: ignore[import-untyped]
    import grpc.aio  # type: ignore[import-untyped]
    from grpc.aio import EOF
    from grpc.aio import AioRpcError as RpcError

    pb: Any = importlib.import_module("etcd3aio._protobuf")

    from frun.rendezvous.verdicts import Verdict, explain_refusal, judge
except Exception as error:  # generated code meets foreign versions: anything may be raised
    raise LaunchError(
        f"the etcd client does not load ({error}): reinstall it with "
        "`pip install --upgrade etcd3aio grpcio protobuf`"
    ) from error

__all__ = ["EOF", "Answer", "Calls", "Member", "Metadata", "RpcError", "pb"]

logger = logging.getLogger(__name__)

Metadata = tuple[tuple[str, str], ...]
T = TypeVar("T")

_FIRST_ATTEMPT_S = 0.5
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 0.5
_CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    # A web proxy of the site never leads to etcd (it is for the workers' own downloads).
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Also the bound of one connection attempt, so not smaller.
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.dns_min_time_between_resolutions_ms", 1000),
    # etcd cuts clients that ping more often than every 5 s, or without a call on the connection.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.http2.max_pings_without_data", 0),
    # Two stores of one process share nothing: one that is closed takes nothing from the other.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
)


@dataclass(frozen=True, slots=True)
class Member:
    """One endpoint with its channel and the calls on it."""

    endpoint: Endpoint
    channel: Any
    kv: Any
    lease: Any
    watch: Any
    auth: Any


@dataclass(frozen=True, slots=True)
class Answer(Generic[T]):
    """An answer. With `unsure` an earlier attempt of the same request may have been carried out."""

    value: T
    unsure: bool


Send = Callable[[Member, Metadata, float], Awaitable[T]]
"""Sends one request to a member with these metadata within that many seconds."""


class Calls:
    """Sends requests to whichever member answers, each within a bound."""

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        *,
        tls: TlsMaterial | None,
        user: str | None,
        password: str | None,
        timeout_s: float,
    ) -> None:
        # Shuffled: the clients of a large job spread over the cluster.
        self._members = [
            _open(endpoint, tls) for endpoint in random.sample(endpoints, len(endpoints))
        ]
        self._user = user
        self._password = password
        self._timeout_s = timeout_s
        self._preferred = 0
        self._token: str | None = None
        self._login = asyncio.Lock()
        self._closed = False
        self.answered = False
        """Whether any request was answered so far."""

    @property
    def preferred(self) -> Member:
        """The member that answered last, or is asked first."""
        return self._members[self._preferred]

    def in_turn(self) -> Iterator[Member]:
        """Yield every member once, the preferred one first."""
        first = self._preferred
        for step in range(len(self._members)):
            yield self._members[(first + step) % len(self._members)]

    def prefer(self, member: Member) -> None:
        """Ask this member first from now on."""
        self._preferred = self._members.index(member)
        self.answered = True

    def avoid(self, member: Member) -> None:
        """Ask another member first, if this one was."""
        if self.preferred is member:
            self._preferred = (self._preferred + 1) % len(self._members)

    def _attempt_s(self, turn: int) -> float:
        """The longest wait for one member in a round of attempts.

        Another member must get its turn soon, since this one may be frozen; but when all are slow
        the next round must have the patience that the first had not.
        """
        if len(self._members) == 1:
            return self._timeout_s
        return float(_FIRST_ATTEMPT_S * 2**turn)

    async def request(
        self, send: Send[T], *, what: str, timeout_s: float | None = None
    ) -> Answer[T]:
        """Send until one member answers.

        Raises `StoreUnavailable` when none did in `timeout_s` (default: the bound of a request),
        `StoreRefused` when the answer is a no that stays, `LeaseLost` when the lease named is gone.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + (self._timeout_s if timeout_s is None else timeout_s)
        unsure = False
        pause = _FIRST_PAUSE_S
        failures: dict[Endpoint, str] = {}
        turn = 0
        while True:
            for member in self.in_turn():
                left = deadline - loop.time()
                if left <= 0:
                    raise StoreUnavailable(_no_answer(what, failures))
                self._raise_if_closed()
                limit = min(left, self._attempt_s(turn))
                try:
                    value = await send(member, await self.metadata(member, limit), limit)
                except RpcError as error:
                    unsure |= self.act_on(error, member) is Verdict.UNSURE
                    failures[member.endpoint] = error.details() or error.code().name.lower()
                except asyncio.CancelledError:
                    if not _is_cancelled():  # gRPC's way to say that this side closed the channel
                        self._raise_if_closed()
                    raise
                except TimeoutError:
                    unsure = True
                    failures[member.endpoint] = "no answer in time"
                else:
                    self.prefer(member)
                    return Answer(value, unsure)
            await asyncio.sleep(max(0.0, min(pause, deadline - loop.time())))
            pause = min(2 * pause, _LONGEST_PAUSE_S)
            turn += 1

    def act_on(self, error: RpcError, member: Member) -> Verdict:
        """Judge a failed call: return when another try may help, else raise what it means."""
        details = error.details() or ""
        verdict = judge(error.code(), details)
        if self.answered and error.code() is grpc.StatusCode.UNIMPLEMENTED:
            # etcd was here before: while the network is broken something else answers for it.
            verdict = Verdict.NOT_SENT
        match verdict:
            case Verdict.NOT_SENT | Verdict.UNSURE:
                pass
            case Verdict.NEW_TOKEN:
                if self._user is None:
                    raise StoreRefused(f"etcd at {member.endpoint} refuses: {details}") from error
                self.forget_token()
            case Verdict.NO_LEASE:
                raise LeaseLost("the lease is gone from etcd") from error
            case Verdict.COMPACTED:
                raise StoreUnavailable(f"etcd at {member.endpoint}: {details}") from error
            case Verdict.REFUSED:
                reason = explain_refusal(error.code(), details, user=self._user)
                raise StoreRefused(f"etcd at {member.endpoint} refuses: {reason}") from error
            case _ as never:
                assert_never(never)
        return verdict

    async def metadata(self, member: Member, timeout_s: float) -> Metadata:
        """Return what authenticates a call; asks for a token when there is none."""
        if self._user is None:
            return ()
        async with asyncio.timeout(timeout_s), self._login:
            if self._token is None:
                self._token = await self._authenticate(member, timeout_s)
        return (("token", self._token),) if self._token else ()

    def forget_token(self) -> None:
        """Authenticate again before the next call."""
        self._token = None

    async def _authenticate(self, member: Member, timeout_s: float) -> str:
        request = pb.AuthenticateRequest(name=self._user, password=self._password or "")
        try:
            answer = await member.auth.Authenticate(request, timeout=timeout_s)
        except RpcError as error:
            if "authentication is not enabled" in (error.details() or ""):
                logger.warning(
                    "etcd at %s has no authentication: user %s is not used",
                    member.endpoint,
                    self._user,
                )
                return ""
            raise
        return str(answer.token)

    async def close(self) -> None:
        """Close every channel; calls that are under way end by `StoreUnavailable`."""
        self._closed = True
        for member in self._members:
            await member.channel.close(None)

    def _raise_if_closed(self) -> None:
        if self._closed:
            raise StoreUnavailable("the store was closed")


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _open(endpoint: Endpoint, tls: TlsMaterial | None) -> Member:
    if tls is None:
        channel = grpc.aio.insecure_channel(_target(endpoint), options=_CHANNEL_OPTIONS)
    else:
        credentials = grpc.ssl_channel_credentials(
            root_certificates=tls.ca, private_key=tls.key, certificate_chain=tls.cert
        )
        channel = grpc.aio.secure_channel(_target(endpoint), credentials, options=_CHANNEL_OPTIONS)
    return Member(
        endpoint=endpoint,
        channel=channel,
        kv=pb.KVStub(channel),
        lease=pb.LeaseStub(channel),
        watch=pb.WatchStub(channel),
        auth=pb.AuthStub(channel),
    )


def _target(endpoint: Endpoint) -> str:
    """Return the name gRPC knows it by: address literals never touch a resolver."""
    try:
        version = ipaddress.ip_address(endpoint.host).version
    except ValueError:
        return f"dns:///{endpoint}"
    return f"ipv{version}:{endpoint}"


def _no_answer(what: str, failures: Mapping[Endpoint, str]) -> str:
    told = ", ".join(f"{endpoint} ({text})" for endpoint, text in failures.items())
    return f"etcd did not answer a {what} in time: {told or 'not reached'}"
