"""Ranks on different hosts, as threads of this process: each greets with a host of its own."""

import os
import pickle
import socket
from pathlib import Path

import pytest

from patchpar.launch import authentication
from patchpar.launch.authentication import Greetings
from patchpar.launch.control_group import Control, LinkControl
from patchpar.launch.message_seal import MessageSeal
from patchpar.launch.shared_secret import NetworkTrust

PATIENCE = 20.0
SECRET = b"0123456789abcdef0123456789abcdef"
KEY = b"the key of a session that is not used again"
SHARED = NetworkTrust(secret=SECRET)


class Evil:
    """Makes a folder where it is unpickled: as good as running any code."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.folder),)


@pytest.fixture
def trap(tmp_path: Path) -> Evil:
    """An object that leaves a trace, `trap.folder`, where it is unpickled."""
    return Evil(tmp_path / "was unpickled")


@pytest.fixture
def two_controls():
    """Two ranks of this process."""
    yield from _controls(2)


@pytest.fixture
def three_controls():
    """Three ranks of this process."""
    yield from _controls(3)


def _controls(world: int):
    pairs = [socket.socketpair() for _ in range(world - 1)]
    made = [LinkControl(0, world, {rank: pair[0] for rank, pair in enumerate(pairs, 1)})]
    made += [LinkControl(rank, world, {0: pair[1]}) for rank, pair in enumerate(pairs, 1)]
    yield made
    for control in made:
        control.leave()


def introduce(control: Control, trust: NetworkTrust, rank: int) -> MessageSeal | None:
    """What a rank on a host of its own does at its start."""
    greetings = Greetings(control, trust, rank, PATIENCE)
    greetings.check()
    assert not greetings.are_of_one_host
    return greetings.authenticate()


@pytest.fixture
def own_hosts(monkeypatch):
    """Every greeting is from another host."""
    numbers = iter(range(1000))
    monkeypatch.setattr(authentication, "this_host", lambda: f"host {next(numbers)}")


class AtBorder(Control):
    """Changes what arrives from other ranks, as somebody on the way could."""

    def __init__(self, inner: Control, change) -> None:
        self._inner, self._change = inner, change

    def broadcast(self, data: bytes) -> bytes:
        return self._change(0, self._inner.broadcast(data))

    def gather(self, data: bytes, patience: float) -> list[bytes]:
        return [self._change(rank, found) for rank, found in enumerate(self._inner.gather(data, patience))]

    def leave(self) -> None:
        self._inner.leave()


def flipped(message: bytes, at: int = -1) -> bytes:
    """The message with one bit changed."""
    changed = bytearray(message)
    changed[at] ^= 1
    return bytes(changed)


def forged(value: object) -> bytes:
    """A message of somebody who knows the format and not the key."""
    return bytes(32) + pickle.dumps(value)
