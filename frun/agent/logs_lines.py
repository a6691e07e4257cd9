"""Owns how a stream of bytes becomes lines, and what a line looks like on the console.

Pure: no file, no thread. `logs` moves the bytes.
"""

from string import Template

MAX_LINE = 1024 * 1024
"""Bytes of one line that are held back while its end has not come; more is shown in pieces."""


class LineSplitter:
    """Cut bytes into lines. `\\n`, `\\r\\n` and a lone `\\r` end one, as in universal newlines.

    A half line waits for its end, for `flush`, or until it is MAX_LINE long.
    """

    def __init__(self, max_line: int = MAX_LINE) -> None:
        self._max_line = max_line
        self._half: list[bytes] = []
        self._half_size = 0
        self._after_return = False

    def feed(self, chunk: bytes) -> list[bytes]:
        """Take the next bytes; return the lines that are now complete, without their ends."""
        if not chunk:
            return []
        if self._after_return and chunk.startswith(b"\n"):
            chunk = chunk[1:]  # the second half of a \r\n whose line was already given out
        self._after_return = chunk.endswith(b"\r")
        if not chunk:
            return []
        lines = chunk.splitlines()
        tail = b"" if chunk.endswith((b"\n", b"\r")) else lines.pop()
        if lines and self._half:
            lines[0] = b"".join([*self._half, lines[0]])
            self._half.clear()
            self._half_size = 0
        if tail:
            self._half.append(tail)
            self._half_size += len(tail)
            if self._half_size >= self._max_line:
                lines.extend(self._overlong())
        return lines

    def pending(self) -> bytes:
        """Return the half line that waits, or nothing. Safe to call from another thread."""
        return b"".join(tuple(self._half))

    def flush(self) -> list[bytes]:
        """Give out the half line: its end will not come."""
        half = self.pending()
        self._half.clear()
        self._half_size = 0
        return [half] if half else []

    def _overlong(self) -> list[bytes]:
        """Cut what waits into pieces of MAX_LINE, never inside a UTF-8 character."""
        data = self.pending()
        pieces = []
        start = 0
        while len(data) - start >= self._max_line:
            end = _character_end(data, start + self._max_line)
            pieces.append(data[start:end])
            start = end
        rest = data[start:]
        self._half[:] = [rest] if rest else []
        self._half_size = len(rest)
        return pieces


def _character_end(data: bytes, end: int) -> int:
    """Return the last place at or before `end` (at most 3 back) where no character is cut."""
    for back in range(4):
        if end - back < len(data) and data[end - back] & 0xC0 != 0x80:
            return end - back
    return end


def printable(line: bytes) -> bytes:
    """Return the line as UTF-8, with what is none replaced."""
    return line if line.isascii() else line.decode("utf-8", "replace").encode()


def line_prefix(
    template: str | None, *, role_name: str, rank: int, local_rank: int, host: str
) -> bytes:
    """Return what stands in front of a worker's lines: `[<role><local rank>]:` or the template.

    The template knows `${role_name}`, `${rank}`, `${local_rank}` and `${host}`; other names and
    lone dollar signs stay as they are.
    """
    if template is None:
        return f"[{role_name}{local_rank}]:".encode("utf-8", "replace")
    text = Template(template).safe_substitute(
        role_name=role_name, rank=rank, local_rank=local_rank, host=host
    )
    return text.encode("utf-8", "replace")
