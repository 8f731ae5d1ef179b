"""On a GPU a block is copied in a stream of its own: after what its slot was used for, and before it is used again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from patchpar.shard.weights import copy_stream
from patchpar.shard.weights.copy_stream import CopyStream

GPU = torch.device("cuda", 0)


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


def test_a_cpu_copies_at_once() -> None:
    into, x = torch.zeros(4), torch.ones(4)
    copied = CopyStream(torch.device("cpu")).copy([(into, x)])
    assert torch.equal(into, x)
    copied.wait()
