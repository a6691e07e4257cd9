"""Processes that are forked here collect nothing that other tests left in this one."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def _nothing_to_collect() -> Iterator[None]:
    """Keep garbage of gRPC, whose threads only this process has, away from children."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
