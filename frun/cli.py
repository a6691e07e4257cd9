"""Owns the command line: read tokens, call, print one line when that fails, exit with a code.

What values mean is `resolve`'s business, what happens then is `launch`'s.
"""

import contextlib
import importlib
import logging
import os
import sys
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import NoReturn

import click

from frun.cli_options import OPTIONS, SECTIONS, Option, normalise
from frun.config import EntryMode, LaunchConfig
from frun.errors import FrunError, UsageError
from frun.resolve import resolve
from frun.values import Given
from frun.version import __version__

logger = logging.getLogger(__name__)

COMMANDS: Mapping[str, tuple[str, str]] = {
    "status": ("frun.status_cli", "status"),
    "report": ("frun.report_cli", "report"),
    "plan": ("frun.plan_cli", "plan"),
    "doctor": ("frun.doctor_cli", "doctor"),
    "inject-fault": ("frun.drill_cli", "inject_fault"),
    "drill": ("frun.campaign_cli", "drill"),
}
"""Commands besides `run`: module and name of the click command, imported when asked for."""

_USAGE = "[run] [FLAGS] SCRIPT [ARGUMENTS]..."
_HELP = """Launch distributed PyTorch training, and keep it running when parts of it die.

Takes torchrun's command lines. A flag may be shortened as long as it is clear, and spelled with
underscores. Flags that are not given are read from PET_<FLAG> (frun's own: FRUN_<FLAG>), then
from the --config file. All that follows SCRIPT is passed on to it."""
_EPILOG = (
    "Other commands, each with --help: frun status, report, plan, doctor, inject-fault, drill. Every"
    " flag: docs/torchrun.md."
)


class RunCommand(click.Command):
    """`frun run`: torchrun's rules of spelling in front of click, help by section behind it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Spell flags out first, so that click never sees an abbreviation."""
        return super().parse_args(ctx, normalise(args))

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write how to call it."""
        formatter.write_usage("frun", _USAGE)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write each section as a list of its own."""
        for section in SECTIONS:
            rows = [(_spelling(each), each.help) for each in OPTIONS if each.section == section]
            with formatter.section(section):
                formatter.write_dl(rows)


def _spelling(option: Option) -> str:
    words = [option.short] if option.short else []
    words += [option.flag, *(f"--{alias.replace('_', '-')}" for alias in option.aliases)]
    return ", ".join(words) + (f" {option.metavar}" if option.metavar else "")


def _parameter(option: Option) -> click.Option:
    names = [option.name, f"--{option.name.replace('_', '-')}"]
    if option.switch:
        return click.Option(names, count=True)
    return click.Option(names, multiple=True, type=str)


def run_parameters() -> list[click.Parameter]:
    """Return what the command line of a job is made of."""
    return [
        *(_parameter(option) for option in OPTIONS),
        click.Argument(["script"], required=False),
        click.Argument(["args"], nargs=-1, type=click.UNPROCESSED),
    ]


def configured(
    options: Mapping[str, object], script: str | None, args: Sequence[str]
) -> LaunchConfig:
    """Return the configuration that a parsed command line means; no script: any."""
    _set_up_logging(os.environ)
    return _configure(_texts(options), script or "-", args)


def inherited() -> dict[str, str]:
    """Return this process's environment, as workers will have it."""
    return dict(os.environ)


@click.pass_context
def _run(
    ctx: click.Context, /, script: str | None, args: tuple[str, ...], **options: object
) -> int:
    if options.pop("help"):
        click.echo(ctx.get_help())
        return 0
    if options.pop("version"):
        click.echo(f"frun {__version__}")
        return 0
    if not script:
        raise UsageError("no script given: frun [FLAGS] SCRIPT [ARGUMENTS], see frun --help")
    config = configured(options, script, args)
    for note in config.notes:
        logger.log(logging.WARNING if note.warning else logging.INFO, "%s", note.text)
    with _quiet_grpc(os.environ):
        importlib.import_module("frun.doctor.timeouts").refuse(config)
        launch = importlib.import_module("frun.launch")
    return int(launch.run(config))


run = RunCommand(
    name="run",
    callback=_run,
    params=run_parameters(),
    help=_HELP,
    epilog=_EPILOG,
    add_help_option=False,
    context_settings={"allow_interspersed_args": False, "max_content_width": 100},
)


