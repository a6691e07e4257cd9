"""Whether replicas still hold the same, from how many of them hold the same as this one. Pure.

Each rank judges itself: who holds the same digest is counted in a store, and a digest that more than half of
the replicas hold is the right one. So nobody is accused by an answer that is late.
"""


def is_majority(count: int, replicas: int) -> bool:
    """Return whether so many of the replicas that hold the same are more than half of them."""
    return 2 * count > replicas


def odd_one(rank: int, part: str, step: int) -> str:
    """Say that a rank is the odd one."""
    return (
        f"rank {rank} holds other parameters{_of(part)} after step {step} than most of its replicas"
    )


def undecided(replicas: int, part: str, step: int) -> str:
    """Say that replicas differ and nobody knows who is right."""
    return (
        f"the {replicas} replicas{_of(part)} differ after step {step}, and no half of them agrees"
    )


def _of(part: str) -> str:
    return f" of {part!r}" if part else ""
