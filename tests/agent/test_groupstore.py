"""The group store's server: frames, who is let in, and what a stranger can not do."""

import asyncio
import contextlib
import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frun.agent.groupstore import GroupStore, Shard
from frun.errors import LaunchError
from frun.protocol.storeframe import (
    HEAD_SIZE,
    MAX_HELLO,
    Decoder,
    Frame,
    FrameError,
    Op,
    Status,
    encode,
    hello_blobs,
)

LIMIT_S = 40.0


@given(
    st.lists(st.tuples(st.integers(0, 255), st.lists(st.binary(max_size=40), max_size=4))),
    st.integers(1, 30),
)
def test_frames_survive_any_cutting(wanted: list[tuple[int, list[bytes]]], size: int) -> None:
    """A stream cut at any places gives the frames that were put in."""
    stream = b"".join(
        encode(n, code, blobs, generation=n + 1, timeout_ms=7)
        for n, (code, blobs) in enumerate(wanted)
    )
    decoder = Decoder()
    got = [
        frame
        for at in range(0, len(stream), size)
        for frame in decoder.feed(stream[at : at + size])
    ]
    assert got == [
        Frame(id=n, code=code, generation=n + 1, timeout_ms=7, blobs=tuple(blobs))
        for n, (code, blobs) in enumerate(wanted)
    ]


@given(st.binary(min_size=HEAD_SIZE, max_size=200))
def test_noise_is_refused_or_incomplete_but_never_breaks(noise: bytes) -> None:
    """Bytes of a stranger end as FrameError, as nothing yet, or as some frame."""
    with contextlib.suppress(FrameError):
        for frame in Decoder(MAX_HELLO).feed(noise):
            assert sum(map(len, frame.blobs)) <= len(noise)


async def opened(job: str = "job", token: str = "secret") -> tuple[GroupStore, int]:
    """Return a listening store and its port."""
    store = GroupStore(token, job)
    return store, await store.listen_tcp("127.0.0.1")


async def talk(port: int, *frames: bytes) -> bytes:
    """Send to a store, and return all it says until it closes, or answers the last request."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(b"".join(frames))
        async with asyncio.timeout(LIMIT_S):
            data = b""
            while piece := await reader.read(4096):
                data += piece
                answers = list(Decoder().feed(data))
                if len(answers) == len(frames):
                    break
            return data
    except ConnectionResetError:
        return b""
    finally:
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)


SET = encode(5, Op.SET, (b"k", b"v"), generation=1, timeout_ms=1000)


@pytest.mark.parametrize(
    ("blobs", "reason"),
    [
        (hello_blobs("job", "wrong"), "token is wrong"),
        (hello_blobs("other", "secret"), "belongs to job 'other', not 'job'"),
        ((b"frun-groupstore", b"99", b"job", b"secret"), "speaks protocol 99, this agent speaks 1"),
        ((b"hello",), "did not say hello as a frun agent does"),
    ],
)
def test_a_wrong_hello_is_closed_with_one_line(
    blobs: tuple[bytes, ...], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Another job, token or protocol gets no answer, changes nothing, and one line says why."""

    async def story() -> None:
        store, port = await opened()
        store.begin(1, [Shard(host="a", address="127.0.0.1", port=port)], 0)
        assert await talk(port, encode(0, Op.HELLO, blobs), SET) == b""
        right = encode(0, Op.HELLO, hello_blobs("job", "secret"))
        count = encode(6, Op.NUM_KEYS, (b"",), generation=1, timeout_ms=1000)
        answers = list(Decoder().feed(await talk(port, right, count)))
        assert [(f.code, f.blobs) for f in answers] == [(Status.OK, ()), (Status.OK, (b"0",))]
        await store.close()

    with caplog.at_level(logging.WARNING):
        asyncio.run(story())
    assert len(caplog.records) == 1
    assert reason in caplog.text


@pytest.mark.parametrize(
    "noise",
    [SET, b"GET / HTTP/1.1\r\nHost: here\r\n\r\n", encode(0, Op.HELLO, (b"x" * (MAX_HELLO + 1),))],
    ids=["no hello", "http", "large"],
)
def test_a_stranger_is_closed_at_once(noise: bytes) -> None:
    """Who does not say hello is closed before it can fill memory."""

    async def story() -> None:
        store, port = await opened()
        assert await talk(port, noise) == b""
        await store.close()

    asyncio.run(story())


