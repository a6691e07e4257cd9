"""A script's objects as tensors and a small rest: described and compared.

Owns what a state is made of. How it gets into objects is `placing`'s, how bytes travel is `copy`'s.
"""

import io
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from frun.errors import StateMismatch
from frun.worker.shards import Mesh, Numbered, Sharding, is_sharded, local, sharding_of, whole

_SAMPLED = 16
"""About so many values are compared."""


@runtime_checkable
class Stateful(Protocol):
    """Anything that can tell its state and take one."""

    def state_dict(self) -> Any:
        """Return the state: any nesting of containers, tensors and values that can be pickled."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Take a state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One tensor of a state, without its bytes."""

    path: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device: str
    """Type of device: a rank's own index is its own affair."""
    sharding: Sharding | None = None
    """How the whole tensor lies on a mesh of which this is the rank's part."""

    def __str__(self) -> str:
        """Say what a person compares."""
        device = "" if self.device == "cpu" else f" on {self.device}"
        part = "" if self.sharding is None else f", part {self.sharding}"
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}{device}{part}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One named object's state, without the bytes of its tensors."""

    name: str
    kind: str
    """Its class."""
    strict: bool
    """Its tensors are there from the start (a module); others may make them later."""
    places: tuple[Place, ...]
    rest: bytes
    """Everything else, pickled; tensors are numbers in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What two ranks must agree on before bytes travel."""

    parts: tuple[Part, ...]
    same: tuple[int, ...]
    """For each tensor, in order of parts, the first one that is the very same memory; mostly itself."""

    @property
    def places(self) -> list[tuple[str, Place]]:
        """All tensors in order, each with the name of its object."""
        return [(part.name, place) for part in self.parts for place in part.places]


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A layout and the live tensors that belong to it."""

    layout: Layout
    tensors: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first thing in which a state is not the donor's."""

    where: str
    """Object and path."""
    donor: str
    here: str


# -- taking apart ------------------------------------------------------------------------------------------


def take(objects: Mapping[str, Stateful]) -> State:
    """Return the state of named objects; its tensors are theirs, not copies.

    Raises StateMismatch for an object that has no state or one that can't be pickled.
    """
    parts: list[Part] = []
    tensors: list[torch.Tensor] = []
    for name in sorted(objects):
        part, own = take_part(name, objects[name])
        parts.append(part)
        tensors += own
    return State(layout=Layout(parts=tuple(parts), same=_same(tensors)), tensors=tuple(tensors))


def unwrapped(stateful: Any) -> Any:
    """Return the module inside DistributedDataParallel and torch.compile wrappers."""
    while isinstance(stateful, torch.nn.Module):
        if isinstance(stateful, torch.nn.parallel.DistributedDataParallel):
            stateful = stateful.module
        elif isinstance(getattr(stateful, "_orig_mod", None), torch.nn.Module):
            stateful = stateful._orig_mod
        else:
            break
    return stateful


def called(module: Any) -> torch.nn.Module:
    """Return what the script calls, compiled or not: a hook on what is inside would be compiled too."""
    while isinstance(module, torch.nn.parallel.DistributedDataParallel):
        module = module.module
    found: torch.nn.Module = module
    return found


def take_part(name: str, stateful: Any) -> tuple[Part, list[torch.Tensor]]:
    """Return the state of one object; see `take`."""
    stateful = unwrapped(stateful)
    if not isinstance(stateful, Stateful):
        raise StateMismatch(
            f"{name} ({_kind(stateful)}) has no state_dict and load_state_dict: pass an object that has"
        )
    state = stateful.state_dict()
    names = _names(state)
    pickler = _Pickler(io.BytesIO())
    try:
        pickler.dump(state)
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
        raise StateMismatch(
            f"the state of {name} ({_kind(stateful)}) can't be sent: {error}"
        ) from error
    places = [
        _place(next(names.get(id(tensor), iter(())), f"tensor {number}"), tensor)
        for number, tensor in enumerate(pickler.found)
    ]
    part = Part(
        name=name,
        kind=_kind(stateful),
        strict=isinstance(stateful, torch.nn.Module),
        places=tuple(places),
        rest=pickler.file.getvalue(),
    )
    return part, [local(tensor).detach() for tensor in pickler.found]


