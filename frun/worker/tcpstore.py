"""The process that serves torch's own TCPStore at MASTER_PORT, on a socket that the agent bound.

Owns nothing but that server. It ends when it is killed: by the agent at the end of the generation,
or with the zygote that forked it.
"""

import os
import signal
import socket
from collections.abc import Sequence
from datetime import timedelta

_CONNECT_S = 60
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Where to reach a socket that listens on all interfaces from its own machine."""


def serve(fds: Sequence[int], args: Sequence[str] = ()) -> None:
    """Serve a TCPStore on the listening socket `fds[0]` until this process is killed.

    `args` is not used. The server's own client connects through loopback, since torch opens one in
    the process that serves; it waits for no worker and counts none.
    """
    del args
    from torch._C._distributed_c10d import TCPStore

    with socket.socket(fileno=os.dup(fds[0])) as sock:
        bound, port = sock.getsockname()[:2]
    store = TCPStore(
        _LOOPBACK.get(bound, bound),
        port,
        None,
        is_master=True,
        timeout=timedelta(seconds=_CONNECT_S),
        wait_for_workers=False,
        master_listen_fd=fds[0],
        use_libuv=True,
    )
    while store.port:  # a signal that has a handler ends a pause
        signal.pause()
