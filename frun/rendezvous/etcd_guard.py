"""A small program that owns one etcd process and its folder, and outlives the agent to remove both.

Run as `python -I -S etcd_guard.py FOLDER ETCD ARGS...` with a pipe as standard input: it makes the
folder, starts etcd in it, and starts it again for every byte that arrives. At the end of the pipe,
however the agent ended, it kills etcd, removes the folder and exits. Each end of etcd is told on
standard output as a line that says how. It imports little: its start is a part of the job's.
"""

import os
import select
import signal
import sys

_PR_SET_PDEATHSIG = 1
_LOG = "log"


def main(argv: list[str]) -> int:
    """Serve until standard input ends."""
    folder, command = argv[0], argv[1:]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        # The agent decides when it is over; a signal to all of a session must not come first.
        signal.signal(number, signal.SIG_IGN)
    try:
        os.makedirs(folder, 0o700, exist_ok=True)
    except OSError as error:
        _tell(f"cannot make its folder {folder}: {error.strerror}")
        return 1
    try:
        _serve(folder, command)
    finally:
        import shutil

        shutil.rmtree(folder, ignore_errors=True)
    return 0


def _serve(folder: str, command: list[str]) -> None:
    pid = _start(folder, command)
    watched = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(0, select.POLLIN)
    poll.register(watched, select.POLLIN)
    alive = True
    while True:
        ready = {fd for fd, _ in poll.poll()}
        if alive and watched in ready:
            alive = False
            poll.unregister(watched)
            os.close(watched)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            _tell(f"signal {-status}" if status < 0 else f"exit status {status}")
        if 0 in ready:
            if not os.read(0, 1):
                break
            if not alive:
                pid = _start(folder, command)
                watched = os.pidfd_open(pid)
                poll.register(watched, select.POLLIN)
                alive = True
    if alive:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _start(folder: str, command: list[str]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        _die_with_guard()
        os.chdir(folder)
        log = os.open(_LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.execv(command[0], command)
    except OSError as error:
        os.write(2, f"cannot start {command[0]}: {error.strerror}\n".encode())
    finally:
        os._exit(127)


def _die_with_guard() -> None:
    """A guard that is itself killed takes etcd along (the folder then stays)."""
    import ctypes

    guard = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != guard:
        os._exit(127)


def _tell(text: str) -> None:
    try:
        os.write(1, text.encode() + b"\n")
    except OSError:  # the agent is gone: the end of the pipe follows
        return


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
