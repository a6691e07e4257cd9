"""How the ranks of a new generation agree on a step: what each says, and what all of them do.

Owns the conversation. The decision is `frun.protocol.restore`'s, the bytes are `copy`'s.
"""

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from frun.errors import StateLost, StateMismatch, UsageError
from frun.protocol.restore import (
    Keep,
    NoDonor,
    Plan,
    RankState,
    Receive,
    plan,
    ranks_in_words,
    strangers,
)
from frun.worker.batches import Position
from frun.worker.copy import CopyReport, transfer
from frun.worker.ddp import Layout
from frun.worker.state import Stateful

NAME = "frun"
"""Under which the session's own memory travels; not to be used for another object."""


@dataclass(slots=True, kw_only=True)
class Memory:
    """What all ranks know of the run beside the script's objects. Travels with them."""

    run: str = field(default_factory=lambda: secrets.token_hex(8))
    """Names this run of training: from the start of step 0 on."""
    seeds: dict[int, int] = field(default_factory=dict)
    """Per rank, what its random numbers follow from."""
    position: Position = field(default_factory=Position)
    """Of the last completed step."""
    layouts: tuple[tuple[int, Layout], ...] = ()
    """The buckets of DDP objects, in the order in which the script makes them."""

    def state_dict(self) -> dict[str, Any]:
        """Return everything as plain values."""
        position = (self.position.pass_, self.position.epoch, self.position.index)
        return {
            "run": self.run,
            "seeds": list(self.seeds.items()),
            "position": position,
            "layouts": self.layouts,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take everything from another rank."""
        pass_, epoch, index = state["position"]
        self.run = state["run"]
        self.seeds = dict(state["seeds"])
        self.position = Position(pass_=pass_, epoch=epoch, index=index)
        self.layouts = state["layouts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What a rank tells all others when they meet."""

    state: RankState
    run: str
    seed: int
    layouts: tuple[tuple[int, int], ...]
    """Of the layouts that it knows: the number of the DDP object, and from which step."""


def gather(said: Said) -> list[Said]:
    """Return what every rank says. Raises UsageError if they have not met."""
    if not is_met():
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise UsageError(
                "session.restore needs the default process group: call init_process_group before it"
            )
        return [said]
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, said)
    return everybody


def decide(everybody: list[Said], memory: Memory, generation: int) -> Plan:
    """Return what each rank does.

    Raises StateLost if the state exists nowhere, StateMismatch if ranks that are taken for replicas are none.

    Where nobody has a state, all begin the run that the first rank names. From the second generation
    on they take its state too: DDP objects then leave modules as they are, since a survivor's may be
    wrapped before `restore` is called.
    """
    pair = strangers(said.state for said in everybody)
    if pair is not None:
        raise StateMismatch(
            f"restore: ranks {pair[0]} and {pair[1]} hold different values and are taken for replicas of"
            " each other: set session.shard to a text that tells the parts of the state apart, before restore"
        )
    decided = plan(said.state for said in everybody)
    if isinstance(decided, NoDonor):
        raise StateLost(f"restore: {decided.reason}")
    if not any(said.state.has_state for said in everybody):
        memory.run = everybody[0].run
        memory.seeds = {said.state.rank: said.seed for said in everybody}
        if generation > 1:
            firsts: dict[str, int] = {}
            # One whose copy was cut may hold a part of that, if its objects are older than this entry.
            for said in sorted(everybody, key=lambda said: said.state.cut):
                firsts.setdefault(said.state.replica, said.state.rank)
            return Plan(
                target=0,
                actions=tuple(
                    Keep(rank=rank) if rank == first else Receive(rank=rank, donor=first)
                    for rank, first in ((s.state.rank, firsts[s.state.replica]) for s in everybody)
                ),
                reason="nobody has a state: all begin with that of "
                + ranks_in_words(list(firsts.values())),
            )
    return decided


def share_layouts(everybody: list[Said], memory: Memory) -> None:
    """Let all ranks with a state know the layouts that any of them knows.

    One may have rebuilt its buckets in a step that another had not begun. Newcomers get them with the copy.
    """
    known = [said.layouts for said in everybody if said.state.sound]
    if all(layouts == known[0] for layouts in known[1:]):
        return
    most = max(known, key=len)
    source = next(
        n for n, said in enumerate(everybody) if said.state.sound and said.layouts == most
    )
    box = [memory.layouts]
    dist.broadcast_object_list(box, src=source)
    memory.layouts = box[0]


def copy(
    decided: Plan, rank: int, objects: Mapping[str, Stateful], fault: Exception | None
) -> CopyReport:
    """Copy as planned. Raises StateMismatch and StateCorrupt on all ranks alike."""
    if is_met():
        return transfer(decided, rank, objects, fault=fault)
    if fault is not None:
        raise fault
    return CopyReport()


def is_met() -> bool:
    """Tell whether the default process group exists."""
    return dist.is_available() and dist.is_initialized()
