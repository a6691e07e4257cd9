"""What all threads of this process are doing, as text."""

import sys
import threading
import traceback

from frun.protocol.channel import MAX_TEXT


def text() -> str:
    """Return the stacks of all threads that run Python code, the main thread's first; not this one's."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main, own = threading.main_thread().ident, threading.get_ident()
    frames = {ident: frame for ident, frame in sys._current_frames().items() if ident != own}
    parts = [
        f"{names.get(ident, 'a thread that Python did not start')}:\n"
        + "".join(traceback.format_stack(frames[ident]))
        for ident in sorted(frames, key=lambda ident: ident != main)
        if not names.get(ident, "").startswith("frun-")
    ]
    return "\n".join(parts)[:MAX_TEXT]
