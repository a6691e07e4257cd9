"""What a worker runs: `__main__`, `sys.argv` and `sys.path` as plain python has them at the first line.

Owns the way from the zygote's bottom frame into the script, and how an exception that leaves it is shown.
The process around it is `bootstrap`'s.
"""

import functools
import io
import os
import pkgutil
import runpy
import sys
from collections.abc import Callable
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from types import CodeType, ModuleType, TracebackType

from frun.worker.bootstrap import Launch, absolute, plain_environment, told

_OF_ANY_MAIN = ("__builtins__", "__doc__", "__loader__", "__package__", "__spec__")


def enter(launch: Launch) -> Callable[[], object]:
    """Make `__main__`, `sys.argv` and `sys.path` what they are at a script's first line.

    Return what runs the script. It has no Python frame of its own, so that nothing of frun is in the
    script's stack.
    """
    # A new module: what was frozen in the zygote is never collected, and the script's names would be
    # kept by it.
    first = sys.modules["__main__"].__dict__
    module = sys.modules["__main__"] = ModuleType("__main__")
    main = module.__dict__
    main.update({name: first[name] for name in _OF_ANY_MAIN})
    if "__annotations__" in first:
        main["__annotations__"] = {}
    sys.orig_argv = launch.command()
    is_module = launch.mode == "module"
    sys.argv = ["-m" if is_module else launch.entry, *launch.args]
    if launch.folder is not None:
        sys.path.insert(0, launch.folder)
    if is_module or launch.is_folder:
        name = launch.entry if is_module else "__main__"
        run = runpy._run_module_as_main  # type: ignore[attr-defined]
        return functools.partial(run, name, is_module)
    path = absolute(launch.entry)
    try:
        code, compiled = _compile(path)
    except (SyntaxError, ValueError, OSError):
        # Python says it best, and says it with the file at hand.
        os.execvpe(launch.python, launch.command(), plain_environment(launch))
    loader = SourcelessFileLoader if compiled else SourceFileLoader
    main["__loader__"] = loader("__main__", path)
    main["__file__"] = path
    if sys.version_info < (3, 15):
        main["__cached__"] = None
    return functools.partial(exec, code, main)


def _compile(path: str) -> tuple[CodeType, bool]:
    """Return the script's code, and whether it was compiled already."""
    with io.open_code(path) as file:
        code = pkgutil.read_code(file)
    if code is not None:
        return code, True
    with io.open_code(path) as file:
        return compile(file.read(), path, "exec", dont_inherit=True), False


def hide_frames() -> None:
    """Let the exception that is leaving the script be shown without the frames below the script.

    Called at the bottom of the stack while the exception passes. The interpreter then calls the
    excepthook itself and so does all the rest as always: exit status, SIGINT, errors in the hook.
    """
    if isinstance(sys.exc_info()[1], SystemExit):
        return
    hook = getattr(sys, "excepthook", None)

    def once(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        error.__traceback__ = sys.last_traceback = trace and trace.tb_next
        for tell in told:
            tell(error, error.__traceback__)
        if hook is None:
            del sys.excepthook
            sys.stderr.write("sys.excepthook is missing\n")
            sys.__excepthook__(kind, error, error.__traceback__)
            return
        sys.excepthook = hook
        try:
            hook(kind, error, error.__traceback__)
        except BaseException as second:
            if second.__traceback__ is not None:
                second.__traceback__ = second.__traceback__.tb_next
            raise

    sys.excepthook = once
