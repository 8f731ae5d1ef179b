"""Memory of the host that other ranks open by number: only the file that was meant, and no descriptor stays open."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch

from patchpar.shard.weights.host_segment import HostSegment, opened
from patchpar.shard.weights.packed import _is_on


def test_another_file_of_the_same_number_is_not_opened() -> None:
    """A rank that has died leaves its number to others."""
    segment = HostSegment(4)
    with tempfile.TemporaryFile() as other:
        host, process, _, *file = json.loads(segment.address)
        assert opened(json.dumps([host, process, other.fileno(), *file]).encode()) is None
    found = opened(segment.address)
    assert found is not None
    segment.memory[0] = 7
    assert found[0] == 7


def test_what_is_opened_leaves_no_descriptor() -> None:
    segment, folder = HostSegment(4), Path("/proc/self/fd")
    before = len(list(folder.iterdir()))
    opened(segment.address)
    assert len(list(folder.iterdir())) == before
    segment.forget()
    assert len(list(folder.iterdir())) == before - 1


def test_weights_on_another_gpu_are_elsewhere() -> None:
    own, other = (torch.device("cuda", index) for index in range(2))
    assert _is_on(own, [own, torch.device("cpu")])
    assert _is_on(own, [torch.device("cuda")])
    assert not _is_on(other, [own])
