"""Tensors of which each rank holds a part: described without their mesh, and made again on another one.

Owns what is known of torch's DTensor, which FSDP2 and tensor parallelism are made of, and the name of the
part of the state that a rank holds. Nothing here imports DTensor: where the script has not, there is none.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from frun.errors import UsageError

_MODULE = "torch.distributed.tensor"
_REFUSED = {
    "FullyShardedDataParallel": "use fully_shard (FSDP2), whose state frun can tell apart by ranks",
    "ZeroRedundancyOptimizer": "use fully_shard (FSDP2), or an optimizer that every rank holds whole",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """What a device mesh is, beside the process groups of one generation."""

    device: str
    names: tuple[str, ...]
    """Of its dimensions; empty if they have none."""
    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    """Global ranks, the last dimension first."""

    def __str__(self) -> str:
        """Say what a person calls it."""
        names = self.names or tuple(str(dim) for dim in range(len(self.shape)))
        sizes = ", ".join(f"{name}={size}" for name, size in zip(names, self.shape, strict=True))
        return f"mesh({sizes})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """How a whole tensor lies on a mesh."""

    mesh: Mesh
    placements: tuple[Any, ...]
    """torch's own, one for each dimension of the mesh."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    stride: tuple[int, ...]

    def __str__(self) -> str:
        """Say what a person compares."""
        placed = ", ".join(str(each) for each in self.placements)
        return f"({placed}) of {list(self.shape)} on {self.mesh}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbered:
    """What stands in a pickled state for a sharded tensor."""

    number: int
    """Of its local part among all tensors of the state."""
    sharding: Sharding


def is_sharded(tensor: object) -> bool:
    """Whether this is a DTensor."""
    module = sys.modules.get(_MODULE)
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory that this rank holds of a tensor; for a plain one that is the tensor."""
    if not is_sharded(tensor):
        return tensor
    part: torch.Tensor = tensor._local_tensor  # type: ignore[attr-defined]
    return part


def sharding_of(tensor: Any) -> Sharding:
    """Describe a sharded tensor."""
    return Sharding(
        mesh=_mesh(tensor.device_mesh),
        placements=tuple(tensor.placements),
        shape=tuple(tensor.shape),
        stride=tuple(tensor.stride()),
    )


def whole(part: torch.Tensor, sharding: Sharding, meshes: Mapping[Mesh, Any]) -> Any:
    """Make a sharded tensor of its local part, on the mesh of this generation that is like the old one.

    Raises KeyError if there is none.
    """
    tensor: Any = sys.modules[_MODULE]
    return tensor.DTensor.from_local(
        part,
        meshes[sharding.mesh],
        sharding.placements,
        run_check=False,
        shape=torch.Size(sharding.shape),
        stride=sharding.stride,
    )


def meshes(objects: Iterable[object]) -> dict[Mesh, Any]:
    """Return the device meshes that the tensors of these modules and optimizers lie on."""
    found: dict[int, Any] = {}
    for tensor in _sharded(objects):
        found.setdefault(id(tensor.device_mesh), tensor.device_mesh)
    return {_mesh(mesh): mesh for mesh in found.values()}


def part_of(objects: Iterable[object]) -> str:
    """Name the part of the state that this rank holds: ranks with the same name hold the same.

    Empty where every rank holds everything. Two meshes of other ranks are never taken for the same one,
    since different layers of a model may lie on them.
    """
    names: set[str] = set()
    known: dict[tuple[int, tuple[bool, ...]], None] = {}
    for tensor in _sharded(objects):
        split = tuple(not placement.is_replicate() for placement in tensor.placements)
        key = (id(tensor.device_mesh), split)
        if key in known or not any(split):
            continue
        known[key] = None
        mesh = _mesh(tensor.device_mesh)
        at = tensor.device_mesh.get_coordinate() or ()
        dims = mesh.names or tuple(str(dim) for dim in range(len(mesh.shape)))
        place = [f"{dim}={n}" for dim, n, cut in zip(dims, at, split, strict=False) if cut]
        ranks = f" of {_short(mesh.ranks)}"
        names.add(",".join(place or ["outside"]) + ranks)
    return "; ".join(sorted(names))


def refuse_unknown(objects: Mapping[str, object]) -> None:
    """Raise UsageError for objects that hold shards in a way that can't be told apart."""
    for name, stateful in objects.items():
        parts = stateful.modules() if isinstance(stateful, torch.nn.Module) else (stateful,)
        for part in parts:
            kind = type(part)
            advice = _REFUSED.get(kind.__name__)
            if advice is not None and kind.__module__.startswith("torch.distributed."):
                raise UsageError(f"session.restore can not take {name} ({kind.__name__}): {advice}")


def _sharded(objects: Iterable[object]) -> Iterator[Any]:
    if _MODULE not in sys.modules:
        return
    for stateful in objects:
        tensors: Iterable[Any] = ()
        if isinstance(stateful, torch.nn.Module):
            tensors = (*stateful.parameters(), *stateful.buffers())
        elif isinstance(stateful, torch.optim.Optimizer):
            tensors = (each for group in stateful.param_groups for each in group["params"])
        yield from filter(is_sharded, tensors)


def _mesh(mesh: Any) -> Mesh:
    return Mesh(
        device=mesh.device_type,
        names=tuple(mesh.mesh_dim_names or ()),
        shape=tuple(mesh.mesh.shape),
        ranks=tuple(mesh.mesh.flatten().tolist()),
    )


def _short(ranks: tuple[int, ...]) -> str:
    if ranks == tuple(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks))}"
