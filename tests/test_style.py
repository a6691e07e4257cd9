"""The house rules that a machine can check: linters, types, import contracts, sizes, names."""

import ast
import configparser
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import frun

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "frun"
SOURCES = sorted(PACKAGE.rglob("*.py"))
MODULE_LINES = 450
FUNCTION_LINES = 70
READS_ENVIRONMENT = ("launch.py", "cli.py", "worker/")
MAY_BLOCK = ("worker/",)
PURE = {
    "collections", "dataclasses", "enum", "functools", "hashlib", "json", "math", "re", "struct",
    "types", "typing", "urllib", "zlib",
}  # fmt: skip
"""What the protocol may import besides itself and `frun.errors`."""
TOOLS = {
    "ruff check": ("-m", "ruff", "check"),
    "ruff format": ("-m", "ruff", "format", "--check"),
    "lint-imports": ("-c", "from importlinter.cli import lint_imports_command as c; c()"),
    "mypy": ("-m", "mypy"),
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def tree(path: Path) -> ast.Module:
    """Return the parsed module."""
    return ast.parse(path.read_text(encoding="utf-8"))


def named(path: Path) -> str:
    """Return the path of a module as people write it, from the package on."""
    return path.relative_to(PACKAGE).as_posix()


def places(path: Path, wanted: str) -> list[str]:
    """Return `file:line` of every expression that is spelled so, such as `os.environ`."""
    return [
        f"{named(path)}:{node.lineno}"
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Attribute) and ast.unparse(node) == wanted
    ]


def undocumented(node: ast.Module | ast.ClassDef) -> Iterator[str]:
    """Yield the public classes, functions and methods below that have no docstring."""
    for child in node.body:
        if not isinstance(child, Function | ast.ClassDef) or child.name.startswith("_"):
            continue
        if ast.get_docstring(child) is None:
            yield f"{child.name} (line {child.lineno})"
        if isinstance(child, ast.ClassDef):
            yield from undocumented(child)


@pytest.mark.parametrize("tool", TOOLS)
def test_a_tool_has_nothing_to_say(tool: str) -> None:
    """Each tool passes with the settings in setup.cfg and pyproject.toml."""
    done = subprocess.run(
        [sys.executable, *TOOLS[tool]], cwd=ROOT, capture_output=True, text=True, timeout=800
    )
    assert done.returncode == 0, f"{tool}:\n{done.stdout}{done.stderr}"


def test_the_torch_contract_names_every_module() -> None:
    """A module that the contract does not list could import torch unseen."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    listed = set(config["importlinter:contract:torch"]["source_modules"].split())
    present = {f"frun.{found.name}" for found in pkgutil.iter_modules(frun.__path__)}
    assert listed == present - {"frun.worker"}


@pytest.mark.parametrize("path", sorted((PACKAGE / "protocol").glob("*.py")), ids=named)
def test_the_protocol_imports_pure_modules_only(path: Path) -> None:
    """Stricter than the contract: what is not known to be pure is not."""
    imported: set[str] = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            imported.add(str(node.module))
    foreign = {name for name in imported if not name.startswith(("frun.protocol", "frun.errors"))}
    assert {name.partition(".")[0] for name in foreign} <= PURE


def test_the_agent_loads_no_torch() -> None:
    """All that an agent is made of leaves torch and numpy out of the process."""
    code = "import sys, frun.launch, frun.status_cli, frun.cli\nprint({*sys.modules} & {'torch', 'numpy'})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stdout + done.stderr


@pytest.mark.parametrize("path", SOURCES, ids=named)
def test_sizes(path: Path) -> None:
    """A module and a function can be read in one go."""
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MODULE_LINES, f"{named(path)} has {lines} lines"
    for node in ast.walk(tree(path)):
        if isinstance(node, Function) and node.end_lineno is not None:
            length = node.end_lineno - node.lineno + 1
            assert length <= FUNCTION_LINES, f"{node.name} has {length} lines"


@pytest.mark.parametrize("path", SOURCES, ids=named)
def test_docstrings(path: Path) -> None:
    """Every module says what it owns, and everything public what it does."""
    module = tree(path)
    if module.body:
        assert ast.get_docstring(module), f"{named(path)} has no docstring"
    assert list(undocumented(module)) == []


@pytest.mark.parametrize("path", SOURCES, ids=named)
def test_surroundings(path: Path) -> None:
    """The environment is read at the edges only, and nobody waits by sleeping."""
    if not named(path).startswith(READS_ENVIRONMENT):
        assert places(path, "os.environ") + places(path, "os.getenv") == []
    if not named(path).startswith(MAY_BLOCK):
        assert places(path, "time.sleep") == []


@pytest.mark.parametrize("path", SOURCES, ids=named)
def test_nothing_is_put_off(path: Path) -> None:
    """What is left to do stands in an issue, not in a comment."""
    words = "|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X"))
    assert re.findall(rf"\b(?:{words})\b", path.read_text(encoding="utf-8")) == []
