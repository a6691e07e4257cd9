"""Messages between a worker and its agent, and their frames. Pure: bytes in, records out.

A frame is a 4-byte little-endian length and a JSON object whose `type` names the message. Facts go up from
the worker, orders come down to it.
"""

import json
import struct
from dataclasses import asdict, dataclass, fields

from frun.errors import WireError

_LENGTH = struct.Struct("<I")
MAX_FRAME = 1 << 20
"""Bytes; a longer frame is a broken one."""
MAX_TEXT = 64 * 1024
"""Characters of a traceback that are sent: the end, where the error is."""
WORKER_VARIABLES = frozenset(
    {
        "FRUN_STORE",
        "FRUN_CHANNEL",
        "FRUN_GENERATION",
        "FRUN_DRILLS",
        "FRUN_COMPARE_REPLICAS",
        "FRUN_CHECK_GRADIENTS",
    }
)
"""By which an agent tells frun's own part of a worker what it needs first; the script never sees them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """First of all: this process is the worker of this rank."""

    rank: int
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Raised:
    """The script let an exception out; the process is about to end with status 1."""

    message: str
    """Type and text."""
    traceback: str
    kind: str
    """Of frun's own errors the kind (`no_donor` ...); empty for the user's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The script entered a resumable function: this worker can live through others' deaths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Paused:
    """The update gate is closed and every blocked collective was released."""

    generation: int
    step: int
    """Completed updates."""
    in_update: bool
    """An update did not end within its bound: this worker's state can not be trusted."""
    took_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Out:
    """The script's function was left and the old process groups are gone; waits for `Resume`."""

    generation: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """All ranks agreed on the step and this worker has its state."""

    generation: int
    step: int
    steps_lost: int
    """Completed updates, over all ranks, that will be done again."""
    rebuild_s: float
    agree_s: float
    copy_s: float
    copied_bytes: int
    homes: int
    """On how many hosts its part of the state is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstStep:
    """The first update of this generation is complete."""

    generation: int
    step: int
    took_s: float
    """Since the state was restored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far this worker is: every few seconds, when lost steps are done again, and at the end."""

    generation: int
    step: int
    """Completed updates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseEnded:
    """What the script had declared to do is done."""

    generation: int
    phase: str
    took_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Odd:
    """A figure of a step is not as it should be, or all of them have been right for long again."""

    generation: int
    reason: str
    """Empty: they are right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diverged:
    """Replicas do not hold the same parameters any more."""

    generation: int
    rank: int
    """The odd one, which is the one that tells; -1: nobody knows which it is."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """Every half second, or more often: the process runs, and its main thread is so far."""

    generation: int
    step: int
    """Completed updates."""
    completed: int
    """Those of them that this process did itself."""
    fresh: bool
    """None of them in this generation."""
    recent_s: float
    """Longest but one of its latest steps."""
    own_s: float
    """Median time of its own part of a step, without waits for others; 0: not known."""
    team: str
    """Ranks of the same text do the same work."""
    delay_s: float
    """How long in each step its main thread was ready to run and had no processor."""
    place: str
    """Where the main thread is, one of `hangs.Place`."""
    where: str
    """Line of the script."""
    still_s: float
    """How long it has not moved."""
    cpu_s: float
    """CPU time that the process has used."""
    last: bool
    """No other follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stacks:
    """Up: what all threads are doing."""

    generation: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Explain:
    """Down: tell what all threads are doing."""

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """Down: stop at once, a new generation is being made."""

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """Down: go on in this generation, with these environment variables changed."""

    generation: int
    env: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inject:
    """Down: do this fault to yourself. Only where the job allows drills."""

    id: int
    """Of the command."""
    kind: str
    argument: str
    step: int
    """Number of completed updates when it is to happen; -1: any."""
    place: str
    """Empty: anywhere."""
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Withdraw:
    """Down: do not do this fault, if it has not happened yet."""

    id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Injected:
    """Up: the fault happens now, or does not happen."""

    id: int
    generation: int
    step: int
    problem: str
    """Why it does not happen; empty if it does."""


Fact = (
    Hello
    | Ready
    | Paused
    | Out
    | Restored
    | FirstStep
    | Progress
    | PhaseEnded
    | Odd
    | Diverged
    | Beat
    | Stacks
    | Raised
    | Injected
)
Order = Pause | Resume | Explain | Inject | Withdraw
Message = Fact | Order

_KINDS: dict[str, type[Message]] = {
    "hello": Hello,
    "ready": Ready,
    "paused": Paused,
    "out": Out,
    "restored": Restored,
    "first_step": FirstStep,
    "progress": Progress,
    "phase_ended": PhaseEnded,
    "odd": Odd,
    "diverged": Diverged,
    "beat": Beat,
    "stacks": Stacks,
    "explain": Explain,
    "raised": Raised,
    "pause": Pause,
    "resume": Resume,
    "inject": Inject,
    "withdraw": Withdraw,
    "injected": Injected,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}


def encode(message: Message) -> bytes:
    """Return the frame of a message."""
    body = json.dumps({"type": _NAMES[type(message)], **asdict(message)}).encode()
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Cuts a stream of bytes into messages, however the bytes come."""

    def __init__(self) -> None:
        self._buffer = b""

    def feed(self, data: bytes) -> list[Message]:
        """Take bytes; return the messages that are complete now. Raises WireError on a broken one."""
        self._buffer += data
        messages = []
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > MAX_FRAME:
                raise WireError(f"a worker's message of {length} bytes is over {MAX_FRAME}")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                break
            messages.append(_decode(self._buffer[_LENGTH.size : end]))
            self._buffer = self._buffer[end:]
        return messages


def _decode(body: bytes) -> Message:
    try:
        document = json.loads(body)
        kind = _KINDS[document["type"]]
        values = {field.name: document[field.name] for field in fields(kind)}
    except (ValueError, KeyError, TypeError) as error:
        raise WireError(f"a worker's message is broken ({error}): {body[:100]!r}") from error
    for field in fields(kind):
        if not _fits(values[field.name], field.type):
            raise WireError(
                f"a worker's {document['type']} has {field.name}={values[field.name]!r}"
            )
    return kind(**values)


def _fits(value: object, wanted: object) -> bool:
    """Tell whether a JSON value is of a field's type; bool is no int, but an int is a float."""
    if wanted is float:
        return type(value) in (int, float)
    if wanted == dict[str, str]:
        return isinstance(value, dict) and all(isinstance(item, str) for item in value.values())
    return type(value) is wanted
