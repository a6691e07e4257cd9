"""One site per test, which must be clean afterwards."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.harness import Site


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A private corner of this machine; processes and files left in it fail the test."""
    with Site(tmp_path) as made:
        yield made
