"""A user's table of patterns, as `frun doctor` looks at it."""

from pathlib import Path

import pytest

from frun.doctor.findings import Level
from frun.doctor.patterns import check


@pytest.mark.parametrize(
    ("text", "level", "said"),
    [
        ("- {class: user, pattern: 'out of (luck'}", Level.FAILURE, "is no regular expression"),
        (
            "- {class: hots, pattern: a}",
            Level.FAILURE,
            "no such class: 'hots', did you mean 'host'",
        ),
        ("- {class: user, pattern: a", Level.FAILURE, "this is not YAML"),
        ("- {class: user, pattern: a}\n- {class: host, pattern: b}", Level.OK, "2 of "),
        ("", Level.OK, "0 of "),
    ],
)
def test_a_table_is_read_as_a_job_would(tmp_path: Path, text: str, level: Level, said: str) -> None:
    """What is wrong is one line with the file's name."""
    path = tmp_path / "site.yaml"
    path.write_text(text, encoding="utf-8")
    found = check(str(path))
    assert (found.level, found.check) == (level, "patterns")
    assert said in found.text
    assert str(path) in found.text
    assert "\n" not in found.text
