"""Exchanges that are awaited together: the stream waits once, and each of them is over then."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from patchpar.comm.collectives import Communicator
from patchpar.comm.transport import Transport
from patchpar.comm.transport.stream_waits import StreamWaits
from patchpar.plan.mesh import Axis, Mesh
from tests.conformance.test_faults import checked, own
from tests.unit.threads import on_threads

WORLD = 3


def both(comm: Communicator, axis: Axis, *, joined: bool) -> tuple[Tensor, Tensor, dict[str, int]]:
    """Two gathers, of which the second is asked for first; and what was counted."""
    bulk = comm.all_gather(axis, "kv", "attn1", own(axis.rank), bulk=True)
    fresh = comm.all_gather(axis, "correction", "attn1", own(axis.rank) + 10)
    found = (fresh.beside(bulk) if joined else fresh).wait()
    return found.clone(), bulk.wait().clone(), dict(comm.traffic.rounds)


WANTED = torch.stack([own(rank) for rank in range(WORLD)])


@pytest.mark.parametrize(("joined", "waits"), [(True, 1), (False, 2)])
def test_a_stream_waits_once_for_what_is_awaited_together(joined: bool, waits: int) -> None:
    with mock.patch.object(StreamWaits, "wait_for", autospec=True, side_effect=StreamWaits.wait_for) as waited:
        found, faults = checked(lambda comm, axis, _: both(comm, axis, joined=joined))
    assert faults == []
    for fresh, bulk, rounds in found:
        assert torch.equal(bulk, WANTED)
        assert torch.equal(fresh, WANTED + 10)
        assert rounds == {"kv": 1, "correction": 1}
    assert waited.call_count == WORLD * waits


def test_over_messages_each_is_awaited() -> None:
    def run(transport: Transport) -> Any:
        return both(Communicator(transport), Mesh(transport.rank, range(WORLD), patch=WORLD)["patch"], joined=True)

    for fresh, bulk, _ in on_threads(WORLD, run):
        assert torch.equal(bulk, WANTED)
        assert torch.equal(fresh, WANTED + 10)


def test_one_that_nobody_awaits_is_found() -> None:
    """The control: the second wait is not for show."""

    def alone(comm: Communicator, axis: Axis, _: Any) -> None:
        comm.all_gather(axis, "kv", "attn1", own(axis.rank), bulk=True)
        comm.all_gather(axis, "correction", "attn1", own(axis.rank)).wait()

    assert any("never awaited" in fault for fault in checked(alone)[1])
