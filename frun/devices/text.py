"""Facts as plain data: in the lines between the checks and their agent, and in files that people write."""

from collections.abc import Mapping
from typing import Any

from frun.protocol.classes import FaultClass
from frun.protocol.health import Fact, Severity

_FIELDS = ("name", "severity", "class", "reason", "device", "lasting")


def written(fact: Fact) -> dict[str, Any]:
    """Return a fact as plain data, without who reports it."""
    return {
        "name": fact.name,
        "severity": fact.severity.value,
        "class": fact.fault_class.value,
        "reason": fact.reason,
        "device": fact.device,
        "lasting": fact.lasting,
    }


def read(document: object) -> Fact:
    """Return the fact that plain data describe; only severity and reason must be there.

    Raises ValueError naming the field that does not fit.
    """
    if not isinstance(document, Mapping):
        raise ValueError(f"a fact is a mapping, not {document!r}")  # noqa: TRY004 - one kind of error
    unknown = [key for key in document if key not in _FIELDS]
    if unknown:
        raise ValueError(f"no such field: {unknown[0]!r}; there are {', '.join(_FIELDS)}")
    return Fact(
        name=_text(document, "name", "fact"),
        severity=Severity(_choice(document, "severity", "", [each.value for each in Severity])),
        fault_class=FaultClass(
            _choice(document, "class", "device", [each.value for each in FaultClass])
        ),
        reason=_text(document, "reason", ""),
        device=_device(document),
        lasting=_switch(document, "lasting"),
    )


def _text(document: Mapping[str, Any], name: str, default: str) -> str:
    value = document.get(name, default)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{name} must be a text, not {value!r}")
    return value


def _choice(document: Mapping[str, Any], name: str, default: str, known: list[str]) -> str:
    value = document.get(name, default)
    if value not in known:
        raise ValueError(f"{name} is {value!r}, not one of {', '.join(known)}")
    return str(value)


def _device(document: Mapping[str, Any]) -> int | None:
    value = document.get("device")
    if value is None or (type(value) is int and value >= 0):
        return value
    raise ValueError(f"device must be a number from 0 on, or left out, not {value!r}")


def _switch(document: Mapping[str, Any], name: str) -> bool:
    value = document.get(name, False)
    if type(value) is not bool:
        raise ValueError(f"{name} must be true or false, not {value!r}")
    return value
