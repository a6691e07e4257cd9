"""The table of reports in README.md and the tests it names stay together."""

import re
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
NUMBERS = (
    "1 2 5 7 9 11 12 14 15 17 18 19 20 21 22 23 26 27 29 30 32 33 35 36 38 39 41 42 43 46 48 49 50 52 53 55"
    " 56 57 59 60 62 63 64 65 67 69 71 73 74 75 78 80 81 83 84 85 86 88 90 91 92 93 95 96 98 99 102 104"
)
"""Reports that concern launching; numbers are not consecutive."""


def named_in(path: Path) -> set[str]:
    """Return the names of the tests of a file."""
    return set(re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE))


def rows() -> dict[str, str]:
    """Return where each report is shown."""
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    found = re.findall(r"^\| ([RS]\d+) \|[^|]*\| (.*) \|$", text, re.MULTILINE)
    assert len(found) == len(dict(found))
    return dict(found)


def test_every_report_has_a_row() -> None:
    """None is forgotten."""
    wanted = [f"R{int(n):02}" for n in NUMBERS.split()] + [f"S{n:02}" for n in range(1, 18)]
    assert list(rows()) == wanted


def test_every_test_that_is_named_exists() -> None:
    """Under this very name, here or in the file that is named with it."""
    here = set().union(*(named_in(path) for path in FOLDER.glob("test_*.py")))
    for report, places in rows().items():
        for place in re.findall(r"`([^`]*test_[^`]*)`", places):
            file, _, name = place.rpartition("::")
            assert name in (named_in(ROOT / file) if file else here), f"{report}: {place}"


def test_every_test_of_a_report_is_named() -> None:
    """A test with a number in its name is in the rows of these numbers."""
    for path in FOLDER.glob("test_*.py"):
        for name in named_in(path):
            for report in re.findall(r"(?<=_)([rs]\d{2,3})(?=_)", name):
                assert f"`{name}`" in rows()[report.upper()]
