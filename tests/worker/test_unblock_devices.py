"""The calls into NCCL and HCCL, in their order, recorded behind the seam of each."""

import logging
import os
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from frun.worker.unblock_hccl import HcclUnblocker
from frun.worker.unblock_nccl import NcclUnblocker, backends_named


class Recorder:
    """Both seams: each group is a list of backends, each call is written down."""

    def __init__(self, *, version: tuple[int, ...] = (2, 27, 5)) -> None:
        """Nothing was called yet."""
        self.calls: list[str] = []
        self.threads: set[int] = set()
        self.together = threading.Barrier(1)
        self.fail = False
        self._version = version

    def backends(self, group: Any) -> list[Any]:
        """Return what the group is made of."""
        return list(group)

    def version(self) -> tuple[int, ...]:
        """Return the version that the test wants."""
        return self._version

    def abort(self, backend: Any, reason: str = "") -> None:
        """Write an abort down once as many as the test wants are under way."""
        self.together.wait(5)
        self.threads.add(threading.get_ident())
        self.calls.append(f"abort {backend}")
        if self.fail:
            raise RuntimeError("broken")

    def settle(self) -> None:
        """Write it down."""
        self.calls.append("settle")

    def synchronize(self) -> None:
        """Write it down."""
        self.calls.append("synchronize")

    def current_device(self) -> int:
        """Return device 3."""
        return 3

    def stop_device(self, device: int) -> None:
        """Write it down."""
        self.calls.append(f"stop {device}")
        if self.fail:
            raise RuntimeError("dictionary changed size during iteration")

    def restart_device(self, device: int) -> None:
        """Write it down."""
        self.calls.append(f"restart {device}")


def test_nccl_aborts_all_at_once_and_only_once() -> None:
    """Each abort waits until all have begun, so aborts one after another would hang."""
    api = Recorder()
    api.together = threading.Barrier(3)
    nccl = NcclUnblocker({}, api)
    for group in (["world"], ["left"], ["right"], []):
        nccl.created(group)
    assert nccl.unblock() == 3
    assert nccl.unblock() == 0
    assert sorted(api.calls) == ["abort left", "abort right", "abort world"]
    assert threading.get_ident() not in api.threads


def test_nccl_teardown_waits_for_the_device_and_aborts_no_group_twice() -> None:
    """After an abort the groups are let go as they are; the device stands still before a copy."""
    api = Recorder()
    nccl = NcclUnblocker({}, api)
    nccl.created(["world"])
    nccl.unblock()
    nccl.created(["late"])
    nccl.shutdown(["world"])
    nccl.shutdown(["late"])
    assert nccl.teardown() == 0
    assert api.calls == ["abort world", "abort late", "synchronize"]
    assert nccl.teardown() == 0
    assert api.calls[-1] == "synchronize"
    assert len(api.calls) == 3


def test_nccl_forgets_what_the_script_destroyed() -> None:
    """A communicator that torch freed is not touched again."""
    api = Recorder()
    nccl = NcclUnblocker({}, api)
    nccl.created(["world"])
    nccl.created(["sub"])
    nccl.forget(["sub"])
    assert nccl.unblock() == 1
    assert api.calls == ["abort world"]


def test_nccl_settles_only_where_it_has_groups() -> None:
    """A process without NCCL groups never touches a device."""
    api = Recorder()
    nccl = NcclUnblocker({}, api)
    nccl.settle()
    nccl.teardown()
    assert api.calls == []
    nccl.created(["world"])
    nccl.settle()
    assert api.calls == ["settle"]


def test_nccl_goes_on_when_an_abort_fails_or_hangs(caplog: pytest.LogCaptureFixture) -> None:
    """Both are reported; the agent ends a worker that does not come out."""
    api = Recorder()
    api.fail = True
    nccl = NcclUnblocker({}, api, limit_s=0.05)
    nccl.created(["world"])
    assert nccl.unblock() == 1
    assert "an NCCL abort failed: broken" in caplog.text
    api.together = threading.Barrier(2)
    nccl.created(["next"])
    assert nccl.unblock() == 1
    assert "1 of 1 NCCL aborts took over" in caplog.text
    api.together.abort()


