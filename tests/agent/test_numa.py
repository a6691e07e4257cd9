"""Binding workers to processors near their GPU, beside torch's own rules, on machines made of files."""

import os
import random
import subprocess
import sys
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch.numa.binding as torchs

from frun.agent import numa
from frun.errors import LaunchError

MODES = ("node", "socket", "exclusive", "core-complex")


@dataclass(frozen=True)
class Machine:
    """A made up machine: nodes of cores, cores of two processors, caches of a few cores."""

    root: Path
    cores_per_node: int = 4
    nodes: int = 2
    nodes_per_socket: int = 1
    cores_per_cache: int = 2
    gpu_nodes: tuple[int, ...] = (0, 0, 1, 1)

    @property
    def gpus(self) -> tuple[str, ...]:
        """PCI addresses by index."""
        return tuple(f"0000:{0x10 + index:02x}:00.0" for index in range(len(self.gpu_nodes)))

    def build(self) -> "Machine":
        """Write the tree; processor n and n + cores share a core, as on most servers."""
        cores = self.cores_per_node * self.nodes
        for address, node in zip(self.gpus, self.gpu_nodes, strict=True):
            self._write(f"bus/pci/devices/{address}/numa_node", str(node))
        self._write("devices/system/node/possible", f"0-{self.nodes - 1}")
        for node in range(self.nodes):
            first = node * self.cores_per_node
            last = first + self.cores_per_node - 1
            self._write(
                f"devices/system/node/node{node}/cpulist",
                f"{first}-{last},{first + cores}-{last + cores}",
            )
        for cpu in range(2 * cores):
            core = cpu % cores
            base = f"devices/system/cpu/cpu{cpu}"
            package = core // self.cores_per_node // self.nodes_per_socket
            self._write(f"{base}/topology/physical_package_id", str(package))
            self._write(f"{base}/topology/thread_siblings_list", f"{core},{core + cores}")
            start = core - core % self.cores_per_cache
            end = min(start + self.cores_per_cache, cores) - 1
            shared = f"{start}-{end},{start + cores}-{end + cores}"
            for index, (kind, level, who) in enumerate(
                [
                    ("Data", 1, f"{core},{core + cores}"),
                    ("Instruction", 4, "0"),
                    ("Unified", 3, shared),
                ]
            ):
                self._write(f"{base}/cache/index{index}/type", kind)
                self._write(f"{base}/cache/index{index}/level", str(level))
                self._write(f"{base}/cache/index{index}/shared_cpu_list", who)
        return self

    def place(self, allowed: Sequence[int] | None = None) -> numa.Place:
        """Return what frun chooses from; all processors without `allowed`."""
        everyone = range(2 * self.cores_per_node * self.nodes)
        chosen = frozenset(everyone if allowed is None else allowed)
        return numa.Place(sysfs=self.root, gpus=self.gpus, allowed=chosen)

    def _write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="ascii")


