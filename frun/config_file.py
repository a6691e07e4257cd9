"""Owns reading a `--config` file: YAML whose keys are flag names, each value kept as text.

YAML's guesses (`2:4` is a number, `no` is false, `null` is nothing) are not made: a value is read
by the same rules as the flag's. Nothing is constructed from tags.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import yaml

from frun.cli_options import BY_NAME, OPTIONS
from frun.errors import UsageError
from frun.values import Given, nearest

_FILTERS = ("duplicate_stdout_filters", "duplicate_stderr_filters")
_LISTS = (
    *_FILTERS,
    "rdzv_endpoint",
    "preload",
    "signals_to_handle",
    "local_ranks_filter",
    "device_checks",
)
_MAPS: Mapping[str, str] = {"rdzv_conf": "=", "redirects": ":", "tee": ":"}
_KEYS = {
    spelling.removeprefix("--"): option.name
    for option in OPTIONS
    if option.in_file
    for spelling in option.spellings
}


def load(path: str) -> dict[str, Given]:
    """Return the values of a file by option name, each with its place for messages.

    Raises:
        UsageError: the file can not be read, is not a YAML mapping, or has a key that is unknown,
            given twice, or of the wrong type.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"--config: {path}: can not be read: {why}") from None
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else path
        why = getattr(error, "problem", None) or "broken"
        raise UsageError(f"{where}: this is not YAML: {why}") from None
    if root is None:
        return {}
    if not isinstance(root, yaml.MappingNode):
        raise UsageError(f"{path}: the file must be `flag: value` lines, it is {_kind(root)}")
    found: dict[str, Given] = {}
    for key_node, node in root.value:
        name, given = _entry(path, key_node, node)
        if name in found:
            raise UsageError(f"{given.source} is given twice, also as {found[name].source}")
        found[name] = given
    return found


def _entry(path: str, key_node: yaml.Node, node: yaml.Node) -> tuple[str, Given]:
    where = f"{path}:{key_node.start_mark.line + 1}"
    key = str(key_node.value)
    name = _KEYS.get(key)
    if name is None:
        if key in ("etcd_user", "etcd_password", "etcd-user", "etcd-password"):
            raise UsageError(f"{where}: {key} can not stand in a file, see --etcd-password-file")
        raise UsageError(f"{where}: unknown key {key!r}{nearest(key, _KEYS)}")
    return name, Given(text=_text(name, node, f"{where}: {key}"), source=f"{where}: {key}")


def _text(name: str, node: yaml.Node, source: str) -> str:
    if isinstance(node, yaml.ScalarNode):
        if node.value == "":
            raise UsageError(f"{source} has no value: give one or take the line out")
        return str(node.value)
    if isinstance(node, yaml.SequenceNode) and name in _LISTS:
        escape: Callable[[str], str] = _double_commas if name in _FILTERS else str
        return ",".join(escape(_scalar(item, source)) for item in node.value)
    if isinstance(node, yaml.MappingNode) and name in _MAPS:
        pairs = ((_scalar(key, source), _scalar(value, source)) for key, value in node.value)
        return ",".join(f"{key}{_MAPS[name]}{value}" for key, value in pairs)
    kinds = "a text, a number"
    kinds += " or a list" if name in _LISTS else " or a mapping" if name in _MAPS else ""
    if BY_NAME[name].switch:
        kinds = "true or false"
    raise UsageError(f"{source} is {_kind(node)}, give {kinds}")


def _scalar(node: yaml.Node, source: str) -> str:
    if not isinstance(node, yaml.ScalarNode):
        raise UsageError(f"{source} has {_kind(node)} inside, give plain values")
    return str(node.value)


def _kind(node: yaml.Node) -> str:
    if isinstance(node, yaml.MappingNode):
        return "a mapping"
    return "a list" if isinstance(node, yaml.SequenceNode) else "a plain value"


def _double_commas(text: str) -> str:
    return text.replace(",", ",,")
