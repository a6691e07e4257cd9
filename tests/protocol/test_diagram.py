"""The picture in docs/protocol.md is what the code does."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def drawing() -> ModuleType:
    """Load the script that draws."""
    found = importlib.util.spec_from_file_location("draw_protocol", DOCS / "draw_protocol.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_every_arrow_has_a_text_and_every_text_an_arrow(drawing: ModuleType) -> None:
    """A step that is new, or gone, is noticed."""
    assert drawing.edges() == set(drawing.TEXTS)


def test_the_diagram_is_up_to_date(drawing: ModuleType) -> None:
    """Run docs/draw_protocol.py when this fails."""
    text = (DOCS / "protocol.md").read_text(encoding="utf-8")
    assert drawing.drawn(text) == text