def torchs_choice(
    monkeypatch: pytest.MonkeyPatch, mode: str, gpu: int, place: numa.Place
) -> frozenset[int]:
    """Return what torch chooses on the same files; the GPU and the affinity are put in its hands."""

    def node_of(*, gpu_index: int) -> int:
        text = (place.sysfs / "bus/pci/devices" / place.gpus[gpu_index] / "numa_node").read_text()
        return max(int(text), 0)

    def open_there(path: str, *args: object) -> object:
        return (place.sysfs / path.removeprefix("/sys/")).open(encoding="ascii")

    def list_there(path: str) -> list[str]:
        return os.listdir(place.sysfs / path.removeprefix("/sys/"))

    class Os:
        path = os.path
        listdir = staticmethod(list_there)

    monkeypatch.setattr(torchs, "_get_numa_node_index_for_gpu_index", node_of)
    monkeypatch.setattr(torchs, "_get_gpu_count", lambda: len(place.gpus))
    monkeypatch.setattr(
        torchs, "_get_allowed_cpu_indices_for_current_thread", lambda: set(place.allowed)
    )
    monkeypatch.setattr(torchs, "open", open_there, raising=False)
    monkeypatch.setattr(torchs, "os", Os)
    options = torchs.NumaOptions(affinity_mode=torchs.AffinityMode(mode))
    return frozenset(torchs._get_logical_cpus_to_bind_to(gpu_index=gpu, numa_options=options))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"cores_per_node": 7, "cores_per_cache": 3},
        {"nodes": 4, "nodes_per_socket": 2, "gpu_nodes": (0, 1, 2, 3, 3)},
        {"nodes": 1, "gpu_nodes": (-1, -1, -1)},
        {"cores_per_node": 6, "gpu_nodes": (1, 0, 1, 1, 0)},
    ],
)
def test_the_choice_is_torchs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, shape: Mapping[str, int]
) -> None:
    """Every GPU of every machine gets the processors that torch would give it."""
    machine = Machine(tmp_path, **shape).build()  # type: ignore[arg-type]
    everyone = sorted(machine.place().allowed)
    dice = random.Random(7)
    for allowed in (everyone, everyone[::2], sorted(dice.sample(everyone, len(everyone) * 3 // 4))):
        place = machine.place(allowed)
        for gpu in range(len(machine.gpus)):
            try:
                theirs = torchs_choice(monkeypatch, mode, gpu, place)
            except RuntimeError:
                with pytest.raises(LaunchError, match=r"--numa-binding exclusive: NUMA node"):
                    numa.processors(mode, gpu, place)
                continue
            assert numa.processors(mode, gpu, place) == theirs, (mode, gpu, allowed)


def test_exclusive_shares_do_not_overlap(tmp_path: Path) -> None:
    """Whole physical cores, all of them, each once; the first GPU of a node gets the odd one."""
    place = Machine(tmp_path, cores_per_node=5).build().place()
    shares = [numa.processors("exclusive", gpu, place) for gpu in range(4)]
    assert [len(share) for share in shares] == [6, 4, 6, 4]
    assert sorted(cpu for share in shares for cpu in share) == sorted(place.allowed)
    assert numa.spell(shares[0]) == "0-2,10-12"


def test_a_node_that_is_only_possible_is_no_error(tmp_path: Path) -> None:
    """Kernels list nodes for memory that may be plugged in one day."""
    place = Machine(tmp_path).build().place()
    (tmp_path / "devices/system/node/possible").write_text("0-7\n", encoding="ascii")
    assert numa.processors("socket", 0, place) == numa.processors("node", 0, place)


@pytest.mark.parametrize("mode", MODES)
def test_no_allowed_processor_near_the_gpu(tmp_path: Path, mode: str) -> None:
    """The refusal names GPU and node."""
    place = Machine(tmp_path).build().place([0, 1, 8])
    with pytest.raises(LaunchError, match=r"GPU 2 \(0000:12:00.0\) is near NUMA node 1"):
        numa.processors(mode, 2, place)


@pytest.mark.parametrize("numbers", [[], [3], [0, 1, 2], [0, 2, 3, 4, 9], [1, 0, 7]])
def test_lists_are_spelled_as_the_kernel_spells_them(numbers: list[int]) -> None:
    """What is written can be read again, and is what torch would write."""
    text = numa.spell(numbers)
    assert numa.read_list(text) == set(numbers)
    assert text == torchs._get_ranges_str_from_ints(set(numbers))


GPUS = tuple(numa.Gpu(uuid=f"GPU-{name}", address=f"a{name}") for name in ("aa1", "aa2", "bb"))


@pytest.mark.parametrize(
    ("devices", "found"),
    [
        (None, "aaa1 aaa2 abb"),
        ("2,0", "abb aaa1"),
        ("GPU-bb, GPU-aa2", "abb aaa2"),
        ("1,GPU-aa,0", "aaa2"),
        ("1,-1,0", "aaa2"),
        ("1,7,0", "aaa2"),
        ("", ""),
    ],
)
def test_visible_gpus(devices: str | None, found: str) -> None:
    """CUDA's rules: numbers or beginnings of UUIDs, up to the first that is no device."""
    assert " ".join(numa.visible(devices, GPUS)) == found


def test_parts_of_gpus_are_refused() -> None:
    """A MIG instance has no place of its own in sysfs."""
    with pytest.raises(LaunchError, match="MIG-1, a part of a GPU"):
        numa.visible("MIG-1", GPUS)


def program(folder: Path, name: str, text: str) -> None:
    """Put a program on a PATH."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)


def surroundings(folder: Path, path: str) -> dict[str, str]:
    """Return an environment in which NVIDIA's library is not installed."""
    (folder / "pynvml.py").write_text("raise ImportError\n", encoding="ascii")
    found = os.pathsep.join([str(folder), *sys.path])
    return {"PATH": path, "PYTHONPATH": found, "HOME": str(folder)}


class Nvml:
    """NVIDIA's library as far as it is asked, with texts as its older versions give them."""

    class NVMLError(Exception):
        """What it raises."""

    def __init__(self, uuids: Sequence[str]) -> None:
        self.uuids = uuids
        self.open = 0

    def nvmlInit(self) -> None:
        """Fail where there is no GPU."""
        if not self.uuids:
            raise self.NVMLError("Driver Not Loaded")
        self.open += 1

    def nvmlShutdown(self) -> None:
        """Count."""
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        """Return the number of GPUs."""
        return len(self.uuids)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        """Return the index itself."""
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        """Return a text."""
        return self.uuids[handle]

    def nvmlDeviceGetPciInfo(self, handle: int) -> types.SimpleNamespace:
        """Return bytes, and a domain of eight digits."""
        return types.SimpleNamespace(busId=b"00000001:%02X:00.0" % (0xAB + handle))


def test_the_library_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nvidia-ml-py is installed it is asked, and let go again."""
    library = Nvml(["GPU-one", "GPU-two"])
    monkeypatch.setitem(sys.modules, "pynvml", library)
    assert numa.list_gpus("/nowhere") == (
        numa.Gpu(uuid="GPU-one", address="0001:ab:00.0"),
        numa.Gpu(uuid="GPU-two", address="0001:ac:00.0"),
    )
    assert library.open == 0
    monkeypatch.setitem(sys.modules, "pynvml", Nvml([]))
    with pytest.raises(LaunchError, match=r"lists no GPU \(Driver Not Loaded\)"):
        numa.list_gpus("/nowhere")


def test_from_the_programs_to_the_prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nvidia-smi tells the addresses, CUDA_VISIBLE_DEVICES the order, and numactl is in front."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    mine = sorted(os.sched_getaffinity(0))
    machine = Machine(tmp_path / "sys", nodes=1, gpu_nodes=(-1, -1)).build()
    (machine.root / "devices/system/node/node0/cpulist").write_text("0-4095\n", encoding="ascii")
    folder = tmp_path / "bin"
    folder.mkdir()
    program(folder, "numactl", "exit 9")
    program(
        folder,
        "nvidia-smi",
        'echo "GPU-one, 00000000:10:00.0"; echo "GPU-two, 00000000:11:00.0"',
    )
    environment = {"PATH": str(folder), "CUDA_VISIBLE_DEVICES": "1,0"}
    found = numa.prefixes("node", 2, environment, machine.root)
    assert found == ((str(folder / "numactl"), f"--physcpubind={numa.spell(mine)}"),) * 2
    with pytest.raises(LaunchError, match="3 workers and 2 NVIDIA GPUs"):
        numa.prefixes("node", 3, environment, machine.root)
    program(folder, "nvidia-smi", 'echo "No devices were found"; exit 6')
    with pytest.raises(LaunchError, match=r"lists no GPU \(No devices were found\)"):
        numa.prefixes("node", 1, environment, machine.root)


@pytest.mark.parametrize(
    ("programs", "text"),
    [((), "no program numactl"), (("numactl",), "no NVIDIA GPU is known here")],
)
def test_frun_ends_before_anything_starts(
    tmp_path: Path, programs: tuple[str, ...], text: str
) -> None:
    """One line, exit 1, and no log folder."""
    for name in programs:
        program(tmp_path, name, "exit 9")
    logs = tmp_path / "logs"
    done = subprocess.run(
        [sys.executable, "-m", "frun", "--numa-binding=node", f"--log-dir={logs}", "-m", "this"],
        env=surroundings(tmp_path, str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1, done.stderr
    assert text in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not logs.exists()


def test_a_bound_worker_runs_behind_its_prefix(tmp_path: Path) -> None:
    """End to end with programs of the test's own: the worker is what numactl executed."""
    program(tmp_path, "numactl", 'export BOUND="$1"; shift; exec "$@"')
    program(tmp_path, "nvidia-smi", 'echo "GPU-one, 00000000:10:00.0"')
    script = tmp_path / "s.py"
    script.write_text("import os\nprint(os.environ['BOUND'], 'FRUN_STORE' in os.environ)\n")
    code = (
        "import sys, pathlib\nfrom frun.agent import numa\n"
        "numa.prefixes.__defaults__ = (pathlib.Path(sys.argv.pop(1)),)\n"
        "from frun.cli import main\nsys.exit(main())\n"
    )
    machine = Machine(tmp_path / "sys", nodes=1, gpu_nodes=(-1,)).build()
    (machine.root / "devices/system/node/node0/cpulist").write_text("0-4095\n", encoding="ascii")
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    done = subprocess.run(
        [sys.executable, "-c", code, str(machine.root), "--numa-binding=node", str(script)],
        env=surroundings(tmp_path, path),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    mine = numa.spell(os.sched_getaffinity(0))
    assert done.stdout.split() == [f"--physcpubind={mine}", "False"]
