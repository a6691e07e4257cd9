"""What NVIDIA's library says of a device, and what is made of it; against a stand-in with its shapes."""

import inspect
from collections.abc import Callable

import pynvml
import pytest

from frun.devices import nvidia
from frun.protocol.health import Fact
from tests.fakes.nvml import CONSTANTS, FakeNvml, Gpu


def told(facts: object) -> list[tuple[object, ...]]:
    """Return what matters of facts."""
    assert isinstance(facts, tuple)
    return [
        (fact.name, fact.severity.value, fact.device, fact.lasting)
        for fact in facts
        if isinstance(fact, Fact)
    ]


def warms(gpu: Gpu) -> None:
    """Get too hot."""
    gpu.temperature = 91


def throttles(gpu: Gpu) -> None:
    """Slow down."""
    gpu.reasons = 0x40


def loses_memory(gpu: Gpu) -> None:
    """Have uncorrected errors."""
    gpu.ecc = 2


def remaps(gpu: Gpu) -> None:
    """Need a reset."""
    gpu.rows = (0, 1, 1, 0)


def wears_out(gpu: Gpu) -> None:
    """Have no row left to replace another."""
    gpu.rows = (0, 9, 0, 1)


def is_lost(gpu: Gpu) -> None:
    """Fall off the bus."""
    gpu.lost = True


def xid(number: int) -> Callable[[Gpu], None]:
    """Return what lets a device report an Xid."""

    def report(gpu: Gpu) -> None:
        gpu.xids.append(number)

    report.__name__ = f"xid {number}"
    return report


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (warms, [("temperature", "warning", 1, False)]),
        (throttles, [("throttled", "warning", 1, False)]),
        (loses_memory, [("ecc", "fault", 1, False), ("ecc", "warning", 1, False)]),
        (remaps, [("remapping", "warning", 1, False)]),
        (wears_out, [("remapping-failed", "warning", 1, True)]),
        (is_lost, [("lost", "fault", 1, True)]),
        (xid(94), [("xid-94", "fault", 1, False)]),
        (xid(79), [("xid-79", "fault", 1, True)]),
        (xid(63), [("xid-63", "warning", 1, False)]),
        (xid(13), []),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_device(change: Callable[[Gpu], None], found: list[tuple[object, ...]]) -> None:
    """The second of two devices changes; of the other one nothing is said."""
    gpus = [Gpu("GPU-a"), Gpu("GPU-b")]
    check = nvidia.using(FakeNvml(*gpus), {})
    assert check is not None
    assert told(check.poll()) == []
    change(gpus[1])
    assert told(check.poll()) == found


def test_what_is_over_is_told_once_and_what_lasts_again() -> None:
    """An error that took its process with it is no fault of the next one; a device to be reset stays one."""
    gpu = Gpu()
    check = nvidia.using(FakeNvml(gpu), {})
    assert check is not None
    check.poll()
    gpu.ecc = 1
    gpu.xids += [48, 119]
    assert ("ecc", "fault", 0, False) in told(check.poll())
    assert told(check.poll()) == [("xid-119", "fault", 0, True), ("ecc", "warning", 0, False)]


def test_links() -> None:
    """A link that was up and is down, and one that has to recover; those that never were up are none."""
    gpu = Gpu()
    gpu.links = {0: 1, 1: 1, 2: 0}
    gpu.recoveries = {0: 3, 1: 0}
    check = nvidia.using(FakeNvml(gpu), {})
    assert check is not None
    assert told(check.poll()) == []
    gpu.links[0] = 0
    gpu.recoveries[1] = 2
    found = [told(check.poll()) for _ in range(20)]
    links = [("nvlink-0", "warning", 0, False), ("nvlink-1", "warning", 0, False)]
    assert (found[8], found[9], found[19]) == ([], links, links[:1])


def test_a_device_that_answers_little() -> None:
    """Without ECC, rows, links and reasons there is less to say, and no error."""
    gpu = Gpu()
    gpu.ecc = gpu.rows = gpu.reasons = gpu.temperature = None
    check = nvidia.using(FakeNvml(gpu), {})
    assert check is not None
    assert told(check.poll()) == []


@pytest.mark.parametrize(
    ("visible", "numbers"),
    [
        (None, [0, 1, 2]),
        ("2,0", [2, 0]),
        ("1,7,0", [1]),
        ("GPU-c,GPU-a", [2, 0]),
        ("MIG-1,1", [None, 1]),
        ("", None),
        ("-1", None),
    ],
)
def test_devices_are_numbered_as_workers_see_them(
    visible: str | None, numbers: list[int | None] | None
) -> None:
    """By CUDA_VISIBLE_DEVICES: the worker of local rank N uses the Nth."""
    gpus = [Gpu("GPU-a"), Gpu("GPU-b"), Gpu("GPU-c")]
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    check = nvidia.using(FakeNvml(*gpus), environment)
    if numbers is None:
        assert check is None
        return
    assert check is not None
    for device, number in enumerate(numbers):
        if number is not None:
            gpus[number].lost = True
            assert told(check.poll()) == [("lost", "fault", device, True)]
            gpus[number].lost = False


def test_without_a_driver_or_a_device_there_is_nothing_to_look_at() -> None:
    """No check then, and no error."""
    assert nvidia.using(FakeNvml(installed=False), {}) is None
    assert nvidia.using(FakeNvml(), {}) is None


def test_the_stand_in_is_like_the_binding() -> None:
    """Every name, number and parameter that frun uses is the real one's."""
    assert {name: getattr(pynvml, name) for name in CONSTANTS} == CONSTANTS
    ours = [name for name in vars(FakeNvml) if name.startswith("nvml")]
    assert ours
    for name in ours:
        theirs = inspect.signature(getattr(pynvml, name)).parameters
        assert len(theirs) == len(inspect.signature(getattr(FakeNvml, name)).parameters) - 1, name
    missing = pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
    assert pynvml.NVMLError(missing).value == missing
