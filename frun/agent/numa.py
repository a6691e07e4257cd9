"""Owns --numa-binding: which processors a worker is bound to, near the GPU of its local rank.

The rules are torchrun's. Everything is read under a sysfs root that is passed in; only `prefixes` looks
at this machine. The worker itself is bound by `numactl`, which stands in front of its command.
"""

import importlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from frun.errors import LaunchError

SYSFS = Path("/sys")
_ASK_S = 30.0
"""Bound on asking nvidia-smi, which takes seconds where no driver daemon keeps the GPUs awake."""
_ADVICE = "leave the flag out on this host"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One NVIDIA GPU as its driver lists it, in the order of the PCI bus."""

    uuid: str
    address: str
    """PCI address as sysfs spells it, `0000:3b:00.0`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What a binding is chosen from."""

    sysfs: Path
    gpus: tuple[str, ...]
    """PCI addresses of the GPUs that workers see, by index."""
    allowed: frozenset[int]
    """Processors that this process may use."""


def prefixes(
    mode: str, nproc: int, environment: Mapping[str, str], sysfs: Path = SYSFS
) -> tuple[tuple[str, ...], ...]:
    """Return what stands in front of each local rank's command.

    `mode` is `node`, `socket`, `exclusive` or `core-complex`. Local rank n is taken to use GPU n of
    those that CUDA_VISIBLE_DEVICES leaves.

    Raises:
        LaunchError: there is no numactl, no GPU for a worker, or no processor near one.
    """
    path = environment.get("PATH")
    if (numactl := shutil.which("numactl", path=path)) is None:
        raise LaunchError(f"--numa-binding {mode}: no program numactl: install it, or {_ADVICE}")
    gpus = visible(environment.get("CUDA_VISIBLE_DEVICES"), list_gpus(path))
    if len(gpus) < nproc:
        raise LaunchError(
            f"--numa-binding {mode}: {nproc} workers and {len(gpus)} NVIDIA GPUs that they can see:"
            f" give fewer to --nproc-per-node, or {_ADVICE}"
        )
    place = Place(sysfs=sysfs, gpus=gpus, allowed=frozenset(os.sched_getaffinity(0)))
    return tuple(
        (numactl, f"--physcpubind={spell(processors(mode, index, place))}")
        for index in range(nproc)
    )


def processors(mode: str, gpu: int, place: Place) -> frozenset[int]:
    """Return the processors for the worker of GPU number `gpu`.

    Raises:
        LaunchError: there are none that this process may use, or too few to share.
    """
    node = _node_of(place, gpu)
    near = _processors_of(place, node)
    match mode:
        case "socket":
            near = _socket(place, node) if near else near
        case "exclusive":
            near = _share(place, node, gpu, near)
        case "core-complex":
            near = _complex(place, node, gpu, near)
    if not near:
        raise LaunchError(
            f"--numa-binding {mode}: GPU {gpu} ({place.gpus[gpu]}) is near NUMA node {node}, of which"
            f" this process may use no processor: widen its affinity, or {_ADVICE}"
        )
    return near


def visible(devices: str | None, gpus: Sequence[Gpu]) -> tuple[str, ...]:
    """Return the addresses of the GPUs that CUDA_VISIBLE_DEVICES shows, by CUDA's rules.

    Names are numbers, or UUIDs that may be shortened; the list ends at the first that fits none.

    Raises:
        LaunchError: it names a part of a GPU (MIG).
    """
    if devices is None:
        return tuple(gpu.address for gpu in gpus)
    found: list[str] = []
    for name in (each.strip() for each in devices.split(",")):
        if name.startswith("MIG-"):
            raise LaunchError(
                f"--numa-binding: CUDA_VISIBLE_DEVICES names {name}, a part of a GPU: {_ADVICE}"
            )
        if name.isdecimal():
            fitting = list(gpus[int(name) : int(name) + 1])
        else:
            fitting = [gpu for gpu in gpus if name and gpu.uuid.startswith(name)]
        if len(fitting) != 1:
            break
        found.append(fitting[0].address)
    return tuple(found)


def list_gpus(path: str | None) -> tuple[Gpu, ...]:
    """Ask NVIDIA's library, or else nvidia-smi on `path`, for all GPUs of this machine.

    Raises:
        LaunchError: neither of them answers; the text says why.
    """
    with suppress(ImportError):
        return _ask_library(importlib.import_module("pynvml"))
    program = shutil.which("nvidia-smi", path=path)
    if program is None:
        raise LaunchError(
            f"--numa-binding: no NVIDIA GPU is known here (no nvidia-smi, no nvidia-ml-py): {_ADVICE}"
        )
    ask = [program, "--query-gpu=uuid,pci.bus_id", "--format=csv,noheader"]
    try:
        done = subprocess.run(ask, capture_output=True, text=True, timeout=_ASK_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"--numa-binding: nvidia-smi does not answer: {error}") from None
    if done.returncode != 0:
        said = " ".join((done.stdout + done.stderr).split())[:200]
        raise LaunchError(f"--numa-binding: nvidia-smi lists no GPU ({said}): {_ADVICE}")
    rows = [line.split(",") for line in done.stdout.splitlines() if line.count(",") == 1]
    return tuple(Gpu(uuid=uuid.strip(), address=pci_address(bus)) for uuid, bus in rows)


def pci_address(text: str) -> str:
    """Return a PCI address as sysfs spells it: the driver writes domains of eight digits."""
    domain, _, rest = text.strip().lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"


def spell(numbers: Iterable[int]) -> str:
    """Return numbers as the kernel and numactl write lists: `0-2,4`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][-1] == number - 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)


