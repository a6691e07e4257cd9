"""Owns reading the table that maps lines of workers to classes of faults: the built-in one, and a user's."""

import re
from pathlib import Path

import yaml

from frun.errors import UsageError
from frun.protocol.classes import FaultClass, Rule
from frun.values import nearest

_BUILT_IN = Path(__file__).with_name("fault_patterns.yaml")
_KEYS = ("class", "pattern")


def load(path: str | None) -> tuple[Rule, ...]:
    """Return the rules of a file, if there is one, then the built-in ones: the first that fits counts.

    Raises:
        UsageError: the file can not be read, or an entry is no class with a pattern; the text names it.
    """
    own = () if path is None else _read(Path(path), f"--fault-patterns: {path}")
    return (*own, *_read(_BUILT_IN, str(_BUILT_IN)))


def _read(path: Path, name: str) -> tuple[Rule, ...]:
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"{name}: can not be read: {why}") from None
    except yaml.YAMLError as error:
        raise UsageError(f"{name}: this is not YAML: {getattr(error, 'problem', None)}") from None
    if document is None:
        return ()
    if not isinstance(document, list):
        raise UsageError(f"{name}: the file must be a list of `{{class: ..., pattern: ...}}`")
    return tuple(_rule(f"{name}: entry {n}", entry) for n, entry in enumerate(document, 1))


def _rule(where: str, entry: object) -> Rule:
    if not isinstance(entry, dict) or set(entry) != set(_KEYS):
        raise UsageError(f"{where} must have the keys class and pattern, and no others")
    name, pattern = (entry[key] for key in _KEYS)
    names = [each.value for each in FaultClass]
    if name not in names:
        raise UsageError(f"{where}: no such class: {name!r}{nearest(str(name), names)}")
    if not isinstance(pattern, str) or not pattern:
        raise UsageError(f"{where}: the pattern must be a text, it is {pattern!r}")
    try:
        return Rule(FaultClass(name), re.compile(pattern, re.IGNORECASE))
    except re.error as error:
        raise UsageError(f"{where}: {pattern!r} is no regular expression: {error}") from None
