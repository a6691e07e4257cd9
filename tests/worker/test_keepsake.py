"""Buffers that are kept for a step that is done again, by this process or by its successor."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from frun.worker.keepsake import Keepsake


class Odd(nn.Module):
    """Buffers of every kind: those of normalization, one that rarely changes, one that is not contiguous."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm1d(5) for _ in range(layers))
        self.register_buffer("table", torch.arange(7.0))
        self.register_buffer("running_odd", torch.zeros(4, 6).t())
        self.register_buffer("running_bytes", torch.zeros(3, dtype=torch.uint8))
        self.register_buffer("empty", torch.zeros(0))

    def change(self, step: int) -> None:
        """Give the buffers the values of a step; the table changes at step 3."""
        with torch.no_grad():
            for name, buffer in self.named_buffers():
                if name != "table" or step == 3:
                    buffer.fill_(step + 1)


def values(module: nn.Module) -> list[list[float]]:
    """Return what the buffers hold."""
    return [buffer.flatten().tolist() for buffer in module.buffers()]


@pytest.mark.parametrize("layers", [0, 3, 700])
def test_the_last_two_steps_can_be_read(layers: int, tmp_path: Path) -> None:
    """By the same process, and by a successor with modules of its own; a third one is gone."""
    module = Odd(layers)
    keepsake = Keepsake(str(tmp_path / "k"), [module], "run")
    keepsake.begin(0)
    seen = {0: values(module)}
    for step in range(1, 6):
        module.change(step)
        keepsake.write(step)
        seen[step] = values(module)
    successor = Odd(layers)
    for reader, into in (
        (keepsake, module),
        (Keepsake(str(tmp_path / "k"), [successor], "run"), successor),
    ):
        for step in (4, 5, 4):
            assert reader.read(step)
            assert values(into) == seen[step]
        assert not reader.read(3)
        assert not reader.read(6)


def test_another_run_or_other_buffers_find_nothing(tmp_path: Path) -> None:
    """What is kept belongs to one run of training and one shape of model."""
    keepsake = Keepsake(str(tmp_path / "k"), [Odd()], "run")
    keepsake.begin(2)
    assert not Keepsake(str(tmp_path / "k"), [Odd()], "another").read(2)
    assert Keepsake(str(tmp_path / "k"), [Odd()], "run").read(2)
    assert not Keepsake(str(tmp_path / "k"), [Odd(4)], "run").read(2)


def test_buffers_that_get_other_memory_are_followed(tmp_path: Path) -> None:
    """`buffer.data = ...` gives a buffer other memory; what is kept is what it holds now."""
    module = Odd()
    keepsake = Keepsake(str(tmp_path / "k"), [module], "run")
    keepsake.begin(0)
    for buffer in module.buffers():
        buffer.data = torch.full_like(buffer, 9)
    keepsake.write(1)
    kept = values(module)
    module.change(1)
    assert keepsake.read(1)
    assert [a for a, b in zip(values(module), kept, strict=True) if a != b] == []


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for nothing."""
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(disk)], check=True)
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_full_disk_is_an_error_and_no_dead_process(full_disk: Path) -> None:
    """Room is taken at the beginning: a write to memory that has no page would end the process."""
    with pytest.raises(OSError, match="No space left"):
        Keepsake(str(full_disk / "k"), [Odd()], "run")
