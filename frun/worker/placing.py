"""Gives objects a state: room for it, nonsense until it has come, and a check that they took it.

Owns everything that writes to the script's objects. What a state is made of is `state`'s.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from frun.errors import StateMismatch
from frun.worker import shards
from frun.worker.state import (
    Difference,
    Layout,
    Part,
    Place,
    State,
    Stateful,
    difference,
    independent,
    nested,
    pieces,
    region_of,
    take,
    take_part,
    unwrapped,
    write,
)

_SPARSE = 4096
_SPARSE_FROM = 16 * _SPARSE
"""Bytes."""


def destinations(donor: Layout, here: State) -> tuple[torch.Tensor, ...]:
    """Return where each tensor of the donor goes: the one that is here, or a new one.

    Tensors that are one memory at the donor and don't exist here are one memory here too.
    """
    mine = {
        (name, place.path): tensor
        for (name, place), tensor in zip(here.layout.places, here.tensors, strict=True)
    }
    found: list[torch.Tensor] = []
    taken: dict[tuple[Any, ...], int] = {}
    for number, (name, place) in enumerate(donor.places):
        own, first = mine.get((name, place.path)), donor.same[number]
        region = None if own is None else region_of(own)
        if own is not None and (region is None or taken.setdefault(region, first) == first):
            found.append(own)
        elif first != number:
            found.append(found[first].detach())
        else:
            found.append(_empty_like(place))
    return tuple(found)


def _empty_like(place: Place) -> torch.Tensor:
    """Return memory for a tensor; with the donor's strides where they are dense."""
    strides = [s for s, n in sorted(zip(place.stride, place.shape, strict=True)) if n != 1]
    sizes = [n for _, n in sorted(zip(place.stride, place.shape, strict=True)) if n != 1]
    expected = 1
    for stride, size in zip(strides, sizes, strict=True):
        if stride != expected:
            return torch.empty(place.shape, dtype=place.dtype, device=place.device)
        expected *= size
    return torch.empty_strided(place.shape, place.stride, dtype=place.dtype, device=place.device)


@torch.no_grad()
def poison(tensors: Sequence[torch.Tensor]) -> None:
    """Make nonsense of tensors that are about to be received: NaN, or -1, or True.

    Small tensors as a whole; of large ones one value in every 4 KiB and the last, so that whatever is left
    of them turns every result to nonsense, at a tenth of the time.
    """
    for tensor in map(independent, tensors):
        if tensor.nbytes > _SPARSE_FROM and tensor.is_contiguous():
            flat = tensor.view(-1)
            _poison(flat[:: _SPARSE // tensor.element_size()])
            _poison(flat[-1:])
        elif tensor.numel() > 0:
            _poison(tensor)


def _poison(tensor: torch.Tensor) -> None:
    if tensor.dtype == torch.bool:
        tensor.fill_(True)
    elif tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        tensor.fill_(float("nan"))
    elif tensor.dtype.is_signed:
        tensor.fill_(-1)
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).max)


@torch.no_grad()
def put(objects: Mapping[str, Stateful], donor: Layout, tensors: Sequence[torch.Tensor]) -> None:
    """Make the objects' states those of the layout, with these tensors' values.

    What was filled in place is not loaded again. Raises StateMismatch if an object ends up with other
    keys, dtypes, shapes or bytes than it was given.
    """
    begin = 0
    meshes = shards.meshes(unwrapped(each) for each in objects.values())
    for part in donor.parts:
        own = tensors[begin : begin + len(part.places)]
        begin += len(part.places)
        _put(part, unwrapped(objects[part.name]), own, meshes)


def _put(
    part: Part, stateful: Any, tensors: Sequence[torch.Tensor], meshes: Mapping[shards.Mesh, Any]
) -> None:
    now, held = take_part(part.name, stateful)
    if now.rest != part.rest or _unequal(part, now, tensors, held) is not None:
        try:
            state = nested(part, tensors, meshes)
            stateful.load_state_dict(state)
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise StateMismatch(
                f"{part.name} ({part.kind}) does not take the donor's state: {_text(error)}"
            ) from error
        if isinstance(stateful, torch.optim.Optimizer):
            _undo_casts(stateful, nested(part, tensors, meshes))
        now, held = take_part(part.name, stateful)
    wrong = _unequal(part, now, tensors, held) or _keys_differ(part, now)
    if wrong is not None:
        raise StateMismatch(
            f"{part.name} ({part.kind}) took the donor's state and has another: "
            f"{wrong.where} is {wrong.here}, the donor's is {wrong.donor}"
        )


