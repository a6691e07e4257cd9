"""Objects move to new objects on one rank; fingerprints; reading another process's memory."""

import ctypes
import os
import signal
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from frun.errors import StateMismatch
from frun.worker import pull
from frun.worker.fingerprint import fingerprint, fingerprint_on_device
from frun.worker.placing import adopt, poison
from frun.worker.state import pieces, take
from tests.worker.stateful import Holder, Untouchable, bits


def trained(seed: int, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and its optimizer after some steps."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 / (steps + 1))
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 6)).sum().backward()
        optimizer.step()
    return model, optimizer


def test_new_objects_adopt_the_states_of_old_ones() -> None:
    """The new model is filled in place; what the optimizer made is handed over, not copied."""
    old_model, old = trained(1, 3)
    new_model, new = trained(2, 0)
    moments = [state["exp_avg"].data_ptr() for state in old.state.values()]
    places = [parameter.data_ptr() for parameter in new_model.parameters()]
    wanted = bits([old_model.state_dict(), old.state_dict()])
    moved = adopt({"model": old_model, "opt": old}, {"model": new_model, "opt": new})
    assert bits([new_model.state_dict(), new.state_dict()]) == wanted
    assert [parameter.data_ptr() for parameter in new_model.parameters()] == places
    assert [state["exp_avg"].data_ptr() for state in new.state.values()] == moments
    assert moved == sum(tensor.nbytes for tensor in new_model.state_dict().values())


def test_the_same_objects_are_left_alone() -> None:
    """An object that was passed before is neither asked nor given a state."""
    same = Untouchable()
    assert adopt({"x": same}, {"x": same}) == 0


def test_adopting_names_the_first_difference() -> None:
    """A script that builds something else on re-entry is told what."""
    with pytest.raises(StateMismatch, match=r"^restore: m weight was float32 \[2, 1\] before"):
        adopt({"m": nn.Linear(1, 2)}, {"m": nn.Linear(1, 3)})
    with pytest.raises(StateMismatch, match=r"^restore: n was not passed to restore before"):
        adopt({}, {"n": nn.Linear(1, 3)})


def test_poison_is_nonsense_in_every_dtype() -> None:
    """Floats become NaN, integers -1 or their greatest, bools True; expanded and strided ones too."""
    kinds = [torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.float8_e5m2]
    floats = [torch.zeros(4, 4, dtype=kind) for kind in kinds]
    whole = [torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.uint8)]
    views = [torch.zeros(4, 4).t()[::2], torch.zeros(4, 1).expand(4, 5), torch.zeros(())]
    poison([*floats, *whole, *views, torch.zeros(2, dtype=torch.bool), torch.zeros(0)])
    assert all(bool(t.to(torch.complex64).isnan().all()) for t in floats + views)
    assert whole[0].tolist() == [-1] * 3
    assert whole[1].tolist() == [255] * 3


def test_pieces_follow_from_the_shape_alone() -> None:
    """A tensor of other strides is cut alike, nothing is lost, and no piece is over the limit."""
    plain = torch.arange(7 * 11 * 5, dtype=torch.int32).reshape(7, 11, 5)
    turned = plain.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    for limit in (4, 16, 100, 230, 10_000):
        one, two = list(pieces(plain, limit)), list(pieces(turned, limit))
        assert [p.tolist() for p in one] == [p.tolist() for p in two]
        assert all(p.nbytes <= limit for p in one)
        assert torch.cat([p.reshape(-1) for p in one]).equal(plain.reshape(-1))


@pytest.mark.parametrize("size", [1, 7, 8, 16_384, 16_385, 1_000_003])
def test_a_fingerprint_sees_every_byte_and_its_place(size: int) -> None:
    """One flipped bit, and two swapped bytes or rows, change it; memory's alignment does not."""
    data = torch.randint(0, 256, (size,), dtype=torch.uint8)
    first = fingerprint(data)
    moved = torch.empty(size + 3, dtype=torch.uint8)[3:]
    moved.copy_(data)
    assert fingerprint(moved) == first
    for place in {0, size // 2, size - 1}:
        for bit in (1, 128):
            data[place] ^= bit
            assert fingerprint(data) != first
            data[place] ^= bit
    assert fingerprint(data) == first == fingerprint_on_device(data)
    assert fingerprint_on_device(moved) == first
    if size > 16_385:
        rows = data[: size // 2048 * 2048].view(-1, 2048)
        rows[[0, 1]] = rows[[1, 0]]
        assert fingerprint(data) != first


def test_paths_are_names_that_a_person_can_follow() -> None:
    """Keys, list positions and keys with the same spelling each have a path of their own."""
    state = {
        "a": [torch.zeros(1), {"b": torch.zeros(2)}],
        "a.0": torch.zeros(3),
        0: (torch.ones(4),),
    }
    found = take({"x": Holder(state)}).layout.places
    assert [(name, place.path) for name, place in found] == [
        ("x", "a.0"),
        ("x", "a.1.b"),
        ("x", "a.0 (2)"),
        ("x", "0.0"),
    ]


def test_tensors_inside_other_objects_are_found() -> None:
    """A tensor in a set or an attribute is sent as a tensor too, under a number."""
    box = Holder({"inner": torch.arange(5)})
    state = take({"x": Holder({"box": box})})
    assert [tensor.tolist() for tensor in state.tensors] == [[0, 1, 2, 3, 4]]
    assert state.tensors[0].data_ptr() == box.state["inner"].data_ptr()


def _child(memory: Any) -> int:
    """Fork a process that holds the same memory and waits."""
    pid = os.fork()
    if pid == 0:
        ctypes.memset(memory, 7, len(memory))
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    os.waitpid(pid, os.WUNTRACED)
    return pid


def test_another_processs_memory_is_read_in_place() -> None:
    """Many stretches, more than one call takes, arrive; a process that is gone is a reset connection."""
    memory = (ctypes.c_char * 5000)()
    pid = _child(memory)
    try:
        mine = (ctypes.c_char * 5000)()
        base, there = ctypes.addressof(mine), ctypes.addressof(memory)
        pull.read(pid, [(base + n, there + n, 2) for n in range(0, 5000, 2)])
        assert mine.raw == b"\7" * 5000
        with pytest.raises(ConnectionResetError):
            pull.read(pid, [(base, 16, 8)])
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    with pytest.raises(ConnectionResetError, match="closed by peer"):
        pull.read(pid, [(base, there, 8)])


def test_an_offer_is_tried_before_it_is_trusted() -> None:
    """Another boot, another secret or a process that is not there: no reading."""
    with pull.offered() as offer:
        assert pull.possible(offer)
        for wrong in (
            replace(offer, boot="x"),
            replace(offer, secret=b"0" * 16),
            replace(offer, address=8),
            replace(offer, pid=1 << 22),
        ):
            assert not pull.possible(wrong)
