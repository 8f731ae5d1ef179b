"""Connections between nodes: who may connect, what arrives, and what is refused because somebody has changed it."""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from patchpar.comm.transport import Incoming, Outgoing, TensorSpec, shared_memory
from patchpar.comm.transport.peer_stream import HEAD_BYTES, PeerStream
from patchpar.comm.transport.shared_memory import SharedMemoryTransport
from patchpar.errors import AuthenticationError, ExchangeError
from patchpar.launch.channel import ChannelClosed, ChannelFrame, FrameKind
from patchpar.launch.messages import decode, encode
from patchpar.launch.network import listener as listener_module
from patchpar.launch.network import tagged_socket
from patchpar.launch.network.handshake import (
    CLIENT,
    NONCE_BYTES,
    PROOF_BYTES,
    READY,
    ConnectionKeys,
    admit,
    introduce,
    receive_exactly,
    session_key,
)
from patchpar.launch.network.listener import MOST_HANDSHAKES, RankListener
from patchpar.launch.network.network_link import NetworkLink
from patchpar.launch.network.remote_rank import ReadyRank
from patchpar.launch.network.remote_worker import RemoteStarter
from patchpar.launch.network.stream_channel import StreamChannel
from patchpar.launch.network.tagged_socket import RankAddress, TaggedSocket, connect_to
from patchpar.launch.rendezvous import this_host
from patchpar.launch.worker_output import FirstPrinter
from patchpar.launch.worker_start import WorkerPoolSpec

HERE, SECONDS = "127.0.0.1", 10.0
KEY, OTHER = session_key(b"the secret", bytes(32)), session_key(b"the secret", bytes(31) + b"1")
TOKEN = secrets.token_bytes(32)


def soon() -> float:
    return time.monotonic() + SECONDS


@pytest.fixture
def listener() -> Iterator[RankListener]:
    found = RankListener("one", HERE, KEY)
    yield found
    found.close()


def connected(listener: RankListener, node: str) -> tuple[TaggedSocket, TaggedSocket]:
    ours = connect_to(listener.address, node, KEY, TOKEN, soon())
    return ours, listener.take(TOKEN, soon())


@pytest.fixture
def lines(listener: RankListener) -> Iterator[tuple[TaggedSocket, TaggedSocket]]:
    """Both ends of a connection between nodes."""
    pair = connected(listener, "two")
    yield pair
    for end in pair:
        end.close()


def test_a_node_reaches_itself_without_its_network(listener: RankListener) -> None:
    assert [end.is_of_one_node for end in connected(listener, "one")] == [True, True]
    assert [end.is_of_one_node for end in connected(listener, "two")] == [False, False]


def test_connections_to_one_token_come_in_order(listener: RankListener) -> None:
    for number in range(20):
        with connect_to(listener.address, "two", KEY, TOKEN, soon()) as link:
            link.sendall(bytes([number]))
            with listener.take(TOKEN, soon()) as other:
                assert other.recv(1) == bytes([number])


