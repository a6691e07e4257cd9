"""The worker channel: frames, who speaks, and the last words of a worker that is dead already."""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frun.agent.channel import Channel
from frun.errors import WireError
from frun.protocol.channel import Frames, Hello, Message, Raised, encode

_RAISES = """
import sys
from frun.worker.channel import open_channel
channel = open_channel({"FRUN_CHANNEL": sys.argv[1], "RANK": "3", "FRUN_GENERATION": "7"})
try:
    raise ValueError("deliberate")
except ValueError as error:
    channel.raised(error, error.__traceback__)
"""

_messages = st.one_of(
    st.builds(Hello, rank=st.integers(0, 1 << 20), generation=st.integers(0, 1 << 20)),
    st.builds(Raised, message=st.text(), traceback=st.text(), kind=st.text()),
)


@given(st.lists(_messages), st.integers(1, 40))
def test_messages_survive_any_cutting_of_the_stream(sent: list[Message], piece: int) -> None:
    """Whatever pieces the kernel hands over, the same messages come out in order."""
    data = b"".join(encode(message) for message in sent)
    frames = Frames()
    got: list[Message] = []
    for start in range(0, len(data), piece):
        got += frames.feed(data[start : start + piece])
    assert got == sent


@pytest.mark.parametrize(
    "frame",
    [
        b"\xff\xff\xff\xff",
        b"\x02\x00\x00\x00{}",
        b"\x01\x00\x00\x00{",
        b'\x10\x00\x00\x00{"type":"other"}',
        b"\x05\x00\x00\x00[1,2]",
    ],
)
def test_a_broken_frame_is_refused(frame: bytes) -> None:
    """A frame that is too long, no JSON, or of an unknown kind raises WireError."""
    with pytest.raises(WireError):
        Frames().feed(frame)


def test_the_last_words_of_a_dead_worker_are_heard(tmp_path: Path) -> None:
    """What a worker sent before it died is handled by `drain`, also if nothing was read before."""

    async def scenario() -> list[tuple[int, Message]]:
        channel = Channel(str(tmp_path / "agent.sock"))
        heard: list[tuple[int, Message]] = []
        channel.on_message = lambda pid, message: heard.append((pid, message))
        try:
            # The loop does not turn while the worker lives, so all is still in the sockets.
            worker = subprocess.Popen([sys.executable, "-c", _RAISES, channel.path])
            worker.wait(30)
            channel.drain(worker.pid)
        finally:
            channel.close()
        assert {pid for pid, _ in heard} == {worker.pid}
        return heard

    hello, raised = [message for _, message in asyncio.run(scenario())]
    assert hello == Hello(rank=3, generation=7)
    assert isinstance(raised, Raised)
    assert raised.message == "ValueError: deliberate"
    assert "Traceback" in raised.traceback
    assert not os.listdir(tmp_path)


def test_a_worker_without_an_agent_goes_on(tmp_path: Path) -> None:
    """A socket that nobody answers does not disturb the script."""
    done = subprocess.run([sys.executable, "-c", _RAISES, str(tmp_path / "none")], timeout=30)
    assert done.returncode == 0


def test_garbage_ends_that_connection_only(tmp_path: Path) -> None:
    """A process that speaks nonsense is dropped; the next worker is heard."""

    async def scenario() -> list[Message]:
        channel = Channel(str(tmp_path / "agent.sock"))
        heard: list[Message] = []
        arrived = asyncio.Event()

        def note(_: int, message: Message) -> None:
            heard.append(message)
            arrived.set()

        channel.on_message = note
        with (
            socket.socket(socket.AF_UNIX) as bad,
            socket.socket(socket.AF_UNIX) as good,
        ):
            bad.connect(channel.path)
            bad.sendall(b"\xff" * 64)
            bad.setblocking(False)
            ended = asyncio.get_running_loop().sock_recv(bad, 1)
            with contextlib.suppress(ConnectionResetError):
                assert await asyncio.wait_for(ended, 10) == b""
            good.connect(channel.path)
            good.sendall(encode(Hello(rank=0, generation=1)))
            await asyncio.wait_for(arrived.wait(), 10)
        channel.close()
        return heard

    assert asyncio.run(scenario()) == [Hello(rank=0, generation=1)]
