"""Owns the table of flags and how tokens before the script are read: spellings, abbreviations.

Values stay text here; `resolve` reads them. Nothing after the script is looked at.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from frun.errors import UsageError
from frun.values import nearest


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One flag with all its spellings."""

    name: str
    """Key in a configuration file and in `resolve`."""
    section: str
    help: str
    metavar: str = ""
    """Empty for a switch, which takes no value."""
    short: str = ""
    aliases: tuple[str, ...] = ()
    env: str = ""
    """Variable that is read when the flag is absent; empty: none."""
    own: bool = False
    """frun's own: torchrun does not have it, and it never spoils an abbreviation of torchrun's."""
    in_file: bool = True

    @property
    def switch(self) -> bool:
        """True when the flag takes no value."""
        return not self.metavar

    @property
    def flag(self) -> str:
        """The spelling shown to people."""
        return "--" + self.name.replace("_", "-")

    @property
    def spellings(self) -> tuple[str, ...]:
        """All long spellings, dashes and underscores."""
        names = (self.name, *self.aliases)
        return tuple(
            dict.fromkeys(f"--{each}" for name in names for each in (name.replace("_", "-"), name))
        )


def _torchrun(name: str, section: str, metavar: str, text: str, short: str = "") -> Option:
    env = "" if name in ("logs_specs", "numa_binding") else f"PET_{name.upper()}"
    return Option(name=name, section=section, metavar=metavar, help=text, short=short, env=env)


def _own(name: str, section: str, metavar: str, text: str) -> Option:
    return Option(
        name=name, section=section, metavar=metavar, help=text, env=f"FRUN_{name.upper()}", own=True
    )


WORLD, MEETING, WORKERS, LOGS, GENERAL = (
    "World",
    "Rendezvous",
    "Workers",
    "Logs",
    "General",
)
SECTIONS = (WORLD, MEETING, WORKERS, LOGS, GENERAL)

OPTIONS = (
    _torchrun("nnodes", WORLD, "N|MIN:MAX", "Hosts of the job, or an elastic range [1]."),
    _torchrun("nproc_per_node", WORLD, "N|KIND", "Workers here: number, auto, cpu, gpu, xpu [1]."),
    _torchrun("max_restarts", WORLD, "N", "Restarts of all workers the job may spend [0]."),
    _own("spares", WORLD, "N", "Hosts that may wait beyond MAX [any number]."),
    _own("max_recoveries", WORLD, "N", "Recoveries in which processes live on [any number]."),
    _own("replace_timeout", WORLD, "S", "Seconds a lost host's place is kept for a new one."),
    _own("pause_timeout", WORLD, "S", "Seconds a survivor has to leave its step [30]."),
    _own("beat_timeout", WORLD, "S", "Seconds a worker may be frozen; 0: for ever [2]."),
    _own("hang_timeout", WORLD, "S", "Seconds a rank may stand still; 0: for ever [2]."),
    _own("compare_replicas", WORLD, "N", "Steps between comparisons of replicas; 0: none [0]."),
    _own("check_gradients", WORLD, "HOW", "Odd gradient norms: none, report or stop [none]."),
    _torchrun("node_rank", WORLD, "N", "This host's place in the order of ranks."),
    _torchrun("role", WORLD, "NAME", "Role of the workers, in log prefixes [default]."),
    Option(
        name="rdzv_id",
        section=MEETING,
        metavar="TEXT",
        help="Id that all hosts of the job share.",
        aliases=("job_id",),
        env="PET_RDZV_ID",
    ),
    _torchrun("rdzv_backend", MEETING, "NAME", "etcd, c10d or static [see docs/torchrun.md]."),
    _torchrun("rdzv_endpoint", MEETING, "HOST[:PORT]", "Where hosts meet; etcd: a comma list."),
    _torchrun("rdzv_conf", MEETING, "K=V,...", "Times and settings; may be given repeatedly."),
    _torchrun("standalone", MEETING, "", "This host alone, with an etcd of its own."),
    _torchrun("master_addr", MEETING, "HOST", "static: address of the first host."),
    _torchrun("master_port", MEETING, "PORT", "static: its port [29500]."),
    _torchrun("local_addr", MEETING, "HOST", "Address that this host publishes."),
    _own("etcd_ca", MEETING, "FILE", "Certificate authority of etcd."),
    _own("etcd_cert", MEETING, "FILE", "This client's certificate for etcd."),
    _own("etcd_key", MEETING, "FILE", "Its private key."),
    _own("etcd_password_file", MEETING, "FILE", "Password of FRUN_ETCD_USER."),
    _torchrun("module", WORKERS, "", "SCRIPT is a module, as in python -m.", short="-m"),
    _torchrun("no_python", WORKERS, "", "SCRIPT is a program, executed itself."),
    _torchrun("run_path", WORKERS, "", "Run SCRIPT with runpy in a forked child."),
    _torchrun("start_method", WORKERS, "HOW", "fork, forkserver: from the zygote; spawn: exec."),
    _own("preload", WORKERS, "MODULES", "Import these once per host, before forking."),
    _torchrun("monitor_interval", WORKERS, "S", "Accepted; exits are seen at once anyway [0.1]."),
    _torchrun("signals_to_handle", WORKERS, "NAMES", "Signals passed on to workers."),
    _torchrun("shutdown_timeout", WORKERS, "S", "Seconds from soft signal to SIGKILL [30]."),
    _torchrun("virtual_local_rank", WORKERS, "", "LOCAL_RANK 0 and one device for each worker."),
    _torchrun("numa_binding", WORKERS, "MODE", "node, socket, exclusive or core-complex."),
    _torchrun("log_dir", LOGS, "DIR", "Base folder of logs and error files."),
    _torchrun("redirects", LOGS, "0..3|MAP", "Streams to files: 1 stdout, 2 stderr, 3 both.", "-r"),
    _torchrun("tee", LOGS, "0..3|MAP", "Streams to files and to the console.", "-t"),
    _torchrun("local_ranks_filter", LOGS, "RANKS", "Local ranks shown on the console [all]."),
    _torchrun("duplicate_stdout_filters", LOGS, "WORDS", "Copy matching lines to one file."),
    _torchrun("duplicate_stderr_filters", LOGS, "WORDS", "The same for stderr."),
    _torchrun("logs_specs", LOGS, "NAME", "default; other classes are refused."),
    _torchrun("event_log_handler", LOGS, "NAME", "null, console or dynamic_rendezvous [null]."),
    Option(
        name="config",
        section=GENERAL,
        metavar="FILE",
        help="YAML file with values for flags.",
        env="FRUN_CONFIG",
        own=True,
        in_file=False,
    ),
    _own("device_checks", GENERAL, "NAMES", "Checks of its devices: a list, or none [all]."),
    _own("fault_patterns", LOGS, "FILE", "YAML table of lines that tell the class of a fault."),
    _own("allow_drills", GENERAL, "", "Let frun inject-fault and frun drill break this job."),
    _own("metrics_port", GENERAL, "PORT", "Serve Prometheus metrics of this agent there."),
    _own("state_dir", GENERAL, "DIR", "Folder of this machine's registry of jobs."),
    Option(name="help", section=GENERAL, help="Show this.", short="-h", in_file=False),
    Option(name="version", section=GENERAL, help="Show the version.", own=True, in_file=False),
)
BY_NAME = {option.name: option for option in OPTIONS}
_BY_SPELLING = {spelling: option for option in OPTIONS for spelling in option.spellings}
_BY_SHORT = {option.short: option for option in OPTIONS if option.short}


