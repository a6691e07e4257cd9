"""Who campaigns when nobody leads. Pure.

If all hosts campaigned at once the winner would be known only when etcd had refused all others, which at
thousands of hosts takes longer than everything that follows.
"""

from frun.protocol.records import RankTable

_FIRST = 8
"""Places that campaign at once; as few hosts as these never wait."""
_TURN_S = 0.05
"""A candidate's head start; the others see its key within it."""


def waits_s(table: RankTable | None, host: str) -> float:
    """Return how long a host lets others campaign first, in seconds from when it saw that nobody leads.

    The first eight places do at once, the next eight one turn later, then twice as many with each turn, and
    spares last. So the loss of any number of hosts delays the next leader by half a second at most.
    """
    if table is None:
        return 0.0
    place = table.slot_of(host)
    at = len(table.slots) if place is None else place[0]
    return _TURN_S * (at // _FIRST).bit_length()
