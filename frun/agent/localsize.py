"""Owns how many workers this machine may run: processor affinity and quota, devices of any kind.

torch is never imported here; where only it can answer, a short-lived process is asked.
"""

import importlib
import importlib.metadata
import json
import logging
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from frun.errors import LaunchError, UsageError

logger = logging.getLogger(__name__)

ASK_TIMEOUT_S = 60.0
"""Bound on asking torch; importing it cold from a slow disk can take tens of seconds."""

_DEVICE_FILES = ("nvidiactl", "kfd", "dri", "davinci_manager", "accel", "dxg", "hl0")
_ASK = """
import json, sys, torch
kind, found = sys.argv[1], None
if kind in ("auto", "gpu"):
    accelerator = getattr(torch, "accelerator", None)
    if torch.cuda.is_available():
        found = ("cuda", torch.cuda.device_count())
    elif kind == "auto" and accelerator is not None and accelerator.is_available():
        found = (accelerator.current_accelerator().type, accelerator.device_count())
elif kind == "xpu":
    if torch.xpu.is_available():
        found = ("xpu", torch.xpu.device_count())
elif kind == torch._C._get_privateuse1_backend_name():
    module = getattr(torch, kind, None)
    if module is not None and module.is_available():
        found = (kind, module.device_count())
else:
    found = ("unknown", 0)
print(json.dumps(found))
"""


def worker_count(kind: str, *, source: str, python: str, environment: Mapping[str, str]) -> int:
    """Return the number of workers that `auto`, `cpu`, `gpu`, `xpu` or a backend's name means.

    `source` is the flag or variable for messages; `python` the interpreter of the workers, asked
    about devices where nothing cheaper can tell (bounded by `ASK_TIMEOUT_S`).

    Raises:
        UsageError: there is no such device here, or no such kind.
        LaunchError: the interpreter could not answer.
    """
    if kind == "cpu":
        return _chosen(kind, cpu_allowance(), "usable cpus")
    if kind in ("auto", "gpu") and (count := _nvidia_count(environment)):
        return _chosen(kind, count, "NVIDIA devices")
    if kind == "auto" and not _has_device_files(Path("/dev")):
        return _chosen(kind, cpu_allowance(), "usable cpus and no accelerator")
    found = ask_torch(kind, python=python, environment=environment)
    if found is not None and found[1] > 0:
        return _chosen(kind, found[1], f"{found[0]} devices")
    if found is not None and found[0] == "unknown":
        raise UsageError(
            f"{source}: {kind!r} is not a number, auto, cpu, gpu, xpu or the name of a device "
            "backend that is installed here"
        )
    if kind == "auto":
        return _chosen(kind, cpu_allowance(), "usable cpus and no accelerator that torch can use")
    raise UsageError(f"{source}: {kind!r}, but torch finds no such device here: give a number")


def cpu_allowance(proc: Path = Path("/proc/self"), root: Path = Path("/sys/fs/cgroup")) -> int:
    """Return how many processors this process may use: affinity, and the cgroup's quota."""
    allowed = len(os.sched_getaffinity(0))
    quota = cgroup_quota(proc, root)
    return allowed if quota is None else min(allowed, max(1, int(quota)))


def cgroup_quota(proc: Path, root: Path) -> float | None:
    """Return the smallest processor quota, in cpus, of this process's control groups; None: none.

    A group's quota bounds all groups below it. Both versions of the interface are read; groups
    that are not visible (a container) are skipped.
    """
    quotas: list[float] = []
    for line in _read(proc / "cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            base, parse = root, _quota_v2
        elif "cpu" in controllers.split(","):
            base, parse = root / "cpu", _quota_v1
        else:
            continue
        group = Path(path.lstrip("/"))
        for folder in (group, *group.parents):
            quota = parse(base / folder)
            if quota is not None:
                quotas.append(quota)
    return min(quotas, default=None)


def ask_torch(kind: str, *, python: str, environment: Mapping[str, str]) -> tuple[str, int] | None:
    """Return (device type, count) from the workers' own torch; None: it finds none.

    Raises:
        LaunchError: the interpreter does not start, has no torch, or takes too long.
    """
    try:
        done = subprocess.run(
            [python, "-c", _ASK, kind],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=ASK_TIMEOUT_S,
            check=True,
        )
        found = json.loads(done.stdout.splitlines()[-1])
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["no message"])[-1]
        raise LaunchError(f"{python} could not count devices: {last}") from None
    except subprocess.TimeoutExpired:
        raise LaunchError(
            f"{python} did not count devices within {ASK_TIMEOUT_S:.0f} s: "
            "give a number to --nproc-per-node"
        ) from None
    except (OSError, ValueError, IndexError) as error:
        raise LaunchError(f"{python} could not be asked for devices: {error}") from None
    return None if found is None else (str(found[0]), int(found[1]))


def _chosen(kind: str, count: int, what: str) -> int:
    logger.info("nproc_per_node %s: %s workers, this host has %s %s", kind, count, count, what)
    return count


def _nvidia_count(environment: Mapping[str, str]) -> int:
    """Count with NVIDIA's library; 0 when it, its driver, or CUDA in torch is missing."""
    try:
        if "+cpu" in importlib.metadata.version("torch"):
            return 0
        pynvml = importlib.import_module("pynvml")
    except (ImportError, importlib.metadata.PackageNotFoundError):
        return 0
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return 0
    try:
        present = int(pynvml.nvmlDeviceGetCount())
    except pynvml.NVMLError:
        return 0
    finally:
        pynvml.nvmlShutdown()
    return visible_count(environment.get("CUDA_VISIBLE_DEVICES"), present)


def visible_count(devices: str | None, present: int) -> int:
    """Return how many of `present` devices CUDA_VISIBLE_DEVICES shows, by CUDA's rules.

    The list ends at the first name that is no device; names that are not numbers are believed.
    """
    if devices is None:
        return present
    count = 0
    for name in (each.strip() for each in devices.split(",")):
        numeric = name.lstrip("-").isdigit()
        if not name or (numeric and not 0 <= int(name) < present):
            break
        count += 1
    return count


def _has_device_files(folder: Path) -> bool:
    return any((folder / name).exists() for name in _DEVICE_FILES)


def _quota_v2(folder: Path) -> float | None:
    words = _read(folder / "cpu.max").split()
    if len(words) != 2 or words[0] == "max":
        return None
    return int(words[0]) / int(words[1])


def _quota_v1(folder: Path) -> float | None:
    quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
    if not quota or not period or int(quota) <= 0:
        return None
    return int(quota) / int(period)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""
