"""Operations of all ranks of an axis at once: what they bring and count is what single messages bring and count."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from patchpar.comm.collectives import Communicator
from patchpar.plan.mesh import Axis
from tests.breadth import first_of
from tests.unit.threads import on_threads

ON_RANKS = "tests.unit.collectives_on_ranks"


@pytest.mark.parametrize("uneven", [False, True])
def test_one_operation_brings_what_messages_bring(ranks: Any, uneven: bool) -> None:
    """Along two axes, with a process group for each; every tensor, every order, every byte."""
    single, at_once = (
        ranks.run(f"{ON_RANKS}:gathers", 4, collective, uneven, through="torch") for collective in (False, True)
    )
    for messages, together in zip(single, at_once, strict=True):
        assert_same(together, messages)


@pytest.mark.parametrize("uneven", [False, True])
def test_a_round_of_a_ring_is_one_operation(ranks: Any, uneven: bool) -> None:
    """Each rank sends to one other, and receives of one; bits, bytes and rounds are those of messages."""
    single, at_once = (
        ranks.run(f"{ON_RANKS}:rings", 4, collective, uneven, through="torch") for collective in (False, True)
    )
    for messages, together in zip(single, at_once, strict=True):
        assert_same(together, messages)
    assert messages["rounds"] == {"kv": 1 + 1 + 3}


@pytest.mark.parametrize(("before", "after"), first_of([(1, 1), (2, 1), (1, 0), (0, 1), (0, 0)], (2, 1), (0, 1)))
def test_one_operation_for_halo_and_moments(ranks: Any, before: int, after: int) -> None:
    """Two and four ranks, image edges, layers that read on one side only: no rank may be left out of an operation."""
    single, at_once = (
        ranks.run(f"{ON_RANKS}:edges", 4, collective, before, after, through="torch") for collective in (False, True)
    )
    for messages, together in zip(single, at_once, strict=True):
        assert_same(together, messages)


@pytest.mark.parametrize("width", [8, 3])
def test_tokens_in_pieces_come_where_they_are_read(ranks: Any, width: int) -> None:
    """In one buffer that all messages fill; where this rank's own lie between them, or padding does, by copies."""
    single, at_once = (
        ranks.run(f"{ON_RANKS}:pieces", 4, collective, width, through="torch") for collective in (False, True)
    )
    for messages, together in zip(single, at_once, strict=True):
        assert_same(together, messages)
        assert messages["fills, step 0"].any()
        assert not torch.equal(messages["fills, step 0"], messages["fills, step 1"])


def test_what_one_rank_gathers_is_arranged_as_what_several_gather() -> None:
    def run(transport: Any) -> list[list[float]]:
        gathered = Communicator(transport).all_gather(Axis("patch"), "kv", "attn1", torch.ones(2))
        return gathered.then(lambda rows: rows + 1).then(torch.Tensor.tolist).wait()

    assert on_threads(1, run) == [[[2.0, 2.0]]]


def assert_same(found: Any, wanted: Any) -> None:
    if isinstance(wanted, torch.Tensor):
        assert found.dtype == wanted.dtype
        assert torch.equal(found, wanted)
    elif isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            assert_same(found[key], value)
    elif isinstance(wanted, (list, tuple)):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_same(one, other)
    else:
        assert found == wanted
