"""Broadcast from rank 0 and all-gather between ranks that have a caller each (torchrun).

LinkControl     on one host, through sockets to rank 0: a rank that exits is noticed at once, with its number
GroupControl    between hosts, through a gloo group of torch.distributed

rank 0                    other ranks
  | <------- WORD --------- |           gather: the data of each rank
  | -------- HERE --------> |           gather: rank 0 has entered it; how long it waits for the others
  | -------- ALL ---------> |           gather: the data of all ranks; or which ranks have exited or are late
  | -------- REPLY -------> |           broadcast, at any time between two gathers
"""

from __future__ import annotations

import contextlib
import pickle
import selectors
import socket
import struct
import time
from collections import deque
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from patchpar.errors import LaunchError, WorkerDied, WorkerError, WorkerHung
from patchpar.launch.executor import CLOSED, CallAborted

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

REPLY_SECONDS = 3600.0  # limit for rank 0's caller, whose process no parent watches
MARGIN = 5.0  # s for rank 0's result to arrive, and for a rank that is late to read it
HEAD = struct.Struct("<BQQ")  # kind, number of the gather, length in bytes
REPLY, HERE, WORD, ALL = range(4)


class Control(Protocol):
    """One rank's end. All ranks make the same calls in the same order."""

    def broadcast(self, data: bytes) -> bytes:
        """Return rank 0's data on all ranks. Raises WorkerDied, WorkerHung; CallAborted if rank 0 ended the call.

        Raises LaunchError once it is left.
        """

    def gather(self, data: bytes, patience: float) -> list[bytes]:
        """Return the data of all ranks in order. Raises WorkerDied, and WorkerHung after `patience` seconds.

        Raises LaunchError once it is left.
        """

    def leave(self) -> None:
        """Release the connections. Idempotent."""


class ControlFrame(NamedTuple):
    """One message of a link between two ranks."""

    kind: int
    number: int
    data: bytes


class _Link:
    """A socket that carries frames."""

    def __init__(self, rank: int, sock: socket.socket) -> None:
        self.rank, self.sock = rank, sock
        self._bytes = bytearray()

    def send(self, frame: ControlFrame, seconds: float = REPLY_SECONDS) -> None:
        """Send a frame. Raises WorkerDied if the other end is closed, WorkerHung if it is not read within `seconds`."""
        self.sock.settimeout(max(seconds, 1e-3))
        try:
            self.sock.sendall(HEAD.pack(frame.kind, frame.number, len(frame.data)) + frame.data)
        except TimeoutError as error:
            raise WorkerHung(f"rank {self.rank} has not read a message for {seconds:.0f} s", rank=self.rank) from error
        except OSError as error:
            raise gone(self.rank) from error

    def take(self) -> ControlFrame | None:
        """Return the next complete frame, None if there is none yet."""
        if len(self._bytes) < HEAD.size:
            return None
        kind, number, length = HEAD.unpack_from(self._bytes)
        if len(self._bytes) < HEAD.size + length:
            return None
        data = bytes(self._bytes[HEAD.size : HEAD.size + length])
        del self._bytes[: HEAD.size + length]
        return ControlFrame(kind, number, data)

    def read(self, seconds: float) -> None:
        """Read once. Raises TimeoutError after `seconds` without data, WorkerDied if the other end is closed."""
        self.sock.settimeout(max(seconds, 1e-3))
        try:
            data = self.sock.recv(1 << 18)
        except TimeoutError:
            raise
        except OSError as error:
            raise gone(self.rank) from error
        if not data:
            raise gone(self.rank)
        self._bytes += data


def gone(rank: int) -> WorkerDied:
    """Return the error for a rank that has closed its end."""
    return WorkerDied(f"rank {rank} has gone: its process has ended, or has closed its pipeline", rank=rank)


