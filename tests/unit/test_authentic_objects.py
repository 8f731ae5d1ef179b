"""What ranks on several hosts unpickle of exchanges: results, statistics, and what encoders return."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from patchpar.comm.collectives import AllGather, Communicator
from patchpar.errors import AuthenticationError
from patchpar.launch.message_seal import TAG_BYTES, MessageSeal
from patchpar.launch.messages import encode, pack
from patchpar.pipeline.torchrun_sync import gather_objects
from patchpar.plan.mesh import Axis
from patchpar.shard.encoders.transfer import PackedValue, ValueTransfer
from tests.launch.hosts import KEY, Evil, flipped
from tests.unit.threads import on_threads

CPU = torch.device("cpu")
VALUE = {"embeddings": torch.arange(6.0).view(2, 3), "pooled": None}


class Attacked(MessageSeal):
    """Of a sender whose messages are changed on the way by `attack(message, previous message)`."""

    def __init__(self, key: bytes, rank: int, attack: Callable[[bytes, bytes], bytes]) -> None:
        super().__init__(key, rank)
        self._attack, self._last = attack, b""

    def seal(self, purpose: str, data: bytes) -> bytes:
        message = super().seal(purpose, data)
        changed, self._last = self._attack(message, self._last), message
        return changed


ATTACKS: dict[str, Callable[[int], MessageSeal | None]] = {
    "nobody": lambda rank: MessageSeal(KEY, rank),
    "changed": lambda rank: Attacked(KEY, rank, lambda message, last: flipped(message)),
    "tag changed": lambda rank: Attacked(KEY, rank, lambda message, last: flipped(message, 0)),
    "repeated": lambda rank: Attacked(KEY, rank, lambda message, last: last or message),
    "of another rank": lambda rank: MessageSeal(KEY, rank + 1),
    "of a stranger": lambda rank: MessageSeal(bytes(32), rank),
    "without a tag": lambda rank: None,
}


def sent(comm: Communicator, axis: Axis, values: list[Any]) -> list[Any]:
    transfer, found = ValueTransfer(comm, axis), []
    for value in values:
        if axis.rank == 0:
            transfer.send("text_encoder", PackedValue.of(value, CPU))
        else:
            found.append(transfer.receive("text_encoder"))
    return found


def gathered(comm: Communicator, axis: Axis, values: list[Any]) -> list[Any]:
    if axis.rank == 0:  # which must not read its own trap
        return [AllGather(comm, axis, "output", "output").of_bytes(pack(encode(value))) for value in values]
    return [gather_objects(comm, axis, None)[0] for _ in values]


def at_reader(way: Any, attacker: MessageSeal | None, reader: MessageSeal | None, values: list[Any]) -> Any:
    """What rank 1 gets of rank 0, whose messages are `attacker`'s, or the error that it raises."""

    def run(transport: Any) -> Any:
        seal = (attacker, reader)[transport.rank]
        try:
            return way(Communicator(transport, seal=seal), Axis("data", transport.rank, 2, (0, 1)), values)
        except AuthenticationError:
            transport.close()  # so that the other rank does not wait
            raise

    return on_threads(2, run)[1]


@pytest.mark.parametrize("way", [sent, gathered])
@pytest.mark.parametrize("attack", ATTACKS)
def test_only_what_the_other_rank_has_sent_is_unpickled(way: Any, attack: str, tmp_path: Path) -> None:
    """The second message would leave a trace if it were unpickled."""
    trap = Evil(tmp_path / "was unpickled")
    values = [VALUE, VALUE if attack == "nobody" else trap]
    found = at_reader(way, ATTACKS[attack](0), MessageSeal(KEY, 1), values)
    if attack == "nobody":
        assert [torch.equal(each["embeddings"], VALUE["embeddings"]) for each in found] == [True, True]
    else:
        assert isinstance(found, AuthenticationError)
        assert "rank 1 has refused a message" in str(found)
    assert not trap.folder.exists()


@pytest.mark.parametrize("way", [sent, gathered])
def test_without_verification_it_would_be(way: Any, tmp_path: Path) -> None:
    trap = Evil(tmp_path / "was unpickled")
    at_reader(way, None, None, [trap])
    assert trap.folder.exists()


def test_a_message_of_one_axis_is_none_of_another() -> None:
    """Two axes of the same ranks are two conversations of the same purpose; other ranks are another purpose."""

    def run(transport: Any) -> list[list[bytes]]:
        comm = Communicator(transport, seal=MessageSeal(KEY, transport.rank))
        axes = [Axis("patch", transport.rank, 3, (0, 1, 2)), Axis("data", transport.rank, 3, (0, 1, 2))]
        return [AllGather(comm, axis, "output", "output").of_bytes(b"%d" % transport.rank) for axis in axes * 2]

    assert on_threads(3, run) == [[[b"0", b"1", b"2"]] * 4] * 3


@pytest.mark.parametrize("is_sealed", [False, True])
def test_a_tag_is_all_that_is_added(is_sealed: bool) -> None:
    def run(transport: Any) -> int:
        comm = Communicator(transport, seal=MessageSeal(KEY, transport.rank) if is_sealed else None)
        AllGather(comm, Axis("data", transport.rank, 2, (0, 1)), "output", "output").of_bytes(b"12345")
        return comm.traffic.total_bytes

    assert on_threads(2, run) == [8 + 5 + is_sealed * TAG_BYTES] * 2
