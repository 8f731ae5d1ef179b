"""Messages between ranks of one host: shared memory for the data, a socket per pair of ranks for notifications.

Messages to ranks on other nodes go through the socket itself, see `peer_stream`.

    sender                                    receiver
    copy tensors into own arena
    message: (segment, offset, bytes) ---->   copy out of the mapped segment
                                    <------   done: (segment)         the space may be used again

A tensor in memory that `register` was called for is not copied by the sender, who needs no answer for its space.

Measured on two CPU cores against gloo's point-to-point messages: benchmarks/transport.py.
"""

import contextlib
import errno
import os
import select
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Literal

import torch
from torch import Tensor

from patchpar.comm.transport.arena import Arena
from patchpar.comm.transport.message import Incoming, Messages, Outgoing, Work
from patchpar.comm.transport.peer_socket import DROPPED, FRAME, ArrivedMessage, OutgoingFrame, PeerSocket
from patchpar.comm.transport.peer_stream import PartCounter, PeerStream, is_between_nodes
from patchpar.comm.transport.poison import Poisonable
from patchpar.errors import ExchangeError
from patchpar.launch.anonymous_file import aligned
from patchpar.launch.links import RETRY_SECONDS

SPIN_SECONDS = 2e-4  # waking a sleeping process costs more than a short wait

Numbered = tuple[PeerSocket, int]
"""The socket through which a message comes, and its number among those of this socket."""


