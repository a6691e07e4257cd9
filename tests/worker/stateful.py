"""Objects with a state, and bit-for-bit comparison of states."""

import ctypes
from typing import Any

import torch

from frun.protocol.restore import Plan, RankState, plan


class Holder:
    """Holds any nested state; takes one by putting it in place of its own."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        """Return the state itself."""
        return self.state

    def load_state_dict(self, state: Any) -> None:
        """Take a state."""
        self.state = state


class Untouchable:
    """Must not be asked for anything."""

    def state_dict(self) -> Any:
        """Fail."""
        raise AssertionError("a rank that keeps its state was asked for it")

    def load_state_dict(self, state: Any) -> None:
        """Fail."""
        raise AssertionError("a rank that keeps its state was given one")


def bits(value: Any) -> Any:
    """Return a nested state with each tensor as its dtype, shape and bytes, so that == is exact."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        return (
            str(value.dtype),
            tuple(value.shape),
            flat.nbytes and ctypes.string_at(flat.data_ptr(), flat.nbytes),
        )
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [bits(item) for item in value]
    return value


def planned(world: int, *new: int) -> Plan:
    """Return the plan in which these ranks are newcomers and the others have the state of step 3."""
    result = plan(
        RankState(rank=rank, host="a", step=0 if rank in new else 3, has_state=rank not in new)
        for rank in range(world)
    )
    assert isinstance(result, Plan)
    return result
