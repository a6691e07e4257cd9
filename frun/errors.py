"""The errors frun raises, by who must act. Foreign errors are mapped to these where they enter.

FrunError
+-- UsageError         the person who typed the command          exit 2
|   +-- JobRefused     this host does not fit the live job       exit 2
+-- LaunchError        the machine: no zygote, no log folder ... exit 1
+-- JobFailed          the user's code, or the cluster           exit 1
+-- StoreUnavailable   nobody yet: retry, bounded
|   +-- StoreRefused   the person who runs etcd (TLS, password)  exit 1
+-- StateMismatch      the script: its objects are not a replica's  exit 1
+-- OddNumber          the user: a loss is infinite             exit 1
+-- StateCorrupt       nobody yet: copy again
+-- LeaseLost          this host: register again or stop
+-- WireError          a document that frun can not read
+-- IllegalTransition  frun's authors
"""


class FrunError(Exception):
    """Base of everything frun raises on purpose; its text is one clear line for a person."""

    exit_code = 1


class UsageError(FrunError):
    """A flag, variable, file or value is wrong; the text names it and the fix."""

    exit_code = 2


class JobRefused(UsageError):
    """This host may not join the job; the text shows both values that disagree."""


class LaunchError(FrunError):
    """This machine could not start what the job needs (a process, a folder, a port)."""


class JobFailed(FrunError):
    """The job ended without success; a summary has been printed."""


class StoreUnavailable(FrunError):
    """etcd did not answer within the bound of one request. Retry, possibly elsewhere."""


class StoreRefused(StoreUnavailable):
    """etcd answered no: bad certificate, bad password, plain client on a TLS port. Do not retry."""


class StateMismatch(FrunError):
    """A rank's objects can't take the state of a replica; the text names object, path and both values."""

    frun_kind = "state_mismatch"


class OddNumber(FrunError):
    """A figure of the training is not as it should be, and the script asked to stop then."""


class StateCorrupt(FrunError):
    """A copied state is not the donor's, byte for byte. It must not be used."""


class StateLost(FrunError):
    """A part of the state exists on no live rank any more, so survivors can not go on from it."""

    frun_kind = "no_donor"


class LeaseLost(FrunError):
    """The lease is gone: what was written under it no longer exists."""


class WireError(FrunError):
    """A stored document or a message is not what its schema says; the text names the field."""


class IllegalTransition(FrunError):
    """An event arrived in a phase that does not know it: a bug in frun. State is unchanged."""
