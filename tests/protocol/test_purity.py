"""What makes the protocol testable: frozen documents, and no way to the outside."""

import ast
import dataclasses
import importlib
import inspect
import pkgutil
from pathlib import Path
from types import ModuleType

import pytest

import frun.protocol

MODULES = [
    importlib.import_module(f"frun.protocol.{found.name}")
    for found in pkgutil.iter_modules(frun.protocol.__path__)
]
BANNED = {"time", "asyncio", "os", "socket", "threading", "random", "subprocess", "datetime"}


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_dataclasses_are_frozen_with_slots(module: ModuleType) -> None:
    """Every dataclass of the protocol is frozen and has slots: state is replaced, never changed."""
    for name, cls in inspect.getmembers(module, inspect.isclass):
        if cls.__module__ != module.__name__ or not dataclasses.is_dataclass(cls):
            continue
        params = cls.__dataclass_params__  # type: ignore[attr-defined]
        assert params.frozen, f"{name} is not frozen"
        assert "__slots__" in vars(cls), f"{name} has no slots"


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_no_clock_no_io(module: ModuleType) -> None:
    """Nothing in the protocol imports what reads a clock, waits, or talks to the outside."""
    assert module.__file__ is not None
    imported = set()
    for node in ast.walk(ast.parse(Path(module.__file__).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported.add(node.module.partition(".")[0])
            if node.module.startswith("frun."):
                assert node.module.startswith(("frun.protocol", "frun.errors")), node.module
    assert not imported & BANNED
