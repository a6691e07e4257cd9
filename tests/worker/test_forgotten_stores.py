"""Stores of generations that are over do not pile up in a survivor."""

from datetime import timedelta

from frun.worker.groupstore import GroupStore
from frun.worker.inject import Rendezvous


def test_stores_of_old_generations_go() -> None:
    """Those of the given generation stay, since threads of it may still be on their way out."""
    rendezvous = Rendezvous(
        path="", generation=3, master_addr="", master_port="", holds_port=False, env={}
    )
    for generation in (1, 2, 2, 3):
        store = GroupStore("", generation, timeout=timedelta(seconds=1))
        rendezvous.stores.append(store)
    rendezvous.forget_stores(2)
    assert [store.generation for store in rendezvous.stores] == [2, 2, 3]
