"""Values that lie in memory which peers have mapped are sent without a copy, and the memory is freed everywhere."""

from __future__ import annotations

import os
from threading import get_ident
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from patchpar.comm.transport import Incoming, Outgoing, TensorSpec, arena
from patchpar.comm.transport.arena import map_segment
from patchpar.comm.transport.peer_socket import PeerSocket
from patchpar.comm.transport.shared_memory import SharedMemoryTransport
from patchpar.launch.anonymous_file import anonymous_file
from tests.unit.threads import on_threads

SIZE = 4096
SPEC = TensorSpec((SIZE,), torch.uint8)


def kept(transport: SharedMemoryTransport, *, registers: bool = True) -> Tensor:
    """Memory of two values of this rank."""
    descriptor = anonymous_file("test")
    os.ftruncate(descriptor, 2 * SIZE)
    memory = map_segment(descriptor)
    memory[:SIZE], memory[SIZE:] = transport.rank + 1, transport.rank + 11
    if registers:
        transport.register(descriptor, memory)
    os.close(descriptor)
    return memory


def copies(transport: SharedMemoryTransport) -> list[int]:
    """Bytes of segments into which messages have been copied."""
    return [segment.used for segment in transport._arena.segments.values() if not segment.is_kept]


def exchanged(transport: SharedMemoryTransport, x: Tensor) -> Any:
    peer = 1 - transport.rank
    return transport.send_recv([Outgoing((peer,), (x,))], [Incoming(peer, (SPEC,))], "here")


def test_values_are_sent_where_they_lie() -> None:
    def run(transport: SharedMemoryTransport, registers: bool) -> Any:
        memory = kept(transport, registers=registers)
        found = [exchanged(transport, memory[SIZE:] if number % 2 else memory[:SIZE]).wait() for number in range(30)]
        other = exchanged(transport, memory[::2]).wait()  # its bytes do not follow each other
        return [tensors[0].unique().tolist() for (tensors,) in [[each[0]] for each in (*found, other)]], copies(
            transport
        )

    of_ranks = on_threads(2, run, True)
    for rank, (values, copied) in enumerate(of_ranks):
        assert values[:30] == [[2 - rank], [12 - rank]] * 15
        assert values[30] == [2 - rank, 12 - rank]
        assert copied == [SIZE], "only the last message"
    for _, copied in on_threads(2, run, False):
        assert copied, "the control: other memory is copied"


def test_what_lies_behind_memory_that_is_shared_is_copied() -> None:
    def run(transport: SharedMemoryTransport) -> Any:
        memory = kept(transport, registers=False)
        descriptor = anonymous_file("test")
        os.ftruncate(descriptor, 2 * SIZE)
        transport.register(descriptor, memory[:SIZE])
        os.close(descriptor)
        ((received,),) = exchanged(transport, memory[SIZE // 2 : SIZE // 2 + SIZE]).wait()
        return received.unique().tolist(), copies(transport)

    for rank, found in enumerate(on_threads(2, run)):
        assert found == ([2 - rank, 12 - rank], [SIZE])


def test_nobody_answers_for_values_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer lets a sender use the space of a message again."""
    answers: list[int] = []
    plain = PeerSocket.done_with
    monkeypatch.setattr(
        PeerSocket, "done_with", lambda line, segment: answers.append(line.peer) or plain(line, segment)
    )

    def run(transport: SharedMemoryTransport, registers: bool) -> int:
        memory = kept(transport, registers=registers)
        for _ in range(5):
            exchanged(transport, memory[:SIZE]).wait()
        return sum(segment.unread for segment in transport._arena.segments.values() if segment.is_kept)

    assert on_threads(2, run, True) == [0, 0]
    assert not answers
    on_threads(2, run, False)
    assert len(answers) == 2 * 5, "the control: other memory is used again"


def test_memory_that_is_no_longer_shared_is_freed_when_it_has_been_read(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = list[tuple[int, int]]()  # by thread: the other rank may get the same file under the number that is free
    monkeypatch.setattr(arena, "os", Mock(wraps=os, close=lambda n: closed.append((get_ident(), n)) or os.close(n)))

    def run(transport: SharedMemoryTransport) -> Any:
        memory, line = kept(transport), transport._lines[1 - transport.rank]
        (segment,) = transport._arena.segments.values()
        pending = exchanged(transport, memory[:SIZE])
        transport.unregister(memory)
        transport.unregister(memory)
        assert closed.count((get_ident(), segment.descriptor)) == 1
        copied = exchanged(transport, memory[:SIZE])
        found = [work.wait()[0][0].unique().tolist() for work in (copied, pending)]
        return found, sorted(line.mapped), sorted(transport._arena.segments), copies(transport)

    for rank, (found, mapped, segments, copied) in enumerate(on_threads(2, run)):
        assert found == [[2 - rank]] * 2
        assert mapped == segments == [1], "the segment of the message that was copied"
        assert copied == [SIZE]
