"""Tests of frun."""

import os
import signal

# Tests fork the process that runs them. gRPC's own handlers crash in such a child when one of its threads is
# at work, which another test may have left; frun itself never forks a process that uses gRPC.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

# A shell starts what runs in its background with these two ignored, and what is tested would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)
