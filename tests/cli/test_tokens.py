"""Spelling of flags before the script, and nothing but copying after it (R01, R02)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frun.cli_options import OPTIONS, match, normalise
from frun.errors import UsageError
from tests.cli.tools import parse

ANY_TEXT = st.text(max_size=12)
FLAG_LIKE = st.sampled_from(
    ["--r=16", "--no", "--max=3", "--help", "-h", "--nnodes=9", "--", "-5", "-1e-3", "", "@file"]
)


@given(st.lists(st.one_of(ANY_TEXT, FLAG_LIKE), max_size=8))
def test_everything_after_the_script_is_untouched(args: list[str]) -> None:
    """Whatever stands behind the script reaches it in order, empty texts and flags included."""
    assert parse(["--nnodes", "2", "s.py", *args]) == ({"nnodes": ("2",)}, "s.py", tuple(args))


@given(st.lists(st.one_of(ANY_TEXT, FLAG_LIKE), max_size=8))
def test_a_double_dash_before_the_script_is_dropped_once(args: list[str]) -> None:
    """`frun -- s.py -- x` gives the script its own `--`."""
    assert parse(["--", "s.py", *args]) == ({}, "s.py", tuple(args))


@pytest.mark.parametrize("option", [o for o in OPTIONS if not o.switch], ids=lambda o: o.name)
def test_both_spellings_and_both_ways_to_give_a_value(option) -> None:  # type: ignore[no-untyped-def]
    """Dash or underscore, `=value` or the next token: all the same."""
    for spelling in option.spellings:
        for tokens in ([f"{spelling}=7"], [spelling, "7"]):
            assert parse([*tokens, "s.py"])[0] == {option.name: ("7",)}


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("--stand", "standalone"),
        ("--redir", "redirects"),
        ("--nproc", "nproc_per_node"),
        ("--nproc_per", "nproc_per_node"),
        ("--re", "redirects"),
        ("--rdzv-b", "rdzv_backend"),
        ("--job", "rdzv_id"),
        ("--job_id", "rdzv_id"),
        ("--module", "module"),
        ("--v", "virtual_local_rank"),
        ("--repl", "replace_timeout"),
        ("--state", "state_dir"),
    ],
)
def test_a_unique_beginning_is_enough(word: str, name: str) -> None:
    """The two spellings are one candidate, and frun's own flags never spoil one of torchrun's."""
    assert match(word).name == name


@pytest.mark.parametrize(
    ("tokens", "parts"),
    [
        (["--no", "s.py"], ["--node-rank", "--no-python", "ambiguous"]),
        (["--rdzv=x", "s.py"], ["--rdzv-id", "--rdzv-backend", "--rdzv-conf"]),
        (["--max-restart-count=3", "s.py"], ["--max-restart-count", "--max-restarts"]),
        (["-x", "s.py"], ["-x"]),
        (["-mx", "s.py"], ["-x", "'-mx'"]),
        (["--role"], ["--role", "value"]),
        (["--role", "--nnodes", "s.py"], ["--role", "'--nnodes'", "--role=--nnodes"]),
        (["--role", "--", "s.py"], ["--role"]),
        (["--standalone=yes", "s.py"], ["--standalone", "'yes'"]),
    ],
)
def test_a_bad_flag_is_named(tokens: list[str], parts: list[str]) -> None:
    """The refusal names the flag and what it could have been."""
    with pytest.raises(UsageError) as caught:
        normalise(tokens)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("tokens", "flags"),
    [
        (["-r", "3"], {"redirects": ("3",)}),
        (["-r3"], {"redirects": ("3",)}),
        (["-r=3"], {"redirects": ("3",)}),
        (["-mt", "0:3"], {"module": ("1",), "tee": ("0:3",)}),
        (["--role=--nnodes"], {"role": ("--nnodes",)}),
        (["--node-rank", "-1"], {"node_rank": ("-1",)}),
        (["--log-dir="], {"log_dir": ("",)}),
        (["--role", "a", "--role", "b"], {"role": ("a", "b")}),
        (["--tee", "3", "-t", "1"], {"tee": ("3", "1")}),
    ],
)
def test_values_are_found(tokens: list[str], flags: dict[str, tuple[str, ...]]) -> None:
    """Short flags, clusters, values that look like flags, repeated flags."""
    assert parse([*tokens, "s.py"])[0] == flags


def test_flags_after_the_script_are_not_flags() -> None:
    """R02: an abbreviation works before the script and is nothing behind it."""
    flags, script, args = parse(["--stand", "--redir", "3", "argv.py", "--redir", "9"])
    assert flags == {"standalone": ("1",), "redirects": ("3",)}
    assert (script, args) == ("argv.py", ("--redir", "9"))