@contextlib.contextmanager
def _quiet_grpc(environment: MutableMapping[str, str]) -> Iterator[None]:
    """Keep gRPC's C core from writing to stderr; it reads its level while it is imported.

    What it would say of a failed connection frun says itself. Workers' environment is not changed.
    """
    given = environment.get("GRPC_VERBOSITY")
    environment.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        yield
    finally:
        if given is None:
            del environment["GRPC_VERBOSITY"]


def _texts(options: Mapping[str, object]) -> dict[str, tuple[str, ...]]:
    texts: dict[str, tuple[str, ...]] = {}
    for name, value in options.items():
        if isinstance(value, tuple) and value:
            texts[name] = tuple(map(str, value))
        elif isinstance(value, int) and value:
            texts[name] = ("1",)
    return texts


def _configure(
    flags: Mapping[str, Sequence[str]], script: str, args: Sequence[str]
) -> LaunchConfig:
    typed = flags.get("config", ())
    path = typed[-1] if typed else os.environ.get("FRUN_CONFIG", "")
    file: Mapping[str, Given] = {}
    if path:
        file = importlib.import_module("frun.config_file").load(path)
    config = resolve(
        flags, os.environ, file, entry=script, args=args, machine=ThisMachine(os.environ)
    )
    if config.workers.mode in (EntryMode.SCRIPT, EntryMode.RUN_PATH):
        _check_script(config.workers.entry)
    return config


def _check_script(script: str) -> None:
    if script == "-" or Path(script).exists():
        return
    raise UsageError(f"no such script: {script!r} in {Path.cwd()} (-m runs a module by its name)")


def _set_up_logging(environment: Mapping[str, str]) -> None:
    """Send frun's log to stderr at LOGLEVEL; other packages speak up from WARNING on."""
    name = environment.get("LOGLEVEL", "").upper() or "WARNING"
    level = int(name) if name.isdigit() else logging.getLevelNamesMapping().get(name)
    if level is None:
        raise UsageError(f"LOGLEVEL: {name!r} is no level, use DEBUG, INFO, WARNING or ERROR")
    logging.basicConfig(format="frun: %(levelname)s: %(message)s", level=logging.WARNING)
    logging.getLogger("frun").setLevel(level)


class ThisMachine:
    """The machine that frun runs on."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment

    @property
    def python(self) -> str:
        """Path of the running interpreter, links not followed."""
        return sys.executable

    @property
    def home(self) -> str:
        """Home folder of the user."""
        return os.path.expanduser("~")

    def count(self, kind: Given, python: str) -> int:
        """Return how many workers a kind of device means here."""
        localsize = importlib.import_module("frun.agent.localsize")
        return int(
            localsize.worker_count(
                kind.text, source=kind.source, python=python, environment=self._environment
            )
        )

    def read_password(self, path: Given) -> str:
        """Return the first line of a password file."""
        try:
            text = Path(path.text).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise path.refuse(f"can not be read: {why}") from None
        line = text.partition("\n")[0].rstrip("\r")
        if not line:
            raise path.refuse("is empty: put the password on its first line")
        return line


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the program and leave with its exit code; bad input is one line on stderr."""
    tokens = list(sys.argv[1:] if argv is None else argv)
    command: click.Command = run
    if tokens and tokens[0] in COMMANDS:
        module, name = COMMANDS[tokens.pop(0)]
        command = getattr(importlib.import_module(module), name)
    elif tokens and tokens[0] == "run":
        tokens = tokens[1:]
    prog = "frun" if command is run else f"frun {command.name}"
    sys.exit(_call(command, tokens, prog))


def _call(command: click.Command, tokens: list[str], prog: str) -> int:
    try:
        code = command.main(tokens, prog_name=prog, standalone_mode=False)
    except click.exceptions.Exit as leaving:
        return leaving.exit_code
    except click.ClickException as error:
        return _say(error.format_message(), UsageError.exit_code)
    except FrunError as error:
        return _say(str(error), error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        return _say("interrupted before the job began", 1)
    return code if isinstance(code, int) else 0


def _say(text: str, code: int) -> int:
    line = " ".join(text.split("\n"))
    click.echo(f"frun: error: {line}", err=True)
    return code
