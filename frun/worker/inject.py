"""Makes `init_process_group()` of the user's script meet in the group store of the generation.

Owns the change to torch's rendezvous: `env://` at the agent's own address goes to the group store,
every other address works as without a launcher. torch is not imported here: if it is not yet
imported, the change waits for the import. Leaves to others: what the store does
(`frun.worker.groupstore`) and who calls `install` (the zygote, in the forked worker).
"""

import importlib.abc
import importlib.machinery
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from types import ModuleType
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlparse

if TYPE_CHECKING:
    from frun.worker.groupstore import Connections, GroupStore

_MODULE = "torch.distributed.rendezvous"
_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
_MEETING = "frun/meeting/"

Meeting = tuple[Any, int, int]


@dataclass(slots=True, kw_only=True)
class Rendezvous:
    """Where this worker's process groups meet. One per process."""

    path: str
    """The agent's unix socket."""
    generation: int
    """Set it to meet in the store of a newer generation from now on."""
    master_addr: str
    master_port: str
    holds_port: bool
    """The agent serves a TCPStore there, so no worker may try to."""
    env: MutableMapping[str, str]
    stores: "list[GroupStore]" = field(default_factory=list)
    """Every store given to torch: its C++ threads keep only the C++ half alive."""
    connections: "Connections | None" = None
    meeting: Callable[[], None] = lambda: None
    """Called before each meeting in the agent's store."""

    def store(self, rank: int, world_size: int, timeout: timedelta) -> "GroupStore":
        """Return a store in which the ranks that meet for the same time find each other.

        The n-th meeting of a rank in a world of this size is with the other ranks' n-th, so a
        second `init_process_group` in one generation never sees the first one's keys.
        """
        from frun.worker.groupstore import Connections, GroupStore

        if self.connections is None:
            self.connections = Connections(self.path)
        counter = GroupStore(self.path, self.generation, connections=self.connections)
        number = counter.add(f"{_MEETING}{world_size}/{rank}", 1)
        store = GroupStore(
            self.path,
            self.generation,
            scope=f"{world_size}.{number}/",
            timeout=timeout,
            connections=self.connections,
        )
        self.stores.append(store)
        return store

    def forget_stores(self, generation: int) -> None:
        """Drop stores older than those of this generation: no group that could use them is left."""
        self.stores = [store for store in self.stores if store.generation >= generation]

    def is_agents(self, host: str, port: int) -> bool:
        """Tell whether this is the address that the agent gave to the workers."""
        if str(port) != self.master_port:
            return False
        return host == self.master_addr or not _addresses(host).isdisjoint(
            _addresses(self.master_addr)
        )

    def patch(self, torch_rendezvous: ModuleType) -> None:
        """Put this into torch's rendezvous module."""
        handlers: dict[str, Callable[..., Iterator[Meeting]]]
        handlers = torch_rendezvous._rendezvous_handlers
        torch_env = handlers["env"]
        torch_create = torch_rendezvous._create_c10d_store
        torch_use_agent_store = torch_rendezvous._torchelastic_use_agent_store
        asked = threading.local()

        def meet(url: str, timeout: timedelta | None = None, **kwargs: Any) -> Iterator[Meeting]:
            """Yield (store, rank, world size) as torch's own handler does."""
            if timeout is None:
                timeout = torch_rendezvous.default_pg_timeout
            if not self._is_ours():
                yield from torch_env(url, timeout=timeout, **kwargs)
                return
            self.meeting()
            query = dict(parse_qsl(urlparse(url).query))
            rank = self._number(query, "rank")
            world_size = self._number(query, "world_size")
            yield self.store(rank, world_size, timeout), rank, world_size
            raise RuntimeError("env:// can not meet again with the same configuration")

        def create(hostname: str, port: int, *args: Any, **kwargs: Any) -> Any:
            """Build a TCPStore; rank 0 hosts it unless the agent does at this very address."""
            asked.at_agents = self.holds_port and self.is_agents(hostname, port)
            try:
                return torch_create(hostname, port, *args, **kwargs)
            finally:
                del asked.at_agents

        def use_agent_store() -> bool:
            """Answer for the address that is being asked for, not for the whole process."""
            return bool(getattr(asked, "at_agents", False)) or (
                not hasattr(asked, "at_agents") and torch_use_agent_store()
            )

        handlers["env"] = meet
        torch_rendezvous._create_c10d_store = create  # type: ignore[attr-defined]
        torch_rendezvous._torchelastic_use_agent_store = use_agent_store  # type: ignore[attr-defined]

    def _is_ours(self) -> bool:
        """Tell whether MASTER_ADDR and MASTER_PORT still name the agent's store."""
        port = self.env.get("MASTER_PORT", "")
        return port.isdecimal() and self.is_agents(self.env.get("MASTER_ADDR", ""), int(port))

    def _number(self, query: dict[str, str], name: str) -> int:
        text = query.get(name) or self.env.get(name.upper())
        if not text:
            raise ValueError(
                "Error initializing torch.distributed using env:// rendezvous: "
                f"environment variable {name.upper()} expected, but not set"
            )
        return int(text)


def install(env: MutableMapping[str, str] | None = None) -> Rendezvous | None:
    """Let groups of this process meet in the group store that `env` names; None if it names none.

    Reads FRUN_STORE, FRUN_GENERATION, MASTER_ADDR and MASTER_PORT now; RANK and WORLD_SIZE at each
    rendezvous, so a script may change them. `env` should be `os.environ` itself.
    """
    if env is None:
        env = os.environ
    path = env.get("FRUN_STORE", "")
    if not path:
        return None
    rendezvous = Rendezvous(
        path=path,
        generation=int(env.get("FRUN_GENERATION", "0")),
        master_addr=env.get("MASTER_ADDR", ""),
        master_port=env.get("MASTER_PORT", ""),
        holds_port=env.get(_AGENT_STORE) == str(True),
        env=env,
    )
    module = sys.modules.get(_MODULE)
    if module is not None:
        rendezvous.patch(module)
    else:
        sys.meta_path.insert(0, _AfterImport(rendezvous.patch))
    return rendezvous


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function with torch's rendezvous module right after it was imported, once."""

    def __init__(self, then: Callable[[ModuleType], None]) -> None:
        self._then = then

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        """Find the module as the others would, with a loader that calls the function."""
        if fullname != _MODULE:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _Loader(spec.loader, self, self._then)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    """Loads with another loader, gets out of the way, and calls a function with the module."""

    def __init__(
        self,
        inner: importlib.abc.Loader,
        finder: _AfterImport,
        then: Callable[[ModuleType], None],
    ) -> None:
        self._inner = inner
        self._finder = finder
        self._then = then

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """Create the module as the real loader does."""
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module, then the function."""
        module.__loader__ = self._inner
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        self._inner.exec_module(module)
        self._then(module)


def _addresses(host: str) -> set[str]:
    try:
        return {str(info[4][0]) for info in socket.getaddrinfo(host, None)} if host else set()
    except OSError:
        return set()