def _unequal(
    part: Part, now: Part, tensors: Sequence[torch.Tensor], held: Sequence[torch.Tensor]
) -> Difference | None:
    """Return the first tensor that is not there, or not what was received."""
    mine = {place.path: (place, tensor) for place, tensor in zip(now.places, held, strict=True)}
    for place, tensor in zip(part.places, tensors, strict=True):
        own, value = mine.pop(place.path, (None, None))
        if own is None or value is None:
            return Difference(where=place.path, donor=str(place), here="absent")
        if (own.dtype, own.shape) != (place.dtype, place.shape):
            return Difference(where=place.path, donor=str(place), here=str(own))
        if region_of(value) != region_of(tensor) and not _equal_bytes(value, tensor):
            return Difference(
                where=place.path, donor="of other bytes", here="not what was received"
            )
    for path, (own, _) in mine.items():
        return Difference(where=path, donor="absent", here=str(own))
    return None


def _equal_bytes(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Compare bit for bit, in pieces of bounded size: NaN is equal to itself, and -0.0 not to 0.0."""
    return all(
        bool(torch.equal(_bytes(a), _bytes(b.to(a.device))))
        for a, b in zip(pieces(one), pieces(two), strict=True)
    )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _undo_casts(optimizer: torch.optim.Optimizer, state: Any) -> None:
    """Give an optimizer the very state it was sent: torch casts floating state to the parameter's dtype."""
    if not isinstance(state, dict) or not isinstance(state.get("state"), dict):
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    places = dict(zip(numbers, parameters, strict=True))
    for number, values in state["state"].items():
        own = optimizer.state.get(places[number]) if number in places else None
        if isinstance(own, dict) and isinstance(values, dict) and own.keys() == values.keys():
            own.update(values)


def _keys_differ(part: Part, now: Part) -> Difference | None:
    if part.rest == now.rest:
        return None
    there = nested(part, [None] * len(part.places))
    own = nested(now, [None] * len(now.places))
    return _structure(there, own, "")


def _structure(there: Any, own: Any, path: str) -> Difference | None:
    """Return the first key that one of two nested values does not have; plain values may differ."""
    if isinstance(there, Mapping) and isinstance(own, Mapping):
        for key in list(there) + [key for key in own if key not in there]:
            where = f"{path}.{key}" if path else str(key)
            if key not in there or key not in own:
                return Difference(
                    where=where,
                    donor="present" if key in there else "absent",
                    here="present" if key in own else "absent",
                )
            found = _structure(there[key], own[key], where)
            if found is not None:
                return found
    return None


def _text(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def adopt(old: Mapping[str, Stateful], new: Mapping[str, Stateful]) -> int:
    """Give new objects the states of those they replace; return the bytes that were not there already.

    An object that is the same one is left alone. Extra memory is the new objects' own: what an optimizer
    makes later is handed over, not copied. Raises StateMismatch naming the first difference.
    """
    moving = {
        name: stateful
        for name, stateful in new.items()
        if unwrapped(old.get(name)) is not unwrapped(stateful)
    }
    if not moving:
        return 0
    kept, fresh = take({name: old[name] for name in moving if name in old}), take(moving)
    found = difference(kept.layout, fresh.layout)
    if found is not None:
        raise StateMismatch(
            f"restore: {found.where} was {found.donor} before the recovery and is now {found.here}: "
            "build the same objects on every entry"
        )
    mine = {
        (name, place.path): tensor
        for (name, place), tensor in zip(fresh.layout.places, fresh.tensors, strict=True)
    }
    targets = []
    moved = 0
    with torch.no_grad():
        for (name, place), tensor in zip(kept.layout.places, kept.tensors, strict=True):
            target = mine.get((name, place.path))
            if target is None:
                target = tensor
            elif region_of(target) != region_of(tensor):
                write(target, tensor)
                moved += tensor.nbytes
            targets.append(target)
    put(moving, kept.layout, targets)
    return moved