def test_what_the_taker_sends_at_once_does_not_overtake_the_handshake(
    listener: RankListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = TaggedSocket.sendall

    def slow(link: TaggedSocket, data: bytes) -> None:
        if data == READY:
            time.sleep(0.1)
        send(link, data)

    def take() -> TaggedSocket:
        link = listener.take(TOKEN, soon())
        link.sendall(b"first")
        return link

    monkeypatch.setattr(TaggedSocket, "sendall", slow)
    with ThreadPoolExecutor() as threads:
        taken = threads.submit(take)
        with connect_to(listener.address, "two", KEY, TOKEN, soon()) as link, taken.result(SECONDS) as other:
            other.sendall(b".")
            assert link.recv(6, socket.MSG_WAITALL) == b"first."


def test_a_client_that_gives_up_before_it_is_taken_is_not_taken(listener: RankListener) -> None:
    with listener._changed, socket.socket(socket.AF_UNIX) as client:
        client.connect("\0" + listener.address.name)
        client.sendall(TOKEN + bytes(32))
        answer = client.recv(64, socket.MSG_WAITALL)
        client.sendall(hmac.digest(KEY, CLIENT + TOKEN + bytes(32) + answer[:32], "sha256"))
    for thread in threading.enumerate():
        if thread.name == "patchpar-handshake":
            thread.join(SECONDS)
    with connect_to(listener.address, "one", KEY, TOKEN, soon()) as link, listener.take(TOKEN, soon()) as other:
        link.sendall(b".")
        assert other.recv(1) == b"."


def test_who_connects_to_what_is_forgotten_is_told_so_and_leaves_nothing(listener: RankListener) -> None:
    listener.forget(TOKEN)
    with pytest.raises(ConnectionResetError):
        connect_to(listener.address, "two", KEY, TOKEN, soon()).close()
    assert not listener._arrived


def test_a_connection_that_cannot_be_accepted_is_not_the_last(listener: RankListener) -> None:
    asked: list[int] = []

    class Failing:
        def accept(self) -> tuple[socket.socket, str]:
            asked.append(1)
            if len(asked) == 1:
                raise ConnectionAbortedError(errno.ECONNABORTED, "the client has gone meanwhile")
            listener.close()
            raise OSError(errno.EINVAL, "it does not listen any more")

    listener._accept(Failing())  # type: ignore[arg-type]
    assert len(asked) == 2


def test_a_queue_of_this_node_that_is_full_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    name, accepted = secrets.token_hex(16), list[socket.socket]()
    monkeypatch.setattr(tagged_socket, "introduce", lambda *_: ConnectionKeys(b"", b""))
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as before:
        server.bind("\0" + name)
        server.listen(0)
        before.connect("\0" + name)
        monkeypatch.setattr(tagged_socket.time, "sleep", lambda seconds: accepted.append(server.accept()[0]))
        connect_to(RankAddress("one", HERE, 0, name), "one", KEY, TOKEN, soon()).close()
    assert len(accepted) == 1
    accepted[0].close()


def test_a_queue_of_this_node_that_stays_full_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(seconds: float) -> None:
        raise AssertionError("it waits after its time")

    monkeypatch.setattr(tagged_socket.time, "sleep", wait)
    name = secrets.token_hex(16)
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as before:
        server.bind("\0" + name)
        server.listen(0)
        before.connect("\0" + name)
        with pytest.raises(TimeoutError, match="does not accept connections"):
            connect_to(RankAddress("one", HERE, 0, name), "one", KEY, TOKEN, time.monotonic() - 1)


def test_ranks_that_have_been_connected_are_known_before_one_fails() -> None:
    """What the pool does not know it cannot end."""
    spec = WorkerPoolSpec(
        devices=("cpu",) * 2, engine="engine:E", deadline=1.0, start_timeout=9.0, start_method="spawn", preload=()
    )
    nothing: Any = lambda *_: None  # noqa: E731
    ready = ReadyRank(host=this_host(), pid=1, address=RankAddress("one", HERE, 1, ""))
    actor: Any = SimpleNamespace(prepare=nothing, ready=lambda give_up: ready, kill=nothing)
    actors: Any = SimpleNamespace(node="one", start=lambda ranks, give_up: dict.fromkeys(ranks, actor))
    starter = RemoteStarter(spec, actors, spec.devices, secret_file=None, trusted_network=True)

    def fail(frame: ChannelFrame) -> None:
        raise MemoryError

    def worker(rank: int, *_: Any) -> Any:
        return SimpleNamespace(rank=rank, channel=SimpleNamespace(send=fail))

    starter._connected = worker  # type: ignore[method-assign]
    known: list[int] = []
    with pytest.raises(MemoryError):
        known.extend(each.rank for each in starter.start((0, 1), None, FirstPrinter()))
    assert known == [0, 1]


def test_who_lacks_the_key_is_refused_on_both_sides(listener: RankListener) -> None:
    with pytest.raises(AuthenticationError, match="did not prove to have the key"):
        connect_to(listener.address, "two", OTHER, TOKEN, soon())
    client, server = socket.socketpair()
    with client, server, ThreadPoolExecutor() as threads:
        asked = threads.submit(admit, server, KEY, soon())
        client.sendall(bytes(64))  # a token and a nonce
        client.recv(64, socket.MSG_WAITALL)
        client.sendall(bytes(32))
        with pytest.raises(AuthenticationError, match="without the key"):
            asked.result()


def test_a_recorded_connection_is_not_accepted_again() -> None:
    client, server = socket.socketpair()
    recorded = []

    class Recording(socket.socket):
        def sendall(self, data, *flags):
            recorded.append(bytes(data))
            super().sendall(data, *flags)

    with Recording(fileno=client.detach()) as client, server, ThreadPoolExecutor() as threads:
        asked = threads.submit(lambda: (admit(server, KEY, soon()), server.sendall(b"r")))
        introduce(client, KEY, TOKEN, soon())
        asked.result()
    client, server = socket.socketpair()
    with client, server, ThreadPoolExecutor() as threads:
        asked = threads.submit(admit, server, KEY, soon())
        client.sendall(recorded[0])
        client.recv(64, socket.MSG_WAITALL)
        client.sendall(recorded[1])
        with pytest.raises(AuthenticationError):
            asked.result()


def test_the_proof_of_a_server_is_none_of_a_client() -> None:
    """Else who has no key could send the server its own proof."""
    client, server = socket.socketpair()
    with client, server, ThreadPoolExecutor() as threads:
        asked = threads.submit(admit, server, KEY, soon())
        client.sendall(TOKEN + bytes(NONCE_BYTES))
        client.sendall(client.recv(NONCE_BYTES + PROOF_BYTES, socket.MSG_WAITALL)[NONCE_BYTES:])
        with pytest.raises(AuthenticationError, match="without the key"):
            asked.result()


def test_what_an_end_has_sent_is_not_accepted_when_it_comes_back(lines: tuple[TaggedSocket, TaggedSocket]) -> None:
    StreamChannel(lines[0]).send(ChannelFrame(FrameKind.CALL, 1, encode("text")))
    lines[1].sendall(lines[1].recv(1 << 16))
    with pytest.raises(AuthenticationError, match="changed on the way"):
        StreamChannel(lines[0]).receive()


def test_a_server_that_is_not_ready_is_no_connection() -> None:
    client, server = socket.socketpair()
    with client, server, ThreadPoolExecutor() as threads:
        asked = threads.submit(lambda: (admit(server, KEY, soon()), server.sendall(b"x")))
        with pytest.raises(ConnectionResetError, match="before it was ready"):
            introduce(client, KEY, TOKEN, soon())
        asked.result()


def test_a_handshake_that_trickles_in_is_given_up() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(bytes(NONCE_BYTES))
        with pytest.raises(TimeoutError, match="has not answered in time"):
            receive_exactly(ours, NONCE_BYTES, time.monotonic() - 1)


@pytest.mark.parametrize("node", ["one", "two"])
def test_a_connection_waits_without_a_limit_after_its_handshake(listener: RankListener, node: str) -> None:
    """The limit of the handshake would else be one of every later message."""
    ours, theirs = connected(listener, node)
    with ours, theirs:
        assert [os.get_blocking(end.fileno()) for end in (ours, theirs)] == [True, True]


def test_a_stranger_that_says_nothing_holds_up_nobody(listener: RankListener) -> None:
    with socket.create_connection((HERE, listener.address.port)):
        assert all(connected(listener, "two"))


def test_many_strangers_that_say_nothing_hold_up_nobody(
    listener: RankListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that has been silent for longest is closed for the next."""
    monkeypatch.setattr(listener_module, "HANDSHAKE_SECONDS", 1000.0)
    with contextlib.ExitStack() as stack:
        address = HERE, listener.address.port
        strangers = [stack.enter_context(socket.create_connection(address)) for _ in range(MOST_HANDSHAKES + 1)]
        assert all(connected(listener, "two"))
        strangers[0].settimeout(SECONDS)
        assert strangers[0].recv(1) == b""
        strangers[-1].settimeout(0.05)
        with pytest.raises(TimeoutError):
            strangers[-1].recv(1)


def test_a_wait_for_a_connection_ends(listener: RankListener) -> None:
    with pytest.raises(TimeoutError):
        listener.take(TOKEN, time.monotonic() + 0.05)
    link = NetworkLink(1, 0, listener, listener.address, KEY, TOKEN)
    with ThreadPoolExecutor() as threads:
        waits = threads.submit(link.accept, soon())
        time.sleep(0.05)
        link.shut()
        with pytest.raises(ConnectionResetError):
            waits.result()
    with pytest.raises(ConnectionResetError):
        link.offer(soon())


# --- channels -------------------------------------------------------------------------------------------------------


def test_frames_come_with_their_blocks_and_notes(lines: tuple[TaggedSocket, TaggedSocket]) -> None:
    notes: list[bytes] = []
    ours = StreamChannel(lines[0], note=lambda: b"here", send_timeout=SECONDS)
    theirs = StreamChannel(lines[1], on_note=notes.append)
    value = {"array": np.arange(200_000), "text": "a" * 50}
    with ThreadPoolExecutor() as threads:
        got = threads.submit(lambda: [theirs.receive() for _ in range(3)])
        for number in range(3):
            ours.send(ChannelFrame(FrameKind.CALL, number, encode(value if number else None)))
    frames = got.result()
    assert [(frame.kind, frame.request) for frame in frames] == [(FrameKind.CALL, number) for number in range(3)]
    assert decode(frames[0].message) is None
    for frame in frames[1:]:
        found = decode(frame.message)
        assert np.array_equal(found["array"], value["array"])
        found["array"][0] = 5  # private and writable
        assert found["text"] == value["text"]
    assert notes == [b"here"] * 3
    ours.close()
    with pytest.raises(ChannelClosed):
        theirs.receive()


@pytest.mark.parametrize("change", ["bit", "repeated", "left out"])
def test_a_frame_that_was_changed_on_the_way_is_not_read(lines: tuple[TaggedSocket, TaggedSocket], change: str) -> None:
    """A man in the middle: what `ours` sends is taken from `lines` and put into a pair, changed."""
    ours = StreamChannel(lines[0])
    for text in ("first", "second"):
        ours.send(ChannelFrame(FrameKind.CALL, 1, encode(text)))
    data = bytearray(lines[1].recv(1 << 16))
    half = len(data) - len(data) // 2 - 1  # the second message has one letter more
    if change == "bit":
        data[half // 2] ^= 1
    forged = {"bit": data, "repeated": data[:half] * 2, "left out": data[half:]}[change]
    there, here = socket.socketpair()
    with there:
        there.sendall(forged)
        end = TaggedSocket(here, _same(lines[1]))
        theirs = StreamChannel(end)
        if change == "repeated":
            theirs.receive()
        with pytest.raises(AuthenticationError, match="changed on the way"):
            theirs.receive()
        theirs.close()


@pytest.mark.parametrize("at", [0, 7, 8, 11, 12, 43])
def test_lengths_that_were_changed_on_the_way_are_waited_for_by_nobody(
    lines: tuple[TaggedSocket, TaggedSocket], at: int
) -> None:
    StreamChannel(lines[0]).send(ChannelFrame(FrameKind.CALL, 1, encode("text")))
    data = bytearray(lines[1].recv(1 << 16))
    data[at] ^= 4
    there, here = socket.socketpair()
    with there:
        there.sendall(data)
        there.shutdown(socket.SHUT_WR)
        theirs = StreamChannel(TaggedSocket(here, _same(lines[1])))
        with pytest.raises(AuthenticationError, match="changed on the way"):
            theirs.receive()
        theirs.close()


def _same(link: TaggedSocket) -> ConnectionKeys:
    """The keys of a connection."""
    return ConnectionKeys(link.sent._key, link.received._key)


# --- messages of ranks ----------------------------------------------------------------------------------------------


def transports(lines: tuple[TaggedSocket, TaggedSocket]) -> tuple[SharedMemoryTransport, SharedMemoryTransport]:
    device = torch.device("cpu")
    return (
        SharedMemoryTransport(0, {1: lines[0]}, device, SECONDS),
        SharedMemoryTransport(1, {0: lines[1]}, device, SECONDS),
    )


def swapped(transport: SharedMemoryTransport, values: list[torch.Tensor], number: int) -> list[list[torch.Tensor]]:
    peer = 1 - transport.rank
    incoming = [Incoming(peer, tuple(TensorSpec.of(x) for x in values))]
    works = [transport.send_recv([Outgoing((peer,), tuple(values))], incoming, "there") for _ in range(number)]
    return [work.wait()[0] for work in works]


@pytest.mark.parametrize("elements", [0, 1, 3_000_000])
def test_messages_both_ways_at_once(lines: tuple[TaggedSocket, TaggedSocket], elements: int) -> None:
    """Larger than what the system buffers: both sides send, and each has to read meanwhile."""
    values = [torch.arange(float(elements)), torch.tensor([1, 2, 3], dtype=torch.int8), torch.ones(2, 3).bool()]
    with ThreadPoolExecutor() as threads:
        both = [threads.submit(swapped, transport, values, 3) for transport in transports(lines)]
        for found in both:
            for received in found.result():
                assert all(torch.equal(x, y) for x, y in zip(received, values, strict=True))


def test_a_message_that_was_changed_is_not_used(lines: tuple[TaggedSocket, TaggedSocket]) -> None:
    first, _ = transports(lines)
    first.send_recv([Outgoing((1,), (torch.arange(9.0),))], [], "there")
    lines[1].setblocking(True)
    data = bytearray(lines[1].recv(1 << 16))
    for at, is_refused in ((None, False), (HEAD_BYTES + 3, True), (20, True)):
        changed = bytearray(data)
        if at is not None:
            changed[at] ^= 1 if at > HEAD_BYTES else 4
        there, here = socket.socketpair()
        with there:
            there.sendall(changed)
            other = SharedMemoryTransport(1, {}, torch.device("cpu"), 0.5)
            other._lines[0] = PeerStream(0, TaggedSocket(here, _same(lines[1])))
            work = other.send_recv([], [Incoming(0, (TensorSpec((9,), torch.float32),))], "there")
            if not is_refused:
                assert torch.equal(work.wait()[0][0], torch.arange(9.0))
                continue
            with pytest.raises(AuthenticationError):
                work.wait()


@pytest.mark.parametrize("at", [0, 14, 15, 22, 23, 24, 87])
def test_no_memory_is_taken_for_a_length_that_the_peer_has_not_sent(
    lines: tuple[TaggedSocket, TaggedSocket], monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """`at`: the changed byte of a head, of the kind, the two lengths, or a tag."""
    first, _ = transports(lines)
    first.send_recv([Outgoing((1,), (torch.arange(9.0),))], [], "there")
    lines[1].setblocking(True)
    data = bytearray(lines[1].recv(1 << 16))
    data[at] ^= 4
    taken, empty = [0], torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **rest: taken.append(*size) or empty(*size, **rest))
    there, here = socket.socketpair()
    with there:
        there.sendall(data)
        other = SharedMemoryTransport(1, {}, torch.device("cpu"), 0.5)
        other._lines[0] = PeerStream(0, TaggedSocket(here, _same(lines[1])))
        with pytest.raises(AuthenticationError, match="rank 0 should have sent was changed"):
            other.send_recv([], [Incoming(0, (TensorSpec((9,), torch.float32),))], "there").wait()
        other.close()
    assert max(taken) <= 64


def test_a_message_may_take_longer_than_a_wait_as_long_as_bytes_come(
    lines: tuple[TaggedSocket, TaggedSocket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part of it comes two thirds of the limit after the one before; the caller is told of each."""
    first, second = transports(lines)
    counted: list[None] = []
    second.waiting = Counting(counted)
    first.send_recv([Outgoing((1,), (torch.arange(9000.0),))], [], "there")
    lines[1].setblocking(True)
    data = _all_of(lines[1], HEAD_BYTES + 36_032)
    there, here = socket.socketpair()
    second._lines[0] = PeerStream(0, TaggedSocket(here, _same(lines[1])))
    parts = [data[at : at + 4000] for at in range(0, len(data), 4000)]
    now = time.monotonic()

    def sleep(*args: Any, **rest: Any) -> None:
        nonlocal now
        now += second.deadline * 2 / 3
        there.sendall(parts.pop(0))
        slept(*args, **rest)

    slept, second._spin = second._sleep, 0.0
    monkeypatch.setattr(second, "_sleep", sleep)
    monkeypatch.setattr(shared_memory, "time", SimpleNamespace(monotonic=lambda: now))
    work = second.send_recv([], [Incoming(0, (TensorSpec((9000,), torch.float32),))], "there")
    assert torch.equal(work.wait()[0][0], torch.arange(9000.0))
    assert not parts
    assert len(counted) >= 8
    there.close()


class Counting(contextlib.nullcontext):  # type: ignore[type-arg]
    """Stands for a rank's WaitingFlag."""

    def count_part(self) -> None:
        self.enter_result.append(None)


def _all_of(line: socket.socket, num_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < num_bytes:
        data += line.recv(num_bytes - len(data))
    return bytes(data)


def test_a_peer_that_is_gone_is_named(lines: tuple[TaggedSocket, TaggedSocket]) -> None:
    first, second = transports(lines)
    threading.Timer(0.05, second.close).start()
    with pytest.raises(ExchangeError, match="rank 1 is gone"):
        swapped(first, [torch.ones(1)], 1)
    assert first.state_of(1) == "ended"