def match(word: str) -> Option:
    """Return the option that a long spelling or its unique beginning means.

    Raises:
        UsageError: none fits, or several do; the text names them.
    """
    exact = _BY_SPELLING.get(word)
    if exact is not None:
        return exact
    found = {o.name: o for s, o in _BY_SPELLING.items() if s.startswith(word)}
    theirs = [option for option in found.values() if not option.own]
    candidates = theirs or list(found.values())
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        names = ", ".join(option.flag for option in candidates)
        raise UsageError(f"{word} is ambiguous, it could be {names}")
    raise UsageError(f"no such flag: {word}{nearest(word, _BY_SPELLING)}")


def normalise(tokens: Sequence[str]) -> list[str]:
    """Spell out every flag before the script as `--name` or `--name=value`, then `--`.

    The script and all that follows are copied untouched.

    Raises:
        UsageError: a flag is unknown, ambiguous, lacks its value or has one it can not take.
    """
    flags: list[str] = []
    rest = list(tokens)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        token = rest.pop(0)
        if token == "--":
            break
        if token.startswith("--"):
            word, equals, value = token.partition("=")
            flags.append(_spelled(match(word), word, value if equals else None, rest))
        else:
            flags += _short(token, rest)
    return [*flags, "--", *rest]


def _short(token: str, rest: list[str]) -> list[str]:
    flags: list[str] = []
    letters = token[1:]
    while letters:
        option = _BY_SHORT.get(f"-{letters[0]}")
        if option is None:
            raise UsageError(f"no such flag: -{letters[0]} (in {token!r})")
        letters = letters[1:]
        if not option.switch:
            value = letters.removeprefix("=") if letters else None
            return [*flags, _spelled(option, option.short, value, rest)]
        flags.append(option.flag)
    return flags


def _spelled(option: Option, word: str, value: str | None, rest: list[str]) -> str:
    if option.switch:
        if value is not None:
            raise UsageError(f"{option.flag} takes no value, but {value!r} was given")
        return option.flag
    if value is None:
        if not rest:
            raise UsageError(f"{word} needs a value, and nothing follows it")
        if _looks_like_a_flag(rest[0]):
            raise UsageError(
                f"{word} needs a value, but {rest[0]!r} follows; "
                f"if that is the value write {word}={rest[0]}"
            )
        value = rest.pop(0)
    return f"{option.flag}={value}"


def _looks_like_a_flag(token: str) -> bool:
    if not token.startswith("-") or token == "-" or " " in token:
        return False
    return re.fullmatch(r"-\d+|-\d*\.\d+", token) is None
