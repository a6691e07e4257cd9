"""frun launches distributed PyTorch training and keeps it alive when parts of it die.

In a training script: `frun.resumable` and `frun.Session`.
"""

from typing import TYPE_CHECKING, Any

from frun.version import __version__ as __version__

if TYPE_CHECKING:
    from frun.worker.resumable import resumable as resumable
    from frun.worker.session import Session as Session


def __getattr__(name: str) -> Any:
    """Import what needs torch when it is first asked for: the launcher never does."""
    if name == "resumable":
        from frun.worker.resumable import resumable

        return resumable
    if name == "Session":
        from frun.worker.session import Session

        return Session
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