def test_a_peer_waits_until_this_host_knows_the_token() -> None:
    """A host that has not read the rank table yet keeps early peers waiting, then lets them in."""

    async def story() -> None:
        store, port = await opened(token="")
        hello = encode(0, Op.HELLO, hello_blobs("job", "late"))
        talking = asyncio.create_task(talk(port, hello, SET))
        while not any(link._early for link in store.links):
            await asyncio.sleep(0)
        store.begin(1, [Shard(host="a", address="127.0.0.1", port=port)], 0, token="late")
        answers = list(Decoder().feed(await talking))
        assert [(f.id, f.code) for f in answers] == [(0, Status.OK), (5, Status.OK)]
        await store.close()

    asyncio.run(story())


def test_a_large_value_waits_for_a_host_that_is_late(tmp_path: Path) -> None:
    """Nothing is lost or refused when a peer learns the token after the first requests for it."""

    async def story() -> None:
        a, port_a = await opened()
        b, port_b = await opened(token="")
        shards = [
            Shard(host="a", address="127.0.0.1", port=port_a),
            Shard(host="b", address="127.0.0.1", port=port_b),
        ]
        a.begin(1, shards, 0)
        await a.listen_unix(str(tmp_path / "s"))
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "s"))
        keys = [str(n).encode() for n in range(8)]
        pairs = [blob for key in keys for blob in (key, bytes(200_000))]
        writer.write(encode(1, Op.SET, pairs, generation=1, timeout_ms=9000))
        async with asyncio.timeout(LIMIT_S):
            while not any(link._hello for link in b.links):
                await asyncio.sleep(0)
            b.begin(1, shards, 1, token="secret")
            assert await reader.readexactly(HEAD_SIZE) == encode(1, Status.OK, ())
        writer.close()
        await writer.wait_closed()
        await a.close()
        await b.close()

    asyncio.run(story())


def test_a_peer_with_another_token_is_told_as_an_error(tmp_path: Path) -> None:
    """The workers of a refused agent get an error that says whose agent refused and why."""

    async def story() -> None:
        a, port_a = await opened()
        b, port_b = await opened(token="other")
        shards = [
            Shard(host="a", address="127.0.0.1", port=port_a),
            Shard(host="b", address="127.0.0.1", port=port_b),
        ]
        a.begin(1, shards, 0)
        path = str(tmp_path / "s")
        await a.listen_unix(path)
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(encode(1, Op.NUM_KEYS, (b"",), generation=1, timeout_ms=5000))
        async with asyncio.timeout(LIMIT_S):
            (answer,) = list(Decoder().feed(await reader.read(4096)))
        assert answer.code == Status.UNREACHABLE
        assert b"host b (127.0.0.1 port" in answer.blobs[0]
        assert b"another job, token or version" in answer.blobs[0]
        writer.close()
        await writer.wait_closed()
        await a.close()
        await b.close()

    asyncio.run(story())


def test_begin_is_idempotent_and_only_moves_on() -> None:
    """The same generation again keeps its keys; an older one, or another world, is a bug."""

    async def story() -> None:
        store, port = await opened()
        shards = [Shard(host="a", address="127.0.0.1", port=port)]
        store.begin(3, shards, 0)
        store.begin(3, shards, 0)
        assert store.generation == 3
        for generation, index in ((2, 0), (3, 1), (4, 1)):
            with pytest.raises(ValueError, match=r"generation|shard"):
                store.begin(generation, shards, index)
        store.end()
        with pytest.raises(ValueError, match="3 is not newer than 3"):
            store.begin(3, shards, 0)
        await store.close()
        await store.close()

    asyncio.run(story())


def test_addresses_that_can_not_be_used_are_launch_errors(tmp_path: Path) -> None:
    """A taken port and a socket path that is too long are reported in one line."""

    async def story() -> None:
        store, port = await opened()
        with pytest.raises(LaunchError, match=f"127.0.0.1 port {port}"):
            await store.listen_tcp("127.0.0.1", port)
        with pytest.raises(LaunchError, match="can not listen for the group store on"):
            await store.listen_unix(str(tmp_path / ("x" * 120)))
        await store.close()

    asyncio.run(story())
