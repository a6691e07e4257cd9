"""A machine that answers without looking, and a way from tokens to a configuration."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import click

from frun.cli import run
from frun.config import LaunchConfig
from frun.errors import UsageError
from frun.resolve import resolve
from frun.values import Given


@dataclass(frozen=True)
class FakeMachine:
    """Has six of everything, and password files that are named here."""

    python: str = "/venv/bin/python"
    home: str = "/home/me"
    passwords: Mapping[str, str] = field(default_factory=dict)

    def count(self, kind: Given, python: str) -> int:
        """Six, unless the kind is unknown."""
        if kind.text not in ("auto", "cpu", "gpu", "xpu"):
            raise UsageError(f"{kind.source}: {kind.text!r} unknown to {python}")
        return 6

    def read_password(self, path: Given) -> str:
        """The password of a known file."""
        if path.text not in self.passwords:
            raise path.refuse("can not be read")
        return self.passwords[path.text]


def parse(tokens: Sequence[str]) -> tuple[dict[str, tuple[str, ...]], str, tuple[str, ...]]:
    """Return flags, script and its arguments, as the command itself would see them."""
    context = run.make_context("frun", list(tokens))
    assert isinstance(context, click.Context)
    values = dict(context.params)
    script, args = values.pop("script"), values.pop("args")
    flags = {
        name: value if isinstance(value, tuple) else ("1",)
        for name, value in values.items()
        if value
    }
    return flags, script, args


def configure(
    *tokens: str,
    env: Mapping[str, str] | None = None,
    file: Mapping[str, Given] | None = None,
    machine: FakeMachine | None = None,
    whole: bool = False,
) -> LaunchConfig:
    """Return what `frun TOKENS s.py` is understood as; `whole` tokens have their own script."""
    flags, script, args = parse(tokens if whole else [*tokens, "s.py"])
    return resolve(
        flags, env or {}, file or {}, entry=script, args=args, machine=machine or FakeMachine()
    )