@torch.no_grad()
def sample(objects: Iterable[Stateful]) -> tuple[float, ...]:
    """Return a few values from all over the large parameters, in main memory or not."""
    found = [
        part.reshape(-1)
        for stateful in objects
        if isinstance(stateful, torch.nn.Module)
        for part in map(local, stateful.parameters())
        if part.dim() > 1 and part.is_floating_point() and part.is_contiguous() and part.numel()
    ]
    chosen = found[:: -(-len(found) // _SAMPLED) or 1]
    each = -(-_SAMPLED // len(chosen)) if chosen else 0
    return tuple(float(flat[flat.numel() * n // each]) for flat in chosen for n in range(each))


class _Pickler(pickle.Pickler):
    """Pickles everything but the bytes of plain tensors, which it collects, wherever they stand."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.file = file
        self.found: list[torch.Tensor] = []
        """As the script has them: of a sharded one the whole."""

    def persistent_id(self, obj: Any) -> int | Numbered | None:
        """Number each occurrence of a tensor; pickle's own memory would name one that stands twice once."""
        if not isinstance(obj, torch.Tensor) or not _is_plain(local(obj)):
            return None
        self.found.append(obj)
        number = len(self.found) - 1
        return Numbered(number=number, sharding=sharding_of(obj)) if is_sharded(obj) else number


class _Unpickler(pickle.Unpickler):
    """Puts given tensors where the pickler met its own."""

    def __init__(self, rest: bytes, tensors: Sequence[Any], meshes: Mapping[Mesh, Any]) -> None:
        super().__init__(io.BytesIO(rest))
        self._tensors = tensors
        self._meshes = meshes

    def persistent_load(self, pid: Any) -> Any:
        """Return the tensor of a number."""
        if not isinstance(pid, Numbered):
            return self._tensors[pid]
        part = self._tensors[pid.number]
        return part if part is None else whole(part, pid.sharding, self._meshes)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether its bytes are all there is to it: neither sparse, quantized, without a device nor a wrapper."""
    return (
        tensor.layout is torch.strided
        and not tensor.is_quantized
        and tensor.device.type != "meta"
        and type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    )


def _place(path: str, tensor: torch.Tensor) -> Place:
    part = local(tensor)
    return Place(
        path=path,
        dtype=part.dtype,
        shape=tuple(part.shape),
        stride=tuple(part.stride()),
        device=part.device.type,
        sharding=sharding_of(tensor) if is_sharded(tensor) else None,
    )


def _named(value: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in nested containers with a path that a person can follow."""
    if isinstance(value, torch.Tensor):
        yield path or "state", value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _named(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _named(item, f"{path}.{number}" if path else str(number))


def _names(state: Any) -> dict[int, Iterator[str]]:
    """Return the paths at which each tensor in containers stands; no two are the same."""
    names: dict[int, list[str]] = {}
    used: set[str] = set()
    for path, tensor in _named(state, ""):
        unique, count = path, 1
        while unique in used:
            count += 1
            unique = f"{path} ({count})"
        used.add(unique)
        names.setdefault(id(tensor), []).append(unique)
    return {number: iter(paths) for number, paths in names.items()}


def _kind(stateful: object) -> str:
    return f"{type(stateful).__module__}.{type(stateful).__qualname__}"


def region_of(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """Return what identifies a tensor's memory, None if it has none."""
    if tensor.numel() == 0:
        return None
    return (
        tensor.device,
        tensor.data_ptr(),
        tensor.dtype,
        tuple(tensor.shape),
        tuple(tensor.stride()),
        tensor.is_conj(),
        tensor.is_neg(),
    )


def _same(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    first: dict[tuple[Any, ...], int] = {}
    same = []
    for number, tensor in enumerate(tensors):
        region = region_of(tensor)
        same.append(number if region is None else first.setdefault(region, number))
    return tuple(same)


# -- comparing ---------------------------------------------------------------------------------------------


def difference(donor: Layout, here: Layout) -> Difference | None:
    """Return the first thing in which a receiver's layout can't take the donor's state.

    Tensors that are missing here are fine where an object makes them later (an optimizer's state).
    """
    theirs = {part.name: part for part in donor.parts}
    mine = {part.name: part for part in here.parts}
    for name in sorted(theirs | mine):
        if name not in theirs or name not in mine:
            there = f"a {theirs[name].kind}" if name in theirs else "not passed to restore"
            own = f"a {mine[name].kind}" if name in mine else "not passed to restore"
            return Difference(where=name, donor=there, here=own)
        found = _part_difference(theirs[name], mine[name])
        if found is not None:
            return found
    return _tie_difference(donor, here)


def _part_difference(donor: Part, here: Part) -> Difference | None:
    if donor.kind != here.kind:
        return Difference(where=donor.name, donor=f"a {donor.kind}", here=f"a {here.kind}")
    theirs = {place.path: place for place in donor.places}
    mine = {place.path: place for place in here.places}
    for path in theirs | mine:
        there, own = theirs.get(path), mine.get(path)
        if there is None or own is None:
            if donor.strict:
                return Difference(
                    where=f"{donor.name} {path}",
                    donor=str(there or "absent"),
                    here=str(own or "absent"),
                )
            continue
        if _kept(there) != _kept(own):
            return Difference(where=f"{donor.name} {path}", donor=str(there), here=str(own))
    return _group_difference(donor, here)


def _kept(place: Place) -> tuple[object, ...]:
    return place.dtype, place.shape, place.device, place.sharding


def _group_difference(donor: Part, here: Part) -> Difference | None:
    """Compare how an optimizer's parameters are grouped."""
    if donor.rest == here.rest:
        return None
    theirs, mine = _group_sizes(donor), _group_sizes(here)
    if theirs == mine:
        return None
    return Difference(
        where=f"{donor.name} param_groups",
        donor=f"groups of {theirs} parameters",
        here=f"groups of {mine} parameters",
    )


def _group_sizes(part: Part) -> list[int] | None:
    if part.strict:
        return None
    state = nested(part, [None] * len(part.places))
    groups = state.get("param_groups") if isinstance(state, dict) else None
    if not isinstance(groups, list):
        return None
    return [
        len(group["params"]) for group in groups if isinstance(group, dict) and "params" in group
    ]


def _tie_difference(donor: Layout, here: Layout) -> Difference | None:
    """Refuse a module that has one memory where the donor has two: one value would overwrite the other."""
    strict = {part.name for part in donor.parts if part.strict}
    theirs = {
        (name, place.path): donor.same[number]
        for number, (name, place) in enumerate(donor.places)
        if name in strict
    }
    mine = here.places
    for number, first in enumerate(here.same):
        one = theirs.get((mine[number][0], mine[number][1].path))
        two = theirs.get((mine[first][0], mine[first][1].path))
        if first != number and None not in (one, two) and one != two:
            (name, place), (other, tied) = mine[number], mine[first]
            return Difference(
                where=f"{name} {place.path}",
                donor="memory of its own",
                here=f"the memory of {other} {tied.path}",
            )
    return None


def nested(part: Part, tensors: Sequence[Any], meshes: Mapping[Mesh, Any] | None = None) -> Any:
    """Return the state_dict of a part, made of these tensors; sharded ones lie on these meshes."""
    return _Unpickler(part.rest, tensors, meshes or {}).load()


def pieces(tensor: torch.Tensor, limit: int = 8 << 20) -> Iterator[torch.Tensor]:
    """Cut a tensor into views of at most `limit` bytes, by its shape alone, in its logical order."""
    if tensor.numel() == 0:
        return
    if tensor.nbytes <= limit or tensor.dim() == 0:
        yield tensor
        return
    row = tensor.nbytes // tensor.shape[0]
    if row > limit:
        for index in range(tensor.shape[0]):
            yield from pieces(tensor[index], limit)
        return
    step = max(1, limit // row)
    for begin in range(0, tensor.shape[0], step):
        yield tensor[begin : begin + step]


def independent(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that has memory of its own: expanded dimensions are cut to one."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def write(target: torch.Tensor, source: torch.Tensor) -> None:
    """Give a tensor the values of one of the same shape, also where its dimensions are expanded."""
    own = independent(target)
    own.copy_(source[tuple(slice(size) for size in own.shape)])
