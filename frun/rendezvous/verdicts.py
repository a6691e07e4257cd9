"""What an error answer from etcd means for the caller: the one table from gRPC's codes to ours.

Pure; `etcd` sends the requests and acts on the verdict.
"""

from enum import Enum, auto

import grpc  # type: ignore[import-untyped]


class Verdict(Enum):
    """What to do after a failed attempt."""

    NOT_SENT = auto()
    """Nothing reached etcd: any request may be tried again."""
    UNSURE = auto()
    """No answer: a write may or may not have happened."""
    NEW_TOKEN = auto()
    """The authentication token is unknown or old: authenticate again; nothing was done."""
    NO_LEASE = auto()
    """The lease does not exist."""
    COMPACTED = auto()
    """The revision asked for is gone or not there yet: read a snapshot."""
    REFUSED = auto()
    """etcd said no and will go on saying no."""


_TOKEN_TEXTS = ("invalid auth token", "revision in header is old")
_UNSENT_TEXTS = (
    "failed to connect to all addresses",
    "DNS resolution failed",
    "no leader",
    "too many requests",
)
_REFUSED_CODES = frozenset(
    {
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.FAILED_PRECONDITION,
    }
)


def judge(code: grpc.StatusCode, details: str) -> Verdict:
    """Return the verdict on one failed attempt."""
    if any(text in details for text in _TOKEN_TEXTS):
        return Verdict.NEW_TOKEN
    if code is grpc.StatusCode.NOT_FOUND and "lease not found" in details:
        return Verdict.NO_LEASE
    if code is grpc.StatusCode.OUT_OF_RANGE:
        return Verdict.COMPACTED
    if code in _REFUSED_CODES:
        return Verdict.REFUSED
    if any(text in details for text in _UNSENT_TEXTS):
        return Verdict.NOT_SENT
    return Verdict.UNSURE


def explain_refusal(code: grpc.StatusCode, details: str, *, user: str | None) -> str:
    """Return the reason of a refusal in words of the person who can change it."""
    if "user name is empty" in details:
        return "it asks for a user and a password, and none were given"
    if "invalid user ID or password" in details:
        return f"wrong user or password (user {user!r})"
    if code is grpc.StatusCode.PERMISSION_DENIED:
        return f"user {user!r} has no permission: grant it readwrite on the prefix /frun/"
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return f"it does not speak etcd's v3 API ({details})"
    return details or code.name.lower()
