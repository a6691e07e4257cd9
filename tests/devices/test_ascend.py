"""What `npu-smi info` prints, and what is made of it. The tables have the shapes of versions 24 to 26."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from frun.devices import ascend
from frun.devices.ascend import Ascend, parse
from tests.devices.build import around

HEAD = """\
+------------------------------------------------------------------------------------------------+
| npu-smi 24.1.rc1                 Version: 24.1.rc1                                             |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
"""
FOOT = """\
+---------------------------+---------------+----------------------------------------------------+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
+===========================+===============+====================================================+
| 0       0                 | 35            | python3                  | 3161                    |
"""
EDGE = """\
+--------------------------------------------------------------------------------------------------------+
| npu-smi 25.2.0                                       Version: 25.2.0                                   |
+-------------------------------+-----------------+------------------------------------------------------+
| NPU     Name                  | Health          | Power(W)     Temp(C)           Hugepages-Usage(page) |
| Chip    Device                | Bus-Id          | AICore(%)    Memory-Usage(MB)                        |
+===============================+=================+======================================================+
| 0       310B1                 | OK              | 10.4          66                15    / 15           |
| 0       0                     | NA              | 0            957   / 10810                           |
+===============================+=================+======================================================+
"""
TWO_ON_A_CARD = """\
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip  Phy-ID              | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 4     Ascend910           | OK            | 178.5       36                0    / 0             |
| 0     8                   | 0000:9D:00.0  | 0           0    / 0          3416 / 65536         |
+------------------------------------------------------------------------------------------------+
| 4     Ascend910           | Critical      | -           36                0    / 0             |
| 1     9                   | 0000:9F:00.0  | 0           0    / 0          3195 / 65536         |
"""


def table(*healths: str) -> str:
    """Return what is printed for cards of one chip; an empty text: the card is not listed."""
    figures = "93.6        40                0    / 0             |\n"
    use = "0           0    / 0          3161 / 65536         |\n"
    rows = [
        f"| {card}     910B3               | {health:<13} | {figures}"
        f"| 0                         | 0000:0{card}:00.0  | {use}"
        for card, health in enumerate(healths)
        if health
    ]
    return HEAD + "".join(rows) + FOOT


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A program that prints what stands beside it."""
    path = tmp_path / "npu-smi"
    path.write_text(f'#!/bin/sh\n[ "$1" = info ] && exec cat "{tmp_path}/output"\n')
    path.chmod(0o755)
    return path


def found(check: Ascend, program: Path, *healths: str) -> list[tuple[object, ...]]:
    """Poll while the program prints this table."""
    (program.parent / "output").write_text(table(*healths))
    return [(f.name, f.severity.value, f.device, f.lasting) for f in check.poll()]


@pytest.mark.parametrize(
    ("output", "healths"),
    [
        (table("OK", "Alarm"), {(0, 0): "OK", (1, 0): "Alarm"}),
        (EDGE, {(0, 0): "OK"}),
        (TWO_ON_A_CARD, {(4, 0): "OK", (4, 1): "Critical"}),
        ("dcmi module initialize failed. ret is -8005\n", {}),
    ],
    ids=["one chip", "edge", "two chips", "no driver"],
)
def test_tables(output: str, healths: dict[tuple[int, int], str]) -> None:
    """Cards of one chip and of two, and the rows of processes, which are no devices."""
    assert parse(output) == healths


@pytest.mark.parametrize(
    ("health", "expected"),
    [
        ("OK", []),
        ("Warning", [("health", "warning", 1, False)]),
        ("Alarm", [("health", "fault", 1, True)]),
        ("Critical", [("health", "fault", 1, True)]),
        ("UNKNOWN", [("health", "fault", 1, True)]),
        ("", [("lost", "fault", 1, True)]),
    ],
)
def test_health(program: Path, health: str, expected: Sequence[object]) -> None:
    """From a minor alarm, with which it works on, to a card that is not listed any more."""
    check = Ascend(str(program), None)
    assert found(check, program, "OK", "OK", "OK") == []
    assert found(check, program, "OK", health, "OK") == expected


def test_devices_are_numbered_as_workers_see_them(program: Path) -> None:
    """By ASCEND_RT_VISIBLE_DEVICES, numbers and ranges."""
    environment = {"PATH": str(program.parent), "ASCEND_RT_VISIBLE_DEVICES": "2,0-1"}
    check = ascend.plugin(around(environment=environment))
    assert check is not None
    assert found(check, program, "Warning", "OK", "OK") == [("health", "warning", 1, False)]


def test_without_npu_smi_or_a_device_there_is_nothing_to_look_at(program: Path) -> None:
    """No check then, and no error."""
    assert ascend.plugin(around(environment={"PATH": "/nowhere"})) is None
    environment = {"PATH": str(program.parent), "ASCEND_RT_VISIBLE_DEVICES": ""}
    assert ascend.plugin(around(environment=environment)) is None