def test_nccl_watchdog_is_told_to_leave_errors_to_frun() -> None:
    """torchrun's default would end a survivor; a value that the user chose stays."""
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    for before, after in (("1", "0"), ("3", "3"), (None, None)):
        environ = {} if before is None else {name: before}
        with NcclUnblocker(environ, Recorder()).creating(2):
            assert environ.get(name) == after


def test_nccl_versions_with_known_traps_are_named(caplog: pytest.LogCaptureFixture) -> None:
    """One warning for a version whose abort is known to hang or crash, none for others."""
    with caplog.at_level(logging.WARNING):
        for version in ((2, 25, 1), (2, 26, 2), (2, 28, 5), ()):
            nccl = NcclUnblocker({}, Recorder(version=version))
            nccl.created(["world"])
            nccl.created(["sub"])
    # An abort that an earlier test left in its thread may still speak in between.
    told = [record.getMessage() for record in caplog.records]
    assert [message for message in told if message.startswith("NCCL ")] == [
        "NCCL 2.25.1: an abort can hang; use another version",
        "NCCL 2.28.5: an abort can crash the process; use another version",
    ]


def test_hccl_stops_once_and_restarts_before_it_frees() -> None:
    """Stop from the side thread; restart while torch still has its table of groups; then free."""
    api = Recorder()
    hccl = HcclUnblocker(api)
    hccl.created(["world"])
    hccl.created(["sub"])
    hccl.created([])
    assert hccl.unblock() == 2
    assert hccl.unblock() == 0
    for group in (["world"], ["sub"], []):
        hccl.shutdown(group)
    hccl.teardown()
    assert api.calls == ["stop 3", "restart 3", "abort world", "abort sub"]


def test_hccl_without_a_stop_only_frees() -> None:
    """A teardown that no fault preceded leaves the device running."""
    api = Recorder()
    hccl = HcclUnblocker(api)
    hccl.settle()
    hccl.created(["world"])
    hccl.settle()
    hccl.shutdown(["world"])
    hccl.teardown()
    assert hccl.unblock() == 0
    assert api.calls == ["settle", "abort world"]


def test_hccl_goes_on_when_stopping_was_not_clean(caplog: pytest.LogCaptureFixture) -> None:
    """The tasks are aborted before torch_npu walks through the groups; the restart still comes."""
    api = Recorder()
    api.fail = True
    hccl = HcclUnblocker(api)
    hccl.created(["world"])
    assert hccl.unblock() == 1
    hccl.shutdown(["world"])
    assert api.calls == ["stop 3", "restart 3", "abort world"]
    assert "stopping npu:3 was not clean" in caplog.text
    assert "an HCCL communicator was not freed" in caplog.text


def test_backends_are_found_once_and_without_wrappers() -> None:
    """A group of several devices has one backend for each; debug mode wraps them."""

    class ProcessGroupNCCL:
        pass

    inner = ProcessGroupNCCL()
    by_device = {"cpu": SimpleNamespace(), "cuda": SimpleNamespace(wrapped_pg=inner), "xpu": inner}
    group = SimpleNamespace(_device_types=list(by_device), _get_backend=by_device.__getitem__)
    assert backends_named(group, "ProcessGroupNCCL") == [inner]
    assert backends_named(object(), "ProcessGroupNCCL") == []


def test_the_modules_import_without_torch() -> None:
    """Importing them costs a worker nothing before its script imports torch."""
    code = (
        "import sys, frun.worker.groups;"
        "assert 'torch' not in sys.modules;"
        "groups = frun.worker.groups.Groups();"
        "assert groups.unblock().count == 0;"
        "assert groups.teardown().count == 0;"
        "groups.settle();"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env=dict(os.environ))
