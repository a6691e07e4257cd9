"""Asks NVIDIA's management library how the devices of this host are.

Written from the library's documentation and its Python binding; it has never run on such a device.
"""

import importlib
import importlib.util
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

from frun.devices.contract import Fact, FaultClass, Severity, Surroundings

_APPLICATIONS = frozenset({8, 13, 31, 43, 45, 68, 109})
"""Xid events that the program on the device causes: its own exception tells more."""
_ENDS = frozenset({48, 74, 94})
"""After these the process is lost, and another one can use the device."""
_LASTS = frozenset({46, 62, 64, 79, 95, 119, 120, 140, 143})
"""After these nothing runs on the device before it was reset."""
_LINKS_EVERY = 10
"""Polls from one look at the links to the next: there are many of them."""


class Nvidia:
    """The devices that the workers of this host may see."""

    def __init__(self, nvml: Any, handles: Sequence[Any]) -> None:
        """`nvml` is the binding, initialised; `handles` are in the workers' order, None: not looked at."""
        self._devices = [
            _Device(nvml, number, handle)
            for number, handle in enumerate(handles)
            if handle is not None
        ]

    def poll(self) -> Iterable[Fact]:
        """Return what is wrong with each device; see `Plugin`."""
        return tuple(fact for device in self._devices for fact in device.poll())


class _Device:
    def __init__(self, nvml: Any, number: int, handle: Any) -> None:
        self._nvml = nvml
        self._number = number
        self._handle = handle
        self._polls = 0
        self._lasting: dict[int, Fact] = {}
        """Xid events that last, which are told only once."""
        self._uncorrected: int | None = None
        self._recovered: dict[int, int] = {}
        """Per link that was up, how often it had to recover."""
        self._link_facts: tuple[Fact, ...] = ()
        self._lost = frozenset(
            (
                nvml.NVML_ERROR_GPU_IS_LOST,
                nvml.NVML_ERROR_RESET_REQUIRED,
                nvml.NVML_ERROR_GPU_NOT_FOUND,
            )
        )
        self._slowdown = self._ask(
            "nvmlDeviceGetTemperatureThreshold", nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
        )
        self._events = self._registered()

    def poll(self) -> Iterator[Fact]:
        nvml = self._nvml
        try:
            # A question that every device can answer tells whether it is there.
            temperature = nvml.nvmlDeviceGetTemperature(self._handle, nvml.NVML_TEMPERATURE_GPU)
        except nvml.NVMLError as error:
            if error.value in self._lost:
                yield self._fault("lost", f"the driver says: {error}", lasting=True)
                return
            temperature = None
        yield from self._xids()
        yield from self._memory()
        yield from self._heat(temperature)
        if self._polls % _LINKS_EVERY == 0:
            self._link_facts = tuple(self._links())
        self._polls += 1
        yield from self._link_facts

    def _registered(self) -> Any:
        nvml = self._nvml
        try:
            events = nvml.nvmlEventSetCreate()
            nvml.nvmlDeviceRegisterEvents(self._handle, nvml.nvmlEventTypeXidCriticalError, events)
        except nvml.NVMLError:
            return None
        return events

    def _xids(self) -> Iterator[Fact]:
        for xid in self._told():
            if xid in _LASTS:
                self._lasting[xid] = self._fault(f"xid-{xid}", f"Xid {xid}", lasting=True)
            elif xid in _ENDS:
                yield self._fault(f"xid-{xid}", f"Xid {xid}")
            elif xid not in _APPLICATIONS:
                yield self._warning(f"xid-{xid}", f"Xid {xid}")
        yield from self._lasting.values()

    def _told(self) -> Iterator[int]:
        """Yield the events since the last poll."""
        while self._events is not None:
            try:
                yield int(self._nvml.nvmlEventSetWait(self._events, 0).eventData)
            except self._nvml.NVMLError as error:
                if error.value != self._nvml.NVML_ERROR_TIMEOUT:
                    self._events = None
                return

    def _memory(self) -> Iterator[Fact]:
        nvml = self._nvml
        count = self._ask(
            "nvmlDeviceGetTotalEccErrors",
            nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
            nvml.NVML_VOLATILE_ECC,
        )
        if count is not None:
            before, self._uncorrected = self._uncorrected, count
            if before is not None and count > before:
                yield self._fault("ecc", f"{count - before} uncorrected memory errors just now")
            if count:
                yield self._warning(
                    "ecc", f"{count} uncorrected memory errors since the driver was loaded"
                )
        rows = self._ask("nvmlDeviceGetRemappedRows")
        if rows is not None:
            _, _, pending, failed = rows
            if failed:
                yield self._warning(
                    "remapping-failed", "a row of its memory can not be replaced", lasting=True
                )
            elif pending:
                yield self._warning(
                    "remapping", "a row of its memory is replaced with the next reset"
                )

    def _heat(self, temperature: int | None) -> Iterator[Fact]:
        nvml = self._nvml
        if temperature is not None and self._slowdown and temperature >= self._slowdown:
            yield self._warning(
                "temperature", f"{temperature} C, it slows down at {self._slowdown}"
            )
        reasons = self._ask("nvmlDeviceGetCurrentClocksEventReasons")
        if reasons is None:
            reasons = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons") or 0
        named = (
            (nvml.nvmlClocksThrottleReasonHwThermalSlowdown, "heat, by the hardware"),
            (nvml.nvmlClocksThrottleReasonSwThermalSlowdown, "heat, by the driver"),
            (nvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown, "its power supply"),
        )
        found = [text for bit, text in named if reasons & bit]
        if found:
            yield self._warning("throttled", f"slowed down for {', '.join(found)}")

    def _links(self) -> Iterator[Fact]:
        nvml = self._nvml
        for link in range(nvml.NVML_NVLINK_MAX_LINKS):
            up = self._ask("nvmlDeviceGetNvLinkState", link)
            if up is None:
                if link not in self._recovered:
                    break
                up = 0
            if not up:
                if link in self._recovered:
                    yield self._warning(
                        f"nvlink-{link}", f"NVLink {link} is down", FaultClass.NETWORK
                    )
                continue
            count = self._ask(
                "nvmlDeviceGetNvLinkErrorCounter", link, nvml.NVML_NVLINK_ERROR_DL_RECOVERY
            )
            before = self._recovered.setdefault(link, count or 0)
            if count is not None and count > before:
                self._recovered[link] = count
                yield self._warning(
                    f"nvlink-{link}",
                    f"NVLink {link} had to recover {count - before} times",
                    FaultClass.NETWORK,
                )

    def _ask(self, function: str, *args: Any) -> Any:
        """Return the answer about this device; None if it has none, or the binding is an older one."""
        call = getattr(self._nvml, function, None)
        if call is None:
            return None
        try:
            return call(self._handle, *args)
        except self._nvml.NVMLError:
            return None

    def _fault(self, name: str, reason: str, *, lasting: bool = False) -> Fact:
        return Fact(
            name=name,
            severity=Severity.FAULT,
            fault_class=FaultClass.DEVICE,
            reason=reason,
            device=self._number,
            lasting=lasting,
        )

    def _warning(
        self,
        name: str,
        reason: str,
        fault_class: FaultClass = FaultClass.DEVICE,
        *,
        lasting: bool = False,
    ) -> Fact:
        return Fact(
            name=name,
            severity=Severity.WARNING,
            fault_class=fault_class,
            reason=reason,
            device=self._number,
            lasting=lasting,
        )