def read_list(text: str) -> frozenset[int]:
    """Return the numbers of such a list."""
    found: set[int] = set()
    for part in filter(None, (each.strip() for each in text.split(","))):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def _ask_library(nvml: Any) -> tuple[Gpu, ...]:
    try:
        nvml.nvmlInit()
        try:
            handles = map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount()))
            return tuple(
                Gpu(
                    uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
                    address=pci_address(_text(nvml.nvmlDeviceGetPciInfo(handle).busId)),
                )
                for handle in handles
            )
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        raise LaunchError(
            f"--numa-binding: NVIDIA's library lists no GPU ({error}): {_ADVICE}"
        ) from None


def _text(value: str | bytes) -> str:
    """Return a text of NVIDIA's library, which older versions give as bytes."""
    return value.decode() if isinstance(value, bytes) else value


def _socket(place: Place, node: int) -> frozenset[int]:
    """All allowed processors of the nodes on the socket of `node`; nodes without any have no say."""
    wanted = _package(place, node)
    nodes = read_list(_read(place.sysfs / "devices/system/node/possible"))
    return frozenset().union(
        *(
            _processors_of(place, other)
            for other in nodes
            if _processors_of(place, other) and _package(place, other) == wanted
        )
    )


def _share(place: Place, node: int, gpu: int, near: frozenset[int]) -> frozenset[int]:
    """Cut the node's physical cores into as many runs as it has GPUs; the first ones may be longer."""
    cores = list(_grouped(near, lambda cpu: _core(place, cpu)).values())
    position, sharing = _turn(place, node, gpu)
    each, longer = divmod(len(cores), sharing)
    if near and each < 1:
        raise LaunchError(
            f"--numa-binding exclusive: NUMA node {node} has {len(cores)} physical cores for"
            f" {sharing} GPUs: use node or socket instead"
        )
    start = position * each + min(position, longer)
    return frozenset().union(*cores[start : start + each + (position < longer)])


def _complex(place: Place, node: int, gpu: int, near: frozenset[int]) -> frozenset[int]:
    """One group of cores below one last-level cache; the fullest first, in turn."""
    groups = sorted(
        _grouped(near, lambda cpu: _cache(place, cpu)).items(), key=lambda it: (-len(it[1]), it[0])
    )
    position, _ = _turn(place, node, gpu)
    return groups[position % len(groups)][1] if groups else frozenset()


def _turn(place: Place, node: int, gpu: int) -> tuple[int, int]:
    """Return the place of `gpu` among the GPUs near `node`, and their number."""
    here = [index for index in range(len(place.gpus)) if _node_of(place, index) == node]
    return here.index(gpu), len(here)


def _grouped(numbers: Iterable[int], key: Callable[[int], int]) -> dict[int, frozenset[int]]:
    """Return the numbers by key, in the order of keys."""
    groups: dict[int, set[int]] = {}
    for number in numbers:
        groups.setdefault(key(number), set()).add(number)
    return {name: frozenset(groups[name]) for name in sorted(groups)}


def _node_of(place: Place, gpu: int) -> int:
    """Return the NUMA node of a GPU; -1 is what machines of a single node say."""
    return max(0, int(_read(place.sysfs / "bus/pci/devices" / place.gpus[gpu] / "numa_node")))


def _processors_of(place: Place, node: int) -> frozenset[int]:
    """Return the allowed processors of a node; a possible node need not be there."""
    folder = place.sysfs / f"devices/system/node/node{node}"
    return read_list(_read(folder / "cpulist")) & place.allowed if folder.exists() else frozenset()


def _package(place: Place, node: int) -> int:
    cpu = min(_processors_of(place, node))
    return int(_read(_cpu(place, cpu) / "topology/physical_package_id"))


def _core(place: Place, cpu: int) -> int:
    """Return the lowest processor on the same physical core."""
    return min(read_list(_read(_cpu(place, cpu) / "topology/thread_siblings_list")))


def _cache(place: Place, cpu: int) -> int:
    """Return the lowest processor that shares the last data cache."""
    levels = {
        int(_read(index / "level")): index / "shared_cpu_list"
        for index in sorted((_cpu(place, cpu) / "cache").glob("index[0-9]*"), reverse=True)
        if _read(index / "type") in ("Unified", "Data")
    }
    return min(read_list(_read(levels[max(levels)]))) if levels else cpu


def _cpu(place: Place, cpu: int) -> Path:
    return place.sysfs / f"devices/system/cpu/cpu{cpu}"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError as error:
        raise LaunchError(f"--numa-binding: {path} can't be read ({error.strerror})") from None
