"""The order in which NCCL is simulated to carry operations out."""

from __future__ import annotations

import pytest
import torch

from tests.conformance.nccl import MESSAGES, Buffer, Group, Operation, SimulatedCommunicator


class Posted:
    """One communicator of some ranks, and tensors that live as long."""

    def __init__(self, *ranks: int) -> None:
        self.faults: list[str] = []
        self.communicator = SimulatedCommunicator("one", ranks, self.faults)
        self._tensors: list[torch.Tensor] = []

    def post(self, rank: int, *messages: tuple[str, int]) -> Group:
        """Messages ("to" or "from", rank) in one group."""
        operations = []
        for way, peer in messages:
            self._tensors.append(torch.zeros(2))
            operations.append(Operation(way == "to", peer, Buffer(self._tensors[-1])))
        group = Group(rank, MESSAGES, "here", operations, "main")
        self.communicator.post(group, rank)
        return group


@pytest.mark.parametrize("first", [0, 1])
def test_messages_of_two_ranks_end_in_the_order_in_which_they_can(first: int) -> None:
    """One rank receives before it sends, the other does both at once: the first message is no longer than it takes.

    Its receiver goes on to what the sender's group waits for.
    """
    ranks = Posted(0, 1)
    apart, together = first, 1 - first
    received = ranks.post(apart, ("from", together))
    both = ranks.post(together, ("to", apart), ("from", apart))
    assert received.is_over
    assert not both.is_over
    sent = ranks.post(apart, ("to", together))
    assert sent.is_over
    assert both.is_over
    assert (ranks.faults, ranks.communicator.left()) == ([], [])


def test_a_message_that_ends_lets_those_behind_it_begin() -> None:
    ranks = Posted(0, 1, 2)
    received, sent = ranks.post(0, ("from", 1)), ranks.post(0, ("to", 2))
    last = ranks.post(2, ("from", 0))
    waits = ranks.post(1, ("to", 0), ("from", 2))
    assert (received.is_over, sent.is_over, last.is_over, waits.is_over) == (True, True, True, False)
    assert ranks.post(2, ("to", 1)).is_over
    assert waits.is_over
    assert ranks.communicator.left() == []


def test_messages_in_other_orders_than_their_peers_wait_for_ever() -> None:
    """The control: both ranks send to each other first, which NCCL does not carry out without the receive."""
    ranks = Posted(0, 1)
    groups = [ranks.post(rank, (way, 1 - rank)) for rank in (0, 1) for way in ("to", "from")]
    assert not any(group.is_over for group in groups)
    assert len(ranks.communicator.left()) == 4