def plugin(around: Surroundings) -> Nvidia | None:
    """Make it where the binding, its library, a device, and a torch that can use it are found."""
    if importlib.util.find_spec("pynvml") is None or not _torch_uses_cuda():
        return None
    return using(importlib.import_module("pynvml"), around.environment)


def using(nvml: ModuleType | Any, environment: Mapping[str, str]) -> Nvidia | None:
    """Make it from a binding; None if workers see no device."""
    try:
        nvml.nvmlInit()
        present = [
            nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())
        ]
    except nvml.NVMLError:
        return None
    handles = _visible(nvml, present, environment.get("CUDA_VISIBLE_DEVICES"))
    return Nvidia(nvml, handles) if any(handle is not None for handle in handles) else None


def _visible(nvml: Any, present: Sequence[Any], names: str | None) -> list[Any]:
    """Return the handles of the devices that CUDA_VISIBLE_DEVICES shows, in its order.

    A list ends at the first number that is no device; a part of a device (MIG) is not looked at.
    """
    if names is None:
        return list(present)
    found: list[Any] = []
    for name in (each.strip() for each in names.split(",")):
        if name.lstrip("-").isdigit():
            if not 0 <= int(name) < len(present):
                break
            found.append(present[int(name)])
        elif name.startswith("GPU-"):
            uuids = [nvml.nvmlDeviceGetUUID(handle) for handle in present]
            found.append(
                next((h for h, u in zip(present, uuids, strict=True) if u.startswith(name)), None)
            )
        else:
            found.append(None)
    return found


def _torch_uses_cuda() -> bool:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return "+cpu" not in version("torch")
    except PackageNotFoundError:
        return True  # the workers' interpreter may be another one
