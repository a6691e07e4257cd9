"""Takes facts from a file, which a site's own script, or a drill, writes.

A list of mappings in YAML or JSON. A file that is not there says that all is well.
"""

from collections.abc import Iterable
from pathlib import Path

import yaml

from frun.devices import text
from frun.devices.contract import Fact, FaultClass
from frun.protocol.health import warning

_LARGEST = 64 * 1024


class FactsFile:
    """One file, read again whenever it has changed."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._signature: tuple[int, int, int] | None = None
        self._facts: tuple[Fact, ...] = ()

    def poll(self) -> Iterable[Fact]:
        """Return what stands in the file; see `Plugin`."""
        try:
            found = self._path.stat()
            signature = (found.st_ino, found.st_size, found.st_mtime_ns)
            if signature != self._signature:
                self._facts = _facts(self._path)
                self._signature = signature
        except FileNotFoundError:
            self._signature = None
            return ()
        except (OSError, ValueError) as error:
            self._signature = None
            return (_unreadable(self._path, error),)
        return self._facts


def _facts(path: Path) -> tuple[Fact, ...]:
    with path.open("rb") as file:
        data = file.read(_LARGEST + 1)
    if len(data) > _LARGEST:
        raise ValueError(f"it has more than {_LARGEST} bytes")
    try:
        document = yaml.safe_load(data)
    except yaml.YAMLError as error:
        raise ValueError("it is not YAML") from error
    if document is None:
        return ()
    if not isinstance(document, list):
        raise ValueError("it must be a list of facts")  # noqa: TRY004 - one kind of error
    return tuple(map(text.read, document))


def _unreadable(path: Path, error: Exception) -> Fact:
    why = (error.strerror or "an error") if isinstance(error, OSError) else str(error)
    return warning("unreadable", f"{path} can not be read: {why}", FaultClass.STORAGE)
