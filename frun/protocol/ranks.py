"""Who gets which ranks. Ranks are stable: a replacement takes the place of what it replaces.

The order of a new world is one documented rule: hosts with an explicit --node-rank first, by it; then by
name in natural order (`node2` before `node10`), then by address, then by who came first.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from frun.protocol.records import HostRecord, Slot, View

_DIGITS = re.compile(r"([0-9]+)")


def natural(text: str) -> tuple[tuple[tuple[int, int, str], ...], str]:
    """Return a sort key in which runs of digits compare as numbers; the text decides between equals."""
    parts = tuple(
        (0, int(part), "") if part.isascii() and part.isdecimal() else (1, 0, part)
        for part in _DIGITS.split(text)
        if part
    )
    return parts, text


def order(hosts: Iterable[HostRecord], joined: Mapping[str, int]) -> list[HostRecord]:
    """Return hosts in the order in which they get ranks."""

    def key(host: HostRecord) -> tuple[object, ...]:
        given = (0, host.node_rank) if host.node_rank is not None else (1, 0)
        return (given, natural(host.name), natural(host.address), joined.get(host.host, 0))

    return sorted(hosts, key=key)


def waiting(view: View, slots: Sequence[Slot], without: Collection[str] = ()) -> list[HostRecord]:
    """Return live hosts that are in no slot and fit for work, leaving out the hosts `without`.

    Those of which nothing is known to be wrong come first, of them the earliest.
    """
    out = {slot.host for slot in slots}.union(without, unfit(view.hosts))
    free = [host for host in view.hosts.values() if host.host not in out]
    return sorted(
        free, key=lambda host: (bool(host.health), view.joined.get(host.host, 0), host.host)
    )


def unfit(hosts: Mapping[str, HostRecord]) -> frozenset[str]:
    """Return the hosts that count for nothing as long as a device of theirs, or they, are of no use.

    None where all are so: there a sick host is better than none, and its workers' failures decide.
    """
    sick = frozenset(name for name, host in hosts.items() if host.health and host.unfit)
    return sick if len(sick) < len(hosts) else frozenset()


def is_surplus(joined: Mapping[str, int], host: str, wanted: int) -> bool:
    """Return True when at least `wanted` hosts came before this one, by `joined` (create revisions)."""
    mine = joined[host]
    return sum(1 for revision in joined.values() if revision < mine) >= wanted


def seat(host: HostRecord) -> Slot:
    """Return a slot for a host, not yet numbered."""
    return Slot(
        host=host.host, address=host.address, port=host.port, first_rank=0, nproc=host.nproc
    )


def vacate(slots: Sequence[Slot], lost: Iterable[str]) -> tuple[Slot, ...]:
    """Return the slots with those of lost hosts empty; their ranks stay reserved."""
    gone = set(lost)
    return tuple(
        replace(slot, host="", address="", port=0, incarnations=()) if slot.host in gone else slot
        for slot in slots
    )


def fill(slots: Sequence[Slot], spares: Sequence[HostRecord]) -> tuple[Slot, ...]:
    """Return the slots with vacant ones taken by spares, as far as they go.

    A spare with the slot's own number of workers is preferred, since then no rank moves.
    """
    left = list(spares)
    vacant = [index for index, slot in enumerate(slots) if not slot.host]
    taken: dict[int, HostRecord] = {}
    for index in vacant:
        fitting = next((spare for spare in left if spare.nproc == slots[index].nproc), None)
        if fitting is not None:
            left.remove(fitting)
            taken[index] = fitting
    taken |= zip((index for index in vacant if index not in taken), left, strict=False)
    return tuple(
        replace(seat(taken[index]), first_rank=slot.first_rank) if index in taken else slot
        for index, slot in enumerate(slots)
    )


def is_full(slots: Sequence[Slot]) -> bool:
    """Return True when no slot is vacant."""
    return all(slot.host for slot in slots)


Kept = Mapping[tuple[str, int], int]
"""Processes that go on: (host, local rank) to the generation in which the process was started."""


def number(slots: Sequence[Slot], generation: int, kept: Kept | None = None) -> tuple[Slot, ...]:
    """Return the slots with dense ranks; every worker that is not kept starts in `generation`."""
    kept = kept or {}
    numbered = []
    first = 0
    for slot in slots:
        incarnations = tuple(
            kept.get((slot.host, local_rank), generation) for local_rank in range(slot.nproc)
        )
        same = slot.first_rank == first and slot.incarnations == incarnations
        # The same object where nothing changed: of thousands of slots most are compared and copied no more.
        numbered.append(
            slot if same else replace(slot, first_rank=first, incarnations=incarnations)
        )
        first += slot.nproc
    return tuple(numbered)


def mark(slots: Sequence[Slot], kept: Kept) -> tuple[Slot, ...]:
    """Return the slots of an incomplete world, ranks as they are, with the processes that go on.

    On a host with such processes a local rank that is not kept has 0; other hosts have none marked.
    """
    marked = []
    for slot in slots:
        incarnations = tuple(kept.get((slot.host, n), 0) for n in range(slot.nproc))
        marked.append(replace(slot, incarnations=incarnations if any(incarnations) else ()))
    return tuple(marked)
