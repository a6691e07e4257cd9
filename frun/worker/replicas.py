"""Compares what replicas hold, every so many steps: corrupted memory shows in nothing else.

Owns the digest of the parameters and the count of equal ones in the group store. Each rank counts itself in
when it has made the update, and looks one step later, when all have. What a count means is
`protocol.replicas`' to say.
"""

import logging
from collections.abc import Iterable, Sequence

import torch
from torch.distributed import DistNetworkError, DistStoreError

from frun.protocol import replicas
from frun.protocol.channel import Diverged
from frun.worker.fingerprint import combined, fingerprint
from frun.worker.groupstore import GroupStore
from frun.worker.runtime import Runtime
from frun.worker.shards import local
from frun.worker.state import Stateful

logger = logging.getLogger(__name__)

_SCOPE = "frun/replicas/"
"""Prefix of the keys in the group store."""


class Replicas:
    """One rank's part in the comparison. Main thread only."""

    def __init__(self, runtime: Runtime | None) -> None:
        """`runtime` says how often, and tells the agent; None where frun did not start this process."""
        self.diverged = False
        """This rank holds something else than most of its replicas: it is nobody's donor."""
        self._runtime = runtime
        self._store: GroupStore | None = None
        self._part = ""
        self._ranks: Sequence[int] = ()
        self._tensors: list[torch.Tensor] = []
        self._counted: tuple[int, str] | None = None
        """Step and digest of which the outcome is not known."""
        self._old: list[str] = []
        """Keys of the last count."""
        self._undecided = False
        """That replicas differ and none is right was said."""

    def begin(self, part: str, ranks: Sequence[int], objects: Iterable[Stateful]) -> None:
        """Begin a generation in which these ranks, this one too, hold the same part of the state."""
        self.diverged, self._counted, self._old = False, None, []
        self._undecided = False
        self._part, self._ranks = part, ranks
        self._tensors = [
            local(each).detach()
            for stateful in objects
            if isinstance(stateful, torch.nn.Module)
            for each in stateful.parameters()
        ]
        wanted = self._runtime is not None and self._runtime.compare_every and len(ranks) > 1
        self._store = self._runtime.store_of(_SCOPE) if self._runtime and wanted else None

    def completed(self, rank: int, step: int) -> None:
        """Take part after an update, if it is time."""
        if self._store is None or self._runtime is None:
            return
        try:
            if self._counted is not None:
                counted, self._counted = self._counted, None
                self._look(self._store, rank, *counted)
            if step % self._runtime.compare_every == 0:
                self._count(self._store, step)
        except (DistNetworkError, DistStoreError) as error:
            # A host is gone or the generation is over: the next one compares again.
            logger.debug("replicas were not compared at step %d: %s", step, error)
            self._counted = None

    def digest(self) -> str:
        """Return what equal parameters have in common."""
        found = [fingerprint(each.contiguous()) for each in self._tensors]
        return combined(torch.tensor(found, dtype=torch.int64))

    def _count(self, store: GroupStore, step: int) -> None:
        digest, majority, number = self.digest(), self._key(step), len(self._ranks)
        count = store.add(f"{majority}/{digest}", 1)
        if replicas.is_majority(count, number) and not replicas.is_majority(count - 1, number):
            store.set(majority, digest)
        self._counted = step, digest
        self._old, old = [majority, f"{majority}/all", f"{majority}/{digest}"], self._old
        if store.add(f"{majority}/all", 1) < number:
            return
        if not store.check([majority]) and not self._undecided:
            self._undecided = True
            self._tell(-1, replicas.undecided(number, self._part, step))
        # Everybody has looked at the last count before coming here.
        for key in old:
            store.delete_key(key)

    def _look(self, store: GroupStore, rank: int, step: int, digest: str) -> None:
        majority = self._key(step)
        other = store.check([majority]) and store.get(majority).decode() != digest
        told, self.diverged = self.diverged, other
        if other and not told:
            self._tell(rank, replicas.odd_one(rank, self._part, step))

    def _tell(self, rank: int, reason: str) -> None:
        logger.warning("frun: %s", reason)
        if self._runtime is not None:
            self._runtime.tell(
                Diverged(generation=self._runtime.generation, rank=rank, reason=reason)
            )

    def _key(self, step: int) -> str:
        return f"{self._part}/{step}"