class SharedMemoryTransport(Poisonable):
    """Messages from one rank to others over the sockets `links`, most of them of its host. `add` takes further ones.

    `deadline`: seconds of one wait, in which nothing of a message comes or goes.
    """

    collectives = None

    def __init__(self, rank: int, links: Mapping[int, socket.socket], device: torch.device, deadline: float) -> None:
        self.rank, self.device, self.deadline = rank, device, deadline
        self.waiting: AbstractContextManager[None] = contextlib.nullcontext()
        self._lines: dict[int, PeerSocket] = {}
        self._arena = Arena()
        self._spin = 0.0
        self.add(links)

    def add(self, links: Mapping[int, socket.socket]) -> None:
        """Take sockets to further ranks, or in place of ended ones. Works of an ended one raise ExchangeError."""
        for peer, link in links.items():
            if peer in self._lines:
                self._lines[peer].end(self._arena)
            self._lines[peer] = PeerStream(peer, link) if is_between_nodes(link) else PeerSocket(peer, link)
        self._spin = SPIN_SECONDS if len(self._lines) < _own_cores() else 0.0

    @property
    def has_ended_ones(self) -> bool:
        """Whether a connection has ended."""
        return any(self.state_of(peer) == "ended" for peer in self._lines)

    @property
    def is_cut(self) -> bool:
        """Whether a connection has ended or has been shut. Reads nothing, so that any thread may ask."""
        poll = select.poll()
        ended = getattr(select, "POLLRDHUP", select.POLLHUP)  # of Linux: the other end, or this one, has been shut
        try:
            for line in list(self._lines.values()):
                poll.register(line.link, ended)
            return bool(poll.poll(0))
        except (OSError, ValueError):  # closed by this rank
            return True

    def state_of(self, peer: int) -> Literal["none", "open", "ended"]:
        """Return whether there is a connection to a rank. An ended one may have lost messages."""
        line = self._lines.get(peer)
        if line is None:
            return "none"
        while line.read(self._arena):
            pass
        return "ended" if line.closed else "open"

    def register(self, descriptor: int, memory: Tensor) -> None:
        """Let peers map the `memory` [bytes] of a file, so that a tensor in it is a message without a copy.

        Such values do not change until `unregister`.
        """
        self._arena.keep(descriptor, memory)

    def unregister(self, memory: Tensor) -> None:
        """End what `register` began. Idempotent.

        Peers free `memory` [bytes] when they have read what was sent from it.
        """
        number = self._arena.drop(memory)
        frame = FRAME.pack(DROPPED, True, number or 0, 0, 0)
        for line in self._lines.values():
            if number is not None and number in line.known:
                with contextlib.suppress(ExchangeError):  # a peer that has left has freed it
                    self._send_frame(line, OutgoingFrame(memoryview(frame)), "unregister memory")

    def send_recv(self, outgoing: Sequence[Outgoing], incoming: Sequence[Incoming], where: str) -> "SharedMemoryWork":
        """Copy outgoing tensors into shared memory and notify the receivers; `Work.wait` fetches incoming ones.

        Raises ExchangeError.
        """
        self.check(where)
        for message in outgoing:
            self._send(message, where)
        return SharedMemoryWork(self, incoming, where)

    def number(self, message: Incoming) -> Numbered:
        """Return the number of the sender's next message: both sides count in the order of their exchanges."""
        line = self._lines[message.peer]
        line.expected += 1
        return line, line.expected - 1

    def _send(self, message: Outgoing, where: str) -> None:
        found = self._arena.kept_at(message.tensors)
        if found is None:
            self._free_read(where)
            found = self._arena.copied(message.tensors)
        for peer in message.peers:
            line = self._lines[peer]
            self._send_frame(line, line.frame_of(*found), where)

    def _free_read(self, where: str) -> None:
        """Free the space of messages that peers have read, and let them use that of those that nobody reads here."""
        for line in self._lines.values():
            line.read(self._arena)
            if line.unwanted:
                self._free_unwanted(line, where)

    def _free_unwanted(self, line: PeerSocket, where: str) -> None:
        """Let the sender use the space of messages again that nobody waits for any more, of those that have come."""
        for _ in range(len(line.unwanted)):  # to which the garbage collector may add some at any time
            number = line.unwanted.popleft()
            if number not in line.arrived:
                line.unwanted.append(number)
                continue
            self._say_read(line, line.arrived.pop(number), where)

    def _say_read(self, line: PeerSocket, message: ArrivedMessage, where: str) -> None:
        """Let the sender use the space of a message again, unless its values stay there."""
        if not message.is_kept:
            with contextlib.suppress(ExchangeError):  # a peer that has left needs no space
                self._send_frame(line, line.done_with(message.segment), where)

    def _send_frame(self, line: PeerSocket, frame: OutgoingFrame, where: str) -> None:
        give_up, (data, descriptor) = time.monotonic() + self.deadline, frame
        while data:
            try:
                if descriptor is None:
                    data = data[line.link.send(data) :]  # a frame without its message is sent whole or not at all
                    give_up = self._with_part(give_up) if data else give_up
                else:
                    data, descriptor = data[socket.send_fds(line.link, [data], [descriptor]) :], None
            except BlockingIOError:  # the peer's buffer is full: read meanwhile, or both ranks would block
                self._sleep(give_up, where, line, writing=True)
            except OSError as error:
                if error.errno != errno.ETOOMANYREFS:
                    raise ExchangeError(f"{self._at(where)}: rank {line.peer} is gone ({error.strerror})") from error
                time.sleep(RETRY_SECONDS)  # the kernel limits descriptors that have been sent and not received
                self._sleep(give_up, where, line, writing=True)

    def fetch(self, message: Incoming, numbered: Numbered, where: str) -> list[Tensor]:
        """Wait for a message of `message.peer` and return its tensors, of any shape. `numbered`: see `number`.

        Earlier messages need not have been fetched. Raises ExchangeError.
        """
        line, number = numbered
        try:
            found = self._frame_of(line, number, where)
        except ExchangeError as error:
            raise ExchangeError(f"{error}; expected from it: {_shapes(message)}") from error.__cause__
        if found.num_bytes != message.num_bytes:
            text = (
                f"{self._at(where)}: rank {line.peer} sent {found.num_bytes} bytes, but {message.num_bytes} were "
                f"expected for {_shapes(message)}: the ranks do not run the same exchanges"
            )
            self.poison(text)
            raise ExchangeError(text)
        received, offset = [], found.offset
        for index, spec in enumerate(message.specs):
            view = found.memory[offset : offset + spec.num_bytes].view(spec.dtype).view(spec.shape)
            into = None if message.into is None else message.into[index]
            received.append(view.to(self.device, copy=True) if into is None else into.copy_(view))
            offset += aligned(spec.num_bytes)
        self._say_read(line, found, where)
        return received

    def _frame_of(self, line: PeerSocket, number: int, where: str) -> ArrivedMessage:
        start, moved = time.monotonic(), line.moved
        give_up = start + self.deadline
        while number not in line.arrived:
            if line.read(self._arena):
                continue
            if line.moved != moved:
                give_up, moved = self._with_part(give_up), line.moved
            if line.closed:
                raise ExchangeError(f"{self._at(where)}: rank {line.peer} is gone")
            if time.monotonic() - start < self._spin:
                os.sched_yield()
            else:
                self._sleep(give_up, where, line)
        return line.arrived.pop(number)

    def _with_part(self, give_up: float) -> float:
        """Return when to give up a wait in which a part of a long message has come or gone; also tell the caller."""
        if isinstance(self.waiting, PartCounter):
            self.waiting.count_part()
        return max(give_up, time.monotonic() + self.deadline)

    def _sleep(self, give_up: float, where: str, line: PeerSocket, *, writing: bool = False) -> None:
        """Wait for a frame of any peer (or until `line` can be written) and read all, so that no socket fills up."""
        poll = select.poll()
        for other in self._lines.values():
            if not other.closed:
                poll.register(other.link, select.POLLIN | (select.POLLOUT if writing and other is line else 0))
        remaining = give_up - time.monotonic()
        with self.waiting:
            something = remaining > 0 and poll.poll(remaining * 1000)
        if not something:
            verb = "read from" if writing else "answered"
            raise ExchangeError(
                f"{self._at(where)}: rank {line.peer} has not {verb} rank {self.rank} for {self.deadline:g} s"
            )
        for other in self._lines.values():
            other.read(self._arena)

    def settle(self, where: str) -> None:
        """See `Transport`: a wait for a message blocks the process."""
        self.check(where)

    def _at(self, where: str) -> str:
        return f"rank {self.rank} at {where}"

    def close(self) -> None:
        """Close sockets and shared memory."""
        for line in self._lines.values():
            line.link.close()
        self._arena.close()
        self._lines.clear()


class SharedMemoryWork(Work[Messages]):
    """Messages that are fetched when they are waited for; outgoing ones have been sent already."""

    def __init__(self, transport: SharedMemoryTransport, incoming: Sequence[Incoming], where: str) -> None:
        super().__init__(incoming, where)
        self._transport, self._numbers = transport, [transport.number(message) for message in incoming]

    def __del__(self) -> None:
        """After a call that has ended early nobody waits for what it expected, whose space the sender would keep."""
        for found, (line, number) in zip(self._received, getattr(self, "_numbers", ()), strict=False):
            if found is None:
                line.unwanted.append(number)

    def _receive(self, index: int) -> list[Tensor]:
        return self._transport.fetch(self.incoming[index], self._numbers[index], self.where)


def _shapes(message: Incoming) -> str:
    return ", ".join(f"{spec.shape} {spec.dtype}" for spec in message.specs) or "nothing"


def _own_cores() -> int:
    """Return the cores that this process may use: with more ranks, waiting must not take a core from a busy rank."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
