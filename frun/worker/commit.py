"""Agreement of all ranks that an update is made: all make it, or none does.

Where each rank holds a part of the state, one rank's update is of no use without those of the others, and a
part can't be copied from a rank that holds another one. So no rank begins an update before all stand
before it, and who was cut off while it waited learns what became of that: the word stands in the group
store, which outlives workers, and the first one to write it decides. Owns this conversation; when it is
held is `updates`'.
"""

import threading

from torch.distributed import DistNetworkError, DistStoreError

from frun.worker.groupstore import GenerationEnded, GroupStore

_GO, _STOP = b"go", b"stop"


class Commit:
    """The updates of one generation. The main thread asks, the side thread ends its waiting."""

    def __init__(self, store: GroupStore, world_size: int) -> None:
        """`store` is for this alone, and its time-out is how long one look for the others lasts."""
        self._store = store
        self._world_size = world_size
        self._number = 0
        """Of updates in this generation that this rank stood before."""
        self._waits = False
        self._lock = threading.Lock()

    def reached(self) -> bool:
        """Stand before an update; True when all ranks do, False when this generation will not make it.

        Called once for each update, by all ranks.
        """
        self._number += 1
        with self._lock:
            self._waits = True
        try:
            return self._word() == _GO
        finally:
            with self._lock:
                self._waits = False

    def settle(self) -> None:
        """The generation is over: let this rank's waiting end with what was decided, or decide now."""
        with self._lock:
            if self._waits:
                self._write(_STOP)

    def _word(self) -> bytes:
        try:
            if self._store.add("reached", 1) == self._number * self._world_size:
                word = self._write(_GO)
                # All have gone on from the update before, since they stand before this one.
                self._store.delete_key(str(self._number - 1))
                return word
            return self._wait()
        except GenerationEnded:
            return self._write(_STOP)
        except DistNetworkError:
            return _STOP

    def _wait(self) -> bytes:
        while True:
            try:
                return self._store.get(str(self._number))
            except DistStoreError:
                continue  # somebody is slow; a pause ends this

    def _write(self, word: bytes) -> bytes:
        """Write the word on this update unless one stands there; return the one that does.

        A word that is lost with its host is `stop`: who has made the update then stands alone, and the state
        of its step is lost with those who have not.
        """
        for attempt in (word, _STOP):
            try:
                return self._store.compare_set(str(self._number), b"", attempt)
            except GenerationEnded:
                continue  # the answer was cut off, not the writing: ask again
            except (DistNetworkError, DistStoreError):
                break
        return _STOP
