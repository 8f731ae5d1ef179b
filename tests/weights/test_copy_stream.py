"""On a GPU a block is copied in a stream of its own: after what its slot was used for, and before it is used again."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from patchpar.comm.collectives import Communicator
from patchpar.comm.transport.shared_memory import SharedMemoryTransport
from patchpar.plan.mesh import Axis
from patchpar.shard.weights import copy_stream, host_store
from patchpar.shard.weights.copy_stream import CopyStream
from patchpar.shard.weights.host_store import HostStore

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class Streams:
    """torch.cuda, as far as streams are concerned; `log` has what was done."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.main = Stream(self, "main")

    def Stream(self, device: torch.device) -> Stream:
        return Stream(self, "copies")

    def Event(self) -> Event:
        return Event(self)

    def current_stream(self, device: torch.device) -> Stream:
        return self.main

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self.log.append(f"in {stream.name}")
        yield
        self.log.append("out")


class Stream:
    def __init__(self, streams: Streams, name: str) -> None:
        self.streams, self.name = streams, name

    def wait_stream(self, other: Stream) -> None:
        self.streams.log.append(f"{self.name} waits for {other.name}")

    def synchronize(self) -> None:
        self.streams.log.append(f"wait for {self.name}")

    def wait_event(self, event: Event) -> None:
        self.streams.log.append(f"{self.name} waits for the event")


class Event:
    def __init__(self, streams: Streams) -> None:
        self.streams = streams

    def record(self, stream: Stream) -> None:
        self.streams.log.append(f"event in {stream.name}")


def test_order_of_copies_and_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    streams: Any = Streams()
    monkeypatch.setattr(copy_stream, "device_module", lambda kind: streams)
    into, x = torch.zeros(4), torch.ones(4)
    copied = CopyStream(GPU).copy([(into, x)])
    before = list(streams.log)
    copied.wait()
    assert torch.equal(into, x)
    assert before == ["copies waits for main", "in copies", "event in copies", "out"]
    assert streams.log[4:] == ["main waits for the event"]


def test_memory_of_a_copy_that_runs_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot may be freed while the copy of a block into it is under way: torch has to know of its stream."""
    streams: Any = Streams()
    monkeypatch.setattr(copy_stream, "device_module", lambda kind: streams)
    x = torch.ones(4)
    into: Any = SimpleNamespace(
        device=GPU,
        copy_=lambda x, non_blocking: streams.log.append("copy"),
        record_stream=lambda stream: streams.log.append(f"used in {stream.name}"),
    )
    stream = CopyStream(GPU)
    stream.copy([(into, x)])
    assert streams.log == ["copies waits for main", "in copies", "copy", "used in copies", "event in copies", "out"]
    stream.finish()
    assert streams.log[-1] == "wait for copies"


def test_memory_of_the_host_is_unpinned_before_it_is_unmapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a pipeline is dropped and not restored: the driver would take it for what is mapped there next."""
    log: list[int | str] = []
    monkeypatch.setattr(host_store, "pin_host_memory", lambda x, device: True)
    monkeypatch.setattr(host_store, "unpin_host_memory", log.append)
    monkeypatch.setattr(CopyStream, "finish", lambda stream: log.append("wait for copies"))
    comm = Communicator(SharedMemoryTransport(0, {}, CPU, 60.0))
    addresses = []
    for is_closed in (False, True):
        store = HostStore(Axis("patch"), CPU)
        store.reserve([])
        store.join(comm)
        assert store._segments is not None
        (memory,) = store._segments
        weakref.finalize(memory, log.append, "unmapped")
        addresses.append(memory.data_ptr())
        del memory
        if is_closed:
            store.close()
            store.close()
        del store
        gc.collect()
    first, second = addresses
    assert log == ["wait for copies", first, "unmapped", "wait for copies", second, "unmapped"]


def test_a_cpu_copies_at_once() -> None:
    into, x = torch.zeros(4), torch.ones(4)
    copied = CopyStream(CPU).copy([(into, x)])
    assert torch.equal(into, x)
    copied.wait()
