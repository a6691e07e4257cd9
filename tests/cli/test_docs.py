"""docs/torchrun.md names everything that the tables in the code know."""

from pathlib import Path

import pytest

from frun.cli_options import OPTIONS, Option
from frun.resolve_rendezvous import KEYS

TEXT = (Path(__file__).parents[2] / "docs" / "torchrun.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_every_flag_is_described(option: Option) -> None:
    """Flag, short form and variable."""
    assert f"`{option.flag}" in TEXT
    if option.short:
        assert f"`{option.short}`" in TEXT
    if option.env.startswith("PET_") or option.name in ("config", "spares", "preload"):
        assert f"`{option.env}`" in TEXT


def test_every_setting_is_described() -> None:
    """All keys of --rdzv-conf."""
    for key in frozenset().union(*KEYS.values()):
        assert f"`{key}`" in TEXT
