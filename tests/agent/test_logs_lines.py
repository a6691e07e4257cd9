"""Cutting bytes into lines."""

from hypothesis import given
from hypothesis import strategies as st

from frun.agent.logs_lines import LineSplitter, printable

PIECES = st.lists(st.sampled_from([b"a", b"\r", b"\n", b"\r\n", "\u00e9".encode(), b"\x0b", b""]))


@given(PIECES)
def test_cutting_does_not_depend_on_how_the_bytes_arrive(pieces: list[bytes]) -> None:
    """Lines are those of universal newlines, however a pipe splits the bytes."""
    splitter = LineSplitter()
    lines = [line for piece in pieces for line in splitter.feed(piece)]
    assert lines + splitter.flush() == b"".join(pieces).splitlines()


@given(st.text(alphabet="a\u00e9\u20ac\U0001f600", max_size=60), st.integers(4, 9))
def test_overlong_lines_are_cut_between_characters(text: str, bound: int) -> None:
    """A line beyond the bound comes in pieces, each valid UTF-8, and nothing is lost."""
    splitter = LineSplitter(max_line=bound)
    data = text.encode()
    pieces = [line for i in range(0, len(data), 3) for line in splitter.feed(data[i : i + 3])]
    pieces += splitter.flush()
    assert b"".join(pieces) == data
    assert all(printable(piece) == piece and len(piece) <= bound + 3 for piece in pieces)