class LinkControl(Control):
    """A Control through sockets: rank 0 has one to each other rank, the others have one to rank 0."""

    def __init__(self, rank: int, world_size: int, links: Mapping[int, socket.socket]) -> None:
        self._rank, self._world = rank, world_size
        self._links = {peer: _Link(peer, sock) for peer, sock in links.items()}
        self._gathers = 0
        self._early: deque[ControlFrame] = deque()  # from rank 0, for a gather that this rank has not entered yet
        self._is_left = False

    def broadcast(self, data: bytes) -> bytes:
        self._check()
        if self._rank == 0:
            for link in self._links.values():
                link.send(ControlFrame(REPLY, self._gathers, data))
            return data
        try:
            frame = self._receive(time.monotonic() + REPLY_SECONDS)
        except TimeoutError as error:
            raise WorkerHung(f"rank 0 has not answered for {REPLY_SECONDS:.0f} s", rank=0) from error
        if frame.kind == REPLY:
            return frame.data
        self._early.append(frame)
        raise CallAborted("rank 0 has ended the call")

    def gather(self, data: bytes, patience: float) -> list[bytes]:
        self._check()
        self._gathers += 1
        return self._collect(data, patience) if self._rank == 0 else self._contribute(data, patience)

    def _collect(self, data: bytes, patience: float) -> list[bytes]:
        words, dead = {0: data}, set[int]()
        give_up = time.monotonic() + patience
        with selectors.DefaultSelector() as selector:
            for link in self._links.values():
                selector.register(link.sock, selectors.EVENT_READ, link)
                with contextlib.suppress(WorkerDied, WorkerHung):  # what it sent before it exited is read below
                    link.send(ControlFrame(HERE, self._gathers, struct.pack("<d", patience)), patience)
                self._read_frames(link, words)
            while len(words) < self._world and not dead and (rest := give_up - time.monotonic()) > 0:
                for key, _ in selector.select(rest):
                    try:
                        key.data.read(0.0)
                        self._read_frames(key.data, words)
                    except WorkerDied:
                        selector.unregister(key.data.sock)
                        dead |= {key.data.rank} - words.keys()
        late = [] if dead else [rank for rank in range(self._world) if rank not in words]
        found = pickle.dumps((sorted(dead), late, patience, [words.get(rank, b"") for rank in range(self._world)]))
        for link in self._links.values():
            with contextlib.suppress(WorkerDied, WorkerHung):  # a rank whose data has arrived may exit
                link.send(ControlFrame(ALL, self._gathers, found), MARGIN if link.rank in late else patience)
        return _gathered(found)

    def _read_frames(self, link: _Link, words: dict[int, bytes]) -> None:
        while (frame := link.take()) is not None:
            if frame.number == self._gathers:  # else of an earlier gather that timed out
                words[link.rank] = frame.data

    def _contribute(self, data: bytes, patience: float) -> list[bytes]:
        with contextlib.suppress(WorkerDied):  # rank 0 may have sent the result already, and exited
            self._links[0].send(ControlFrame(WORD, self._gathers, data), patience)
        give_up = time.monotonic() + patience
        while True:
            try:
                frame = self._early.popleft() if self._early else self._receive(give_up)
            except TimeoutError as error:
                text = f"rank 0 has not finished within {patience:.0f} s of rank {self._rank}"
                raise WorkerHung(text, rank=0) from error
            if frame.number != self._gathers:
                continue
            if frame.kind == HERE:
                give_up = time.monotonic() + struct.unpack("<d", frame.data)[0] + MARGIN
            if frame.kind == ALL:
                return _gathered(frame.data)

    def _receive(self, give_up: float) -> ControlFrame:
        link = self._links[0]
        while (frame := link.take()) is None:
            if time.monotonic() > give_up:
                raise TimeoutError
            link.read(give_up - time.monotonic())
        return frame

    def _check(self) -> None:
        if self._is_left:
            raise LaunchError(CLOSED)

    def leave(self) -> None:
        self._is_left = True
        for link in self._links.values():
            link.sock.close()


def _gathered(found: bytes) -> list[bytes]:
    """Return the data that rank 0 has gathered. Raises WorkerDied or WorkerHung for a rank whose data is missing."""
    dead, late, patience, words = pickle.loads(found)
    if dead:
        raise gone(dead[0])
    if late:
        raise WorkerHung(f"rank {late[0]} has not finished within {patience:.0f} s of rank 0", rank=late[0])
    return list(words)


class GroupControl(Control):
    """A Control through a gloo group of all ranks, beside the default group.

    No other object refers to the group, so that `leave` ends its threads. A gloo thread that releases a tensor while
    Python shuts down has to take the GIL, which ends the thread and, with it, the process: "terminate called without
    an active exception".
    """

    def __init__(self) -> None:
        import torch.distributed as dist

        made: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=REPLY_SECONDS))
        self._group: ProcessGroup | None = made  # from torch 2.15 on it may be a number, of ranks that are not in it

    @property
    def group(self) -> ProcessGroup:
        """The group. Raises LaunchError after `leave`: torch would use the default group for None."""
        if self._group is None:
            raise LaunchError(CLOSED)
        return self._group

    def broadcast(self, data: bytes) -> bytes:
        import torch
        import torch.distributed as dist

        group = self.group
        with _with_gloo_errors(REPLY_SECONDS):
            size = torch.tensor([len(data)])
            dist.broadcast(size, 0, group=group)
            body = torch.zeros(int(size), dtype=torch.uint8)
            if dist.get_rank() == 0:
                body = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            dist.broadcast(body, 0, group=group)
        return body.numpy().tobytes()

    def gather(self, data: bytes, patience: float) -> list[bytes]:
        import torch

        sizes = [int(size) for size in self._all(torch.tensor([len(data)]), patience)]
        if not any(sizes):
            return [b""] * len(sizes)
        padded = torch.frombuffer(bytearray(data.ljust(max(sizes), b"\0")), dtype=torch.uint8)
        parts = self._all(padded, patience)
        return [part.numpy().tobytes()[:size] for part, size in zip(parts, sizes, strict=True)]

    def _all(self, own: torch.Tensor, patience: float) -> list[torch.Tensor]:
        import torch
        import torch.distributed as dist

        group = self.group
        found = [torch.zeros_like(own) for _ in range(dist.get_world_size())]
        with _with_gloo_errors(patience):
            work = dist.all_gather(found, own, group=group, async_op=True)
            assert work is not None
            work.wait(timedelta(seconds=patience))
        return found

    def leave(self) -> None:
        import torch.distributed as dist

        group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(RuntimeError, ValueError):  # ValueError: destroyed together with the default group
                dist.destroy_process_group(group)


@contextlib.contextmanager
def _with_gloo_errors(patience: float) -> Iterator[None]:
    """Raise gloo's errors as WorkerHung and WorkerDied."""
    try:
        yield
    except WorkerError:
        raise
    except RuntimeError as error:
        if "imed out" in str(error):
            raise WorkerHung(f"a rank has not finished within {patience:.0f} s of this one") from error
        raise WorkerDied(f"a rank has gone: {error}") from error
