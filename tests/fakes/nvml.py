"""A stand-in for NVIDIA's binding `pynvml`: names, arguments, answers and errors as in nvidia-ml-py 13."""

from types import SimpleNamespace
from typing import Any

TIMEOUT, NOT_SUPPORTED, GPU_IS_LOST, LIBRARY_NOT_FOUND = 10, 3, 15, 12
CONSTANTS = {
    "NVML_ERROR_TIMEOUT": TIMEOUT,
    "NVML_ERROR_GPU_IS_LOST": GPU_IS_LOST,
    "NVML_ERROR_RESET_REQUIRED": 16,
    "NVML_ERROR_GPU_NOT_FOUND": 28,
    "NVML_TEMPERATURE_GPU": 0,
    "NVML_TEMPERATURE_THRESHOLD_SLOWDOWN": 1,
    "NVML_MEMORY_ERROR_TYPE_UNCORRECTED": 1,
    "NVML_VOLATILE_ECC": 0,
    "NVML_NVLINK_MAX_LINKS": 36,
    "NVML_NVLINK_ERROR_DL_RECOVERY": 1,
    "nvmlEventTypeXidCriticalError": 0x8,
    "nvmlClocksThrottleReasonHwThermalSlowdown": 0x40,
    "nvmlClocksThrottleReasonSwThermalSlowdown": 0x20,
    "nvmlClocksThrottleReasonHwPowerBrakeSlowdown": 0x80,
}


class Gpu:
    """What one device answers. A test changes it between polls."""

    def __init__(self, uuid: str = "GPU-0") -> None:
        self.uuid = uuid
        self.temperature: int | None = 40
        self.ecc: int | None = 0
        self.rows: tuple[int, int, int, int] | None = (0, 0, 0, 0)
        self.reasons: int | None = 0
        self.links: dict[int, int] = {}
        """Per link 1: up, 0: down."""
        self.recoveries: dict[int, int] = {}
        self.xids: list[int] = []
        self.lost = False


class FakeNvml:
    """The functions that frun calls, for these devices."""

    class NVMLError(Exception):
        """Any error, with its number."""

        def __init__(self, value: int) -> None:
            super().__init__(f"error {value}")
            self.value = value

    def __init__(self, *gpus: Gpu, installed: bool = True) -> None:
        """Not `installed`: there is no driver."""
        self.gpus = list(gpus)
        self.installed = installed
        for name, value in CONSTANTS.items():
            setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    def _answer(self, gpu: Gpu, value: Any) -> Any:
        if gpu.lost:
            raise self.NVMLError(GPU_IS_LOST)
        if value is None:
            raise self.NVMLError(NOT_SUPPORTED)
        return value

    def nvmlInit(self) -> None:
        """Begin."""
        if not self.installed:
            raise self.NVMLError(LIBRARY_NOT_FOUND)

    def nvmlDeviceGetCount(self) -> int:
        """Count the devices."""
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Gpu:
        """Return a handle."""
        return self.gpus[index]

    def nvmlDeviceGetUUID(self, handle: Gpu) -> str:
        """Name a device."""
        return handle.uuid

    def nvmlDeviceGetTemperature(self, handle: Gpu, sensor: int) -> int:
        """Return degrees Celsius."""
        assert sensor == 0
        return int(self._answer(handle, handle.temperature))

    def nvmlDeviceGetTemperatureThreshold(self, handle: Gpu, threshold: int) -> int:
        """Return where it slows down."""
        assert threshold == 1
        return int(self._answer(handle, 90))

    def nvmlDeviceGetTotalEccErrors(self, handle: Gpu, error: int, counter: int) -> int:
        """Count memory errors."""
        assert (error, counter) == (1, 0)
        return int(self._answer(handle, handle.ecc))

    def nvmlDeviceGetRemappedRows(self, handle: Gpu) -> Any:
        """Return corrected, uncorrected, pending, failed."""
        return self._answer(handle, handle.rows)

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: Gpu) -> int:
        """Return bits."""
        return int(self._answer(handle, handle.reasons))

    def nvmlDeviceGetNvLinkState(self, device: Gpu, link: int) -> int:
        """Say if a link is up."""
        return int(self._answer(device, device.links.get(link)))

    def nvmlDeviceGetNvLinkErrorCounter(self, device: Gpu, link: int, counter: int) -> int:
        """Count recoveries."""
        assert counter == 1
        return int(self._answer(device, device.recoveries.get(link)))

    def nvmlEventSetCreate(self) -> list[Gpu]:
        """Make a set of events."""
        return []

    def nvmlDeviceRegisterEvents(self, handle: Gpu, events: int, into: list[Gpu]) -> None:
        """Listen to a device."""
        assert events == 0x8
        into.append(handle)

    def nvmlEventSetWait(self, events: list[Gpu], timeout_ms: int) -> Any:
        """Return the next event."""
        assert timeout_ms == 0
        for gpu in events:
            if gpu.xids:
                return SimpleNamespace(device=gpu, eventType=0x8, eventData=gpu.xids.pop(0))
        raise self.NVMLError(TIMEOUT)
