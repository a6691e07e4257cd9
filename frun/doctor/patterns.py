"""Whether a user's table of patterns can be used."""

from frun import fault_patterns
from frun.doctor.findings import Finding, failure, ok
from frun.errors import UsageError


def check(path: str) -> Finding:
    """Read the file of --fault-patterns as a job would; what is wrong with it is one line."""
    try:
        own = len(fault_patterns.load(path)) - len(fault_patterns.load(None))
    except UsageError as error:
        return failure("patterns", str(error))
    return ok("patterns", f"{own} of {path}, before those of frun")
